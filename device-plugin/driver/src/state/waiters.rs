//! Wakes threads and tasks that wait for a change of a state.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
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
        for waker in wakers.into_values() {
            // A waker that panics must not keep the others from their tasks.
            let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
        }
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Wake;

    use super::*;

    /// Counts its wakes, and panics on each.
    #[derive(Default)]
    struct Panic(AtomicU32);

    impl Wake for Panic {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
            panic!("the executor has ended");
        }
    }

    #[test]
    fn all_tasks_are_woken_when_wakers_panic() {
        let (waiters, wakes) = (Waiters::default(), Arc::new(Panic::default()));
        for subscription in 0..2 {
            waiters.register(subscription, &Waker::from(Arc::clone(&wakes)));
        }
        waiters.wake_all();
        assert_eq!(wakes.0.load(Ordering::Relaxed), 2);
    }
}
