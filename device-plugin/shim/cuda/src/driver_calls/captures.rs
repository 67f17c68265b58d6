//! Tracks stream captures, and keeps the shim's own calls from invalidating them.
//!
//! While a thread captures a stream, calls that the driver considers unsafe fail and invalidate the
//! capture (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED). On driver 580 these include querying a pool's
//! sizes and trimming it. So the shim relaxes the thread's capture mode for its own calls. Another
//! thread may begin a capture at any time, so the shim does so even where it has counted none.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

use super::driver;
use crate::curesult::{self, CuResult};
use crate::fork_local::ForkLocal;

/// Captures that began and did not end. Meanwhile the shim waits for no GPU work to reclaim memory,
/// and repeats no call that ran out of memory.
static ACTIVE: AtomicU32 = AtomicU32::new(0);

/// The captures of [`ACTIVE`] whose begin has succeeded. The per-thread default streams of several
/// threads have the same handle.
static ORIGINS: ForkLocal<Vec<Origin>> = ForkLocal::new();

/// The stream on which a capture began. A capture ends with this stream and with its context, and
/// not with a stream that joined the capture (measured on an H200).
#[derive(Debug)]
struct Origin {
    stream: u64,
    /// The id of the stream's context; zero where the driver tells none.
    context: u64,
}

/// Forgets the parent's captures, in a forked child.
pub(crate) fn reset() {
    ORIGINS.reset();
    ACTIVE.store(0, Ordering::Relaxed);
}

thread_local! {
    /// Whether the shim has relaxed the thread's capture mode.
    static IS_RELAXED: Cell<bool> = const { Cell::new(false) };
}

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const MODE_RELAXED: c_int = 2;

/// Returns whether a capture may be active.
pub(crate) fn may_be_active() -> bool {
    ACTIVE.load(Ordering::Relaxed) > 0
}

/// Returns whether a stream is being captured.
pub(crate) fn is_capturing(stream: u64) -> bool {
    let mut status = 0;
    may_be_active()
        && driver!(cuStreamIsCapturing(stream => u64, &raw mut status => *mut c_int))
            == curesult::SUCCESS
        && status != 0
}

/// Runs the shim's own driver calls so that they invalidate no capture.
pub(crate) fn with_relaxed_capture<T>(calls: impl FnOnce() -> T) -> T {
    let _mode = RelaxedMode::enter();
    calls()
}

/// Runs a driver call of the hot path, which costs no other call while no capture is active. A
/// capture that begins during the call can be invalidated.
pub(crate) fn with_relaxed_capture_if_active<T>(call: impl FnOnce() -> T) -> T {
    if may_be_active() {
        with_relaxed_capture(call)
    } else {
        call()
    }
}

/// The calling thread's capture mode, restored on drop; `None` in a call within another one, which
/// costs no driver call.
struct RelaxedMode(Option<c_int>);

impl RelaxedMode {
    fn enter() -> RelaxedMode {
        let is_outermost = !IS_RELAXED.get();
        let mode = is_outermost.then(|| exchange_mode(MODE_RELAXED));
        IS_RELAXED.set(true);
        RelaxedMode(mode)
    }
}

impl Drop for RelaxedMode {
    fn drop(&mut self) {
        if let Some(mode) = self.0 {
            IS_RELAXED.set(false);
            exchange_mode(mode);
        }
    }
}

fn exchange_mode(mode: c_int) -> c_int {
    let mut mode = mode;
    let _ = driver!(cuThreadExchangeStreamCaptureMode(&raw mut mode => *mut c_int));
    mode
}

/// Counts a capture before it begins on a stream of a context.
pub(crate) fn begin(stream: u64, context: u64, call: impl FnOnce() -> CuResult) -> CuResult {
    ACTIVE.fetch_add(1, Ordering::Relaxed);
    let answer = call();
    if answer == curesult::SUCCESS {
        ORIGINS.lock().push(Origin { stream, context });
    } else {
        count_ended(1);
    }
    answer
}

/// Counts a stream's capture as ended. A failed call may have ended it too.
pub(crate) fn end(stream: u64, call: impl FnOnce() -> CuResult) -> CuResult {
    let before = is_capturing(stream);
    let answer = call();
    if before && !is_capturing(stream) && take(stream).is_some() {
        count_ended(1);
    }
    answer
}

/// Counts the capture of a destroyed stream as ended. The origin is taken out before the call,
/// because another thread may get the same handle after it.
pub(crate) fn destroy_stream(stream: u64, call: impl FnOnce() -> CuResult) -> CuResult {
    let taken = may_be_active().then(|| take(stream)).flatten();
    let answer = call();
    match taken {
        Some(_) if answer == curesult::SUCCESS => count_ended(1),
        Some(origin) => ORIGINS.lock().push(origin),
        None => {}
    }
    answer
}

/// Counts the captures in a destroyed context as ended.
pub(crate) fn end_context(context: u64) {
    if context != 0 && may_be_active() {
        let mut origins = ORIGINS.lock();
        let ended = origins.extract_if(.., |origin| origin.context == context);
        count_ended(ended.count() as u32);
    }
}

fn take(stream: u64) -> Option<Origin> {
    let mut origins = ORIGINS.lock();
    let found = origins.iter().position(|origin| origin.stream == stream)?;
    Some(origins.swap_remove(found))
}

fn count_ended(captures: u32) {
    ACTIVE.fetch_sub(captures, Ordering::Relaxed);
}
