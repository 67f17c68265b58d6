//! Talks to the API server: reads the spec of this node's `GpuNode` and what agents must know of
//! namespaces, writes the status, and publishes Events.
//!
//! | module | job |
//! |---|---|
//! | [`gpu_node`] | creates this node's `GpuNode` and writes its status |
//! | [`spec_watch`] | watches that object |
//! | [`spec`] | parses its spec: pure |
//! | [`namespaces`] | watches what agents must know of namespaces |
//! | `watching` | follows a kind, and counts and logs failures |
//! | [`pod_settings`] | waits for what that spec has of a pod |
//! | [`events`] | publishes Events on the node and its pods |
//! | [`metrics`] | counts writes, failures of the watch and dropped Events |

pub mod events;
pub mod gpu_node;
pub mod metrics;
pub mod namespaces;
pub mod pod_settings;
pub mod spec;
pub mod spec_watch;
mod watching;

pub use events::{Events, PodRef, Reason};
pub use namespaces::ContextPolicies;
pub use pod_settings::PodSettingsReader;
pub use spec::ParsedSpec;
