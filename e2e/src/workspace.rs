//! Builds this repository's own programs with cargo.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;

use crate::cargo;
use crate::paths;

/// The programs and libraries that run in a cluster.
const PACKAGES: &[&str] = &[
    "bursar-device-plugin",
    "bursar-shim",
    "bursar-nvml-shim",
    "bursar-fdstore",
    "bursar-relay",
    "bursar-provisioner",
    "bursar-operator",
    "bursar-probe",
    "bursar-sim-state",
    "bursar-sim-cuda",
    "bursar-sim-nvml",
];

/// The package of the harness.
const HARNESS: &str = env!("CARGO_PKG_NAME");

/// The cargo profile of a build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// The profile of the tests, so that dependencies compile once.
    Dev,
    /// The profile of releases.
    Release,
}

/// The error of a build.
#[derive(Debug, thiserror::Error)]
pub enum WorkspaceError {
    /// Cargo could not be run.
    #[error("cargo: {0}")]
    Cargo(#[from] io::Error),
    /// A program does not compile; cargo has printed the cause.
    #[error("cargo build failed ({0})")]
    Build(std::process::ExitStatus),
}

/// Built programs and libraries by file name.
#[derive(Debug, Clone, Default)]
pub struct Binaries(BTreeMap<String, PathBuf>);

impl Binaries {
    /// Returns the path of the file with this name.
    pub fn get(&self, name: &str) -> Option<&Path> {
        self.0.get(name).map(PathBuf::as_path)
    }

    /// Returns the programs and libraries in cargo's output folder.
    pub(crate) fn in_folder(folder: &Path) -> io::Result<Self> {
        let paths = folder.read_dir()?.map(|entry| Ok(entry?.path()));
        let paths = paths.collect::<io::Result<Vec<_>>>()?;
        let files = paths.into_iter().filter(|path| path.is_file());
        Ok(Self(by_name(files)))
    }

    /// Returns the paths of all files.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.0.values().map(PathBuf::as_path)
    }

    /// Replaces the file of this name, or adds it.
    #[must_use]
    pub fn with(mut self, name: &str, path: PathBuf) -> Self {
        self.0.insert(name.to_owned(), path);
        self
    }

    /// Returns cargo's output folder, before any file was replaced by one of another folder.
    pub fn folder(&self) -> Option<&Path> {
        self.0.values().next().and_then(|path| path.parent())
    }
}

/// The fields of `cargo build --message-format=json` that the harness reads (The Cargo Book,
/// "External tools").
#[derive(Deserialize)]
struct Message {
    reason: String,
    #[serde(default)]
    target: Target,
    #[serde(default)]
    filenames: Vec<PathBuf>,
}

#[derive(Default, Deserialize)]
struct Target {
    kind: Vec<String>,
}

/// Selects the packages and targets of `cargo test --workspace`, so that each crate has the same
/// features as there. Cargo unifies features over all selected packages and, with a test target,
/// over development dependencies. Another selection would compile nearly every crate once more.
const TEST_SELECTION: &[&str] = &["--workspace", "--lib", "--bins", "--test", "cluster"];

/// Compiles the programs and libraries of a cluster. Compiler messages go to standard error.
///
/// With `harness` the release profile compiles the harness too; the profile of the tests always
/// does, because it compiles the whole workspace.
///
/// # Errors
/// When cargo is missing or a package does not compile.
pub fn build(profile: Profile, harness: bool) -> Result<Binaries, WorkspaceError> {
    if profile == Profile::Dev
        && let Some(folder) = cargo::built()
    {
        return Ok(Binaries::in_folder(&folder)?);
    }
    let selection = match profile {
        Profile::Dev => TEST_SELECTION.to_vec(),
        Profile::Release => {
            let harness = harness.then_some(HARNESS);
            package_arguments(PACKAGES.iter().copied().chain(harness))
        }
    };
    build_selection(profile, &selection)
}

/// Compiles all programs, libraries and examples for `cargo verify`. Every build of the profile of
/// the tests, by this program or by a test, finds them there from now on.
///
/// # Errors
/// As [`build`].
pub(crate) fn build_for_checks() -> Result<(), WorkspaceError> {
    let selection = [TEST_SELECTION, &["--examples"]].concat();
    let binaries = build_selection(Profile::Dev, &selection)?;
    if let Some(folder) = binaries.folder() {
        cargo::set_built(folder.to_owned());
    }
    Ok(())
}

