//! The right to write memory and say when it is whole: one holder at a time, for a time.
//!
//! A [`WriteGate`] belongs to what is written. It issues one [`WriteToken`] at a time; another is issued when
//! that one was committed, dropped or has expired, and then *fences* it. An expired token that nobody fenced still
//! writes, for what it was writing cannot be stopped; it only cannot commit any more. Tokens are made here
//! alone and cannot be copied, so that to hold one is to have the right.
//!
//! ```compile_fail,E0382
//! # use bursar_runtime::{WriteGate, WriteToken};
//! # use std::time::Instant;
//! fn twice(gate: &WriteGate, token: WriteToken, now: Instant) {
//!     let _ = gate.commit(token, now);
//!     let _ = gate.commit(token, now);
//! }
//! ```
//! ```compile_fail,E0599
//! # use bursar_runtime::WriteToken;
//! fn copied(token: &WriteToken) -> WriteToken {
//!     token.clone()
//! }
//! ```
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A century.
const FOR_EVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Why a right to write is not given, or has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteRefused {
    /// Somebody else is writing.
    #[error(
        "another writer has the right to write for {0:?} more; wait, or read what was committed"
    )]
    Held(Duration),
    /// Another writer has it since.
    #[error(
        "the right to write was fenced: another writer has it; what was written does not count"
    )]
    Fenced,
    /// The time for it is over.
    #[error("the right to write expired {0:?} ago; ask for a new one and write again")]
    Expired(Duration),
    /// The token is of something else.
    #[error("the right to write is not for this memory")]
    Foreign,
}

/// Issues the rights to write one thing.
#[derive(Debug, Default)]
pub struct WriteGate(Arc<Mutex<Gate>>);

#[derive(Debug, Default)]
struct Gate {
    /// The number of the newest token.
    issued: u64,
    /// When that expires; none where it was committed or given up.
    until: Option<Instant>,
    /// How many were committed.
    commits: u64,
}

/// The right to write; given up when dropped.
#[derive(Debug)]
pub struct WriteToken {
    gate: Arc<Mutex<Gate>>,
    number: u64,
    until: Instant,
}

fn lock(gate: &Mutex<Gate>) -> MutexGuard<'_, Gate> {
    gate.lock().unwrap_or_else(PoisonError::into_inner)
}

impl WriteGate {
    /// Gives the right to write from `now` on, for some time.
    ///
    /// # Errors
    /// [`WriteRefused::Held`] while another has it.
    pub fn issue(&self, now: Instant, lasts: Duration) -> Result<WriteToken, WriteRefused> {
        let mut gate = lock(&self.0);
        if let Some(left) = gate
            .until
            .and_then(|until| until.checked_duration_since(now))
            && !left.is_zero()
        {
            return Err(WriteRefused::Held(left));
        }
        // What the clock cannot count to is as good as for ever.
        let until = now.checked_add(lasts).unwrap_or(now + FOR_EVER);
        gate.issued += 1;
        gate.until = Some(until);
        Ok(WriteToken {
            gate: Arc::clone(&self.0),
            number: gate.issued,
            until,
        })
    }

    /// Takes the right from whoever has it: what it writes from now on is refused.
    pub fn fence(&self) {
        let mut gate = lock(&self.0);
        gate.issued += 1;
        gate.until = None;
    }

    /// How often a write was committed.
    pub fn commits(&self) -> u64 {
        lock(&self.0).commits
    }

    /// Whether a token may write: it is of this gate, and the newest.
    ///
    /// # Errors
    /// [`WriteRefused::Foreign`] or [`WriteRefused::Fenced`].
    pub fn admit(&self, token: &WriteToken) -> Result<(), WriteRefused> {
        if Arc::ptr_eq(&self.0, &token.gate) {
            token.newest(&lock(&self.0))
        } else {
            Err(WriteRefused::Foreign)
        }
    }

    /// Ends a write as whole, and says which commit it was. The token is used up, whatever the answer.
    ///
    /// # Errors
    /// [`WriteRefused::Foreign`], [`WriteRefused::Fenced`] or [`WriteRefused::Expired`]: nothing was committed.
    pub fn commit(&self, token: WriteToken, now: Instant) -> Result<u64, WriteRefused> {
        self.admit(&token)?;
        let mut gate = lock(&self.0);
        token.newest(&gate)?;
        if now >= token.until {
            return Err(WriteRefused::Expired(now - token.until));
        }
        gate.until = None;
        gate.commits += 1;
        Ok(gate.commits)
    }
}

impl WriteToken {
    /// Until when it can be committed.
    pub fn until(&self) -> Instant {
        self.until
    }

    fn newest(&self, gate: &Gate) -> Result<(), WriteRefused> {
        if gate.issued == self.number && gate.until.is_some() {
            Ok(())
        } else {
            Err(WriteRefused::Fenced)
        }
    }
}

