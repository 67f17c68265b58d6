//! Starts the agent's tasks and stops all of them on shutdown, or when one task ends.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bursar_apiserver::Events;
use bursar_apiserver::gpu_node::GpuNodeClient;
use bursar_apiserver::spec_watch::{self, Observation, WatchOutput};
use bursar_config::Config;
use bursar_enforcement::audit::Auditor;
use bursar_enforcement::drain;
use bursar_enforcement::driver_limits::{self, Limits};
use bursar_enforcement::faults;
use bursar_gpu::drain::DrainState;
use bursar_gpu::generations::GpuGenerations;
use bursar_gpu::health::HealthThresholds;
use bursar_gpu::nvml::{self, PollIntervals};
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
use bursar_ledger::units::Resource;
use bursar_node::actor::{DeviceUpdates, Inputs, NodeHandle, Observers, node_task};
use bursar_node::allocator::NodeAllocator;
use bursar_node::host::{HostError, OsHost};
use bursar_node::metrics::NodeMetrics;
use bursar_node::pod_resolver::PodResolver;
use bursar_retained::fdstore_client;
use bursar_retained::lease_ids::LeaseIds;
use bursar_retained::provisioners::{Program, Provisioners};
use bursar_retained::scrub_check::ScrubCache;
use bursar_retained::service::LeaseService;
use bursar_retained::status::RetainedStatus;
use bursar_retained::tokens::key;
use bursar_retained::tokens::seal::{NameTooLong, NodeKey};
use bursar_sessions::lease_handle::{Commands, LeaseHandle, LiveLeases};
use bursar_sessions::{CgroupResolver, Sessions};
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

use crate::http::{Heartbeat, Sources};
use crate::metrics::Metrics;
use crate::publisher::StatusPublisher;

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

/// The tasks that run for as long as the agent does.
struct Tasks {
    set: JoinSet<&'static str>,
    stop: CancellationToken,
}

