//! Runs the task that owns the node's state and handles commands one after the other.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_apiserver::{Events, ParsedSpec, PodRef, Reason};
use bursar_config::ResourcesConfig;
use bursar_gpu::drain::DrainState;
use bursar_gpu::generations::{GenerationChange, GpuGenerations};
use bursar_gpu::health::UnhealthyReason;
use bursar_gpu::{GpuState, Inventory};
use bursar_host::clock;
use bursar_kubelet::device_checkpoint::CheckpointEntry;
use bursar_kubelet::devices::{Devices, DevicesError};
use bursar_kubelet::plugin::{AllocateError, Allocator, PrepareError};
use bursar_kubelet::pod_resources::ListedContainer;
use bursar_ledger::units::{AllocationId, Bytes, DeviceIdSet, GpuUuid, Resource};
use bursar_ledger::{LedgerView, WaitReason};
use bursar_retained::status::RetainedStatus;
use tokio::sync::watch::error::RecvError;
use tokio::sync::{Mutex, mpsc, oneshot, watch};
use tracing::{debug, error};

use super::allocator::{
    BoundContainer, BoundMemory, ContainerIdentity, NodeAllocator, NodeProblems, PrepareRequest,
    QueuedClaim, Reply,
};
use super::capacity;
use super::checkpoint_state::PodName;
use super::host::OsHost;
use super::other_plugins::GpuOwners;
use super::pod_resolver::PodResolver;
use crate::metrics::{BindResult, Counts, NodeMetrics};

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
        tokens: DeviceIdSet,
        /// The id that the plugin relay has given to the kubelet.
        id: Option<AllocationId>,
        reply: oneshot::Sender<AllocationId>,
    },
    Prepare {
        bind: PrepareRequest,
        reply: Reply,
    },
    KubeletState {
        /// The entries of the kubelet's checkpoint, where readable.
        entries: Option<Vec<CheckpointEntry>>,
        /// The containers that the kubelet lists with device memory, if the agent asked.
        listed: Vec<ListedContainer>,
    },
}

/// The devices of both resources to advertise to the kubelet.
#[derive(Debug, Clone)]
pub struct DeviceUpdates {
    /// Devices of device memory.
    pub device: watch::Receiver<Devices>,
    /// Devices of managed memory.
    pub managed: watch::Receiver<Devices>,
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
    /// The GPUs on which CUDA does not work, as their provisioners have found, and why.
    pub unfit_for_cuda: watch::Receiver<BTreeMap<GpuUuid, UnhealthyReason>>,
    /// The GPUs that are being drained.
    pub drain: watch::Receiver<DrainState>,
    /// The owners of the GPUs; `None` where another owner is only reported.
    pub owners: Option<watch::Receiver<GpuOwners>>,
    /// The GPUs whose driver was proven to clear freed memory; `None` where namespaces share all
    /// GPUs.
    pub retained: Option<watch::Receiver<RetainedStatus>>,
    /// The spec of the node's `GpuNode`; `None` until the agent has read the object.
    pub spec: watch::Receiver<Option<ParsedSpec>>,
    /// The memory of each GPU that is in use and charged to no container, as the audit found it.
    pub withheld: watch::Receiver<BTreeMap<GpuUuid, Bytes>>,
}

