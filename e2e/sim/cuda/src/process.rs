//! Holds the driver's state in this process image, from `cuInit` to `execve`.
//!
//! The entry points reach their tables through the process image; no table reaches the image.

use bursar_sim_state::rm::{self, ContextGroups, RmClient};
use bursar_sim_state::{Image, Sim, xid::Xid};

use crate::abi::Code;
use crate::granularity::{CHUNK, is_piece};
use crate::tables::address_space::{AddressSpace, AllocationKind};
use crate::tables::arrays::Arrays;
use crate::tables::captures::Captures;
use crate::tables::chunks::Chunks;
use crate::tables::contexts::Contexts;
use crate::tables::devices::{Device, visible_devices};
use crate::tables::graphs::Graphs;
use crate::tables::libraries::Libraries;
use crate::tables::modules::Modules;
use crate::tables::multicasts::Multicasts;
use crate::tables::pools::Pools;
use crate::tables::residency::Residency;
use crate::tables::streams::Streams;
use crate::tables::vmm::Vmm;
use std::fs::File;
use std::os::fd::IntoRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// The process image. A thread that takes two of its locks takes `vmm` before `space`.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) sim: Arc<Sim>,
    pub(crate) image: Image,
    pub(crate) devices: Vec<Device>,
    pub(crate) contexts: Mutex<Contexts>,
    pub(crate) space: Mutex<AddressSpace>,
    pub(crate) arrays: Mutex<Arrays>,
    pub(crate) graphs: Mutex<Graphs>,
    pub(crate) streams: Mutex<Streams>,
    pub(crate) pools: Mutex<Pools>,
    pub(crate) vmm: Mutex<Vmm>,
    pub(crate) multicasts: Mutex<Multicasts>,
    pub(crate) modules: Mutex<Modules>,
    pub(crate) libraries: Mutex<Libraries>,
    pub(crate) captures: Mutex<Captures>,
    pub(crate) residency: Mutex<Residency>,
    pub(crate) chunks: Mutex<Chunks>,
    /// The client of the kernel module, if the machine has one.
    rm: Option<Mutex<RmClient>>,
    pid: u32,
    /// The sticky error; 0 for none. Only `execve` clears it (F1 in docs/internals/facts.md).
    sticky: AtomicI32,
}

static PROCESS: OnceLock<Process> = OnceLock::new();
static INIT_LOCK: Mutex<()> = Mutex::new(());

/// Locks a mutex. A poisoned value stays usable, because entry points catch panics.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The machine's directory: `SIMGPU_DIR`, or `/run/simgpu`.
pub(crate) fn machine_dir() -> PathBuf {
    std::env::var_os("SIMGPU_DIR").map_or_else(|| "/run/simgpu".into(), PathBuf::from)
}

/// The directory of device nodes: `SIMGPU_DEV`, or `/dev`.
pub(crate) fn device_dir() -> PathBuf {
    std::env::var_os("SIMGPU_DEV").map_or_else(|| "/dev".into(), PathBuf::from)
}

/// Opens and maps the control node until the process ends; a failure is ignored. Returns the open
/// file.
///
/// A real `cuInit` does so with the control node and the GPUs' nodes (seen on an H200 with driver
/// 580).
fn map_control_node(node: &Path) -> Option<File> {
    let file = File::open(node).ok()?;
    let own = file.try_clone().ok();
    let descriptor = file.into_raw_fd();
    // SAFETY: the kernel chooses the address of the new mapping, which nothing reads.
    unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ,
            libc::MAP_PRIVATE,
            descriptor,
            0,
        )
    };
    own
}

/// Makes a client of the machine's kernel module; none without one. The memory of this image then
/// lives as long as the control file, also by a duplicate, and the GPUs' nodes stay open.
fn begin_rm_client(
    control: File,
    image: &Image,
    sim: &Sim,
    devices: &[Device],
) -> Option<RmClient> {
    let client = RmClient::over(control, rm::FIRST_OBJECT).ok()?;
    if let Err(error) = image.live_as_long_as(&client) {
        sim.log(&format!("memory ends with the process: {error}"));
    }
    for device in devices {
        let minor = sim.config.gpu[sim.units[device.unit].gpu].minor;
        let node = File::open(device_dir().join(format!("nvidia{minor}")));
        std::mem::forget(node);
    }
    Some(client)
}

/// Initialises the driver, once per process image.
pub(crate) fn init_driver() -> Result<(), Code> {
    let _one = lock(&INIT_LOCK);
    if PROCESS.get().is_none() {
        let process = Process::new()?;
        // The lock guarantees that no other thread has set it.
        let _ = PROCESS.set(process);
    }
    process().map(|_| ())
}

/// The process image, if this process called `cuInit` itself.
///
/// # Errors
/// Only the parent process called `cuInit`, or no process did.
pub(crate) fn process() -> Result<&'static Process, Code> {
    let process = PROCESS.get().ok_or(Code::NOT_INITIALIZED)?;
    if process.pid == std::process::id() {
        Ok(process)
    } else {
        Err(Code::NOT_INITIALIZED)
    }
}

/// The process image, if it has no sticky error.
pub(crate) fn healthy_process() -> Result<&'static Process, Code> {
    let process = process()?;
    process.check_sticky_error()?;
    Ok(process)
}

