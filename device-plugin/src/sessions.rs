//! Serves every allocation's socket and keeps its credit.
//!
//! ```text
//! Sessions -- one task per allocation (allocation) -- one task per process (conversation)
//!                      |                                        |
//!                      +------ Container: credit (pure), pages, processes ------+
//!          \-- one task per GPU (leftovers): what the dead exported, proven free (held, pure)
//! ```
//!
//! A process is known from its first hello until its pidfd says that it died; closing the socket
//! ends nothing. What it was granted is then *retired*: it stays charged until [`DriverCharges`]
//! no longer shows that the driver charges the process (a forked child can keep its memory), and what it
//! had exported until nobody can hold that.
//! Grants are on record in `<run-dir>/sessions/<id>.json` before a process learns of them, so that
//! an agent that starts again never grants them twice; the shim says hello again when it next needs
//! the agent.

mod accounts;
mod checkpoint;
mod closer;
mod connection;
mod connection_limit;
mod container;
mod context_size;
mod driver_sample;
mod fault_notifier;
mod listener;
mod options;
mod orphan_bound;
mod peer;
pub(crate) mod pidfd;
mod rate_limit;
mod reclaim;
mod recovery;
mod shared_samples;
mod stream;
mod usage;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};

use crate::checkpoint::Checkpoint;
use crate::clock::{self, Present};
use crate::ledger::Moment;
use crate::retained::handle::{Desk, Living};
use crate::retained::leases::Charged;
use crate::units::{AllocationId, Bytes, GpuUuid, LeaseId, PodUid, TokenSet};
use closer::Closer;
use connection_limit::Seats;
use container::Container;
use container::denials::ToldOfAll;
use container::drain::Holder;
use container::siblings::Siblings;
use context_size::ContextSizes;
use fault_notifier::Bell;
use reclaim::Left;
use shared_samples::Looks;
use stream::Listener;

pub use accounts::Credit;
pub use driver_sample::{Charges, DriverCharges, Look};
pub use fault_notifier::Waits;
pub use peer::{Cgroups, Membership, Process};
pub use recovery::{Decision, Fault, Image, Policy, Since, Suspect};
pub use usage::{AccountBooks, Books, MemberBooks, by_allocation};

/// The processes of one container that are served at the same time. A container with more gets
/// `Rejected`, and its further processes no memory.
pub const MAX_PROCESSES: usize = 512;

/// What a container may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    /// Names the socket's folder.
    pub allocation: AllocationId,
    /// The pod that every peer must belong to.
    pub pod: PodUid,
    /// The GPUs, and how much of each.
    pub gpus: Vec<(GpuUuid, Bytes)>,
    /// Managed memory; zero is none.
    pub managed: Bytes,
    /// The tokens of its claim: allocations of the pod that have the same share the GPUs' quotas.
    pub tokens: Option<TokenSet>,
}

/// What a memory account counts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Account {
    /// One GPU's memory.
    Gpu(GpuUuid),
    /// CUDA managed memory.
    Managed,
}

/// One account of one container, at a moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The container's allocation.
    pub allocation: AllocationId,
    /// Which memory.
    pub account: Account,
    /// What the container may use.
    pub quota: Bytes,
    /// What its living processes may use without asking.
    pub granted: Bytes,
    /// What they say that they use, never more than was granted.
    pub used: Bytes,
    /// What dead processes had been granted and the driver may still charge.
    pub retired: Bytes,
    /// The most that was ever granted and retired together.
    pub peak: Bytes,
    /// Allocations that were denied.
    pub denied: u64,
    /// Living processes that said hello.
    pub processes: usize,
}

