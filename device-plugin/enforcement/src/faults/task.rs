//! Reads the kernel's log, applies context policies, publishes faults and kills processes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bursar_apiserver::{ContextPolicies, Events, ParsedSpec};
use bursar_config::PathsConfig;
use bursar_crds::context_policy::ContextAction;
use bursar_crds::gpu_node;
use bursar_gpu::xid::RecentXids;
use bursar_host::clock::{self, ClockReading};
use bursar_ledger::BootTime;
use bursar_ledger::units::AllocationId;
use bursar_node::actor::Snapshot;
use bursar_sessions::{Sessions, XidTarget};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::confirmation::PendingXids;
use super::killer::Killer;
use super::kmsg::{KernelLog, XidLine};
use super::restarts::AwaitedRestarts;
use super::{events, policy};
use crate::audit::metrics::AuditMetrics;

/// How often the task reads the kernel's log and checks for overdue faults.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The inputs of the task.
pub struct FaultInputs {
    /// The paths of the log and of `/proc`.
    pub paths: PathsConfig,
    /// The sessions, which know the containers' processes.
    pub sessions: Arc<Sessions>,
    /// The node's containers.
    pub snapshots: watch::Receiver<Snapshot>,
    /// The orders in the node's `GpuNode`; none before the API server has sent the object.
    pub orders: watch::Receiver<Option<ParsedSpec>>,
    /// The context policies of namespaces; none before the API server has listed them.
    pub policies: watch::Receiver<Option<ContextPolicies>>,
    /// The XIDs that NVML reported recently.
    pub xids: watch::Receiver<RecentXids>,
    /// Since when the agent cannot write the node's status; none while it can.
    pub disconnected_since: watch::Receiver<Option<Instant>>,
    /// The publisher of Events.
    pub events: Events,
    /// The cluster's default for namespaces without a context policy.
    pub default_action: ContextAction,
    /// The counters.
    pub metrics: AuditMetrics,
}

/// Acts on faults until `stop`, and publishes the open ones in `faults`.
pub async fn run(
    inputs: FaultInputs,
    faults: watch::Sender<Vec<gpu_node::Fault>>,
    stop: CancellationToken,
) {
    let new_reports = inputs.sessions.fault_reports();
    let (mut barriers, mut waiting) = (inputs.sessions.register_kmsg_reader(), Vec::new());
    let mut log = open_log(&inputs.paths.kernel_log);
    let (mut generations, mut pending) = (BTreeMap::new(), PendingXids::default());
    let mut restarts = AwaitedRestarts::default();
    let mut killer = Killer::new(inputs.paths.proc.clone(), Arc::clone(&inputs.sessions));
    let mut xids = inputs.xids.clone();
    let mut ticker = interval(POLL_INTERVAL);
    ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let is_barrier = tokio::select! {
            () = stop.cancelled() => return,
            () = new_reports.notified() => false,
            Ok(()) = xids.changed() => false,
            1.. = barriers.recv_many(&mut waiting, barriers.max_capacity()) => true,
            _ = ticker.tick() => false,
        };
        let now = clock::read_clocks();
        let read = log.as_mut().map(|log| log.read(now.moment));
        let (lines, is_whole) = read.unwrap_or((Vec::new(), true));
        // Tenant processes say hello as often as they like, so a hello alone costs one read.
        if is_barrier && is_whole && lines.is_empty() && !xids.has_changed().unwrap_or(false) {
            release(&mut waiting);
            continue;
        }
        inputs.apply_orders(now);
        for (line, at) in lines {
            // The process is looked up before another image in the same process connects.
            if let Some(suspect) = inputs.find_suspect(line, at) {
                pending.push(line, at, suspect);
            }
        }
        let recent = xids.borrow_and_update().clone();
        for (line, suspect) in pending.take_confirmed(&recent, now.moment) {
            inputs.sessions.record_xid(&suspect, line.xid, now);
            let (pid, xid) = (line.pid, line.xid);
            info!(pid, xid, "xid of a container's process");
        }
        if is_whole {
            release(&mut waiting);
        } else if !waiting.is_empty() {
            ticker.reset_immediately();
        }
        inputs.publish_new_faults(now);
        inputs.publish_restarts(&mut restarts, now);
        killer.kill_condemned(now.moment);
        let open = inputs.open_faults(&mut generations);
        faults.send_if_modified(|before| {
            let changed = *before != open;
            *before = open;
            changed
        });
    }
}