impl Process {
    fn new() -> Result<Process, Code> {
        if !device_dir().join("nvidiactl").exists() {
            return Err(Code::NO_DEVICE);
        }
        let sim = Sim::open(&machine_dir()).map_err(|error| {
            eprintln!("simulated libcuda: {error}");
            Code::from(error)
        })?;
        for gpu in &sim.config.gpu {
            bursar_sim_state::folder::create_gpu_node(&device_dir(), gpu.minor);
        }
        let devices = visible_devices(
            &sim,
            &device_dir(),
            std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref(),
        );
        if devices.is_empty() {
            return Err(Code::NO_DEVICE);
        }
        for device in &devices {
            if let Some(code) = bursar_sim_state::init_fault::check(&sim, device.unit) {
                return Err(Code(code));
            }
        }
        let sim = Arc::new(sim);
        let image = Image::register(&sim)?;
        let control = map_control_node(&device_dir().join("nvidiactl"));
        let rm = control.and_then(|file| begin_rm_client(file, &image, &sim, &devices));
        Ok(Process {
            pools: Mutex::new(Pools::new(devices.len())),
            contexts: Mutex::new(Contexts::new(devices.len())),
            space: Mutex::default(),
            arrays: Mutex::default(),
            graphs: Mutex::default(),
            streams: Mutex::default(),
            vmm: Mutex::default(),
            multicasts: Mutex::default(),
            modules: Mutex::default(),
            libraries: Mutex::default(),
            captures: Mutex::default(),
            residency: Mutex::default(),
            chunks: Mutex::default(),
            rm: rm.map(Mutex::new),
            pid: std::process::id(),
            sticky: AtomicI32::new(0),
            sim,
            image,
            devices,
        })
    }

    /// Moves the managed memory of a range to a unit, as an access of the unit does.
    pub(crate) fn populate_managed(&self, unit: usize, address: u64, len: u64) {
        let found = lock(&self.space).find_containing(address);
        let Some((base, found)) = found.filter(|(_, found)| found.kind == AllocationKind::Managed)
        else {
            return;
        };
        let len = len.min(found.len - (address - base));
        let base = if is_piece(found.len) {
            base - base % CHUNK
        } else {
            base
        };
        lock(&self.chunks).populate(&self.image, unit, base, address, len);
    }

    /// Makes a context's channel groups; none without a kernel module.
    pub(crate) fn create_groups(&self, device: usize) -> Result<Option<ContextGroups>, Code> {
        let Some(client) = &self.rm else {
            return Ok(None);
        };
        let made = lock(client).create_context(&self.gpu_config(device).uuid);
        made.map(Some).map_err(|error| {
            self.sim.log(&format!("no channel group: {error}"));
            Code::UNKNOWN
        })
    }

    /// Frees a context's channel groups.
    pub(crate) fn destroy_groups(&self, groups: Option<&ContextGroups>) {
        if let (Some(client), Some(groups)) = (&self.rm, groups) {
            let freed = lock(client).destroy_context(groups);
            freed.unwrap_or_else(|error| self.sim.log(&format!("a group stays: {error}")));
        }
    }

    /// Gives work to the group of a context that runs kernels. Returns all work that the group was
    /// given; none without a kernel module.
    pub(crate) fn submit_work(&self, context: u64, nanos: u64) -> Result<Option<u64>, Code> {
        let (Some(client), Some(groups)) = (&self.rm, self.context(context)?.groups) else {
            return Ok(None);
        };
        let submitted = lock(client).submit(groups.computing, nanos);
        submitted.map(Some).map_err(|_| Code::UNKNOWN)
    }

    /// Whether a context's group has done this much of its work. A group that has ended has.
    pub(crate) fn has_done(&self, context: u64, work: u64) -> bool {
        if work == 0 {
            return true;
        }
        let groups = self
            .context(context)
            .ok()
            .and_then(|context| context.groups);
        let (Some(client), Some(groups)) = (&self.rm, groups) else {
            return true;
        };
        let done = lock(client).progress(groups.computing);
        done.is_err() || done.is_ok_and(|done| done >= work)
    }

    /// Fails with the sticky error, if there is one.
    pub(crate) fn check_sticky_error(&self) -> Result<(), Code> {
        let injected = self.image.injected();
        if injected != 0 {
            let _ = self.sticky.compare_exchange(0, injected, Relaxed, Relaxed);
        }
        match self.sticky.load(Relaxed) {
            0 => Ok(()),
            code => Err(Code(code)),
        }
    }

    /// Sets the image's sticky error and raises the XID, like a kernel fault on the device.
    pub(crate) fn poison(&self, device: usize, code: Code, xid: u32) {
        if self
            .sticky
            .compare_exchange(0, code.0, Relaxed, Relaxed)
            .is_ok()
        {
            self.sim.raise_xid(Xid {
                unit: self.devices[device].unit,
                code: xid,
                pid: self.pid,
            });
        }
    }

    /// Fails if the device fell off the bus.
    pub(crate) fn check_present(&self, device: usize) -> Result<(), Code> {
        if self.sim.is_lost(self.devices[device].unit) {
            Err(Code::DEVICE_UNAVAILABLE)
        } else {
            Ok(())
        }
    }
}
