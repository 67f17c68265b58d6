//! Tells threads and tasks when the memory of a device becomes stale.
//!
//! A change that this process causes or finds wakes the subscribers at once. A fence of the agent
//! is a word in shared memory. So one thread of the process reads the fences of all subscribed
//! states every [`FENCE_INTERVAL`]. That thread exists only in a container with the shim, and only
//! while a subscription exists.
#![forbid(unsafe_code)]

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::poller::{Polled, Poller};
use super::{DeviceState, StaleReason};

/// Time between two reads of the agent's fence.
pub const FENCE_INTERVAL: Duration = Duration::from_millis(100);

/// Source of the changes of one [`DeviceState`], for one thread or task.
///
/// ```
/// # use std::time::Duration;
/// # use bursar_driver::state::ErrorMonitor;
/// # use bursar_driver::state::StaleReason;
/// let monitor = ErrorMonitor::new();
/// let state = monitor.new_state();
/// let mut changes = state.subscribe();
/// assert_eq!(changes.wait(Duration::from_millis(1)), None);
/// state.shut_down();
/// assert_eq!(changes.wait(Duration::MAX), Some(StaleReason::ShutDown));
/// ```
#[derive(Debug)]
pub struct StateSubscription {
    number: u64,
    /// Stage of the last change that this subscription returned.
    returned_stage: u64,
    watched: Arc<Watched>,
}

/// State with at least one subscription.
#[derive(Debug)]
struct Watched {
    state: Arc<DeviceState>,
}

/// Reads the fences of subscribed states.
static FENCE_POLLER: Poller = Poller::new("bursar-fence", FENCE_INTERVAL);

impl DeviceState {
    /// Subscribes to the changes of this state. A state that is stale already counts as a change.
    pub fn subscribe(self: &Arc<Self>) -> StateSubscription {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let watched = Arc::new(Watched {
            state: Arc::clone(self),
        });
        if self.fence.is_some() {
            let polled: Arc<dyn Polled> = Arc::clone(&watched) as _;
            FENCE_POLLER.add(Arc::downgrade(&polled));
        }
        StateSubscription {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            returned_stage: 0,
            watched,
        }
    }
}

impl StateSubscription {
    /// Returns the state.
    pub fn state(&self) -> &Arc<DeviceState> {
        &self.watched.state
    }

    /// Blocks the thread until the state changes, for at most `timeout`, and returns the new
    /// reason. [`Duration::MAX`] waits without an end.
    ///
    /// Returns `None` after `timeout`, and at once when [`StaleReason::ShutDown`] was returned
    /// before, because a state that was shut down changes no more.
    pub fn wait(&mut self, timeout: Duration) -> Option<StaleReason> {
        if self.is_final() {
            return None;
        }
        let deadline = Instant::now().checked_add(timeout);
        let (state, returned_stage) = (&self.watched.state, self.returned_stage);
        // Applies a fence that the agent has already set.
        let _ = state.check();
        let reason = state
            .waiters
            .wait_until(deadline, || state.later_than(returned_stage))?;
        self.returned_stage = reason.stage_number();
        Some(reason)
    }

    /// Waits in a task until the state changes. The future is cancellation safe, works under every
    /// executor, and blocks no thread.
    ///
    /// The output is `None` when [`StaleReason::ShutDown`] was returned before.
    pub fn changed(&mut self) -> StateChange<'_> {
        StateChange(self)
    }

    fn is_final(&self) -> bool {
        self.returned_stage == StaleReason::ShutDown.stage_number()
    }

    fn poll_change(&mut self, context: &Context<'_>) -> Poll<Option<StaleReason>> {
        if self.is_final() {
            return Poll::Ready(None);
        }
        let state = &self.watched.state;
        // Applies a fence that the agent has already set.
        let _ = state.check();
        // Registered before the look, so that a change after the look wakes the task.
        state.waiters.register(self.number, context.waker());
        match state.later_than(self.returned_stage) {
            Some(reason) => {
                state.waiters.forget(self.number);
                self.returned_stage = reason.stage_number();
                Poll::Ready(Some(reason))
            }
            None => Poll::Pending,
        }
    }
}

impl Drop for StateSubscription {
    fn drop(&mut self) {
        self.watched.state.waiters.forget(self.number);
    }
}

