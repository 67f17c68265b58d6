//! Starts a real Kubernetes with Bursar on one machine, and runs the checks of the repository.

pub mod cache;
mod cargo;
pub mod chart;
pub mod cluster;
pub mod control_plane;
pub mod demo;
pub mod folders;
pub mod images;
pub mod kube;
pub mod node;
pub mod objects;
pub mod pack;
pub mod pods;
pub mod progress;
pub mod scene;
pub mod sim;
pub mod supplies;
pub mod verify;
pub mod wait;
pub mod workspace;
