//! The node's own state: one task owns the ledger and its host, and everybody asks it.
//!
//! | module | job |
//! |---|---|
//! | [`actor`] | the task: takes commands one after the other, and the passing of time |
//! | [`core`] | carries the ledger's decisions out, in an order that survives crashes |
//! | [`recover`] | takes over from a predecessor |
//! | [`host`] | the steps on the host |
//! | [`installer`] | installs the shim's files beside the task |
//! | [`identity`] | finds out whose container the kubelet starts |
//! | [`names`] | names pods whose names were not told then |
//! | [`offer`] | GPUs and config as capacity and tokens: pure |
//! | [`state`] | what the checkpoint holds |
//! | [`report`] | what the node says of itself to the API server: pure |
//! | [`generations`] | how often each GPU's memory was lost |
//! | [`clock`] | the time since boot |

pub mod actor;
pub mod clock;
pub mod core;
pub mod generations;
pub mod host;
pub mod identity;
mod installer;
mod names;
pub mod offer;
mod recover;
pub mod report;
pub mod state;
