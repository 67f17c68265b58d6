//! Asks NVML about the GPUs, through one process for each: a call that hangs holds up nothing but
//! its own GPU.
//!
//! ```text
//!   Watcher --probe each `Pace::poll`, questions--> process of a GPU (`calls`) --> NVML
//!           <--answers, XIDs each `Pace::events`--  and one for the driver: how many GPUs there are
//!      |
//!      +--> Roster --> Inventory
//! ```
//!
//! A GPU that is not told of within [`ANSWER`] does not answer: its process is killed, and the next
//! one starts when that has ended. A call that hangs in the kernel keeps its process from ending,
//! so one process a GPU is the most there is.
//!
//! After a reset, or an update of the driver, old handles stay broken for ever: while NVML cannot
//! be used every probe has a process of its own. A process whose probe failed is replaced each
//! [`Pace::reopen`], and once when its GPU answers again: its registration for XIDs may be broken.
//! A GPU has to answer for [`Policy::quiet`] before it is well, so none of its XIDs is missed then.
//!
//! A GPU that is drained has no process: the last one has ended before that is said. The others
//! are asked for by their place on the bus meanwhile (`calls`).

mod calls;
mod process;
mod protocol;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{sleep_until, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::{debug, info, warn};

pub use calls::{WORD, child};
pub use protocol::Refusal;

use super::health::Policy;
use super::pci::PciAddress;
use super::registry::{Probe, Remembered, Roster};
use super::xid::Told;
use super::{Inventory, NoDriver};
use crate::clock;
use crate::gpu::drain::Drain;
use crate::sessions::{DriverCharges, Look};
use crate::units::{Bytes, GpuUuid};
use process::{Id, Job, Process, Report};
use protocol::{Found, Request, Response, Scope};

/// How long one answer of NVML may take.
const ANSWER: Duration = Duration::from_secs(5);

/// How long the first answer of a process may take: without persistence mode the driver initialises
/// the GPU for it.
const START: Duration = Duration::from_secs(20);

/// How long a look for the library may hold up the rounds of probes.
const FIND: Duration = Duration::from_secs(1);

/// Questions that may wait for one GPU.
const QUEUE: usize = 32;

/// Questions that may wait until the GPUs are known.
const MOST_WAITING: usize = 1_024;

/// How often NVML is asked.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Between two probes of all GPUs.
    pub poll: Duration,
    /// Between two probes while a GPU ails or there is none.
    pub poll_ailing: Duration,
    /// The age at which a process is replaced whose probe failed.
    pub reopen: Duration,
    /// Between two looks for XID events; the longest time that an XID goes unseen.
    pub events: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            poll: Duration::from_secs(5),
            poll_ailing: Duration::from_secs(2),
            reopen: Duration::from_secs(30),
            events: Duration::from_millis(250),
        }
    }
}

/// Says where `libnvidia-ml.so.1` is now, or why nowhere; asked again before processes start.
pub type FindLibrary = Arc<dyn Fn() -> Result<PathBuf, String> + Send + Sync>;

/// Why NVML did not answer a question.
#[derive(Debug, thiserror::Error)]
pub enum QueryError {
    /// There is no driver at the moment.
    #[error("NVML is not available")]
    NotAvailable,
    /// NVML answered with an error.
    #[error("NVML does not answer about {gpu}")]
    Nvml {
        /// The GPU that was asked about.
        gpu: GpuUuid,
        /// What NVML said.
        source: Refusal,
    },
}

/// Asks NVML; the watcher ends when the last handle is dropped.
#[derive(Debug, Clone)]
pub struct NvmlHandle {
    questions: mpsc::UnboundedSender<(GpuUuid, Job)>,
}

impl DriverCharges for NvmlHandle {
    fn look(&self, gpu: &GpuUuid) -> Option<Look> {
        self.ask(gpu).blocking_recv().ok()?.ok()
    }
}