/// What went wrong with an allocation's socket.
#[derive(Debug, thiserror::Error)]
pub enum SessionsError {
    /// The folder or the socket in it could not be made.
    #[error("serve {}: {source}", path.display())]
    Serve {
        /// The socket or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The folder could not be removed.
    #[error("remove {}: {source}", path.display())]
    Remove {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Nothing is served under this name.
    #[error("allocation {0} is not served")]
    Unknown(AllocationId),
    /// More accounts than a credit page has.
    #[error("allocation {allocation} has {gpus} GPUs: more than a credit page has accounts")]
    TooManyGpus {
        /// The allocation.
        allocation: AllocationId,
        /// Its GPUs.
        gpus: usize,
    },
}

/// The sockets of this node's allocations. Dropping it stops serving and leaves the folders.
pub struct Sessions {
    run_dir: PathBuf,
    shared: Arc<Shared>,
    membership: Arc<dyn Membership>,
    seats: Seats,
    /// Whether the kernel is asked to refuse descriptors.
    refuses: bool,
    /// None where contexts are not charged.
    contexts: Option<Arc<ContextSizes>>,
    bell: Bell,
    /// None where nothing is kept.
    desk: Option<Desk>,
    /// The claims with allocations that are served.
    claims: Mutex<BTreeMap<(PodUid, TokenSet), Siblings>>,
    /// The tasks of the GPUs, which end with these sessions.
    watches: Mutex<JoinSet<()>>,
    /// Log lines that are written once for all containers.
    told: ToldOfAll,
}

/// What the tasks of the GPUs see.
struct Shared {
    charges: Arc<dyn DriverCharges>,
    /// The same for those who wait for what ended images had.
    looks: Arc<Looks>,
    running: Mutex<BTreeMap<AllocationId, Running>>,
    /// What pods that ended left.
    left: Mutex<BTreeMap<GpuUuid, Left>>,
    /// The GPUs that have a task.
    watched: Mutex<BTreeSet<GpuUuid>>,
    /// Changes each time that there may be something to prove, or no more.
    exports: watch::Sender<()>,
    /// The kept leases that the vault has; none where nothing is kept.
    living: Option<watch::Receiver<Living>>,
}

struct Running {
    container: Arc<Mutex<Container>>,
    task: AbortHandle,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Shared {
    /// Ends the task of a GPU that no container has and on which no dead process left memory; whether it
    /// has ended.
    fn unwatch(&self, gpu: &GpuUuid) -> bool {
        let mut watched = lock(&self.watched);
        let has_it = |running: &Running| lock(&running.container).gpus().contains(gpu);
        let is_used =
            lock(&self.running).values().any(has_it) || lock(&self.left).contains_key(gpu);
        if !is_used {
            watched.remove(gpu);
        }
        !is_used
    }
}

impl Drop for Sessions {
    fn drop(&mut self) {
        // The GPUs' tasks hold on to them until they have ended.
        lock(&self.shared.running).clear();
    }
}

impl Sessions {
    /// Serves below `run_dir`, as many processes at the same time as this process's limit of
    /// descriptors allows. Must be dropped inside the runtime that it serves on.
    pub fn new(
        run_dir: PathBuf,
        charges: Arc<dyn DriverCharges>,
        membership: Arc<dyn Membership>,
    ) -> Sessions {
        Sessions {
            run_dir,
            shared: Arc::new(Shared {
                looks: Arc::new(Looks::at(Arc::clone(&charges))),
                charges,
                running: Mutex::default(),
                left: Mutex::default(),
                watched: Mutex::default(),
                exports: watch::Sender::default(),
                living: None,
            }),
            membership,
            seats: Seats::of_this_process(),
            refuses: true,
            contexts: None,
            bell: Bell::default(),
            desk: None,
            claims: Mutex::default(),
            watches: Mutex::default(),
            told: ToldOfAll::default(),
        }
    }

    /// Charges each CUDA context what one takes of its GPU, which the agent [measures](Self::context_measured) and
    /// keeps in a file at `path`.
    #[must_use]
    pub fn charging_contexts(mut self, path: PathBuf) -> Sessions {
        let file = Checkpoint::new(path);
        self.contexts = Some(Arc::new(ContextSizes::of(file)));
        self
    }

    /// Who looks at GPUs.
    pub(crate) fn charges(&self) -> Arc<dyn DriverCharges> {
        Arc::clone(&self.shared.charges)
    }

    /// The agent saw a context of `gpu` take `bytes` with this driver, by a process of its own.
    pub fn context_measured(&self, gpu: &GpuUuid, driver: &str, bytes: Bytes) {
        if let Some(sizes) = &self.contexts {
            sizes.measured(gpu, driver, bytes);
        }
    }

    /// Whether the agent has still to measure what a context of `gpu` takes with this driver.
    pub fn lacks_context(&self, gpu: &GpuUuid, driver: &str) -> bool {
        let sizes = self.contexts.as_ref();
        sizes.is_some_and(|sizes| !sizes.is_measured(gpu, driver))
    }

    /// What a context of `gpu` takes, as far as it is known.
    pub fn context_size(&self, gpu: &GpuUuid) -> Option<Bytes> {
        Some(self.contexts.as_ref()?.of_gpu(gpu))
    }

    /// Forgets the sizes of contexts on all other GPUs.
    pub fn keep_gpus(&self, gpus: &BTreeSet<GpuUuid>) {
        if let Some(sizes) = &self.contexts {
            sizes.keep_gpus(gpus);
        }
    }

    /// From now on there is this driver: what contexts of another one took counts no more.
    pub fn set_driver(&self, driver: &str) {
        if let Some(sizes) = &self.contexts {
            sizes.keep_only(driver);
        }
    }

    /// Passes questions about kept memory on to a desk, and takes what is `living` for no residual. Before anything
    /// is served.
    #[must_use]
    pub fn keeping(mut self, desk: Desk, living: watch::Receiver<Living>) -> Sessions {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.living = Some(living);
        }
        self.desk = Some(desk);
        self
    }

    /// Serves at most `peers` processes of the node at the same time.
    #[must_use]
    pub fn limited_to(mut self, peers: usize) -> Sessions {
        self.seats = Seats::new(peers);
        self
    }

    /// Serves as on a kernel before 6.16, which lets processes pass any descriptor.
    #[must_use]
    pub fn passed_descriptors(mut self) -> Sessions {
        self.refuses = false;
        self
    }

    /// The folder of the allocations' folders: what a CDI device mounts one of.
    pub fn alloc_dir(run_dir: &Path) -> PathBuf {
        run_dir.join("alloc")
    }

    /// Serves an allocation from now on; one that is served already goes on as it is. After a
    /// restart of the agent the processes that were known are charged at once.
    ///
    /// # Errors
    /// [`SessionsError::Serve`] when the folder or the socket cannot be made.
    pub async fn serve(&self, served: Served) -> Result<(), SessionsError> {
        let allocation = served.allocation;
        if lock(&self.shared.running).contains_key(&allocation) {
            return Ok(());
        }
        if served.gpus.len() >= bursar_protocol::credit_page::MAX_SLOTS {
            return Err(SessionsError::TooManyGpus {
                allocation,
                gpus: served.gpus.len(),
            });
        }
        let folder = self.folder(&allocation);
        let socket = folder.join(bursar_protocol::SOCKET_NAME);
        let served_before = socket.exists();
        let closer = Closer::of(allocation);
        let listener = listen(&folder, &socket, Arc::clone(&closer), self.refuses);
        let listener = listener.map_err(|source| SessionsError::Serve {
            path: socket.clone(),
            source,
        })?;
        let record = checkpoint::Record::at(self.record_path(&allocation)).map_err(|source| {
            SessionsError::Serve {
                path: self.record_path(&allocation),
                source,
            }
        })?;
        let siblings = served.tokens.clone().map(|tokens| {
            let mut claims = lock(&self.claims);
            claims.retain(|_, siblings| !siblings.is_alone());
            claims
                .entry((served.pod.clone(), tokens))
                .or_default()
                .clone()
        });
        let (mut container, known) = Container::restore(
            served,
            record,
            served_before,
            self.membership.as_ref(),
            clock::now(),
        );
        if let Some(sizes) = &self.contexts {
            container.charge_contexts(Arc::clone(sizes));
        }
        container.close_by(Arc::clone(&closer));
        container.keep_pages(self.seats.pages());
        container.tell_with(self.told.clone());
        container.tell_exports(self.shared.exports.clone());
        if let Some(siblings) = siblings {
            container.join(siblings);
        }
        let gpus = container.gpus();
        let container = Arc::new(Mutex::new(container));
        let task = listener::Task {
            container: Arc::clone(&container),
            looks: Arc::clone(&self.shared.looks),
            membership: Arc::clone(&self.membership),
            seats: self.seats.clone(),
            bell: self.bell.clone(),
            desk: self.desk.clone(),
            closer,
            told: self.told.clone(),
        };
        let task = tokio::spawn(task.run(listener, known)).abort_handle();
        // A second serve of the same allocation at the same time: the later listener has replaced
        // the earlier's socket, so the later one stays.
        lock(&self.shared.running).insert(allocation, Running { container, task });
        // After the container is listed: the task of a GPU that no container has may be ending.
        gpus.into_iter().for_each(|gpu| self.watch(gpu));
        Ok(())
    }

    /// Ends an allocation: its pod is gone. One that is not served is ended already.
    ///
    /// # Errors
    /// [`SessionsError::Remove`] when its folder cannot be removed.
    pub async fn end(&self, allocation: &AllocationId) -> Result<(), SessionsError> {
        let ended = lock(&self.shared.running).remove(allocation);
        if let Some(running) = &ended {
            let mut container = lock(&running.container);
            container.leave_siblings();
            container.end_record();
        }
        drop(ended);
        self.shared.exports.send_replace(());
        let record = self.record_path(allocation);
        for path in [
            self.folder(allocation),
            checkpoint::temporary(&record),
            record,
        ] {
            let removed = if path.is_dir() {
                std::fs::remove_dir_all(&path)
            } else {
                std::fs::remove_file(&path)
            };
            match removed {
                Err(source) if source.kind() != io::ErrorKind::NotFound => {
                    return Err(SessionsError::Remove { path, source });
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Starts the task of a GPU: it runs while a container has the GPU or dead processes left memory there.
    fn watch(&self, gpu: GpuUuid) {
        if lock(&self.shared.watched).insert(gpu.clone()) {
            let mut watches = lock(&self.watches);
            while watches.try_join_next().is_some() {}
            watches.spawn(reclaim::watch(gpu, Arc::clone(&self.shared)));
        }
        self.shared.exports.send_replace(());
    }

    /// What of each GPU an allocation's processes had exported, living or dead: what may be held by others when its
    /// pod ends. One that is not served is known by its record.
    pub fn exported(&self, allocation: &AllocationId) -> Vec<(GpuUuid, Bytes)> {
        if let Some(running) = lock(&self.shared.running).get(allocation) {
            return lock(&running.container).exported();
        }
        let record = checkpoint::Record::at(self.record_path(allocation)).ok();
        let content = record.and_then(|record| record.read());
        content
            .map(|content| content.exported())
            .unwrap_or_default()
    }

    /// Charges an allocation for what a container before it had exported of a GPU: how much of it, on record.
    pub fn inherit(&self, allocation: &AllocationId, gpu: &GpuUuid, bytes: Bytes) -> Bytes {
        let mut inherited = Bytes::ZERO;
        // One that is not served takes nothing.
        let _ = self.with(allocation, |container| {
            inherited = container.inherit(gpu, bytes)
        });
        inherited
    }

    /// The kept leases that an allocation is charged for, each with its GPU and what it has. One that is not served
    /// is known by its record.
    pub fn leases(&self, allocation: &AllocationId) -> BTreeMap<LeaseId, (GpuUuid, Bytes)> {
        if let Some(running) = lock(&self.shared.running).get(allocation) {
            return lock(&running.container).leases();
        }
        let record = checkpoint::Record::at(self.record_path(allocation)).ok();
        let content = record.and_then(|record| record.read());
        let leases = content.map(|content| content.leases()).unwrap_or_default();
        leases
            .into_iter()
            .map(|(lease, what)| (LeaseId(lease), what))
            .collect()
    }

    /// The pids of exited processes whose memory the accounts still charge.
    pub fn exited_pids(&self) -> BTreeSet<u32> {
        let running = lock(&self.shared.running);
        let containers = running.values().map(|running| lock(&running.container));
        containers
            .flat_map(|container| container.exited_pids())
            .collect()
    }

    /// The kept leases that the allocations which are served are charged for.
    pub fn all_leases(&self) -> Charged {
        let running = lock(&self.shared.running);
        running
            .iter()
            .map(|(id, running)| (*id, lock(&running.container).leases()))
            .collect()
    }

    /// Charges an allocation for a kept lease that is to be made, on record.
    ///
    /// # Errors
    /// What its quota has left; nothing where it is not served.
    pub fn lease(
        &self,
        allocation: &AllocationId,
        gpu: &GpuUuid,
        lease: LeaseId,
        bytes: Bytes,
    ) -> Result<(), Bytes> {
        let mut leased = Err(Bytes::ZERO);
        let served = self.with(allocation, |container| {
            leased = container.lease(gpu, lease, bytes);
        });
        served.map_err(|_| Bytes::ZERO).and(leased)
    }

    /// Charges an allocation for a kept lease that there is, if it is not.
    pub fn adopt_lease(
        &self,
        allocation: &AllocationId,
        gpu: &GpuUuid,
        lease: LeaseId,
        bytes: Bytes,
    ) {
        // One that is not served is charged when it is.
        let _ = self.with(allocation, |container| {
            container.adopt_lease(gpu, lease, bytes)
        });
    }

    /// Charges what a kept lease has as what dead processes exported from now on, whether or not it was charged by now:
    /// whether that is on record.
    pub fn release_lease(
        &self,
        allocation: &AllocationId,
        gpu: &GpuUuid,
        lease: LeaseId,
        bytes: Bytes,
    ) -> bool {
        let mut released = false;
        let served = self.with(allocation, |container| {
            released = container.release_lease(gpu, lease, bytes);
        });
        served.is_ok() && released
    }

    /// There is no memory of a kept lease that an allocation was charged for.
    pub fn forget_lease(&self, allocation: &AllocationId, lease: LeaseId) {
        let _ = self.with(allocation, |container| container.forget_lease(lease));
    }

    /// Looks after what pods that ended left on GPUs, and nothing else of the kind: the most that is held of it, where
    /// that is proven. It has another number whenever something was left.
    pub fn held(&self, left: BTreeMap<GpuUuid, u64>) -> BTreeMap<GpuUuid, Bytes> {
        let gpus: Vec<GpuUuid> = left.keys().cloned().collect();
        let mut known = lock(&self.shared.left);
        let before = std::mem::take(&mut *known);
        let same = |gpu: &GpuUuid, number: u64| {
            let left = before.get(gpu).filter(|left| left.number == number);
            left.copied().unwrap_or(Left { number, held: None })
        };
        *known = left
            .into_iter()
            .map(|(gpu, number)| (gpu.clone(), same(&gpu, number)))
            .collect();
        let proven = known.iter();
        let proven = proven
            .filter_map(|(gpu, left)| Some((gpu.clone(), left.held?)))
            .collect();
        drop(known);
        gpus.into_iter().for_each(|gpu| self.watch(gpu));
        proven
    }

    /// Sets what an account is given at birth, which may become known while the container runs. Of what is used
    /// above it nothing is taken away; nothing more is granted until frees have caught up.
    ///
    /// # Errors
    /// [`SessionsError::Unknown`].
    pub fn resize(
        &self,
        allocation: &AllocationId,
        account: &Account,
        quota: Bytes,
    ) -> Result<(), SessionsError> {
        self.with(allocation, |container| container.resize(account, quota))
    }

    /// Lowers an account of a running container below what it was given at birth; none lifts that again. It
    /// outlives the agent. What is used above it stays; see [`Sessions::reclaim`].
    ///
    /// # Errors
    /// [`SessionsError::Unknown`].
    pub fn order(
        &self,
        allocation: &AllocationId,
        account: &Account,
        bytes: Option<Bytes>,
    ) -> Result<(), SessionsError> {
        self.with(allocation, |container| container.order(account, bytes))
    }

    /// Takes credit that lies idle above a quota that was made smaller.
    pub fn reclaim(&self) {
        for running in lock(&self.shared.running).values() {
            lock(&running.container).reclaim();
        }
    }

    /// Charges what processes without a session have of an account of a container, by pid; it replaces what was
    /// told before. An allocation that has ended is nobody's.
    pub fn set_outside(
        &self,
        allocation: &AllocationId,
        account: &Account,
        charged: BTreeMap<u32, Bytes>,
    ) {
        let _ = self.with(allocation, |container| {
            container.set_outside(account, charged)
        });
    }

    /// The books of every allocation that is served.
    pub fn books(&self) -> Vec<Books> {
        let running = lock(&self.shared.running);
        running
            .values()
            .map(|running| lock(&running.container).books())
            .collect()
    }

    /// The images of an allocation's container that live and are not fenced; none where it is not served.
    pub fn images(&self, allocation: &AllocationId) -> Option<Vec<Image>> {
        let running = lock(&self.shared.running);
        let running = running.get(allocation)?;
        Some(lock(&running.container).images())
    }

    /// Told each time that a process reported poison.
    pub fn news(&self) -> Arc<Notify> {
        self.bell.news()
    }

    /// Who waits until the kernel's log was read to its end: from now on every image does before it is greeted, so that
    /// no XID of the image before it, nor of a process that had its pid, is taken for its own.
    pub fn wait_for_log(&self) -> mpsc::Receiver<Waits> {
        self.bell.waits()
    }

    /// What is done about poisoned contexts of an allocation's container from now on. One that has ended needs nothing.
    pub fn set_context_policy(&self, allocation: &AllocationId, policy: Policy) {
        let _ = self.with(allocation, |container| container.set_policy(policy));
    }

    /// The image that a process of the host is, if one of the GPUs `on` is its container's and it had started by then.
    pub fn suspect(&self, pid: u32, on: &[GpuUuid], by: Moment) -> Option<Suspect> {
        let running = lock(&self.shared.running);
        let mut running = running.values();
        running.find_map(|running| lock(&running.container).suspect(pid, on, by))
    }

    /// An image's context is lost by this XID. One that has ended needs nothing.
    pub fn xid(&self, suspect: &Suspect, code: u32, now: Present) {
        let _ = self.with(&suspect.allocation, |container| {
            container.xid(suspect, code, now);
        });
    }

    /// The poisoned images of an allocation's container below this number are to be ended. One that has ended needs nothing.
    pub fn reach(&self, allocation: &AllocationId, generation: u64, now: Present) {
        let _ = self.with(allocation, |container| container.reach(generation, now));
    }

    /// The faults that were opened since this was last asked, after deciding about those that waited long enough.
    /// `alone`: for how long nobody could be told of them.
    pub fn new_faults(&self, alone: Duration, now: Present) -> Vec<(AllocationId, Fault)> {
        self.of_each(|container| {
            container.overdue(alone, now);
            container.take_news()
        })
    }

    /// The faults that are open.
    pub fn faults(&self) -> Vec<(AllocationId, Fault)> {
        self.of_each(|container| container.faults().to_vec())
    }

    /// The first processes of containers that are to be killed for a fault, one of each container at a time.
    pub fn condemned(&self) -> Vec<(AllocationId, Process)> {
        let poisoned = self.of_each(|container| {
            let pod = container.pod().clone();
            let condemned = container.condemned();
            condemned
                .map(|process| (process, pod))
                .into_iter()
                .collect()
        });
        // Outside of the locks: it reads files.
        let first = |(allocation, (process, pod)): (AllocationId, (Process, PodUid))| {
            let first = self.membership.first(process, &pod)?;
            Some((allocation, first))
        };
        poisoned.into_iter().filter_map(first).collect()
    }

    /// Containers with memory of these GPUs get nothing more: which of the GPUs living processes hold so, and the first
    /// processes of their containers, which are to be killed.
    pub fn drain(&self, gpus: &BTreeSet<GpuUuid>) -> (BTreeSet<GpuUuid>, BTreeSet<Process>) {
        let found = self.of_each(|container| container.drain(gpus));
        let (mut held, mut doomed) = (BTreeSet::new(), BTreeSet::new());
        // Outside of the locks: it reads files.
        for (_, Holder { pid, pod, gpus }) in found {
            let process = self.membership.process(pid);
            if let Some(first) = process.and_then(|process| self.membership.first(process, &pod)) {
                held.extend(gpus);
                doomed.insert(first);
            }
        }
        (held, doomed)
    }

    fn of_each<T>(&self, ask: impl Fn(&mut Container) -> Vec<T>) -> Vec<(AllocationId, T)> {
        let running = lock(&self.shared.running);
        let answers = running.iter().flat_map(|(allocation, running)| {
            let answers = ask(&mut lock(&running.container));
            answers.into_iter().map(|answer| (*allocation, answer))
        });
        answers.collect()
    }

    fn with(
        &self,
        allocation: &AllocationId,
        act: impl FnOnce(&mut Container),
    ) -> Result<(), SessionsError> {
        let running = lock(&self.shared.running);
        let running = running
            .get(allocation)
            .ok_or(SessionsError::Unknown(*allocation))?;
        act(&mut lock(&running.container));
        Ok(())
    }

    /// Every account of every allocation that is served.
    pub fn usage(&self) -> Vec<Usage> {
        let running = lock(&self.shared.running);
        running
            .values()
            .flat_map(|running| lock(&running.container).usage())
            .collect()
    }

    fn folder(&self, allocation: &AllocationId) -> PathBuf {
        Sessions::alloc_dir(&self.run_dir).join(allocation.to_string())
    }

    fn record_path(&self, allocation: &AllocationId) -> PathBuf {
        self.run_dir
            .join("sessions")
            .join(format!("{allocation}.json"))
    }
}

/// Any user of the container may connect; its cgroup is what counts.
fn listen(
    folder: &Path,
    socket: &Path,
    closer: Arc<Closer>,
    refuses: bool,
) -> io::Result<Listener> {
    use std::os::unix::fs::PermissionsExt;
    let mode =
        |path: &Path, mode| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode));
    std::fs::create_dir_all(folder)?;
    mode(folder, 0o755)?;
    // Bound under another name and moved: a shim that connects finds a socket that is served, or
    // the old one, never none.
    let fresh = folder.join(".agent.sock.new");
    match std::fs::remove_file(&fresh) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = Listener::bind(&fresh, closer, refuses)?;
    mode(&fresh, 0o666)?;
    std::fs::rename(&fresh, socket)?;
    Ok(listener)
}

/// A panic while a lock is held leaves plain counters: they are usable, and the agent's other
/// containers must not suffer.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
