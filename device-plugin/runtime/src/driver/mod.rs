//! The CUDA driver as this crate calls it.
//!
//! The library is `libcuda.so.1` as the loader finds it: in a container of ours that is the shim, on a test machine the
//! simulated driver. It is opened at the first use, once. Codes come back as integers, for a newer driver has
//! codes that an enum of today has not; functions that not every driver has are optional, each by itself.
//!
//! What is safe here cannot break Rust's rules for memory of the host. Device addresses are numbers: a wrong one
//! makes the driver refuse a call, or a kernel fault, which poisons the process image (design F1). What writes or reads
//! by an address, which may be the host's, is [`raw`].
#![allow(
    unsafe_code,
    reason = "the crate's one way to the driver; each block says why it is sound"
)]

mod context;
mod copy;
mod device;
mod host_view;
mod kernel;
mod linear;
mod managed;
mod module;
pub mod raw;
mod stream;
mod table;
mod vmm;

pub use context::{Context, ContextGuard};
pub use device::{Device, GpuUuid, InvalidUuid};
pub(crate) use host_view::HostView;
pub use kernel::{Kernel, Parameter};
pub use linear::LINEAR_ALIGNMENT;
pub use managed::{Advice, Attach, Location, Residency};
pub use module::{Function, Grid, Module};
pub use stream::{Event, Stream, StreamKey};
pub use vmm::{Access, Handle, Mapping, Reservation};

use std::ffi::CStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{CudaError, ResourceError};
use crate::state::ErrorMonitor;
use table::Table;

/// Why there is no driver to call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriverError {
    /// `libcuda.so.1` cannot be opened, or lacks a function that every driver since CUDA 11.4 has.
    #[error("no CUDA driver: {0}; install NVIDIA's driver, or run in a container with a GPU")]
    NoDriver(String),
    /// The driver is there and a call failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The GPU's resource did not start.
    #[error(transparent)]
    Resource(#[from] ResourceError),
    /// No device has this ordinal.
    #[error("there is no device {ordinal}: this process sees {count}")]
    NoSuchDevice {
        /// The ordinal that was asked for.
        ordinal: u32,
        /// How many devices there are.
        count: u32,
    },
    /// No device that this process sees has this UUID.
    #[error("this process does not see {0}")]
    NoSuchGpu(GpuUuid),
}

/// The driver, loaded and initialised.
#[derive(Debug)]
pub struct Driver {
    table: Table,
}

static LOADED: OnceLock<Result<Driver, String>> = OnceLock::new();

impl Driver {
    /// The driver of this process. The library is opened at the first call, once; `cuInit` is tried until it succeeds.
    ///
    /// # Errors
    /// [`DriverError::NoDriver`], or what `cuInit` answered.
    pub fn get() -> Result<&'static Driver, DriverError> {
        static READY: AtomicBool = AtomicBool::new(false);
        let driver = LOADED
            .get_or_init(|| {
                let table = table::load()?;
                if let Some(fence) = table.fence() {
                    ErrorMonitor::global().set_fence_fn(fence);
                }
                Ok(Driver { table })
            })
            .as_ref()
            .map_err(|reason| DriverError::NoDriver(reason.clone()))?;
        if !READY.load(Ordering::Acquire) {
            // SAFETY: `cuInit` may be called by several threads, and again.
            check("cuInit", unsafe { (driver.table.cuInit)(0) })?;
            READY.store(true, Ordering::Release);
        }
        Ok(driver)
    }

    /// The CUDA version of the driver as it says it: 13000 is 13.0.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn version(&self) -> Result<i32, CudaError> {
        let mut version = 0;
        // SAFETY: the pointer is good for the call.
        check("cuDriverGetVersion", unsafe {
            (self.table.cuDriverGetVersion)(&raw mut version)
        })?;
        Ok(version)
    }

    fn table(&self) -> &Table {
        &self.table
    }
}

/// The driver's name of a code, where a driver is loaded and knows it.
pub(crate) fn error_name(code: i32) -> Option<String> {
    let driver = LOADED.get()?.as_ref().ok()?;
    let mut text = std::ptr::null();
    // SAFETY: the pointer is good for the call; any code may be asked for.
    let answer = unsafe { (driver.table.cuGetErrorName)(code, &raw mut text) };
    if answer != 0 || text.is_null() {
        return None;
    }
    // SAFETY: the driver's own static text.
    let text = unsafe { CStr::from_ptr(text) };
    Some(text.to_string_lossy().into_owned())
}

/// The result of a call; a code that poisons the image is seen here, whoever asked.
fn check(call: &'static str, code: i32) -> Result<(), CudaError> {
    match code {
        0 => Ok(()),
        code => {
            ErrorMonitor::global().observe(code, probe);
            Err(CudaError { call, code })
        }
    }
}

/// Asks the driver something that waits for nothing and tells of earlier errors.
fn probe() -> i32 {
    let Some(Ok(driver)) = LOADED.get() else {
        return 0;
    };
    let (mut free, mut total) = (0, 0);
    // SAFETY: the pointers are good for the call.
    unsafe { (driver.table.cuMemGetInfo_v2)(&raw mut free, &raw mut total) }
}

/// Calls a function of the table by its name.
macro_rules! call {
    ($driver:expr, $name:ident($($argument:expr),* $(,)?)) => {
        $crate::driver::check(
            stringify!($name),
            // SAFETY: the table has the prototypes of cuda.h; the module's functions say why the arguments are good.
            unsafe { ($driver.table().$name)($($argument),*) },
        )
    };
}
use call;
