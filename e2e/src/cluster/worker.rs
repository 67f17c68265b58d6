//! Adds a node to a local cluster: a machine of its own as far as Kubernetes can see.

use std::net::SocketAddrV4;
use std::path::{Path, PathBuf};

use super::components::{ClusterConfig, node_name};
use super::local::{LocalCluster, LocalError, Startup, step_error};
use super::run_folder::RunFolder;
use crate::node::{API_PORT, KUBELET_PORT, MAX_NODES, PortForward, address};
use crate::progress::Progress;

/// A node besides the first one, with a node process, a kubelet and a containerd of its own.
/// Dropping it takes the node down; its Node object stays in the API server.
///
/// ```text
/// network of the node                  network of the first node
/// kubelet, pods --> any address:443 ---> kube-apiserver
/// kubelet:10250 <--------------------- address of the node:10250 <-- kube-apiserver
/// ```
pub struct WorkerNode {
    node: LocalCluster,
    _to_api_server: PortForward,
    _to_kubelet: PortForward,
}

impl WorkerNode {
    /// Starts the node with this number, from 2 on, in a run folder of its own, and waits until it
    /// is Ready.
    ///
    /// # Errors
    /// When the number is that of another node, or a component does not start in time. What was
    /// started is taken down again.
    pub async fn join(
        cluster: &LocalCluster,
        harness: &Path,
        number: u8,
        progress: &Progress,
    ) -> Result<Self, LocalError> {
        if !(2..=MAX_NODES).contains(&number) {
            let why = format!("the numbers are 2 to {MAX_NODES}");
            return Err(step_error(format!("start of node {number}"))(
                std::io::Error::other(why),
            ));
        }
        let of_cluster = cluster.config();
        let folder = RunFolder::of(&format!("{}-{number}", of_cluster.folder.name()))?;
        folder.prepare()?;
        let config = ClusterConfig {
            cgroup_root: folder.cgroup()?.root(),
            folder,
            number,
            ..of_cluster.clone()
        };
        config
            .write_node_files()
            .map_err(step_error("configuration files"))?;
        let mut start = Startup::start_node_process(config, harness).await?;
        let network = start.network()?;
        let any = SocketAddrV4::new(std::net::Ipv4Addr::UNSPECIFIED, API_PORT);
        let api_server = SocketAddrV4::new(address(1), API_PORT);
        let kubelet = SocketAddrV4::new(address(number), KUBELET_PORT);
        let forward = |from, to| {
            PortForward::open(from, to).map_err(step_error("forwarder between the nodes"))
        };
        let to_api_server = forward((network, any), (cluster.network(), api_server))?;
        let to_kubelet = forward((cluster.network(), kubelet), (network, kubelet))?;
        let client = cluster.client();
        start.start_node_components().await?;
        start.wait_for_node(&client, progress).await?;
        Ok(Self {
            node: start.finish(client),
            _to_api_server: to_api_server,
            _to_kubelet: to_kubelet,
        })
    }

    /// Returns the node's name in Kubernetes.
    pub fn name(&self) -> String {
        node_name(self.node.config().number)
    }

    /// The run folder.
    pub fn folder(&self) -> &RunFolder {
        self.node.folder()
    }

    /// Returns a path of the node as [`LocalCluster::host_path`] does.
    pub fn host_path(&self, path: &str) -> PathBuf {
        self.node.host_path(path)
    }

    /// Returns the ids of the node's processes as [`LocalCluster::processes_named`] does.
    pub fn processes_named(&self, program: &str) -> Vec<i32> {
        self.node.processes_named(program)
    }

    /// Imports an OCI archive into the node's containerd.
    ///
    /// # Errors
    /// When `ctr` fails.
    pub async fn import_image(&self, archive: &Path) -> Result<(), LocalError> {
        self.node.import_image(archive).await
    }

    /// Kills every process of the node, and removes what a machine loses with its power. Its disks
    /// stay, and so do the kernel and its boot id.
    ///
    /// # Errors
    /// When a process or a mount stays.
    pub async fn cut_power(&mut self) -> Result<(), LocalError> {
        self.node.cut_power().await
    }

    /// Starts containerd and the kubelet after [`Self::cut_power`].
    ///
    /// # Errors
    /// When one of them does not start.
    pub async fn boot(&mut self) -> Result<(), LocalError> {
        self.node.start_node_components().await
    }

    /// Takes the node down and reports failures, which dropping ignores.
    ///
    /// # Errors
    /// When a part of the node cannot be removed.
    pub fn down(self) -> Result<(), LocalError> {
        self.node.down()
    }
}
