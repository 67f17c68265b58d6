//! What every entry point goes through: no panic leaves the library, and every function is on one list.

use crate::abi::{Code, DriverResult};
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs an entry point's body.
pub(crate) fn call(body: impl FnOnce() -> DriverResult) -> i32 {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(Code(code))) => code,
        Err(_) => Code::UNKNOWN.0,
    }
}

/// A function of this library, for `cuGetProcAddress`.
#[derive(Debug)]
pub(crate) struct Export {
    pub(crate) name: &'static str,
    pub(crate) address: *const c_void,
}

// SAFETY: a function's address, which never changes.
unsafe impl Sync for Export {}

/// Declares entry points: each is exported under its name and put on the module's list `EXPORTS`.
macro_rules! exports {
    ($(fn $name:ident($($arg:ident: $kind:ty),* $(,)?) = $body:expr;)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "` of the CUDA driver API.")]
            #[unsafe(no_mangle)]
            pub extern "C" fn $name($($arg: $kind),*) -> i32 {
                $crate::entry::call(|| $body)
            }
        )*
        pub(crate) static EXPORTS: &[$crate::entry::Export] = &[
            $($crate::entry::Export { name: stringify!($name), address: $name as *const std::ffi::c_void },)*
        ];
    };
}
pub(crate) use exports;
