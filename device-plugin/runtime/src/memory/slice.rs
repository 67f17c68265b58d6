//! Gives typed device memory one owner, which uses it in one stream at a time.
//!
//! The memory is bound to the [`DeviceState`] under which it was allocated: every use is refused
//! after a poison, a drain or a shutdown. A drop returns the memory to its resource. If the driver
//! fails to free it, the bytes stay charged until
//! [`reap_pending`](crate::DeviceMemoryResource::reap_pending) succeeds.
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::Pod;

use crate::driver::{Access, Stream};
use crate::error::{CudaError, ResourceError};
use crate::memory::kernel_arg::DevSliceArg;
use crate::resource::{Block, BlockRef, FreeError, Tag, check_stream};
use crate::runtime::{DeviceRuntime, SharedResource};
use crate::state::{DeviceState, StaleReason};

/// Reason for which memory was not allocated or used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// The memory is stale.
    #[error(transparent)]
    Stale(#[from] StaleReason),
    /// The resource refused the request.
    #[error(transparent)]
    Resource(#[from] ResourceError),
    /// The number of items exceeds the address space.
    #[error(
        "failed to allocate {len} items of {size} bytes: larger than the address space; request less"
    )]
    TooLarge {
        /// Requested number of items.
        len: usize,
        /// Size of an item in bytes.
        size: usize,
    },
    /// The range is not inside the memory.
    #[error(
        "failed to use items {start} to {end}: the memory has {len} items; pass a range inside it"
    )]
    Range {
        /// First item.
        start: usize,
        /// End of the range, exclusive.
        end: usize,
        /// Number of items of the memory.
        len: usize,
    },
    /// The lengths differ.
    #[error("failed to copy {given} items: the memory has {len} items; pass as many")]
    Length {
        /// Number of items of the memory.
        len: usize,
        /// Number of given items.
        given: usize,
    },
    /// The driver failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// Block with its resource, stream and state, freed when dropped.
#[derive(Debug)]
pub(crate) struct OwnedBlock {
    /// `None` once the block was freed.
    block: Option<Block>,
    pub(crate) block_ref: BlockRef,
    pub(crate) resource: SharedResource,
    /// Stream in whose order the block is freed.
    pub(crate) stream: Stream,
    /// State under which the block was allocated.
    pub(crate) state: Arc<DeviceState>,
}

impl OwnedBlock {
    pub(crate) fn allocate<T>(
        runtime: &DeviceRuntime,
        len: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<OwnedBlock, MemoryError> {
        // Checked before the allocation, so that memory of a device that is lost meanwhile is stale
        // from the start.
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
        // After a failed free the resource keeps the block charged.
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
    /// Allocates memory for work that is submitted to `stream` after this call. The content is
    /// undefined.
    ///
    /// # Errors
    /// [`MemoryError::Stale`] if the runtime admits no new work, or the resource's error.
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

    /// Overwrites the memory with items of the host and waits for the copy.
    ///
    /// # Errors
    /// [`MemoryError::Stale`], [`MemoryError::Length`], or the driver's error.
    pub fn copy_from_host(&mut self, items: &[T]) -> Result<(), MemoryError> {
        let stream = self.synchronized_stream(items.len())?;
        let context = stream.context();
        context.copy_to_device(self.address(), bytemuck::cast_slice(items))?;
        Ok(())
    }

    /// Copies the memory to the host and waits for the copy.
    ///
    /// # Errors
    /// As [`copy_from_host`](Self::copy_from_host).
    pub fn copy_to_host(&self, items: &mut [T]) -> Result<(), MemoryError> {
        let stream = self.synchronized_stream(items.len())?;
        let context = stream.context();
        context.copy_from_device(bytemuck::cast_slice_mut(items), self.address())?;
        Ok(())
    }

    /// Waits for the stream and returns it, if the memory has `given` items.
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
    /// Returns the number of items.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the memory has no items, which no resource allocates.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the first address without a check.
    pub fn address(&self) -> u64 {
        self.memory.block_ref.address
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.memory.block_ref.bytes()
    }

    /// Returns the stream in whose order the memory is used.
    pub fn stream(&self) -> &Stream {
        &self.memory.stream
    }

    /// Checks that the memory is valid, at the cost of one load.
    ///
    /// # Errors
    /// The reason for which the memory is stale.
    #[inline]
    pub fn check(&self) -> Result<(), StaleReason> {
        self.memory.state.check()
    }

    /// Lends the memory to a kernel that reads it.
    pub fn arg(&self) -> DevSliceArg<'_> {
        DevSliceArg::of_single_stream(&self.memory, Access::Read)
    }

    /// Lends the memory to a kernel that writes it.
    pub fn arg_mut(&mut self) -> DevSliceArg<'_> {
        DevSliceArg::of_single_stream(&self.memory, Access::ReadWrite)
    }

    /// Moves the memory to another stream of the same device, behind all work so far.
    ///
    /// # Errors
    /// [`MemoryError::Stale`], [`ResourceError::WrongOrdinal`], or the driver's error. The memory
    /// keeps its stream then.
    pub fn move_to(&mut self, stream: &Stream) -> Result<(), MemoryError> {
        self.check()?;
        check_stream(self.memory.resource.ordinal(), stream)?;
        stream.wait_for(self.stream())?;
        self.memory.stream = stream.clone();
        Ok(())
    }

    /// Frees the memory. Unlike a drop, this returns the result.
    ///
    /// # Errors
    /// [`FreeError::Retired`] if the driver failed; the bytes stay charged.
    pub fn free(mut self) -> Result<(), FreeError> {
        self.memory.free()
    }

    pub(crate) fn into_parts(self) -> (OwnedBlock, usize) {
        (self.memory, self.len)
    }
}
