//! Helps pending pods to a GPU. The scheduler cannot, because it sees node totals only.
//!
//! ```text
//!   watches --> PlacementIndex --> plan (pure) --> steps --> apply: one write each --> History
//!                                    ^                                                  |
//!                                    +--------------- attempts and times ---------------+
//! ```
//!
//! | module | job |
//! |---|---|
//! | [`pod`], [`node`] | reduce pods, nodes and GPUs to what the planner needs |
//! | [`node_usage`] | sums what pods request of nodes beside GPU memory |
//! | `filters` | checks a node against a pod's constraints |
//! | [`snapshot`] | indexes all of it for one plan |
//! | [`plan`] | plans labels, relocations, reservations, preemption, quota overrides |
//! | [`history`] | remembers attempts, which the cluster does not show |
//! | `apply` | applies one step |
//! | [`controller`] | runs plans and steps |
//!
//! The cluster itself holds what must survive: reservations are in `GpuNode.spec`, victims have a
//! deletion timestamp. A restarted operator makes the same plan.

mod apply;
pub mod controller;
mod filters;
pub mod history;
pub mod node;
pub mod node_usage;
pub mod plan;
pub mod pod;
pub mod snapshot;

pub use plan::PlacementOptions;
pub use snapshot::{PlacementEvent, PlacementIndex};
