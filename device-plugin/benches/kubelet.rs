//! What the kubelet waits for: Allocate, PreStartContainer and ListAndWatch through gRPC on a Unix socket.
//!
//! The agent is a process of its own (this program again, with the real plugin, lifecycle, checkpoint reader and
//! ledger of 8 GPUs with 141 quanta each); the tests' fake kubelet asks. Beside each time stands the floor: the
//! same caller's empty call to the same socket in the same minute. Pods take 1 to 32 tokens and the oldest makes
//! room, at about 60 % of the node.
//!
//! `cargo bench -p bursar-device-plugin --bench kubelet`

#[path = "../tests/common/mod.rs"]
mod common;

use std::collections::VecDeque;
use std::error::Error;
use std::io::{BufRead as _, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bursar_device_plugin::kubelet::api::deviceplugin::Empty;
use bursar_device_plugin::kubelet::api::deviceplugin::device_plugin_client::DevicePluginClient;
use prost::Message as _;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tonic::transport::{Channel, Endpoint};

use common::agent::{Agent, GPU, devices, ledger};
use common::kubelet::{Call, FakeKubelet, Pod};

const GPUS: [u32; 8] = [141; 8];
const TOKENS: usize = 8 * 141;
/// Tokens that are held at a time.
const BUSY: usize = TOKENS * 6 / 10;

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().collect();
    if let [_, mode, dir, tokens] = args.as_slice()
        && mode == "agent"
    {
        return be_the_agent(Path::new(dir), tokens.parse()?);
    }
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?
        .block_on(async {
            calls().await?;
            lists().await
        })
}

/// The agent's process: ends pods as its standard input says, and itself when that ends.
fn be_the_agent(dir: &Path, tokens: usize) -> Outcome<()> {
    let gpus = if tokens == TOKENS {
        GPUS.to_vec()
    } else {
        vec![tokens as u32]
    };
    let agent = Agent::start(dir, ledger(&gpus), devices(tokens, tokens));
    for uid in std::io::stdin().lock().lines() {
        agent.allocator.pod_gone(&uid?);
    }
    Ok(())
}

/// A node with its agent's process.
struct Node {
    kubelet: FakeKubelet,
    agent: Child,
    empty: DevicePluginClient<Channel>,
    alive: VecDeque<(Pod, usize)>,
    busy: usize,
    next: usize,
    random: StdRng,
    _root: tempfile::TempDir,
}

impl Node {
    async fn new(tokens: usize) -> Outcome<Self> {
        let root = tempfile::tempdir()?;
        let mut kubelet = FakeKubelet::new(root.path(), 7);
        kubelet.start();
        kubelet.sync_pods().await;
        let agent = Command::new(std::env::current_exe()?)
            .arg("agent")
            .arg(kubelet.dir())
            .arg(tokens.to_string())
            .stdin(Stdio::piped())
            .spawn()?;
        kubelet.until_allocatable(GPU, tokens).await;
        let socket = kubelet.calls().into_iter().find_map(|call| match call {
            Call::Register(_, endpoint) => Some(kubelet.dir().join(endpoint)),
            _ => None,
        });
        let socket = socket.ok_or("no registration")?;
        let channel = Endpoint::try_from(format!("unix://{}", socket.display()))?
            .connect()
            .await?;
        Ok(Self {
            kubelet,
            agent,
            empty: DevicePluginClient::new(channel),
            alive: VecDeque::new(),
            busy: 0,
            next: 0,
            random: StdRng::seed_from_u64(7),
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
        let size = self.random.random_range(1..=32);
        while self.busy + size > BUSY {
            let Some((pod, size)) = self.alive.pop_front() else {
                break;
            };
            self.kubelet.pod_deleted(&pod);
            let uids = self.agent.stdin.as_mut().ok_or("no standard input")?;
            writeln!(uids, "{}", pod.uid)?;
            self.busy -= size;
        }
        let pod = Pod::with(&format!("p{}", self.next), GPU, size);
        self.kubelet.admit(&pod).await?;
        self.kubelet.start_container(&pod, "main").await?;
        self.alive.push_back((pod, size));
        (self.busy, self.next) = (self.busy + size, self.next + 1);
        Ok(())
    }

    /// Memory of the agent's process in bytes.
    fn agent_rss(&self) -> Outcome<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.agent.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line
            .and_then(|line| line.trim().strip_suffix(" kB"))
            .ok_or("no VmRSS")?;
        Ok(kib.trim().parse::<u64>()? * 1024)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        drop(self.agent.stdin.take());
        let _ended = self.agent.wait();
    }
}

async fn calls() -> Outcome<()> {
    println!("Calls: {TOKENS} tokens, pods of 1 to 32, {BUSY} tokens held");
    println!(
        "{:<34}{:>10}{:>10}{:>10}{:>8}",
        "", "p50", "p99", "max", "calls"
    );
    let mut node = Node::new(TOKENS).await?;
    for _ in 0..200 {
        node.one_pod().await?;
    }
    node.kubelet.take_times();
    for (pace, count) in [(Some(Duration::from_millis(10)), 1000), (None, 3000)] {
        let mut floor = Vec::with_capacity(count);
        let mut tick = pace.map(tokio::time::interval);
        let start = Instant::now();
        for _ in 0..count {
            if let Some(tick) = &mut tick {
                tick.tick().await;
            }
            floor.push(node.empty_call().await?);
            node.one_pod().await?;
        }
        let rate = count as f64 / start.elapsed().as_secs_f64();
        let name = if pace.is_some() {
            "at 100/s"
        } else {
            "flat out"
        };
        let times = node.kubelet.take_times();
        row(&format!("empty call, {name}"), floor);
        row(&format!("Allocate, {name}"), times.allocate);
        row(&format!("PreStartContainer, {name}"), times.pre_start);
        println!(
            "{:<34}{rate:>10.0} pods/s, the fake kubelet's own work included",
            ""
        );
    }
    println!(
        "agent RSS: {:.1} MiB (goal 20)\n",
        node.agent_rss()? as f64 / f64::from(1 << 20)
    );
    Ok(())
}

async fn lists() -> Outcome<()> {
    println!("ListAndWatch: from the call to the first message");
    println!(
        "{:<34}{:>10}{:>10}{:>10}{:>8}{:>12}",
        "", "p50", "p99", "max", "calls", "bytes"
    );
    for tokens in [160, TOKENS, 4096] {
        let mut node = Node::new(tokens).await?;
        let (mut times, mut bytes) = (Vec::new(), 0);
        for _ in 0..300 {
            let start = Instant::now();
            let mut stream = node.empty.list_and_watch(Empty {}).await?.into_inner();
            let list = stream.message().await?.ok_or("no list")?;
            times.push(start.elapsed());
            bytes = list.encoded_len();
        }
        let line = line(&format!("{tokens} tokens"), times);
        println!("{line}{bytes:>12}");
    }
    Ok(())
}

fn row(name: &str, times: Vec<Duration>) {
    println!("{}", line(name, times));
}

fn line(name: &str, mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
    let us = |time: Duration| format!("{} us", time.as_micros());
    let (p50, p99, max) = (us(at(0.5)), us(at(0.99)), us(at(1.0)));
    format!("{name:<34}{p50:>10}{p99:>10}{max:>10}{:>8}", times.len())
}
