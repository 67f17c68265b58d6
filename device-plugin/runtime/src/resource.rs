//! What every source of device memory, and every layer over one, has in common.
//!
//! A resource hands out [`Block`]s. A block is owned: whoever has it may free it, once, by giving it back to the
//! resource that it came from, which the block knows. [`BlockRef`] is the same without the right to free: it can
//! be copied, and may have gone stale.
//!
//! Layers (a budget, a log) are resources over a resource; each puts its own mark on a block, so that a block which
//! went out through a budget cannot come back past it.
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::collections::HashSet;
use std::fmt;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver::{Stream, StreamKey};
use crate::error::{FreeError, ResourceError};

/// What tells one resource of this process from all others.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Origin(NonZeroU64);

impl Origin {
    /// One that nobody has.
    pub fn unique() -> Origin {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // 2^64 resources are more than a process can make.
        Origin(NonZeroU64::new(NEXT.fetch_add(1, Ordering::Relaxed)).unwrap_or(NonZeroU64::MAX))
    }
}

impl fmt::Debug for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "resource {}", self.0)
    }
}

/// What an allocation is for: a word for logs and statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(pub &'static str);

/// A block as anybody may know it. Its memory may have been freed since.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockRef {
    /// The first address.
    pub address: u64,
    /// Size and alignment as asked for.
    pub layout: Layout,
    /// The resource that it came from.
    pub origin: Origin,
    /// The block's number; together with the cookie no other block of its source ever has it.
    pub generation: u64,
    /// What its source knows it by; means nothing to others.
    pub cookie: u64,
}

impl BlockRef {
    /// Bytes as asked for.
    pub fn bytes(&self) -> u64 {
        self.layout.size() as u64
    }

    /// The same block as the resource under a layer knows it.
    #[must_use]
    pub fn with_origin(self, origin: Origin) -> BlockRef {
        BlockRef { origin, ..self }
    }
}

/// A block that its holder owns. Dropping it frees nothing: the resource goes on counting it.
///
/// What is freed cannot be freed or used again:
///
/// ```compile_fail,E0382
/// # use bursar_runtime::{Block, DeviceMemoryResource, FreeError, driver::Stream};
/// fn twice(memory: &impl DeviceMemoryResource, block: Block, stream: &Stream) -> Result<(), FreeError> {
///     memory.deallocate(block, stream)?;
///     memory.deallocate(block, stream)
/// }
/// ```
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a block that is dropped stays allocated"]
pub struct Block(BlockRef);

impl Block {
    /// A block of a resource: for sources of memory only. One that its resource did not make, or that was freed, is
    /// refused by it.
    pub fn new(block: BlockRef) -> Block {
        Block(block)
    }

    /// What is known of it, without the right to free it.
    pub fn as_ref(&self) -> BlockRef {
        self.0
    }

    /// The first address.
    pub fn address(&self) -> u64 {
        self.0.address
    }

    /// Bytes as asked for.
    pub fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    /// The same block with the mark of another layer: for layers only.
    pub fn with_origin(self, origin: Origin) -> Block {
        Block(self.0.with_origin(origin))
    }
}

/// A use of a block by work in a stream, between its preparation and its end.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a use that is not finished keeps its block from being freed"]
pub struct BlockUse {
    /// The block.
    pub block: BlockRef,
    /// The stream.
    pub stream: StreamKey,
}

/// Bytes that a resource answers for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outstanding {
    /// In blocks that somebody owns.
    pub live: u64,
    /// In blocks that were freed, and that the driver has not yet given back.
    pub retired: u64,
}

impl Outstanding {
    /// All of them.
    pub fn total(self) -> u64 {
        self.live.saturating_add(self.retired)
    }
}

/// A budget at one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetSnapshot {
    /// Bytes that may be in use.
    pub limit: u64,
    /// Bytes that count: live ones, retired ones, and such as are being allocated now.
    pub used: u64,
}

