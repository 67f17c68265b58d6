//! Holds credit that a pool was charged ahead of its allocations.
//!
//! One word, {available, in use}, in units. An allocation reserves its part before the driver may
//! grow the pool, and finishes the part after that. A thread closes the word before it queries the
//! pool's size. It has then counted every growth, as in use or as grown, and some of them twice.

use std::sync::atomic::{AtomicU64, Ordering};

use bursar_protocol::units::Units;

#[derive(Debug, Default)]
pub(super) struct PrefetchedCredit(AtomicU64);

const ONE_AVAILABLE: u64 = 1 << 32;

impl PrefetchedCredit {
    /// Reserves `units` for a call. Returns `false` where less is available.
    #[inline]
    pub(super) fn reserve(&self, units: Units) -> bool {
        let step = |word: u64| {
            let left = (word / ONE_AVAILABLE).checked_sub(u64::from(units.0))?;
            Some(left * ONE_AVAILABLE + (word % ONE_AVAILABLE) + u64::from(units.0))
        };
        self.0
            .try_update(Ordering::SeqCst, Ordering::Relaxed, step)
            .is_ok()
    }

    /// Ends the reservation of a call.
    #[inline]
    pub(super) fn finish(&self, units: Units) {
        self.0.fetch_sub(u64::from(units.0), Ordering::SeqCst);
    }

    /// Leaves nothing for further calls. Returns what running calls have reserved.
    pub(super) fn close(&self) -> Units {
        let word = self.0.fetch_and(ONE_AVAILABLE - 1, Ordering::SeqCst);
        Units((word % ONE_AVAILABLE) as u32)
    }

    /// Makes `units`, which the caller has charged, available to further calls.
    pub(super) fn open(&self, units: Units) {
        let open = |word: u64| u64::from(units.0) * ONE_AVAILABLE + word % ONE_AVAILABLE;
        self.0.update(Ordering::SeqCst, Ordering::Relaxed, open);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserve_grants_no_more_than_is_available() {
        let ahead = PrefetchedCredit::default();
        assert!(!ahead.reserve(Units(1)));
        ahead.open(Units(10));
        assert!(ahead.reserve(Units(7)));
        assert!(!ahead.reserve(Units(4)));
        assert!(ahead.reserve(Units(3)));
        ahead.finish(Units(7));
        assert_eq!(ahead.close(), Units(3));
    }

    #[test]
    fn close_leaves_only_running_reservations() {
        let ahead = PrefetchedCredit::default();
        ahead.open(Units::MAX);
        assert!(ahead.reserve(Units(5)));
        assert_eq!(ahead.close(), Units(5));
        assert!(!ahead.reserve(Units(1)));
        ahead.finish(Units(5));
        assert_eq!(ahead.close(), Units::ZERO);
    }

    #[test]
    fn each_unit_is_reserved_once_by_racing_threads() {
        let ahead = PrefetchedCredit::default();
        ahead.open(Units(1000));
        let count = || (0..1000).filter(|_| ahead.reserve(Units(3))).count();
        let taken: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(count)).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .sum()
        });
        assert_eq!(taken, 333);
        assert_eq!(ahead.close(), Units(999));
    }
}
