//! What the containers of one claim have of its GPUs: they share one quota.
//!
//! The kubelet gives an init container's tokens to the containers that follow it. Those with the same tokens have one
//! claim and are never alive together, but what the first exported, or kept, may outlive it: it counts against the
//! next.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use bursar_protocol::units::Units;

use super::Container;
use crate::units::{AllocationId, Bytes, GpuUuid};

/// What each container of a claim has. Its lock is taken last, and nothing is done while it is held.
#[derive(Clone, Debug, Default)]
pub(in super::super) struct Siblings(Arc<Mutex<BTreeMap<AllocationId, Taken>>>);

/// What one container has.
#[derive(Clone, Debug, Default)]
struct Taken {
    /// By account of a GPU.
    units: Vec<Units>,
    retired_at: Option<Instant>,
}

impl Siblings {
    fn with<T>(&self, act: impl FnOnce(&mut BTreeMap<AllocationId, Taken>) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether no container has it any more but who asks.
    pub(in super::super) fn is_alone(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }
}

impl Container {
    /// Shares the claim's quota from now on.
    pub(in super::super) fn join(&mut self, siblings: Siblings) {
        self.siblings = Some(siblings);
        self.tell_siblings();
        self.hear_siblings();
    }

    /// It is served no more: what it had is accounted for elsewhere.
    pub(in super::super) fn leave_siblings(&mut self) {
        let allocation = self.served.allocation;
        if let Some(siblings) = self.siblings.take() {
            siblings.with(|all| all.remove(&allocation));
        }
    }

    /// Tells the others of its claim what it has.
    pub(super) fn tell_siblings(&self) {
        let Some(siblings) = &self.siblings else {
            return;
        };
        let gpus = 0..self.served.gpus.len();
        let taken = Taken {
            units: gpus.map(|index| self.credit.own(index)).collect(),
            retired_at: self.retired_at,
        };
        siblings.with(|all| drop(all.insert(self.served.allocation, taken)));
    }

    /// Counts against its quota what the others of its claim have now.
    pub(super) fn hear_siblings(&mut self) {
        let Some(siblings) = &self.siblings else {
            return;
        };
        let own = self.served.allocation;
        let mut inherited = vec![Units::ZERO; self.served.gpus.len()];
        siblings.with(|all| {
            for (_, had) in all.iter().filter(|(other, _)| **other != own) {
                for (sum, units) in inherited.iter_mut().zip(&had.units) {
                    *sum = sum.saturating_add(*units);
                }
            }
        });
        self.credit.set_inherited(inherited);
    }

    /// When an image of it, or of another container of its claim, ended last.
    pub(super) fn last_retired_at(&self) -> Option<Instant> {
        let Some(siblings) = &self.siblings else {
            return self.retired_at;
        };
        let others = siblings.with(|all| all.values().filter_map(|had| had.retired_at).max());
        self.retired_at.max(others)
    }

    /// Charges what a container before it, of another claim, had exported of a GPU, as far as its quota goes: how much
    /// that is. It is on record.
    pub(in super::super) fn inherit(&mut self, gpu: &GpuUuid, bytes: Bytes) -> Bytes {
        let Some(index) = self.index_of(gpu) else {
            return Bytes::ZERO;
        };
        let units = Units::holding(bytes.0).unwrap_or(Units::MAX);
        let units = units.min(self.credit.quota(index));
        let before = self.credit.clone();
        self.credit.inherit(index, units);
        if !self.write_record() {
            self.credit = before;
            return Bytes::ZERO;
        }
        self.refresh();
        Bytes(units.bytes())
    }
}
