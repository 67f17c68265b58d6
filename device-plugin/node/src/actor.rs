//! Runs the task that owns the node's state and handles commands one after the other.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_apiserver::ParsedSpec;
use bursar_gpu::cuda_fitness::{CudaFitness, CudaFitnesses, CudaVerdict, gpus_where};
use bursar_gpu::drain::DrainState;
use bursar_gpu::generations::GpuGenerations;
use bursar_gpu::uvm::UvmModule;
use bursar_gpu::{GpuState, Inventory};
use bursar_host::clock;
use bursar_host::driver_files::DriverVersions;
use bursar_kubelet::device_checkpoint::{DeviceCheckpoint, DeviceCheckpointError};
use bursar_kubelet::devices::{Devices, DevicesError};
use bursar_kubelet::pod_resources::ListedContainer;
use bursar_ledger::units::{AllocationId, Bytes, DeviceIdSet, GpuUuid, Resource};
use bursar_ledger::{BootTime, LedgerView};
use tokio::sync::watch::error::RecvError;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::MissedTickBehavior;
use tracing::{debug, error, warn};

mod handle;

pub use self::handle::{NodeHandle, Observers};
use super::allocator::{
    BoundContainer, KubeletCheckpointProblem, NodeAllocator, NodeProblems, PrepareRequest,
    QueuedClaim, Reply,
};
use super::capacity;
use super::host::OsHost;
use super::other_plugins::GpuOwners;
use super::pod_resolver::PodResolver;
use crate::metrics::Counts;

/// The interval of checks for ended pods and expired waits: most of a release's delay.
pub(crate) const TICK_INTERVAL: Duration = Duration::from_millis(250);
/// An idle node runs one full tick in this many.
const IDLE_TICKS: u32 = 4;
/// The interval at which the agent compares pending allocations with the kubelet's checkpoint.
pub(crate) const COLLECT_INTERVAL: Duration = Duration::from_secs(10);
/// The number of queued commands: far above a kubelet's concurrent calls.
const QUEUE_LENGTH: usize = 256;

/// A command to the node task.
#[derive(Debug)]
enum Command {
    Allocate {
        resource: Resource,
        device_ids: DeviceIdSet,
        /// The id that the plugin relay has given to the kubelet.
        id: Option<AllocationId>,
        reply: oneshot::Sender<AllocationId>,
    },
    Prepare {
        request: PrepareRequest,
        /// The time at which the call stops waiting for room.
        deadline: BootTime,
        reply: Reply,
    },
    KubeletState {
        /// The kubelet's checkpoint.
        checkpoint: Result<DeviceCheckpoint, DeviceCheckpointError>,
        /// The containers that the kubelet lists with device memory, if the agent asked.
        listed: Vec<ListedContainer>,
    },
}

/// The devices of each resource to advertise to the kubelet.
#[derive(Debug, Clone)]
pub struct DeviceUpdates {
    /// Devices of device memory.
    pub device: watch::Receiver<Devices>,
    /// Devices of managed memory.
    pub managed: watch::Receiver<Devices>,
    /// Devices of compute time.
    pub compute: watch::Receiver<Devices>,
}

/// The state of the node, for status and metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The GPUs.
    pub inventory: Inventory,
    /// The memory of the GPUs.
    pub view: LedgerView,
    /// The queued claims, the oldest first.
    pub queued_claims: Vec<QueuedClaim>,
    /// The numbers of both resources in the ledger.
    pub counts: [(Resource, Counts); 2],
    /// The driver's module for managed memory.
    pub uvm: UvmModule,
    /// The versions of the driver's files and of its module.
    pub driver: DriverVersions,
    /// The GPU generations of the present GPUs, and of the last that were removed.
    pub generations: BTreeMap<GpuUuid, u64>,
    /// The node's problems.
    pub problems: NodeProblems,
    /// The reason why the devices cannot be advertised.
    pub devices_error: Option<DevicesError>,
    /// The containers with device memory.
    pub containers: Arc<[BoundContainer]>,
}

