//! Exports the driver's functions and variables that have no hook. Both shims, libcuda's and
//! NVML's, compile this module.
//!
//! The build scripts generate a line for each symbol from the shim's table: `symbols.txt` of
//! libcuda, `nvml-symbols.txt` of NVML. The macros `variable` and `refuse` are below, `forward` and
//! `watch` in [`crate::trampoline`].
//!
//! The shim passes the errors of a `watch` line's function to `poison`, which calls the driver
//! through [`crate::forward`]. So this module imports `forward`, and not the other way round.

use crate::forward::SLOTS;

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

/// Exports a function that returns NOT_SUPPORTED. The head of `symbols.txt` says why; NVML's table
/// refuses no function.
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
