//! Counts allocations and frees.
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::adaptor::upstream::{Upstream, forward};
use crate::driver::Stream;
use crate::error::ResourceError;
use crate::resource::physical::{PhysicalBlock, PhysicalMemoryResource, ReleaseError};
use crate::resource::{Block, DeviceMemoryResource, FreeError, Tag};

/// Current value, highest value and sum of all increases of a number, which is of bytes or of
/// blocks, as the field's name says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counter {
    /// Current value.
    pub current: u64,
    /// Highest value so far.
    pub peak: u64,
    /// Sum of all increases.
    pub total: u64,
}

impl Counter {
    fn add(&mut self, amount: u64) {
        self.current += amount;
        self.total += amount;
        self.peak = self.peak.max(self.current);
    }

    fn subtract(&mut self, amount: u64) {
        self.current = self.current.saturating_sub(amount);
    }
}

/// Counts of the calls so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocationCounts {
    /// Bytes of live blocks.
    pub bytes: Counter,
    /// Number of live blocks.
    pub blocks: Counter,
    /// Number of failed allocations.
    pub failed_allocations: u64,
    /// Number of frees that failed or were refused.
    pub failed_frees: u64,
}

/// Counters over an upstream resource.
#[derive(Debug)]
pub struct Statistics<R> {
    upstream: Upstream<R>,
    counts: Mutex<AllocationCounts>,
}

impl<R> Statistics<R> {
    /// Counts the calls of a resource.
    pub fn new(resource: R) -> Self {
        Statistics {
            upstream: Upstream::new(resource),
            counts: Mutex::default(),
        }
    }

    /// Returns all counts at one instant.
    pub fn counts(&self) -> AllocationCounts {
        *self.lock()
    }

    fn count_allocation(&self, bytes: u64, succeeded: bool) {
        let mut counts = self.lock();
        if succeeded {
            counts.bytes.add(bytes);
            counts.blocks.add(1);
        } else {
            counts.failed_allocations += 1;
        }
    }

    /// Counts a free. A block that was not refused has no owner afterwards.
    fn count_free(&self, bytes: u64, succeeded: bool, refused: bool) {
        let mut counts = self.lock();
        counts.failed_frees += u64::from(!succeeded);
        if !refused {
            counts.bytes.subtract(bytes);
            counts.blocks.subtract(1);
        }
    }

    fn lock(&self) -> MutexGuard<'_, AllocationCounts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<R: DeviceMemoryResource> DeviceMemoryResource for Statistics<R> {
    fn allocate(&self, layout: Layout, stream: &Stream, tag: Tag) -> Result<Block, ResourceError> {
        let result = self.upstream.allocate(layout, stream, tag);
        self.count_allocation(layout.size() as u64, result.is_ok());
        result
    }

    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        let bytes = block.bytes();
        let result = self.upstream.deallocate(block, stream);
        let refused = matches!(result, Err(FreeError::Refused { .. }));
        self.count_free(bytes, result.is_ok(), refused);
        result
    }

    fn kind(&self) -> &'static str {
        "statistics"
    }

    forward!(
        identity,
        bytes_outstanding,
        budget_snapshot,
        reap_pending,
        is_retired,
        uses
    );
}

impl<R: PhysicalMemoryResource> PhysicalMemoryResource for Statistics<R> {
    fn create(&self, bytes: u64, tag: Tag) -> Result<PhysicalBlock, ResourceError> {
        let result = self.upstream.create(bytes, tag);
        self.count_allocation(bytes, result.is_ok());
        result
    }

    fn release(&self, block: PhysicalBlock) -> Result<(), ReleaseError> {
        let bytes = block.bytes();
        let result = self.upstream.release(block);
        self.count_free(bytes, result.is_ok(), result.is_err());
        result
    }

    fn kind(&self) -> &'static str {
        "statistics"
    }

    forward!(physical_identity, budget_snapshot);
}
