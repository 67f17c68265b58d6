//! Fake kubelet: a device manager that behaves like the real one, for fast tests.
//!
//! The fake follows `pkg/kubelet/cm/devicemanager` of Kubernetes 1.36.3:
//! - At its start the kubelet reads its checkpoint, then removes every socket of its directory,
//!   then serves.
//! - Register dials back and reads the options before it answers. The options in Register are
//!   ignored.
//! - A ListAndWatch that ends is never retried. All its devices become Unhealthy, and the handler
//!   disconnects *whatever client the resource has by then*.
//! - Allocate is called once per container, with device ids chosen at random, in no order. Later
//!   containers of the pod reuse device ids of plain init containers, but not those of a sidecar. A
//!   failure fails the pod for ever.
//! - PreStartContainer is called before each start with a limit of 30 s. It is not called while the
//!   plugin has not registered with this kubelet.
//! - The checkpoint is replaced (temporary file, rename) after each Allocate and each device
//!   update, and is all that survives a restart. A deleted pod stays in the checkpoint until the
//!   next allocation or listing.
//!
//! The fake lacks topology, NUMA, GetPreferredAllocation (the agent does not offer it) and the
//! back-off of pods.

mod checkpoint;
mod client;
mod manager;
mod pod;
mod pod_resources;

use std::collections::BTreeMap;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use bursar_kubelet::api::deviceplugin::registration_server::{Registration, RegistrationServer};
use bursar_kubelet::api::deviceplugin::{Empty, RegisterRequest, VERSION};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use client::Client;
pub use manager::{Capacity, Options};
use manager::{Manager, Wanted};
pub use pod::{Container, Kind, Phase, Pod};

/// `endpointStopGracePeriod`: how long capacity outlives a plugin.
const STOP_GRACE: Duration = Duration::from_secs(5 * 60);

/// Faults that a test can inject.
#[derive(Debug, Clone)]
pub struct Faults {
    /// How many GetDevicePluginOptions calls fail.
    pub options: u32,
    /// How many streams are cut as soon as they are open.
    pub streams: u32,
    /// Whether PodResources serves Get.
    pub serves_get: bool,
    /// The healthy devices of plugins beside the agent's, by resource.
    pub other_plugins: BTreeMap<String, usize>,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            options: 0,
            streams: 0,
            serves_get: true,
            other_plugins: BTreeMap::new(),
        }
    }
}

/// The plugins' response times, as the kubelet measures them.
#[derive(Debug, Clone, Default)]
pub struct Times {
    pub allocate: Vec<Duration>,
    pub pre_start: Vec<Duration>,
}

/// The calls between the kubelet and plugins in both directions, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// A plugin's registration: resource and endpoint.
    Register(String, String),
    GetDevicePluginOptions(String),
    ListAndWatch(String),
    Allocate(String),
    PreStartContainer(String),
}

#[derive(Debug)]
struct Shared {
    dir: PathBuf,
    manager: Mutex<Manager>,
    /// The pods in the API server, which outlive the kubelet's restarts.
    pods: Mutex<Vec<Pod>>,
    faults: Mutex<Faults>,
    calls: Mutex<Vec<Call>>,
    /// The times of each Allocate and PreStartContainer.
    times: Mutex<Times>,
    /// The kubelet admits one pod at a time.
    admission: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
pub struct FakeKubelet {
    shared: Arc<Shared>,
    pod_resources: PathBuf,
    /// Stops the servers. None while the kubelet is stopped.
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    stop: CancellationToken,
    servers: Vec<tokio::task::JoinHandle<()>>,
}

impl FakeKubelet {
    /// Creates a kubelet under `root` without starting it. `seed` determines its choice of device
    /// ids.
    pub fn new(root: &Path, seed: u64) -> Self {
        let dir = root.join("device-plugins");
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::create_dir_all(root.join("pod-resources")).unwrap();
        let shared = Shared {
            dir,
            manager: Mutex::new(Manager::new(seed)),
            pods: Mutex::default(),
            faults: Mutex::default(),
            calls: Mutex::default(),
            times: Mutex::default(),
            admission: tokio::sync::Mutex::default(),
        };
        Self {
            shared: Arc::new(shared),
            pod_resources: root.join("pod-resources/kubelet.sock"),
            running: None,
        }
    }

