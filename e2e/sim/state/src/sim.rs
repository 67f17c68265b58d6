//! Opens a simulated machine and reads and sets the state of its GPUs.

use crate::config::{Config, ConfigError};
use crate::folder::MachineDir;
use crate::table::{MAX_XIDS, Table, TableError};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Interval at which a hanging call checks whether it was released.
pub(crate) const HANG_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A simulated machine, opened by this process.
#[derive(Debug)]
pub struct Sim {
    /// The machine's directory.
    pub folder: MachineDir,
    /// The configuration, read when the machine was opened.
    pub config: Config,
    /// GPUs, each followed by its MIG instances; memory is accounted per unit.
    pub units: Vec<Unit>,
    pub(crate) table: Table,
    /// Queries images' locks. Holds no lock itself, so that a forked child may share it.
    pub(crate) images_lock: File,
    /// Queries images' pids. Never closed, because a close would drop this process's own lock.
    pub(crate) pids_lock: std::mem::ManuallyDrop<File>,
    pub(crate) namespace: u64,
}

/// A GPU or a MIG instance.
#[derive(Debug, Clone)]
pub struct Unit {
    /// Position in [`Sim::units`].
    pub index: usize,
    /// Position in [`Config::gpu`].
    pub gpu: usize,
    /// Position among that GPU's instances; `None` for a whole GPU.
    pub mig: Option<usize>,
    /// The memory in bytes.
    pub total: u64,
}

