//! The cargo that this program calls: the one that runs it, without the variables of this package.

use std::process::Command;

/// A call of cargo. The cargo that runs us, so that a `+toolchain` on the command line holds here too.
///
/// What it told us about our own package would reach build scripts: ring's is run again, and all that
/// stands on it compiled again, whenever `CARGO_PKG_NAME` and the like change (The Cargo Book,
/// "Environment Variables").
pub(crate) fn command() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(is_package_variable) {
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
