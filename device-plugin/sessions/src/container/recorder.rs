//! Writes a container's checkpoint at a limited rate, and keeps what waits for the next write.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_ledger::units::AllocationId;
use bursar_protocol::messages::Response;
use bursar_protocol::units::Units;
use tokio::sync::{Notify, oneshot, watch};

use super::denials::SharedLogLimiter;
use crate::checkpoint::{CheckpointContent, SessionCheckpoint};
use crate::rate_limit::{RateLimiter, measure_cpu_time};

/// Writes take one part in this many of a processor's time at most.
const WRITE_TIME_DIVISOR: u32 = 20;

/// The longest that one write delays the next: 20 writes a second, whatever they cost.
pub(super) const MAX_WRITE_DELAY: Duration = Duration::from_millis(50);

/// The debt of writes before one is delayed: 20 times the longest delay.
pub(super) const WRITE_BURST: Duration = Duration::from_secs(1);

/// Numbers the changes of the container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ChangeNumber(u64);

/// The checkpoint of a container, and the changes that it does not hold yet.
pub(crate) struct Recorder {
    checkpoint: SessionCheckpoint,
    /// Whether the checkpoint is lost and the driver has not yet shown which processes have memory.
    /// Until then the agent grants nothing.
    is_lost: bool,
    rate_limiter: RateLimiter,
    last: ChangeNumber,
    /// The last change that a write was tried for.
    written: ChangeNumber,
    /// Whether there are changes besides the requests.
    has_changes: bool,
    credit_requests: Vec<CreditRequest>,
    /// The number of requests for credit so far.
    request_count: u64,
    /// Wakes the task that releases the bytes of exited images.
    change_notify: Arc<Notify>,
    /// Wakes the tasks that prove orphaned exports free.
    orphans_changed: watch::Sender<()>,
    log_limiter: SharedLogLimiter,
}

/// A request for credit that waits for a write.
#[derive(Debug)]
pub(super) struct CreditRequest {
    pub(super) pid: u32,
    pub(super) account: u8,
    pub(super) need: Units,
    pub(super) answer: oneshot::Sender<Response>,
}

impl Recorder {
    /// Writes to `checkpoint`, which is `is_lost` if unknown processes may live.
    pub(super) fn new(checkpoint: SessionCheckpoint, is_lost: bool) -> Recorder {
        Recorder {
            checkpoint,
            is_lost,
            rate_limiter: RateLimiter::new(WRITE_BURST),
            last: ChangeNumber::default(),
            written: ChangeNumber::default(),
            has_changes: false,
            credit_requests: Vec::new(),
            request_count: 0,
            change_notify: Arc::default(),
            orphans_changed: watch::Sender::default(),
            log_limiter: SharedLogLimiter::default(),
        }
    }

    /// Notifies `orphans_changed` of each change while orphaned exports are charged, and limits
    /// log lines together with the other containers.
    pub(super) fn connect(
        &mut self,
        orphans_changed: watch::Sender<()>,
        log_limiter: SharedLogLimiter,
    ) {
        self.orphans_changed = orphans_changed;
        self.log_limiter = log_limiter;
    }

    pub(super) fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Ends the loss of the checkpoint. Returns whether it was lost.
    pub(super) fn end_loss(&mut self) -> bool {
        std::mem::take(&mut self.is_lost)
    }

    /// Keeps a request until the next write.
    pub(super) fn push_request(&mut self, request: CreditRequest) {
        self.request_count = self.request_count.saturating_add(1);
        self.credit_requests.push(request);
    }

    pub(super) fn request_count(&self) -> u64 {
        self.request_count
    }

    /// Drops the requests of a process that says hello again: it waits for no answer, and has not
    /// adopted its new page.
    pub(super) fn drop_requests_of(&mut self, pid: u32) {
        self.credit_requests.retain(|request| request.pid != pid);
    }

    /// Numbers a change that the next write must hold, beside the requests or one of them.
    pub(super) fn next_change(&mut self, is_request: bool, has_orphans: bool) -> ChangeNumber {
        self.has_changes |= !is_request;
        self.notify(has_orphans);
        self.last.0 += 1;
        self.last
    }

    /// The last change.
    pub(super) fn last(&self) -> ChangeNumber {
        self.last
    }

    /// The time until the rate limit allows the write of a change; `None` where it was written.
    pub(super) fn wait_time(&mut self, change: ChangeNumber, now: Instant) -> Option<Duration> {
        (self.written < change).then(|| self.rate_limiter.wait_time(now))
    }

    /// Whether no change waits for a write.
    pub(crate) fn is_recorded(&self) -> bool {
        self.written >= self.last
    }