/// Reasons why a simulated machine cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// The configuration was refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The table is not usable.
    #[error(transparent)]
    Table(#[from] TableError),
    /// A system call on a lock file or an allocation's file failed.
    #[error("failed to {step} {path}")]
    Io {
        /// The step that failed.
        step: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The unit has less free memory than requested.
    #[error("out of memory on unit {unit}: {wanted} bytes requested, {free} free")]
    OutOfMemory {
        /// The unit.
        unit: usize,
        /// The requested bytes.
        wanted: u64,
        /// The free bytes.
        free: u64,
    },
    /// The table has no free slot.
    #[error("failed to use a slot of the table: all {0} are in use")]
    TableFull(usize),
    /// The collector reused this image's slot, because the program closed the image's descriptors.
    #[error("the process image is no longer registered: the program closed its descriptors")]
    ImageCollected,
    /// The descriptor or id belongs to no allocation.
    #[error("the descriptor or id belongs to no allocation")]
    NotAnObject,
}

impl Sim {
    /// Opens a directory that `simgpu init` laid out.
    ///
    /// # Errors
    /// The directory is not laid out, or its configuration no longer parses.
    pub fn open(path: &Path) -> Result<Sim, SimError> {
        let folder = MachineDir::at(path);
        let config = Config::read(&folder.config())?;
        let at = |step, path: PathBuf| move |source| SimError::Io { step, path, source };
        let open = |path: PathBuf| crate::lock::open(&path).map_err(at("open", path));
        let namespace =
            crate::lock::pid_namespace().map_err(at("read", "/proc/self/ns/pid".into()))?;
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

    /// Whether the driver zeroes freed memory.
    pub fn is_scrub_enabled(&self) -> bool {
        self.table.raw().scrub.load(Relaxed) != 0
    }

    /// Switches the zeroing of freed memory.
    pub fn set_scrub_enabled(&self, on: bool) {
        self.table.raw().scrub.store(u32::from(on), Relaxed);
    }

    /// Refuses the next evictions of managed memory: the allocations that need them fail.
    pub fn refuse_evictions(&self, count: u32) {
        let table = self.table.lock();
        table.raw().evictions_to_refuse.store(count, Relaxed);
    }

    /// The number of evictions that are still to be refused.
    pub fn evictions_to_refuse(&self) -> u32 {
        self.table.raw().evictions_to_refuse.load(Relaxed)
    }

    /// Sets how many milliseconds the eviction of a GiB of managed memory takes.
    pub fn set_eviction_delay(&self, milliseconds: u32) {
        let delay = &self.table.raw().eviction_delay;
        delay.store(milliseconds, Relaxed);
    }

    /// Takes the time of an eviction. The caller has released the table's lock.
    pub(crate) fn wait_for_eviction(&self, bytes: u64) {
        let per_gib = self.table.raw().eviction_delay.load(Relaxed);
        let per_gib = Duration::from_millis(per_gib.into());
        std::thread::sleep(per_gib.mul_f64(bytes as f64 / f64::from(1 << 30)));
    }

    /// Whether a unit's GPU has fallen off the bus; a MIG instance is lost with its GPU.
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

    /// The number of calls of `cuCtx*`, `cuDevicePrimaryCtx*` and `cuGreenCtx*` so far, in all
    /// processes.
    pub fn context_calls(&self) -> u64 {
        self.table.raw().context_calls.load(Relaxed)
    }

    /// Counts a call of a context function.
    pub fn count_context_call(&self) {
        self.table.raw().context_calls.fetch_add(1, Relaxed);
    }

    fn hung_flag(&self, gpu: Option<usize>) -> &AtomicU32 {
        let raw = self.table.raw();
        gpu.map_or(&raw.hung, |gpu| &raw.units[self.gpu_unit(gpu)].hung)
    }

    /// Whether NVML's calls hang: those about a GPU, or with `None` those that name no GPU.
    pub fn is_hung(&self, gpu: Option<usize>) -> bool {
        self.hung_flag(gpu).load(Relaxed) != 0
    }

    /// Makes NVML's calls hang or return: those about a GPU, or with `None` those that name no GPU.
    pub fn set_hung(&self, gpu: Option<usize>, hung: bool) {
        self.hung_flag(gpu).store(u32::from(hung), Relaxed);
    }

    /// Blocks while NVML's calls hang: those about a GPU, or with `None` those that name no GPU.
    pub fn wait_while_hung(&self, gpu: Option<usize>) {
        while self.is_hung(gpu) {
            std::thread::sleep(HANG_POLL_INTERVAL);
        }
    }

    /// The unit of a whole GPU.
    pub fn gpu_unit(&self, gpu: usize) -> usize {
        self.config.gpu[..gpu]
            .iter()
            .map(|gpu_config| 1 + gpu_config.mig.len())
            .sum()
    }

    /// Finds a GPU by position or UUID.
    pub fn find_gpu(&self, name: &str) -> Option<usize> {
        let by_number = name.parse().ok().filter(|gpu| *gpu < self.config.gpu.len());
        by_number.or_else(|| self.config.gpu.iter().position(|gpu| gpu.uuid == name))
    }

    /// The UUID of a GPU or MIG instance.
    pub fn uuid(&self, unit: &Unit) -> &str {
        let gpu = &self.config.gpu[unit.gpu];
        unit.mig.map_or(&gpu.uuid, |mig| &gpu.mig[mig].uuid)
    }

    /// Whether `dev` has the GPU's device node and this container may open it.
    pub fn is_visible(&self, gpu: usize, dev: &Path) -> bool {
        let node = dev.join(format!("nvidia{}", self.config.gpu[gpu].minor));
        crate::folder::is_device_allowed(&node)
    }

    /// Appends a line to the log; a failure is ignored.
    pub fn log(&self, line: &str) {
        use std::io::Write as _;
        if let Ok(mut log) = File::options().append(true).open(self.folder.log()) {
            let _ = log.write_all(format!("{} {line}\n", std::process::id()).as_bytes());
        }
    }

    /// The slot of the `n`th XID in the ring.
    pub(crate) fn xid_slot(n: u32) -> usize {
        n as usize % MAX_XIDS
    }
}

fn units(config: &Config) -> Vec<Unit> {
    let mut units = Vec::new();
    for (gpu, gpu_config) in config.gpu.iter().enumerate() {
        units.push(Unit {
            index: units.len(),
            gpu,
            mig: None,
            total: gpu_config.memory,
        });
        for (mig, instance) in gpu_config.mig.iter().enumerate() {
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
