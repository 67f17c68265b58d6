//! Exports the driver's functions and variables that have no hook.
//!
//! The build script generates a line for each symbol from `symbols.txt`. The macro `refuse` is
//! below, the others are in the crate that both shims use.
//!
//! The shim passes the errors of a `watch` line's function to `poison`, which calls the driver
//! through [`crate::forward`]. So this module imports `forward`, and not the other way round.

use bursar_shim_common::{forward, variable, watch};

use crate::forward::FUNCTIONS;

/// Exports a function that returns NOT_SUPPORTED. The head of `symbols.txt` says why.
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
    include!(concat!(env!("OUT_DIR"), "/exports.rs"));
}