impl Drop for WriteToken {
    fn drop(&mut self) {
        let mut gate = lock(&self.gate);
        if self.newest(&gate).is_ok() {
            gate.until = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LASTS: Duration = Duration::from_secs(10);
    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_second_writer_waits_until_the_first_commits() {
        let (gate, now) = (WriteGate::default(), Instant::now());
        let first = gate.issue(now, LASTS).expect("the first");
        let refused = gate.issue(now + SECOND, LASTS).map(|_| ());
        assert_eq!(refused, Err(WriteRefused::Held(LASTS - SECOND)));
        assert_eq!(gate.commit(first, now + SECOND), Ok(1));
        assert_eq!(
            gate.admit(&gate.issue(now + SECOND, LASTS).expect("the second")),
            Ok(())
        );
    }

    #[test]
    fn an_expired_token_still_writes_and_only_cannot_commit() {
        let (gate, now) = (WriteGate::default(), Instant::now());
        let token = gate.issue(now, LASTS).expect("a token");
        assert_eq!(gate.admit(&token), Ok(()));
        let late = gate.commit(token, now + LASTS + SECOND);
        assert_eq!(late, Err(WriteRefused::Expired(SECOND)));
        assert_eq!(gate.commits(), 0);
    }

    #[test]
    fn a_token_for_longer_than_a_clock_counts_is_one_for_ever() {
        let (gate, now) = (WriteGate::default(), Instant::now());
        let token = gate.issue(now, Duration::MAX).expect("a token");
        assert_eq!(gate.commit(token, now + LASTS), Ok(1));
    }

    #[test]
    fn a_token_expires_at_its_instant_and_not_after_it() {
        let (gate, now) = (WriteGate::default(), Instant::now());
        let token = gate.issue(now, LASTS).expect("a token");
        assert_eq!(
            gate.commit(token, now + LASTS),
            Err(WriteRefused::Expired(Duration::ZERO))
        );
    }

    #[test]
    fn the_next_writer_fences_an_expired_one() {
        let (gate, now) = (WriteGate::default(), Instant::now());
        let stalled = gate.issue(now, LASTS).expect("a token");
        let next = gate.issue(now + LASTS, LASTS).expect("the next");
        assert_eq!(gate.admit(&stalled), Err(WriteRefused::Fenced));
        // Also where the clock of the stalled writer says that there is time left.
        assert_eq!(gate.commit(stalled, now), Err(WriteRefused::Fenced));
        assert_eq!(gate.commit(next, now + LASTS), Ok(1));
    }

    #[test]
    fn a_fence_ends_the_right_at_once() {
        let (gate, now) = (WriteGate::default(), Instant::now());
        let token = gate.issue(now, LASTS).expect("a token");
        gate.fence();
        assert_eq!(gate.admit(&token), Err(WriteRefused::Fenced));
        assert_eq!(gate.commit(token, now), Err(WriteRefused::Fenced));
    }

    #[test]
    fn a_token_is_good_for_its_own_memory_only() {
        let (gate, other, now) = (WriteGate::default(), WriteGate::default(), Instant::now());
        let (_own, foreign) = (
            gate.issue(now, LASTS),
            other.issue(now, LASTS).expect("a token"),
        );
        assert_eq!(gate.admit(&foreign), Err(WriteRefused::Foreign));
        assert_eq!(gate.commit(foreign, now), Err(WriteRefused::Foreign));
        assert_eq!((gate.commits(), other.commits()), (0, 0));
    }

    #[test]
    fn a_dropped_token_lets_the_next_writer_in_and_a_fenced_one_takes_nothing_with_it() {
        let (gate, now) = (WriteGate::default(), Instant::now());
        drop(gate.issue(now, LASTS).expect("a token"));
        let stalled = gate.issue(now, SECOND).expect("a token");
        let next = gate.issue(now + SECOND, LASTS).expect("the next");
        drop(stalled);
        assert_eq!(gate.commit(next, now + SECOND), Ok(1));
    }

    /// What a writer of the model does.
    #[derive(Debug, Clone)]
    enum Step {
        Issue,
        Commit(usize),
        Drop(usize),
        Fence,
        Wait(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            Just(Step::Issue),
            (0..4usize).prop_map(Step::Commit),
            (0..4usize).prop_map(Step::Drop),
            Just(Step::Fence),
            (1..8u64).prop_map(Step::Wait),
        ];
        prop::collection::vec(step, 0..60)
    }

    proptest! {
        #[test]
        fn at_most_one_token_can_commit_at_any_time_and_only_before_it_expires(steps in steps()) {
            let (gate, mut now) = (WriteGate::default(), Instant::now());
            let mut tokens: Vec<(WriteToken, Instant)> = Vec::new();
            for step in steps {
                match step {
                    Step::Issue => {
                        if let Ok(token) = gate.issue(now, LASTS / 2) {
                            tokens.push((token, now + LASTS / 2));
                        }
                    }
                    Step::Commit(place) if place < tokens.len() => {
                        let newest = place + 1 == tokens.len();
                        let (token, until) = tokens.remove(place);
                        if gate.commit(token, now).is_ok() {
                            prop_assert!(newest && now < until);
                        }
                    }
                    Step::Drop(place) if place < tokens.len() => drop(tokens.remove(place)),
                    Step::Commit(_) | Step::Drop(_) => {}
                    Step::Fence => gate.fence(),
                    Step::Wait(seconds) => now += SECOND * u32::try_from(seconds).expect("small"),
                }
                let admitted = tokens.iter().filter(|(token, _)| gate.admit(token).is_ok()).count();
                prop_assert!(admitted <= 1, "{admitted} writers");
            }
        }
    }
}
