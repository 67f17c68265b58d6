//! Keeps one resource registered with the kubelet while the agent runs.
//!
//! The state machine in [`registration`](super::registration) decides; this module observes, acts
//! and reports. The lifecycle has no lock while it registers: the server answers on its own tasks,
//! for the kubelet dials back before it answers.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::api::deviceplugin::registration_client::RegistrationClient;
use super::api::deviceplugin::{KUBELET_SOCKET, RegisterRequest, VERSION};
use super::connect::connect;
use super::dir_watch::{PluginDirWatch, WatchError, kubelet_socket};
use super::error_text::{error_chain, status_chain};
use super::in_flight::InFlightCount;
use super::plugin::{Allocator, plugin_options};
use super::registration::{Observation, OwnServer, StateMachine, Step};
use super::server::{self, PluginService, Server};

/// The poll interval beside a directory watch, in case the watch misses a change.
pub(crate) const POLL_WATCHED: Duration = Duration::from_secs(5);
/// The poll interval without a directory watch.
pub(crate) const POLL_UNWATCHED: Duration = Duration::from_millis(500);
/// The timeout of Register: the kubelet takes up to 10 s to dial back.
pub(crate) const REGISTER_TIMEOUT: Duration = Duration::from_secs(12);
/// The most former servers to keep.
const MAX_RETIRED: usize = 4;

/// Whether the kubelet watches a resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Registration {
    /// The resource is not registered, with the reason.
    NotRegistered(NotRegistered),
    /// The kubelet has a ListAndWatch stream open.
    Registered,
}

impl Registration {
    /// Whether the kubelet watches the resource.
    pub fn is_registered(&self) -> bool {
        matches!(self, Self::Registered)
    }
}

/// The reason why a resource is not registered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotRegistered {
    /// The agent has not tried yet.
    #[error("the agent is starting")]
    Starting,
    /// The kubelet's directory is missing or unreadable.
    #[error("{0}")]
    Directory(String),
    /// The agent's socket could not be created.
    #[error("{0}")]
    CannotServe(String),
    /// There is no `kubelet.sock`.
    #[error("no {KUBELET_SOCKET} in {}: the kubelet is not running", .0.display())]
    NoKubelet(PathBuf),
    /// The kubelet refused the registration.
    #[error("{0}")]
    Refused(String),
    /// The kubelet accepted the registration and has no ListAndWatch stream open.
    #[error("the kubelet has no ListAndWatch stream open")]
    NoStream,
    /// The plugin relay is registered with no kubelet, with its reason.
    #[error("the plugin relay has not registered the resource: {0}")]
    Relay(String),
    /// The plugin relay runs and does not answer.
    #[error(
        "the plugin relay does not answer, so the kubelet admits no pod of this node; the agent \
         continues a stopped relay, and ends one that has hung for 20 s"
    )]
    RelaySilent,
    /// The agent is stopping.
    #[error("the agent has stopped")]
    Stopped,
}

impl NotRegistered {
    /// A bounded name for conditions, events and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Starting => "AgentStarting",
            Self::Directory(_) => "PluginDirectoryUnreadable",
            Self::CannotServe(_) => "CannotListen",
            Self::NoKubelet(_) => "KubeletNotRunning",
            Self::Refused(_) => "RegistrationFailed",
            Self::NoStream => "NoDeviceStream",
            Self::Relay(_) => "RelayNotRegistered",
            Self::RelaySilent => "RelaySilent",
            Self::Stopped => "AgentStopped",
        }
    }
}

/// The reason why one call of Register failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegisterError {
    /// No server answers at the socket of the kubelet or relay.
    #[error("failed to connect to {path}")]
    Connect {
        /// The socket.
        path: PathBuf,
        #[source]
        source: tonic::transport::Error,
    },
    /// The kubelet or relay refused.
    #[error("failed to register {resource} at {path}: {}", status_chain(.status))]
    Refused {
        /// The socket.
        path: PathBuf,
        /// The resource's name.
        resource: String,
        /// The answer.
        status: Box<tonic::Status>,
    },
    /// The kubelet or relay did not answer in time.
    #[error("failed to register {resource} at {path}: no answer within {REGISTER_TIMEOUT:?}")]
    TimedOut {
        /// The socket.
        path: PathBuf,
        /// The resource's name.
        resource: String,
    },
}

