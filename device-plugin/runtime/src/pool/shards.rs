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
//! freed blocks, so that a block costs no atomic operation on shared data. Before a request fails,
//! it gets the idle credit of the account and of all shards, which makes the limit exact. From then
//! on credit is *low*: shards draw only what they need and return freed credit at once, because
//! shards that alternate at the limit would collect credit again and again. Low credit ends when
//! plenty is left, or after many draws.
//!
//! Lock order: the credit collection, a shard, the central heap. Only `allocate_any` locks more
//! than one shard; it locks all of them in index order, and the pool serializes its callers.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::epoch::StreamDeps;
use super::shard_affinity;
use super::tlsf::{
    BlockId, EarlierUses, EdgeBlock, EmptyRegion, HeapBlock, HeapError, TlsfHeap, UseCount,
};
use crate::adaptor::budget::BudgetAccount;
use crate::resource::BudgetSnapshot;
use crate::sync::biased_lock::{self, BiasedGuard, BiasedLock};

/// Number of shards besides the central heap.
const SHARD_COUNT: usize = 32;
/// Index of the central heap.
const CENTRAL: usize = 0;
/// Chunk sizes are multiples of this.
const CHUNK_STEP: u64 = 2 << 20;
/// A chunk has at most this fraction of the free bytes.
const CHUNK_DIVISOR: u64 = 8;
/// Number of blocks for which a new chunk has room if possible; the minimum is two.
const BLOCKS_PER_CHUNK: u64 = 4;
/// A shard draws this fraction of the remaining credit ahead.
const DRAW_AHEAD_DIVISOR: u64 = 64;
/// Low credit ends once this fraction of the limit is left.
const PLENTY_DIVISOR: u64 = 4;
/// Low credit also ends after so many draws by one shard, which may be the only one that needs any.
const LOW_CREDIT_DRAWS: u32 = 1024;

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

/// Chunk of a shard.
#[derive(Debug)]
struct Chunk {
    /// Block in the central heap.
    id: BlockId,
    /// Region in the shard's heap.
    span: EmptyRegion,
}

/// Heap and chunks of a shard, guarded by its lock.
#[derive(Debug, Default)]
struct ShardState {
    heap: TlsfHeap,
    /// Indexed by the region's number. Empty for the central heap, whose regions are slabs.
    chunks: Vec<Option<Chunk>>,
    /// Number of draws while credit was low.
    draws: u32,
}

impl ShardState {
    #[inline]
    fn allocate(&mut self, shard: usize, request: Request) -> Option<Allocation> {
        let taken = self.heap.allocate(request.bytes, request.align)?;
        Some(Allocation {
            handle: BlockHandle {
                shard: shard as u32,
                id: taken.id,
            },
            address: taken.address,
            deps: taken.deps,
        })
    }

    fn add_chunk(&mut self, chunk: HeapBlock) -> Option<()> {
        let vacant = self.chunks.iter().position(Option::is_none);
        let region = vacant.unwrap_or(self.chunks.len());
        let index = u32::try_from(region).ok()?;
        let span = self
            .heap
            .add_region(index, chunk.address, chunk.bytes, chunk.deps)?;
        if vacant.is_none() {
            self.chunks.push(None);
        }
        self.chunks[region] = Some(Chunk { id: chunk.id, span });
        Some(())
    }
}

/// Shard on cache lines of its own, because other threads use its neighbours.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard {
    state: BiasedLock<ShardState>,
    /// Bytes that the shard may allocate without asking the account. Written under the state's lock
    /// only, and read without it.
    credit: AtomicU64,
}

impl Shard {
    #[inline]
    fn credit(&self) -> u64 {
        self.credit.load(Ordering::Relaxed)
    }

    #[inline]
    fn set_credit(&self, _: &mut ShardState, bytes: u64) {
        self.credit.store(bytes, Ordering::Relaxed);
    }

    /// Takes and returns the shard's idle credit.
    fn take_credit(&self, state: &mut ShardState) -> u64 {
        let idle = self.credit();
        self.set_credit(state, 0);
        idle
    }
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
        biased_lock::register_membarrier();
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

    /// Charges bytes for the slower methods. Fails only if the account and all shards together lack
    /// idle credit.
    pub(super) fn charge(&self, bytes: u64) -> Result<(), BudgetSnapshot> {
        // Credit may suffice, and only room was missing.
        if self.account.0.charge(bytes).is_ok() {
            return Ok(());
        }
        let _one = self.lock_collection();
        self.collect_credit();
        self.account.0.charge(bytes)
    }

    /// Returns charged bytes that got no block.
    pub(super) fn uncharge(&self, bytes: u64) {
        self.account.0.uncharge(bytes);
    }

    /// Changes the limit. Every allocation after the return obeys it.
    pub(super) fn set_limit(&self, limit: u64) {
        let _one = self.lock_collection();
        self.account.0.set_limit(limit);
        self.collect_credit();
        self.update_low_credit();
    }

    /// Returns the idle credit of all shards to the account. The caller holds `collection`.
    fn collect_credit(&self) {
        // A thread that frees in a shard after this collection sees the flag.
        self.low_credit.store(true, Ordering::Relaxed);
        // Under each shard's lock, so that concurrent draws are found too. From here on shards keep
        // no credit, and freed credit goes to the account.
        let shards = self.shards.iter();
        let idle = shards
            .map(|shard| shard.take_credit(&mut shard.state.lock()))
            .sum();
        self.account.0.uncharge(idle);
    }

