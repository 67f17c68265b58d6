//! The operator: what each namespace's `GpuMemoryBudget` comes to.
//!
//! | module | job |
//! |---|---|
//! | [`world`] | what is known of the cluster: pure |
//! | [`demand`] | what a pod asks for: pure |
//! | [`budget`] | from a budget and the facts to its status: pure |
//! | [`quanta`] | amounts in whole quanta |

pub mod budget;
pub mod demand;
pub mod quanta;
pub mod world;
