//! What the agent and the kubelet say to each other.
//!
//! | module | job |
//! |---|---|
//! | [`api`] | the generated gRPC types of both sides |
//! | [`devices`] | a resource's tokens as one ListAndWatch message, held to its limits |
//! | [`plugin`] | answers the kubelet's calls over an [`plugin::Allocator`] |
//! | [`server`] | serves a plugin on a socket of its own |
//! | [`directory`] | wakes when the kubelet's plugin directory changes |
//! | [`registration`] | decides when to serve and when to register: pure |
//! | [`lifecycle`] | carries those decisions out for as long as the agent lives |

pub mod api;
mod connect;
mod count;
pub mod devices;
pub mod directory;
pub mod lifecycle;
pub mod plugin;
pub mod registration;
pub mod server;
