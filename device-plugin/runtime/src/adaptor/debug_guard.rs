//! A layer that finds writes past a block's ends and after its free.
//!
//! Each block lies between two zones of known bytes, which are looked at when it is freed. What is allocated is filled
//! with one byte, what is freed with another; freed blocks stay in quarantine, are looked at when they leave it,
//! and only then are free. It waits for the whole context at each free: a layer for hunting bugs. Over
//! [`Exportable::guarded`](crate::Exportable::guarded) a kernel that goes further faults at once.
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::collections::{HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::adaptor::upstream::{Under, pass_on};
use crate::driver::{Context, Stream};
use crate::error::{CudaError, ErrorClass, FreeError, ResourceError};
use crate::resource::{
    Block, BlockRef, BlockUse, DeviceMemoryResource, Outstanding, Reaped, Tag, check_own,
    check_stream, take_live,
};

/// Bytes of a zone, at least.
const ZONE: usize = 256;
/// What a zone is filled with.
const CANARY: u8 = 0xCA;
/// What a new block is filled with.
const FRESH: u8 = 0xCD;
/// What a freed block is filled with.
const FREED: u8 = 0xDD;

/// A block that was freed.
#[derive(Debug)]
struct Quarantined {
    /// As the resource under the guard knows it.
    block: Block,
    stream: Stream,
    /// As the guard's user knew it.
    outer: BlockRef,
}

#[derive(Debug, Default)]
struct State {
    /// Blocks that somebody owns, and their bytes.
    live: HashSet<BlockRef>,
    live_bytes: u64,
    quarantine: VecDeque<Quarantined>,
    /// Bytes of blocks in quarantine, and of such as are leaving it now.
    quarantined_bytes: u64,
    leaving: Vec<BlockRef>,
    /// Blocks that left, and that the resource under the guard has not given back when it was last asked.
    below: Vec<BlockRef>,
    found: Vec<ResourceError>,
}

/// Zones and quarantine over a resource.
#[derive(Debug)]
pub struct Guard<R> {
    under: Under<R>,
    /// Bytes that the quarantine may keep.
    most: u64,
    state: Mutex<State>,
}

impl<R: DeviceMemoryResource> Guard<R> {
    /// Guards blocks, and keeps freed ones in a quarantine of so many bytes.
    pub fn new(resource: R, quarantine: u64) -> Self {
        Guard {
            under: Under::new(resource),
            most: quarantine,
            state: Mutex::default(),
        }
    }

    /// Writes after a free that were found when blocks left the quarantine, since this was last asked.
    pub fn take_found(&self) -> Vec<ResourceError> {
        std::mem::take(&mut self.lock().found)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The block under the guard's, with the zones.
    fn inner(&self, block: BlockRef) -> Result<BlockRef, ResourceError> {
        Ok(BlockRef {
            address: block.address - zone(block.layout) as u64,
            layout: with_zones(block.layout, self.ordinal())?,
            ..self.under.below(block)
        })
    }

    /// The block of a use as the resource under the guard knows it; one that was freed may still be live there.
    fn used(&self, block: BlockRef) -> Result<BlockRef, ResourceError> {
        let (origin, found, generation) = (self.under.origin, block.origin, block.generation);
        if found != origin {
            return Err(ResourceError::Foreign { origin, found });
        }
        if !self.lock().live.contains(&block) {
            return Err(ResourceError::Stale { generation });
        }
        self.inner(block)
    }

    /// Whether a block is in quarantine, or leaving it now.
    fn is_kept(&self, block: BlockRef) -> bool {
        let state = self.lock();
        let mut kept = state.quarantine.iter().map(|kept| kept.outer);
        kept.any(|kept| kept == block) || state.leaving.contains(&block)
    }

    /// The first byte of the zones that was overwritten.
    fn check_zones(&self, context: &Context, block: BlockRef) -> Result<(), ResourceError> {
        let before = zone(block.layout);
        let (start, end) = (block.address - before as u64, block.address + block.bytes());
        for (address, bytes) in [(start, before), (end, ZONE)] {
            if let Some(offset) = differs(context, address, bytes, CANARY)? {
                return Err(corrupted(block, address + offset, true));
            }
        }
        Ok(())
    }

    /// Lets the oldest blocks go, until no more than `most` bytes are in quarantine.
    fn release(&self, most: u64) -> Result<(), ResourceError> {
        let mut answer = Ok(());
        while let Some(gone) = self.oldest(most) {
            let outer = gone.outer;
            if let Err(error) = self.look(&gone) {
                match error {
                    ResourceError::Corrupted { .. } => self.lock().found.push(error),
                    error => answer = Err(error),
                }
            }
            let refused = match self.under.resource.deallocate(gone.block, &gone.stream) {
                Ok(()) => None,
                Err(FreeError::Retired { source, .. }) => {
                    answer = Err(source.into());
                    None
                }
                Err(FreeError::Refused { block, why }) => {
                    answer = Err(why);
                    Some(Quarantined { block, ..gone })
                }
            };
            let retired = refused.is_none() && self.is_retired_below(outer);
            let mut state = self.lock();
            state.leaving.retain(|leaving| *leaving != outer);
            state.below.extend(retired.then_some(outer));
            if let Some(stays) = refused {
                state.quarantine.push_front(stays);
                break;
            }
            state.quarantined_bytes -= outer.bytes();
        }
        answer
    }

    /// Takes the oldest block out of a quarantine that is too large.
    fn oldest(&self, most: u64) -> Option<Quarantined> {
        let mut state = self.lock();
        if state.quarantined_bytes <= most {
            return None;
        }
        let gone = state.quarantine.pop_front()?;
        state.leaving.push(gone.outer);
        Some(gone)
    }

    fn is_retired_below(&self, block: BlockRef) -> bool {
        let inner = self.inner(block);
        inner.is_ok_and(|inner| self.under.resource.is_retired(inner))
    }

    /// Whether a freed block is as it was left.
    fn look(&self, gone: &Quarantined) -> Result<(), ResourceError> {
        let (context, start) = (gone.stream.context(), gone.block.address());
        context.synchronize()?;
        match differs(context, start, gone.block.as_ref().layout.size(), FREED)? {
            Some(offset) => Err(corrupted(gone.outer, start + offset, false)),
            None => Ok(()),
        }
    }
}

fn corrupted(block: BlockRef, address: u64, before: bool) -> ResourceError {
    ResourceError::Corrupted {
        generation: block.generation,
        address,
        before,
    }
}

/// Bytes of the zone before a block: so many that the block is aligned if the zone is.
fn zone(layout: Layout) -> usize {
    layout.align().max(ZONE)
}

fn with_zones(layout: Layout, ordinal: u32) -> Result<Layout, ResourceError> {
    let asked = layout.size() as u64;
    if asked == 0 {
        return Err(ResourceError::ZeroBytes { ordinal });
    }
    let size = layout.size().checked_add(zone(layout) + ZONE);
    size.and_then(|size| Layout::from_size_align(size, layout.align()).ok())
        .ok_or(ResourceError::TooLarge { ordinal, asked })
}

/// The first byte of a range that is not as told.
fn differs(
    context: &Context,
    address: u64,
    bytes: usize,
    expected: u8,
) -> Result<Option<u64>, CudaError> {
    const STEP: usize = 1 << 20;
    let mut buffer = vec![0; bytes.min(STEP)];
    for start in (0..bytes).step_by(STEP) {
        let part = &mut buffer[..STEP.min(bytes - start)];
        context.copy_from_device(part, address + start as u64)?;
        if let Some(place) = part.iter().position(|byte| *byte != expected) {
            return Ok(Some((start + place) as u64));
        }
    }
    Ok(None)
}

impl<R: DeviceMemoryResource> DeviceMemoryResource for Guard<R> {
    fn allocate(&self, layout: Layout, stream: &Stream, tag: Tag) -> Result<Block, ResourceError> {
        check_stream(self.ordinal(), stream)?;
        let zoned = with_zones(layout, self.ordinal())?;
        let block = match self.under.allocate(zoned, stream, tag) {
            Err(error)
                if error.class() == ErrorClass::OutOfMemory
                    && self.reap_pending().is_ok_and(|reaped| reaped.freed > 0) =>
            {
                self.under.allocate(zoned, stream, tag)?
            }
            other => other?,
        };
        let (context, whole, before) = (stream.context(), block.as_ref(), zone(layout));
        let filled = context
            .fill_async(whole.address, CANARY, whole.layout.size(), stream)
            .and_then(|()| {
                context.fill_async(whole.address + before as u64, FRESH, layout.size(), stream)
            });
        if let Err(error) = filled {
            // A block that cannot be filled is nobody's: where its free fails too it stays counted below.
            let _ = self.under.deallocate(block, stream);
            return Err(error.into());
        }
        let block = BlockRef {
            address: whole.address + before as u64,
            layout,
            ..whole
        };
        let mut state = self.lock();
        state.live.insert(block);
        state.live_bytes += block.bytes();
        Ok(Block::new(block))
    }

    /// A block whose zones were overwritten is refused, and kept as it is.
    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        let block = check_own(self.under.origin, block)?;
        let block = take_live(&mut self.lock().live, block)?;
        let outer = block.as_ref();
        let prepared = check_stream(self.ordinal(), stream)
            .and_then(|()| Ok(stream.context().synchronize()?))
            .and_then(|()| self.check_zones(stream.context(), outer))
            .and_then(|()| self.inner(outer))
            .and_then(|inner| {
                stream
                    .context()
                    .fill(inner.address, FREED, inner.layout.size())?;
                Ok(inner)
            });
        let inner = match prepared {
            Ok(inner) => inner,
            Err(why) => {
                self.lock().live.insert(outer);
                return Err(FreeError::Refused { block, why });
            }
        };
        {
            let mut state = self.lock();
            state.live_bytes -= outer.bytes();
            state.quarantined_bytes += outer.bytes();
            state.quarantine.push_back(Quarantined {
                block: Block::new(inner),
                stream: stream.clone(),
                outer,
            });
        }
        // This block is in quarantine; what others fail with is told to who reaps.
        let _ = self.release(self.most);
        Ok(())
    }

    fn bytes_outstanding(&self) -> Outstanding {
        let mut state = self.lock();
        state.below.retain(|block| self.is_retired_below(*block));
        let below: u64 = state.below.iter().map(BlockRef::bytes).sum();
        Outstanding {
            live: state.live_bytes,
            retired: state.quarantined_bytes + below,
        }
    }

    /// Empties the quarantine.
    fn reap_pending(&self) -> Result<Reaped, ResourceError> {
        let before = self.bytes_outstanding().retired;
        let released = self.release(0);
        self.under.resource.reap_pending()?;
        released?;
        let pending = self.bytes_outstanding().retired;
        Ok(Reaped {
            freed: before.saturating_sub(pending),
            pending,
        })
    }

    fn is_retired(&self, block: BlockRef) -> bool {
        self.is_kept(block) || self.is_retired_below(block)
    }

    fn prepare_block_use(
        &self,
        block: BlockRef,
        stream: &Stream,
    ) -> Result<BlockUse, ResourceError> {
        let used = self
            .under
            .resource
            .prepare_block_use(self.used(block)?, stream)?;
        Ok(BlockUse { block, ..used })
    }

    fn finish_block_use(&self, used: BlockUse, stream: &Stream) -> Result<(), ResourceError> {
        let block = self.inner(used.block)?;
        self.under
            .resource
            .finish_block_use(BlockUse { block, ..used }, stream)
    }

    fn record_block_use(&self, block: BlockRef, stream: &Stream) -> Result<(), ResourceError> {
        self.under
            .resource
            .record_block_use(self.used(block)?, stream)
    }

    fn kind(&self) -> &'static str {
        "guard"
    }

    pass_on!(identity, budget_snapshot);
}
