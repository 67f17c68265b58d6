//! Defines why memory is not allocated or used.
#![forbid(unsafe_code)]

use crate::error::{CudaError, ErrorClass, ResourceError};
use crate::state::StaleReason;

/// Reason for which memory was not allocated or used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// The memory is stale.
    #[error(transparent)]
    Stale(#[from] StaleReason),
    /// The resource refused the request.
    #[error(transparent)]
    Resource(#[from] ResourceError),
    /// The number of items exceeds the address space.
    #[error(
        "failed to allocate {len} items of {size} bytes: larger than the address space; request less"
    )]
    TooLarge {
        /// Requested number of items.
        len: usize,
        /// Size of an item in bytes.
        size: usize,
    },
    /// The range is not inside the memory.
    #[error(
        "failed to use items {start} to {end}: the memory has {len} items; pass a range inside it"
    )]
    Range {
        /// First item.
        start: usize,
        /// End of the range, exclusive.
        end: usize,
        /// Number of items of the memory.
        len: usize,
    },
    /// The lengths differ.
    #[error("failed to copy {given} items: the memory has {len} items; pass as many")]
    Length {
        /// Number of items of the memory.
        len: usize,
        /// Number of given items.
        given: usize,
    },
    /// The driver failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

impl MemoryError {
    /// Returns the class of the failure.
    pub fn class(&self) -> ErrorClass {
        match self {
            MemoryError::Stale(reason) => reason.class(),
            MemoryError::Resource(error) => error.class(),
            MemoryError::Cuda(error) => error.class(),
            MemoryError::TooLarge { .. }
            | MemoryError::Range { .. }
            | MemoryError::Length { .. } => ErrorClass::Caller,
        }
    }

    /// Returns whether the same call may succeed later in this process image.
    pub fn retryable(&self) -> bool {
        self.class().retryable()
    }
}
