//! Accepts the agent's registrations, and registers the same resources with the kubelet.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bursar_kubelet::api::deviceplugin::registration_server::{self, RegistrationServer};
use bursar_kubelet::api::deviceplugin::{Empty, KUBELET_SOCKET, RegisterRequest, VERSION};
use bursar_kubelet::devices::Devices;
use bursar_kubelet::lifecycle::{Lifecycle, Registration};
use bursar_kubelet::server::PluginService;
use bursar_ledger::units::Resource;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};
use tracing::{info, warn};

use crate::agent::{self, AgentLink, Forwarder};
use crate::state::{self, Offer, Offers, Registrations};

/// The most resources of a node. An agent has two, and two more after a change of the quantum.
const MAX_RESOURCES: usize = 8;

/// Where the relay meets its peers, and how long it waits for an agent.
#[derive(Debug, Clone)]
pub struct RelayOptions {
    /// The kubelet's plugin directory.
    pub kubelet_dir: PathBuf,
    /// The directory in which the relay is the agent's kubelet; only root may enter it.
    pub dir: PathBuf,
    /// The time for which PreStartContainer waits for an agent.
    pub away_timeout: Duration,
    /// The relay withdraws a resource after this time without an agent.
    pub withdraw_after: Duration,
}

/// The reason why the relay cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// The relay's directory or its socket cannot be used.
    #[error("failed to listen on {path}: {source}")]
    Listen {
        /// The socket.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The server of registrations ended.
    #[error("failed to serve registrations: {0}")]
    Serve(#[from] tonic::transport::Error),
}

/// A resource that an agent has registered.
#[derive(Debug)]
struct RelayedResource {
    link: watch::Sender<AgentLink>,
    devices: watch::Sender<Devices>,
    registration: watch::Receiver<Registration>,
    /// Ends the registration with the kubelet.
    withdraw: CancellationToken,
}

#[derive(Debug)]
struct Relay {
    options: RelayOptions,
    resources: Mutex<BTreeMap<String, RelayedResource>>,
    /// The tasks of the resources.
    tasks: Mutex<JoinSet<()>>,
    /// The number of the next registration by an agent.
    next: AtomicU64,
    shutdown: CancellationToken,
}

/// Serves until `shutdown`.
///
/// # Errors
/// [`RelayError`] if the relay cannot listen.
pub async fn run(options: RelayOptions, shutdown: CancellationToken) -> Result<(), RelayError> {
    let listener = listen(&options.dir)?;
    let relay = Arc::new(Relay {
        options,
        resources: Mutex::default(),
        tasks: Mutex::default(),
        next: AtomicU64::default(),
        shutdown: shutdown.clone(),
    });
    relay.restore();
    tonic::transport::Server::builder()
        .add_service(RegistrationServer::new(RegistrationService(relay.clone())))
        .serve_with_incoming_shutdown(
            UnixListenerStream::new(listener),
            shutdown.cancelled_owned(),
        )
        .await?;
    let tasks = std::mem::take(&mut *lock(&relay.tasks));
    tasks.join_all().await;
    Ok(())
}

/// Removes every socket of the directory, as the kubelet does at its start: a living agent then
/// registers again.
fn listen(dir: &Path) -> Result<UnixListener, RelayError> {
    let path = dir.join(KUBELET_SOCKET);
    let failed = |source| RelayError::Listen {
        path: path.clone(),
        source,
    };
    // The agent trusts each peer in the directory.
    std::fs::set_permissions(dir, Permissions::from_mode(0o700)).map_err(failed)?;
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_type().map_err(failed)?.is_socket() {
            std::fs::remove_file(entry.path()).map_err(failed)?;
        }
    }
    UnixListener::bind(&path).map_err(failed)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Relay {
    /// Registers the device lists of the relay before.
    fn restore(self: &Arc<Self>) {
        let offers = state::load_offers(&self.options.dir).unwrap_or_else(|error| {
            warn!(%error, "failed to read the last device lists; an agent sends them again");
            Offers::new()
        });
        for (name, offer) in offers.into_iter().take(MAX_RESOURCES) {
            if let Some(devices) = offer.devices() {
                info!(resource = name, devices = devices.len(), "offered again");
                let away = AgentLink::Away(Instant::now());
                let resource = self.start_resource(&name, away, devices);
                lock(&self.resources).insert(name, resource);
            }
        }
    }

    /// Follows the plugin of a new registration, in place of the one before.
    fn follow(self: &Arc<Self>, name: String, resource: Resource, channel: Channel) {
        let (relay, followed) = (self.clone(), channel.clone());
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let task = async move {
            let follow = agent::follow(followed, resource, |devices| {
                relay.accept(&name, number, &channel, devices)
            });
            let ended = relay.shutdown.run_until_cancelled(follow).await;
            if let Some(Err(status)) = ended {
                info!(resource = name, %status, "the agent's device list ended");
            }
            relay.mark_away(&name, number);
        };
        self.spawn(task);
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = lock(&self.tasks);
        // Ended tasks would add up.
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }

    /// Takes a device list; returns false if a later registration has replaced the plugin.
    fn accept(
        self: &Arc<Self>,
        name: &str,
        number: u64,
        channel: &Channel,
        devices: Devices,
    ) -> bool {
        let link = AgentLink::Up(number, channel.clone());
        let mut resources = lock(&self.resources);
        match resources.get(name) {
            Some(known) => {
                let linked = known.link.borrow().number();
                if linked > Some(number) {
                    return false;
                }
                known.devices.send_replace(devices);
                if linked != Some(number) {
                    known.link.send_replace(link);
                }
            }
            None => {
                // A change of the quantum changes the resource's name.
                let resource = devices.resource();
                let is_renamed = |_: &String, known: &mut RelayedResource| {
                    known.devices.borrow().resource() == resource
                };
                for (former, known) in resources.extract_if(.., is_renamed) {
                    info!(
                        resource = former,
                        "withdrawn: the agent offers {name} instead"
                    );
                    known.withdraw.cancel();
                }
                let started = self.start_resource(name, link, devices);
                resources.insert(name.to_owned(), started);
            }
        }
        self.save_offers(&resources);
        true
    }

    /// Registers a resource with the kubelet until it is withdrawn.
    fn start_resource(
        self: &Arc<Self>,
        name: &str,
        link: AgentLink,
        devices: Devices,
    ) -> RelayedResource {
        let resource = devices.resource();
        let (link, linked) = watch::channel(link);
        let (devices, offered) = watch::channel(devices);
        let service = PluginService {
            resource,
            allocator: Arc::new(Forwarder {
                link: linked.clone(),
                away_timeout: self.options.away_timeout,
            }),
            devices: offered,
        };
        let (lifecycle, registration) =
            Lifecycle::new(&self.options.kubelet_dir, name.to_owned(), service);
        let withdraw = self.shutdown.child_token();
        self.spawn(lifecycle.run(withdraw.clone()));
        let (relay, name) = (self.clone(), name.to_owned());
        let (watched, stop) = (registration.clone(), withdraw.clone());
        self.spawn(async move { relay.watch_over(&name, linked, watched, stop).await });
        RelayedResource {
            link,
            devices,
            registration,
            withdraw,
        }
    }

    /// Reports the resource's registration, and withdraws the resource once no agent has come back
    /// for long.
    async fn watch_over(
        &self,
        name: &str,
        mut link: watch::Receiver<AgentLink>,
        mut registration: watch::Receiver<Registration>,
        withdraw: CancellationToken,
    ) {
        loop {
            self.save_registrations();
            let away = match *link.borrow_and_update() {
                AgentLink::Away(since) => Some(since + self.options.withdraw_after),
                AgentLink::Up(..) => None,
            };
            let expired = async {
                match away {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = withdraw.cancelled() => return,
                // Both channels close only with the resource.
                Ok(()) = link.changed() => {}
                Ok(()) = registration.changed() => { registration.mark_unchanged(); }
                () = expired => if self.withdraw(name) {
                    return self.save_registrations();
                },
            }
        }
    }

    /// Withdraws a resource, unless an agent has come back at the last moment.
    fn withdraw(&self, name: &str) -> bool {
        let mut resources = lock(&self.resources);
        let is_away = |known: &RelayedResource| known.link.borrow().number().is_none();
        if !resources.get(name).is_some_and(is_away) {
            return false;
        }
        warn!(
            resource = name,
            "no agent has come back: the resource is withdrawn"
        );
        if let Some(withdrawn) = resources.remove(name) {
            withdrawn.withdraw.cancel();
        }
        self.save_offers(&resources);
        true
    }

    fn mark_away(&self, name: &str, number: u64) {
        if let Some(known) = lock(&self.resources).get(name)
            && known.link.borrow().number() == Some(number)
        {
            known.link.send_replace(AgentLink::Away(Instant::now()));
        }
    }

    fn save_offers(&self, resources: &BTreeMap<String, RelayedResource>) {
        let offers = resources
            .iter()
            .map(|(name, known)| (name.clone(), Offer::from(&*known.devices.borrow())));
        if let Err(error) = state::save_offers(&self.options.dir, &offers.collect()) {
            warn!(%error, "failed to save the device lists: a restart of the relay needs an agent");
        }
    }

    fn save_registrations(&self) {
        let resources = lock(&self.resources);
        let registrations: Registrations = resources
            .iter()
            .map(|(name, known)| (name.clone(), state::reason(&known.registration.borrow())))
            .collect();
        if let Err(error) = state::save_registrations(&self.options.dir, &registrations) {
            warn!(%error, "failed to save the registrations: the agent reports older ones");
        }
    }

    /// Checks a registration, and connects to its plugin.
    async fn register(self: &Arc<Self>, request: RegisterRequest) -> Result<(), Status> {
        let RegisterRequest {
            version,
            endpoint,
            resource_name: name,
            options: _,
        } = request;
        if version != VERSION {
            return Err(Status::invalid_argument(format!(
                "failed to register {name}: version {version} is not {VERSION}"
            )));
        }
        let resource = Resource::of_name(&name).ok_or_else(|| {
            Status::invalid_argument(format!("failed to register {name}: unknown resource"))
        })?;
        if Path::new(&endpoint).file_name() != Some(endpoint.as_ref()) {
            return Err(Status::invalid_argument(format!(
                "failed to register {name}: {endpoint:?} is not the name of a socket"
            )));
        }
        let is_full = {
            let resources = lock(&self.resources);
            !resources.contains_key(&name) && resources.len() >= MAX_RESOURCES
        };
        if is_full {
            return Err(Status::resource_exhausted(format!(
                "failed to register {name}: the relay has {MAX_RESOURCES} resources"
            )));
        }
        let channel = agent::dial(&self.options.dir.join(&endpoint)).await?;
        info!(resource = name, endpoint, "an agent registered");
        self.follow(name, resource, channel);
        Ok(())
    }
}

struct RegistrationService(Arc<Relay>);

#[tonic::async_trait]
impl registration_server::Registration for RegistrationService {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        self.0.register(request.into_inner()).await?;
        Ok(Response::new(Empty {}))
    }
}