impl Inputs {
    fn effective_inventory(&self) -> Inventory {
        let inventory = self.inventory.borrow().clone();
        let inventory = inventory.with_unfit_for_cuda(&self.unfit_for_cuda.borrow());
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

/// A handle to the node task, from which the kubelet's plugins allocate.
#[derive(Clone)]
pub struct NodeHandle {
    commands: mpsc::Sender<Command>,
    resolver: Arc<PodResolver>,
    bind_wait: Duration,
    observers: Observers,
    /// Held by the pod whose deletion is asked for next. The lock is fair.
    deletion_checks: Arc<Mutex<()>>,
}

/// The receivers of the node task's events and measurements.
#[derive(Debug, Clone)]
pub struct Observers {
    /// Events on pods.
    pub events: Events,
    /// Durations and counters.
    pub metrics: NodeMetrics,
}

/// How often the agent asks whether a waiting pod is being deleted. All waiting pods of the node
/// share this rate, one after the other.
const DELETION_CHECK_INTERVAL: Duration = Duration::from_millis(500);

impl Observers {
    /// Reports the GPUs whose memory has a new generation.
    fn report_lost_memory(&self, grown: &[GenerationChange]) {
        for change in grown {
            self.events
                .on_node(Reason::GpuMemoryLost, change.to_string());
        }
    }

    /// Reports the end of a PreStartContainer call of `container`. A wait is reported when it
    /// begins, and again only where its reason has changed.
    fn report_prepare(
        &self,
        container: Option<&NamedContainer>,
        result: &Result<BoundMemory, PrepareError>,
        reported_wait: Option<&str>,
        took: Duration,
    ) {
        let (counted, reason, message) = match result {
            Ok(memory) => (BindResult::Bound, Reason::Bound, memory.to_string()),
            Err(error @ (PrepareError::NoRoom(_) | PrepareError::PodDeleted)) => (
                BindResult::NoRoom,
                Reason::WaitingForRoom,
                error.to_string(),
            ),
            Err(error) => (BindResult::Failed, Reason::NotBound, error.to_string()),
        };
        self.metrics.observe_prepare(counted, took);
        let is_told = matches!(result, Err(PrepareError::PodDeleted))
            || reported_wait.is_some_and(|told| told == message);
        if let Some(container) = container.filter(|_| !is_told) {
            self.events
                .on_pod(container.pod.clone(), reason, container.says(&message));
        }
    }
}

/// A container whose pod has a name, as Events show it.
#[derive(Clone, Debug)]
struct NamedContainer {
    pod: PodRef,
    /// Empty while the kubelet has not reported it.
    container: String,
}

impl NamedContainer {
    fn of(identity: &ContainerIdentity) -> Option<Self> {
        let PodName { namespace, name } = identity.pod_name.clone()?;
        let held = identity.checkpoint_entries.first();
        Some(Self {
            pod: PodRef {
                namespace,
                name,
                uid: identity.pod.clone(),
            },
            container: held
                .map_or_else(|| identity.container.clone(), |held| held.container.clone()),
        })
    }

    fn says(&self, message: &str) -> String {
        match self.container.is_empty() {
            true => message.to_owned(),
            false => format!("container {}: {message}", self.container),
        }
    }
}

impl Allocator for NodeHandle {
    async fn allocate(
        &self,
        resource: Resource,
        tokens: DeviceIdSet,
        id: Option<AllocationId>,
    ) -> Result<AllocationId, AllocateError> {
        let begun = Instant::now();
        let (reply, booked) = oneshot::channel();
        let command = Command::Allocate {
            resource,
            tokens,
            id,
            reply,
        };
        self.commands
            .send(command)
            .await
            .map_err(|_| AllocateError::Stopping)?;
        let booked = booked.await.map_err(|_| AllocateError::Stopping);
        self.observers.metrics.observe_allocate(begun.elapsed());
        booked
    }

    async fn prepare(&self, resource: Resource, tokens: DeviceIdSet) -> Result<(), PrepareError> {
        let (begun, until) = (Instant::now(), clock::now() + self.bind_wait);
        let identity = match self.resolver.resolve(resource, &tokens).await {
            Ok(identity) => identity,
            Err(error) => {
                let result = Err(error.into());
                self.observers
                    .report_prepare(None, &result, None, begun.elapsed());
                return result.map(drop);
            }
        };
        let container = NamedContainer::of(&identity);
        let (result, bound) = oneshot::channel();
        let (waits, waiting) = oneshot::channel();
        let bind = PrepareRequest {
            resource,
            tokens,
            identity,
            deadline: until,
        };
        let reply = Reply { result, waits };
        self.commands
            .send(Command::Prepare { bind, reply })
            .await
            .map_err(|_| PrepareError::Stopping)?;
        let (result, told) = self.follow(container.as_ref(), bound, waiting).await;
        let (container, told) = (container.as_ref(), told.as_deref());
        self.observers
            .report_prepare(container, &result, told, begun.elapsed());
        result.map(drop)
    }
}

impl NodeHandle {
    /// Waits for the result of a call. Publishes a wait when it begins, and ends it when the pod is
    /// being deleted: the kubelet ends no pod while this call is open.
    async fn follow(
        &self,
        container: Option<&NamedContainer>,
        mut bound: oneshot::Receiver<Result<BoundMemory, PrepareError>>,
        waiting: oneshot::Receiver<WaitReason>,
    ) -> (Result<BoundMemory, PrepareError>, Option<String>) {
        let stopping = || Err(PrepareError::Stopping);
        let reason = tokio::select! {
            biased;
            // The channel closes without a reason where the call does not wait.
            Ok(reason) = waiting => reason.to_string(),
            result = &mut bound => return (result.unwrap_or_else(|_| stopping()), None),
        };
        let Some(container) = container else {
            return (bound.await.unwrap_or_else(|_| stopping()), None);
        };
        let events = &self.observers.events;
        events.on_pod(
            container.pod.clone(),
            Reason::WaitingForRoom,
            container.says(&reason),
        );
        let result = tokio::select! {
            biased;
            result = bound => result.unwrap_or_else(|_| stopping()),
            () = self.wait_for_deletion(&container.pod) => Err(PrepareError::PodDeleted),
        };
        (result, Some(reason))
    }

    /// Returns once the API server has a deletion of the pod.
    async fn wait_for_deletion(&self, pod: &PodRef) {
        loop {
            let _turn = self.deletion_checks.lock().await;
            tokio::time::sleep(DELETION_CHECK_INTERVAL).await;
            if self.resolver.is_deleted(pod).await {
                return;
            }
        }
    }
}

/// The node task before it runs.
pub struct NodeTask {
    allocator: NodeAllocator<OsHost>,
    config: ResourcesConfig,
    commands: mpsc::Receiver<Command>,
    own_commands: mpsc::WeakSender<Command>,
    resolver: Arc<PodResolver>,
    inputs: Inputs,
    device: watch::Sender<Devices>,
    managed: watch::Sender<Devices>,
    snapshot: watch::Sender<Snapshot>,
    /// The time of the last tick.
    heartbeat: watch::Sender<Instant>,
    devices_error: Option<DevicesError>,
    generations: GpuGenerations,
    observers: Observers,
}

/// Creates the task over a recovered allocator.
pub fn node_task(
    allocator: NodeAllocator<OsHost>,
    config: ResourcesConfig,
    identities: PodResolver,
    bind_wait: Duration,
    followed: Inputs,
    generations: GpuGenerations,
    voice: Observers,
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
    let first = Snapshot {
        inventory: Inventory::Starting,
        view: allocator.view(clock::now()),
        queued_claims: Vec::new(),
        counts: counts(&allocator),
        generations: BTreeMap::new(),
        problems: NodeProblems::default(),
        devices_error: None,
        containers: allocator.containers(),
    };
    let (snapshot, snapshots) = watch::channel(first);
    let (pulse, beats) = watch::channel(Instant::now());
    let identities = Arc::new(identities);
    let actor = NodeTask {
        allocator,
        config,
        own_commands: commands.downgrade(),
        commands: received,
        resolver: identities.clone(),
        inputs: followed,
        device,
        managed,
        snapshot,
        heartbeat: pulse,
        devices_error: None,
        generations,
        observers: voice.clone(),
    };
    let offers = DeviceUpdates {
        device: device_offer,
        managed: managed_offer,
    };
    (
        actor,
        NodeHandle {
            commands,
            resolver: identities,
            bind_wait,
            observers: voice,
            deletion_checks: Arc::default(),
        },
        offers,
        snapshots,
        beats,
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
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut ticks = 0_u32;
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
                // These tasks end only with the agent.
                Ok(()) = self.inputs.unfit_for_cuda.changed() => self.apply_inventory().await,
                Ok(()) = self.inputs.drain.changed() => self.apply_inventory().await,
                Ok(()) = wait_if_present(&mut self.inputs.owners) => {
                    if let Some(owners) = &mut self.inputs.owners {
                        owners.mark_unchanged();
                    }
                    self.apply_inventory().await;
                }
                Ok(()) = wait_if_present(&mut self.inputs.retained) => self.apply_scrub_status().await,
                // Without the API server the last known spec stays in force.
                Ok(()) = self.inputs.spec.changed() => self.apply_spec().await,
                Ok(()) = self.inputs.withheld.changed() => {
                    let withheld = self.inputs.withheld.borrow_and_update().clone();
                    self.allocator.set_withheld(withheld, clock::now()).await;
                    self.publish();
                }
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
                    let trouble = self.allocator.host_mut().cdi_problem();
                    self.allocator.set_cdi_problem(trouble);
                    // Repeats reads and writes that failed before.
                    let inventory = self.inputs.inventory.borrow().clone();
                    self.observe_generations(inventory.gpus());
                    self.read_kubelet_state();
                }
            }
        }
    }

    async fn handle(&mut self, command: Command) {
        let now = clock::now();
        match command {
            Command::Allocate {
                resource,
                tokens,
                id,
                reply,
            } => {
                let id = id.unwrap_or_else(|| AllocationId::from_bits(rand::random()));
                self.allocator.allocate(id, resource, tokens, now);
                debug!(allocation = %id, %resource, "allocated");
                // The kubelet may have gone; the agent then collects the allocation.
                let _ = reply.send(id);
            }
            Command::Prepare { bind, reply } => {
                self.allocator.bind(bind, reply, now).await;
                // Enforcement has to know the container before its program runs.
                self.publish();
            }
            Command::KubeletState {
                entries: held,
                listed,
            } => {
                let known = held.map(|held| {
                    self.allocator.resolve_missing_names(&listed, &held);
                    held.iter().map(|held| held.allocation).collect()
                });
                self.allocator.collect_garbage(known.as_ref(), now).await;
            }
        }
    }

    async fn apply_inventory(&mut self) {
        self.inputs.inventory.mark_unchanged();
        let inventory = self.inputs.effective_inventory();
        if inventory == Inventory::Starting {
            return;
        }
        self.allocator.host_mut().mark_driver_stale();
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

    async fn apply_scrub_status(&mut self) {
        if let Some(kept) = &mut self.inputs.retained {
            let cleared = kept.borrow_and_update().scrubbed.clone();
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

    /// Advertises the node's devices. Running pods keep theirs where the new ones cannot be
    /// advertised.
    fn advertise(&mut self, inventory: &Inventory) {
        // A node without a GPU has nothing to register.
        if inventory.gpus().is_empty() {
            return;
        }
        match capacity::devices(inventory.gpus(), &self.config) {
            Ok([device, managed]) => {
                self.devices_error = None;
                send_if_changed(&self.device, device);
                send_if_changed(&self.managed, managed);
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
            generations: self.generations.by_gpu(),
            problems: NodeProblems {
                late_write: self.generations.late_write(),
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
            let held = identities
                .read_device_checkpoint()
                .await
                .map(|known| known.entries)
                .ok();
            if let Some(commands) = commands.upgrade() {
                // The task has ended: nothing is left to collect.
                let _ = commands
                    .send(Command::KubeletState {
                        entries: held,
                        listed,
                    })
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

#[cfg(test)]
mod tests {
    use axum::body::{Body, to_bytes};
    use axum::http::{Method, Request, Response};
    use bursar_apiserver::metrics::ApiMetrics;
    use bursar_kubelet::pod_resources::PodResourcesClient;
    use kube::Client;
    use prometheus_client::registry::Registry;
    use serde_json::{Value, json};
    use tokio_util::sync::CancellationToken;

    use super::*;

    /// The Events that the API server got: reason and note.
    type Published = Arc<std::sync::Mutex<Vec<(String, String)>>>;

    /// A client of an API server that stores Events and has one pod, deleted or not.
    fn client(is_deleted: bool, published: Published) -> Client {
        let server = tower::service_fn(move |request: Request<kube::client::Body>| {
            let published = published.clone();
            async move {
                let is_event = request.method() == Method::POST;
                let body = to_bytes(Body::new(request.into_body()), 1 << 16).await?;
                let mut answer: Value = serde_json::from_slice(&body).expect("a JSON body");
                if is_event {
                    let text = |field: &str| answer[field].as_str().unwrap().to_owned();
                    let told = (text("reason"), text("note"));
                    published.lock().unwrap().push(told);
                } else {
                    answer = json!({ "metadata": { "name": "train-0", "uid": "uid-1" } });
                    if is_deleted {
                        answer["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
                    }
                }
                Ok::<_, axum::Error>(Response::new(Body::from(answer.to_string())))
            }
        });
        Client::new(server, "default")
    }

    fn handle(is_deleted: bool, published: &Published) -> NodeHandle {
        let client = client(is_deleted, published.clone());
        let metrics = ApiMetrics::new(&mut Registry::default());
        let (events, sender) = Events::new(metrics.clone());
        let stop = CancellationToken::new();
        tokio::spawn(sender.run(client.clone(), "n".into(), metrics, stop));
        NodeHandle {
            commands: mpsc::channel(1).0,
            resolver: Arc::new(PodResolver {
                device_plugin_dir: Default::default(),
                resource_names: Vec::new(),
                pod_resources: PodResourcesClient::new(std::path::Path::new("/nobody")),
                client: Some(client),
            }),
            bind_wait: Duration::from_secs(25),
            observers: Observers {
                events,
                metrics: NodeMetrics::new(&mut Registry::default()),
            },
            deletion_checks: Arc::default(),
        }
    }

    fn container() -> NamedContainer {
        NamedContainer {
            pod: PodRef {
                namespace: "team".into(),
                name: "train-0".into(),
                uid: "uid-1".parse().unwrap(),
            },
            container: "main".into(),
        }
    }

    /// A wait for 8 GiB of device memory on a GPU with 6 GiB free.
    fn reason() -> WaitReason {
        WaitReason {
            resource: Resource::DeviceMemory,
            needed: Bytes::gib(8),
            other_containers: Vec::new(),
            gpus: std::num::NonZeroU16::new(1),
            too_few_gpus: None,
            beyond_instance: false,
            largest_free: Bytes::gib(6),
            largest_free_gpu: Some("GPU-a".parse().unwrap()),
            set_aside: Vec::new(),
            closed_gpu: None,
            claims_ahead: 0,
            withheld: Bytes::ZERO,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn wait_is_told_when_it_begins_and_once() {
        let published = Published::default();
        let handle = handle(false, &published);
        let (container, begun) = (container(), tokio::time::Instant::now());
        let (result, bound) = oneshot::channel();
        let (waits, waiting) = oneshot::channel();
        waits.send(reason()).unwrap();
        let node = async {
            while published.lock().unwrap().is_empty() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            let told_after = begun.elapsed();
            tokio::time::sleep(Duration::from_secs(25)).await;
            let message = reason().to_string();
            result.send(Err(PrepareError::NoRoom(message))).unwrap();
            told_after
        };
        let follow = handle.follow(Some(&container), bound, waiting);
        let ((result, told), told_after) = tokio::join!(follow, node);
        assert!(told_after < Duration::from_secs(1), "{told_after:?}");
        let took = Duration::from_secs(25);
        let told = told.as_deref();
        handle
            .observers
            .report_prepare(Some(&container), &result, told, took);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let note = "container main: waiting for 8 GiB on one GPU: largest free 6 GiB (GPU-a)";
        let expected = [("WaitingForGpuMemory".to_owned(), note.to_owned())];
        assert_eq!(*published.lock().unwrap(), expected);
    }

    #[tokio::test(start_paused = true)]
    async fn lost_memory_is_told_with_both_generations() {
        let published = Published::default();
        let handle = handle(false, &published);
        let change = |gpu: &str, before| GenerationChange {
            gpu: gpu.parse().unwrap(),
            before,
            after: before + 1,
        };
        let observers = &handle.observers;
        observers.report_lost_memory(&[change("GPU-a", 3), change("GPU-b", 1)]);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let told = published.lock().unwrap().clone();
        let note = "the memory of GPU-a has generation 4 instead of 3: its contents are lost";
        assert_eq!(told[0], ("GpuMemoryLost".to_owned(), note.to_owned()));
        assert_eq!(told.len(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn wait_ends_soon_after_the_pod_is_deleted() {
        let handle = handle(true, &Published::default());
        let begun = tokio::time::Instant::now();
        let (_result, bound) = oneshot::channel();
        let (waits, waiting) = oneshot::channel();
        waits.send(reason()).unwrap();
        let (result, _) = handle.follow(Some(&container()), bound, waiting).await;
        assert!(
            matches!(result, Err(PrepareError::PodDeleted)),
            "{result:?}"
        );
        assert!(begun.elapsed() < Duration::from_secs(1));
    }

    #[tokio::test(start_paused = true)]
    async fn bound_container_is_told_with_amount_and_gpu() {
        let published = Published::default();
        let handle = handle(false, &published);
        let memory = BoundMemory::Device(vec![("GPU-a".parse().unwrap(), Bytes::gib(8))]);
        handle
            .observers
            .report_prepare(Some(&container()), &Ok(memory), None, Duration::ZERO);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let note = "container main: 8 GiB of GPU-a";
        let expected = [("GpuMemoryBound".to_owned(), note.to_owned())];
        assert_eq!(*published.lock().unwrap(), expected);
    }
}