/// Keeps one resource registered by [`Lifecycle::run`].
#[derive(Debug)]
pub struct Lifecycle<A> {
    dir: PathBuf,
    /// The extended resource's name.
    name: String,
    /// The plugin to serve.
    service: PluginService<A>,
    /// The state for readiness and conditions.
    report: watch::Sender<Registration>,
    machine: StateMachine,
    /// The server whose endpoint is, or will be, registered.
    server: Option<Server>,
    next_server: u32,
    /// Former servers, without sockets, which end once the kubelet has left them: ending a stream
    /// would make the kubelet drop the later registration.
    retired: VecDeque<Server>,
    /// The error of the last attempt to serve or register.
    failure: Option<NotRegistered>,
    /// The reason why the directory is not watched now.
    watch_error: Option<WatchError>,
}

impl<A: Allocator> Lifecycle<A> {
    /// The lifecycle of the resource `name` in `dir`, with a receiver of its registration state.
    pub fn new(
        dir: &Path,
        name: String,
        service: PluginService<A>,
    ) -> (Self, watch::Receiver<Registration>) {
        let starting = Registration::NotRegistered(NotRegistered::Starting);
        let (report, registration) = watch::channel(starting);
        let lifecycle = Self {
            dir: dir.to_owned(),
            name,
            service,
            report,
            machine: StateMachine::default(),
            server: None,
            next_server: 0,
            retired: VecDeque::new(),
            failure: None,
            watch_error: None,
        };
        (lifecycle, registration)
    }