    /// The plugin directory.
    pub fn dir(&self) -> &Path {
        &self.shared.dir
    }

    /// The pod-resources socket.
    pub fn pod_resources_socket(&self) -> &Path {
        &self.pod_resources
    }

    /// Starts the device manager and its servers. The kubelet admits no pods before
    /// [`Self::sync_pods`].
    pub fn start(&mut self) {
        assert!(self.running.is_none(), "running already");
        let entries = checkpoint::read(&self.shared.dir);
        self.shared.manager().restore(entries);
        self.empty_directory();
        let stop = CancellationToken::new();
        let servers = vec![
            self.serve_registration(stop.clone()),
            pod_resources::serve(&self.pod_resources, Arc::clone(&self.shared), stop.clone()),
        ];
        self.running = Some(Running { stop, servers });
    }

    /// Stops as on SIGTERM: closes connections and removes the socket.
    pub async fn stop(&mut self) {
        self.kill().await;
        let _not_there = std::fs::remove_file(self.shared.dir.join("kubelet.sock"));
    }

    /// Stops as on SIGKILL: closes connections and leaves the socket.
    pub async fn kill(&mut self) {
        let Some(running) = self.running.take() else {
            return;
        };
        running.stop.cancel();
        for server in running.servers {
            server.abort();
            let _cancelled = server.await;
        }
        self.shared.manager().disconnect_all();
    }

    /// Stops, starts, and admits all pods before any plugin can register.
    pub async fn restart(&mut self) {
        self.stop().await;
        self.start();
        self.sync_pods().await;
    }

    /// Admits every pod of the API server again, as a starting kubelet does.
    pub async fn sync_pods(&self) {
        let pods = self.shared.pods.lock().unwrap().clone();
        for pod in pods.into_iter().filter(|pod| !pod.is_terminal()) {
            let _phase_tells = self.allocate_pod(&pod).await;
        }
        self.shared.manager().sources_ready = true;
    }

    /// Removes every file of the plugin directory, `kubelet.sock` and the checkpoint too.
    pub fn wipe_directory(&self) {
        let entries: Vec<_> = std::fs::read_dir(&self.shared.dir).unwrap().collect();
        for entry in entries {
            let _gone = std::fs::remove_file(entry.unwrap().path());
        }
    }

    /// Removes the plugins' sockets and nothing else.
    pub fn wipe_plugin_sockets(&self) {
        // The listing precedes the removal, because the agent quickly creates another socket.
        let entries: Vec<_> = std::fs::read_dir(&self.shared.dir).unwrap().collect();
        for entry in entries.into_iter().flatten() {
            let kind = entry.file_type().unwrap();
            if kind.is_socket() && entry.file_name() != "kubelet.sock" {
                let _gone = std::fs::remove_file(entry.path());
            }
        }
    }

    /// Cuts the connection to the plugin of `resource`, as a broken stream does.
    pub fn cut(&self, resource: &str) {
        let client = self.shared.manager().client(resource);
        client.expect("a registered plugin").cut.cancel();
    }

    /// Injects a fault.
    pub fn inject(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.shared.faults.lock().unwrap());
    }

    /// All calls so far.
    pub fn calls(&self) -> Vec<Call> {
        self.shared.calls.lock().unwrap().clone()
    }

    /// The number of calls so far that `such` accepts.
    pub fn count(&self, such: impl Fn(&Call) -> bool) -> usize {
        self.shared
            .calls
            .lock()
            .unwrap()
            .iter()
            .filter(|call| such(call))
            .count()
    }

    /// The times since the last call of this method.
    pub fn take_times(&self) -> Times {
        std::mem::take(&mut self.shared.times.lock().unwrap())
    }

    /// The resource's capacity in the node's status. None where no plugin ever registered it.
    pub fn capacity(&self, resource: &str) -> Option<Capacity> {
        self.shared.manager().capacity(resource)
    }

