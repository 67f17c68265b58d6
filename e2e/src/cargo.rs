//! Calls the cargo that runs this program, without the variables of this package.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The variable in which `cargo verify` passes the folder of all built programs and libraries.
/// Tests that build a part of the workspace would compile it again with other features.
const BUILT_VARIABLE: &str = "BURSAR_BUILT";

/// The variables with which golden tests write what they compare with. A check with them could not
/// fail.
const WEAKENING: [&str; 2] = ["BURSAR_UPDATE", "BLESS"];

static BUILT: OnceLock<PathBuf> = OnceLock::new();

static VARIABLES: OnceLock<Vec<(&str, String)>> = OnceLock::new();

/// Sets environment variables of all commands of cargo that this program starts from now on.
pub(crate) fn set_variables(variables: Vec<(&'static str, String)>) {
    // The program sets them once.
    let _ = VARIABLES.set(variables);
}

/// Tells this program and all commands of cargo that every program is built, in this folder.
pub(crate) fn set_built(folder: PathBuf) {
    // A second call names the same folder.
    let _ = BUILT.set(folder);
}

/// Returns the folder of all built programs and libraries, once they are built.
pub(crate) fn built() -> Option<PathBuf> {
    let from_environment = || std::env::var_os(BUILT_VARIABLE).map(PathBuf::from);
    BUILT.get().cloned().or_else(from_environment)
}

/// Returns a command for the cargo that runs this program, so that a `+toolchain` on the command
/// line counts for it too.
///
/// The variables that cargo sets for this package are removed, because they would reach build
/// scripts. The build script of ring runs again whenever `CARGO_PKG_NAME` changes. Cargo then
/// compiles every crate again that depends on ring (The Cargo Book, "Environment Variables").
///
/// A program that cargo did not start calls the `cargo` of `PATH`.
pub(crate) fn command() -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = without_package_variables(Command::new(cargo));
    if let Some(folder) = BUILT.get() {
        command.env(BUILT_VARIABLE, folder);
    }
    let variables = VARIABLES.get().into_iter().flatten();
    command.envs(variables.map(|(name, value)| (name, value)));
    command
}

/// Returns a command for `program`, which extends cargo by the subcommand `name`. Cargo passes the
/// subcommand's name as the first argument, so the command does too.
pub(crate) fn subcommand(program: &Path, name: &str) -> Command {
    let mut command = without_package_variables(Command::new(program));
    command.arg(name);
    command
}

fn without_package_variables(mut command: Command) -> Command {
    for (name, _) in std::env::vars_os() {
        let is_known = |name: &str| is_package_variable(name) || WEAKENING.contains(&name);
        if name.to_str().is_some_and(is_known) {
            command.env_remove(name);
        }
    }
    command
}

fn is_package_variable(variable: &str) -> bool {
    let starts = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_"];
    let names = [
        "CARGO_CRATE_NAME",
        "CARGO_PRIMARY_PACKAGE",
        "CARGO_TARGET_TMPDIR",
    ];
    starts.iter().any(|start| variable.starts_with(start)) || names.contains(&variable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_keeps_the_users_variables() {
        assert!(is_package_variable("CARGO_PKG_NAME") && is_package_variable("CARGO_MANIFEST_DIR"));
        assert!(!is_package_variable("CARGO_TARGET_DIR") && !is_package_variable("CARGO_HOME"));
    }
}
