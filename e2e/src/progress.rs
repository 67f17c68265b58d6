//! Progress lines on standard error: what is being done, and how long after the start.

use std::fmt::Display;
use std::io::Write;
use std::time::{Duration, Instant};

/// Prints progress lines, each with the seconds since it was made.
#[derive(Debug, Clone)]
pub struct Progress {
    start: Instant,
}

impl Progress {
    /// A progress whose clock starts now.
    pub fn start() -> Self {
        Self {
            start: Instant::now(),
        }
    }

    /// Prints one line. A closed standard error is no reason to stop working, so that is ignored.
    pub fn report(&self, what: impl Display) {
        let seconds = self.start.elapsed().as_secs_f64();
        let _ = writeln!(std::io::stderr(), "[{seconds:6.1}s] {what}");
    }

    /// Time since the start.
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }
}
