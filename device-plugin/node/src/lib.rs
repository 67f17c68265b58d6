//! Binds GPU memory to the node's containers: one task owns the ledger and the host's state.
//!
//! | module | job |
//! |---|---|
//! | [`actor`] | runs the task that handles commands one after the other |
//! | [`allocator`] | carries out the ledger's decisions in an order that survives crashes |
//! | [`cdi`] | writes each container's CDI spec |
//! | [`shim_install`] | installs the shim's files on the node |
//! | [`recover`] | restores the state of the agent that ran before |
//! | [`host`] | defines the steps on the host and performs them |
//! | [`installer`] | installs the shim's files without blocking the task |
//! | [`pod_resolver`] | resolves device ids to the container that the kubelet starts |
//! | [`shared_read`] | reads a file on one blocking thread while its disk hangs |
//! | [`other_plugins`] | looks for another device plugin that offers this node's GPUs |
//! | [`capacity`] | computes capacity and devices from GPUs and configuration: pure |
//! | [`metrics`] | counts allocations and times the kubelet's calls |
//! | [`checkpoint_state`] | defines the content of the checkpoint |

pub mod actor;
pub mod allocator;
pub mod capacity;
pub mod cdi;
pub mod checkpoint_state;
pub mod host;
mod installer;
pub mod metrics;
pub mod other_plugins;
pub mod pod_resolver;
mod recover;
mod shared_read;
pub mod shim_install;
