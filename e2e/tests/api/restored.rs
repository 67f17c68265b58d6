//! Restores etcd from a backup, under an operator and an agent's process.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use bursar_e2e::sim::{self, Layout, SimulatedDriver, SimulatedGpus};
use bursar_e2e::workspace::{self, Binaries, Profile};
use bursar_sim_api::WatchFault;
use futures::try_join;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use kube::api::{Api, ListParams, PostParams};
use libtest_mimic::Failed;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};

use crate::isolated_scope::IsolatedScope;
use crate::scenarios::in_force;
use crate::server::{Permit, Server};
use crate::test_case::{FaultPlan, Outcome, PROMISED_TIME, TestCase};

/// The agent's Node and GpuNode.
const NODE: &str = "restored-agent";

/// How many objects are created after the backup, before the events that the watches receive. Fewer
/// writes follow the restore, so the revisions of these events stay in the future.
const LOST: usize = 400;

/// How often the trial reads the agent's object.
const POLL: Duration = Duration::from_millis(100);

/// The agent's GPUs: two that are drained in turn, and one that is lost after the backup.
const GPUS: u32 = 3;
const LOST_GPU: u32 = 2;
/// The states of a lost GPU. The first reason stays: the XID 79, which requires a reset, or the
/// probe that found the GPU lost.
const AFTER_LOSS: [&str; 2] = ["Draining", "Lost"];

/// A wide bound on the time until the agent carries out an order before the restore. It finds its
/// GPUs first.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// A wide bound on the time until the agent follows the restored objects, beside other trials on a
/// busy machine. The promise is a third of it.
const FOLLOW_TIMEOUT: Duration = PROMISED_TIME.saturating_mul(3);

/// Runs on its own control plane, because a restore would revert the objects of other cases.
pub(crate) async fn etcd_restored(shared: &Server, permit: Permit) -> Result<String, Failed> {
    let server = Server::named("restored", shared.progress.clone()).await?;
    let outcome = Box::pin(through_a_restore(&server, permit)).await;
    server.control_plane.stop().await;
    let (outcome, agent) = outcome?;
    let operator = outcome.check_durations()?;
    Ok(format!(
        "operator: {operator}; agent: {agent:.1?} after the API server's return"
    ))
}

async fn through_a_restore(server: &Server, permit: Permit) -> Result<(Outcome, Duration), Failed> {
    let name = "restored";
    let plan = FaultPlan::with_watch_fault(name, WatchFault::NoFault);
    let mut case = TestCase::with_permit(server, permit, name, plan).await?;
    let agent = AgentProcess::start(&case.scope, server).await?;
    let declared = async |at: &IsolatedScope| at.create_budget("16Gi", "24Gi").await;
    let is_declared = async |at: &IsolatedScope| in_force(at, "16", "24").await;
    case.transition("a budget is made", declared, is_declared)
        .await?;
    agent.order_drain(0).await?;
    agent.wait_until_drained(0, START_TIMEOUT).await?;

    server.control_plane.back_up_etcd().await?;
    let configs = Api::<ConfigMap>::namespaced(server.control_plane.client(), name);
    for number in 0..LOST {
        let config = json!({ "metadata": { "name": format!("lost-{number}") } });
        let config = serde_json::from_value(config)?;
        configs.create(&PostParams::default(), &config).await?;
    }
    let raised = async |at: &IsolatedScope| {
        at.patch_budget(json!({ "deviceMemory": { "guaranteed": "22Gi", "limit": "30Gi" } }))
            .await
    };
    let is_raised = async |at: &IsolatedScope| in_force(at, "22", "30").await;
    case.transition("the budget is raised", raised, is_raised)
        .await?;
    agent.order_drain(1).await?;
    agent.wait_until_drained(1, START_TIMEOUT).await?;
    agent.gpus.lose(LOST_GPU)?;
    agent.wait_until_lost(LOST_GPU, START_TIMEOUT).await?;
    let before = newest_revision(server).await?;

    server.control_plane.restore_etcd().await?;
    let returned = Instant::now();
    let after = newest_revision(server).await?;
    if after + LOST as u64 / 2 > before {
        let reason = format!("revision {after} after {before}: etcd was not restored");
        return Err(reason.into());
    }
    // The amendment's generation is that of the lost one.
    let amended = async |at: &IsolatedScope| {
        at.patch_budget(json!({ "deviceMemory": { "guaranteed": "20Gi" } }))
            .await
    };
    let is_amended = async |at: &IsolatedScope| in_force(at, "20", "24").await;
    let operator = case.transition("the budget is amended after a restore", amended, is_amended);
    let agent = async {
        // The restored object says that this GPU is well.
        agent.wait_until_lost(LOST_GPU, FOLLOW_TIMEOUT).await?;
        agent.wait_until_drained(0, FOLLOW_TIMEOUT).await?;
        agent.order_drain(1).await?;
        agent.wait_until_drained(1, FOLLOW_TIMEOUT).await?;
        Ok(returned.elapsed())
    };
    let ((), agent) = try_join!(operator, agent)?;
    if agent > FOLLOW_TIMEOUT {
        return Err(format!("the agent followed after {agent:.1?}").into());
    }
    Ok((case.finish(is_amended).await?, agent))
}

