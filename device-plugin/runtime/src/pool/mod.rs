//! Suballocates blocks from slabs of another resource, in tens of nanoseconds and without a driver
//! call.
//!
//! * `size_classes` maps a size to its free list.
//! * `tlsf` places blocks and merges free neighbours.
//! * `shards` spreads allocations over many heaps with a central heap behind them.
//! * `shard_affinity` spreads contending threads over the shards, each of which has a
//!   biased lock.
//! * `epoch` records for which streams a free block must still wait.
//! * `stream_slots` numbers the streams and orders one behind others.
//! * `growth` adds slabs and releases empty ones.
//! * `block_use` records which streams use a block.
//! * This file is the resource: it orders streams when a block changes streams.
//!
//! The next request in the stream of a free reuses the freed block without an event. If another
//! stream takes the block, the pool records an event at that time and orders the other stream
//! behind it. Sizes are multiples of 256 bytes. A remainder of up to 1/64 of a block (at most 16
//! KiB) stays with the block.
#![forbid(unsafe_code)]

mod block_use;
mod epoch;
mod growth;
mod settings;
mod shard_affinity;
mod shards;
mod size_classes;
mod stream_slots;
mod tlsf;

use std::alloc::Layout;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver::{Access, Context, Stream};
use crate::error::{CudaError, ResourceError};
use crate::resource::{
    Block, BlockRef, BlockUse, BudgetSnapshot, DeviceMemoryResource, FreeError, Origin,
    Outstanding, Reaped, Tag, check_request, check_stream,
};
use block_use::RecordedUse;
use epoch::{EventClock, StreamSlot};
use growth::{SLAB_STEP, Slabs};
use shards::{Allocation, BlockHandle, Request, Shards};
use stream_slots::StreamSlots;
use tlsf::{BlockId, HeapError, UseCount};

pub use settings::{PoolSettings, PoolStatistics};

/// Largest supported alignment.
const MAX_ALIGN: usize = 2 << 20;
/// Low bits of a generation that hold the shard; the other bits hold the serial number in that
/// shard.
const SHARD_BITS: u32 = 6;

/// Pool over a source of memory.
///
/// Call [`Pool::forget_stream`] before the owner of a foreign stream destroys that stream.
#[derive(Debug)]
pub struct Pool<R: DeviceMemoryResource> {
    source: R,
    ordinal: u32,
    origin: Origin,
    settings: PoolSettings,
    shards: Shards,
    clock: EventClock,
    slots: StreamSlots,
    slabs: Mutex<Slabs>,
    /// Held while a thread searches all shards, grows the pool or releases slabs, once for all
    /// waiting threads.
    growth: Mutex<()>,
    waits: AtomicU64,
}

impl<R: DeviceMemoryResource> Pool<R> {
    /// Creates a pool of a context's device over `source`, with its first slab.
    ///
    /// # Errors
    /// [`ResourceError::WrongOrdinal`] for another device's source, or the source's error.
    pub fn new(
        source: R,
        context: &Context,
        settings: PoolSettings,
    ) -> Result<Pool<R>, ResourceError> {
        let internal = context.stream()?;
        check_stream(source.ordinal(), &internal)?;
        let pool = Pool {
            ordinal: source.ordinal(),
            source,
            origin: Origin::unique(),
            settings,
            shards: Shards::new(settings.limit),
            clock: EventClock::new(),
            slots: StreamSlots::new(internal),
            slabs: Mutex::default(),
            growth: Mutex::default(),
            waits: AtomicU64::new(0),
        };
        if settings.initial > 0 {
            pool.add_slab(
                settings
                    .initial
                    .next_multiple_of(SLAB_STEP)
                    .min(settings.maximum),
            )?;
        }
        Ok(pool)
    }

    /// Returns the source of the slabs.
    pub fn source(&self) -> &R {
        &self.source
    }

    /// Returns statistics, summed while other threads keep allocating.
    pub fn statistics(&self) -> PoolStatistics {
        let totals = self.shards.totals();
        let slabs = self.slabs();
        PoolStatistics {
            reserved: slabs.bytes,
            slabs: slabs.all.iter().flatten().count(),
            requested: totals.requested,
            live: totals.live,
            blocks: totals.blocks,
            free: totals.free,
            largest_free: totals.largest_free,
            waits: self.waits.load(Ordering::Relaxed),
        }
    }

    /// Changes the limit of live bytes. Every allocation after the return obeys it, and live blocks
    /// stay.
    pub fn set_limit(&self, bytes: u64) {
        self.shards.set_limit(bytes);
    }

