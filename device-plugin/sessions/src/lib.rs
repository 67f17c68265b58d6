//! Serves the session socket of each allocation, and accounts for the memory of its processes.
//!
//! ```text
//! Sessions -- one task per allocation (listener) -- one task per process (connection)
//!                      |                                        |
//!                      +-- Container: accounts (pure), pages, processes --+
//!          \-- one task per GPU (reclaim): proves orphaned exports free (orphan_bound, pure)
//! ```
//!
//! The agent knows a process from its first hello until its pidfd reports the exit. Closing the
//! socket ends nothing. The grants of an exited process stay charged until [`MemorySampler`] shows
//! that the driver charges the process nothing: a forked child can keep its memory. Exported memory
//! of an exited process stays charged until no other process can hold it.
//!
//! The agent writes grants to `<run-dir>/sessions/<id>.json` before a process learns of them, so
//! that a restarted agent never grants them twice. The shim says hello again when it next needs the
//! agent.

mod accounts;
mod charges;
mod checkpoint;
mod closer;
mod connection;
mod connection_limit;
mod container;
mod context_size;
mod fault_notifier;
mod faults;
pub mod lease_handle;
mod listener;
mod options;
mod orphan_bound;
mod peer;
pub mod pidfd;
mod rate_limit;
mod reclaim;
mod recovery;
mod serve;
mod shared_samples;
mod stream;
mod usage;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bursar_gpu::memory_sample::MemorySampler;
use bursar_host::checkpoint::Checkpoint;
use bursar_ledger::units::{AllocationId, Bytes, DeviceIdSet, GpuUuid, PodUid};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

use crate::lease_handle::{LeaseHandle, LiveLeases};
use connection_limit::ConnectionLimit;
use container::Container;
use container::denials::SharedLogLimiter;
use container::faults::GpuHolder;
use container::siblings::ClaimSiblings;
use context_size::ContextSizes;
use fault_notifier::FaultNotifier;
use reclaim::Unreclaimed;
use shared_samples::SharedSampler;

pub(crate) use accounts::CreditAccounts;
pub use peer::{CgroupResolver, ContainerResolver, ImageMemory, Process};
pub use recovery::{
    Fault, ProcessImage, RecordedMoment, RecoveryAction, RecoveryPolicy, XidTarget,
};
pub use usage::{
    AccountBalance, ContainerUsage, DeniedAllocation, ProcessCredit, ProcessHistory, by_allocation,
};

/// The most processes of one container that have a session at the same time. The agent answers
/// `Rejected` to further processes, which then get no memory.
pub const MAX_PROCESSES: usize = 512;

/// The allocation to serve, and what its container may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionSpec {
    /// The allocation, whose id names the socket's folder.
    pub allocation: AllocationId,
    /// The pod that every peer must belong to.
    pub pod: PodUid,
    /// The GPUs of the container, each with its quota.
    pub gpus: Vec<(GpuUuid, Bytes)>,
    /// The quota of managed memory; zero allows none.
    pub managed: Bytes,
    /// The device ids of the claim: allocations of the pod with the same ids share the quotas of
    /// the GPUs.
    pub device_ids: Option<DeviceIdSet>,
}

/// The memory that an account counts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Account {
    /// The memory of one GPU.
    Gpu(GpuUuid),
    /// CUDA managed memory.
    Managed,
}

/// A process that the agent has to kill for a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CondemnedProcess {
    /// The allocation of its container.
    pub allocation: AllocationId,
    /// The process.
    pub process: Process,
    /// Whether the container goes on. The process's forked children that share its GPU memory then
    /// end with it.
    pub ends_alone: bool,
}

