//! Reconciles leases and their charges with the state of the node.

use std::collections::BTreeSet;

use bursar_host::clock;
use bursar_ledger::units::GpuUuid;
use bursar_sessions::lease_handle::{LedgerUpdate, NodeView};

use super::State;

impl State {
    pub(super) fn reconcile(&mut self, node: NodeView) -> LedgerUpdate {
        let gpus: Vec<GpuUuid> = node.generations.keys().cloned().collect();
        self.retain_gpus(node.free.keys().cloned().collect());
        let late = self.leases.expire_writers(clock::now());
        self.apply_effects(late);
        if self.leases.is_store_connected() {
            self.reconcile_charges();
        }
        let charged = self.service.sessions.all_charged_leases();
        let (update, effects) = self.leases.reconcile(node, &charged);
        if self.leases.is_store_connected() {
            // Containers that took leases over are charged for them now.
            self.reconcile_charges();
        }
        self.apply_effects(effects);
        self.close_misplaced_keep_alive();
        let undrained = gpus.into_iter().filter(|gpu| !self.drained.contains(gpu));
        let undrained: Vec<GpuUuid> = undrained.collect();
        undrained
            .into_iter()
            .for_each(|gpu| self.ensure_scrub_checked(gpu));
        update
    }

    /// Forgets GPUs that have left the node: a new MIG instance has a new UUID. An empty list means
    /// that NVML has not answered.
    fn retain_gpus(&mut self, gpus: BTreeSet<GpuUuid>) {
        if gpus.is_empty() || gpus == self.gpus {
            return;
        }
        self.service.provisioners.retain_gpus(&gpus);
        self.service.scrub_cache.retain_gpus(&gpus);
        self.service.sessions.retain_gpus(&gpus);
        self.failed_checks.retain(|gpu, _| gpus.contains(gpu));
        self.unmeasured.retain(|gpu, _| gpus.contains(gpu));
        self.gpus = gpus;
    }

    /// Charges each container for the leases that it owns, and for no other.
    pub(super) fn reconcile_charges(&mut self) {
        let sessions = &self.service.sessions;
        let charged = sessions.all_charged_leases();
        let owned = self.leases.lease_owners();
        for (lease, (owner, gpu, bytes)) in &owned {
            if charged
                .get(owner)
                .is_some_and(|leases| !leases.contains_key(lease))
            {
                sessions.adopt_lease(owner, gpu, *lease, *bytes);
            }
        }
        for (allocation, leases) in charged {
            for (lease, (gpu, bytes)) in leases {
                match self.leases.owner(lease) {
                    Some(owner) if owner == allocation => {}
                    // The unreadable blob names the owner, so the charged container stays charged.
                    _ if self.leases.is_unreadable(lease) => {}
                    // The new owner is charged.
                    Some(_) => sessions.refund_lease(&allocation, lease),
                    // The lease ended with an earlier agent, with the fd store, or before its
                    // creation.
                    None => drop(sessions.release_lease(&allocation, &gpu, lease, bytes)),
                }
            }
        }
    }
}
