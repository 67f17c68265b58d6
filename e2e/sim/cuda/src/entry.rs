//! Declares entry points: catches panics at the API's boundary and lists every exported function.

use crate::abi::{Code, DriverResult};
use crate::process::process;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The families of functions that create, change or use a context by name. The simulated machine
/// counts their calls, so that a test can see that a process makes none.
const CONTEXT_FUNCTIONS: [&str; 3] = ["cuCtx", "cuDevicePrimaryCtx", "cuGreenCtx"];

/// Runs an entry point's body, and turns a panic into `CUDA_ERROR_UNKNOWN`.
pub(crate) fn call(name: &'static str, body: impl FnOnce() -> DriverResult) -> i32 {
    if CONTEXT_FUNCTIONS
        .iter()
        .any(|family| name.starts_with(family))
        && let Ok(process) = process()
    {
        process.sim.count_context_call();
    }
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(Code(code))) => code,
        Err(_) => Code::UNKNOWN.0,
    }
}

/// An exported function, for `cuGetProcAddress`.
#[derive(Debug)]
pub(crate) struct Export {
    pub(crate) name: &'static str,
    pub(crate) address: *const c_void,
}

// SAFETY: a function's address is constant.
unsafe impl Sync for Export {}

/// Declares entry points: exports each function and lists it in the module's `EXPORTS`.
macro_rules! exports {
    ($(fn $name:ident($($arg:ident: $kind:ty),* $(,)?) = $body:expr;)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "` of the CUDA driver API.")]
            #[unsafe(no_mangle)]
            pub extern "C" fn $name($($arg: $kind),*) -> i32 {
                $crate::entry::call(stringify!($name), || $body)
            }
        )*
        pub(crate) static EXPORTS: &[$crate::entry::Export] = &[
            $($crate::entry::Export { name: stringify!($name), address: $name as *const std::ffi::c_void },)*
        ];
    };
}
pub(crate) use exports;
