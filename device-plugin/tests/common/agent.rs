//! Fixture of a small agent: the real plugin, lifecycle and ledger, without a node.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use bursar_kubelet::device_checkpoint::DeviceCheckpoint;
use bursar_kubelet::devices::{DeviceHealth, Devices};
use bursar_kubelet::lifecycle::{Lifecycle, Registration};
use bursar_kubelet::plugin::{AllocateError, Allocator, PrepareError};
use bursar_kubelet::server::PluginService;
use bursar_ledger::units::{AllocationId, DeviceIdSet, PodUid, Quanta, Quantum, Resource};
use bursar_ledger::{
    BindOutcome, BindRequest, Binding, BootTime, Gpu, GpuSpread, Health, Ledger, Priority,
    WaitHandle,
};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::PATIENCE;

/// The resource name of device memory.
pub const GPU: &str = "bursar.dev/gpu-memory-gib";

/// A ledger with one GPU for each number of quanta.
pub fn ledger(gpus: &[u32]) -> Ledger {
    let mut ledger = Ledger::new(Quantum::Gib1);
    ledger.set_gpus(gpus.iter().enumerate().map(|(i, quanta)| Gpu {
        uuid: format!("GPU-{i:04}").parse().unwrap(),
        capacity: Quanta(*quanta),
        health: Health::Healthy,
    }));
    ledger
}

/// A list of `all` device ids, of which the first `healthy` are healthy.
pub fn devices(healthy: usize, all: usize) -> Devices {
    let health = |i| {
        if i < healthy {
            DeviceHealth::Healthy
        } else {
            DeviceHealth::Unhealthy
        }
    };
    Devices::new(Resource::DeviceMemory, (0..all).map(health).collect()).unwrap()
}

/// The agent's configuration for a node with all folders under `root`, also those of the fake
/// kubelet. The driver is that of the lab at `lab`.
pub fn config(root: &Path, lab: &Path) -> String {
    let (root, lab) = (root.display(), lab.display());
    format!(
        r#"
[kubelet]
device-plugin-dir = "{root}/device-plugins"
pod-resources-socket = "{root}/pod-resources/kubelet.sock"
[driver]
root = "{lab}/driver"
host-root = "{lab}/driver"
dev-root = "{lab}/dev"
[paths]
state-dir = "{root}/state"
run-dir = "{root}/run"
cdi-dir = "{root}/cdi"
cgroup-root = "{root}/cgroup"
shim-dir = "{root}/shim"
kernel-log = "{lab}/state/kernel-log"
sys = "{lab}/sys"
[retained-memory]
provisioner = "{root}/no-provisioner"
fdstore-socket = "{root}/fdstore/fdstore.sock"
[sharing]
# Without a provisioner no GPU is ever seen to be cleared.
allow-unscrubbed = true
[http]
listen = "127.0.0.1:0"
probes = "127.0.0.1:0"
"#
    )
}

/// An allocator over a ledger. It finds pods in the kubelet's checkpoint.
#[derive(Debug)]
pub struct LedgerAllocator {
    state: Mutex<State>,
    /// Notified when memory may have become free.
    changed: Notify,
    start: Instant,
    /// The kubelet's plugin directory.
    dir: PathBuf,
    /// How long a bind waits for memory.
    bind_wait: Duration,
}

#[derive(Debug)]
struct State {
    ledger: Ledger,
    /// The allocations in order of their `Allocate` calls.
    allocations: Vec<AllocationId>,
}

impl LedgerAllocator {
    pub fn new(dir: &Path, ledger: Ledger, bind_wait: Duration) -> Self {
        let allocations = ledger.allocations().map(|(id, _)| id).collect();
        let state = Mutex::new(State {
            ledger,
            allocations,
        });
        let (changed, start) = (Notify::new(), Instant::now());
        Self {
            state,
            changed,
            start,
            dir: dir.to_owned(),
            bind_wait,
        }
    }

