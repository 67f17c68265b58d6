//! The operator: keeps each namespace's `GpuMemoryBudget` in force, and publishes what it comes to.
//!
//! ```text
//!   watches --> observe --> world (pure index) --> dirty budgets, gathered --> plan (pure) --> write
//!               budgets, pods, GpuNodes, Nodes, quotas, namespaces             empty: nothing
//! ```
//!
//! | module | job |
//! |---|---|
//! | [`args`] | the command line |
//! | [`observe`] | turns watches into changes of the world, and those into work |
//! | [`ahead`] | what was written itself is known before the watch tells |
//! | [`world`] | what is known of the cluster: pure |
//! | [`demand`] | what a pod asks for: pure |
//! | [`budget`] | from a budget and the facts to what is to be done and said: pure |
//! | [`quanta`] | amounts in whole quanta |
//! | [`ask`] | what is asked of the API server itself has a limit |
//! | [`job`] | whether a Job lets its pods be disrupted |
//! | [`pods`] | what the pods of a namespace ask for, asked of the API server itself |
//! | [`reconcile`] | does it, budget by budget |
//! | `orders` | whether what is ordered of an agent has to be written: pure |
//! | `slim` | an object's metadata without `managedFields` |
//! | [`there`] | what a node says concerns the pods on it and no others: pure |
//! | [`versions`] | names the values of another version in an object: pure |
//! | [`release`] | lets go of namespaces whose budget is gone |
//! | [`contexts`] | orders of the agents what is done about poisoned contexts |
//! | [`write`](mod@write) | the API calls that change something |
//! | [`placement`] | helps pods to a GPU: node labels, moves, reservations and evictions, lowered quotas |
//! | [`pulse`] | when each watch last made progress |
//! | [`metrics`], [`http`] | what is measured, and what probes are told |
//! | [`operator`] | the tasks and their end |

pub mod ahead;
pub mod args;
pub mod ask;
pub mod budget;
pub mod contexts;
pub mod demand;
pub mod http;
pub mod job;
pub mod metrics;
pub mod observe;
pub mod operator;
mod orders;
pub mod placement;
pub mod pods;
pub mod pulse;
pub mod quanta;
pub mod reconcile;
pub mod release;
mod slim;
pub mod there;
pub mod versions;
pub mod world;
pub mod write;
