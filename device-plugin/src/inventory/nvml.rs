//! The one thread that talks to NVML: its calls block, some for seconds on a sick GPU.
//!
//! It probes every GPU each [`Pace::poll`], drains XID events in between, answers questions about
//! processes, and publishes what changed. After a reset, or an update of the driver, old handles stay broken for
//! ever: while NVML cannot be used it opens the library afresh for each probe, and while a GPU ails each
//! [`Pace::reopen`], for XIDs of the other GPUs are lost in between.
//!
//! A GPU that is drained is held by nobody: the library is closed, and opened again for the others only. Those are
//! asked for by their place on the bus, as NVML opens every GPU that it is walked past, or that it compares an UUID with.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, EventSet, Nvml};
use tokio::sync::{oneshot, watch};
use tracing::{debug, info, warn};

use super::health::Policy;
use super::holders;
use super::limits;
use super::mig::{CAPABILITIES, Instance};
use super::pci::PciAddress;
use super::roster::{Probe, Remembered, Roster};
use super::xid::Told;
use super::{Gpu, GpuState, Inventory, NoDriver};
use crate::drain::Drain;
use crate::node::clock;
use crate::sessions::{Charges, DriverCharges, Look};
use crate::units::{Bytes, GpuUuid, UnitError};

/// How often the thread looks.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Between two probes of all GPUs.
    pub poll: Duration,
    /// Between two probes while a GPU ails or there is none.
    pub poll_ailing: Duration,
    /// How long one opening of the library is used while a GPU ails.
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

/// Says where `libnvidia-ml.so.1` is now, or why nowhere; asked again before each opening.
pub type FindLibrary = Box<dyn Fn() -> Result<PathBuf, String> + Send>;

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
        source: NvmlError,
    },
}

struct Question {
    gpu: GpuUuid,
    answer: Answer,
}

/// Where an answer goes, and so what is asked.
enum Answer {
    Look(oneshot::Sender<Result<Look, QueryError>>),
    Limit {
        cgroup: PathBuf,
        hard: Bytes,
        answer: oneshot::Sender<Result<(), QueryError>>,
    },
}

/// Asks the NVML thread; the thread ends when the last handle is dropped.
#[derive(Debug, Clone)]
pub struct NvmlHandle {
    questions: mpsc::Sender<Question>,
}

impl DriverCharges for NvmlHandle {
    fn look(&self, gpu: &GpuUuid) -> Option<Look> {
        self.ask(gpu).blocking_recv().ok()?.ok()
    }
}

impl NvmlHandle {
    /// Asks for a GPU's memory and processes. The answer comes when NVML gives it, which for a sick GPU may be
    /// never: who asks has a deadline of their own.
    pub fn ask(&self, gpu: &GpuUuid) -> oneshot::Receiver<Result<Look, QueryError>> {
        let (answer, answered) = oneshot::channel();
        let question = Question {
            gpu: gpu.clone(),
            answer: Answer::Look(answer),
        };
        // The thread has ended with the agent: the receiver finds that out.
        let _ = self.questions.send(question);
        answered
    }

    /// Has the driver hold the processes in `cgroup` to so much of a GPU. The answer comes when NVML gives it.
    pub fn limit(
        &self,
        gpu: &GpuUuid,
        cgroup: &Path,
        hard: Bytes,
    ) -> oneshot::Receiver<Result<(), QueryError>> {
        let (answer, answered) = oneshot::channel();
        let question = Question {
            gpu: gpu.clone(),
            answer: Answer::Limit {
                cgroup: cgroup.to_owned(),
                hard,
                answer,
            },
        };
        let _ = self.questions.send(question);
        answered
    }
}

/// Starts the thread. `find` says where the driver's library is; `remembered` is what a predecessor in the same
/// boot knew of its GPUs; of `drain`, nothing is held that is released.
pub fn start(
    find: FindLibrary,
    pace: Pace,
    policy: Policy,
    remembered: BTreeMap<GpuUuid, Remembered>,
    drain: watch::Receiver<Drain>,
) -> std::io::Result<(
    watch::Receiver<Inventory>,
    watch::Receiver<Told>,
    NvmlHandle,
)> {
    let (questions, asked) = mpsc::channel();
    let (publish, inventory) = watch::channel(Inventory::Starting);
    let (xids, told) = watch::channel(Told::default());
    let watcher = Watcher {
        pace,
        asked,
        publish,
        xids,
        drain,
        roster: Roster::new(policy, remembered),
        complaint: None,
    };
    std::thread::Builder::new()
        .name("nvml".into())
        .spawn(move || watcher.run(&find))?;
    Ok((inventory, told, NvmlHandle { questions }))
}

