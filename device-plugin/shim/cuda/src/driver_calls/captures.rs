//! Tracks stream captures, and keeps the shim's own calls from invalidating them.
//!
//! While a thread captures a stream, calls that the driver considers unsafe fail and invalidate the
//! capture (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED). On driver 580 these include querying a pool's
//! sizes and trimming it. So the shim relaxes the thread's capture mode for its own calls. Another
//! thread may begin a capture at any time, so the shim does so even where it has counted none.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

use super::driver;
use crate::curesult::{self, CuResult};

/// Captures that began and did not end. The shim misses the end of a capture whose stream the
/// program destroys. From then on the shim waits for no GPU work to reclaim memory, and repeats no
/// call that ran out of memory.
static ACTIVE: AtomicU32 = AtomicU32::new(0);

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

/// The calling thread's capture mode, restored on drop.
struct RelaxedMode(c_int);

impl RelaxedMode {
    fn enter() -> RelaxedMode {
        RelaxedMode(exchange_mode(MODE_RELAXED))
    }
}

impl Drop for RelaxedMode {
    fn drop(&mut self) {
        exchange_mode(self.0);
    }
}

fn exchange_mode(mode: c_int) -> c_int {
    let mut mode = mode;
    let _ = driver!(cuThreadExchangeStreamCaptureMode(&raw mut mode => *mut c_int));
    mode
}

/// Counts a capture before it begins.
pub(crate) fn begin(call: impl FnOnce() -> CuResult) -> CuResult {
    ACTIVE.fetch_add(1, Ordering::Relaxed);
    let answer = call();
    if answer != curesult::SUCCESS {
        count_ended();
    }
    answer
}

/// Counts a capture as ended. A failed call may have ended it too.
pub(crate) fn end(stream: u64, call: impl FnOnce() -> CuResult) -> CuResult {
    let before = is_capturing(stream);
    let answer = call();
    if before && !is_capturing(stream) {
        count_ended();
    }
    answer
}

fn count_ended() {
    let _ = ACTIVE.try_update(Ordering::Relaxed, Ordering::Relaxed, |count| {
        count.checked_sub(1)
    });
}