    /// Serves and registers until `shutdown`, then stops gracefully.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut watch = None;
        self.remove_stale_sockets();
        while !shutdown.is_cancelled() {
            watch = watch.or_else(|| self.watch_directory());
            self.drop_idle_servers();
            let streams = self.stream_counts();
            let observation = self.observe();
            match self.machine.next_step(observation, Instant::now()) {
                Step::Serve => self.start_server(),
                Step::Register => tokio::select! {
                    () = self.register(observation) => {}
                    () = shutdown.cancelled() => {}
                },
                Step::Idle(until) => {
                    self.publish(self.registration(observation));
                    tokio::select! {
                        gone = self.wait_for_change(&mut watch, &streams, until) => if gone { watch = None },
                        () = shutdown.cancelled() => {}
                    }
                }
            }
        }
        self.stop().await;
    }

    /// Removes the sockets of dead agents. A socket with this process's pid is of a dead agent,
    /// too.
    fn remove_stale_sockets(&self) {
        let own = std::process::id();
        let alive = |pid| pid != own && server::is_process_alive(pid);
        let removed = server::remove_stale_sockets(&self.dir, self.service.resource, alive);
        if removed > 0 {
            info!(resource = self.name, removed, "stale sockets removed");
        }
    }

    fn watch_directory(&mut self) -> Option<PluginDirWatch> {
        match PluginDirWatch::new(&self.dir) {
            Ok(watch) => {
                self.watch_error = None;
                Some(watch)
            }
            Err(error) => {
                let text = error_chain(&error);
                let logged = self.watch_error.as_ref().map(|error| error_chain(error));
                if logged.as_ref() != Some(&text) {
                    warn!(
                        resource = self.name,
                        reason = error.reason(),
                        failure = text,
                        "failed to watch the plugin directory"
                    );
                }
                self.watch_error = Some(error);
                None
            }
        }
    }

    fn observe(&self) -> Observation {
        let own = match &self.server {
            Some(server) if server.is_reachable() => {
                let InFlightCount { now, total: ever } = server.streams();
                OwnServer::Serving {
                    server: server.number(),
                    open: now,
                    opened: ever,
                }
            }
            _ => OwnServer::Missing,
        };
        Observation {
            kubelet: kubelet_socket(&self.dir),
            own,
        }
    }

    fn start_server(&mut self) {
        if let Some(previous) = self.server.take() {
            previous.remove_socket();
            self.retired.push_back(previous);
        }
        let started = Server::start(&self.dir, self.next_server, &self.service);
        self.next_server = self.next_server.wrapping_add(1);
        match started {
            Ok(server) => {
                debug!(
                    resource = self.name,
                    endpoint = server.endpoint(),
                    "serving"
                );
                self.server = Some(server);
                self.failure
                    .take_if(|failure| matches!(failure, NotRegistered::CannotServe(_)));
                self.machine.server_started();
            }
            Err(error) => self.record_failure(NotRegistered::CannotServe(error_chain(&error))),
        }
    }

    async fn register(&mut self, observation: Observation) {
        let Some(endpoint) = self.server.as_ref().map(Server::endpoint) else {
            return;
        };
        match call_register(&self.dir, &self.name, &endpoint).await {
            Ok(()) => {
                info!(resource = self.name, endpoint, "registered");
                self.failure = None;
                self.machine
                    .registration_accepted(observation, Instant::now());
            }
            Err(error) => self.record_failure(NotRegistered::Refused(error_chain(&error))),
        }
    }

    /// Records a failure, logs a new one, and starts a pause.
    fn record_failure(&mut self, failure: NotRegistered) {
        self.machine.attempt_failed(Instant::now());
        if self.failure.as_ref() != Some(&failure) {
            warn!(resource = self.name, reason = failure.reason(), %failure, "failed to register the resource");
        }
        self.failure = Some(failure);
    }

    fn registration(&self, observation: Observation) -> Registration {
        let has_stream = self.retired.iter().any(|server| server.streams().now > 0);
        if self.machine.is_live() || has_stream {
            return Registration::Registered;
        }
        let why = match (&self.watch_error, &self.failure, observation.kubelet) {
            (Some(error @ WatchError::Directory { .. }), ..) => {
                NotRegistered::Directory(error_chain(error))
            }
            (_, Some(failure @ NotRegistered::CannotServe(_)), _) => failure.clone(),
            (_, _, None) => NotRegistered::NoKubelet(self.dir.clone()),
            (_, Some(failure), Some(_)) => failure.clone(),
            (_, None, Some(_)) => NotRegistered::NoStream,
        };
        Registration::NotRegistered(why)
    }

    fn publish(&self, registration: Registration) {
        self.report.send_if_modified(|published| {
            let changed = *published != registration;
            if changed {
                info!(resource = self.name, ?registration, "registration changed");
                *published = registration;
            }
            changed
        });
    }

    /// Waits for a change or a timeout; returns true where the directory watch has ended.
    async fn wait_for_change(
        &self,
        watch: &mut Option<PluginDirWatch>,
        streams: &[InFlightCount],
        until: Option<Instant>,
    ) -> bool {
        let poll = if watch.is_some() {
            POLL_WATCHED
        } else {
            POLL_UNWATCHED
        };
        let net = Instant::now() + poll;
        let until = until.map_or(net, |at| at.min(net));
        let directory = async {
            match watch {
                Some(watch) => watch.changed().await.is_err(),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            gone = directory => gone,
            () = self.wait_for_stream_change(streams) => false,
            () = tokio::time::sleep_until(until.into()) => false,
        }
    }

    fn servers(&self) -> impl Iterator<Item = &Server> {
        self.server.iter().chain(&self.retired)
    }

    /// The stream count of each server.
    fn stream_counts(&self) -> Vec<InFlightCount> {
        self.servers().map(Server::streams).collect()
    }

    /// Waits until a stream of any server opens or ends.
    async fn wait_for_stream_change(&self, before: &[InFlightCount]) {
        let changes = self.servers().zip(before);
        let changes: Vec<_> = changes
            .map(|(server, before)| Box::pin(server.streams_changed(*before)))
            .collect();
        if changes.is_empty() {
            std::future::pending::<()>().await;
        }
        futures::future::select_all(changes).await;
    }

    /// Drops former servers that the kubelet has left. Beyond [`MAX_RETIRED`] the oldest one
    /// without an open stream goes first.
    fn drop_idle_servers(&mut self) {
        self.retired.retain(|server| !server.is_idle());
        while self.retired.len() > MAX_RETIRED {
            let mut servers = self.retired.iter();
            let unused = servers.position(|server| server.streams().now == 0);
            self.retired.remove(unused.unwrap_or_default());
        }
    }

    async fn stop(mut self) {
        let servers = self.server.take().into_iter().chain(self.retired.drain(..));
        futures::future::join_all(servers.map(Server::stop)).await;
        self.publish(Registration::NotRegistered(NotRegistered::Stopped));
    }
}

/// Calls Register at the kubelet in `dir`.
async fn call_register(dir: &Path, resource: &str, endpoint: &str) -> Result<(), RegisterError> {
    let path = dir.join(KUBELET_SOCKET);
    let call = async {
        let channel =
            connect(&path, REGISTER_TIMEOUT)
                .await
                .map_err(|source| RegisterError::Connect {
                    path: path.clone(),
                    source,
                })?;
        let request = RegisterRequest {
            version: VERSION.to_owned(),
            endpoint: endpoint.to_owned(),
            resource_name: resource.to_owned(),
            options: Some(plugin_options()),
        };
        RegistrationClient::new(channel)
            .register(request)
            .await
            .map_err(|status| RegisterError::Refused {
                path: path.clone(),
                resource: resource.to_owned(),
                status: Box::new(status),
            })?;
        Ok(())
    };
    let late = |_| RegisterError::TimedOut {
        path: path.clone(),
        resource: resource.to_owned(),
    };
    tokio::time::timeout(REGISTER_TIMEOUT, call)
        .await
        .map_err(late)?
}
