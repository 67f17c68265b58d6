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
use bursar_config::{AuditPolicy, Config};
use bursar_enforcement::audit::kill::kill;
use bursar_gpu::memory_sample::GpuMemorySample;
use bursar_gpu::nvml::NvmlHandle;
use bursar_gpu::{Gpu, Inventory};
use bursar_host::checkpoint::Checkpoint;
use bursar_ledger::GpuView;
use bursar_ledger::units::{GpuUuid, PodUid};
use bursar_node::actor::Snapshot;
use bursar_node::checkpoint_state::PodName;
use bursar_sessions::{Process, Sessions};
use bursar_supervision::provisioners::Program;
use tokio::sync::{Mutex, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::child::HolderProcess;
use crate::effect::{self, Outcomes, Tested, Verdict, Versions};
use crate::holder::Report;
use crate::orders::{Processes, orders};
use crate::process::Request;

/// The agent tells a holder of active processes at this pace, and of the pods each fourth time.
const ACTIVITY: Duration = Duration::from_millis(250);
const ACTIVITIES_PER_ORDER: u32 = 4;

/// NVML's answer is waited for so long; the last one counts meanwhile.
const SAMPLE_TIMEOUT: Duration = Duration::from_millis(700);

/// The first and the longest pause before a holder is started again.
const RESTART_BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// The pauses before a GPU is looked at again that was not idle, and whose test failed.
const IDLE_CHECK: Duration = Duration::from_secs(10);
const TEST_RETRY: Duration = Duration::from_secs(600);

/// The file of the tests' outcomes in the state directory.
const OUTCOMES: &str = "compute.json";

/// How long the driver may take to describe a GPU.
const DESCRIPTION: Duration = Duration::from_secs(5);

/// The inputs of the task.
pub struct ComputeInputs {
    /// The agent's configuration.
    pub config: Config,
    /// The round that pods divide.
    pub round: Duration,
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
    /// Channel groups in use that no weight holds.
    pub hidden_groups: usize,
}

/// Runs until `stop`.
pub async fn run(
    inputs: ComputeInputs,
    status: watch::Sender<ComputeStatus>,
    stop: CancellationToken,
) {
    let mut snapshots = inputs.snapshots.clone();
    let tests = Mutex::default();
    let shared = Arc::new(Shared {
        inputs,
        status,
        tests,
    });
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
    /// Held by the GPU under test: others like it take its outcome.
    tests: Mutex<()>,
}

/// The task of one GPU.
struct GpuTask {
    shared: Arc<Shared>,
    snapshots: watch::Receiver<Snapshot>,
    gpu: Gpu,
    versions: Versions,
    outcomes: Outcomes,
    state: GpuCompute,
    next_test: Instant,
    /// The channel groups of the driver itself, if a test has counted them.
    driver_groups: Option<usize>,
    /// The groups in the last report that no weight holds.
    last_hidden: usize,
    /// The processes that changed slices themselves: how often, and in how many reports more than
    /// they did not.
    changers: BTreeMap<u32, (u64, u32)>,
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
        let outcomes = Checkpoint::new(config.paths.state_dir.join(OUTCOMES));
        let not_idle = "the GPU was not idle since the start".to_owned();
        Self {
            state: GpuCompute {
                verdict: Verdict::Unknown(not_idle),
                problem: None,
                hidden_groups: 0,
            },
            versions: Versions {
                model: gpu.model.clone(),
                driver: driver.unwrap_or_default(),
                firmware: String::new(),
            },
            outcomes: Outcomes::new(outcomes),
            snapshots: shared.inputs.snapshots.clone(),
            shared,
            gpu,
            next_test: Instant::now(),
            driver_groups: None,
            last_hidden: 0,
            changers: BTreeMap::new(),
            sample: GpuMemorySample::default(),
        }
    }

    /// Reads the firmware's version, and takes the outcome of an earlier test.
    async fn take_outcome(&mut self) -> bool {
        if self.versions.firmware.is_empty() {
            let folder = self.gpu.pci.map(|pci| pci.to_string().to_lowercase());
            let folder = folder.as_deref().and_then(|folder| folder.get(4..));
            let proc = &self.shared.inputs.config.paths.proc;
            let file = proc.join("driver/nvidia/gpus");
            let file = file.join(folder.unwrap_or_default()).join("information");
            // A driver that hangs keeps a thread of its own.
            let text = timeout(DESCRIPTION, tokio::fs::read_to_string(file)).await;
            let text = text.ok().and_then(Result::ok).unwrap_or_default();
            self.versions.firmware = effect::firmware_version(&text);
        }
        let Some(tested) = self.outcomes.get(&self.versions) else {
            return false;
        };
        self.take(tested);
        true
    }

    fn take(&mut self, tested: Tested) {
        self.state.verdict = tested.verdict;
        self.driver_groups = tested.driver_groups.or(self.driver_groups);
    }

    async fn run(mut self) {
        let mut backoff = RESTART_BACKOFF.0;
        self.take_outcome().await;
        loop {
            if self.view().weights.is_empty() {
                self.state.problem = None;
            }
            self.publish();
            let is_obeyed = !matches!(self.state.verdict, Verdict::NotEnforced(_));
            if is_obeyed && !self.view().weights.is_empty() {
                let begun = Instant::now();
                let held = self.hold().await;
                (self.state.hidden_groups, self.last_hidden) = (0, 0);
                if held.is_ok() || begun.elapsed() > RESTART_BACKOFF.1 {
                    backoff = RESTART_BACKOFF.0;
                }
                let Err(error) = held else {
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

    /// Whether neither a pod nor a process has memory of the GPU.
    async fn is_idle(&mut self) -> bool {
        self.view().pods.is_empty()
            && self.read_sample().await
            && self.sample.charges.iter().next().is_none()
    }

    /// Tests an idle GPU, one at a time on the node. A pod that comes ends the test.
    async fn test(&mut self) {
        self.next_test = Instant::now() + IDLE_CHECK;
        let shared = self.shared.clone();
        let Ok(_alone) = shared.tests.try_lock() else {
            return;
        };
        if self.take_outcome().await || !self.is_idle().await {
            return;
        }
        self.next_test = Instant::now() + TEST_RETRY;
        // The ends of its processes are waited for, which a driver that hangs puts off.
        self.state.verdict = Verdict::Unknown("the test of time slices has not ended".to_owned());
        self.publish();
        let (mut snapshots, uuid) = (self.snapshots.clone(), self.gpu.uuid.clone());
        let is_needed = async move {
            let has_pod = |snapshot: &Snapshot| {
                let mut gpus = snapshot.view.gpus.iter();
                gpus.any(|gpu| gpu.uuid == uuid && !gpu.pods.is_empty())
            };
            // The node's task ends only with the agent.
            let _ = snapshots.wait_for(has_pod).await;
        };
        let (program, device) = (&self.shared.inputs.program, self.device());
        let tested = effect::test(program, &self.gpu.uuid, &device, is_needed).await;
        info!(gpu = %self.gpu.uuid, verdict = ?tested.verdict, "tested time slices");
        self.outcomes.record(&self.versions, &tested);
        self.take(tested);
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
        let round = self.shared.inputs.round;
        let mut holder = HolderProcess::start(&self.gpu.uuid, &self.device(), round)?;
        info!(gpu = %self.gpu.uuid, "holding weights of compute time");
        let held = self.hold_by(&mut holder).await;
        if let Err(error) = &held {
            self.state.problem = Some(format!("failed to hold weights: {error}; the agent waits"));
            self.publish();
        }
        holder.end().await;
        held
    }

    async fn hold_by(&mut self, holder: &mut HolderProcess) -> io::Result<()> {
        self.changers.clear();
        loop {
            self.read_sample().await;
            let (view, images) = (self.view(), self.images());
            let listed = self.sample.charges.iter().map(|(pid, _)| pid).collect();
            let pids = |of: &Vec<Process>| of.iter().map(|process| process.pid).collect();
            let processes = images.iter().map(|(pod, of)| (pod.clone(), pids(of)));
            let processes: Processes = processes.collect();
            let pods = orders(&view, &processes, &listed);
            if let Some(report) = holder.send(&Request::Pods { pods }).await? {
                self.take_changes(&report, &images);
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
    fn images(&self) -> BTreeMap<PodUid, Vec<Process>> {
        let snapshot = self.snapshots.borrow();
        let mut views = snapshot.view.gpus.iter();
        let view = views.find(|view| view.uuid == self.gpu.uuid);
        let mut processes = BTreeMap::<PodUid, Vec<Process>>::new();
        for container in snapshot.containers.iter() {
            if view.is_some_and(|view| view.pods.contains_key(&container.pod)) {
                let sessions = &self.shared.inputs.sessions;
                let images = sessions.process_images(&container.allocation);
                let images = images.into_iter().flatten().map(|image| image.process);
                let of_pod = processes.entry(container.pod.clone()).or_default();
                of_pod.extend(images);
            }
        }
        processes
    }

    fn take_report(&mut self, report: &Report, processes: &Processes, listed: &BTreeSet<u32>) {
        let in_use = report.in_use.map_or(0, |in_use| in_use as usize);
        let driver = self.driver_groups.unwrap_or(in_use);
        let hidden = in_use.saturating_sub(report.known + driver);
        // A context may have been made after the look of one report.
        let hidden = std::mem::replace(&mut self.last_hidden, hidden).min(hidden);
        if hidden > 0 && self.state.hidden_groups == 0 {
            let known: BTreeSet<u32> = processes.values().flatten().copied().collect();
            let others: Vec<String> = listed.difference(&known).map(u32::to_string).collect();
            let message = format!(
                "no weight holds {hidden} channel groups of {}; processes on the GPU that belong to \
                 no pod: {}",
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

    /// Acts on processes that set slices themselves. Each call begins the round again from the
    /// first group, so that setting it back is no defence: see ADR 1.
    fn take_changes(&mut self, report: &Report, images: &BTreeMap<PodUid, Vec<Process>>) {
        let before = std::mem::take(&mut self.changers);
        for (pid, changes) in &report.changed {
            let (known, strikes) = before.get(pid).copied().unwrap_or_default();
            let is_new = *changes > known;
            let strikes = if is_new {
                strikes + 1
            } else {
                strikes.saturating_sub(1)
            };
            self.changers.insert(*pid, (*changes, strikes));
            let audit = &self.shared.inputs.config.audit;
            if !is_new || !strikes.is_multiple_of(audit.kill_after) {
                continue;
            }
            let mut of_pods = images
                .iter()
                .flat_map(|(pod, of)| of.iter().map(move |at| (pod, at)));
            let Some((pod, process)) = of_pods.find(|(_, process)| process.pid == *pid) else {
                continue;
            };
            // A driver that was not tested may answer with other slices than those that were set.
            let is_sure = self.state.verdict == Verdict::Enforced;
            let killed = match audit.policy {
                AuditPolicy::Kill if is_sure => {
                    kill(&self.shared.inputs.config.paths.proc, *process)
                }
                AuditPolicy::Kill | AuditPolicy::Report => Ok(false),
            };
            warn!(gpu = %self.gpu.uuid, %pod, pid, ?killed, "a process sets time slices itself");
            if strikes == audit.kill_after || matches!(killed, Ok(true)) {
                let message = format!(
                    "process {pid} of pod {} sets the time slices of {} itself, and weights do not \
                     hold beside it; {}",
                    self.name_of(pod),
                    self.gpu.uuid,
                    match killed {
                        Ok(true) => "the agent has killed it",
                        _ => "the agent has not ended it",
                    }
                );
                let events = &self.shared.inputs.events;
                events.on_node(Reason::ComputeNotHeld, message);
            }
        }
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
