//! Indexes pods, nodes and GPUs for the placement planner.
//!
//! | module | job |
//! |---|---|
//! | [`pod`], [`node`] | reduce pods, nodes and GPUs to what the planner needs |
//! | [`node_usage`] | sums what pods request of nodes beside GPU memory |
//! | [`snapshot`] | indexes all of it, and takes a snapshot for each plan |

pub mod node;
pub mod node_usage;
pub mod pod;
pub mod snapshot;
