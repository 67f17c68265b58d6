//! Tells the API server about this node.
//!
//! | module | job |
//! |---|---|
//! | [`report`] | what the agent knows, in its own types |
//! | [`render`] | the `GpuNode` status that a report comes to: pure |
//! | [`publish`] | writes that status when it changed, at a bounded rate |
//! | [`object`] | makes and writes this node's `GpuNode` |
//! | [`orders`] | follows that object |
//! | [`spec`] | reads the orders in its spec: pure |
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
pub mod spec;

pub use events::{Events, PodRef, Reason};
pub use report::{
    FaultReport, GpuHealth, GpuReport, ImageReport, Memory, NamespaceReport, NodeReport,
    NotEnforcedReport, WaitingReport,
};
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
