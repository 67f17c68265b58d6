//! Reserves credit for processes, and takes idle credit of others back.

use std::time::{Duration, Instant};

use bursar_ledger::BootTime;
use bursar_protocol::units::Units;

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
            .saturating_add(self.memory.idle_credit_for(pid, index));
        let of_ending: Units = self
            .fault_log
            .ending_pids(now)
            .map(|ending| self.memory.credit.granted_against(ending, index))
            .sum();
        let with_ended = free
            .saturating_add(of_ending)
            .saturating_add(self.memory.credit.exited_against(index))
            .saturating_add(self.memory.credit.sibling_charges(index));
        let has_ended = self.memory.claim.last_exit().is_some_and(recently);
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
        self.memory.update_from_siblings();
        if self.memory.credit.free(index) < need {
            self.memory.reclaim_for(pid, index, need);
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
                self.memory.refresh_pages();
            }
            return Ok(units);
        }
        self.memory.credit.revoke(pid, index, units);
        Err(RefusalReason::NoPage)
    }
}
