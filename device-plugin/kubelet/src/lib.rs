//! Speaks the device plugin API, the PodResources API and the kubelet's checkpoint format.
//!
//! | module | job |
//! |---|---|
//! | [`api`] | includes the generated gRPC types of both sides |
//! | [`devices`] | builds the ListAndWatch message of a resource and checks its limits |
//! | [`plugin`] | answers the kubelet's calls by a [`plugin::Allocator`] |
//! | [`connect`] | connects to a socket of the kubelet or of a plugin |
//! | [`server`] | serves a plugin on its own socket |
//! | [`dir_watch`] | watches the kubelet's plugin directory |
//! | [`registration`] | decides when to serve and when to register: pure |
//! | [`lifecycle`] | keeps a resource registered while the agent runs |
//! | [`device_checkpoint`] | reads pods' device ids from the kubelet's checkpoint |
//! | [`pod_resources`] | reads the names of pods from the kubelet |
//! | [`error_text`] | formats an error with its sources on one line |

pub mod api;
pub mod connect;
pub mod device_checkpoint;
pub mod devices;
pub(crate) mod dir_watch;
pub mod error_text;
#[cfg(test)]
mod golden;
mod in_flight;
pub mod lifecycle;
pub mod plugin;
pub mod pod_resources;
pub mod registration;
pub mod server;
