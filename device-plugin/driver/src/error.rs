//! Classifies failures and says whether a retry can succeed.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::OnceLock;

pub use bursar_protocol::error_class::ErrorClass;

use crate::resource::Origin;
use crate::state::StaleReason;

/// Returns the driver's name of a code, or `None` for a code that the driver does not know.
pub(crate) type ErrorNameFn = fn(i32) -> Option<String>;

static ERROR_NAME: OnceLock<ErrorNameFn> = OnceLock::new();

/// Sets the function by which errors print names instead of numbers.
pub(crate) fn set_error_name_fn(name: ErrorNameFn) {
    // A second caller would set the same function.
    let _ = ERROR_NAME.set(name);
}

/// Failed call of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CudaError {
    /// Exported name of the driver's function.
    pub call: &'static str,
    /// `CUresult` as an integer, because newer drivers have codes that an enum would not.
    pub code: i32,
}

impl CudaError {
    /// Returns the class of the code.
    pub fn class(&self) -> ErrorClass {
        ErrorClass::of(self.code)
    }

    /// Returns the code's name in cuda.h, if a loaded driver knows the code.
    pub fn name(&self) -> Option<String> {
        ERROR_NAME.get().and_then(|name| name(self.code))
    }

    /// Returns whether the same call may succeed later in this process image.
    pub fn retryable(&self) -> bool {
        self.class().retryable()
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{}: {name} ({})", self.call, self.code),
            None => write!(f, "{}: CUDA error {}", self.call, self.code),
        }
    }
}

impl std::error::Error for CudaError {}

