//! What the agent and the kubelet say to each other.

pub mod api;
