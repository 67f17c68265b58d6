//! Adopts memory of cudarc, and lends memory to cudarc.
//!
//! Enabled by the feature `cudarc-interop`. Contexts and streams are exchanged by
//! [`Context::from_cudarc`](crate::driver::Context::from_cudarc),
//! [`Stream::from_cudarc`](crate::driver::Stream::from_cudarc) and their counterparts `to_cudarc`.
#![forbid(unsafe_code)]

use std::alloc::Layout;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtrMut as _};

use crate::driver::interop::InteropError;
use crate::driver::{Context, Stream};
use crate::error::ResourceError;
use crate::memory::error::MemoryError;
use crate::memory::gpu_ref::GpuRef;
use crate::memory::owned_block::OwnedBlock;
use crate::memory::slice::TrackedSlice;
use crate::memory::submission::SubmitError;
use crate::memory::write_token::WriteToken;
use crate::resource::{DeviceMemoryResource as _, check_stream};
use crate::runtime::{DeviceRuntime, SharedResource};
use crate::source::adopted::AdoptedMemory;
use crate::vouched::lend;

/// Reason for which memory is not exchanged with cudarc.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudarcError {
    /// The context or the stream cannot be exchanged.
    #[error(transparent)]
    Interop(#[from] InteropError),
    /// The memory cannot be used.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The work was not submitted.
    #[error(transparent)]
    Submit(#[from] SubmitError),
}

impl<T: Send + 'static> TrackedSlice<T> {
    /// Adopts a slice of cudarc, with the slice's stream as its own. The memory is freed by cudarc,
    /// behind all uses.
    ///
    /// # Errors
    /// [`MemoryError::Stale`] if the runtime admits no new work,
    /// [`ZeroBytes`](ResourceError::ZeroBytes) for an empty slice,
    /// [`WrongOrdinal`](ResourceError::WrongOrdinal) for a slice of another device, or
    /// [`InteropError`]. The slice is freed then.
    /// [`PointerCollision`](ResourceError::PointerCollision) if an adopted slice has some of the
    /// memory: the slice is never freed then.
    pub fn from_cudarc(
        runtime: &DeviceRuntime,
        mut slice: CudaSlice<T>,
    ) -> Result<TrackedSlice<T>, CudarcError> {
        runtime.state().check().map_err(MemoryError::from)?;
        let (len, size, ordinal) = (slice.len(), size_of::<T>(), runtime.ordinal());
        let layout = Layout::array::<T>(len).map_err(|_| MemoryError::TooLarge { len, size })?;
        if layout.size() == 0 {
            return Err(MemoryError::from(ResourceError::ZeroBytes { ordinal }).into());
        }
        let foreign = Arc::clone(slice.stream());
        let stream = Stream::from_cudarc(&foreign)?;
        check_stream(ordinal, &stream).map_err(MemoryError::from)?;
        // Orders the slice's stream behind its uses in other streams of cudarc.
        let (address, used) = slice.device_ptr_mut(&foreign);
        drop(used);
        let adopted = AdoptedMemory::of(runtime.context());
        let block = adopted
            .adopt(address, layout, Box::new(slice), &stream)
            .map_err(MemoryError::from)?;
        let resource = adopted as SharedResource;
        let state = Arc::clone(runtime.state());
        let memory = OwnedBlock::from_parts(block, resource, stream, state);
        Ok(TrackedSlice::from_parts(memory, len))
    }

    /// Returns the slice of cudarc that [`from_cudarc`](Self::from_cudarc) adopted, behind all
    /// uses, in whatever stream of cudarc it is used next.
    ///
    /// # Errors
    /// The memory unchanged, if it is not of cudarc; `None` if the driver failed to order the uses,
    /// and the memory is freed later.
    #[expect(
        clippy::result_large_err,
        reason = "the error is the memory itself, which the caller keeps"
    )]
    pub fn into_cudarc(self) -> Result<CudaSlice<T>, Option<TrackedSlice<T>>> {
        let (mut memory, len) = self.into_parts();
        let adopted = AdoptedMemory::of(memory.stream.context());
        let stream = memory.stream.clone();
        let block = match memory.block_ref.origin == adopted.origin() {
            true => memory.take_block(),
            false => None,
        };
        let Some(block) = block else {
            return Err(Some(TrackedSlice::from_parts(memory, len)));
        };
        let owner = adopted.take_back(block, &stream).ok().flatten();
        let slice = owner.and_then(|owner| owner.downcast::<CudaSlice<T>>().ok());
        let mut slice = *slice.ok_or(None)?;
        // Records cudarc's event of the last write, behind which cudarc orders its other streams.
        let own = Arc::clone(slice.stream());
        drop(slice.device_ptr_mut(&own));
        Ok(slice)
    }
}

impl<T> GpuRef<T> {
    /// Lends the memory to cudarc, in order to submit work to `stream` that reads it. `submit` uses
    /// no other stream, and keeps the rules of [`submit_in`](crate::submit_in).
    ///
    /// # Errors
    /// As [`read_in`](Self::read_in), and [`InteropError`].
    pub fn read_in_cudarc<R>(
        &self,
        stream: &Arc<CudaStream>,
        submit: impl FnOnce(CudaView<'_, T>) -> R,
    ) -> Result<R, CudarcError> {
        let own = Stream::from_cudarc(stream)?;
        let len = self.len();
        let lent = |address| lend(stream, address, len).map(|lent| submit(lent.view()));
        Ok(self.read_in(&own, lent)??)
    }

    /// Lends the memory to cudarc as [`read_in_cudarc`](Self::read_in_cudarc) does, for work that
    /// writes it.
    ///
    /// # Errors
    /// As [`write_in`](Self::write_in), and [`InteropError`].
    pub fn write_in_cudarc<R>(
        &self,
        token: &WriteToken,
        stream: &Arc<CudaStream>,
        submit: impl FnOnce(CudaViewMut<'_, T>) -> R,
    ) -> Result<R, CudarcError> {
        let own = Stream::from_cudarc(stream)?;
        let len = self.len();
        let lent = |address| lend(stream, address, len).map(|mut lent| submit(lent.view_mut()));
        Ok(self.write_in(token, &own, lent)??)
    }
}

impl DeviceRuntime {
    /// Returns a cudarc context over the runtime's context.
    ///
    /// # Errors
    /// [`InteropError`].
    pub fn to_cudarc(&self) -> Result<Arc<cudarc::driver::CudaContext>, InteropError> {
        self.context().to_cudarc()
    }

    /// Returns the runtime of a cudarc context's device.
    ///
    /// # Errors
    /// [`InteropError`], as [`Context::from_cudarc`] and [`DeviceRuntime::for_ordinal`].
    pub fn for_cudarc(
        context: &cudarc::driver::CudaContext,
    ) -> Result<Arc<DeviceRuntime>, InteropError> {
        let own = Context::from_cudarc(context)?;
        Ok(DeviceRuntime::for_ordinal(own.ordinal())?)
    }
}
