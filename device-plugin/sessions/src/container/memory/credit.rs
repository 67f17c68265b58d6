//! Grants credit within the quotas: first free units, then idle credit that the agent takes back
//! from other processes.

use bursar_ledger::units::GpuUuid;
use bursar_protocol::units::Units;

use super::super::quotas::QuotaInForce;
use super::ContainerMemory;
use crate::accounts::NO_PID;
use crate::{Account, CreditAccounts};

impl ContainerMemory {
    /// The idle credit that may be taken for a request. It is that of the account's other
    /// processes, and that of all processes in accounts that share its quota.
    pub(crate) fn idle_credit_for(&self, pid: u32, account: usize) -> Units {
        let own = self.idle_credit_of_others(pid, account);
        let of_all = |account| self.idle_credit_of_others(NO_PID, account);
        let sharing = match self.credit.covered_by(account) {
            Some(covered) => Some(of_all(covered)),
            None if self.credit.covered() == Some(account) => {
                self.credit.covering().map(of_all).min()
            }
            None => None,
        };
        own.saturating_add(sharing.unwrap_or(Units::ZERO))
    }

    fn idle_credit_of_others(&self, pid: u32, account: usize) -> Units {
        let others = self.processes.iter().filter(|(other, _)| **other != pid);
        others
            .filter_map(|(other, state)| {
                let slot = state.adopted_slot(account)?;
                Some(Units(slot.word().idle()).min(self.credit.granted_to(*other, account)))
            })
            .sum()
    }

    /// Takes back idle credit until an account has `need` free, if there is enough of it. Managed
    /// memory that is covered needs room on every GPU.
    fn reclaim_for(&mut self, pid: u32, account: usize, need: Units) {
        let covered = self.credit.covered();
        let limiting: Vec<_> = match covered == Some(account) {
            true => self.credit.covering().collect(),
            false => vec![account],
        };
        // The process has used up its idle credit of the account itself.
        let asker = |of: usize| if of == account { pid } else { NO_PID };
        let idle = |of: usize| self.idle_credit_of_others(asker(of), of);
        let shared = covered.map_or(Units::ZERO, idle);
        let missing = |credit: &CreditAccounts, of: usize| need.saturating_sub(credit.free(of));
        let is_enough = |of: &usize| idle(*of).saturating_add(shared) >= missing(&self.credit, *of);
        if !limiting.iter().all(is_enough) {
            return;
        }
        if let Some(covered) = covered {
            let most = limiting.iter().map(|of| missing(&self.credit, *of)).max();
            self.reclaim_idle(asker(covered), covered, most.unwrap_or(Units::ZERO));
        }
        for of in limiting {
            let left = missing(&self.credit, of);
            self.reclaim_idle(asker(of), of, left);
        }
    }

    fn reclaim_idle(&mut self, pid: u32, account: usize, mut missing: Units) {
        for (other, state) in self.processes.iter().filter(|(other, _)| **other != pid) {
            let Some(slot) = state.adopted_slot(account) else {
                continue;
            };
            let at_most = missing.min(self.credit.granted_to(*other, account));
            let taken = slot.reclaim(at_most);
            missing = missing.saturating_sub(self.credit.revoke(*other, account, taken));
        }
    }

    /// Reclaims idle credit beyond the quota: after the quota was lowered, freed bytes must not be
    /// used again. Returns whether any was reclaimed.
    pub(crate) fn reclaim_excess(&mut self) -> bool {
        let mut changed = false;
        for index in 0..self.accounts.len() {
            let excess = self.credit.excess(index);
            if excess > Units::ZERO {
                let before = self.credit.granted(index);
                self.reclaim_idle(NO_PID, index, excess);
                if let Some(covered) = self.credit.covered_by(index) {
                    self.reclaim_idle(NO_PID, covered, self.credit.excess(index));
                }
                changed |= self.credit.granted(index) != before;
            }
        }
        changed
    }