/// Runs the agent until `shutdown`.
pub async fn run(
    config: Config,
    options: RunOptions,
    shutdown: CancellationToken,
) -> Result<(), AgentError> {
    let RunOptions {
        node,
        client,
        poll_intervals,
        health,
    } = options;
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
    let drained = persisted.iter().filter(|(_, gpu)| gpu.health.drained);
    let drain = drain::initial_state(drained.map(|(gpu, _)| gpu.clone()).collect());
    let (inventory, xids, nvml) = nvml::start(
        library,
        poll_intervals,
        health,
        persisted,
        drain.subscribe(),
    );
    let metrics = Metrics::new();
    let (events, outbox) = Events::new(metrics.api.clone());
    let resolver = pod_resolver(&config, client.clone());
    let stop = shutdown.child_token();
    let mut tasks = Tasks {
        set: JoinSet::new(),
        stop: stop.clone(),
    };
    let (leases, commands) = LeaseHandle::channel();
    let (live_sender, live_leases) = watch::channel(LiveLeases::new());
    let sessions = sessions(&config, nvml.clone(), leases.clone(), live_leases);
    let (retained_sender, retained) = watch::channel(RetainedStatus::default());
    // The lease service starts before recovery: pods that ended without an agent may own leases.
    let secret = key::load_or_create(&config.paths.run_dir.join(key::FILE_NAME));
    let service = lease_service(
        &config,
        NodeKey::new(node.clone(), secret)?,
        commands,
        sessions.clone(),
        live_sender,
        retained_sender,
        drain.subscribe(),
    )?;
    let released_by_leases = service.released_gpus.subscribe();
    let hung_provisioners = service.provisioners.hung();
    tasks.spawn("retained memory", service.run(stop.clone()));
    let allocator = recover_allocator(
        &config,
        &resolver,
        sessions.clone(),
        leases,
        metrics.node.clone(),
    )
    .await?;
    let observers = Observers {
        events: events.clone(),
        metrics: metrics.node.clone(),
    };
    let (spec_sender, spec) = watch::channel(None);
    let (withheld_sender, withheld) = watch::channel(BTreeMap::new());
    let (task, handle, updates, snapshots, heartbeat) = node_task(
        allocator,
        config.resources,
        resolver,
        config.bind_wait,
        Inputs {
            inventory: inventory.clone(),
            hung_provisioners,
            drain: drain.subscribe(),
            retained: (!config.allow_unscrubbed).then(|| retained.clone()),
            spec: spec.clone(),
            withheld,
        },
        generations,
        observers,
    );
    tasks.spawn("node", task.run());
    let (writer_spec, writer_drain) = (spec.clone(), drain.subscribe());
    let drain_inputs = drain::DrainInputs {
        proc: config.paths.proc.clone(),
        sessions: sessions.clone(),
        orders: spec.clone(),
        inventory,
        released_by_leases,
    };
    tasks.spawn("drain", drain::run(drain_inputs, drain, stop.clone()));
    let (limits_sender, limits) = watch::channel(Limits::new());
    let limiter = driver_limits::run(
        nvml.clone(),
        sessions.clone(),
        snapshots.clone(),
        limits_sender,
        stop.clone(),
    );
    tasks.spawn("driver limits", limiter);
    let (auditor, audited) = Auditor::new(
        &config,
        nvml,
        sessions.clone(),
        snapshots.clone(),
        limits.clone(),
        events.clone(),
        metrics.audit.clone(),
    )
    .map_err(AgentError::Thread)?;
    let auditor = auditor.with_withheld(withheld_sender);
    tasks.spawn("audit", auditor.run(config.clone(), stop.clone()));
    let (ordered_sender, ordered) = watch::channel(AppliedSpec::default());
    let (faults_sender, faults) = watch::channel(Vec::new());
    // Without an API server the agent counts as disconnected from its start.
    let (disconnected_sender, disconnected_since) = watch::channel(Some(Instant::now()));
    let fault_inputs = faults::FaultInputs {
        paths: config.paths.clone(),
        sessions: sessions.clone(),
        snapshots: snapshots.clone(),
        orders: spec.clone(),
        xids,
        disconnected_since,
        events: events.clone(),
        metrics: metrics.audit.clone(),
    };
    tasks.spawn(
        "faults",
        faults::run(fault_inputs, faults_sender, stop.clone()),
    );
    let overrides = quota_overrides::run(
        sessions,
        snapshots.clone(),
        spec,
        ordered_sender,
        stop.clone(),
    );
    tasks.spawn("quota overrides", overrides);
    let registration = tasks.register(&config, handle, updates, &metrics);
    let publisher = StatusPublisher {
        config: config.resources,
        boot_id: clock::boot_id(),
        snapshots,
        registration,
        audited,
        limits,
        ordered,
        faults,
        retained,
        node: node.clone(),
        client: client.clone(),
        events,
        metrics: metrics.clone(),
    };
    let (publishing, reports, readiness) = publisher.start(stop.clone());
    tasks.spawn("status publisher", publishing);
    tasks
        .serve(
            &config,
            Sources {
                metrics: metrics.clone(),
                health: Heartbeat(heartbeat),
                readiness,
            },
        )
        .await?;
    if let Some(client) = client {
        tasks.spawn(
            "events",
            outbox.run(
                client.clone(),
                node.clone(),
                metrics.api.clone(),
                stop.clone(),
            ),
        );
        let (observed_sender, observed) = watch::channel(Observation::default());
        let history = History::default();
        let output = WatchOutput {
            spec: spec_sender,
            observed: observed_sender,
            metrics: metrics.api.clone(),
        };
        tasks.spawn(
            "spec watch",
            spec_watch::run(
                client.clone(),
                node.clone(),
                history.clone(),
                output,
                stop.clone(),
            ),
        );
        let writer = Publisher {
            api: GpuNodeClient::new(client, node, history),
            reports,
            observed,
            spec: writer_spec,
            drain: writer_drain,
            rate: Rate::default(),
            unreachable_since: disconnected_sender,
            metrics: metrics.api,
        };
        tasks.spawn("GpuNode writer", writer.run(stop));
    }
    tasks.supervise(shutdown).await
}

impl Tasks {
    fn spawn(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.set.spawn(async move {
            task.await;
            name
        });
    }

    /// Registers both resources, each as soon as the node offers a device of that resource.
    ///
    /// Returns the registration state of device memory.
    fn register(
        &mut self,
        config: &Config,
        node: NodeHandle,
        updates: DeviceUpdates,
        metrics: &Metrics,
    ) -> watch::Receiver<Registration> {
        let DeviceUpdates { device, managed } = updates;
        let node = Arc::new(node);
        let mut register_resource = |resource: Resource, devices: watch::Receiver<Devices>| {
            let name = resource.name(config.resources.quantum).to_owned();
            let service = PluginService {
                resource,
                allocator: node.clone(),
                devices: devices.clone(),
            };
            let (lifecycle, registration) =
                Lifecycle::new(&config.kubelet.device_plugin_dir, name, service);
            self.spawn(
                "registration",
                register_when_offered(lifecycle, devices, self.stop.clone()),
            );
            self.spawn(
                "registration counter",
                count_registrations(
                    registration.clone(),
                    resource,
                    metrics.clone(),
                    self.stop.clone(),
                ),
            );
            registration
        };
        register_resource(Resource::ManagedMemory, managed);
        register_resource(Resource::DeviceMemory, device)
    }

