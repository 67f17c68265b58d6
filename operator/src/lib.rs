//! Keeps each namespace's `GpuMemoryBudget` in force, and helps pods to GPU memory.
//!
//! ```text
//!   watches --> cluster --+--> budget -----> api --> ResourceQuotas, statuses, evictions
//!               (index)   |--> placement --> api --> labels, reservations, evictions
//!                         +--> nodes ------> api --> orders to agents, namespace labels
//! ```
//!
//! | module | job |
//! |---|---|
//! | [`cli`] | parses the command line |
//! | [`run`](mod@run) | starts the tasks and joins them |
//! | [`cluster`] | watches the cluster and indexes what the operator needs of it |
//! | [`budget`] | reconciles one budget: conditions, quotas, evictions; evicts without one too |
//! | [`placement`] | plans for pending pods: labels, reservations, preemption, relocation |
//! | [`leader`] | elects one of the replicas by a Lease |
//! | [`nodes`] | writes context policies to agents; unlabels namespaces without a budget |
//! | [`api`] | calls the API server |
//! | [`serve`] | answers probes and metric scrapes |
//! | [`quanta`] | counts memory in whole quanta |
//! | [`clock`] | names the type of the wall clock |

pub mod api;
pub mod budget;
pub mod cli;
pub mod clock;
pub mod cluster;
mod error;
pub mod leader;
pub mod nodes;
pub mod placement;
#[cfg(test)]
mod property_cases;
pub mod quanta;
pub mod run;
pub mod serve;