    /// Releases every slab without live blocks, behind the work that may still use the slab.
    /// Returns the released bytes.
    ///
    /// # Errors
    /// The error of the driver or the source. A slab that was not released stays in the pool.
    pub fn trim(&self) -> Result<u64, ResourceError> {
        let _one = self.lock_growth();
        self.release_empty_slabs()
    }

    /// Forgets a stream before its owner destroys it. Blocks that were freed in the stream stay
    /// ordered.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn forget_stream(&self, stream: &Stream) -> Result<(), ResourceError> {
        check_stream(self.ordinal, stream)?;
        Ok(self.slots.forget(stream)?)
    }

    /// Finds credit and room for a request in any shard.
    fn allocate_slow(&self, slot: usize, request: Request) -> Result<Allocation, ResourceError> {
        if let Some(allocation) = self.shards.allocate_with_draw(slot, request) {
            return Ok(allocation);
        }
        let over = |found: BudgetSnapshot| self.over_budget(request, found);
        self.shards.charge(request.bytes).map_err(over)?;
        if let Some(allocation) = self.shards.allocate_charged(slot, request) {
            return Ok(allocation);
        }
        let _one = self.lock_growth();
        self.allocate_or_grow(request)
            .inspect_err(|_| self.shards.uncharge(request.bytes))
    }

    fn over_budget(&self, request: Request, found: BudgetSnapshot) -> ResourceError {
        ResourceError::OverBudget {
            ordinal: self.ordinal,
            requested: request.bytes,
            used: found.used,
            limit: found.limit,
        }
    }

    /// Finds room unless a block was taken, and orders the stream behind the block's earlier users.
    #[cold]
    fn place_slow(
        &self,
        allocated: Option<Allocation>,
        request: Request,
        stream: &Stream,
        slot: Option<StreamSlot>,
    ) -> Result<Allocation, ResourceError> {
        let allocation = match allocated {
            Some(allocation) => allocation,
            None => self.allocate_slow(slot.map_or(0, StreamSlot::index), request)?,
        };
        let unmet = match slot {
            Some(slot) => self.clock.unmet(slot, allocation.deps),
            None => allocation.deps.slots,
        };
        if unmet != 0 {
            self.order_after(&allocation, stream, slot, unmet)?;
        }
        if slot.is_none() {
            // A stream without a slot cannot be asked later for which streams it has waited.
            let _ = self
                .shards
                .update_use(allocation.handle, allocation.deps, 0, UseCount::Keep);
        }
        Ok(allocation)
    }

    /// Orders a stream behind a block's earlier users; frees the block unchanged if that fails.
    fn order_after(
        &self,
        allocation: &Allocation,
        stream: &Stream,
        slot: Option<StreamSlot>,
        others: u64,
    ) -> Result<(), ResourceError> {
        self.waits.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = self.slots.wait(&self.clock, stream, slot, others) {
            // The block was allocated a moment ago, and no caller knows it yet.
            let _ = self
                .shards
                .free(allocation.handle, allocation.deps, |all| all);
            return Err(error.into());
        }
        Ok(())
    }

    /// Checks that the block is this pool's and that the stream belongs to its device.
    #[inline]
    fn check(&self, block: BlockRef, stream: &Stream) -> Result<(), ResourceError> {
        let (origin, found) = (self.origin, block.origin);
        if origin != found {
            return Err(ResourceError::Foreign { origin, found });
        }
        check_stream(self.ordinal, stream)
    }

    /// Returns the block's handle in the shards and the slot of the stream that allocated the
    /// block.
    fn decode(&self, block: BlockRef) -> (BlockHandle, Option<StreamSlot>) {
        let handle = BlockHandle {
            shard: (block.generation & ((1 << SHARD_BITS) - 1)) as u32,
            id: BlockId {
                index: block.cookie as u32,
                serial: block.generation >> SHARD_BITS,
            },
        };
        (
            handle,
            StreamSlot::new((block.cookie >> u32::BITS) as usize),
        )
    }

    /// Frees a block behind the work of a stream and behind the deps of its allocation. The host
    /// waits for a stream without a slot.
    #[inline]
    fn free(&self, block: BlockRef, stream: &Stream) -> Result<(), ResourceError> {
        self.check(block, stream)?;
        let (handle, alloc_slot) = self.decode(block);
        let alloc_slot = alloc_slot.map_or(0, StreamSlot::bit);
        let freed = match self.slots.slot_for(stream)? {
            Some(slot) => {
                let deps = self.clock.stamp_free(slot.bit() | alloc_slot);
                let remaining = |before| self.clock.remaining_after_wait(slot, before);
                self.shards.free(handle, deps, remaining)
            }
            None => self.free_synchronized(handle, alloc_slot, stream)?,
        };
        freed.map_err(|reason| heap_error(block.generation, reason))
    }

    #[cold]
    fn free_synchronized(
        &self,
        handle: BlockHandle,
        alloc_slot: u64,
        stream: &Stream,
    ) -> Result<Result<(), HeapError>, CudaError> {
        stream.synchronize()?;
        Ok(self
            .shards
            .free(handle, self.clock.stamp_free(alloc_slot), |all| all))
    }
}

