//! Checks that a pod's GPU has the size of its quota, for the chart's `helm test`.

use bursar_runtime::driver::{Driver, DriverError};
use bursar_runtime::error::{CudaError, ErrorClass};

/// Why a pod is not held to its quota.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QuotaCheckError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error("the GPU has {total} bytes, and the pod requested {quota}")]
    OtherSize { total: u64, quota: u64 },
    #[error("an allocation of all {quota} bytes succeeded, and the context is not counted")]
    NotEnforced { quota: u64 },
}

/// Returns a sentence about the first GPU, whose size must be `quota` bytes.
pub(crate) fn check(quota: u64) -> Result<String, QuotaCheckError> {
    let context = Driver::get()?.device(0)?.primary_context()?;
    let (free, total) = context.memory_info()?;
    if total != quota {
        return Err(QuotaCheckError::OtherSize { total, quota });
    }
    // The context is part of the quota, so the whole quota is never free.
    match context.device().create(quota) {
        Err(error) if error.class() == ErrorClass::OutOfMemory => Ok(format!(
            "the GPU has {total} bytes, of which {free} are free; an allocation beyond that is refused"
        )),
        Err(error) => Err(error.into()),
        Ok(_) => Err(QuotaCheckError::NotEnforced { quota }),
    }
}