impl NvmlHandle {
    /// Asks for a GPU's memory and processes. There is no answer where the GPU gives none within
    /// [`ANSWER`].
    pub fn ask(&self, gpu: &GpuUuid) -> oneshot::Receiver<Result<Look, QueryError>> {
        let (answer, answered) = oneshot::channel();
        let job = Job::Look(Request::Look(gpu.clone()), answer);
        // The watcher has ended with the agent: the receiver finds that out.
        let _ = self.questions.send((gpu.clone(), job));
        answered
    }

    /// Has the driver hold the processes in `cgroup` to so much of a GPU. No answer, as with
    /// [`ask`](Self::ask).
    pub fn limit(
        &self,
        gpu: &GpuUuid,
        cgroup: &Path,
        hard: Bytes,
    ) -> oneshot::Receiver<Result<(), QueryError>> {
        let (answer, answered) = oneshot::channel();
        let request = Request::Limit {
            gpu: gpu.clone(),
            cgroup: cgroup.to_owned(),
            hard,
        };
        let _ = self
            .questions
            .send((gpu.clone(), Job::Limit(request, answer)));
        answered
    }
}

/// Starts the watcher. `find` says where the driver's library is; `remembered` is what a
/// predecessor in the same boot knew of its GPUs; of `drain`, nothing is held that is released.
pub fn start(
    find: FindLibrary,
    pace: Pace,
    policy: Policy,
    remembered: BTreeMap<GpuUuid, Remembered>,
    drain: watch::Receiver<Drain>,
) -> (
    watch::Receiver<Inventory>,
    watch::Receiver<Told>,
    NvmlHandle,
) {
    let (questions, asked) = mpsc::unbounded_channel();
    let (publish, inventory) = watch::channel(Inventory::Starting);
    let (xids, told) = watch::channel(Told::default());
    let (report, reports) = mpsc::unbounded_channel();
    let watcher = Watcher {
        find,
        pace,
        asked,
        waiting: Vec::new(),
        report,
        reports,
        publish,
        xids,
        drain,
        roster: Roster::new(policy, remembered),
        complaint: None,
        started: 0,
        library: None,
        finding: None,
        driver: Slot::of(Scope::Driver),
        version: None,
        count: 0,
        gpus: Vec::new(),
        ending: BTreeMap::new(),
        next: Instant::now(),
        round: None,
    };
    tokio::spawn(watcher.run());
    (inventory, told, NvmlHandle { questions })
}

/// The task's state.
struct Watcher {
    find: FindLibrary,
    pace: Pace,
    asked: mpsc::UnboundedReceiver<(GpuUuid, Job)>,
    /// Questions from before the first round was over.
    waiting: Vec<(GpuUuid, Job)>,
    report: mpsc::UnboundedSender<(Id, Report)>,
    reports: mpsc::UnboundedReceiver<(Id, Report)>,
    publish: watch::Sender<Inventory>,
    xids: watch::Sender<Told>,
    drain: watch::Receiver<Drain>,
    roster: Roster,
    /// The trouble that was logged last: each is logged once.
    complaint: Option<NoDriver>,
    /// How many processes were started.
    started: Id,
    library: Option<PathBuf>,
    /// A look for the library that has not come back.
    finding: Option<JoinHandle<Result<PathBuf, String>>>,
    driver: Slot,
    /// The driver's version, as it last told.
    version: Option<String>,
    /// How many GPUs the driver last told of.
    count: u32,
    gpus: Vec<Slot>,
    /// Processes that no slot has any more and that have not ended, with the GPU of each where that
    /// is known.
    ending: BTreeMap<Id, Option<GpuUuid>>,
    /// When the next round of probes begins.
    next: Instant,
    /// When the running round of probes ends at the latest.
    round: Option<Instant>,
}

/// A part of the driver that is looked at.
struct Slot {
    scope: Scope,
    /// The physical GPU, once it told.
    uuid: Option<GpuUuid>,
    running: Option<Running>,
    /// The last call did not return in time, and none has since.
    hung: bool,
    /// What the last probe found.
    found: Option<Found>,
}

