//! What the agent and the kubelet say to each other.
//!
//! | module | job |
//! |---|---|
//! | [`api_error`] | the generated gRPC types of both sides |
//! | [`device_mappings`] | a resource's tokens as one ListAndWatch message, held to its limits |
//! | [`plugin`] | answers the kubelet's calls over an [`plugin::Allocator`] |
//! | [`server`] | serves a plugin on a socket of its own |
//! | [`dir_watch`] | wakes when the kubelet's plugin directory changes |
//! | [`registration`] | decides when to serve and when to register: pure |
//! | [`lifecycle`] | carries those decisions out for as long as the agent lives |
//! | [`device_checkpoint`] | reads which pod holds which tokens from the kubelet's own file |
//! | [`pod_resources`] | asks the kubelet for pods' names |

pub mod api;
mod connect;
pub mod device_checkpoint;
pub mod devices;
pub mod dir_watch;
mod in_flight;
pub mod lifecycle;
pub mod plugin;
pub mod pod_resources;
pub mod registration;
pub mod server;
