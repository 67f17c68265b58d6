//! Offers the operations of a runtime that may block as futures.
//!
//! Such an operation runs in one of a few threads of this crate, so that no worker of Tokio waits
//! for the driver. The futures need no particular executor. An operation whose future is dropped
//! still runs to its end, and its result is dropped: memory is freed.
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::sync::Arc;

use bytemuck::Pod;

use crate::driver::{Attach, Stream};
use crate::error::ResourceError;
use crate::memory::error::MemoryError;
use crate::memory::managed_ref::ManagedRef;
use crate::memory::owned_block::OwnedBlock;
use crate::memory::slice::TrackedSlice;
use crate::resource::{Block, FreeError, Reaped, Tag};
use crate::runtime::DeviceRuntime;
use crate::sync::blocking;

pub use crate::sync::blocking::RunError;

/// Reason for which an operation failed.
#[derive(Debug, thiserror::Error)]
pub enum AsyncError {
    /// The operation did not run.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The operation failed.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A free failed or was refused.
    #[error(transparent)]
    Free(#[from] FreeError),
}

impl From<ResourceError> for AsyncError {
    fn from(error: ResourceError) -> AsyncError {
        AsyncError::Memory(error.into())
    }
}

/// Runtime of a GPU for tasks.
#[derive(Clone, Debug)]
pub struct AsyncRuntime(Arc<DeviceRuntime>);

impl From<Arc<DeviceRuntime>> for AsyncRuntime {
    fn from(runtime: Arc<DeviceRuntime>) -> Self {
        AsyncRuntime(runtime)
    }
}

/// Owns a block of the runtime's resource.
fn owned(runtime: &DeviceRuntime, block: Block, stream: &Stream) -> OwnedBlock {
    let (resource, state) = (Arc::clone(runtime.resource()), Arc::clone(runtime.state()));
    OwnedBlock::from_parts(block, resource, stream.clone(), state)
}

impl AsyncRuntime {
    /// Returns the runtime, for operations that do not block.
    pub fn runtime(&self) -> &Arc<DeviceRuntime> {
        &self.0
    }

    /// Runs any operation in a thread that may block.
    ///
    /// # Errors
    /// [`RunError`] if the system has no thread or the operation panicked.
    pub async fn run<R: Send + 'static>(
        &self,
        operation: impl FnOnce(&DeviceRuntime) -> R + Send + 'static,
    ) -> Result<R, RunError> {
        let runtime = Arc::clone(&self.0);
        blocking::run(move || operation(&runtime)).await
    }

    /// Allocates device memory for `len` items. The content is undefined.
    ///
    /// # Errors
    /// As [`TrackedSlice::allocate`], and [`AsyncError::Run`].
    pub async fn allocate_async<T: Pod>(
        &self,
        len: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<TrackedSlice<T>, AsyncError> {
        let stream = stream.clone();
        let allocate =
            move |runtime: &DeviceRuntime| TrackedSlice::allocate(runtime, len, &stream, tag);
        Ok(self.run(allocate).await??)
    }

    /// Allocates managed memory for `len` items and attaches it.
    ///
    /// # Errors
    /// As [`ManagedRef::allocate`], and [`AsyncError::Run`].
    pub async fn allocate_managed_async<T: Pod + Send>(
        &self,
        len: usize,
        attach: Attach,
        stream: &Stream,
        tag: Tag,
    ) -> Result<ManagedRef<T>, AsyncError> {
        let stream = stream.clone();
        let allocate = move |runtime: &DeviceRuntime| {
            let managed = runtime.managed();
            managed.allocate(len, attach, &stream, tag)
        };
        Ok(self.run(allocate).await??)
    }

    /// Allocates a block of the runtime's resource.
    ///
    /// # Errors
    /// As [`allocate`](crate::DeviceMemoryResource::allocate), and [`AsyncError::Run`].
    pub async fn allocate_block_async(
        &self,
        layout: Layout,
        stream: &Stream,
        tag: Tag,
    ) -> Result<Block, AsyncError> {
        let stream = stream.clone();
        // The owner frees the block if the future is dropped.
        let allocate = move |runtime: &DeviceRuntime| {
            let block = runtime.resource().allocate(layout, &stream, tag)?;
            Ok::<_, ResourceError>(owned(runtime, block, &stream))
        };
        let mut owner = self.run(allocate).await??;
        Ok(owner
            .take_block()
            .expect("the owner is new and has its block"))
    }

    /// Frees a block of the runtime's resource behind the present work of a stream, whether or not
    /// the future is polled.
    ///
    /// # Errors
    /// [`AsyncError::Free`] as of [`deallocate`](crate::DeviceMemoryResource::deallocate), and
    /// [`AsyncError::Run`]. If the system has no thread, the calling thread has freed the block.
    pub fn deallocate_async(
        &self,
        block: Block,
        stream: &Stream,
    ) -> impl Future<Output = Result<(), AsyncError>> + Send + use<> {
        let mut owner = owned(&self.0, block, stream);
        let freed = blocking::run(move || owner.free());
        async move { Ok(freed.await??) }
    }

    /// Frees memory, and waits for its work if the resource requires that.
    ///
    /// # Errors
    /// As [`TrackedSlice::free`], and [`AsyncError::Run`].
    pub async fn free_async<T: Pod>(&self, memory: TrackedSlice<T>) -> Result<(), AsyncError> {
        Ok(self.run(move |_| memory.free()).await??)
    }

    /// Overwrites memory with items of the host, and returns the memory after the copy.
    ///
    /// # Errors
    /// As [`TrackedSlice::copy_from_host`], and [`AsyncError::Run`]. The memory is freed then.
    pub async fn copy_from_host_async<T: Pod + Send>(
        &self,
        mut memory: TrackedSlice<T>,
        items: Vec<T>,
    ) -> Result<TrackedSlice<T>, AsyncError> {
        let copy = move |_: &DeviceRuntime| memory.copy_from_host(&items).map(|()| memory);
        Ok(self.run(copy).await??)
    }

    /// Copies memory to the host, and returns the memory with its items.
    ///
    /// # Errors
    /// As [`TrackedSlice::copy_to_host`], and [`AsyncError::Run`]. The memory is freed then.
    pub async fn copy_to_host_async<T: Pod + Send>(
        &self,
        memory: TrackedSlice<T>,
    ) -> Result<(TrackedSlice<T>, Vec<T>), AsyncError> {
        let copy = move |_: &DeviceRuntime| {
            let mut items = vec![T::zeroed(); memory.len()];
            memory.copy_to_host(&mut items).map(|()| (memory, items))
        };
        Ok(self.run(copy).await??)
    }

    /// Waits for the work of a stream.
    ///
    /// # Errors
    /// The driver's error, which may be that of an earlier launch, and [`AsyncError::Run`].
    pub async fn synchronize_async(&self, stream: &Stream) -> Result<(), AsyncError> {
        let stream = stream.clone();
        let wait = move |_: &DeviceRuntime| stream.synchronize().map_err(MemoryError::from);
        Ok(self.run(wait).await??)
    }

    /// Releases frees whose work is done and retries failed frees.
    ///
    /// # Errors
    /// As [`reap_pending`](crate::DeviceMemoryResource::reap_pending), and [`AsyncError::Run`].
    pub async fn reap_async(&self) -> Result<Reaped, AsyncError> {
        let reap = |runtime: &DeviceRuntime| runtime.resource().reap_pending();
        Ok(self.run(reap).await??)
    }
}
