//! The plugin relay: keeps the node's GPU memory registered with the kubelet while no agent runs.
//!
//! The kubelet fails a pod for good if the device plugin is away when the pod is admitted. So the
//! relay is the kubelet's plugin, and to the agent it is the kubelet:
//!
//! ```text
//!   kubelet <-- kubelet.sock, ListAndWatch, Allocate --- relay <-- kubelet.sock --- agent
//!                                     PreStartContainer -------------------------->
//! ```
//!
//! The relay speaks the device plugin API on both sides, so relay and agent may be of different
//! versions. It sends the device list that an agent sent last, answers Allocate by itself with a
//! random allocation id, and forwards PreStartContainer. Only PreStartContainer needs an agent, and
//! the kubelet repeats that call.
//!
//! | module | job |
//! |---|---|
//! | [`agent`] | follows one resource's plugin in the agent, and forwards calls to it |
//! | [`relay`] | accepts the agent's registrations, and registers with the kubelet |
//! | [`watchdog`] | ends a relay that hangs, because the kubelet would wait for it for ever |
//! | [`state`] | the files: the last device lists, and whether the kubelet follows them |

pub mod agent;
pub mod relay;
pub mod state;
pub mod watchdog;

/// The relay's directory on the node, where the agent registers.
pub const DIR: &str = "/run/bursar/relay";

pub use relay::{RelayError, RelayOptions, run};