async fn newest_revision(server: &Server) -> Result<u64, Failed> {
    let namespaces = Api::<Namespace>::all(server.control_plane.client());
    let list = namespaces.list_metadata(&ListParams::default()).await?;
    let revision = list.metadata.resource_version.unwrap_or_default();
    Ok(revision.parse()?)
}

/// An agent with the chart's configuration of a node, over simulated GPUs and without a kubelet.
struct AgentProcess {
    scope: IsolatedScope,
    gpus: SimulatedGpus,
    log: PathBuf,
    _folder: TempDir,
    _process: Child,
}

impl AgentProcess {
    async fn start(scope: &IsolatedScope, server: &Server) -> Result<Self, Failed> {
        let node = json!({ "metadata": { "name": NODE } });
        scope.create("/api/v1/nodes", node).await?;
        let binaries =
            tokio::task::spawn_blocking(|| workspace::build(Profile::Dev, false)).await??;
        let folder = tempfile::tempdir()?;
        let root = folder.path();
        for name in [
            "cdi",
            "cgroup/kubepods",
            "dev",
            "device-plugins",
            "run-dir",
            "shim",
            "state",
        ] {
            fs::create_dir_all(root.join(name))?;
        }
        let driver = SimulatedDriver {
            command: built(&binaries, "simgpu")?,
            libraries: vec![
                built(&binaries, "libbursar_sim_cuda.so")?,
                built(&binaries, "libbursar_sim_nvml.so")?,
            ],
        };
        for (library, name) in driver
            .libraries
            .iter()
            .zip(["libcuda.so.1", "libnvidia-ml.so.1"])
        {
            fs::copy(library, root.join("shim").join(name))?;
        }
        let layout = Layout {
            node: 1,
            count: GPUS,
            gib: 16,
            mig_gib: None,
        };
        let gpus = SimulatedGpus::set_up(driver, root, root, layout)?;
        let machine = root.join(sim::FOLDER.trim_start_matches('/'));
        let config = root.join("agent.toml");
        fs::write(&config, configuration(root, &machine))?;
        let log = root.join("agent.log");
        let process = Command::new(built(&binaries, "bursar-agent")?)
            .arg("--config")
            .arg(&config)
            .args(["--node-name", NODE, "--log-format", "text"])
            .env("KUBECONFIG", server.control_plane.kubeconfig())
            .env_remove("KUBERNETES_SERVICE_HOST")
            .env("SIMGPU_DIR", &machine)
            .env("SIMGPU_DEV", machine.join("dev"))
            .stdin(Stdio::null())
            .stderr(fs::File::create(&log)?)
            .kill_on_drop(true)
            .spawn()?;
        let agent = Self {
            scope: scope.clone(),
            gpus,
            log,
            _folder: folder,
            _process: process,
        };
        for gpu in 0..GPUS {
            agent.wait_until_state(gpu, "Active", START_TIMEOUT).await?;
        }
        Ok(agent)
    }

