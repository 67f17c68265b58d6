//! Runs the node agent: binds GPU memory to pods and holds them to their quotas.
//!
//! The kubelet's calls arrive in [`kubelet`], the ledger decides, and [`node`] carries out the
//! decision.

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
