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
    #[error("simgpu {arguments}: {said}")]
    Failed {
        /// Its arguments.
        arguments: String,
        /// Its standard error.
        said: String,
    },
}

/// Returns the configuration of `count` GPUs of `gib` GiB each.
fn config(count: u32, gib: u32) -> String {
    let mut text = String::new();
    for gpu in 0..count {
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "[[gpu]]\nname = \"Simulated GPU\"\nuuid = \"GPU-00000000-0000-4000-8000-{gpu:012x}\"\n\
             memory = \"{gib}Gi\"\nminor = {gpu}\n\n"
        );
    }
    text
}

/// Returns the UUID of the simulated GPU with this index.
pub fn uuid(gpu: u32) -> String {
    format!("GPU-00000000-0000-4000-8000-{gpu:012x}")
}

impl SimulatedGpus {
    /// Sets up `count` GPUs of `gib` GiB in [`FOLDER`] of a node. `root` is the node's root folder
    /// as this process can open it, `configs` the folder of the configuration file.
    ///
    /// # Errors
    /// When `simgpu` fails, or a device node cannot be created.
    pub fn set_up(
        driver: SimulatedDriver,
        root: &Path,
        configs: &Path,
        count: u32,
        gib: u32,
    ) -> Result<Self, SimError> {
        let path = configs.join("simgpu.toml");
        std::fs::write(&path, config(count, gib)).map_err(|source| SimError::File {
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
            let made = mknodat(
                CWD,
                dev.join(entry.file_name()),
                FileType::CharacterDevice,
                Mode::from_raw_mode(0o666),
                node.rdev(),
            );
            match made {
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
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(SimError::Failed {
            arguments: arguments.join(" "),
            said,
        })
    }
}