    /// Lets shards keep freed credit again if all drawn credit is within the limit. The caller
    /// holds `collection`.
    fn update_low_credit(&self) {
        let BudgetSnapshot { limit, used } = self.account.0.snapshot();
        self.low_credit.store(used > limit, Ordering::Relaxed);
    }

    /// Returns the limit and the requested bytes of live blocks.
    pub(super) fn budget(&self) -> BudgetSnapshot {
        BudgetSnapshot {
            used: self.totals().requested,
            ..self.account.0.snapshot()
        }
    }

    fn lock_collection(&self) -> MutexGuard<'_, ()> {
        self.collection
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Draws credit for a request, and more ahead if possible.
    fn draw_credit(&self, shard: &Shard, state: &mut ShardState, bytes: u64) -> Option<()> {
        let BudgetSnapshot { limit, used } = self.account.0.snapshot();
        let remaining = limit.saturating_sub(used);
        let mut ahead = remaining / DRAW_AHEAD_DIVISOR;
        if self.low_credit.load(Ordering::Relaxed) {
            ahead = 0;
            state.draws = state.draws.wrapping_add(1);
            if (remaining >= limit / PLENTY_DIVISOR || state.draws.is_multiple_of(LOW_CREDIT_DRAWS))
                && let Ok(_one) = self.collection.0.try_lock()
            {
                self.update_low_credit();
            }
        }
        let least = bytes - shard.credit();
        let drawn = [least.saturating_add(ahead), least]
            .into_iter()
            .find(|&wanted| self.account.0.charge(wanted).is_ok())?;
        shard.set_credit(state, shard.credit() + drawn);
        Some(())
    }

    /// Frees a block that `deps` may still use; for `remaining` see [`TlsfHeap::free`].
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

    /// Adds deps to a live block; see [`TlsfHeap::update_use`].
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

    /// Returns the empty chunks of all shards to the central heap.
    pub(super) fn return_chunks(&self) {
        for shard in &self.shards[1..] {
            self.return_shard_chunks(&mut shard.state.lock());
        }
    }

    /// Returns empty chunks of shards whose lock is free at once; says whether there was one.
    fn return_idle_chunks(&self) -> bool {
        let states = self.shards[1..]
            .iter()
            .filter_map(|shard| shard.state.try_lock());
        let returned = states.map(|mut state| self.return_shard_chunks(&mut state));
        returned.sum::<usize>() > 0
    }

    fn return_shard_chunks(&self, state: &mut ShardState) -> usize {
        let chunks = 0..state.chunks.len();
        let returned = chunks.filter(|&region| self.return_chunk(state, region));
        returned.count()
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

    /// Adds a chunk to a shard and allocates from it, or from the central heap if there is no
    /// chunk.
    fn refill(&self, shard: usize, state: &mut ShardState, request: Request) -> Option<Allocation> {
        if self.grow_shard(state, request).is_some()
            || self.return_idle_chunks() && self.grow_shard(state, request).is_some()
        {
            let allocation = state.allocate(shard, request);
            if allocation.is_some() {
                return allocation;
            }
        }
        self.central().allocate(CENTRAL, request)
    }

    /// Adds a chunk to a shard, if a sufficiently large one is left.
    fn grow_shard(&self, state: &mut ShardState, request: Request) -> Option<()> {
        let mut central = self.central();
        let max_chunk = central.heap.free_bytes() / CHUNK_DIVISOR;
        let block_bytes = request.bytes.saturating_add(request.align);
        let wanted = block_bytes
            .saturating_mul(BLOCKS_PER_CHUNK)
            .max(state.heap.live_bytes());
        let chunk = wanted.min(max_chunk).next_multiple_of(CHUNK_STEP);
        if block_bytes.saturating_mul(2) > chunk {
            return None;
        }
        state.add_chunk(central.heap.allocate_chunk(chunk)?)
    }

    /// Returns a chunk that is empty.
    fn return_chunk(&self, state: &mut ShardState, region: usize) -> bool {
        let Some(chunk) = &state.chunks[region] else {
            return false;
        };
        let (id, span) = (chunk.id, chunk.span);
        let Some(deps) = state.heap.remove_region(span) else {
            return false;
        };
        state.chunks[region] = None;
        // The central heap counts the chunk as allocated while a shard owns it, so this cannot
        // fail.
        let _ = self.central().heap.free(id, deps, |all| all);
        true
    }

    /// Returns the free edges of a shard's chunks.
    fn return_edges(&self, state: &mut ShardState) {
        for end in state.heap.edge_blocks() {
            self.return_edge(state, &end);
        }
    }

    fn return_edge(&self, state: &mut ShardState, end: &EdgeBlock) -> Option<()> {
        let chunk = state.chunks.get(end.region as usize)?.as_ref()?;
        let mut central = self.central();
        let (kept_id, edge_id) = central.heap.split_chunk(chunk.id, end)?;
        let span = state.heap.remove_edge(end, chunk.span);
        state.chunks[end.region as usize] = Some(Chunk { id: kept_id, span });
        // The split allocated the edge a moment ago under this lock, so this cannot fail.
        let _ = central.heap.free(edge_id, end.deps, |all| all);
        Some(())
    }
}

#[cfg(test)]
mod tests;
