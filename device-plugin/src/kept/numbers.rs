//! The numbers of leases: each is given once, over reboots too, and is larger than all before it.
//!
//! So a lease's number is its generation L as well: whatever takes the place of a lease that was lost has a larger
//! one. They are on disk by the thousand: those that an agent did not get to give are given by none.

use crate::checkpoint::{Checkpoint, LoadError};
use crate::kept::LeaseId;

/// Numbers that are taken from the disk at a time.
const BLOCK: u64 = 1024;

/// The numbers.
#[derive(Debug)]
pub struct Numbers {
    file: Checkpoint,
    next: u64,
    /// On disk: none from here on was given. Zero before the disk was read.
    end: u64,
}

impl Numbers {
    /// Those of the file.
    pub fn of(file: Checkpoint) -> Numbers {
        Numbers {
            file,
            next: 1,
            end: 0,
        }
    }

    /// The next number; none where the disk does not take it.
    pub fn take(&mut self) -> Option<LeaseId> {
        if self.end == 0 {
            let end: u64 = match self.file.load() {
                Ok(end) => end.unwrap_or(1),
                Err(error @ LoadError::Read { .. }) => {
                    tracing::warn!(%error, "numbers of leases not known");
                    return None;
                }
                Err(error @ LoadError::Malformed { .. }) => {
                    tracing::warn!(%error, "numbers of leases begin above those that the vault has");
                    1
                }
            };
            self.next = self.next.max(end);
        }
        if self.next >= self.end {
            let end = self.next.checked_add(BLOCK)?;
            if let Err(error) = self.file.save_durably(&end) {
                tracing::warn!(%error, "numbers of leases not written");
                return None;
            }
            self.end = end;
        }
        let number = self.next;
        self.next += 1;
        Some(LeaseId(number))
    }

    /// There is a lease of this number.
    pub fn seen(&mut self, lease: LeaseId) {
        self.next = self.next.max(lease.0.saturating_add(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_number_is_given_twice_whatever_agent_gives_it_and_whether_or_not_the_disk_is_lost() {
        let folder = tempfile::tempdir().unwrap();
        let numbers = || Numbers::of(Checkpoint::new(folder.path().join("leases.json")));
        let mut first = numbers();
        let given: Vec<u64> = (0..BLOCK + 5).map(|_| first.take().unwrap().0).collect();
        assert!(given.windows(2).all(|two| two[0] < two[1]));
        let mut second = numbers();
        let next = second.take().unwrap();
        assert!(next.0 > *given.last().unwrap());
        std::fs::remove_file(folder.path().join("leases.json")).unwrap();
        let mut third = numbers();
        third.seen(next);
        assert!(third.take().unwrap() > next);
    }

    #[test]
    fn without_a_disk_no_number_is_given() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("none").join("leases.json");
        assert_eq!(Numbers::of(Checkpoint::new(file)).take(), None);
    }
}
