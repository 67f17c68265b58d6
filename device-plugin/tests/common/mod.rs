//! Shares fixtures between tests and benchmarks: a fake kubelet and a small agent.

#![allow(dead_code, unreachable_pub, reason = "each test uses a part of it")]
#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

pub mod agent;
pub mod kubelet;
pub mod node;
pub mod steps;

use std::time::{Duration, Instant};

/// The longest time that a test waits for a condition.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Polls until `reached` returns true. Returns the time that this took.
///
/// # Panics
/// After [`PATIENCE`].
pub async fn eventually(description: &str, mut reached: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !reached() {
        assert!(start.elapsed() < PATIENCE, "not reached: {description}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    start.elapsed()
}

/// Checks a promise by the first attempt, or by both of two more. A busy machine may miss the time
/// now and then.
///
/// # Panics
/// When two attempts took longer.
pub async fn assert_within(promise: Duration, attempt: impl AsyncFn() -> Duration) {
    let mut times = vec![attempt().await];
    if times[0] >= promise {
        times.extend([attempt().await, attempt().await]);
        assert!(times[1..].iter().all(|time| *time < promise), "{times:?}");
    }
    println!("took {times:?}");
}

/// Checks a promise by the median, and five times the promise by each. A busy machine may miss the
/// time now and then.
///
/// # Panics
/// When the median or the worst time is too long.
pub fn assert_median_within(promise: Duration, description: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let (count, median, worst) = (times.len(), times[times.len() / 2], times[times.len() - 1]);
    println!("{description}: of {count}, median {median:?}, worst {worst:?}");
    assert!(median < promise && worst < 5 * promise, "{times:?}");
}
