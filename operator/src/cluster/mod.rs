//! Indexes what the watches report of the cluster.

mod aggregates;
mod cache;
mod index;
mod node_liveness;
pub mod on_node;
pub mod own_writes;
pub mod pod_request;
mod projections;
pub(crate) mod slim_metadata;
pub mod unknown_values;
pub mod watch_liveness;
pub mod watches;

pub use cache::{Entry, Key, Mirror, slimmed};
pub use index::{Change, ContextOrders, Dirty, World, kinds};
pub use projections::{Claim, Gpus, Host, LeftOut, Offer, OpenFault, budget_label};
