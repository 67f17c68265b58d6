//! Counts allocations and frees.
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::adaptor::upstream::{Upstream, forward};
use crate::driver::Stream;
use crate::error::ResourceError;
use crate::resource::{Block, DeviceMemoryResource, FreeError, Tag};

/// Current value, highest value and sum of all increases of a number.
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

impl<R: DeviceMemoryResource> Statistics<R> {
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

    fn lock(&self) -> MutexGuard<'_, AllocationCounts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<R: DeviceMemoryResource> DeviceMemoryResource for Statistics<R> {
    fn allocate(&self, layout: Layout, stream: &Stream, tag: Tag) -> Result<Block, ResourceError> {
        let result = self.upstream.allocate(layout, stream, tag);
        let mut counts = self.lock();
        match &result {
            Ok(block) => {
                counts.bytes.add(block.bytes());
                counts.blocks.add(1);
            }
            Err(_) => counts.failed_allocations += 1,
        }
        result
    }

    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        let bytes = block.bytes();
        let result = self.upstream.deallocate(block, stream);
        let mut counts = self.lock();
        counts.failed_frees += u64::from(result.is_err());
        // After a failed free the block has no owner.
        if !matches!(result, Err(FreeError::Refused { .. })) {
            counts.bytes.subtract(bytes);
            counts.blocks.subtract(1);
        }
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