/// A process, as its slot knows it.
struct Running {
    id: Id,
    jobs: mpsc::Sender<Job>,
    /// Ends the process; none once that has begun.
    life: Option<DropGuard>,
    since: Instant,
    /// A probe was sent and not answered.
    probing: bool,
    /// A probe of this process failed.
    failed: bool,
}

impl Slot {
    fn of(scope: Scope) -> Self {
        Self {
            scope,
            uuid: None,
            running: None,
            hung: false,
            found: None,
        }
    }

    fn is_probing(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.probing)
    }

    /// Whether a round waits for its answer, or for the end of its process.
    fn is_awaited(&self) -> bool {
        let ends = |running: &Running| running.life.is_none();
        (self.is_probing() || self.running.as_ref().is_some_and(ends)) && !self.hung
    }

    /// Sends a probe, unless one is under way.
    fn probe(&mut self) {
        if let Some(running) = &mut self.running
            && !running.probing
            && running.life.is_some()
            && running.jobs.try_send(Job::Probe).is_ok()
        {
            running.probing = true;
            self.found = None;
        }
    }

    /// Begins to end its process; the slot has it until it has ended.
    fn end(&mut self) {
        if let Some(running) = &mut self.running {
            running.life = None;
            running.probing = false;
        }
    }

    /// Ends a process whose probe failed, once its GPU answers or the process is `old`.
    fn replace_broken(&mut self, old: Duration) {
        let Some(running) = &mut self.running else {
            return;
        };
        match self.found {
            Some(Found::Lost | Found::Silent(_)) => running.failed = true,
            Some(Found::Gpus(..)) if running.failed => return self.end(),
            Some(Found::Gpus(..)) | None => {}
        }
        if running.failed && running.since.elapsed() >= old && !self.hung {
            self.end();
        }
    }

    fn is_at(&self, places: &BTreeSet<PciAddress>) -> bool {
        matches!(&self.scope, Scope::Place(place) if places.contains(place))
    }
}

impl Watcher {
    async fn run(mut self) {
        let drained = self.drain.borrow_and_update().released.clone();
        self.roster.drain(drained, Instant::now());
        loop {
            let due = self.round.unwrap_or(self.next);
            tokio::select! {
                question = self.asked.recv() => match question {
                    Some((gpu, job)) => self.pass(&gpu, job),
                    // Every handle is gone: the agent ends.
                    None => return,
                },
                Some((id, report)) = self.reports.recv() => self.hear(id, report),
                Ok(()) = self.drain.changed() => {}
                () = sleep_until(due.into()) => match self.round {
                    Some(_) => self.end_round(),
                    None => self.begin_round().await,
                },
            }
            self.follow_drain();
            self.find_gpus();
            if self.round.is_some() && !self.is_awaiting() {
                self.end_round();
            }
            for (gpu, job) in std::mem::take(&mut self.waiting) {
                self.pass(&gpu, job);
            }
        }
    }

    /// Drops a question about a GPU without a process: its caller gets no answer.
    ///
    /// Questions wait until the first round has found the GPUs: a starting agent without an answer
    /// would refuse memory that dead processes gave back long ago.
    fn pass(&mut self, gpu: &GpuUuid, job: Job) {
        if matches!(*self.publish.borrow(), Inventory::Starting) {
            if self.waiting.len() < MOST_WAITING {
                self.waiting.push((gpu.clone(), job));
            }
            return;
        }
        let Some(gpu) = self.roster.gpu(gpu) else {
            return;
        };
        let physical = gpu.mig_parent.as_ref().unwrap_or(&gpu.uuid);
        let of_it = |slot: &&Slot| slot.uuid.as_ref() == Some(physical) && !slot.hung;
        if let Some(running) = self
            .gpus
            .iter()
            .find(of_it)
            .and_then(|s| s.running.as_ref())
        {
            // A full queue holds a question of every caller that the agent has.
            let _ = running.jobs.try_send(job);
        }
    }

