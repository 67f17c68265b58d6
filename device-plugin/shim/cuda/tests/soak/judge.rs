//! Collects the violations that any thread sees.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The most violations that are printed.
const MOST: usize = 50;

/// Collects violations.
#[derive(Debug)]
pub(crate) struct Judge {
    start: Instant,
    violations: Mutex<Vec<String>>,
}

impl Judge {
    /// Creates an empty list.
    pub(crate) fn new() -> Judge {
        Judge {
            start: Instant::now(),
            violations: Mutex::default(),
        }
    }

    /// Records a violation, with the time since the run began.
    pub(crate) fn violation(&self, what: impl AsRef<str>) {
        let mut violations = self.lock();
        if violations.len() < MOST {
            let text = format!("{:.3?}: {}", self.start.elapsed(), what.as_ref());
            println!("violation at {text}");
            violations.push(text);
        }
    }

    /// Records a violation unless the condition holds.
    pub(crate) fn hold(&self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.violation(what());
        }
    }

    /// Records a violation if a call took longer than allowed.
    pub(crate) fn in_time(&self, who: &str, nanoseconds: u64, most: Duration) {
        let took = Duration::from_nanos(nanoseconds);
        self.hold(took <= most, || {
            format!("{who} took {took:?}, at most {most:?} is right")
        });
    }

    /// Returns the recorded violations.
    pub(crate) fn violations(&self) -> Vec<String> {
        self.lock().clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<String>> {
        self.violations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
