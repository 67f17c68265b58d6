//! The node agent, as a library: `main` and the tests put its parts together.
//!
//! A request's way: the kubelet asks, the ledger decides, the node carries out.

pub mod agent;
pub mod checkpoint;
pub mod clock;
pub mod config;
pub mod container_runtime;
pub mod enforcement;
pub mod gpu;
pub mod gpu_node;
pub mod kubelet;
pub mod metrics;
pub mod node;
pub mod procfs;
pub mod retained;
pub mod sessions;

pub use bursar_ledger as ledger;
pub use bursar_ledger::units;
