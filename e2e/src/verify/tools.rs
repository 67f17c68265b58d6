//! Installs pinned programs that checks need, once, into the cache.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{self, CacheError};
use crate::cargo;
use crate::paths;

/// The pinned version of cargo-deny.
const CARGO_DENY: &str = "0.20.2";

/// The error of an installation.
#[derive(Debug, thiserror::Error)]
pub(super) enum ToolError {
    #[error("cargo install {tool}: {source}")]
    Start {
        tool: String,
        source: std::io::Error,
    },
    #[error(
        "cargo install {tool} failed; its output above says why (it needs the crates.io registry)"
    )]
    Failed { tool: String },
    #[error(
        "failed to unpack the Debian packages {names}: {what}; apt-get needs Debian's registry"
    )]
    Packages { names: String, what: String },
}

/// Returns the path of `promtool`: the installed one, or that of Debian's package `prometheus`,
/// which is downloaded at its first use and not installed.
pub(super) fn promtool() -> Result<PathBuf, CacheError<ToolError>> {
    let installed = PathBuf::from("promtool");
    let asked = Command::new(&installed).arg("--version").output();
    if asked.is_ok_and(|asked| asked.status.success()) {
        return Ok(installed);
    }
    let unpacked = |out: &Path| {
        unpack(out, &["prometheus"])?;
        // The server is large and not used.
        let _ = std::fs::remove_file(out.join("usr/bin/prometheus"));
        Ok(())
    };
    let folder = cache::get_or_make(&paths::cache().join("tools"), "prometheus", unpacked)?;
    Ok(folder.join("usr/bin/promtool"))
}

/// Returns the folder of Debian's packages with zsh and the completion functions of bash, which
/// are downloaded at their first use and not installed.
pub(super) fn shells() -> Result<PathBuf, CacheError<ToolError>> {
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
pub(super) fn cargo_deny() -> Result<PathBuf, CacheError<ToolError>> {
    let name = format!("cargo-deny-{CARGO_DENY}");
    let folder = cache::get_or_make(&paths::cache().join("tools"), &name, |out| {
        install("cargo-deny", CARGO_DENY, out)
    })?;
    Ok(folder.join("bin/cargo-deny"))
}

fn install(package: &str, version: &str, out: &Path) -> Result<(), ToolError> {
    let tool = format!("{package}@{version}");
    let status = cargo::command()
        .args(["install", "--quiet", "--locked", "--root"])
        .arg(out)
        .arg(&tool)
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