/// Reason for which a memory resource failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResourceError {
    /// The request has no bytes.
    #[error(
        "failed to allocate memory on device {ordinal}: 0 bytes requested; request at least one byte"
    )]
    ZeroBytes {
        /// Resource's device.
        ordinal: u32,
    },
    /// The request is larger than any address space.
    #[error(
        "failed to allocate {requested} bytes on device {ordinal}: larger than the address space; request less"
    )]
    TooLarge {
        /// Resource's device.
        ordinal: u32,
        /// Requested bytes.
        requested: u64,
    },
    /// The resource does not support the alignment.
    #[error(
        "failed to allocate memory on device {ordinal}: alignment of {requested} bytes is not supported; request at most {max}"
    )]
    Alignment {
        /// Resource's device.
        ordinal: u32,
        /// Requested alignment in bytes.
        requested: usize,
        /// Largest supported alignment in bytes.
        max: usize,
    },
    /// The driver is out of memory: it returned code 2.
    #[error(
        "failed to allocate {requested} bytes on device {ordinal}: {source}; free memory or request a larger quota"
    )]
    OutOfMemory {
        /// Resource's device.
        ordinal: u32,
        /// Requested bytes.
        requested: u64,
        /// Error that the driver returned.
        source: CudaError,
    },
    /// The budget has no room, although the driver may have.
    #[error(
        "failed to allocate {requested} bytes on device {ordinal}: {used} of the budget's {limit} bytes are in use; free memory or raise the limit"
    )]
    OverBudget {
        /// Resource's device.
        ordinal: u32,
        /// Requested bytes.
        requested: u64,
        /// Bytes that are live or not yet proven free.
        used: u64,
        /// Limit of the budget in bytes.
        limit: u64,
    },
    /// The driver returned memory that overlaps a live block, so that two owners would share it.
    /// The memory stays allocated.
    #[error(
        "failed to allocate memory on device {ordinal}: the driver returned {address:#x}, which live block {generation} has; restart the process and report the driver's version"
    )]
    PointerCollision {
        /// Resource's device.
        ordinal: u32,
        /// Address that the driver returned.
        address: u64,
        /// Generation of the live block.
        generation: u64,
    },
    /// The stream or block belongs to another device.
    #[error(
        "failed to use an object of device {found} on device {ordinal}: the devices differ; pass a stream or block of device {ordinal}"
    )]
    WrongOrdinal {
        /// Resource's device.
        ordinal: u32,
        /// Device of the stream or block.
        found: u32,
    },
    /// Another resource allocated the block.
    #[error(
        "failed to use a block of {found:?} with {origin:?}: another resource allocated it; pass it to that resource"
    )]
    Foreign {
        /// Origin of the resource.
        origin: Origin,
        /// Origin of the block.
        found: Origin,
    },
    /// The block was freed before.
    #[error("failed to use block {generation}: it was freed before; allocate a new block")]
    Stale {
        /// Block's generation.
        generation: u64,
    },
    /// A prepared use of the block is not finished.
    #[error(
        "failed to free block {generation}: {uses} prepared uses are not finished; finish them first"
    )]
    InUse {
        /// Block's generation.
        generation: u64,
        /// Number of unfinished uses.
        uses: u32,
    },
    /// The use was prepared for another stream.
    #[error(
        "failed to finish a use of block {generation}: it was prepared for another stream; finish it in that stream"
    )]
    WrongStream {
        /// Block's generation.
        generation: u64,
    },
    /// A program wrote outside a live block or into a freed one.
    #[error("failed to verify block {generation}: the byte at {address:#x} was overwritten {}; check the kernels that use the block", if *while_live { "outside the block" } else { "after the free" })]
    Corrupted {
        /// Block's generation.
        generation: u64,
        /// Address of the first changed byte.
        address: u64,
        /// True for a write outside a live block, false for a write after its free.
        while_live: bool,
    },
    /// The resource does not track uses of its blocks by streams.
    #[error(
        "failed to track a use of a block: the {resource} resource does not track uses; synchronize the stream before the free, or use a resource that does"
    )]
    StreamMisuse {
        /// Kind of the resource.
        resource: &'static str,
    },
    /// The runtime admits no new work.
    #[error(transparent)]
    Ended(#[from] StaleReason),
    /// The driver failed in another way.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

impl ResourceError {
    /// Classifies a failed allocation of `requested` bytes: out of memory only if the driver
    /// returned code 2.
    pub fn from_alloc_failure(ordinal: u32, requested: u64, source: CudaError) -> Self {
        match source.class() {
            ErrorClass::OutOfMemory => ResourceError::OutOfMemory {
                ordinal,
                requested,
                source,
            },
            _ => ResourceError::Cuda(source),
        }
    }

    /// Returns the class of the failure.
    pub fn class(&self) -> ErrorClass {
        match self {
            ResourceError::OutOfMemory { source, .. } | ResourceError::Cuda(source) => {
                source.class()
            }
            ResourceError::OverBudget { .. } => ErrorClass::OutOfMemory,
            ResourceError::Ended(reason) => reason.class(),
            ResourceError::PointerCollision { .. } => ErrorClass::Hardware,
            ResourceError::ZeroBytes { .. }
            | ResourceError::TooLarge { .. }
            | ResourceError::Alignment { .. }
            | ResourceError::WrongOrdinal { .. }
            | ResourceError::Foreign { .. }
            | ResourceError::Stale { .. }
            | ResourceError::InUse { .. }
            | ResourceError::WrongStream { .. }
            | ResourceError::Corrupted { .. }
            | ResourceError::StreamMisuse { .. } => ErrorClass::Caller,
        }
    }

    /// Returns whether the same request may succeed later in this process image.
    pub fn retryable(&self) -> bool {
        self.class().retryable()
    }

    /// Returns a bounded label for metrics and conditions.
    pub fn reason(&self) -> &'static str {
        match self {
            ResourceError::ZeroBytes { .. } => "ZeroBytes",
            ResourceError::TooLarge { .. } => "TooLarge",
            ResourceError::Alignment { .. } => "Alignment",
            ResourceError::OutOfMemory { .. } => "OutOfMemory",
            ResourceError::OverBudget { .. } => "OverBudget",
            ResourceError::PointerCollision { .. } => "PointerCollision",
            ResourceError::WrongOrdinal { .. } => "WrongOrdinal",
            ResourceError::Foreign { .. } => "Foreign",
            ResourceError::Stale { .. } => "Stale",
            ResourceError::InUse { .. } => "InUse",
            ResourceError::WrongStream { .. } => "WrongStream",
            ResourceError::Corrupted { .. } => "Corrupted",
            ResourceError::StreamMisuse { .. } => "StreamMisuse",
            ResourceError::Ended(_) => "Ended",
            ResourceError::Cuda(_) => "Cuda",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocation_error_is_out_of_memory_only_for_code_2() {
        for code in (1..1000).chain([i32::MIN, i32::MAX]) {
            let source = CudaError {
                call: "cuMemAlloc_v2",
                code,
            };
            let error = ResourceError::from_alloc_failure(0, 1, source);
            let is_out_of_memory = matches!(error, ResourceError::OutOfMemory { .. });
            assert_eq!(is_out_of_memory, code == 2, "{code}");
        }
    }

    #[test]
    fn error_prints_its_code_when_no_driver_is_loaded() {
        let error = CudaError {
            call: "cuMemAlloc_v2",
            code: 12345,
        };
        assert_eq!(error.to_string(), "cuMemAlloc_v2: CUDA error 12345");
    }
}
