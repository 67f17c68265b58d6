//! The driver's answers that the shim gives itself. Source: `CUresult` in cuda.h.

/// An answer of the driver. An integer: newer drivers have codes that no list here knows.
pub(crate) type CuResult = i32;

pub(crate) const SUCCESS: CuResult = 0;
pub(crate) const INVALID_VALUE: CuResult = 1;
pub(crate) const OUT_OF_MEMORY: CuResult = 2;
pub(crate) const SHARED_OBJECT_INIT_FAILED: CuResult = 303;
pub(crate) const NOT_FOUND: CuResult = 500;
pub(crate) const NOT_PERMITTED: CuResult = 800;
pub(crate) const NOT_SUPPORTED: CuResult = 801;
pub(crate) const UNKNOWN: CuResult = 999;
