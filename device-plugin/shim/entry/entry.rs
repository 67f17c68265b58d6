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

use generated::{COUNT, NAMES, SHIM, STARTS, UNLOADABLE};
pub use variable::Variable;

/// The function that each export jumps to, null before its first call.
///
/// The table is in the file, like the exported variables: the loader maps it, and would have to ask
/// the kernel for empty pages otherwise. No process reads a page of it before it calls the driver.
#[unsafe(link_section = ".data")]
static SLOTS: [AtomicPtr<c_void>; COUNT] = [const { AtomicPtr::new(core::ptr::null_mut()) }; COUNT];

/// The handle of the open shim, or null.
#[unsafe(link_section = ".data")]
static OPENED: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());

/// Runs in every program, so it does nothing in all but one of a container. The linker makes it
/// `DT_INIT`, because the loader would write into a page of its own for `.init_array`.
#[unsafe(no_mangle)]
extern "C" fn bursar_on_load() {
    if loader::process_id() == 1 {
        open_shim();
    }
}

/// Returns the shim's handle, or null while it cannot be opened.
fn open_shim() -> *mut c_void {
    let opened = OPENED.load(Ordering::Acquire);
    if !opened.is_null() {
        return opened;
    }
    let opened = loader::open(SHIM);
    OPENED.store(opened, Ordering::Release);
    opened
}

// Every slot's first call comes here.
at_first_call!(lazy_resolve, resolve);

/// Looks up the shim's function at `index` and fills its slot. Threads that race find the same
/// address. While the shim cannot be opened, each call tries again.
extern "C" fn resolve(index: usize) -> *mut c_void {
    let shim = open_shim();
    let (Some(slot), Some(start)) = (SLOTS.get(index), STARTS.get(index)) else {
        return unloadable as *mut c_void;
    };
    if shim.is_null() {
        return unloadable as *mut c_void;
    }
    let name = NAMES.as_ptr().wrapping_add(usize::from(*start));
    let mut found = loader::symbol(shim, name.cast());
    if found.is_null() {
        // The image's shim is of another build.
        found = unloadable as *mut c_void;
    }
    slot.store(found, Ordering::Release);
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
