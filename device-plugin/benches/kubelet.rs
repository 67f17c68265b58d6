//! Measures the kubelet's waiting times for Allocate, PreStartContainer and ListAndWatch, through
//! gRPC on a Unix socket.
//!
//! The agent is a real `bursar-agent` process over the simulated driver, with its checkpoint, CDI
//! files and sessions. The tests' fake kubelet is the client. Beside each time, a floor shows the
//! same client's empty call to the same socket in the same minute. Pods take 1 to 16 device ids,
//! and the oldest pod ends for each new one. A pod's memory is free when the agent has seen its
//! cgroup end, so the pods at full speed come in bursts.
//!
//! `cargo bench -p bursar-device-plugin --bench kubelet`
//!
//! With the argument `idle` the benchmark measures instead the processor time of an idle agent at
//! 50, 250 and 500 pods. `BURSAR_AGENT` names another build of the agent.

#[path = "../tests/common/mod.rs"]
mod common;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bursar_kubelet::api::deviceplugin::Empty;
use bursar_kubelet::api::deviceplugin::device_plugin_client::DevicePluginClient;
use prost::Message as _;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tonic::transport::{Channel, Endpoint};

use common::kubelet::Pod;
use common::node::{Node, Outcome};

const GPUS: usize = 8;
/// Quanta of each GPU.
const QUANTA: usize = 141;
/// The device ids that are allocated at a time.
const BUSY: usize = 400;
/// The pause after the last pod's start, and the time for which an idle agent is observed.
const SETTLE_TIME: Duration = Duration::from_secs(4);
const IDLE_TIME: Duration = Duration::from_secs(20);
/// The pods of a burst, and the pause after it, in which the agent polls the cgroups twice.
const BURST: (usize, Duration) = (60, Duration::from_millis(1000));

fn main() -> Outcome<()> {
    let mut threads = tokio::runtime::Builder::new_multi_thread();
    threads
        .worker_threads(2)
        .enable_all()
        .build()?
        .block_on(async {
            if std::env::args().any(|word| word == "idle") {
                return measure_idle().await;
            }
            measure_calls().await?;
            measure_lists().await
        })
}

/// A node with pods that come and go.
struct BusyNode {
    node: Node,
    empty: DevicePluginClient<Channel>,
    alive: VecDeque<(Pod, usize)>,
    busy: usize,
    next: usize,
    random: StdRng,
}

/// Starts a node with the agent's process. `BURSAR_AGENT` names another build of the agent.
async fn start_node(count: usize, quanta: usize) -> Outcome<Node> {
    let built = env!("CARGO_BIN_EXE_bursar-agent").into();
    let program = std::env::var_os("BURSAR_AGENT").unwrap_or(built);
    Node::new(count, quanta, |lab, config| {
        Node::program(lab, program, config)
    })
    .await
}

impl BusyNode {
    async fn new(count: usize, quanta: usize) -> Outcome<Self> {
        let node = start_node(count, quanta).await?;
        let socket = node.socket().ok_or("no registration")?;
        let channel = Endpoint::try_from(format!("unix://{}", socket.display()))?;
        Ok(Self {
            node,
            empty: DevicePluginClient::new(channel.connect().await?),
            alive: VecDeque::new(),
            busy: 0,
            next: 0,
            random: StdRng::seed_from_u64(7),
        })
    }

    async fn time_empty_call(&mut self) -> Outcome<Duration> {
        let start = Instant::now();
        self.empty.get_device_plugin_options(Empty {}).await?;
        Ok(start.elapsed())
    }

    /// Starts one pod and ends the oldest ones beyond the limit.
    async fn run_one_pod(&mut self) -> Outcome<()> {
        let size = self.random.random_range(1..=16);
        while self.busy + size > BUSY {
            let Some((pod, size)) = self.alive.pop_front() else {
                break;
            };
            self.node.end(&pod)?;
            self.busy -= size;
        }
        let pod = self.node.start(&format!("p{}", self.next), size).await?;
        self.alive.push_back((pod, size));
        (self.busy, self.next) = (self.busy + size, self.next + 1);
        Ok(())
    }
}

