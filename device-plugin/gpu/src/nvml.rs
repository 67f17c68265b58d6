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
mod handle;
mod process;
mod protocol;
mod reports;
mod rounds;
mod slot;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_ledger::units::GpuUuid;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::sleep_until;
use tracing::{info, warn};

pub use calls::{SUBCOMMAND, run_child};
pub use handle::{NvmlHandle, QueryError};
pub use protocol::CallError;

use super::health::HealthThresholds;
use super::registry::{GpuRegistry, PersistedGpu, ProbeResult};
use super::xid::RecentXids;
use super::{Inventory, NoDriver};
use crate::drain::DrainState;
use process::{Job, ProcessNumber, ProcessReport};
use protocol::Scope;
use slot::ProbeSlot;

/// How long one answer of NVML may take.
const ANSWER: Duration = Duration::from_secs(5);

/// How long the first answer of a process may take. Without persistence mode the driver initialises
/// the GPU for it.
const FIRST_ANSWER: Duration = Duration::from_secs(20);

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

/// Starts the watcher. `find` locates the driver's library; its processes read no file below
/// `hidden` but those beside the library. `persisted` has the GPUs that the previous agent of the
/// same boot recorded; the watcher holds no GPU that `drain` has released.
pub fn start(
    find: LibraryLocator,
    hidden: Vec<PathBuf>,
    intervals: PollIntervals,
    thresholds: HealthThresholds,
    persisted: BTreeMap<GpuUuid, PersistedGpu>,
    drain: watch::Receiver<DrainState>,
) -> (
    watch::Receiver<Inventory>,
    watch::Receiver<RecentXids>,
    NvmlHandle,
) {
    let (request_sender, requests) = mpsc::unbounded_channel();
    let (publish, inventory) = watch::channel(Inventory::Starting);
    let (xids, recent_xids) = watch::channel(RecentXids::default());
    let (report, reports) = mpsc::unbounded_channel();
    let watcher = NvmlWatcher {
        locate_library: find,
        hidden,
        intervals,
        requests,
        deferred: Vec::new(),
        report_sender: report,
        reports,
        publish,
        xids,
        drain,
        registry: GpuRegistry::new(thresholds, persisted),
        logged_failure: None,
        next_process: 0,
        library: None,
        locating: None,
        driver_slot: ProbeSlot::new(Scope::Driver),
        driver_version: None,
        gpu_count: 0,
        known_count: 0,
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
            requests: request_sender,
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
    /// The number of GPUs that the driver last reported; 0 while it does not answer.
    gpu_count: u32,
    /// The number of GPUs that the driver last reported, also while it does not answer.
    known_count: u32,
    gpu_slots: Vec<ProbeSlot>,
    /// Processes without a slot that have not ended, with the GPU of each where that is known.
    exiting: BTreeMap<ProcessNumber, Option<GpuUuid>>,
    /// The time of the next round of probes.
    next_round: Instant,
    /// The latest end of the running round of probes.
    round_deadline: Option<Instant>,
}

impl NvmlWatcher {
    async fn run(mut self) {
        let drained = self.drain.borrow_and_update().released.clone();
        self.registry.set_drained(drained, Instant::now());
        loop {
            let due = self.round_deadline.unwrap_or(self.next_round);
            tokio::select! {
                request = self.requests.recv() => match request {
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
        let is_of_gpu = |slot: &&ProbeSlot| slot.uuid.as_ref() == Some(physical) && !slot.is_hung;
        if let Some(running) = self
            .gpu_slots
            .iter()
            .find(is_of_gpu)
            .and_then(|s| s.process.as_ref())
        {
            // The queue has room for a request of every caller in the agent.
            let _ = running.jobs.try_send(job);
        }
    }

    /// Moves the process of a removed slot to those that are ending.
    fn retire(&mut self, slot: ProbeSlot) {
        if let Some(running) = slot.process {
            self.exiting.insert(running.id, slot.uuid);
        }
    }

    /// Stops all processes, after an error of the driver.
    ///
    /// The GPUs are listed anew once every process has ended. A process that hangs may never end,
    /// so meanwhile its GPU and the others keep their slots, if those name PCI addresses.
    fn reset_driver(&mut self, why: NoDriver) {
        let driver = std::mem::replace(&mut self.driver_slot, ProbeSlot::new(Scope::Driver));
        self.retire(driver);
        let hangs = |slot: &ProbeSlot| slot.is_hung && slot.process.is_some();
        let has_address = |slot: &ProbeSlot| matches!(slot.scope, Scope::Address(_));
        if self.gpu_slots.iter().any(hangs) && self.gpu_slots.iter().all(has_address) {
            for slot in &mut self.gpu_slots {
                slot.stop_process();
                slot.found = None;
            }
        } else {
            for slot in std::mem::take(&mut self.gpu_slots) {
                self.retire(slot);
            }
        }
        (self.round_deadline, self.gpu_count) = (None, 0);
        self.library = None;
        self.next_round = Instant::now() + self.intervals.probe_unhealthy;
        self.record_probe(ProbeResult::NoDriver(why));
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
        self.retire_drained(&released);
        if let Some(addresses) = self.addresses_except(&released) {
            self.retain_at(&addresses);
            if addresses.is_empty() {
                let driver =
                    std::mem::replace(&mut self.driver_slot, ProbeSlot::new(Scope::Driver));
                self.retire(driver);
            }
        }
        let may_hold =
            |gpu: &Option<GpuUuid>| gpu.as_ref().is_none_or(|gpu| released.contains(gpu));
        let is_starting = self.gpu_slots.iter().any(ProbeSlot::is_starting);
        if !is_starting && !self.exiting.values().any(may_hold) {
            self.registry.set_drained(released, Instant::now());
            self.publish_inventory();
            (self.round_deadline, self.next_round) = (None, Instant::now());
        }
    }

    fn record_probe(&mut self, probe: ProbeResult) {
        let failure = match &probe {
            ProbeResult::NoDriver(why) => Some(why.clone()),
            ProbeResult::Listed { .. } => None,
        };
        if let Some(why) = failure.as_ref().filter(|_| failure != self.logged_failure) {
            warn!(reason = %why, "nvml not available");
        }
        self.logged_failure = failure;
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
