//! The agent's life: starts its parts, and ends when it is told to or when one of them ends.

pub mod http;
mod publisher;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bursar_http::Listeners;
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

use crate::agent::http::{Pulse, Sources};
use crate::checkpoint::Checkpoint;
use crate::clock;
use crate::config::Config;
use crate::enforcement::audit::Auditor;
use crate::enforcement::driver_limits::{self, Limits};
use crate::enforcement::faults;
use crate::gpu::drain::{self, Drain};
use crate::gpu::generations::Generations;
use crate::gpu::health::Policy;
use crate::gpu::nvml::{self, Pace};
use crate::gpu_node::Events;
use crate::gpu_node::api::ApiObject;
use crate::gpu_node::publish::{Publisher, Rate};
use crate::gpu_node::quota_overrides::{self, Ordered};
use crate::gpu_node::spec_watch::{self, Seen, Told};
use crate::kubelet::devices::Devices;
use crate::kubelet::lifecycle::{Lifecycle, Registration};
use crate::kubelet::pod_resources::PodResourcesClient;
use crate::kubelet::server::Service;
use crate::metrics::Metrics;
use crate::node::actor::{Followed, Node, Offers, Voice, actor};
use crate::node::allocator::Core;
use crate::node::host::{HostError, OsHost, find_driver};
use crate::node::pod_cgroups::Pods;
use crate::node::pod_resolver::Identities;
use crate::retained::fdstore_client;
use crate::retained::handle::{Desk, Living, Notes};
use crate::retained::lease_ids::Numbers;
use crate::retained::provisioners::{Program, Workers};
use crate::retained::scrub_check::Verdicts;
use crate::retained::service::Keeper;
use crate::retained::status::KeptStatus;
use crate::retained::tokens::key;
use crate::retained::tokens::seal::{NameTooLong, NodeKey};
use crate::sessions::{Cgroups, Sessions};
use crate::units::Resource;
use publisher::Reporter;

/// How long the API server may take until it begins to answer.
const API_SILENCE: Duration = Duration::from_secs(20);
/// How long it may be silent within an answer: a quiet watch lasts 200 s.
const WATCH_SILENCE: Duration = Duration::from_secs(210);

/// What the agent is run with besides its configuration.
#[derive(Clone)]
pub struct Surroundings {
    /// This node's name in Kubernetes.
    pub node: String,
    /// The API server; without one everything but the status works.
    pub client: Option<Client>,
    /// How often NVML is asked.
    pub pace: Pace,
    /// How quickly a GPU's health changes.
    pub health: Policy,
}

impl Surroundings {
    /// As in production, on the node of this name.
    pub fn new(node: String, client: Option<Client>) -> Self {
        Self {
            node,
            client,
            pace: Pace::default(),
            health: Policy::default(),
        }
    }
}

