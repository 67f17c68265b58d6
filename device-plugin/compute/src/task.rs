//! Runs a holder for each GPU that has a pod with a weight, and tests idle GPUs.
//!
//! ```text
//!   Unknown --idle--> test --> Enforced | NotEnforced
//!   a pod has a weight, not NotEnforced: holder --no weight is left--> the driver's own slices
//!                                           |
//!                                           +--no answer in time--> killed, again after a pause
//! ```
//!
//! Slices stay as they are when the agent ends, and the next agent's holder takes them over.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_apiserver::{Events, Reason};
use bursar_config::Config;
use bursar_gpu::memory_sample::GpuMemorySample;
use bursar_gpu::nvml::NvmlHandle;
use bursar_gpu::{Gpu, Inventory};
use bursar_host::checkpoint::Checkpoint;
use bursar_ledger::GpuView;
use bursar_ledger::units::{GpuUuid, PodUid};
use bursar_node::actor::Snapshot;
use bursar_node::checkpoint_state::PodName;
use bursar_sessions::Sessions;
use bursar_supervision::provisioners::Program;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::child::HolderProcess;
use crate::effect::{self, Verdict, Verdicts, Versions};
use crate::holder::Report;
use crate::orders::{Doubts, Excess, Processes, orders};
use crate::process::Request;

/// How often a holder is told of active processes, and how often of the pods.
const ACTIVITY: Duration = Duration::from_millis(250);
const ACTIVITIES_PER_ORDER: u32 = 4;

/// NVML's answer is waited for so long; the last one counts meanwhile.
const SAMPLE_TIMEOUT: Duration = Duration::from_millis(700);

/// The first and the longest pause before a holder is started again.
const RESTART_BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// The pauses before a GPU is looked at again that was not idle, and whose test failed.
const IDLE_CHECK: Duration = Duration::from_secs(10);
const TEST_RETRY: Duration = Duration::from_secs(600);

/// The groups of the driver itself on an H200, none of which belongs to a process.
const DRIVER_GROUPS: usize = 6;

/// The file of the verdicts in the state directory.
const VERDICTS: &str = "compute.json";

/// The inputs of the task.
pub struct ComputeInputs {
    /// The agent's configuration.
    pub config: Config,
    /// The source of the processes' utilization.
    pub nvml: NvmlHandle,
    /// The processes of containers.
    pub sessions: Arc<Sessions>,
    /// The pods and weights of the GPUs.
    pub snapshots: watch::Receiver<Snapshot>,
    /// The provisioner's program, which runs the loads of a test.
    pub program: Program,
    /// Where findings are published.
    pub events: Events,
}

/// The compute time of each GPU.
pub type ComputeStatus = BTreeMap<GpuUuid, GpuCompute>;

/// How a GPU's compute time is divided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuCompute {
    /// Whether the GPU keeps to slices.
    pub verdict: Verdict,
    /// Why the agent cannot hold the weights of the GPU's pods now.
    pub problem: Option<String>,
    /// The round that its pods divide.
    pub round: Duration,
    /// Channel groups in use that belong to no known process.
    pub hidden_groups: usize,
}

/// Runs until `stop`.
pub async fn run(
    inputs: ComputeInputs,
    status: watch::Sender<ComputeStatus>,
    stop: CancellationToken,
) {
    let mut snapshots = inputs.snapshots.clone();
    let shared = Arc::new(Shared { inputs, status });
    let mut running: BTreeMap<GpuUuid, AbortHandle> = BTreeMap::new();
    let mut tasks = JoinSet::new();
    loop {
        let inventory = snapshots.borrow_and_update().inventory.clone();
        // A holder has the GPU open, which a drained one must not be.
        let states = inventory.gpus().iter();
        let healthy = states.filter(|state| state.health.is_healthy() && !state.gpu.uuid.is_mig());
        let gpus: Vec<&Gpu> = healthy.map(|state| &state.gpu).collect();
        running.retain(|uuid, task| {
            let is_present = gpus.iter().any(|gpu| gpu.uuid == *uuid) && !task.is_finished();
            if !is_present {
                task.abort();
                shared
                    .status
                    .send_if_modified(|all| all.remove(uuid).is_some());
            }
            is_present
        });
        for gpu in gpus {
            running.entry(gpu.uuid.clone()).or_insert_with(|| {
                let task = GpuTask::new(shared.clone(), gpu.clone(), &inventory);
                tasks.spawn(task.run())
            });
        }
        tokio::select! {
            changed = snapshots.changed() => if changed.is_err() {
                break;
            },
            Some(_) = tasks.join_next() => {}
            () = stop.cancelled() => break,
        }
    }
    drop(tasks);
    stop.cancelled().await;
}

struct Shared {
    inputs: ComputeInputs,
    status: watch::Sender<ComputeStatus>,
}

