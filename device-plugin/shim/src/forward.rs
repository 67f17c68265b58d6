//! A trampoline for every function that the shim does not hook: of libcuda's, and of NVML's, whose shim
//! has this module too.
//!
//! Each ([`crate::trampoline`]) puts its index into a scratch register and jumps through its slot. A slot leads to [`lazy_resolve`] until the first call, which
//! asks the real library for the function, keeps every argument register as it was, and goes on
//! there. So no prototype is needed, and arguments of any shape pass through.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::driver;

/// Where each trampoline jumps.
static SLOTS: [AtomicPtr<c_void>; COUNT] =
    [const { AtomicPtr::new(lazy_resolve as *const () as *mut c_void) }; COUNT];

/// The real function at `index`; `None` if this driver lacks it or cannot be loaded.
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

// A function has an address in each unit that it is compiled into: what is compared is taken here, once.
static MISSING: AtomicPtr<c_void> = AtomicPtr::new(missing as *const () as *mut c_void);
static UNLOADABLE: AtomicPtr<c_void> = AtomicPtr::new(unloadable as *const () as *mut c_void);

/// Finds the function at `index` and fills its slot. Threads that race find the same.
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

/// A function that this driver lacks.
extern "C" fn missing() -> driver::Code {
    driver::MISSING
}

/// Any function while the real library cannot be opened.
extern "C" fn unloadable() -> driver::Code {
    driver::UNLOADABLE
}

// The way of every first call.
at_first_call!(lazy_resolve, resolve);

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
        extern "C" fn $name() -> crate::curesult::CuResult {
            crate::curesult::NOT_SUPPORTED
        }
    };
}

#[allow(non_snake_case, non_upper_case_globals)]
mod generated {
    use super::*;
    include!(concat!(env!("OUT_DIR"), "/forwarders.rs"));
}
pub(crate) use generated::{COUNT, NAMES, index};
