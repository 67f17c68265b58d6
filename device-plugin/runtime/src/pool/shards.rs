//! The heaps of a pool: one that has all memory, and shards that threads and streams allocate from side by side.
//!
//! A shard takes chunks from the central heap and cuts its blocks from them under a lock of its own, so that eight
//! threads meet rarely. A chunk is as large as what the shard has live, an 8th of what is free at most: many shards
//! find one. What is free in a shard is never lost to others: where no chunk is to be had, empty ones go back; before a
//! request is refused, other shards are asked, and the free ends of chunks go back too, so that free neighbours become
//! one across chunks. A request is refused only where no free range is large enough.
//!
//! The limit is kept in the same way: a part draws credit from an account ahead, and keeps that of the blocks that are
//! freed in it, so that a block costs no atomic operation on what all threads share. Before a request is refused it gets
//! what is idle in the account and in all parts, so the limit is exact. From then on credit is scarce: parts draw what
//! they need and give back what is freed, for who takes from one another by turns takes again and again. That ends where
//! much is left, or by and by.
//!
//! Locks are taken in one order: the credit's, a shard's, the central heap's. Two shards' has only who takes from anywhere, and
//! it has all of them, one after the other; the pool lets one do so at a time.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::epoch::StreamDeps;
use super::shard_affinity;
use super::tlsf::{BlockId, EdgeBlock, EmptyRegion, HeapBlock, HeapError, TlsfHeap, UseCount};
use crate::adaptor::budget::BudgetAccount;
use crate::resource::BudgetSnapshot;
use crate::sync::biased_lock::{self, BiasedGuard, BiasedLock};

/// Shards of a pool; the central heap beside them.
const SHARD_COUNT: usize = 32;
/// The part that is the central heap.
const CENTRAL: usize = 0;
/// Chunks have whole multiples of this.
const CHUNK_STEP: u64 = 2 << 20;
/// A chunk is such a part of what is free at most.
const CHUNK_DIVISOR: u64 = 8;
/// A chunk has room for this many of the blocks that are cut from it where there is as much, and for two at least.
const BLOCKS_PER_CHUNK: u64 = 4;
/// Credit is drawn ahead by such a part of what is left.
const DRAW_AHEAD_DIVISOR: u64 = 64;
/// Credit is scarce no more where such a part of the limit is left.
const PLENTY_DIVISOR: u64 = 4;
/// Nor where a part has drawn this often: it may be the only one that needs any.
const LOW_CREDIT_DRAWS: u32 = 1024;

/// A block's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockHandle {
    /// The heap that it is of.
    pub(super) shard: u32,
    /// Its name there.
    pub(super) id: BlockId,
}

/// What a request got.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allocation {
    /// To free it by.
    pub(super) handle: BlockHandle,
    /// Where it begins.
    pub(super) address: u64,
    /// What may still use it.
    pub(super) deps: StreamDeps,
}

/// A request: bytes, and a power of two that the address is a multiple of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) bytes: u64,
    pub(super) align: u64,
}

/// Bytes and blocks at one instant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Totals {
    /// Bytes that were asked for, of live blocks.
    pub(super) requested: u64,
    /// Bytes that live blocks have.
    pub(super) live: u64,
    /// Live blocks.
    pub(super) blocks: u64,
    /// Free bytes.
    pub(super) free: u64,
    /// The largest free range of one heap.
    pub(super) largest_free: u64,
}

/// A chunk of a shard.
#[derive(Debug)]
struct Chunk {
    /// Its name in the central heap.
    id: BlockId,
    /// Its name in the shard's.
    span: EmptyRegion,
}

/// One heap and what is counted with it.
#[derive(Debug, Default)]
struct ShardState {
    heap: TlsfHeap,
    /// By the region's number; the central heap's regions are slabs, and not here.
    chunks: Vec<Option<Chunk>>,
    /// How often credit was drawn while it was scarce.
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

