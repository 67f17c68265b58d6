//! Waits for a lock that is usually held for tens of nanoseconds, by a thread that may not be
//! running.

use std::cell::Cell;
use std::time::Duration;

use spin::relax::RelaxStrategy;

/// Spins before a yield: a multiple of the usual hold time.
const SPINS: u32 = 64;
/// Yields before a sleep, because the holder may have a lower priority than this thread.
const YIELDS: u32 = 64;
const SLEEP: Duration = Duration::from_micros(50);

/// Spins, then yields, then sleeps.
#[derive(Debug)]
pub(super) struct Backoff;

impl RelaxStrategy for Backoff {
    #[cold]
    fn relax() {
        thread_local! {
            static WAITED: Cell<u32> = const { Cell::new(0) };
        }
        let waited = WAITED.get().wrapping_add(1);
        WAITED.set(waited);
        if !waited.is_multiple_of(SPINS) {
            std::hint::spin_loop();
        } else if !waited.is_multiple_of(SPINS * YIELDS) {
            std::thread::yield_now();
        } else {
            std::thread::sleep(SLEEP);
        }
    }
}
