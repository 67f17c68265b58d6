//! Counts streams and calls in flight, and lets others wait for a change.

use std::sync::Arc;

use tokio::sync::watch;

/// The present number and the total.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct InFlightCount {
    /// The number in flight.
    pub(super) now: u32,
    /// The number ever started, which never decreases.
    pub(super) total: u64,
}

/// A counter whose guards decrement it when dropped.
#[derive(Debug, Clone, Default)]
pub(super) struct InFlight(Arc<watch::Sender<InFlightCount>>);

impl InFlight {
    /// Counts one more until the guard is dropped.
    pub(super) fn start(&self) -> InFlightGuard {
        self.0.send_modify(|count| {
            count.now += 1;
            count.total += 1;
        });
        InFlightGuard(self.clone())
    }

    /// Waits until the count satisfies `such`.
    pub(super) async fn wait_until(&self, such: impl FnMut(&InFlightCount) -> bool) {
        let mut count = self.0.subscribe();
        // `self` has the sender, so the channel cannot be closed.
        let _such = count.wait_for(such).await.is_ok();
    }

    /// The present count.
    pub(super) fn get(&self) -> InFlightCount {
        *self.0.borrow()
    }
}

/// The guard of one counted call or stream.
#[derive(Debug)]
pub(super) struct InFlightGuard(InFlight);

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.0.0.send_modify(|count| count.now -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_guard_leaves_the_count_and_stays_in_the_total() {
        let counter = InFlight::default();
        let first = counter.start();
        let second = counter.start();
        assert_eq!(counter.get(), InFlightCount { now: 2, total: 2 });
        drop(first);
        assert_eq!(counter.get(), InFlightCount { now: 1, total: 2 });
        drop(second);
        assert_eq!(counter.get(), InFlightCount { now: 0, total: 2 });
    }
}
