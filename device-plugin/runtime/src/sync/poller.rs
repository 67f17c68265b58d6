//! Calls values regularly in a thread that exists only while such values do.
#![forbid(unsafe_code)]

use std::sync::{Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

/// Value that a [`Poller`] calls.
pub(crate) trait Polled: Send + Sync {
    /// Looks for a change. The poller calls this from its own thread, without a lock.
    fn poll(&self);
}

/// Thread that calls registered values after each interval.
pub(crate) struct Poller {
    name: &'static str,
    interval: Duration,
    /// Registered values; `None` while the thread does not exist.
    polled: Mutex<Option<Vec<Weak<dyn Polled>>>>,
}

impl Poller {
    /// Creates a poller without a thread.
    pub(crate) const fn new(name: &'static str, interval: Duration) -> Poller {
        Poller {
            name,
            interval,
            polled: Mutex::new(None),
        }
    }

    /// Registers a value until it is dropped. Without a thread, which the system may refuse, the
    /// value is not called.
    pub(crate) fn add(&'static self, value: Weak<dyn Polled>) {
        let mut polled = self.polled.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(all) = &mut *polled {
            all.push(value);
            return;
        }
        let thread = thread::Builder::new().name(self.name.to_owned());
        if thread.spawn(|| self.run()).is_ok() {
            *polled = Some(vec![value]);
        }
    }

    /// Calls the values until none is left.
    fn run(&self) {
        loop {
            let alive: Vec<_> = {
                let mut polled = self.polled.lock().unwrap_or_else(PoisonError::into_inner);
                let all = polled.get_or_insert_default();
                all.retain(|value| value.strong_count() > 0);
                if all.is_empty() {
                    *polled = None;
                    return;
                }
                all.iter().filter_map(Weak::upgrade).collect()
            };
            for value in alive {
                value.poll();
            }
            thread::sleep(self.interval);
        }
    }

    /// Returns whether the thread exists.
    #[cfg(test)]
    pub(crate) fn is_running(&self) -> bool {
        let polled = self.polled.lock();
        polled.unwrap_or_else(PoisonError::into_inner).is_some()
    }
}
