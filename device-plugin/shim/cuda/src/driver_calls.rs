//! Calls the real driver's functions, for the hooks and for every module below them.
//!
//! * [`captures`] keeps these calls from invalidating stream captures
//! * [`context_ids`] finds ids of contexts
//! * [`streams`] finds ids and devices of streams

pub(crate) mod captures;
pub(crate) mod context_ids;
pub(crate) mod streams;

use std::ffi::c_int;

use bursar_protocol::gpu_uuid::GpuUuid;

use crate::curesult::{self, CuResult};
use crate::forward::{self, index};

/// Calls the real function. A missing function returns the code of its trampoline.
macro_rules! driver {
    ($name:ident($($argument:expr => $kind:ty),* $(,)?)) => {
        match $crate::forward::FUNCTIONS.get($crate::forward::index::$name) {
            // SAFETY: the prototype is that of cuda.h, and the arguments are the program's own or
            // point to locals of the right type.
            Some(function) => unsafe {
                std::mem::transmute::<
                    *mut std::ffi::c_void,
                    unsafe extern "C" fn($($kind),*) -> $crate::curesult::CuResult,
                >(function)($($argument),*)
            },
            None => $crate::curesult::NOT_SUPPORTED,
        }
    };
}
pub(crate) use driver;

/// Returns the ordinal of the calling thread's current device.
pub(crate) fn current_device() -> Result<c_int, CuResult> {
    let mut device = 0;
    match driver!(cuCtxGetDevice(&raw mut device => *mut c_int)) {
        curesult::SUCCESS => Ok(device),
        code => Err(code),
    }
}

/// Returns the number of devices that the driver shows to this process.
pub(crate) fn device_count() -> c_int {
    let mut count = 0;
    match driver!(cuDeviceGetCount(&raw mut count => *mut c_int)) {
        curesult::SUCCESS => count,
        _ => 0,
    }
}

/// Returns a device's UUID: the MIG instance's own UUID from CUDA 11.4 on.
pub(crate) fn device_uuid(device: c_int) -> Option<GpuUuid> {
    let mut uuid = [0; 16];
    let code = match forward::FUNCTIONS.get(index::cuDeviceGetUuid_v2) {
        Some(_) => driver!(cuDeviceGetUuid_v2(uuid.as_mut_ptr() => *mut u8, device => c_int)),
        None => driver!(cuDeviceGetUuid(uuid.as_mut_ptr() => *mut u8, device => c_int)),
    };
    (code == curesult::SUCCESS).then_some(GpuUuid::from_bytes(uuid))
}