    fn path() -> String {
        format!("/apis/bursar.dev/v1alpha1/gpunodes/{NODE}")
    }

    /// Orders a drain of this GPU alone.
    async fn order_drain(&self, gpu: u32) -> Result<(), Failed> {
        let spec = json!({ "spec": { "drain": [sim::uuid(gpu)] } });
        self.scope.merge(&Self::path(), spec).await
    }

    /// Waits until the agent drains this GPU, and no longer the other one.
    async fn wait_until_drained(&self, gpu: u32, within: Duration) -> Result<(), Failed> {
        self.wait_until_state(gpu, "Draining", within).await?;
        let state = |status: &Value| state_of(status, 1 - gpu) != "Draining";
        self.wait_until(&format!("GPU {gpu} drained alone"), within, state)
            .await
    }

    async fn wait_until_lost(&self, gpu: u32, within: Duration) -> Result<(), Failed> {
        let expected = |status: &Value| {
            let state = state_of(status, gpu);
            AFTER_LOSS.iter().any(|lost| state == *lost)
        };
        self.wait_until(&format!("GPU {gpu} lost"), within, expected)
            .await
    }

    async fn wait_until_state(
        &self,
        gpu: u32,
        state: &str,
        within: Duration,
    ) -> Result<(), Failed> {
        let expected = |status: &Value| state_of(status, gpu) == state;
        self.wait_until(&format!("GPU {gpu} {state}"), within, expected)
            .await
    }

    /// Waits until the status in the API server is as expected.
    async fn wait_until(
        &self,
        what: &str,
        within: Duration,
        expected: impl Fn(&Value) -> bool,
    ) -> Result<(), Failed> {
        let begin = Instant::now();
        loop {
            // The agent has not created its object yet, or the API server is starting.
            let object = self.scope.get(&Self::path()).await.unwrap_or_default();
            if expected(&object["status"]) {
                return Ok(());
            }
            if begin.elapsed() > within {
                let status = &object["status"]["gpus"];
                let log = fs::read_to_string(&self.log).unwrap_or_default();
                let lines: Vec<_> = log.lines().rev().take(20).collect();
                let why = format!(
                    "the agent has not reported {what} within {within:?}: {status}\n{lines:#?}"
                );
                return Err(why.into());
            }
            sleep(POLL).await;
        }
    }
}

/// The state of this GPU in the status of a GpuNode; null if the status lacks the GPU.
fn state_of(status: &Value, gpu: u32) -> Value {
    let uuid = sim::uuid(gpu);
    let mut gpus = status["gpus"].as_array().into_iter().flatten();
    gpus.find(|gpu| gpu["uuid"] == uuid.as_str())
        .map(|gpu| gpu["state"].clone())
        .unwrap_or_default()
}

pub(crate) fn built(binaries: &Binaries, name: &str) -> Result<PathBuf, Failed> {
    let path = binaries.get(name).map(PathBuf::from);
    path.ok_or_else(|| format!("the workspace does not build {name}").into())
}

/// The agent's configuration, with all folders of the node under `root`.
fn configuration(root: &Path, machine: &Path) -> String {
    let (root, machine) = (root.display(), machine.display());
    format!(
        r#"
[kubelet]
device-plugin-dir = "{root}/device-plugins"
pod-resources-socket = "{root}/no-kubelet.sock"
[driver]
root = "{machine}/driver"
host-root = "{machine}/driver"
dev-root = "{machine}/dev"
[paths]
state-dir = "{root}/state"
run-dir = "{root}/run-dir"
cdi-dir = "{root}/cdi"
cgroup-root = "{root}/cgroup"
shim-dir = "{root}/shim"
kernel-log = "{machine}/state/kernel-log"
[retained-memory]
enabled = false
[http]
listen = "127.0.0.1:0"
probes = "127.0.0.1:0"
"#
    )
}
