//! Where a thread sits among the shards of every pool: at the first one, until it has met others there often enough.
//!
//! Who looks through all shards, for their sums or for room, is met as well, and is no reason to leave.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads that share a shard meet as often within microseconds.
const ENOUGH: u32 = 64;

thread_local! {
    static SEAT: Cell<usize> = const { Cell::new(0) };
    static MEETINGS: Cell<u32> = const { Cell::new(0) };
}

/// The calling thread's seat.
#[inline]
pub(super) fn of_thread() -> usize {
    SEAT.get()
}

/// The calling thread's seat from here on, where it has met another: at every [`ENOUGH`]th time one that nobody was given
/// yet.
#[cold]
pub(super) fn after_a_meeting() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    let meetings = MEETINGS.get().wrapping_add(1);
    MEETINGS.set(meetings);
    if meetings.is_multiple_of(ENOUGH) {
        SEAT.set(NEXT.fetch_add(1, Ordering::Relaxed));
    }
    SEAT.get()
}
