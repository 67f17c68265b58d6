//! Charges the leases that the container owns, and authorizes its processes for lease requests.

use bursar_ledger::units::{AllocationId, Bytes, GpuUuid, LeaseId};

use bursar_protocol::messages::{Account, RejectReason};
use bursar_protocol::units::Units;

use super::{Container, ContainerResolver};
use crate::accounts::NO_PID;

/// Why a process may not send a request to the lease service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum NotAuthorized {
    /// The process belongs to another container, or names a GPU of another one.
    Rejected(RejectReason),
    /// The process is poisoned, or its GPU is being drained.
    Fenced,
}

impl Container {
    /// Authorizes a process to request leases or memory tokens. Returns the allocation that the
    /// request counts for; a named GPU must be the allocation's.
    pub(in super::super) fn authorize(
        &self,
        pid: u32,
        gpu: Option<&Account>,
        resolver: &dyn ContainerResolver,
    ) -> Result<AllocationId, NotAuthorized> {
        self.resolve_cgroup(pid, resolver)
            .map_err(NotAuthorized::Rejected)?;
        if self.is_fenced(pid) {
            return Err(NotAuthorized::Fenced);
        }
        let has = |account: &Account| {
            self.memory
                .gpus()
                .any(|gpu| account.device_uuid() == Some(gpu.as_str()))
        };
        match gpu.is_none_or(has) {
            true => Ok(self.spec.allocation),
            false => Err(NotAuthorized::Rejected(RejectReason::Account)),
        }
    }

    /// Charges a lease: first free bytes, then idle credit of processes. The checkpoint holds the
    /// charge when this returns.
    ///
    /// # Errors
    /// The bytes that the quota has left.
    pub(in super::super) fn charge_lease(
        &mut self,
        gpu: &GpuUuid,
        lease: LeaseId,
        bytes: Bytes,
    ) -> Result<(), Bytes> {
        let (Some(index), false) = (self.memory.account_index(gpu), self.recorder.is_lost()) else {
            return Err(Bytes::ZERO);
        };
        let need = Units::holding(bytes.0).unwrap_or(Units::MAX);
        self.memory.update_from_siblings();
        let idle = self.memory.idle_credit_for(NO_PID, index);
        let free = self.memory.credit().free(index);
        let missing = need.saturating_sub(free);
        if missing > idle {
            return Err(Bytes(free.saturating_add(idle).bytes()));
        }
        if missing > Units::ZERO {
            self.memory.reclaim_for(NO_PID, index, need);
        }
        let leased = self.memory.credit_mut().charge_lease(lease.0, index, need);
        leased.map_err(|free| Bytes(free.bytes()))?;
        if !self.write_checkpoint() {
            self.memory.credit_mut().refund_lease(lease.0);
            return Err(Bytes::ZERO);
        }
        self.memory.refresh_pages();
        Ok(())
    }

    /// Charges a lease that the fd store has, unless the account charges it already.
    pub(in super::super) fn adopt_lease(&mut self, gpu: &GpuUuid, lease: LeaseId, bytes: Bytes) {
        let Some(index) = self.memory.account_index(gpu) else {
            return;
        };
        if !self.memory.credit().leases().contains_key(&lease.0) {
            let units = Units::holding(bytes.0).unwrap_or(Units::MAX);
            self.memory.credit_mut().adopt_lease(lease.0, index, units);
            self.record_leases();
        }
    }

    /// Charges the bytes of a lease as orphaned exports from now on, whether or not the account
    /// charged the lease. Returns whether the checkpoint holds the change; otherwise nothing has
    /// changed.
    pub(in super::super) fn release_lease(
        &mut self,
        gpu: &GpuUuid,
        lease: LeaseId,
        bytes: Bytes,
    ) -> bool {
        self.adopt_lease(gpu, lease, bytes);
        let before = self.memory.credit().clone();
        self.memory.credit_mut().release_lease(lease.0);
        let is_on_record = self.record_leases();
        if !is_on_record {
            *self.memory.credit_mut() = before;
        }
        is_on_record
    }

    /// Refunds a charged lease that has no memory.
    pub(in super::super) fn refund_lease(&mut self, lease: LeaseId) {
        self.memory.credit_mut().refund_lease(lease.0);
        self.record_leases();
    }

    fn record_leases(&mut self) -> bool {
        self.memory.refresh_pages();
        self.write_checkpoint()
    }

    /// Charges exports that an earlier container of another claim left on a GPU, within the quota.
    /// Returns the bytes that the checkpoint now holds.
    pub(in super::super) fn inherit_exports(&mut self, gpu: &GpuUuid, bytes: Bytes) -> Bytes {
        let Some(index) = self.memory.account_index(gpu) else {
            return Bytes::ZERO;
        };
        let units = Units::holding(bytes.0).unwrap_or(Units::MAX);
        let units = units.min(self.memory.credit().quota(index));
        let before = self.memory.credit().clone();
        self.memory.credit_mut().charge_orphaned(index, units);
        if !self.write_checkpoint() {
            *self.memory.credit_mut() = before;
            return Bytes::ZERO;
        }
        self.memory.refresh_pages();
        Bytes(units.bytes())
    }
}
