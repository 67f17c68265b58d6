//! Fixture of a node with many device ids: the simulated driver, the fake kubelet, cgroups that are
//! plain folders, and the agent as a process.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use bursar_sim_lab::SimMachine;

use super::agent::{GPU, config};
use super::kubelet::{Call, FakeKubelet, Pod};

/// The result of a step of a test.
pub type Outcome<T> = Result<T, Box<dyn Error>>;

pub struct Node {
    pub kubelet: FakeKubelet,
    pub agent: Child,
    cgroups: PathBuf,
    _lab: SimMachine,
    _root: tempfile::TempDir,
}

fn gpus(count: usize, quanta: usize) -> String {
    let gpu = |i| {
        let uuid = format!("GPU-00000000-0000-0000-0000-{i:012}");
        format!(
            "[[gpu]]\nname = \"NVIDIA H200\"\nuuid = \"{uuid}\"\nmemory = \"{quanta}Gi\"\nminor = {i}\n"
        )
    };
    (0..count).map(gpu).collect()
}

impl Node {
    /// Starts a node with `count` GPUs of `quanta` each. `agent` makes the agent's command from the
    /// path of its configuration.
    pub async fn new(
        count: usize,
        quanta: usize,
        agent: impl FnOnce(&SimMachine, &Path) -> Command,
    ) -> Outcome<Self> {
        // On a real node the agent's run folder and the CDI folder are on a tmpfs too.
        let root = tempfile::tempdir_in("/dev/shm")?;
        let lab = SimMachine::new(&gpus(count, quanta))?;
        let cgroups = root.path().join("cgroup/kubepods");
        for dir in ["cgroup/kubepods", "state", "run", "cdi", "shim"] {
            std::fs::create_dir_all(root.path().join(dir))?;
        }
        for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
            std::fs::copy(lab.library(name), root.path().join("shim").join(name))?;
        }
        let file = root.path().join("agent.toml");
        std::fs::write(&file, config(root.path(), lab.path()))?;
        let mut kubelet = FakeKubelet::new(root.path(), 7);
        kubelet.start();
        kubelet.sync_pods().await;
        let node = Self {
            agent: agent(&lab, &file)
                .env_remove("KUBECONFIG")
                .env_remove("KUBERNETES_SERVICE_HOST")
                .spawn()?,
            kubelet,
            cgroups,
            _lab: lab,
            _root: root,
        };
        node.kubelet.until_allocatable(GPU, count * quanta).await;
        Ok(node)
    }

    /// The agent's command.
    pub fn program(
        lab: &SimMachine,
        program: impl AsRef<std::ffi::OsStr>,
        config: &Path,
    ) -> Command {
        let mut command = lab.command(program);
        command
            .args(["--node-name", "bench", "--log", "error", "--config"])
            .arg(config)
            .stdin(Stdio::null());
        command
    }

    /// The socket that the agent has registered.
    pub fn socket(&self) -> Option<PathBuf> {
        self.kubelet
            .calls()
            .into_iter()
            .find_map(|call| match call {
                Call::Register(_, endpoint) => Some(self.kubelet.dir().join(endpoint)),
                _ => None,
            })
    }

    /// Admits a pod with `size` device ids and starts its container.
    pub async fn start(&self, name: &str, size: usize) -> Outcome<Pod> {
        let pod = Pod::with(name, GPU, size);
        self.kubelet.admit(&pod).await?;
        std::fs::create_dir(self.cgroup(&pod))?;
        self.kubelet.start_container(&pod, "main").await?;
        Ok(pod)
    }

    /// Deletes the pod.
    pub fn end(&self, pod: &Pod) -> Outcome<()> {
        self.kubelet.pod_deleted(pod);
        Ok(std::fs::remove_dir(self.cgroup(pod))?)
    }

    fn cgroup(&self, pod: &Pod) -> PathBuf {
        self.cgroups.join(format!("pod{}", pod.uid))
    }

    /// The resident memory of the agent's process, in MiB.
    pub fn agent_rss(&self) -> Outcome<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.agent.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line
            .and_then(|line| line.trim().strip_suffix(" kB"))
            .ok_or("no VmRSS")?;
        Ok(kib.trim().parse::<f64>()? / 1024.0)
    }

    /// The processor time of the agent and its child processes, in seconds.
    pub fn agent_processor(&self) -> Outcome<f64> {
        let agent = self.agent.id();
        let mut seconds = 0.0;
        for process in std::fs::read_dir("/proc")?.flatten() {
            // A process that is no child of the agent may end while its files are read.
            let Ok(stat) = std::fs::read_to_string(process.path().join("stat")) else {
                continue;
            };
            let fields = stat.rsplit_once(')').ok_or("no stat")?.1;
            let fields: Vec<&str> = fields.split_whitespace().collect();
            let is_agent = process.file_name() == agent.to_string().as_str();
            if is_agent || fields[1] == agent.to_string() {
                // User and system time, of ended children too, in ticks of 10 ms.
                for ticks in &fields[11..15] {
                    seconds += ticks.parse::<f64>()? / 100.0;
                }
            }
        }
        Ok(seconds)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ended_before = self.agent.kill();
        let _reaped = self.agent.wait();
    }
}
