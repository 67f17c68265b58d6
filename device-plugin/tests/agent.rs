//! Tests the agent as a process, between a fake kubelet and the simulated driver.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod common;

#[path = "agent/machine.rs"]
mod machine;

#[path = "agent/crash_points.rs"]
mod crash_points;
#[path = "agent/degraded_node.rs"]
mod degraded_node;
#[path = "agent/descriptors.rs"]
mod descriptors;
#[path = "agent/exhausted.rs"]
mod exhausted;
#[path = "agent/growth.rs"]
mod growth;
#[path = "agent/hangs.rs"]
mod hangs;
#[path = "agent/limits.rs"]
mod limits;
#[path = "agent/memory.rs"]
mod memory;
#[path = "agent/observability.rs"]
mod observability;
#[path = "agent/restarts.rs"]
mod restarts;
