//! What several tests and benchmarks share: a kubelet that is not one, and a small agent.

#![allow(dead_code, unreachable_pub, reason = "each test uses a part of it")]
#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

pub mod agent;
pub mod kubelet;

use std::time::{Duration, Instant};

/// The most that any test waits for anything.
pub const PATIENCE: Duration = Duration::from_secs(20);

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
