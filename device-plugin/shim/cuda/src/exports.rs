//! Exports the driver's functions and variables that have no hook.
//!
//! The build script generates a line for each symbol from `symbols.txt`. The macros `variable` and
//! `refuse` are below, `forward` and `watch` in the crate that both shims use.
//!
//! The shim passes the errors of a `watch` line's function to `poison`, which calls the driver
//! through [`crate::forward`]. So this module imports `forward`, and not the other way round.

use bursar_shim_common::{forward, watch};

use crate::forward::FUNCTIONS;

/// Exports a variable of the driver that debuggers look for. The shim's copy stays zero, so no
/// debugger attaches to the driver through it.
macro_rules! variable {
    ($name:ident, $size:literal) => {
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals)]
        static $name: crate::exports::Variable<$size> = crate::exports::Variable::zero();
    };
}

/// Writable bytes for debuggers that look the variable up by name.
#[repr(C, align(8))]
struct Variable<const N: usize>(std::cell::UnsafeCell<[u8; N]>);

impl<const N: usize> Variable<N> {
    const fn zero() -> Variable<N> {
        Variable(std::cell::UnsafeCell::new([0; N]))
    }
}

// SAFETY: no code here reads or writes it.
unsafe impl<const N: usize> Sync for Variable<N> {}

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
