//! What this process begins or writes: of each title one lease at a time.
//!
//! A lease of its own that a process asks for again is given to it again, for an answer may have been lost: the right to
//! commit is then the later asker's. So the agent cannot tell two threads apart that want the same.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{Key, LeaseName};
use crate::driver::GpuUuid;

/// What a lease is found by, and who is asked for it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Title {
    pub(super) agent: PathBuf,
    pub(super) gpu: GpuUuid,
    pub(super) name: LeaseName,
    pub(super) key: Key,
}

static CLAIMED: Mutex<BTreeSet<Title>> = Mutex::new(BTreeSet::new());

/// That a title is somebody's of this process, until it is dropped.
#[derive(Debug)]
pub(super) struct Claim(Title);

impl Claim {
    /// A title, if it is nobody's.
    pub(super) fn of(title: Title) -> Option<Claim> {
        claimed().insert(title.clone()).then(|| Claim(title))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        claimed().remove(&self.0);
    }
}

fn claimed() -> MutexGuard<'static, BTreeSet<Title>> {
    CLAIMED.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_title_is_one_threads_until_that_lets_go_of_it() {
        let title = |key: u8| Title {
            agent: PathBuf::from("/run/agent.sock"),
            gpu: GpuUuid::from_bytes([1; 16]),
            name: LeaseName::try_from("weights".to_owned()).unwrap(),
            key: [key; 32],
        };
        let first = Claim::of(title(1));
        assert!(first.is_some() && Claim::of(title(1)).is_none());
        assert!(Claim::of(title(2)).is_some());
        drop(first);
        assert!(Claim::of(title(1)).is_some());
    }
}
