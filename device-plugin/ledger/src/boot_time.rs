//! Defines the time of events.

use std::ops::Add;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Milliseconds of `CLOCK_BOOTTIME`. The clock only grows within a boot and continues while the
/// agent is down. So times in a checkpoint mean the same to the next agent.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct BootTime(pub u64);

impl BootTime {
    /// The time since `earlier`; zero where that is not earlier.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for BootTime {
    type Output = Self;

    fn add(self, span: Duration) -> Self {
        Self(self.0.saturating_add(span.as_millis() as u64))
    }
}
