//! One opened simulated machine.

use crate::config::{Config, ConfigError};
use crate::folder::MachineDir;
use crate::table::{MAX_XIDS, Table, TableError};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// How soon a call that hangs notices that it may go on.
const HANG_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A simulated machine, as this process sees it.
#[derive(Debug)]
pub struct Sim {
    /// Its files.
    pub folder: MachineDir,
    /// Its configuration, read once.
    pub config: Config,
    /// GPUs, each followed by its MIG instances: what memory is accounted by.
    pub units: Vec<Unit>,
    pub(crate) table: Table,
    /// Looks at images' locks. Never holds one, so that a forked child may share it.
    pub(crate) images_lock: File,
    /// Looks at images' pids. Never closed: a close would drop this process's own signature.
    pub(crate) pids_lock: std::mem::ManuallyDrop<File>,
    pub(crate) namespace: u64,
}

/// A GPU or a MIG instance.
#[derive(Debug, Clone)]
pub struct Unit {
    /// Position in [`Sim::random_units`].
    pub index: usize,
    /// Position in [`Config::gpu`].
    pub gpu: usize,
    /// Position in that GPU's instances, for an instance.
    pub mig: Option<usize>,
    /// Bytes.
    pub total: u64,
}

/// Why a simulated machine cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// Its configuration was refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its table is not usable.
    #[error(transparent)]
    Table(#[from] TableError),
    /// A lock file or an allocation's file failed.
    #[error("{step} {path}")]
    Io {
        /// What was being done.
        step: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The GPU has not that much left.
    #[error("out of memory on unit {unit}: {wanted} bytes wanted, {free} free")]
    OutOfMemory {
        /// The unit.
        unit: usize,
        /// Bytes asked for.
        wanted: u64,
        /// Bytes left.
        free: u64,
    },
    /// A table's places are all taken.
    #[error("all {0} places are taken")]
    TableFull(usize),
    /// This image's lock is gone (somebody closed its descriptor), and its place was given away.
    #[error("this process image was collected: its descriptors were closed")]
    ImageCollected,
    /// A descriptor is not one of an allocation.
    #[error("the descriptor is not an allocation's")]
    NotAnObject,
}

impl Sim {
    /// Opens a folder that `simgpu init` laid out.
    ///
    /// # Errors
    /// It was not, or its configuration no longer parses.
    pub fn open(path: &Path) -> Result<Sim, SimError> {
        let folder = MachineDir::at(path);
        let config = Config::read(&folder.config())?;
        let at = |step, path: PathBuf| move |source| SimError::Io { step, path, source };
        let open = |path: PathBuf| crate::lock::open(&path).map_err(at("opening", path));
        let namespace =
            crate::lock::pid_namespace().map_err(at("asking", "/proc/self/ns/pid".into()))?;
        Ok(Sim {
            units: units(&config),
            table: Table::open(&folder.table())?,
            images_lock: open(folder.images_lock())?,
            pids_lock: std::mem::ManuallyDrop::new(open(folder.pids_lock())?),
            namespace,
            folder,
            config,
        })
    }

    /// Whether freed memory is zeroed.
    pub fn is_scrub_enabled(&self) -> bool {
        self.table.raw().scrub.load(Relaxed) != 0
    }

    /// Switches scrubbing.
    pub fn set_scrub_enabled(&self, on: bool) {
        self.table.raw().scrub.store(u32::from(on), Relaxed);
    }

    /// Whether a GPU has fallen off the bus; a MIG instance goes with its GPU.
    pub fn is_lost(&self, unit: usize) -> bool {
        let gpu = self.gpu_unit(self.units[unit].gpu);
        self.table.raw().units[gpu].lost.load(Relaxed) != 0
    }

    /// Takes a GPU off the bus, or puts it back.
    pub fn set_lost(&self, gpu: usize, lost: bool) {
        self.table.raw().units[self.gpu_unit(gpu)]
            .lost
            .store(u32::from(lost), Relaxed);
    }

    fn hung_flag(&self, gpu: Option<usize>) -> &AtomicU32 {
        let raw = self.table.raw();
        gpu.map_or(&raw.hung, |gpu| &raw.units[self.gpu_unit(gpu)].hung)
    }

    /// Whether NVML's calls about a GPU, or about none, wait.
    pub fn is_hung(&self, gpu: Option<usize>) -> bool {
        self.hung_flag(gpu).load(Relaxed) != 0
    }

    /// Makes NVML's calls about a GPU, or about none, wait, or lets them go on.
    pub fn set_hung(&self, gpu: Option<usize>, hung: bool) {
        self.hung_flag(gpu).store(u32::from(hung), Relaxed);
    }

    /// Waits as long as NVML's calls about a GPU, or about none, do.
    pub fn wait_while_hung(&self, gpu: Option<usize>) {
        while self.is_hung(gpu) {
            std::thread::sleep(HANG_POLL_INTERVAL);
        }
    }

    /// The unit that is a whole GPU.
    pub fn gpu_unit(&self, gpu: usize) -> usize {
        self.config.gpu[..gpu]
            .iter()
            .map(|card| 1 + card.mig.len())
            .sum()
    }

    /// The GPU that a user names by position or UUID.
    pub fn find_gpu(&self, name: &str) -> Option<usize> {
        let by_number = name.parse().ok().filter(|gpu| *gpu < self.config.gpu.len());
        by_number.or_else(|| self.config.gpu.iter().position(|gpu| gpu.uuid == name))
    }

    /// The UUID of a unit.
    pub fn uuid(&self, unit: &Unit) -> &str {
        let gpu = &self.config.gpu[unit.gpu];
        unit.mig.map_or(&gpu.uuid, |mig| &gpu.mig[mig].uuid)
    }

    /// Whether the device node of a GPU in `dev` is one that this process's container was given.
    pub fn is_visible(&self, gpu: usize, dev: &Path) -> bool {
        let node = dev.join(format!("nvidia{}", self.config.gpu[gpu].minor));
        crate::folder::is_device_allowed(&node)
    }

    /// Appends a line to the log, as far as that is possible.
    pub fn log(&self, line: &str) {
        use std::io::Write as _;
        if let Ok(mut log) = File::options().append(true).open(self.folder.log()) {
            let _ = log.write_all(format!("{} {line}\n", std::process::id()).as_bytes());
        }
    }

    /// The place of the `n`th XID.
    pub(crate) fn xid_slot(n: u32) -> usize {
        n as usize % MAX_XIDS
    }
}

fn units(config: &Config) -> Vec<Unit> {
    let mut units = Vec::new();
    for (gpu, card) in config.gpu.iter().enumerate() {
        units.push(Unit {
            index: units.len(),
            gpu,
            mig: None,
            total: card.memory,
        });
        for (mig, instance) in card.mig.iter().enumerate() {
            units.push(Unit {
                index: units.len(),
                gpu,
                mig: Some(mig),
                total: instance.memory,
            });
        }
    }
    units
}
