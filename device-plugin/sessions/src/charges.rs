//! Charges leases and exported memory to containers.

use std::collections::{BTreeMap, BTreeSet};

use bursar_ledger::units::{AllocationId, Bytes, GpuUuid, LeaseId};

use crate::checkpoint::{CheckpointContent, SessionCheckpoint};
use crate::lease_handle::ChargedLeases;
use crate::reclaim::Unreclaimed;
use crate::{Sessions, lock};

impl Sessions {
    /// The bytes of each GPU that the allocation's processes have exported, live or exited. Other
    /// processes may hold them after the pod has ended. The checkpoint answers for an allocation
    /// that is not served.
    pub fn exported_bytes(&self, allocation: &AllocationId) -> Vec<(GpuUuid, Bytes)> {
        self.with_container(allocation, |container| container.memory().exported_bytes())
            .unwrap_or_else(|_| self.read_checkpoint(allocation).exported_bytes())
    }

    /// Charges an allocation for exports that an earlier container left on a GPU. Returns the bytes
    /// that the checkpoint now holds.
    pub fn inherit_exports(&self, allocation: &AllocationId, gpu: &GpuUuid, bytes: Bytes) -> Bytes {
        // An allocation that is not served inherits nothing.
        self.with_container(allocation, |container| {
            container.inherit_exports(gpu, bytes)
        })
        .unwrap_or(Bytes::ZERO)
    }

    /// The leases that an allocation is charged for, each with its GPU and bytes. The checkpoint
    /// answers for an allocation that is not served.
    pub fn charged_leases(&self, allocation: &AllocationId) -> BTreeMap<LeaseId, (GpuUuid, Bytes)> {
        self.with_container(allocation, |container| container.memory().charged_leases())
            .unwrap_or_else(|_| self.read_checkpoint(allocation).leases_by_id())
    }

    /// The checkpoint of an allocation that is not served; empty where there is none.
    fn read_checkpoint(&self, allocation: &AllocationId) -> CheckpointContent {
        let record = SessionCheckpoint::open(self.checkpoint_path(allocation)).ok();
        let content = record.and_then(|record| record.read());
        content.unwrap_or_default()
    }

    /// Tells the processes of all containers with a GPU how much managed memory the driver moves
    /// away there for device memory.
    pub fn set_evictable(&self, gpu: &GpuUuid, bytes: Bytes) {
        for running in lock(&self.shared.containers).values() {
            lock(&running.container)
                .memory_mut()
                .set_evictable(gpu, bytes);
        }
    }

    /// The pids of exited processes whose memory the accounts still charge.
    pub fn exited_pids(&self) -> BTreeSet<u32> {
        let running = lock(&self.shared.containers);
        let containers = running.values().map(|running| lock(&running.container));
        containers
            .flat_map(|container| container.memory().credit().exited_pids())
            .collect()
    }

    /// The leases that all served allocations are charged for.
    pub fn all_charged_leases(&self) -> ChargedLeases {
        let running = lock(&self.shared.containers);
        running
            .iter()
            .map(|(id, running)| (*id, lock(&running.container).memory().charged_leases()))
            .collect()
    }

    /// Charges an allocation for a new lease, and saves the charge in the checkpoint.
    ///
    /// # Errors
    /// The bytes that the quota has left; zero where the allocation is not served.
    pub fn charge_lease(
        &self,
        allocation: &AllocationId,
        gpu: &GpuUuid,
        lease: LeaseId,
        bytes: Bytes,
    ) -> Result<(), Bytes> {
        self.with_container(allocation, |container| {
            container.charge_lease(gpu, lease, bytes)
        })
        .unwrap_or(Err(Bytes::ZERO))
    }

    /// Charges an allocation for an existing lease, unless the account charges the lease already.
    pub fn adopt_lease(
        &self,
        allocation: &AllocationId,
        gpu: &GpuUuid,
        lease: LeaseId,
        bytes: Bytes,
    ) {
        // An allocation that is not served is charged when the agent serves it again.
        let _ = self.with_container(allocation, |container| {
            container.adopt_lease(gpu, lease, bytes)
        });
    }

    /// Charges the bytes of a lease as orphaned exports from now on, whether or not the account
    /// charged the lease. Returns whether the checkpoint holds the change.
    pub fn release_lease(
        &self,
        allocation: &AllocationId,
        gpu: &GpuUuid,
        lease: LeaseId,
        bytes: Bytes,
    ) -> bool {
        self.with_container(allocation, |container| {
            container.release_lease(gpu, lease, bytes)
        })
        .unwrap_or(false)
    }

    /// Refunds a lease that has no memory.
    pub fn refund_lease(&self, allocation: &AllocationId, lease: LeaseId) {
        let _ = self.with_container(allocation, |container| container.refund_lease(lease));
    }

    /// Tracks the memory that ended pods left on these GPUs, and no other. Returns the upper bound
    /// of each GPU that has a proven bound. The revision of a GPU changes whenever another pod
    /// leaves memory there.
    pub fn bound_unreclaimed(&self, revisions: BTreeMap<GpuUuid, u64>) -> BTreeMap<GpuUuid, Bytes> {
        let gpus: Vec<GpuUuid> = revisions.keys().cloned().collect();
        let mut unreclaimed = lock(&self.shared.unreclaimed);
        let before = std::mem::take(&mut *unreclaimed);
        let same = |gpu: &GpuUuid, revision: u64| {
            let entry = before.get(gpu).filter(|entry| entry.revision == revision);
            entry.copied().unwrap_or(Unreclaimed {
                revision,
                upper_bound: None,
            })
        };
        *unreclaimed = revisions
            .into_iter()
            .map(|(gpu, revision)| (gpu.clone(), same(&gpu, revision)))
            .collect();
        let proven = unreclaimed.iter();
        let proven = proven
            .filter_map(|(gpu, entry)| Some((gpu.clone(), entry.upper_bound?)))
            .collect();
        drop(unreclaimed);
        gpus.into_iter().for_each(|gpu| self.start_reclaim(gpu));
        proven
    }
}
