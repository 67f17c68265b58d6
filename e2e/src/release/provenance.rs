//! Describes how the images of a release were built, as a predicate of SLSA 1.0.

use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::cli_archive::HOMEPAGE;
use crate::images;
use crate::paths;

/// The files that pin what a build downloads.
const PINS: [&str; 2] = ["Cargo.lock", "rust-toolchain.toml"];

/// Returns the commit of the repository, unless it is no clone.
pub(super) fn revision() -> Option<String> {
    let output = Command::new("git")
        .args(["rev-parse", "HEAD"])
        .current_dir(paths::repository())
        .output()
        .ok()?;
    let revision = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    output.status.success().then_some(revision)
}

/// Returns the predicate of a build on this machine that began at `begun` and ends now.
pub(super) fn predicate(version: &str, started_on: Timestamp) -> io::Result<Value> {
    let mut dependencies = Vec::new();
    if let Some(commit) = revision() {
        dependencies.push(json!({
            "uri": format!("git+{HOMEPAGE}@{commit}"),
            "digest": { "gitCommit": commit },
        }));
    }
    for name in PINS {
        dependencies.push(pin(&paths::repository().join(name), name)?);
    }
    Ok(json!({
        "buildDefinition": {
            "buildType": format!("{HOMEPAGE}/blob/main/docs/internals/release.md"),
            "externalParameters": {
                "command": "cargo e2e release",
                "version": version,
                "architecture": images::architecture(),
            },
            "resolvedDependencies": dependencies,
        },
        "runDetails": {
            "builder": { "id": format!("{HOMEPAGE}/tree/main/e2e/src/release") },
            "metadata": {
                "startedOn": started_on.to_string(),
                "finishedOn": Timestamp::now().to_string(),
            },
        },
    }))
}

fn pin(path: &Path, name: &str) -> io::Result<Value> {
    let digest = images::digest(&fs::read(path)?).replace("sha256:", "");
    Ok(json!({ "uri": format!("{HOMEPAGE}/blob/main/{name}"), "digest": { "sha256": digest } }))
}
