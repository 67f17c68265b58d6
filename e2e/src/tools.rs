//! Installs pinned programs that checks and releases need, once, into the cache.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use crate::cache::{self, CacheError};
use crate::cargo;
use crate::paths;

/// The pinned version of cargo-deny.
const CARGO_DENY: &str = "0.20.2";
/// The pinned version of cargo-cyclonedx.
const CARGO_CYCLONEDX: &str = "0.5.9";
/// The pinned version of mdBook.
const MDBOOK: &str = "0.5.4";

/// The error of an installation.
#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    /// Cargo could not be started.
    #[error("cargo install {tool}: {source}")]
    Start {
        /// The tool and its version.
        tool: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The tool does not compile.
    #[error(
        "cargo install {tool} failed; its output above says why (it needs the crates.io registry)"
    )]
    Failed {
        /// The tool and its version.
        tool: String,
    },
    /// Debian packages could not be unpacked.
    #[error(
        "failed to unpack the Debian packages {names}: {what}; apt-get needs Debian's registry"
    )]
    Packages {
        /// The packages.
        names: String,
        /// The cause.
        what: String,
    },
}

/// The programs of a Debian package that are kept of it.
struct DebianPackage {
    name: &'static str,
    programs: &'static [&'static str],
}

const PROMETHEUS: DebianPackage = DebianPackage {
    name: "prometheus",
    programs: &["prometheus", "promtool"],
};
const LUA: DebianPackage = DebianPackage {
    name: "lua5.1",
    programs: &["lua5.1"],
};
const REGISTRY: DebianPackage = DebianPackage {
    name: "docker-registry",
    programs: &["docker-registry"],
};

/// Returns the path of `promtool`: the installed one, or that of Debian's package `prometheus`.
pub(crate) fn promtool() -> Result<PathBuf, CacheError<ToolError>> {
    PROMETHEUS.program("promtool")
}

/// Returns the path of Prometheus: the installed one, or that of Debian's package `prometheus`.
///
/// # Errors
/// When the package cannot be downloaded.
pub fn prometheus() -> Result<PathBuf, CacheError<ToolError>> {
    PROMETHEUS.program("prometheus")
}

/// Returns the path of Lua 5.1, the language of Argo CD's scripts: the installed one, or that of
/// Debian's package.
pub(crate) fn lua() -> Result<PathBuf, CacheError<ToolError>> {
    LUA.program("lua5.1")
}

/// Returns the path of CNCF's registry: the installed one, or that of Debian's package
/// `docker-registry`.
///
/// # Errors
/// When the package cannot be downloaded.
pub fn registry() -> Result<PathBuf, CacheError<ToolError>> {
    REGISTRY.program("docker-registry")
}

impl DebianPackage {
    /// Returns the path of a program on the PATH, or in the package, which is downloaded at its
    /// first use and not installed.
    fn program(&self, program: &str) -> Result<PathBuf, CacheError<ToolError>> {
        let installed = PathBuf::from(program);
        let output = Command::new(&installed).arg("--version").output();
        if output.is_ok_and(|output| output.status.success()) {
            return Ok(installed);
        }
        let key = self.programs.join("+");
        let folder = cache::get_or_make(&paths::cache().join("tools"), &key, |out| {
            unpack(out, &[self.name])?;
            self.remove_other_programs(&out.join("usr/bin"))
        })?;
        Ok(folder.join("usr/bin").join(program))
    }

    /// Removes the other programs of the package, because they are large.
    fn remove_other_programs(&self, folder: &Path) -> Result<(), ToolError> {
        let failed = |error: io::Error| ToolError::Packages {
            names: self.name.to_owned(),
            what: error.to_string(),
        };
        for entry in fs::read_dir(folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            if !self.programs.iter().any(|program| name == *program) {
                fs::remove_file(entry.path()).map_err(failed)?;
            }
        }
        Ok(())
    }
}

/// Returns the folder of Debian's packages with zsh and the completion functions of bash, which
/// are downloaded at their first use and not installed.
pub(crate) fn shells() -> Result<PathBuf, CacheError<ToolError>> {
    let packages = ["bash-completion", "zsh", "zsh-common"];
    cache::get_or_make(&paths::cache().join("tools"), "shells", |out| {
        unpack(out, &packages)
    })
}

fn unpack(out: &Path, packages: &[&str]) -> Result<(), ToolError> {
    // An old list of packages names versions that the registry has no more.
    let script = "apt-get download \"$@\" >&2 || { apt-get update >&2 && apt-get download \"$@\" >&2; } && \
                  for package in *.deb; do dpkg-deb -x \"$package\" . && rm \"$package\"; done";
    let status = Command::new("sh")
        .args(["-ec", script, "unpack"])
        .args(packages)
        .current_dir(out)
        .status();
    let what = match status {
        Ok(status) if status.success() => return Ok(()),
        Ok(status) => status.to_string(),
        Err(error) => error.to_string(),
    };
    let names = packages.join(" ");
    Err(ToolError::Packages { names, what })
}

/// Returns the path of `cargo-deny`, which is compiled at its first use (about 4 minutes on two
/// cores).
pub(crate) fn cargo_deny() -> Result<PathBuf, CacheError<ToolError>> {
    let name = format!("cargo-deny-{CARGO_DENY}");
    let folder = cache::get_or_make(&paths::cache().join("tools"), &name, |out| {
        install("cargo-deny", CARGO_DENY, &[], out)
    })?;
    Ok(folder.join("bin/cargo-deny"))
}

/// Returns the path of `cargo-cyclonedx`, which is compiled at its first use (about 2 minutes on
/// two cores).
///
/// # Errors
/// When the crates.io registry is missing, or the tool does not compile.
pub fn cargo_cyclonedx() -> Result<PathBuf, CacheError<ToolError>> {
    let name = format!("cargo-cyclonedx-{CARGO_CYCLONEDX}");
    let folder = cache::get_or_make(&paths::cache().join("tools"), &name, |out| {
        install("cargo-cyclonedx", CARGO_CYCLONEDX, &[], out)
    })?;
    Ok(folder.join("bin/cargo-cyclonedx"))
}

/// Returns the path of `mdbook`, which is compiled at its first use (about 2 minutes on two
/// cores). Its server and its search, which need most of its dependencies, are left out.
pub(crate) fn mdbook() -> Result<PathBuf, CacheError<ToolError>> {
    let name = format!("mdbook-{MDBOOK}");
    let folder = cache::get_or_make(&paths::cache().join("tools"), &name, |out| {
        install("mdbook", MDBOOK, &["--no-default-features"], out)
    })?;
    Ok(folder.join("bin/mdbook"))
}

fn install(package: &str, version: &str, flags: &[&str], out: &Path) -> Result<(), ToolError> {
    let tool = format!("{package}@{version}");
    let status = cargo::command()
        .args(["install", "--quiet", "--locked", "--root"])
        .arg(out)
        .arg(&tool)
        .args(flags)
        // A separate target folder, because the workspace's own would be rebuilt after each change
        // of lock files.
        .env("CARGO_TARGET_DIR", out.join("target"))
        .status()
        .map_err(|source| ToolError::Start {
            tool: tool.clone(),
            source,
        })?;
    let _ = std::fs::remove_dir_all(out.join("target"));
    if status.success() {
        Ok(())
    } else {
        Err(ToolError::Failed { tool })
    }
}