    /// Waits until this many device ids are allocatable. Returns the time that this took.
    pub async fn until_allocatable(&self, resource: &str, count: usize) -> Duration {
        let description = format!("{count} of {resource} allocatable");
        let reached = || {
            self.capacity(resource)
                .is_some_and(|c| c.allocatable == count)
        };
        super::eventually(&description, reached).await
    }

    /// The health of each device of a container, as the pod's status lists it.
    pub fn resource_health(&self, pod: &Pod, container: &str) -> Vec<(String, bool)> {
        self.shared.manager().resource_health(&pod.uid, container)
    }

    /// Admits a new pod, container by container.
    ///
    /// # Errors
    /// The message of the pod's UnexpectedAdmissionError. The pod is Failed for ever.
    pub async fn admit(&self, pod: &Pod) -> Result<(), String> {
        self.shared.pods.lock().unwrap().push(pod.clone());
        self.allocate_pod(pod).await
    }

    /// Starts a container: calls PreStartContainer, then returns the options for the runtime.
    ///
    /// # Errors
    /// The message of the pod's CreateContainerConfigError. The real kubelet would retry.
    pub async fn start_container(&self, pod: &Pod, container: &str) -> Result<Options, String> {
        let spec = pod.container_named(container);
        for (resource, _) in &spec.limits {
            self.shared.pre_start(&pod.uid, container, resource).await?;
        }
        self.shared.manager().set_running(&pod.uid, container, true);
        Ok(self.shared.manager().run_options(&pod.uid, container))
    }

    /// Ends the container's process. The pod continues.
    pub fn container_ended(&self, pod: &Pod, container: &str) {
        self.shared
            .manager()
            .set_running(&pod.uid, container, false);
    }

    /// Ends the pod, which becomes terminal.
    pub fn pod_ended(&self, pod: &Pod, phase: Phase) {
        self.set_phase(&pod.uid, phase);
        self.shared.manager().set_inactive(&pod.uid);
    }

    /// Deletes the pod at the API server.
    pub fn pod_deleted(&self, pod: &Pod) {
        self.shared
            .pods
            .lock()
            .unwrap()
            .retain(|known| known.uid != pod.uid);
        self.shared.manager().set_inactive(&pod.uid);
    }

    /// Reboots the node: no container runs any more. Call this while the kubelet is stopped.
    pub fn reboot(&self) {
        assert!(
            self.running.is_none(),
            "a running kubelet does not survive a reboot"
        );
        self.shared.manager().clear_running();
    }

    /// The pod's phase.
    pub fn phase(&self, pod: &Pod) -> Option<Phase> {
        let pods = self.shared.pods.lock().unwrap();
        pods.iter()
            .find(|known| known.uid == pod.uid)
            .map(|pod| pod.phase.clone())
    }

    #[allow(dead_code, reason = "only some tests ask")]
    /// The pods that have not ended.
    pub fn pods(&self) -> Vec<Pod> {
        let pods = self.shared.pods.lock().unwrap();
        pods.iter()
            .filter(|pod| !pod.is_terminal())
            .cloned()
            .collect()
    }

    /// The device ids of a container, sorted.
    pub fn assigned(&self, pod: &Pod, container: &str, resource: &str) -> Vec<String> {
        self.shared
            .manager()
            .assigned(&pod.uid, container, resource)
    }

    async fn allocate_pod(&self, pod: &Pod) -> Result<(), String> {
        let _one_at_a_time = self.shared.admission.lock().await;
        self.shared.manager().set_active(pod);
        for container in &pod.containers {
            for (resource, count) in &container.limits {
                let allocated = self.shared.allocate(pod, container, resource, *count).await;
                if let Err(message) = allocated {
                    self.pod_ended(pod, Phase::Failed(message.clone()));
                    return Err(message);
                }
            }
            self.shared.manager().update_reusable(&pod.uid, container);
        }
        Ok(())
    }

    fn set_phase(&self, uid: &str, phase: Phase) {
        for pod in self
            .shared
            .pods
            .lock()
            .unwrap()
            .iter_mut()
            .filter(|pod| pod.uid == uid)
        {
            pod.phase = phase.clone();
        }
    }