/// The task of one GPU.
struct GpuTask {
    shared: Arc<Shared>,
    snapshots: watch::Receiver<Snapshot>,
    gpu: Gpu,
    versions: Versions,
    verdicts: Verdicts,
    state: GpuCompute,
    next_test: Instant,
    doubts: Doubts,
    /// The groups of no known process in the last report.
    last_hidden: usize,
    /// The last answer of NVML.
    sample: GpuMemorySample,
}

impl GpuTask {
    fn new(shared: Arc<Shared>, gpu: Gpu, inventory: &Inventory) -> Self {
        let config = &shared.inputs.config;
        let driver = match inventory {
            Inventory::Gpus { driver, .. } => driver.clone(),
            Inventory::Starting | Inventory::NoDriver(_) | Inventory::NoGpu => None,
        };
        let folder = gpu.pci.map(|pci| pci.to_string().to_lowercase());
        let folder = folder.as_deref().and_then(|folder| folder.get(4..));
        let file = config.paths.proc.join("driver/nvidia/gpus");
        let file = file.join(folder.unwrap_or_default()).join("information");
        let versions = Versions {
            model: gpu.model.clone(),
            driver: driver.unwrap_or_default(),
            firmware: effect::firmware_version(&std::fs::read_to_string(file).unwrap_or_default()),
        };
        let file = config.paths.state_dir.join(VERDICTS);
        let verdicts = Verdicts::new(Checkpoint::new(file));
        let not_tested = || Verdict::Unknown("the GPU was not idle since the start".to_owned());
        Self {
            state: GpuCompute {
                verdict: verdicts.get(&versions).unwrap_or_else(not_tested),
                problem: None,
                round: config.compute.round,
                hidden_groups: 0,
            },
            snapshots: shared.inputs.snapshots.clone(),
            shared,
            gpu,
            versions,
            verdicts,
            next_test: Instant::now(),
            doubts: Doubts::default(),
            last_hidden: 0,
            sample: GpuMemorySample::default(),
        }
    }

    async fn run(mut self) {
        let mut backoff = RESTART_BACKOFF.0;
        loop {
            self.publish();
            let is_obeyed = !matches!(self.state.verdict, Verdict::NotEnforced(_));
            if is_obeyed && !self.view().weights.is_empty() {
                let held = self.hold().await;
                (self.state.hidden_groups, self.last_hidden) = (0, 0);
                let Err(error) = held else {
                    backoff = RESTART_BACKOFF.0;
                    continue;
                };
                warn!(gpu = %self.gpu.uuid, %error, "failed to hold weights of compute time; the agent tries again");
                let problem = format!("failed to hold weights: {error}; the agent tries again");
                self.state.problem = Some(problem);
                self.publish();
                sleep(backoff).await;
                backoff = (backoff * 2).min(RESTART_BACKOFF.1);
                continue;
            }
            let is_unknown = matches!(self.state.verdict, Verdict::Unknown(_));
            if is_unknown && Instant::now() >= self.next_test && self.is_idle().await {
                self.test().await;
                continue;
            }
            tokio::select! {
                // The node's task ends only with the agent.
                Ok(()) = self.snapshots.changed() => {}
                () = sleep(IDLE_CHECK) => {}
            }
        }
    }

    fn publish(&self) {
        self.shared.status.send_if_modified(|all| {
            let before = all.insert(self.gpu.uuid.clone(), self.state.clone());
            before.as_ref() != Some(&self.state)
        });
    }

    /// The GPU in the ledger.
    fn view(&mut self) -> GpuView {
        let snapshot = self.snapshots.borrow_and_update();
        let mut views = snapshot.view.gpus.iter();
        let view = views.find(|view| view.uuid == self.gpu.uuid).cloned();
        view.unwrap_or_else(|| GpuView::empty(self.gpu.uuid.clone()))
    }

    fn device(&self) -> PathBuf {
        let nodes = &self.shared.inputs.config.driver.dev_root;
        nodes.join(format!("nvidia{}", self.gpu.minor))
    }

    /// Whether no pod has memory of the GPU, and no process computes on it.
    async fn is_idle(&mut self) -> bool {
        if !self.view().pods.is_empty() || !self.read_sample().await {
            return false;
        }
        let mut percents = self.sample.sm_percents.iter().flatten();
        percents.all(|(_, percent)| *percent == 0)
    }

    async fn test(&mut self) {
        let (program, device) = (&self.shared.inputs.program, self.device());
        self.state.verdict = effect::test(program, &self.gpu.uuid, &device).await;
        self.next_test = Instant::now() + TEST_RETRY;
        info!(gpu = %self.gpu.uuid, verdict = ?self.state.verdict, "tested time slices");
        let (versions, verdict) = (self.versions.clone(), self.state.verdict.clone());
        self.verdicts.record(versions, verdict);
    }

