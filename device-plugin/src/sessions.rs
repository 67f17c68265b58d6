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
//! ends nothing. What it was granted is then *retired*: it stays charged until [`MemorySampler`]
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
use crate::clock::{self, ClockReading};
use crate::ledger::BootTime;
use crate::retained::handle::{LeaseHandle, LiveLeases};
use crate::retained::leases::ChargedLeases;
use crate::units::{AllocationId, Bytes, DeviceIdSet, GpuUuid, LeaseId, PodUid};
use closer::SocketCloser;
use connection_limit::ConnectionLimit;
use container::Container;
use container::denials::SharedLogLimiter;
use container::drain::GpuHolder;
use container::siblings::ClaimSiblings;
use context_size::ContextSizes;
use fault_notifier::FaultNotifier;
use reclaim::Unreclaimed;
use shared_samples::SharedSampler;
use stream::Listener;

pub use accounts::CreditAccounts;
pub use driver_sample::{GpuMemorySample, MemorySampler, ProcessMemory};
pub use fault_notifier::KmsgBarrier;
pub use peer::{CgroupResolver, ContainerResolver, Process};
pub use recovery::{
    Fault, ProcessImage, RecordedMoment, RecoveryAction, RecoveryPolicy, XidTarget,
};
pub use usage::{AccountBalance, ContainerUsage, ProcessCredit, by_allocation};

/// The processes of one container that are served at the same time. A container with more gets
/// `Rejected`, and its further processes no memory.
pub const MAX_PROCESSES: usize = 512;

/// What a container may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionSpec {
    /// Names the socket's folder.
    pub allocation: AllocationId,
    /// The pod that every peer must belong to.
    pub pod: PodUid,
    /// The GPUs, and how much of each.
    pub gpus: Vec<(GpuUuid, Bytes)>,
    /// Managed memory; zero is none.
    pub managed: Bytes,
    /// The tokens of its claim: allocations of the pod that have the same share the GPUs' quotas.
    pub tokens: Option<DeviceIdSet>,
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
pub struct AccountUsage {
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
    pub exited: Bytes,
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
    resolver: Arc<dyn ContainerResolver>,
    connection_limit: ConnectionLimit,
    /// Whether the kernel is asked to refuse descriptors.
    refuses_descriptors: bool,
    /// None where contexts are not charged.
    context_sizes: Option<Arc<ContextSizes>>,
    fault_notifier: FaultNotifier,
    /// None where nothing is kept.
    lease_service: Option<LeaseHandle>,
    /// The claims with allocations that are served.
    siblings_by_claim: Mutex<BTreeMap<(PodUid, DeviceIdSet), ClaimSiblings>>,
    /// The tasks of the GPUs, which end with these sessions.
    reclaim_tasks: Mutex<JoinSet<()>>,
    /// Log lines that are written once for all containers.
    log_limiter: SharedLogLimiter,
}

/// What the tasks of the GPUs see.
struct Shared {
    sampler: Arc<dyn MemorySampler>,
    /// The same for those who wait for what ended images had.
    shared_sampler: Arc<SharedSampler>,
    containers: Mutex<BTreeMap<AllocationId, RunningContainer>>,
    /// What pods that ended left.
    unreclaimed: Mutex<BTreeMap<GpuUuid, Unreclaimed>>,
    /// The GPUs that have a task.
    gpus_with_task: Mutex<BTreeSet<GpuUuid>>,
    /// Changes each time that there may be something to prove, or no more.
    orphans_changed: watch::Sender<()>,
    /// The kept leases that the vault has; none where nothing is kept.
    live_leases: Option<watch::Receiver<LiveLeases>>,
}

struct RunningContainer {
    container: Arc<Mutex<Container>>,
    task: AbortHandle,
}

impl Drop for RunningContainer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Shared {
    /// Ends the task of a GPU that no container has and on which no dead process left memory; whether it
    /// has ended.
    fn release_unused_gpu(&self, gpu: &GpuUuid) -> bool {
        let mut watched = lock(&self.gpus_with_task);
        let has_it = |running: &RunningContainer| lock(&running.container).gpus().contains(gpu);
        let is_used = lock(&self.containers).values().any(has_it)
            || lock(&self.unreclaimed).contains_key(gpu);
        if !is_used {
            watched.remove(gpu);
        }
        !is_used
    }
}

