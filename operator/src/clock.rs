//! Names the type of the wall clock.

use k8s_openapi::jiff::Timestamp;

/// Reads the wall clock for timestamps that people read. Decisions use the monotonic clock.
pub type Clock = fn() -> Timestamp;
