//! Fixture of a node: simulated GPUs, the fake kubelet, cgroups that are plain folders, and the
//! agent as a process.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use bursar_sim_lab::SimMachine;
pub(crate) use bursar_sim_lab::TWO_GPUS;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

pub(crate) use crate::common::agent::GPU;
use crate::common::kubelet::{FakeKubelet, Phase, Pod};
use crate::common::steps::{is_running, temporary_files};
use crate::common::{PATIENCE, eventually};

/// The agent's error while the installation of the shim exceeds its timeout.
pub(crate) const INSTALLATION_LATE: &str = "failed to install the shim's files within 2s";

/// The most time until the node is clean after the agent's death.
const CLEAN_WITHIN: Duration = Duration::from_secs(10);

pub(crate) struct Machine {
    pub(crate) lab: SimMachine,
    pub(crate) kubelet: FakeKubelet,
    pub(crate) root: TempDir,
    agent: Option<Child>,
    /// The length of the log at the agent's start.
    log_start: usize,
}

impl Machine {
    /// A machine with two GPUs of 16 GiB and a running kubelet, without an agent.
    pub(crate) async fn new() -> Self {
        Self::with_driver(TWO_GPUS).await
    }

    /// A machine like that of [`Machine::new`], with this configuration of the simulated driver.
    pub(crate) async fn with_driver(config: &str) -> Self {
        let (lab, root) = (
            SimMachine::new(config).unwrap(),
            tempfile::tempdir().unwrap(),
        );
        let mut kubelet = FakeKubelet::new(root.path(), 7);
        kubelet.start();
        kubelet.sync_pods().await;
        for folder in ["cgroup/kubepods", "shim", "cdi", "run", "state"] {
            fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
            fs::copy(lab.library(name), root.path().join("shim").join(name)).unwrap();
        }
        let machine = Self {
            lab,
            kubelet,
            root,
            agent: None,
            log_start: 0,
        };
        let config = crate::common::agent::config(machine.root.path(), machine.lab.path())
            + "[binding]\nwait = \"1s\"\n";
        fs::write(machine.path("agent.toml"), config).unwrap();
        machine
    }

    /// A machine with a registered agent.
    pub(crate) async fn started() -> Self {
        let mut machine = Self::new().await;
        machine.start_agent();
        machine.kubelet.until_allocatable(GPU, 32).await;
        machine
    }

    pub(crate) fn path(&self, below: &str) -> PathBuf {
        self.root.path().join(below)
    }

