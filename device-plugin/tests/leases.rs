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

#[path = "leases/api.rs"]
mod api;
#[path = "leases/chaos.rs"]
mod chaos;
#[path = "leases/crash_points.rs"]
mod crash_points;
#[path = "leases/drained.rs"]
mod drained;
#[path = "leases/ends_of_lease.rs"]
mod ends_of_lease;
#[path = "leases/fixture.rs"]
mod fixture;
#[path = "leases/hung_provisioner.rs"]
mod hung_provisioner;
#[path = "leases/measured.rs"]
mod measured;
#[path = "leases/offline.rs"]
mod offline;
#[path = "leases/runtime_client.rs"]
mod runtime_client;
#[path = "leases/shared.rs"]
mod shared;
#[path = "leases/supervised.rs"]
mod supervised;
#[path = "leases/survives.rs"]
mod survives;
#[path = "leases/tenant_process.rs"]
mod tenant_process;
#[path = "leases/tokens.rs"]
mod tokens;
