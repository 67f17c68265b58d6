//! Typed device memory with one owner, used in the order of one stream at a time.
//!
//! The memory is bound to the [`DeviceState`] under which it was allocated: after a poison, a drain or the runtime's end
//! every use is refused. It goes back to its resource when dropped; where the driver does not free it then, it
//! stays charged there until [`reap_pending`](crate::DeviceMemoryResource::reap_pending) succeeds.
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::Pod;

use crate::driver::{Access, Stream};
use crate::error::{CudaError, FreeError, ResourceError};
use crate::memory::kernel_arg::DevSliceArg;
use crate::resource::{Block, BlockRef, Tag, check_stream};
use crate::runtime::{DeviceRuntime, SharedResource};
use crate::state::{DeviceState, StaleReason};

/// Why memory was not allocated or used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// It cannot be used any more.
    #[error(transparent)]
    Stale(#[from] StaleReason),
    /// The resource refused.
    #[error(transparent)]
    Resource(#[from] ResourceError),
    /// No address space holds so many.
    #[error("{len} items of {size} bytes are more than an address can count")]
    TooLarge {
        /// Items asked for.
        len: usize,
        /// Bytes of each.
        size: usize,
    },
    /// A part that is not inside the memory.
    #[error("items {start} to {end} of memory of {len}")]
    Range {
        /// The first item.
        start: usize,
        /// The item after the last.
        end: usize,
        /// Items of the memory.
        len: usize,
    },
    /// Two lengths that have to be equal are not.
    #[error("{given} items for memory of {len}")]
    Length {
        /// Items of the memory.
        len: usize,
        /// Items given.
        given: usize,
    },
    /// The driver failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// A block with what has to be known of it as long as it is used; freed when dropped.
#[derive(Debug)]
pub(crate) struct OwnedBlock {
    /// None once it was freed.
    block: Option<Block>,
    pub(crate) block_ref: BlockRef,
    pub(crate) resource: SharedResource,
    /// It is freed in the order of this stream.
    pub(crate) stream: Stream,
    /// Under which it was allocated.
    pub(crate) state: Arc<DeviceState>,
}

impl OwnedBlock {
    /// Allocates room for `len` items of `T`.
    pub(crate) fn allocate<T>(
        runtime: &DeviceRuntime,
        len: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<OwnedBlock, MemoryError> {
        // Before the allocation: memory of a device that is lost meanwhile is stale from the start.
        runtime.state().check()?;
        let size = size_of::<T>();
        let layout = Layout::array::<T>(len).map_err(|_| MemoryError::TooLarge { len, size })?;
        let block = runtime.resource().allocate(layout, stream, tag)?;
        Ok(OwnedBlock {
            block_ref: block.as_ref(),
            block: Some(block),
            resource: Arc::clone(runtime.resource()),
            stream: stream.clone(),
            state: Arc::clone(runtime.state()),
        })
    }

    pub(crate) fn free(&mut self) -> Result<(), FreeError> {
        match self.block.take() {
            Some(block) => self.resource.deallocate(block, &self.stream),
            None => Ok(()),
        }
    }
}

impl Drop for OwnedBlock {
    fn drop(&mut self) {
        // A free that fails is the resource's: it keeps the block, charged.
        let _ = self.free();
    }
}

/// Device memory for `len` items of `T`, with one owner.
#[derive(Debug)]
pub struct TrackedSlice<T> {
    memory: OwnedBlock,
    len: usize,
    items: PhantomData<fn() -> T>,
}

impl<T: Pod> TrackedSlice<T> {
    /// Allocates from a runtime's resource, for work that comes after this in a stream. What is in it is what was there before.
    ///
    /// # Errors
    /// [`MemoryError::Stale`] where nothing new is allocated; what the resource answered.
    pub fn allocate(
        runtime: &DeviceRuntime,
        len: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<TrackedSlice<T>, MemoryError> {
        Ok(TrackedSlice {
            memory: OwnedBlock::allocate::<T>(runtime, len, stream, tag)?,
            len,
            items: PhantomData,
        })
    }

    /// Overwrites it with items of the host's, and waits until that is done.
    ///
    /// # Errors
    /// [`MemoryError::Stale`], [`MemoryError::Length`], or what the driver answered.
    pub fn copy_from_host(&mut self, items: &[T]) -> Result<(), MemoryError> {
        let stream = self.synchronized_stream(items.len())?;
        let context = stream.context();
        context.copy_to_device(self.address(), bytemuck::cast_slice(items))?;
        Ok(())
    }

    /// Copies it to the host, and waits until that is done.
    ///
    /// # Errors
    /// As [`copy_from_host`](Self::copy_from_host).
    pub fn copy_to_host(&self, items: &mut [T]) -> Result<(), MemoryError> {
        let stream = self.synchronized_stream(items.len())?;
        let context = stream.context();
        context.copy_from_device(bytemuck::cast_slice_mut(items), self.address())?;
        Ok(())
    }

    /// The stream, after its work, where `given` items fit.
    fn synchronized_stream(&self, given: usize) -> Result<&Stream, MemoryError> {
        self.check()?;
        let len = self.len;
        if given != len {
            return Err(MemoryError::Length { len, given });
        }
        self.stream().synchronize()?;
        Ok(self.stream())
    }
}

impl<T> TrackedSlice<T> {
    /// How many items it holds.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds none; no resource allocates that.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its first address, without a look at whether it can be used.
    pub fn address(&self) -> u64 {
        self.memory.block_ref.address
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.memory.block_ref.bytes()
    }

    /// The stream in whose order it is used.
    pub fn stream(&self) -> &Stream {
        &self.memory.stream
    }

    /// Whether it can be used: one load.
    ///
    /// # Errors
    /// Why not.
    #[inline]
    pub fn check(&self) -> Result<(), StaleReason> {
        self.memory.state.check()
    }

    /// For a kernel that reads it.
    pub fn arg(&self) -> DevSliceArg<'_> {
        DevSliceArg::of_single_stream(&self.memory, Access::Read)
    }

    /// For a kernel that writes it.
    pub fn arg_mut(&mut self) -> DevSliceArg<'_> {
        DevSliceArg::of_single_stream(&self.memory, Access::ReadWrite)
    }

    /// Goes on in another stream of the same device, behind all that was submitted for it so far.
    ///
    /// # Errors
    /// [`MemoryError::Stale`], [`ResourceError::WrongOrdinal`], or what the driver answered: then it stays where it was.
    pub fn move_to(&mut self, stream: &Stream) -> Result<(), MemoryError> {
        self.check()?;
        check_stream(self.memory.resource.ordinal(), stream)?;
        stream.wait_for(self.stream())?;
        self.memory.stream = stream.clone();
        Ok(())
    }

    /// Frees it and says how that went, which dropping it does not.
    ///
    /// # Errors
    /// [`FreeError::Retired`]: the driver did not free it, and it stays charged.
    pub fn free(mut self) -> Result<(), FreeError> {
        self.memory.free()
    }

    pub(crate) fn into_parts(self) -> (OwnedBlock, usize) {
        (self.memory, self.len)
    }
}