    pub(crate) fn command(&self) -> Command {
        let mut command = self.lab.command(env!("CARGO_BIN_EXE_bursar-agent"));
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.path("agent.log"))
            .unwrap();
        command
            .arg("--config")
            .arg(self.path("agent.toml"))
            .args(["--node-name", "node-1", "--log-format", "text"])
            .env("HOME", self.root.path())
            // A small node has two cores. The number on this machine must not matter.
            .env("TOKIO_WORKER_THREADS", "2")
            // The shims are debug builds of 13 MB here. After the first installation has freed its
            // copy, glibc would keep that much of the next one.
            .env("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072")
            .env_remove("KUBECONFIG")
            .env_remove("KUBERNETES_SERVICE_HOST")
            .stdin(Stdio::null())
            .stderr(log);
        command
    }

    pub(crate) fn start_agent(&mut self) {
        self.start_agent_with(self.command());
    }

    /// Starts an agent by a command made from [`Machine::command`].
    pub(crate) fn start_agent_with(&mut self, mut command: Command) {
        assert!(self.agent.is_none(), "running already");
        self.log_start = self.log().len();
        self.agent = Some(command.spawn().unwrap());
    }

    #[allow(dead_code, reason = "as above")]
    /// Whether the agent runs, though its parent has not waited for its end.
    pub(crate) fn is_agent_running(&self) -> bool {
        is_running(self.agent_pid())
    }

    /// Kills the agent with SIGKILL, so that it runs no cleanup.
    pub(crate) fn kill_agent(&mut self) {
        let mut agent = self.agent.take().expect("a running agent");
        agent.kill().unwrap();
        agent.wait().unwrap();
    }

    pub(crate) async fn restart_agent(&mut self) -> Duration {
        self.kill_agent();
        self.start_successor().await
    }

    /// Starts another agent. Returns the time until it registered.
    pub(crate) async fn start_successor(&mut self) -> Duration {
        let before = self.registrations();
        self.start_agent();
        self.until_registered(before).await
    }

    /// Waits until there are more than `before` registrations. Returns the time that this took.
    pub(crate) async fn until_registered(&self, before: usize) -> Duration {
        let time = eventually("a registration", || self.registrations() > before).await;
        self.kubelet.until_allocatable(GPU, 32).await;
        time
    }

    /// Stops the agent with SIGTERM and returns its exit status.
    pub(crate) async fn stop_agent(&mut self) -> ExitStatus {
        let agent = self.agent.as_mut().expect("a running agent");
        let pid = rustix::process::Pid::from_child(agent);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let mut status = None;
        eventually("the agent's end", || {
            status = agent.try_wait().unwrap();
            status.is_some()
        })
        .await;
        self.agent = None;
        status.expect("it has ended")
    }

    #[allow(
        dead_code,
        reason = "the tests of retained memory find its provisioners"
    )]
    pub(crate) fn agent_pid(&self) -> u32 {
        self.agent.as_ref().expect("a running agent").id()
    }

    #[allow(dead_code, reason = "only some tests use them")]
    /// The agent's processes that call NVML.
    pub(crate) fn nvml_processes(&self) -> Vec<u32> {
        let agent = self.agent_pid();
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let pids = processes.filter_map(|process| process.file_name().to_str()?.parse().ok());
        let is_caller = |pid: &u32| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let Some((name, rest)) = stat.rsplit_once(") ") else {
                return false;
            };
            let parent = rest.split(' ').nth(1).and_then(|pid| pid.parse().ok());
            name.ends_with("(bursar-nvml") && parent == Some(agent) && !rest.starts_with('Z')
        };
        pids.filter(is_caller).collect()
    }

    pub(crate) fn is_agent_alive(&mut self) -> bool {
        self.agent
            .as_mut()
            .is_some_and(|agent| agent.try_wait().unwrap().is_none())
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.path("agent.log")).unwrap_or_default()
    }

    /// The address at which the agent serves `path`, according to its log.
    pub(crate) async fn address(&self, path: &str) -> SocketAddr {
        let field = if path == "/metrics" {
            " address="
        } else {
            " probes="
        };
        let mut address = None;
        eventually("the agent to say where it listens", || {
            let log = self.log().split_off(self.log_start);
            let line = log.split("metrics and probes").nth(1);
            address = line.and_then(|line| {
                let address = line.lines().next()?.split(field).nth(1)?;
                address
                    .split_whitespace()
                    .next()?
                    .parse::<SocketAddr>()
                    .ok()
            });
            address.is_some()
        })
        .await;
        address.expect("it said so")
    }

    /// Sends a GET of `path` to the agent. Returns the status code and the body.
    pub(crate) async fn get(&self, path: &str) -> (u16, String) {
        let address = self.address(path).await;
        let request = format!("GET {path} HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n");
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let code = head.split(' ').nth(1).unwrap().parse().unwrap();
        (code, body.to_owned())
    }

    pub(crate) fn registrations(&self) -> usize {
        self.kubelet
            .count(|call| matches!(call, crate::common::kubelet::Call::Register(..)))
    }

    pub(crate) fn cgroup(&self, pod: &Pod) -> PathBuf {
        self.path(&format!("cgroup/kubepods/pod{}", pod.uid))
    }

    #[allow(dead_code, reason = "the audit's tests have processes")]
    /// Places a process in the pod's container `main`, as the agent sees it.
    pub(crate) fn adopt(&self, pod: &Pod, pid: u32) {
        let folder = self.cgroup(pod).join("main");
        fs::create_dir_all(&folder).unwrap();
        let procs = folder.join("cgroup.procs");
        let before = fs::read_to_string(&procs).unwrap_or_default();
        self.show(pid, &format!("0::/kubepods/pod{}/main\n", pod.uid));
        fs::write(procs, format!("{before}{pid}\n")).unwrap();
    }

    #[allow(dead_code, reason = "as above")]
    /// Removes an exited process from the agent's `/proc`, because its pid may be used again.
    pub(crate) fn remove_process(&self, pid: u32) {
        fs::remove_dir_all(self.path(&format!("proc/{pid}"))).unwrap();
    }

    #[allow(dead_code, reason = "as above")]
    /// Creates the `/proc` entry of a process in this cgroup for the agent.
    pub(crate) fn show(&self, pid: u32, cgroup: &str) {
        let folder = self.path(&format!("proc/{pid}"));
        fs::create_dir_all(&folder).unwrap();
        for name in [
            "stat",
            "status",
            "maps",
            "mountinfo",
            "environ",
            "ns",
            "root",
            "task",
        ] {
            let real = format!("/proc/{pid}/{name}");
            std::os::unix::fs::symlink(real, folder.join(name)).unwrap();
        }
        fs::write(folder.join("cgroup"), cgroup).unwrap();
    }

    /// Admits a pod with one container of `gib` GiB and creates its cgroup.
    pub(crate) async fn admit(&self, name: &str, gib: usize) -> Pod {
        let pod = Pod::with(name, GPU, gib);
        self.kubelet.admit(&pod).await.unwrap();
        fs::create_dir_all(self.cgroup(&pod)).unwrap();
        pod
    }

    /// Lets the kubelet start the pod's container once.
    pub(crate) async fn start_once(&self, pod: &Pod) -> Result<Vec<String>, String> {
        Ok(self.kubelet.start_container(pod, "main").await?.cdi_devices)
    }

    /// Lets the kubelet start the container. It retries while a busy machine is late with the
    /// installation of the shim.
    pub(crate) async fn start(&self, pod: &Pod) -> Result<Vec<String>, String> {
        let start = Instant::now();
        loop {
            let started = self.start_once(pod).await;
            let is_late = |error: &String| error.contains(INSTALLATION_LATE);
            if !started.as_ref().is_err_and(is_late) || start.elapsed() > PATIENCE {
                return started;
            }
        }
    }

    /// Waits until the agent refuses the pod with these words. A new agent first checks for half a
    /// second whether used memory is free.
    pub(crate) async fn until_refused(&self, pod: &Pod, words: &str) {
        let start = Instant::now();
        loop {
            let error = self.start(pod).await.unwrap_err();
            if error.contains(words) {
                return;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "{error}");
        }
    }

    pub(crate) async fn run(&self, name: &str, gib: usize) -> Pod {
        let pod = self.admit(name, gib).await;
        self.start(&pod).await.unwrap();
        pod
    }

    #[allow(dead_code, reason = "as above")]
    /// Runs a pod, unless the agent refuses or dies.
    pub(crate) async fn try_run(&self, name: &str, gib: usize) -> Option<Pod> {
        let pod = Pod::with(name, GPU, gib);
        self.kubelet.admit(&pod).await.ok()?;
        fs::create_dir_all(self.cgroup(&pod)).unwrap();
        self.start(&pod).await.ok()?;
        Some(pod)
    }

    /// Ends the pod's last process and removes its cgroup.
    pub(crate) fn end(&self, pod: &Pod) {
        self.kubelet.pod_ended(pod, Phase::Succeeded);
        fs::remove_dir_all(self.cgroup(pod)).unwrap();
    }

    /// Retries as the kubelet does until the container starts. Returns the time that this took.
    pub(crate) async fn until_started(&self, pod: &Pod) -> Duration {
        let start = Instant::now();
        while let Err(error) = self.start(pod).await {
            assert!(start.elapsed() < PATIENCE, "{error}");
            // A kubelet without a plugin refuses at once, and serves the plugin's registration.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        start.elapsed()
    }

    #[allow(dead_code, reason = "the tests of crash points use it")]
    /// Starts the next agent after one that has died.
    pub(crate) async fn replace_dead_agent(&mut self, description: &str) {
        let mut agent = self.agent.take().expect("an agent");
        agent.wait().unwrap();
        let found = timeout(CLEAN_WITHIN, self.start_successor()).await;
        assert!(found.is_ok(), "{description}: it does not register");
    }

    #[allow(dead_code, reason = "as above")]
    /// The agent keeps the pods that run, releases the others, and offers all memory again.
    pub(crate) async fn assert_clean(&self, description: &str) {
        for pod in &self.kubelet.pods() {
            if self.kubelet.assigned(pod, "main", GPU).is_empty() {
                // The kubelet was about to admit it.
                self.kubelet.pod_deleted(pod);
                continue;
            }
            fs::create_dir_all(self.cgroup(pod)).unwrap();
            let started = timeout(CLEAN_WITHIN, self.until_started(pod)).await;
            assert!(started.is_ok(), "{description}: {} does not start", pod.uid);
            self.end(pod);
        }
        let nothing = || self.devices().is_empty() && self.sockets() == 0;
        let clean = timeout(CLEAN_WITHIN, eventually("nothing left", nothing)).await;
        assert!(clean.is_ok(), "{description}: {:?}", self.devices());
        for name in ["whole", "other"] {
            let pod = self.admit(name, 16).await;
            let started = timeout(CLEAN_WITHIN, self.until_started(&pod)).await;
            assert!(started.is_ok(), "{description}: memory is lost");
        }
        // The next write of a record replaces its temporary file. Those in the state folder are
        // rare.
        for folder in ["run", "cdi"] {
            let left = temporary_files(&self.path(folder));
            assert!(left.is_empty(), "{description}: {left:?}");
        }
    }

    /// The CDI files by name, each with the GPUs and quotas of its pod.
    pub(crate) fn devices(&self) -> BTreeMap<String, String> {
        let entries = fs::read_dir(self.path("cdi")).unwrap().flatten();
        // None where the agent removed the file after the listing.
        let binding = |path: &Path| {
            let spec = fs::read(path).ok()?;
            let spec: serde_json::Value = serde_json::from_slice(&spec).unwrap();
            let binding = spec["annotations"]["bursar.dev/binding"].as_str();
            Some(binding.unwrap().to_owned())
        };
        let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
        entries
            .map(|entry| entry.path())
            .filter_map(|path| Some((name(&path), binding(&path)?)))
            .collect()
    }

    /// The number of sockets that a shim can connect to.
    pub(crate) fn sockets(&self) -> usize {
        let folders = fs::read_dir(self.path("run/alloc")).unwrap().flatten();
        folders
            .filter(|folder| {
                std::os::unix::net::UnixStream::connect(folder.path().join("agent.sock")).is_ok()
            })
            .count()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            let _gone = agent.kill();
            let _reaped = agent.wait();
        }
        if std::thread::panicking() {
            let log = self.log();
            let last = log.get(self.log_start..).unwrap_or(&log);
            eprintln!("the last agent's log:\n{last}");
        }
    }
}