    fn is_awaiting(&self) -> bool {
        let slots = || self.gpus.iter().chain([&self.driver]);
        let is_finding = self.gpus.is_empty() && self.count > 0 && !self.roster.has_drained();
        slots().any(Slot::is_awaited) || is_finding
    }

    async fn begin_round(&mut self) {
        let places = self.roster.places();
        self.next = Instant::now() + self.pace.poll_ailing;
        if places.as_ref().is_some_and(BTreeSet::is_empty) {
            return;
        }
        let starts = |slot: &Slot| slot.running.is_none();
        let starts = starts(&self.driver) || self.gpus.iter().any(starts);
        if (starts || self.library.is_none())
            && let Err(why) = self.find_library().await
        {
            return self.lose_driver(NoDriver::Missing(why));
        }
        if let Some(places) = places {
            self.keep_at(&places);
            let lacking = places.into_iter().map(Scope::Place);
            let is_there = |scope: &Scope| self.gpus.iter().any(|slot| slot.scope == *scope);
            let lacking: Vec<_> = lacking.filter(|scope| !is_there(scope)).collect();
            if self.ending.is_empty() {
                self.gpus.extend(lacking.into_iter().map(Slot::of));
            }
        }
        self.round = Some(Instant::now() + ANSWER);
        self.ask_all();
    }

    /// Ends the processes of all GPUs but those at these places.
    fn keep_at(&mut self, places: &BTreeSet<PciAddress>) {
        let goes = |slot: &mut Slot| !slot.is_at(places);
        let gone: Vec<Slot> = self.gpus.extract_if(.., goes).collect();
        gone.into_iter().for_each(|slot| self.forget(slot));
    }

    /// Looks where the library is now. While a disk hangs that is where it was, and one look waits
    /// at most.
    async fn find_library(&mut self) -> Result<(), String> {
        let find = self.find.clone();
        let mut finding = match self.finding.take() {
            Some(finding) => finding,
            None => spawn_blocking(move || find()),
        };
        match timeout(FIND, &mut finding).await {
            Ok(found) => {
                let found = found.map_err(|error| error.to_string());
                self.library = Some(found.flatten()?);
            }
            Err(_) => self.finding = Some(finding),
        }
        let late = || format!("failed to find the driver within {FIND:?}: a file system hangs");
        self.library.as_ref().map(|_| ()).ok_or_else(late)
    }

    fn ask_all(&mut self) {
        let Self {
            driver,
            gpus,
            library,
            started,
            report,
            pace,
            ..
        } = self;
        for slot in gpus.iter_mut().chain([driver]) {
            if let (None, Some(library)) = (&slot.running, library.as_ref()) {
                slot.running = run(slot.scope, library, started, report, pace);
            }
            slot.probe();
        }
    }

    fn hear(&mut self, id: Id, report: Report) {
        let has_it = |slot: &&mut Slot| slot.running.as_ref().is_some_and(|run| run.id == id);
        let slots = self.gpus.iter_mut().chain([&mut self.driver]);
        let Some(slot) = slots.into_iter().find(has_it) else {
            if matches!(report, Report::Ended) {
                self.ending.remove(&id);
            }
            return;
        };
        let now = Instant::now();
        match report {
            Report::Probed(response) => {
                slot.hung = false;
                if let Some(running) = &mut slot.running {
                    running.probing = false;
                }
                self.hear_probe(id, response);
            }
            Report::Xids(codes) => {
                if let Some(uuid) = slot.uuid.clone() {
                    self.hear_xids(&uuid, &codes);
                }
            }
            Report::Hung => {
                if !std::mem::replace(&mut slot.hung, true) {
                    let gpu = slot.uuid.as_ref().map(GpuUuid::as_str);
                    warn!(gpu, scope = ?slot.scope, "nvml call hangs");
                }
                slot.end();
                if let Some(uuid) = slot.uuid.clone() {
                    self.roster.hung(&uuid, now);
                    self.announce();
                }
            }
            Report::Ended => {
                let ended = slot.running.take();
                if ended.is_some_and(|ended| ended.probing) {
                    slot.found = Some(Found::Silent("the process that asks has ended".to_owned()));
                }
                if !slot.hung {
                    // Its events are lost until the next one has registered for them.
                    self.next = now;
                }
            }
        }
    }

