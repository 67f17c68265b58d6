//! A simulated API server, and a layer of faults between a client and any API server.
//!
//! | module | job |
//! |---|---|
//! | [`server`] | keeps objects with their history in memory, and answers lists, watches and writes |
//! | [`faults`] | spoils writes and watches on their way |
//!
//! Both work in the process of the test, without sockets: time may be virtual
//! (`tokio::time::pause`).

pub mod faults;
pub mod server;

pub use faults::{Faults, FaultyWrites, WatchFault, WriteFault};
pub use server::SimApiServer;
