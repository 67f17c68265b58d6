//! Tests the audit: the agent, the simulated driver, the real shim, and programs in containers made
//! of their CDI files.
//!
//! An honest program causes no finding. A program that goes past the shim is found.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod common;

#[allow(dead_code, reason = "the agent's tests use the rest of it")]
#[path = "agent/machine.rs"]
mod machine;

#[allow(dead_code, reason = "the security tests use the rest of it")]
#[path = "security/api_server.rs"]
mod api_server;
#[path = "audit/container.rs"]
mod container;
#[path = "audit/devices.rs"]
mod devices;
#[path = "audit/faults.rs"]
mod faults;
#[path = "audit/findings.rs"]
mod findings;
#[allow(dead_code, reason = "the tests of leases use the rest of it")]
#[path = "leases/api.rs"]
mod gpu_node_api;
#[path = "audit/honest.rs"]
mod honest;
#[path = "audit/large.rs"]
mod large;
#[path = "audit/managed.rs"]
mod managed;
#[path = "audit/pid_reuse.rs"]
mod pid_reuse;
#[path = "audit/programs.rs"]
mod programs;
#[path = "audit/proof.rs"]
mod proof;
#[path = "audit/reclaim.rs"]
mod reclaim;
#[path = "audit/utilization.rs"]
mod utilization;
