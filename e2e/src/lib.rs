//! Starts a real Kubernetes with Bursar on one machine, and runs the checks of the repository.

pub mod artifacts;
pub mod cache;
mod cargo;
pub mod chart;
pub mod cli_archive;
pub mod cluster;
pub mod console;
pub mod control_plane;
pub mod demo;
pub mod environment;
pub mod images;
pub mod kube;
pub mod node;
pub mod pack;
pub mod paths;
pub mod pods;
pub mod progress;
pub mod raw_api;
pub mod release;
pub mod sim;
pub mod soak;
pub mod tools;
pub mod verify;
pub mod versions;
pub mod wait;
pub mod workspace;
