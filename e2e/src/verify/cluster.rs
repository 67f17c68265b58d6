//! Runs trials on a real cluster: one test program, and one cluster for all selected trials.

use std::process::Command;

use serde::Deserialize;

use super::checks::{self, Check};
use crate::cargo;
use crate::kube::{KUBERNETES_VARIABLE, KubernetesVersion};
use crate::paths;

/// A part of Kubernetes that a trial needs.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Needs {
    /// The first minor version that has it.
    minor: u32,
    what: String,
}

/// Returns the trials of `e2e/tests/cluster`, which refuses to run when it has others.
pub fn trials() -> impl Iterator<Item = &'static str> {
    let trials = checks::all().iter().filter(|check| check.trial().is_some());
    trials.map(|check| check.name.as_str())
}

/// Returns the command that runs the chosen trials on one cluster of a release of Kubernetes.
/// Prints the trials that do not apply to it, with the reason.
pub(super) fn command(version: KubernetesVersion, is_chosen: impl Fn(&Check) -> bool) -> Command {
    let mut command = cargo::command();
    // Other tests are selected alike, so that no crate is compiled with other features.
    command.args(["test", "--quiet", "--locked", "--workspace"]);
    command.args(["--test", "cluster", "--", "--exact"]);
    for check in checks::all() {
        let Some(needs) = check.trial() else {
            continue;
        };
        let lacks = needs.as_ref().filter(|needs| version.minor() < needs.minor);
        let is_chosen = is_chosen(check);
        if let (true, Some(Needs { what, .. })) = (is_chosen, lacks) {
            println!(
                "{}: skipped, Kubernetes {version} has no {what}",
                check.name
            );
        }
        if !is_chosen || lacks.is_some() {
            command.args(["--skip", &check.name]);
        }
    }
    command
        .env(KUBERNETES_VARIABLE, version.to_string())
        .current_dir(paths::repository());
    command
}
