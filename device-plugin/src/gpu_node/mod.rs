//! Tells the API server about this node.
//!
//! | module | job |
//! |---|---|
//! | [`report`] | what the agent knows, in its own types |
//! | [`render`] | the `GpuNode` status that a report comes to: pure |
//! | [`publish`] | writes that status when it changed, at a bounded rate |
//! | [`api_error`] | makes and writes this node's `GpuNode` |
//! | [`spec_watch`] | follows that object |
//! | [`build_spec`] | reads the orders in its spec: pure |
//! | [`events`] | Events on the node and its pods, bounded in kind, number and rate |
//!
//! Nothing here is on a pod's way: with the API server away the agent works on, and says later what
//! is true then.

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
