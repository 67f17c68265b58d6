//! Linear memory that `cuMemFreeAsync` frees: it stays charged until the driver has given it back.
//!
//! The driver gives it back when a synchronise of the host sees that the stream has passed the free
//! (measured on an H200, driver 580: without one it stays taken, however long the stream is idle). An
//! event behind the free tells when a synchronise with it no longer waits. The charge is kept under the
//! event's handle among all others, so that it ends with its context as they do.

use std::ffi::c_uint;

use crate::accounting::{self, ALLOC_TABLE};
use crate::alloc_table::Charge;
use crate::curesult;
use crate::fork_local::ForkLocal;
use crate::hooks::{captures, driver};

/// The events, oldest first.
pub(crate) static PENDING_EVENTS: ForkLocal<Vec<u64>> = ForkLocal::new();

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: c_uint = 2;

/// Notes memory that was just freed in the order of a stream.
pub(crate) fn add(stream: u64, charge: Charge) {
    let mut event = 0;
    if driver!(cuEventCreate(&raw mut event => *mut u64, DISABLE_TIMING => c_uint))
        != curesult::SUCCESS
    {
        // Without an event nothing tells when; the process is about to end with its context.
        return accounting::discharge(charge);
    }
    let recorded = driver!(cuEventRecord(event => u64, stream => u64)) == curesult::SUCCESS;
    if !recorded || ALLOC_TABLE.insert(event, charge).is_err() {
        let _ = driver!(cuEventDestroy_v2(event => u64));
        return accounting::discharge(charge);
    }
    PENDING_EVENTS.lock().push(event);
    // So that the list stays short.
    collect();
}

/// Gives back what no longer waits for its stream; whether that was anything.
pub(crate) fn collect() -> bool {
    let mut events = PENDING_EVENTS.lock();
    let before = events.len();
    events.retain(|event| !release_if_passed(*event));
    events.len() < before
}

/// Whether anything waits.
pub(crate) fn has_pending() -> bool {
    !PENDING_EVENTS.lock().is_empty()
}

fn release_if_passed(event: u64) -> bool {
    let Some(charge) = ALLOC_TABLE.remove(event) else {
        // Its context has ended, and the event with it.
        return true;
    };
    let passed = captures::with_relaxed_capture(|| {
        driver!(cuEventQuery(event => u64)) == curesult::SUCCESS
            && driver!(cuEventSynchronize(event => u64)) == curesult::SUCCESS
    });
    if passed {
        let _ = driver!(cuEventDestroy_v2(event => u64));
        accounting::discharge(charge);
        return true;
    }
    // It has a place in the table: the one that it was taken from.
    ALLOC_TABLE.insert(event, charge).is_err()
}
