//! The functions of NVML that tell about memory and processes.
//!
//! Each asks the real library first, and passes on what that refuses: whether it was started, the device
//! exists and answers, and the structure's version is one that it knows. What it says of memory and
//! processes goes to no caller.
#![allow(non_snake_case, reason = "the functions have NVML's names")]

mod accounting;
mod memory;
mod processes;
mod utilization;

use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::codes::{self, Code};
use crate::container::{self, Usage};

/// `nvmlDevice_t`.
type Device = *mut c_void;

/// How a hook ends.
type Answer = Result<(), Code>;

/// Long enough for every UUID: `NVML_DEVICE_UUID_V2_BUFFER_SIZE`.
const UUID_SIZE: u32 = 96;

/// Runs a hook; no panic leaves the library.
fn hooked(hook: impl FnOnce() -> Answer) -> Code {
    match catch_unwind(AssertUnwindSafe(hook)) {
        Ok(Ok(())) => codes::SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => codes::UNKNOWN,
    }
}

/// Calls the real library's function: `real!(name(value => type, ...))`.
macro_rules! real {
    ($name:ident($($value:expr => $kind:ty),* $(,)?)) => {
        match $crate::forward::real($crate::forward::index::$name) {
            // SAFETY: the prototype is that of nvml.h, and what is pointed to lives through the call.
            Some(function) => unsafe {
                let function = std::mem::transmute::<
                    *mut std::ffi::c_void,
                    unsafe extern "C" fn($($kind),*) -> $crate::codes::Code,
                >(function);
                function($($value),*)
            },
            None => $crate::hooks::absent(),
        }
    };
}
use real;

/// What a function answers that the driver lacks, or that lacks a driver.
fn absent() -> Code {
    match crate::real::library() {
        Some(_) => codes::MISSING,
        None => codes::UNLOADABLE,
    }
}

fn succeeded(code: Code) -> Answer {
    if code == codes::SUCCESS {
        Ok(())
    } else {
        Err(code)
    }
}

/// The answer to a list that was asked for without room.
fn permitted(code: Code) -> Answer {
    match code {
        codes::SUCCESS | codes::INSUFFICIENT_SIZE => Ok(()),
        code => Err(code),
    }
}

/// The structure behind a pointer that a program gave.
fn given<'a, T>(pointer: *mut T) -> Result<&'a mut T, Code> {
    // SAFETY: null, or by the function's contract a structure of the caller that nobody else uses.
    unsafe { pointer.as_mut() }.ok_or(codes::INVALID_ARGUMENT)
}

/// The device's UUID, as NVML prints it.
fn uuid(device: Device) -> Result<String, Code> {
    let mut text = [0_u8; UUID_SIZE as usize];
    succeeded(real!(nvmlDeviceGetUUID(
        device => Device,
        text.as_mut_ptr().cast() => *mut c_char,
        UUID_SIZE => u32,
    )))?;
    let end = text.iter().position(|byte| *byte == 0);
    let text = end.and_then(|end| std::str::from_utf8(text.get(..end)?).ok());
    text.map(str::to_owned).ok_or(codes::UNKNOWN)
}

/// What the container may use of the device, and does.
fn usage(device: Device) -> Result<Usage, Code> {
    container::usage(&uuid(device)?)
}

/// What a code means; without a driver there is nobody to ask.
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(code: Code) -> *const c_char {
    let Some(function) = crate::forward::real(crate::forward::index::nvmlErrorString) else {
        return c"NVML Shared Library Not Found".as_ptr();
    };
    // SAFETY: the prototype is that of nvml.h.
    unsafe {
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(Code) -> *const c_char>(function)(
            code,
        )
    }
}
