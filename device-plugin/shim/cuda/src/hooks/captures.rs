//! Hooks the begin and the end of stream captures, so that the shim can count them. A capture ends
//! with its stream too.
#![allow(non_snake_case)]

use std::ffi::{c_int, c_void};

use super::hooks;
use crate::curesult::CuResult;
use crate::driver_calls::captures::{self, destroy_stream, end};
use crate::driver_calls::context_ids::id_of_stream;
use crate::driver_calls::streams::per_thread;

hooks! {
    /// `cuStreamBeginCapture` (CUDA 10.0): without a mode.
    fn cuStreamBeginCapture(stream: u64) = |driver_call| begin(stream, || driver_call(stream));
    /// `cuStreamBeginCapture` for the per-thread default stream.
    fn cuStreamBeginCapture_ptsz(stream: u64) = |driver_call| begin(per_thread(stream), || driver_call(stream));
    /// `cuStreamBeginCapture` (CUDA 10.1).
    fn cuStreamBeginCapture_v2(stream: u64, mode: c_int) = |driver_call| begin(stream, || driver_call(stream, mode));
    /// `cuStreamBeginCapture_v2` for the per-thread default stream.
    fn cuStreamBeginCapture_v2_ptsz(stream: u64, mode: c_int) = |driver_call| begin(per_thread(stream), || driver_call(stream, mode));
    /// `cuStreamBeginCaptureToGraph` (CUDA 12.3).
    fn cuStreamBeginCaptureToGraph(
        stream: u64, graph: u64, dependencies: *const u64, data: *const c_void, count: usize, mode: c_int,
    ) = |driver_call| begin(stream, || driver_call(stream, graph, dependencies, data, count, mode));
    /// `cuStreamBeginCaptureToGraph` for the per-thread default stream.
    fn cuStreamBeginCaptureToGraph_ptsz(
        stream: u64, graph: u64, dependencies: *const u64, data: *const c_void, count: usize, mode: c_int,
    ) = |driver_call| begin(per_thread(stream), || driver_call(stream, graph, dependencies, data, count, mode));
    /// `cuStreamBeginRecaptureToGraph` (CUDA 13.3).
    fn cuStreamBeginRecaptureToGraph(
        stream: u64, mode: c_int, graph: u64, callback: *const c_void, data: *mut c_void,
    ) = |driver_call| begin(stream, || driver_call(stream, mode, graph, callback, data));
    /// `cuStreamBeginRecaptureToGraph` for the per-thread default stream.
    fn cuStreamBeginRecaptureToGraph_ptsz(
        stream: u64, mode: c_int, graph: u64, callback: *const c_void, data: *mut c_void,
    ) = |driver_call| begin(per_thread(stream), || driver_call(stream, mode, graph, callback, data));
    /// `cuStreamBeginCaptureToCig` (CUDA 13.1).
    fn cuStreamBeginCaptureToCig(stream: u64, parameters: *mut c_void) = |driver_call| begin(stream, || driver_call(stream, parameters));
    /// `cuStreamBeginCaptureToCig` for the per-thread default stream.
    fn cuStreamBeginCaptureToCig_ptsz(stream: u64, parameters: *mut c_void) = |driver_call| begin(per_thread(stream), || driver_call(stream, parameters));
    /// `cuStreamEndCapture` (CUDA 10.0).
    fn cuStreamEndCapture(stream: u64, graph: *mut u64) = |driver_call| end(stream, || driver_call(stream, graph));
    /// `cuStreamEndCapture` for the per-thread default stream.
    fn cuStreamEndCapture_ptsz(stream: u64, graph: *mut u64) = |driver_call| end(per_thread(stream), || driver_call(stream, graph));
    /// `cuStreamEndCaptureToCig` (CUDA 13.1).
    fn cuStreamEndCaptureToCig(stream: u64) = |driver_call| end(stream, || driver_call(stream));
    /// `cuStreamEndCaptureToCig` for the per-thread default stream.
    fn cuStreamEndCaptureToCig_ptsz(stream: u64) = |driver_call| end(per_thread(stream), || driver_call(stream));
    /// `cuStreamDestroy` (CUDA 2.0).
    fn cuStreamDestroy(stream: u64) = |driver_call| destroy_stream(stream, || driver_call(stream));
    /// `cuStreamDestroy` (CUDA 4.0).
    fn cuStreamDestroy_v2(stream: u64) = |driver_call| destroy_stream(stream, || driver_call(stream));
}

/// Begins a capture, and counts it with the stream's context.
fn begin(stream: u64, call: impl FnOnce() -> CuResult) -> CuResult {
    let context = captures::with_relaxed_capture(|| id_of_stream(stream));
    captures::begin(stream, context, call)
}
