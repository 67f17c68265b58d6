//! Counts things that are alive, so that others can wait for a change.

use std::sync::Arc;

use tokio::sync::watch;

/// How many there are, and how many there ever were.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct InFlightCount {
    /// Alive at this moment.
    pub(super) now: u32,
    /// Begun since the counter was made; never falls.
    pub(super) total: u64,
}

/// A counter whose guards count themselves out.
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

    /// Waits until the count is such.
    pub(super) async fn wait_until(&self, such: impl FnMut(&InFlightCount) -> bool) {
        let mut count = self.0.subscribe();
        // The sender lives in `self`, so there is no error.
        let _such = count.wait_for(such).await.is_ok();
    }

    /// The count at this moment.
    pub(super) fn get(&self) -> InFlightCount {
        *self.0.borrow()
    }
}

/// One counted thing.
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
