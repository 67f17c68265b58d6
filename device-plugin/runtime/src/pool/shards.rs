//! Spreads allocations over shards with heaps of their own, behind which a central heap owns all
//! memory.
//!
//! A shard takes chunks from the central heap and cuts blocks from them under its own lock, so that
//! eight threads seldom contend. A chunk is as large as the shard's live memory, at most 1/8 of the
//! free memory, so that many shards find one. Free memory of a shard stays available to others:
//! when no chunk is left, empty chunks return to the central heap. Before a request fails, the pool
//! searches the other shards and returns the free edges of chunks, so that free neighbours merge
//! across chunks. A request fails only if no free range is large enough.
//!
//! The limit works the same way. A shard draws credit from an account ahead and keeps the credit of
//! freed blocks. So a block costs no atomic operation on shared data. Before a request fails, it
//! gets the idle credit of the account and of all shards, which makes the limit exact. From then on
//! credit is *low*: shards draw only what they need and return freed credit at once. Otherwise
//! shards that alternate at the limit would collect credit again and again. Low credit ends when
//! plenty is left, or after many draws.
//!
//! Lock order: the credit collection, a shard, the central heap. Only `allocate_any` locks more
//! than one shard; it locks all of them in index order, and the pool serializes its callers.

mod chunks;
mod credit;
mod shard;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use bursar_biased_lock::BiasedGuard;

use super::epoch::StreamDeps;
use super::shard_affinity;
use super::tlsf::{BlockId, EarlierUses, EmptyRegion, HeapError, UseCount};
use crate::adaptor::budget::BudgetAccount;
use shard::{Shard, ShardState};

/// Number of shards besides the central heap.
const SHARD_COUNT: usize = 32;
/// Index of the central heap.
const CENTRAL: usize = 0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockHandle {
    /// Index of the heap.
    pub(super) shard: u32,
    /// Block in that heap.
    pub(super) id: BlockId,
}

/// Result of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allocation {
    /// Handle for the free.
    pub(super) handle: BlockHandle,
    /// First address.
    pub(super) address: u64,
    /// Streams that may still use the memory.
    pub(super) deps: StreamDeps,
}

/// Request: size in bytes, and alignment as a power of two.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) bytes: u64,
    pub(super) align: u64,
}

/// Sums over all heaps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Totals {
    /// Requested bytes of live blocks.
    pub(super) requested: u64,
    /// Bytes of live blocks after rounding.
    pub(super) live: u64,
    /// Number of live blocks.
    pub(super) blocks: u64,
    /// Free bytes.
    pub(super) free: u64,
    /// Largest free range of one heap.
    pub(super) largest_free: u64,
}

/// Keeps data that all threads write apart from data that they only read.
#[derive(Debug)]
#[repr(align(128))]
struct CachePadded<T>(T);

/// Returns the shard of a stream slot and a thread's offset.
#[inline]
fn shard_index(slot: usize, shard_offset: usize) -> usize {
    1 + slot.wrapping_add(shard_offset) % SHARD_COUNT
}

/// All heaps of a pool, with its credit.
#[derive(Debug)]
pub(super) struct Shards {
    shards: Box<[Shard]>,
    /// Requested bytes of live blocks, and credit that shards have drawn.
    account: CachePadded<BudgetAccount>,
    /// Held while credit moves from shards to the account, so that a concurrent search misses none.
    collection: CachePadded<Mutex<()>>,
    /// Freed credit returns to the account at once, because a request found none left or the limit
    /// is below the live bytes.
    low_credit: AtomicBool,
}

impl Shards {
    /// Creates shards without memory, with a limit for live bytes.
    pub(super) fn new(limit: u64) -> Shards {
        bursar_biased_lock::register_membarrier();
        Shards {
            account: CachePadded(BudgetAccount::new(limit)),
            shards: std::iter::repeat_with(Shard::default)
                .take(1 + SHARD_COUNT)
                .collect(),
            collection: CachePadded(Mutex::default()),
            low_credit: AtomicBool::new(false),
        }
    }

    /// Adds a slab; `None` if the heap cannot number as much memory.
    pub(super) fn add_region(
        &self,
        slab: u32,
        address: u64,
        bytes: u64,
        deps: StreamDeps,
    ) -> Option<EmptyRegion> {
        self.central().heap.add_region(slab, address, bytes, deps)
    }

    /// Removes a slab that is entirely free, and returns its deps.
    pub(super) fn remove_region(&self, slab: EmptyRegion) -> Option<StreamDeps> {
        self.central().heap.remove_region(slab)
    }

    /// Allocates from the thread's shard for a stream slot, if that takes nothing but the shard's
    /// lock.
    ///
    /// `None` means that the caller must first get credit, a chunk or the lock by the other
    /// methods.
    #[inline]
    pub(super) fn try_allocate(&self, slot: usize, request: Request) -> Option<Allocation> {
        let index = shard_index(slot, shard_affinity::shard_offset());
        let shard = &self.shards[index];
        let Some(mut state) = shard.state.try_lock() else {
            // A thread that often contends here moves to another shard, and waits for that shard
            // from then on.
            shard_affinity::on_contention();
            return None;
        };
        let credit = shard.credit().checked_sub(request.bytes)?;
        let allocation = state.allocate(index, request)?;
        shard.set_credit(&mut state, credit);
        Some(allocation)
    }