    /// The bindings.
    pub fn bindings(&self) -> Vec<Binding> {
        self.state().ledger.bindings().collect()
    }

    /// A copy of the ledger.
    pub fn ledger(&self) -> Ledger {
        self.state().ledger.clone()
    }

    /// Releases the memory of a pod whose cgroup is gone.
    pub fn pod_gone(&self, uid: &str) {
        self.state().ledger.release_pod(&uid.parse().unwrap());
        self.changed.notify_waiters();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn now(&self) -> BootTime {
        BootTime(self.start.elapsed().as_millis() as u64)
    }

    /// The pod that has these device ids by its newest allocation.
    fn pod_of(&self, resource: Resource, device_ids: &DeviceIdSet) -> Option<PodUid> {
        let names = [(Resource::DeviceMemory, GPU.to_owned())];
        let checkpoint = DeviceCheckpoint::read(&self.dir, &names).ok()?;
        let allocations = &self.state().allocations;
        let age = |id: AllocationId| allocations.iter().position(|other| *other == id);
        let newest = checkpoint
            .entries_with(resource, device_ids)
            .max_by_key(|held| age(held.allocation));
        newest.map(|held| held.pod.clone())
    }

    /// Adds the allocations of these device ids that only the kubelet knows.
    fn add_held(&self, resource: Resource, device_ids: &DeviceIdSet) {
        let names = [(Resource::DeviceMemory, GPU.to_owned())];
        let checkpoint = DeviceCheckpoint::read(&self.dir, &names).unwrap_or_default();
        let mut state = self.state();
        for held in checkpoint.entries_with(resource, device_ids) {
            if !state.allocations.contains(&held.allocation) {
                state.allocations.push(held.allocation);
                let ids = device_ids.clone();
                state
                    .ledger
                    .add_pending(held.allocation, resource, ids, self.now());
            }
        }
    }

    fn containers(&self, pod: &PodUid) -> Vec<DeviceIdSet> {
        let names = [(Resource::DeviceMemory, GPU.to_owned())];
        let checkpoint = DeviceCheckpoint::read(&self.dir, &names).unwrap_or_default();
        let held = checkpoint.entries.into_iter();
        held.filter(|held| held.pod == *pod)
            .map(|held| held.device_ids)
            .collect()
    }

    fn start_bind(
        &self,
        resource: Resource,
        device_ids: &DeviceIdSet,
    ) -> Result<BindOutcome, PrepareError> {
        let unknown = || PrepareError::NotAllocated {
            resource,
            device_ids: device_ids.clone(),
        };
        self.add_held(resource, device_ids);
        let pod = self.pod_of(resource, device_ids).ok_or_else(unknown)?;
        let start = BindRequest {
            resource,
            device_ids: device_ids.clone(),
            containers: self.containers(&pod),
            pod,
            spread: GpuSpread::default(),
            priority: Priority::default(),
        };
        let started = self
            .state()
            .ledger
            .bind(start, self.now())
            .map_err(|_| unknown())?;
        Ok(started.outcome)
    }

    async fn wait_for(&self, ticket: WaitHandle) {
        loop {
            let changed = self.changed.notified();
            let bound = self.state().ledger.advance(self.now());
            if !bound.is_empty() {
                self.changed.notify_waiters();
            }
            if self
                .bindings()
                .iter()
                .any(|binding| binding.claim == ticket.claim)
            {
                return;
            }
            let _or_look_again = tokio::time::timeout(Duration::from_millis(20), changed).await;
        }
    }
}

impl Allocator for LedgerAllocator {
    async fn allocate(
        &self,
        resource: Resource,
        device_ids: DeviceIdSet,
        id: Option<AllocationId>,
    ) -> Result<AllocationId, AllocateError> {
        let id = id.unwrap_or_else(|| AllocationId::from_bits(rand::random()));
        let now = self.now();
        let mut state = self.state();
        state.ledger.add_pending(id, resource, device_ids, now);
        state.allocations.push(id);
        Ok(id)
    }