    /// Serves metrics and probes.
    async fn serve(&mut self, config: &Config, sources: Sources) -> Result<(), AgentError> {
        let listeners = Listeners::bind(config.http_listen, config.http_probes).await?;
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
        while let Some(ended) = self.set.join_next().await {
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

/// A resolver for the extended resources under the names that pods request.
fn pod_resolver(config: &Config, client: Option<Client>) -> PodResolver {
    let quantum = config.resources.quantum;
    let named = |resource: Resource| (resource, resource.name(quantum).to_owned());
    PodResolver {
        device_plugin_dir: config.kubelet.device_plugin_dir.clone(),
        resource_names: [Resource::DeviceMemory, Resource::ManagedMemory]
            .map(named)
            .to_vec(),
        pod_resources: PodResourcesClient::new(&config.kubelet.pod_resources_socket),
        client,
    }
}

fn sessions(
    config: &Config,
    nvml: nvml::NvmlHandle,
    desk: LeaseHandle,
    living: watch::Receiver<LiveLeases>,
) -> Arc<Sessions> {
    let membership = Arc::new(CgroupResolver::new(config.paths.proc.clone()));
    let sessions = Sessions::new(config.paths.run_dir.clone(), Arc::new(nvml), membership);
    let sessions = sessions.with_leases(desk, living);
    // Sizes measured by earlier versions of the agent came from tenants: they lie in the state
    // directory.
    Arc::new(sessions.with_context_sizes(config.paths.run_dir.join("contexts.json")))
}

/// The service for retained memory. Where the feature is off, the service refuses every request.
fn lease_service(
    config: &Config,
    key: NodeKey,
    notes: Commands,
    sessions: Arc<Sessions>,
    living: watch::Sender<LiveLeases>,
    status: watch::Sender<RetainedStatus>,
    drain: watch::Receiver<DrainState>,
) -> Result<LeaseService, AgentError> {
    let folder = config.paths.run_dir.join("kept");
    let beside = || {
        let own = std::env::current_exe().unwrap_or_default();
        own.with_file_name("bursar-provisioner")
    };
    let program = Program {
        path: config.retained.provisioner.clone().unwrap_or_else(beside),
        driver: config.driver.clone(),
        libraries: folder.join("lib"),
    };
    let fdstore = config
        .retained
        .enabled
        .then(|| config.retained.fdstore_socket.clone());
    Ok(LeaseService {
        commands: notes,
        store_events: fdstore
            .map(fdstore_client::start)
            .transpose()
            .map_err(AgentError::Thread)?,
        sessions,
        membership: Arc::new(CgroupResolver::new(config.paths.proc.clone())),
        provisioners: Arc::new(Provisioners::new(program.clone())),
        program,
        scrub_cache: ScrubCache::load(Checkpoint::new(folder.join("scrubbed.json"))),
        lease_ids: LeaseIds::new(SystemTime::now()),
        key,
        live_leases: living,
        drain,
        released_gpus: watch::Sender::default(),
        status,
    })
}

async fn recover_allocator(
    config: &Config,
    identities: &PodResolver,
    sessions: Arc<Sessions>,
    desk: LeaseHandle,
    metrics: NodeMetrics,
) -> Result<NodeAllocator<OsHost>, HostError> {
    let host = OsHost::new(config, sessions, desk)?;
    let found = host.survey();
    let kubelet = identities
        .read_device_checkpoint()
        .await
        .unwrap_or_else(|error| {
            warn!(%error, "failed to read the kubelet's device checkpoint at the start");
            Default::default()
        });
    let pods = PodCgroups::new(config.paths.cgroup_root.clone());
    let mut core = NodeAllocator::new(config.resources, clock::boot_id(), host, pods, metrics);
    core.recover(found, &kubelet.entries, clock::now()).await;
    if !config.allow_unscrubbed {
        core.set_scrubbed_gpus(BTreeSet::new(), clock::now()).await;
    }
    Ok(core)
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
