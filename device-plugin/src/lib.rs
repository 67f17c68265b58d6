//! Runs the node agent: binds GPU memory to pods and holds them to their quotas.
//!
//! The kubelet's calls arrive in [`kubelet`], the ledger decides, and [`node`] carries out the
//! decision.

pub mod agent;
pub mod container_runtime;
