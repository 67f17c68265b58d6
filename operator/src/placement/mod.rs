//! Helps pending pods to a GPU. The scheduler cannot, because it sees node totals only.
//!
//! ```text
//!   watches --> ClusterIndex --> plan (pure) --> steps --> apply: one write each --> History
//!                                  ^                                                  |
//!                                  +--------------- attempts and times ---------------+
//! ```
//!
//! | module | job |
//! |---|---|
//! | [`facts`](crate::cluster::facts) | reduces the cluster to what the planner needs |
//! | `filters` | checks a node against a pod's constraints |
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
pub mod plan;

pub use plan::PlacementOptions;
