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
//! | [`confirmation`] | which records of the kernel's log NVML confirms: pure |
//! | [`kmsg`] | finds XIDs with pids in the kernel's log |
//! | [`context_policy`] | what is done in which container: pure |
//! | [`task`] | the loop |
//! | [`events`] | Events, and what the status says |

pub mod confirmation;
pub mod events;
pub mod kmsg;
pub mod policy;
pub mod task;

pub use task::{FaultInputs, run};
