//! Puts what changed on record, and answers requests for credit once they are.
//!
//! ```text
//!   change, request --> at once, while writes are paid for --> one write --> answers
//!                  \--> else all that come meanwhile --------^
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_protocol::messages::Response;
use bursar_protocol::units::Units;
use tokio::sync::{Notify, oneshot, watch};

use super::super::rate_limit::{Pace, measured};
use super::Container;
use super::denials::Why;

/// Writes take one in so many parts of a processor's time at most.
const SHARE: u32 = 20;

/// The longest that one write delays the next: 20 a second, whatever they cost.
pub(super) const LONGEST: Duration = Duration::from_millis(50);

/// What writes may owe before one is delayed: 20 of those.
pub(super) const AT_ONCE: Duration = Duration::from_secs(1);

/// Numbers what has to be on record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(in super::super) struct Change(u64);

/// What has to be on record.
#[derive(Debug)]
pub(super) struct Changes {
    pub(super) pace: Pace,
    pub(super) last: Change,
    /// The last that a write was tried for.
    written: Change,
    /// Whether anything changed since then but by requests.
    any: bool,
    asked: Vec<Asked>,
}

/// A request for credit.
#[derive(Debug)]
struct Asked {
    pid: u32,
    account: u8,
    need: Units,
    answer: oneshot::Sender<Response>,
}

impl Default for Changes {
    fn default() -> Changes {
        Changes {
            pace: Pace::new(AT_ONCE),
            last: Change::default(),
            written: Change::default(),
            any: false,
            asked: Vec::new(),
        }
    }
}

impl Container {
    /// Requests credit for a process: answered once it is on record.
    pub(in super::super) fn ask(
        &mut self,
        pid: u32,
        account: u8,
        need: Units,
    ) -> (Change, oneshot::Receiver<Response>) {
        let (answer, answered) = oneshot::channel();
        self.requests = self.requests.saturating_add(1);
        self.changes.asked.push(Asked {
            pid,
            account,
            need,
            answer,
        });
        (self.number(), answered)
    }

    /// A process asks for what the others use: what has to be on record before it is answered.
    pub(in super::super) fn asks_refresh(&mut self, pid: u32) -> Option<Change> {
        let news = self.hear(pid);
        self.refresh();
        news.then(|| self.changed())
    }

    /// Something changed that is to be on record: at once, or with the next write.
    pub(super) fn changed(&mut self) -> Change {
        self.changes.any = true;
        self.tell_siblings();
        self.number()
    }

    fn number(&mut self) -> Change {
        self.stir();
        self.changes.last.0 += 1;
        let change = self.changes.last;
        self.recorded(change, Instant::now());
        change
    }

    /// Writes what is not on record, if writes are paid for: how long to wait before this is tried again.
    pub(in super::super) fn recorded(&mut self, change: Change, now: Instant) -> Option<Duration> {
        if self.changes.written >= change {
            return None;
        }
        let wait = self.changes.pace.debt(now);
        if !wait.is_zero() {
            return Some(wait);
        }
        self.write_changes();
        None
    }

    /// Whether nothing waits for a write.
    pub(in super::super) fn is_recorded(&self) -> bool {
        self.changes.written >= self.changes.last
    }

    /// Notified each time that something changed which is to be on record.
    pub(in super::super) fn stirred(&self) -> Arc<Notify> {
        Arc::clone(&self.stirred)
    }

    /// Tells `exports` each time that something changed while dead processes' exports are charged.
    pub(in super::super) fn tell_exports(&mut self, exports: watch::Sender<()>) {
        self.exports = exports;
    }

    fn stir(&self) {
        self.stirred.notify_one();
        let [_, kept] = self.credit.retirements();
        if !kept.is_empty() {
            self.exports.send_replace(());
        }
    }

    /// Nothing more is put on record: the allocation has ended.
    pub(in super::super) fn end_record(&mut self) {
        self.record.close();
    }

    /// The same of all that changed.
    pub(in super::super) fn record_all(&mut self, now: Instant) {
        self.recorded(self.changes.last, now);
    }

    fn write_changes(&mut self) {
        let asked = std::mem::take(&mut self.changes.asked);
        let mut any = std::mem::take(&mut self.changes.any);
        let mut granted = Vec::new();
        for Asked {
            pid,
            account,
            need,
            answer,
        } in asked
        {
            any |= self.hear(pid);
            let units = self.take_credit(pid, usize::from(account), need);
            any |= units.is_ok();
            granted.push((pid, account, need, units, answer));
        }
        let written = !any || self.write_record();
        self.changes.written = self.changes.last;
        for (pid, account, need, units, answer) in granted {
            let index = usize::from(account);
            let handed = units.and_then(|units| match written {
                true => self.hand_out(pid, index, units),
                false => {
                    self.credit.give_back(pid, index, units);
                    Err(Why::Unrecorded)
                }
            });
            // Who does not wait for it any more has the credit in its page.
            let _ = answer.send(match handed {
                Ok(units) => Response::Granted { account, units },
                Err(why) => self.refuse(pid, account, need, why),
            });
        }
    }

    /// Whether the record holds what the books say now. Each write delays the next that can wait.
    pub(super) fn write_record(&mut self) -> bool {
        self.stir();
        let (written, took) = measured(|| self.write_now());
        let delays = took.saturating_mul(SHARE).min(LONGEST);
        self.changes.pace.charge(delays, Instant::now());
        written
    }
}
