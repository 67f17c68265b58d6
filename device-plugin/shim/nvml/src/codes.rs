//! The answers that the shim gives itself. Source: `nvmlReturn_t` in nvml.h.

/// An answer of NVML. An integer: newer drivers have codes that no list here knows.
pub(crate) type Code = u32;

pub(crate) const SUCCESS: Code = 0;
pub(crate) const INVALID_ARGUMENT: Code = 2;
pub(crate) const NOT_SUPPORTED: Code = 3;
pub(crate) const NO_PERMISSION: Code = 4;
pub(crate) const NOT_FOUND: Code = 6;
pub(crate) const INSUFFICIENT_SIZE: Code = 7;
pub(crate) const ARGUMENT_VERSION_MISMATCH: Code = 25;
pub(crate) const UNKNOWN: Code = 999;

/// The answer of a function that this driver lacks: FUNCTION_NOT_FOUND.
pub(crate) const MISSING: Code = 13;
/// The answer of any function while the real library cannot be opened: LIBRARY_NOT_FOUND.
pub(crate) const UNLOADABLE: Code = 12;
