//! Defines the interface of every source of physical memory, which has no address and needs no
//! context.
//!
//! A resource hands out [`PhysicalBlock`]s. A block can be exported as a file descriptor, or mapped
//! by a process that has a context. As with a block of device memory, the owner frees it by
//! returning it to the resource that created it. Each adaptor puts its own origin on the block.
#![forbid(unsafe_code)]

mod source;

use std::fmt;
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::sync::Arc;

pub use source::Physical;

use crate::driver::{Access, Context, GpuUuid, Handle, Mapping};
use crate::error::{CudaError, ErrorClass, ResourceError};
use crate::resource::{BudgetSnapshot, Origin, Tag};

/// Owned physical memory. Dropping a block does not release its memory; the resource keeps counting
/// it.
#[derive(Debug)]
#[must_use = "a block that is dropped stays allocated"]
pub struct PhysicalBlock {
    handle: ManuallyDrop<Handle>,
    origin: Origin,
    number: u64,
}

impl PhysicalBlock {
    /// Creates a block; only sources call this. The number is unique within a source, and not zero.
    pub fn new(handle: Handle, origin: Origin, number: u64) -> PhysicalBlock {
        PhysicalBlock {
            handle: ManuallyDrop::new(handle),
            origin,
            number,
        }
    }

    /// Returns the handle for the release; only sources call this.
    pub fn into_handle(self) -> Handle {
        ManuallyDrop::into_inner(self.handle)
    }

    /// Returns the handle, to map the memory.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.handle.bytes()
    }

    /// Returns the number of the allocation, which is unique within its source.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the resource that created the block.
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// Puts another origin on the block; only adaptors call this.
    pub fn with_origin(self, origin: Origin) -> PhysicalBlock {
        PhysicalBlock { origin, ..self }
    }

    /// Exports the memory as a file descriptor, which keeps it past the block's release and this
    /// process's end (F4 in `docs/internals/facts.md`).
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn export(&self) -> Result<OwnedFd, CudaError> {
        self.handle.export()
    }

    /// Maps the memory at new addresses of a context's device. The mapping keeps the memory past
    /// the block's release.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn map(&self, context: &Context, access: Access) -> Result<Mapping, CudaError> {
        let addresses = Arc::new(context.driver().reserve(self.bytes())?);
        addresses.map(0, &self.handle, access, context)
    }
}

/// Block that was not released, with the reason. The caller still owns the block, and the resource
/// still counts it.
#[derive(Debug, thiserror::Error)]
#[error("failed to release {} bytes of physical memory: {reason}", block.bytes())]
pub struct ReleaseError {
    /// Block that is still owned.
    pub block: PhysicalBlock,
    /// Reason of the refusal, or the driver's error.
    pub reason: ResourceError,
}

impl ReleaseError {
    /// Returns the class of the failure.
    pub fn class(&self) -> ErrorClass {
        self.reason.class()
    }

    /// Returns whether the same call may succeed later in this process image.
    pub fn retryable(&self) -> bool {
        self.class().retryable()
    }
}

/// Creates physical memory of one GPU: a source of it, or an adaptor over another resource.
///
/// No method needs or creates a context. Threads may share a resource.
pub trait PhysicalMemoryResource: Send + Sync + fmt::Debug {
    /// Creates memory that can be exported. The size is a multiple of the
    /// [`granularity`](Self::granularity); [`round_up`](Self::round_up) returns such a size.
    ///
    /// # Errors
    /// [`ResourceError::OutOfMemory`], [`ResourceError::OverBudget`], [`ResourceError::Ended`], or
    /// the driver's error.
    fn create(&self, bytes: u64, tag: Tag) -> Result<PhysicalBlock, ResourceError>;

    /// Releases a block. The driver frees the memory once no descriptor and no mapping keeps it.
    ///
    /// # Errors
    /// The block, if another resource created it or the driver failed.
    fn release(&self, block: PhysicalBlock) -> Result<(), ReleaseError>;

    /// Returns the GPU's UUID.
    fn uuid(&self) -> GpuUuid;

    /// Returns the GPU's ordinal.
    fn ordinal(&self) -> u32;

    /// Returns the granularity of sizes in bytes.
    fn granularity(&self) -> u64;

    /// Returns the origin of this resource's blocks.
    fn origin(&self) -> Origin;

    /// Returns the bytes of the blocks that were created and not released.
    fn bytes_outstanding(&self) -> u64;

    /// Returns the state of the resource's budget; `None` without a budget.
    fn budget_snapshot(&self) -> Option<BudgetSnapshot> {
        None
    }

    /// Returns the name of the resource's kind, for messages.
    fn kind(&self) -> &'static str;

    /// Returns the smallest size that has room for `bytes`.
    ///
    /// # Errors
    /// [`ResourceError::ZeroBytes`], [`ResourceError::TooLarge`].
    fn round_up(&self, bytes: u64) -> Result<u64, ResourceError> {
        let ordinal = self.ordinal();
        match bytes.checked_next_multiple_of(self.granularity()) {
            Some(0) => Err(ResourceError::ZeroBytes { ordinal }),
            Some(whole) => Ok(whole),
            None => Err(ResourceError::TooLarge {
                ordinal,
                requested: bytes,
            }),
        }
    }
}

/// Forwards every call, so that adaptors accept shared resources like owned ones.
impl<R: PhysicalMemoryResource + ?Sized> PhysicalMemoryResource for Arc<R> {
    fn create(&self, bytes: u64, tag: Tag) -> Result<PhysicalBlock, ResourceError> {
        (**self).create(bytes, tag)
    }

    fn release(&self, block: PhysicalBlock) -> Result<(), ReleaseError> {
        (**self).release(block)
    }

    fn uuid(&self) -> GpuUuid {
        (**self).uuid()
    }

    fn ordinal(&self) -> u32 {
        (**self).ordinal()
    }

    fn granularity(&self) -> u64 {
        (**self).granularity()
    }

    fn origin(&self) -> Origin {
        (**self).origin()
    }

    fn bytes_outstanding(&self) -> u64 {
        (**self).bytes_outstanding()
    }

    fn budget_snapshot(&self) -> Option<BudgetSnapshot> {
        (**self).budget_snapshot()
    }

    fn kind(&self) -> &'static str {
        (**self).kind()
    }
}

/// Checks that the resource created the block; returns the block otherwise.
///
/// # Errors
/// [`ReleaseError`] with [`ResourceError::Foreign`].
pub fn check_physical_origin(
    origin: Origin,
    block: PhysicalBlock,
) -> Result<PhysicalBlock, ReleaseError> {
    let found = block.origin;
    if found != origin {
        let reason = ResourceError::Foreign { origin, found };
        return Err(ReleaseError { block, reason });
    }
    Ok(block)
}