    fn hear_probe(&mut self, id: Id, response: Response) {
        let has_it = |slot: &&mut Slot| slot.running.as_ref().is_some_and(|run| run.id == id);
        match response {
            Response::Driver { gpus, version } => {
                (self.count, self.version) = (gpus, version);
                let is_hung = self.gpus.iter().any(|slot| slot.hung);
                if gpus as usize > self.gpus.len() && !self.roster.has_drained() && !is_hung {
                    // The count does not tell which of them is new.
                    for slot in std::mem::take(&mut self.gpus) {
                        self.forget(slot);
                    }
                }
            }
            Response::Gpu { uuid, found } => {
                let drained = self.roster.drained();
                let Some(slot) = self.gpus.iter_mut().find(has_it) else {
                    return;
                };
                slot.uuid = uuid.or_else(|| slot.uuid.take());
                if let Found::Gpus(gpus, place) = &found {
                    slot.scope = place.map_or(slot.scope, Scope::Place);
                    if !gpus.is_empty() && gpus.iter().all(|gpu| gpu.is_in(drained)) {
                        // An agent that starts looks at all GPUs once, to know which are which.
                        slot.end();
                    }
                }
                slot.found = Some(found);
            }
            Response::NoDriver(why) => match self.gpus.iter_mut().find(has_it) {
                Some(slot) => slot.found = Some(Found::Silent(why.to_string())),
                None => self.lose_driver(why),
            },
            Response::Xids(_) | Response::Look(_) | Response::Limit(_) => {}
        }
    }

    fn hear_xids(&mut self, uuid: &GpuUuid, codes: &[u64]) {
        let ailed = self.roster.is_ailing();
        for code in codes.iter().copied() {
            warn!(gpu = %uuid, xid = code, "xid");
            self.roster.xid(uuid, code, Instant::now());
            if let Some(place) = self.roster.place(uuid) {
                self.xids
                    .send_modify(|told| told.hear(place, code, clock::now()));
            }
        }
        self.announce();
        if !ailed && self.roster.is_ailing() {
            self.next = Instant::now();
        }
    }

    /// Ends the process of a slot that is gone.
    fn forget(&mut self, slot: Slot) {
        if let Some(running) = slot.running {
            self.ending.insert(running.id, slot.uuid);
        }
    }

    fn lose_driver(&mut self, why: NoDriver) {
        let driver = std::mem::replace(&mut self.driver, Slot::of(Scope::Driver));
        for slot in std::mem::take(&mut self.gpus).into_iter().chain([driver]) {
            self.forget(slot);
        }
        (self.round, self.count) = (None, 0);
        self.library = None;
        self.next = Instant::now() + self.pace.poll_ailing;
        self.take(Probe::NoDriver(why));
    }

    /// Looks at all GPUs by their numbers, once nothing else looks at any.
    fn find_gpus(&mut self) {
        let is_due = self.gpus.is_empty() && self.ending.is_empty() && self.count > 0;
        if is_due && self.round.is_some() && !self.roster.has_drained() {
            self.gpus = (0..self.count).map(|i| Slot::of(Scope::Index(i))).collect();
            self.next = Instant::now();
            self.round = None;
        }
    }

