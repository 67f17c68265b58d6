//! Assigns lease ids: each is larger than all before it, also across restarts and boots.
//!
//! The id is therefore also the lease generation: the successor of a lost lease has a larger one.

use std::time::{SystemTime, UNIX_EPOCH};

use bursar_ledger::units::LeaseId;

/// Assigns the ids of new leases.
///
/// Ids begin at the microseconds from the epoch to the agent's start. An earlier agent used less
/// than one id each microsecond, so its ids are lower. If the clock was set back, the leases that
/// the fd store lists raise the next id.
///
/// An id may come twice in one case: an administrator sets the clock back, the fd store loses its
/// leases, and the agent restarts.
#[derive(Debug)]
pub struct LeaseIds {
    next: u64,
}

impl LeaseIds {
    /// Assigns the ids of an agent that started at `start`.
    pub fn new(start: SystemTime) -> LeaseIds {
        let since_epoch = start.duration_since(UNIX_EPOCH).unwrap_or_default();
        let micros = u64::try_from(since_epoch.as_micros()).unwrap_or(u64::MAX);
        // Zero is the export keep-alive.
        LeaseIds {
            next: micros.max(1),
        }
    }

    /// Assigns the next id.
    pub fn assign(&mut self) -> LeaseId {
        let lease = LeaseId(self.next);
        self.observe(lease);
        lease
    }

    /// Raises the next id above that of an existing lease.
    pub fn observe(&mut self, lease: LeaseId) {
        self.next = self.next.max(lease.0.saturating_add(1));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn id_is_larger_than_those_of_earlier_agents() {
        let start = UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let mut first = LeaseIds::new(start);
        let ids: Vec<LeaseId> = (0..1_000).map(|_| first.assign()).collect();
        assert!(ids.is_sorted_by(|earlier, later| earlier < later));
        let mut second = LeaseIds::new(start + Duration::from_millis(1));
        assert!(second.assign() > ids[999]);
    }

    #[test]
    fn id_is_larger_than_stored_ones_if_the_clock_was_set_back() {
        let stored = LeaseId(1 << 60);
        for start in [UNIX_EPOCH, UNIX_EPOCH - Duration::from_secs(1)] {
            let mut ids = LeaseIds::new(start);
            assert_eq!(ids.assign(), LeaseId(1));
            ids.observe(stored);
            ids.observe(LeaseId(7));
            assert_eq!(ids.assign(), LeaseId(stored.0 + 1));
        }
    }
}
