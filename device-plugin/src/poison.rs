//! Acts on poisoned contexts: carries the sessions' decisions out, and tells of them.
//!
//! ```text
//!   shim's report --> sessions: fence, decide (pure) --+--> verdict to the shim
//!   kernel's log: XID with a pid --> sessions ---------+--> here: kill, Event, metrics, GpuNode.status.faults
//!   GpuNode.spec.contextPolicies --> here --> sessions
//! ```
//!
//! | module | job |
//! |---|---|
//! | [`log`] | finds XIDs with pids in the kernel's log |
//! | [`policy`] | what is done in which container: pure |
//! | [`run`] | the loop |
//! | [`tell`] | Events, and what the status says |

pub mod log;
pub mod policy;
pub mod run;
pub mod tell;

pub use run::{Around, run};
