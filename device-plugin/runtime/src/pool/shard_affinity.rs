//! Where a thread sits among the shards of every pool: at the first one, until it meets others there again and again.
//!
//! Who looks through all shards, for their sums or for room, is met as well, and is no reason to leave. Where many threads
//! begin at one shard each of them waits for all others, microseconds at a time: none may have to do so often before it leaves.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Who looks through all shards is met once each time at most, and threads that share one as often within microseconds.
const ENOUGH: u32 = 4;
/// Meetings further apart are not of one company.
const TOGETHER: Duration = Duration::from_millis(10);

thread_local! {
    static SEAT: Cell<usize> = const { Cell::new(0) };
    /// When the present company was met first, and how often.
    static MET: Cell<Option<(Instant, u32)>> = const { Cell::new(None) };
}

/// The calling thread's seat.
#[inline]
pub(super) fn of_thread() -> usize {
    SEAT.get()
}

/// Says that the calling thread found its seat taken, or another thread's by right. Where that was often it gets one that nobody
/// was given yet.
#[cold]
pub(super) fn meet() {
    meet_at(Instant::now());
}

fn meet_at(now: Instant) {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    let (first, before) = MET
        .get()
        .filter(|(first, _)| now.duration_since(*first) < TOGETHER)
        .unwrap_or((now, 0));
    let met = before + 1;
    MET.set((met < ENOUGH).then_some((first, met)));
    if met == ENOUGH {
        SEAT.set(NEXT.fetch_add(1, Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_meets_others_at_once_moves_and_who_is_looked_at_now_and_then_stays() {
        // A thread of its own, which sits at the first seat.
        let moved = std::thread::spawn(|| {
            let since = Instant::now();
            for look in 0..1000 {
                meet_at(since + TOGETHER * look);
            }
            assert_eq!(of_thread(), 0);
            let later = since + TOGETHER * 2000;
            (0..ENOUGH).for_each(|_| meet_at(later));
            of_thread() != 0
        });
        assert!(moved.join().expect("it ends"));
    }
}
