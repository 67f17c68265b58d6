//! The kept leases that the container owns, on its account; and who of it may ask about kept memory.

use std::collections::BTreeMap;

use bursar_protocol::messages::{Account, RejectReason};
use bursar_protocol::units::Units;

use super::{Container, ContainerResolver};
use crate::sessions::accounts::NO_PID;
use crate::units::{AllocationId, Bytes, GpuUuid, LeaseId};

/// Why a process may not ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum NotAuthorized {
    /// It is none of the container's, or asks for another one's GPU.
    Rejected(RejectReason),
    /// It is poisoned, or its GPU is drained.
    Fenced,
}

impl Container {
    /// The allocation that a process asks about kept memory for, or about tokens; of this GPU where it names one.
    pub(in super::super) fn authorize(
        &self,
        pid: u32,
        gpu: Option<&Account>,
        membership: &dyn ContainerResolver,
    ) -> Result<AllocationId, NotAuthorized> {
        self.resolve_cgroup(pid, membership)
            .map_err(NotAuthorized::Rejected)?;
        if self.is_fenced(pid) {
            return Err(NotAuthorized::Fenced);
        }
        let has = |account: &Account| {
            self.gpus()
                .iter()
                .any(|gpu| *account == to_wire_account(gpu))
        };
        match gpu.is_none_or(has) {
            true => Ok(self.spec.allocation),
            false => Err(NotAuthorized::Rejected(RejectReason::Account)),
        }
    }

    /// Charges a lease: from what is free, then from what processes have idle. It is on record when this returns.
    ///
    /// # Errors
    /// What the quota has left.
    pub(in super::super) fn charge_lease(
        &mut self,
        gpu: &GpuUuid,
        lease: LeaseId,
        bytes: Bytes,
    ) -> Result<(), Bytes> {
        let (Some(index), false) = (self.account_index(gpu), self.is_checkpoint_lost) else {
            return Err(Bytes::ZERO);
        };
        let need = Units::holding(bytes.0).unwrap_or(Units::MAX);
        self.update_from_siblings();
        let idle = self.idle_credit_of_others(NO_PID, index);
        let free = self.credit.free(index);
        let missing = need.saturating_sub(free);
        if missing > idle {
            return Err(Bytes(free.saturating_add(idle).bytes()));
        }
        self.reclaim_idle(NO_PID, index, missing);
        let leased = self.credit.charge_lease(lease.0, index, need);
        leased.map_err(|free| Bytes(free.bytes()))?;
        if !self.write_checkpoint() {
            self.credit.refund_lease(lease.0);
            return Err(Bytes::ZERO);
        }
        self.refresh_pages();
        Ok(())
    }

    /// Charges a lease that the vault has, if it is not charged by now.
    pub(in super::super) fn adopt_lease(&mut self, gpu: &GpuUuid, lease: LeaseId, bytes: Bytes) {
        let Some(index) = self.account_index(gpu) else {
            return;
        };
        if !self.credit.leases().contains_key(&lease.0) {
            let units = Units::holding(bytes.0).unwrap_or(Units::MAX);
            self.credit.adopt_lease(lease.0, index, units);
            self.record_leases();
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
        let is_on_record = self.record_leases();
        if !is_on_record {
            self.credit = before;
        }
        is_on_record
    }

    /// There is no memory of a lease that was charged.
    pub(in super::super) fn refund_lease(&mut self, lease: LeaseId) {
        self.credit.refund_lease(lease.0);
        self.record_leases();
    }

    /// The leases that are charged, each with its GPU and what it has.
    pub(in super::super) fn charged_leases(&self) -> BTreeMap<LeaseId, (GpuUuid, Bytes)> {
        let gpus = self.gpus();
        let leases = self.credit.leases().iter();
        leases
            .filter_map(|(lease, (index, units))| {
                let gpu = gpus.get(*index)?.clone();
                Some((LeaseId(*lease), (gpu, Bytes(units.bytes()))))
            })
            .collect()
    }

    fn record_leases(&mut self) -> bool {
        self.refresh_pages();
        self.write_checkpoint()
    }
}

fn to_wire_account(gpu: &GpuUuid) -> Account {
    Account::Device(gpu.as_str().to_owned())
}
