//! Tracks the managed memory of each GPU, which device memory displaces, and the agent's balloon.

use std::collections::BTreeMap;
use std::sync::Arc;

use bursar_ledger::units::{Bytes, GpuUuid};

use super::{Sessions, Shared, lock};

/// The managed memory of one GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ManagedMemory {
    /// The bytes that the driver moves away for device memory.
    evictable: Bytes,
    /// Whether their owners have the host memory for it.
    may_evict: bool,
    /// The most that the agent's balloon has.
    balloon: Bytes,
}

impl Sessions {
    /// Tells the processes of all containers with a GPU how much managed memory the driver moves
    /// away there for device memory. The agent has all of it moved away if it `may_evict` it.
    pub fn set_evictable(&self, gpu: &GpuUuid, bytes: Bytes, may_evict: bool) {
        self.shared.update_managed(gpu, |managed| {
            managed.evictable = bytes;
            managed.may_evict = may_evict;
        });
    }

    /// The most that the agent's balloon has of each GPU.
    pub fn balloons(&self) -> BTreeMap<GpuUuid, Bytes> {
        let managed = lock(&self.shared.managed);
        let managed = managed.iter();
        managed
            .map(|(gpu, managed)| (gpu.clone(), managed.balloon))
            .collect()
    }
}

impl Shared {
    /// Whether a GPU has managed memory, and the agent may have all of it moved away.
    pub(super) fn may_evict(&self, gpu: &GpuUuid) -> bool {
        let managed = lock(&self.managed).get(gpu).copied();
        managed.is_some_and(|managed| managed.may_evict && managed.evictable > Bytes::ZERO)
    }

    /// Processes see the balloon as memory that they can have: it is gone before any of them is
    /// granted more.
    fn update_managed(&self, gpu: &GpuUuid, update: impl FnOnce(&mut ManagedMemory)) {
        // The lock is held until the pages show the last update.
        let mut all = lock(&self.managed);
        let managed = all.entry(gpu.clone()).or_default();
        update(managed);
        let bytes = managed.evictable.0.saturating_add(managed.balloon.0);
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
        shared.update_managed(gpu, |managed| managed.balloon = bytes);
        PublishedBalloon {
            shared: Arc::clone(shared),
            gpu: gpu.clone(),
        }
    }
}

impl Drop for PublishedBalloon {
    fn drop(&mut self) {
        self.shared
            .update_managed(&self.gpu, |managed| managed.balloon = Bytes::ZERO);
    }
}
