//! Calls the CUDA driver.
//!
//! The dynamic loader chooses `libcuda.so.1`: the shim in a container with a GPU memory quota, the
//! simulated driver on a test machine. The library is opened once, at the first use. Error codes
//! stay integers, because a newer driver has codes that an enum would not. Functions that some
//! drivers lack are optional.
//!
//! The safe functions cannot break Rust's rules for host memory. A device address is a number. A
//! wrong one makes the driver refuse a call or a kernel fault, and a fault poisons the process
//! image (F1 in `docs/internals/facts.md`). The functions of [`raw`], a launch and a host's view
//! are unsafe, because they write or read at an address that may be the host's.
#![allow(
    unsafe_code,
    reason = "the crate's one way to the driver; each block says why it is sound"
)]

mod context;
mod copy;
mod device;
mod host_view;
#[cfg(feature = "cudarc-interop")]
pub mod interop;
mod kernel;
mod linear;
mod managed;
mod module;
pub mod raw;
mod stream;
mod table;
mod vmm;

pub use bursar_protocol::gpu_uuid::{GpuUuid, InvalidUuid};
pub use context::{Context, ContextGuard};
pub use device::Device;
pub use host_view::HostView;
pub use kernel::{Kernel, Parameter, Spin};
pub use linear::LINEAR_ALIGNMENT;
pub use managed::{Advice, Attach, Location, Residency};
pub use module::{Function, Grid, Module};
pub use stream::{Event, Stream, StreamKey};
pub use vmm::{Access, Handle, Mapping, Reservation};

use std::ffi::CStr;
use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use bursar_protocol::fence::QuotaFn;

use crate::error::{self, CudaError, ErrorClass, ResourceError};
use crate::state::ErrorMonitor;
use table::Table;

/// Reason for which the driver cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriverError {
    /// The loader cannot open `libcuda.so.1`, or the library lacks a function that every driver
    /// since CUDA 11.4 has.
    #[error(
        "failed to load the CUDA driver: {0}; install NVIDIA's driver or run in a container with a GPU"
    )]
    NoDriver(String),
    /// A call of the driver failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The GPU's resource failed to start.
    #[error(transparent)]
    Resource(#[from] ResourceError),
    /// No device has this ordinal.
    #[error(
        "failed to find device {ordinal}: this process sees {count} devices; pass a lower ordinal"
    )]
    NoSuchDevice {
        /// Requested ordinal.
        ordinal: u32,
        /// Number of devices.
        count: u32,
    },
    /// This process sees no device with this UUID.
    #[error("failed to find {0}: this process does not see it; check the container's GPUs")]
    NoSuchGpu(GpuUuid),
}

impl DriverError {
    /// Returns the class of the failure.
    pub fn class(&self) -> ErrorClass {
        match self {
            DriverError::Cuda(error) => error.class(),
            DriverError::Resource(error) => error.class(),
            DriverError::NoDriver(_)
            | DriverError::NoSuchDevice { .. }
            | DriverError::NoSuchGpu(_) => ErrorClass::Caller,
        }
    }

    /// Returns whether the same call may succeed later in this process image.
    pub fn retryable(&self) -> bool {
        self.class().retryable()
    }
}

/// Loaded and initialised driver.
pub struct Driver {
    table: Table,
    /// Reads the quota of a device; `None` outside of a container with the shim.
    quota: Option<QuotaFn>,
}

/// Names the driver without its hundred addresses, because handles and devices contain it.
impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Driver")
    }
}

static LOADED: OnceLock<Result<Driver, String>> = OnceLock::new();

impl Driver {
    /// Returns the driver of this process. The first call opens the library; `cuInit` is retried
    /// until it succeeds.
    ///
    /// # Errors
    /// [`DriverError::NoDriver`], or the error of `cuInit`.
    pub fn get() -> Result<&'static Driver, DriverError> {
        static READY: AtomicBool = AtomicBool::new(false);
        let driver = LOADED
            .get_or_init(|| {
                let table = table::load()?;
                if let Some(fence) = table.fence() {
                    ErrorMonitor::global().set_fence_fn(fence);
                }
                if let Some(generation) = table.process_generation() {
                    ErrorMonitor::global().set_process_generation_fn(generation);
                }
                error::set_error_name_fn(error_name);
                let quota = table.quota();
                Ok(Driver { table, quota })
            })
            .as_ref()
            .map_err(|reason| DriverError::NoDriver(reason.clone()))?;
        if !READY.load(Ordering::Acquire) {
            // SAFETY: several threads may call `cuInit`, and repeatedly.
            check("cuInit", unsafe { (driver.table.cuInit)(0) })?;
            READY.store(true, Ordering::Release);
        }
        Ok(driver)
    }

    /// Returns the CUDA version that the driver reports: 13000 is 13.0.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn version(&self) -> Result<i32, CudaError> {
        let mut version = 0;
        // SAFETY: the pointer is valid for the call.
        check("cuDriverGetVersion", unsafe {
            (self.table.cuDriverGetVersion)(&raw mut version)
        })?;
        Ok(version)
    }

    /// Returns whether [`Device::quota`] changes when the agent changes the container's quota.
    pub fn quota_follows_agent(&self) -> bool {
        self.quota.is_some()
    }

    fn table(&self) -> &Table {
        &self.table
    }
}

/// Returns the driver's name of a code, if a loaded driver knows the code.
fn error_name(code: i32) -> Option<String> {
    let driver = LOADED.get()?.as_ref().ok()?;
    let mut text = std::ptr::null();
    // SAFETY: the pointer is valid for the call, and every code is permitted.
    let answer = unsafe { (driver.table.cuGetErrorName)(code, &raw mut text) };
    if answer != 0 || text.is_null() {
        return None;
    }
    // SAFETY: the text is static in the driver.
    let text = unsafe { CStr::from_ptr(text) };
    Some(text.to_string_lossy().into_owned())
}

/// Converts the code of a call to a result, and reports a failure to the error monitor.
fn check(call: &'static str, code: i32) -> Result<(), CudaError> {
    match code {
        0 => Ok(()),
        code => {
            ErrorMonitor::global().observe(code, probe);
            Err(CudaError { call, code })
        }
    }
}

/// Calls a function that does not wait and that returns earlier sticky errors.
fn probe() -> i32 {
    let Some(Ok(driver)) = LOADED.get() else {
        return 0;
    };
    let (mut free, mut total) = (0, 0);
    // SAFETY: the pointers are valid for the call.
    unsafe { (driver.table.cuMemGetInfo_v2)(&raw mut free, &raw mut total) }
}

/// Calls a function of the table by its name and checks its code.
macro_rules! call {
    ($driver:expr, $name:ident($($argument:expr),* $(,)?)) => {
        $crate::driver::check(
            stringify!($name),
            // SAFETY: the table has the prototypes of cuda.h; the callers pass valid arguments.
            unsafe { ($driver.table().$name)($($argument),*) },
        )
    };
}
use call;