    async fn prepare(
        &self,
        resource: Resource,
        device_ids: DeviceIdSet,
        limit: Duration,
    ) -> Result<(), PrepareError> {
        let BindOutcome::Queued(ticket, reason) = self.start_bind(resource, &device_ids)? else {
            return Ok(());
        };
        match tokio::time::timeout(self.bind_wait.min(limit), self.wait_for(ticket)).await {
            Ok(()) => Ok(()),
            Err(_) => {
                self.state().ledger.stop_waiting(ticket, self.now());
                Err(PrepareError::NoRoom(reason.to_string()))
            }
        }
    }
}

/// A running agent, on threads of its own so that a test can kill it.
#[derive(Debug)]
pub struct Agent {
    pub allocator: Arc<LedgerAllocator>,
    pub devices: watch::Sender<Devices>,
    pub registration: watch::Receiver<Registration>,
    shutdown: CancellationToken,
    life: tokio::task::JoinHandle<()>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Agent {
    /// Starts an agent in the kubelet's directory, with this ledger and these device ids.
    pub fn start(dir: &Path, ledger: Ledger, devices: Devices) -> Self {
        Self::start_with_bind_wait(dir, ledger, devices, Duration::from_millis(200))
    }

    /// Starts an agent whose binds wait for memory for `bind_wait`.
    pub fn start_with_bind_wait(
        dir: &Path,
        ledger: Ledger,
        devices: Devices,
        bind_wait: Duration,
    ) -> Self {
        Self::start_as(GPU, dir, dir, ledger, devices, bind_wait)
    }

    /// Starts an agent that registers the resource `name` in `registration_dir`, and reads the
    /// checkpoint of the kubelet in `dir`.
    pub fn start_as(
        name: &str,
        registration_dir: &Path,
        dir: &Path,
        ledger: Ledger,
        devices: Devices,
        bind_wait: Duration,
    ) -> Self {
        let mut threads = tokio::runtime::Builder::new_multi_thread();
        let runtime = threads.worker_threads(1).enable_all().build().unwrap();
        let allocator = Arc::new(LedgerAllocator::new(dir, ledger, bind_wait));
        let (devices, shown) = watch::channel(devices);
        let service = PluginService {
            resource: Resource::DeviceMemory,
            allocator: Arc::clone(&allocator),
            devices: shown,
        };
        let (lifecycle, registration) = Lifecycle::new(registration_dir, name.to_owned(), service);
        let shutdown = CancellationToken::new();
        let life = runtime.spawn(lifecycle.run(shutdown.clone()));
        Self {
            allocator,
            devices,
            registration,
            shutdown,
            life,
            runtime: Some(runtime),
        }
    }

    pub fn is_registered(&self) -> bool {
        self.registration.borrow().is_registered()
    }

    /// Waits until the kubelet follows the agent's device list. Returns the time that this took.
    pub async fn until_registered(&self) -> Duration {
        super::eventually("registered", || self.is_registered()).await
    }

    /// Waits until the kubelet no longer follows the agent's device list.
    pub async fn until_not_registered(&self) -> Duration {
        super::eventually("not registered", || !self.is_registered()).await
    }

    /// Stops the agent as SIGTERM does, and returns its ledger.
    pub async fn stop(mut self) -> Ledger {
        self.shutdown.cancel();
        let life = &mut self.life;
        life.await.unwrap();
        self.allocator.ledger()
    }

    /// Kills the agent as SIGKILL does, and returns the ledger that its checkpoint would have.
    pub fn kill(self) -> Ledger {
        self.allocator.ledger()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // A killed process does nothing more, so this waits until the last task has ended. It waits
        // on another thread, because a runtime must not be dropped in another one's task.
        if let Some(runtime) = self.runtime.take() {
            let end = std::thread::spawn(move || runtime.shutdown_timeout(PATIENCE));
            let _ended = end.join();
        }
    }
}
