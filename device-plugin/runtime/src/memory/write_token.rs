//! Issues an exclusive, expiring right to write memory and to commit the write.
//!
//! A [`WriteGate`] belongs to the memory. The gate issues one [`WriteToken`] at a time. It issues
//! the next one when the first was committed, dropped or has expired, and thereby *fences* the
//! first. An expired token that is not fenced still writes, because running work cannot be stopped;
//! it only cannot commit. Only the gate creates tokens, and a token cannot be copied.
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

use crate::error::ErrorClass;

/// 100 years.
const MAX_LIFETIME: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Reason for which the gate refuses a writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteRefused {
    /// Another writer has the token.
    #[error(
        "failed to issue a write token: another writer has it for {0:?} more; retry later or read the last commit"
    )]
    Busy(Duration),
    /// The token was revoked, and another writer may have the next one.
    #[error("failed to write: the token was revoked; discard the write and request a new token")]
    Fenced,
    /// The token has expired.
    #[error(
        "failed to commit the write: the token expired {0:?} ago; write again with a new token"
    )]
    Expired(Duration),
    /// The token belongs to another gate.
    #[error("failed to write: the token belongs to other memory; pass the token of this memory")]
    Foreign,
}

impl WriteRefused {
    /// Returns the class of the failure.
    pub fn class(&self) -> ErrorClass {
        match self {
            WriteRefused::Busy(_) => ErrorClass::NotReady,
            WriteRefused::Fenced | WriteRefused::Expired(_) | WriteRefused::Foreign => {
                ErrorClass::Caller
            }
        }
    }

    /// Returns whether the same call may succeed later in this process image.
    pub fn retryable(&self) -> bool {
        self.class().retryable()
    }
}

/// Issuer of write tokens for one piece of memory.
#[derive(Debug, Default)]
pub struct WriteGate(Arc<Mutex<GateState>>);

#[derive(Debug, Default)]
struct GateState {
    /// Number of the newest token.
    issued: u64,
    /// Expiry of the newest token; `None` once that was committed, dropped or fenced.
    expires_at: Option<Instant>,
    commits: u64,
}

/// Right to write, given up when dropped.
#[derive(Debug)]
pub struct WriteToken {
    gate: Arc<Mutex<GateState>>,
    number: u64,
    expires_at: Instant,
}

fn lock(gate: &Mutex<GateState>) -> MutexGuard<'_, GateState> {
    gate.lock().unwrap_or_else(PoisonError::into_inner)
}

impl WriteGate {
    /// Issues a token that expires `lifetime` after `now`.
    ///
    /// # Errors
    /// [`WriteRefused::Busy`] while another writer has an unexpired token.
    pub fn issue(&self, now: Instant, lifetime: Duration) -> Result<WriteToken, WriteRefused> {
        let mut gate = lock(&self.0);
        if let Some(remaining) = gate
            .expires_at
            .and_then(|expires_at| expires_at.checked_duration_since(now))
            && !remaining.is_zero()
        {
            return Err(WriteRefused::Busy(remaining));
        }
        // The clock cannot represent the expiry, so a century has to do.
        let expires_at = now.checked_add(lifetime).unwrap_or(now + MAX_LIFETIME);
        gate.issued += 1;
        gate.expires_at = Some(expires_at);
        Ok(WriteToken {
            gate: Arc::clone(&self.0),
            number: gate.issued,
            expires_at,
        })
    }

    /// Revokes the current token: the gate refuses it from now on.
    pub fn fence(&self) {
        let mut gate = lock(&self.0);
        gate.issued += 1;
        gate.expires_at = None;
    }

    /// Returns the number of commits.
    pub fn commits(&self) -> u64 {
        lock(&self.0).commits
    }

    /// Checks that a token is the newest one of this gate.
    ///
    /// # Errors
    /// [`WriteRefused::Foreign`] or [`WriteRefused::Fenced`].
    pub fn admit(&self, token: &WriteToken) -> Result<(), WriteRefused> {
        if Arc::ptr_eq(&self.0, &token.gate) {
            token.check_newest(&lock(&self.0))
        } else {
            Err(WriteRefused::Foreign)
        }
    }

