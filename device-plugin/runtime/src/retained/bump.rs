//! Allocates blocks from a lease that is being written, as a bump allocator.
//!
//! Blocks lie in the order of the requests. So a program that loads the same content in the same
//! order finds it at the same offsets. A free reuses nothing before the lease ends, so blocks of
//! different streams never overlap.

use std::alloc::Layout;
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::{LeaseError, LeaseWriter, RetainedLease};
use crate::driver::Stream;
use crate::error::ResourceError;
use crate::resource::{
    Block, BlockRef, BudgetSnapshot, DeviceMemoryResource, FreeError, Origin, Outstanding, Tag,
    check_free, check_request, remove_live,
};

/// Guaranteed alignment of a mapping: the smallest granularity of a driver is 2 MiB.
const ALIGNMENT: usize = 2 << 20;

/// Resource that allocates a lease from start to end.
#[derive(Debug)]
pub struct LeaseArena {
    writing: LeaseWriter,
    origin: Origin,
    next_generation: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// End of the allocated bytes, including alignment gaps.
    offset: u64,
    /// Blocks that have an owner.
    live_blocks: HashSet<BlockRef>,
    live_bytes: u64,
}

impl LeaseArena {
    /// Allocates from a new lease.
    pub fn new(writing: LeaseWriter) -> LeaseArena {
        LeaseArena {
            writing,
            origin: Origin::unique(),
            next_generation: AtomicU64::new(0),
            state: Mutex::default(),
        }
    }

    /// Returns the lease's writer.
    pub fn writing(&self) -> &LeaseWriter {
        &self.writing
    }

    /// Commits the lease. Blocks keep their addresses and become read-only.
    ///
    /// # Errors
    /// As [`LeaseWriter::commit`].
    pub fn commit(self) -> Result<RetainedLease, LeaseError> {
        self.writing.commit()
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the start and end of a block behind `taken` of `bytes` bytes.
fn next_range(taken: u64, bytes: u64, layout: Layout) -> Option<(u64, u64)> {
    let start = taken.checked_next_multiple_of(layout.align() as u64)?;
    let end = start.checked_add(layout.size() as u64)?;
    (end <= bytes).then_some((start, end))
}

impl DeviceMemoryResource for LeaseArena {
    fn allocate(&self, layout: Layout, stream: &Stream, _: Tag) -> Result<Block, ResourceError> {
        check_request(self.ordinal(), layout, ALIGNMENT, stream)?;
        let (mut state, requested) = (self.state(), layout.size() as u64);
        let Some((start, end)) = next_range(state.offset, self.writing.bytes(), layout) else {
            return Err(ResourceError::OverBudget {
                ordinal: self.ordinal(),
                requested,
                used: state.offset,
                limit: self.writing.bytes(),
            });
        };
        state.offset = end;
        state.live_bytes += requested;
        let block = BlockRef {
            address: self.writing.address() + start,
            layout,
            origin: self.origin,
            generation: self.next_generation.fetch_add(1, Ordering::Relaxed),
            cookie: 0,
        };
        state.live_blocks.insert(block);
        Ok(Block::new(block))
    }

    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        let block = check_free(self.origin, self.ordinal(), block, stream)?;
        let mut state = self.state();
        state.live_bytes -= remove_live(&mut state.live_blocks, block)?.bytes();
        Ok(())
    }

    fn ordinal(&self) -> u32 {
        self.writing.context().ordinal()
    }

    fn origin(&self) -> Origin {
        self.origin
    }

    fn bytes_outstanding(&self) -> Outstanding {
        let state = self.state();
        Outstanding {
            live: state.live_bytes,
            retired: state.offset.saturating_sub(state.live_bytes),
        }
    }

    fn budget_snapshot(&self) -> Option<BudgetSnapshot> {
        Some(BudgetSnapshot {
            limit: self.writing.bytes(),
            used: self.state().offset,
        })
    }

    fn kind(&self) -> &'static str {
        "retained"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(size: usize, align: usize) -> Layout {
        Layout::from_size_align(size, align).unwrap()
    }

    #[test]
    fn ranges_are_consecutive_aligned_and_within_the_lease() {
        assert_eq!(next_range(0, 100, layout(10, 1)), Some((0, 10)));
        assert_eq!(next_range(10, 100, layout(10, 64)), Some((64, 74)));
        assert_eq!(next_range(74, 100, layout(26, 2)), Some((74, 100)));
        assert_eq!(next_range(74, 100, layout(27, 2)), None);
        assert_eq!(next_range(u64::MAX - 1, u64::MAX, layout(1, 64)), None);
    }
}
