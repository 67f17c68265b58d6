//! Offers the operations of a runtime that may block as futures.
//!
//! Such an operation runs in one of a few threads of this crate, so that no worker of Tokio waits
//! for the driver. The futures need no particular executor. An operation starts with the call and
//! runs to its end, whether or not its future is polled. If the future is dropped, the result is
//! dropped in such a thread too: memory is freed there.
//!
//! A task that drops memory frees it in its worker, which waits for the driver then. Managed memory
//! also waits for the work that uses it. [`AsyncRuntime::free_async`] and
//! [`AsyncRuntime::free_managed_async`] do not block the worker.
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::sync::Arc;

use bytemuck::Pod;

use crate::driver::{Attach, Stream};
use crate::error::{ErrorClass, ResourceError};
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

impl AsyncError {
    /// Returns the class of the failure.
    pub fn class(&self) -> ErrorClass {
        match self {
            AsyncError::Run(error) => error.class(),
            AsyncError::Memory(error) => error.class(),
            AsyncError::Free(error) => error.class(),
        }
    }

    /// Returns whether the same call may succeed later in this process image.
    pub fn retryable(&self) -> bool {
        self.class().retryable()
    }
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
    pub fn run<F, R>(
        &self,
        operation: F,
    ) -> impl Future<Output = Result<R, RunError>> + Send + use<F, R>
    where
        F: FnOnce(&DeviceRuntime) -> R + Send + 'static,
        R: Send + 'static,
    {
        let runtime = Arc::clone(&self.0);
        blocking::run(move || operation(&runtime))
    }

    /// Runs an operation that may fail.
    fn try_run<F, R, E>(
        &self,
        operation: F,
    ) -> impl Future<Output = Result<R, AsyncError>> + Send + use<F, R, E>
    where
        F: FnOnce(&DeviceRuntime) -> Result<R, E> + Send + 'static,
        R: Send + 'static,
        E: Into<AsyncError> + Send + 'static,
    {
        let running = self.run(operation);
        async move { running.await?.map_err(E::into) }
    }

    /// Allocates device memory for `len` items. The content is undefined.
    ///
    /// # Errors
    /// As [`TrackedSlice::allocate`], and [`AsyncError::Run`].
    pub fn allocate_async<T: Pod>(
        &self,
        len: usize,
        stream: &Stream,
        tag: Tag,
    ) -> impl Future<Output = Result<TrackedSlice<T>, AsyncError>> + Send + use<T> {
        let stream = stream.clone();
        self.try_run(move |runtime| TrackedSlice::allocate(runtime, len, &stream, tag))
    }

    /// Allocates managed memory for `len` items and attaches it.
    ///
    /// # Errors
    /// As [`ManagedRef::allocate`], and [`AsyncError::Run`].
    pub fn allocate_managed_async<T: Pod + Send>(
        &self,
        len: usize,
        attach: Attach,
        stream: &Stream,
        tag: Tag,
    ) -> impl Future<Output = Result<ManagedRef<T>, AsyncError>> + Send + use<T> {
        let stream = stream.clone();
        self.try_run(move |runtime| runtime.managed().allocate(len, attach, &stream, tag))
    }

    /// Allocates a block of the runtime's resource.
    ///
    /// # Errors
    /// As [`allocate`](crate::DeviceMemoryResource::allocate), and [`AsyncError::Run`].
    pub fn allocate_block_async(
        &self,
        layout: Layout,
        stream: &Stream,
        tag: Tag,
    ) -> impl Future<Output = Result<Block, AsyncError>> + Send + use<> {
        let stream = stream.clone();
        // The owner frees the block if the future is dropped.
        let allocated = self.try_run(move |runtime| {
            let block = runtime.resource().allocate(layout, &stream, tag)?;
            Ok::<_, ResourceError>(owned(runtime, block, &stream))
        });
        async move {
            let mut owner = allocated.await?;
            Ok(owner
                .take_block()
                .expect("the owner is new and has its block"))
        }
    }

