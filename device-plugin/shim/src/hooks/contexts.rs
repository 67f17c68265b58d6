//! The ends of contexts: the driver frees what was allocated in them, and so does the ledger.
//!
//! Source: `cuCtxDestroy` in cuda.h, "these resources also include memory allocations by
//! cuMemAlloc(), cuMemAllocHost(), cuMemAllocManaged() and cuMemAllocPitch()".
#![allow(non_snake_case)]

use std::ffi::{c_int, c_uint};

use super::{hooks, real};
use crate::codes::{self, CuResult};
use crate::forward::{self, index};
use crate::ledger::{self, LIVE};

/// The calling thread's context; zero where there is none.
pub(crate) fn current() -> u64 {
    name_of(0).unwrap_or(0)
}

/// What tells a context from all others of this process: the driver's number for it (CUDA 12.0),
/// which never comes again, and before that its handle, which may. Handle zero is the current
/// context.
fn name_of(handle: u64) -> Option<u64> {
    let mut name = 0;
    let code = if forward::real(index::cuCtxGetId).is_some() {
        real!(cuCtxGetId(handle => u64, &raw mut name => *mut u64))
    } else if handle == 0 {
        real!(cuCtxGetCurrent(&raw mut name => *mut u64))
    } else {
        name = handle;
        codes::SUCCESS
    };
    (code == codes::SUCCESS && name != 0).then_some(name)
}

/// The primary context of a device, if it lives. Whoever retained it, it cannot end while it is
/// asked for its name.
fn primary(device: c_int) -> Option<u64> {
    let (mut flags, mut active, mut handle) = (0, 0, 0);
    let code = real!(cuDevicePrimaryCtxGetState(
        device => c_int, &raw mut flags => *mut c_uint, &raw mut active => *mut c_int,
    ));
    if code != codes::SUCCESS || active == 0 {
        return None;
    }
    if real!(cuDevicePrimaryCtxRetain(&raw mut handle => *mut u64, device => c_int))
        != codes::SUCCESS
    {
        return None;
    }
    let name = name_of(handle);
    release(device);
    name
}

/// Releases a primary context, in the form that the driver has.
fn release(device: c_int) -> CuResult {
    match forward::real(index::cuDevicePrimaryCtxRelease_v2) {
        Some(_) => real!(cuDevicePrimaryCtxRelease_v2(device => c_int)),
        None => real!(cuDevicePrimaryCtxRelease(device => c_int)),
    }
}

/// Calls what ends a context for certain. Its pointers are forgotten first: once they are freed,
/// another thread may be given the same ones.
fn ending(context: Option<u64>, call: impl FnOnce() -> CuResult) -> CuResult {
    let Some(context) = context.filter(|_| crate::state::state().is_some()) else {
        return call();
    };
    let known = LIVE.remove_context(context);
    let answer = call();
    for (pointer, charge) in known {
        if answer == codes::SUCCESS {
            ledger::discharge(charge);
        } else {
            // Not ended, so still there.
            let _ = LIVE.insert(pointer, charge);
        }
    }
    answer
}

/// Calls what ends a primary context if nobody else has retained it.
fn releasing(device: c_int, call: impl FnOnce() -> CuResult) -> CuResult {
    let before = primary(device);
    let answer = call();
    if let (codes::SUCCESS, Some(context)) = (answer, before)
        && crate::state::state().is_some()
        && primary(device) != Some(context)
    {
        for (_, charge) in LIVE.remove_context(context) {
            ledger::discharge(charge);
        }
    }
    answer
}

hooks! {
    /// `cuCtxDestroy` (CUDA 2.0).
    fn cuCtxDestroy(context: u64) = |plain| ending(named(context), || plain(context));
    /// `cuCtxDestroy` (CUDA 4.0).
    fn cuCtxDestroy_v2(context: u64) = |plain| ending(named(context), || plain(context));
    /// `cuDevicePrimaryCtxRelease` (CUDA 7.0).
    fn cuDevicePrimaryCtxRelease(device: c_int) = |plain| releasing(device, || plain(device));
    /// `cuDevicePrimaryCtxRelease` (CUDA 11.0).
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) = |plain| releasing(device, || plain(device));
    /// `cuDevicePrimaryCtxReset` (CUDA 7.0).
    fn cuDevicePrimaryCtxReset(device: c_int) = |plain| ending(primary(device), || plain(device));
    /// `cuDevicePrimaryCtxReset` (CUDA 11.0).
    fn cuDevicePrimaryCtxReset_v2(device: c_int) = |plain| ending(primary(device), || plain(device));
}

/// The name of a context that a program hands over; of no context where that is null.
fn named(handle: u64) -> Option<u64> {
    if handle == 0 { None } else { name_of(handle) }
}