    /// Allocates as [`Shards::try_allocate`] does, and gets credit and a chunk if necessary.
    ///
    /// `None` if the account lacks credit, or no free range of the shard or the central heap fits.
    pub(super) fn allocate_with_draw(&self, slot: usize, request: Request) -> Option<Allocation> {
        let (index, mut state) = self.lock_shard(slot);
        let shard = &self.shards[index];
        if shard.credit() < request.bytes {
            self.draw_credit(shard, &mut state, request.bytes)?;
        }
        let Some(allocation) = self.allocate_or_refill(index, &mut state, request) else {
            // Another shard may need the credit that was drawn for this request.
            if self.low_credit.load(Ordering::Relaxed) {
                self.account.0.uncharge(shard.take_credit(&mut state));
            }
            return None;
        };
        shard.set_credit(&mut state, shard.credit() - request.bytes);
        Some(allocation)
    }

    /// Allocates as [`Shards::allocate_with_draw`] does, for bytes that were charged before.
    pub(super) fn allocate_charged(&self, slot: usize, request: Request) -> Option<Allocation> {
        let (index, mut state) = self.lock_shard(slot);
        self.allocate_or_refill(index, &mut state, request)
    }

    fn allocate_or_refill(
        &self,
        shard: usize,
        state: &mut ShardState,
        request: Request,
    ) -> Option<Allocation> {
        let allocation = state.allocate(shard, request);
        allocation.or_else(|| self.refill(shard, state, request))
    }

    /// Allocates from any heap, for bytes that were charged before. All shards are locked, so that
    /// the search misses no memory.
    pub(super) fn allocate_any(&self, request: Request) -> Option<Allocation> {
        let shards = self.shards.iter().enumerate().skip(1);
        let mut states: Vec<_> = shards
            .map(|(index, shard)| (index, shard.state.lock()))
            .collect();
        for (_, state) in &mut states {
            self.return_shard_chunks(state);
        }
        if let Some(allocation) = self.central().allocate(CENTRAL, request) {
            return Some(allocation);
        }
        let allocation = states
            .iter_mut()
            .find_map(|(index, state)| state.allocate(*index, request));
        allocation.or_else(|| {
            for (_, state) in &mut states {
                self.return_edges(state);
            }
            self.central().allocate(CENTRAL, request)
        })
    }

    /// Frees a block that `deps` may still use; for `remaining` see
    /// [`TlsfHeap::free`](super::tlsf::TlsfHeap::free).
    #[inline]
    pub(super) fn free(
        &self,
        handle: BlockHandle,
        deps: StreamDeps,
        remaining: impl Fn(StreamDeps) -> StreamDeps,
    ) -> Result<(), HeapError> {
        let shard = self.shard_of_handle(handle)?;
        let mut state = shard.state.lock();
        let requested = state.heap.free(handle.id, deps, remaining)?;
        // Shards paid the credit of a block in the central heap.
        if handle.shard as usize == CENTRAL || self.low_credit.load(Ordering::Relaxed) {
            self.account.0.uncharge(requested);
        } else {
            shard.set_credit(&mut state, shard.credit() + requested);
        }
        Ok(())
    }

    /// Adds deps to a live block; see [`TlsfHeap::update_use`](super::tlsf::TlsfHeap::update_use).
    pub(super) fn update_use(
        &self,
        handle: BlockHandle,
        deps: StreamDeps,
        writers: u64,
        open: UseCount,
    ) -> Result<EarlierUses, HeapError> {
        self.shard_of_handle(handle)?
            .state
            .lock()
            .heap
            .update_use(handle.id, deps, writers, open)
    }

    /// Sums over the heaps, one after the other, while other threads keep allocating.
    pub(super) fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        let (mut chunk_bytes, mut chunks) = (0, 0);
        for (index, shard) in self.shards.iter().enumerate() {
            let mut state = shard.state.lock();
            totals.requested += state.heap.requested_bytes();
            totals.live += state.heap.live_bytes();
            totals.blocks += state.heap.live_blocks();
            totals.free += state.heap.free_bytes();
            totals.largest_free = totals.largest_free.max(state.heap.largest_free());
            if index != CENTRAL {
                chunk_bytes += state.heap.live_bytes() + state.heap.free_bytes();
                chunks += state.chunks.iter().flatten().count() as u64;
            }
        }
        totals.live = totals.live.saturating_sub(chunk_bytes);
        totals.blocks = totals.blocks.saturating_sub(chunks);
        totals
    }

    fn central(&self) -> BiasedGuard<'_, ShardState> {
        self.shards[CENTRAL].state.lock()
    }

    fn shard_of_handle(&self, handle: BlockHandle) -> Result<&Shard, HeapError> {
        self.shards
            .get(handle.shard as usize)
            .ok_or(HeapError::NotLive)
    }

    /// Locks the shard of a stream slot and the calling thread.
    fn lock_shard(&self, slot: usize) -> (usize, BiasedGuard<'_, ShardState>) {
        let index = shard_index(slot, shard_affinity::shard_offset());
        (index, self.shards[index].state.lock())
    }
}

#[cfg(test)]
mod tests;