impl Drop for Sessions {
    fn drop(&mut self) {
        // The GPUs' tasks hold on to them until they have ended.
        lock(&self.shared.containers).clear();
    }
}

impl Sessions {
    /// Serves below `run_dir`, as many processes at the same time as this process's limit of
    /// descriptors allows. Must be dropped inside the runtime that it serves on.
    pub fn new(
        run_dir: PathBuf,
        charges: Arc<dyn MemorySampler>,
        membership: Arc<dyn ContainerResolver>,
    ) -> Sessions {
        Sessions {
            run_dir,
            shared: Arc::new(Shared {
                shared_sampler: Arc::new(SharedSampler::new(Arc::clone(&charges))),
                sampler: charges,
                containers: Mutex::default(),
                unreclaimed: Mutex::default(),
                gpus_with_task: Mutex::default(),
                orphans_changed: watch::Sender::default(),
                live_leases: None,
            }),
            resolver: membership,
            connection_limit: ConnectionLimit::from_rlimit(),
            refuses_descriptors: true,
            context_sizes: None,
            fault_notifier: FaultNotifier::default(),
            lease_service: None,
            siblings_by_claim: Mutex::default(),
            reclaim_tasks: Mutex::default(),
            log_limiter: SharedLogLimiter::default(),
        }
    }

    /// Charges each CUDA context what one takes of its GPU, which the agent [measures](Self::context_measured) and
    /// keeps in a file at `path`.
    #[must_use]
    pub fn with_context_sizes(mut self, path: PathBuf) -> Sessions {
        let file = Checkpoint::new(path);
        self.context_sizes = Some(Arc::new(ContextSizes::load(file)));
        self
    }

    /// Who looks at GPUs.
    pub(crate) fn sampler(&self) -> Arc<dyn MemorySampler> {
        Arc::clone(&self.shared.sampler)
    }

    /// The agent saw a context of `gpu` take `bytes` with this driver, by a process of its own.
    pub fn record_context_size(&self, gpu: &GpuUuid, driver: &str, bytes: Bytes) {
        if let Some(sizes) = &self.context_sizes {
            sizes.record(gpu, driver, bytes);
        }
    }

    /// Whether the agent has still to measure what a context of `gpu` takes with this driver.
    pub fn lacks_context_size(&self, gpu: &GpuUuid, driver: &str) -> bool {
        let sizes = self.context_sizes.as_ref();
        sizes.is_some_and(|sizes| !sizes.is_measured(gpu, driver))
    }

    /// What a context of `gpu` takes, as far as it is known.
    pub fn context_size(&self, gpu: &GpuUuid) -> Option<Bytes> {
        Some(self.context_sizes.as_ref()?.size_on(gpu))
    }

    /// Forgets the sizes of contexts on all other GPUs.
    pub fn retain_gpus(&self, gpus: &BTreeSet<GpuUuid>) {
        if let Some(sizes) = &self.context_sizes {
            sizes.retain_gpus(gpus);
        }
    }

    /// From now on there is this driver: what contexts of another one took counts no more.
    pub fn set_driver_version(&self, driver: &str) {
        if let Some(sizes) = &self.context_sizes {
            sizes.retain_driver(driver);
        }
    }

