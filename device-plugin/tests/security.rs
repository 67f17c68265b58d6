//! Tests the agent under hostile tenants. A neighbour is answered as fast as before, and afterwards
//! the agent uses no more resources than before. [`fixture`] describes how to add a load.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod common;

#[allow(dead_code, reason = "the agent's tests use the rest of it")]
#[path = "agent/machine.rs"]
mod machine;

#[path = "security/adversary.rs"]
mod adversary;
#[path = "security/api_server.rs"]
mod api_server;
#[path = "security/events.rs"]
mod events;
#[path = "security/fixture.rs"]
mod fixture;
#[path = "security/http.rs"]
mod http;
#[path = "security/oracles.rs"]
mod oracles;
#[path = "security/socket.rs"]
mod socket;
