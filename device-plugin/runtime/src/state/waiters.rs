//! Wakes threads and tasks that wait for a change of a state.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Instant;

/// Threads and tasks that wait, at most one task for each subscription.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    wakers: Mutex<HashMap<u64, Waker>>,
    changed: Condvar,
}

impl Waiters {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Waker>> {
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes all waiters. The caller has published the change before, and holds no lock.
    pub(super) fn wake_all(&self) {
        let wakers = std::mem::take(&mut *self.lock());
        self.changed.notify_all();
        wakers.into_values().for_each(Waker::wake);
    }

    /// Registers the task of a subscription until the next change.
    pub(super) fn register(&self, subscription: u64, waker: &Waker) {
        self.lock().insert(subscription, waker.clone());
    }

    /// Forgets the task of a subscription.
    pub(super) fn forget(&self, subscription: u64) {
        self.lock().remove(&subscription);
    }

    /// Blocks the thread until `look` finds something or the deadline passes.
    pub(super) fn wait_until<T>(
        &self,
        deadline: Option<Instant>,
        look: impl Fn() -> Option<T>,
    ) -> Option<T> {
        let mut guard = self.lock();
        loop {
            // Under the lock, so that a change after the look wakes this thread.
            if let Some(found) = look() {
                return Some(found);
            }
            guard = match deadline {
                None => self
                    .changed
                    .wait(guard)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return None;
                    }
                    let waited = self.changed.wait_timeout(guard, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}
