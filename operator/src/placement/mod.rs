//! Helps pods to a GPU where the scheduler, which sees node totals only, cannot.
//!
//! ```text
//!   the watches --> Landscape (pure index) --> plan (pure) --> steps --> act: one write each --> Memory
//!                                               ^                                               |
//!                                               +--- what was tried, and when ------------------+
//! ```
//!
//! | module | job |
//! |---|---|
//! | [`pod`], [`node`] | what is kept of pods, nodes and their GPUs |
//! | [`load`] | what pods take of nodes beside GPU memory |
//! | `matching` | whether a pod may be on a node |
//! | [`landscape`] | all of it, indexed |
//! | [`plan`] | from that to steps: node labels, moves, reservations and evictions, quotas |
//! | [`memory`] | what was tried, which the cluster does not show |
//! | `act` | carries a step out |
//! | [`run`](mod@run) | the task |
//!
//! Everything that must not be forgotten is in the cluster: who is held a GPU is in `GpuNode.spec`, who has to go
//! carries a deletion time. An operator that starts anew finds the same plan.

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
