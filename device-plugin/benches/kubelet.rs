//! What the kubelet waits for: Allocate, PreStartContainer and ListAndWatch through gRPC on a Unix socket.
//!
//! The agent is `bursar-agent` itself, a process of its own over the simulated driver, with its checkpoint, CDI files
//! and sessions; the tests' fake kubelet asks. Beside each time stands the floor: the same caller's empty
//! call to the same socket in the same minute. Pods take 1 to 16 tokens, and the oldest makes room; a pod's memory is
//! free when the agent has seen its cgroup end, so flat out comes in bursts.
//!
//! `cargo bench -p bursar-device-plugin --bench kubelet`

#[path = "../tests/common/mod.rs"]
mod common;

use std::collections::VecDeque;
use std::error::Error;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use bursar_device_plugin::kubelet::api::deviceplugin::Empty;
use bursar_device_plugin::kubelet::api::deviceplugin::device_plugin_client::DevicePluginClient;
use bursar_sim_lab::Lab;
use prost::Message as _;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tonic::transport::{Channel, Endpoint};

use common::agent::{GPU, config};
use common::kubelet::{Call, FakeKubelet, Pod};

const GPUS: usize = 8;
/// Quanta of each.
const QUANTA: usize = 141;
/// Tokens that are held at a time.
const BUSY: usize = 400;
/// Pods of a burst, and the pause after it: two looks at the cgroups.
const BURST: (usize, Duration) = (60, Duration::from_millis(1000));

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let mut threads = tokio::runtime::Builder::new_multi_thread();
    threads
        .worker_threads(2)
        .enable_all()
        .build()?
        .block_on(async {
            calls().await?;
            lists().await
        })
}

/// A node with its agent's process.
struct Node {
    kubelet: FakeKubelet,
    agent: Child,
    empty: DevicePluginClient<Channel>,
    cgroups: PathBuf,
    alive: VecDeque<(Pod, usize)>,
    busy: usize,
    next: usize,
    random: StdRng,
    _lab: Lab,
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
    async fn new(count: usize, quanta: usize) -> Outcome<Self> {
        // As on a node, where the agent's run folder and the CDI folder are on a tmpfs.
        let root = tempfile::tempdir_in("/dev/shm")?;
        let lab = Lab::new(&gpus(count, quanta))?;
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
        let agent = lab
            .command(env!("CARGO_BIN_EXE_bursar-agent"))
            .args(["--node-name", "bench", "--log", "error", "--config"])
            .arg(file)
            .env_remove("KUBECONFIG")
            .stdin(Stdio::null())
            .spawn()?;
        kubelet.until_allocatable(GPU, count * quanta).await;
        let socket = kubelet.calls().into_iter().find_map(|call| match call {
            Call::Register(_, endpoint) => Some(kubelet.dir().join(endpoint)),
            _ => None,
        });
        let socket = socket.ok_or("no registration")?;
        let channel = Endpoint::try_from(format!("unix://{}", socket.display()))?;
        Ok(Self {
            kubelet,
            agent,
            empty: DevicePluginClient::new(channel.connect().await?),
            cgroups,
            alive: VecDeque::new(),
            busy: 0,
            next: 0,
            random: StdRng::seed_from_u64(7),
            _lab: lab,
            _root: root,
        })
    }

    async fn empty_call(&mut self) -> Outcome<Duration> {
        let start = Instant::now();
        self.empty.get_device_plugin_options(Empty {}).await?;
        Ok(start.elapsed())
    }

    /// One pod comes, and those that are too many go.
    async fn one_pod(&mut self) -> Outcome<()> {
        let size = self.random.random_range(1..=16);
        while self.busy + size > BUSY {
            let Some((pod, size)) = self.alive.pop_front() else {
                break;
            };
            self.kubelet.pod_deleted(&pod);
            std::fs::remove_dir(self.cgroup(&pod))?;
            self.busy -= size;
        }
        let pod = Pod::with(&format!("p{}", self.next), GPU, size);
        self.kubelet.admit(&pod).await?;
        std::fs::create_dir(self.cgroup(&pod))?;
        self.kubelet.start_container(&pod, "main").await?;
        self.alive.push_back((pod, size));
        (self.busy, self.next) = (self.busy + size, self.next + 1);
        Ok(())
    }

