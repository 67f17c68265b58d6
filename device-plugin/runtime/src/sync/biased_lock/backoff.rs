//! How to wait for a holder that mostly needs tens of nanoseconds, and may not be running.

use std::cell::Cell;
use std::time::Duration;

use spin::relax::RelaxStrategy;

/// Looks this often before it lets others run: a multiple of what a holder needs.
const SPINS: u32 = 64;
/// Lets others run this often before it sleeps, for who is to run may have less of a right to than this thread.
const YIELDS: u32 = 64;
const SLEEP: Duration = Duration::from_micros(50);

/// Looks, then lets others run, then sleeps.
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