    /// Commits a write and returns the number of the commit. The token is consumed in any case.
    ///
    /// # Errors
    /// [`WriteRefused::Foreign`], [`WriteRefused::Fenced`] or [`WriteRefused::Expired`]: nothing
    /// was committed.
    pub fn commit(&self, token: WriteToken, now: Instant) -> Result<u64, WriteRefused> {
        self.admit(&token)?;
        let mut gate = lock(&self.0);
        token.check_newest(&gate)?;
        if now >= token.expires_at {
            return Err(WriteRefused::Expired(now - token.expires_at));
        }
        gate.expires_at = None;
        gate.commits += 1;
        Ok(gate.commits)
    }
}

impl WriteToken {
    /// Returns the time until which the token can be committed.
    pub fn expires_at(&self) -> Instant {
        self.expires_at
    }

    fn check_newest(&self, gate: &GateState) -> Result<(), WriteRefused> {
        if gate.issued == self.number && gate.expires_at.is_some() {
            Ok(())
        } else {
            Err(WriteRefused::Fenced)
        }
    }
}

impl Drop for WriteToken {
    fn drop(&mut self) {
        let mut gate = lock(&self.gate);
        if self.check_newest(&gate).is_ok() {
            gate.expires_at = None;
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
    fn second_writer_is_refused_until_the_first_commits() {
        let (gate, now) = (WriteGate::default(), Instant::now());
        let first = gate.issue(now, LASTS).expect("the first");
        let refused = gate.issue(now + SECOND, LASTS).map(|_| ());
        assert_eq!(refused, Err(WriteRefused::Busy(LASTS - SECOND)));
        assert_eq!(gate.commit(first, now + SECOND), Ok(1));
        assert_eq!(
            gate.admit(&gate.issue(now + SECOND, LASTS).expect("the second")),
            Ok(())
        );
    }

    #[test]
    fn expired_token_writes_but_cannot_commit() {
        let (gate, now) = (WriteGate::default(), Instant::now());
        let token = gate.issue(now, LASTS).expect("a token");
        assert_eq!(gate.admit(&token), Ok(()));
        let late = gate.commit(token, now + LASTS + SECOND);
        assert_eq!(late, Err(WriteRefused::Expired(SECOND)));
        assert_eq!(gate.commits(), 0);
    }

    #[test]
    fn token_lifetime_beyond_the_clock_is_capped() {
        let (gate, now) = (WriteGate::default(), Instant::now());
        let token = gate.issue(now, Duration::MAX).expect("a token");
        assert_eq!(gate.commit(token, now + LASTS), Ok(1));
    }

    #[test]
    fn token_expires_at_exactly_its_deadline() {
        let (gate, now) = (WriteGate::default(), Instant::now());
        let token = gate.issue(now, LASTS).expect("a token");
        assert_eq!(
            gate.commit(token, now + LASTS),
            Err(WriteRefused::Expired(Duration::ZERO))
        );
    }

    #[test]
    fn next_writer_fences_an_expired_token() {
        let (gate, now) = (WriteGate::default(), Instant::now());
        let stalled = gate.issue(now, LASTS).expect("a token");
        let next = gate.issue(now + LASTS, LASTS).expect("the next");
        assert_eq!(gate.admit(&stalled), Err(WriteRefused::Fenced));
        // The stalled writer's own clock may say that the token has not expired.
        assert_eq!(gate.commit(stalled, now), Err(WriteRefused::Fenced));
        assert_eq!(gate.commit(next, now + LASTS), Ok(1));
    }

    #[test]
    fn fence_revokes_a_token_at_once() {
        let (gate, now) = (WriteGate::default(), Instant::now());
        let token = gate.issue(now, LASTS).expect("a token");
        gate.fence();
        assert_eq!(gate.admit(&token), Err(WriteRefused::Fenced));
        assert_eq!(gate.commit(token, now), Err(WriteRefused::Fenced));
    }

    #[test]
    fn token_is_refused_by_another_gate() {
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
    fn dropped_token_admits_the_next_writer() {
        let (gate, now) = (WriteGate::default(), Instant::now());
        drop(gate.issue(now, LASTS).expect("a token"));
        let stalled = gate.issue(now, SECOND).expect("a token");
        let next = gate.issue(now + SECOND, LASTS).expect("the next");
        drop(stalled);
        assert_eq!(gate.commit(next, now + SECOND), Ok(1));
    }

    /// Step of a simulated writer.
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
        fn at_most_one_unexpired_token_can_commit(steps in steps()) {
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
                        let (token, expires_at) = tokens.remove(place);
                        if gate.commit(token, now).is_ok() {
                            prop_assert!(newest && now < expires_at);
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
