//! A layer that counts what passes through it.
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::adaptor::upstream::{Upstream, forward};
use crate::driver::Stream;
use crate::error::{FreeError, ResourceError};
use crate::resource::{Block, DeviceMemoryResource, Tag};

/// A number of which the present, the highest and the sum of all increases are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counter {
    /// Now.
    pub current: u64,
    /// The highest that it was.
    pub peak: u64,
    /// All that was ever added.
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

/// What passed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocationCounts {
    /// Bytes of live blocks.
    pub bytes: Counter,
    /// Live blocks.
    pub blocks: Counter,
    /// Allocations that failed.
    pub failed_allocations: u64,
    /// Frees that failed, or were refused.
    pub failed_frees: u64,
}

/// Counts over a resource.
#[derive(Debug)]
pub struct Statistics<R> {
    upstream: Upstream<R>,
    counts: Mutex<AllocationCounts>,
}

impl<R: DeviceMemoryResource> Statistics<R> {
    /// Counts what passes from now on.
    pub fn new(resource: R) -> Self {
        Statistics {
            upstream: Upstream::new(resource),
            counts: Mutex::default(),
        }
    }

    /// The counts at one instant.
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
        // A free that failed leaves nobody who owns the block.
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
