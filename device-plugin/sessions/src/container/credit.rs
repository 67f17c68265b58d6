//! Reserves credit for processes, and takes idle credit of others back.

use std::time::{Duration, Instant};

use bursar_ledger::BootTime;
use bursar_protocol::units::Units;

use super::super::CreditAccounts;
use super::super::accounts::NO_PID;
use super::Container;
use super::denials::RefusalReason;

/// How long a request waits for the driver to free the memory of an exited image. The driver takes
/// 112 ms for 100 GiB (F8 in docs/internals/facts.md).
pub(super) const RECLAIM_WINDOW: Duration = Duration::from_secs(1);

impl Container {
    /// Whether a request would be refused only for bytes of an image that exited a moment ago, or
    /// whose kill is due. The driver is about to free them. A re-executed program requests its
    /// whole quota at once. A request that the agent received before the window waits no more.
    pub(in super::super) fn is_reclaim_pending(
        &self,
        pid: u32,
        account: u8,
        need: Units,
        received_at: Instant,
        now: BootTime,
    ) -> bool {
        let index = usize::from(account);
        let recently = |then: Instant| then.elapsed() < RECLAIM_WINDOW;
        let free = self
            .memory
            .credit
            .free(index)
            .saturating_add(self.idle_credit_for(pid, index));
        let of_ending: Units = self
            .fault_log
            .ending_pids(now)
            .map(|ending| self.memory.credit.granted_against(ending, index))
            .sum();
        let with_ended = free
            .saturating_add(of_ending)
            .saturating_add(self.memory.credit.exited_against(index))
            .saturating_add(self.memory.credit.sibling_charges(index));
        let has_ended = self.last_exit_in_claim().is_some_and(recently);
        recently(received_at)
            && (has_ended || of_ending > Units::ZERO)
            && !self.is_fenced(pid)
            && (free.saturating_add(Units(1))..=with_ended).contains(&need)
    }

    /// Reserves credit for a process in the accounts: first from free bytes, then from idle credit
    /// of other processes.
    pub(super) fn reserve_credit(
        &mut self,
        pid: u32,
        index: usize,
        need: Units,
    ) -> Result<Units, RefusalReason> {
        if self.is_fenced(pid) {
            return Err(RefusalReason::Fenced);
        }
        if self.is_checkpoint_lost {
            return Err(RefusalReason::RecordLost);
        }
        self.update_from_siblings();
        if self.memory.credit.free(index) < need {
            self.reclaim_for(pid, index, need);
        }
        let granted = self.memory.credit.grant(pid, index, need);
        granted.map_err(|_| RefusalReason::Quota)
    }

    /// Grants reserved credit to the page of a process. A page that the process has left is frozen.
    /// Any other page that rejects a grant is being overwritten without pause, or was.
    pub(super) fn grant_to_page(
        &mut self,
        pid: u32,
        index: usize,
        units: Units,
    ) -> Result<Units, RefusalReason> {
        let state = self.memory.processes.get_mut(&pid);
        let granted = state.is_some_and(|state| {
            let page = state.page.as_ref();
            let Some(slot) = page.and_then(|page| page.slot(index)) else {
                return false;
            };
            let granted = slot.grant(units);
            state.has_broken_page |= !granted && !slot.word().is_frozen();
            granted
        });
        if granted {
            if self.memory.credit.covered() == Some(index) {
                // The pages of the GPUs' accounts must show the bytes.
                self.refresh_pages();
            }
            return Ok(units);
        }
        self.memory.credit.revoke(pid, index, units);
        Err(RefusalReason::NoPage)
    }

    pub(super) fn idle_credit_of_others(&self, pid: u32, account: usize) -> Units {
        let others = self
            .memory
            .processes
            .iter()
            .filter(|(other, _)| **other != pid);
        others
            .filter_map(|(other, state)| {
                let slot = state.adopted_page()?.slot(account)?;
                Some(Units(slot.word().idle()).min(self.memory.credit.granted_to(*other, account)))
            })
            .sum()
    }

    /// The covered managed memory that counts against an account.
    pub(super) fn covered_use(&self, account: usize) -> Units {
        let Some(covered) = self.memory.credit.covered_by(account) else {
            return Units::ZERO;
        };
        let members = self.memory.processes.iter();
        let live: Units = members
            .map(|(pid, state)| self.used_by(*pid, state, covered))
            .sum();
        live.saturating_add(self.memory.credit.exited(covered))
    }

    /// The idle credit that may be taken for a request. It is that of the account's other
    /// processes, and that of all processes in accounts that share its quota.
    pub(super) fn idle_credit_for(&self, pid: u32, account: usize) -> Units {
        let own = self.idle_credit_of_others(pid, account);
        let of_all = |account| self.idle_credit_of_others(NO_PID, account);
        let sharing = match self.memory.credit.covered_by(account) {
            Some(covered) => Some(of_all(covered)),
            None if self.memory.credit.covered() == Some(account) => {
                self.memory.credit.covering().map(of_all).min()
            }
            None => None,
        };
        own.saturating_add(sharing.unwrap_or(Units::ZERO))
    }

    /// Takes back idle credit until an account has `need` free, if there is enough of it. Managed
    /// memory that is covered needs room on every GPU.
    pub(super) fn reclaim_for(&mut self, pid: u32, account: usize, need: Units) {
        let covered = self.memory.credit.covered();
        let limiting: Vec<_> = match covered == Some(account) {
            true => self.memory.credit.covering().collect(),
            false => vec![account],
        };
        // The process has used up its idle credit of the account itself.
        let asker = |of: usize| if of == account { pid } else { NO_PID };
        let idle = |of: usize| self.idle_credit_of_others(asker(of), of);
        let shared = covered.map_or(Units::ZERO, idle);
        let missing = |credit: &CreditAccounts, of: usize| need.saturating_sub(credit.free(of));
        let is_enough =
            |of: &usize| idle(*of).saturating_add(shared) >= missing(&self.memory.credit, *of);
        if !limiting.iter().all(is_enough) {
            return;
        }
        if let Some(covered) = covered {
            let most = limiting
                .iter()
                .map(|of| missing(&self.memory.credit, *of))
                .max();
            self.reclaim_idle(asker(covered), covered, most.unwrap_or(Units::ZERO));
        }
        for of in limiting {
            let left = missing(&self.memory.credit, of);
            self.reclaim_idle(asker(of), of, left);
        }
    }

    pub(super) fn reclaim_idle(&mut self, pid: u32, account: usize, mut missing: Units) {
        for (other, state) in self
            .memory
            .processes
            .iter()
            .filter(|(other, _)| **other != pid)
        {
            let Some(slot) = state.adopted_page().and_then(|page| page.slot(account)) else {
                continue;
            };
            let at_most = missing.min(self.memory.credit.granted_to(*other, account));
            let taken = slot.reclaim(at_most);
            missing = missing.saturating_sub(self.memory.credit.revoke(*other, account, taken));
        }
    }
}
