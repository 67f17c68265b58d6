//! Accounts for the memory of a container: its credit, and the processes that have it.

mod idle_credit;
mod usage;

use std::collections::BTreeMap;

use bursar_ledger::units::{Bytes, GpuUuid, LeaseId};
use bursar_protocol::units::Units;

use super::super::accounts::AmountsByPid;
use super::super::{Account, CreditAccounts};
use super::ProcessState;
use super::siblings::{ClaimMember, ClaimSiblings};

/// The accounts of a container, and the processes that are granted credit of them.
pub(crate) struct ContainerMemory {
    pub(super) accounts: Vec<Account>,
    pub(crate) credit: CreditAccounts,
    pub(super) processes: BTreeMap<u32, ProcessState>,
    /// The managed memory that the driver moves away for device memory, by account.
    pub(super) evictable: Vec<Units>,
    /// The claim that the container shares the quotas of its GPUs with.
    pub(super) claim: ClaimMember,
}

impl ContainerMemory {
    /// Shares the claim's quota from now on.
    pub(crate) fn join_claim(&mut self, siblings: ClaimSiblings) {
        self.claim.join(siblings, &mut self.credit);
    }

    /// Publishes the container's charges to the others of its claim.
    pub(crate) fn publish_to_siblings(&self) {
        self.claim.publish(&self.credit);
    }

    /// Counts the current charges of the others of its claim against its quota.
    pub(crate) fn update_from_siblings(&mut self) {
        self.claim.update(&mut self.credit);
    }

    /// Writes the usage of the container's other processes into every page.
    pub(crate) fn refresh_pages(&self) {
        let [exited, orphaned] = self.credit.exited_and_orphaned();
        let siblings = self.processes.len().saturating_sub(1) + exited.len() + orphaned.len();
        let siblings = u32::try_from(siblings).unwrap_or(u32::MAX);
        for index in 0..self.accounts.len() {
            let uses: Vec<_> = self.uses(index).collect();
            let live: Units = uses.iter().map(|(_, used)| *used).sum();
            let all = live.saturating_add(self.used_beside_live(index));
            // A process whose covered managed memory changes must ask for the figure.
            let covered = self.credit.covered_by(index);
            let has_covered =
                covered.is_some_and(|covered| self.credit.granted(covered) > Units::ZERO);
            let siblings = siblings.saturating_add(u32::from(has_covered));
            for (state, used) in uses {
                if let Some(slot) = state.page.as_ref().and_then(|page| page.slot(index)) {
                    slot.set_others(all.saturating_sub(used), siblings);
                }
            }
        }
    }

    /// The live processes, each with the units that it uses of an account.
    fn uses(&self, account: usize) -> impl Iterator<Item = (&ProcessState, Units)> {
        let members = self.processes.iter();
        members.map(move |(pid, state)| (state, self.used_by(*pid, state, account)))
    }

    /// The units of an account that are in use, without those that live processes use of it.
    fn used_beside_live(&self, account: usize) -> Units {
        self.credit
            .charged_beside_grants(account)
            .saturating_add(self.covered_use(account))
    }

    /// The bytes that a process uses: the figure of its page, at most its grant. Without a page the
    /// whole grant counts.
    pub(super) fn used_by(&self, pid: u32, state: &ProcessState, account: usize) -> Units {
        let granted = self.credit.granted_to(pid, account);
        let slot = state.adopted_page().and_then(|page| page.slot(account));
        slot.map_or(granted, |slot| Units(slot.word().used).min(granted))
    }

    pub(crate) fn has_untracked(&self) -> bool {
        (0..self.accounts.len()).any(|index| self.credit.untracked(index) > Units::ZERO)
    }

    /// Notes that a process has sent a message, and so has its page. Returns whether its exports
    /// have changed: the checkpoint must hold them before the agent answers.
    pub(crate) fn update_exports(&mut self, pid: u32) -> bool {
        let Some(state) = self.processes.get_mut(&pid) else {
            return false;
        };
        state.has_adopted_page = true;
        let exported = state.current_exports();
        let has_changed = state.exported != exported;
        state.exported = exported;
        has_changed
    }

    /// The covered managed memory that counts against an account.
    pub(crate) fn covered_use(&self, account: usize) -> Units {
        let Some(covered) = self.credit.covered_by(account) else {
            return Units::ZERO;
        };
        let live: Units = self.uses(covered).map(|(_, used)| used).sum();
        live.saturating_add(self.credit.exited(covered))
    }

