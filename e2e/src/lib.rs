//! Bursar's end-to-end harness: a real Kubernetes on one machine, Bursar on it, and the checks
//! that both hold.

pub mod cache;
pub mod cluster;
pub mod folders;
pub mod kube;
pub mod node;
pub mod progress;
pub mod verify;
pub mod wait;
