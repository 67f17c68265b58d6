//! Defines the NVML result codes that the shim itself returns. Source: `nvmlReturn_t` in nvml.h.

/// A result code of NVML. An integer, because newer drivers have codes that no enum here lists.
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
