//! Tests that no pod fails while the agent is away, because the plugin relay answers the kubelet.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use bursar_kubelet::devices::DeviceHealth;
use bursar_relay::{RelayOptions, state};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

use crate::common::agent::{Agent, GPU, devices, ledger};
use crate::common::kubelet::{Call, FakeKubelet, Pod};
use crate::common::{eventually, steps};

const WAIT: Duration = Duration::from_millis(200);
/// The time for which the relay's PreStartContainer waits for an agent.
const AWAY: Duration = Duration::from_secs(2);
/// The fewest steps of a relay on disk. With fewer ones the library counts nothing.
const FEWEST_STEPS: usize = 8;
/// Longer than any test runs.
const NEVER: Duration = Duration::from_secs(3600);

/// A relay on threads of its own, so that a test can kill it.
struct Relay {
    runtime: Option<tokio::runtime::Runtime>,
}

impl Relay {
    fn start(kubelet_dir: &Path, dir: &Path, withdraw_after: Duration) -> Self {
        let mut threads = tokio::runtime::Builder::new_multi_thread();
        let runtime = threads.worker_threads(1).enable_all().build().unwrap();
        let options = RelayOptions {
            kubelet_dir: kubelet_dir.to_owned(),
            dir: dir.to_owned(),
            away_timeout: AWAY,
            withdraw_after,
        };
        runtime.spawn(async {
            bursar_relay::run(options, CancellationToken::new())
                .await
                .unwrap()
        });
        Self {
            runtime: Some(runtime),
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            let end = std::thread::spawn(move || runtime.shutdown_timeout(Duration::from_secs(5)));
            let _ended = end.join();
        }
    }
}

/// The relay's program, which is killed when the value is dropped.
struct Program(Child);

