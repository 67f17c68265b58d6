//! Audits what programs have against the ledger, and does something about it.
//!
//! | module | job |
//! |---|---|
//! | [`gather`] | asks NVML about every GPU, with a deadline |
//! | [`judge`] | sets what the driver charges against the ledger: pure |
//! | [`strikes`] | counts for how long findings stand: pure |
//! | [`policy`] | what is done about a finding: pure |
//! | [`kill`] | kills a process, and never a later one with its pid |
//! | [`tally`] | sums up by namespace, for its budget's status: pure |
//! | [`tell`] | Events |
//! | `withheld` | how much of each GPU is charged to nobody, as far as that lasts: pure |
//! | [`run`] | the loop |

pub mod gather;
pub mod judge;
pub mod kill;
pub mod policy;
pub mod run;
pub mod strikes;
pub mod tally;
pub mod tell;
mod withheld;

pub use run::{Audited, Auditor};
