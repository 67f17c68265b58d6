//! Checks that a pod's GPU has the size of its quota, for the chart's `helm test`.

use bursar_runtime::driver::DriverError;
use bursar_runtime::error::{CudaError, ErrorClass};
use bursar_runtime::{DeviceRuntime, Physical, PhysicalMemoryResource as _, ResourceError, Tag};

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
    let runtime = DeviceRuntime::for_ordinal(0)?;
    let (free, total) = runtime.context().memory_info()?;
    if total != quota {
        return Err(QuotaCheckError::OtherSize { total, quota });
    }
    // The context is part of the quota, so the whole quota is never free.
    let memory = Physical::new(runtime.context().device())?;
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
