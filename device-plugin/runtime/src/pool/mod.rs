//! The pool: blocks cut from slabs of another resource, in tens of nanoseconds and without a call of the driver.
//!
//! * [`size_classes`] says which list a size stands in
//! * [`tlsf`] places blocks and makes free neighbours one
//! * [`shard_affinity`] keeps threads apart, [`lock`](crate::sync::biased_lock) those that meet
//! * [`shards`] has a heap for each of many shards over a central one, and loses no byte between them
//! * [`epoch`] says what a free block still waits for
//! * [`stream_slots`] numbers streams, and puts one behind others
//! * this file is the resource: it grows by slabs, gives empty ones back, and lets streams take blocks from one another
//!
//! A block that was freed in a stream goes to the next request of that stream as it is. Where another stream takes
//! it, that stream is put behind the first by an event, which is recorded only then. Sizes are whole multiples of
//! 256 bytes, and a rest of up to 1/64 of a block (16 KiB at most) stays with it.
#![forbid(unsafe_code)]

mod epoch;
mod shard_affinity;
mod shards;
mod size_classes;
mod stream_slots;
mod tlsf;

use std::alloc::Layout;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::driver::{Context, Stream};
use crate::error::{CudaError, ErrorClass, FreeError, ResourceError};
use crate::resource::{
    Block, BlockRef, BlockUse, BudgetSnapshot, DeviceMemoryResource, Origin, Outstanding, Reaped,
    Tag, check_request, check_stream,
};
use epoch::{After, Lane, Order};
use shards::{Arena, Place, Placed, Request};
use stream_slots::Lanes;
use tlsf::{BlockId, Open, Refusal, Whole};

/// What slabs are multiples of: the driver takes linear memory of more than 1 MiB in such steps.
const SLAB_STEP: u64 = 2 << 20;
/// The coarsest alignment of a block.
const MOST_ALIGN: usize = 2 << 20;
/// Bits of a generation that say the part; the others are the serial number there.
const PART_BITS: u32 = 6;

/// How large a pool is, and how it grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolSettings {
    /// Bytes of the slab that it begins with; 0 for none.
    pub initial: u64,
    /// Bytes that it may take from its source.
    pub maximum: u64,
    /// Bytes that it grows by, where they are to be had and enough.
    pub step: u64,
    /// Bytes that live blocks may have, as asked for: an exact budget that costs an allocation nothing.
    /// [`Pool::set_limit`] changes it.
    pub limit: u64,
}

impl Default for PoolSettings {
    fn default() -> PoolSettings {
        PoolSettings {
            initial: 0,
            maximum: u64::MAX,
            step: 256 << 20,
            limit: u64::MAX,
        }
    }
}

/// A pool in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStatistics {
    /// Bytes taken from the source.
    pub reserved: u64,
    /// Slabs that they are in.
    pub slabs: usize,
    /// Bytes of live blocks as asked for.
    pub asked: u64,
    /// Bytes of live blocks as cut.
    pub live: u64,
    /// Live blocks.
    pub blocks: u64,
    /// Bytes free for the next request.
    pub free: u64,
    /// The largest free range. Ranges of several shards that touch count as one only when they are needed as one.
    pub largest_free: u64,
    /// Blocks that one stream took from others and had to be put behind them for.
    pub waits: u64,
}

#[derive(Debug)]
struct Slab {
    block: Block,
    whole: Whole,
}

#[derive(Debug, Default)]
struct Slabs {
    /// By the region's number.
    all: Vec<Option<Slab>>,
    bytes: u64,
}

/// A pool over a source of memory.
///
/// A stream that was not made by this crate is given back by [`Pool::forget`] before it is destroyed.
#[derive(Debug)]
pub struct Pool<R: DeviceMemoryResource> {
    source: R,
    ordinal: u32,
    origin: Origin,
    settings: PoolSettings,
    arena: Arena,
    order: Order,
    lanes: Lanes,
    slabs: Mutex<Slabs>,
    /// Held by who looks for room everywhere, grows or gives back: one does it for all that wait.
    growing: Mutex<()>,
    waits: AtomicU64,
}

