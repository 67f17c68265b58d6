//! Starts, operates and takes down a cluster on this machine.

use std::fs::{self, File};
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Namespace, Node, ServiceAccount};
use kube::Client;
use kube::api::Api;

use super::components::{CONTAINERD_SOCKET, ClusterConfig, Component, NODE_NAME, node_name};
use super::control::ControlClient;
use super::run_folder::{RunFolder, RunFolderError};
use crate::kube::Toolbox;
use crate::node::{CgroupError, Network, PortForward, Request};
use crate::progress::Progress;
use crate::wait::{self, Poll, WaitError};

/// The pause between two polls of a state.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The timeout of each step of the start on a loaded machine; an idle machine takes 1 to 5 s.
const STEP_TIMEOUT: Duration = Duration::from_secs(120);

/// The name, programs and scope of a cluster to start.
#[derive(Debug, Clone)]
pub struct ClusterOptions {
    /// The cluster's name, also that of its run folder and cgroup.
    pub name: String,
    /// The program whose subcommand `node` is the node process.
    pub harness: PathBuf,
    /// The programs of Kubernetes and containerd.
    pub toolbox: Toolbox,
    /// The components to start.
    pub scope: ClusterScope,
}

/// Which components of a cluster are started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClusterScope {
    /// All components, with a node that runs pods.
    WithNode,
    /// etcd, the API server and the controller manager, for nodes that exist as objects only. The
    /// controllers that evict pods from silent nodes are off.
    ControlPlaneOnly,
}

/// The error of a cluster's start or of an operation on it.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// The harness does not run as root, which namespaces, mounts and cgroups require.
    #[error("a cluster on this machine needs root (namespaces, mounts and cgroups)")]
    NotRoot,
    /// The run folder cannot be used.
    #[error(transparent)]
    RunFolder(#[from] RunFolderError),
    /// The system's cgroups cannot be used.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// A step failed.
    #[error("{step}: {source}")]
    Step {
        /// The step.
        step: String,
        /// The system's error.
        source: io::Error,
    },
    /// A component did not become ready.
    #[error("{source}\n--- the end of {log}:\n{tail}")]
    NotReady {
        /// The timeout of the wait.
        source: WaitError,
        /// The log of the component that the wait depends on.
        log: PathBuf,
        /// The last lines of the log.
        tail: String,
    },
    /// A program that acts on the cluster failed.
    #[error("{program} failed ({status}): {stderr}")]
    Program {
        /// The program's name.
        program: String,
        /// Its exit status.
        status: String,
        /// Its standard error.
        stderr: String,
    },
}

pub(super) fn step_error(what: impl Into<String>) -> impl FnOnce(io::Error) -> LocalError {
    let step = what.into();
    move |source| LocalError::Step { step, source }
}

/// A running cluster of at most one node. Dropping it takes the cluster down and waits until that
/// is done.
pub struct LocalCluster {
    layout: ClusterConfig,
    /// The node process, which takes the cluster down even if the harness is killed.
    node_process: Child,
    control: Option<ControlClient>,
    client: Client,
    /// Whether the cluster outlives this value.
    detached: bool,
}

impl LocalCluster {
    /// Starts a cluster, and waits until its node is Ready and `default` accepts pods.
    ///
    /// # Errors
    /// When a component does not start in time, with the end of its log. The components that were
    /// started are taken down again.
    pub async fn up(options: ClusterOptions, progress: &Progress) -> Result<Self, LocalError> {
        if !rustix::process::geteuid().is_root() {
            return Err(LocalError::NotRoot);
        }
        let folder = RunFolder::of(&options.name)?;
        folder.prepare()?;
        let cgroup = folder.cgroup()?;
        let layout = ClusterConfig {
            toolbox: options.toolbox,
            scope: options.scope,
            cgroup_v2: cgroup.is_v2(),
            cgroup_root: cgroup.root(),
            certificates: folder.clone(),
            number: 1,
            folder: folder.clone(),
        };
        layout
            .write_files()
            .map_err(step_error("configuration files"))?;
        let mut start = Startup::start_node_process(layout, &options.harness).await?;
        start.start_components(progress).await?;
        let client = start.client().await?;
        start.wait_until_usable(&client, progress).await?;
        Ok(start.finish(client))
    }

    /// Returns a client with the administrator's rights.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// Returns the administrator's kubeconfig file, for programs on the host.
    pub fn kubeconfig(&self) -> PathBuf {
        self.layout.folder.kubeconfig()
    }

