//! The numbers of leases: each is given once, over reboots too, and is larger than all before it.
//!
//! So a lease's number is its generation L as well: whatever takes the place of a lease that was lost has a larger
//! one. They are on disk by the thousand: those that an agent did not get to give are given by none. Who gives them
//! does not wait for the disk: the next thousand is [`Order`]ed while there are some left.

use crate::checkpoint::{Checkpoint, LoadError};
use crate::units::LeaseId;

/// Numbers that are taken from the disk at a time.
const BLOCK: u64 = 1024;

/// The numbers.
#[derive(Debug)]
pub struct Numbers {
    file: Checkpoint,
    next: u64,
    /// On disk: none from here on was given. Zero before the disk was read.
    end: u64,
    /// The disk is at it.
    ordered: bool,
}

/// Numbers to take from the disk.
#[derive(Debug)]
pub struct Order {
    file: Checkpoint,
    /// From here on, or from where the disk says if that was not read.
    from: u64,
    is_read: bool,
}

/// Numbers that may be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    from: u64,
    end: u64,
}

impl Numbers {
    /// Those of the file.
    pub fn of(file: Checkpoint) -> Numbers {
        Numbers {
            file,
            next: 1,
            end: 0,
            ordered: false,
        }
    }

    /// What the disk is to be asked for now; then [`arrived`](Self::arrived).
    pub fn order(&mut self) -> Option<Order> {
        let is_needed = !self.ordered && self.next.saturating_add(BLOCK / 2) > self.end;
        is_needed.then(|| {
            self.ordered = true;
            Order {
                file: self.file.clone(),
                from: self.next.max(self.end),
                is_read: self.end > 0,
            }
        })
    }

    /// The disk has taken an order in, or has not.
    pub fn arrived(&mut self, block: Option<Block>) {
        self.ordered = false;
        if let Some(Block { from, end }) = block {
            if self.end == 0 {
                self.next = self.next.max(from);
            }
            self.end = end;
        }
    }

    /// The next number; none before the disk has it.
    pub fn peek(&self) -> Option<LeaseId> {
        (self.next < self.end).then_some(LeaseId(self.next))
    }

    /// There is a lease of this number.
    pub fn seen(&mut self, lease: LeaseId) {
        self.next = self.next.max(lease.0.saturating_add(1));
    }
}

impl Order {
    /// Waits for the disk; nothing where it does not take it.
    pub fn carry_out(self) -> Option<Block> {
        let read = if self.is_read {
            0
        } else {
            match self.file.load() {
                Ok(end) => end.unwrap_or(1),
                Err(error @ LoadError::Read { .. }) => {
                    tracing::warn!(%error, "numbers of leases not known");
                    return None;
                }
                Err(error @ LoadError::Malformed { .. }) => {
                    tracing::warn!(%error, "numbers of leases begin above those that the vault has");
                    1
                }
            }
        };
        let from = self.from.max(read);
        let end = from.checked_add(BLOCK)?;
        if let Err(error) = self.file.save_durably(&end) {
            tracing::warn!(%error, "numbers of leases not written");
            return None;
        }
        Some(Block { from, end })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the disk has each order taken in at once.
    fn take(numbers: &mut Numbers) -> Option<LeaseId> {
        if let Some(order) = numbers.order() {
            numbers.arrived(order.carry_out());
        }
        let number = numbers.peek()?;
        numbers.seen(number);
        Some(number)
    }

    #[test]
    fn no_number_is_given_twice_whatever_agent_gives_it_and_whether_or_not_the_disk_is_lost() {
        let folder = tempfile::tempdir().unwrap();
        let numbers = || Numbers::of(Checkpoint::new(folder.path().join("leases.json")));
        let mut first = numbers();
        let given: Vec<u64> = (0..2 * BLOCK + 5)
            .map(|_| take(&mut first).unwrap().0)
            .collect();
        assert!(given.windows(2).all(|two| two[0] < two[1]));
        let mut second = numbers();
        let next = take(&mut second).unwrap();
        assert!(next.0 > *given.last().unwrap());
        std::fs::remove_file(folder.path().join("leases.json")).unwrap();
        let mut third = numbers();
        third.seen(next);
        assert!(take(&mut third).unwrap() > next);
    }

    #[test]
    fn without_a_disk_no_number_is_given() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("none").join("leases.json");
        let mut numbers = Numbers::of(Checkpoint::new(file));
        assert_eq!(take(&mut numbers), None);
        assert!(numbers.order().is_some(), "it is tried again");
    }

    #[test]
    fn while_the_disk_is_at_the_next_numbers_half_a_block_is_given() {
        let folder = tempfile::tempdir().unwrap();
        let mut numbers = Numbers::of(Checkpoint::new(folder.path().join("leases.json")));
        assert_eq!(numbers.peek(), None, "the disk was not asked");
        take(&mut numbers).unwrap();
        let order = loop {
            if let Some(order) = numbers.order() {
                break order;
            }
            numbers.seen(numbers.peek().unwrap());
        };
        let (mut given, mut last) = (0, LeaseId(0));
        while let Some(number) = numbers.peek() {
            assert!(numbers.order().is_none(), "once");
            numbers.seen(number);
            (given, last) = (given + 1, number);
        }
        assert_eq!(given, BLOCK / 2 - 1);
        // What the vault has may be above what was ordered.
        numbers.seen(LeaseId(last.0 + 3 * BLOCK));
        numbers.arrived(order.carry_out());
        assert_eq!(numbers.peek(), None);
        assert!(take(&mut numbers).unwrap().0 > last.0 + 3 * BLOCK);
    }
}
