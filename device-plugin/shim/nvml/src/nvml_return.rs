//! The answers that the shim gives itself. Source: `nvmlReturn_t` in nvml.h.

/// An answer of NVML. An integer: newer drivers have codes that no list here knows.
pub(crate) type NvmlReturn = u32;

pub(crate) const SUCCESS: NvmlReturn = 0;
pub(crate) const INVALID_ARGUMENT: NvmlReturn = 2;
pub(crate) const NOT_SUPPORTED: NvmlReturn = 3;
pub(crate) const NO_PERMISSION: NvmlReturn = 4;
pub(crate) const NOT_FOUND: NvmlReturn = 6;
pub(crate) const INSUFFICIENT_SIZE: NvmlReturn = 7;
pub(crate) const LIBRARY_NOT_FOUND: NvmlReturn = 12;
pub(crate) const FUNCTION_NOT_FOUND: NvmlReturn = 13;
pub(crate) const ARGUMENT_VERSION_MISMATCH: NvmlReturn = 25;
pub(crate) const UNKNOWN: NvmlReturn = 999;
