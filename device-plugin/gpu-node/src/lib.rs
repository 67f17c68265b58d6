//! Publishes this node's state as a `GpuNode` and as Events, and reads the operator's spec.
//!
//! | module | job |
//! |---|---|
//! | [`report`] | the node's state, without what a `GpuNode` keeps of its last status: pure |
//! | [`node_report`] | computes the report from a snapshot of the node: pure |
//! | [`carry_over`] | completes its status with what the last status knows: pure |
//! | `urgency` | decides which changes are written at once: pure |
//! | `summary` | describes the node in a few words for `kubectl get`: pure |
//! | [`publish`] | writes the status when it changed, at a bounded rate |
//! | [`quota_overrides`] | applies the spec's quotas to the sessions |
//!
//! No pod's start depends on the API server: without it the agent works on, and publishes the state
//! later.

pub mod carry_over;
pub mod node_report;
pub mod publish;
pub mod quota_overrides;
pub mod report;
mod summary;
mod urgency;

pub use report::{ExportedMemory, NodeReport};
#[cfg(any(test, feature = "testing"))]
pub mod fixtures;
#[cfg(test)]
mod tests;
