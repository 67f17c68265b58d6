//! Simulated GPUs for a node without a driver: laid out by `simgpu`, broken and mended by it.

use std::fmt::Write as _;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::io::Errno;

/// The folder of the simulated machine, on its node.
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
    /// [`FOLDER`] as this process can open it.
    folder: PathBuf,
}

/// Why `simgpu` did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// It could not be run, or its configuration not written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It failed.
    #[error("simgpu {arguments}: {said}")]
    Failed {
        /// Its arguments.
        arguments: String,
        /// What it said.
        said: String,
    },
}

/// The configuration of `count` GPUs of `gib` GiB each.
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

/// The UUID of the simulated GPU at this position.
pub fn uuid(gpu: u32) -> String {
    format!("GPU-00000000-0000-4000-8000-{gpu:012x}")
}

impl SimulatedGpus {
    /// Lays out `count` GPUs of `gib` GiB in [`FOLDER`] of the node whose root folder is `root`, as this
    /// process can open it. `configs` is a folder for the configuration file.
    ///
    /// # Errors
    /// When `simgpu` refuses, or a device node cannot be made.
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

    /// Makes the GPUs' device nodes in the node's own `/dev` too. For a pod with users of its own, runc binds
    /// the node that the host has at the container's path, wherever CDI says that it is.
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
    /// When `simgpu` refuses.
    pub fn lose(&self, gpu: u32) -> Result<(), SimError> {
        self.run(&["lose".to_owned(), gpu.to_string()])
    }

    /// Puts a lost GPU back.
    ///
    /// # Errors
    /// When `simgpu` refuses.
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