/// Lets the hellos go on that wait for the log.
fn release(waiting: &mut Vec<oneshot::Sender<()>>) {
    for barrier in waiting.drain(..) {
        // A session that waited too long has dropped its receiver.
        let _ = barrier.send(());
    }
}

impl FaultInputs {
    fn apply_orders(&self, now: ClockReading) {
        let (orders, policies) = (self.orders.borrow(), self.policies.borrow());
        let restarts = orders.as_ref().map(|orders| orders.restarts.as_slice());
        for container in self.snapshots.borrow().containers.iter() {
            let allocation = &container.allocation;
            let policy = policies
                .as_ref()
                .and_then(|all| policy::context_policy(all, self.default_action, container));
            if let Some(policy) = policy {
                self.sessions.set_recovery_policy(allocation, policy);
            }
            let generation = policy::required_generation(restarts.unwrap_or_default(), container);
            if let Some(generation) = generation {
                self.sessions
                    .require_generation(allocation, generation, now);
            }
        }
    }

    fn find_suspect(&self, XidLine { gpu, pid, .. }: XidLine, at: BootTime) -> Option<XidTarget> {
        let gpus = self.snapshots.borrow().inventory.gpus_at(gpu);
        self.sessions.find_xid_target(pid, &gpus, at)
    }

    fn publish_new_faults(&self, now: ClockReading) {
        let disconnected_for = self
            .disconnected_since
            .borrow()
            .map(|since| since.elapsed());
        let faults = self
            .sessions
            .take_new_faults(disconnected_for.unwrap_or_default(), now);
        if faults.is_empty() {
            return;
        }
        let containers = &self.snapshots.borrow().containers;
        for (allocation, fault) in faults {
            if !fault.is_memory_held() {
                self.metrics.count_poisoned(&fault);
            }
            events::publish_fault(&self.events, &allocation, &fault, containers);
        }
    }

    fn publish_restarts(&self, restarts: &mut AwaitedRestarts, now: ClockReading) {
        let open = self.sessions.open_faults();
        let images = |allocation: &AllocationId| {
            let images = self.sessions.process_images(allocation);
            images.unwrap_or_default()
        };
        for restart in restarts.observe(&open, images, now.moment) {
            self.metrics.observe_recovery(restart.action, restart.took);
            let containers = &self.snapshots.borrow().containers;
            events::publish_restart(&self.events, &restart, containers);
        }
    }

    /// `generations`: the GPU's generation at the first sight of each fault.
    fn open_faults(&self, generations: &mut BTreeMap<String, u64>) -> Vec<gpu_node::Fault> {
        let open = self.sessions.open_faults();
        let snapshot = self.snapshots.borrow();
        let reports = open.into_iter().map(|(allocation, fault)| {
            let now = snapshot.generations.get(&fault.gpu).copied();
            let id = events::fault_id(&allocation, &fault);
            let generation = *generations.entry(id).or_insert(now.unwrap_or_default());
            events::open_fault(&allocation, &fault, generation, &snapshot.containers)
        });
        let reports: Vec<_> = reports.collect();
        let open: BTreeSet<&str> = reports.iter().map(|report| report.id.as_str()).collect();
        generations.retain(|id, _| open.contains(id.as_str()));
        reports
    }
}

