//! Reconciles the leases with the node's containers and GPUs, and with what the fd store lists.

use std::collections::{BTreeMap, BTreeSet};

use bursar_ledger::units::{AllocationId, Bytes, GpuUuid, LeaseId, PodUid};
use bursar_sessions::Process;
use bursar_sessions::lease_handle::{ChargedLeases, LedgerUpdate, NodeView};

use super::record::{Content, LeaseRecord, StoredRecord};
use super::{Effect, Lease, LeaseTable, Stage};

/// The leases without an owner on each GPU, with their bytes.
type OrphanedLeases = BTreeMap<GpuUuid, BTreeMap<LeaseId, Bytes>>;

/// The container that takes over a lease whose owner has ended.
fn new_owner(node: &NodeView, record: &LeaseRecord) -> Option<AllocationId> {
    if node.containers.contains_key(&record.owner) {
        return None;
    }
    let mut containers = node.containers.iter();
    let new_owner = containers.find(|(_, container)| {
        container.pod == record.pod && container.gpus.contains(&record.title.gpu)
    });
    new_owner.map(|(allocation, _)| *allocation)
}

impl LeaseTable {
    /// Takes the node's new state: releases leases whose last opener has ended, and reports leases
    /// without an owner. `charged` are the charges of the containers.
    pub(crate) fn reconcile(
        &mut self,
        node: NodeView,
        charged: &ChargedLeases,
    ) -> (LedgerUpdate, Vec<Effect>) {
        self.node = node;
        let mut effects = Vec::new();
        self.hand_over_leases(&mut effects);
        self.end_unused_leases();
        let mut update = LedgerUpdate::default();
        let mut orphaned = OrphanedLeases::new();
        self.report_leases(charged, &mut update, &mut orphaned, &mut effects);
        self.report_unreadable(charged, &mut orphaned, &mut effects);
        update.orphaned = self.store_connected.then_some(orphaned);
        (update, effects)
    }

    /// Removes the openers that have ended, and gives the leases of ended containers to the next
    /// ones of their pods.
    fn hand_over_leases(&mut self, effects: &mut Vec<Effect>) {
        let containers = self.node.containers.values();
        let pods: BTreeSet<&PodUid> = containers.map(|container| &container.pod).collect();
        for (id, lease) in &mut self.leases {
            lease.record.openers.retain(|opener| pods.contains(opener));
            if lease.stage == Stage::Live
                && let Some(new_owner) = new_owner(&self.node, &lease.record)
            {
                lease.record.owner = new_owner;
                // The next container of a pod starts before the previous one is removed, or a
                // moment after; the pod keeps the lease open.
                if lease.record.content != Content::Discarded {
                    lease.record.openers.insert(lease.record.pod.clone());
                }
                effects.push(Effect::Update(*id, Box::new(lease.record.clone())));
            }
        }
    }

    /// Ends the leases without an opener, and those whose memory is lost or must go.
    fn end_unused_leases(&mut self) {
        for lease in self.leases.values_mut() {
            let gpu = &lease.record.title.gpu;
            let generation = self.node.generations.get(gpu);
            let is_lost = self.drained.contains(gpu)
                || generation.is_some_and(|generation| *generation != lease.record.gpu_generation);
            if lease.stage == Stage::Live && (lease.record.openers.is_empty() || is_lost) {
                lease.stage = Stage::ReleasePending;
            }
        }
    }

    /// Has each lease's bytes charged to its owner, or else reports them to the ledger.
    fn report_leases(
        &mut self,
        charged: &ChargedLeases,
        update: &mut LedgerUpdate,
        orphaned: &mut OrphanedLeases,
        effects: &mut Vec<Effect>,
    ) {
        for (id, lease) in &mut self.leases {
            let LeaseRecord {
                title,
                bytes,
                owner,
                ..
            } = &lease.record;
            match (lease.stage, self.node.containers.contains_key(owner)) {
                (Stage::ReleasePending, true) => effects.push(Effect::Charge(*id, *owner)),
                (Stage::ReleasePending, false) => {
                    update.ended.push((*id, title.gpu.clone(), *bytes));
                    lease.stage = Stage::ReleaseReported;
                }
                (Stage::Creating | Stage::Live, false) => {
                    // While the fd store is away the ledger gets no list.
                    lease.is_charged = self.store_connected;
                    let gpu_leases = orphaned.entry(title.gpu.clone()).or_default();
                    gpu_leases.insert(*id, *bytes);
                }
                (Stage::Creating | Stage::Live, true) => {
                    let its = charged.get(owner);
                    lease.is_charged = its.is_some_and(|leases| leases.contains_key(id));
                }
                (Stage::ReleaseReported | Stage::Releasing, _) => {}
            }
        }
    }