fn heap_error(generation: u64, reason: HeapError) -> ResourceError {
    match reason {
        HeapError::NotLive => ResourceError::Stale { generation },
        HeapError::InUse(uses) => ResourceError::InUse { generation, uses },
    }
}

impl<R: DeviceMemoryResource> DeviceMemoryResource for Pool<R> {
    #[inline]
    fn allocate(&self, layout: Layout, stream: &Stream, _: Tag) -> Result<Block, ResourceError> {
        check_request(self.ordinal, layout, MAX_ALIGN, stream)?;
        let request = Request {
            bytes: layout.size() as u64,
            align: layout.align() as u64,
        };
        let slot = self.slots.slot_for(stream)?;
        let allocated = self
            .shards
            .try_allocate(slot.map_or(0, StreamSlot::index), request);
        let allocation = match (slot, allocated) {
            (Some(slot), Some(allocation)) if self.clock.unmet(slot, allocation.deps) == 0 => {
                allocation
            }
            (slot, allocated) => self.place_slow(allocated, request, stream, slot)?,
        };
        let BlockHandle { shard: part, id } = allocation.handle;
        let alloc_slot = slot.map_or(epoch::SLOT_COUNT, StreamSlot::index) as u64;
        Ok(Block::new(BlockRef {
            address: allocation.address,
            layout,
            origin: self.origin,
            generation: id.serial << SHARD_BITS | u64::from(part),
            cookie: alloc_slot << u32::BITS | u64::from(id.index),
        }))
    }

    #[inline]
    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        match self.free(block.as_ref(), stream) {
            Ok(()) => Ok(()),
            Err(reason) => Err(FreeError::Refused { block, reason }),
        }
    }

    fn ordinal(&self) -> u32 {
        self.ordinal
    }

    fn origin(&self) -> Origin {
        self.origin
    }

    /// Live bytes are requested bytes of owned blocks. Retired bytes are slabs that the source
    /// failed to free.
    fn bytes_outstanding(&self) -> Outstanding {
        Outstanding {
            live: self.shards.totals().requested,
            retired: self.source.bytes_outstanding().retired,
        }
    }

    fn budget_snapshot(&self) -> Option<BudgetSnapshot> {
        Some(self.shards.budget()).filter(|budget| budget.limit != u64::MAX)
    }

    fn reap_pending(&self) -> Result<Reaped, ResourceError> {
        self.source.reap_pending()
    }

    fn supports_block_use_tracking(&self) -> bool {
        true
    }

    /// Also orders the stream behind the present work of the allocating stream, such as the first
    /// write.
    fn prepare_block_use(
        &self,
        block: BlockRef,
        stream: &Stream,
        access: Access,
    ) -> Result<BlockUse, ResourceError> {
        let RecordedUse { slot, before } = self.record_use(block, stream, access, UseCount::Inc)?;
        let ordered = self.slots.wait(&self.clock, stream, Some(slot), before);
        if let Err(error) = ordered {
            self.record_use(block, stream, access, UseCount::Dec)?;
            return Err(error.into());
        }
        Ok(BlockUse {
            block,
            stream: stream.key(),
            access,
        })
    }

    fn finish_block_use(&self, used: BlockUse, stream: &Stream) -> Result<(), ResourceError> {
        if used.stream != stream.key() {
            let generation = used.block.generation;
            return Err(ResourceError::WrongStream { generation });
        }
        self.record_use(used.block, stream, used.access, UseCount::Dec)
            .map(drop)
    }

    fn record_block_use(
        &self,
        block: BlockRef,
        stream: &Stream,
        access: Access,
    ) -> Result<(), ResourceError> {
        self.record_use(block, stream, access, UseCount::Keep)
            .map(drop)
    }

    fn kind(&self) -> &'static str {
        "pool"
    }
}

impl<R: DeviceMemoryResource> Drop for Pool<R> {
    /// Releases slabs without live blocks and leaves the others to the context.
    fn drop(&mut self) {
        let _ = self.trim();
    }
}