    fn cgroup(&self, pod: &Pod) -> PathBuf {
        self.cgroups.join(format!("pod{}", pod.uid))
    }

    /// Resident memory of the agent's process, in MiB.
    fn agent_rss(&self) -> Outcome<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.agent.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line
            .and_then(|line| line.trim().strip_suffix(" kB"))
            .ok_or("no VmRSS")?;
        Ok(kib.trim().parse::<f64>()? / 1024.0)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ended_before = self.agent.kill();
        let _reaped = self.agent.wait();
    }
}

async fn calls() -> Outcome<()> {
    println!("Calls: {GPUS} GPUs of {QUANTA} tokens, pods of 1 to 16, {BUSY} tokens held");
    println!(
        "{:<34}{:>10}{:>10}{:>10}{:>8}",
        "", "p50", "p99", "max", "calls"
    );
    let mut node = Node::new(GPUS, QUANTA).await?;
    println!("agent RSS, no pod: {:.1} MiB", node.agent_rss()?);
    for _ in 0..60 {
        node.one_pod().await?;
    }
    node.kubelet.take_times();
    at_100_a_second(&mut node, 1000).await?;
    flat_out(&mut node, 30).await?;
    println!(
        "agent RSS, {} pods: {:.1} MiB (goal 20)\n",
        node.alive.len(),
        node.agent_rss()?
    );
    Ok(())
}

async fn at_100_a_second(node: &mut Node, pods: usize) -> Outcome<()> {
    let mut tick = tokio::time::interval(Duration::from_millis(10));
    let mut floor = Vec::with_capacity(pods);
    for _ in 0..pods {
        tick.tick().await;
        floor.push(node.empty_call().await?);
        node.one_pod().await?;
    }
    rows(node, "at 100/s", floor);
    Ok(())
}

async fn flat_out(node: &mut Node, bursts: usize) -> Outcome<()> {
    let (pods, pause) = BURST;
    let (mut floor, mut busy) = (Vec::new(), Duration::ZERO);
    for _ in 0..bursts {
        tokio::time::sleep(pause).await;
        let start = Instant::now();
        for _ in 0..pods {
            floor.push(node.empty_call().await?);
            node.one_pod().await?;
        }
        busy += start.elapsed();
    }
    let rate = floor.len() as f64 / busy.as_secs_f64();
    rows(node, "flat out", floor);
    println!("{rate:.0} pods/s flat out, with the fake kubelet's own work");
    Ok(())
}

fn rows(node: &Node, how: &str, floor: Vec<Duration>) {
    let times = node.kubelet.take_times();
    println!("{}", line(&format!("empty call, {how}"), floor));
    println!("{}", line(&format!("Allocate, {how}"), times.allocate));
    println!(
        "{}",
        line(&format!("PreStartContainer, {how}"), times.pre_start)
    );
}

async fn lists() -> Outcome<()> {
    println!("ListAndWatch, from the call to the first message");
    println!(
        "{:<34}{:>10}{:>10}{:>10}{:>8}{:>10}",
        "", "p50", "p99", "max", "calls", "bytes"
    );
    for (count, quanta) in [(1, 160), (GPUS, QUANTA), (8, 512)] {
        let mut node = Node::new(count, quanta).await?;
        let (mut times, mut bytes) = (Vec::new(), 0);
        for _ in 0..300 {
            let start = Instant::now();
            let mut stream = node.empty.list_and_watch(Empty {}).await?.into_inner();
            let list = stream.message().await?.ok_or("no list")?;
            times.push(start.elapsed());
            bytes = list.encoded_len();
        }
        println!(
            "{}{bytes:>10}",
            line(&format!("{} tokens", count * quanta), times)
        );
    }
    Ok(())
}

fn line(name: &str, mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
    let us = |time: Duration| format!("{} us", time.as_micros());
    let (p50, p99, max) = (us(at(0.5)), us(at(0.99)), us(at(1.0)));
    format!("{name:<34}{p50:>10}{p99:>10}{max:>10}{:>8}", times.len())
}
