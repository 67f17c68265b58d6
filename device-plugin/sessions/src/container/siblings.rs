//! Shares the quota of one claim among its containers.
//!
//! The kubelet gives an init container's device ids to the containers that follow it. Containers
//! with the same device ids have one claim and never run together. Exports and leases of an earlier
//! container may outlive it, and so count against the next one.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use bursar_ledger::units::{AllocationId, Bytes, GpuUuid};

use bursar_protocol::units::Units;

use super::Container;

/// The charges of each container of a claim. A container takes this lock last, and calls nothing
/// while it holds the lock.
#[derive(Clone, Debug, Default)]
pub(in super::super) struct ClaimSiblings(Arc<Mutex<BTreeMap<AllocationId, SiblingCharges>>>);

/// The charges of one container.
#[derive(Clone, Debug, Default)]
struct SiblingCharges {
    /// The charged units, by account of a GPU.
    units: Vec<Units>,
    last_exit: Option<Instant>,
}

impl ClaimSiblings {
    fn with_lock<T>(
        &self,
        act: impl FnOnce(&mut BTreeMap<AllocationId, SiblingCharges>) -> T,
    ) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether no container shares this value any more, so that only the caller has it.
    pub(in super::super) fn is_unshared(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }
}

impl Container {
    /// Shares the claim's quota from now on.
    pub(in super::super) fn join_claim(&mut self, siblings: ClaimSiblings) {
        self.siblings = Some(siblings);
        self.publish_to_siblings();
        self.update_from_siblings();
    }

    /// Leaves the claim. The agent accounts for the container's remaining bytes elsewhere.
    pub(in super::super) fn leave_claim(&mut self) {
        let allocation = self.spec.allocation;
        if let Some(siblings) = self.siblings.take() {
            siblings.with_lock(|all| all.remove(&allocation));
        }
    }

    /// Publishes the container's charges to the others of its claim.
    pub(super) fn publish_to_siblings(&self) {
        let Some(siblings) = &self.siblings else {
            return;
        };
        let gpus = 0..self.spec.gpus.len();
        let charges = SiblingCharges {
            units: gpus
                .map(|index| self.memory.credit.own_charged(index))
                .collect(),
            last_exit: self.last_exit,
        };
        siblings.with_lock(|all| drop(all.insert(self.spec.allocation, charges)));
    }

    /// Counts the current charges of the others of its claim against its quota.
    pub(super) fn update_from_siblings(&mut self) {
        let Some(siblings) = &self.siblings else {
            return;
        };
        let own = self.spec.allocation;
        let mut inherited = vec![Units::ZERO; self.spec.gpus.len()];
        siblings.with_lock(|all| {
            for (_, charges) in all.iter().filter(|(other, _)| **other != own) {
                for (sum, units) in inherited.iter_mut().zip(&charges.units) {
                    *sum = sum.saturating_add(*units);
                }
            }
        });
        self.memory.credit.set_sibling_charges(inherited);
    }

    /// When the last image of this container, or of another one of its claim, exited.
    pub(super) fn last_exit_in_claim(&self) -> Option<Instant> {
        let Some(siblings) = &self.siblings else {
            return self.last_exit;
        };
        let others =
            siblings.with_lock(|all| all.values().filter_map(|charges| charges.last_exit).max());
        self.last_exit.max(others)
    }

    /// Charges exports that an earlier container of another claim left on a GPU, within the quota.
    /// Returns the bytes that the checkpoint now holds.
    pub(in super::super) fn inherit_exports(&mut self, gpu: &GpuUuid, bytes: Bytes) -> Bytes {
        let Some(index) = self.memory.account_index(gpu) else {
            return Bytes::ZERO;
        };
        let units = Units::holding(bytes.0).unwrap_or(Units::MAX);
        let units = units.min(self.memory.credit.quota(index));
        let before = self.memory.credit.clone();
        self.memory.credit.charge_orphaned(index, units);
        if !self.write_checkpoint() {
            self.memory.credit = before;
            return Bytes::ZERO;
        }
        self.memory.refresh_pages();
        Bytes(units.bytes())
    }
}
