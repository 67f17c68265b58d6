//! Serves probes and metrics.

pub mod metrics;
pub mod probes;
