//! Prints progress lines on standard error with the time since the start.

use std::fmt::Display;
use std::io::Write;
use std::time::{Duration, Instant};

/// Prints progress lines, each with the seconds since its creation.
#[derive(Debug, Clone)]
pub struct Progress {
    start: Instant,
}

impl Progress {
    /// Starts the clock.
    pub fn start() -> Self {
        Self {
            start: Instant::now(),
        }
    }

    /// Prints one line. A closed standard error must not stop the work, so its error is ignored.
    pub fn report(&self, what: impl Display) {
        let seconds = self.start.elapsed().as_secs_f64();
        let _ = writeln!(std::io::stderr(), "[{seconds:6.1}s] {what}");
    }

    /// Returns the time since the start.
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }
}