/// What [`DeviceMemoryResource::reap_pending`] found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reaped {
    /// Bytes that came back.
    pub freed: u64,
    /// Bytes still retired.
    pub pending: u64,
}

/// A source of device memory, or a layer over one.
///
/// Safe for threads. A resource that is dropped leaves what it handed out to the context.
pub trait DeviceMemoryResource: Send + Sync + fmt::Debug {
    /// Allocates for work that comes after this in a stream. Work in other streams has to be ordered behind it:
    /// [`prepare_block_use`](Self::prepare_block_use) does that.
    ///
    /// # Errors
    /// [`ResourceError::ZeroBytes`], [`ResourceError::Alignment`], [`ResourceError::WrongOrdinal`] for another device's stream,
    /// [`ResourceError::OutOfMemory`] or [`ResourceError::OverBudget`], or what the driver answered.
    fn allocate(&self, layout: Layout, stream: &Stream, tag: Tag) -> Result<Block, ResourceError>;

    /// Frees a block once the work that is in a stream now is done, and the uses that were recorded.
    ///
    /// # Errors
    /// [`FreeError::Refused`] with the block where it is not this resource's; [`FreeError::Retired`] where the driver failed.
    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError>;

    /// The device's ordinal.
    fn ordinal(&self) -> u32;

    /// The mark of this resource's blocks.
    fn origin(&self) -> Origin;

    /// Bytes that it answers for.
    fn bytes_outstanding(&self) -> Outstanding;

    /// The budget that it keeps, if it keeps one.
    fn budget_snapshot(&self) -> Option<BudgetSnapshot> {
        None
    }

    /// Gives back what can be by now: frees whose work is done, frees that failed. Waits for nothing.
    ///
    /// # Errors
    /// What the driver answered when a free was tried again; everything else was tried.
    fn reap_pending(&self) -> Result<Reaped, ResourceError> {
        Ok(Reaped::default())
    }

    /// Whether a block that was freed here is still retired. A layer that counts asks this after a free and after a reap.
    fn is_retired(&self, block: BlockRef) -> bool {
        let _ = block;
        false
    }

    /// Orders work that will be submitted to a stream behind what makes the block usable there.
    ///
    /// # Errors
    /// [`ResourceError::StreamMisuse`] where uses are not tracked; [`ResourceError::Stale`] after a free.
    fn prepare_block_use(
        &self,
        block: BlockRef,
        stream: &Stream,
    ) -> Result<BlockUse, ResourceError> {
        let _ = (block, stream);
        Err(self.stream_misuse())
    }

    /// Ends a use, once its work was submitted: a free waits for it.
    ///
    /// # Errors
    /// As [`prepare_block_use`](Self::prepare_block_use), or what the driver answered.
    fn finish_block_use(&self, used: BlockUse, stream: &Stream) -> Result<(), ResourceError> {
        let _ = (used, stream);
        Err(self.stream_misuse())
    }

    /// Tells of a use by work that is in a stream by now: a free waits for it.
    ///
    /// # Errors
    /// As [`prepare_block_use`](Self::prepare_block_use), or what the driver answered.
    fn record_block_use(&self, block: BlockRef, stream: &Stream) -> Result<(), ResourceError> {
        let _ = (block, stream);
        Err(self.stream_misuse())
    }

    /// What a resource of this kind is called in messages and logs.
    fn kind(&self) -> &'static str;

    /// That uses are not tracked here.
    fn stream_misuse(&self) -> ResourceError {
        ResourceError::StreamMisuse {
            resource: self.kind(),
        }
    }
}

