//! Assigns lease ids: each is used once, also across reboots, and is larger than all before it.
//!
//! The id is therefore also the lease generation: the successor of a lost lease has a larger one.
//! The agent reserves ids on disk in blocks; ids that an agent reserved and did not use stay
//! unused. Assigning does not wait for the disk: the next [`Reservation`] starts while half a block
//! is left.

use bursar_host::checkpoint::{Checkpoint, LoadError};
use bursar_ledger::units::LeaseId;

/// How many ids one reservation takes.
const BLOCK_SIZE: u64 = 1024;

/// The ids that this agent may assign.
#[derive(Debug)]
pub struct LeaseIds {
    file: Checkpoint,
    next: u64,
    /// The first id that is not reserved on disk; zero before the disk was read.
    end: u64,
    /// Whether a reservation is under way.
    is_reserving: bool,
}

/// A block of ids to reserve on disk.
#[derive(Debug)]
pub struct Reservation {
    file: Checkpoint,
    /// The first id to reserve. A larger one on disk takes precedence.
    from: u64,
    is_read: bool,
}

/// A block of ids that is reserved on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdBlock {
    from: u64,
    end: u64,
}

impl LeaseIds {
    /// Assigns ids that `file` records. Reads nothing yet.
    pub fn new(file: Checkpoint) -> LeaseIds {
        LeaseIds {
            file,
            next: 1,
            end: 0,
            is_reserving: false,
        }
    }

    /// Returns the reservation to carry out now;
    /// [`complete_reservation`](Self::complete_reservation) takes its result.
    pub(crate) fn next_reservation(&mut self) -> Option<Reservation> {
        let is_needed = !self.is_reserving && self.next.saturating_add(BLOCK_SIZE / 2) > self.end;
        is_needed.then(|| {
            self.is_reserving = true;
            Reservation {
                file: self.file.clone(),
                from: self.next.max(self.end),
                is_read: self.end > 0,
            }
        })
    }

    /// Takes the result of a reservation; none if it failed.
    pub(crate) fn complete_reservation(&mut self, block: Option<IdBlock>) {
        self.is_reserving = false;
        if let Some(IdBlock { from, end }) = block {
            if self.end == 0 {
                self.next = self.next.max(from);
            }
            self.end = end;
        }
    }

    /// The next id; none before a block is reserved.
    pub fn peek(&self) -> Option<LeaseId> {
        (self.next < self.end).then_some(LeaseId(self.next))
    }

    /// Raises the next id above that of an existing lease.
    pub fn observe(&mut self, lease: LeaseId) {
        self.next = self.next.max(lease.0.saturating_add(1));
    }
}

impl Reservation {
    /// Writes the reservation to disk; returns none if that fails.
    pub fn reserve(self) -> Option<IdBlock> {
        let read = if self.is_read {
            0
        } else {
            match self.file.load() {
                Ok(end) => end.unwrap_or(1),
                Err(error @ LoadError::Read { .. }) => {
                    tracing::warn!(%error, "failed to read the reserved lease ids; no lease is created before the next attempt succeeds");
                    return None;
                }
                Err(error @ LoadError::Malformed { .. }) => {
                    tracing::warn!(%error, "failed to parse the reserved lease ids; ids start above those of the fd store");
                    1
                }
            }
        };
        let from = self.from.max(read);
        let end = from.checked_add(BLOCK_SIZE)?;
        if let Err(error) = self.file.save_durably(&end) {
            tracing::warn!(%error, "failed to reserve lease ids; no lease is created before the next attempt succeeds");
            return None;
        }
        Some(IdBlock { from, end })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Assigns an id, with a disk that completes each reservation at once.
    fn take(numbers: &mut LeaseIds) -> Option<LeaseId> {
        if let Some(order) = numbers.next_reservation() {
            numbers.complete_reservation(order.reserve());
        }
        let number = numbers.peek()?;
        numbers.observe(number);
        Some(number)
    }

    #[test]
    fn no_number_is_given_twice_whatever_agent_gives_it_and_whether_or_not_the_disk_is_lost() {
        let folder = tempfile::tempdir().unwrap();
        let numbers = || LeaseIds::new(Checkpoint::new(folder.path().join("leases.json")));
        let mut first = numbers();
        let given: Vec<u64> = (0..2 * BLOCK_SIZE + 5)
            .map(|_| take(&mut first).unwrap().0)
            .collect();
        assert!(given.windows(2).all(|two| two[0] < two[1]));
        let mut second = numbers();
        let next = take(&mut second).unwrap();
        assert!(next.0 > *given.last().unwrap());
        std::fs::remove_file(folder.path().join("leases.json")).unwrap();
        let mut third = numbers();
        third.observe(next);
        assert!(take(&mut third).unwrap() > next);
    }

    #[test]
    fn without_a_disk_no_number_is_given() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("none").join("leases.json");
        let mut numbers = LeaseIds::new(Checkpoint::new(file));
        assert_eq!(take(&mut numbers), None);
        assert!(numbers.next_reservation().is_some(), "it is tried again");
    }

    #[test]
    fn while_the_disk_is_at_the_next_numbers_half_a_block_is_given() {
        let folder = tempfile::tempdir().unwrap();
        let mut numbers = LeaseIds::new(Checkpoint::new(folder.path().join("leases.json")));
        assert_eq!(numbers.peek(), None, "the disk was not asked");
        take(&mut numbers).unwrap();
        let order = loop {
            if let Some(order) = numbers.next_reservation() {
                break order;
            }
            numbers.observe(numbers.peek().unwrap());
        };
        let (mut given, mut last) = (0, LeaseId(0));
        while let Some(number) = numbers.peek() {
            assert!(numbers.next_reservation().is_none(), "once");
            numbers.observe(number);
            (given, last) = (given + 1, number);
        }
        assert_eq!(given, BLOCK_SIZE / 2 - 1);
        // The fd store may have ids above the reserved block.
        numbers.observe(LeaseId(last.0 + 3 * BLOCK_SIZE));
        numbers.complete_reservation(order.reserve());
        assert_eq!(numbers.peek(), None);
        assert!(take(&mut numbers).unwrap().0 > last.0 + 3 * BLOCK_SIZE);
    }
}
