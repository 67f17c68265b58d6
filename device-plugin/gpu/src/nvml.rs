//! Asks NVML about the GPUs, through one process for each: a call that hangs blocks one GPU alone.
//!
//! ```text
//!   NvmlWatcher --probes, requests--> process of a GPU (`calls`) --> NVML
//!      |        <--answers, XIDs----- and one for the driver: GPU count
//!      |
//!      +--> GpuRegistry --> Inventory
//! ```
//!
//! A GPU does not answer if its process takes longer than [`ANSWER`]. The agent kills the process
//! and starts the next one after its end. A call that hangs in the kernel delays that end, so a GPU
//! never has two processes.
//!
//! After a reset or an update of the driver old handles stay broken for ever. While NVML cannot be
//! used every probe has a new process. A process whose probe failed is replaced each
//! [`PollIntervals::replace_failed`], and once when its GPU answers again, since its registration
//! for XIDs may be broken. A GPU must answer for [`HealthThresholds::recovery_time`] before it is
//! healthy, so no XID is missed in between.
//!
//! A drained GPU has no process: its state becomes drained after the end of the last one. Meanwhile
//! the other GPUs are opened by their PCI addresses (`calls`).

mod calls;
mod process;
mod protocol;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_host::clock;
use bursar_ledger::units::{Bytes, GpuUuid};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{sleep_until, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::{debug, info, warn};

pub use calls::{SUBCOMMAND, run_child};
pub use protocol::CallError;

use super::health::HealthThresholds;
use super::pci::PciAddress;
use super::registry::{GpuRegistry, PersistedGpu, ProbeResult};
use super::xid::RecentXids;
use super::{Inventory, NoDriver};
use crate::drain::DrainState;
use crate::memory_sample::{GpuMemorySample, MemorySampler};
use process::{Job, NvmlProcess, ProcessNumber, ProcessReport};
use protocol::{GpuProbe, Request, Response, Scope};

/// How long one answer of NVML may take.
const ANSWER: Duration = Duration::from_secs(5);

/// How long the first answer of a process may take. Without persistence mode the driver initialises
/// the GPU for it.
const FIRST_ANSWER: Duration = Duration::from_secs(20);

/// How long a search for the library may delay a round of probes.
const FIND: Duration = Duration::from_secs(1);

/// The most requests that wait for one GPU.
const JOB_QUEUE_LENGTH: usize = 32;

/// The most requests that wait until the GPUs are known.
const MAX_DEFERRED: usize = 1_024;

/// How often the watcher asks NVML.
#[derive(Debug, Clone, Copy)]
pub struct PollIntervals {
    /// Between two probes of all GPUs.
    pub probe: Duration,
    /// Between two probes while a GPU is unhealthy or none is known.
    pub(crate) probe_unhealthy: Duration,
    /// The age at which a process is replaced whose probe failed.
    pub(crate) replace_failed: Duration,
    /// Between two queries for XIDs, and so the longest delay of an XID.
    pub xids: Duration,
}

impl Default for PollIntervals {
    fn default() -> Self {
        Self {
            probe: Duration::from_secs(5),
            probe_unhealthy: Duration::from_secs(2),
            replace_failed: Duration::from_secs(30),
            xids: Duration::from_millis(250),
        }
    }
}

/// Finds `libnvidia-ml.so.1`, or says why not; called again before processes start.
pub(crate) type LibraryLocator = Arc<dyn Fn() -> Result<PathBuf, String> + Send + Sync>;

/// Why NVML did not answer a request.
#[derive(Debug, thiserror::Error)]
pub enum QueryError {
    /// No driver is available at present.
    #[error("NVML is not available")]
    NotAvailable,
    /// NVML answered with an error.
    #[error("NVML does not answer about {gpu}")]
    Nvml {
        /// The GPU of the request.
        gpu: GpuUuid,
        /// NVML's error.
        source: CallError,
    },
}

/// Sends requests to NVML; the watcher ends when the last handle is dropped.
#[derive(Debug, Clone)]
pub struct NvmlHandle {
    requests: mpsc::UnboundedSender<(GpuUuid, Job)>,
}

impl MemorySampler for NvmlHandle {
    fn sample(&self, gpu: &GpuUuid) -> Option<GpuMemorySample> {
        self.request(gpu, false).blocking_recv().ok()?.ok()
    }
}

impl NvmlHandle {
    /// Requests a GPU's memory and processes, with their SM utilization. The channel closes without
    /// an answer if the GPU gives none within [`ANSWER`].
    pub fn request_sample(
        &self,
        gpu: &GpuUuid,
    ) -> oneshot::Receiver<Result<GpuMemorySample, QueryError>> {
        self.request(gpu, true)
    }

    fn request(
        &self,
        gpu: &GpuUuid,
        with_utilization: bool,
    ) -> oneshot::Receiver<Result<GpuMemorySample, QueryError>> {
        let (answer, answered) = oneshot::channel();
        let request = Request::Sample {
            gpu: gpu.clone(),
            with_utilization,
        };
        let job = Job::Sample(request, answer);
        // After the watcher's end the receiver reports the closed channel.
        let _ = self.requests.send((gpu.clone(), job));
        answered
    }

    /// Requests a driver limit for the processes in `cgroup`. The channel may close without an
    /// answer, as with [`request_sample`](Self::request_sample).
    pub fn request_limit(
        &self,
        gpu: &GpuUuid,
        cgroup: &Path,
        hard: Bytes,
    ) -> oneshot::Receiver<Result<(), QueryError>> {
        let (answer, answered) = oneshot::channel();
        let request = Request::SetLimit {
            gpu: gpu.clone(),
            cgroup: cgroup.to_owned(),
            hard,
        };
        let _ = self
            .requests
            .send((gpu.clone(), Job::SetLimit(request, answer)));
        answered
    }
}

/// Starts the watcher. `find` locates the driver's library; its processes read no file below
/// `hidden` but those beside the library. `persisted` has the GPUs that the previous agent of the
/// same boot recorded; the watcher holds no GPU that `drain` has released.
pub fn start(
    find: LibraryLocator,
    hidden: Vec<PathBuf>,
    pace: PollIntervals,
    policy: HealthThresholds,
    persisted: BTreeMap<GpuUuid, PersistedGpu>,
    drain: watch::Receiver<DrainState>,
) -> (
    watch::Receiver<Inventory>,
    watch::Receiver<RecentXids>,
    NvmlHandle,
) {
    let (questions, asked) = mpsc::unbounded_channel();
    let (publish, inventory) = watch::channel(Inventory::Starting);
    let (xids, recent_xids) = watch::channel(RecentXids::default());
    let (report, reports) = mpsc::unbounded_channel();
    let watcher = NvmlWatcher {
        locate_library: find,
        hidden,
        intervals: pace,
        requests: asked,
        deferred: Vec::new(),
        report_sender: report,
        reports,
        publish,
        xids,
        drain,
        registry: GpuRegistry::new(policy, persisted),
        logged_failure: None,
        next_process: 0,
        library: None,
        locating: None,
        driver_slot: ProbeSlot::new(Scope::Driver),
        driver_version: None,
        gpu_count: 0,
        gpu_slots: Vec::new(),
        exiting: BTreeMap::new(),
        next_round: Instant::now(),
        round_deadline: None,
    };
    tokio::spawn(watcher.run());
    (
        inventory,
        recent_xids,
        NvmlHandle {
            requests: questions,
        },
    )
}

struct NvmlWatcher {
    locate_library: LibraryLocator,
    hidden: Vec<PathBuf>,
    intervals: PollIntervals,
    requests: mpsc::UnboundedReceiver<(GpuUuid, Job)>,
    /// Requests that arrived before the end of the first round.
    deferred: Vec<(GpuUuid, Job)>,
    report_sender: mpsc::UnboundedSender<(ProcessNumber, ProcessReport)>,
    reports: mpsc::UnboundedReceiver<(ProcessNumber, ProcessReport)>,
    publish: watch::Sender<Inventory>,
    xids: watch::Sender<RecentXids>,
    drain: watch::Receiver<DrainState>,
    registry: GpuRegistry,
    /// The last failure that was logged, so that each is logged once.
    logged_failure: Option<NoDriver>,
    next_process: ProcessNumber,
    library: Option<PathBuf>,
    /// A search for the library that has not ended.
    locating: Option<JoinHandle<Result<PathBuf, String>>>,
    driver_slot: ProbeSlot,
    /// The driver's version, as last reported.
    driver_version: Option<String>,
    /// The number of GPUs that the driver last reported.
    gpu_count: u32,
    gpu_slots: Vec<ProbeSlot>,
    /// Processes without a slot that have not ended, with the GPU of each where that is known.
    exiting: BTreeMap<ProcessNumber, Option<GpuUuid>>,
    /// The time of the next round of probes.
    next_round: Instant,
    /// The latest end of the running round of probes.
    round_deadline: Option<Instant>,
}

/// A part of the driver that the watcher probes through one process.
struct ProbeSlot {
    scope: Scope,
    /// The physical GPU, once NVML has reported it.
    uuid: Option<GpuUuid>,
    process: Option<SlotProcess>,
    /// The last call did not return in time, and no later call has returned.
    is_hung: bool,
    /// The result of the last probe.
    found: Option<GpuProbe>,
}

/// A running process, from its slot's view.
struct SlotProcess {
    id: ProcessNumber,
    jobs: mpsc::Sender<Job>,
    /// Stops the process when dropped; none while the process is being stopped.
    stop_guard: Option<DropGuard>,
    started_at: Instant,
    /// A probe was sent and is not answered.
    is_probing: bool,
    /// A probe of this process has failed.
    has_failed: bool,
}

impl ProbeSlot {
    fn new(scope: Scope) -> Self {
        Self {
            scope,
            uuid: None,
            process: None,
            is_hung: false,
            found: None,
        }
    }

    fn is_probing(&self) -> bool {
        self.process
            .as_ref()
            .is_some_and(|running| running.is_probing)
    }

    /// Whether a round waits for this slot's answer, or for the end of its process.
    fn is_awaited(&self) -> bool {
        let ends = |running: &SlotProcess| running.stop_guard.is_none();
        (self.is_probing() || self.process.as_ref().is_some_and(ends)) && !self.is_hung
    }

    /// Sends a probe, unless one is pending.
    fn probe(&mut self) {
        if let Some(running) = &mut self.process
            && !running.is_probing
            && running.stop_guard.is_some()
            && running.jobs.try_send(Job::Probe).is_ok()
        {
            running.is_probing = true;
            self.found = None;
        }
    }

    /// Starts to stop the process, which stays in the slot until its end.
    fn stop_process(&mut self) {
        if let Some(running) = &mut self.process {
            running.stop_guard = None;
            running.is_probing = false;
        }
    }

    /// Stops a process whose probe failed, once its GPU answers or the process is `old`.
    fn replace_failed(&mut self, old: Duration) {
        let Some(running) = &mut self.process else {
            return;
        };
        match self.found {
            Some(GpuProbe::Lost | GpuProbe::Failed(_)) => running.has_failed = true,
            Some(GpuProbe::Gpus(..)) if running.has_failed => return self.stop_process(),
            Some(GpuProbe::Gpus(..)) | None => {}
        }
        if running.has_failed && running.started_at.elapsed() >= old && !self.is_hung {
            self.stop_process();
        }
    }

    fn is_at(&self, places: &BTreeSet<PciAddress>) -> bool {
        matches!(&self.scope, Scope::Address(place) if places.contains(place))
    }
}

impl NvmlWatcher {
    async fn run(mut self) {
        let drained = self.drain.borrow_and_update().released.clone();
        self.registry.set_drained(drained, Instant::now());
        loop {
            let due = self.round_deadline.unwrap_or(self.next_round);
            tokio::select! {
                question = self.requests.recv() => match question {
                    Some((gpu, job)) => self.dispatch(&gpu, job),
                    // All handles were dropped: the agent ends.
                    None => return,
                },
                Some((id, report)) = self.reports.recv() => self.handle_report(id, report),
                Ok(()) = self.drain.changed() => {}
                () = sleep_until(due.into()) => match self.round_deadline {
                    Some(_) => self.end_round(),
                    None => self.begin_round().await,
                },
            }
            self.apply_drain();
            self.enumerate_gpus();
            if self.round_deadline.is_some() && !self.is_round_pending() {
                self.end_round();
            }
            for (gpu, job) in std::mem::take(&mut self.deferred) {
                self.dispatch(&gpu, job);
            }
        }
    }

    /// Passes a request to the process of its GPU. A request about a GPU without a process is
    /// dropped, and its caller gets no answer.
    ///
    /// Requests wait until the first round has found the GPUs. Otherwise a starting agent would get
    /// no answers, and would refuse memory that exited processes freed long ago.
    fn dispatch(&mut self, gpu: &GpuUuid, job: Job) {
        if matches!(*self.publish.borrow(), Inventory::Starting) {
            if self.deferred.len() < MAX_DEFERRED {
                self.deferred.push((gpu.clone(), job));
            }
            return;
        }
        let Some(gpu) = self.registry.probed_gpu(gpu) else {
            return;
        };
        let physical = gpu.mig_parent.as_ref().unwrap_or(&gpu.uuid);
        let of_it = |slot: &&ProbeSlot| slot.uuid.as_ref() == Some(physical) && !slot.is_hung;
        if let Some(running) = self
            .gpu_slots
            .iter()
            .find(of_it)
            .and_then(|s| s.process.as_ref())
        {
            // The queue has room for a request of every caller in the agent.
            let _ = running.jobs.try_send(job);
        }
    }

    fn is_round_pending(&self) -> bool {
        let slots = || self.gpu_slots.iter().chain([&self.driver_slot]);
        let is_finding =
            self.gpu_slots.is_empty() && self.gpu_count > 0 && !self.registry.has_drained();
        slots().any(ProbeSlot::is_awaited) || is_finding
    }

    async fn begin_round(&mut self) {
        let places = self.registry.probed_addresses();
        self.next_round = Instant::now() + self.intervals.probe_unhealthy;
        if places.as_ref().is_some_and(BTreeSet::is_empty) {
            return;
        }
        let starts = |slot: &ProbeSlot| slot.process.is_none();
        let starts = starts(&self.driver_slot) || self.gpu_slots.iter().any(starts);
        if (starts || self.library.is_none())
            && let Err(why) = self.find_library().await
        {
            return self.reset_driver(NoDriver::Missing(why));
        }
        if let Some(places) = places {
            self.retain_at(&places);
            let lacking = places.into_iter().map(Scope::Address);
            let is_there = |scope: &Scope| self.gpu_slots.iter().any(|slot| slot.scope == *scope);
            let lacking: Vec<_> = lacking.filter(|scope| !is_there(scope)).collect();
            if self.exiting.is_empty() {
                self.gpu_slots
                    .extend(lacking.into_iter().map(ProbeSlot::new));
            }
        }
        self.round_deadline = Some(Instant::now() + ANSWER);
        self.probe_all();
    }

    /// Stops the processes of all GPUs except those at these addresses.
    fn retain_at(&mut self, places: &BTreeSet<PciAddress>) {
        let goes = |slot: &mut ProbeSlot| !slot.is_at(places);
        let gone: Vec<ProbeSlot> = self.gpu_slots.extract_if(.., goes).collect();
        gone.into_iter().for_each(|slot| self.retire(slot));
    }

    /// Searches for the library. At most one search waits; while a disk hangs the last known path
    /// is used.
    async fn find_library(&mut self) -> Result<(), String> {
        let find = self.locate_library.clone();
        let mut finding = match self.locating.take() {
            Some(finding) => finding,
            None => spawn_blocking(move || find()),
        };
        match timeout(FIND, &mut finding).await {
            Ok(found) => {
                let found = found.map_err(|error| error.to_string());
                self.library = Some(found.flatten()?);
            }
            Err(_) => self.locating = Some(finding),
        }
        let late = || format!("failed to find the driver within {FIND:?}: a file system hangs");
        self.library.as_ref().map(|_| ()).ok_or_else(late)
    }

    fn probe_all(&mut self) {
        let Self {
            driver_slot: driver,
            gpu_slots: gpus,
            library,
            hidden,
            next_process: started,
            report_sender: report,
            intervals: pace,
            ..
        } = self;
        for slot in gpus.iter_mut().chain([driver]) {
            if let (None, Some(library)) = (&slot.process, library.as_ref()) {
                let process = NvmlProcess::start(library, slot.scope, hidden);
                slot.process = run(slot.scope, process, started, report, pace);
            }
            slot.probe();
        }
    }

    fn handle_report(&mut self, id: ProcessNumber, report: ProcessReport) {
        let has_it = |slot: &&mut ProbeSlot| slot.process.as_ref().is_some_and(|run| run.id == id);
        let slots = self.gpu_slots.iter_mut().chain([&mut self.driver_slot]);
        let Some(slot) = slots.into_iter().find(has_it) else {
            if matches!(report, ProcessReport::Exited) {
                self.exiting.remove(&id);
            }
            return;
        };
        let now = Instant::now();
        match report {
            ProcessReport::Probed(response) => {
                slot.is_hung = false;
                if let Some(running) = &mut slot.process {
                    running.is_probing = false;
                }
                self.handle_probe(id, response);
            }
            ProcessReport::Xids(codes) => {
                if let Some(uuid) = slot.uuid.clone() {
                    self.handle_xids(&uuid, &codes);
                }
            }
            ProcessReport::TimedOut => {
                if !std::mem::replace(&mut slot.is_hung, true) {
                    let gpu = slot.uuid.as_ref().map(GpuUuid::as_str);
                    warn!(gpu, scope = ?slot.scope, "nvml call hangs");
                }
                slot.stop_process();
                if let Some(uuid) = slot.uuid.clone() {
                    self.registry.record_timeout(&uuid, now);
                    self.publish_inventory();
                }
            }
            ProcessReport::Exited => {
                let ended = slot.process.take();
                if ended.is_some_and(|ended| ended.is_probing) {
                    slot.found = Some(GpuProbe::Failed(
                        "the process that calls NVML has ended".to_owned(),
                    ));
                }
                if !slot.is_hung {
                    // The GPU's XIDs are lost until the next process has registered for them.
                    self.next_round = now;
                }
            }
        }
    }

    fn handle_probe(&mut self, id: ProcessNumber, response: Response) {
        let has_it = |slot: &&mut ProbeSlot| slot.process.as_ref().is_some_and(|run| run.id == id);
        match response {
            Response::Driver { gpus, version } => {
                (self.gpu_count, self.driver_version) = (gpus, version);
                let is_hung = self.gpu_slots.iter().any(|slot| slot.is_hung);
                if gpus as usize > self.gpu_slots.len() && !self.registry.has_drained() && !is_hung
                {
                    // The count does not say which of the GPUs is new.
                    for slot in std::mem::take(&mut self.gpu_slots) {
                        self.retire(slot);
                    }
                }
            }
            Response::Gpu { uuid, found } => {
                let drained = self.registry.drained();
                let Some(slot) = self.gpu_slots.iter_mut().find(has_it) else {
                    return;
                };
                slot.uuid = uuid.or_else(|| slot.uuid.take());
                if let GpuProbe::Gpus(gpus, place) = &found {
                    slot.scope = place.map_or(slot.scope, Scope::Address);
                    if !gpus.is_empty() && gpus.iter().all(|gpu| gpu.is_in(drained)) {
                        // A starting agent probes all GPUs once, since their UUIDs are unknown
                        // before.
                        slot.stop_process();
                    }
                }
                slot.found = Some(found);
            }
            Response::NoDriver(why) => match self.gpu_slots.iter_mut().find(has_it) {
                Some(slot) => slot.found = Some(GpuProbe::Failed(why.to_string())),
                None => self.reset_driver(why),
            },
            Response::Xids(_) | Response::Sample(_) | Response::SetLimit(_) => {}
        }
    }

    fn handle_xids(&mut self, uuid: &GpuUuid, codes: &[u64]) {
        let ailed = self.registry.has_unhealthy();
        for code in codes.iter().copied() {
            warn!(gpu = %uuid, xid = code, "xid");
            self.registry.record_xid(uuid, code, Instant::now());
            if let Some(place) = self.registry.pci_address_of(uuid) {
                self.xids
                    .send_modify(|recent_xids| recent_xids.record(place, code, clock::now()));
            }
        }
        self.publish_inventory();
        if !ailed && self.registry.has_unhealthy() {
            self.next_round = Instant::now();
        }
    }

    /// Moves the process of a removed slot to those that are ending.
    fn retire(&mut self, slot: ProbeSlot) {
        if let Some(running) = slot.process {
            self.exiting.insert(running.id, slot.uuid);
        }
    }

    fn reset_driver(&mut self, why: NoDriver) {
        let driver = std::mem::replace(&mut self.driver_slot, ProbeSlot::new(Scope::Driver));
        for slot in std::mem::take(&mut self.gpu_slots)
            .into_iter()
            .chain([driver])
        {
            self.retire(slot);
        }
        (self.round_deadline, self.gpu_count) = (None, 0);
        self.library = None;
        self.next_round = Instant::now() + self.intervals.probe_unhealthy;
        self.record_probe(ProbeResult::NoDriver(why));
    }

    /// Probes all GPUs by NVML's index, once no other process is left.
    fn enumerate_gpus(&mut self) {
        let is_due = self.gpu_slots.is_empty() && self.exiting.is_empty() && self.gpu_count > 0;
        if is_due && self.round_deadline.is_some() && !self.registry.has_drained() {
            self.gpu_slots = (0..self.gpu_count)
                .map(|i| ProbeSlot::new(Scope::Index(i)))
                .collect();
            self.next_round = Instant::now();
            self.round_deadline = None;
        }
    }

    /// Records the requested drains, stops the processes of drained GPUs, and publishes the drain
    /// after their end.
    fn apply_drain(&mut self) {
        let DrainState {
            requested,
            released,
            ..
        } = self.drain.borrow_and_update().clone();
        if self.registry.set_draining(&requested) {
            self.publish_inventory();
        }
        if released == *self.registry.drained() {
            return;
        }
        if let Some(places) = self.registry.addresses_except(&released) {
            self.retain_at(&places);
            if places.is_empty() {
                let driver =
                    std::mem::replace(&mut self.driver_slot, ProbeSlot::new(Scope::Driver));
                self.retire(driver);
            }
        }
        let holds = |gpu: &Option<GpuUuid>| gpu.as_ref().is_none_or(|gpu| released.contains(gpu));
        if !self.exiting.values().any(holds) {
            self.registry.set_drained(released, Instant::now());
            self.publish_inventory();
            (self.round_deadline, self.next_round) = (None, Instant::now());
        }
    }

    fn end_round(&mut self) {
        self.round_deadline = None;
        for slot in self.gpu_slots.iter_mut().chain([&mut self.driver_slot]) {
            slot.is_hung |= slot.is_probing();
        }
        if self.gpu_slots.is_empty() && self.driver_slot.is_hung {
            let why = format!("NVML does not answer within {ANSWER:?}");
            self.record_probe(ProbeResult::NoDriver(NoDriver::Failed(why)));
        } else {
            self.record_probe(self.round_result());
        }
        for slot in &mut self.gpu_slots {
            slot.replace_failed(self.intervals.replace_failed);
        }
        let is_well = !self.gpu_slots.is_empty() && !self.registry.has_unhealthy();
        let pause = if is_well {
            self.intervals.probe
        } else {
            self.intervals.probe_unhealthy
        };
        self.next_round = Instant::now() + pause;
    }

    /// The result of a round, for the registry.
    fn round_result(&self) -> ProbeResult {
        let (mut gpus, mut silent, mut lost, mut hung) =
            <(Vec<_>, Vec<_>, Vec<_>, Vec<_>)>::default();
        let places = self.registry.probed_addresses();
        let looked_at = match &places {
            Some(places) => places.len(),
            None => usize::from(self.gpu_count > 0),
        };
        let (mut complete, mut all_told) = (true, self.gpu_slots.len() >= looked_at);
        for ProbeSlot {
            uuid,
            found,
            is_hung: hangs,
            ..
        } in &self.gpu_slots
        {
            let uuid = uuid.clone();
            match found {
                _ if *hangs => match uuid {
                    Some(uuid) => hung.push(uuid),
                    None => all_told = false,
                },
                Some(GpuProbe::Gpus(found, _)) => gpus.extend(found.iter().cloned()),
                // Without an UUID the registry takes the unlisted GPU for the lost one.
                Some(GpuProbe::Lost) => lost.extend(uuid),
                Some(GpuProbe::Failed(why)) => {
                    debug!(
                        gpu = uuid.as_ref().map(GpuUuid::as_str),
                        why, "gpu does not answer"
                    );
                    complete &= uuid.is_some();
                    silent.extend(uuid);
                }
                None => {
                    complete &= uuid.is_some();
                    silent.extend(uuid);
                }
            }
        }
        ProbeResult::Listed {
            driver: self.driver_version.clone(),
            gpus,
            unresponsive: silent,
            lost,
            timed_out: hung,
            failures_named: complete,
            timeouts_named: all_told,
        }
    }

    fn record_probe(&mut self, probe: ProbeResult) {
        let complaint = match &probe {
            ProbeResult::NoDriver(why) => Some(why.clone()),
            ProbeResult::Listed { .. } => None,
        };
        if let Some(why) = complaint
            .as_ref()
            .filter(|_| complaint != self.logged_failure)
        {
            warn!(reason = %why, "nvml not available");
        }
        self.logged_failure = complaint;
        self.registry.record_probe(probe, Instant::now());
        self.publish_inventory();
    }

    fn publish_inventory(&self) {
        let next = self.registry.inventory();
        self.publish.send_if_modified(|now| {
            let changed = *now != next;
            if changed {
                for state in next.gpus() {
                    info!(gpu = %state.gpu.uuid, health = ?state.health, memory = %state.gpu.memory, "gpu");
                }
                *now = next;
            }
            changed
        });
    }
}

/// Runs a process; none where the system refused to start it.
fn run(
    scope: Scope,
    process: io::Result<NvmlProcess>,
    started: &mut ProcessNumber,
    report: &mpsc::UnboundedSender<(ProcessNumber, ProcessReport)>,
    pace: &PollIntervals,
) -> Option<SlotProcess> {
    let process = process
        .inspect_err(|error| warn!(%error, "failed to start a process that calls NVML"))
        .ok()?;
    let (jobs, received) = mpsc::channel(JOB_QUEUE_LENGTH);
    let (stop, id) = (CancellationToken::new(), *started);
    *started += 1;
    let events = (scope != Scope::Driver).then_some(pace.xids);
    tokio::spawn(process.run(id, received, report.clone(), events, stop.clone()));
    Some(SlotProcess {
        id,
        jobs,
        stop_guard: Some(stop.drop_guard()),
        started_at: Instant::now(),
        is_probing: false,
        has_failed: false,
    })
}