/// Passes everything on, so that what is shared can be layered like what is owned.
impl<R: DeviceMemoryResource + ?Sized> DeviceMemoryResource for Arc<R> {
    fn allocate(&self, layout: Layout, stream: &Stream, tag: Tag) -> Result<Block, ResourceError> {
        (**self).allocate(layout, stream, tag)
    }

    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        (**self).deallocate(block, stream)
    }

    fn ordinal(&self) -> u32 {
        (**self).ordinal()
    }

    fn origin(&self) -> Origin {
        (**self).origin()
    }

    fn bytes_outstanding(&self) -> Outstanding {
        (**self).bytes_outstanding()
    }

    fn budget_snapshot(&self) -> Option<BudgetSnapshot> {
        (**self).budget_snapshot()
    }

    fn reap_pending(&self) -> Result<Reaped, ResourceError> {
        (**self).reap_pending()
    }

    fn is_retired(&self, block: BlockRef) -> bool {
        (**self).is_retired(block)
    }

    fn prepare_block_use(
        &self,
        block: BlockRef,
        stream: &Stream,
    ) -> Result<BlockUse, ResourceError> {
        (**self).prepare_block_use(block, stream)
    }

    fn finish_block_use(&self, used: BlockUse, stream: &Stream) -> Result<(), ResourceError> {
        (**self).finish_block_use(used, stream)
    }

    fn record_block_use(&self, block: BlockRef, stream: &Stream) -> Result<(), ResourceError> {
        (**self).record_block_use(block, stream)
    }

    fn kind(&self) -> &'static str {
        (**self).kind()
    }
}

/// Checks what every source refuses before it asks the driver.
///
/// # Errors
/// [`ResourceError::ZeroBytes`], [`ResourceError::Alignment`], [`ResourceError::WrongOrdinal`].
#[inline]
pub fn check_request(
    ordinal: u32,
    layout: Layout,
    max: usize,
    stream: &Stream,
) -> Result<(), ResourceError> {
    if layout.size() == 0 {
        return Err(ResourceError::ZeroBytes { ordinal });
    }
    if layout.align() > max {
        let requested = layout.align();
        return Err(ResourceError::Alignment {
            ordinal,
            requested,
            max,
        });
    }
    check_stream(ordinal, stream)
}

/// Checks that a stream is of a device.
///
/// # Errors
/// [`ResourceError::WrongOrdinal`].
#[inline]
pub fn check_stream(ordinal: u32, stream: &Stream) -> Result<(), ResourceError> {
    let found = stream.context().ordinal();
    if found != ordinal {
        return Err(ResourceError::WrongOrdinal { ordinal, found });
    }
    Ok(())
}

/// Checks that a block is a resource's own, and a stream its device's; gives the block back otherwise.
///
/// # Errors
/// [`FreeError::Refused`] with [`ResourceError::Foreign`] or [`ResourceError::WrongOrdinal`].
pub fn check_free(
    origin: Origin,
    ordinal: u32,
    block: Block,
    stream: &Stream,
) -> Result<Block, FreeError> {
    let block = check_origin(origin, block)?;
    match check_stream(ordinal, stream) {
        Ok(()) => Ok(block),
        Err(reason) => Err(FreeError::Refused { block, reason }),
    }
}

/// Checks that a block is a resource's own; gives it back otherwise.
///
/// # Errors
/// [`FreeError::Refused`] with [`ResourceError::Foreign`].
#[inline]
pub fn check_origin(origin: Origin, block: Block) -> Result<Block, FreeError> {
    let found = block.0.origin;
    if found != origin {
        let reason = ResourceError::Foreign { origin, found };
        return Err(FreeError::Refused { block, reason });
    }
    Ok(block)
}

/// Takes a block from those that somebody owns; gives it back where it is none of them. Its address may be another's
/// by now.
///
/// # Errors
/// [`FreeError::Refused`] with [`ResourceError::Stale`].
pub(crate) fn remove_live(live: &mut HashSet<BlockRef>, block: Block) -> Result<Block, FreeError> {
    if live.remove(&block.0) {
        return Ok(block);
    }
    let generation = block.0.generation;
    let reason = ResourceError::Stale { generation };
    Err(FreeError::Refused { block, reason })
}
