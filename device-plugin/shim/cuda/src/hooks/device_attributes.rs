//! Hides that a device can access all host memory.
//!
//! With HMM or ATS a kernel may use memory of `malloc`, which the driver then moves to the device.
//! No call allocates it, so no quota can hold it. Programs and libraries ask for these attributes
//! before they rely on it, and use memory that is charged otherwise.
#![allow(non_snake_case)]

use std::ffi::c_int;

use super::hooks;
use crate::curesult;

/// `CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS`, and
/// `..._PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES`.
const PAGEABLE_ACCESS: [c_int; 2] = [88, 100];

hooks! {
    /// `cuDeviceGetAttribute` (CUDA 2.0).
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) = |driver_call| {
        let answer = driver_call(value, attribute, device);
        if answer == curesult::SUCCESS && PAGEABLE_ACCESS.contains(&attribute) && !value.is_null() {
            // SAFETY: not null, and the driver has just written it.
            unsafe { value.write(0) };
        }
        answer
    };
}