    /// The node's name.
    pub fn node_name(&self) -> &'static str {
        NODE_NAME
    }

    /// The run folder.
    pub fn folder(&self) -> &RunFolder {
        &self.layout.folder
    }

    /// Returns the programs of Kubernetes and containerd.
    pub fn toolbox(&self) -> &Toolbox {
        &self.layout.toolbox
    }

    /// Returns a path of the node as this process can open it. Absolute symbolic links in it lead
    /// to the host's files, so callers name the target (`/run`, not `/var/run`).
    pub fn host_path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.node_process.id()))
            .join(path.trim_start_matches('/'))
    }

    /// Returns the ids of the cluster's processes by program name, of which the kernel keeps 15
    /// bytes (proc(5)).
    pub fn processes_named(&self, program: &str) -> Vec<i32> {
        let wanted = &program[..program.len().min(15)];
        let named = |pid: &i32| {
            fs::read_to_string(format!("/proc/{pid}/comm"))
                .is_ok_and(|comm| comm.trim_end() == wanted)
        };
        let cgroup = self.layout.folder.cgroup();
        cgroup
            .map(|cgroup| cgroup.processes().into_iter().filter(named).collect())
            .unwrap_or_default()
    }

    /// Stops the kubelet and starts it again; `kill` sends SIGKILL instead of SIGTERM.
    ///
    /// # Errors
    /// When the kubelet does not exit or does not start.
    pub async fn restart_kubelet(&mut self, kill: bool) -> Result<(), LocalError> {
        let kubelet = self.layout.kubelet();
        self.restart_component(&kubelet, kill).await
    }

    /// Stops the kubelet, for tests of the time without it.
    ///
    /// # Errors
    /// When the kubelet does not exit.
    pub async fn stop_kubelet(&mut self) -> Result<(), LocalError> {
        self.end_component("kubelet", false).await
    }

    /// Starts the kubelet after [`Self::stop_kubelet`].
    ///
    /// # Errors
    /// When the kubelet does not start.
    pub async fn start_kubelet(&mut self) -> Result<(), LocalError> {
        let kubelet = self.layout.kubelet();
        self.start_component(&kubelet).await
    }

    /// Stops the controller manager, for tests of the time without it.
    ///
    /// # Errors
    /// When the controller manager does not exit.
    pub async fn stop_controller_manager(&mut self) -> Result<(), LocalError> {
        self.end_component("kube-controller-manager", false).await
    }

    /// Starts the controller manager after [`Self::stop_controller_manager`].
    ///
    /// # Errors
    /// When the controller manager does not start.
    pub async fn start_controller_manager(&mut self) -> Result<(), LocalError> {
        let manager = self.layout.controller_manager();
        self.start_component(&manager).await
    }

    /// Kills the API server, for tests of the time without it. etcd keeps its objects.
    ///
    /// # Errors
    /// When the API server does not exit.
    pub async fn kill_api_server(&mut self) -> Result<(), LocalError> {
        self.end_component("kube-apiserver", true).await
    }

    /// Starts the API server after [`Self::kill_api_server`]; the server answers a few seconds
    /// later.
    ///
    /// # Errors
    /// When the API server does not start.
    pub async fn start_api_server(&mut self) -> Result<(), LocalError> {
        let server = self.layout.apiserver();
        self.start_component(&server).await
    }

    /// Copies etcd's data. etcd, the API server and the controller manager are restarted.
    ///
    /// # Errors
    /// When a process does not end or start, or the data cannot be copied.
    pub async fn back_up_etcd(&mut self) -> Result<(), LocalError> {
        self.restart_etcd_after(copy).await
    }

    /// Replaces etcd's data by the copy of [`Self::back_up_etcd`], so that revisions go back.
    ///
    /// # Errors
    /// As [`Self::back_up_etcd`].
    pub async fn restore_etcd(&mut self) -> Result<(), LocalError> {
        self.restart_etcd_after(|data, backup| {
            fs::remove_dir_all(data)?;
            copy(backup, data)
        })
        .await
    }

    /// Ends etcd and its clients, changes its data, starts all and waits for the API server.
    async fn restart_etcd_after(
        &mut self,
        change: impl FnOnce(&Path, &Path) -> io::Result<()>,
    ) -> Result<(), LocalError> {
        self.stop_controller_manager().await?;
        self.kill_api_server().await?;
        self.end_component("etcd", false).await?;
        let scratch = self.layout.folder.scratch();
        let scratch = self.host_path(&scratch.to_string_lossy());
        change(&scratch.join("etcd"), &scratch.join("etcd-backup"))
            .map_err(step_error("copy of etcd's data"))?;
        let etcd = self.layout.etcd();
        self.start_component(&etcd).await?;
        self.start_api_server().await?;
        let client = self.client();
        let answers = async || match Api::<Namespace>::all(client.clone()).get("default").await {
            Ok(_) => Poll::Ready(()),
            Err(error) => Poll::Pending(error.to_string()),
        };
        wait::poll_until("the API server", STEP_TIMEOUT, POLL_INTERVAL, answers)
            .await
            .map_err(|source| not_ready_error(&self.layout.folder, "kube-apiserver", source))?;
        self.start_controller_manager().await
    }

    /// Stops containerd and starts it again; containers keep running.
    ///
    /// # Errors
    /// When containerd does not exit or does not start.
    pub async fn restart_containerd(&mut self, kill: bool) -> Result<(), LocalError> {
        let containerd = self.layout.containerd();
        self.restart_component(&containerd, kill).await
    }

    async fn restart_component(
        &mut self,
        component: &Component,
        kill: bool,
    ) -> Result<(), LocalError> {
        self.end_component(component.name, kill).await?;
        self.start_component(component).await
    }

    async fn end_component(&mut self, name: &str, kill: bool) -> Result<(), LocalError> {
        let request = Request::End {
            name: name.to_owned(),
            kill,
        };
        self.control()?
            .call(&request)
            .await
            .map(drop)
            .map_err(step_error(format!("end of {name}")))
    }

    async fn start_component(&mut self, component: &Component) -> Result<(), LocalError> {
        let path = self.layout.toolbox.path().to_string_lossy().into_owned();
        let log = self.layout.folder.log(component.name);
        self.control()?
            .spawn(component, &path, &log)
            .await
            .map_err(step_error(format!("start of {}", component.name)))
    }

    fn control(&mut self) -> Result<&mut ControlClient, LocalError> {
        let gone = || step_error("node process")(io::Error::other("its connection is closed"));
        self.control.as_mut().ok_or_else(gone)
    }

    /// Imports an OCI archive into the node's containerd.
    ///
    /// # Errors
    /// When `ctr` fails.
    pub async fn import_image(&self, archive: &Path) -> Result<(), LocalError> {
        let archive = archive.to_string_lossy();
        self.ctr(&["images", "import", "--local", &archive])
            .await
            .map(drop)
    }

    /// Gives an image of the node another reference besides its own.
    ///
    /// # Errors
    /// When `ctr` fails.
    pub async fn tag_image(&self, reference: &str, other: &str) -> Result<(), LocalError> {
        let tag = ["images", "tag", reference, other];
        self.ctr(&tag).await.map(drop)
    }

    /// Gives the node the host's `port` on its own loopback, such as that of a registry.
    ///
    /// # Errors
    /// When the node's network cannot be entered, or the port is in use there.
    pub fn expose_host_port(&self, port: u16) -> Result<PortForward, LocalError> {
        let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, port);
        PortForward::open((self.network(), address), (Network::Own, address))
            .map_err(step_error("port on the node"))
    }

    /// Kills every process of the node, and removes what a machine loses with its power.
    pub(super) async fn cut_power(&mut self) -> Result<(), LocalError> {
        let cut = self.control()?.call(&Request::PowerOff).await;
        cut.map(drop).map_err(step_error("loss of power"))
    }

    /// Starts containerd and the kubelet.
    pub(super) async fn start_node_components(&mut self) -> Result<(), LocalError> {
        self.start_component(&self.layout.containerd()).await?;
        wait_for_containerd(&self.node_process, &self.layout.folder).await?;
        self.start_component(&self.layout.kubelet()).await
    }

    /// Returns the decisions about the cluster and its node.
    pub(super) fn config(&self) -> &ClusterConfig {
        &self.layout
    }

    /// Returns the network of the node.
    pub(super) fn network(&self) -> Network {
        Network::Of(self.node_process.id())
    }

    /// Returns the references of the images that the node has.
    ///
    /// # Errors
    /// When `ctr` fails.
    pub async fn images(&self) -> Result<Vec<String>, LocalError> {
        let listed = self.ctr(&["images", "list", "--quiet"]).await?;
        Ok(listed.lines().map(str::to_owned).collect())
    }

    /// Runs `ctr` on the node's containerd, and returns its standard output.
    async fn ctr(&self, arguments: &[&str]) -> Result<String, LocalError> {
        let output = tokio::process::Command::new(self.layout.toolbox.program("ctr"))
            .arg("--address")
            .arg(self.host_path(CONTAINERD_SOCKET))
            .args(["--namespace", "k8s.io"])
            .args(arguments)
            .output()
            .await
            .map_err(step_error("ctr"))?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        Err(LocalError::Program {
            program: format!("ctr {}", arguments.join(" ")),
            status: output.status.to_string(),
            stderr: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        })
    }

    /// Leaves the cluster running when this value is dropped, until `down` is called.
    ///
    /// # Errors
    /// When the node process has exited.
    pub async fn detach(mut self) -> Result<RunFolder, LocalError> {
        self.control()?
            .call(&Request::Detach)
            .await
            .map_err(step_error("keep"))?;
        self.detached = true;
        Ok(self.layout.folder.clone())
    }

    /// Takes the cluster down and reports failures, which dropping ignores.
    ///
    /// # Errors
    /// When a part of the cluster cannot be removed.
    pub fn down(mut self) -> Result<(), LocalError> {
        self.end_node_process()
    }

    fn end_node_process(&mut self) -> Result<(), LocalError> {
        // The node process takes the cluster down when its owner's connection closes.
        self.control = None;
        end_node_process(&mut self.node_process, &self.layout.folder)
    }
}