    fn empty_directory(&self) {
        for entry in std::fs::read_dir(&self.shared.dir).unwrap().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_socket()) {
                let _gone = std::fs::remove_file(entry.path());
            }
        }
    }

    fn serve_registration(&self, stop: CancellationToken) -> tokio::task::JoinHandle<()> {
        let listener = UnixListener::bind(self.shared.dir.join("kubelet.sock")).unwrap();
        let service = RegistrationServer::new(RegistrationService(Arc::clone(&self.shared)));
        tokio::spawn(async move {
            let served = tonic::transport::Server::builder()
                .add_service(service)
                .serve_with_incoming_shutdown(
                    UnixListenerStream::new(listener),
                    stop.cancelled_owned(),
                );
            served.await.unwrap();
        })
    }
}

impl Drop for FakeKubelet {
    fn drop(&mut self) {
        for server in self.running.iter().flat_map(|running| &running.servers) {
            server.abort();
        }
    }
}

struct RegistrationService(Arc<Shared>);

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let RegisterRequest {
            version,
            endpoint,
            resource_name,
            options: _ignored,
        } = request.into_inner();
        self.0
            .note(Call::Register(resource_name.clone(), endpoint.clone()));
        if version != VERSION {
            return Err(Status::unknown(format!(
                "unsupported API version {version}"
            )));
        }
        if !resource_name.contains('/') || resource_name.starts_with("requests.") {
            return Err(Status::unknown(format!(
                "invalid resource name {resource_name}"
            )));
        }
        let connected = Client::connect(&self.0, &resource_name, &self.0.dir.join(endpoint)).await;
        connected.map_err(Status::unknown)?;
        Ok(Response::new(Empty {}))
    }
}

impl Shared {
    fn manager(&self) -> MutexGuard<'_, Manager> {
        self.manager.lock().unwrap()
    }

    fn note(&self, call: Call) {
        self.calls.lock().unwrap().push(call);
    }

    fn write_checkpoint(&self) {
        let entries = self.manager().to_checkpoint();
        checkpoint::write(&self.dir, &entries);
    }

    /// `allocateContainerResources` for one resource.
    async fn allocate(
        &self,
        pod: &Pod,
        container: &Container,
        resource: &str,
        count: usize,
    ) -> Result<(), String> {
        let (ids, client) = {
            let mut manager = self.manager();
            if !manager.is_plugin_resource(resource) {
                return Ok(());
            }
            manager.forget_inactive();
            match manager.choose(&pod.uid, &container.name, resource, count)? {
                Wanted::Nothing => return Ok(()),
                Wanted::Ids(ids) => (ids, manager.endpoint(resource)),
            }
        };
        self.note(Call::Allocate(resource.to_owned()));
        let start = Instant::now();
        let answer = match client {
            Ok(client) => client.allocate(ids.clone()).await,
            Err(error) => Err(error),
        };
        self.times.lock().unwrap().allocate.push(start.elapsed());
        match answer {
            Ok(answer) => self
                .manager()
                .insert(&pod.uid, &container.name, resource, ids, answer),
            Err(error) => {
                self.manager().recount();
                return Err(format!(
                    "Allocate failed due to {error}, which is unexpected"
                ));
            }
        }
        self.write_checkpoint();
        Ok(())
    }

    /// `callPreStartContainerIfNeeded`.
    async fn pre_start(&self, uid: &str, container: &str, resource: &str) -> Result<(), String> {
        let (ids, client) = {
            let mut manager = self.manager();
            if !manager.needs_pre_start(resource)? {
                return Ok(());
            }
            let mut ids = manager.assigned(uid, container, resource);
            if ids.is_empty() {
                return Err(format!(
                    "no devices found allocated in local cache for pod {uid}"
                ));
            }
            manager.shuffle(&mut ids);
            (ids, manager.endpoint(resource)?)
        };
        self.note(Call::PreStartContainer(resource.to_owned()));
        let start = Instant::now();
        let started = client.pre_start(ids).await;
        self.times.lock().unwrap().pre_start.push(start.elapsed());
        started.map_err(|e| format!("device plugin PreStartContainer rpc failed with err: {e}"))
    }

    fn expired(stopped: Option<Instant>) -> bool {
        stopped.is_some_and(|at| at.elapsed() > STOP_GRACE)
    }
}