/// The thread's state.
struct Watcher {
    pace: Pace,
    asked: mpsc::Receiver<Question>,
    publish: watch::Sender<Inventory>,
    xids: watch::Sender<Told>,
    drain: watch::Receiver<Drain>,
    roster: Roster,
    /// The trouble that was logged last: each is logged once.
    complaint: Option<NoDriver>,
}

/// Every handle is gone: the agent ends.
struct Ended;

impl Watcher {
    fn run(mut self, find: &FindLibrary) {
        while self.session(find).is_ok() {}
    }

    /// Uses one opening of the library for as long as all is well.
    fn session(&mut self, find: &FindLibrary) -> Result<(), Ended> {
        let released = self.drain.borrow().released.clone();
        self.roster.drain(released, Instant::now());
        self.announce();
        if self.roster.places().is_some_and(|places| places.is_empty()) {
            return self.idle(None, self.pace.poll_ailing);
        }
        let opened = find().map_err(NoDriver::Missing).and_then(|path| {
            let nvml = Nvml::builder().lib_path(path.as_os_str()).init();
            nvml.map_err(|error| no_driver(&path.display(), &error))
        });
        match opened {
            Err(why) => {
                self.take(Probe::NoDriver(why));
                self.idle(None, self.pace.poll_ailing)
            }
            Ok(nvml) => self.use_library(&nvml),
        }
    }

    fn use_library(&mut self, nvml: &Nvml) -> Result<(), Ended> {
        let (opened, mut events) = (Instant::now(), Vec::new());
        let mut ailed = self.roster.is_ailing();
        loop {
            // Before the probe, which takes its time where a GPU is sick, and after it for what it found.
            register_new(nvml, &mut events, &self.roster.inventory());
            let spares = self.roster.has_drained();
            let probe = probe(nvml, self.roster.places());
            let broken = matches!(probe, Probe::NoDriver(_));
            self.take(probe);
            if !spares && self.roster.has_drained() {
                // An agent that starts looks at all of them once, to know which are which.
                return Ok(());
            }
            let inventory = self.roster.inventory();
            register_new(nvml, &mut events, &inventory);
            let session = Session {
                nvml,
                events: &events,
            };
            if broken || inventory.gpus().is_empty() {
                return self.idle(Some(session), self.pace.poll_ailing);
            }
            let ailing = self.roster.is_ailing();
            if std::mem::replace(&mut ailed, ailing) && !ailing {
                // The event set of a GPU that was away may be broken as well.
                return Ok(());
            }
            let pause = if ailing {
                self.pace.poll_ailing
            } else {
                self.pace.poll
            };
            self.idle(Some(session), pause)?;
            if self.is_drain_changed() {
                return Ok(());
            }
            if self.roster.is_ailing() && opened.elapsed() >= self.pace.reopen {
                return Ok(());
            }
        }
    }

    /// Whether other GPUs are released than were when the library was opened.
    fn is_drain_changed(&self) -> bool {
        self.drain.borrow().released != *self.roster.drained()
    }

