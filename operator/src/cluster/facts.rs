//! Reduces Pods, Nodes and GpuNodes to the facts that budgets and the planner need.
//!
//! | module | job |
//! |---|---|
//! | [`pod`], [`node`] | reduce pods, nodes and GPUs |
//! | [`pod_on_node`] | reduces a pod to what its node's agent must know |
//! | [`pod_request`] | adds up what a pod's containers request |
//! | [`node_usage`] | sums what pods request of nodes beside GPU memory |
//! | [`snapshot`] | takes a view of the index for each plan |

pub mod node;
pub mod node_usage;
pub mod pod;
pub mod pod_on_node;
pub mod pod_request;
pub mod snapshot;
