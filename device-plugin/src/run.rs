//! Starts the agent's tasks and stops all of them on shutdown, or when one task ends.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bursar_apiserver::events::EventSender;
use bursar_apiserver::gpu_node::GpuNodeClient;
use bursar_apiserver::spec_watch::{self, Observation, WatchOutput};
use bursar_apiserver::{Events, ParsedSpec};
use bursar_config::Config;
use bursar_enforcement::audit::{AuditStatus, Auditor};
use bursar_enforcement::drain::{self, DrainInputs};
use bursar_enforcement::driver_limits::{self, Limits};
use bursar_enforcement::faults::report::FaultReport;
use bursar_enforcement::faults::{self, FaultInputs};
use bursar_gpu::Inventory;
use bursar_gpu::drain::DrainState;
use bursar_gpu::generations::GpuGenerations;
use bursar_gpu::health::{HealthThresholds, UnhealthyReason};
use bursar_gpu::nvml::{self, NvmlHandle, PollIntervals};
use bursar_gpu::uvm::UvmModule;
use bursar_gpu::xid::RecentXids;
use bursar_gpu_node::NodeReport;
use bursar_gpu_node::node_report::ManagedOffer;
use bursar_gpu_node::publish::{Publisher, Rate};
use bursar_gpu_node::quota_overrides::{self, AppliedSpec};
use bursar_host::checkpoint::Checkpoint;
use bursar_host::clock;
use bursar_host::driver_files::Driver;
use bursar_host::pod_cgroups::PodCgroups;
use bursar_http::Listeners;
use bursar_kubelet::devices::Devices;
use bursar_kubelet::lifecycle::{Lifecycle, Registration};
use bursar_kubelet::pod_resources::PodResourcesClient;
use bursar_kubelet::server::PluginService;
use bursar_ledger::units::{Bytes, GpuUuid, Resource};
use bursar_node::actor::{DeviceUpdates, Inputs, NodeHandle, Observers, Snapshot, node_task};
use bursar_node::allocator::NodeAllocator;
use bursar_node::host::{HostError, OsHost};
use bursar_node::other_plugins::{self, GpuOwners};
use bursar_node::pod_resolver::PodResolver;
use bursar_retained::fdstore_client;
use bursar_retained::lease_ids::LeaseIds;
use bursar_retained::provisioners::{Program, Provisioners};
use bursar_retained::scrub_check::ScrubCache;
use bursar_retained::service::LeaseService;
use bursar_retained::status::RetainedStatus;
use bursar_retained::supervision::Supervisor;
use bursar_retained::tokens::seal::{NameTooLong, NodeKey};
use bursar_retained::tokens::{NodePublicKey, key};
use bursar_sessions::lease_handle::{LeaseHandle, LiveLeases};
use bursar_sessions::{CgroupResolver, RecoveryPolicy, Sessions};
use bursar_watch::History;
use futures::future::BoxFuture;
use kube::Client;
use kube::client::{ClientBuilder, DynBody};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tower::BoxError;
use tower::util::MapFutureLayer;
use tracing::{info, warn};

use crate::http::{Heartbeat, Sources, Verdict};
use crate::metrics::Metrics;
use crate::publisher::StatusPublisher;
use crate::relay;

/// The time within which the API server has to begin each response.
const API_TIMEOUT: Duration = Duration::from_secs(20);
/// The longest silence within a response. A quiet watch of kube lasts 200 s.
const WATCH_TIMEOUT: Duration = Duration::from_secs(210);

/// Options of a run that are not in the configuration file: the tests replace them.
#[derive(Clone)]
pub struct RunOptions {
    /// This node's name in Kubernetes.
    pub node: String,
    /// The client of the API server. Without a client the agent publishes no status and no events.
    pub client: Option<Client>,
    /// The intervals at which the agent polls NVML.
    pub(crate) poll_intervals: PollIntervals,
    /// The thresholds at which a GPU's health changes.
    pub health: HealthThresholds,
}

impl RunOptions {
    /// The options of production on the node `node`.
    pub fn new(node: String, client: Option<Client>) -> Self {
        Self {
            node,
            client,
            poll_intervals: PollIntervals::default(),
            health: HealthThresholds::default(),
        }
    }
}

