//! The node agent, as a library: `main` and the tests put its parts together.
//!
//! A request's way: the kubelet asks, the ledger decides, the node carries out.

pub mod agent;
pub mod attest;
pub mod audit;
pub mod cdi;
pub mod checkpoint;
pub mod config;
pub mod drain;
pub mod driver;
pub mod http;
pub mod inventory;
pub mod kept;
pub mod kubelet;
pub mod limits;
pub mod metrics;
pub mod node;
pub mod pods;
pub mod poison;
pub mod proc;
pub mod resize;
pub mod runtime;
pub mod sessions;
pub mod shim_files;
pub mod status;
pub mod tokens;

pub use bursar_ledger as ledger;
pub use bursar_ledger::units;