    /// Answers questions and drains events for `time`, or until a GPU falls sick or others are drained.
    fn idle(&mut self, session: Option<Session<'_, '_>>, time: Duration) -> Result<(), Ended> {
        let until = Instant::now() + time;
        let ailing = self.roster.is_ailing();
        loop {
            if let Some(session) = &session {
                self.drain(session);
                if !ailing && self.roster.is_ailing() {
                    return Ok(());
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.is_drain_changed() {
                return Ok(());
            }
            match self.asked.recv_timeout(left.min(self.pace.events)) {
                Ok(question) => answer(session.as_ref(), &self.roster, question),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(Ended),
            }
        }
    }

    fn drain(&mut self, session: &Session<'_, '_>) {
        for (uuid, set) in session.events {
            while let Ok(event) = set.wait(0) {
                if let Some(XidError::Value(code)) = event.event_data {
                    warn!(gpu = %uuid, xid = code, "xid");
                    self.roster.xid(uuid, code, Instant::now());
                    if let Some(place) = self.roster.place(uuid) {
                        self.xids
                            .send_modify(|told| told.hear(place, code, clock::now()));
                    }
                }
            }
        }
        self.announce();
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

/// One opening of the library. Each GPU has an event set of its own, for a registration that fails
/// destroys its set.
struct Session<'nvml, 'events> {
    nvml: &'nvml Nvml,
    events: &'events [(GpuUuid, EventSet<'nvml>)],
}

fn no_driver(asked: &dyn std::fmt::Display, error: &NvmlError) -> NoDriver {
    let why = format!("{asked}: {error}");
    match error {
        NvmlError::DriverNotLoaded => NoDriver::NotLoaded(why),
        _ => NoDriver::Failed(why),
    }
}

/// Of all GPUs, or of those at these places.
fn probe(nvml: &Nvml, places: Option<BTreeSet<PciAddress>>) -> Probe {
    let count = match nvml.device_count() {
        Ok(count) => count,
        Err(error) => {
            return Probe::NoDriver(no_driver(&"nvmlDeviceGetCount", &error));
        }
    };
    let (mut gpus, mut silent, mut lost, mut complete) = (Vec::new(), Vec::new(), Vec::new(), true);
    let devices: Vec<_> = match places {
        None => (0..count)
            .map(|index| nvml.device_by_index(index))
            .collect(),
        Some(places) => {
            let at = |place: PciAddress| nvml.device_by_pci_bus_id(place.to_string());
            places.into_iter().map(at).collect()
        }
    };
    for (number, named) in devices.into_iter().enumerate() {
        let named = named.map_err(GpuError::Nvml);
        let (device, uuid) = match named.and_then(|device| Ok((uuid_of(&device)?, device))) {
            Ok((uuid, device)) => (device, uuid),
            // Then the one that is not listed is the one that is lost.
            Err(GpuError::Nvml(NvmlError::GpuLost | NvmlError::NotFound)) => continue,
            Err(error) => {
                debug!(number, %error, "gpu without a name");
                complete = false;
                continue;
            }
        };
        match describe(nvml, &device, &uuid) {
            Ok(found) => gpus.extend(found),
            Err(GpuError::Nvml(NvmlError::GpuLost)) => lost.push(uuid),
            Err(error) => {
                debug!(gpu = %uuid, %error, "gpu does not answer");
                silent.push(uuid);
            }
        }
    }
    Probe::Listed {
        driver: nvml.sys_driver_version().ok(),
        gpus,
        silent,
        lost,
        complete,
    }
}

/// The GPU itself, or its MIG instances where it is cut.
fn describe(nvml: &Nvml, device: &Device<'_>, uuid: &GpuUuid) -> Result<Vec<Gpu>, GpuError> {
    let minor = device.minor_number()?;
    // GPUs without MIG answer NotSupported, old drivers FunctionNotFound.
    let cut = device.mig_mode().is_ok_and(|mode| mode.current == 1);
    if !cut {
        return Ok(vec![gpu(device, uuid.clone(), minor)?]);
    }
    let mut instances = Vec::new();
    for index in 0..device.mig_device_count()? {
        match device.mig_device_by_index(index) {
            Ok(instance) => {
                let name = uuid_of(&instance)?;
                let numbers = Instance::of(nvml, &instance);
                let capabilities = numbers
                    .map(|numbers| numbers.capabilities(Path::new(CAPABILITIES), minor))
                    .unwrap_or_default();
                instances.push(Gpu {
                    pci: pci(device),
                    mig_parent: Some(uuid.clone()),
                    capabilities,
                    ..gpu(&instance, name, minor)?
                });
            }
            // The count is what the GPU can be cut into at most.
            Err(NvmlError::NotFound) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(instances)
}

fn gpu(device: &Device<'_>, uuid: GpuUuid, minor: u32) -> Result<Gpu, NvmlError> {
    let memory = device.memory_info()?;
    Ok(Gpu {
        uuid,
        minor,
        model: device.name()?,
        memory: Bytes(memory.total.saturating_sub(memory.reserved)),
        pci: pci(device),
        mig_parent: None,
        capabilities: Vec::new(),
    })
}

fn pci(device: &Device<'_>) -> Option<PciAddress> {
    device.pci_info().ok()?.bus_id.parse().ok()
}

/// Why a GPU cannot be told of.
#[derive(Debug, thiserror::Error)]
enum GpuError {
    #[error(transparent)]
    Nvml(#[from] NvmlError),
    #[error(transparent)]
    Unit(#[from] UnitError),
}

fn uuid_of(device: &Device<'_>) -> Result<GpuUuid, GpuError> {
    Ok(device.uuid()?.parse()?)
}

/// Asks for the XID events of physical GPUs that are not watched yet.
fn register_new<'nvml>(
    nvml: &'nvml Nvml,
    events: &mut Vec<(GpuUuid, EventSet<'nvml>)>,
    inventory: &Inventory,
) {
    let looked_at = |state: &&GpuState| !state.memory.drained;
    for GpuState { gpu, .. } in inventory.gpus().iter().filter(looked_at) {
        let physical = gpu.mig_parent.as_ref().unwrap_or(&gpu.uuid);
        if events.iter().any(|(watched, _)| watched == physical) {
            continue;
        }
        let registered = physical_of(nvml, gpu).and_then(|device| {
            let set = nvml.create_event_set()?;
            device
                .register_events(EventTypes::CRITICAL_XID_ERROR, set)
                .map_err(|error| error.error)
        });
        match registered {
            Ok(set) => events.push((physical.clone(), set)),
            Err(error) => debug!(gpu = %physical, %error, "no xid events"),
        }
    }
}

/// The GPU, or what a MIG instance is cut from.
fn physical_of<'nvml>(nvml: &'nvml Nvml, gpu: &Gpu) -> Result<Device<'nvml>, NvmlError> {
    let physical = gpu.mig_parent.as_ref().unwrap_or(&gpu.uuid);
    match gpu.pci {
        Some(place) => nvml.device_by_pci_bus_id(place.to_string()),
        None => nvml.device_by_uuid(physical.as_str()),
    }
}

fn device_of<'nvml>(nvml: &'nvml Nvml, gpu: &Gpu) -> Result<Device<'nvml>, NvmlError> {
    let physical = physical_of(nvml, gpu)?;
    if gpu.mig_parent.is_none() {
        return Ok(physical);
    }
    for index in 0..physical.mig_device_count()? {
        match physical.mig_device_by_index(index) {
            Ok(instance) if instance.uuid()? == gpu.uuid.as_str() => return Ok(instance),
            Ok(_) | Err(NvmlError::NotFound) => {}
            Err(error) => return Err(error),
        }
    }
    Err(NvmlError::NotFound)
}

fn answer(session: Option<&Session<'_, '_>>, roster: &Roster, Question { gpu, answer }: Question) {
    match answer {
        // Nobody waits any more, so NVML need not be asked.
        Answer::Look(answer) if answer.is_closed() => {}
        Answer::Look(answer) => {
            // Who asked may have given up meanwhile.
            let _ = answer.send(ask(session, roster, gpu, |_, device| look(device)));
        }
        Answer::Limit {
            cgroup,
            hard,
            answer,
        } => {
            let limit = |nvml: &Nvml, device: &Device<'_>| limits::set(nvml, device, &cgroup, hard);
            let _ = answer.send(ask(session, roster, gpu, limit));
        }
    }
}

fn ask<T>(
    session: Option<&Session<'_, '_>>,
    roster: &Roster,
    gpu: GpuUuid,
    what: impl FnOnce(&Nvml, &Device<'_>) -> Result<T, NvmlError>,
) -> Result<T, QueryError> {
    let Session { nvml, .. } = session.ok_or(QueryError::NotAvailable)?;
    let known = roster.gpu(&gpu).ok_or(QueryError::NotAvailable)?;
    let answer = device_of(nvml, known).and_then(|device| what(nvml, &device));
    answer.map_err(|source| QueryError::Nvml { gpu, source })
}

/// The memory first: a process that is in it is listed then, unless it has ended.
fn look(device: &Device<'_>) -> Result<Look, NvmlError> {
    let used = Bytes(device.memory_info()?.used);
    let compute = device.running_compute_processes()?;
    // A GPU without graphics answers NotSupported.
    let graphics = device.running_graphics_processes().unwrap_or_default();
    let charged = compute.into_iter().chain(graphics).map(|process| {
        let bytes = match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(Bytes(bytes)),
            UsedGpuMemory::Unavailable => None,
        };
        (process.pid, bytes)
    });
    let charges: Charges = charged.collect();
    let contextless = contextless(&device.uuid()?, &charges);
    Ok(Look {
        used,
        charges,
        contextless,
    })
}

/// What processes own that NVML does not list. A MIG instance has none: the kernel module tells of the whole GPU.
fn contextless(uuid: &str, charges: &Charges) -> BTreeMap<u32, Bytes> {
    let gpu = uuid.parse().ok().filter(|_| !uuid.starts_with("MIG-"));
    let told = gpu.map(|gpu| holders::holders(&gpu));
    let told = told.transpose().unwrap_or_else(|error| {
        debug!(uuid, %error, "processes without a context are not known");
        None
    });
    let mut contextless = told.unwrap_or_default();
    contextless.retain(|pid, _| !charges.lists(*pid));
    contextless
}
