//! Writes changes to the checkpoint, and answers requests for credit after the write.
//!
//! ```text
//!   change, request --> at once, while the rate limit allows --> one write --> answers
//!                  \--> otherwise together with later ones ------^
//! ```

use std::time::{Duration, Instant};

use bursar_protocol::messages::Response;
use bursar_protocol::units::Units;
use tokio::sync::oneshot;

use super::Container;
use super::denials::RefusalReason;
use super::recorder::{ChangeNumber, CreditRequest};

impl Container {
    /// Requests credit for a process. The answer comes after the checkpoint holds the grant.
    pub(in super::super) fn request_credit(
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
        (self.next_change(), answered)
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
        self.recorder.mark_changed();
        self.memory.publish_to_siblings();
        self.next_change()
    }

    fn next_change(&mut self) -> ChangeNumber {
        let has_orphans = self.memory.credit().has_orphaned();
        let change = self.recorder.next_change(has_orphans);
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
        let wait = self.recorder.wait_time(change, now)?;
        if wait.is_zero() {
            self.write_changes();
            return None;
        }
        Some(wait)
    }

    /// Ends all writes, since the allocation has ended, and leaves the claim.
    pub(in super::super) fn close(&mut self) {
        self.memory.claim_mut().leave();
        self.recorder.close();
    }

    /// Writes all changes if the rate limit allows.
    pub(in super::super) fn flush_changes(&mut self, now: Instant) {
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
        self.recorder.mark_written();
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
}
