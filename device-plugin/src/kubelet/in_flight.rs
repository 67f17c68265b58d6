//! Counts things that are alive, so that others can wait for a change.

use std::sync::Arc;

use tokio::sync::watch;

/// How many there are, and how many there ever were.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Count {
    /// Alive at this moment.
    pub(super) now: u32,
    /// Begun since the counter was made; never falls.
    pub(super) ever: u64,
}

/// A counter whose guards count themselves out.
#[derive(Debug, Clone, Default)]
pub(super) struct Counter(Arc<watch::Sender<Count>>);

impl Counter {
    /// Counts one more until the guard is dropped.
    pub(super) fn enter(&self) -> Counted {
        self.0.send_modify(|count| {
            count.now += 1;
            count.ever += 1;
        });
        Counted(self.clone())
    }

    /// Waits until the count is such.
    pub(super) async fn until(&self, such: impl FnMut(&Count) -> bool) {
        let mut count = self.0.subscribe();
        // The sender lives in `self`, so there is no error.
        let _such = count.wait_for(such).await.is_ok();
    }

    /// The count at this moment.
    pub(super) fn get(&self) -> Count {
        *self.0.borrow()
    }
}

/// One counted thing.
#[derive(Debug)]
pub(super) struct Counted(Counter);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.0.send_modify(|count| count.now -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_guard_is_no_longer_counted_but_was_there() {
        let counter = Counter::default();
        let first = counter.enter();
        let second = counter.enter();
        assert_eq!(counter.get(), Count { now: 2, ever: 2 });
        drop(first);
        assert_eq!(counter.get(), Count { now: 1, ever: 2 });
        drop(second);
        assert_eq!(counter.get(), Count { now: 0, ever: 2 });
    }
}