impl Program {
    fn is_running(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// A node whose agent registers with a relay.
struct Node {
    kubelet: FakeKubelet,
    relay: Option<Relay>,
    agent: Option<Agent>,
    root: TempDir,
}

impl Node {
    async fn new() -> Self {
        Self::withdrawing_after(NEVER).await
    }

    async fn withdrawing_after(withdraw_after: Duration) -> Self {
        let mut node = Self::without_relay().await;
        node.start_relay(withdraw_after);
        node.start_agent(ledger(&[8]));
        node.kubelet.until_allocatable(GPU, 8).await;
        node
    }

    async fn without_relay() -> Self {
        let root = tempfile::tempdir().unwrap();
        let mut kubelet = FakeKubelet::new(root.path(), 42);
        kubelet.start();
        kubelet.sync_pods().await;
        let node = Self {
            kubelet,
            relay: None,
            agent: None,
            root,
        };
        std::fs::create_dir(node.dir()).unwrap();
        node
    }

    fn dir(&self) -> PathBuf {
        self.root.path().join("relay")
    }

    fn start_relay(&mut self, withdraw_after: Duration) {
        let relay = Relay::start(self.kubelet.dir(), &self.dir(), withdraw_after);
        self.relay = Some(relay);
    }

    fn start_agent(&mut self, ledger: bursar_ledger::Ledger) {
        let kubelet = self.kubelet.dir();
        let agent = Agent::start_as(GPU, &self.dir(), kubelet, ledger, devices(8, 8), WAIT);
        self.agent = Some(agent);
    }

    fn kill_agent(&mut self) -> bursar_ledger::Ledger {
        self.agent.take().expect("a living agent").kill()
    }

    fn bound(&self) -> Vec<(String, String)> {
        let bindings = self.agent.as_ref().unwrap().allocator.bindings();
        let bound = bindings.iter().map(|bound| {
            let ids = bound.allocations.iter().map(ToString::to_string);
            (bound.pod.to_string(), ids.collect::<Vec<_>>().join(","))
        });
        let mut bound: Vec<_> = bound.collect();
        bound.sort();
        bound
    }

    /// Asserts that the pod is bound under the id that the kubelet gives to the runtime.
    fn assert_bound(&self, pod: &Pod, devices: &[String]) {
        let [device] = devices else {
            panic!("{devices:?}")
        };
        let id = device.strip_prefix("bursar.dev/gpu=").unwrap().to_owned();
        let bound = self.bound();
        assert!(bound.contains(&(pod.uid.clone(), id)), "{bound:?}");
    }

    fn count(&self, such: impl Fn(&Call) -> bool) -> usize {
        self.kubelet.count(such)
    }
}

#[tokio::test]
async fn pod_admitted_without_an_agent_starts_with_the_next_one() {
    let mut node = Node::new().await;
    let registered = node.count(|call| matches!(call, Call::Register(..)));
    for round in 0..5 {
        let state = node.kill_agent();
        let pod = Pod::with(&format!("pod-{round}"), GPU, 1);
        let start = Instant::now();
        node.kubelet.admit(&pod).await.unwrap();
        assert!(
            start.elapsed() < Duration::from_secs(5),
            "Allocate waits for nothing"
        );
        assert_eq!(node.kubelet.capacity(GPU).unwrap().allocatable, 8);
        let started = node.kubelet.start_container(&pod, "main");
        let (started, ()) = tokio::join!(started, async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            node.agent = Some(Agent::start_as(
                GPU,
                &node.root.path().join("relay"),
                node.kubelet.dir(),
                state,
                devices(8, 8),
                WAIT,
            ));
        });
        node.assert_bound(&pod, &started.unwrap().cdi_devices);
    }
    let now = node.count(|call| matches!(call, Call::Register(..)));
    assert_eq!(now, registered, "the kubelet noticed no agent's end");
    assert_eq!(node.bound().len(), 5);
}

#[tokio::test]
async fn agent_receives_allocations_and_answers_as_without_a_relay() {
    let node = Node::new().await;
    let pod = Pod::with("a", GPU, 8);
    node.kubelet.admit(&pod).await.unwrap();
    eventually("the agent to know the allocation", || {
        let ledger = node.agent.as_ref().unwrap().allocator.ledger();
        ledger.allocations().count() == 1
    })
    .await;
    let options = node.kubelet.start_container(&pod, "main").await.unwrap();
    node.assert_bound(&pod, &options.cdi_devices);

    // The kubelet assigns the device ids again before the agent has released the memory.
    node.kubelet.pod_deleted(&pod);
    let waiting = Pod::with("b", GPU, 3);
    node.kubelet.admit(&waiting).await.unwrap();
    let refused = node.kubelet.start_container(&waiting, "main").await;
    let message = refused.unwrap_err();
    assert!(message.contains("waiting for 3 GiB"), "{message}");
    node.agent.as_ref().unwrap().allocator.pod_gone(&pod.uid);
    let options = node
        .kubelet
        .start_container(&waiting, "main")
        .await
        .unwrap();
    node.assert_bound(&waiting, &options.cdi_devices);
}

#[tokio::test]
async fn container_waits_within_the_kubelets_limit_for_an_agent() {
    let mut node = Node::new().await;
    node.kill_agent();
    let pod = Pod::with("a", GPU, 1);
    node.kubelet.admit(&pod).await.unwrap();
    let message = node
        .kubelet
        .start_container(&pod, "main")
        .await
        .unwrap_err();
    assert!(
        message.contains("the node's agent has been away for"),
        "{message}"
    );
}

#[tokio::test]
async fn agent_that_was_away_says_in_time_why_a_container_waits() {
    let mut node = Node::new().await;
    let (a, b) = (Pod::with("a", GPU, 8), Pod::with("b", GPU, 3));
    node.kubelet.admit(&a).await.unwrap();
    node.kubelet.start_container(&a, "main").await.unwrap();
    // The kubelet assigns the device ids again before the agent has released the memory.
    node.kubelet.pod_deleted(&a);
    node.kubelet.admit(&b).await.unwrap();
    let state = node.kill_agent();
    let (relay, kubelet) = (node.dir(), node.kubelet.dir().to_owned());
    let started = node.kubelet.start_container(&b, "main");
    let (started, _agent) = tokio::join!(started, async {
        tokio::time::sleep(AWAY / 2).await;
        Agent::start_as(GPU, &relay, &kubelet, state, devices(8, 8), NEVER)
    });
    let message = started.unwrap_err();
    assert!(message.contains("waiting for 3 GiB"), "{message}");
}

#[tokio::test]
async fn restarted_relay_offers_the_last_devices_without_an_agent() {
    let mut node = Node::new().await;
    node.agent
        .as_ref()
        .unwrap()
        .devices
        .send_replace(devices(8, 5));
    node.kubelet.until_allocatable(GPU, 5).await;
    let state = node.kill_agent();
    node.relay = None;
    node.kubelet.until_allocatable(GPU, 0).await;
    node.start_relay(NEVER);
    node.kubelet.until_allocatable(GPU, 5).await;
    let pod = Pod::with("a", GPU, 2);
    node.kubelet.admit(&pod).await.unwrap();
    node.start_agent(state);
    node.kubelet.until_allocatable(GPU, 8).await;
    let options = node.kubelet.start_container(&pod, "main").await.unwrap();
    node.assert_bound(&pod, &options.cdi_devices);
}

#[tokio::test]
async fn living_agent_registers_with_a_restarted_relay() {
    let mut node = Node::new().await;
    node.relay = None;
    node.agent.as_ref().unwrap().until_not_registered().await;
    node.start_relay(NEVER);
    node.agent.as_ref().unwrap().until_registered().await;
    node.kubelet.until_allocatable(GPU, 8).await;
    let pod = Pod::with("a", GPU, 2);
    node.kubelet.admit(&pod).await.unwrap();
    let options = node.kubelet.start_container(&pod, "main").await.unwrap();
    node.assert_bound(&pod, &options.cdi_devices);
}

#[tokio::test]
async fn restarted_kubelet_gets_the_devices_without_an_agent() {
    let mut node = Node::new().await;
    let state = node.kill_agent();
    node.kubelet.restart().await;
    node.kubelet.until_allocatable(GPU, 8).await;
    let pod = Pod::with("a", GPU, 2);
    node.kubelet.admit(&pod).await.unwrap();
    node.start_agent(state);
    let options = node.kubelet.start_container(&pod, "main").await.unwrap();
    node.assert_bound(&pod, &options.cdi_devices);
}

#[tokio::test]
async fn resource_is_withdrawn_when_no_agent_comes_back() {
    let mut node = Node::withdrawing_after(Duration::from_millis(500)).await;
    let dir = node.dir();
    let registered = || state::load_registrations(&dir).unwrap();
    eventually("a record of the registration", || {
        registered().get(GPU) == Some(&None)
    })
    .await;
    let state = node.agent.take().unwrap().kill();
    node.kubelet.until_allocatable(GPU, 0).await;
    eventually("an empty record", || registered().is_empty()).await;
    node.start_agent(state);
    node.kubelet.until_allocatable(GPU, 8).await;
}

#[tokio::test]
async fn renamed_resource_is_withdrawn_at_once() {
    const HALVES: &str = "bursar.dev/gpu-memory-512mib";
    let mut node = Node::new().await;
    let state = node.kill_agent();
    let kubelet = node.kubelet.dir();
    let agent = Agent::start_as(HALVES, &node.dir(), kubelet, state, devices(8, 8), WAIT);
    node.agent = Some(agent);
    node.kubelet.until_allocatable(HALVES, 8).await;
    node.kubelet.until_allocatable(GPU, 0).await;
}

#[tokio::test]
async fn newest_agent_replaces_the_one_before() {
    let mut node = Node::new().await;
    let before = node.agent.take().unwrap();
    node.start_agent(ledger(&[8]));
    node.agent.as_ref().unwrap().until_registered().await;
    let pod = Pod::with("a", GPU, 2);
    eventually("the newer agent to be asked", || {
        before.devices.send_replace(devices(8, 1));
        node.kubelet.capacity(GPU).unwrap().allocatable == 8
    })
    .await;
    node.kubelet.admit(&pod).await.unwrap();
    let options = node.kubelet.start_container(&pod, "main").await.unwrap();
    node.assert_bound(&pod, &options.cdi_devices);
    assert!(before.allocator.bindings().is_empty());
    drop(before);
    assert_eq!(node.kubelet.capacity(GPU).unwrap().allocatable, 8);
}

impl Node {
    /// Starts the relay's program, which dies at this step of its own; 0 is never.
    fn start_program(&self, library: &Path, dies_at: usize) -> Program {
        static FOLDER: OnceLock<PathBuf> = OnceLock::new();
        let build = || bursar_sim_lab::build(&["bursar-relay"], &["--bins"]).unwrap();
        let mut command = Command::new(FOLDER.get_or_init(build).join("bursar-relay"));
        command.arg("--kubelet-dir").arg(self.kubelet.dir());
        command.arg("--dir").arg(self.dir());
        let file = self.root.path().join("steps");
        steps::die_at(&mut command, library, &file, dies_at);
        Program(command.spawn().unwrap())
    }