/// None where the log cannot be read; only the shims report faults then.
fn open_log(path: &Path) -> Option<KernelLog> {
    KernelLog::open(path)
        .inspect_err(|error| {
            warn!(path = %path.display(), %error, "failed to open the kernel's log; XIDs of processes are not found");
        })
        .ok()
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;

    use bursar_apiserver::metrics::ApiMetrics;
    use bursar_crds::context_policy::ContextPolicy;
    use bursar_gpu::Inventory;
    use bursar_gpu::memory_sample::{GpuMemorySample, MemorySampler};
    use bursar_gpu::uvm::UvmModule;
    use bursar_ledger::units::{Bytes, GpuUuid, PodUid, Quanta, Resource};
    use bursar_ledger::{LedgerView, ManagedView};
    use bursar_node::allocator::{BoundContainer, NodeProblems};
    use bursar_node::checkpoint_state::{ContainerName, PodName};
    use bursar_node::metrics::Counts;
    use bursar_protocol::messages::{Message as _, Request};
    use bursar_sessions::{CgroupResolver, ContainerResolver, Process, SessionSpec};
    use prometheus_client::registry::Registry;

    use super::*;

    struct FakeSampler;

    impl MemorySampler for FakeSampler {
        fn sample(&self, _gpu: &GpuUuid) -> Option<GpuMemorySample> {
            Some(GpuMemorySample::default())
        }
    }

    /// Resolves every process to every pod.
    struct FakeResolver;

    impl ContainerResolver for FakeResolver {
        fn process(&self, pid: u32) -> Option<Process> {
            CgroupResolver::new("/proc".into()).process(pid)
        }

        fn container(&self, _pid: u32, _pod: &PodUid) -> Option<String> {
            Some("here".to_owned())
        }
    }

    /// The state of a node with one container, in the namespace "team".
    fn snapshot() -> Snapshot {
        let name = ContainerName {
            container: "main".to_owned(),
            pod: Some(PodName {
                namespace: "team".to_owned(),
                name: "p".to_owned(),
            }),
        };
        let none = Quanta(0);
        Snapshot {
            inventory: Inventory::Starting,
            view: LedgerView {
                gpus: Vec::new(),
                managed: ManagedView {
                    capacity: none,
                    bound: none,
                    free: none,
                },
                unbound_allocations: 0,
                queued_claims: 0,
            },
            queued_claims: Vec::new(),
            counts: [Resource::DeviceMemory, Resource::ManagedMemory]
                .map(|resource| (resource, Counts::default())),
            uvm: UvmModule::default(),
            driver: Default::default(),
            generations: BTreeMap::new(),
            problems: NodeProblems::default(),
            devices_error: None,
            containers: [BoundContainer {
                name: Some(name),
                ..BoundContainer::with_ids(7, 7)
            }]
            .into(),
        }
    }

    fn inputs(folder: &Path, sessions: &Arc<Sessions>) -> FaultInputs {
        let path = |name| folder.join(name);
        std::fs::write(path("kmsg"), "").unwrap();
        FaultInputs {
            paths: PathsConfig {
                state_dir: path("state"),
                run_dir: path("run"),
                cdi_dir: path("cdi"),
                cgroup_root: path("cgroup"),
                shim_dir: path("shim"),
                proc: path("proc"),
                sys: path("sys"),
                kernel_log: path("kmsg"),
            },
            sessions: Arc::clone(sessions),
            snapshots: watch::channel(snapshot()).1,
            orders: watch::channel(None).1,
            policies: watch::channel(None).1,
            xids: watch::channel(RecentXids::default()).1,
            disconnected_since: watch::channel(None).1,
            events: Events::new(ApiMetrics::new(&mut Registry::default())).0,
            default_action: ContextAction::Process,
            metrics: AuditMetrics::new(&mut Registry::default()),
        }
    }

    /// Says hello to the session of allocation 7, and waits for the welcome.
    async fn hello(folder: &Path) {
        let socket = folder.join("alloc/0000000000000007/agent.sock");
        let hello = Request::Hello {
            version: 1,
            image: 1,
            holdings: vec![],
        };
        // The runtime's paused time stands still meanwhile.
        tokio::task::spawn_blocking(move || {
            let mut stream = UnixStream::connect(socket).unwrap();
            stream.write_all(&hello.frame()).unwrap();
            stream.read_exact(&mut [0]).unwrap();
        })
        .await
        .unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn hello_causes_no_round_beyond_a_read_of_the_log() {
        let folder = tempfile::tempdir().unwrap();
        let run_dir = folder.path().to_owned();
        let sessions = Sessions::new(run_dir, Arc::new(FakeSampler), Arc::new(FakeResolver));
        let sessions = Arc::new(sessions);
        let spec = SessionSpec {
            allocation: AllocationId::from_bits(7),
            pod: "p".parse().unwrap(),
            gpus: vec![("GPU-aaaa".parse().unwrap(), Bytes::gib(1))],
            managed: Bytes::ZERO,
            device_ids: None,
        };
        sessions.serve(spec).await.unwrap();
        let (policies, received) = watch::channel(None);
        let inputs = FaultInputs {
            policies: received,
            ..inputs(folder.path(), &sessions)
        };
        tokio::spawn(run(
            inputs,
            watch::Sender::default(),
            CancellationToken::new(),
        ));
        // The first round comes at once.
        tokio::time::sleep(POLL_INTERVAL / 2).await;
        let policy = ContextPolicy {
            action: Some(ContextAction::Report),
            grace_seconds: 0,
            ..ContextPolicy::default()
        };
        policies.send_replace(Some([("team".to_owned(), policy)].into()));
        let record = folder.path().join("sessions/0000000000000007.json");
        let has_policy = || std::fs::read_to_string(&record).unwrap().contains("Report");
        hello(folder.path()).await;
        assert!(!has_policy(), "the hello caused a round");
        tokio::time::sleep(POLL_INTERVAL).await;
        assert!(has_policy());
    }
}
