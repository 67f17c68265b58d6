//! Limits how many peers the agent serves at the same time, on the whole node.
//!
//! Each peer costs the agent descriptors: a socket, a pidfd, and for a moment a credit page.
//! Without free descriptors the agent could not write its own files, so peers get only a part of
//! the limit.

use std::sync::Arc;

use rustix::process::{Resource, Rlimit};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// One peer in this many descriptors: a peer has at most three, so a quarter stays for the agent
/// itself.
const DESCRIPTORS_PER_PEER: u64 = 4;

/// The permits of a node.
#[derive(Clone, Debug)]
pub(super) struct ConnectionLimit(Arc<Semaphore>);

/// Permission to use descriptors of the agent for one peer.
#[derive(Debug)]
pub(super) struct ConnectionPermit {
    _permit: OwnedSemaphorePermit,
}

impl ConnectionLimit {
    /// Creates a limit of `count` peers.
    pub(super) fn new(count: usize) -> ConnectionLimit {
        ConnectionLimit(Arc::new(Semaphore::new(count.min(Semaphore::MAX_PERMITS))))
    }

    /// Derives the limit from this process's current limit of descriptors.
    pub(super) fn from_rlimit() -> ConnectionLimit {
        let Rlimit { current, .. } = rustix::process::getrlimit(Resource::Nofile);
        ConnectionLimit::new(max_peers(current))
    }

    /// The number of free pages that a container may keep for reuse: the descriptors of one permit
    /// in 64.
    pub(super) fn max_free_pages(&self) -> usize {
        self.0.available_permits() / 64
    }

    /// Acquires a permit for a container that has `taken` permits, if more than `taken` are free.
    /// So one container never takes more than half of the permits.
    pub(super) fn try_acquire(&self, taken: usize) -> Option<ConnectionPermit> {
        if taken > 0 && self.0.available_permits() <= taken {
            return None;
        }
        let permit = Arc::clone(&self.0).try_acquire_owned().ok()?;
        Some(ConnectionPermit { _permit: permit })
    }
}

/// The number of peers that a limit of descriptors allows; `None` means no limit.
fn max_peers(descriptors: Option<u64>) -> usize {
    descriptors.map_or(usize::MAX, |limit| {
        usize::try_from(limit / DESCRIPTORS_PER_PEER).unwrap_or(usize::MAX)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_of_the_descriptors_stays_the_agents_own() {
        assert_eq!(max_peers(Some(1024)), 256);
        assert_eq!(max_peers(None), usize::MAX);
    }

    #[test]
    fn permit_is_free_again_when_its_peer_is_gone() {
        let connections = ConnectionLimit::new(1);
        let permit = connections.try_acquire(0);
        assert!(permit.is_some() && connections.try_acquire(0).is_none());
        drop(permit);
        assert!(connections.try_acquire(0).is_some());
    }

    #[test]
    fn greedy_container_leaves_permits_to_others() {
        let connections = ConnectionLimit::new(100);
        let take = |limit: usize| {
            let mut taken = Vec::new();
            while let Some(permit) = (taken.len() < limit)
                .then(|| connections.try_acquire(taken.len()))
                .flatten()
            {
                taken.push(permit);
            }
            taken
        };
        let greedy = take(1000);
        assert_eq!(greedy.len(), 50);
        let (second, third) = (take(10), take(1000));
        assert_eq!((second.len(), third.len()), (10, 20));
    }
}
