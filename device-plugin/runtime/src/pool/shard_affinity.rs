//! Where a thread sits among the shards of every pool: at the first one, until it meets others there again and again.
//!
//! Who looks through all shards, for their sums or for room, is met as well, and is no reason to leave. Where many threads
//! begin at one shard each of them waits for all others, microseconds at a time: none may have to do so often before it leaves.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Who looks through all shards is met once each time at most, and threads that share one as often within microseconds.
const CONTENTION_LIMIT: u32 = 4;
/// Meetings further apart are not of one company.
const CONTENTION_WINDOW: Duration = Duration::from_millis(10);

thread_local! {
    static SHARD_OFFSET: Cell<usize> = const { Cell::new(0) };
    /// When the present company was met first, and how often.
    static RECENT: Cell<Option<(Instant, u32)>> = const { Cell::new(None) };
}

/// The calling thread's seat.
#[inline]
pub(super) fn shard_offset() -> usize {
    SHARD_OFFSET.get()
}

/// Says that the calling thread found its seat taken, or another thread's by right. Where that was often it gets one that nobody
/// was given yet.
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
    let met = before + 1;
    RECENT.set((met < CONTENTION_LIMIT).then_some((first, met)));
    if met == CONTENTION_LIMIT {
        SHARD_OFFSET.set(NEXT.fetch_add(1, Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_moves_only_after_frequent_contention() {
        // A thread of its own, which sits at the first seat.
        let moved = std::thread::spawn(|| {
            let since = Instant::now();
            for look in 0..1000 {
                on_contention_at(since + CONTENTION_WINDOW * look);
            }
            assert_eq!(shard_offset(), 0);
            let later = since + CONTENTION_WINDOW * 2000;
            (0..CONTENTION_LIMIT).for_each(|_| on_contention_at(later));
            shard_offset() != 0
        });
        assert!(moved.join().expect("it ends"));
    }
}
