//! The kept leases that the container owns, on its account; and who of it may ask about kept memory.

use std::collections::BTreeMap;

use bursar_protocol::messages::{Account, RejectReason};
use bursar_protocol::units::Units;

use super::{Container, Membership};
use crate::sessions::accounts::NOBODY;
use crate::units::{AllocationId, Bytes, GpuUuid, LeaseId};

/// Why a process may not ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum NotAsked {
    /// It is none of the container's, or asks for another one's GPU.
    Unwelcome(RejectReason),
    /// It is poisoned, or its GPU is drained.
    Fenced,
}

impl Container {
    /// The allocation that a process asks about kept memory for, or about tokens; of this GPU where it names one.
    pub(in super::super) fn may_ask(
        &self,
        pid: u32,
        gpu: Option<&Account>,
        membership: &dyn Membership,
    ) -> Result<AllocationId, NotAsked> {
        self.home_of(pid, membership).map_err(NotAsked::Unwelcome)?;
        if self.is_fenced(pid) {
            return Err(NotAsked::Fenced);
        }
        let has = |account: &Account| self.gpus().iter().any(|gpu| *account == on_wire(gpu));
        match gpu.is_none_or(has) {
            true => Ok(self.served.allocation),
            false => Err(NotAsked::Unwelcome(RejectReason::Account)),
        }
    }

    /// Charges a lease: from what is free, then from what processes have idle. It is on record when this returns.
    ///
    /// # Errors
    /// What the quota has left.
    pub(in super::super) fn lease(
        &mut self,
        gpu: &GpuUuid,
        lease: LeaseId,
        bytes: Bytes,
    ) -> Result<(), Bytes> {
        let (Some(index), false) = (self.index_of(gpu), self.record_lost) else {
            return Err(Bytes::ZERO);
        };
        let need = Units::holding(bytes.0).unwrap_or(Units::MAX);
        self.hear_siblings();
        let idle = self.idle_of_others(NOBODY, index);
        let free = self.credit.free(index);
        let missing = need.saturating_sub(free);
        if missing > idle {
            return Err(Bytes(free.saturating_add(idle).bytes()));
        }
        self.take_idle(NOBODY, index, missing);
        let leased = self.credit.lease(lease.0, index, need);
        leased.map_err(|free| Bytes(free.bytes()))?;
        if !self.write_record() {
            self.credit.forget_lease(lease.0);
            return Err(Bytes::ZERO);
        }
        self.refresh();
        Ok(())
    }

    /// Charges a lease that the vault has, if it is not charged by now.
    pub(in super::super) fn adopt_lease(&mut self, gpu: &GpuUuid, lease: LeaseId, bytes: Bytes) {
        let Some(index) = self.index_of(gpu) else {
            return;
        };
        if !self.credit.leases().contains_key(&lease.0) {
            let units = Units::holding(bytes.0).unwrap_or(Units::MAX);
            self.credit.adopt_lease(lease.0, index, units);
            self.note_leases();
        }
    }

    /// Charges what a lease has as what dead processes exported from now on, whether or not it was charged by now:
    /// whether that is on record. Where it is not, nothing has changed.
    pub(in super::super) fn release_lease(
        &mut self,
        gpu: &GpuUuid,
        lease: LeaseId,
        bytes: Bytes,
    ) -> bool {
        self.adopt_lease(gpu, lease, bytes);
        let before = self.credit.clone();
        self.credit.release_lease(lease.0);
        let is_on_record = self.note_leases();
        if !is_on_record {
            self.credit = before;
        }
        is_on_record
    }

    /// There is no memory of a lease that was charged.
    pub(in super::super) fn forget_lease(&mut self, lease: LeaseId) {
        self.credit.forget_lease(lease.0);
        self.note_leases();
    }

    /// The leases that are charged, each with its GPU and what it has.
    pub(in super::super) fn leases(&self) -> BTreeMap<LeaseId, (GpuUuid, Bytes)> {
        let gpus = self.gpus();
        let leases = self.credit.leases().iter();
        leases
            .filter_map(|(lease, (index, units))| {
                let gpu = gpus.get(*index)?.clone();
                Some((LeaseId(*lease), (gpu, Bytes(units.bytes()))))
            })
            .collect()
    }

    fn note_leases(&mut self) -> bool {
        self.refresh();
        self.write_record()
    }
}

fn on_wire(gpu: &GpuUuid) -> Account {
    Account::Device(gpu.as_str().to_owned())
}
