//! Looks up the real library's functions, each at its first call. Both shims, libcuda's and NVML's,
//! compile this module.
//!
//! Each trampoline ([`crate::trampoline`]) puts its index into a scratch register and jumps through
//! its slot. Until the first call a slot leads to [`lazy_resolve`], which looks the function up in
//! the real library, preserves every argument register and jumps there. So no prototype is needed,
//! and arguments of any shape pass through.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::driver;

/// Where each trampoline jumps.
pub(crate) static SLOTS: [AtomicPtr<c_void>; COUNT] =
    [const { AtomicPtr::new(lazy_resolve as *const () as *mut c_void) }; COUNT];

/// Returns the real function at `index`, or `None` if the driver lacks it or cannot be loaded.
#[inline]
pub(crate) fn driver_function(index: usize) -> Option<*mut c_void> {
    let slot = SLOTS.get(index)?;
    let known = slot.load(Ordering::Acquire);
    let found = if known == lazy_resolve as *const () as *mut c_void {
        resolve(index)
    } else {
        known
    };
    let stubs = [&MISSING, &UNLOADABLE].map(|stub| stub.load(Ordering::Relaxed));
    (!stubs.contains(&found)).then_some(found)
}

// A function may have an address in each codegen unit, so the compared addresses are taken here,
// once.
static MISSING: AtomicPtr<c_void> = AtomicPtr::new(missing as *const () as *mut c_void);
static UNLOADABLE: AtomicPtr<c_void> = AtomicPtr::new(unloadable as *const () as *mut c_void);

/// Looks up the function at `index` and fills its slot. Threads that race find the same address.
#[cold]
extern "C" fn resolve(index: usize) -> *mut c_void {
    let found = match (driver::library(), NAMES.get(index)) {
        (Some(library), Some(name)) => library
            .symbol(name)
            .unwrap_or_else(|| MISSING.load(Ordering::Relaxed)),
        _ => UNLOADABLE.load(Ordering::Relaxed),
    };
    if let Some(slot) = SLOTS.get(index) {
        slot.store(found, Ordering::Release);
    }
    found
}

/// Stands in for a function that this driver lacks.
extern "C" fn missing() -> driver::Code {
    driver::MISSING
}

/// Stands in for every function while the real library cannot be opened.
extern "C" fn unloadable() -> driver::Code {
    driver::UNLOADABLE
}

// Every slot's first call comes here.
at_first_call!(lazy_resolve, resolve);

mod generated {
    use super::*;
    include!(concat!(env!("OUT_DIR"), "/function_table.rs"));
}
pub(crate) use generated::{COUNT, NAMES, index};
