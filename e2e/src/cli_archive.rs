//! Packs `kubectl bursar` for krew: an archive for each platform, and the plugin's manifest.
//!
//! krew downloads the archive of its platform, compares the checksum, unpacks the files and links
//! the program as `kubectl-bursar` (krew's developer guide, "Plugin manifest").

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use bursar_cli::args::CompletionShell;
use bursar_cli::completion;
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::images::{ClosureError, libraries};
use crate::paths;
use crate::workspace::{self, WorkspaceError};

const PACKAGE: &str = "bursar-cli";
/// The name of the program.
pub const PROGRAM: &str = "kubectl-bursar";
/// The version of an archive that belongs to no release.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
pub(crate) const HOMEPAGE: &str = "https://github.com/bursar/bursar";
/// The file name of the manifest, which krew requires to be the plugin's name.
pub const MANIFEST: &str = "bursar.yaml";

/// The platforms of releases: the target of Rust, and krew's words for it.
const PLATFORMS: [(&str, &str, &str); 4] = [
    ("x86_64-unknown-linux-musl", "linux", "amd64"),
    ("x86_64-unknown-linux-gnu", "linux", "amd64"),
    ("aarch64-unknown-linux-musl", "linux", "arm64"),
    ("aarch64-unknown-linux-gnu", "linux", "arm64"),
];