impl<R: DeviceMemoryResource> Pool<R> {
    /// A pool of a context's device over `source`, with its first slab.
    ///
    /// # Errors
    /// [`ResourceError::WrongOrdinal`] for another device's source, or what the source answered.
    pub fn new(
        source: R,
        context: &Context,
        settings: PoolSettings,
    ) -> Result<Pool<R>, ResourceError> {
        let keeper = context.stream()?;
        check_stream(source.ordinal(), &keeper)?;
        let pool = Pool {
            ordinal: source.ordinal(),
            source,
            origin: Origin::unique(),
            settings,
            arena: Arena::new(settings.limit),
            order: Order::new(),
            lanes: Lanes::new(keeper),
            slabs: Mutex::default(),
            growing: Mutex::default(),
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

    /// What the slabs are taken from.
    pub fn source(&self) -> &R {
        &self.source
    }

    /// The pool in numbers: sums over a moment in which others go on.
    pub fn statistics(&self) -> PoolStatistics {
        let totals = self.arena.totals();
        let slabs = self.slabs();
        PoolStatistics {
            reserved: slabs.bytes,
            slabs: slabs.all.iter().flatten().count(),
            asked: totals.asked,
            live: totals.live,
            blocks: totals.blocks,
            free: totals.free,
            largest_free: totals.largest_free,
            waits: self.waits.load(Ordering::Relaxed),
        }
    }

    /// Changes the limit of live bytes: what is allocated after the return is within it. What is live stays.
    pub fn set_limit(&self, bytes: u64) {
        self.arena.set_limit(bytes);
    }

    /// Gives every slab without a live block back to the source, behind the work that may still use it; how many bytes
    /// those were.
    ///
    /// # Errors
    /// What the driver or the source answered. A slab that was not given back stays in the pool.
    pub fn trim(&self) -> Result<u64, ResourceError> {
        let _one = self.growing();
        self.give_back()
    }

    /// Forgets a stream, before it is destroyed by whoever made it. What was freed in it stays ordered.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn forget(&self, stream: &Stream) -> Result<(), ResourceError> {
        check_stream(self.ordinal, stream)?;
        Ok(self.lanes.forget(stream)?)
    }

    fn slabs(&self) -> MutexGuard<'_, Slabs> {
        self.slabs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn growing(&self) -> MutexGuard<'_, ()> {
        self.growing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gets a request credit and room, wherever they are.
    fn find_room(&self, lane: usize, request: Request) -> Result<Placed, ResourceError> {
        if let Some(placed) = self.arena.take_drawing(lane, request) {
            return Ok(placed);
        }
        let over = |found: BudgetSnapshot| self.over_budget(request, found);
        self.arena.charge(request.bytes).map_err(over)?;
        if let Some(placed) = self.arena.take_charged(lane, request) {
            return Ok(placed);
        }
        let _one = self.growing();
        self.make_room(request)
            .inspect_err(|_| self.arena.discharge(request.bytes))
    }

    /// Takes room where there is any, or more from the source, or makes room there.
    fn make_room(&self, request: Request) -> Result<Placed, ResourceError> {
        let mut gave_back = false;
        loop {
            if let Some(placed) = self.arena.take_anywhere(request) {
                return Ok(placed);
            }
            // A new slab may go to a thread that was quicker: then the next one.
            let Err(error) = self.grow(request) else {
                continue;
            };
            if error.class() != ErrorClass::OutOfMemory || gave_back {
                return Err(error);
            }
            gave_back = true;
            let given = self.give_back()?;
            if given + self.source.reap_pending()?.freed == 0 {
                return Err(error);
            }
        }
    }

    fn over_budget(&self, request: Request, found: BudgetSnapshot) -> ResourceError {
        ResourceError::OverBudget {
            ordinal: self.ordinal,
            asked: request.bytes,
            used: found.used,
            limit: found.limit,
        }
    }

    /// Adds a slab that has room for a request.
    fn grow(&self, request: Request) -> Result<(), ResourceError> {
        let used = self.slabs().bytes;
        let room = self.settings.maximum.saturating_sub(used);
        let least = request
            .bytes
            .checked_add(request.align)
            .and_then(|bytes| bytes.checked_next_multiple_of(SLAB_STEP))
            .filter(|&bytes| bytes <= room)
            .ok_or_else(|| {
                let limit = self.settings.maximum;
                self.over_budget(request, BudgetSnapshot { limit, used })
            })?;
        let wanted = self.settings.step.clamp(least, room);
        match self.add_slab(wanted) {
            Err(error) if error.class() == ErrorClass::OutOfMemory && wanted > least => {
                self.add_slab(least)
            }
            other => other,
        }
    }

    fn add_slab(&self, bytes: u64) -> Result<(), ResourceError> {
        let (keeper, lane) = self.lanes.keeper();
        let too_large = || ResourceError::TooLarge {
            ordinal: self.ordinal,
            asked: bytes,
        };
        let size = usize::try_from(bytes).map_err(|_| too_large())?;
        let layout =
            Layout::from_size_align(size, tlsf::GRANULE as usize).map_err(|_| too_large())?;
        let block = self.source.allocate(layout, keeper, Tag("slab"))?;
        let mut slabs = self.slabs();
        let vacant = slabs.all.iter().position(Option::is_none);
        let region = vacant.unwrap_or(slabs.all.len());
        // A source that is ordered by streams made it for the keeper's work.
        let after = match keeper.is_idle() {
            Ok(true) => After::NOTHING,
            _ => self.order.freed(lane.bit()),
        };
        let added = u32::try_from(region)
            .ok()
            .and_then(|region| self.arena.add(region, block.address(), bytes, after));
        let Some(whole) = added else {
            drop(slabs);
            // The source answers for it where it fails.
            let _ = self.source.deallocate(block, keeper);
            return Err(too_large());
        };
        if vacant.is_none() {
            slabs.all.push(None);
        }
        slabs.all[region] = Some(Slab { block, whole });
        slabs.bytes += bytes;
        Ok(())
    }

    /// Gives empty slabs back. Who holds `growing` waits for the device here, and only who needs that memory waits too.
    fn give_back(&self) -> Result<u64, ResourceError> {
        self.arena.return_chunks();
        let count = self.slabs().all.len();
        let mut given = 0;
        for region in 0..count {
            let mut slabs = self.slabs();
            let Some(after) = slabs.all[region]
                .as_ref()
                .and_then(|slab| self.arena.remove(slab.whole))
            else {
                continue;
            };
            let Some(slab) = slabs.all[region].take() else {
                continue;
            };
            drop(slabs);
            let bytes = slab.block.bytes();
            if let Err((slab, error)) = self.give_back_slab(slab, after) {
                let whole = self
                    .arena
                    .add(slab.whole.region, slab.block.address(), bytes, after);
                let slab = whole.map(|whole| Slab { whole, ..slab });
                self.slabs().all[region] = slab;
                return Err(error);
            }
            self.slabs().bytes -= bytes;
            given += bytes;
        }
        Ok(given)
    }

    fn give_back_slab(&self, slab: Slab, after: After) -> Result<(), (Slab, ResourceError)> {
        let (keeper, lane) = self.lanes.keeper();
        let missing = self.order.missing(lane, after);
        if let Err(error) = self.lanes.wait(&self.order, keeper, Some(lane), missing) {
            return Err((slab, error.into()));
        }
        match self.source.deallocate(slab.block, keeper) {
            Err(FreeError::Refused { block, why }) => Err((Slab { block, ..slab }, why)),
            // A free that failed is the source's to try again, and counted there.
            Ok(()) | Err(FreeError::Retired { .. }) => Ok(()),
        }
    }

    /// Finds room where none was taken yet, and puts the stream behind those that used it before.
    #[cold]
    fn place(
        &self,
        taken: Option<Placed>,
        request: Request,
        stream: &Stream,
        lane: Option<Lane>,
    ) -> Result<Placed, ResourceError> {
        let placed = match taken {
            Some(placed) => placed,
            None => self.find_room(lane.map_or(0, Lane::number), request)?,
        };
        let missing = match lane {
            Some(lane) => self.order.missing(lane, placed.after),
            None => placed.after.lanes,
        };
        if missing != 0 {
            self.put_behind(&placed, stream, lane, missing)?;
        }
        if lane.is_none() {
            // Nobody can ask its stream later what it waited for.
            let _ = self.arena.used(placed.place, placed.after, Open::Same);
        }
        Ok(placed)
    }

    /// Puts a stream behind those that used a block before; frees the block as it was where that fails.
    fn put_behind(
        &self,
        placed: &Placed,
        stream: &Stream,
        lane: Option<Lane>,
        others: u64,
    ) -> Result<(), ResourceError> {
        self.waits.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = self.lanes.wait(&self.order, stream, lane, others) {
            // It was allocated a moment ago, and nobody knows of it.
            let _ = self.arena.free(placed.place, placed.after, |all| all);
            return Err(error.into());
        }
        Ok(())
    }

    /// Checks that a block is this pool's, and a stream this device's.
    #[inline]
    fn check(&self, block: BlockRef, stream: &Stream) -> Result<(), ResourceError> {
        let (origin, found) = (self.origin, block.origin);
        if origin != found {
            return Err(ResourceError::Foreign { origin, found });
        }
        check_stream(self.ordinal, stream)
    }

    /// A block's name in the arena, and the lane that it was allocated in.
    fn known(&self, block: BlockRef) -> (Place, Option<Lane>) {
        let place = Place {
            part: (block.generation & ((1 << PART_BITS) - 1)) as u32,
            id: BlockId {
                index: block.cookie as u32,
                serial: block.generation >> PART_BITS,
            },
        };
        (place, Lane::new((block.cookie >> u32::BITS) as usize))
    }

    /// The place and the lanes of a block and a stream that is to use it.
    fn tracked(
        &self,
        block: BlockRef,
        stream: &Stream,
    ) -> Result<(Place, Lane, Lane), ResourceError> {
        self.check(block, stream)?;
        let (place, home) = self.known(block);
        match (home, self.lanes.of(stream)?) {
            (Some(home), Some(lane)) => Ok((place, home, lane)),
            _ => Err(self.untracked()),
        }
    }

    fn used(
        &self,
        block: BlockRef,
        stream: &Stream,
        open: Open,
    ) -> Result<(Lane, Lane), ResourceError> {
        let (place, home, lane) = self.tracked(block, stream)?;
        let after = self.order.freed(lane.bit());
        let used = self.arena.used(place, after, open);
        used.map_err(|why| refused(block.generation, why))?;
        Ok((home, lane))
    }

    /// Frees a block behind the work in a stream, and behind what its allocation was put behind. A stream without a lane
    /// is waited for.
    #[inline]
    fn free(&self, block: BlockRef, stream: &Stream) -> Result<(), ResourceError> {
        self.check(block, stream)?;
        let (place, home) = self.known(block);
        let home = home.map_or(0, Lane::bit);
        let freed = match self.lanes.of(stream)? {
            Some(lane) => {
                let after = self.order.freed(lane.bit() | home);
                let left = |before| self.order.left(lane, before);
                self.arena.free(place, after, left)
            }
            None => self.free_after_all(place, home, stream)?,
        };
        freed.map_err(|why| refused(block.generation, why))
    }

    #[cold]
    fn free_after_all(
        &self,
        place: Place,
        home: u64,
        stream: &Stream,
    ) -> Result<Result<(), Refusal>, CudaError> {
        stream.synchronize()?;
        Ok(self.arena.free(place, self.order.freed(home), |all| all))
    }
}

fn refused(generation: u64, why: Refusal) -> ResourceError {
    match why {
        Refusal::NotLive => ResourceError::Stale { generation },
        Refusal::InUse(uses) => ResourceError::InUse { generation, uses },
    }
}

impl<R: DeviceMemoryResource> DeviceMemoryResource for Pool<R> {
    #[inline]
    fn allocate(&self, layout: Layout, stream: &Stream, _: Tag) -> Result<Block, ResourceError> {
        check_request(self.ordinal, layout, MOST_ALIGN, stream)?;
        let request = Request {
            bytes: layout.size() as u64,
            align: layout.align() as u64,
        };
        let lane = self.lanes.of(stream)?;
        let taken = self.arena.take(lane.map_or(0, Lane::number), request);
        let placed = match (lane, taken) {
            (Some(lane), Some(placed)) if self.order.missing(lane, placed.after) == 0 => placed,
            (lane, taken) => self.place(taken, request, stream, lane)?,
        };
        let Place { part, id } = placed.place;
        let home = lane.map_or(epoch::STREAMS, Lane::number) as u64;
        Ok(Block::new(BlockRef {
            address: placed.address,
            layout,
            origin: self.origin,
            generation: id.serial << PART_BITS | u64::from(part),
            cookie: home << u32::BITS | u64::from(id.index),
        }))
    }

