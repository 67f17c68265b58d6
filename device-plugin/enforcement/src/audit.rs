//! Audits the memory that programs have against the agent's accounts, and acts on differences.
//!
//! | module | job |
//! |---|---|
//! | [`collect`] | asks NVML about every GPU, with a deadline |
//! | [`compare`] | compares the driver's figures with the accounts: pure |
//! | `device_users` | finds processes of pods that have the driver's device nodes mapped |
//! | `listings` | remembers since when the driver lists each process: pure |
//! | [`consecutive`] | counts in how many audits a finding was present: pure |
//! | [`policy`] | decides what follows a finding: pure |
//! | `pod_attestations` | probes the containers of each pod, and leaves out a pod that hangs |
//! | `probe_queue` | runs the probes of pods on a few threads |
//! | [`kill`] | kills a process, and never another one that reuses its pid |
//! | [`namespace_usage`] | sums usage by namespace, for the budget's status: pure |
//! | [`events`] | publishes Events about findings and denials |
//! | `denials` | decides when denied allocations become an Event: pure |
//! | `withheld` | decides how much memory of each GPU is withheld: pure |
//! | [`task`] | runs an audit each second |

pub mod collect;
pub mod compare;
pub mod consecutive;
mod denials;
mod device_users;
pub mod events;
pub mod kill;
mod listings;
pub mod metrics;
pub mod namespace_usage;
mod pod_attestations;
pub mod policy;
mod probe_queue;
mod settle;
pub mod task;
mod withheld;

pub use task::{AuditInputs, AuditStatus, Auditor};
