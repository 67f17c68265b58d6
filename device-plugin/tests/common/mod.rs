//! What several tests and benchmarks share: a kubelet that is not one, and a small agent.

#![allow(dead_code, unreachable_pub, reason = "each test uses a part of it")]
#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

pub mod agent;
pub mod kubelet;
pub mod node;

use std::time::{Duration, Instant};

/// The most that any test waits for anything.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Looks until `reached` says so; how long that took.
///
/// # Panics
/// After [`PATIENCE`].
pub async fn eventually(what: &str, mut reached: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !reached() {
        assert!(start.elapsed() < PATIENCE, "not reached: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    start.elapsed()
}

/// Holds a promise on the best of three: a busy machine may break it now and then, a wrong agent breaks it every time.
///
/// # Panics
/// When three in a row took longer.
pub async fn in_time(promise: Duration, attempt: impl AsyncFn() -> Duration) {
    let mut times = Vec::new();
    while times.last().is_none_or(|last| *last >= promise) {
        assert!(times.len() < 3, "each took {promise:?} or more: {times:?}");
        times.push(attempt().await);
    }
    println!("took {times:?}");
}

/// Holds a promise on the median, and five times as much on each: a busy machine may break it now and then.
///
/// # Panics
/// When it is not held.
pub fn in_time_as_a_rule(promise: Duration, what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let (count, median, worst) = (times.len(), times[times.len() / 2], times[times.len() - 1]);
    println!("{what}: of {count}, median {median:?}, worst {worst:?}");
    assert!(median < promise && worst < 5 * promise, "{times:?}");
}
