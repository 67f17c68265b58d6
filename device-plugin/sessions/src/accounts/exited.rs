//! Keeps the units of exited processes charged.

use bursar_protocol::units::Units;

use super::super::MAX_PROCESSES;
use super::{AmountsByPid, CreditAccounts, NO_PID, total};

/// The most exited processes whose orphaned exports are kept apart. A container could otherwise
/// have one for each unit of its quota. Honest containers have a few.
pub(super) const MAX_EXPORTERS: usize = 2 * MAX_PROCESSES;

impl CreditAccounts {
    /// The units of exited processes, with their orphaned exports.
    pub(crate) fn exited(&self, account: usize) -> Units {
        total(&self.exited, account).saturating_add(self.orphaned(account))
    }

    /// The exports of exited processes that other processes may hold.
    pub(crate) fn orphaned(&self, account: usize) -> Units {
        total(&self.orphaned, account)
    }

    /// Whether an exited process has left exports that other processes may hold.
    pub(in super::super) fn has_orphaned(&self) -> bool {
        !self.orphaned.is_empty()
    }

    /// The units of exited processes that count against an account's quota.
    pub(crate) fn exited_against(&self, account: usize) -> Units {
        self.against(account, |account| self.exited(account))
    }

    /// Marks the grants of a process image as exited: they stay charged, and no process can use
    /// them. The exported part, at most the grant, becomes orphaned.
    pub(crate) fn mark_exited(&mut self, pid: u32, exported: &[Units]) {
        let Some(granted) = self.granted.remove(&pid) else {
            return;
        };
        let of = |account: usize| exported.get(account).copied().unwrap_or(Units::ZERO);
        let orphaned: Vec<_> = (0..)
            .map(of)
            .zip(&granted)
            .map(|(exported, granted)| exported.min(*granted))
            .collect();
        let rest: Vec<_> = granted
            .iter()
            .zip(&orphaned)
            .map(|(granted, orphaned)| granted.saturating_sub(*orphaned))
            .collect();
        add_amounts(&mut self.exited, pid, rest);
        let is_apart = self.orphaned.len() < MAX_EXPORTERS || self.orphaned.contains_key(&pid);
        let exporter = if is_apart { pid } else { NO_PID };
        add_amounts(&mut self.orphaned, exporter, orphaned);
    }

    /// Releases the units of an exited image that the driver no longer charges. Its orphaned
    /// exports stay charged.
    pub(crate) fn release_exited(&mut self, pid: u32) {
        self.exited.remove(&pid);
    }

    /// Caps the orphaned exports of an account by a proven bound on their sum. The bound concerns
    /// the exports that were orphaned when `of` was copied, so exporters whose entry has changed
    /// since then keep theirs.
    pub(in super::super) fn cap_orphaned(
        &mut self,
        account: usize,
        most: Units,
        of: &AmountsByPid,
    ) {
        let mut left = most;
        for (pid, accounts) in &mut self.orphaned {
            let asked = of.get(pid).and_then(|asked| asked.get(account));
            if let Some(units) = accounts.get_mut(account)
                && asked == Some(&*units)
            {
                *units = left.min(*units);
                left = left.saturating_sub(*units);
            }
        }
        self.orphaned.retain(|_, accounts| is_any_nonzero(accounts));
    }

    /// The pids of exited process images that are still charged.
    pub(crate) fn exited_pids(&self) -> Vec<u32> {
        self.exited.keys().copied().collect()
    }

    /// The grants of exited processes, and their orphaned exports, for the checkpoint.
    pub(in super::super) fn exited_and_orphaned(&self) -> [&AmountsByPid; 2] {
        [&self.exited, &self.orphaned]
    }

    /// Charges exports of a container that has ended, or of a released lease, as orphaned exports
    /// of this container.
    pub(in super::super) fn charge_orphaned(&mut self, account: usize, units: Units) {
        let mut amounts = vec![Units::ZERO; self.quotas.len()];
        if let Some(slot) = amounts.get_mut(account) {
            *slot = units;
        }
        add_amounts(&mut self.orphaned, NO_PID, amounts);
        self.update_peak(account);
    }
}

/// Adds the amounts of a process, if any is above zero.
fn add_amounts(sums: &mut AmountsByPid, pid: u32, amounts: Vec<Units>) {
    if !is_any_nonzero(&amounts) {
        return;
    }
    let process_sums = sums
        .entry(pid)
        .or_insert_with(|| vec![Units::ZERO; amounts.len()]);
    for (sum, units) in process_sums.iter_mut().zip(amounts) {
        *sum = sum.saturating_add(units);
    }
}

fn is_any_nonzero(amounts: &[Units]) -> bool {
    amounts.iter().any(|units| *units != Units::ZERO)
}
