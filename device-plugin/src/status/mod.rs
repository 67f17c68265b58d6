//! Tells the API server about this node.
//!
//! | module | job |
//! |---|---|
//! | [`report`] | what the agent knows, in its own types |
//! | [`render`] | the `GpuNode` status that a report comes to: pure |
//! | [`publish`] | writes that status when it changed, at a bounded rate |
//! | [`object`] | the API calls on this node's `GpuNode` |
//! | [`orders`] | follows what is ordered in it |
//! | [`events`] | Events on the node and its pods, bounded in kind, number and rate |
//!
//! Nothing here is on a pod's way: with the API server away the agent works on, and says later what
//! is true then.

pub mod events;
pub mod object;
pub mod orders;
pub mod publish;
pub mod render;
pub mod report;

pub use events::{Events, PodRef, Reason};
pub use publish::run;
pub use report::{
    FaultReport, GpuHealth, GpuReport, ImageReport, Memory, NamespaceReport, NodeReport,
    NotEnforcedReport, WaitingReport,
};
#[cfg(test)]
pub(crate) mod testing;
