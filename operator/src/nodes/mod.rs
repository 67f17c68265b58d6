//! Writes orders to the agents in `GpuNode.spec`, reports agents that are away, and removes the
//! label of namespaces without a budget.

pub mod absent_agents;
pub mod context_policies;
pub mod maintenance;
pub mod namespace_label;
pub mod pod_settings;
