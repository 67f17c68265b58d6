//! Installs Debian packages that a build needs.

use std::path::Path;
use std::process::Command;

use crate::progress::Progress;

/// A Debian package, and the file that shows its presence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Package {
    name: &'static str,
    /// A file that exists if the package is installed.
    proof_path: &'static str,
}

impl Package {
    /// The C compiler.
    pub(crate) const GCC: Self = Self {
        name: "gcc",
        proof_path: "/usr/bin/gcc",
    };
    /// libseccomp's header and static library.
    pub(crate) const SECCOMP: Self = Self {
        name: "libseccomp-dev",
        proof_path: "/usr/include/seccomp.h",
    };
    /// The C compiler for 32-bit programs.
    pub(crate) const GCC_MULTILIB: Self = Self {
        name: "gcc-multilib",
        proof_path: "/usr/lib32/libc.so.6",
    };
    /// The C compiler for programs over musl.
    pub(crate) const MUSL: Self = Self {
        name: "musl-tools",
        proof_path: "/usr/bin/musl-gcc",
    };
    /// The compressor of archives.
    pub(crate) const XZ: Self = Self {
        name: "xz-utils",
        proof_path: "/usr/bin/xz",
    };
}

/// The error of an installation.
#[derive(Debug, thiserror::Error)]
pub enum PackageError {
    /// There is no `apt-get`, or it failed.
    #[error("Debian packages {names} are needed and could not be installed: {why}")]
    Install {
        /// The packages' names.
        names: String,
        /// The cause.
        why: String,
    },
}

/// Installs the missing ones of `packages`.
///
/// # Errors
/// When `apt-get` is missing or fails, with the packages' names and its last lines.
pub(crate) fn require(packages: &[Package], progress: &Progress) -> Result<(), PackageError> {
    let missing: Vec<&str> = packages
        .iter()
        .filter(|package| !Path::new(package.proof_path).exists())
        .map(|package| package.name)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    progress.report(format_args!("installing {}", missing.join(" ")));
    // A fresh container may have stale package lists or none, so they are updated once.
    if apt_get(
        &[
            &["install", "-y", "--no-install-recommends"],
            missing.as_slice(),
        ]
        .concat(),
    )
    .is_ok()
    {
        return Ok(());
    }
    let _ = apt_get(&["update"]);
    apt_get(
        &[
            &["install", "-y", "--no-install-recommends"],
            missing.as_slice(),
        ]
        .concat(),
    )
    .map_err(|why| PackageError::Install {
        names: missing.join(" "),
        why,
    })
}

fn apt_get(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("apt-get")
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .output()
        .map_err(|error| format!("apt-get: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let last: Vec<&str> = stderr.lines().rev().take(4).collect();
    Err(last.into_iter().rev().collect::<Vec<_>>().join("; "))
}
