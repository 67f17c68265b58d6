//! Calls the API server: reads, writes and Events.

pub mod client;
pub mod error;
pub(crate) mod events;
pub mod job_disruption;
pub mod read;
pub mod write;
