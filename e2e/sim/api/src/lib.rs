//! Simulates an API server, and injects faults between a client and any API server.
//!
//! | module | job |
//! |---|---|
//! | [`server`] | stores objects with their history in memory; serves lists, watches and writes |
//! | [`faults`] | disturbs writes and watches |
//!
//! Both run inside the test's process without sockets, so that time may be virtual
//! (`tokio::time::pause`).

pub mod faults;
pub mod server;

pub use faults::{Faults, FaultyWrites, WatchFault, WriteFault};
pub use server::SimApiServer;
