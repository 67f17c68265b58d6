//! Looks up the real library's functions, each at its first call.

use std::ffi::{CStr, c_void};

use bursar_shim_common::{Functions, at_first_call};

use crate::driver;

/// The real library's functions, through which the trampolines jump.
pub(crate) static FUNCTIONS: Functions<COUNT> = Functions::new(
    &NAMES,
    driver::library,
    lazy_resolve as *mut c_void,
    driver::missing as *mut c_void,
    driver::unloadable as *mut c_void,
);

extern "C" fn resolve(index: usize) -> *mut c_void {
    FUNCTIONS.resolve(index)
}

// Every slot's first call comes here.
at_first_call!(lazy_resolve, resolve);

include!(concat!(env!("OUT_DIR"), "/function_table.rs"));
