//! Releases ended pods, and the memory that they leave once it is proven free.

use std::collections::BTreeSet;
use std::time::Duration;

use bursar_host::pod_cgroups::PodCgroup;
use bursar_kubelet::device_checkpoint::DeviceCheckpoint;
use bursar_ledger::units::{AllocationId, Bytes, GpuUuid, PodUid};
use bursar_ledger::{Binding, BootTime};
use bursar_sessions::lease_handle::LedgerUpdate;
use tracing::info;

use super::super::host::HostOps;
use super::NodeAllocator;
use super::leases::lease_inputs;

/// The shortest time between two collections. After a stall of the node task two reads may arrive
/// at once, and have the same transient failure.
const MIN_COLLECT_INTERVAL: Duration = Duration::from_secs(5);

impl<H: HostOps> NodeAllocator<H> {
    /// Releases the pods whose cgroup was removed.
    pub(crate) async fn release_ended_pods(&mut self, now: BootTime) {
        for pod in self.pod_cgroups.drain_ended() {
            self.release_pod(&pod, now).await;
        }
    }

    /// Drops pending allocations that the kubelet's checkpoint lacks, and releases pods without a
    /// cgroup.
    ///
    /// Both require two misses in a row, [`MIN_COLLECT_INTERVAL`] apart. A checkpoint with a
    /// skipped entry misses nothing: the entry may be the allocation's.
    pub(crate) async fn collect_garbage(
        &mut self,
        checkpoint: Option<&DeviceCheckpoint>,
        now: BootTime,
    ) {
        let since_last = self.last_collection.map(|last| now.since(last));
        if since_last.is_some_and(|since| since < MIN_COLLECT_INTERVAL) {
            return;
        }
        self.last_collection = Some(now);
        if let Some(checkpoint) = checkpoint.filter(|checkpoint| checkpoint.skipped == 0) {
            let known = checkpoint.entries.iter().map(|entry| entry.allocation);
            let dropped = self.ledger.gc_pending(&known.collect(), now);
            self.metrics.count_dropped(dropped.len());
            for allocation in dropped {
                info!(%allocation, "pending allocation without a pod dropped");
                self.checkpoint_dirty = true;
                self.names.remove(allocation);
                self.effects.begin_teardown([allocation]);
            }
        }
        let pods: Vec<PodUid> = self.ledger.pods().into_iter().cloned().collect();
        let missing: BTreeSet<_> = pods
            .into_iter()
            .filter(|pod| self.pod_cgroups.watch(pod) == PodCgroup::Gone)
            .collect();
        for pod in missing.intersection(&std::mem::take(&mut self.pods_without_cgroup)) {
            self.release_pod(pod, now).await;
        }
        self.pods_without_cgroup = missing;
        self.bind_queued(now).await;
    }

    /// Releases a pod whose cgroup was removed.
    pub(in super::super) async fn release_pod(&mut self, pod: &PodUid, now: BootTime) {
        let ended = self.ledger.release_pod(pod);
        if ended.is_empty() {
            return;
        }
        self.metrics.count_release();
        info!(%pod, allocations = ended.len(), "pod released");
        self.waits.fail_calls_of(pod);
        self.checkpoint_dirty = true;
        self.account_for_ended(&ended, now).await;
        for allocation in ended {
            self.names.remove(allocation);
            self.effects.finish_setup(allocation);
            self.effects.begin_teardown([allocation]);
        }
        if self.save_checkpoint().is_ok() {
            self.tear_down_ended().await;
        }
    }

    /// Reconciles retained leases with the node's bindings; returns whether the leases are known.
    pub(super) async fn reconcile_leases(&mut self, now: BootTime) -> bool {
        let inputs = lease_inputs(&self.ledger, &self.names, &self.gpus, self.config.quantum);
        let LedgerUpdate { orphaned, ended } = self.host.reconcile_leases(inputs).await;
        // `end_lease` skips a lease that the ledger lists as orphaned. Its bytes become unreclaimed
        // when `set_orphaned_leases` replaces that list, so this loop runs first.
        for (lease, gpu, bytes) in ended {
            info!(%lease, %gpu, bytes = bytes.0, "retained lease ended");
            self.ledger.end_lease(lease, gpu, bytes, now);
            self.unrecorded_leases.push(lease);
            self.checkpoint_dirty = true;
        }
        let known = orphaned.is_some();
        if let Some(orphaned) = orphaned {
            self.checkpoint_dirty |= self.ledger.set_orphaned_leases(orphaned, now);
        }
        known
    }

    /// Lets the ledger account for the leases of ended allocations, and for their exported memory,
    /// which other processes may still map. Returns the exported memory.
    pub(super) async fn account_for_ended(
        &mut self,
        ended: &[AllocationId],
        now: BootTime,
    ) -> Vec<(GpuUuid, Bytes)> {
        // The order matters: from here on the ledger accounts for the pod's leases, and not its
        // exports.
        let are_leases_known = self.reconcile_leases(now).await;
        let mut exported = Vec::new();
        for allocation in ended {
            let mut left = self.host.exported_memory(*allocation);
            exported.extend(left.iter().cloned());
            if !are_leases_known {
                left.extend(self.host.charged_leases(*allocation));
            }
            for (gpu, bytes) in left {
                self.ledger.add_unreclaimed(gpu, bytes, now);
            }
        }
        exported
    }

    /// Charges the exports of earlier containers of the pod to the next one instead of the node.
    ///
    /// A crash in between charges the memory twice, until the memory is proven free.
    pub(super) fn charge_successor(&mut self, heir: &Binding, exported: Vec<(GpuUuid, Bytes)>) {
        for (gpu, bytes) in exported {
            let inherited = self.host.charge_inherited(heir.allocations[0], &gpu, bytes);
            if inherited > Bytes::ZERO {
                info!(pod = %heir.pod, %gpu, bytes = inherited.0, "exports charged to the next container");
                self.ledger.subtract_unreclaimed(&gpu, inherited);
                self.checkpoint_dirty = true;
            }
        }
    }

    /// Returns memory to the GPUs that is proven free.
    pub(super) fn reclaim_proven(&mut self) {
        let leaks = self.ledger.unreclaimed_versions();
        for (gpu, held) in self.host.unreclaimed_at_most(leaks.clone()) {
            if let Some(number) = leaks.get(&gpu)
                && self.ledger.lower_unreclaimed(&gpu, *number, held)
            {
                info!(%gpu, unreclaimed = held.0, "unreclaimed memory of ended pods");
                self.checkpoint_dirty = true;
            }
        }
    }
}
