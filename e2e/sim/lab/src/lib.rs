//! Lays out simulated machines for tests.
//!
//! [`SimMachine::new`] builds the driver libraries and `simgpu` with cargo, once per test process,
//! because a cdylib cannot be a test's dependency. It lays out a machine in a temporary directory.
//!
//! [`SimMachine::spawn_client`] starts `sim-actor`, a CUDA and NVML program over unmodified cudarc
//! and nvml-wrapper. The program executes one request after the other, so that a test can arrange
//! forks, kills and descriptors in flight.
//!
//! [`run_in_subprocess`] runs a test's own code on such a machine.

mod actor;
mod build;
mod inside;
mod kernel;
mod tenant;

pub use actor::{DriverClient, Reply, receive_fd, send_with_fd};
pub use build::build;
pub use inside::{peer_command, peer_role, run_in_subprocess};
pub use kernel::{KernelModule, SimGroup};
pub use tenant::RmTenant;

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

/// One H200 with all of its 141 GiB, as in the measurements of `docs/internals/facts.md`.
pub const H200: &str = r#"
[[gpu]]
name = "NVIDIA H200"
uuid = "GPU-00000000-0000-0000-0000-000000000001"
memory = "141Gi"
minor = 0
"#;

/// A laid-out machine; its directory is removed on drop.
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
        let folder = tempfile::Builder::new().prefix("simgpu-").tempdir()?;
        let file = folder.path().join("given.toml");
        std::fs::write(&file, config)?;
        MachineDir::at(folder.path()).init(
            &file,
            &[
                build::driver_file("libbursar_sim_cuda.so")?,
                build::driver_file("libbursar_sim_nvml.so")?,
            ],
        )?;
        Ok(SimMachine { folder })
    }

    /// The machine's directory, for `SIMGPU_DIR`.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// A driver library: `libcuda.so.1` or `libnvidia-ml.so.1`.
    pub fn library(&self, name: &str) -> PathBuf {
        MachineDir::at(self.path()).libraries().join(name)
    }

    /// Opens the machine in the test's own process.
    ///
    /// # Errors
    /// Those of [`Sim::open`].
    pub fn sim(&self) -> Result<Sim> {
        Ok(Sim::open(self.path())?)
    }

    /// A command whose environment selects this machine and its libraries.
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

    /// Runs `simgpu` and returns its output.
    ///
    /// # Errors
    /// `simgpu` failed; the error has its standard error.
    pub fn run_simgpu(&self, arguments: &[&str]) -> Result<String> {
        let output = self
            .command(build::driver_file("simgpu")?)
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

    /// Starts the machine's kernel module, which only programs that start later find.
    ///
    /// # Errors
    /// The program cannot be built or started, or may not mount FUSE file systems.
    pub fn load_kernel_module(&self) -> Result<KernelModule> {
        KernelModule::spawn(self.command(build::driver_file("sim-kernel-module")?))
    }

    /// The folder of device nodes.
    pub fn dev(&self) -> PathBuf {
        MachineDir::at(self.path()).dev()
    }

    /// Starts a `sim-actor` process.
    ///
    /// # Errors
    /// The program cannot be built or started.
    pub fn spawn_client(&self) -> Result<DriverClient> {
        DriverClient::spawn(self.command(build::driver_file("sim-actor")?))
    }

    /// Starts a `sim-actor` process as process 1 of a new pid namespace, like a container's.
    ///
    /// # Errors
    /// The program cannot be built or started, or the system permits no namespaces.
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
        command.arg(build::driver_file("sim-actor")?);
        DriverClient::spawn(command)
    }
}
