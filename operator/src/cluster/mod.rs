//! Indexes what the watches report of the cluster.

mod agents;
mod aggregates;
mod cache;
pub mod facts;
mod index;
mod node_liveness;
pub mod nvidia_labels;
pub mod on_node;
pub mod own_writes;
mod pod_settings;
mod projections;
pub(crate) mod slim_metadata;
pub mod slim_node;
pub mod slim_pod;
pub(crate) mod ssa_diff;
pub mod unknown_values;
pub mod watch_liveness;
pub mod watches;

pub use cache::{Cache, CacheEntry, Key, project};
pub use index::{Affected, ClusterIndex, NamespaceWrite, WatchEvent, kinds};
pub use projections::{
    BudgetSummary, Capacity, ExclusionReason, GpuNamespaceSummary, GpuNodeSummary, OpenFault,
    QuotaOverrides, budget_label,
};
