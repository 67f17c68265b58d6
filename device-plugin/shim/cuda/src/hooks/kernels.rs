//! Charges kernels' local memory when the program gets a function's handle, because it may then
//! launch it.
#![allow(non_snake_case)]

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint};

use super::{context_registry, hooks};
use crate::accounting::Denied;
use crate::curesult::{self, CuResult};
use crate::driver_calls::{current_device, device_count, driver};

/// `CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES`.
const ATTR_LOCAL_SIZE_BYTES: c_int = 3;

/// The most local memory of some kernels on each device, in bytes a thread.
type LocalMemory = BTreeMap<c_int, u64>;

/// Adds the local memory of a function, on the current context's device.
fn add_function(handle: u64, needed: &mut LocalMemory) {
    let Ok(device) = current_device() else {
        return;
    };
    let mut bytes = 0;
    let code = driver!(cuFuncGetAttribute(
        &raw mut bytes => *mut c_int, ATTR_LOCAL_SIZE_BYTES => c_int, handle => u64,
    ));
    add(code, device, bytes, needed);
}

/// Adds the local memory of a kernel, which can be launched on any device.
fn add_kernel(handle: u64, needed: &mut LocalMemory) {
    for device in 0..device_count() {
        let mut bytes = 0;
        let code = driver!(cuKernelGetAttribute(
            &raw mut bytes => *mut c_int, ATTR_LOCAL_SIZE_BYTES => c_int, handle => u64, device => c_int,
        ));
        add(code, device, bytes, needed);
    }
}

fn add(code: CuResult, device: c_int, bytes: c_int, needed: &mut LocalMemory) {
    if let (curesult::SUCCESS, Ok(bytes)) = (code, u64::try_from(bytes)) {
        let most = needed.entry(device).or_default();
        *most = bytes.max(*most);
    }
}

/// Charges the handles that the driver wrote, all of them or none. Where that is denied, overwrites
/// them with zeros.
///
/// # Safety
/// If `answer` is success, `handles` is null or points to `count` handles.
unsafe fn charge_loaded(
    answer: CuResult,
    handles: *mut u64,
    count: c_uint,
    function: &str,
    add: impl Fn(u64, &mut LocalMemory),
) -> CuResult {
    if answer != curesult::SUCCESS || handles.is_null() || count == 0 {
        return answer;
    }
    // SAFETY: the caller guarantees it.
    let handles = unsafe { std::slice::from_raw_parts_mut(handles, count as usize) };
    let mut needed = LocalMemory::new();
    for handle in &*handles {
        add(*handle, &mut needed);
    }
    match context_registry::kernels_loaded(&needed, function) {
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
        unsafe { charge_loaded(answer, out, 1, "cuModuleGetFunction", add_function) }
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
            charge_loaded(answer, out, count.min(room), "cuModuleEnumerateFunctions", add_function)
        }
    };

    /// `cuKernelGetFunction` (CUDA 12.0).
    fn cuKernelGetFunction(out: *mut u64, kernel: u64) = |driver_call| {
        let answer = driver_call(out, kernel);
        // SAFETY: the driver has just written one handle.
        unsafe { charge_loaded(answer, out, 1, "cuKernelGetFunction", add_function) }
    };

    /// `cuLibraryGetKernel` (CUDA 12.0). A kernel can be launched as it is.
    fn cuLibraryGetKernel(out: *mut u64, library: u64, name: *const c_char) = |driver_call| {
        let answer = driver_call(out, library, name);
        // SAFETY: the driver has just written one.
        unsafe { charge_loaded(answer, out, 1, "cuLibraryGetKernel", add_kernel) }
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
            charge_loaded(answer, out, count.min(room), "cuLibraryEnumerateKernels", add_kernel)
        }
    };
}
