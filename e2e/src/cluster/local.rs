//! A cluster of our own: started, operated on and taken down.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Namespace, Node, ServiceAccount};
use kube::Client;
use kube::api::Api;

use super::components::{CONTAINERD_SOCKET, Component, Layout, NODE};
use super::control::Control;
use super::run_folder::{RunFolder, RunFolderError};
use crate::kube::Toolbox;
use crate::node::{CgroupError, Request};
use crate::progress::Progress;
use crate::wait::{self, Look, TimedOut};

/// How often a state is looked at while waiting for it.
const PAUSE: Duration = Duration::from_millis(100);
/// The bound of each step of the start on a loaded machine; an idle one takes 1 to 5 s.
const STEP: Duration = Duration::from_secs(120);

/// What to start.
#[derive(Debug, Clone)]
pub struct Options {
    /// The cluster's name: of its run folder and its cgroup.
    pub name: String,
    /// The program whose subcommand `node` is the node process.
    pub harness: PathBuf,
    /// Kubernetes and its friends.
    pub toolbox: Toolbox,
    /// How much of a cluster it is.
    pub extent: Extent,
}

/// How much of a cluster is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// A node that runs pods.
    Node,
    /// etcd, the API server and the controller manager, for nodes that are objects only. Nobody minds that they are
    /// never heard of.
    ControlPlane,
}

/// Why a cluster could not be started or operated on.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// Namespaces, mounts and cgroups need it.
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
        /// What was being done.
        step: String,
        /// What the system said.
        source: io::Error,
    },
    /// A component did not become ready.
    #[error("{source}\n--- the end of {log}:\n{tail}")]
    NotReady {
        /// What was waited for.
        source: TimedOut,
        /// The log of the component that it depends on.
        log: PathBuf,
        /// Its last lines.
        tail: String,
    },
    /// A program that acts on the cluster failed.
    #[error("{program} failed ({status}): {stderr}")]
    Program {
        /// Its name.
        program: String,
        /// How it ended.
        status: String,
        /// What it said.
        stderr: String,
    },
}

fn step(what: impl Into<String>) -> impl FnOnce(io::Error) -> LocalError {
    let step = what.into();
    move |source| LocalError::Step { step, source }
}

/// A running cluster of one node. Dropping it takes it down and waits for that.
pub struct Local {
    layout: Layout,
    /// The node process; killed clusters are taken down by it, not by us.
    node: Child,
    control: Option<Control>,
    client: Client,
    /// Dropping leaves it running.
    kept: bool,
}

impl Local {
    /// Starts a cluster and waits until its node, if it is to have one, is Ready and pods can be made in `default`.
    ///
    /// # Errors
    /// When anything of it does not start in its bound; the error has the end of its log. What
    /// was started is taken down again.
    pub async fn up(options: Options, progress: &Progress) -> Result<Self, LocalError> {
        if !rustix::process::geteuid().is_root() {
            return Err(LocalError::NotRoot);
        }
        let folder = RunFolder::of(&options.name)?;
        folder.prepare()?;
        let cgroup = folder.cgroup()?;
        let layout = Layout {
            toolbox: options.toolbox,
            extent: options.extent,
            cgroup_v2: cgroup.is_v2(),
            cgroup_root: cgroup.root(),
            folder: folder.clone(),
        };
        layout.write().map_err(step("configuration files"))?;
        let mut start = Start::node(layout, &options.harness).await?;
        start.components(progress).await?;
        let client = start.client().await?;
        start.ready(&client, progress).await?;
        Ok(start.finish(client))
    }

    /// A client with all rights.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// The kubeconfig file of the administrator, for programs on the host.
    pub fn kubeconfig(&self) -> PathBuf {
        self.layout.folder.kubeconfig()
    }

