//! Streams and events.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{CUevent, CUstream};

use super::{Context, call};
use crate::error::CudaError;

/// A stream of a context; one that was made here is destroyed with its last clone, when its work is done.
#[derive(Clone)]
pub struct Stream(Arc<Inner>);

struct Inner {
    context: Context,
    key: StreamKey,
    raw: CUstream,
    owned: bool,
}

// SAFETY: a stream's handle may be used by any thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// Tells streams apart, also after one is destroyed: a number is never used again. Each context's default stream has
/// one number, however often it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamKey(u64);

impl StreamKey {
    /// The key of a device's default stream.
    pub fn default_of(ordinal: u32) -> StreamKey {
        StreamKey(u64::from(ordinal))
    }

    /// Its number, for logs.
    pub fn number(self) -> u64 {
        self.0
    }
}

/// Numbers below are the default streams', by ordinal.
const FIRST_CREATED_KEY: u64 = 1 << 32;
static NEXT_KEY: AtomicU64 = AtomicU64::new(FIRST_CREATED_KEY);

/// `CU_STREAM_NON_BLOCKING`
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`
const DISABLE_TIMING: u32 = 2;
/// `CUDA_ERROR_NOT_READY`
const NOT_READY: i32 = 600;

pub(super) fn default_of(context: &Context) -> Stream {
    Stream(Arc::new(Inner {
        context: context.clone(),
        key: StreamKey::default_of(context.ordinal()),
        raw: std::ptr::null_mut(),
        owned: false,
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
            // Where it fails the context is lost, and the stream with it.
            let _ = call!(self.context.driver(), cuStreamDestroy_v2(self.raw));
        }
    }
}

impl Context {
    /// Makes a stream that does not wait for the default stream.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn stream(&self) -> Result<Stream, CudaError> {
        let _current = self.enter()?;
        let mut raw = std::ptr::null_mut();
        call!(self.driver(), cuStreamCreate(&raw mut raw, NON_BLOCKING))?;
        Ok(Stream::new(self, raw, true))
    }

    /// Makes an event that measures no time.
    ///
    /// # Errors
    /// What the driver answered.
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
        }))
    }

    /// A stream that somebody else made, as a `CUstream`. It stays theirs to destroy, and two answers for one handle have
    /// two keys: make one and clone it.
    ///
    /// # Safety
    /// The handle is a stream of this context, and lives as long as any clone of the answer.
    pub unsafe fn from_raw(context: &Context, raw: usize) -> Stream {
        match raw {
            0 => default_of(context),
            raw => Stream::new(context, raw as CUstream, false),
        }
    }

    /// The context that it is of.
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// What tells it from others.
    pub fn key(&self) -> StreamKey {
        self.0.key
    }

    /// Whether nobody else can submit to it: everybody has the default stream.
    pub(crate) fn is_sole_handle(&self) -> bool {
        !self.0.raw.is_null() && Arc::strong_count(&self.0) == 1
    }

    /// The `CUstream`, for calls of others.
    pub fn as_raw(&self) -> usize {
        self.0.raw as usize
    }

    pub(super) fn raw(&self) -> CUstream {
        self.0.raw
    }

    /// Waits until its work is done. Hold no lock over it.
    ///
    /// # Errors
    /// What the driver answered, the error of an earlier launch too.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _current = self.0.context.enter()?;
        call!(self.0.context.driver(), cuStreamSynchronize(self.0.raw))
    }

    /// Whether its work is done.
    ///
    /// # Errors
    /// What the driver answered, the error of an earlier launch too.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        let _current = self.0.context.enter()?;
        query_result(call!(self.0.context.driver(), cuStreamQuery(self.0.raw)))
    }

    /// Lets work that is submitted from now on wait for an event, of this or another device.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        let _current = self.0.context.enter()?;
        call!(
            self.0.context.driver(),
            cuStreamWaitEvent(self.0.raw, event.raw, 0)
        )
    }
}

impl Stream {
    /// Lets work that is submitted from now on wait for all that another stream, of this or another device, has to do
    /// now.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn wait_for(&self, other: &Stream) -> Result<(), CudaError> {
        if self == other {
            return Ok(());
        }
        let event = other.context().event()?;
        event.record(other)?;
        self.wait(&event)
    }
}

/// A point in a stream's work.
pub struct Event {
    context: Context,
    raw: CUevent,
}

// SAFETY: an event's handle may be used by any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event({:p}, {:?})", self.raw, self.context)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // Where it fails the context is lost, and the event with it.
            let _ = call!(self.context.driver(), cuEventDestroy_v2(self.raw));
        }
    }
}

impl Event {
    /// Moves it to the end of what a stream of its device has to do.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        let _current = self.context.enter()?;
        call!(self.context.driver(), cuEventRecord(self.raw, stream.raw()))
    }

    /// Whether the work before it is done; so it is where it was never recorded.
    ///
    /// # Errors
    /// What the driver answered, the error of an earlier launch too.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let _current = self.context.enter()?;
        query_result(call!(self.context.driver(), cuEventQuery(self.raw)))
    }

    /// Waits for the work before it. Hold no lock over it.
    ///
    /// # Errors
    /// What the driver answered, the error of an earlier launch too.
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
