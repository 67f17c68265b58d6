//! Builds programs and libraries of this workspace for tests.

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result, ensure};

/// The variable in which `cargo verify` passes the folder of all built programs and libraries.
/// Another selection of packages would compile the libraries again, and replace them under a test.
const BUILT_VARIABLE: &str = "BURSAR_BUILT";

/// The packages of the driver libraries, of the kernel module, of `simgpu` and of `sim-actor`.
const DRIVER: &[&str] = &[
    "bursar-sim-cuda",
    "bursar-sim-kernel",
    "bursar-sim-nvml",
    "bursar-sim-state",
    "bursar-sim-lab",
];

/// Returns the path of a driver library, `simgpu` or `sim-actor`. The first call builds them all.
pub(crate) fn driver_file(name: &str) -> Result<PathBuf> {
    static FOLDER: Mutex<Option<PathBuf>> = Mutex::new(None);
    let mut folder = FOLDER.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = match &mut *folder {
        Some(folder) => folder,
        none => none.insert(build(DRIVER, &["--lib", "--bins"])?),
    };
    Ok(folder.join(name))
}

/// Builds these targets of these packages with cargo, and returns cargo's output folder. Under
/// `cargo verify` everything is built.
///
/// Cargo holds no lock while tests run, so a test may call it.
///
/// # Errors
/// When cargo cannot be run, or a package does not compile.
pub fn build(packages: &[&str], targets: &[&str]) -> Result<PathBuf> {
    if let Some(folder) = std::env::var_os(BUILT_VARIABLE) {
        return Ok(folder.into());
    }
    let test = std::env::current_exe().context("finding the test's program")?;
    // target/<profile>/deps/<test>
    let folder = test.ancestors().nth(2);
    let folder = folder.context("the test's program is in no folder of cargo")?;
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["build", "--quiet"]).args(targets);
    command.args(packages.iter().flat_map(|package| ["--package", package]));
    if folder.ends_with("release") {
        command.arg("--release");
    }
    // A test may have set the path of the libraries of its own program.
    command.env_remove("LD_LIBRARY_PATH");
    let status = command
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .context("running cargo build")?;
    ensure!(status.success(), "cargo build of {packages:?}: {status}");
    Ok(folder.to_owned())
}