    /// The node's name.
    pub fn node_name(&self) -> &'static str {
        NODE
    }

    /// The run folder.
    pub fn folder(&self) -> &RunFolder {
        &self.layout.folder
    }

    /// Kubernetes and its friends.
    pub fn toolbox(&self) -> &Toolbox {
        &self.layout.toolbox
    }

    /// A path of the node as this process can open it. Absolute symbolic links in it lead to the
    /// host's files, so name the target (`/run`, not `/var/run`).
    pub fn host_path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.node.id())).join(path.trim_start_matches('/'))
    }

    /// Ids of the cluster's processes whose program has this name (at most 15 bytes count, proc(5)).
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

    /// Ends the kubelet and starts it again; `kill` is SIGKILL, otherwise SIGTERM.
    ///
    /// # Errors
    /// When it does not end or does not start.
    pub async fn restart_kubelet(&mut self, kill: bool) -> Result<(), LocalError> {
        let kubelet = self.layout.kubelet();
        self.restart(&kubelet, kill).await
    }

    /// Ends the kubelet, for a test that does something while it is away.
    ///
    /// # Errors
    /// When it does not end.
    pub async fn stop_kubelet(&mut self) -> Result<(), LocalError> {
        self.end("kubelet", false).await
    }

    /// Starts the kubelet again after [`Self::stop_kubelet`].
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start_kubelet(&mut self) -> Result<(), LocalError> {
        let kubelet = self.layout.kubelet();
        self.start(&kubelet).await
    }

    /// Ends the controller manager, for a test that does something while it is away.
    ///
    /// # Errors
    /// When it does not end.
    pub async fn stop_controller_manager(&mut self) -> Result<(), LocalError> {
        self.end("kube-controller-manager", false).await
    }

    /// Starts the controller manager again after [`Self::stop_controller_manager`].
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start_controller_manager(&mut self) -> Result<(), LocalError> {
        let manager = self.layout.controller_manager();
        self.start(&manager).await
    }

    /// Kills the API server, for a test that does something while it is away. What it stored stays.
    ///
    /// # Errors
    /// When it does not end.
    pub async fn kill_api_server(&mut self) -> Result<(), LocalError> {
        self.end("kube-apiserver", true).await
    }

    /// Starts the API server again after [`Self::kill_api_server`]; it answers a few seconds later.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start_api_server(&mut self) -> Result<(), LocalError> {
        let server = self.layout.apiserver();
        self.start(&server).await
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
        self.end("etcd", false).await?;
        let scratch = self.layout.folder.scratch();
        let scratch = self.host_path(&scratch.to_string_lossy());
        change(&scratch.join("etcd"), &scratch.join("etcd-backup"))
            .map_err(step("copy of etcd's data"))?;
        let etcd = self.layout.etcd();
        self.start(&etcd).await?;
        self.start_api_server().await?;
        let client = self.client();
        let answers = async || match Api::<Namespace>::all(client.clone()).get("default").await {
            Ok(_) => Look::Found(()),
            Err(error) => Look::NotYet(error.to_string()),
        };
        wait::until("the API server", STEP, PAUSE, answers)
            .await
            .map_err(|source| not_ready(&self.layout.folder, "kube-apiserver", source))?;
        self.start_controller_manager().await
    }

    /// Ends containerd and starts it again; containers live on.
    ///
    /// # Errors
    /// When it does not end or does not start.
    pub async fn restart_containerd(&mut self, kill: bool) -> Result<(), LocalError> {
        let containerd = self.layout.containerd();
        self.restart(&containerd, kill).await
    }

    async fn restart(&mut self, component: &Component, kill: bool) -> Result<(), LocalError> {
        self.end(component.name, kill).await?;
        self.start(component).await
    }

    async fn end(&mut self, name: &str, kill: bool) -> Result<(), LocalError> {
        let request = Request::End {
            name: name.to_owned(),
            kill,
        };
        self.control()?
            .ask(&request)
            .await
            .map(drop)
            .map_err(step(format!("end of {name}")))
    }

    async fn start(&mut self, component: &Component) -> Result<(), LocalError> {
        let path = self.layout.toolbox.path().to_string_lossy().into_owned();
        let log = self.layout.folder.log(component.name);
        self.control()?
            .spawn(component, &path, &log)
            .await
            .map_err(step(format!("start of {}", component.name)))
    }

    fn control(&mut self) -> Result<&mut Control, LocalError> {
        let gone = || step("node process")(io::Error::other("its connection is closed"));
        self.control.as_mut().ok_or_else(gone)
    }

    /// Imports an OCI archive into the node's containerd.
    ///
    /// # Errors
    /// When `ctr` fails.
    pub async fn import(&self, archive: &Path) -> Result<(), LocalError> {
        let output = tokio::process::Command::new(self.layout.toolbox.program("ctr"))
            .arg("--address")
            .arg(self.host_path(CONTAINERD_SOCKET))
            .args(["--namespace", "k8s.io", "images", "import", "--local"])
            .arg(archive)
            .output()
            .await
            .map_err(step("ctr"))?;
        if output.status.success() {
            return Ok(());
        }
        let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(LocalError::Program {
            program: "ctr images import".to_owned(),
            status: output.status.to_string(),
            stderr,
        })
    }

    /// Leaves the cluster running when this value is dropped; `down` ends it then.
    ///
    /// # Errors
    /// When the node process is gone.
    pub async fn keep(mut self) -> Result<RunFolder, LocalError> {
        self.control()?
            .ask(&Request::Keep)
            .await
            .map_err(step("keep"))?;
        self.kept = true;
        Ok(self.layout.folder.clone())
    }

    /// Takes the cluster down and says how that went; dropping does the same silently.
    ///
    /// # Errors
    /// When something of it is left.
    pub fn down(mut self) -> Result<(), LocalError> {
        self.end_node()
    }

    fn end_node(&mut self) -> Result<(), LocalError> {
        // The node process takes everything down when its owner's connection closes.
        self.control = None;
        let folder = &self.layout.folder;
        let status = reap(&mut self.node, Duration::from_secs(40))
            .map_err(step("end of the node process"))?;
        if status == Some(0) {
            return Ok(());
        }
        let tail = tail(&folder.log("node"), 10);
        let _ = self.node.kill();
        let _ = self.node.wait();
        folder.sweep()?;
        Err(step("end of the node process")(io::Error::other(format!(
            "it had to be forced: {tail}"
        ))))
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        if !self.kept && self.control.is_some() {
            // Nothing can be done about a failure here; the next start sweeps.
            let _ = self.end_node();
        }
    }
}

