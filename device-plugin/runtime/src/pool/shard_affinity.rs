//! Assigns threads to shards: every thread starts at offset 0 and moves after repeated contention.
//!
//! A thread that searches all shards also contends, but that is no reason to move. Where many
//! threads share a shard, each waits for all others for microseconds, so a thread moves after few
//! contentions.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A thread that searches all shards contends at most once; threads that share a shard contend this
/// often within microseconds.
const CONTENTION_LIMIT: u32 = 4;
/// Contention events farther apart than this do not add up.
const CONTENTION_WINDOW: Duration = Duration::from_millis(10);

thread_local! {
    static SHARD_OFFSET: Cell<usize> = const { Cell::new(0) };
    /// Time of the first contention of the current window, and the number of contentions in it.
    static RECENT: Cell<Option<(Instant, u32)>> = const { Cell::new(None) };
}

/// Returns the calling thread's offset.
#[inline]
pub(super) fn shard_offset() -> usize {
    SHARD_OFFSET.get()
}

/// Counts a contention of the calling thread. At the limit the thread gets an offset that no other
/// thread was given.
#[cold]
pub(super) fn on_contention() {
    on_contention_at(Instant::now());
}

fn on_contention_at(now: Instant) {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    let (first, before) = RECENT
        .get()
        .filter(|(first, _)| now.duration_since(*first) < CONTENTION_WINDOW)
        .unwrap_or((now, 0));
    let contentions = before + 1;
    RECENT.set((contentions < CONTENTION_LIMIT).then_some((first, contentions)));
    if contentions == CONTENTION_LIMIT {
        SHARD_OFFSET.set(NEXT.fetch_add(1, Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_moves_only_after_frequent_contention() {
        // A new thread, which starts at offset 0.
        let moved = std::thread::spawn(|| {
            let since = Instant::now();
            for window in 0..1000 {
                on_contention_at(since + CONTENTION_WINDOW * window);
            }
            assert_eq!(shard_offset(), 0);
            let later = since + CONTENTION_WINDOW * 2000;
            (0..CONTENTION_LIMIT).for_each(|_| on_contention_at(later));
            shard_offset() != 0
        });
        assert!(moved.join().expect("it ends"));
    }
}
