//! Publishes this node's state as a `GpuNode` and as Events, and reads the operator's spec.
//!
//! | module | job |
//! |---|---|
//! | [`report`] | the node's state in the agent's types |
//! | [`render`] | builds the `GpuNode` status from a report: pure |
//! | [`publish`] | writes the status when it changed, at a bounded rate |
//! | [`api`] | creates this node's `GpuNode` and writes it |
//! | [`spec_watch`] | watches that object |
//! | [`spec`] | parses its spec: pure |
//! | [`quota_overrides`] | applies the spec's quotas to the sessions |
//! | [`events`] | publishes Events on the node and its pods |
//!
//! No pod's start depends on the API server: without it the agent works on, and publishes the state
//! later.

pub mod api;
pub mod events;
pub mod publish;
pub mod quota_overrides;
pub mod render;
pub mod report;
pub mod spec;
pub mod spec_watch;

pub use events::{Events, PodRef, Reason};
pub use report::{
    FaultReport, GpuHealth, GpuReport, ImageReport, MemoryReport, NamespaceReport, NodeReport,
    NotEnforcedReport, WaitingReport,
};
#[cfg(test)]
pub(crate) mod fixtures;
#[cfg(test)]
mod tests;
