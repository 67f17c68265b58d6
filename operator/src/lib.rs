//! The operator: publishes what each namespace's `GpuMemoryBudget` comes to.
//!
//! ```text
//!   watches --> observe --> world (pure index) --> dirty budgets, gathered --> publish: status (pure)
//!               budgets, pods, GpuNodes, Nodes                                  same: nothing; else one write
//! ```
//!
//! | module | job |
//! |---|---|
//! | [`args`] | the command line |
//! | [`observe`] | turns watches into changes of the world, and those into work |
//! | [`world`] | what is known of the cluster: pure |
//! | [`demand`] | what a pod asks for: pure |
//! | [`budget`] | from a budget and the facts to its status: pure |
//! | [`quanta`] | amounts in whole quanta |
//! | [`publish`] | writes a status that changed |
//! | [`metrics`], [`http`] | what is measured, and how it is served |
//! | [`operator`] | the tasks and their end |
//!
//! Nothing is enforced here yet: use is counted and reported, no pod is refused or evicted.

pub mod args;
pub mod budget;
pub mod demand;
pub mod http;
pub mod metrics;
pub mod observe;
pub mod operator;
pub mod publish;
pub mod quanta;
pub mod world;