    /// Frees a block of the runtime's resource behind the present work of a stream.
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
        self.try_run(move |_| owner.free())
    }

    /// Frees memory, and waits for its work if the resource requires that.
    ///
    /// # Errors
    /// As [`TrackedSlice::free`], and [`AsyncError::Run`]. If the system has no thread, the calling
    /// thread has freed the memory.
    pub fn free_async<T: Pod>(
        &self,
        memory: TrackedSlice<T>,
    ) -> impl Future<Output = Result<(), AsyncError>> + Send + use<T> {
        self.try_run(move |_| memory.free())
    }

    /// Waits for all work that uses managed memory, and frees the memory.
    ///
    /// # Errors
    /// As [`ManagedRef::free`], and [`AsyncError::Run`]. If the system has no thread, the calling
    /// thread has freed the memory.
    pub fn free_managed_async<T: Pod + Send>(
        &self,
        memory: ManagedRef<T>,
    ) -> impl Future<Output = Result<(), AsyncError>> + Send + use<T> {
        self.try_run(move |_| memory.free())
    }

    /// Overwrites memory with items of the host, and returns the memory after the copy.
    ///
    /// # Errors
    /// As [`TrackedSlice::copy_from_host`], and [`AsyncError::Run`]. The memory is freed then.
    pub fn copy_from_host_async<T: Pod + Send>(
        &self,
        mut memory: TrackedSlice<T>,
        items: Vec<T>,
    ) -> impl Future<Output = Result<TrackedSlice<T>, AsyncError>> + Send + use<T> {
        self.try_run(move |_| memory.copy_from_host(&items).map(|()| memory))
    }

    /// Copies memory to the host, and returns the memory with its items.
    ///
    /// # Errors
    /// As [`TrackedSlice::copy_to_host`], and [`AsyncError::Run`]. The memory is freed then.
    pub fn copy_to_host_async<T: Pod + Send>(
        &self,
        memory: TrackedSlice<T>,
    ) -> impl Future<Output = Result<(TrackedSlice<T>, Vec<T>), AsyncError>> + Send + use<T> {
        self.try_run(move |_| {
            let mut items = vec![T::zeroed(); memory.len()];
            memory.copy_to_host(&mut items).map(|()| (memory, items))
        })
    }

    /// Waits for the work of a stream.
    ///
    /// # Errors
    /// The driver's error, which may be that of an earlier launch, and [`AsyncError::Run`].
    pub fn synchronize_async(
        &self,
        stream: &Stream,
    ) -> impl Future<Output = Result<(), AsyncError>> + Send + use<> {
        let stream = stream.clone();
        self.try_run(move |_| stream.synchronize().map_err(MemoryError::from))
    }

    /// Releases frees whose work is done and retries failed frees.
    ///
    /// # Errors
    /// As [`reap_pending`](crate::DeviceMemoryResource::reap_pending), and [`AsyncError::Run`].
    pub fn reap_async(&self) -> impl Future<Output = Result<Reaped, AsyncError>> + Send + use<> {
        self.try_run(|runtime| runtime.resource().reap_pending())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::CudaError;
    use crate::state::StaleReason;

    #[test]
    fn async_error_has_the_class_of_its_cause() {
        let (call, ordinal) = ("cuMemAlloc_v2", 0);
        let full = CudaError { call, code: 2 };
        let causes: [(AsyncError, ErrorClass); 6] = [
            (MemoryError::Cuda(full).into(), ErrorClass::OutOfMemory),
            (
                MemoryError::Stale(StaleReason::Poisoned(700)).into(),
                ErrorClass::StickyProcess,
            ),
            (
                ResourceError::Ended(StaleReason::ShutDown).into(),
                ErrorClass::Gone,
            ),
            (
                ResourceError::ZeroBytes { ordinal }.into(),
                ErrorClass::Caller,
            ),
            (
                RunError::NoThread("none".to_owned()).into(),
                ErrorClass::NotReady,
            ),
            (
                FreeError::Retired {
                    bytes: 1,
                    source: full,
                }
                .into(),
                ErrorClass::OutOfMemory,
            ),
        ];
        for (error, class) in causes {
            assert_eq!(error.class(), class, "{error:?}");
            assert_eq!(error.retryable(), class.retryable(), "{error:?}");
        }
    }
}
