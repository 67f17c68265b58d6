//! Acts on poisoned contexts: carries out the sessions' decisions and reports them.
//!
//! ```text
//!   shim's report --> sessions: fence, decide (pure) --+--> verdict to the shim
//!   kernel's log: XID with a pid --> confirmation -----+--> task: kill, Event, GpuNode.status
//!   NVML: XID of a GPU ------------------^
//!   GpuNamespaces, GpuNode.spec.restarts --> task --> sessions
//! ```
//!
//! | module | job |
//! |---|---|
//! | [`confirmation`] | decides which XIDs of the kernel's log NVML confirms: pure |
//! | [`forked_children`] | finds the forked children that share a process's GPU memory |
//! | [`killer`] | kills the processes that the sessions condemn |
//! | [`kmsg`] | finds XIDs with pids in the kernel's log |
//! | [`policy`] | decides what follows a fault in which container: pure |
//! | `restarts` | detects that a program runs again after a fault: pure |
//! | [`task`] | reads the log and carries out decisions |
//! | [`events`] | publishes Events and builds the entries of the node's status |

pub mod confirmation;
pub mod events;
mod forked_children;
pub mod killer;
pub mod kmsg;
pub mod policy;
mod restarts;
pub mod task;

pub use task::{FaultInputs, run};
