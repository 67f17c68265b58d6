//! Sets up simulated GPUs by `simgpu` on a node without a driver, and injects their loss.

use std::fmt::Write as _;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::io::Errno;

/// The folder of the simulated machine on its node.
pub const FOLDER: &str = "/run/simgpu";

/// The programs and libraries of the simulated driver.
#[derive(Debug, Clone)]
pub struct SimulatedDriver {
    /// The `simgpu` command.
    pub command: PathBuf,
    /// `libbursar_sim_cuda.so` and `libbursar_sim_nvml.so`.
    pub libraries: Vec<PathBuf>,
}

/// The GPUs of one node.
#[derive(Debug, Clone)]
pub struct SimulatedGpus {
    driver: SimulatedDriver,
    /// [`FOLDER`] as a path that this process can open.
    folder: PathBuf,
}

/// The error of a call of `simgpu`.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// `simgpu` could not be started, or its configuration could not be written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// `simgpu` exited with a failure.
    #[error("simgpu {arguments}: {stderr}")]
    Failed {
        /// Its arguments.
        arguments: String,
        /// Its standard error.
        stderr: String,
    },
}

/// The simulated GPUs of one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// The node's number, from 1 on, which is part of the UUIDs.
    pub node: u8,
    /// The number of GPUs.
    pub count: u32,
    /// The memory of each GPU, in GiB.
    pub gib: u32,
    /// The memory of each of two MIG instances of the last GPU, in GiB.
    pub mig_gib: Option<u32>,
}

impl Layout {
    /// Returns the configuration for `simgpu`.
    fn config(self) -> String {
        let mut text = String::new();
        for gpu in 0..self.count {
            let (uuid, gib) = (self.uuid(gpu), self.gib);
            // Writing to a string cannot fail.
            let _ = write!(
                text,
                "[[gpu]]\nname = \"Simulated GPU\"\nuuid = \"{uuid}\"\n\
                 memory = \"{gib}Gi\"\nminor = {gpu}\n\n"
            );
            if let Some(gib) = self.mig_gib.filter(|_| gpu + 1 == self.count) {
                for instance in 0..MIG_INSTANCES {
                    let uuid = self.mig_uuid(instance);
                    let _ = write!(
                        text,
                        "[[gpu.mig]]\nprofile = \"3g.{gib}gb\"\nuuid = \"{uuid}\"\n\
                         memory = \"{gib}Gi\"\n\n"
                    );
                }
            }
        }
        text
    }

    /// Returns the UUID of the simulated GPU with this index.
    pub fn uuid(self, gpu: u32) -> String {
        let node = 0x8000 + u16::from(self.node) - 1;
        format!("GPU-00000000-0000-4000-{node:04x}-{gpu:012x}")
    }

    /// Returns the UUID of the MIG instance with this index.
    pub fn mig_uuid(self, instance: u32) -> String {
        let node = 0x8000 + u16::from(self.node) - 1;
        format!("MIG-00000000-0000-4000-{node:04x}-{instance:012x}")
    }

    /// Returns the device memory that the node offers, in GiB.
    pub fn total_gib(self) -> u32 {
        match self.mig_gib {
            None => self.count * self.gib,
            Some(gib) => (self.count - 1) * self.gib + MIG_INSTANCES * gib,
        }
    }
}

/// The MIG instances of a GPU in MIG mode.
pub const MIG_INSTANCES: u32 = 2;

/// Returns the UUID of the first node's simulated GPU with this index.
pub fn uuid(gpu: u32) -> String {
    let first = Layout {
        node: 1,
        count: 0,
        gib: 0,
        mig_gib: None,
    };
    first.uuid(gpu)
}

impl SimulatedGpus {
    /// Sets up the GPUs in [`FOLDER`] of a node. `root` is the node's root folder
    /// as this process can open it, `configs` the folder of the configuration file.
    ///
    /// # Errors
    /// When `simgpu` fails, or a device node cannot be created.
    pub fn set_up(
        driver: SimulatedDriver,
        root: &Path,
        configs: &Path,
        layout: Layout,
    ) -> Result<Self, SimError> {
        let path = configs.join("simgpu.toml");
        std::fs::write(&path, layout.config()).map_err(|source| SimError::File {
            path: path.clone(),
            source,
        })?;
        let folder = root.join(FOLDER.trim_start_matches('/'));
        let gpus = Self { driver, folder };
        let mut arguments = vec!["init".to_owned(), format!("--config={}", path.display())];
        arguments.extend(
            gpus.driver
                .libraries
                .iter()
                .map(|library| format!("--lib={}", library.display())),
        );
        gpus.run(&arguments)?;
        let dev = root.join("dev");
        gpus.create_device_nodes(&dev)
            .map_err(|source| SimError::File { path: dev, source })?;
        Ok(gpus)
    }

    /// Creates the GPUs' device nodes in the node's own `/dev` too. For a pod in a user namespace,
    /// runc binds the host's node at the container's path, whatever host path the CDI file has.
    fn create_device_nodes(&self, dev: &Path) -> io::Result<()> {
        for entry in std::fs::read_dir(self.folder.join("dev"))? {
            let entry = entry?;
            let node = entry.metadata()?;
            if !node.file_type().is_char_device() {
                continue;
            }
            let created = mknodat(
                CWD,
                dev.join(entry.file_name()),
                FileType::CharacterDevice,
                Mode::from_raw_mode(0o666),
                node.rdev(),
            );
            match created {
                Err(error) if error != Errno::EXIST => return Err(error.into()),
                _ => {}
            }
        }
        Ok(())
    }

    /// Takes a GPU off the bus, as XID 79 does.
    ///
    /// # Errors
    /// When `simgpu` fails.
    pub fn lose(&self, gpu: u32) -> Result<(), SimError> {
        self.run(&["lose".to_owned(), gpu.to_string()])
    }

    /// Restores a lost GPU.
    ///
    /// # Errors
    /// When `simgpu` fails.
    pub fn restore(&self, gpu: u32) -> Result<(), SimError> {
        self.run(&["restore".to_owned(), gpu.to_string()])
    }

    fn run(&self, arguments: &[String]) -> Result<(), SimError> {
        let command = &self.driver.command;
        let output = Command::new(command)
            .arg("--dir")
            .arg(&self.folder)
            .args(arguments)
            .output()
            .map_err(|source| SimError::File {
                path: command.clone(),
                source,
            })?;
        if output.status.success() {
            return Ok(());
        }
        let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(SimError::Failed {
            arguments: arguments.join(" "),
            stderr,
        })
    }
}
