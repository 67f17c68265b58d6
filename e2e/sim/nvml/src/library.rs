//! Opens the machine in the first `nvmlInit` and closes the nodes in the last `nvmlShutdown`.

use bursar_sim_state::{Sim, Unit};

use crate::abi::{Code, NvmlResult, exports};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The machine and the device nodes that this process opened.
#[derive(Debug)]
pub(crate) struct Library {
    pub(crate) sim: Sim,
    dev: PathBuf,
    /// The opened nodes, by the GPU's minor number.
    ///
    /// NVML opens a GPU's node with its first handle, and closes all nodes in the last
    /// `nvmlShutdown`.
    nodes: Mutex<BTreeMap<u32, File>>,
}

/// The library and the number of `nvmlInit` calls.
///
/// The machine stays open after the last `nvmlShutdown`: closing `pids.lock` would drop this
/// process's lock on its pid.
static LIBRARY: Mutex<(Option<Arc<Library>>, u32)> = Mutex::new((None, 0));

/// The opened library.
pub(crate) fn library() -> Result<Arc<Library>, Code> {
    let state = LIBRARY.lock().unwrap_or_else(PoisonError::into_inner);
    let library = match &*state {
        (Some(library), 1..) => Arc::clone(library),
        _ => return Err(Code::UNINITIALIZED),
    };
    drop(state);
    library.sim.wait_while_hung(None);
    Ok(library)
}

fn init() -> NvmlResult {
    let mut state = LIBRARY.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = std::env::var_os("SIMGPU_DIR").map_or_else(|| "/run/simgpu".into(), PathBuf::from);
    let dev = std::env::var_os("SIMGPU_DEV").map_or_else(|| "/dev".into(), PathBuf::from);
    if !dev.join("nvidiactl").exists() {
        return Err(Code::DRIVER_NOT_LOADED);
    }
    let other = |library: &Arc<Library>| library.sim.folder.path() != folder || library.dev != dev;
    if state.1 == 0 && state.0.as_ref().is_none_or(other) {
        let sim = Sim::open(&folder).map_err(|error| {
            eprintln!("simulated libnvidia-ml: {error}");
            Code::DRIVER_NOT_LOADED
        })?;
        state.0 = Some(Arc::new(Library {
            sim,
            dev,
            nodes: Mutex::default(),
        }));
    }
    state.1 += 1;
    drop(state);
    library().map(drop)
}

fn shutdown() -> NvmlResult {
    let mut state = LIBRARY.lock().unwrap_or_else(PoisonError::into_inner);
    state.1 = state.1.checked_sub(1).ok_or(Code::UNINITIALIZED)?;
    if let (Some(library), 0) = &*state {
        library.nodes().clear();
    }
    Ok(())
}

impl Library {
    fn nodes(&self) -> MutexGuard<'_, BTreeMap<u32, File>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the node of a unit's GPU, if it exists; waits first while the GPU hangs.
    ///
    /// The node is opened with `O_PATH`, because no driver serves its device number.
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

    /// Whole GPUs with an accessible node, in order.
    pub(crate) fn gpus(&self) -> Vec<&Unit> {
        let whole = self.sim.units.iter().filter(|unit| unit.mig.is_none());
        whole
            .filter(|unit| self.sim.is_visible(unit.gpu, &self.dev))
            .collect()
    }

    /// GPUs and MIG instances with an accessible node.
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
