//! Charges a container, and records the charges before a process or the caller learns of them.
//!
//! ```text
//!   change, request --> at once, while the rate limit allows --> one write --> answers
//!                  \--> otherwise together with later ones ------^
//! ```

use std::time::{Duration, Instant};

use bursar_ledger::BootTime;
use bursar_ledger::units::{Bytes, GpuUuid, LeaseId};
use bursar_protocol::POISON_SINCE;
use bursar_protocol::messages::Response;
use bursar_protocol::units::Units;
use tokio::sync::oneshot;

use super::super::Account;
use super::super::accounts::AmountsByPid;
use super::Container;
use super::denials::RefusalReason;
use super::recorder::{ChangeNumber, CreditRequest};

/// How long a request waits for the driver to free the memory of an exited image. The driver takes
/// 112 ms for 100 GiB (F8 in docs/internals/facts.md).
pub(super) const RECLAIM_WINDOW: Duration = Duration::from_secs(1);

impl Container {
    /// Requests credit for a process. The answer comes after the checkpoint holds the grant.
    pub(crate) fn request_credit(
        &mut self,
        pid: u32,
        account: u8,
        need: Units,
    ) -> (ChangeNumber, oneshot::Receiver<Response>) {
        let (answer, answered) = oneshot::channel();
        self.recorder.push_request(CreditRequest {
            pid,
            account,
            need,
            answer,
        });
        (self.next_change(true), answered)
    }

    /// Handles a query for the use of other processes. Returns the change that the checkpoint must
    /// hold before the answer.
    pub(crate) fn handle_refresh(&mut self, pid: u32) -> Option<ChangeNumber> {
        let has_changed = self.memory.update_exports(pid);
        self.memory.refresh_pages();
        has_changed.then(|| self.note_change())
    }

    /// Notes a change, and writes it now or with the next write.
    pub(super) fn note_change(&mut self) -> ChangeNumber {
        self.memory.publish_to_siblings();
        self.next_change(false)
    }

    fn next_change(&mut self, is_request: bool) -> ChangeNumber {
        let credit = self.memory.credit();
        let change = self.recorder.next_change(is_request, credit.has_orphaned());
        self.poll_recorded(change, Instant::now());
        change
    }

    /// Writes all changes if the rate limit allows, and otherwise returns the time to wait before
    /// the next try.
    pub(crate) fn poll_recorded(&mut self, change: ChangeNumber, now: Instant) -> Option<Duration> {
        let wait = self.recorder.wait_time(change, now)?;
        if wait.is_zero() {
            self.write_changes();
            return None;
        }
        Some(wait)
    }

    /// Ends all writes, since the allocation has ended, and leaves the claim.
    pub(crate) fn close(&mut self) {
        self.memory.claim_mut().leave();
        self.recorder.close();
    }

    /// Writes all changes if the rate limit allows.
    pub(crate) fn flush_changes(&mut self, now: Instant) {
        self.poll_recorded(self.recorder.last(), now);
    }

    fn write_changes(&mut self) {
        let (requests, mut has_changes) = self.recorder.take_pending();
        let mut granted = Vec::new();
        for CreditRequest {
            pid,
            account,
            need,
            answer,
        } in requests
        {
            // A process that has exited would keep the account of this grant for ever.
            if answer.is_closed() || self.memory.image_of(pid).is_none() {
                continue;
            }
            has_changes |= self.memory.update_exports(pid);
            let units = self.reserve_credit(pid, usize::from(account), need);
            has_changes |= units.is_ok();
            granted.push((pid, account, need, units, answer));
        }
        let written = !has_changes || self.write_checkpoint();
        for (pid, account, need, units, answer) in granted {
            let index = usize::from(account);
            let outcome = units.and_then(|units| match written {
                true if self.memory.grant_to_page(pid, index, units) => Ok(units),
                true => Err(RefusalReason::NoPage),
                false => {
                    self.memory.credit_mut().revoke(pid, index, units);
                    Err(RefusalReason::Unrecorded)
                }
            });
            // A process that no longer waits for the answer still has the credit in its page.
            let _ = answer.send(match outcome {
                Ok(units) => Response::Granted { account, units },
                Err(reason) => self.refuse_credit(pid, account, need, reason),
            });
        }
    }

