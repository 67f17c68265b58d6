//! Checks that a pod's GPU has the size of its quota, for the chart's `helm test`.

use bursar_driver::driver::{Driver, DriverError};
use bursar_driver::error::{CudaError, ErrorClass, ResourceError};
use bursar_driver::physical::{Physical, PhysicalMemoryResource as _};
use bursar_driver::resource::Tag;

/// Why a pod is not held to its quota.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QuotaCheckError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    Resource(#[from] ResourceError),
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
    let memory = Physical::new(context.device())?;
    match memory.create(quota, Tag("quota check")) {
        Err(error) if error.class() == ErrorClass::OutOfMemory => Ok(format!(
            "the GPU has {total} bytes, of which {free} are free; an allocation beyond that is refused"
        )),
        Err(error) => Err(error.into()),
        Ok(block) => {
            memory.release(block).map_err(|error| error.reason)?;
            Err(QuotaCheckError::NotEnforced { quota })
        }
    }
}