/// The reason why the agent ended without a request to stop.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The agent cannot use its run directory.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The node's name is too long to be a Kubernetes name.
    #[error("failed to use --node-name: {0}")]
    Node(#[from] NameTooLong),
    /// The operating system started no thread.
    #[error("failed to start a thread: {0}")]
    Thread(#[source] std::io::Error),
    /// The agent cannot listen for metrics or for probes.
    #[error("failed to listen on http.listen or http.probes: {0}")]
    Listen(#[from] bursar_http::ListenError),
    /// A task ended although the agent was not stopping.
    #[error("task {0} ended before the agent was stopped")]
    TaskEnded(&'static str),
    /// A task panicked.
    #[error("a task of the agent panicked: {0}")]
    TaskPanicked(#[from] tokio::task::JoinError),
}

/// The parts that all tasks share, and the tasks that run for as long as the agent does.
struct Agent {
    config: Config,
    node: String,
    client: Option<Client>,
    metrics: Metrics,
    events: Events,
    tasks: JoinSet<&'static str>,
    stop: CancellationToken,
}

/// The node's GPUs, as NVML's processes report them.
struct Gpus {
    inventory: watch::Receiver<Inventory>,
    xids: watch::Receiver<RecentXids>,
    nvml: NvmlHandle,
    generations: GpuGenerations,
    drain: watch::Sender<DrainState>,
}

/// The node task's reports.
struct NodeState {
    snapshots: watch::Receiver<Snapshot>,
    heartbeat: watch::Receiver<std::time::Instant>,
}

/// The sessions of tenants, and the lease service behind them.
struct Tenants {
    sessions: Arc<Sessions>,
    leases: LeaseHandle,
    retained: watch::Receiver<RetainedStatus>,
    released_gpus: watch::Receiver<BTreeSet<GpuUuid>>,
    unfit_for_cuda: watch::Receiver<BTreeMap<GpuUuid, UnhealthyReason>>,
    /// `None` where retained memory is off.
    supervised: Option<Arc<Provisioners>>,
    live_leases: watch::Receiver<LiveLeases>,
    token_key: NodePublicKey,
}

/// Takes managed memory out of the configuration where a neighbour's allocation could fail because
/// of it. The driver's parameters change only with a new load of its modules.
fn check_managed_memory(mut config: Config) -> (Config, ManagedOffer) {
    let module = UvmModule::read(&config.paths.sys, &config.paths.proc);
    let managed = ManagedOffer {
        configured: config.resources.managed_capacity,
        refused: module.check_eviction().err(),
        module,
    };
    if let (Some(why), true) = (managed.refused, managed.configured > Bytes::ZERO) {
        warn!(%why, "managed memory is not offered");
        config.resources.managed_capacity = Bytes::ZERO;
    }
    (config, managed)
}

/// Runs the agent until `shutdown`.
pub async fn run(
    config: Config,
    options: RunOptions,
    shutdown: CancellationToken,
) -> Result<(), AgentError> {
    let metrics = Metrics::new();
    let (events, event_sender) = Events::new(metrics.api.clone());
    let (config, managed) = check_managed_memory(config);
    let Gpus {
        inventory,
        xids,
        nvml,
        generations,
        drain,
    } = watch_gpus(&config, &options)?;
    let mut agent = Agent {
        config,
        node: options.node,
        client: options.client,
        metrics,
        events,
        tasks: JoinSet::new(),
        stop: shutdown.child_token(),
    };
    let (spec_sender, spec) = watch::channel(None);
    let (withheld_sender, withheld) = watch::channel(BTreeMap::new());
    // Without an API server the agent counts as disconnected from its start.
    let (disconnected_sender, disconnected_since) = watch::channel(Some(Instant::now()));

    // The lease service starts before recovery: pods that ended without an agent may own leases.
    let tenants = agent.start_lease_service(nvml.clone(), drain.subscribe())?;
    let sessions = tenants.sessions.clone();
    let owners = agent.start_owner_check();
    let refuses = agent.config.refuse_beside_other_plugins;
    let inputs = Inputs {
        inventory: inventory.clone(),
        owners: refuses.then(|| owners.clone()),
        unfit_for_cuda: tenants.unfit_for_cuda,
        drain: drain.subscribe(),
        retained: (!agent.config.allow_unscrubbed).then(|| tenants.retained.clone()),
        spec: spec.clone(),
        withheld,
    };
    let allocator = agent.recover_allocator(&sessions, tenants.leases).await?;
    let (node, handle, updates) = agent.start_node(allocator, inputs, generations);
    let drained = drain.subscribe();
    let observed_gpus = inventory.clone();
    agent.spawn(
        "drain",
        drain::run(
            DrainInputs {
                proc: agent.config.paths.proc.clone(),
                sessions: sessions.clone(),
                orders: spec.clone(),
                inventory,
                released_by_leases: tenants.released_gpus,
            },
            drain,
            agent.stop.clone(),
        ),
    );
    let limits = agent.start_driver_limits(&nvml, &sessions, &node);
    let audited = agent.start_audit(nvml, &sessions, &node, &limits, withheld_sender)?;
    let faults = agent.start_faults(FaultInputs {
        paths: agent.config.paths.clone(),
        sessions: sessions.clone(),
        snapshots: node.snapshots.clone(),
        orders: spec.clone(),
        xids,
        disconnected_since,
        events: agent.events.clone(),
        default_action: agent.config.default_context_action,
        metrics: agent.metrics.audit.clone(),
    });
    let ordered = agent.start_quota_overrides(sessions, &node, spec.clone());
    let registration = agent.register(handle, updates);
    if let Some(provisioners) = tenants.supervised {
        agent.start_supervision(
            Supervisor {
                provisioners,
                inventory: observed_gpus,
                drain: drained.clone(),
                live_leases: tenants.live_leases,
            },
            registration.clone(),
        );
    }
    let (reports, readiness) = agent.start_publisher(StatusPublisher {
        config: agent.config.resources,
        boot_id: clock::boot_id(),
        snapshots: node.snapshots,
        registration,
        audited,
        limits,
        ordered,
        faults,
        retained: tenants.retained,
        owners,
        token_key: tenants.token_key,
        managed,
        paths: agent.config.paths.clone(),
        node: agent.node.clone(),
        client: agent.client.clone(),
        events: agent.events.clone(),
        metrics: agent.metrics.clone(),
    });
    agent.serve(node.heartbeat, readiness).await?;
    if let Some(client) = agent.client.clone() {
        let observed = agent.follow_api_server(&client, event_sender, spec_sender);
        let writer = Publisher {
            api: GpuNodeClient::new(client, agent.node.clone(), observed.1),
            reports,
            observed: observed.0,
            spec,
            drain: drained,
            rate: Rate::default(),
            unreachable_since: disconnected_sender,
            metrics: agent.metrics.api.clone(),
        };
        agent.spawn("GpuNode writer", writer.run(agent.stop.clone()));
    }
    agent.supervise(shutdown).await
}

/// Starts NVML's processes with the generations and drains on record.
fn watch_gpus(config: &Config, options: &RunOptions) -> Result<Gpus, AgentError> {
    let driver = config.driver.clone();
    let library = Arc::new(move || -> Result<PathBuf, String> {
        Driver::find_configured(&driver)
            .map(|driver| driver.libnvml.path)
            .map_err(|error| error.to_string())
    });
    let file = |folder: &Path| Checkpoint::new(folder.join("generations.json"));
    let (run_dir, state_dir) = (&config.paths.run_dir, &config.paths.state_dir);
    let generations = GpuGenerations::load(file(run_dir), file(state_dir), clock::boot_id())
        .map_err(AgentError::Thread)?;
    let persisted = generations.persisted_gpus();
    let records = persisted.iter().map(|(gpu, record)| (gpu, record.health));
    let drain = watch::Sender::new(drain::initial_state(records));
    // The driver's root is the host's, with the tokens of all pods. An agent outside of a container
    // has no other root.
    let root = Some(config.driver.root.clone());
    let hidden = root.filter(|root| root.as_path() != Path::new("/"));
    let (inventory, xids, nvml) = nvml::start(
        library,
        hidden.into_iter().collect(),
        options.poll_intervals,
        options.health,
        persisted,
        drain.subscribe(),
    );
    Ok(Gpus {
        inventory,
        xids,
        nvml,
        generations,
        drain,
    })
}

impl Agent {
    fn spawn(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(async move {
            task.await;
            name
        });
    }

    /// Starts the service for retained memory. Where the feature is off, the service refuses every
    /// request.
    fn start_lease_service(
        &mut self,
        nvml: NvmlHandle,
        drain: watch::Receiver<DrainState>,
    ) -> Result<Tenants, AgentError> {
        let paths = &self.config.paths;
        let resolver = Arc::new(CgroupResolver::new(paths.proc.clone()));
        let (leases, commands) = LeaseHandle::channel();
        let (live_sender, live_leases) = watch::channel(LiveLeases::new());
        let sessions = Sessions::new(paths.run_dir.clone(), Arc::new(nvml), resolver.clone())
            .with_leases(leases.clone(), live_leases)
            .with_default_policy(RecoveryPolicy::with_action(
                self.config.default_context_action,
            ))
            // Sizes measured by earlier versions of the agent came from tenants: they lie in the
            // state directory.
            .with_context_sizes(paths.run_dir.join("contexts.json"));
        let sessions = Arc::new(sessions);
        let (status, retained) = watch::channel(RetainedStatus::default());
        let folder = paths.run_dir.join("retained");
        let program = Program {
            path: self.provisioner(),
            driver: self.config.driver.clone(),
            libraries: folder.join("lib"),
        };
        let fdstore = &self.config.retained;
        let fdstore = fdstore.enabled.then(|| fdstore.fdstore_socket.clone());
        let secret = key::load_or_create(&paths.run_dir.join(key::FILE_NAME));
        let service = LeaseService {
            commands,
            store_events: fdstore
                .map(fdstore_client::start)
                .transpose()
                .map_err(AgentError::Thread)?,
            sessions: sessions.clone(),
            membership: resolver,
            provisioners: Arc::new(Provisioners::new(program.clone())),
            program,
            scrub_cache: ScrubCache::load(Checkpoint::new(folder.join("scrubbed.json"))),
            lease_ids: LeaseIds::new(SystemTime::now()),
            key: NodeKey::new(self.node.clone(), secret)?,
            live_leases: live_sender,
            drain,
            released_gpus: watch::Sender::default(),
            status,
        };
        let tenants = Tenants {
            sessions,
            leases,
            retained,
            released_gpus: service.released_gpus.subscribe(),
            unfit_for_cuda: service.provisioners.unfit(),
            supervised: self
                .config
                .retained
                .enabled
                .then(|| service.provisioners.clone()),
            live_leases: service.live_leases.subscribe(),
            token_key: service.key.public(),
        };
        self.spawn("retained memory", service.run(self.stop.clone()));
        Ok(tenants)
    }

    /// Starts the supervision of the GPUs' allocator runtimes. It begins once the kubelet has had
    /// the node's offer.
    fn start_supervision(
        &mut self,
        supervisor: Supervisor,
        mut registration: watch::Receiver<Registration>,
    ) {
        let offered = async move {
            let registered = registration.wait_for(Registration::is_registered);
            let is_offered = registered.await.is_ok();
            // The lifecycle ends only with the agent.
            if !is_offered {
                std::future::pending().await
            }
        };
        let task = supervisor.run(offered, std::time::Instant::now, self.stop.clone());
        self.spawn("runtime supervision", task);
    }

    /// The configured provisioner, or else the one beside the agent's program.
    fn provisioner(&self) -> PathBuf {
        let beside = || {
            let own = std::env::current_exe().unwrap_or_default();
            own.with_file_name("bursar-provisioner")
        };
        self.config
            .retained
            .provisioner
            .clone()
            .unwrap_or_else(beside)
    }

    /// Starts to look for other device plugins with the node's GPUs.
    fn start_owner_check(&mut self) -> watch::Receiver<GpuOwners> {
        let (sender, owners) = watch::channel(GpuOwners::default());
        let kubelet = PodResourcesClient::new(&self.config.kubelet.pod_resources_socket);
        let task = other_plugins::run(kubelet, sender, self.stop.clone());
        self.spawn("owner check", task);
        owners
    }

    /// A resolver for the extended resources under the names that pods request.
    fn pod_resolver(&self) -> PodResolver {
        let Config {
            resources, kubelet, ..
        } = &self.config;
        let named = |resource: Resource| (resource, resource.name(resources.quantum).to_owned());
        PodResolver {
            device_plugin_dir: kubelet.device_plugin_dir.clone(),
            resource_names: [Resource::DeviceMemory, Resource::ManagedMemory]
                .map(named)
                .to_vec(),
            pod_resources: PodResourcesClient::new(&kubelet.pod_resources_socket),
            client: self.client.clone(),
        }
    }

    /// Restores the state of the agent that ran before.
    async fn recover_allocator(
        &self,
        sessions: &Arc<Sessions>,
        leases: LeaseHandle,
    ) -> Result<NodeAllocator<OsHost>, HostError> {
        let config = &self.config;
        let host = OsHost::new(config, sessions.clone(), leases)?;
        let found = host.survey();
        let kubelet = self
            .pod_resolver()
            .read_device_checkpoint()
            .await
            .unwrap_or_else(|error| {
                warn!(%error, "failed to read the kubelet's device checkpoint at the start");
                Default::default()
            });
        let cgroups = PodCgroups::new(config.paths.cgroup_root.clone());
        let metrics = self.metrics.node.clone();
        let mut allocator =
            NodeAllocator::new(config.resources, clock::boot_id(), host, cgroups, metrics);
        allocator
            .recover(found, &kubelet.entries, clock::now())
            .await;
        if !config.allow_unscrubbed {
            allocator
                .set_scrubbed_gpus(BTreeSet::new(), clock::now())
                .await;
        }
        Ok(allocator)
    }

    fn start_node(
        &mut self,
        allocator: NodeAllocator<OsHost>,
        inputs: Inputs,
        generations: GpuGenerations,
    ) -> (NodeState, NodeHandle, DeviceUpdates) {
        let observers = Observers {
            events: self.events.clone(),
            metrics: self.metrics.node.clone(),
        };
        let (task, handle, updates, snapshots, heartbeat) = node_task(
            allocator,
            self.config.resources,
            self.pod_resolver(),
            self.config.bind_wait,
            inputs,
            generations,
            observers,
        );
        self.spawn("node", task.run());
        let state = NodeState {
            snapshots,
            heartbeat,
        };
        (state, handle, updates)
    }

    fn start_driver_limits(
        &mut self,
        nvml: &NvmlHandle,
        sessions: &Arc<Sessions>,
        node: &NodeState,
    ) -> watch::Receiver<Limits> {
        let (limits, set) = watch::channel(Limits::new());
        let task = driver_limits::run(
            nvml.clone(),
            sessions.clone(),
            node.snapshots.clone(),
            limits,
            self.stop.clone(),
        );
        self.spawn("driver limits", task);
        set
    }

    fn start_audit(
        &mut self,
        nvml: NvmlHandle,
        sessions: &Arc<Sessions>,
        node: &NodeState,
        limits: &watch::Receiver<Limits>,
        withheld: watch::Sender<BTreeMap<GpuUuid, Bytes>>,
    ) -> Result<watch::Receiver<AuditStatus>, AgentError> {
        let (auditor, audited) = Auditor::new(
            &self.config,
            nvml,
            sessions.clone(),
            node.snapshots.clone(),
            limits.clone(),
            self.events.clone(),
            self.metrics.audit.clone(),
        )
        .map_err(AgentError::Thread)?;
        let auditor = auditor.with_withheld(withheld);
        self.spawn("audit", auditor.run(self.config.clone(), self.stop.clone()));
        Ok(audited)
    }

    fn start_faults(&mut self, inputs: FaultInputs) -> watch::Receiver<Vec<FaultReport>> {
        let (sender, open) = watch::channel(Vec::new());
        self.spawn("faults", faults::run(inputs, sender, self.stop.clone()));
        open
    }

    fn start_quota_overrides(
        &mut self,
        sessions: Arc<Sessions>,
        node: &NodeState,
        spec: watch::Receiver<Option<ParsedSpec>>,
    ) -> watch::Receiver<AppliedSpec> {
        let (sender, applied) = watch::channel(AppliedSpec::default());
        let task = quota_overrides::run(
            sessions,
            node.snapshots.clone(),
            spec,
            sender,
            self.stop.clone(),
        );
        self.spawn("quota overrides", task);
        applied
    }

    fn start_publisher(
        &mut self,
        publisher: StatusPublisher,
    ) -> (watch::Receiver<NodeReport>, watch::Receiver<Verdict>) {
        let (task, reports, readiness) = publisher.start(self.stop.clone());
        self.spawn("status publisher", task);
        (reports, readiness)
    }

    /// Starts the tasks that need the API server, except the writer of the status.
    ///
    /// Returns what the watch has observed of the node's `GpuNode`, and the history that the writer
    /// compares versions by.
    fn follow_api_server(
        &mut self,
        client: &Client,
        events: EventSender,
        spec: watch::Sender<Option<ParsedSpec>>,
    ) -> (watch::Receiver<Observation>, History) {
        let (node, metrics) = (self.node.clone(), self.metrics.api.clone());
        self.spawn(
            "events",
            events.run(
                client.clone(),
                node.clone(),
                metrics.clone(),
                self.stop.clone(),
            ),
        );
        let (observed, observations) = watch::channel(Observation::default());
        let history = History::default();
        let output = WatchOutput {
            spec,
            observed,
            metrics,
        };
        self.spawn(
            "spec watch",
            spec_watch::run(
                client.clone(),
                node,
                history.clone(),
                output,
                self.stop.clone(),
            ),
        );
        (observations, history)
    }

    /// Registers both resources, each as soon as the node offers a device of that resource.
    ///
    /// Returns the registration state of device memory.
    fn register(
        &mut self,
        node: NodeHandle,
        updates: DeviceUpdates,
    ) -> watch::Receiver<Registration> {
        let DeviceUpdates { device, managed } = updates;
        let node = Arc::new(node);
        let mut register_resource = |resource: Resource, devices: watch::Receiver<Devices>| {
            let name = resource.name(self.config.resources.quantum).to_owned();
            let service = PluginService {
                resource,
                allocator: node.clone(),
                devices: devices.clone(),
            };
            let kubelet = &self.config.kubelet;
            let relay = kubelet.relay_dir.clone();
            let dir = relay.as_ref().unwrap_or(&kubelet.device_plugin_dir);
            let (lifecycle, mut registration) = Lifecycle::new(dir, name.clone(), service);
            self.spawn(
                "registration",
                register_when_offered(lifecycle, devices, self.stop.clone()),
            );
            if let Some(dir) = relay {
                let (task, with_kubelet) =
                    relay::follow(dir, name, registration, self.stop.clone());
                self.spawn("relay watch", task);
                registration = with_kubelet;
            }
            self.spawn(
                "registration counter",
                count_registrations(
                    registration.clone(),
                    resource,
                    self.metrics.clone(),
                    self.stop.clone(),
                ),
            );
            registration
        };
        register_resource(Resource::ManagedMemory, managed);
        register_resource(Resource::DeviceMemory, device)
    }

    /// Serves metrics and probes.
    async fn serve(
        &mut self,
        heartbeat: watch::Receiver<std::time::Instant>,
        readiness: watch::Receiver<Verdict>,
    ) -> Result<(), AgentError> {
        let sources = Sources {
            metrics: self.metrics.clone(),
            health: Heartbeat(heartbeat),
            readiness,
        };
        let listeners = Listeners::bind(self.config.http_listen, self.config.http_probes).await?;
        let address = |listener: &TcpListener| listener.local_addr().ok();
        if let Some((address, probes)) = address(&listeners.metrics).zip(address(&listeners.probes))
        {
            info!(%address, %probes, "serving metrics and probes");
        }
        let served = bursar_http::serve(listeners, sources, self.stop.clone());
        self.spawn("http server", served);
        Ok(())
    }

    /// Waits for the first task to end, then stops the others.
    ///
    /// # Errors
    /// A task ended before `shutdown` was cancelled.
    async fn supervise(mut self, shutdown: CancellationToken) -> Result<(), AgentError> {
        let mut result = Ok(());
        while let Some(ended) = self.tasks.join_next().await {
            if !shutdown.is_cancelled() && result.is_ok() {
                result = match ended {
                    Ok(name) => Err(AgentError::TaskEnded(name)),
                    Err(error) => Err(AgentError::TaskPanicked(error)),
                };
            }
            self.stop.cancel();
        }
        info!("stopped");
        result
    }
}

/// Registers a resource once the node offers a device, until `stop`.
async fn register_when_offered(
    lifecycle: Lifecycle<NodeHandle>,
    mut devices: watch::Receiver<Devices>,
    stop: CancellationToken,
) {
    let first = tokio::select! {
        first = devices.wait_for(|devices| !devices.is_empty()) => first.is_ok(),
        () = stop.cancelled() => false,
    };
    if first {
        lifecycle.run(stop).await;
    }
}

/// Counts the registrations that the kubelet accepted.
async fn count_registrations(
    mut registration: watch::Receiver<Registration>,
    resource: Resource,
    metrics: Metrics,
    stop: CancellationToken,
) {
    while let Some(Ok(())) = stop.run_until_cancelled(registration.changed()).await {
        if registration.borrow_and_update().is_registered() {
            metrics.count_registration(resource);
        }
    }
    // The lifecycle may end before the agent stops. Its own task reports that.
    stop.cancelled().await;
}

/// Connects to the API server of the agent's cluster, or to the one in `KUBECONFIG`.
///
/// Every request of the client has a deadline.
pub async fn connect_api_server() -> Option<Client> {
    let client = kube::Config::infer()
        .await
        .map_err(kube::Error::InferConfig)
        .and_then(|config| client_with_deadlines(config, API_TIMEOUT));
    client
        .inspect_err(
            |error| warn!(%error, "failed to configure a client of the API server: no status, and every pod has priority 0"),
        )
        .ok()
}

/// A client of `config` with a deadline for each step of a request.
///
/// The body of a response has a longer deadline than its beginning: a watch may be quiet.
fn client_with_deadlines(mut config: kube::Config, silence: Duration) -> kube::Result<Client> {
    config.connect_timeout = Some(silence);
    config.write_timeout = Some(silence);
    config.read_timeout = Some(WATCH_TIMEOUT);
    let begins = MapFutureLayer::new(move |answer: ResponseFuture| async move {
        let answer: Result<_, BoxError> = timeout(silence, answer).await?;
        answer
    });
    Ok(ClientBuilder::try_from(config)?.with_layer(&begins).build())
}

/// A response of kube's client that has not arrived yet.
type ResponseFuture = BoxFuture<'static, Result<::http::Response<Box<DynBody>>, BoxError>>;

#[cfg(test)]
mod tests {
    use futures::StreamExt as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    const SILENCE: Duration = Duration::from_millis(50);

    async fn client_of(server: &TcpListener) -> Client {
        let address = server.local_addr().unwrap();
        let config = kube::Config::new(format!("http://{address}").parse().unwrap());
        client_with_deadlines(config, SILENCE).unwrap()
    }

    #[tokio::test]
    async fn request_times_out_when_the_api_server_is_silent() {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = client_of(&silent).await;
        let answer = timeout(Duration::from_secs(10), client.apiserver_version()).await;
        assert!(answer.expect("the request has a deadline").is_err());
    }

    #[tokio::test]
    async fn watch_continues_without_events() {
        let quiet = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = client_of(&quiet).await;
        let server = tokio::spawn(async move {
            let (mut stream, _) = quiet.accept().await.unwrap();
            let _ = stream.read(&mut [0; 4096]).await.unwrap();
            let begins = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
            stream.write_all(begins).await.unwrap();
            std::future::pending::<()>().await
        });
        let nodes = bursar_apiserver::gpu_node::gpu_nodes(client);
        let params = kube::api::WatchParams::default();
        let begun = nodes.watch(&params, "1");
        let begun = timeout(Duration::from_secs(10), begun).await.unwrap();
        let mut events = std::pin::pin!(begun.unwrap());
        let told = timeout(10 * SILENCE, events.next()).await;
        assert!(told.is_err(), "{told:?}");
        server.abort();
    }
}
