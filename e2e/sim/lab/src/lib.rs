//! A simulated machine for a test.
//!
//! [`Lab::new`] builds the two driver libraries and `simgpu` with cargo (a cdylib cannot be a test's
//! dependency), once per test process, and lays out a folder of its own under the system's temporary folder.
//! [`Lab::actor`] starts `sim-actor`, a CUDA and NVML program (over unchanged cudarc and nvml-wrapper) that
//! does what it is told line by line, so that a test can stage forks, kills and descriptors in flight.
//! [`run_in_subprocess`] runs a test's own code on such a machine.

mod actor;
mod build;
mod inside;

pub use actor::{DriverClient, Reply, receive_fd, send_with_fd};
pub use inside::{peer_command, peer_role, run_in_subprocess};

use anyhow::{Context as _, Result, ensure};
use bursar_sim_state::{MachineDir, Sim};
use std::path::{Path, PathBuf};
use std::process::Command;

/// One 16 GiB GPU.
pub const ONE_GPU: &str = r#"
[[gpu]]
name = "NVIDIA H200"
uuid = "GPU-00000000-0000-0000-0000-000000000001"
memory = "16Gi"
minor = 0
"#;

/// Two GPUs of 16 GiB.
pub const TWO_GPUS: &str = r#"
[[gpu]]
name = "NVIDIA H200"
uuid = "GPU-00000000-0000-0000-0000-000000000001"
memory = "16Gi"
minor = 0

[[gpu]]
name = "NVIDIA H200"
uuid = "GPU-00000000-0000-0000-0000-000000000002"
memory = "16Gi"
minor = 1
"#;

/// One H200 with all of its 141 GiB, as the facts in the design were measured on.
pub const H200: &str = r#"
[[gpu]]
name = "NVIDIA H200"
uuid = "GPU-00000000-0000-0000-0000-000000000001"
memory = "141Gi"
minor = 0
"#;

/// A laid-out machine; gone when dropped.
#[derive(Debug)]
pub struct SimMachine {
    folder: tempfile::TempDir,
}

impl SimMachine {
    /// Lays out a machine with that `config.toml`.
    ///
    /// # Errors
    /// The libraries cannot be built, or the configuration is refused.
    pub fn new(config: &str) -> Result<SimMachine> {
        let built = build::driver_artifacts()?;
        let folder = tempfile::Builder::new().prefix("simgpu-").tempdir()?;
        let file = folder.path().join("given.toml");
        std::fs::write(&file, config)?;
        MachineDir::at(folder.path()).init(&file, &[built.cuda.clone(), built.nvml.clone()])?;
        Ok(SimMachine { folder })
    }

    /// The machine's folder, `SIMGPU_DIR`.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// A driver library: `libcuda.so.1` or `libnvidia-ml.so.1`.
    pub fn library(&self, name: &str) -> PathBuf {
        MachineDir::at(self.path()).libraries().join(name)
    }

    /// The machine as the tests' own process sees it.
    ///
    /// # Errors
    /// As [`Sim::open`].
    pub fn sim(&self) -> Result<Sim> {
        Ok(Sim::open(self.path())?)
    }

    /// A command that finds this machine and its libraries.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        let folder = MachineDir::at(self.path());
        command
            .env("SIMGPU_DIR", self.path())
            .env("SIMGPU_DEV", folder.dev());
        command
            .env("LD_LIBRARY_PATH", folder.libraries())
            .env_remove("CUDA_VISIBLE_DEVICES");
        command
    }

    /// Runs `simgpu` and returns what it printed.
    ///
    /// # Errors
    /// It failed; with what it said.
    pub fn run_simgpu(&self, arguments: &[&str]) -> Result<String> {
        let output = self
            .command(&build::driver_artifacts()?.simgpu)
            .args(arguments)
            .output()
            .context("running simgpu")?;
        ensure!(
            output.status.success(),
            "simgpu {arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Starts an actor.
    ///
    /// # Errors
    /// It cannot be built or started.
    pub fn spawn_client(&self) -> Result<DriverClient> {
        DriverClient::spawn(self.command(&build::driver_artifacts()?.client))
    }

    /// Starts an actor as the first process of a pid namespace of its own, as a container has one.
    ///
    /// # Errors
    /// As [`Lab::actor`]; or the system lets us make no namespaces.
    pub fn spawn_client_in_pid_namespace(&self) -> Result<DriverClient> {
        let mut command = self.command("unshare");
        command.args([
            "--user",
            "--map-root-user",
            "--pid",
            "--fork",
            "--mount-proc",
            "--kill-child",
        ]);
        command.arg(build::driver_artifacts()?.client);
        DriverClient::spawn(command)
    }
}
