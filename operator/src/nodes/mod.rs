//! Orders to the agents in `GpuNode.spec`, and the budget label of namespaces.

pub mod context_policies;
pub mod namespace_label;
pub(crate) mod ssa_diff;
