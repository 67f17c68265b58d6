//! Finds the ids of contexts.

use super::driver;
use crate::curesult;
use crate::forward::{self, index};

/// Returns the id of the calling thread's context; zero without one.
pub(crate) fn current_id() -> u64 {
    context_id(0).unwrap_or(0)
}

/// Returns the id of a context: the driver's number (CUDA 12.0), which is never reused, and before
/// that the handle, which may be. Handle zero is the current context.
pub(crate) fn context_id(handle: u64) -> Option<u64> {
    let mut name = 0;
    let code = if forward::FUNCTIONS.get(index::cuCtxGetId).is_some() {
        driver!(cuCtxGetId(handle => u64, &raw mut name => *mut u64))
    } else if handle == 0 {
        driver!(cuCtxGetCurrent(&raw mut name => *mut u64))
    } else {
        name = handle;
        curesult::SUCCESS
    };
    (code == curesult::SUCCESS && name != 0).then_some(name)
}

/// Returns the id of a stream's context; zero where the driver does not tell.
pub(crate) fn id_of_stream(stream: u64) -> u64 {
    let mut handle = 0;
    match driver!(cuStreamGetCtx(stream => u64, &raw mut handle => *mut u64)) {
        curesult::SUCCESS => id_of_handle(handle).unwrap_or(0),
        _ => 0,
    }
}

/// Returns the id of a context handle; `None` for a null handle.
pub(crate) fn id_of_handle(handle: u64) -> Option<u64> {
    if handle == 0 {
        None
    } else {
        context_id(handle)
    }
}
