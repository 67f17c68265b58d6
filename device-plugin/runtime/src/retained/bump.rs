//! A lease that is being written, as a resource to allocate from.
//!
//! What is allocated lies in the order of the requests, so a program that loads the same things in the same order finds them
//! at the same offsets in the kept lease. Only the end of the lease frees memory: no byte is handed out twice, so no work in a
//! stream can meet another's.

use std::alloc::Layout;
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::{Kept, KeptError, Writing};
use crate::driver::Stream;
use crate::error::{FreeError, ResourceError};
use crate::resource::{
    Block, BlockRef, BudgetSnapshot, DeviceMemoryResource, Origin, Outstanding, Tag, check_free,
    check_request, take_live,
};

/// What a mapping's address is a multiple of, at least: the smallest granularity of a driver is 2 MiB.
const ALIGNMENT: usize = 2 << 20;

/// Hands out the bytes of a lease from its start to its end.
#[derive(Debug)]
pub struct Arena {
    writing: Writing,
    origin: Origin,
    made: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Bytes from the start that were handed out, with what alignment left.
    taken: u64,
    /// Blocks that somebody owns, and their bytes.
    owned: HashSet<BlockRef>,
    live: u64,
}

impl Arena {
    /// Allocates from a lease.
    pub fn new(writing: Writing) -> Arena {
        Arena {
            writing,
            origin: Origin::unique(),
            made: AtomicU64::new(0),
            state: Mutex::default(),
        }
    }

    /// The lease.
    pub fn writing(&self) -> &Writing {
        &self.writing
    }

    /// Commits the lease. Blocks keep their addresses, and are read-only.
    ///
    /// # Errors
    /// As [`Writing::commit`].
    pub fn commit(self) -> Result<Kept, KeptError> {
        self.writing.commit()
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where a block of a layout starts behind `taken` bytes of `bytes`, and where it ends.
fn place(taken: u64, bytes: u64, layout: Layout) -> Option<(u64, u64)> {
    let start = taken.checked_next_multiple_of(layout.align() as u64)?;
    let end = start.checked_add(layout.size() as u64)?;
    (end <= bytes).then_some((start, end))
}

impl DeviceMemoryResource for Arena {
    fn allocate(&self, layout: Layout, stream: &Stream, _: Tag) -> Result<Block, ResourceError> {
        check_request(self.ordinal(), layout, ALIGNMENT, stream)?;
        let (mut state, asked) = (self.state(), layout.size() as u64);
        let Some((start, end)) = place(state.taken, self.writing.bytes(), layout) else {
            return Err(ResourceError::OverBudget {
                ordinal: self.ordinal(),
                asked,
                used: state.taken,
                limit: self.writing.bytes(),
            });
        };
        state.taken = end;
        state.live += asked;
        let block = BlockRef {
            address: self.writing.address() + start,
            layout,
            origin: self.origin,
            generation: self.made.fetch_add(1, Ordering::Relaxed),
            cookie: 0,
        };
        state.owned.insert(block);
        Ok(Block::new(block))
    }

    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        let block = check_free(self.origin, self.ordinal(), block, stream)?;
        let mut state = self.state();
        state.live -= take_live(&mut state.owned, block)?.bytes();
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
            live: state.live,
            retired: state.taken.saturating_sub(state.live),
        }
    }

    fn budget_snapshot(&self) -> Option<BudgetSnapshot> {
        Some(BudgetSnapshot {
            limit: self.writing.bytes(),
            used: self.state().taken,
        })
    }

    fn kind(&self) -> &'static str {
        "kept"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(size: usize, align: usize) -> Layout {
        Layout::from_size_align(size, align).unwrap()
    }

    #[test]
    fn blocks_follow_one_another_aligned_and_end_with_the_lease() {
        assert_eq!(place(0, 100, layout(10, 1)), Some((0, 10)));
        assert_eq!(place(10, 100, layout(10, 64)), Some((64, 74)));
        assert_eq!(place(74, 100, layout(26, 2)), Some((74, 100)));
        assert_eq!(place(74, 100, layout(27, 2)), None);
        assert_eq!(place(u64::MAX - 1, u64::MAX, layout(1, 64)), None);
    }
}
