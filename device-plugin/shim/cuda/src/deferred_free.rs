//! Defers the discharge of linear memory that `cuMemFreeAsync` frees until the driver has released
//! it.
//!
//! The driver releases the memory when a host synchronize sees that the stream has passed the free.
//! Without a synchronize the memory stays taken, however long the stream is idle (measured on an
//! H200, driver 580). An event behind the free tells when a synchronize no longer waits. The charge
//! is recorded under the event's handle in the same table as all others, so that it ends with its
//! context.

use std::ffi::c_uint;

use crate::accounting::{self, ALLOC_TABLE};
use crate::alloc_table::Charge;
use crate::curesult;
use crate::driver_calls::{captures, driver, streams};
use crate::fork_local::ForkLocal;

/// The events, oldest first.
pub(crate) static PENDING_EVENTS: ForkLocal<Vec<u64>> = ForkLocal::new();

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: c_uint = 2;

/// Forgets the parent's events, in a forked child.
pub(crate) fn reset() {
    PENDING_EVENTS.reset();
}

/// Records memory that was just freed in stream order. The stream may be of a context that is not
/// current, whose events alone can be recorded in it (fact F27).
pub(crate) fn add(stream: u64, pointer: u64, charge: Charge) {
    let recorded = record(stream).or_else(|| streams::in_context_of(stream, || record(stream))?);
    match recorded.filter(|event| ALLOC_TABLE.insert(*event, charge).is_ok()) {
        Some(event) => {
            PENDING_EVENTS.lock().push(event);
            // Collecting here keeps the list short.
            collect();
        }
        // Without an event the time of the release is unknown. So the charge stays until the driver
        // returns the pointer again, or the context ends.
        None => drop(ALLOC_TABLE.insert(pointer, charge)),
    }
}

/// Records an event of the current context behind the work of a stream.
fn record(stream: u64) -> Option<u64> {
    let mut event = 0;
    if driver!(cuEventCreate(&raw mut event => *mut u64, DISABLE_TIMING => c_uint))
        != curesult::SUCCESS
    {
        return None;
    }
    if driver!(cuEventRecord(event => u64, stream => u64)) != curesult::SUCCESS {
        let _ = driver!(cuEventDestroy_v2(event => u64));
        return None;
    }
    Some(event)
}

/// Discharges the memory whose stream has passed the free. Returns whether there was any.
pub(crate) fn collect() -> bool {
    let mut events = PENDING_EVENTS.lock();
    let before = events.len();
    events.retain(|event| !release_if_passed(*event));
    events.len() < before
}

/// Returns whether any memory waits for its stream.
pub(crate) fn has_pending() -> bool {
    !PENDING_EVENTS.lock().is_empty()
}

fn release_if_passed(event: u64) -> bool {
    let Some(charge) = ALLOC_TABLE.remove(event) else {
        // The context was destroyed, and the event with it.
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
    // The insert reuses the slot that the charge was removed from.
    ALLOC_TABLE.insert(event, charge).is_err()
}
