//! Creates streams and events, and orders work by them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{CUevent, CUstream};

use super::{Context, call};
use crate::error::CudaError;

/// Stream of a context. The last clone of a created stream destroys it after its work.
#[derive(Clone)]
pub struct Stream(Arc<Inner>);

pub(super) struct Inner {
    context: Context,
    key: StreamKey,
    raw: CUstream,
    owned: bool,
    /// Stream of cudarc, which owns the handle.
    #[cfg(feature = "cudarc-interop")]
    owner: Option<Arc<cudarc::driver::CudaStream>>,
}

// SAFETY: any thread may use a stream's handle.
unsafe impl Send for Inner {}
// SAFETY: any thread may use a stream's handle.
unsafe impl Sync for Inner {}

/// Identifies a stream; a key is never reused. A context's default stream always has the same key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamKey(u64);

impl StreamKey {
    /// Returns the key of a device's default stream.
    pub fn default_of(ordinal: u32) -> StreamKey {
        StreamKey(u64::from(ordinal))
    }

    /// Returns the key as a number, for logs.
    pub fn number(self) -> u64 {
        self.0
    }
}

/// First key of a created stream. Lower keys are the default streams', by ordinal.
const FIRST_CREATED_KEY: u64 = 1 << 32;
static NEXT_KEY: AtomicU64 = AtomicU64::new(FIRST_CREATED_KEY);