    /// Reserves credit for a process: first from free bytes, then from idle credit of other
    /// processes.
    ///
    /// # Errors
    /// The missing units.
    pub(crate) fn reserve_credit(
        &mut self,
        pid: u32,
        index: usize,
        need: Units,
    ) -> Result<Units, Units> {
        self.claim.update(&mut self.credit);
        if self.credit.free(index) < need {
            self.reclaim_for(pid, index, need);
        }
        self.credit.grant(pid, index, need)
    }

    /// Grants reserved credit to the page of a process, and otherwise revokes it. A page that the
    /// process has left is frozen. Any other page that rejects a grant is being overwritten without
    /// pause, or was. Returns whether the page has the grant.
    pub(crate) fn grant_to_page(&mut self, pid: u32, index: usize, units: Units) -> bool {
        let state = self.processes.get_mut(&pid);
        let granted = state.is_some_and(|state| {
            let Some(slot) = state.slot(index) else {
                return false;
            };
            let granted = slot.grant(units);
            state.has_broken_page |= !granted && !slot.word().is_frozen();
            granted
        });
        if !granted {
            self.credit.revoke(pid, index, units);
        } else if self.credit.covered() == Some(index) {
            // The pages of the GPUs' accounts must show the bytes.
            self.refresh_pages();
        }
        granted
    }

    /// Charges a lease: first to free bytes, then to idle credit of processes.
    ///
    /// # Errors
    /// The units that the quota has left.
    pub(crate) fn charge_lease(
        &mut self,
        lease: u64,
        index: usize,
        need: Units,
    ) -> Result<(), Units> {
        self.claim.update(&mut self.credit);
        let idle = self.idle_credit_for(NO_PID, index);
        let free = self.credit.free(index);
        let missing = need.saturating_sub(free);
        if missing > idle {
            return Err(free.saturating_add(idle));
        }
        if missing > Units::ZERO {
            self.reclaim_for(NO_PID, index, need);
        }
        self.credit.charge_lease(lease, index, need)
    }

    /// Changes the requested quota of an account. Returns whether there is such an account.
    pub(crate) fn request_quota(&mut self, account: &Account, units: Units) -> bool {
        let index = self
            .index_of(account)
            .inspect(|index| self.quotas.request(*index, units));
        index.inspect(|index| self.apply_quota(*index)).is_some()
    }

    /// Lowers an account below the requested quota; `None` removes the order. Returns whether the
    /// order has changed.
    pub(crate) fn order_quota(&mut self, account: &Account, ordered: Option<Units>) -> bool {
        let index = self
            .index_of(account)
            .filter(|index| self.quotas.order(*index, ordered));
        index.inspect(|index| self.apply_quota(*index)).is_some()
    }

    /// Applies the quotas that the operator had ordered.
    pub(super) fn restore_quotas(&mut self, ordered: &[Option<Units>]) {
        self.quotas.restore(ordered);
        for index in 0..self.accounts.len() {
            self.apply_quota(index);
        }
    }

    /// Applies the requested quota of an account, or a lower order.
    fn apply_quota(&mut self, index: usize) {
        let is_managed = self.accounts.get(index) == Some(&Account::Managed);
        let (quota, covered) = match self.quotas.in_force(index, is_managed) {
            QuotaInForce::Own(quota) => (quota, None),
            QuotaInForce::Covered(quota) => (quota, Some(index)),
        };
        if is_managed {
            self.credit.set_covered(covered);
        }
        self.credit.set_quota(index, quota);
        // The quota of covered managed memory follows those of the GPUs.
        for index in 0..self.accounts.len() {
            for slot in self.slots(index) {
                slot.set_quota(self.credit.quota(index));
            }
        }
    }

    /// Replaces what the driver takes of an account beyond what processes are charged. Returns
    /// whether the charge has changed.
    pub(crate) fn set_overhead(&mut self, gpu: &GpuUuid, units: Units) -> bool {
        let Some(index) = self.account_index(gpu) else {
            return false;
        };
        let before = self.credit.overhead(index);
        self.credit.set_overhead(index, units);
        self.credit.overhead(index) != before
    }
}
