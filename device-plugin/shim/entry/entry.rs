//! Stands for a library of the driver in every program of a container, and opens its shim at the
//! first call.
//!
//! `/etc/ld.so.preload` makes each program of a container load what stands for the driver, also
//! the many that never use a GPU. So this library loads in a few microseconds: jumps through a
//! table, and no needed library but the C library. The shim (`bursar-shim`, `bursar-nvml-shim`)
//! may be as heavy as it needs to be.
//!
//! `bursar-node`'s build script compiles it, once for each library of the driver. The agent then
//! hides the functions that the node's driver lacks.
//!
//! The container's first process opens the shim of libcuda when it is loaded: that saves how the
//! program was started, which the program may change before its first call.

#![no_std]

mod loader;
#[path = "../common/src/trampoline.rs"]
mod trampoline;
#[path = "../common/src/variable.rs"]
mod variable;

use core::ffi::{CStr, c_int, c_void};
use core::sync::atomic::{AtomicPtr, Ordering};

use generated::{COUNT, NAMES, OPENS_AT_START, SHIM, STARTS, UNLOADABLE};
pub use variable::Variable;

/// The function that each export jumps to.
static SLOTS: [AtomicPtr<c_void>; COUNT] =
    [const { AtomicPtr::new(lazy_resolve as *mut c_void) }; COUNT];

/// The handle of the open shim, or null.
static OPENED: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());

#[used]
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = on_load;

/// Runs in every program, so it does nothing in all but one of a container.
extern "C" fn on_load() {
    if OPENS_AT_START && loader::process_id() == 1 {
        loader::open(SHIM);
    }
}

// Every slot's first call comes here.
at_first_call!(lazy_resolve, resolve);

/// Looks up the shim's function at `index` and fills its slot. Threads that race find the same
/// address. While the shim cannot be opened, each call tries again.
extern "C" fn resolve(index: usize) -> *mut c_void {
    let shim = match OPENED.load(Ordering::Acquire) {
        opened if opened.is_null() => loader::open(SHIM),
        opened => opened,
    };
    if shim.is_null() {
        return unloadable as *mut c_void;
    }
    OPENED.store(shim, Ordering::Release);
    let name = STARTS.get(index).map_or(NAMES.as_ptr(), |start| {
        NAMES.as_ptr().wrapping_add(usize::from(*start))
    });
    let found = match loader::symbol(shim, name.cast()) {
        // The image's shim is of another build.
        missing if missing.is_null() => unloadable as *mut c_void,
        found => found,
    };
    if let Some(slot) = SLOTS.get(index) {
        slot.store(found, Ordering::Release);
    }
    found
}

/// Stands in for a function that the shim does not have, and for each while it cannot be opened.
extern "C" fn unloadable() -> c_int {
    UNLOADABLE
}

/// Nothing here panics.
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[allow(non_snake_case, non_upper_case_globals)]
mod generated {
    use super::*;
    include!(env!("BURSAR_ENTRY"));
}
