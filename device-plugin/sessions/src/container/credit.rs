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
            .credit()
            .free(index)
            .saturating_add(self.memory.idle_credit_for(pid, index));
        let of_ending: Units = self
            .faults
            .log()
            .ending_pids(now)
            .map(|ending| self.memory.credit().granted_against(ending, index))
            .sum();
        let with_ended = free
            .saturating_add(of_ending)
            .saturating_add(self.memory.credit().exited_against(index))
            .saturating_add(self.memory.credit().sibling_charges(index));
        let has_ended = self.memory.last_exit_in_claim().is_some_and(recently);
        recently(received_at)
            && (has_ended || of_ending > Units::ZERO)
            && !self.is_fenced(pid)
            && (free.saturating_add(Units(1))..=with_ended).contains(&need)
    }

    /// Reserves credit for a process in the accounts.
    pub(super) fn reserve_credit(
        &mut self,
        pid: u32,
        index: usize,
        need: Units,
    ) -> Result<Units, RefusalReason> {
        if self.is_fenced(pid) {
            return Err(RefusalReason::Fenced);
        }
        if self.recorder.is_lost() {
            return Err(RefusalReason::RecordLost);
        }
        let reserved = self.memory.reserve_credit(pid, index, need);
        reserved.map_err(|_| RefusalReason::Quota)
    }
}
