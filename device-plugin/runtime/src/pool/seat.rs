//! Where a thread sits among the shards of every pool: at the first one, until it meets another thread there.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local! {
    static SEAT: Cell<usize> = const { Cell::new(0) };
}

/// The calling thread's seat.
#[inline]
pub(super) fn of_thread() -> usize {
    SEAT.get()
}

/// Moves the calling thread to a seat that nobody was given yet.
#[cold]
pub(super) fn next() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    let seat = NEXT.fetch_add(1, Ordering::Relaxed);
    SEAT.set(seat);
    seat
}
