//! Finds the unwinder when a panic needs it, so that the library needs no `libgcc_s.so.1` to be loaded.
//!
//! The loader ends a program that has a preloaded library with a dependency that is not there, and images
//! without C++ lack this one. The standard library's calls of the unwinder come here instead: hidden
//! functions that go on to the real ones, which are looked up at the first of them. Where the image has
//! no unwinder, a panic cannot be caught, and ends the process; nothing in the library is known to panic.
//!
//! Functions: those that the `unwind` crate of the standard library declares, by the Itanium C++ ABI.

#![cfg(all(target_arch = "x86_64", target_env = "gnu", not(test)))]

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

const NAMES: [&CStr; 15] = [
    c"_Unwind_RaiseException",
    c"_Unwind_Resume",
    c"_Unwind_DeleteException",
    c"_Unwind_Backtrace",
    c"_Unwind_GetLanguageSpecificData",
    c"_Unwind_GetRegionStart",
    c"_Unwind_GetTextRelBase",
    c"_Unwind_GetDataRelBase",
    c"_Unwind_GetIP",
    c"_Unwind_GetIPInfo",
    c"_Unwind_SetIP",
    c"_Unwind_SetGR",
    c"_Unwind_GetGR",
    c"_Unwind_GetCFA",
    c"_Unwind_FindEnclosingFunction",
];

/// `_Unwind_Resume`'s place: it must not return.
const RESUME: usize = 1;

/// `_URC_END_OF_STACK`: nobody catches it.
const END_OF_STACK: c_int = 5;

/// Where each function goes on to: first to the search for it.
static FUNCTIONS: [AtomicPtr<c_void>; NAMES.len()] =
    [const { AtomicPtr::new(find as *mut c_void) }; NAMES.len()];

extern "C" fn absent() -> c_int {
    END_OF_STACK
}

/// The real function, from now on at its place.
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

/// First call of a function, whose index is in r11. The stack is as its caller left it when it goes on,
/// for an unwinder begins with its own caller.
#[unsafe(naked)]
unsafe extern "C" fn find() {
    core::arch::naked_asm!(
        "push rbp",
        "mov rbp, rsp",
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "mov rdi, r11",
        "call {resolve}",
        "mov r11, rax",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "pop rbp",
        "jmp r11",
        resolve = sym resolve,
    )
}

core::arch::global_asm!(
    ".macro bursar_unwinder name, index",
    ".globl \\name",
    ".hidden \\name",
    ".type \\name, @function",
    "\\name:",
    "mov r11d, \\index",
    "jmp qword ptr [rip + {functions} + 8 * \\index]",
    ".endm",
    ".text",
    "bursar_unwinder _Unwind_RaiseException, 0",
    "bursar_unwinder _Unwind_Resume, 1",
    "bursar_unwinder _Unwind_DeleteException, 2",
    "bursar_unwinder _Unwind_Backtrace, 3",
    "bursar_unwinder _Unwind_GetLanguageSpecificData, 4",
    "bursar_unwinder _Unwind_GetRegionStart, 5",
    "bursar_unwinder _Unwind_GetTextRelBase, 6",
    "bursar_unwinder _Unwind_GetDataRelBase, 7",
    "bursar_unwinder _Unwind_GetIP, 8",
    "bursar_unwinder _Unwind_GetIPInfo, 9",
    "bursar_unwinder _Unwind_SetIP, 10",
    "bursar_unwinder _Unwind_SetGR, 11",
    "bursar_unwinder _Unwind_GetGR, 12",
    "bursar_unwinder _Unwind_GetCFA, 13",
    "bursar_unwinder _Unwind_FindEnclosingFunction, 14",
    functions = sym FUNCTIONS,
);