    /// Reports the leases that only another version of the agent can read, unless a container is
    /// charged for them. Those of drained GPUs end, and once all GPUs of the node are drained also
    /// those whose GPU is unknown.
    fn report_unreadable(
        &self,
        charged: &ChargedLeases,
        orphaned: &mut OrphanedLeases,
        effects: &mut Vec<Effect>,
    ) {
        let mut gpus = self.node.free.keys();
        let is_node_drained =
            !self.node.free.is_empty() && gpus.all(|gpu| self.drained.contains(gpu));
        for (id, extent) in &self.unreadable {
            let gpu = extent.as_ref().map(|(gpu, _)| gpu);
            if gpu.map_or(is_node_drained, |gpu| self.drained.contains(gpu)) {
                effects.push(Effect::Drop(*id));
            }
            let Some((gpu, bytes)) = extent else { continue };
            let is_charged = |leases: &BTreeMap<_, _>| leases.contains_key(id);
            if !charged.values().any(is_charged) {
                let gpu_leases = orphaned.entry(gpu.clone()).or_default();
                gpu_leases.insert(*id, *bytes);
            }
        }
    }

    /// Confirms that a lease's bytes are charged as orphaned exports; its descriptor may be closed.
    pub(crate) fn confirm_charged(&mut self, id: LeaseId) -> Option<Effect> {
        let lease = self.leases.get_mut(&id)?;
        let is_due = matches!(lease.stage, Stage::ReleasePending | Stage::ReleaseReported);
        lease.stage = if is_due {
            Stage::Releasing
        } else {
            lease.stage
        };
        (is_due && self.store_connected).then_some(Effect::Drop(id))
    }

    /// Confirms that the fd store has closed a lease's descriptor.
    pub(crate) fn confirm_dropped(&mut self, id: LeaseId) {
        self.unreadable.remove(&id);
        if self.leases.get(&id).map(|lease| lease.stage) == Some(Stage::Releasing) {
            self.leases.remove(&id);
        }
    }

    /// Records that the connection to the fd store is lost: which descriptors exist is unknown.
    pub(crate) fn store_disconnected(&mut self) {
        self.store_connected = false;
    }

    /// Replaces the table by what the fd store lists. Leases that it does not list are lost with
    /// their memory. Writers that are not alive by `is_alive` lose their leases.
    pub(crate) fn resync(
        &mut self,
        stored: BTreeMap<LeaseId, StoredRecord>,
        is_alive: impl Fn(Process) -> bool,
    ) -> Vec<Effect> {
        self.store_connected = true;
        self.unreadable.clear();
        let mut effects = Vec::new();
        let known: Vec<LeaseId> = self.leases.keys().copied().collect();
        for id in known {
            let stage = self.leases.get(&id).map(|lease| lease.stage);
            match stage {
                Some(Stage::Live) if !stored.contains_key(&id) => self.release(id, &mut effects),
                Some(Stage::Releasing) if !stored.contains_key(&id) => {
                    drop(self.leases.remove(&id))
                }
                _ => {}
            }
        }
        for (id, stored_record) in stored {
            match (self.leases.get_mut(&id), stored_record) {
                (Some(lease), _) if lease.stage == Stage::Releasing => {
                    effects.push(Effect::Drop(id))
                }
                (Some(lease), StoredRecord::Read(record)) if lease.stage == Stage::Live => {
                    lease.record = record
                }
                (Some(_), _) => {}
                (None, StoredRecord::Read(record)) => {
                    let lease = Lease {
                        record,
                        stage: Stage::Live,
                        is_charged: false,
                    };
                    self.leases.insert(id, lease);
                }
                (None, StoredRecord::Unreadable { extent, why: _ }) => {
                    self.unreadable.insert(id, extent);
                }
            }
        }
        self.release_replaced(&mut effects);
        self.release_writers(|writer| !is_alive(writer.process), &mut effects);
        effects
    }

    /// Releases all but the newest lease of each key: an earlier agent gave the older ones up and
    /// exited before the fd store closed them.
    fn release_replaced(&mut self, effects: &mut Vec<Effect>) {
        let found = self.leases.iter().filter(|(_, lease)| {
            matches!(lease.stage, Stage::Creating | Stage::Live)
                && lease.record.content != Content::Discarded
        });
        let mut newest = BTreeMap::new();
        // Ids ascend, so the last insert is the newest.
        let replaced: Vec<LeaseId> = found
            .filter_map(|(id, lease)| newest.insert(&lease.record.title, *id))
            .collect();
        for id in replaced {
            self.release(id, effects);
        }
    }
}