impl Drop for LocalCluster {
    fn drop(&mut self) {
        if !self.detached && self.control.is_some() {
            // A drop cannot report a failure; the next start removes the remains.
            let _ = self.end_node_process();
        }
    }
}

/// Takes down the cluster of this name, if it exists.
///
/// # Errors
/// When a part of the cluster cannot be removed.
pub async fn down(name: &str) -> Result<(), LocalError> {
    let folder = RunFolder::of(name)?;
    if folder.is_up()? {
        let mut control = ControlClient::connect(&folder.control_socket())
            .await
            .map_err(step_error("node process"))?;
        control
            .call(&Request::Stop { keep_logs: false })
            .await
            .map_err(step_error("stop"))?;
        let gone = async || match folder.is_up() {
            Ok(false) => Poll::Ready(()),
            Ok(true) => Poll::Pending("the node process still works on it".to_owned()),
            Err(error) => Poll::Pending(error.to_string()),
        };
        let bound = Duration::from_secs(40);
        wait::poll_until("the end of the cluster", bound, POLL_INTERVAL, gone)
            .await
            .map_err(|source| not_ready_error(&folder, "node", source))?;
    }
    Ok(folder.clean_up()?)
}

/// A cluster that is being started. Dropping it takes the cluster down.
pub(super) struct Startup {
    layout: ClusterConfig,
    node: Option<Child>,
    control: Option<ControlClient>,
}

