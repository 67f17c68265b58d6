//! Defines the driver's result codes that the shim itself returns. Source: `CUresult` in cuda.h.

/// A result code of the driver. An integer, because newer drivers have codes that no enum here
/// lists.
pub(crate) type CuResult = i32;

pub(crate) const SUCCESS: CuResult = 0;
pub(crate) const INVALID_VALUE: CuResult = 1;
pub(crate) const OUT_OF_MEMORY: CuResult = 2;
pub(crate) const SHARED_OBJECT_INIT_FAILED: CuResult = 303;
pub(crate) const NOT_FOUND: CuResult = 500;
pub(crate) const NOT_PERMITTED: CuResult = 800;
pub(crate) const NOT_SUPPORTED: CuResult = 801;
pub(crate) const UNKNOWN: CuResult = 999;