    /// The GPUs, in the order of the accounts.
    pub(crate) fn gpus(&self) -> impl Iterator<Item = &GpuUuid> {
        self.accounts.iter().filter_map(|account| match account {
            Account::Gpu(gpu) => Some(gpu),
            Account::Managed => None,
        })
    }

    pub(crate) fn account_index(&self, gpu: &GpuUuid) -> Option<usize> {
        let is_it = |account: &Account| matches!(account, Account::Gpu(other) if other == gpu);
        self.accounts.iter().position(is_it)
    }

    /// The units that live processes report as exported, at most their grants.
    pub(crate) fn live_exports(&self, index: usize) -> Units {
        let members = self.processes.iter();
        let exported = members.map(|(pid, state)| self.exports_of(*pid, state, index));
        exported.sum()
    }

    /// The units that one live process reports as exported, at most its grant.
    pub(super) fn exports_of(&self, pid: u32, state: &ProcessState, index: usize) -> Units {
        let exported = state.current_exports().get(index).copied();
        let granted = self.credit.granted_to(pid, index);
        exported.unwrap_or(Units::ZERO).min(granted)
    }

    /// The bytes that a process had as an untracked process, by account.
    pub(crate) fn untracked_by(&self, pid: u32) -> Vec<Units> {
        let accounts = 0..self.accounts.len();
        accounts
            .map(|index| self.credit.untracked_by(pid, index))
            .collect()
    }

    /// Tells all processes how much managed memory the driver moves away from a GPU for device
    /// memory.
    pub(crate) fn set_evictable(&mut self, gpu: &GpuUuid, bytes: Bytes) {
        let Some(index) = self.account_index(gpu) else {
            return;
        };
        let units = Units::within(bytes.0);
        self.evictable.resize(self.accounts.len(), Units::ZERO);
        match self.evictable.get_mut(index) {
            Some(before) if *before != units => *before = units,
            _ => return,
        }
        for slot in self
            .processes
            .values()
            .filter_map(|state| state.page.as_ref()?.slot(index))
        {
            slot.set_evictable(units);
        }
    }

    /// Replaces the bytes of untracked processes of an account, by pid. Processes that have a
    /// session by now are charged already.
    pub(crate) fn set_untracked(&mut self, account: &Account, mut charged: BTreeMap<u32, Bytes>) {
        let Some(index) = self.accounts.iter().position(|other| other == account) else {
            return;
        };
        charged.retain(|pid, _| !self.processes.contains_key(pid));
        let before = self.credit.untracked(index);
        let charged = charged.into_iter();
        let charged = charged.map(|(pid, bytes)| (pid, Units::within(bytes.0)));
        self.credit.set_untracked(index, charged.collect());
        if self.credit.untracked(index) != before {
            self.refresh_pages();
        }
    }

    /// The orphaned exports of this GPU that are not proven free.
    pub(crate) fn orphaned_exports(&self, gpu: &GpuUuid) -> Option<AmountsByPid> {
        let any = self.credit.orphaned(self.account_index(gpu)?) > Units::ZERO;
        let [_, orphaned] = self.credit.exited_and_orphaned();
        any.then(|| orphaned.clone())
    }

    /// The bytes of each GPU that processes have exported, live or exited.
    pub(crate) fn exported_bytes(&self) -> Vec<(GpuUuid, Bytes)> {
        let exported = |index: usize| {
            let live = self.live_exports(index);
            Bytes(live.saturating_add(self.credit.orphaned(index)).bytes())
        };
        let gpus = self.gpus().enumerate();
        gpus.map(|(index, gpu)| (gpu.clone(), exported(index)))
            .collect()
    }

    /// The charged leases, each with its GPU and bytes.
    pub(crate) fn charged_leases(&self) -> BTreeMap<LeaseId, (GpuUuid, Bytes)> {
        let gpus: Vec<_> = self.gpus().collect();
        let leases = self.credit.leases().iter();
        leases
            .filter_map(|(lease, (index, units))| {
                let gpu = (*gpus.get(*index)?).clone();
                Some((LeaseId(*lease), (gpu, Bytes(units.bytes()))))
            })
            .collect()
    }
}
