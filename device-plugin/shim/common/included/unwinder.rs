//! Finds the unwinder when a panic needs it, so that the library does not depend on
//! `libgcc_s.so.1`.
//!
//! The loader ends a program whose preloaded library has a missing dependency, and images without
//! C++ lack this one. The standard library's unwinder calls reach the hidden functions here, which
//! look the real ones up at the first call. Where the image has no unwinder, a panic cannot be
//! caught and ends the process; no code of the library is known to panic.
//!
//! The functions are those that the standard library's `unwind` crate declares, by the Itanium C++
//! ABI.

#![cfg(all(target_arch = "x86_64", target_env = "gnu", not(test)))]

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use bursar_shim_common::at_first_call;

/// The index of `_Unwind_Resume`, which must not return.
const RESUME: usize = 1;

/// `_URC_END_OF_STACK`: no frame catches the exception.
const END_OF_STACK: c_int = 5;

/// Where each function jumps: to the lookup at first.
static FUNCTIONS: [AtomicPtr<c_void>; NAMES.len()] =
    [const { AtomicPtr::new(find as *mut c_void) }; NAMES.len()];

extern "C" fn absent() -> c_int {
    END_OF_STACK
}

/// Looks up the real function and stores its address.
extern "C" fn resolve(index: usize) -> *mut c_void {
    let real = NAMES.get(index).map_or(std::ptr::null_mut(), |name| {
        // SAFETY: both names end with a zero, and opening the unwinder runs no code but its own.
        unsafe {
            let library = libc::dlopen(c"libgcc_s.so.1".as_ptr(), libc::RTLD_NOW);
            if library.is_null() {
                std::ptr::null_mut()
            } else {
                libc::dlsym(library, name.as_ptr())
            }
        }
    });
    let function = match (real.is_null(), index) {
        (false, _) => real,
        (true, RESUME) => libc::abort as *mut c_void,
        (true, _) => absent as *mut c_void,
    };
    if let Some(place) = FUNCTIONS.get(index) {
        place.store(function, Ordering::Release);
    }
    function
}

// An unwinder starts at its own caller, so the stack must be as the caller left it when the real
// function runs.
at_first_call!(find, resolve);

/// Declares hidden functions of these names, each a jump through its slot.
macro_rules! unwinder {
    ($($name:ident = $index:literal),* $(,)?) => {
        const NAMES: &[&CStr] = &[$(
            match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a name without a zero"),
            },
        )*];

        core::arch::global_asm!(
            ".text",
            $(
                concat!(".globl ", stringify!($name)),
                concat!(".hidden ", stringify!($name)),
                concat!(".type ", stringify!($name), ", @function"),
                concat!(stringify!($name), ":"),
                concat!("mov r11d, ", $index),
                concat!("jmp qword ptr [rip + {functions} + 8 * ", $index, "]"),
            )*
            functions = sym FUNCTIONS,
        );
    };
}

unwinder! {
    _Unwind_RaiseException = 0,
    _Unwind_Resume = 1,
    _Unwind_DeleteException = 2,
    _Unwind_Backtrace = 3,
    _Unwind_GetLanguageSpecificData = 4,
    _Unwind_GetRegionStart = 5,
    _Unwind_GetTextRelBase = 6,
    _Unwind_GetDataRelBase = 7,
    _Unwind_GetIP = 8,
    _Unwind_GetIPInfo = 9,
    _Unwind_SetIP = 10,
    _Unwind_SetGR = 11,
    _Unwind_GetGR = 12,
    _Unwind_GetCFA = 13,
    _Unwind_FindEnclosingFunction = 14,
}