/// Why a request about an allocation's socket failed.
#[derive(Debug, thiserror::Error)]
pub enum SessionsError {
    /// The agent could not create the folder or the socket in it.
    #[error("failed to create the session socket {}: {source}", path.display())]
    Serve {
        /// The socket or the folder.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
    /// The agent could not remove the folder.
    #[error("failed to remove {}: {source}", path.display())]
    Remove {
        /// The folder.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
    /// The agent serves no allocation with this id.
    #[error("allocation {0} is not served")]
    Unknown(AllocationId),
    /// The allocation has more accounts than a credit page has slots.
    #[error("allocation {allocation} has {gpus} GPUs, more than a credit page has accounts")]
    TooManyGpus {
        /// The allocation.
        allocation: AllocationId,
        /// The number of its GPUs.
        gpus: usize,
    },
}

/// The session sockets of this node. Dropping this value stops the service and leaves the folders.
pub struct Sessions {
    run_dir: PathBuf,
    shared: Arc<Shared>,
    resolver: Arc<dyn ContainerResolver>,
    connection_limit: ConnectionLimit,
    /// Whether the agent asks the kernel to refuse passed descriptors.
    refuses_descriptors: bool,
    /// `None` where the agent does not charge contexts.
    context_sizes: Option<Arc<ContextSizes>>,
    fault_notifier: FaultNotifier,
    /// The policy of a container before the first order for its namespace.
    default_policy: RecoveryPolicy,
    /// `None` where the node has no retained memory.
    lease_service: Option<LeaseHandle>,
    /// The claims whose allocations the agent serves.
    siblings_by_claim: Mutex<BTreeMap<(PodUid, DeviceIdSet), ClaimSiblings>>,
    /// The tasks of the GPUs, which end with these sessions.
    reclaim_tasks: Mutex<JoinSet<()>>,
    /// Limits the log lines that concern all containers.
    log_limiter: SharedLogLimiter,
}

/// The state that the tasks of the GPUs share.
struct Shared {
    sampler: Arc<dyn MemorySampler>,
    /// The samples for the containers that wait for the driver to free memory of exited images.
    shared_sampler: Arc<SharedSampler>,
    containers: Mutex<BTreeMap<AllocationId, RunningContainer>>,
    /// The bytes that ended pods may still occupy.
    unreclaimed: Mutex<BTreeMap<GpuUuid, Unreclaimed>>,
    /// The GPUs that have a reclaim task.
    gpus_with_task: Mutex<BTreeSet<GpuUuid>>,
    /// Changes each time that orphaned memory or the set of containers may have changed.
    orphans_changed: watch::Sender<()>,
    /// The leases whose memory the fd store has; `None` where the node has no retained memory.
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
    /// Releases the task of a GPU that no container uses and where ended pods left nothing. Returns
    /// whether the task ends.
    fn release_unused_gpu(&self, gpu: &GpuUuid) -> bool {
        let mut watched = lock(&self.gpus_with_task);
        let has_it = |running: &RunningContainer| {
            let container = lock(&running.container);
            container.memory().account_index(gpu).is_some()
        };
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
        // The GPUs' tasks hold references to the containers until they have ended.
        lock(&self.shared.containers).clear();
    }
}

impl Sessions {
    /// Serves below `run_dir`. The agent's limit of descriptors bounds the number of peers. The
    /// caller drops the value inside the runtime that serves it.
    pub fn new(
        run_dir: PathBuf,
        sampler: Arc<dyn MemorySampler>,
        resolver: Arc<dyn ContainerResolver>,
    ) -> Sessions {
        Sessions {
            run_dir,
            shared: Arc::new(Shared {
                shared_sampler: Arc::new(SharedSampler::new(Arc::clone(&sampler))),
                sampler,
                containers: Mutex::default(),
                unreclaimed: Mutex::default(),
                gpus_with_task: Mutex::default(),
                orphans_changed: watch::Sender::default(),
                live_leases: None,
            }),
            resolver,
            connection_limit: ConnectionLimit::from_rlimit(),
            refuses_descriptors: true,
            context_sizes: None,
            fault_notifier: FaultNotifier::default(),
            default_policy: RecoveryPolicy::default(),
            lease_service: None,
            siblings_by_claim: Mutex::default(),
            reclaim_tasks: Mutex::default(),
            log_limiter: SharedLogLimiter::default(),
        }
    }

    /// Charges each CUDA context its size on that GPU. The agent
    /// [measures](Self::record_context_size) the sizes and saves them in the file at `path`.
    #[must_use]
    pub fn with_context_sizes(mut self, path: PathBuf) -> Sessions {
        let file = Checkpoint::new(path);
        self.context_sizes = Some(Arc::new(ContextSizes::load(file)));
        self
    }

    /// Recovers new containers by `policy` until an order for their namespace says otherwise.
    #[must_use]
    pub fn with_default_policy(mut self, policy: RecoveryPolicy) -> Sessions {
        self.default_policy = policy;
        self
    }

    /// The source of memory samples of the GPUs.
    pub fn sampler(&self) -> Arc<dyn MemorySampler> {
        Arc::clone(&self.shared.sampler)
    }

    /// Records that a context of `gpu` takes `bytes` with this driver, as measured by a process of
    /// the agent. Returns whether the agent uses the size from now on.
    pub fn record_context_size(&self, gpu: &GpuUuid, driver: &str, bytes: Bytes) -> bool {
        let sizes = self.context_sizes.as_ref();
        sizes.is_some_and(|sizes| sizes.record(gpu, driver, bytes))
    }

    /// Whether the agent has not yet measured a context of `gpu` with this driver.
    pub fn lacks_context_size(&self, gpu: &GpuUuid, driver: &str) -> bool {
        let sizes = self.context_sizes.as_ref();
        sizes.is_some_and(|sizes| !sizes.is_measured(gpu, driver))
    }

    /// The size of a context of `gpu`, as far as the agent knows it.
    pub fn context_size(&self, gpu: &GpuUuid) -> Option<Bytes> {
        Some(self.context_sizes.as_ref()?.size_on(gpu))
    }

    /// Removes what is known of all other GPUs.
    pub fn retain_gpus(&self, gpus: &BTreeSet<GpuUuid>) {
        if let Some(sizes) = &self.context_sizes {
            sizes.retain_gpus(gpus);
        }
    }

    /// Removes the context sizes that were measured with another version of the driver.
    pub fn set_driver_version(&self, driver: &str) {
        if let Some(sizes) = &self.context_sizes {
            sizes.retain_driver(driver);
        }
    }

    /// Passes lease requests to `lease_service`, and counts the memory of `live_leases` as
    /// explained. The caller does this before the first [`serve`](Self::serve).
    #[must_use]
    pub fn with_leases(
        mut self,
        lease_service: LeaseHandle,
        live_leases: watch::Receiver<LiveLeases>,
    ) -> Sessions {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.live_leases = Some(live_leases);
        }
        self.lease_service = Some(lease_service);
        self
    }

    /// Serves at most `peers` processes of the node at the same time.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn with_connection_limit(mut self, peers: usize) -> Sessions {
        self.connection_limit = ConnectionLimit::new(peers);
        self
    }

