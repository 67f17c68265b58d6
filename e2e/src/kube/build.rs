//! Builds every part with the Go compiler, once, into the cache.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::packages::{self, PackageError};
use super::parts::{self, COSIGN, CRANE, PARTS, Part};
use super::toolbox::Toolbox;
use super::version::{KubernetesVersion, UnknownVersion};
use crate::cache::{self, CacheError};
use crate::paths;
use crate::progress::Progress;

/// Why a part could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// No Go compiler is in `PATH`.
    #[error(
        "Go is needed to build Kubernetes and is not in PATH ({0}); get it from https://go.dev/dl (at least the version in e2e/kube/*/go.mod)"
    )]
    NoGo(io::Error),
    /// A pinned file or an output cannot be used.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// No pins of the chosen Kubernetes are there.
    #[error(transparent)]
    Version(#[from] UnknownVersion),
    /// A Debian package is missing.
    #[error(transparent)]
    Package(#[from] PackageError),
    /// `go build` failed.
    #[error("go build of {part} failed ({status}){hint}:\n{tail}")]
    Go {
        /// The part.
        part: &'static str,
        /// The compiler's exit status.
        status: String,
        /// The remedy, if the output suggests one.
        hint: &'static str,
        /// The last lines that it printed.
        tail: String,
    },
}

/// Builds every part that is not in the cache, and returns the programs of all parts.
///
/// # Errors
/// When Go, a Debian package or the network is missing, or a part does not compile.
pub fn build(progress: &Progress) -> Result<Toolbox, CacheError<BuildError>> {
    let version = KubernetesVersion::chosen().map_err(|error| CacheError::Make(error.into()))?;
    let mut programs = build_parts(&[parts::kubernetes(version)], progress)?;
    programs.extend(build_parts(PARTS, progress)?);
    Ok(Toolbox::new(programs))
}

/// Builds `crane`, the client of registries, unless the cache has it.
///
/// # Errors
/// As [`build`].
pub fn build_crane(progress: &Progress) -> Result<Toolbox, CacheError<BuildError>> {
    Ok(Toolbox::new(build_parts(&[CRANE], progress)?))
}

/// Builds `cosign`, the signer of releases, unless the cache has it. It takes minutes.
///
/// # Errors
/// As [`build`].
pub fn build_cosign(progress: &Progress) -> Result<Toolbox, CacheError<BuildError>> {
    Ok(Toolbox::new(build_parts(&[COSIGN], progress)?))
}

fn build_parts(
    parts: &[Part],
    progress: &Progress,
) -> Result<Vec<PathBuf>, CacheError<BuildError>> {
    let version = go_version().map_err(CacheError::Make)?;
    let root = paths::cache().join("kube");
    let mut found = Vec::new();
    for part in parts {
        let sources = paths::repository().join("e2e/kube").join(part.name);
        let key = part.key(&sources, &version).map_err(|source| {
            CacheError::Make(BuildError::File {
                path: sources.clone(),
                source,
            })
        })?;
        found.push(cache::get_or_make(&root, &key, |out| {
            compile(part, &sources, out, progress)
        })?);
    }
    Ok(found)
}

fn go_version() -> Result<String, BuildError> {
    let output = Command::new("go")
        .args(["env", "GOVERSION"])
        .output()
        .map_err(BuildError::NoGo)?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn compile(part: &Part, sources: &Path, out: &Path, progress: &Progress) -> Result<(), BuildError> {
    packages::require(part.packages, progress)?;
    progress.report(format_args!(
        "{}: go build (once; kept in {})",
        part.name,
        paths::cache().display()
    ));
    let start = Instant::now();
    let log = out.join("build.log");
    let file = |path: &Path| {
        let path = path.to_path_buf();
        move |source| BuildError::File { path, source }
    };
    let stderr = File::create(&log).map_err(file(&log))?;
    let mut child = Command::new("go")
        .args(part.arguments(out))
        .current_dir(sources)
        .env("CGO_ENABLED", if part.cgo { "1" } else { "0" })
        .env("GOFLAGS", "-mod=readonly")
        .env("GOWORK", "off")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(stderr)
        .spawn()
        .map_err(BuildError::NoGo)?;
    let status = wait_for(&mut child, part.name, progress).map_err(file(&log))?;
    let missing = part
        .programs
        .iter()
        .find(|program| !out.join(program).exists());
    if !status.success() || missing.is_some() {
        let text = fs::read_to_string(&log).unwrap_or_default();
        return Err(BuildError::Go {
            part: part.name,
            status: status.to_string(),
            hint: network_hint(&text),
            tail: tail(&text, 12),
        });
    }
    for name in part.links {
        let link = out.join(name);
        std::os::unix::fs::symlink(part.programs[0], &link).map_err(file(&link))?;
    }
    fs::remove_file(&log).map_err(file(&log))?;
    progress.report(format_args!(
        "{}: built in {:.0} s",
        part.name,
        start.elapsed().as_secs_f64()
    ));
    Ok(())
}

/// Waits for the end of a build, and reports every 15 s that it goes on.
fn wait_for(child: &mut Child, name: &str, progress: &Progress) -> io::Result<ExitStatus> {
    let start = Instant::now();
    let mut last_report = start;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if last_report.elapsed() >= Duration::from_secs(15) {
            let seconds = start.elapsed().as_secs();
            progress.report(format_args!("{name}: still building after {seconds} s"));
            last_report = Instant::now();
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn network_hint(text: &str) -> &'static str {
    let network = [
        "dial tcp",
        "no such host",
        "i/o timeout",
        "connection refused",
        "TLS handshake",
    ];
    if network.iter().any(|sign| text.contains(sign)) {
        "; the Go module proxy cannot be reached (see GOPROXY in `go env`)"
    } else if text.contains("requires go >=") {
        "; this Go is too old"
    } else {
        ""
    }
}

/// Returns the last `count` lines of `text`.
fn tail(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hint_names_a_missing_network() {
        assert!(
            network_hint("dial tcp: lookup proxy.golang.org: no such host").contains("GOPROXY")
        );
        assert_eq!(network_hint("undefined: x"), "");
    }

    #[test]
    fn tail_returns_the_last_lines() {
        assert_eq!(tail("a\nb\nc", 2), "b\nc");
        assert_eq!(tail("a", 5), "a");
    }
}