    /// Asks NVML for the processes. Returns whether it has answered.
    async fn read_sample(&mut self) -> bool {
        let answer = self.shared.inputs.nvml.request_sample(&self.gpu.uuid);
        match timeout(SAMPLE_TIMEOUT, answer).await {
            Ok(Ok(Ok(sample))) => {
                self.sample = sample;
                true
            }
            _ => false,
        }
    }

    /// Holds the weights until no pod has one, and then gives the groups the driver's own slices
    /// back.
    async fn hold(&mut self) -> io::Result<()> {
        let mut holder = HolderProcess::start(&self.gpu.uuid, &self.device(), self.state.round)?;
        info!(gpu = %self.gpu.uuid, "holding weights of compute time");
        loop {
            let is_new = self.read_sample().await;
            let (view, processes) = (self.view(), self.processes());
            let listed = self.sample.charges.iter().map(|(pid, _)| pid).collect();
            if is_new && let Some(percents) = &self.sample.sm_percents {
                let now = Instant::now();
                for excess in self.doubts.add(&view, &processes, percents, now) {
                    self.report_excess(&excess);
                }
            }
            let doubted = self.doubts.doubted(Instant::now());
            let pods = orders(&view, &processes, &listed, &doubted);
            if let Some(report) = holder.send(&Request::Pods { pods }).await? {
                self.take_report(&report, &processes, &listed);
            }
            if view.weights.is_empty() {
                return Ok(());
            }
            let processes = self.active(&listed);
            for _ in 0..ACTIVITIES_PER_ORDER {
                let processes = processes.clone();
                holder.send(&Request::Active { processes }).await?;
                sleep(ACTIVITY).await;
            }
        }
    }

    /// The processes with work; all where the driver does not tell.
    fn active(&self, listed: &BTreeSet<u32>) -> BTreeSet<u32> {
        match &self.sample.sm_percents {
            None => listed.clone(),
            Some(percents) => {
                let busy = percents.iter().filter(|(_, percent)| **percent > 0);
                busy.map(|(pid, _)| *pid).collect()
            }
        }
    }

    /// The processes of the containers whose pod has memory of the GPU.
    fn processes(&self) -> Processes {
        let snapshot = self.snapshots.borrow();
        let mut views = snapshot.view.gpus.iter();
        let view = views.find(|view| view.uuid == self.gpu.uuid);
        let mut processes = Processes::new();
        for container in snapshot.containers.iter() {
            if view.is_some_and(|view| view.pods.contains_key(&container.pod)) {
                let sessions = &self.shared.inputs.sessions;
                let images = sessions.process_images(&container.allocation);
                let pids = images.into_iter().flatten().map(|image| image.process.pid);
                let of_pod = processes.entry(container.pod.clone()).or_default();
                of_pod.extend(pids);
            }
        }
        processes
    }

    fn take_report(&mut self, report: &Report, processes: &Processes, listed: &BTreeSet<u32>) {
        let in_use = report.in_use.map_or(0, |in_use| in_use as usize);
        let hidden = in_use.saturating_sub(report.known + DRIVER_GROUPS);
        // A context may have been made after the look of one report.
        let hidden = std::mem::replace(&mut self.last_hidden, hidden).min(hidden);
        if hidden > 0 && self.state.hidden_groups == 0 {
            let known: BTreeSet<u32> = processes.values().flatten().copied().collect();
            let others: Vec<String> = listed.difference(&known).map(u32::to_string).collect();
            let message = format!(
                "{hidden} channel groups of {} belong to no process of a pod, and no weight holds \
                 them; other processes on the GPU: {}",
                self.gpu.uuid,
                if others.is_empty() {
                    "none".to_owned()
                } else {
                    others.join(", ")
                }
            );
            warn!(gpu = %self.gpu.uuid, hidden, "channel groups of no known process");
            self.shared
                .inputs
                .events
                .on_node(Reason::ComputeNotHeld, message);
        }
        (self.state.hidden_groups, self.state.problem) = (hidden, None);
        self.publish();
    }

    fn report_excess(&self, Excess { pod, share, part }: &Excess) {
        let message = format!(
            "pod {} has {share} % of the busy time of {}, where its weight gives {part} %",
            self.name_of(pod),
            self.gpu.uuid
        );
        warn!(gpu = %self.gpu.uuid, %pod, share, part, "pod above its part of compute time");
        self.shared
            .inputs
            .events
            .on_node(Reason::ComputeNotHeld, message);
    }

    fn name_of(&self, pod: &PodUid) -> String {
        let snapshot = self.snapshots.borrow();
        let mut containers = snapshot.containers.iter();
        let name = containers
            .find(|container| container.pod == *pod)
            .and_then(|container| container.name.as_ref()?.pod.as_ref());
        name.map_or_else(|| pod.to_string(), PodName::to_string)
    }
}
