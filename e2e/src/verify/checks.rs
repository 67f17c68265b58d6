//! The table of checks.

use std::ffi::OsString;
use std::process::Command;

use super::tools;
use crate::folders;

/// One check: a name `area/what`, what it shows, and how it is run.
pub(super) struct Check {
    pub(super) name: &'static str,
    pub(super) shows: &'static str,
    how: How,
}

enum How {
    /// `cargo` with these arguments, in the repository.
    Cargo(&'static [&'static str]),
    /// A function of this program.
    Here(fn() -> anyhow::Result<()>),
}

const fn cargo_check(
    name: &'static str,
    shows: &'static str,
    arguments: &'static [&'static str],
) -> Check {
    Check {
        name,
        shows,
        how: How::Cargo(arguments),
    }
}

/// Every check, in the order in which they run: what fails fastest comes first.
pub(super) const CHECKS: &[Check] = &[
    cargo_check(
        "main/fmt",
        "the code is formatted",
        &["fmt", "--all", "--check"],
    ),
    cargo_check(
        "main/clippy",
        "no warning, in tests and benchmarks either",
        &[
            "clippy",
            "--quiet",
            "--locked",
            "--workspace",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ],
    ),
    Check {
        name: "main/deny",
        shows: "licences, bans and sources of every dependency",
        how: How::Here(deny),
    },
];

impl Check {
    pub(super) fn run(&self) -> anyhow::Result<()> {
        match self.how {
            How::Cargo(arguments) => succeed(Command::new(cargo()).args(arguments)),
            How::Here(function) => function(),
        }
    }
}

/// The cargo that runs us, so that a `+toolchain` on the command line holds for the checks too.
pub(super) fn cargo() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

fn succeed(command: &mut Command) -> anyhow::Result<()> {
    let shown = format!("{command:?}").replace('"', "");
    let status = command.current_dir(folders::repository()).status()?;
    anyhow::ensure!(status.success(), "{shown}: {status}");
    Ok(())
}

fn deny() -> anyhow::Result<()> {
    // The advisory database is a git repository of its own: `cargo deny check advisories`, where
    // there is a network.
    succeed(
        Command::new(tools::cargo_deny()?)
            .args(["--locked", "check", "licenses", "bans", "sources"]),
    )
}
