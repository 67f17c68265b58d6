//! Tests the agent's side of the kubelet's API against a fake kubelet.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod common;

#[path = "kubelet/answers.rs"]
mod answers;
#[path = "kubelet/lifecycle.rs"]
mod lifecycle;
#[path = "kubelet/relay.rs"]
mod relay;
#[path = "kubelet/upstream_device_plugin_failures_test.rs"]
mod upstream_device_plugin_failures_test;
#[path = "kubelet/upstream_device_plugin_test.rs"]
mod upstream_device_plugin_test;

use bursar_kubelet::devices::Devices;
use bursar_ledger::Ledger;
use tempfile::TempDir;

use common::agent::{Agent, GPU, devices, ledger};
use common::kubelet::{FakeKubelet, Pod};

/// A node with a registered agent.
struct Fixture {
    kubelet: FakeKubelet,
    /// None while the agent is killed.
    agent: Option<Agent>,
    root: TempDir,
}

impl Fixture {
    /// A node with one GPU of 8 quanta.
    async fn new() -> Self {
        Self::with_gpus(&[8], 8).await
    }

    async fn with_gpus(gpus: &[u32], device_ids: usize) -> Self {
        let root = tempfile::tempdir().unwrap();
        let mut kubelet = FakeKubelet::new(root.path(), 42);
        kubelet.start();
        kubelet.sync_pods().await;
        let agent = Some(Agent::start(
            kubelet.dir(),
            ledger(gpus),
            devices(device_ids, device_ids),
        ));
        let node = Self {
            kubelet,
            agent,
            root,
        };
        node.until_ready(device_ids).await;
        node
    }

    fn agent(&self) -> &Agent {
        self.agent.as_ref().expect("a living agent")
    }

    async fn until_ready(&self, device_ids: usize) {
        self.kubelet.until_allocatable(GPU, device_ids).await;
        self.agent().until_registered().await;
    }

    /// Kills the agent as SIGKILL does, and returns the state for its successor.
    ///
    /// A process's exit closes its sockets at once, but the exit of threads in this process does
    /// not. If the kubelet saw a stream end later, it would attribute the end to the successor. So
    /// this waits until the kubelet has observed the end.
    async fn kill_agent(&mut self) -> (Ledger, Devices) {
        let agent = self.agent.take().expect("a living agent");
        let devices = agent.devices.borrow().clone();
        let ledger = agent.kill();
        self.kubelet.until_allocatable(GPU, 0).await;
        (ledger, devices)
    }

    /// Starts another agent with the ledger of the agent before.
    async fn start_agent(&mut self, (ledger, devices): (Ledger, Devices)) {
        let healthy = devices.healthy_count();
        self.agent = Some(Agent::start(self.kubelet.dir(), ledger, devices));
        self.until_ready(healthy).await;
    }

    async fn restart_agent(&mut self) {
        let kept = self.kill_agent().await;
        self.start_agent(kept).await;
    }

    async fn restart_kubelet(&mut self) {
        let device_ids = self.agent().devices.borrow().healthy_count();
        self.kubelet.restart().await;
        self.until_ready(device_ids).await;
    }

    /// Admits and starts a pod of one container. Returns the container's CDI devices.
    async fn run_pod(&self, pod: &Pod) -> Vec<String> {
        self.kubelet.admit(pod).await.unwrap();
        self.start_pod(pod).await
    }

    /// Starts the pod's container, also repeatedly. Returns its CDI devices.
    async fn start_pod(&self, pod: &Pod) -> Vec<String> {
        self.kubelet
            .start_container(pod, "main")
            .await
            .unwrap()
            .cdi_devices
    }

    fn device_ids_of(&self, pod: &Pod) -> Vec<String> {
        self.kubelet.assigned(pod, "main", GPU)
    }

    /// The pods with bound memory and their amounts.
    fn bound(&self) -> Vec<(String, u32)> {
        let bindings = self.agent().allocator.bindings();
        let mut bound: Vec<_> = bindings
            .iter()
            .map(|b| (b.pod.to_string(), b.device_ids.quanta().0))
            .collect();
        bound.sort();
        bound
    }
}
