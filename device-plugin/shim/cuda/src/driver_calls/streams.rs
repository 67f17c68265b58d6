//! Finds the ids and devices of streams.

use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicU32, Ordering};

use super::{captures, current_device, device_count, driver};
use crate::curesult::{self, CuResult};

/// `CU_STREAM_PER_THREAD`: the meaning of stream 0 in `_ptsz` functions.
const PER_THREAD: u64 = 2;

/// Returns the handle of a `_ptsz` function's stream for functions without the suffix.
pub(crate) fn per_thread(stream: u64) -> u64 {
    if stream == 0 { PER_THREAD } else { stream }
}

/// Returns the id of a stream: the driver's number (CUDA 12.0), and before that the handle, which
/// may be reused.
pub(crate) fn stream_id(stream: u64) -> u64 {
    let mut name = 0;
    let id = || driver!(cuStreamGetId(stream => u64, &raw mut name => *mut u64));
    if captures::with_relaxed_capture(id) == curesult::SUCCESS {
        name
    } else {
        stream
    }
}

/// Returns the device that a stream runs on.
#[inline]
pub(crate) fn device_of(stream: u64) -> Result<c_int, CuResult> {
    if has_single_device() {
        return Ok(0);
    }
    device_among_many(stream)
}

#[inline(never)]
fn device_among_many(stream: u64) -> Result<c_int, CuResult> {
    if stream <= PER_THREAD {
        return current_device();
    }
    let (mut device, mut context) = (0, 0);
    if driver!(cuStreamGetDevice(stream => u64, &raw mut device => *mut c_int)) == curesult::SUCCESS
    {
        return Ok(device);
    }
    match driver!(cuStreamGetCtx(stream => u64, &raw mut context => *mut u64)) {
        curesult::SUCCESS => in_context(context, current_device)?,
        code => Err(code),
    }
}

/// Calls a function while the context of a stream is current; `None` where that fails.
pub(crate) fn in_context_of<T>(stream: u64, call: impl FnOnce() -> T) -> Option<T> {
    let mut context = 0;
    match driver!(cuStreamGetCtx(stream => u64, &raw mut context => *mut u64)) {
        curesult::SUCCESS => in_context(context, call).ok(),
        _ => None,
    }
}

fn in_context<T>(context: u64, call: impl FnOnce() -> T) -> Result<T, CuResult> {
    match driver!(cuCtxPushCurrent_v2(context => u64)) {
        curesult::SUCCESS => {}
        code => return Err(code),
    }
    let result = call();
    let mut popped = 0;
    let _ = driver!(cuCtxPopCurrent_v2(&raw mut popped => *mut u64));
    Ok(result)
}

/// Returns whether the driver shows a single device. Queried once, because the number never changes
/// after cuInit.
fn has_single_device() -> bool {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let known = COUNT.load(Ordering::Relaxed);
    if known != 0 {
        return known == 1;
    }
    let count = c_uint::try_from(device_count()).unwrap_or(0);
    COUNT.store(count, Ordering::Relaxed);
    count == 1
}
