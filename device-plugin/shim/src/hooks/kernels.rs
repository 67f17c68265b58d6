//! Charges kernels' local memory when the program gets a function's handle, because it may then
//! launch it.
#![allow(non_snake_case)]

use std::ffi::{c_char, c_int, c_uint};

use super::{context_registry, hooks};
use crate::accounting::Denied;
use crate::curesult::{self, CuResult};
use crate::driver_calls::{current_device, device_count, driver};

/// `CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES`.
const ATTR_LOCAL_SIZE_BYTES: c_int = 3;

/// Charges the local memory of a function, on the current context's device.
fn charge_function(handle: u64, name: &str) -> Result<(), Denied> {
    let Ok(device) = current_device() else {
        return Ok(());
    };
    let mut bytes = 0;
    let code = driver!(cuFuncGetAttribute(
        &raw mut bytes => *mut c_int, ATTR_LOCAL_SIZE_BYTES => c_int, handle => u64,
    ));
    charge_local_memory(code, device, bytes, name)
}

/// Charges the local memory of a kernel, which can be launched on any device.
fn charge_kernel(handle: u64, name: &str) -> Result<(), Denied> {
    (0..device_count()).try_for_each(|device| {
        let mut bytes = 0;
        let code = driver!(cuKernelGetAttribute(
            &raw mut bytes => *mut c_int, ATTR_LOCAL_SIZE_BYTES => c_int, handle => u64, device => c_int,
        ));
        charge_local_memory(code, device, bytes, name)
    })
}

fn charge_local_memory(
    code: CuResult,
    device: c_int,
    bytes: c_int,
    name: &str,
) -> Result<(), Denied> {
    match u64::try_from(bytes) {
        Ok(bytes) if code == curesult::SUCCESS => {
            context_registry::kernel_loaded(device, bytes, name)
        }
        _ => Ok(()),
    }
}

/// Charges the handles that the driver wrote. Where that is denied, overwrites them with zeros.
///
/// # Safety
/// If `answer` is success, `handles` is null or points to `count` handles.
unsafe fn charge_loaded(
    answer: CuResult,
    handles: *mut u64,
    count: c_uint,
    charge: impl Fn(u64) -> Result<(), Denied>,
) -> CuResult {
    if answer != curesult::SUCCESS || handles.is_null() || count == 0 {
        return answer;
    }
    // SAFETY: the caller guarantees it.
    let handles = unsafe { std::slice::from_raw_parts_mut(handles, count as usize) };
    match handles.iter().try_for_each(|handle| charge(*handle)) {
        Ok(()) => answer,
        Err(Denied) => {
            handles.fill(0);
            curesult::OUT_OF_MEMORY
        }
    }
}

hooks! {
    /// `cuModuleGetFunction` (CUDA 2.0).
    fn cuModuleGetFunction(out: *mut u64, module: u64, name: *const c_char) = |driver_call| {
        let answer = driver_call(out, module, name);
        // SAFETY: the driver has just written one handle.
        unsafe { charge_loaded(answer, out, 1, |handle| charge_function(handle, "cuModuleGetFunction")) }
    };

    /// `cuModuleEnumerateFunctions` (CUDA 12.4).
    fn cuModuleEnumerateFunctions(out: *mut u64, room: c_uint, module: u64) = |driver_call| {
        let answer = driver_call(out, room, module);
        let mut count = 0;
        if driver!(cuModuleGetFunctionCount(&raw mut count => *mut c_uint, module => u64)) != curesult::SUCCESS {
            return answer;
        }
        // SAFETY: the driver has just written as many handles as there are, up to the caller's
        // capacity.
        unsafe {
            charge_loaded(answer, out, count.min(room), |handle| charge_function(handle, "cuModuleEnumerateFunctions"))
        }
    };

    /// `cuKernelGetFunction` (CUDA 12.0).
    fn cuKernelGetFunction(out: *mut u64, kernel: u64) = |driver_call| {
        let answer = driver_call(out, kernel);
        // SAFETY: the driver has just written one handle.
        unsafe { charge_loaded(answer, out, 1, |handle| charge_function(handle, "cuKernelGetFunction")) }
    };

    /// `cuLibraryGetKernel` (CUDA 12.0). A kernel can be launched as it is.
    fn cuLibraryGetKernel(out: *mut u64, library: u64, name: *const c_char) = |driver_call| {
        let answer = driver_call(out, library, name);
        // SAFETY: the driver has just written one.
        unsafe { charge_loaded(answer, out, 1, |handle| charge_kernel(handle, "cuLibraryGetKernel")) }
    };

    /// `cuLibraryEnumerateKernels` (CUDA 12.4).
    fn cuLibraryEnumerateKernels(out: *mut u64, room: c_uint, library: u64) = |driver_call| {
        let answer = driver_call(out, room, library);
        let mut count = 0;
        if driver!(cuLibraryGetKernelCount(&raw mut count => *mut c_uint, library => u64)) != curesult::SUCCESS {
            return answer;
        }
        // SAFETY: the driver has just written as many as there are, and as there is room for.
        unsafe {
            charge_loaded(answer, out, count.min(room), |handle| charge_kernel(handle, "cuLibraryEnumerateKernels"))
        }
    };
}
