//! Tracks stream captures, and keeps the shim's own calls from invalidating them.
//!
//! While a thread captures a stream, calls that the driver considers unsafe fail and invalidate the
//! capture (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED). On driver 580 these include querying a pool's
//! sizes and trimming it. So the shim counts captures, and relaxes the thread's capture mode for
//! its own calls while there are any.
#![allow(non_snake_case)]

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

use super::streams::per_thread;
use super::{driver, hooks};
use crate::curesult::{self, CuResult};

/// Captures that began and did not end. A capture that ended unseen, with its stream, only costs
/// later calls a little time.
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
    if !may_be_active() {
        return calls();
    }
    let _mode = RelaxedMode::enter();
    calls()
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
fn begin(call: impl FnOnce() -> CuResult) -> CuResult {
    ACTIVE.fetch_add(1, Ordering::Relaxed);
    let answer = call();
    if answer != curesult::SUCCESS {
        count_ended();
    }
    answer
}

/// Counts a capture as ended. A failed call may have ended it too.
fn end(stream: u64, call: impl FnOnce() -> CuResult) -> CuResult {
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

hooks! {
    /// `cuStreamBeginCapture` (CUDA 10.0): without a mode.
    fn cuStreamBeginCapture(stream: u64) = |driver_call| begin(|| driver_call(stream));
    /// `cuStreamBeginCapture` for the per-thread default stream.
    fn cuStreamBeginCapture_ptsz(stream: u64) = |driver_call| begin(|| driver_call(stream));
    /// `cuStreamBeginCapture` (CUDA 10.1).
    fn cuStreamBeginCapture_v2(stream: u64, mode: c_int) = |driver_call| begin(|| driver_call(stream, mode));
    /// `cuStreamBeginCapture_v2` for the per-thread default stream.
    fn cuStreamBeginCapture_v2_ptsz(stream: u64, mode: c_int) = |driver_call| begin(|| driver_call(stream, mode));
    /// `cuStreamBeginCaptureToGraph` (CUDA 12.3).
    fn cuStreamBeginCaptureToGraph(
        stream: u64, graph: u64, dependencies: *const u64, data: *const c_void, count: usize, mode: c_int,
    ) = |driver_call| begin(|| driver_call(stream, graph, dependencies, data, count, mode));
    /// `cuStreamBeginCaptureToGraph` for the per-thread default stream.
    fn cuStreamBeginCaptureToGraph_ptsz(
        stream: u64, graph: u64, dependencies: *const u64, data: *const c_void, count: usize, mode: c_int,
    ) = |driver_call| begin(|| driver_call(stream, graph, dependencies, data, count, mode));
    /// `cuStreamBeginRecaptureToGraph` (CUDA 13.3).
    fn cuStreamBeginRecaptureToGraph(
        stream: u64, mode: c_int, graph: u64, callback: *const c_void, data: *mut c_void,
    ) = |driver_call| begin(|| driver_call(stream, mode, graph, callback, data));
    /// `cuStreamBeginRecaptureToGraph` for the per-thread default stream.
    fn cuStreamBeginRecaptureToGraph_ptsz(
        stream: u64, mode: c_int, graph: u64, callback: *const c_void, data: *mut c_void,
    ) = |driver_call| begin(|| driver_call(stream, mode, graph, callback, data));
    /// `cuStreamBeginCaptureToCig` (CUDA 13.1).
    fn cuStreamBeginCaptureToCig(stream: u64, parameters: *mut c_void) = |driver_call| begin(|| driver_call(stream, parameters));
    /// `cuStreamBeginCaptureToCig` for the per-thread default stream.
    fn cuStreamBeginCaptureToCig_ptsz(stream: u64, parameters: *mut c_void) = |driver_call| begin(|| driver_call(stream, parameters));
    /// `cuStreamEndCapture` (CUDA 10.0).
    fn cuStreamEndCapture(stream: u64, graph: *mut u64) = |driver_call| end(stream, || driver_call(stream, graph));
    /// `cuStreamEndCapture` for the per-thread default stream.
    fn cuStreamEndCapture_ptsz(stream: u64, graph: *mut u64) = |driver_call| end(per_thread(stream), || driver_call(stream, graph));
    /// `cuStreamEndCaptureToCig` (CUDA 13.1).
    fn cuStreamEndCaptureToCig(stream: u64) = |driver_call| end(stream, || driver_call(stream));
    /// `cuStreamEndCaptureToCig` for the per-thread default stream.
    fn cuStreamEndCaptureToCig_ptsz(stream: u64) = |driver_call| end(per_thread(stream), || driver_call(stream));
}
