//! Exchanges contexts, streams and memory with cudarc's safe API.
//!
//! cudarc and this crate load the same `libcuda.so.1`, so handles of one are valid for the other.
//! An object of either keeps what it borrows from the other alive.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, CudaView, CudaViewMut};

use super::stream::{self, Stream, StreamKey};
use super::{Context, Driver, DriverError};
use crate::error::CudaError;

/// Reason for which an object cannot be exchanged with cudarc.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InteropError {
    /// The driver cannot be used.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The context is not the device's primary one, which this crate uses.
    #[error(
        "failed to exchange a context of device {ordinal}: it is not the primary context; create it by CudaContext::new"
    )]
    NotPrimary {
        /// Ordinal of the device.
        ordinal: usize,
    },
    /// The stream is another one in each thread, so that its work cannot be ordered.
    #[error(
        "failed to exchange a stream: it is the per-thread default stream; pass a stream of CudaContext::new_stream"
    )]
    PerThreadStream,
    /// cudarc returned an error or panicked.
    #[error("failed to call cudarc: {0}")]
    Cudarc(String),
}

impl From<CudaError> for InteropError {
    fn from(error: CudaError) -> InteropError {
        InteropError::Driver(error.into())
    }
}

/// Calls cudarc, which panics when a function of the driver is missing or fails.
fn guarded<R>(call: impl FnOnce() -> R) -> Result<R, InteropError> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        InteropError::Cudarc(text.unwrap_or_else(|| "panicked".to_owned()))
    })
}

impl Context {
    /// Returns the context of a cudarc context, which must be the device's primary one.
    ///
    /// # Errors
    /// [`InteropError::NotPrimary`], or the driver's error.
    pub fn from_cudarc(context: &CudaContext) -> Result<Context, InteropError> {
        let ordinal = context.ordinal();
        let not_primary = InteropError::NotPrimary { ordinal };
        let Ok(number) = u32::try_from(ordinal) else {
            return Err(not_primary);
        };
        let own = Driver::get()?.device(number)?.primary_context()?;
        if own.raw() != context.cu_ctx() {
            return Err(not_primary);
        }
        Ok(own)
    }

    /// Returns a cudarc context over the same primary context.
    ///
    /// # Errors
    /// [`InteropError::Cudarc`].
    pub fn to_cudarc(&self) -> Result<Arc<CudaContext>, InteropError> {
        let ordinal = self.ordinal() as usize;
        guarded(|| CudaContext::new(ordinal))?
            .map_err(|error| InteropError::Cudarc(format!("CUDA error {}", error.0 as i32)))
    }
}

/// Streams of cudarc that this crate knows, by their handles.
static ADOPTED: Mutex<Option<HashMap<usize, Weak<stream::Inner>>>> = Mutex::new(None);

/// Streams of this crate that cudarc knows. cudarc's handle does not keep the stream alive, so this
/// crate keeps it until the process ends.
static LENT: Mutex<Option<HashMap<StreamKey, Stream>>> = Mutex::new(None);

impl Stream {
    /// Returns the stream of a cudarc stream, which it keeps alive. Equal streams give equal
    /// results while one result exists.
    ///
    /// # Errors
    /// [`InteropError::NotPrimary`], [`InteropError::PerThreadStream`], or the driver's error.
    pub fn from_cudarc(foreign: &Arc<CudaStream>) -> Result<Stream, InteropError> {
        /// `CU_STREAM_PER_THREAD`
        const PER_THREAD: usize = 2;
        let context = Context::from_cudarc(foreign.context())?;
        match foreign.cu_stream() as usize {
            // The null stream, and `CU_STREAM_LEGACY`.
            0 | 1 => Ok(context.default_stream()),
            PER_THREAD => Err(InteropError::PerThreadStream),
            raw => {
                let mut adopted = ADOPTED.lock().unwrap_or_else(PoisonError::into_inner);
                let adopted = adopted.get_or_insert_default();
                // The entry's stream keeps cudarc's alive, so the handle was not reused.
                if let Some(known) = adopted.get(&raw).and_then(Weak::upgrade) {
                    return Ok(Stream::from_inner(known));
                }
                adopted.retain(|_, known| known.strong_count() > 0);
                let stream = Stream::with_owner(&context, Arc::clone(foreign));
                adopted.insert(raw, stream.downgrade());
                Ok(stream)
            }
        }
    }

    /// Returns the stream for cudarc. A stream that this crate created is not destroyed any more
    /// after this call, because cudarc's handle does not keep it alive.
    ///
    /// # Errors
    /// [`InteropError::NotPrimary`] if `context` is not the stream's.
    pub fn to_cudarc(&self, context: &Arc<CudaContext>) -> Result<Arc<CudaStream>, InteropError> {
        if context.cu_ctx() != self.context().raw() {
            let ordinal = context.ordinal();
            return Err(InteropError::NotPrimary { ordinal });
        }
        if let Some(owner) = self.owner() {
            return Ok(Arc::clone(owner));
        }
        if self.raw().is_null() {
            return Ok(context.default_stream());
        }
        let mut lent = LENT.lock().unwrap_or_else(PoisonError::into_inner);
        lent.get_or_insert_default()
            .entry(self.key())
            .or_insert_with(|| self.clone());
        // SAFETY: the stream belongs to this context, and `LENT` keeps it alive for ever.
        Ok(unsafe { context.wrap_borrowed_stream(self.raw()) })
    }
}

/// Slice of cudarc over memory that it does not own.
pub struct LentSlice<T>(Option<CudaSlice<T>>);

impl<T> LentSlice<T> {
    /// Lends `len` items at an address.
    ///
    /// # Safety
    /// The caller owns memory of that size at the address as long as the result lives, and the host
    /// does not refer to it.
    ///
    /// # Errors
    /// cudarc's panic.
    pub unsafe fn new(
        stream: &Arc<CudaStream>,
        address: u64,
        len: usize,
    ) -> Result<LentSlice<T>, InteropError> {
        // SAFETY: the caller owns memory of that size at the address, and the slice gives it up
        // before cudarc could free it.
        let slice = guarded(|| unsafe { stream.upgrade_device_ptr::<T>(address, len) })?;
        Ok(LentSlice(Some(slice)))
    }

    /// Returns the items.
    pub fn view(&self) -> CudaView<'_, T> {
        self.0
            .as_ref()
            .expect("only a drop takes the slice")
            .as_view()
    }

    /// Returns the items for changes.
    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.0
            .as_mut()
            .expect("only a drop takes the slice")
            .as_view_mut()
    }
}

impl<T> Drop for LentSlice<T> {
    fn drop(&mut self) {
        if let Some(slice) = self.0.take() {
            // Gives the address up without a free.
            let _ = slice.leak();
        }
    }
}
