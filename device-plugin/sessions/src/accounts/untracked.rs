//! Charges what the driver reports beyond the grants: untracked processes and overhead.

use std::collections::BTreeMap;

use bursar_protocol::units::Units;

use super::CreditAccounts;

impl CreditAccounts {
    /// The units of an account that untracked processes have.
    pub(crate) fn untracked(&self, account: usize) -> Units {
        let charged = self.untracked.get(account);
        charged.map_or(Units::ZERO, |charged| charged.values().copied().sum())
    }

    /// Whether untracked processes have units of any account.
    pub(crate) fn has_untracked(&self) -> bool {
        let mut charged = self.untracked.iter().flat_map(BTreeMap::values);
        charged.any(|units| *units > Units::ZERO)
    }

    /// The pids of untracked processes that have memory.
    pub(in super::super) fn untracked_pids(&self) -> impl Iterator<Item = u32> {
        self.untracked.iter().flat_map(BTreeMap::keys).copied()
    }

    /// Replaces the units of untracked processes of an account, by pid. The account grants these
    /// units to no other process.
    pub(crate) fn set_untracked(&mut self, account: usize, charged: BTreeMap<u32, Units>) {
        if let Some(slot) = self.untracked.get_mut(account) {
            *slot = charged;
        }
    }

    /// Removes a process that now has a session from the untracked ones: from now on its own report
    /// counts, within the quota. Returns the units that it had, by account.
    pub(crate) fn take_untracked(&mut self, pid: u32) -> Vec<Units> {
        let charged = self.untracked.iter_mut();
        charged
            .map(|charged| charged.remove(&pid).unwrap_or_default())
            .collect()
    }

    /// The units of an account that the driver takes and no process is charged for.
    pub(crate) fn overhead(&self, account: usize) -> Units {
        self.overheads.get(account).copied().unwrap_or(Units::ZERO)
    }

    /// Replaces the overhead of an account. The account grants these units to no process. More than
    /// the quota is not counted.
    pub(crate) fn set_overhead(&mut self, account: usize, units: Units) {
        let units = units.min(self.quota(account));
        if let Some(slot) = self.overheads.get_mut(account) {
            *slot = units;
        }
    }
}
