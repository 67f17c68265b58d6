//! A trampoline for every function that the shim does not hook: of libcuda's, and of NVML's, whose shim
//! has this module too.
//!
//! Each is two instructions: its index into a scratch register that the calling convention gives to
//! linkage code, and a jump through its slot. A slot leads to [`lazy`] until the first call, which
//! asks the real library for the function, keeps every argument register as it was, and goes on
//! there. So no prototype is needed, and arguments of any shape pass through.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::codes;

/// Where each trampoline jumps.
static SLOTS: [AtomicPtr<c_void>; COUNT] =
    [const { AtomicPtr::new(lazy as *const () as *mut c_void) }; COUNT];

/// The real function at `index`; `None` if this driver lacks it or cannot be loaded.
#[inline]
pub(crate) fn real(index: usize) -> Option<*mut c_void> {
    let slot = SLOTS.get(index)?;
    let known = slot.load(Ordering::Acquire);
    let found = if known == lazy as *const () as *mut c_void {
        resolve(index)
    } else {
        known
    };
    let stubs = [
        missing as *const () as *mut c_void,
        unloadable as *const () as *mut c_void,
    ];
    (!stubs.contains(&found)).then_some(found)
}

/// Finds the function at `index` and fills its slot. Threads that race find the same.
#[cold]
extern "C" fn resolve(index: usize) -> *mut c_void {
    let found = match (crate::real::library(), NAMES.get(index)) {
        (Some(library), Some(name)) => library
            .symbol(name)
            .unwrap_or(missing as *const () as *mut c_void),
        _ => unloadable as *const () as *mut c_void,
    };
    if let Some(slot) = SLOTS.get(index) {
        slot.store(found, Ordering::Release);
    }
    found
}

/// A function that this driver lacks.
extern "C" fn missing() -> codes::Code {
    codes::MISSING
}

/// Any function while the real library cannot be opened.
extern "C" fn unloadable() -> codes::Code {
    codes::UNLOADABLE
}

#[cfg(target_arch = "x86_64")]
macro_rules! forward {
    ($name:ident, $index:literal) => {
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name() {
            core::arch::naked_asm!(
                "mov r11d, {index}",
                "jmp qword ptr [rip + {slots} + {offset}]",
                index = const $index,
                offset = const $index * 8,
                slots = sym SLOTS,
            )
        }
    };
}

#[cfg(target_arch = "x86_64")]
at_first_call!(lazy, resolve);

#[cfg(target_arch = "aarch64")]
macro_rules! forward {
    ($name:ident, $index:literal) => {
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name() {
            core::arch::naked_asm!(
                "adrp x16, {slots}",
                "add x16, x16, :lo12:{slots}",
                "mov x17, {index}",
                "ldr x16, [x16, x17, lsl #3]",
                "br x16",
                index = const $index,
                slots = sym SLOTS,
            )
        }
    };
}

/// First call of a function: its index is in x17 (AAPCS64: x16 and x17 are linkage code's own).
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
unsafe extern "C" fn lazy() {
    core::arch::naked_asm!(
        "stp x29, x30, [sp, #-224]!",
        "mov x29, sp",
        "stp x0, x1, [sp, #16]",
        "stp x2, x3, [sp, #32]",
        "stp x4, x5, [sp, #48]",
        "stp x6, x7, [sp, #64]",
        "str x8, [sp, #80]",
        "stp q0, q1, [sp, #96]",
        "stp q2, q3, [sp, #128]",
        "stp q4, q5, [sp, #160]",
        "stp q6, q7, [sp, #192]",
        "mov x0, x17",
        "bl {resolve}",
        "mov x16, x0",
        "ldp x0, x1, [sp, #16]",
        "ldp x2, x3, [sp, #32]",
        "ldp x4, x5, [sp, #48]",
        "ldp x6, x7, [sp, #64]",
        "ldr x8, [sp, #80]",
        "ldp q0, q1, [sp, #96]",
        "ldp q2, q3, [sp, #128]",
        "ldp q4, q5, [sp, #160]",
        "ldp q6, q7, [sp, #192]",
        "ldp x29, x30, [sp], #224",
        "br x16",
        resolve = sym resolve,
    )
}

/// A variable of the driver, which debuggers look for. It is the shim's own and stays zero: no
/// debugger of the driver attaches through it.
macro_rules! variable {
    ($name:ident, $size:literal) => {
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals)]
        static $name: crate::forward::Variable<$size> = crate::forward::Variable::zero();
    };
}

/// Writable bytes for whoever finds them by name.
#[repr(C, align(8))]
struct Variable<const N: usize>(std::cell::UnsafeCell<[u8; N]>);

impl<const N: usize> Variable<N> {
    const fn zero() -> Variable<N> {
        Variable(std::cell::UnsafeCell::new([0; N]))
    }
}

// SAFETY: no code here reads or writes it.
unsafe impl<const N: usize> Sync for Variable<N> {}

/// A function that answers NOT_SUPPORTED: the table says why.
macro_rules! refuse {
    ($name:ident) => {
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> codes::CuResult {
            codes::NOT_SUPPORTED
        }
    };
}

#[allow(non_snake_case, non_upper_case_globals)]
mod generated {
    use super::*;
    include!(concat!(env!("OUT_DIR"), "/forwarders.rs"));
}
pub(crate) use generated::{COUNT, NAMES, index};
