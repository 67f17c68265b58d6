//! Acts on poisoned contexts: carries the sessions' decisions out, and tells of them.
//!
//! ```text
//!   shim's report --> sessions: fence, decide (pure) --+--> verdict to the shim
//!   kernel's log: XID with a pid --> belief --> sessions --> here: kill, Event, metrics, GpuNode.status.faults
//!   NVML: XID of a GPU ---------------^
//!   GpuNode.spec.contextPolicies --> here --> sessions
//! ```
//!
//! | module | job |
//! |---|---|
//! | [`belief`] | which records of the kernel's log NVML confirms: pure |
//! | [`log`] | finds XIDs with pids in the kernel's log |
//! | [`policy`] | what is done in which container: pure |
//! | [`run`] | the loop |
//! | [`tell`] | Events, and what the status says |

pub mod belief;
pub mod log;
pub mod policy;
pub mod run;
pub mod tell;

pub use run::{Around, run};