/// The channels that the node task watches.
pub struct Inputs {
    /// The GPUs.
    pub inventory: watch::Receiver<Inventory>,
    /// The results of the allocator runtimes' starts; `None` if the agent starts none.
    pub cuda_fitness: Option<watch::Receiver<CudaFitnesses>>,
    /// The GPUs that are being drained.
    pub drain: watch::Receiver<DrainState>,
    /// The owners of the GPUs; `None` where another owner is only reported.
    pub owners: Option<watch::Receiver<GpuOwners>>,
    /// The GPUs whose driver was proven to clear freed memory; `None` where namespaces share all
    /// GPUs.
    pub scrubbed: Option<watch::Receiver<BTreeSet<GpuUuid>>>,
    /// The spec of the node's `GpuNode`; `None` until the agent has read the object.
    pub spec: watch::Receiver<Option<ParsedSpec>>,
    /// The memory of each GPU that is in use and charged to no container, as the audit found it.
    pub withheld: watch::Receiver<BTreeMap<GpuUuid, Bytes>>,
}

impl Inputs {
    fn effective_inventory(&self) -> Inventory {
        let inventory = self.inventory.borrow().clone();
        let inventory = match &self.cuda_fitness {
            Some(fitnesses) => inventory.with_unfit_for_cuda(&fitnesses.borrow()),
            None => inventory,
        };
        let has_other = self
            .owners
            .as_ref()
            .is_some_and(|owners| matches!(*owners.borrow(), GpuOwners::OtherPlugin { .. }));
        let inventory = match has_other {
            true => inventory.with_other_owner(),
            false => inventory,
        };
        inventory.with_draining(&self.drain.borrow())
    }
}

/// The node task before it runs.
pub struct NodeTask {
    allocator: NodeAllocator<OsHost>,
    commands: mpsc::Receiver<Command>,
    own_commands: mpsc::WeakSender<Command>,
    resolver: Arc<PodResolver>,
    inputs: Inputs,
    device: watch::Sender<Devices>,
    managed: watch::Sender<Devices>,
    compute: watch::Sender<Devices>,
    snapshot: watch::Sender<Snapshot>,
    /// The time of the last tick.
    heartbeat: watch::Sender<Instant>,
    driver: DriverVersions,
    devices_error: Option<DevicesError>,
    /// The problem of the last read of the kubelet's checkpoint.
    checkpoint_problem: Option<KubeletCheckpointProblem>,
    generations: GpuGenerations,
    observers: Observers,
    /// Whether the agent's offer of managed memory awaits the first starts of the GPUs' runtimes.
    awaits_first_starts: bool,
}

/// Creates the task over a recovered allocator.
pub fn node_task(
    allocator: NodeAllocator<OsHost>,
    resolver: PodResolver,
    bind_wait: Duration,
    inputs: Inputs,
    generations: GpuGenerations,
    observers: Observers,
) -> (
    NodeTask,
    NodeHandle,
    DeviceUpdates,
    watch::Receiver<Snapshot>,
    watch::Receiver<Instant>,
) {
    let (commands, received) = mpsc::channel(QUEUE_LENGTH);
    let none = |resource| Devices::new(resource, Vec::new()).expect("no token is not too many");
    let (device, device_offer) = watch::channel(none(Resource::DeviceMemory));
    let (managed, managed_offer) = watch::channel(none(Resource::ManagedMemory));
    let (compute, compute_offer) = watch::channel(none(Resource::Compute));
    let first = Snapshot {
        inventory: Inventory::Starting,
        view: allocator.view(clock::now()),
        queued_claims: Vec::new(),
        counts: counts(&allocator),
        uvm: allocator.uvm().clone(),
        driver: DriverVersions::default(),
        generations: BTreeMap::new(),
        problems: NodeProblems::default(),
        devices_error: None,
        containers: allocator.containers(),
    };
    let (snapshot, snapshots) = watch::channel(first);
    let (heartbeat, heartbeats) = watch::channel(Instant::now());
    let resolver = Arc::new(resolver);
    let task = NodeTask {
        awaits_first_starts: inputs.cuda_fitness.is_some(),
        allocator,
        own_commands: commands.downgrade(),
        commands: received,
        resolver: resolver.clone(),
        inputs,
        device,
        managed,
        compute,
        snapshot,
        heartbeat,
        driver: DriverVersions::default(),
        devices_error: None,
        checkpoint_problem: None,
        generations,
        observers: observers.clone(),
    };
    let updates = DeviceUpdates {
        device: device_offer,
        managed: managed_offer,
        compute: compute_offer,
    };
    (
        task,
        NodeHandle::new(commands, resolver, bind_wait, observers),
        updates,
        snapshots,
        heartbeats,
    )
}