    /// Writes the checkpoint, and returns whether it holds the accounts.
    pub(super) fn write_checkpoint(&mut self) -> bool {
        let has_orphans = self.memory.credit().has_orphaned();
        let allocation = self.spec.allocation;
        self.recorder.write(allocation, has_orphans, |is_lost| {
            self.memory.publish_to_siblings();
            self.memory
                .checkpoint_content(is_lost, self.faults.log().clone())
        })
    }

    /// Whether a request would be refused only for bytes of an image that exited a moment ago, or
    /// whose kill is due. The driver is about to free them. A re-executed program requests its
    /// whole quota at once. A request that the agent received before the window waits no more.
    pub(crate) fn is_reclaim_pending(
        &mut self,
        pid: u32,
        account: u8,
        need: Units,
        received_at: Instant,
        now: BootTime,
    ) -> bool {
        let index = usize::from(account);
        let recently = |then: Instant| then.elapsed() < RECLAIM_WINDOW;
        // A sibling publishes its charges as soon as a sample shows the memory free.
        self.memory.update_from_siblings();
        let credit = self.memory.credit();
        let idle = self.memory.idle_credit_for(pid, index);
        let free = credit.free(index).saturating_add(idle);
        let ending = self.faults.log().ending_pids(now);
        let of_ending = ending.map(|pid| credit.granted_against(pid, index)).sum();
        let with_ended = free
            .saturating_add(of_ending)
            .saturating_add(credit.exited_against(index))
            .saturating_add(credit.sibling_charges(index));
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

    /// Logs a refusal, and returns the answer to the request.
    pub(super) fn refuse_credit(
        &mut self,
        pid: u32,
        account: u8,
        need: Units,
        reason: RefusalReason,
    ) -> Response {
        let index = usize::from(account);
        if let Some(suppressed) = self.log_limiter.due(reason.as_str(), Instant::now()) {
            let credit = self.memory.credit();
            tracing::info!(
                allocation = %self.spec.allocation,
                pod = %self.spec.pod,
                pid,
                account,
                reason = reason.as_str(),
                asked = need.bytes(),
                free = credit.free(index).bytes(),
                idle = self.memory.idle_credit_for(pid, index).bytes(),
                quota = credit.quota(index).bytes(),
                granted = credit.granted(index).bytes(),
                own = credit.granted_to(pid, index).bytes(),
                exited = credit.exited(index).bytes(),
                leased = credit.leased(index).bytes(),
                untracked = credit.untracked(index).bytes(),
                suppressed,
                "memory refused"
            );
        }
        let version = self.memory.protocol_version(pid);
        let free = match reason {
            RefusalReason::Fenced if version >= Some(POISON_SINCE) => {
                return Response::Fenced { account };
            }
            RefusalReason::Fenced | RefusalReason::RecordLost | RefusalReason::Unrecorded => {
                Units::ZERO
            }
            RefusalReason::Quota | RefusalReason::NoPage => self.memory.credit().free(index),
        };
        Response::Refused { account, free }
    }

    /// Charges a lease. The checkpoint holds the charge when this returns.
    ///
    /// # Errors
    /// The bytes that the quota has left.
    pub(crate) fn charge_lease(
        &mut self,
        gpu: &GpuUuid,
        lease: LeaseId,
        bytes: Bytes,
    ) -> Result<(), Bytes> {
        let (Some(index), false) = (self.memory.account_index(gpu), self.recorder.is_lost()) else {
            return Err(Bytes::ZERO);
        };
        let need = Units::holding(bytes.0).unwrap_or(Units::MAX);
        let charged = self.memory.charge_lease(lease.0, index, need);
        charged.map_err(|left| Bytes(left.bytes()))?;
        if !self.write_checkpoint() {
            self.memory.credit_mut().refund_lease(lease.0);
            return Err(Bytes::ZERO);
        }
        self.memory.refresh_pages();
        Ok(())
    }

    /// Charges a lease that the fd store has, unless the account charges it already.
    pub(crate) fn adopt_lease(&mut self, gpu: &GpuUuid, lease: LeaseId, bytes: Bytes) {
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
    /// charged the lease. Returns whether the checkpoint holds the change; otherwise the lease
    /// stays charged.
    pub(crate) fn release_lease(&mut self, gpu: &GpuUuid, lease: LeaseId, bytes: Bytes) -> bool {
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
    pub(crate) fn refund_lease(&mut self, lease: LeaseId) {
        self.memory.credit_mut().refund_lease(lease.0);
        self.record_leases();
    }

    /// Charges exports that an earlier container of another claim left on a GPU, within the quota.
    /// Returns the bytes that the checkpoint now holds.
    pub(crate) fn inherit_exports(&mut self, gpu: &GpuUuid, bytes: Bytes) -> Bytes {
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

    fn record_leases(&mut self) -> bool {
        self.memory.refresh_pages();
        self.write_checkpoint()
    }

    /// Caps the orphaned exports of a GPU by a proven bound for those in `query`.
    /// Returns whether any bytes became free.
    pub(crate) fn cap_orphaned_exports(
        &mut self,
        gpu: &GpuUuid,
        bound: Bytes,
        query: &AmountsByPid,
    ) -> bool {
        let Some(index) = self.memory.account_index(gpu) else {
            return false;
        };
        let before = self.memory.credit().orphaned(index);
        let most = Units::holding(bound.0).unwrap_or(Units::MAX);
        self.memory.credit_mut().cap_orphaned(index, most, query);
        let changed = self.memory.credit().orphaned(index) != before;
        if changed {
            self.memory.refresh_pages();
            self.note_change();
        }
        changed
    }

    /// Handles a new context of a process: answers the current size, and writes it into the pages
    /// of all processes. Also returns the change that the checkpoint must hold before the answer.
    pub(crate) fn handle_context_made(
        &mut self,
        pid: u32,
        account: u8,
    ) -> (Response, Option<ChangeNumber>) {
        let change = self.memory.update_exports(pid).then(|| self.note_change());
        let units = self.memory.publish_context_charge(usize::from(account));
        (Response::ContextSize { account, units }, change)
    }

    /// Replaces what the driver takes of an account beyond what processes are charged.
    pub(crate) fn set_overhead(&mut self, gpu: &GpuUuid, bytes: Bytes) {
        if self.memory.set_overhead(gpu, Units::within(bytes.0)) {
            self.reclaim_excess();
            self.memory.refresh_pages();
        }
    }

    /// Lowers an account below the requested quota; `None` removes the override. The next write of
    /// the checkpoint that succeeds holds the override.
    pub(crate) fn override_quota(&mut self, account: &Account, bytes: Option<Bytes>) {
        let ordered = bytes.map(|bytes| Units::within(bytes.0));
        if self.memory.order_quota(account, ordered) {
            self.reclaim_excess();
            self.write_checkpoint();
        }
    }

    /// Changes the requested quota of an account.
    pub(crate) fn set_requested_quota(&mut self, account: &Account, quota: Bytes) {
        if self.memory.request_quota(account, Units::within(quota.0)) {
            self.reclaim_excess();
        }
    }

    /// Reclaims idle credit beyond the quota: after the quota was lowered, freed bytes must not be
    /// used again.
    pub(crate) fn reclaim_excess(&mut self) {
        if self.memory.reclaim_excess() {
            self.write_checkpoint();
        }
    }

    /// Requests credit while the rate limit allows a write, and returns the answer.
    #[cfg(test)]
    pub(super) fn request(&mut self, pid: u32, account: u8, need: Units) -> Response {
        let (_, mut answer) = self.request_credit(pid, account, need);
        answer.try_recv().unwrap()
    }
}