/// Measures the processor time of an idle agent.
async fn measure_idle() -> Outcome<()> {
    println!("Idle: {GPUS} GPUs of {QUANTA} tokens, pods of one token");
    println!(
        "{:>6}{:>14}{:>12}{:>12}",
        "pods", "started in", "idle", "RSS"
    );
    for pods in [50, 250, 500] {
        let node = start_node(GPUS, QUANTA).await?;
        let begun = Instant::now();
        for number in 0..pods {
            node.start(&format!("p{number}"), 1).await?;
        }
        let started = begun.elapsed();
        tokio::time::sleep(SETTLE_TIME).await;
        let (before, begun) = (node.agent_processor()?, Instant::now());
        tokio::time::sleep(IDLE_TIME).await;
        let share = (node.agent_processor()? - before) / begun.elapsed().as_secs_f64();
        println!(
            "{pods:>6}{:>12.1} s{:>10.2} %{:>8.1} MiB",
            started.as_secs_f64(),
            100.0 * share,
            node.agent_rss()?
        );
    }
    Ok(())
}

async fn measure_calls() -> Outcome<()> {
    println!("Calls: {GPUS} GPUs of {QUANTA} tokens, pods of 1 to 16, {BUSY} tokens held");
    println!(
        "{:<34}{:>10}{:>10}{:>10}{:>8}",
        "", "p50", "p99", "max", "calls"
    );
    let mut node = BusyNode::new(GPUS, QUANTA).await?;
    println!("agent RSS, no pod: {:.1} MiB", node.node.agent_rss()?);
    for _ in 0..60 {
        node.run_one_pod().await?;
    }
    node.node.kubelet.take_times();
    run_at_100_a_second(&mut node, 1000).await?;
    run_flat_out(&mut node, 30).await?;
    println!(
        "agent RSS, {} pods: {:.1} MiB (goal 20)\n",
        node.alive.len(),
        node.node.agent_rss()?
    );
    Ok(())
}

async fn run_at_100_a_second(node: &mut BusyNode, pods: usize) -> Outcome<()> {
    let mut tick = tokio::time::interval(Duration::from_millis(10));
    let mut floor = Vec::with_capacity(pods);
    for _ in 0..pods {
        tick.tick().await;
        floor.push(node.time_empty_call().await?);
        node.run_one_pod().await?;
    }
    print_rows(node, "at 100/s", floor);
    Ok(())
}

async fn run_flat_out(node: &mut BusyNode, bursts: usize) -> Outcome<()> {
    let (pods, pause) = BURST;
    let (mut floor, mut busy) = (Vec::new(), Duration::ZERO);
    for _ in 0..bursts {
        tokio::time::sleep(pause).await;
        let start = Instant::now();
        for _ in 0..pods {
            floor.push(node.time_empty_call().await?);
            node.run_one_pod().await?;
        }
        busy += start.elapsed();
    }
    let rate = floor.len() as f64 / busy.as_secs_f64();
    print_rows(node, "flat out", floor);
    println!("{rate:.0} pods/s flat out, with the fake kubelet's own work");
    Ok(())
}

fn print_rows(node: &BusyNode, how: &str, floor: Vec<Duration>) {
    let times = node.node.kubelet.take_times();
    println!("{}", format_line(&format!("empty call, {how}"), floor));
    println!(
        "{}",
        format_line(&format!("Allocate, {how}"), times.allocate)
    );
    println!(
        "{}",
        format_line(&format!("PreStartContainer, {how}"), times.pre_start)
    );
}

async fn measure_lists() -> Outcome<()> {
    println!("ListAndWatch, from the call to the first message");
    println!(
        "{:<34}{:>10}{:>10}{:>10}{:>8}{:>10}",
        "", "p50", "p99", "max", "calls", "bytes"
    );
    for (count, quanta) in [(1, 160), (GPUS, QUANTA), (8, 512)] {
        let mut node = BusyNode::new(count, quanta).await?;
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
            format_line(&format!("{} tokens", count * quanta), times)
        );
    }
    Ok(())
}

fn format_line(name: &str, mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
    let us = |time: Duration| format!("{} us", time.as_micros());
    let (p50, p99, max) = (us(at(0.5)), us(at(0.99)), us(at(1.0)));
    format!("{name:<34}{p50:>10}{p99:>10}{max:>10}{:>8}", times.len())
}