    /// Behaves as on a kernel before 6.16, where tenant processes can pass any descriptor.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn with_passed_descriptors(mut self) -> Sessions {
        self.refuses_descriptors = false;
        self
    }

    /// The folder of the allocations' folders. A CDI device mounts the folder of its allocation.
    pub fn alloc_dir(run_dir: &Path) -> PathBuf {
        run_dir.join("alloc")
    }

    /// Sets the requested quota of an account, which may become known while the container runs.
    /// Used bytes above the quota stay; the account grants nothing until enough is freed.
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

    /// Lowers the quota of an account below the requested one; `None` removes the override. The
    /// override outlives the agent. Used bytes above the quota stay; see
    /// [`Sessions::reclaim_excess`].
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

    /// Reclaims idle credit above quotas that have been lowered.
    pub fn reclaim_excess(&self) {
        for running in lock(&self.shared.containers).values() {
            lock(&running.container).reclaim_excess();
        }
    }

    /// Replaces the bytes that untracked processes have of a container's account, by pid. An
    /// allocation that has ended is ignored.
    pub fn set_untracked(
        &self,
        allocation: &AllocationId,
        account: &Account,
        charged: BTreeMap<u32, Bytes>,
    ) {
        let _ = self.with_container(allocation, |container| {
            container.memory_mut().set_untracked(account, charged)
        });
    }

    /// Replaces what the driver takes of a container's account beyond what its processes are
    /// charged. The account grants so much less. An allocation that has ended is ignored.
    pub fn set_overhead(&self, allocation: &AllocationId, gpu: &GpuUuid, bytes: Bytes) {
        let _ = self.with_container(allocation, |container| container.set_overhead(gpu, bytes));
    }

    /// The usage of every served allocation.
    pub fn container_usage(&self) -> Vec<ContainerUsage> {
        let running = lock(&self.shared.containers);
        running
            .values()
            .map(|running| lock(&running.container).container_usage())
            .collect()
    }

    /// The live images of an allocation's container that are not fenced; `None` where the
    /// allocation is not served.
    pub fn process_images(&self, allocation: &AllocationId) -> Option<Vec<ProcessImage>> {
        let images = self.with_container(allocation, |container| container.process_images());
        images.ok()
    }

    /// Whether a process of an allocation's container has a session.
    pub fn has_session(&self, allocation: &AllocationId, process: Process) -> bool {
        let image = self.with_container(allocation, |container| {
            container.memory().image_of(process.pid)
        });
        matches!(image, Ok(Some(image)) if image.process == process)
    }

    /// Fences all containers that use these GPUs. Returns the GPUs that live processes still hold,
    /// and the root processes to kill.
    pub fn drain_gpus(&self, gpus: &BTreeSet<GpuUuid>) -> (BTreeSet<GpuUuid>, BTreeSet<Process>) {
        let found = self.collect_from_containers(|container| container.drain_gpus(gpus));
        let (mut held_gpus, mut to_kill) = (BTreeSet::new(), BTreeSet::new());
        // Reading `/proc` takes time, so the agent does it without the locks.
        for (_, GpuHolder { pid, pod, gpus }) in found {
            let process = self.resolver.process(pid);
            if let Some(root) =
                process.and_then(|process| self.resolver.root_process(process, &pod))
            {
                held_gpus.extend(gpus);
                to_kill.insert(root);
            }
        }
        (held_gpus, to_kill)
    }

    fn collect_from_containers<T>(
        &self,
        collect: impl Fn(&mut Container) -> Vec<T>,
    ) -> Vec<(AllocationId, T)> {
        let running = lock(&self.shared.containers);
        let items = running.iter().flat_map(|(allocation, running)| {
            let found = collect(&mut lock(&running.container));
            found.into_iter().map(|item| (*allocation, item))
        });
        items.collect()
    }

    fn with_container<T>(
        &self,
        allocation: &AllocationId,
        act: impl FnOnce(&mut Container) -> T,
    ) -> Result<T, SessionsError> {
        let running = lock(&self.shared.containers);
        let running = running
            .get(allocation)
            .ok_or(SessionsError::Unknown(*allocation))?;
        Ok(act(&mut lock(&running.container)))
    }
}

/// Locks a mutex and ignores poisoning: a panic leaves plain counters, and must not affect other
/// containers.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
