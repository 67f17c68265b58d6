//! Permits one writer of a lease in this process at a time.
//!
//! A response may be lost, so the agent grants a lease again to the process that already writes it.
//! The right to commit then passes to the later request. The agent cannot tell two threads apart.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{Key, LeaseName};
use crate::driver::GpuUuid;

/// Identity of a lease: the agent's socket, the GPU, the name and the key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct WriteLockKey {
    pub(super) agent: PathBuf,
    pub(super) gpu: GpuUuid,
    pub(super) name: LeaseName,
    pub(super) key: Key,
}

static LOCKED: Mutex<BTreeSet<WriteLockKey>> = Mutex::new(BTreeSet::new());

/// Lock on a lease's identity, released when dropped.
#[derive(Debug)]
pub(super) struct WriteLock(WriteLockKey);

impl WriteLock {
    /// Takes the lock; `None` if another thread holds it.
    pub(super) fn try_acquire(key: WriteLockKey) -> Option<WriteLock> {
        locked().insert(key.clone()).then(|| WriteLock(key))
    }
}

impl Drop for WriteLock {
    fn drop(&mut self) {
        locked().remove(&self.0);
    }
}

fn locked() -> MutexGuard<'static, BTreeSet<WriteLockKey>> {
    LOCKED.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_lock_is_exclusive_until_dropped() {
        let key = |key: u8| WriteLockKey {
            agent: PathBuf::from("/run/agent.sock"),
            gpu: GpuUuid::from_bytes([1; 16]),
            name: LeaseName::try_from("weights".to_owned()).unwrap(),
            key: [key; 32],
        };
        let first = WriteLock::try_acquire(key(1));
        assert!(first.is_some() && WriteLock::try_acquire(key(1)).is_none());
        assert!(WriteLock::try_acquire(key(2)).is_some());
        drop(first);
        assert!(WriteLock::try_acquire(key(1)).is_some());
    }
}
