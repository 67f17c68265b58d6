//! Defines Bursar's Kubernetes API: `GpuMemoryBudget`, `GpuNode` and `GpuNamespace`.
//!
//! The chart's CRD templates and `docs/use/reference/api.md` are generated from these types. The
//! test `generated` fails if they are stale. `BURSAR_UPDATE=1 cargo test -p bursar-crds` writes
//! them.

pub mod amount;
pub mod budget;
pub mod conditions;
pub mod context_policy;
pub mod gpu_namespace;
pub mod gpu_node;
pub mod numbers;
pub mod pod_total;
pub mod quantity;
pub mod resources;
mod schema;
pub mod shares;

pub use amount::Amount;
pub use budget::{GpuMemoryBudget, GpuMemoryBudgetSpec, GpuMemoryBudgetStatus};
pub use gpu_namespace::{GpuNamespace, GpuNamespaceSpec};
pub use gpu_node::{GpuNode, GpuNodeSpec, GpuNodeStatus};
pub use resources::Quantum;

/// The API group of every kind here.
pub const GROUP: &str = "bursar.dev";

/// Field manager of the operator's server-side applies.
pub const OPERATOR_MANAGER: &str = "bursar-operator";

/// Field manager of the agent's server-side applies.
pub const AGENT_MANAGER: &str = "bursar-agent";

/// Node label that puts a node into a cohort. A node without it is in [`DEFAULT_COHORT`].
pub const COHORT_LABEL: &str = "bursar.dev/cohort";

/// The cohort of budgets and nodes that name none.
pub const DEFAULT_COHORT: &str = "default";