/// The error of a build or of an archive.
#[derive(Debug, thiserror::Error)]
pub enum CliArchiveError {
    /// Releases have no such platform.
    #[error("failed to pack for {0}: releases have linux on x86_64 and aarch64, gnu or musl")]
    Target(String),
    /// The program does not compile.
    #[error(transparent)]
    Build(#[from] WorkspaceError),
    /// Cargo built no program of this name.
    #[error("the build has no {0}")]
    NotBuilt(&'static str),
    /// The program's libraries cannot be listed.
    #[error(transparent)]
    Libraries(#[from] ClosureError),
    /// The program would need libraries of the user's machine.
    #[error("failed to pack {path}: it is not static, it needs {library}")]
    Dynamic {
        /// The program.
        path: PathBuf,
        /// One of its libraries.
        library: String,
    },
    /// A file cannot be read or written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> CliArchiveError {
    let path = path.to_path_buf();
    move |source| CliArchiveError::File { path, source }
}

/// The words of krew for a target.
fn platform(target: &str) -> Result<(&'static str, &'static str), CliArchiveError> {
    let mut known = PLATFORMS.into_iter();
    let found = known.find(|(name, ..)| *name == target);
    let (_, os, arch) = found.ok_or_else(|| CliArchiveError::Target(target.to_owned()))?;
    Ok((os, arch))
}

/// The target of this machine: musl if rustup has its standard library, else glibc.
pub fn default_target() -> String {
    let arch = std::env::consts::ARCH;
    let musl = format!("{arch}-unknown-linux-musl");
    match workspace::has_standard_library(&musl) {
        true => musl,
        false => format!("{arch}-unknown-linux-gnu"),
    }
}

/// Compiles the program in the release profile for a target, linked statically.
///
/// # Errors
/// As [`static_program`].
pub fn build(target: &str) -> Result<PathBuf, CliArchiveError> {
    platform(target)?;
    static_program(PACKAGE, PROGRAM, target)
}

/// Compiles a package's program in the release profile for a target, linked statically.
///
/// # Errors
/// When it does not compile, or is not static.
pub(crate) fn static_program(
    package: &str,
    program: &'static str,
    target: &str,
) -> Result<PathBuf, CliArchiveError> {
    let binaries = workspace::build_static(package, target)?;
    let path = binaries
        .get(program)
        .ok_or(CliArchiveError::NotBuilt(program))?;
    match libraries(path)?.into_keys().next() {
        Some(library) => Err(CliArchiveError::Dynamic {
            path: path.to_path_buf(),
            library,
        }),
        None => Ok(path.to_path_buf()),
    }
}

fn archive_name(version: &str, os: &str, arch: &str) -> String {
    format!("{PROGRAM}_{version}_{os}_{arch}.tar.gz")
}

/// Writes the archive of a program for a target into a folder, and the manifest of all archives of
/// this version there. Returns the archive's path.
///
/// # Errors
/// When the target is unknown, or a file cannot be read or written.
pub fn write(
    program: &Path,
    target: &str,
    version: &str,
    folder: &Path,
) -> Result<PathBuf, CliArchiveError> {
    let (os, arch) = platform(target)?;
    fs::create_dir_all(folder).map_err(at(folder))?;
    let path = folder.join(archive_name(version, os, arch));
    let licence = paths::repository().join("LICENSE");
    let entries = [
        (PROGRAM, 0o755, fs::read(program).map_err(at(program))?),
        (
            "kubectl_complete-bursar",
            0o755,
            completion::script(CompletionShell::Kubectl).into_bytes(),
        ),
        ("LICENSE", 0o644, fs::read(&licence).map_err(at(&licence))?),
    ];
    let file = File::create(&path).map_err(at(&path))?;
    let mut archive = tar::Builder::new(GzEncoder::new(file, Compression::best()));
    for (name, mode, content) in entries {
        // No time and no owner, so that the same program gives the same archive.
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(mode);
        let appended = archive.append_data(&mut header, name, content.as_slice());
        appended.map_err(at(&path))?;
    }
    let file = archive.into_inner().and_then(GzEncoder::finish);
    file.and_then(|file| file.sync_all()).map_err(at(&path))?;
    write_manifest(version, folder)?;
    Ok(path)
}

/// Writes the manifest of the archives of this version in a folder, each with its checksum.
///
/// # Errors
/// When a file cannot be read or written.
pub fn write_manifest(version: &str, folder: &Path) -> Result<(), CliArchiveError> {
    let mut platforms = Vec::new();
    for (os, arch) in [("linux", "amd64"), ("linux", "arm64")] {
        let name = archive_name(version, os, arch);
        let path = folder.join(&name);
        if path.exists() {
            let sum = checksum(&path)?;
            let line = format!("{sum}  {name}\n");
            let beside = path.with_extension("gz.sha256");
            fs::write(&beside, line).map_err(at(&beside))?;
            platforms.push(platform_entry(version, (os, arch), &sum));
        }
    }
    let path = folder.join(MANIFEST);
    let text = serde_yaml_ng::to_string(&manifest(version, platforms));
    let text = text.map_err(|error| at(&path)(io::Error::other(error)))?;
    fs::write(&path, text).map_err(at(&path))
}

/// The SHA-256 of a file in hexadecimal digits.
///
/// # Errors
/// When the file cannot be read.
pub fn checksum(path: &Path) -> Result<String, CliArchiveError> {
    let bytes = fs::read(path).map_err(at(path))?;
    Ok(Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect())
}

fn platform_entry(version: &str, (os, arch): (&str, &str), sum: &str) -> Value {
    let name = archive_name(version, os, arch);
    json!({
        "selector": { "matchLabels": { "os": os, "arch": arch } },
        "uri": format!("{HOMEPAGE}/releases/download/v{version}/{name}"),
        "sha256": sum,
        "bin": PROGRAM,
        "files": [{ "from": PROGRAM, "to": "." }, { "from": "LICENSE", "to": "." }],
    })
}

fn manifest(version: &str, platforms: Vec<Value>) -> Value {
    json!({
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": { "name": "bursar" },
        "spec": {
            "version": format!("v{version}"),
            "homepage": HOMEPAGE,
            "shortDescription": "Show and manage shared GPU memory",
            "description": "Shows the GPU memory of pods and nodes, explains why a pod does not run, \
                looks for what is wrong in the cluster, drains GPUs, and rewrites manifests of \
                HAMi, KAI, time-slicing and MPS.\n",
            "caveats": format!("The cluster needs Bursar {version}.\n"),
            "platforms": platforms,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifest_lists_every_archive_of_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        fs::write(&program, "#!/bin/sh\n").unwrap();
        let to = folder.path().join("out");
        let first = write(&program, "x86_64-unknown-linux-musl", VERSION, &to).unwrap();
        write(&program, "aarch64-unknown-linux-gnu", VERSION, &to).unwrap();
        let text = fs::read_to_string(to.join(MANIFEST)).unwrap();
        let manifest: Value = serde_yaml_ng::from_str(&text).unwrap();
        let platforms = manifest["spec"]["platforms"].as_array().unwrap();
        assert_eq!(platforms.len(), 2, "{text}");
        assert_eq!(platforms[0]["sha256"], checksum(&first).unwrap());
        assert_eq!(manifest["metadata"]["name"], "bursar");
        let again = write(&program, "x86_64-unknown-linux-gnu", VERSION, &to).unwrap();
        assert_eq!(checksum(&again).unwrap(), platforms[0]["sha256"]);
    }

    #[test]
    fn unknown_target_is_refused() {
        let refused = write(
            Path::new("p"),
            "riscv64gc-unknown-linux-gnu",
            VERSION,
            Path::new("t"),
        );
        assert!(matches!(refused, Err(CliArchiveError::Target(_))));
    }
}
