//! Forwards the functions of a driver's library to the real one. The shims of libcuda and NVML
//! are built on it.
//!
//! A shim exports a trampoline for each function ([`forward!`], [`watch!`]). A trampoline jumps
//! through the function's slot in the shim's table ([`Functions`]).
//!
//! Beside this crate's source are the files that the shims compile themselves, and why:
//!
//! * `included/`: the linker takes hidden symbols from a crate's archive only if they are missing
//!   by then, and the standard library, which they serve, is linked after the crates.
//! * `build/`: parts of the build scripts, and `tests/support/`: parts of the tests. This crate
//!   has neither the scripts' standard output nor the tests' dependencies.

mod forward;
mod library;
mod trampoline;
mod variable;

pub use forward::Functions;
pub use library::Library;
pub use variable::Variable;