/// `CU_STREAM_NON_BLOCKING`
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`
const DISABLE_TIMING: u32 = 2;
/// `CUDA_ERROR_NOT_READY`
const NOT_READY: i32 = 600;

fn default_of(context: &Context) -> Stream {
    Stream(Arc::new(Inner {
        context: context.clone(),
        key: StreamKey::default_of(context.ordinal()),
        raw: std::ptr::null_mut(),
        owned: false,
        #[cfg(feature = "cudarc-interop")]
        owner: None,
    }))
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:?}, {:?})", self.0.key, self.0.context)
    }
}

impl PartialEq for Stream {
    fn eq(&self, other: &Self) -> bool {
        self.0.key == other.0.key
    }
}

impl Eq for Stream {}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.owned && self.context.enter().is_ok() {
            // If the call fails, the context is lost and its streams with it.
            let _ = call!(self.context.driver(), cuStreamDestroy_v2(self.raw));
        }
    }
}

impl Context {
    /// Returns the context's default stream, which synchronizes with all blocking streams.
    pub fn default_stream(&self) -> Stream {
        default_of(self)
    }

    /// Creates a stream that does not synchronize with the default stream.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn stream(&self) -> Result<Stream, CudaError> {
        let _current = self.enter()?;
        let mut raw = std::ptr::null_mut();
        call!(self.driver(), cuStreamCreate(&raw mut raw, NON_BLOCKING))?;
        Ok(Stream::new(self, raw, true))
    }

    /// Creates an event without timing.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn event(&self) -> Result<Event, CudaError> {
        let _current = self.enter()?;
        let mut raw = std::ptr::null_mut();
        call!(self.driver(), cuEventCreate(&raw mut raw, DISABLE_TIMING))?;
        Ok(Event {
            context: self.clone(),
            raw,
        })
    }
}

impl Stream {
    fn new(context: &Context, raw: CUstream, owned: bool) -> Stream {
        Stream(Arc::new(Inner {
            context: context.clone(),
            key: StreamKey(NEXT_KEY.fetch_add(1, Ordering::Relaxed)),
            raw,
            owned,
            #[cfg(feature = "cudarc-interop")]
            owner: None,
        }))
    }

    /// Wraps a stream of cudarc, which lives as long as the result.
    #[cfg(feature = "cudarc-interop")]
    pub(super) fn with_owner(context: &Context, owner: Arc<cudarc::driver::CudaStream>) -> Stream {
        Stream(Arc::new(Inner {
            context: context.clone(),
            key: StreamKey(NEXT_KEY.fetch_add(1, Ordering::Relaxed)),
            raw: owner.cu_stream(),
            owned: false,
            owner: Some(owner),
        }))
    }

    /// Returns the stream of cudarc that owns the handle.
    #[cfg(feature = "cudarc-interop")]
    pub(super) fn owner(&self) -> Option<&Arc<cudarc::driver::CudaStream>> {
        self.0.owner.as_ref()
    }

    #[cfg(feature = "cudarc-interop")]
    pub(super) fn from_inner(inner: Arc<Inner>) -> Stream {
        Stream(inner)
    }

    #[cfg(feature = "cudarc-interop")]
    pub(super) fn downgrade(&self) -> std::sync::Weak<Inner> {
        Arc::downgrade(&self.0)
    }

    /// Wraps a foreign `CUstream`, which stays its owner's to destroy. Each call returns a new key,
    /// so wrap a handle once and clone the result.
    ///
    /// # Safety
    /// The handle is a stream of this context and lives as long as every clone of the result.
    pub unsafe fn from_raw(context: &Context, raw: usize) -> Stream {
        match raw {
            0 => default_of(context),
            raw => Stream::new(context, raw as CUstream, false),
        }
    }

    /// Returns the stream's context.
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// Returns the stream's key.
    pub fn key(&self) -> StreamKey {
        self.0.key
    }

    /// Returns whether no other handle can submit to the stream. The default stream is available to
    /// every caller.
    pub fn is_sole_handle(&self) -> bool {
        !self.0.raw.is_null() && Arc::strong_count(&self.0) == 1
    }

    /// Returns the `CUstream`, for calls outside this crate.
    pub fn as_raw(&self) -> usize {
        self.0.raw as usize
    }

    pub(super) fn raw(&self) -> CUstream {
        self.0.raw
    }

    /// Waits for the stream's work. Callers must hold no lock.
    ///
    /// # Errors
    /// The driver's error, which may be that of an earlier launch.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _current = self.0.context.enter()?;
        call!(self.0.context.driver(), cuStreamSynchronize(self.0.raw))
    }

    /// Returns whether the stream's work is done.
    ///
    /// # Errors
    /// The driver's error, which may be that of an earlier launch.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        let _current = self.0.context.enter()?;
        query_result(call!(self.0.context.driver(), cuStreamQuery(self.0.raw)))
    }

    /// Orders later work of this stream behind an event of any device.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        let _current = self.0.context.enter()?;
        call!(
            self.0.context.driver(),
            cuStreamWaitEvent(self.0.raw, event.raw, 0)
        )
    }
}

impl Stream {
    /// Orders later work of this stream behind the present work of another stream of any device.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn wait_for(&self, other: &Stream) -> Result<(), CudaError> {
        if self == other {
            return Ok(());
        }
        let event = other.context().event()?;
        event.record(other)?;
        self.wait(&event)
    }
}

/// Point in a stream's work.
pub struct Event {
    context: Context,
    raw: CUevent,
}

// SAFETY: any thread may use an event's handle.
unsafe impl Send for Event {}
// SAFETY: any thread may use an event's handle.
unsafe impl Sync for Event {}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event({:p}, {:?})", self.raw, self.context)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // If the call fails, the context is lost and its events with it.
            let _ = call!(self.context.driver(), cuEventDestroy_v2(self.raw));
        }
    }
}

impl Event {
    /// Records the event after the present work of a stream of its device.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        let _current = self.context.enter()?;
        call!(self.context.driver(), cuEventRecord(self.raw, stream.raw()))
    }

    /// Returns whether the work before the event is done, and true for an event that was never
    /// recorded.
    ///
    /// # Errors
    /// The driver's error, which may be that of an earlier launch.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let _current = self.context.enter()?;
        query_result(call!(self.context.driver(), cuEventQuery(self.raw)))
    }

    /// Waits for the work before the event. Callers must hold no lock.
    ///
    /// # Errors
    /// The driver's error, which may be that of an earlier launch.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _current = self.context.enter()?;
        call!(self.context.driver(), cuEventSynchronize(self.raw))
    }
}

fn query_result(answer: Result<(), CudaError>) -> Result<bool, CudaError> {
    match answer {
        Ok(()) => Ok(true),
        Err(CudaError {
            code: NOT_READY, ..
        }) => Ok(false),
        Err(other) => Err(other),
    }
}
