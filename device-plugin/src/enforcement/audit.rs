//! Audits what programs have against the ledger, and does something about it.
//!
//! | module | job |
//! |---|---|
//! | [`collect`] | asks NVML about every GPU, with a deadline |
//! | [`compare`] | sets what the driver charges against the ledger: pure |
//! | [`consecutive`] | counts for how long findings stand: pure |
//! | [`context_policy`] | what is done about a finding: pure |
//! | [`kill`] | kills a process, and never a later one with its pid |
//! | [`namespace_usage`] | sums up by namespace, for its budget's status: pure |
//! | [`events`] | Events |
//! | `withheld` | how much of each GPU is charged to nobody, as far as that lasts: pure |
//! | [`task`] | the loop |

pub mod collect;
pub mod compare;
pub mod consecutive;
pub mod events;
pub mod kill;
pub mod namespace_usage;
pub mod policy;
pub mod task;
mod withheld;

pub use task::{AuditStatus, Auditor};
