//! What was seen to be wrong, by all who look.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A run that goes wrong everywhere need not say so a million times.
const MOST: usize = 50;

/// Collects violations.
#[derive(Debug)]
pub(crate) struct Judge {
    begun: Instant,
    violations: Mutex<Vec<String>>,
}

impl Judge {
    /// Nothing seen yet.
    pub(crate) fn new() -> Judge {
        Judge {
            begun: Instant::now(),
            violations: Mutex::default(),
        }
    }

    /// Notes a violation, with the time since the run began.
    pub(crate) fn violation(&self, what: impl AsRef<str>) {
        let mut violations = self.lock();
        if violations.len() < MOST {
            let text = format!("{:.3?}: {}", self.begun.elapsed(), what.as_ref());
            println!("violation at {text}");
            violations.push(text);
        }
    }

    /// Notes a violation unless it holds.
    pub(crate) fn hold(&self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.violation(what());
        }
    }

    /// Notes a violation if a call took longer than it may.
    pub(crate) fn in_time(&self, who: &str, nanoseconds: u64, most: Duration) {
        let took = Duration::from_nanos(nanoseconds);
        self.hold(took <= most, || {
            format!("{who} took {took:?}, at most {most:?} is right")
        });
    }

    /// What was noted.
    pub(crate) fn violations(&self) -> Vec<String> {
        self.lock().clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<String>> {
        self.violations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
