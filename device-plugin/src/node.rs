//! The node's own state: one task owns the ledger and its host, and everybody asks it.
//!
//! | module | job |
//! |---|---|
//! | [`actor`] | the task: takes commands one after the other, and the passing of time |
//! | [`allocator`] | carries the ledger's decisions out, in an order that survives crashes |
//! | [`cdi`] | writes the CDI spec of each container |
//! | [`driver_files`] | finds the driver's files on the host |
//! | [`pod_cgroups`] | watches the cgroups of the pods |
//! | [`shim_install`] | installs the shim's files on the node |
//! | [`recover`] | takes over from a predecessor |
//! | [`host`] | the steps on the host |
//! | [`installer`] | installs the shim's files beside the task |
//! | [`pod_resolver`] | finds out whose container the kubelet starts |
//! | [`pod_names`] | names pods whose names were not told then |
//! | [`gpu_capacity`] | GPUs and config as capacity and tokens: pure |
//! | [`checkpoint_state`] | what the checkpoint holds |
//! | [`report`] | what the node says of itself to the API server: pure |

pub mod actor;
pub mod allocator;
pub mod capacity;
pub mod cdi;
pub mod checkpoint_state;
pub mod driver_files;
pub mod host;
mod installer;
pub mod pod_cgroups;
mod pod_names;
pub mod pod_resolver;
mod recover;
pub mod report;
pub mod shim_install;
