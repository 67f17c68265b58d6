//! Calls values regularly in a thread that exists only while such values do.
#![forbid(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

/// Value that a [`Poller`] calls.
pub trait Polled: Send + Sync {
    /// Looks for a change. The poller calls this from its own thread, without a lock.
    fn poll(&self);
}

/// Thread that calls registered values after each interval.
pub struct Poller {
    name: &'static str,
    interval: Duration,
    /// Registered values; `None` while the thread does not exist.
    polled: Mutex<Option<Vec<Weak<dyn Polled>>>>,
}

impl Poller {
    /// Creates a poller without a thread.
    pub const fn new(name: &'static str, interval: Duration) -> Poller {
        Poller {
            name,
            interval,
            polled: Mutex::new(None),
        }
    }

    /// Registers a value until it is dropped. Without a thread, which the system may refuse, the
    /// value is not called.
    pub fn add(&'static self, value: Weak<dyn Polled>) {
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
                // A panic of a program's function must not end the thread for the other values.
                let _ = catch_unwind(AssertUnwindSafe(|| value.poll()));
            }
            thread::sleep(self.interval);
        }
    }

    /// Returns whether the thread exists.
    #[cfg(test)]
    pub fn is_running(&self) -> bool {
        let polled = self.polled.lock();
        polled.unwrap_or_else(PoisonError::into_inner).is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    struct Panic;

    impl Polled for Panic {
        fn poll(&self) {
            panic!("no luck");
        }
    }

    struct Report(Sender<()>);

    impl Polled for Report {
        fn poll(&self) {
            // The test may have ended.
            let _ = self.0.send(());
        }
    }

    #[test]
    fn poller_goes_on_after_a_value_panicked() {
        static POLLER: Poller = Poller::new("test", Duration::from_millis(1));
        let (sender, polls) = channel();
        let values: [Arc<dyn Polled>; 2] = [Arc::new(Panic), Arc::new(Report(sender))];
        for value in &values {
            POLLER.add(Arc::downgrade(value));
        }
        for _ in 0..3 {
            let polled = polls.recv_timeout(Duration::from_secs(30));
            polled.expect("the thread goes on");
        }
    }
}