/// Takes down the cluster of this name, if there is one.
///
/// # Errors
/// When something of it is left.
pub async fn down(name: &str) -> Result<(), LocalError> {
    let folder = RunFolder::of(name)?;
    if folder.is_up()? {
        let mut control = Control::connect(&folder.control())
            .await
            .map_err(step("node process"))?;
        control
            .ask(&Request::Stop { keep_logs: false })
            .await
            .map_err(step("stop"))?;
        let gone = async || match folder.is_up() {
            Ok(false) => Look::Found(()),
            Ok(true) => Look::NotYet("the node process still works on it".to_owned()),
            Err(error) => Look::NotYet(error.to_string()),
        };
        let bound = Duration::from_secs(40);
        wait::until("the end of the cluster", bound, PAUSE, gone)
            .await
            .map_err(|source| not_ready(&folder, "node", source))?;
    }
    Ok(folder.sweep()?)
}

/// A cluster on its way up; dropped half-way, it is taken down.
struct Start {
    layout: Layout,
    node: Option<Child>,
    control: Option<Control>,
}

impl Start {
    /// Starts the node process and becomes its owner.
    async fn node(layout: Layout, harness: &Path) -> Result<Self, LocalError> {
        let folder = layout.folder.clone();
        let log = File::create(folder.log("node")).map_err(step("log of the node process"))?;
        let node = Command::new(harness)
            .args(["node", "--name", folder.name()])
            // Ctrl-C in a terminal goes to the harness alone, which then closes the connection.
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .map_err(step(harness.display().to_string()))?;
        let mut start = Self {
            layout,
            node: Some(node),
            control: None,
        };
        let mut control = start.connect().await?;
        control
            .ask(&Request::Own)
            .await
            .map_err(step("node process"))?;
        start.control = Some(control);
        Ok(start)
    }

