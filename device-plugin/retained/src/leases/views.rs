//! Describes the leases to the service.

use std::collections::{BTreeMap, BTreeSet};

use bursar_crds::gpu_node::LeaseState;
use bursar_ledger::units::{AllocationId, Bytes, GpuUuid, LeaseId};
use bursar_sessions::Process;
use bursar_sessions::lease_handle::Caller;

use super::record::{Content, LeaseRecord};
use super::{LeaseTable, Stage};

impl LeaseTable {
    /// Whether a process may use a lease: its pod has the lease open, and before the commit the
    /// process is the writer.
    pub(crate) fn is_open(&self, caller: Caller, id: LeaseId, gpu: &GpuUuid) -> bool {
        let pod = self.node.containers.get(&caller.allocation);
        self.get(id).zip(pod).is_some_and(|(record, binding)| {
            let may_use = match &record.content {
                Content::Committed { .. } => true,
                Content::Writing(writer) => writer.process == caller.process,
                Content::Discarded => false,
            };
            may_use && record.title.gpu == *gpu && record.openers.contains(&binding.pod)
        })
    }

    /// The description of a lease that is being created.
    #[cfg(test)]
    pub(crate) fn creating(&self, id: LeaseId) -> Option<&LeaseRecord> {
        let lease = self.leases.get(&id)?;
        (lease.stage == Stage::Creating).then_some(&lease.record)
    }

    /// The description of a lease that is live.
    pub(crate) fn get(&self, id: LeaseId) -> Option<&LeaseRecord> {
        let lease = self.leases.get(&id)?;
        (lease.stage == Stage::Live).then_some(&lease.record)
    }

    /// The processes that are writing.
    pub(crate) fn writers(&self) -> BTreeSet<Process> {
        let leases = self.leases.values();
        leases
            .filter(|lease| matches!(lease.stage, Stage::Creating | Stage::Live))
            .filter_map(|lease| match &lease.record.content {
                Content::Writing(writer) => Some(writer.process),
                Content::Committed { .. } | Content::Discarded => None,
            })
            .collect()
    }

    /// Whether the fd store may have a lease of a GPU.
    pub(crate) fn has_leases_on(&self, gpu: &GpuUuid) -> bool {
        let mut leases = self.leases.values();
        leases.any(|lease| lease.record.title.gpu == *gpu)
            || self.unreadable.values().flatten().any(|(at, _)| at == gpu)
    }

    /// The memory of a GPU that leases have or may still have, released ones included.
    pub(crate) fn lent_by(&self, gpu: &GpuUuid) -> Bytes {
        let known = self.leases.values().map(|lease| &lease.record);
        let known = known.filter(|record| record.title.gpu == *gpu);
        let unreadable = self.unreadable.values().flatten();
        let unreadable = unreadable.filter(|(at, _)| at == gpu);
        let all = known.map(|record| record.bytes);
        let all = all.chain(unreadable.map(|(_, bytes)| *bytes));
        Bytes(all.fold(0, |sum, bytes| sum.saturating_add(bytes.0)))
    }

    /// The number of leases that are charged to no container, because their GPU and size are
    /// unreadable.
    pub(crate) fn uncharged(&self) -> usize {
        let unreadable = self.unreadable.values();
        unreadable.filter(|extent| extent.is_none()).count()
    }

    /// The live leases that an account is charged for. Empty while the fd store is
    /// away, because it may have closed their descriptors.
    pub(crate) fn live_leases(&self) -> BTreeMap<GpuUuid, BTreeMap<LeaseId, Bytes>> {
        let mut live: BTreeMap<GpuUuid, BTreeMap<LeaseId, Bytes>> = BTreeMap::new();
        if self.store_connected {
            for (id, lease) in &self.leases {
                if lease.stage == Stage::Live && lease.is_charged {
                    let gpu_leases = live.entry(lease.record.title.gpu.clone()).or_default();
                    gpu_leases.insert(*id, lease.record.bytes);
                }
            }
            for (id, extent) in &self.unreadable {
                if let Some((gpu, bytes)) = extent {
                    live.entry(gpu.clone()).or_default().insert(*id, *bytes);
                }
            }
        }
        live
    }

    /// The leases that this agent can read, with their states.
    pub(crate) fn readable(&self) -> impl Iterator<Item = (LeaseId, &LeaseRecord, LeaseState)> {
        self.leases.iter().map(|(id, lease)| {
            let state = match (lease.stage, &lease.record.content) {
                (Stage::Creating | Stage::Live, Content::Writing(_)) => LeaseState::Writing,
                (Stage::Creating | Stage::Live, Content::Committed { .. }) => LeaseState::Committed,
                (Stage::Creating | Stage::Live, Content::Discarded) => LeaseState::Discarded,
                (Stage::ReleasePending | Stage::ReleaseReported | Stage::Releasing, _) => {
                    LeaseState::Releasing
                }
            };
            (*id, &lease.record, state)
        })
    }

    /// The container that is charged for a lease, until the lease is charged as orphaned exports.
    pub(crate) fn owner(&self, id: LeaseId) -> Option<AllocationId> {
        let lease = self.leases.get(&id)?;
        let has_owner = !matches!(lease.stage, Stage::ReleaseReported | Stage::Releasing);
        has_owner.then_some(lease.record.owner)
    }

    /// The GPU and the size of a lease.
    pub(crate) fn extent(&self, id: LeaseId) -> Option<(GpuUuid, Bytes)> {
        if let Some(extent) = self.unreadable.get(&id) {
            return extent.clone();
        }
        let LeaseRecord { title, bytes, .. } = &self.leases.get(&id)?.record;
        Some((title.gpu.clone(), *bytes))
    }

    /// The owner, GPU and size of each usable lease.
    pub(crate) fn lease_owners(&self) -> BTreeMap<LeaseId, (AllocationId, GpuUuid, Bytes)> {
        let leases = self.leases.iter();
        leases
            .filter(|(_, lease)| matches!(lease.stage, Stage::Creating | Stage::Live))
            .map(|(id, lease)| {
                let LeaseRecord { owner, bytes, .. } = lease.record;
                (*id, (owner, lease.record.title.gpu.clone(), bytes))
            })
            .collect()
    }
}
