//! Answers probes and scrapes of metrics.

pub mod metrics;
pub mod probes;
