//! Detects writes past the ends of a block and after its free.
//!
//! Each block lies between two red zones of known bytes, which the free checks. The adaptor fills
//! allocated memory with one byte value and freed memory with another. Freed blocks stay in
//! quarantine, are checked when they leave it, and only then return to the upstream. Each free
//! synchronizes the context, so the adaptor is for debugging. Over
//! [`Exportable::guarded`](crate::Exportable::guarded) a kernel that accesses memory farther away
//! faults at once.
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::collections::{HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::adaptor::upstream::{Upstream, forward};
use crate::driver::{Access, Context, Stream};
use crate::error::{CudaError, ErrorClass, ResourceError};
use crate::resource::{
    Block, BlockRef, BlockUse, DeviceMemoryResource, FreeError, Outstanding, Reaped, Tag,
    check_origin, check_stream, remove_live,
};
use crate::vouched;

/// Smallest size of a red zone in bytes.
const MIN_REDZONE: usize = 256;
const REDZONE_FILL: u8 = 0xCA;
const ALLOCATED_FILL: u8 = 0xCD;
const FREED_FILL: u8 = 0xDD;

/// Freed block in quarantine.
#[derive(Debug)]
struct Quarantined {
    /// Block as the upstream knows it, with its red zones.
    block: Block,
    stream: Stream,
    /// Block as the caller knew it.
    user_block: BlockRef,
}

#[derive(Debug, Default)]
struct State {
    /// Blocks that have an owner.
    live: HashSet<BlockRef>,
    live_bytes: u64,
    /// Blocks with a prepared use that is not finished, once for each use.
    open_uses: Vec<BlockRef>,
    quarantine: VecDeque<Quarantined>,
    /// Bytes of blocks in quarantine or leaving it now.
    quarantined_bytes: u64,
    leaving: Vec<BlockRef>,
    /// Blocks that left the quarantine and that the upstream had not released at the last check.
    retired_upstream: Vec<BlockRef>,
    violations: Vec<ResourceError>,
}

/// Red zones and quarantine over an upstream resource.
#[derive(Debug)]
pub struct DebugGuard<R> {
    upstream: Upstream<R>,
    /// Largest number of bytes in quarantine.
    quarantine_limit: u64,
    state: Mutex<State>,
}

impl<R: DeviceMemoryResource> DebugGuard<R> {
    /// Guards the blocks of a resource, with a quarantine of `quarantine` bytes.
    pub fn new(resource: R, quarantine: u64) -> Self {
        DebugGuard {
            upstream: Upstream::new(resource),
            quarantine_limit: quarantine,
            state: Mutex::default(),
        }
    }

    /// Returns and clears the writes after a free that were found since the last call.
    pub fn take_violations(&self) -> Vec<ResourceError> {
        std::mem::take(&mut self.lock().violations)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the upstream's block, which includes the red zones.
    fn with_redzones(&self, block: BlockRef) -> Result<BlockRef, ResourceError> {
        Ok(BlockRef {
            // The upstream refuses the address of a block that was never allocated.
            address: block
                .address
                .wrapping_sub(redzone_before(block.layout) as u64),
            layout: layout_with_redzones(block.layout, self.ordinal())?,
            ..self.upstream.translate(block)
        })
    }

    /// Returns the upstream's block for a use. The upstream may still hold a block that was freed
    /// here, so the adaptor checks first.
    fn check_live(&self, block: BlockRef) -> Result<BlockRef, ResourceError> {
        let (origin, found, generation) = (self.upstream.origin, block.origin, block.generation);
        if found != origin {
            return Err(ResourceError::Foreign { origin, found });
        }
        if !self.lock().live.contains(&block) {
            return Err(ResourceError::Stale { generation });
        }
        self.with_redzones(block)
    }

    /// Refuses a block with an open use. The upstream would refuse it too, but only when it leaves
    /// the quarantine.
    fn check_unused(&self, block: BlockRef) -> Result<(), ResourceError> {
        let state = self.lock();
        let open = state.open_uses.iter().filter(|open| **open == block);
        match open.count() as u32 {
            0 => Ok(()),
            uses => Err(ResourceError::InUse {
                generation: block.generation,
                uses,
            }),
        }
    }

    /// Returns whether a block is in quarantine or leaving it now.
    fn is_quarantined(&self, block: BlockRef) -> bool {
        let state = self.lock();
        let mut quarantined = state
            .quarantine
            .iter()
            .map(|quarantined| quarantined.user_block);
        quarantined.any(|quarantined| quarantined == block) || state.leaving.contains(&block)
    }

    /// Fails with the first overwritten byte of the red zones.
    fn check_redzones(&self, context: &Context, block: BlockRef) -> Result<(), ResourceError> {
        let below = redzone_before(block.layout);
        let (start, end) = (block.address - below as u64, block.address + block.bytes());
        for (address, bytes) in [(start, below), (end, MIN_REDZONE)] {
            if let Some(offset) = first_mismatch(context, address, bytes, REDZONE_FILL)? {
                return Err(corrupted(block, address + offset, true));
            }
        }
        Ok(())
    }

    /// Releases the oldest blocks until at most `limit` bytes are in quarantine.
    fn drain_quarantine(&self, limit: u64) -> Result<(), ResourceError> {
        let mut result = Ok(());
        while let Some(quarantined) = self.pop_oldest(limit) {
            let outer = quarantined.user_block;
            if let Err(error) = self.check_freed_fill(&quarantined) {
                match error {
                    ResourceError::Corrupted { .. } => self.lock().violations.push(error),
                    error => result = Err(error),
                }
            }
            let refused = match self
                .upstream
                .resource
                .deallocate(quarantined.block, &quarantined.stream)
            {
                Ok(()) => None,
                Err(FreeError::Retired { source, .. }) => {
                    result = Err(source.into());
                    None
                }
                Err(FreeError::Refused { block, reason }) => {
                    result = Err(reason);
                    Some(Quarantined {
                        block,
                        ..quarantined
                    })
                }
            };
            let retired = refused.is_none() && self.is_retired_upstream(outer);
            let mut state = self.lock();
            state.leaving.retain(|leaving| *leaving != outer);
            self.forget_released(&mut state);
            state.retired_upstream.extend(retired.then_some(outer));
            if let Some(stays) = refused {
                state.quarantine.push_front(stays);
                break;
            }
            state.quarantined_bytes -= outer.bytes();
        }
        result
    }

    /// Removes the oldest block of a quarantine above `limit` bytes.
    fn pop_oldest(&self, limit: u64) -> Option<Quarantined> {
        let mut state = self.lock();
        if state.quarantined_bytes <= limit {
            return None;
        }
        let quarantined = state.quarantine.pop_front()?;
        state.leaving.push(quarantined.user_block);
        Some(quarantined)
    }

    fn is_retired_upstream(&self, block: BlockRef) -> bool {
        let inner = self.with_redzones(block);
        inner.is_ok_and(|inner| self.upstream.resource.is_retired(inner))
    }

    /// Forgets blocks that the upstream has released.
    fn forget_released(&self, state: &mut State) {
        state
            .retired_upstream
            .retain(|block| self.is_retired_upstream(*block));
    }

    /// Checks that no program wrote into a freed block.
    fn check_freed_fill(&self, quarantined: &Quarantined) -> Result<(), ResourceError> {
        let (context, start) = (quarantined.stream.context(), quarantined.block.address());
        context.synchronize()?;
        match first_mismatch(
            context,
            start,
            quarantined.block.as_ref().layout.size(),
            FREED_FILL,
        )? {
            Some(offset) => Err(corrupted(quarantined.user_block, start + offset, false)),
            None => Ok(()),
        }
    }
}

fn corrupted(block: BlockRef, address: u64, while_live: bool) -> ResourceError {
    ResourceError::Corrupted {
        generation: block.generation,
        address,
        while_live,
    }
}

/// Returns the size of the red zone before a block, which keeps the block's alignment.
fn redzone_before(layout: Layout) -> usize {
    layout.align().max(MIN_REDZONE)
}

fn layout_with_redzones(layout: Layout, ordinal: u32) -> Result<Layout, ResourceError> {
    let requested = layout.size() as u64;
    if requested == 0 {
        return Err(ResourceError::ZeroBytes { ordinal });
    }
    let size = layout
        .size()
        .checked_add(redzone_before(layout) + MIN_REDZONE);
    size.and_then(|size| Layout::from_size_align(size, layout.align()).ok())
        .ok_or(ResourceError::TooLarge { ordinal, requested })
}

/// Returns the offset of the first byte that differs from `expected`.
fn first_mismatch(
    context: &Context,
    address: u64,
    bytes: usize,
    expected: u8,
) -> Result<Option<u64>, CudaError> {
    const STEP: usize = 1 << 20;
    let mut buffer = vec![0; bytes.min(STEP)];
    for start in (0..bytes).step_by(STEP) {
        let part = &mut buffer[..STEP.min(bytes - start)];
        vouched::copy_from_device(context, part, address + start as u64)?;
        if let Some(place) = part.iter().position(|byte| *byte != expected) {
            return Ok(Some((start + place) as u64));
        }
    }
    Ok(None)
}

impl<R: DeviceMemoryResource> DeviceMemoryResource for DebugGuard<R> {
    fn allocate(&self, layout: Layout, stream: &Stream, tag: Tag) -> Result<Block, ResourceError> {
        check_stream(self.ordinal(), stream)?;
        let zoned = layout_with_redzones(layout, self.ordinal())?;
        let block = match self.upstream.allocate(zoned, stream, tag) {
            Err(error)
                if error.class() == ErrorClass::OutOfMemory
                    && self.reap_pending().is_ok_and(|reaped| reaped.freed > 0) =>
            {
                self.upstream.allocate(zoned, stream, tag)?
            }
            other => other?,
        };
        let (context, whole, offset) = (stream.context(), block.as_ref(), redzone_before(layout));
        let filled = vouched::fill_async(
            context,
            whole.address,
            REDZONE_FILL,
            whole.layout.size(),
            stream,
        )
        .and_then(|()| {
            vouched::fill_async(
                context,
                whole.address + offset as u64,
                ALLOCATED_FILL,
                layout.size(),
                stream,
            )
        });
        if let Err(error) = filled {
            // A block that cannot be filled has no owner. If its free fails, the upstream keeps
            // counting it.
            let _ = self.upstream.deallocate(block, stream);
            return Err(error.into());
        }
        let block = BlockRef {
            address: whole.address + offset as u64,
            layout,
            ..whole
        };
        let mut state = self.lock();
        state.live.insert(block);
        state.live_bytes += block.bytes();
        Ok(Block::new(block))
    }

    /// Refuses a block whose red zones were overwritten; the block stays live.
    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        let block = check_origin(self.upstream.origin, block)?;
        let block = remove_live(&mut self.lock().live, block)?;
        let outer = block.as_ref();
        let prepared = check_stream(self.ordinal(), stream)
            .and_then(|()| self.check_unused(outer))
            .and_then(|()| Ok(stream.context().synchronize()?))
            .and_then(|()| self.check_redzones(stream.context(), outer))
            .and_then(|()| self.with_redzones(outer))
            .and_then(|inner| {
                vouched::fill(
                    stream.context(),
                    inner.address,
                    FREED_FILL,
                    inner.layout.size(),
                )?;
                Ok(inner)
            });
        let inner = match prepared {
            Ok(inner) => inner,
            Err(reason) => {
                self.lock().live.insert(outer);
                return Err(FreeError::Refused { block, reason });
            }
        };
        {
            let mut state = self.lock();
            state.live_bytes -= outer.bytes();
            state.quarantined_bytes += outer.bytes();
            state.quarantine.push_back(Quarantined {
                block: Block::new(inner),
                stream: stream.clone(),
                user_block: outer,
            });
        }
        // This block is in quarantine. A later reap reports the failures of other blocks.
        let _ = self.drain_quarantine(self.quarantine_limit);
        Ok(())
    }

    fn bytes_outstanding(&self) -> Outstanding {
        let mut state = self.lock();
        self.forget_released(&mut state);
        let below: u64 = state.retired_upstream.iter().map(BlockRef::bytes).sum();
        Outstanding {
            live: state.live_bytes,
            retired: state.quarantined_bytes + below,
        }
    }

    /// Empties the quarantine.
    fn reap_pending(&self) -> Result<Reaped, ResourceError> {
        let before = self.bytes_outstanding().retired;
        let released = self.drain_quarantine(0);
        self.upstream.resource.reap_pending()?;
        released?;
        let pending = self.bytes_outstanding().retired;
        Ok(Reaped {
            freed: before.saturating_sub(pending),
            pending,
        })
    }

    fn is_retired(&self, block: BlockRef) -> bool {
        self.is_quarantined(block) || self.is_retired_upstream(block)
    }

    fn supports_block_use_tracking(&self) -> bool {
        self.upstream.resource.supports_block_use_tracking()
    }

    fn prepare_block_use(
        &self,
        block: BlockRef,
        stream: &Stream,
        access: Access,
    ) -> Result<BlockUse, ResourceError> {
        let used =
            self.upstream
                .resource
                .prepare_block_use(self.check_live(block)?, stream, access)?;
        self.lock().open_uses.push(block);
        Ok(BlockUse { block, ..used })
    }

    fn finish_block_use(&self, used: BlockUse, stream: &Stream) -> Result<(), ResourceError> {
        let (outer, block) = (used.block, self.with_redzones(used.block)?);
        self.upstream
            .resource
            .finish_block_use(BlockUse { block, ..used }, stream)?;
        let open_uses = &mut self.lock().open_uses;
        if let Some(index) = open_uses.iter().position(|open| *open == outer) {
            open_uses.swap_remove(index);
        }
        Ok(())
    }

    fn record_block_use(
        &self,
        block: BlockRef,
        stream: &Stream,
        access: Access,
    ) -> Result<(), ResourceError> {
        self.upstream
            .resource
            .record_block_use(self.check_live(block)?, stream, access)
    }

    fn kind(&self) -> &'static str {
        "debug-guard"
    }

    forward!(identity, budget_snapshot);
}