    /// Notified each time that a change must be written.
    pub(crate) fn change_notify(&self) -> Arc<Notify> {
        Arc::clone(&self.change_notify)
    }

    fn notify(&self, has_orphans: bool) {
        self.change_notify.notify_one();
        if has_orphans {
            self.orphans_changed.send_replace(());
        }
    }

    /// Takes the requests that wait for a write, which the caller tries now, and whether there are
    /// other changes.
    pub(super) fn take_pending(&mut self) -> (Vec<CreditRequest>, bool) {
        self.written = self.last;
        let requests = std::mem::take(&mut self.credit_requests);
        (requests, std::mem::take(&mut self.has_changes))
    }

    /// Writes the content for a checkpoint that is lost or not, and returns whether the checkpoint
    /// now holds it. Each write delays the next one that can wait.
    pub(super) fn write(
        &mut self,
        allocation: AllocationId,
        has_orphans: bool,
        content: impl FnOnce(bool) -> CheckpointContent,
    ) -> bool {
        self.notify(has_orphans);
        let (is_written, took) = measure_cpu_time(|| {
            if self.checkpoint.is_closed() {
                return false;
            }
            let written = self.checkpoint.write(content(self.is_lost));
            if let Err(error) = &written
                && let Some(suppressed) = self.log_limiter.due("record", Instant::now())
            {
                tracing::warn!(%allocation, %error, suppressed, "failed to write a session checkpoint; free space in /run");
            }
            written.is_ok()
        });
        let delays = took.saturating_mul(WRITE_TIME_DIVISOR).min(MAX_WRITE_DELAY);
        self.rate_limiter
            .charge_at_most(delays, MAX_WRITE_DELAY, Instant::now());
        is_written
    }

    /// Ends all writes, since the allocation has ended.
    pub(super) fn close(&mut self) {
        self.checkpoint.close();
    }

    #[cfg(test)]
    pub(super) fn rate_limiter_mut(&mut self) -> &mut RateLimiter {
        &mut self.rate_limiter
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorder(folder: &tempfile::TempDir) -> Recorder {
        let path = folder.path().join("record.json");
        Recorder::new(SessionCheckpoint::open(path).unwrap(), true)
    }

    fn write(recorder: &mut Recorder) -> bool {
        let content = |incomplete| CheckpointContent {
            incomplete,
            ..CheckpointContent::default()
        };
        recorder.write(AllocationId::from_bits(1), false, content)
    }

    fn request(pid: u32) -> CreditRequest {
        CreditRequest {
            pid,
            account: 0,
            need: Units(1),
            answer: oneshot::channel().0,
        }
    }

    #[test]
    fn change_waits_until_earlier_writes_are_paid() {
        let folder = tempfile::tempdir().unwrap();
        let (mut recorder, now) = (recorder(&folder), Instant::now());
        let change = recorder.next_change(true, false);
        assert_eq!(recorder.wait_time(change, now), Some(Duration::ZERO));
        recorder.rate_limiter_mut().charge(2 * WRITE_BURST, now);
        assert_eq!(recorder.wait_time(change, now), Some(WRITE_BURST));
        let later = now + WRITE_BURST;
        assert_eq!(recorder.wait_time(change, later), Some(Duration::ZERO));
        assert!(!recorder.is_recorded());
        let (_, has_changes) = recorder.take_pending();
        assert!(recorder.is_recorded() && !has_changes);
        assert_eq!(recorder.wait_time(change, now), None);
    }

    #[test]
    fn requests_of_one_process_are_dropped_alone() {
        let folder = tempfile::tempdir().unwrap();
        let mut recorder = recorder(&folder);
        for pid in [1, 2, 1] {
            recorder.push_request(request(pid));
        }
        recorder.drop_requests_of(1);
        let (requests, has_changes) = recorder.take_pending();
        let pids: Vec<u32> = requests.iter().map(|request| request.pid).collect();
        assert_eq!((pids, has_changes), (vec![2], false));
        assert_eq!(recorder.request_count(), 3);
    }

    #[test]
    fn loss_is_on_record_until_it_ends() {
        let folder = tempfile::tempdir().unwrap();
        let mut recorder = recorder(&folder);
        let is_incomplete = |recorder: &Recorder| recorder.checkpoint.read().unwrap().incomplete;
        assert!(write(&mut recorder) && is_incomplete(&recorder));
        assert!(recorder.end_loss() && !recorder.end_loss());
        assert!(write(&mut recorder) && !is_incomplete(&recorder));
    }

    #[test]
    fn closed_checkpoint_is_not_written() {
        let folder = tempfile::tempdir().unwrap();
        let mut recorder = recorder(&folder);
        recorder.close();
        assert!(!write(&mut recorder));
        assert!(recorder.checkpoint.read().is_none());
    }
}
