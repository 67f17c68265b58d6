//! Gives typed device memory one owner, which uses it in one stream at a time.
//!
//! The memory is bound to the [`DeviceState`](crate::DeviceState) under which it was allocated:
//! every use is refused after a poison, a drain or a shutdown. A drop returns the memory to its
//! resource. If the driver fails to free it, the bytes stay charged until
//! [`reap_pending`](crate::DeviceMemoryResource::reap_pending) succeeds.
#![forbid(unsafe_code)]

use std::marker::PhantomData;

use bytemuck::Pod;

use crate::driver::{Access, Stream};
use crate::memory::error::MemoryError;
use crate::memory::kernel_arg::DevSliceArg;
use crate::memory::owned_block::OwnedBlock;
use crate::resource::{FreeError, Tag, check_stream};
use crate::runtime::DeviceRuntime;
use crate::state::StaleReason;
use crate::vouched;

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
        vouched::copy_to_device(context, self.address(), bytemuck::cast_slice(items))?;
        Ok(())
    }

    /// Copies the memory to the host and waits for the copy.
    ///
    /// # Errors
    /// As [`copy_from_host`](Self::copy_from_host).
    pub fn copy_to_host(&self, items: &mut [T]) -> Result<(), MemoryError> {
        let stream = self.synchronized_stream(items.len())?;
        let context = stream.context();
        vouched::copy_from_device(context, bytemuck::cast_slice_mut(items), self.address())?;
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
    /// [`MemoryError::Stale`], [`WrongOrdinal`](crate::ResourceError::WrongOrdinal), or the
    /// driver's error. The memory keeps its stream then.
    pub fn move_to(&mut self, stream: &Stream) -> Result<(), MemoryError> {
        self.check()?;
        check_stream(self.memory.resource.ordinal(), stream)?;
        stream.wait_for(self.stream())?;
        self.memory.stream = stream.clone();
        Ok(())
    }

    /// Opens the first use of the memory by another stream of the device, such as a stream of
    /// uploads. That stream follows the allocation, and the memory's own stream follows the use.
    ///
    /// Unlike [`move_to`](Self::move_to), the memory keeps its own stream.
    ///
    /// # Errors
    /// [`MemoryError::Stale`], [`WrongOrdinal`](crate::ResourceError::WrongOrdinal), or the
    /// driver's error.
    pub fn prepare_first_use<'a>(
        &'a mut self,
        stream: &'a Stream,
    ) -> Result<FirstUse<'a, T>, MemoryError> {
        self.check()?;
        check_stream(self.memory.resource.ordinal(), stream)?;
        stream.wait_for(self.stream())?;
        Ok(FirstUse {
            slice: self,
            stream,
            finished: false,
        })
    }

    /// Frees the memory. Unlike a drop, this returns the result.
    ///
    /// # Errors
    /// [`FreeError::Retired`] if the driver failed; the bytes stay charged.
    pub fn free(mut self) -> Result<(), FreeError> {
        self.memory.free()
    }

    /// Wraps an owned block of `len` items.
    #[cfg(feature = "cudarc-interop")]
    pub(crate) fn from_parts(memory: OwnedBlock, len: usize) -> TrackedSlice<T> {
        TrackedSlice {
            memory,
            len,
            items: PhantomData,
        }
    }

    pub(crate) fn into_parts(self) -> (OwnedBlock, usize) {
        (self.memory, self.len)
    }
}

/// Open first use of memory in another stream than its own, until [`finish`](Self::finish) or a
/// drop.
#[derive(Debug)]
#[must_use = "a use that is dropped at once is empty"]
pub struct FirstUse<'a, T> {
    slice: &'a mut TrackedSlice<T>,
    stream: &'a Stream,
    finished: bool,
}

impl<T> FirstUse<'_, T> {
    /// Returns the first address, for work that the caller submits to [`stream`](Self::stream).
    pub fn address(&self) -> u64 {
        self.slice.address()
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.slice.bytes()
    }

    /// Returns the stream of the use.
    pub fn stream(&self) -> &Stream {
        self.stream
    }

    /// Ends the use after its work was submitted: later work in the memory's own stream and the
    /// free follow it. The host does not wait.
    ///
    /// # Errors
    /// The driver's error; the host has then waited for the work, if that is possible.
    pub fn finish(mut self) -> Result<(), MemoryError> {
        self.join()
    }

    fn join(&mut self) -> Result<(), MemoryError> {
        self.finished = true;
        let (own, other) = (self.slice.stream(), self.stream);
        Ok(own.wait_for(other).or_else(|_| other.synchronize())?)
    }
}

impl<T> Drop for FirstUse<'_, T> {
    fn drop(&mut self) {
        if !self.finished {
            // If this fails, the context is lost and its work with it.
            let _ = self.join();
        }
    }
}