    /// Ends the processes of GPUs that are drained now, and says that they are when those have
    /// ended.
    fn follow_drain(&mut self) {
        let released = self.drain.borrow_and_update().released.clone();
        if released == *self.roster.drained() {
            return;
        }
        if let Some(places) = self.roster.places_without(&released) {
            self.keep_at(&places);
            if places.is_empty() {
                let driver = std::mem::replace(&mut self.driver, Slot::of(Scope::Driver));
                self.forget(driver);
            }
        }
        let holds = |gpu: &Option<GpuUuid>| gpu.as_ref().is_none_or(|gpu| released.contains(gpu));
        if !self.ending.values().any(holds) {
            self.roster.drain(released, Instant::now());
            self.announce();
            (self.round, self.next) = (None, Instant::now());
        }
    }

    fn end_round(&mut self) {
        self.round = None;
        for slot in self.gpus.iter_mut().chain([&mut self.driver]) {
            slot.hung |= slot.is_probing();
        }
        if self.gpus.is_empty() && self.driver.hung {
            let why = format!("NVML does not answer within {ANSWER:?}");
            self.take(Probe::NoDriver(NoDriver::Failed(why)));
        } else {
            self.take(self.probed());
        }
        for slot in &mut self.gpus {
            slot.replace_broken(self.pace.reopen);
        }
        let is_well = !self.gpus.is_empty() && !self.roster.is_ailing();
        let pause = if is_well {
            self.pace.poll
        } else {
            self.pace.poll_ailing
        };
        self.next = Instant::now() + pause;
    }

    /// What a round found.
    fn probed(&self) -> Probe {
        let (mut gpus, mut silent, mut lost, mut hung) =
            <(Vec<_>, Vec<_>, Vec<_>, Vec<_>)>::default();
        let places = self.roster.places();
        let looked_at = match &places {
            Some(places) => places.len(),
            None => usize::from(self.count > 0),
        };
        let (mut complete, mut all_told) = (true, self.gpus.len() >= looked_at);
        for Slot {
            uuid,
            found,
            hung: hangs,
            ..
        } in &self.gpus
        {
            let uuid = uuid.clone();
            match found {
                _ if *hangs => match uuid {
                    Some(uuid) => hung.push(uuid),
                    None => all_told = false,
                },
                Some(Found::Gpus(found, _)) => gpus.extend(found.iter().cloned()),
                // Without a name the one that is not listed is the one that is lost.
                Some(Found::Lost) => lost.extend(uuid),
                Some(Found::Silent(why)) => {
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
        Probe::Listed {
            driver: self.version.clone(),
            gpus,
            silent,
            lost,
            hung,
            complete,
            all_told,
        }
    }

    fn take(&mut self, probe: Probe) {
        let complaint = match &probe {
            Probe::NoDriver(why) => Some(why.clone()),
            Probe::Listed { .. } => None,
        };
        if let Some(why) = complaint.as_ref().filter(|_| complaint != self.complaint) {
            warn!(reason = %why, "nvml not available");
        }
        self.complaint = complaint;
        self.roster.probed(probe, Instant::now());
        self.announce();
    }

    fn announce(&self) {
        let next = self.roster.inventory();
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

/// Starts a process; none where the system does not let the agent.
fn run(
    scope: Scope,
    library: &Path,
    started: &mut Id,
    report: &mpsc::UnboundedSender<(Id, Report)>,
    pace: &Pace,
) -> Option<Running> {
    let process = Process::start(library, scope);
    let process = process
        .inspect_err(|error| warn!(%error, "failed to start a process that calls NVML"))
        .ok()?;
    let (jobs, received) = mpsc::channel(QUEUE);
    let (stop, id) = (CancellationToken::new(), *started);
    *started += 1;
    let events = (scope != Scope::Driver).then_some(pace.events);
    tokio::spawn(process.run(id, received, report.clone(), events, stop.clone()));
    Some(Running {
        id,
        jobs,
        life: Some(stop.drop_guard()),
        since: Instant::now(),
        probing: false,
        failed: false,
    })
}