impl NodeTask {
    /// Runs until all handles are dropped.
    ///
    /// The task still answers the kubelet's last calls while the agent stops, for a failed Allocate
    /// fails its pod for ever.
    pub async fn run(mut self) {
        let mut tick = tokio::time::interval(TICK_INTERVAL);
        let mut collect = tokio::time::interval(COLLECT_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        collect.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut ticks = 0_u32;
        self.read_uvm_module().await;
        self.apply_inventory().await;
        loop {
            tokio::select! {
                command = self.commands.recv() => match command {
                    Some(command) => self.handle(command).await,
                    None => return,
                },
                changed = self.inputs.inventory.changed() => match changed {
                    Ok(()) => self.apply_inventory().await,
                    // The NVML thread ends only with the agent.
                    Err(_) => return,
                },
                // The tasks that send on the other channels end only with the agent.
                Ok(()) = wait_if_present(&mut self.inputs.cuda_fitness) => {
                    self.apply_cuda_fitness().await;
                }
                Ok(()) = self.inputs.drain.changed() => self.apply_inventory().await,
                Ok(()) = wait_if_present(&mut self.inputs.owners) => {
                    if let Some(owners) = &mut self.inputs.owners {
                        owners.mark_unchanged();
                    }
                    self.apply_inventory().await;
                }
                Ok(()) = wait_if_present(&mut self.inputs.scrubbed) => self.apply_scrub_status().await,
                // Without the API server the last known spec stays in force.
                Ok(()) = self.inputs.spec.changed() => self.apply_spec().await,
                Ok(()) = self.inputs.withheld.changed() => self.apply_withheld().await,
                _ = tick.tick() => {
                    self.allocator.release_ended_pods(clock::now()).await;
                    ticks = ticks.wrapping_add(1);
                    if self.allocator.needs_tick() || ticks.is_multiple_of(IDLE_TICKS) {
                        self.allocator.tick(clock::now()).await;
                        self.publish();
                    }
                    self.heartbeat.send_replace(Instant::now());
                }
                _ = collect.tick() => {
                    let problem = self.allocator.host_mut().cdi_problem();
                    self.allocator.set_cdi_problem(problem);
                    // Repeats reads and writes that failed before.
                    let inventory = self.inputs.inventory.borrow().clone();
                    self.observe_generations(inventory.gpus());
                    self.read_uvm_module().await;
                    self.look_at_driver().await;
                    // Ended pods have left ids that may be Unhealthy instead of those of others.
                    self.advertise(&self.inputs.effective_inventory());
                    self.read_kubelet_state();
                }
            }
        }
    }

    async fn apply_withheld(&mut self) {
        let withheld = self.inputs.withheld.borrow_and_update().clone();
        self.allocator.set_withheld(withheld, clock::now()).await;
        self.publish();
    }

    async fn handle(&mut self, command: Command) {
        let now = clock::now();
        match command {
            Command::Allocate {
                resource,
                device_ids,
                id,
                reply,
            } => {
                let id = id.unwrap_or_else(|| AllocationId::from_bits(rand::random()));
                self.allocator.allocate(id, resource, device_ids, now);
                debug!(allocation = %id, %resource, "allocated");
                // The kubelet may have gone; the agent then collects the allocation.
                let _ = reply.send(id);
            }
            Command::Prepare {
                request,
                deadline,
                reply,
            } => {
                self.read_uvm_module().await;
                self.allocator.bind(request, deadline, reply, now).await;
                // Enforcement has to know the container before its program runs.
                self.publish();
            }
            Command::KubeletState { checkpoint, listed } => {
                self.report_checkpoint(&checkpoint);
                let checkpoint = checkpoint.ok();
                if let Some(checkpoint) = &checkpoint {
                    let entries = &checkpoint.entries;
                    self.allocator.resolve_missing_names(&listed, entries);
                }
                let collected = self.allocator.collect_garbage(checkpoint.as_ref(), now);
                collected.await;
            }
        }
    }

    /// Logs and publishes a problem of the kubelet's checkpoint when it changes.
    fn report_checkpoint(&mut self, read: &Result<DeviceCheckpoint, DeviceCheckpointError>) {
        let has_allocations = || {
            counts(&self.allocator)
                .iter()
                .any(|(_, all)| all.pending + all.bound > 0)
        };
        let skipped = read.as_ref().map_or(0, |checkpoint| checkpoint.skipped);
        self.observers.metrics.set_skipped_entries(skipped);
        let problem = match read {
            Ok(DeviceCheckpoint { skipped: 0, .. }) => None,
            Ok(DeviceCheckpoint { skipped, entries }) => Some(KubeletCheckpointProblem {
                error: format!(
                    "failed to decode {skipped} entries of the kubelet's device checkpoint"
                ),
                is_whole: entries.is_empty(),
            }),
            // A kubelet writes the file when it admits the first container with a device.
            Err(DeviceCheckpointError::Missing { .. }) if !has_allocations() => None,
            Err(error) => Some(KubeletCheckpointProblem {
                error: error.to_string(),
                is_whole: true,
            }),
        };
        if problem == self.checkpoint_problem {
            return;
        }
        if let Some(KubeletCheckpointProblem { error, .. }) = &problem {
            warn!(error, "no pending allocation is collected");
        }
        self.checkpoint_problem = problem;
        self.publish();
    }

    /// Reads the driver's module for managed memory, which the first program with a GPU may load.
    /// Advertises and publishes what follows from a change.
    async fn read_uvm_module(&mut self) {
        self.awaits_first_starts = self.awaits_first_starts && self.has_untried_gpu();
        let module = UvmModule {
            not_concurrent: self.gpus_where(|fitness| fitness.lacks_concurrent_access),
            awaits_first_starts: self.awaits_first_starts,
            ..self.allocator.host_mut().uvm_module()
        };
        if module == *self.allocator.uvm() {
            return;
        }
        self.allocator.set_uvm_module(module, clock::now()).await;
        let inventory = self.inputs.effective_inventory();
        if inventory != Inventory::Starting {
            self.advertise(&inventory);
            self.publish();
        }
    }

    /// Writes the CDI files of running containers again if the driver's files were replaced, and
    /// publishes a version that changed.
    async fn look_at_driver(&mut self) {
        if self.allocator.host_mut().has_new_driver().await {
            self.allocator.repeat_setups();
        }
        let versions = self.allocator.host_mut().driver_versions();
        if versions != self.driver {
            self.driver = versions;
            self.publish();
        }
    }

    /// Whether CUDA is still to be tried on a healthy GPU, or no GPU is known.
    fn has_untried_gpu(&self) -> bool {
        if self.inputs.cuda_fitness.is_none() {
            return false;
        }
        let inventory = self.inputs.effective_inventory();
        let tried = self.gpus_where(|fitness| fitness.verdict != CudaVerdict::Untried);
        let is_untried = |state: &GpuState| {
            let gpu = &state.gpu.uuid;
            state.health.is_healthy() && !gpu.is_mig() && !tried.contains(gpu)
        };
        inventory.gpus().is_empty() || inventory.gpus().iter().any(is_untried)
    }

    async fn apply_inventory(&mut self) {
        self.inputs.inventory.mark_unchanged();
        let inventory = self.inputs.effective_inventory();
        if inventory == Inventory::Starting {
            return;
        }
        self.observe_generations(inventory.gpus());
        self.allocator
            .set_gpus(inventory.gpus().to_vec(), clock::now())
            .await;
        self.advertise(&inventory);
        self.publish();
    }

    /// Records the GPUs' generations, and publishes an Event for each that has grown.
    fn observe_generations(&mut self, gpus: &[GpuState]) {
        let grown = self.generations.observe(gpus);
        self.observers.report_lost_memory(&grown);
        self.allocator.set_generations(self.generations.by_gpu());
    }

    /// Returns the GPUs whose results satisfy a condition; none if the agent starts no runtimes.
    fn gpus_where(&self, holds: impl Fn(&CudaFitness) -> bool) -> BTreeSet<GpuUuid> {
        let fitnesses = self.inputs.cuda_fitness.as_ref();
        fitnesses.map_or_else(BTreeSet::new, |fitnesses| {
            gpus_where(&fitnesses.borrow(), holds)
        })
    }

    async fn apply_cuda_fitness(&mut self) {
        let Some(fitnesses) = &mut self.inputs.cuda_fitness else {
            return;
        };
        let fitnesses = fitnesses.borrow_and_update().clone();
        self.allocator
            .set_cuda_fitness(&fitnesses, clock::now())
            .await;
        self.read_uvm_module().await;
        self.apply_inventory().await;
    }

    async fn apply_scrub_status(&mut self) {
        if let Some(scrubbed) = &mut self.inputs.scrubbed {
            let cleared = scrubbed.borrow_and_update().clone();
            self.allocator
                .set_scrubbed_gpus(cleared, clock::now())
                .await;
            self.publish();
        }
    }

    async fn apply_spec(&mut self) {
        let Some(ParsedSpec { reservations, .. }) = self.inputs.spec.borrow_and_update().clone()
        else {
            return;
        };
        self.allocator
            .set_reservations(&reservations, clock::now())
            .await;
        self.publish();
    }

    /// Advertises the node's devices. Running pods keep their devices where the new ones cannot be
    /// advertised.
    fn advertise(&mut self, inventory: &Inventory) {
        // A node without a GPU has nothing to register.
        if inventory.gpus().is_empty() {
            return;
        }
        let devices = capacity::devices(
            inventory.gpus(),
            // Too many devices are refused before the first of them are advertised.
            &self.allocator.offered_after_first_starts(),
            &self.allocator.ledger,
            &self.device.borrow(),
        );
        match devices {
            Ok([device, managed, compute]) => {
                self.devices_error = None;
                send_if_changed(&self.device, device);
                send_if_changed(&self.compute, compute);
                // Devices of pods alone would be less than the agent before has offered.
                if !self.awaits_first_starts {
                    send_if_changed(&self.managed, managed);
                }
            }
            Err(refused) => {
                if self.devices_error.as_ref() != Some(&refused) {
                    error!(reason = refused.reason(), error = %refused, "failed to advertise devices");
                }
                self.devices_error = Some(refused);
            }
        }
    }

    fn publish(&mut self) {
        let snapshot = Snapshot {
            inventory: self.inputs.effective_inventory(),
            view: self.allocator.view(clock::now()),
            queued_claims: self.allocator.queued_claims(),
            counts: counts(&self.allocator),
            uvm: self.allocator.uvm().clone(),
            driver: self.driver.clone(),
            generations: self.generations.by_gpu(),
            problems: NodeProblems {
                late_write: self.generations.late_write(),
                kubelet_checkpoint: self.checkpoint_problem.clone(),
                ..self.allocator.problems().clone()
            },
            devices_error: self.devices_error.clone(),
            containers: self.allocator.containers(),
        };
        send_if_changed(&self.snapshot, snapshot);
    }

    /// Reads the kubelet's checkpoint and missing pod names without blocking the task.
    fn read_kubelet_state(&self) {
        let (identities, commands) = (self.resolver.clone(), self.own_commands.clone());
        let lacks_names = self.allocator.has_unnamed_pods();
        tokio::spawn(async move {
            let listed = match lacks_names {
                true => identities.list_containers(Resource::DeviceMemory).await,
                false => Vec::new(),
            };
            let checkpoint = identities.read_device_checkpoint().await;
            if let Some(commands) = commands.upgrade() {
                // The task has ended: nothing is left to collect.
                let _ = commands
                    .send(Command::KubeletState { checkpoint, listed })
                    .await;
            }
        });
    }
}

/// Waits for a change; never returns where there is no channel.
async fn wait_if_present<T>(followed: &mut Option<watch::Receiver<T>>) -> Result<(), RecvError> {
    match followed {
        Some(followed) => followed.changed().await,
        None => std::future::pending().await,
    }
}

fn counts(allocator: &NodeAllocator<OsHost>) -> [(Resource, Counts); 2] {
    [Resource::DeviceMemory, Resource::ManagedMemory]
        .map(|resource| (resource, allocator.counts(resource)))
}

fn send_if_changed<T: PartialEq>(sender: &watch::Sender<T>, value: T) {
    sender.send_if_modified(|now| {
        let changed = *now != value;
        if changed {
            *now = value;
        }
        changed
    });
}
