//! Writes changes to the checkpoint, and answers requests for credit after the write.
//!
//! ```text
//!   change, request --> at once, while the rate limit allows --> one write --> answers
//!                  \--> otherwise together with later ones ------^
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_protocol::messages::Response;
use bursar_protocol::units::Units;
use tokio::sync::{Notify, oneshot, watch};

use super::super::rate_limit::{RateLimiter, measure_cpu_time};
use super::Container;
use super::denials::RefusalReason;

/// Writes take one part in this many of a processor's time at most.
const WRITE_TIME_DIVISOR: u32 = 20;

/// The longest that one write delays the next: 20 writes a second, whatever they cost.
pub(super) const MAX_WRITE_DELAY: Duration = Duration::from_millis(50);

/// The debt of writes before one is delayed: 20 times the longest delay.
pub(super) const WRITE_BURST: Duration = Duration::from_secs(1);

/// Numbers the changes of the container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(in super::super) struct ChangeNumber(u64);

/// The changes that the checkpoint does not hold yet.
#[derive(Debug)]
pub(super) struct PendingChanges {
    pub(super) rate_limiter: RateLimiter,
    pub(super) last: ChangeNumber,
    /// The last change that a write was tried for.
    written: ChangeNumber,
    /// Whether there are changes besides the requests.
    has_changes: bool,
    credit_requests: Vec<CreditRequest>,
}

/// A request for credit that waits for a write.
#[derive(Debug)]
struct CreditRequest {
    pid: u32,
    account: u8,
    need: Units,
    answer: oneshot::Sender<Response>,
}

impl Default for PendingChanges {
    fn default() -> PendingChanges {
        PendingChanges {
            rate_limiter: RateLimiter::new(WRITE_BURST),
            last: ChangeNumber::default(),
            written: ChangeNumber::default(),
            has_changes: false,
            credit_requests: Vec::new(),
        }
    }
}

impl Container {
    /// Requests credit for a process. The answer comes after the checkpoint holds the grant.
    pub(in super::super) fn request_credit(
        &mut self,
        pid: u32,
        account: u8,
        need: Units,
    ) -> (ChangeNumber, oneshot::Receiver<Response>) {
        let (answer, answered) = oneshot::channel();
        self.requests = self.requests.saturating_add(1);
        self.pending_changes.credit_requests.push(CreditRequest {
            pid,
            account,
            need,
            answer,
        });
        (self.next_change(), answered)
    }

    /// Drops the requests of a process that says hello again: it waits for no answer, and has not
    /// adopted its new page.
    pub(super) fn drop_requests_of(&mut self, pid: u32) {
        let requests = &mut self.pending_changes.credit_requests;
        requests.retain(|request| request.pid != pid);
    }

    /// Handles a query for the use of other processes. Returns the change that the checkpoint must
    /// hold before the answer.
    pub(in super::super) fn handle_refresh(&mut self, pid: u32) -> Option<ChangeNumber> {
        let has_changed = self.memory.update_exports(pid);
        self.memory.refresh_pages();
        has_changed.then(|| self.note_change())
    }

    /// Notes a change, and writes it now or with the next write.
    pub(super) fn note_change(&mut self) -> ChangeNumber {
        self.pending_changes.has_changes = true;
        self.memory.publish_to_siblings();
        self.next_change()
    }

    fn next_change(&mut self) -> ChangeNumber {
        self.notify_change();
        self.pending_changes.last.0 += 1;
        let change = self.pending_changes.last;
        self.poll_recorded(change, Instant::now());
        change
    }

    /// Writes all changes if the rate limit allows, and otherwise returns the time to wait before
    /// the next try.
    pub(in super::super) fn poll_recorded(
        &mut self,
        change: ChangeNumber,
        now: Instant,
    ) -> Option<Duration> {
        if self.pending_changes.written >= change {
            return None;
        }
        let wait = self.pending_changes.rate_limiter.wait_time(now);
        if !wait.is_zero() {
            return Some(wait);
        }
        self.write_changes();
        None
    }

    /// Whether no change waits for a write.
    pub(in super::super) fn is_recorded(&self) -> bool {
        self.pending_changes.written >= self.pending_changes.last
    }

    /// Notified each time that a change must be written.
    pub(in super::super) fn change_notify(&self) -> Arc<Notify> {
        Arc::clone(&self.change_notify)
    }

    /// Sets the sender that is notified of each change while orphaned exports are charged.
    pub(in super::super) fn set_orphans_sender(&mut self, exports: watch::Sender<()>) {
        self.orphans_changed = exports;
    }

    fn notify_change(&self) {
        self.change_notify.notify_one();
        let [_, orphaned] = self.memory.credit().exited_and_orphaned();
        if !orphaned.is_empty() {
            self.orphans_changed.send_replace(());
        }
    }

    /// Ends all writes, since the allocation has ended, and leaves the claim.
    pub(in super::super) fn close(&mut self) {
        self.memory.claim_mut().leave();
        self.checkpoint.close();
    }

    /// Writes all changes if the rate limit allows.
    pub(in super::super) fn flush_changes(&mut self, now: Instant) {
        self.poll_recorded(self.pending_changes.last, now);
    }

    fn write_changes(&mut self) {
        let requests = std::mem::take(&mut self.pending_changes.credit_requests);
        let mut has_changes = std::mem::take(&mut self.pending_changes.has_changes);
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
        self.pending_changes.written = self.pending_changes.last;
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

    /// Writes the checkpoint, and returns whether it holds the accounts. Each write delays the next
    /// one that can wait.
    pub(super) fn write_checkpoint(&mut self) -> bool {
        self.notify_change();
        let (written, took) = measure_cpu_time(|| self.store_checkpoint());
        let delays = took.saturating_mul(WRITE_TIME_DIVISOR).min(MAX_WRITE_DELAY);
        self.pending_changes
            .rate_limiter
            .charge_at_most(delays, MAX_WRITE_DELAY, Instant::now());
        written
    }
}