    /// Adds a chunk to a shard.
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

/// A part on cache lines of its own: neighbours are other threads'.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard {
    state: BiasedLock<ShardState>,
    /// Bytes that may be allocated here before the account is asked. It is changed under the share's lock only, and looked
    /// at without it.
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

    /// Takes the credit that is idle here; how much it was.
    fn take_credit(&self, state: &mut ShardState) -> u64 {
        let idle = self.credit();
        self.set_credit(state, 0);
        idle
    }
}

/// What all threads write, apart from what they only read.
#[derive(Debug)]
#[repr(align(128))]
struct CachePadded<T>(T);

/// The shard of a lane and a thread's seat.
#[inline]
fn shard_index(slot: usize, shard_offset: usize) -> usize {
    1 + slot.wrapping_add(shard_offset) % SHARD_COUNT
}

/// The heaps.
#[derive(Debug)]
pub(super) struct Shards {
    shards: Box<[Shard]>,
    /// Live bytes as asked for, and credit.
    account: CachePadded<BudgetAccount>,
    /// Held by whoever takes credit from parts, so that nobody who looks through them misses any.
    collection: CachePadded<Mutex<()>>,
    /// What is freed is the account's, not for the next in its part: a request found none left, or more is live than a limit
    /// that was lowered.
    low_credit: AtomicBool,
}

impl Shards {
    /// Without memory, and with a limit for live bytes.
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

    /// Adds memory; `None` where it is more than a heap can name.
    pub(super) fn add_region(
        &self,
        slab: u32,
        address: u64,
        bytes: u64,
        deps: StreamDeps,
    ) -> Option<EmptyRegion> {
        self.central().heap.add_region(slab, address, bytes, deps)
    }

    /// Takes a slab away that is free from end to end; what may still use it.
    pub(super) fn remove_region(&self, slab: EmptyRegion) -> Option<StreamDeps> {
        self.central().heap.remove_region(slab)
    }

    /// A block for a stream's lane, of the shard that the calling thread uses for it, if that is all it takes. `None` where
    /// credit, a chunk or the shard's lock have to be got first: the others do.
    #[inline]
    pub(super) fn try_allocate(&self, slot: usize, request: Request) -> Option<Allocation> {
        let index = shard_index(slot, shard_affinity::shard_offset());
        let shard = &self.shards[index];
        let Some(mut state) = shard.state.try_lock() else {
            // Who comes here again and again gets another shard, and waits for that one from now on.
            shard_affinity::on_contention();
            return None;
        };
        let credit = shard.credit().checked_sub(request.bytes)?;
        let allocation = state.allocate(index, request)?;
        shard.set_credit(&mut state, credit);
        Some(allocation)
    }

    /// The same with a chunk and with credit that are got for it. `None` where the account has too little, or no free range of
    /// the shard or the central heap is large enough.
    pub(super) fn allocate_with_draw(&self, slot: usize, request: Request) -> Option<Allocation> {
        let (index, mut state) = self.lock_shard(slot);
        let shard = &self.shards[index];
        if shard.credit() < request.bytes {
            self.draw_credit(shard, &mut state, request.bytes)?;
        }
        let Some(allocation) = self.allocate_or_refill(index, &mut state, request) else {
            // Somebody may be short of what was drawn for this.
            if self.low_credit.load(Ordering::Relaxed) {
                self.account.0.uncharge(shard.take_credit(&mut state));
            }
            return None;
        };
        shard.set_credit(&mut state, shard.credit() - request.bytes);
        Some(allocation)
    }

    /// The same for bytes that were charged.
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

    /// A block from wherever there is one, for bytes that were charged. No shard takes or gives any memory meanwhile, so that
    /// none is missed.
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

