//! Shares the quota of one claim among its containers.
//!
//! The kubelet gives an init container's device ids to the containers that follow it. Containers
//! with the same device ids have one claim and never run together. Exports and leases of an earlier
//! container may outlive it, and so count against the next one.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use bursar_ledger::units::AllocationId;
use bursar_protocol::units::Units;

use crate::CreditAccounts;

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

/// A container as a member of its claim.
#[derive(Debug)]
pub(super) struct ClaimMember {
    allocation: AllocationId,
    /// The number of the container's GPUs, whose quotas the claim shares.
    gpus: usize,
    /// When the last image of the container exited.
    last_exit: Option<Instant>,
    /// `None` where the claim is unknown.
    siblings: Option<ClaimSiblings>,
}

impl ClaimMember {
    pub(super) fn new(allocation: AllocationId, gpus: usize) -> ClaimMember {
        ClaimMember {
            allocation,
            gpus,
            last_exit: None,
            siblings: None,
        }
    }

    /// Shares the claim's quota from now on.
    pub(super) fn join(&mut self, siblings: ClaimSiblings, credit: &mut CreditAccounts) {
        self.siblings = Some(siblings);
        self.publish(credit);
        self.update(credit);
    }

    /// Leaves the claim. The agent accounts for the container's remaining bytes elsewhere.
    pub(super) fn leave(&mut self) {
        if let Some(siblings) = self.siblings.take() {
            siblings.with_lock(|all| all.remove(&self.allocation));
        }
    }

    /// Records the exit of an image. The siblings read it with the next charges.
    pub(super) fn record_exit(&mut self, now: Instant) {
        self.last_exit = Some(now);
    }

    /// Publishes the container's charges to the others of its claim.
    pub(super) fn publish(&self, credit: &CreditAccounts) {
        let Some(siblings) = &self.siblings else {
            return;
        };
        let gpus = 0..self.gpus;
        let charges = SiblingCharges {
            units: gpus.map(|index| credit.own_charged(index)).collect(),
            last_exit: self.last_exit,
        };
        siblings.with_lock(|all| drop(all.insert(self.allocation, charges)));
    }

    /// Counts the current charges of the others of its claim against its quota.
    pub(super) fn update(&self, credit: &mut CreditAccounts) {
        let Some(siblings) = &self.siblings else {
            return;
        };
        let own = self.allocation;
        let mut inherited = vec![Units::ZERO; self.gpus];
        siblings.with_lock(|all| {
            for (_, charges) in all.iter().filter(|(other, _)| **other != own) {
                for (sum, units) in inherited.iter_mut().zip(&charges.units) {
                    *sum = sum.saturating_add(*units);
                }
            }
        });
        credit.set_sibling_charges(inherited);
    }

    /// When the last image of this container, or of another one of its claim, exited.
    pub(super) fn last_exit(&self) -> Option<Instant> {
        let Some(siblings) = &self.siblings else {
            return self.last_exit;
        };
        let others =
            siblings.with_lock(|all| all.values().filter_map(|charges| charges.last_exit).max());
        self.last_exit.max(others)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A member of a claim with one GPU, and the accounts that it publishes.
    fn member(allocation: u64) -> (ClaimMember, CreditAccounts) {
        let allocation = AllocationId::from_bits(allocation);
        (
            ClaimMember::new(allocation, 1),
            CreditAccounts::new(vec![Units(10), Units::ZERO]),
        )
    }

    #[test]
    fn charges_of_a_sibling_count_until_it_leaves() {
        let claim = ClaimSiblings::default();
        let ((mut first, mut charged), (mut second, mut credit)) = (member(1), member(2));
        charged.grant(7, 0, Units(4)).unwrap();
        first.join(claim.clone(), &mut charged);
        second.join(claim.clone(), &mut credit);
        assert_eq!(credit.free(0), Units(6));
        assert_eq!(charged.free(0), Units(6), "its own charges count once");
        first.leave();
        second.update(&mut credit);
        assert_eq!(credit.free(0), Units(10));
        drop(second);
        assert!(claim.is_unshared());
    }

    #[test]
    fn last_exit_in_a_claim_is_that_of_any_member() {
        let claim = ClaimSiblings::default();
        let ((mut first, mut charged), (mut second, mut credit)) = (member(1), member(2));
        first.join(claim.clone(), &mut charged);
        second.join(claim, &mut credit);
        assert_eq!(second.last_exit(), None);
        let now = Instant::now();
        first.record_exit(now);
        first.publish(&charged);
        assert_eq!(second.last_exit(), Some(now));
        second.record_exit(now + Duration::from_secs(1));
        assert_eq!(second.last_exit(), Some(now + Duration::from_secs(1)));
    }
}
