//! Calls the API server: reads, writes, Events, and the client for them.

pub mod client;
pub(crate) mod events;
pub mod job_disruption;
pub mod read;
pub mod write;
