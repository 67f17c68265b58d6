//! Implements the NVML functions that report memory and processes.
//!
//! Each hook calls the real library before anything else and returns its errors. Examples are a
//! missing initialization, a missing device or an unknown version of a structure. What the real
//! library says of memory and processes reaches no caller.
#![allow(non_snake_case, reason = "the functions have NVML's names")]

mod accounting;
mod memory;
mod processes;
mod utilization;

use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::agent_client::{self, Usage};
use crate::nvml_return::{self, NvmlReturn};

/// `nvmlDevice_t`.
type Device = *mut c_void;

type HookResult = Result<(), NvmlReturn>;

/// Long enough for every UUID: `NVML_DEVICE_UUID_V2_BUFFER_SIZE`.
const UUID_SIZE: u32 = 96;

/// Runs a hook, and turns a panic into an error code.
fn guarded(hook: impl FnOnce() -> HookResult) -> NvmlReturn {
    match catch_unwind(AssertUnwindSafe(hook)) {
        Ok(Ok(())) => nvml_return::SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => nvml_return::UNKNOWN,
    }
}

/// Calls the real library's function: `driver!(name(value => type, ...))`.
macro_rules! driver {
    ($name:ident($($value:expr => $kind:ty),* $(,)?)) => {
        match $crate::forward::FUNCTIONS.get($crate::forward::index::$name) {
            // SAFETY: the prototype is that of nvml.h, and all pointers outlive the call.
            Some(function) => unsafe {
                let function = std::mem::transmute::<
                    *mut std::ffi::c_void,
                    unsafe extern "C" fn($($kind),*) -> $crate::nvml_return::NvmlReturn,
                >(function);
                function($($value),*)
            },
            None => $crate::hooks::missing_code(),
        }
    };
}
use driver;

/// Returns the code for a missing function, or for a missing driver.
fn missing_code() -> NvmlReturn {
    match crate::driver::library() {
        Some(_) => crate::driver::missing(),
        None => crate::driver::unloadable(),
    }
}

fn check(code: NvmlReturn) -> HookResult {
    if code == nvml_return::SUCCESS {
        Ok(())
    } else {
        Err(code)
    }
}

/// Accepts the result of a list query without a buffer.
fn check_count_query(code: NvmlReturn) -> HookResult {
    match code {
        nvml_return::SUCCESS | nvml_return::INSUFFICIENT_SIZE => Ok(()),
        code => Err(code),
    }
}

/// Returns the structure behind a program's pointer.
fn deref<'a, T>(pointer: *mut T) -> Result<&'a mut T, NvmlReturn> {
    // SAFETY: null, or by the function's contract a structure that only the caller uses.
    unsafe { pointer.as_mut() }.ok_or(nvml_return::INVALID_ARGUMENT)
}

/// Returns the device's UUID, as NVML prints it.
fn uuid(device: Device) -> Result<String, NvmlReturn> {
    let mut text = [0_u8; UUID_SIZE as usize];
    check(driver!(nvmlDeviceGetUUID(
        device => Device,
        text.as_mut_ptr().cast() => *mut c_char,
        UUID_SIZE => u32,
    )))?;
    let end = text.iter().position(|byte| *byte == 0);
    let text = end.and_then(|end| std::str::from_utf8(text.get(..end)?).ok());
    text.map(str::to_owned).ok_or(nvml_return::UNKNOWN)
}

/// Returns the container's quota and usage of the device.
fn usage(device: Device) -> Result<Usage, NvmlReturn> {
    agent_client::usage(&uuid(device)?)
}

/// Describes a code. Without a driver the shim knows one text only.
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(code: NvmlReturn) -> *const c_char {
    let Some(function) = crate::forward::FUNCTIONS.get(crate::forward::index::nvmlErrorString)
    else {
        return c"NVML Shared Library Not Found".as_ptr();
    };
    // SAFETY: the prototype is that of nvml.h.
    unsafe {
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(NvmlReturn) -> *const c_char>(
            function,
        )(code)
    }
}
