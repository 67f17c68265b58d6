//! The agent's life: starts its parts, and ends when it is told to or when one of them ends.

use std::path::PathBuf;
use std::sync::Arc;

use kube::Client;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::config::Config;
use crate::inventory::health::Policy;
use crate::inventory::nvml::{self, Pace};
use crate::kubelet::devices::Devices;
use crate::kubelet::lifecycle::Lifecycle;
use crate::kubelet::pod_resources::PodResourcesClient;
use crate::kubelet::server::Service;
use crate::node::actor::{Node, actor};
use crate::node::clock;
use crate::node::core::Core;
use crate::node::host::{HostError, OsHost, find_driver};
use crate::node::identity::Identities;
use crate::pods::Pods;
use crate::sessions::{Cgroups, Sessions};
use crate::units::Resource;

/// What the agent is run with besides its configuration.
#[derive(Clone, Default)]
pub struct Surroundings {
    /// The API server; without one everything but the status works.
    pub client: Option<Client>,
    /// How often NVML is asked.
    pub pace: Pace,
    /// How quickly a GPU's health changes.
    pub health: Policy,
}

/// Why the agent ended other than by request.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The run folder or the CDI folder cannot be used.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A thread could not be started.
    #[error("start the nvml thread: {0}")]
    Thread(#[source] std::io::Error),
    /// A part ended early.
    #[error("the {0} ended early")]
    Ended(&'static str),
    /// A part panicked.
    #[error("a part of the agent failed: {0}")]
    Failed(#[from] tokio::task::JoinError),
}

/// Runs the agent until `shutdown`.
pub async fn run(
    config: Config,
    around: Surroundings,
    shutdown: CancellationToken,
) -> Result<(), AgentError> {
    let driver = config.driver.clone();
    let library = Box::new(move || -> Result<PathBuf, String> {
        find_driver(&driver)
            .map(|driver| driver.libnvml.path)
            .map_err(|error| error.to_string())
    });
    let (inventory, nvml) =
        nvml::start(library, around.pace, around.health).map_err(AgentError::Thread)?;
    let names = names(&config);
    let identities = Identities {
        device_plugin_dir: config.kubelet.device_plugin_dir.clone(),
        names: names.clone(),
        pod_resources: PodResourcesClient::new(&config.kubelet.pod_resources_socket),
        client: around.client,
    };
    let membership = Arc::new(Cgroups::new(PathBuf::from("/proc")));
    let sessions = Arc::new(Sessions::new(
        config.paths.run_dir.clone(),
        Arc::new(nvml),
        membership,
    ));
    let core = recovered(&config, &identities, sessions).await?;
    let (actor, node, offers, _snapshots) = actor(
        core,
        config.resources,
        identities,
        config.bind_wait,
        inventory,
    );
    let mut parts = JoinSet::new();
    let stop = shutdown.child_token();
    parts.spawn(part("node", actor.run(stop.clone())));
    let node = Arc::new(node);
    for (resource, name) in names {
        let devices = match resource {
            Resource::DeviceMemory => offers.device.clone(),
            Resource::ManagedMemory => offers.managed.clone(),
        };
        let registered = register(
            config.kubelet.device_plugin_dir.clone(),
            resource,
            name,
            node.clone(),
            devices,
            stop.clone(),
        );
        parts.spawn(part("registration", registered));
    }
    drop((node, offers));
    supervise(parts, shutdown, stop).await
}

/// Awaits the first part's end; where nobody asked for it, all parts end and it is an error.
async fn supervise(
    mut parts: JoinSet<&'static str>,
    shutdown: CancellationToken,
    stop: CancellationToken,
) -> Result<(), AgentError> {
    let mut result = Ok(());
    while let Some(ended) = parts.join_next().await {
        if !shutdown.is_cancelled() && result.is_ok() {
            result = match ended {
                Ok(name) => Err(AgentError::Ended(name)),
                Err(error) => Err(AgentError::Failed(error)),
            };
        }
        stop.cancel();
    }
    info!("stopped");
    result
}

async fn part(name: &'static str, life: impl Future<Output = ()>) -> &'static str {
    life.await;
    name
}

/// Our resources under the names that pods ask for.
fn names(config: &Config) -> Vec<(Resource, String)> {
    let quantum = config.resources.quantum;
    [Resource::DeviceMemory, Resource::ManagedMemory]
        .map(|resource| (resource, resource.name(quantum)))
        .to_vec()
}

async fn recovered(
    config: &Config,
    identities: &Identities,
    sessions: Arc<Sessions>,
) -> Result<Core<OsHost>, HostError> {
    let host = OsHost::new(config, sessions)?;
    let found = host.survey();
    let kubelet = identities.kubelet().await.unwrap_or_else(|error| {
        warn!(%error, "the kubelet's checkpoint tells nothing");
        Default::default()
    });
    let pods = Pods::new(config.paths.cgroup_root.clone());
    let mut core = Core::new(config.resources, clock::boot_id(), host, pods);
    core.recover(found, &kubelet.held, clock::now()).await;
    Ok(core)
}

/// Registers a resource once it has a token, for as long as the agent lives.
async fn register(
    dir: PathBuf,
    resource: Resource,
    name: String,
    allocator: Arc<Node>,
    mut devices: watch::Receiver<Devices>,
    stop: CancellationToken,
) {
    let first = tokio::select! {
        first = devices.wait_for(|devices| !devices.is_empty()) => first.is_ok(),
        () = stop.cancelled() => false,
    };
    if first {
        let service = Service {
            resource,
            allocator,
            devices,
        };
        let (lifecycle, _registration) = Lifecycle::new(&dir, name, service);
        lifecycle.run(stop).await;
    }
}

/// The API server of the cluster that the agent's pod is in, or that KUBECONFIG names.
pub async fn api_server() -> Option<Client> {
    match Client::try_default().await {
        Ok(client) => Some(client),
        Err(error) => {
            warn!(%error, "no api server: no status, and every pod has priority 0");
            None
        }
    }
}
