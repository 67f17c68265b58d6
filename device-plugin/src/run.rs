//! Starts the agent's tasks and stops all of them on shutdown, or when one task ends.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bursar_apiserver::ContextPolicies;
use bursar_apiserver::{Events, ParsedSpec};
use bursar_config::Config;
use bursar_enforcement::drain;
use bursar_gpu::Inventory;
use bursar_gpu::cuda_fitness::CudaFitnesses;
use bursar_gpu::drain::DrainState;
use bursar_gpu::generations::GpuGenerations;
use bursar_gpu::health::HealthThresholds;
use bursar_gpu::nvml::{self, NvmlHandle, PollIntervals};
use bursar_gpu::xid::RecentXids;
use bursar_gpu_node::publish::{Publisher, Rate};
use bursar_host::checkpoint::Checkpoint;
use bursar_host::clock;
use bursar_host::driver_files::Driver;
use bursar_ledger::units::GpuUuid;
use bursar_node::actor::Snapshot;
use bursar_node::host::HostError;
use bursar_retained::status::RetainedStatus;
use bursar_retained::tokens::NodePublicKey;
use bursar_retained::tokens::seal::NameTooLong;
use bursar_sessions::Sessions;
use bursar_sessions::lease_handle::{LeaseHandle, LiveLeases};
use bursar_supervision::provisioners::Provisioners;
use kube::Client;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::metrics::Metrics;
use crate::publisher::StatusPublisher;

mod enforcement;
mod kubelet;
mod publishing;

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
    /// The spec of the node's `GpuNode`; none until the agent has read the object.
    spec: watch::Receiver<Option<ParsedSpec>>,
    /// The context policies of namespaces; none until the agent has read them.
    policies: watch::Sender<Option<ContextPolicies>>,
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
    drain: watch::Receiver<DrainState>,
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
    scrubbed: watch::Receiver<BTreeSet<GpuUuid>>,
    released_gpus: watch::Receiver<BTreeSet<GpuUuid>>,
    /// `None` where retained memory is off.
    supervised: Option<Supervised>,
    live_leases: watch::Receiver<LiveLeases>,
    token_key: NodePublicKey,
}

/// The provisioners that the agent keeps running.
struct Supervised {
    provisioners: Arc<Provisioners>,
    /// The results of their starts.
    fitness: watch::Sender<CudaFitnesses>,
}

/// Runs the agent until `shutdown`.
pub async fn run(
    config: Config,
    options: RunOptions,
    shutdown: CancellationToken,
) -> Result<(), AgentError> {
    let metrics = Metrics::new();
    let (events, event_sender) = Events::new(metrics.api.clone());
    let (gpus, generations, drain) = watch_gpus(&config, &options)?;
    let (spec_sender, spec) = watch::channel(None);
    let mut agent = Agent {
        config,
        node: options.node,
        client: options.client,
        spec,
        policies: watch::Sender::default(),
        metrics,
        events,
        tasks: JoinSet::new(),
        stop: shutdown.child_token(),
    };
    let (withheld_sender, withheld) = watch::channel(BTreeMap::new());
    // Without an API server the agent counts as disconnected from its start.
    let (disconnected_sender, disconnected_since) = watch::channel(Some(Instant::now()));

    // The lease service starts before recovery: pods that ended without an agent may own leases.
    let tenants = agent.start_lease_service(&gpus)?;
    let owners = agent.start_owner_check();
    let inputs = agent.node_inputs(&gpus, &tenants, &owners, withheld);
    let allocator = agent.recover_allocator(&tenants).await?;
    let (node, handle, updates) = agent.start_node(allocator, inputs, generations);
    agent.start_drain(drain, &gpus, &tenants);
    let limits = agent.start_driver_limits(&gpus, &tenants, &node);
    let audited = agent.start_audit(&gpus, &tenants, &node, &limits, withheld_sender)?;
    let computed = agent.start_compute(&gpus, &tenants, &node);
    let faults = agent.start_faults(&gpus, &tenants, &node, disconnected_since);
    let ordered = agent.start_quota_overrides(&tenants, &node);
    let registration = agent.register(handle, updates);
    agent.start_supervision(&gpus, &tenants, &registration);
    let (reports, readiness) = agent.start_publisher(StatusPublisher {
        config: agent.config.resources,
        unknown_keys: agent.config.unknown_keys.clone(),
        boot_id: clock::boot_id(),
        snapshots: node.snapshots,
        registration,
        audited,
        limits,
        computed,
        ordered,
        faults,
        retained: tenants.retained,
        owners,
        token_key: tenants.token_key,
        node: agent.node.clone(),
        client: agent.client.clone(),
        events: agent.events.clone(),
        metrics: agent.metrics.clone(),
    });
    agent.serve(node.heartbeat, readiness).await?;
    if let Some(client) = agent.client.clone() {
        let (api, observed) = agent.follow_api_server(client, event_sender, spec_sender);
        agent.start_writer(Publisher {
            api,
            reports,
            observed,
            spec: agent.spec.clone(),
            drain: gpus.drain,
            rate: Rate::default(),
            unreachable_since: disconnected_sender,
            metrics: agent.metrics.api.clone(),
        });
    }
    agent.supervise(shutdown).await
}

/// Starts NVML's processes with the generations and drains on record.
///
/// Returns what they report, the GPUs' generations, and the channel of the drain's state.
fn watch_gpus(
    config: &Config,
    options: &RunOptions,
) -> Result<(Gpus, GpuGenerations, watch::Sender<DrainState>), AgentError> {
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
    let gpus = Gpus {
        inventory,
        xids,
        nvml,
        drain: drain.subscribe(),
    };
    Ok((gpus, generations, drain))
}

impl Agent {
    fn spawn(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(async move {
            task.await;
            name
        });
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
