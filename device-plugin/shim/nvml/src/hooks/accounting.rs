//! Reports accounting as disabled: the driver's list names processes of all containers, exited ones
//! too.

use std::ffi::c_void;

use super::{Device, check, deref, driver, guarded};
use crate::nvml_return::{self, NvmlReturn};

/// `NVML_FEATURE_DISABLED`.
const DISABLED: u32 = 0;

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetAccountingMode(device: Device, mode: *mut u32) -> NvmlReturn {
    guarded(|| {
        check(driver!(nvmlDeviceGetAccountingMode(device => Device, mode => *mut u32)))?;
        *deref(mode)? = DISABLED;
        Ok(())
    })
}

// NVML returns this code while accounting is disabled.

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetAccountingPids(_: Device, _: *mut u32, _: *mut u32) -> NvmlReturn {
    nvml_return::NOT_SUPPORTED
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetAccountingStats(_: Device, _: u32, _: *mut c_void) -> NvmlReturn {
    nvml_return::NOT_SUPPORTED
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetAccountingStats_v2(_: Device, _: *mut c_void) -> NvmlReturn {
    nvml_return::NOT_SUPPORTED
}
