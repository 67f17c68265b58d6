//! Runs the node process: the parent of all processes of a cluster, in namespaces of its own.
//!
//! ```text
//! harness --control socket--> node process --spawns--> etcd, kube-apiserver, ..., kubelet,
//!    |                             |                   containerd --> pods
//!    |   127.0.0.1:PORT ---------> forwarder ---> kube-apiserver (in the node's network namespace)
//! ```
//!
//! The node process has a network and a mount namespace. Addresses, links and mounts therefore
//! disappear with its last process, and fixed paths such as `/var/lib/kubelet` are free. Every
//! descendant is in one cgroup, by which the node process finds and kills all of them. When its
//! owner disconnects for any cause, the node process takes everything down and removes its run
//! folder.

mod cgroups;
mod forward;
mod namespace;
mod netlink;
mod processes;
mod protocol;
mod server;

use std::net::Ipv4Addr;

pub use cgroups::{Cgroup, CgroupError};
pub use forward::{Network, PortForward};
pub use protocol::{Reply, Request};
pub use server::{NodeError, run};

/// The most nodes of a cluster. Each has an address of its own.
pub const MAX_NODES: u8 = 3;

/// Returns the address of the node with this number, from 1 on. Each node has the addresses of all
/// nodes on its loopback link: a forwarder leads from the address of another node to that node.
/// Pods reach the addresses through their gateway.
pub const fn address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, number)
}

/// The address of the first node, which has the control plane.
pub const ADDRESS: Ipv4Addr = address(1);
/// The address of the Service `kubernetes`. The API server listens on the address itself, so that
/// pods need no kube-proxy.
pub const SERVICE_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
/// The API server's port on every address of the node.
pub const API_PORT: u16 = 443;
/// The kubelet's port on the node's address.
pub const KUBELET_PORT: u16 = 10250;
