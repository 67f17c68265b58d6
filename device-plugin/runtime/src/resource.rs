//! Defines the interface that every source of device memory and every adaptor implements.
//!
//! A resource hands out [`Block`]s. The owner of a block may free the block once, by returning it
//! to the resource that allocated it. The block records that resource as its [`Origin`]. A
//! [`BlockRef`] describes a block without the right to free it. A `BlockRef` can be copied and may
//! be stale.
//!
//! An adaptor is a resource over an upstream resource. Each adaptor puts its own origin on a block,
//! so that a block that was allocated through a budget cannot be freed past the budget.
#![forbid(unsafe_code)]

pub use bursar_driver::physical;
pub use bursar_driver::resource::{BudgetSnapshot, Origin, Tag};

use std::alloc::Layout;
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use crate::driver::{Access, Stream, StreamKey};
use crate::error::{CudaError, ErrorClass, ResourceError};

/// Describes a block without owning it. The block may have been freed since.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockRef {
    /// First device address.
    pub address: u64,
    /// Size and alignment as requested.
    pub layout: Layout,
    /// Resource that allocated the block.
    pub origin: Origin,
    /// Number of the allocation. Generation and cookie together are unique within a source.
    pub generation: u64,
    /// Value that only the source interprets.
    pub cookie: u64,
}

impl BlockRef {
    /// Returns the requested size in bytes.
    pub fn bytes(&self) -> u64 {
        self.layout.size() as u64
    }

    /// Returns the same block as another resource of the stack knows it.
    #[must_use]
    pub fn with_origin(self, origin: Origin) -> BlockRef {
        BlockRef { origin, ..self }
    }
}

/// Owned block. Dropping a block does not free its memory; the resource keeps counting it.
///
/// A freed block cannot be freed or used again:
///
/// ```compile_fail,E0382
/// # use bursar_runtime::{Block, DeviceMemoryResource, FreeError, driver::Stream};
/// fn twice(
///     memory: &impl DeviceMemoryResource,
///     block: Block,
///     stream: &Stream,
/// ) -> Result<(), FreeError> {
///     memory.deallocate(block, stream)?;
///     memory.deallocate(block, stream)
/// }
/// ```
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a block that is dropped stays allocated"]
pub struct Block(BlockRef);

impl Block {
    /// Creates a block; only sources call this. A resource refuses a block that it did not allocate
    /// or that was freed.
    pub fn new(block: BlockRef) -> Block {
        Block(block)
    }

    /// Returns a description of the block without the right to free it.
    pub fn as_ref(&self) -> BlockRef {
        self.0
    }

    /// Returns the first device address.
    pub fn address(&self) -> u64 {
        self.0.address
    }

    /// Returns the requested size in bytes.
    pub fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    /// Puts another origin on the block; only adaptors call this.
    pub fn with_origin(self, origin: Origin) -> Block {
        Block(self.0.with_origin(origin))
    }
}

/// Prepared use of a block by work in a stream, until the use is finished.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a use that is not finished keeps its block from being freed"]
pub struct BlockUse {
    /// Block in use.
    pub block: BlockRef,
    /// Stream that uses the block.
    pub stream: StreamKey,
    /// Access of the work.
    pub access: Access,
}

/// Reason for which a block was not freed.
#[derive(Debug, thiserror::Error)]
pub enum FreeError {
    /// The resource refuses to free the block and returns it.
    #[error("failed to free a block: {reason}")]
    Refused {
        /// Block that is still owned.
        block: Block,
        /// Reason of the refusal.
        reason: ResourceError,
    },
    /// The driver failed to free the block. The bytes stay charged until
    /// [`reap_pending`](crate::DeviceMemoryResource::reap_pending) succeeds.
    #[error(
        "failed to free {bytes} bytes: {source}; they stay charged until reap_pending succeeds"
    )]
    Retired {
        /// Bytes of the block.
        bytes: u64,
        /// Error that the driver returned.
        source: CudaError,
    },
}

impl FreeError {
    /// Returns the class of the failure.
    pub fn class(&self) -> ErrorClass {
        match self {
            FreeError::Refused { reason, .. } => reason.class(),
            FreeError::Retired { source, .. } => source.class(),
        }
    }

    /// Returns whether a later free of a refused block may succeed, or a later reap of a retired
    /// one.
    pub fn retryable(&self) -> bool {
        self.class().retryable()
    }
}

/// Bytes for which a resource still answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outstanding {
    /// Bytes of blocks that have an owner.
    pub live: u64,
    /// Bytes of freed blocks that the driver has not released yet.
    pub retired: u64,
}

impl Outstanding {
    /// Returns live and retired bytes together.
    pub fn total(self) -> u64 {
        self.live.saturating_add(self.retired)
    }
}

/// Result of [`DeviceMemoryResource::reap_pending`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reaped {
    /// Bytes released by this call.
    pub freed: u64,
    /// Bytes that are still retired.
    pub pending: u64,
}

/// Allocates device memory: a source of memory, or an adaptor over another resource.
///
/// Threads may share a resource. Blocks of a dropped resource stay allocated in the context.
pub trait DeviceMemoryResource: Send + Sync + fmt::Debug {
    /// Allocates a block for work that is submitted to `stream` after this call. Work in other
    /// streams must be ordered behind the allocation by
    /// [`prepare_block_use`](Self::prepare_block_use).
    ///
    /// # Errors
    /// [`ResourceError::ZeroBytes`], [`ResourceError::Alignment`], [`ResourceError::WrongOrdinal`]
    /// for another device's stream, [`ResourceError::OutOfMemory`], [`ResourceError::OverBudget`],
    /// or the driver's error.
    fn allocate(&self, layout: Layout, stream: &Stream, tag: Tag) -> Result<Block, ResourceError>;