    /// Charges bytes for the other ways to take a block. It fails only where not enough credit is idle, wherever it is.
    pub(super) fn charge(&self, bytes: u64) -> Result<(), BudgetSnapshot> {
        // Room may be all that was missing.
        if self.account.0.charge(bytes).is_ok() {
            return Ok(());
        }
        let _one = self.lock_collection();
        self.collect_credit();
        self.account.0.charge(bytes)
    }

    /// Gives back what was charged and got no block.
    pub(super) fn uncharge(&self, bytes: u64) {
        self.account.0.uncharge(bytes);
    }

    /// Changes the limit: what is taken after the return is within it.
    pub(super) fn set_limit(&self, limit: u64) {
        let _one = self.lock_collection();
        self.account.0.set_limit(limit);
        self.collect_credit();
        self.update_low_credit();
    }

    /// Gives the idle credit of all parts back to the account. `moving` is held.
    fn collect_credit(&self) {
        // Who frees in a part after its credit was taken sees this.
        self.low_credit.store(true, Ordering::Relaxed);
        // Under each part's lock, so that what is being drawn ahead is found too. No part keeps any from here on: what
        // comes back meanwhile is in the account.
        let shards = self.shards.iter();
        let idle = shards
            .map(|shard| shard.take_credit(&mut shard.state.lock()))
            .sum();
        self.account.0.uncharge(idle);
    }

    /// Lets parts keep the credit of what is freed, if all that is drawn is within the limit. `moving` is held.
    fn update_low_credit(&self) {
        let BudgetSnapshot { limit, used } = self.account.0.snapshot();
        self.low_credit.store(used > limit, Ordering::Relaxed);
    }

    /// The limit, and live bytes as asked for.
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

    /// Draws credit for a request of `bytes`, and some ahead.
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

    /// Frees a block that `after` may still use; `left` as in [`Heap::free`].
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
        // What is of the central heap was paid for by shards.
        if handle.shard as usize == CENTRAL || self.low_credit.load(Ordering::Relaxed) {
            self.account.0.uncharge(requested);
        } else {
            shard.set_credit(&mut state, shard.credit() + requested);
        }
        Ok(())
    }

    /// Remembers what more may use a live block.
    pub(super) fn update_use(
        &self,
        handle: BlockHandle,
        deps: StreamDeps,
        open: UseCount,
    ) -> Result<(), HeapError> {
        self.shard_of_handle(handle)?
            .state
            .lock()
            .heap
            .update_use(handle.id, deps, open)
    }

    /// Gives the empty chunks of all shards back to the central heap.
    pub(super) fn return_chunks(&self) {
        for shard in &self.shards[1..] {
            self.return_shard_chunks(&mut shard.state.lock());
        }
    }

    /// The same without waiting for shards that are in use, or are a thread's by right; whether there was a chunk.
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

    /// What there is. Heaps are looked at one after the other: sums over a moment in which others go on.
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

    /// The shard of a lane and the calling thread.
    fn lock_shard(&self, slot: usize) -> (usize, BiasedGuard<'_, ShardState>) {
        let index = shard_index(slot, shard_affinity::shard_offset());
        (index, self.shards[index].state.lock())
    }

    /// Gives a shard a chunk and allocates from it, or from the central heap where there is none.
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

    /// Gives a shard a chunk, if there is one that is worth it for a request.
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

    /// Gives a chunk back, if it is empty.
    fn return_chunk(&self, state: &mut ShardState, region: usize) -> bool {
        let Some(chunk) = &state.chunks[region] else {
            return false;
        };
        let (id, span) = (chunk.id, chunk.span);
        let Some(deps) = state.heap.remove_region(span) else {
            return false;
        };
        state.chunks[region] = None;
        // A chunk stays allocated for as long as its shard has it.
        let _ = self.central().heap.free(id, deps, |all| all);
        true
    }

    /// Gives back the free ends of a shard's chunks.
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
        // It was allocated a moment ago, and the lock is held.
        let _ = central.heap.free(edge_id, end.deps, |all| all);
        Some(())
    }
}

#[cfg(test)]
mod tests;