    /// Passes questions about kept memory on to a desk, and takes what is `living` for no residual. Before anything
    /// is served.
    #[must_use]
    pub fn with_leases(
        mut self,
        desk: LeaseHandle,
        living: watch::Receiver<LiveLeases>,
    ) -> Sessions {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.live_leases = Some(living);
        }
        self.lease_service = Some(desk);
        self
    }

    /// Serves at most `peers` processes of the node at the same time.
    #[must_use]
    pub fn with_connection_limit(mut self, peers: usize) -> Sessions {
        self.connection_limit = ConnectionLimit::new(peers);
        self
    }

    /// Serves as on a kernel before 6.16, which lets processes pass any descriptor.
    #[must_use]
    pub fn with_passed_descriptors(mut self) -> Sessions {
        self.refuses_descriptors = false;
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
    pub async fn serve(&self, served: SessionSpec) -> Result<(), SessionsError> {
        let allocation = served.allocation;
        if lock(&self.shared.containers).contains_key(&allocation) {
            return Ok(());
        }
        if served.gpus.len() >= bursar_protocol::credit_page::MAX_SLOTS {
            return Err(SessionsError::TooManyGpus {
                allocation,
                gpus: served.gpus.len(),
            });
        }
        let folder = self.allocation_dir(&allocation);
        let socket = folder.join(bursar_protocol::SOCKET_NAME);
        let served_before = socket.exists();
        let closer = SocketCloser::new(allocation);
        let listener = bind_listener(
            &folder,
            &socket,
            Arc::clone(&closer),
            self.refuses_descriptors,
        );
        let listener = listener.map_err(|source| SessionsError::Serve {
            path: socket.clone(),
            source,
        })?;
        let record = checkpoint::SessionCheckpoint::open(self.checkpoint_path(&allocation))
            .map_err(|source| SessionsError::Serve {
                path: self.checkpoint_path(&allocation),
                source,
            })?;
        let siblings = served.tokens.clone().map(|tokens| {
            let mut claims = lock(&self.siblings_by_claim);
            claims.retain(|_, siblings| !siblings.is_unshared());
            claims
                .entry((served.pod.clone(), tokens))
                .or_default()
                .clone()
        });
        let (mut container, known) = Container::restore(
            served,
            record,
            served_before,
            self.resolver.as_ref(),
            clock::now(),
        );
        if let Some(sizes) = &self.context_sizes {
            container.set_context_sizes(Arc::clone(sizes));
        }
        container.set_closer(Arc::clone(&closer));
        container.set_free_page_limit(self.connection_limit.max_free_pages());
        container.set_log_limiter(self.log_limiter.clone());
        container.set_orphans_sender(self.shared.orphans_changed.clone());
        if let Some(siblings) = siblings {
            container.join_claim(siblings);
        }
        let gpus = container.gpus();
        let container = Arc::new(Mutex::new(container));
        let task = listener::ListenerTask {
            container: Arc::clone(&container),
            shared_sampler: Arc::clone(&self.shared.shared_sampler),
            resolver: Arc::clone(&self.resolver),
            connection_limit: self.connection_limit.clone(),
            fault_notifier: self.fault_notifier.clone(),
            lease_service: self.lease_service.clone(),
            closer,
            log_limiter: self.log_limiter.clone(),
        };
        let task = tokio::spawn(task.run(listener, known)).abort_handle();
        // A second serve of the same allocation at the same time: the later listener has replaced
        // the earlier's socket, so the later one stays.
        lock(&self.shared.containers).insert(allocation, RunningContainer { container, task });
        // After the container is listed: the task of a GPU that no container has may be ending.
        gpus.into_iter().for_each(|gpu| self.start_reclaim(gpu));
        Ok(())
    }

    /// Ends an allocation: its pod is gone. One that is not served is ended already.
    ///
    /// # Errors
    /// [`SessionsError::Remove`] when its folder cannot be removed.
    pub async fn remove(&self, allocation: &AllocationId) -> Result<(), SessionsError> {
        let ended = lock(&self.shared.containers).remove(allocation);
        if let Some(running) = &ended {
            let mut container = lock(&running.container);
            container.leave_claim();
            container.close_checkpoint();
        }
        drop(ended);
        self.shared.orphans_changed.send_replace(());
        let record = self.checkpoint_path(allocation);
        for path in [
            self.allocation_dir(allocation),
            checkpoint::temporary_path(&record),
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
    fn start_reclaim(&self, gpu: GpuUuid) {
        if lock(&self.shared.gpus_with_task).insert(gpu.clone()) {
            let mut watches = lock(&self.reclaim_tasks);
            while watches.try_join_next().is_some() {}
            watches.spawn(reclaim::run(gpu, Arc::clone(&self.shared)));
        }
        self.shared.orphans_changed.send_replace(());
    }

    /// What of each GPU an allocation's processes had exported, living or dead: what may be held by others when its
    /// pod ends. One that is not served is known by its record.
    pub fn exported_bytes(&self, allocation: &AllocationId) -> Vec<(GpuUuid, Bytes)> {
        if let Some(running) = lock(&self.shared.containers).get(allocation) {
            return lock(&running.container).exported_bytes();
        }
        let record = checkpoint::SessionCheckpoint::open(self.checkpoint_path(allocation)).ok();
        let content = record.and_then(|record| record.read());
        content
            .map(|content| content.exported_bytes())
            .unwrap_or_default()
    }

    /// Charges an allocation for what a container before it had exported of a GPU: how much of it, on record.
    pub fn inherit_exports(&self, allocation: &AllocationId, gpu: &GpuUuid, bytes: Bytes) -> Bytes {
        let mut inherited = Bytes::ZERO;
        // One that is not served takes nothing.
        let _ = self.with_container(allocation, |container| {
            inherited = container.inherit_exports(gpu, bytes)
        });
        inherited
    }

    /// The kept leases that an allocation is charged for, each with its GPU and what it has. One that is not served
    /// is known by its record.
    pub fn charged_leases(&self, allocation: &AllocationId) -> BTreeMap<LeaseId, (GpuUuid, Bytes)> {
        if let Some(running) = lock(&self.shared.containers).get(allocation) {
            return lock(&running.container).charged_leases();
        }
        let record = checkpoint::SessionCheckpoint::open(self.checkpoint_path(allocation)).ok();
        let content = record.and_then(|record| record.read());
        let leases = content
            .map(|content| content.leases_by_id())
            .unwrap_or_default();
        leases
            .into_iter()
            .map(|(lease, what)| (LeaseId(lease), what))
            .collect()
    }

    /// The pids of exited processes whose memory the accounts still charge.
    pub fn exited_pids(&self) -> BTreeSet<u32> {
        let running = lock(&self.shared.containers);
        let containers = running.values().map(|running| lock(&running.container));
        containers
            .flat_map(|container| container.exited_pids())
            .collect()
    }

    /// The kept leases that the allocations which are served are charged for.
    pub fn all_charged_leases(&self) -> ChargedLeases {
        let running = lock(&self.shared.containers);
        running
            .iter()
            .map(|(id, running)| (*id, lock(&running.container).charged_leases()))
            .collect()
    }

    /// Charges an allocation for a kept lease that is to be made, on record.
    ///
    /// # Errors
    /// What its quota has left; nothing where it is not served.
    pub fn charge_lease(
        &self,
        allocation: &AllocationId,
        gpu: &GpuUuid,
        lease: LeaseId,
        bytes: Bytes,
    ) -> Result<(), Bytes> {
        let mut leased = Err(Bytes::ZERO);
        let served = self.with_container(allocation, |container| {
            leased = container.charge_lease(gpu, lease, bytes);
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
        let _ = self.with_container(allocation, |container| {
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
        let served = self.with_container(allocation, |container| {
            released = container.release_lease(gpu, lease, bytes);
        });
        served.is_ok() && released
    }

    /// There is no memory of a kept lease that an allocation was charged for.
    pub fn refund_lease(&self, allocation: &AllocationId, lease: LeaseId) {
        let _ = self.with_container(allocation, |container| container.refund_lease(lease));
    }

    /// Looks after what pods that ended left on GPUs, and nothing else of the kind: the most that is held of it, where
    /// that is proven. It has another number whenever something was left.
    pub fn bound_unreclaimed(&self, left: BTreeMap<GpuUuid, u64>) -> BTreeMap<GpuUuid, Bytes> {
        let gpus: Vec<GpuUuid> = left.keys().cloned().collect();
        let mut known = lock(&self.shared.unreclaimed);
        let before = std::mem::take(&mut *known);
        let same = |gpu: &GpuUuid, number: u64| {
            let left = before.get(gpu).filter(|left| left.revision == number);
            left.copied().unwrap_or(Unreclaimed {
                revision: number,
                upper_bound: None,
            })
        };
        *known = left
            .into_iter()
            .map(|(gpu, number)| (gpu.clone(), same(&gpu, number)))
            .collect();
        let proven = known.iter();
        let proven = proven
            .filter_map(|(gpu, left)| Some((gpu.clone(), left.upper_bound?)))
            .collect();
        drop(known);
        gpus.into_iter().for_each(|gpu| self.start_reclaim(gpu));
        proven
    }

    /// Sets what an account is given at birth, which may become known while the container runs. Of what is used
    /// above it nothing is taken away; nothing more is granted until frees have caught up.
    ///
    /// # Errors
    /// [`SessionsError::Unknown`].
    pub fn set_requested_quota(
        &self,
        allocation: &AllocationId,
        account: &Account,
        quota: Bytes,
    ) -> Result<(), SessionsError> {
        self.with_container(allocation, |container| {
            container.set_requested_quota(account, quota)
        })
    }

    /// Lowers an account of a running container below what it was given at birth; none lifts that again. It
    /// outlives the agent. What is used above it stays; see [`Sessions::reclaim_excess`].
    ///
    /// # Errors
    /// [`SessionsError::Unknown`].
    pub fn override_quota(
        &self,
        allocation: &AllocationId,
        account: &Account,
        bytes: Option<Bytes>,
    ) -> Result<(), SessionsError> {
        self.with_container(allocation, |container| {
            container.override_quota(account, bytes)
        })
    }

    /// Takes credit that lies idle above a quota that was made smaller.
    pub fn reclaim_excess(&self) {
        for running in lock(&self.shared.containers).values() {
            lock(&running.container).reclaim_excess();
        }
    }

    /// Charges what processes without a session have of an account of a container, by pid; it replaces what was
    /// told before. An allocation that has ended is nobody's.
    pub fn set_untracked(
        &self,
        allocation: &AllocationId,
        account: &Account,
        charged: BTreeMap<u32, Bytes>,
    ) {
        let _ = self.with_container(allocation, |container| {
            container.set_untracked(account, charged)
        });
    }

    /// The books of every allocation that is served.
    pub fn container_usage(&self) -> Vec<ContainerUsage> {
        let running = lock(&self.shared.containers);
        running
            .values()
            .map(|running| lock(&running.container).container_usage())
            .collect()
    }

    /// The images of an allocation's container that live and are not fenced; none where it is not served.
    pub fn process_images(&self, allocation: &AllocationId) -> Option<Vec<ProcessImage>> {
        let running = lock(&self.shared.containers);
        let running = running.get(allocation)?;
        Some(lock(&running.container).process_images())
    }

    /// Told each time that a process reported poison.
    pub fn fault_reports(&self) -> Arc<Notify> {
        self.fault_notifier.reports()
    }

    /// Who waits until the kernel's log was read to its end: from now on every image does before it is greeted, so that
    /// no XID of the image before it, nor of a process that had its pid, is taken for its own.
    pub fn register_kmsg_reader(&self) -> mpsc::Receiver<KmsgBarrier> {
        self.fault_notifier.register_kmsg_reader()
    }

    /// What is done about poisoned contexts of an allocation's container from now on. One that has ended needs nothing.
    pub fn set_recovery_policy(&self, allocation: &AllocationId, policy: RecoveryPolicy) {
        let _ = self.with_container(allocation, |container| container.set_policy(policy));
    }

    /// The image that a process of the host is, if one of the GPUs `on` is its container's and it had started by then.
    pub fn find_xid_target(&self, pid: u32, on: &[GpuUuid], by: BootTime) -> Option<XidTarget> {
        let running = lock(&self.shared.containers);
        let mut running = running.values();
        running.find_map(|running| lock(&running.container).find_xid_target(pid, on, by))
    }

    /// An image's context is lost by this XID. One that has ended needs nothing.
    pub fn record_xid(&self, suspect: &XidTarget, code: u32, now: ClockReading) {
        let _ = self.with_container(&suspect.allocation, |container| {
            container.record_xid(suspect, code, now);
        });
    }

    /// The poisoned images of an allocation's container below this number are to be ended. One that has ended needs nothing.
    pub fn require_generation(
        &self,
        allocation: &AllocationId,
        generation: u64,
        now: ClockReading,
    ) {
        let _ = self.with_container(allocation, |container| {
            container.require_generation(generation, now)
        });
    }

    /// The faults that were opened since this was last asked, after deciding about those that waited long enough.
    /// `alone`: for how long nobody could be told of them.
    pub fn take_new_faults(
        &self,
        alone: Duration,
        now: ClockReading,
    ) -> Vec<(AllocationId, Fault)> {
        self.collect_from_containers(|container| {
            container.tick_faults(alone, now);
            container.take_unreported_faults()
        })
    }

    /// The faults that are open.
    pub fn open_faults(&self) -> Vec<(AllocationId, Fault)> {
        self.collect_from_containers(|container| container.open_faults().to_vec())
    }

    /// The first processes of containers that are to be killed for a fault, one of each container at a time.
    pub fn processes_to_kill(&self) -> Vec<(AllocationId, Process)> {
        let poisoned = self.collect_from_containers(|container| {
            let pod = container.pod().clone();
            let condemned = container.process_to_kill();
            condemned
                .map(|process| (process, pod))
                .into_iter()
                .collect()
        });
        // Outside of the locks: it reads files.
        let first = |(allocation, (process, pod)): (AllocationId, (Process, PodUid))| {
            let first = self.resolver.root_process(process, &pod)?;
            Some((allocation, first))
        };
        poisoned.into_iter().filter_map(first).collect()
    }

    /// Containers with memory of these GPUs get nothing more: which of the GPUs living processes hold so, and the first
    /// processes of their containers, which are to be killed.
    pub fn drain_gpus(&self, gpus: &BTreeSet<GpuUuid>) -> (BTreeSet<GpuUuid>, BTreeSet<Process>) {
        let found = self.collect_from_containers(|container| container.drain_gpus(gpus));
        let (mut held, mut doomed) = (BTreeSet::new(), BTreeSet::new());
        // Outside of the locks: it reads files.
        for (_, GpuHolder { pid, pod, gpus }) in found {
            let process = self.resolver.process(pid);
            if let Some(first) =
                process.and_then(|process| self.resolver.root_process(process, &pod))
            {
                held.extend(gpus);
                doomed.insert(first);
            }
        }
        (held, doomed)
    }

    fn collect_from_containers<T>(
        &self,
        ask: impl Fn(&mut Container) -> Vec<T>,
    ) -> Vec<(AllocationId, T)> {
        let running = lock(&self.shared.containers);
        let answers = running.iter().flat_map(|(allocation, running)| {
            let answers = ask(&mut lock(&running.container));
            answers.into_iter().map(|answer| (*allocation, answer))
        });
        answers.collect()
    }

    fn with_container(
        &self,
        allocation: &AllocationId,
        act: impl FnOnce(&mut Container),
    ) -> Result<(), SessionsError> {
        let running = lock(&self.shared.containers);
        let running = running
            .get(allocation)
            .ok_or(SessionsError::Unknown(*allocation))?;
        act(&mut lock(&running.container));
        Ok(())
    }

    /// Every account of every allocation that is served.
    pub fn account_usage(&self) -> Vec<AccountUsage> {
        let running = lock(&self.shared.containers);
        running
            .values()
            .flat_map(|running| lock(&running.container).account_usage())
            .collect()
    }

    fn allocation_dir(&self, allocation: &AllocationId) -> PathBuf {
        Sessions::alloc_dir(&self.run_dir).join(allocation.to_string())
    }

    fn checkpoint_path(&self, allocation: &AllocationId) -> PathBuf {
        self.run_dir
            .join("sessions")
            .join(format!("{allocation}.json"))
    }
}

/// Any user of the container may connect; its cgroup is what counts.
fn bind_listener(
    folder: &Path,
    socket: &Path,
    closer: Arc<SocketCloser>,
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