    async fn connect(&mut self) -> Result<Control, LocalError> {
        let begin = Instant::now();
        loop {
            let folder = &self.layout.folder;
            let ended = match self.node.as_mut() {
                Some(node) => node.try_wait().map_err(step("node process"))?,
                None => None,
            };
            if let Some(status) = ended {
                let said = tail(&folder.log("node"), 10);
                return Err(step("node process")(io::Error::other(format!(
                    "{status}: {said}"
                ))));
            }
            match Control::connect(&folder.control()).await {
                Ok(control) => return Ok(control),
                Err(error) if begin.elapsed() > Duration::from_secs(10) => {
                    return Err(step("node process's socket")(error));
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }

    fn control(&mut self) -> Result<&mut Control, LocalError> {
        let gone = || step("node process")(io::Error::other("its connection is closed"));
        self.control.as_mut().ok_or_else(gone)
    }

    /// Starts every component; they wait for each other themselves, but the API server for etcd.
    async fn components(&mut self, progress: &Progress) -> Result<(), LocalError> {
        let layout = self.layout.clone();
        let path = layout.toolbox.path().to_string_lossy().into_owned();
        let folder = layout.folder.clone();
        let port = fs::read_to_string(folder.port()).map_err(step("port of the API server"))?;
        let port = port
            .parse()
            .map_err(|error| step("port of the API server")(io::Error::other(error)))?;
        layout
            .write_host_kubeconfig(port)
            .map_err(step("kubeconfig"))?;
        let mut components = vec![layout.etcd(), layout.apiserver()];
        match layout.extent {
            Extent::Node => components.extend([
                layout.containerd(),
                layout.controller_manager(),
                layout.scheduler(),
                layout.kubelet(),
            ]),
            Extent::ControlPlane => components.push(layout.controller_manager()),
        }
        for component in components {
            if component.name == "kube-controller-manager" {
                self.api_ready(progress).await?;
            }
            let log = folder.log(component.name);
            let spawned = self.control()?.spawn(&component, &path, &log).await;
            spawned.map_err(step(format!("start of {}", component.name)))?;
        }
        Ok(())
    }

    async fn api_ready(&mut self, progress: &Progress) -> Result<(), LocalError> {
        let client = self.client().await?;
        let look = async || {
            let request = http::Request::get("/readyz").body(Vec::new());
            match request {
                Err(error) => Look::Never(error.to_string()),
                Ok(request) => match client.request_text(request).await {
                    Ok(_) => Look::Found(()),
                    Err(error) => Look::NotYet(error.to_string()),
                },
            }
        };
        self.wait("the API server", &["etcd", "kube-apiserver"], look)
            .await?;
        progress.say("API server is ready");
        Ok(())
    }

    /// Waits for something that the components `needs` bring about; the end of one of them ends
    /// the wait. The error has the end of its log, or of the last one's.
    async fn wait(
        &mut self,
        what: &str,
        needs: &[&'static str],
        look: impl AsyncFn() -> Look<()>,
    ) -> Result<(), LocalError> {
        let folder = self.layout.folder.clone();
        let control = self.control()?;
        let mut to_blame = needs.last().copied().unwrap_or("node");
        let waited = wait::until(what, STEP, PAUSE, async || {
            for name in needs {
                if let Ok(Some(how)) = control.ended(name).await {
                    to_blame = name;
                    return Look::Never(format!("{name} ended with {how}"));
                }
            }
            look().await
        })
        .await;
        waited.map_err(|source| not_ready(&folder, to_blame, source))
    }

    async fn client(&self) -> Result<Client, LocalError> {
        let client = super::client(&self.layout.folder.kubeconfig()).await;
        client.map_err(|error| step("kubeconfig")(io::Error::other(error)))
    }

    async fn ready(&mut self, client: &Client, progress: &Progress) -> Result<(), LocalError> {
        if self.layout.extent == Extent::Node {
            self.node_ready(client, progress).await?;
        }
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), "default");
        let account = async || match accounts.get_opt("default").await {
            Ok(Some(_)) => Look::Found(()),
            Ok(None) => Look::NotYet("it is not there".to_owned()),
            Err(error) => Look::NotYet(error.to_string()),
        };
        self.wait(
            "the default service account",
            &["kube-controller-manager"],
            account,
        )
        .await
    }

    async fn node_ready(&mut self, client: &Client, progress: &Progress) -> Result<(), LocalError> {
        let nodes: Api<Node> = Api::all(client.clone());
        let node = async || match nodes.get_opt(NODE).await {
            Ok(Some(node)) => node_state(&node),
            Ok(None) => Look::NotYet("it has not registered".to_owned()),
            Err(error) => Look::NotYet(error.to_string()),
        };
        self.wait("the node to be Ready", &["containerd", "kubelet"], node)
            .await?;
        progress.say("node is Ready");
        Ok(())
    }

    fn finish(mut self, client: Client) -> Local {
        let node = self
            .node
            .take()
            .expect("the node process is there until the start is finished");
        Local {
            layout: self.layout.clone(),
            node,
            control: self.control.take(),
            client,
            kept: false,
        }
    }
}

impl Drop for Start {
    fn drop(&mut self) {
        self.control = None;
        if let Some(mut node) = self.node.take() {
            let _ = reap(&mut node, Duration::from_secs(40));
        }
    }
}

/// Copies a folder to a path where nothing is.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let status = Command::new("cp").arg("-a").arg(from).arg(to).status()?;
    match status.success() {
        true => Ok(()),
        false => Err(io::Error::other(format!("cp: {status}"))),
    }
}

fn node_state(node: &Node) -> Look<()> {
    let conditions = node
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    match conditions
        .into_iter()
        .find(|condition| condition.type_ == "Ready")
    {
        Some(ready) if ready.status == "True" => Look::Found(()),
        Some(ready) => Look::NotYet(ready.message.clone().unwrap_or_default()),
        None => Look::NotYet("it has no Ready condition".to_owned()),
    }
}

fn not_ready(folder: &RunFolder, component: &str, source: TimedOut) -> LocalError {
    let log = folder.log(component);
    LocalError::NotReady {
        source,
        tail: tail(&log, 15),
        log,
    }
}

/// The last lines of a log.
fn tail(path: &Path, count: usize) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

/// Waits for the process's end: its exit code, or none if it was killed or lives on.
fn reap(node: &mut Child, bound: Duration) -> io::Result<Option<i32>> {
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