/// Compiles the programs and libraries of a cluster and `kubectl bursar` from other sources of this
/// repository.
///
/// # Errors
/// As [`build`].
pub(crate) fn build_elsewhere(source: &Path, target: &Path) -> Result<Binaries, WorkspaceError> {
    let mut command = cargo::command();
    command.env("CARGO_TARGET_DIR", target);
    let packages = PACKAGES.iter().copied().chain(["bursar-cli"]);
    run_build(source, command, Profile::Dev, &package_arguments(packages))
}

/// Compiles these packages. Compiler messages go to standard error.
///
/// # Errors
/// As [`build`].
pub fn build_packages(profile: Profile, packages: &[&str]) -> Result<Binaries, WorkspaceError> {
    build_selection(profile, &package_arguments(packages.iter().copied()))
}

/// Returns whether the repository's rustc has a standard library for this target. A rustc that
/// cannot be run has none.
#[must_use]
pub fn has_standard_library(target: &str) -> bool {
    let output = Command::new("rustc")
        .args(["--print", "target-libdir", "--target", target])
        .current_dir(paths::repository())
        .output();
    output.is_ok_and(|output| Path::new(String::from_utf8_lossy(&output.stdout).trim()).is_dir())
}

/// Compiles one package in the release profile for a target, linked statically. Compiler messages
/// go to standard error.
///
/// # Errors
/// As [`build`].
pub fn build_static(package: &str, target: &str) -> Result<Binaries, WorkspaceError> {
    let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    let mut command = cargo::command();
    // With a target the flags do not count for build scripts and macros.
    command.env(
        "RUSTFLAGS",
        format!("{flags} -C target-feature=+crt-static"),
    );
    run_build(
        &paths::repository(),
        command,
        Profile::Release,
        &["--locked", "--package", package, "--target", target],
    )
}

fn package_arguments<'a>(packages: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    packages
        .flat_map(|package| ["--package", package])
        .collect()
}

fn build_selection(profile: Profile, selection: &[&str]) -> Result<Binaries, WorkspaceError> {
    run_build(&paths::repository(), cargo::command(), profile, selection)
}

fn run_build(
    source: &Path,
    mut command: Command,
    profile: Profile,
    selection: &[&str],
) -> Result<Binaries, WorkspaceError> {
    command.args([
        "build",
        "--quiet",
        "--message-format=json-render-diagnostics",
    ]);
    command.args(selection);
    if profile == Profile::Release {
        command.arg("--release");
    }
    let output = command
        .current_dir(source)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()?;
    if !output.status.success() {
        return Err(WorkspaceError::Build(output.status));
    }
    Ok(Binaries(artifacts(&String::from_utf8_lossy(
        &output.stdout,
    ))))
}

fn artifacts(messages: &str) -> BTreeMap<String, PathBuf> {
    let messages = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Message>(line).ok());
    let linked = |kind: &String| kind == "bin" || kind == "cdylib";
    let files = messages
        .filter(|message| {
            message.reason == "compiler-artifact" && message.target.kind.iter().any(linked)
        })
        .flat_map(|message| message.filenames);
    by_name(files)
}

/// Returns the programs and shared libraries among these files by name.
fn by_name(files: impl Iterator<Item = PathBuf>) -> BTreeMap<String, PathBuf> {
    files
        .filter_map(|path| Some((path.file_name()?.to_str()?.to_owned(), path)))
        .filter(|(name, _)| name.ends_with(".so") || !name.contains('.'))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn artifacts_are_the_binaries_and_cdylibs_cargo_lists() {
        let messages = r#"
{"reason":"compiler-artifact","target":{"kind":["cdylib"]},"filenames":["/t/debug/libbursar_shim.so","/t/debug/libbursar_shim.rlib"]}
{"reason":"compiler-artifact","target":{"kind":["proc-macro"]},"filenames":["/t/debug/deps/libserde_derive-1.so"]}
{"reason":"compiler-artifact","target":{"kind":["custom-build"]},"filenames":["/t/debug/build/x/build-script-build"]}
{"reason":"compiler-artifact","target":{"kind":["bin"]},"filenames":["/t/debug/bursar-agent"]}
{"reason":"build-script-executed","filenames":["/t/debug/other"]}
{"reason":"build-finished","success":true}"#;
        let found = artifacts(messages);
        let names: Vec<&str> = found.keys().map(String::as_str).collect();
        assert_eq!(names, ["bursar-agent", "libbursar_shim.so"]);
    }
}