/// Why the agent ended other than by request.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The run folder cannot be used.
    #[error(transparent)]
    Host(#[from] HostError),
    /// No node can have this name.
    #[error("--node-name: {0}")]
    Node(#[from] NameTooLong),
    /// A thread could not be started.
    #[error("start a thread: {0}")]
    Thread(#[source] std::io::Error),
    /// Nobody could be answered about metrics and health.
    #[error("http.listen, http.probes: {0}")]
    Listen(#[from] bursar_http::ListenError),
    /// A part ended early.
    #[error("the {0} ended early")]
    Ended(&'static str),
    /// A part panicked.
    #[error("a part of the agent failed: {0}")]
    Failed(#[from] tokio::task::JoinError),
}

/// The parts that live as long as the agent.
struct Parts {
    running: JoinSet<&'static str>,
    stop: CancellationToken,
}

/// Runs the agent until `shutdown`.
pub async fn run(
    config: Config,
    around: Surroundings,
    shutdown: CancellationToken,
) -> Result<(), AgentError> {
    let Surroundings {
        node,
        client,
        pace,
        health,
    } = around;
    let driver = config.driver.clone();
    let library = Arc::new(move || -> Result<PathBuf, String> {
        find_driver(&driver)
            .map(|driver| driver.libnvml.path)
            .map_err(|error| error.to_string())
    });
    let generations = |folder: &Path| Checkpoint::new(folder.join("generations.json"));
    let (run, disk) = (&config.paths.run_dir, &config.paths.state_dir);
    let generations = Generations::load(generations(run), generations(disk), clock::boot_id())
        .map_err(AgentError::Thread)?;
    let remembered = generations.remembered();
    let drained = remembered.iter().filter(|(_, gpu)| gpu.memory.drained);
    let drain = drain::begin(drained.map(|(gpu, _)| gpu.clone()).collect());
    let (inventory, xids, nvml) = nvml::start(library, pace, health, remembered, drain.subscribe());
    let metrics = Metrics::new();
    let (events, outbox) = Events::new(metrics.clone());
    let identities = identities(&config, client.clone());
    let stop = shutdown.child_token();
    let mut parts = Parts {
        running: JoinSet::new(),
        stop: stop.clone(),
    };
    let (desk, notes) = Desk::open();
    let (living, of_vault) = watch::channel(Living::new());
    let sessions = sessions(&config, nvml.clone(), desk.clone(), of_vault);
    let (status, kept) = watch::channel(KeptStatus::default());
    // Before anything is recovered: what ended meanwhile may have kept leases.
    let secret = key::load(&config.paths.run_dir.join(key::FILE));
    let keeper = keeper(
        &config,
        NodeKey::new(node.clone(), secret)?,
        notes,
        sessions.clone(),
        living,
        status,
        drain.subscribe(),
    )?;
    let let_go = keeper.let_go.subscribe();
    let stuck = keeper.workers.stuck();
    parts.start("kept memory", keeper.run(stop.clone()));
    let core = recovered(
        &config,
        &identities,
        sessions.clone(),
        desk,
        metrics.clone(),
    )
    .await?;
    let voice = Voice {
        events: events.clone(),
        metrics: metrics.clone(),
    };
    let (orders, told) = watch::channel(None);
    let (withhold, withheld) = watch::channel(BTreeMap::new());
    let (actor, allocator, offers, snapshots, pulse) = actor(
        core,
        config.resources,
        identities,
        config.bind_wait,
        Followed {
            inventory: inventory.clone(),
            stuck,
            drain: drain.subscribe(),
            kept: (!config.allow_unscrubbed).then(|| kept.clone()),
            orders: told.clone(),
            withheld,
        },
        generations,
        voice,
    );
    parts.start("node", actor.run());
    let (ordering, draining) = (told.clone(), drain.subscribe());
    let drains = drain::Around {
        proc: config.paths.proc.clone(),
        sessions: sessions.clone(),
        orders: told.clone(),
        inventory,
        let_go,
    };
    parts.start("drain", drain::run(drains, drain, stop.clone()));
    let (set, limits) = watch::channel(Limits::new());
    let limiter = driver_limits::run(
        nvml.clone(),
        sessions.clone(),
        snapshots.clone(),
        set,
        stop.clone(),
    );
    parts.start("driver limits", limiter);
    let (auditor, audited) = Auditor::new(
        &config,
        nvml,
        sessions.clone(),
        snapshots.clone(),
        limits.clone(),
        events.clone(),
        metrics.clone(),
    )
    .map_err(AgentError::Thread)?;
    let auditor = auditor.withholding(withhold);
    parts.start("audit", auditor.run(config.clone(), stop.clone()));
    let (acknowledge, ordered) = watch::channel(Ordered::default());
    let (open, faults) = watch::channel(Vec::new());
    // Without an API server nobody is ever told.
    let (unheard, alone) = watch::channel(Some(Instant::now()));
    let around = faults::Around {
        paths: config.paths.clone(),
        sessions: sessions.clone(),
        snapshots: snapshots.clone(),
        orders: told.clone(),
        xids,
        unheard: alone,
        events: events.clone(),
        metrics: metrics.clone(),
    };
    parts.start("poison", faults::run(around, open, stop.clone()));
    let resize = quota_overrides::run(sessions, snapshots.clone(), told, acknowledge, stop.clone());
    parts.start("resize", resize);
    let registration = parts.register(&config, allocator, offers, &metrics);
    let reporter = Reporter {
        config: config.resources,
        boot: clock::boot_id(),
        snapshots,
        registration,
        audited,
        limits,
        ordered,
        faults,
        kept,
        node: node.clone(),
        client: client.clone(),
        events,
        metrics: metrics.clone(),
    };
    let (reporting, reports, readiness) = reporter.start(stop.clone());
    parts.start("reporter", reporting);
    parts
        .serve(
            &config,
            Sources {
                metrics: metrics.clone(),
                health: Pulse(pulse),
                readiness,
            },
        )
        .await?;
    if let Some(client) = client {
        parts.start(
            "events",
            outbox.run(client.clone(), node.clone(), metrics.clone(), stop.clone()),
        );
        let (seen, sees) = watch::channel(Seen::default());
        let history = History::default();
        let told = Told {
            orders,
            seen,
            metrics: metrics.clone(),
        };
        parts.start(
            "orders",
            spec_watch::run(
                client.clone(),
                node.clone(),
                history.clone(),
                told,
                stop.clone(),
            ),
        );
        let publisher = Publisher {
            object: ApiObject::new(client, node, history),
            reports,
            seen: sees,
            orders: ordering,
            drain: draining,
            rate: Rate::default(),
            unheard,
            metrics,
        };
        parts.start("status", publisher.run(stop));
    }
    parts.supervise(shutdown).await
}

impl Parts {
    fn start(&mut self, name: &'static str, life: impl Future<Output = ()> + Send + 'static) {
        self.running.spawn(async move {
            life.await;
            name
        });
    }

    /// Registers both resources, each once it has a token; what the kubelet thinks of device memory.
    fn register(
        &mut self,
        config: &Config,
        node: Node,
        offers: Offers,
        metrics: &Metrics,
    ) -> watch::Receiver<Registration> {
        let Offers { device, managed } = offers;
        let node = Arc::new(node);
        let mut life = |resource: Resource, devices: watch::Receiver<Devices>| {
            let name = resource.name(config.resources.quantum).to_owned();
            let service = Service {
                resource,
                allocator: node.clone(),
                devices: devices.clone(),
            };
            let (lifecycle, registration) =
                Lifecycle::new(&config.kubelet.device_plugin_dir, name, service);
            self.start(
                "registration",
                register(lifecycle, devices, self.stop.clone()),
            );
            self.start(
                "registration counter",
                count(
                    registration.clone(),
                    resource,
                    metrics.clone(),
                    self.stop.clone(),
                ),
            );
            registration
        };
        life(Resource::ManagedMemory, managed);
        life(Resource::DeviceMemory, device)
    }

    /// Serves metrics and health.
    async fn serve(&mut self, config: &Config, sources: Sources) -> Result<(), AgentError> {
        let listeners = Listeners::bind(config.http_listen, config.http_probes).await?;
        let address = |listener: &TcpListener| listener.local_addr().ok();
        if let Some((address, probes)) = address(&listeners.metrics).zip(address(&listeners.probes))
        {
            info!(%address, %probes, "metrics and probes");
        }
        let served = bursar_http::serve(listeners, sources, self.stop.clone());
        self.start("http server", served);
        Ok(())
    }

    /// Awaits the first part's end; where nobody asked for it, all parts end and it is an error.
    async fn supervise(mut self, shutdown: CancellationToken) -> Result<(), AgentError> {
        let mut result = Ok(());
        while let Some(ended) = self.running.join_next().await {
            if !shutdown.is_cancelled() && result.is_ok() {
                result = match ended {
                    Ok(name) => Err(AgentError::Ended(name)),
                    Err(error) => Err(AgentError::Failed(error)),
                };
            }
            self.stop.cancel();
        }
        info!("stopped");
        result
    }
}

/// Our resources under the names that pods ask for, and whom to ask about their holders.
fn identities(config: &Config, client: Option<Client>) -> Identities {
    let quantum = config.resources.quantum;
    let named = |resource: Resource| (resource, resource.name(quantum).to_owned());
    Identities {
        device_plugin_dir: config.kubelet.device_plugin_dir.clone(),
        names: [Resource::DeviceMemory, Resource::ManagedMemory]
            .map(named)
            .to_vec(),
        pod_resources: PodResourcesClient::new(&config.kubelet.pod_resources_socket),
        client,
    }
}

fn sessions(
    config: &Config,
    nvml: nvml::NvmlHandle,
    desk: Desk,
    living: watch::Receiver<Living>,
) -> Arc<Sessions> {
    let membership = Arc::new(Cgroups::new(config.paths.proc.clone()));
    let sessions = Sessions::new(config.paths.run_dir.clone(), Arc::new(nvml), membership);
    let sessions = sessions.keeping(desk, living);
    // Not in the state's folder, where agents before kept what tenants had said.
    Arc::new(sessions.charging_contexts(config.paths.run_dir.join("contexts.json")))
}

/// What keeps memory, or where that is switched off what says so.
fn keeper(
    config: &Config,
    key: NodeKey,
    notes: Notes,
    sessions: Arc<Sessions>,
    living: watch::Sender<Living>,
    status: watch::Sender<KeptStatus>,
    drain: watch::Receiver<Drain>,
) -> Result<Keeper, AgentError> {
    let folder = config.paths.run_dir.join("kept");
    let beside = || {
        let own = std::env::current_exe().unwrap_or_default();
        own.with_file_name("bursar-worker")
    };
    let program = Program {
        path: config.kept.worker.clone().unwrap_or_else(beside),
        driver: config.driver.clone(),
        libraries: folder.join("lib"),
    };
    let vault = config
        .kept
        .enabled
        .then(|| config.kept.vault_socket.clone());
    let state = &config.paths.state_dir;
    Ok(Keeper {
        notes,
        news: vault
            .map(fdstore_client::start)
            .transpose()
            .map_err(AgentError::Thread)?,
        sessions,
        membership: Arc::new(Cgroups::new(config.paths.proc.clone())),
        workers: Arc::new(Workers::new(program.clone())),
        program,
        verdicts: Verdicts::of(Checkpoint::new(folder.join("scrubbed.json"))),
        numbers: Numbers::of(Checkpoint::new(state.join("leases.json"))),
        key,
        living,
        drain,
        let_go: watch::Sender::default(),
        status,
    })
}

async fn recovered(
    config: &Config,
    identities: &Identities,
    sessions: Arc<Sessions>,
    desk: Desk,
    metrics: Metrics,
) -> Result<Core<OsHost>, HostError> {
    let host = OsHost::new(config, sessions, desk)?;
    let found = host.survey();
    let kubelet = identities.kubelet().await.unwrap_or_else(|error| {
        warn!(%error, "the kubelet's checkpoint tells nothing");
        Default::default()
    });
    let pods = Pods::new(config.paths.cgroup_root.clone());
    let mut core = Core::new(config.resources, clock::boot_id(), host, pods, metrics);
    core.recover(found, &kubelet.held, clock::now()).await;
    if !config.allow_unscrubbed {
        core.set_cleared(BTreeSet::new(), clock::now()).await;
    }
    Ok(core)
}

/// Registers a resource once it has a token, for as long as the agent lives.
async fn register(
    lifecycle: Lifecycle<Node>,
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

/// Counts the times that the kubelet accepted a resource.
async fn count(
    mut registration: watch::Receiver<Registration>,
    resource: Resource,
    metrics: Metrics,
    stop: CancellationToken,
) {
    while let Some(Ok(())) = stop.run_until_cancelled(registration.changed()).await {
        if registration.borrow_and_update().is_registered() {
            metrics.registered(resource);
        }
    }
    // Its lifecycle may end before the agent is told to: that is the lifecycle's to report.
    stop.cancelled().await;
}

/// The API server of the cluster that the agent's pod is in, or that KUBECONFIG names; no request to it waits
/// for ever.
pub async fn api_server() -> Option<Client> {
    let client = kube::Config::infer()
        .await
        .map_err(kube::Error::InferConfig)
        .and_then(|config| hurried(config, API_SILENCE));
    client
        .inspect_err(
            |error| warn!(%error, "no api server: no status, and every pod has priority 0"),
        )
        .ok()
}

/// A client by `config` with a deadline for each step of a request. The deadline of an answer's beginning is not that
/// of its body, for a watch may have nothing to tell.
fn hurried(mut config: kube::Config, silence: Duration) -> kube::Result<Client> {
    config.connect_timeout = Some(silence);
    config.write_timeout = Some(silence);
    config.read_timeout = Some(WATCH_SILENCE);
    let begins = MapFutureLayer::new(move |answer: Answer| async move {
        let answer: Result<_, BoxError> = timeout(silence, answer).await?;
        answer
    });
    Ok(ClientBuilder::try_from(config)?.with_layer(&begins).build())
}

/// An answer of kube's client to come.
type Answer = BoxFuture<'static, Result<::http::Response<Box<DynBody>>, BoxError>>;

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
        hurried(config, SILENCE).unwrap()
    }

    #[tokio::test]
    async fn request_ends_when_the_api_server_says_nothing() {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = client_of(&silent).await;
        let answer = timeout(Duration::from_secs(10), client.apiserver_version()).await;
        assert!(answer.expect("the request has a deadline").is_err());
    }

    #[tokio::test]
    async fn watch_goes_on_while_it_has_nothing_to_tell() {
        let quiet = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = client_of(&quiet).await;
        let server = tokio::spawn(async move {
            let (mut stream, _) = quiet.accept().await.unwrap();
            let _ = stream.read(&mut [0; 4096]).await.unwrap();
            let begins = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
            stream.write_all(begins).await.unwrap();
            std::future::pending::<()>().await
        });
        let nodes = crate::gpu_node::api::objects(client);
        let params = kube::api::WatchParams::default();
        let begun = nodes.watch(&params, "1");
        let begun = timeout(Duration::from_secs(10), begun).await.unwrap();
        let mut events = std::pin::pin!(begun.unwrap());
        let told = timeout(10 * SILENCE, events.next()).await;
        assert!(told.is_err(), "{told:?}");
        server.abort();
    }
}