    /// The devices that the agent says are healthy.
    fn offered(&self) -> usize {
        let devices = self.agent.as_ref().unwrap().devices.borrow();
        let healthy = |health: &&DeviceHealth| **health == DeviceHealth::Healthy;
        devices.health().iter().filter(healthy).count()
    }
}

/// A container starts, and three of eight devices become unhealthy.
async fn container_starts_and_offer_changes(node: &Node) -> Option<()> {
    node.kubelet.until_allocatable(GPU, 8).await;
    let pod = Pod::with("a", GPU, 2);
    node.kubelet.admit(&pod).await.ok()?;
    node.kubelet.start_container(&pod, "main").await.ok()?;
    let agent = node.agent.as_ref().unwrap();
    agent.devices.send_replace(devices(8, 5));
    node.kubelet.until_allocatable(GPU, 5).await;
    Some(())
}

/// Lets a relay die at a step, and expects that the next one serves the node, with its agent and
/// without. Returns the steps of a relay that does not die.
async fn relay_dies_at(library: &Path, step: usize) -> Option<usize> {
    let mut node = Node::without_relay().await;
    let mut program = node.start_program(library, step);
    node.start_agent(ledger(&[8]));
    let act = container_starts_and_offer_changes(&node);
    if !steps::until_dead(|| program.is_running(), act).await {
        return Some(steps::count(&node.root.path().join("steps")));
    }
    program = node.start_program(library, 0);
    let offered = node.offered();
    node.kubelet.until_allocatable(GPU, offered).await;
    let pod = Pod::with("b", GPU, 2);
    node.kubelet.admit(&pod).await.unwrap();
    let options = node.kubelet.start_container(&pod, "main").await.unwrap();
    node.assert_bound(&pod, &options.cdi_devices);

    drop(node.kill_agent());
    drop(program);
    node.kubelet.until_allocatable(GPU, 0).await;
    let _program = node.start_program(library, 0);
    node.kubelet.until_allocatable(GPU, offered).await;
    let files = std::fs::read_dir(node.dir()).unwrap().flatten();
    let mut names = files.map(|file| file.file_name().to_string_lossy().into_owned());
    assert!(
        !names.any(|name| name.ends_with(".unread")),
        "step {step}: a record could not be read"
    );
    let left = steps::temporary_files(&node.dir());
    assert!(left.is_empty(), "step {step}: {left:?}");
    None
}

#[tokio::test]
async fn relay_that_dies_at_any_step_is_replaced_without_loss() {
    let folder = tempfile::tempdir().unwrap();
    let library = steps::library(folder.path());
    let is_long = std::env::var_os("BURSAR_LONG").is_some();
    for _ in 0..if is_long { 3 } else { 1 } {
        let all = relay_dies_at(&library, 0).await.expect("it does not die");
        assert!(all >= FEWEST_STEPS, "only {all} steps");
        let mut deaths = 0;
        for step in 1..=all {
            deaths += usize::from(relay_dies_at(&library, step).await.is_none());
        }
        println!("{all} steps, {deaths} deaths");
        assert!(deaths * 2 >= all, "only {deaths} deaths of {all}");
    }
}