impl Startup {
    /// Starts the node process and takes ownership of it.
    pub(super) async fn start_node_process(
        layout: ClusterConfig,
        harness: &Path,
    ) -> Result<Self, LocalError> {
        let folder = layout.folder.clone();
        let log =
            File::create(folder.log("node")).map_err(step_error("log of the node process"))?;
        let node = Command::new(harness)
            .args(["node", "--name", folder.name()])
            // Ctrl-C in a terminal signals the harness alone, which then closes the connection.
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .map_err(step_error(harness.display().to_string()))?;
        let mut start = Self {
            layout,
            node: Some(node),
            control: None,
        };
        let mut control = start.connect().await?;
        control
            .call(&Request::TakeOwnership)
            .await
            .map_err(step_error("node process"))?;
        start.control = Some(control);
        Ok(start)
    }

    async fn connect(&mut self) -> Result<ControlClient, LocalError> {
        let begin = Instant::now();
        loop {
            let folder = &self.layout.folder;
            let ended = match self.node.as_mut() {
                Some(node) => node.try_wait().map_err(step_error("node process"))?,
                None => None,
            };
            if let Some(status) = ended {
                let log = tail(&folder.log("node"), 10);
                return Err(step_error("node process")(io::Error::other(format!(
                    "{status}: {log}"
                ))));
            }
            match ControlClient::connect(&folder.control_socket()).await {
                Ok(control) => return Ok(control),
                Err(error) if begin.elapsed() > Duration::from_secs(10) => {
                    return Err(step_error("node process's socket")(error));
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }

    fn control(&mut self) -> Result<&mut ControlClient, LocalError> {
        let gone = || step_error("node process")(io::Error::other("its connection is closed"));
        self.control.as_mut().ok_or_else(gone)
    }

    /// Returns the network of the node process.
    pub(super) fn network(&self) -> Result<Network, LocalError> {
        let node = self.node.as_ref().ok_or_else(not_started)?;
        Ok(Network::Of(node.id()))
    }

    /// Starts containerd and the kubelet.
    pub(super) async fn start_node_components(&mut self) -> Result<(), LocalError> {
        self.spawn(&self.layout.containerd()).await?;
        self.wait_for_containerd().await?;
        self.spawn(&self.layout.kubelet()).await
    }

    async fn wait_for_containerd(&self) -> Result<(), LocalError> {
        match &self.node {
            Some(node) => wait_for_containerd(node, &self.layout.folder).await,
            None => Err(not_started()),
        }
    }

    async fn spawn(&mut self, component: &Component) -> Result<(), LocalError> {
        let path = self.layout.toolbox.path().to_string_lossy().into_owned();
        let log = self.layout.folder.log(component.name);
        let spawned = self.control()?.spawn(component, &path, &log).await;
        spawned.map_err(step_error(format!("start of {}", component.name)))
    }

    /// Starts every component. They wait for each other by themselves, except the API server, which
    /// needs etcd, and the kubelet, which needs containerd.
    async fn start_components(&mut self, progress: &Progress) -> Result<(), LocalError> {
        let layout = self.layout.clone();
        let folder = layout.folder.clone();
        let port =
            fs::read_to_string(folder.port()).map_err(step_error("port of the API server"))?;
        let port = port
            .parse()
            .map_err(|error| step_error("port of the API server")(io::Error::other(error)))?;
        layout
            .write_host_kubeconfig(port)
            .map_err(step_error("kubeconfig"))?;
        let mut components = vec![layout.etcd(), layout.apiserver()];
        match layout.scope {
            ClusterScope::WithNode => components.extend([
                layout.containerd(),
                layout.controller_manager(),
                layout.scheduler(),
                layout.kubelet(),
            ]),
            ClusterScope::ControlPlaneOnly => components.push(layout.controller_manager()),
        }
        for component in components {
            if component.name == "kube-controller-manager" {
                self.wait_for_api_server(progress).await?;
            }
            if component.name == "kubelet" {
                self.wait_for_containerd().await?;
            }
            self.spawn(&component).await?;
        }
        Ok(())
    }

    async fn wait_for_api_server(&mut self, progress: &Progress) -> Result<(), LocalError> {
        let client = self.client().await?;
        let poll = async || {
            let request = http::Request::get("/readyz").body(Vec::new());
            match request {
                Err(error) => Poll::Failed(error.to_string()),
                Ok(request) => match client.request_text(request).await {
                    Ok(_) => Poll::Ready(()),
                    Err(error) => Poll::Pending(error.to_string()),
                },
            }
        };
        self.wait_for_components("the API server", &["etcd", "kube-apiserver"], poll)
            .await?;
        progress.report("API server is ready");
        Ok(())
    }

    /// Polls until the components `needs` have brought about a state; the exit of one of them ends
    /// the wait. The error has the end of the log of that component, or of the last one.
    async fn wait_for_components(
        &mut self,
        what: &str,
        needs: &[&'static str],
        poll: impl AsyncFn() -> Poll<()>,
    ) -> Result<(), LocalError> {
        let folder = self.layout.folder.clone();
        let control = self.control()?;
        let mut to_blame = needs.last().copied().unwrap_or("node");
        let waited = wait::poll_until(what, STEP_TIMEOUT, POLL_INTERVAL, async || {
            for name in needs {
                if let Ok(Some(how)) = control.exit_description(name).await {
                    to_blame = name;
                    return Poll::Failed(format!("{name} ended with {how}"));
                }
            }
            poll().await
        })
        .await;
        waited.map_err(|source| not_ready_error(&folder, to_blame, source))
    }

    async fn client(&self) -> Result<Client, LocalError> {
        let client = super::client(&self.layout.folder.kubeconfig()).await;
        client.map_err(|error| step_error("kubeconfig")(io::Error::other(error)))
    }

    async fn wait_until_usable(
        &mut self,
        client: &Client,
        progress: &Progress,
    ) -> Result<(), LocalError> {
        if self.layout.scope == ClusterScope::WithNode {
            self.wait_for_node(client, progress).await?;
        }
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), "default");
        let account = async || match accounts.get_opt("default").await {
            Ok(Some(_)) => Poll::Ready(()),
            Ok(None) => Poll::Pending("it is not there".to_owned()),
            Err(error) => Poll::Pending(error.to_string()),
        };
        self.wait_for_components(
            "the default service account",
            &["kube-controller-manager"],
            account,
        )
        .await
    }

    pub(super) async fn wait_for_node(
        &mut self,
        client: &Client,
        progress: &Progress,
    ) -> Result<(), LocalError> {
        let nodes: Api<Node> = Api::all(client.clone());
        let name = node_name(self.layout.number);
        let node = async || match nodes.get_opt(&name).await {
            Ok(Some(node)) => node_readiness(&node),
            Ok(None) => Poll::Pending("it has not registered".to_owned()),
            Err(error) => Poll::Pending(error.to_string()),
        };
        self.wait_for_components("the node to be Ready", &["containerd", "kubelet"], node)
            .await?;
        progress.report(format_args!("{name} is Ready"));
        Ok(())
    }

    pub(super) fn finish(mut self, client: Client) -> LocalCluster {
        let node = self
            .node
            .take()
            .expect("the node process is there until the start is finished");
        LocalCluster {
            layout: self.layout.clone(),
            node_process: node,
            control: self.control.take(),
            client,
            detached: false,
        }
    }
}

impl Drop for Startup {
    fn drop(&mut self) {
        self.control = None;
        if let Some(mut node) = self.node.take() {
            // A drop cannot report a failure; the next start removes the remains.
            let _ = end_node_process(&mut node, &self.layout.folder);
        }
    }
}

fn not_started() -> LocalError {
    step_error("node process")(io::Error::other("it was not started"))
}

/// Waits until a node's containerd accepts connections; without it the kubelet exits.
async fn wait_for_containerd(node: &Child, folder: &RunFolder) -> Result<(), LocalError> {
    let socket = format!("/proc/{}/root{CONTAINERD_SOCKET}", node.id());
    let accepts = async || match UnixStream::connect(&socket) {
        Ok(_) => Poll::Ready(()),
        Err(error) => Poll::Pending(error.to_string()),
    };
    wait::poll_until("containerd", STEP_TIMEOUT, POLL_INTERVAL, accepts)
        .await
        .map_err(|source| not_ready_error(folder, "containerd", source))
}

/// Copies a folder to a path where nothing is.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let status = Command::new("cp").arg("-a").arg(from).arg(to).status()?;
    match status.success() {
        true => Ok(()),
        false => Err(io::Error::other(format!("cp: {status}"))),
    }
}

fn node_readiness(node: &Node) -> Poll<()> {
    let conditions = node
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    match conditions
        .into_iter()
        .find(|condition| condition.type_ == "Ready")
    {
        Some(ready) if ready.status == "True" => Poll::Ready(()),
        Some(ready) => Poll::Pending(ready.message.clone().unwrap_or_default()),
        None => Poll::Pending("it has no Ready condition".to_owned()),
    }
}

fn not_ready_error(folder: &RunFolder, component: &str, source: WaitError) -> LocalError {
    let log = folder.log(component);
    LocalError::NotReady {
        source,
        tail: tail(&log, 15),
        log,
    }
}

/// Returns the last lines of a log.
fn tail(path: &Path, count: usize) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

/// Waits for the end of a node process whose owner has closed its connection. One that hangs or
/// fails is killed, and the remains of its cluster are removed.
fn end_node_process(node: &mut Child, folder: &RunFolder) -> Result<(), LocalError> {
    let status = wait_for_exit(node, Duration::from_secs(40))
        .map_err(step_error("end of the node process"))?;
    if status == Some(0) {
        return Ok(());
    }
    let tail = tail(&folder.log("node"), 10);
    let _ = node.kill();
    let _ = node.wait();
    folder.clean_up()?;
    Err(step_error("end of the node process")(io::Error::other(
        format!("it had to be forced: {tail}"),
    )))
}

/// Waits for the process's exit, and returns its exit code: none if a signal or nothing has ended
/// it in time.
fn wait_for_exit(node: &mut Child, bound: Duration) -> io::Result<Option<i32>> {
    let start = Instant::now();
    loop {
        if let Some(status) = node.try_wait()? {
            return Ok(status.code());
        }
        if start.elapsed() > bound {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
