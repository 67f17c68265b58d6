//! Linear memory that `cuMemFreeAsync` frees: it stays charged until the driver has given it back.
//!
//! The driver gives it back when a synchronise of the host sees that the stream has passed the free
//! (measured on an H200, driver 580: without one it stays taken, however long the stream is idle). An
//! event behind the free tells when a synchronise with it no longer waits. The charge is kept under the
//! event's handle among all others, so that it ends with its context as they do.

use std::ffi::c_uint;

use crate::afresh::Afresh;
use crate::codes;
use crate::hooks::{captures, real};
use crate::ledger::{self, LIVE};
use crate::live::Charge;

/// The events, oldest first.
pub(crate) static EVENTS: Afresh<Vec<u64>> = Afresh::new();

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: c_uint = 2;

/// Notes memory that was just freed in the order of a stream.
pub(crate) fn add(stream: u64, charge: Charge) {
    let mut event = 0;
    if real!(cuEventCreate(&raw mut event => *mut u64, DISABLE_TIMING => c_uint)) != codes::SUCCESS
    {
        // Without an event nothing tells when; the process is about to end with its context.
        return ledger::discharge(charge);
    }
    let recorded = real!(cuEventRecord(event => u64, stream => u64)) == codes::SUCCESS;
    if !recorded || LIVE.insert(event, charge).is_err() {
        let _ = real!(cuEventDestroy_v2(event => u64));
        return ledger::discharge(charge);
    }
    EVENTS.lock().push(event);
    // So that the list stays short.
    collect();
}

/// Gives back what no longer waits for its stream; whether that was anything.
pub(crate) fn collect() -> bool {
    let mut events = EVENTS.lock();
    let before = events.len();
    events.retain(|event| !is_gone(*event));
    events.len() < before
}

/// Whether anything waits.
pub(crate) fn any() -> bool {
    !EVENTS.lock().is_empty()
}

fn is_gone(event: u64) -> bool {
    let Some(charge) = LIVE.remove(event) else {
        // Its context has ended, and the event with it.
        return true;
    };
    let passed = captures::apart(|| {
        real!(cuEventQuery(event => u64)) == codes::SUCCESS
            && real!(cuEventSynchronize(event => u64)) == codes::SUCCESS
    });
    if passed {
        let _ = real!(cuEventDestroy_v2(event => u64));
        ledger::discharge(charge);
        return true;
    }
    // It has a place in the table: the one that it was taken from.
    LIVE.insert(event, charge).is_err()
}
