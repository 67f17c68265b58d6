//! Tests retained memory: the agent, a real fd store, real provisioners, the simulated driver, and
//! tenants as processes.
//!
//! Retained memory outlives all of these processes except the fd store. Memory that a process
//! leaves behind stays charged until no process maps it.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod common;

#[allow(dead_code, reason = "the agent's tests use the rest of it")]
#[path = "agent/machine.rs"]
mod machine;

#[allow(dead_code, reason = "the audit's tests use the rest of it")]
#[path = "audit/container.rs"]
mod container;

#[path = "leases/alone.rs"]
mod alone;
#[path = "leases/api.rs"]
mod api;
#[path = "leases/bed.rs"]
mod bed;
#[path = "leases/drained.rs"]
mod drained;
#[path = "leases/ends.rs"]
mod ends;
#[path = "leases/lives.rs"]
mod lives;
#[path = "leases/measured.rs"]
mod measured;
#[path = "leases/real.rs"]
mod real;
#[path = "leases/shared.rs"]
mod shared;
#[path = "leases/storm.rs"]
mod storm;
#[path = "leases/stuck.rs"]
mod stuck;
#[path = "leases/tenant.rs"]
mod tenant;
#[path = "leases/tokens.rs"]
mod tokens;
