//! The opened machine: what `nvmlInit` makes and the last `nvmlShutdown` ends.

use crate::abi::{Code, NvmlResult, exports};
use bursar_sim_state::{Sim, Unit};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The machine and the GPUs of it that this process sees.
#[derive(Debug)]
pub(crate) struct Library {
    pub(crate) sim: Sim,
    dev: PathBuf,
    /// The device nodes of the GPUs that somebody asked for, by minor: NVML opens a GPU with its first handle, and
    /// closes all at its end.
    nodes: Mutex<BTreeMap<u32, File>>,
}

/// The library with the number of `nvmlInit` calls. A sim that was opened stays open: see
/// [`Sim::open`] on pids.
static LIBRARY: Mutex<(Option<Arc<Library>>, u32)> = Mutex::new((None, 0));

/// The opened library.
pub(crate) fn library() -> Result<Arc<Library>, Code> {
    let held = LIBRARY.lock().unwrap_or_else(PoisonError::into_inner);
    let library = match &*held {
        (Some(library), 1..) => Arc::clone(library),
        _ => return Err(Code::UNINITIALIZED),
    };
    drop(held);
    library.sim.wait_while_hung(None);
    Ok(library)
}

fn init() -> NvmlResult {
    let mut held = LIBRARY.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = std::env::var_os("SIMGPU_DIR").map_or_else(|| "/run/simgpu".into(), PathBuf::from);
    let dev = std::env::var_os("SIMGPU_DEV").map_or_else(|| "/dev".into(), PathBuf::from);
    if !dev.join("nvidiactl").exists() {
        return Err(Code::DRIVER_NOT_LOADED);
    }
    let other = |library: &Arc<Library>| library.sim.folder.path() != folder || library.dev != dev;
    if held.1 == 0 && held.0.as_ref().is_none_or(other) {
        let sim = Sim::open(&folder).map_err(|error| {
            eprintln!("simulated libnvidia-ml: {error}");
            Code::DRIVER_NOT_LOADED
        })?;
        held.0 = Some(Arc::new(Library {
            sim,
            dev,
            nodes: Mutex::default(),
        }));
    }
    held.1 += 1;
    drop(held);
    library().map(drop)
}

fn shutdown() -> NvmlResult {
    let mut held = LIBRARY.lock().unwrap_or_else(PoisonError::into_inner);
    held.1 = held.1.checked_sub(1).ok_or(Code::UNINITIALIZED)?;
    if let (Some(library), 0) = &*held {
        library.nodes().clear();
    }
    Ok(())
}

impl Library {
    fn nodes(&self) -> MutexGuard<'_, BTreeMap<u32, File>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Holds the GPU of a unit from now on, as far as its node is there. Its number has no driver behind it, so the
    /// node is held by its path. A GPU that hangs is not opened before it is released.
    pub(crate) fn open_device_node(&self, unit: &Unit) {
        self.sim.wait_while_hung(Some(unit.gpu));
        let minor = self.sim.config.gpu[unit.gpu].minor;
        let node = self.dev.join(format!("nvidia{minor}"));
        let by_path = File::options()
            .read(true)
            .custom_flags(libc::O_PATH)
            .open(node);
        if let (Entry::Vacant(place), Ok(node)) = (self.nodes().entry(minor), by_path) {
            place.insert(node);
        }
    }

    /// Whole GPUs whose device node is there, in order.
    pub(crate) fn gpus(&self) -> Vec<&Unit> {
        let whole = self.sim.units.iter().filter(|unit| unit.mig.is_none());
        whole
            .filter(|unit| self.sim.is_visible(unit.gpu, &self.dev))
            .collect()
    }

    /// GPUs and instances whose device node is there.
    pub(crate) fn units(&self) -> impl Iterator<Item = &Unit> {
        self.sim
            .units
            .iter()
            .filter(|unit| self.sim.is_visible(unit.gpu, &self.dev))
    }
}

exports! {
    fn nvmlInit() = init();
    fn nvmlInit_v2() = init();
    fn nvmlInitWithFlags(_flags: u32) = init();
    fn nvmlShutdown() = shutdown();
}
