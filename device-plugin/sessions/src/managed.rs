//! Tracks the managed memory of each GPU, which device memory displaces, and the agent's balloon.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_ledger::units::{Bytes, GpuUuid};

use super::{Sessions, Shared, lock};

/// How long an audit's permission to evict managed memory is valid: the host memory of its owners
/// changes.
const PERMISSION_AGE: Duration = Duration::from_secs(3);

/// The agent's balloon on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BalloonState {
    /// The most that it has; zero while there is none.
    pub bytes: Bytes,
    /// The number of balloons so far.
    pub count: u64,
}

impl BalloonState {
    /// Whether there was a balloon at any time from `before` to this state.
    pub fn was_held_since(self, before: BalloonState) -> bool {
        self.bytes > Bytes::ZERO || self != before
    }
}

/// The managed memory of one GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ManagedMemory {
    /// The bytes that the driver moves away for device memory.
    evictable: Bytes,
    /// When the audit last found host memory of their owners for all of it.
    permitted_at: Option<Instant>,
    balloon: BalloonState,
}

impl Sessions {
    /// Tells the processes of all containers with a GPU how much managed memory the driver moves
    /// away there for device memory. For a few seconds, until a balloon of any GPU ends, the agent
    /// has all of it moved away if it `may_evict` it.
    pub fn set_evictable(&self, gpu: &GpuUuid, bytes: Bytes, may_evict: bool) {
        self.shared.update_managed(gpu, |managed| {
            managed.evictable = bytes;
            managed.permitted_at = may_evict.then(Instant::now);
        });
    }

    /// The bytes of the last call of [`set_evictable`](Self::set_evictable).
    pub fn evictable(&self, gpu: &GpuUuid) -> Bytes {
        let managed = lock(&self.shared.managed).get(gpu).copied();
        managed.unwrap_or_default().evictable
    }

    /// The agent's balloon on each GPU.
    pub fn balloons(&self) -> BTreeMap<GpuUuid, BalloonState> {
        let managed = lock(&self.shared.managed);
        let managed = managed.iter();
        managed
            .map(|(gpu, managed)| (gpu.clone(), managed.balloon))
            .collect()
    }
}

impl Shared {
    /// Whether a GPU has managed memory, and the agent may have all of it moved away.
    pub(super) fn may_evict(&self, gpu: &GpuUuid, now: Instant) -> bool {
        let managed = lock(&self.managed).get(gpu).copied().unwrap_or_default();
        let age = |at| now.saturating_duration_since(at);
        managed
            .permitted_at
            .is_some_and(|at| age(at) < PERMISSION_AGE)
            && managed.evictable > Bytes::ZERO
    }

    /// Takes the permissions of all GPUs back. Their figures do not have what a balloon moves to
    /// the host.
    fn forbid_evictions(&self) {
        for managed in lock(&self.managed).values_mut() {
            managed.permitted_at = None;
        }
    }

    /// Processes see the balloon as memory that they can have: it is gone before any of them is
    /// granted more.
    fn update_managed(&self, gpu: &GpuUuid, update: impl FnOnce(&mut ManagedMemory)) {
        // The lock is held until the pages show the last update.
        let mut all = lock(&self.managed);
        let managed = all.entry(gpu.clone()).or_default();
        update(managed);
        let bytes = managed.evictable.0.saturating_add(managed.balloon.bytes.0);
        for running in lock(&self.containers).values() {
            lock(&running.container).set_evictable(gpu, Bytes(bytes));
        }
    }
}

/// A balloon that the audit and all processes know; they forget it when this is dropped.
pub(super) struct PublishedBalloon {
    shared: Arc<Shared>,
    gpu: GpuUuid,
}

impl PublishedBalloon {
    pub(super) fn new(shared: &Arc<Shared>, gpu: &GpuUuid, bytes: Bytes) -> PublishedBalloon {
        shared.update_managed(gpu, |managed| {
            let count = managed.balloon.count + 1;
            managed.balloon = BalloonState { bytes, count };
        });
        shared.forbid_evictions();
        PublishedBalloon {
            shared: Arc::clone(shared),
            gpu: gpu.clone(),
        }
    }
}

impl Drop for PublishedBalloon {
    fn drop(&mut self) {
        self.shared
            .update_managed(&self.gpu, |managed| managed.balloon.bytes = Bytes::ZERO);
        self.shared.forbid_evictions();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn balloon_is_known_when_it_ended_between_two_states() {
        let state = |bytes, count| BalloonState {
            bytes: Bytes(bytes),
            count,
        };
        assert!(!state(0, 1).was_held_since(state(0, 1)));
        assert!(state(0, 2).was_held_since(state(0, 1)));
        assert!(state(0, 1).was_held_since(state(7, 1)));
        assert!(state(7, 1).was_held_since(state(7, 1)));
    }
}
