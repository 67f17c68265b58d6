//! Builds the driver libraries, `simgpu` and `sim-actor`, once per test process.

use anyhow::{Context as _, Result, ensure};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// Paths of the built files.
#[derive(Debug, Clone)]
pub(crate) struct DriverArtifacts {
    pub(crate) cuda: PathBuf,
    pub(crate) nvml: PathBuf,
    pub(crate) simgpu: PathBuf,
    pub(crate) client: PathBuf,
}

static ARTIFACTS: Mutex<Option<DriverArtifacts>> = Mutex::new(None);

const PACKAGES: [&str; 4] = [
    "bursar-sim-cuda",
    "bursar-sim-nvml",
    "bursar-sim-state",
    "bursar-sim-lab",
];

pub(crate) fn driver_artifacts() -> Result<DriverArtifacts> {
    let mut built = ARTIFACTS.lock().unwrap_or_else(PoisonError::into_inner);
    match &*built {
        Some(driver) => Ok(driver.clone()),
        None => Ok(built.insert(build_artifacts()?).clone()),
    }
}

/// Runs `cargo build` and takes the files' paths from its JSON messages.
///
/// Cargo holds no lock while tests run, so a test may call it.
fn build_artifacts() -> Result<DriverArtifacts> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .arg("build")
        .args(PACKAGES.iter().flat_map(|package| ["--package", package]));
    command.args([
        "--lib",
        "--bins",
        "--message-format=json-render-diagnostics",
    ]);
    command
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stderr(Stdio::inherit());
    let output = command.output().context("running cargo build")?;
    ensure!(
        output.status.success(),
        "cargo build of the simulated driver failed"
    );
    let messages: Vec<serde_json::Value> = String::from_utf8(output.stdout)?
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect();
    let find = |target: &str, kind: &str| {
        let of_target = |message: &&serde_json::Value| {
            message["reason"] == "compiler-artifact"
                && message["target"]["name"] == target
                && message["target"]["kind"][0] == kind
        };
        let message = messages
            .iter()
            .find(of_target)
            .with_context(|| format!("cargo did not build {target}"))?;
        let file = message["executable"]
            .as_str()
            .or_else(|| message["filenames"][0].as_str());
        Ok::<_, anyhow::Error>(PathBuf::from(
            file.with_context(|| format!("{target} has no file"))?,
        ))
    };
    Ok(DriverArtifacts {
        cuda: find("bursar_sim_cuda", "cdylib")?,
        nvml: find("bursar_sim_nvml", "cdylib")?,
        simgpu: find("simgpu", "bin")?,
        client: find("sim-actor", "bin")?,
    })
}