    #[inline]
    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        match self.free(block.as_ref(), stream) {
            Ok(()) => Ok(()),
            Err(why) => Err(FreeError::Refused { block, why }),
        }
    }

    fn ordinal(&self) -> u32 {
        self.ordinal
    }

    fn origin(&self) -> Origin {
        self.origin
    }

    /// Live are the blocks that somebody owns, as asked for; retired are slabs that the source could not free.
    fn bytes_outstanding(&self) -> Outstanding {
        Outstanding {
            live: self.arena.totals().asked,
            retired: self.source.bytes_outstanding().retired,
        }
    }

    fn budget_snapshot(&self) -> Option<BudgetSnapshot> {
        Some(self.arena.limit()).filter(|budget| budget.limit != u64::MAX)
    }

    fn reap_pending(&self) -> Result<Reaped, ResourceError> {
        self.source.reap_pending()
    }

    /// Also puts the stream behind all that is in the block's own stream now, such as what wrote it.
    fn prepare_block_use(
        &self,
        block: BlockRef,
        stream: &Stream,
    ) -> Result<BlockUse, ResourceError> {
        let (home, lane) = self.used(block, stream, Open::More)?;
        if lane != home
            && let Err(error) = self.lanes.wait(&self.order, stream, Some(lane), home.bit())
        {
            self.used(block, stream, Open::Fewer)?;
            return Err(error.into());
        }
        Ok(BlockUse {
            block,
            stream: stream.key(),
        })
    }

    fn finish_block_use(&self, used: BlockUse, stream: &Stream) -> Result<(), ResourceError> {
        if used.stream != stream.key() {
            let generation = used.block.generation;
            return Err(ResourceError::WrongStream { generation });
        }
        self.used(used.block, stream, Open::Fewer).map(drop)
    }

    fn record_block_use(&self, block: BlockRef, stream: &Stream) -> Result<(), ResourceError> {
        self.used(block, stream, Open::Same).map(drop)
    }

    fn kind(&self) -> &'static str {
        "pool"
    }
}

impl<R: DeviceMemoryResource> Drop for Pool<R> {
    /// Slabs without a live block go back to the source; the others are left to the context.
    fn drop(&mut self) {
        let _ = self.trim();
    }
}
