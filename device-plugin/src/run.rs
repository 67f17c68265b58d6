//! Starts the agent's tasks and stops all of them on shutdown, or when one task ends.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bursar_apiserver::Events;
use bursar_apiserver::gpu_node::GpuNodeClient;
use bursar_config::Config;
use bursar_enforcement::drain::{self, DrainInputs};
use bursar_enforcement::faults::FaultInputs;
use bursar_gpu::Inventory;
use bursar_gpu::drain::DrainState;
use bursar_gpu::generations::GpuGenerations;
use bursar_gpu::health::{HealthThresholds, UnhealthyReason};
use bursar_gpu::nvml::{self, NvmlHandle, PollIntervals};
use bursar_gpu::uvm::UvmModule;
use bursar_gpu::xid::RecentXids;
use bursar_gpu_node::node_report::ManagedOffer;
use bursar_gpu_node::publish::{Publisher, Rate};
use bursar_host::checkpoint::Checkpoint;
use bursar_host::clock;
use bursar_host::driver_files::Driver;
use bursar_ledger::units::{Bytes, GpuUuid};
use bursar_node::actor::{Inputs, Snapshot};
use bursar_node::host::HostError;
use bursar_retained::provisioners::Provisioners;
use bursar_retained::status::RetainedStatus;
use bursar_retained::supervision::Supervisor;
use bursar_retained::tokens::NodePublicKey;
use bursar_retained::tokens::seal::NameTooLong;
use bursar_sessions::Sessions;
use bursar_sessions::lease_handle::{LeaseHandle, LiveLeases};
use kube::Client;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

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
    refused_by_cuda: watch::Receiver<BTreeSet<GpuUuid>>,
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
        refused_by_cuda: tenants.refused_by_cuda,
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
