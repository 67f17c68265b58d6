//! The node process: one process in namespaces of its own, from which everything of a cluster descends.
//!
//! ```text
//! harness --control socket--> node process --spawns--> etcd, kube-apiserver, ..., kubelet, containerd --> pods
//!    |                             |
//!    |   127.0.0.1:PORT ---------> forwarder ---> kube-apiserver (in the node's network namespace)
//! ```
//!
//! It has a network and a mount namespace, so that addresses, links and mounts die with its last
//! process and fixed paths such as `/var/lib/kubelet` are free; and a cgroup, by which every
//! descendant is found and killed. When its owner goes away, however that happens, it takes
//! everything down and removes its run folder.

mod cgroups;
mod forward;
mod namespace;
mod netlink;
mod processes;
mod protocol;
mod server;

use std::net::Ipv4Addr;

pub use cgroups::{Cgroup, CgroupError};
pub use protocol::{Reply, Request};
pub use server::{NodeError, run};

/// The node's own address. It is on the node's loopback link; pods reach it through their gateway.
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
/// The address of the Service `kubernetes`. The API server listens on it itself, so that pods need
/// no kube-proxy to reach it.
pub const SERVICE_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
/// The API server's port on every address of the node.
pub const API_PORT: u16 = 443;
