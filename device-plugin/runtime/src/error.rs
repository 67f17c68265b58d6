//! What failed, of which class it is, and whether a retry helps.
#![forbid(unsafe_code)]

use std::fmt;

pub use bursar_protocol::sticky::ErrorClass;

use crate::driver;
use crate::resource::{Block, Origin};
use crate::state::StaleReason;

/// A call of the driver that did not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CudaError {
    /// The function, by its exported name.
    pub call: &'static str,
    /// The `CUresult`, as the integer that it came as.
    pub code: i32,
}

impl CudaError {
    /// What follows from it.
    pub fn class(&self) -> ErrorClass {
        ErrorClass::of(self.code)
    }

    /// Whether the same call may succeed later in this process image.
    pub fn retryable(&self) -> bool {
        self.class().retryable()
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match driver::error_name(self.code) {
            Some(name) => write!(f, "{}: {name} ({})", self.call, self.code),
            None => write!(f, "{}: CUDA error {}", self.call, self.code),
        }
    }
}

impl std::error::Error for CudaError {}

/// Why a memory resource did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResourceError {
    /// An allocation of nothing has no address.
    #[error("an allocation of 0 bytes on device {ordinal}")]
    ZeroBytes {
        /// The resource's device.
        ordinal: u32,
    },
    /// Larger than any address space.
    #[error("an allocation of {requested} bytes on device {ordinal}")]
    TooLarge {
        /// The resource's device.
        ordinal: u32,
        /// Bytes asked for.
        requested: u64,
    },
    /// The resource cannot align so coarsely.
    #[error("an alignment of {requested} bytes on device {ordinal}: at most {max}")]
    Alignment {
        /// The resource's device.
        ordinal: u32,
        /// Bytes asked for.
        requested: usize,
        /// Bytes that it can do.
        max: usize,
    },
    /// The driver has no room: it answered 2.
    #[error(
        "{requested} bytes on device {ordinal}: {source}; free some, or ask for a larger quota"
    )]
    OutOfMemory {
        /// The resource's device.
        ordinal: u32,
        /// Bytes asked for.
        requested: u64,
        /// The driver's answer.
        source: CudaError,
    },
    /// The budget has no room, whatever the driver has.
    #[error(
        "{requested} bytes on device {ordinal}: {used} of the budget's {limit} bytes are in use; free some, or raise it"
    )]
    OverBudget {
        /// The resource's device.
        ordinal: u32,
        /// Bytes asked for.
        requested: u64,
        /// Bytes live or not yet proven free.
        used: u64,
        /// The budget.
        limit: u64,
    },
    /// A stream or a block of another device.
    #[error("something of device {found} given to a resource of device {ordinal}")]
    WrongOrdinal {
        /// The resource's device.
        ordinal: u32,
        /// The device that it is of.
        found: u32,
    },
    /// A block that another resource made.
    #[error("a block of {found:?} given to {origin:?}: give it to the resource that it came from")]
    Foreign {
        /// The resource.
        origin: Origin,
        /// The block's.
        found: Origin,
    },
    /// The block was freed before.
    #[error("block {generation} was freed before")]
    Stale {
        /// The block's number.
        generation: u64,
    },
    /// A use of the block was prepared and not finished.
    #[error("block {generation} is in use: {uses} prepared uses are not finished")]
    InUse {
        /// The block's number.
        generation: u64,
        /// How many.
        uses: u32,
    },
    /// The use is of another stream than the one that it was prepared for.
    #[error("a use of block {generation} was prepared for another stream")]
    WrongStream {
        /// The block's number.
        generation: u64,
    },
    /// Somebody wrote where nobody may.
    #[error("block {generation}: the byte at {address:#x} {}", if *while_live { "before or behind it was overwritten" } else { "in it was written after it was freed" })]
    Corrupted {
        /// The block's number.
        generation: u64,
        /// The first byte that is not as it was left.
        address: u64,
        /// It was written while the block lived, outside of it; otherwise after its free.
        while_live: bool,
    },
    /// The resource cannot track what streams do with its blocks.
    #[error(
        "{resource} does not track its blocks' use: wait for the stream before they are freed, or take a resource that does"
    )]
    StreamMisuse {
        /// The kind of resource.
        resource: &'static str,
    },
    /// The runtime admits nothing more.
    #[error(transparent)]
    Ended(#[from] StaleReason),
    /// The driver failed in another way.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

impl ResourceError {
    /// What became of an allocation that the driver refused: out of memory only if the driver said so.
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

    /// What follows from it.
    pub fn class(&self) -> ErrorClass {
        match self {
            ResourceError::OutOfMemory { source, .. } | ResourceError::Cuda(source) => {
                source.class()
            }
            ResourceError::OverBudget { .. } => ErrorClass::OutOfMemory,
            ResourceError::Ended(StaleReason::Poisoned(code)) => ErrorClass::of(*code),
            ResourceError::Ended(StaleReason::Draining | StaleReason::ShutDown) => ErrorClass::Gone,
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

    /// Whether the same request may succeed later in this process image.
    pub fn retryable(&self) -> bool {
        self.class().retryable()
    }

    /// A word for labels and conditions, of a bounded set.
    pub fn reason(&self) -> &'static str {
        match self {
            ResourceError::ZeroBytes { .. } => "ZeroBytes",
            ResourceError::TooLarge { .. } => "TooLarge",
            ResourceError::Alignment { .. } => "Alignment",
            ResourceError::OutOfMemory { .. } => "OutOfMemory",
            ResourceError::OverBudget { .. } => "OverBudget",
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

/// Why a block was not freed.
#[derive(Debug, thiserror::Error)]
pub enum FreeError {
    /// It is not this resource's to free; here it is back.
    #[error("not freed: {reason}")]
    Refused {
        /// The block.
        block: Block,
        /// Why.
        reason: ResourceError,
    },
    /// The driver did not free it. It stays charged, and [`reap_pending`](crate::DeviceMemoryResource::reap_pending) tries again.
    #[error("{bytes} bytes stay charged: {source}")]
    Retired {
        /// The block's bytes.
        bytes: u64,
        /// The driver's answer.
        source: CudaError,
    },
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