    /// Frees a block after the work now in `stream` and after all recorded uses.
    ///
    /// # Errors
    /// [`FreeError::Refused`] returns the block with the reason:
    ///
    /// - [`ResourceError::Foreign`]: another resource allocated the block.
    /// - [`ResourceError::Stale`]: the block was freed before.
    /// - [`ResourceError::WrongOrdinal`]: the stream is another device's.
    /// - [`ResourceError::InUse`]: a prepared use is not finished.
    /// - An adaptor's own reason, such as [`ResourceError::Corrupted`].
    ///
    /// [`FreeError::Retired`] says that the driver failed. The resource then keeps the block, and
    /// [`reap_pending`](Self::reap_pending) retries the free.
    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError>;

    /// Returns the device's ordinal.
    fn ordinal(&self) -> u32;

    /// Returns the origin of this resource's blocks.
    fn origin(&self) -> Origin;

    /// Returns the bytes for which this resource still answers.
    fn bytes_outstanding(&self) -> Outstanding;

    /// Returns the state of the resource's budget; `None` without a budget.
    fn budget_snapshot(&self) -> Option<BudgetSnapshot> {
        None
    }

    /// Releases frees whose work is done and retries failed frees. Does not wait for work of the
    /// GPU, unless the driver's free does: a retried `cuMemFree` of [`Direct`](crate::Direct) or
    /// [`Managed`](crate::Managed) waits for the device.
    ///
    /// # Errors
    /// The driver's error for a retried free; the resource still tries all others.
    fn reap_pending(&self) -> Result<Reaped, ResourceError> {
        Ok(Reaped::default())
    }

    /// Returns whether a freed block is still retired. An adaptor that counts bytes asks after a
    /// free and after a reap.
    fn is_retired(&self, block: BlockRef) -> bool {
        let _ = block;
        false
    }

    /// Returns whether the resource tracks uses of its blocks by streams.
    ///
    /// If not, the functions for uses return [`ResourceError::StreamMisuse`]. The host must then
    /// wait for uses in other streams than the allocation's before it frees a block. A program that
    /// shares blocks between streams asks before it starts.
    fn supports_block_use_tracking(&self) -> bool {
        false
    }

    /// Orders work that will be submitted to `stream` behind the block's allocation, and behind
    /// finished and recorded uses in other streams. A read is ordered behind writes, a write behind
    /// all.
    ///
    /// # Errors
    /// No use is open after an error:
    ///
    /// - [`ResourceError::StreamMisuse`]: the resource does not track uses, or not in this stream.
    /// - [`ResourceError::Stale`]: the block was freed.
    /// - [`ResourceError::Foreign`], or `Stale` of a source: another resource allocated the block.
    /// - [`ResourceError::WrongOrdinal`]: the stream is another device's.
    /// - The driver's error.
    fn prepare_block_use(
        &self,
        block: BlockRef,
        stream: &Stream,
        access: Access,
    ) -> Result<BlockUse, ResourceError> {
        let _ = (block, stream, access);
        Err(self.stream_misuse())
    }

    /// Ends a prepared use after its work was submitted. A later free waits for that work.
    ///
    /// # Errors
    /// [`ResourceError::WrongStream`] for another stream than the prepared use's; others as
    /// [`prepare_block_use`](Self::prepare_block_use). After an error the block stays in use.
    fn finish_block_use(&self, used: BlockUse, stream: &Stream) -> Result<(), ResourceError> {
        let _ = (used, stream);
        Err(self.stream_misuse())
    }

    /// Records a use by work that is already in `stream`. A later free waits for that work, and
    /// later prepared uses are ordered behind it.
    ///
    /// # Errors
    /// As [`prepare_block_use`](Self::prepare_block_use).
    fn record_block_use(
        &self,
        block: BlockRef,
        stream: &Stream,
        access: Access,
    ) -> Result<(), ResourceError> {
        let _ = (block, stream, access);
        Err(self.stream_misuse())
    }

    /// Returns the name of this kind of resource in messages and logs.
    fn kind(&self) -> &'static str;

    /// Returns the error of a resource that does not track uses.
    fn stream_misuse(&self) -> ResourceError {
        ResourceError::StreamMisuse {
            resource: self.kind(),
        }
    }
}

/// Forwards every call, so that adaptors accept shared resources like owned ones.
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

    fn supports_block_use_tracking(&self) -> bool {
        (**self).supports_block_use_tracking()
    }

    fn prepare_block_use(
        &self,
        block: BlockRef,
        stream: &Stream,
        access: Access,
    ) -> Result<BlockUse, ResourceError> {
        (**self).prepare_block_use(block, stream, access)
    }

    fn finish_block_use(&self, used: BlockUse, stream: &Stream) -> Result<(), ResourceError> {
        (**self).finish_block_use(used, stream)
    }

    fn record_block_use(
        &self,
        block: BlockRef,
        stream: &Stream,
        access: Access,
    ) -> Result<(), ResourceError> {
        (**self).record_block_use(block, stream, access)
    }

    fn kind(&self) -> &'static str {
        (**self).kind()
    }
}

/// Checks a request before a source calls the driver.
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

/// Checks that a stream belongs to the device.
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

/// Checks that the resource allocated the block and that the stream belongs to its device; returns
/// the block otherwise.
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

/// Checks that the resource allocated the block; returns the block otherwise.
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

/// Removes a block from the live ones. Refuses a block that is not live, because another block may
/// have its address by now.
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