/// Future of the next change of a state.
#[derive(Debug)]
#[must_use = "a future does nothing unless it is awaited"]
pub struct StateChange<'a>(&'a mut StateSubscription);

impl Future for StateChange<'_> {
    type Output = Option<StaleReason>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll_change(context)
    }
}

impl Polled for Watched {
    /// Reads the fence. A check that finds a fence wakes the state's subscribers.
    fn poll(&self) {
        let _ = self.state.check();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::task::{Wake, Waker};
    use std::thread;

    use super::*;
    use crate::state::ErrorMonitor;
    use bursar_protocol::fence::Fence;

    /// Longer than a busy machine delays a thread.
    const LONG: Duration = Duration::from_secs(30);

    #[derive(Default)]
    struct FakeTask(AtomicBool);

    impl Wake for FakeTask {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    fn poll(changes: &mut StateSubscription, task: &Arc<FakeTask>) -> Poll<Option<StaleReason>> {
        let waker = Waker::from(Arc::clone(task));
        Pin::new(&mut changes.changed()).poll(&mut Context::from_waker(&waker))
    }

    #[test]
    fn task_is_woken_by_each_stage_and_ends_with_the_last() {
        let monitor = ErrorMonitor::new();
        let state = monitor.new_state();
        let (mut changes, task) = (state.subscribe(), Arc::new(FakeTask::default()));
        let changing: [(StaleReason, &dyn Fn()); 3] = [
            (StaleReason::Draining, &|| state.drain()),
            (StaleReason::Poisoned(700), &|| {
                monitor.observe(700, || unreachable!("a known code"));
            }),
            (StaleReason::ShutDown, &|| state.shut_down()),
        ];
        for (reason, change) in changing {
            assert_eq!(poll(&mut changes, &task), Poll::Pending);
            assert!(!task.0.load(Ordering::SeqCst));
            change();
            assert!(task.0.swap(false, Ordering::SeqCst), "{reason:?}");
            assert_eq!(poll(&mut changes, &task), Poll::Ready(Some(reason)));
        }
        assert_eq!(poll(&mut changes, &task), Poll::Ready(None));
        assert_eq!(changes.wait(Duration::MAX), None);
    }

    #[test]
    fn thread_is_woken_by_a_change() {
        let state = ErrorMonitor::new().new_state();
        let mut changes = state.subscribe();
        thread::scope(|scope| {
            let waiting = scope.spawn(move || changes.wait(LONG));
            state.drain();
            assert_eq!(waiting.join().ok(), Some(Some(StaleReason::Draining)));
        });
    }

    #[test]
    fn subscriber_of_a_stale_state_gets_the_reason_at_once() {
        let state = ErrorMonitor::new().new_state();
        state.drain();
        let mut changes = state.subscribe();
        assert_eq!(changes.wait(Duration::ZERO), Some(StaleReason::Draining));
        assert_eq!(changes.wait(Duration::ZERO), None);
    }

    #[test]
    fn agent_fence_wakes_a_subscriber_without_a_check() {
        static FENCE: AtomicU64 = AtomicU64::new(0);
        extern "C" fn fence() -> u64 {
            FENCE.load(Ordering::Relaxed)
        }
        let monitor = ErrorMonitor::new();
        monitor.set_fence_fn(fence);
        for _ in 0..2 {
            let state = monitor.new_state();
            let mut changes = state.subscribe();
            FENCE.store(Fence::Poisoned(719).word(), Ordering::Relaxed);
            assert_eq!(changes.wait(LONG), Some(StaleReason::Poisoned(719)));
            FENCE.store(0, Ordering::Relaxed);
            drop((changes, state));
            // The thread ends without subscriptions, and the next one starts it again.
            while FENCE_POLLER.is_running() {
                thread::sleep(FENCE_INTERVAL / 4);
            }
        }
    }

    #[test]
    fn dropped_subscription_leaves_no_waker() {
        let state = ErrorMonitor::new().new_state();
        let task = Arc::new(FakeTask::default());
        for _ in 0..100 {
            assert_eq!(poll(&mut state.subscribe(), &task), Poll::Pending);
        }
        assert_eq!(Arc::strong_count(&task), 1);
    }
}
