//! Tests the allocator over a host in memory that can crash before any step, or fail a step.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bursar_crds::gpu_node::Reservation;
use bursar_gpu::cuda_fitness::{CudaFitness, CudaFitnesses, CudaVerdict};
use bursar_gpu::health::{Health, PersistedHealth, UnhealthyReason};
use bursar_gpu::{Gpu, GpuState};
use bursar_kubelet::device_checkpoint::DeviceCheckpoint;
use bursar_ledger::units::{Bytes, Quanta, Quantum};
use bursar_ledger::{Binding, GpuSpread, Placement, Priority};
use bursar_sessions::lease_handle::{LedgerUpdate, NodeView};
use jiff::Timestamp;
use tokio::sync::oneshot;

use prometheus_client::registry::Registry;

use super::*;
use crate::capacity;
use crate::cdi;
use crate::host::HostSurvey;

/// The state of the host, which outlives the agent.
#[derive(Debug, Default)]
struct FakeHostState {
    checkpoint: Option<NodeCheckpoint>,
    /// The served allocations with their managed memory.
    sockets: BTreeMap<AllocationId, Bytes>,
    cdi: BTreeMap<AllocationId, cdi::CdiBinding>,
    /// The exported memory that the sessions report for each allocation.
    exported: BTreeMap<AllocationId, Vec<(GpuUuid, Bytes)>>,
    /// The exports that allocations were charged for on behalf of earlier ones.
    inherited: BTreeMap<AllocationId, (GpuUuid, Bytes)>,
    /// The upper bound of unreclaimed memory on each GPU.
    unreclaimed: Bytes,
    /// The leases that allocations are charged for.
    leases: BTreeMap<AllocationId, Vec<(GpuUuid, Bytes)>>,
    /// The allocations that were served at the last reconciliation of leases.
    served_at_reconcile: BTreeSet<AllocationId>,
    /// The inputs of that reconciliation, and its answer.
    last_lease_inputs: NodeView,
    lease_answer: LedgerUpdate,
    /// The leases that the ledger has on record.
    recorded: Vec<LeaseId>,
    /// The allocations whose CDI file the next agent cannot read.
    unreadable: BTreeSet<AllocationId>,
    /// The number of steps performed.
    steps_done: usize,
    /// The agent crashes before the step with this number.
    crash_at: Option<usize>,
    /// The names of steps that fail.
    failing_steps: BTreeSet<&'static str>,
}

#[derive(Debug, Clone, Default)]
struct FakeHost(Arc<Mutex<FakeHostState>>);

impl FakeHost {
    fn state(&self) -> MutexGuard<'_, FakeHostState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn step(
        &self,
        name: &'static str,
        effect: impl FnOnce(&mut FakeHostState),
    ) -> Result<(), HostError> {
        let mut disk = self.state();
        let has_crashed = disk.crash_at.is_some_and(|at| disk.steps_done >= at);
        if has_crashed || disk.failing_steps.contains(name) {
            let source = std::io::Error::from(std::io::ErrorKind::StorageFull);
            return Err(HostError::Folder {
                path: name.into(),
                source,
            });
        }
        disk.steps_done += 1;
        effect(&mut disk);
        Ok(())
    }

    fn found(&self) -> HostSurvey {
        let disk = self.state();
        HostSurvey {
            checkpoint: Ok(disk.checkpoint.clone()),
            cdi_bindings: disk
                .cdi
                .values()
                .filter(|binding| !disk.unreadable.contains(&binding.allocation))
                .cloned()
                .collect(),
            unreadable: disk.unreadable.clone(),
            allocations: disk.sockets.keys().copied().collect(),
        }
    }
}

impl HostOps for FakeHost {
    fn save_checkpoint(&mut self, state: &NodeCheckpoint) -> Result<(), HostError> {
        // Only state that survives serialization counts.
        let text = serde_json::to_string(state).unwrap();
        self.step("persist", |disk| {
            disk.checkpoint = Some(serde_json::from_str(&text).unwrap())
        })
    }

    async fn serve_session(
        &mut self,
        binding: &cdi::CdiBinding,
        managed: Bytes,
    ) -> Result<(), HostError> {
        self.step("expose", |disk| {
            disk.sockets.insert(binding.allocation, managed);
        })
    }

    fn set_managed_quota(
        &mut self,
        allocation: AllocationId,
        managed: Bytes,
    ) -> Result<(), HostError> {
        self.step("allow managed", |disk| {
            if let Some(served) = disk.sockets.get_mut(&allocation) {
                *served = managed;
            }
        })
    }

    fn exported_memory(&self, allocation: AllocationId) -> Vec<(GpuUuid, Bytes)> {
        self.state()
            .exported
            .get(&allocation)
            .cloned()
            .unwrap_or_default()
    }

    /// Accepts at most 14 GiB, as a quota would.
    fn charge_inherited(&mut self, allocation: AllocationId, gpu: &GpuUuid, bytes: Bytes) -> Bytes {
        let inherited = bytes.min(Bytes::gib(14));
        let mut disk = self.state();
        disk.inherited.insert(allocation, (gpu.clone(), inherited));
        inherited
    }

    fn unreclaimed_at_most(&self, left: BTreeMap<GpuUuid, u64>) -> BTreeMap<GpuUuid, Bytes> {
        let held = self.state().unreclaimed;
        left.into_keys().map(|gpu| (gpu, held)).collect()
    }

    fn charged_leases(&self, allocation: AllocationId) -> Vec<(GpuUuid, Bytes)> {
        self.state()
            .leases
            .get(&allocation)
            .cloned()
            .unwrap_or_default()
    }

    async fn reconcile_leases(&mut self, node: NodeView) -> LedgerUpdate {
        let mut disk = self.state();
        disk.last_lease_inputs = node;
        disk.served_at_reconcile = disk.sockets.keys().copied().collect();
        LedgerUpdate {
            orphaned: disk.lease_answer.orphaned.clone(),
            // Each ended lease is reported once.
            ended: std::mem::take(&mut disk.lease_answer.ended),
        }
    }

    async fn confirm_recorded(&mut self, leases: Vec<LeaseId>) {
        self.state().recorded.extend(leases);
    }

    async fn write_cdi(&mut self, binding: &cdi::CdiBinding) -> Result<(), HostError> {
        self.step("describe", |disk| {
            drop(disk.cdi.insert(binding.allocation, binding.clone()))
        })
    }

    async fn tear_down(&mut self, allocation: AllocationId) -> Result<(), HostError> {
        self.step("withdraw cdi", |disk| drop(disk.cdi.remove(&allocation)))?;
        self.step("withdraw socket", |disk| {
            disk.sockets.remove(&allocation);
        })
    }
}

/// A node of two GPUs of 16 GiB, with its kubelet's checkpoint and cgroups.
struct TestNode {
    host: FakeHost,
    cgroups: tempfile::TempDir,
    kubelet: Vec<CheckpointEntry>,
    now: BootTime,
    allocator: NodeAllocator<FakeHost>,
    next: u64,
}

const WAIT: Duration = Duration::from_secs(25);

fn gpu(name: &str, minor: u32, health: Health) -> GpuState {
    let gpu = Gpu {
        minor,
        ..Gpu::with_uuid(name)
    };
    GpuState {
        gpu,
        health,
        persisted: PersistedHealth::default(),
    }
}

fn two_gpus() -> Vec<GpuState> {
    vec![
        gpu("GPU-a", 0, Health::Healthy),
        gpu("GPU-b", 1, Health::Healthy),
    ]
}

fn new_allocator(host: &FakeHost, cgroups: &tempfile::TempDir) -> NodeAllocator<FakeHost> {
    let config = ResourcesConfig {
        quantum: Quantum::Gib1,
        managed_capacity: Bytes::gib(8),
        reserved: Bytes::ZERO,
        compute_round: None,
    };
    let mut allocator = NodeAllocator::new(
        config,
        "boot-1".into(),
        host.clone(),
        PodCgroups::new(cgroups.path().to_owned()),
        NodeMetrics::new(&mut Registry::default()),
    );
    allocator.gpus.set_uvm(uvm_module(true));
    let offered = capacity::managed_capacity(&allocator.offered());
    allocator.ledger.set_managed_capacity(offered);
    allocator
}

fn uvm_module(oversubscription: bool) -> UvmModule {
    UvmModule {
        oversubscription: Some(oversubscription),
        ..UvmModule::default()
    }
}

fn device_ids(range: std::ops::Range<u16>) -> DeviceIdSet {
    DeviceIdSet::from_indexes(range).unwrap()
}

impl TestNode {
    async fn new() -> Self {
        let (host, cgroups) = (FakeHost::default(), tempfile::tempdir().unwrap());
        std::fs::create_dir(cgroups.path().join("kubepods")).unwrap();
        let mut allocator = new_allocator(&host, &cgroups);
        allocator.set_gpus(two_gpus(), BootTime(0)).await;
        Self {
            host,
            cgroups,
            kubelet: Vec::new(),
            now: BootTime(1_000),
            allocator,
            next: 1,
        }
    }

    fn cgroup(&self, pod: &str) -> std::path::PathBuf {
        self.cgroups
            .path()
            .join("kubepods")
            .join(format!("pod{pod}"))
    }

    /// The kubelet admits a container: it calls Allocate and writes its checkpoint.
    fn admit(
        &mut self,
        pod: &str,
        container: &str,
        resource: Resource,
        ids: DeviceIdSet,
    ) -> AllocationId {
        let _ = std::fs::create_dir(self.cgroup(pod));
        let allocation = AllocationId::from_bits(self.next);
        self.next += 1;
        self.allocator
            .allocate(allocation, resource, ids.clone(), self.now);
        let (pod, container) = (pod.parse().unwrap(), container.to_owned());
        self.kubelet.push(CheckpointEntry {
            pod,
            container,
            resource,
            device_ids: ids,
            allocation,
        });
        allocation
    }

    fn admit_device(&mut self, pod: &str, ids: std::ops::Range<u16>) -> AllocationId {
        self.admit(pod, "main", Resource::DeviceMemory, device_ids(ids))
    }

    /// The kubelet starts the container with these device ids.
    async fn start(
        &mut self,
        pod: &str,
        resource: Resource,
        ids: DeviceIdSet,
    ) -> oneshot::Receiver<Result<BoundMemory, PrepareError>> {
        let pod: PodUid = pod.parse().unwrap();
        let holds = |held: &&CheckpointEntry| {
            held.pod == pod && held.device_ids == ids && held.resource == resource
        };
        let of_pod = |held: &&CheckpointEntry| held.pod == pod && held.resource == resource;
        let containers = self.kubelet.iter().filter(of_pod);
        let request = PrepareRequest {
            checkpoint_entries: self.kubelet.iter().filter(holds).cloned().collect(),
            bind: BindRequest {
                resource,
                containers: containers.map(|held| held.device_ids.clone()).collect(),
                device_ids: ids,
                pod,
                spread: GpuSpread::default(),
                priority: Priority(0),
            },
            pod_name: None,
            container: String::new(),
            weight: 0,
            is_assumed: false,
        };
        let (result, answer) = oneshot::channel();
        let reply = Reply {
            result,
            wait_reason: oneshot::channel().0,
        };
        let deadline = self.now + WAIT;
        self.allocator
            .bind(request, deadline, reply, self.now)
            .await;
        answer
    }

    async fn start_device(
        &mut self,
        pod: &str,
        ids: std::ops::Range<u16>,
    ) -> oneshot::Receiver<Result<BoundMemory, PrepareError>> {
        self.start(pod, Resource::DeviceMemory, device_ids(ids))
            .await
    }

    /// The kubelet removes the pod's cgroup, then forgets its device ids.
    async fn end(&mut self, pod: &str) {
        let _ = std::fs::remove_dir(self.cgroup(pod));
        self.tick(1).await;
        self.kubelet.retain(|held| held.pod.as_str() != pod);
    }

    async fn tick(&mut self, seconds: u64) {
        self.now = self.now + Duration::from_secs(seconds);
        self.allocator.tick(self.now).await;
    }

    /// Kills the agent and starts the next one.
    async fn restart(&mut self) {
        self.restart_with(Quantum::Gib1).await;
    }

    /// Kills the agent and starts the next one with another quantum.
    async fn restart_with(&mut self, quantum: Quantum) {
        self.host.state().crash_at = None;
        self.allocator = new_allocator(&self.host, &self.cgroups);
        self.allocator.config.quantum = quantum;
        self.allocator.ledger = Ledger::new(quantum);
        self.allocator
            .recover(self.host.found(), &self.kubelet, self.now)
            .await;
        self.allocator.set_gpus(two_gpus(), self.now).await;
        self.tick(0).await;
    }

    /// The GPUs and quanta of each pod.
    fn placements(&self) -> BTreeMap<String, Vec<(String, u32)>> {
        let placement = |binding: Binding| {
            let shares = match binding.placement {
                Placement::Device(shares) => shares
                    .iter()
                    .map(|s| (s.gpu.to_string(), s.quanta.0))
                    .collect(),
                Placement::Managed(quanta) => vec![("managed".to_owned(), quanta.0)],
            };
            (format!("{}/{}", binding.pod, binding.device_ids), shares)
        };
        self.allocator.bindings().map(placement).collect()
    }

    /// Checks that files and sockets on the host are exactly those of the bindings.
    fn assert_host_matches_bindings(&self) {
        let device = |binding: &Binding| binding.resource == Resource::DeviceMemory;
        let bound: BTreeSet<AllocationId> = self
            .allocator
            .bindings()
            .filter(device)
            .flat_map(|binding| binding.allocations)
            .collect();
        let disk = self.host.state();
        assert_eq!(
            disk.cdi.keys().copied().collect::<BTreeSet<_>>(),
            bound,
            "cdi files"
        );
        assert_eq!(
            disk.sockets.keys().copied().collect::<BTreeSet<_>>(),
            bound,
            "sockets"
        );
        for binding in self.allocator.bindings().filter(device) {
            let Placement::Device(shares) = &binding.placement else {
                continue;
            };
            for allocation in &binding.allocations {
                let described: Vec<_> = disk.cdi[allocation]
                    .gpus
                    .iter()
                    .map(|gpu| (&gpu.uuid, gpu.quota))
                    .collect();
                let expected: Vec<_> = shares
                    .iter()
                    .map(|s| (&s.gpu, s.quanta.bytes(Quantum::Gib1)))
                    .collect();
                assert_eq!(described, expected);
            }
        }
        for gpu in self.allocator.view(self.now).gpus {
            assert!(gpu.bound <= gpu.capacity, "{gpu:?}");
        }
    }
}

fn try_answer(
    answer: &mut oneshot::Receiver<Result<BoundMemory, PrepareError>>,
) -> Option<Result<(), String>> {
    answer
        .try_recv()
        .ok()
        .map(|result| result.map(drop).map_err(|error| error.to_string()))
}

#[test]
fn bound_memory_is_described_with_amount_and_gpu() {
    let share = |gpu: &str, gib| (gpu.parse().unwrap(), Bytes::gib(gib));
    let single = BoundMemory::Device(vec![share("GPU-a", 8)]);
    assert_eq!(single.to_string(), "8 GiB of GPU-a");
    let multiple = BoundMemory::Device(vec![share("GPU-a", 10), share("GPU-b", 10)]);
    assert_eq!(
        multiple.to_string(),
        "20 GiB over 2 GPUs: 10 GiB of GPU-a, 10 GiB of GPU-b"
    );
    let managed = BoundMemory::Managed(Bytes::gib(4));
    assert_eq!(managed.to_string(), "4 GiB of managed memory");
}

#[tokio::test]
async fn container_is_bound_to_one_gpu_named_in_its_cdi_file() {
    let mut node = TestNode::new().await;
    let allocation = node.admit_device("a", 0..10);
    let mut answer = node.start_device("a", 0..10).await;
    assert_eq!(try_answer(&mut answer), Some(Ok(())));
    node.assert_host_matches_bindings();
    let disk = node.host.state();
    let binding = &disk.cdi[&allocation];
    assert_eq!(
        (binding.pod.as_str(), binding.container.as_str()),
        ("a", "main")
    );
    assert_eq!(binding.gpus[0].quota, Bytes::gib(10));
    assert_eq!(binding.gpus[0].nodes, ["nvidia0"]);
}

#[tokio::test]
async fn mig_instance_gets_its_capability_nodes() {
    let mut node = TestNode::new().await;
    let mut instance = gpu("MIG-1", 3, Health::Healthy);
    instance.gpu.mig_parent = Some("GPU-c".parse().unwrap());
    instance.gpu.capabilities = vec![30, 32];
    node.allocator.set_gpus(vec![instance], node.now).await;
    let allocation = node.admit_device("a", 0..10);
    node.start_device("a", 0..10).await;
    assert_eq!(
        node.host.state().cdi[&allocation].gpus[0].nodes,
        [
            "nvidia3",
            "nvidia-caps/nvidia-cap30",
            "nvidia-caps/nvidia-cap32"
        ]
    );
}

#[tokio::test]
async fn container_without_room_waits_until_deadline_with_reason() {
    let mut node = TestNode::new().await;
    for (pod, ids) in [("a", 0..10), ("b", 10..20)] {
        node.admit_device(pod, ids.clone());
        node.start_device(pod, ids).await;
    }
    node.admit_device("c", 20..28);
    let mut answer = node.start_device("c", 20..28).await;
    node.tick(24).await;
    assert_eq!(try_answer(&mut answer), None);
    node.tick(1).await;
    let message = "waiting for 8 GiB on one GPU: largest free 6 GiB (GPU-a)";
    assert_eq!(try_answer(&mut answer), Some(Err(message.to_owned())));
}

#[tokio::test]
async fn waits_are_listed_by_whether_room_can_end_them() {
    let mut node = TestNode::new().await;
    for (pod, ids) in [("a", 0..16), ("b", 16..32)] {
        node.admit_device(pod, ids.clone());
        node.start_device(pod, ids).await;
    }
    let mut answers = Vec::new();
    for (pod, ids) in [("huge", 100..140), ("first", 32..40), ("second", 40..44)] {
        node.admit_device(pod, ids.clone());
        answers.push(node.start_device(pod, ids).await);
        node.tick(1).await;
    }
    let mut pods_with = |set: fn(&mut QueuedClaim)| {
        let claims = node.allocator.waits.claims_mut();
        claims
            .filter(|claim| claim.pod.as_str() == "second")
            .for_each(set);
        let claims = node.allocator.queued_claims().into_iter();
        claims
            .map(|claim| claim.pod.to_string())
            .collect::<Vec<_>>()
    };
    // The wall clock steps back while the second waits.
    let listed = pods_with(|claim| claim.since = Timestamp::UNIX_EPOCH);
    assert_eq!(listed, ["first", "second", "huge"]);
    let listed = pods_with(|claim| claim.priority = Priority(10));
    assert_eq!(listed, ["second", "first", "huge"]);
}

#[tokio::test]
async fn wait_is_listed_while_one_gpu_is_closed_to_its_pod() {
    let mut node = TestNode::new().await;
    node.admit_device("a", 0..16);
    node.start_device("a", 0..16).await;
    let closed = ["GPU-b".parse().unwrap()].into();
    node.allocator.set_scrubbed_gpus(closed, node.now).await;
    for (pod, ids) in [("b", 16..32), ("c", 32..36)] {
        node.admit_device(pod, ids.clone());
        node.start_device(pod, ids).await;
    }
    let claims = node.allocator.queued_claims().into_iter();
    let claims: Vec<_> = claims
        .map(|claim| (claim.pod.to_string(), claim.fits_when_empty))
        .collect();
    assert_eq!(claims, [("c".to_owned(), true)]);
}

#[tokio::test]
async fn wait_names_the_pod_for_which_memory_is_set_aside() {
    let mut node = TestNode::new().await;
    for (pod, ids) in [("a", 0..10), ("b", 10..20)] {
        node.admit_device(pod, ids.clone());
        node.start_device(pod, ids).await;
    }
    node.admit_device("c", 20..28);
    let _waits = node.start_device("c", 20..28).await;
    let name = crate::checkpoint_state::PodName {
        namespace: "team".into(),
        name: "c".into(),
    };
    let pod = "c".parse().unwrap();
    let NodeAllocator { names, ledger, .. } = &mut node.allocator;
    names.set_pod(ledger, &pod, Some(&name), "main", &[]);
    node.admit_device("d", 28..35);
    let mut answer = node.start_device("d", 28..35).await;
    node.tick(25).await;
    let message = "waiting for 7 GiB on one GPU: largest free 6 GiB (GPU-a), \
                   6 GiB of it set aside for team/c, 1 pod is before it";
    assert_eq!(try_answer(&mut answer), Some(Err(message.to_owned())));
}

#[tokio::test]
async fn reserved_gpu_is_bound_to_another_pod_after_five_minutes() {
    let mut node = TestNode::new().await;
    let reservations = ["GPU-a", "GPU-b"].map(|gpu| Reservation {
        gpu: gpu.to_owned(),
        pod_uid: "nobody".to_owned(),
        quanta: 16,
    });
    node.allocator
        .set_reservations(&reservations, node.now)
        .await;
    node.tick(1).await;
    let steps = node.host.state().steps_done;
    node.allocator
        .set_reservations(&reservations, node.now)
        .await;
    node.tick(289).await;
    assert_eq!(
        node.host.state().steps_done,
        steps,
        "nothing new is on record"
    );
    node.admit_device("a", 0..10);
    let _waits = node.start_device("a", 0..10).await;
    assert!(node.placements().is_empty());
    node.tick(11).await;
    assert_eq!(node.placements().len(), 1);
}

#[tokio::test]
async fn queued_claim_is_bound_when_a_pod_ends() {
    let mut node = TestNode::new().await;
    for (pod, ids) in [("a", 0..10), ("b", 10..20)] {
        node.admit_device(pod, ids.clone());
        node.start_device(pod, ids).await;
    }
    node.admit_device("c", 20..28);
    let mut answer = node.start_device("c", 20..28).await;
    node.end("a").await;
    assert_eq!(try_answer(&mut answer), Some(Ok(())));
    assert_eq!(
        node.placements().keys().collect::<Vec<_>>(),
        ["b/10-19", "c/20-27"]
    );
    node.assert_host_matches_bindings();
}

#[tokio::test]
async fn gpu_is_bound_to_queued_claims_only_once_cuda_works_there() {
    let fitnesses = |verdict| -> CudaFitnesses {
        let fitness = CudaFitness {
            verdict,
            lacks_concurrent_access: false,
        };
        let gpus = ["GPU-a", "GPU-b"].map(|gpu| gpu.parse().unwrap());
        gpus.map(|gpu| (gpu, fitness)).into()
    };
    for before in [CudaVerdict::Untried, CudaVerdict::Refused] {
        let mut node = TestNode::new().await;
        let mut set = fitnesses(before);
        node.allocator.set_cuda_fitness(&set, node.now).await;
        node.admit_device("a", 0..10);
        let mut answer = node.start_device("a", 0..10).await;
        for verdict in [
            CudaVerdict::Unfit(UnhealthyReason::CudaRefused),
            CudaVerdict::Refused,
        ] {
            set = fitnesses(verdict);
            node.allocator.set_cuda_fitness(&set, node.now).await;
            assert_eq!(try_answer(&mut answer), None, "{before:?}, {verdict:?}");
        }
        set = fitnesses(CudaVerdict::Works);
        node.allocator.set_cuda_fitness(&set, node.now).await;
        assert_eq!(try_answer(&mut answer), Some(Ok(())), "{before:?}");
    }
}

#[tokio::test]
async fn cancelled_call_reserves_no_room() {
    let mut node = TestNode::new().await;
    for (pod, ids) in [("a", 0..16), ("b", 16..32)] {
        node.admit_device(pod, ids.clone());
        node.start_device(pod, ids).await;
    }
    node.admit_device("c", 0..8);
    drop(node.start_device("c", 0..8).await);
    node.tick(1).await;
    node.end("a").await;
    assert_eq!(node.placements().keys().collect::<Vec<_>>(), ["b/16-31"]);
    let mut repeated = node.start_device("c", 0..8).await;
    assert_eq!(try_answer(&mut repeated), Some(Ok(())));
}

#[tokio::test]
async fn repeated_call_gets_the_same_binding() {
    let mut node = TestNode::new().await;
    node.admit_device("a", 0..10);
    node.start_device("a", 0..10).await;
    let before = node.placements();
    let mut repeated = node.start_device("a", 0..10).await;
    assert_eq!(try_answer(&mut repeated), Some(Ok(())));
    assert_eq!(node.placements(), before);
    node.assert_host_matches_bindings();
}

#[tokio::test]
async fn init_container_is_torn_down_when_its_ids_are_reused() {
    let mut node = TestNode::new().await;
    node.admit("a", "init", Resource::DeviceMemory, device_ids(0..12));
    node.start_device("a", 0..12).await;
    node.admit("a", "main", Resource::DeviceMemory, device_ids(0..14));
    let mut answer = node.start_device("a", 0..14).await;
    assert_eq!(try_answer(&mut answer), Some(Ok(())));
    assert_eq!(node.placements().len(), 1);
    node.assert_host_matches_bindings();
}

#[tokio::test]
async fn names_of_claims_go_when_another_pod_gets_their_ids() {
    let mut node = TestNode::new().await;
    node.admit("a", "init", Resource::DeviceMemory, device_ids(0..12));
    node.admit("a", "main", Resource::DeviceMemory, device_ids(0..14));
    node.start_device("a", 0..12).await;
    node.start_device("a", 0..14).await;
    // The kubelet gives the ids away before it removes the cgroup.
    node.admit_device("b", 0..4);
    node.start_device("b", 0..4).await;
    node.end("a").await;
    let allocations = node.allocator.ledger.allocations();
    let known: BTreeSet<AllocationId> = allocations.map(|(id, _)| id).collect();
    assert_eq!(node.allocator.names.allocations(), known);
}

#[tokio::test]
async fn claim_ends_when_its_container_starts_with_other_ids() {
    let mut node = TestNode::new().await;
    for (container, ids) in [("main", 0..4), ("side", 4..8)] {
        node.admit(
            "a",
            container,
            Resource::DeviceMemory,
            device_ids(ids.clone()),
        );
        node.start_device("a", ids).await;
    }
    // The kubelet loses its checkpoint, and then the first container restarts.
    node.kubelet.clear();
    node.admit_device("a", 8..12);
    let mut answer = node.start_device("a", 8..12).await;
    assert_eq!(try_answer(&mut answer), Some(Ok(())));
    let bound: Vec<String> = node.placements().into_keys().collect();
    assert_eq!(bound, ["a/4-7", "a/8-11"]);
    node.assert_host_matches_bindings();
}

#[tokio::test]
async fn exports_of_init_container_are_charged_to_the_next() {
    for (exported, left) in [
        (Bytes::gib(6), Bytes::ZERO),
        (Bytes::gib(15), Bytes::gib(1)),
    ] {
        let mut node = TestNode::new().await;
        let init = node.admit("a", "init", Resource::DeviceMemory, device_ids(0..16));
        let main = node.admit("a", "main", Resource::DeviceMemory, device_ids(0..14));
        node.start_device("a", 0..16).await;
        let gpu: GpuUuid = "GPU-a".parse().unwrap();
        node.host.state().exported = [(init, vec![(gpu.clone(), exported)])].into();
        node.host.state().unreclaimed = exported;
        let mut answer = node.start_device("a", 0..14).await;
        assert_eq!(try_answer(&mut answer), Some(Ok(())));
        assert!(
            node.host.state().served_at_reconcile.contains(&main),
            "it is charged for leases before its program starts"
        );
        let inherited = exported.min(Bytes::gib(14));
        assert_eq!(
            node.host.state().inherited,
            [(main, (gpu.clone(), inherited))].into()
        );
        node.restart().await;
        let view = node.allocator.view(node.now);
        let gpu_view = view.gpus.iter().find(|view| view.uuid == gpu).unwrap();
        assert_eq!(
            gpu_view.unreclaimed, left,
            "what the heir cannot be charged stays the node's"
        );
    }
}

#[tokio::test]
async fn containers_of_a_pod_are_placed_together_across_restart() {
    let mut node = TestNode::new().await;
    let containers = [0..4, 4..8, 8..20, 20..32];
    for (number, ids) in containers.iter().enumerate() {
        let name = format!("c{number}");
        node.admit("a", &name, Resource::DeviceMemory, device_ids(ids.clone()));
    }
    for ids in containers {
        let mut answer = node.start_device("a", ids).await;
        assert_eq!(try_answer(&mut answer), Some(Ok(())));
        node.restart().await;
    }
    assert_eq!(node.placements().len(), 4);
    node.assert_host_matches_bindings();
}

#[tokio::test]
async fn unallocated_device_ids_are_refused_by_name() {
    let mut node = TestNode::new().await;
    let mut answer = node.start_device("a", 0..4).await;
    assert!(
        try_answer(&mut answer)
            .unwrap()
            .unwrap_err()
            .contains("0-3")
    );
}

#[tokio::test]
async fn allocation_known_only_to_kubelet_is_bound() {
    let mut node = TestNode::new().await;
    node.admit_device("a", 0..4);
    node.host.state().checkpoint = None;
    node.allocator = new_allocator(&node.host, &node.cgroups);
    node.allocator.set_gpus(two_gpus(), node.now).await;
    let mut answer = node.start_device("a", 0..4).await;
    assert_eq!(try_answer(&mut answer), Some(Ok(())));
}

#[tokio::test]
async fn unwritable_cdi_dir_fails_call_and_retry_succeeds() {
    let mut node = TestNode::new().await;
    node.admit_device("a", 0..10);
    node.host.state().failing_steps.insert("describe");
    let mut answer = node.start_device("a", 0..10).await;
    assert!(
        try_answer(&mut answer)
            .unwrap()
            .unwrap_err()
            .contains("describe")
    );
    assert!(node.allocator.problems().host.is_some());
    let mut repeated = node.start_device("a", 0..10).await;
    assert!(try_answer(&mut repeated).unwrap().is_err());
    node.host.state().failing_steps.clear();
    let mut last = node.start_device("a", 0..10).await;
    assert_eq!(try_answer(&mut last), Some(Ok(())));
    assert_eq!(node.allocator.problems().host, None);
    node.assert_host_matches_bindings();
}

#[tokio::test]
async fn full_disk_answers_allocate_and_delays_bindings() {
    let mut node = TestNode::new().await;
    node.host.state().failing_steps.insert("persist");
    node.admit_device("a", 0..10);
    let mut answer = node.start_device("a", 0..10).await;
    assert!(try_answer(&mut answer).unwrap().is_err());
    assert!(
        node.host.state().cdi.is_empty(),
        "nothing is shown that is not on record"
    );
    assert!(node.allocator.problems().checkpoint.is_some());
    node.host.state().failing_steps.clear();
    node.tick(1).await;
    assert_eq!(node.allocator.problems().checkpoint, None);
    let mut repeated = node.start_device("a", 0..10).await;
    assert_eq!(try_answer(&mut repeated), Some(Ok(())));
    node.restart().await;
    assert_eq!(node.placements().len(), 1);
    node.assert_host_matches_bindings();
}

#[tokio::test]
async fn failed_teardown_is_retried() {
    let mut node = TestNode::new().await;
    node.admit_device("a", 0..10);
    node.start_device("a", 0..10).await;
    node.host.state().failing_steps.insert("withdraw cdi");
    node.end("a").await;
    assert_eq!(node.host.state().cdi.len(), 1);
    node.host.state().failing_steps.clear();
    node.tick(1).await;
    node.assert_host_matches_bindings();
}

#[tokio::test]
async fn lost_gpu_gets_no_new_pod_until_it_is_back() {
    let mut node = TestNode::new().await;
    node.admit_device("a", 0..10);
    node.start_device("a", 0..10).await;
    let before = node.placements();
    let lost = Health::Unhealthy(UnhealthyReason::Lost);
    node.allocator
        .set_gpus(
            vec![gpu("GPU-a", 0, lost), gpu("GPU-b", 1, Health::Healthy)],
            node.now,
        )
        .await;
    assert_eq!(node.placements(), before);
    node.admit_device("b", 10..26);
    node.start_device("b", 10..26).await;
    node.admit_device("c", 26..30);
    let mut answer = node.start_device("c", 26..30).await;
    assert_eq!(try_answer(&mut answer), None);
    node.allocator.set_gpus(two_gpus(), node.now).await;
    assert_eq!(try_answer(&mut answer), Some(Ok(())));
    node.assert_host_matches_bindings();
}

#[tokio::test]
async fn container_is_not_restarted_while_its_gpu_drains() {
    let mut node = TestNode::new().await;
    node.admit_device("a", 0..10);
    node.start_device("a", 0..10).await;
    let before = node.placements();
    for why in [UnhealthyReason::Draining, UnhealthyReason::Drained] {
        let gpus = ["GPU-a", "GPU-b"].into_iter().zip(0..);
        let gpus = gpus.map(|(uuid, minor)| gpu(uuid, minor, Health::Unhealthy(why)));
        node.allocator.set_gpus(gpus.collect(), node.now).await;
        let mut refused = node.start_device("a", 0..10).await;
        let refused = try_answer(&mut refused).unwrap().unwrap_err();
        assert!(refused.contains("is drained"), "{refused}");
    }
    node.allocator.set_gpus(two_gpus(), node.now).await;
    let mut repeated = node.start_device("a", 0..10).await;
    assert_eq!(try_answer(&mut repeated), Some(Ok(())));
    assert_eq!(node.placements(), before);
}

#[tokio::test]
async fn allocation_without_a_pod_is_collected() {
    let mut node = TestNode::new().await;
    node.admit_device("a", 0..10);
    let none = DeviceCheckpoint::default();
    for _ in 0..3 {
        node.now = node.now + Duration::from_secs(61);
        node.allocator.collect_garbage(Some(&none), node.now).await;
    }
    assert_eq!(node.allocator.view(node.now).unbound_allocations, 0);
}

#[tokio::test]
async fn allocation_is_not_collected_while_an_entry_is_skipped() {
    let mut node = TestNode::new().await;
    node.admit_device("a", 0..10);
    let checkpoint = DeviceCheckpoint {
        entries: Vec::new(),
        skipped: 1,
    };
    for _ in 0..3 {
        node.now = node.now + Duration::from_secs(61);
        let collected = node.allocator.collect_garbage(Some(&checkpoint), node.now);
        collected.await;
    }
    assert_eq!(node.allocator.view(node.now).unbound_allocations, 1);
}

#[tokio::test]
async fn pod_is_released_after_two_collections_without_cgroup() {
    let mut node = TestNode::new().await;
    node.admit_device("a", 0..4);
    std::fs::remove_dir(node.cgroup("a")).unwrap();
    node.start_device("a", 0..4).await;
    // The second collection follows a stall of the node task.
    for (milliseconds, bound) in [(0, 1), (5, 1), (10_000, 0)] {
        node.now = node.now + Duration::from_millis(milliseconds);
        node.allocator.collect_garbage(None, node.now).await;
        assert_eq!(node.placements().len(), bound, "{milliseconds}");
    }
}

#[derive(Debug, Clone)]
enum KubeletStep {
    Admit(&'static str, std::ops::Range<u16>),
    Start(&'static str, std::ops::Range<u16>),
    End(&'static str),
}

/// Fills two GPUs, queues a claim, ends a pod so that the claim is bound, and reuses an init
/// container's device ids.
fn pod_history() -> Vec<KubeletStep> {
    use KubeletStep::{Admit, End, Start};
    vec![
        Admit("a", 0..10),
        Start("a", 0..10),
        Admit("b", 10..22),
        Start("b", 10..22),
        Admit("c", 22..30),
        Start("c", 22..30),
        End("a"),
        Admit("d", 0..2),
        Start("d", 0..2),
        Admit("d", 0..4),
        Start("d", 0..4),
        End("b"),
    ]
}

impl TestNode {
    async fn apply(&mut self, step: &KubeletStep) {
        match step.clone() {
            KubeletStep::Admit(pod, ids) => drop(self.admit_device(pod, ids)),
            // The kubelet retries while the pod exists; the test reads the result from the
            // placements.
            KubeletStep::Start(pod, ids) => {
                let answer = self.start_device(pod, ids).await;
                // The call stays open, as the kubelet's would.
                std::mem::forget(answer);
            }
            KubeletStep::End(pod) => self.end(pod).await,
        }
    }

    /// Repeats the kubelet's call for every container that has not started.
    async fn retry_all(&mut self, started: &[KubeletStep]) {
        for step in started {
            if let KubeletStep::Start(pod, ids) = step
                && self.cgroup(pod).exists()
                && !started.iter().any(
                    |later| matches!(later, KubeletStep::Start(p, t) if p == pod && t.end > ids.end),
                )
            {
                self.apply(step).await;
            }
        }
    }
}

#[tokio::test]
async fn crash_before_any_step_changes_no_binding() {
    let mut undisturbed = TestNode::new().await;
    for step in pod_history() {
        undisturbed.apply(&step).await;
    }
    undisturbed.assert_host_matches_bindings();
    let (expected, steps) = (
        undisturbed.placements(),
        undisturbed.host.state().steps_done,
    );
    assert!(
        expected.len() == 2 && steps > 20,
        "{expected:?} in {steps} steps"
    );
    for crash_at in 1..steps {
        let mut node = TestNode::new().await;
        node.host.state().crash_at = Some(crash_at);
        let mut done = Vec::new();
        for step in pod_history() {
            node.apply(&step).await;
            done.push(step);
            let crashed = {
                let disk = node.host.state();
                disk.crash_at.is_some_and(|at| disk.steps_done >= at)
            };
            if crashed {
                node.restart().await;
                node.assert_host_matches_bindings();
                node.retry_all(&done).await;
            }
        }
        node.tick(1).await;
        node.assert_host_matches_bindings();
        assert_eq!(node.placements(), expected, "crash before step {crash_at}");
    }
}

#[tokio::test]
async fn deleted_checkpoint_is_rebuilt_with_the_same_bindings() {
    for length in 1..=pod_history().len() {
        let mut node = TestNode::new().await;
        for step in pod_history().iter().take(length) {
            node.apply(step).await;
        }
        let before = node.placements();
        node.host.state().checkpoint = None;
        node.restart().await;
        assert_eq!(node.placements(), before, "after {length} acts");
        node.assert_host_matches_bindings();
    }
}

#[tokio::test]
async fn pod_without_name_gets_the_one_that_kubelet_lists() {
    let mut node = TestNode::new().await;
    let listed = |pod: &str, ids| bursar_kubelet::pod_resources::ListedContainer {
        name: bursar_kubelet::pod_resources::ContainerRef {
            namespace: "team".into(),
            pod: pod.into(),
            container: "main".into(),
        },
        device_ids: device_ids(ids),
    };
    let names = |node: &TestNode| -> Vec<Option<String>> {
        let containers = node.allocator.containers();
        let holders = containers.iter().map(|bound| bound.name.clone());
        holders
            .map(|holder| Some(holder?.pod?.to_string()))
            .collect()
    };
    // After a rebuild the kubelet's checkpoint has the init container's ids as ids of the pod.
    node.admit("a", "init", Resource::DeviceMemory, device_ids(0..2));
    node.admit_device("a", 0..4);
    node.start_device("a", 0..4).await;
    assert_eq!(names(&node), [None]);
    assert!(node.allocator.has_unnamed_pods());
    let lists = [listed("train", 0..4)];
    // The kubelet wrote another pod's entry after it had listed the pods.
    node.admit_device("b", 3..6);
    let late = node.kubelet.pop().unwrap();
    node.allocator.resolve_missing_names(&lists, &node.kubelet);
    assert_eq!(names(&node), [None]);
    node.kubelet.push(late);
    node.allocator.resolve_missing_names(&lists, &node.kubelet);
    assert_eq!(
        names(&node),
        [None],
        "the ids may have been the other's by then"
    );
    node.end("b").await;
    let none = DeviceCheckpoint::default();
    for _ in 0..2 {
        node.now = node.now + Duration::from_secs(61);
        node.allocator.collect_garbage(Some(&none), node.now).await;
    }
    node.admit("a", "init", Resource::DeviceMemory, device_ids(0..2));
    node.allocator.resolve_missing_names(&lists, &node.kubelet);
    assert_eq!(names(&node), [Some("team/train".into())]);
    assert!(!node.allocator.has_unnamed_pods());
    node.tick(1).await;
    node.restart().await;
    assert_eq!(names(&node), [Some("team/train".into())], "it is on record");
    node.host.state().checkpoint = None;
    node.restart().await;
    assert_eq!(names(&node), [None]);
    node.allocator.resolve_missing_names(&lists, &node.kubelet);
    assert_eq!(names(&node), [Some("team/train".into())]);
}

#[tokio::test]
async fn managed_memory_is_bound_only_while_it_can_be_evicted() {
    let mut node = TestNode::new().await;
    for (pod, ids) in [("a", 0..3), ("b", 3..5)] {
        node.admit(pod, "main", Resource::ManagedMemory, device_ids(ids));
    }
    let start = (Resource::ManagedMemory, device_ids(0..3));
    let mut bound = node.start("a", start.0, start.1.clone()).await;
    assert_eq!(try_answer(&mut bound), Some(Ok(())));
    let pinned = uvm_module(false);
    node.allocator.set_uvm_module(pinned, node.now).await;
    let mut waiting = node.start("b", start.0, device_ids(3..5)).await;
    assert_eq!(try_answer(&mut waiting), None);
    let not_concurrent = UvmModule {
        not_concurrent: ["GPU-a".parse().unwrap()].into(),
        ..uvm_module(true)
    };
    node.allocator
        .set_uvm_module(not_concurrent, node.now)
        .await;
    assert_eq!(try_answer(&mut waiting), None);
    let mut repeated = node.start("a", start.0, start.1).await;
    assert_eq!(try_answer(&mut repeated), Some(Ok(())), "it stays bound");
    let evictable = uvm_module(true);
    node.allocator.set_uvm_module(evictable, node.now).await;
    assert_eq!(try_answer(&mut waiting), Some(Ok(())));
}

#[tokio::test]
async fn managed_memory_survives_a_deleted_checkpoint() {
    let mut node = TestNode::new().await;
    node.admit("a", "main", Resource::ManagedMemory, device_ids(0..6));
    let mut answer = node
        .start("a", Resource::ManagedMemory, device_ids(0..6))
        .await;
    assert_eq!(try_answer(&mut answer), Some(Ok(())));
    let before = node.placements();
    node.host.state().checkpoint = None;
    node.restart().await;
    assert_eq!(node.placements(), before);
}

#[tokio::test]
async fn container_gets_managed_memory_in_either_order() {
    for managed_first in [false, true] {
        let mut node = TestNode::new().await;
        let device = node.admit("a", "main", Resource::DeviceMemory, device_ids(0..4));
        node.admit("a", "main", Resource::ManagedMemory, device_ids(0..3));
        let mut order = [
            (Resource::DeviceMemory, device_ids(0..4)),
            (Resource::ManagedMemory, device_ids(0..3)),
        ];
        if managed_first {
            order.reverse();
        }
        for (resource, ids) in order {
            let mut answer = node.start("a", resource, ids).await;
            assert_eq!(try_answer(&mut answer), Some(Ok(())));
        }
        let served = BTreeMap::from([(device, Bytes::gib(3))]);
        assert_eq!(
            node.host.state().sockets,
            served,
            "managed first: {managed_first}"
        );
        for forgotten in [false, true] {
            // The next agent serves every allocation anew.
            let nothing = BTreeMap::from([(device, Bytes::ZERO)]);
            node.host.state().sockets = nothing;
            if forgotten {
                node.host.state().checkpoint = None;
            }
            node.restart().await;
            assert_eq!(
                node.host.state().sockets,
                served,
                "after a restart; checkpoint lost: {forgotten}"
            );
        }
    }
}

#[tokio::test]
async fn managed_memory_belongs_to_one_container() {
    let mut node = TestNode::new().await;
    let first = node.admit("a", "one", Resource::DeviceMemory, device_ids(0..2));
    let second = node.admit("a", "two", Resource::DeviceMemory, device_ids(2..4));
    let other = node.admit("b", "two", Resource::DeviceMemory, device_ids(4..6));
    node.admit("a", "two", Resource::ManagedMemory, device_ids(0..3));
    for (pod, ids) in [("a", 0..2), ("a", 2..4), ("b", 4..6)] {
        node.start_device(pod, ids).await;
    }
    node.start("a", Resource::ManagedMemory, device_ids(0..3))
        .await;
    let served = BTreeMap::from([
        (first, Bytes::ZERO),
        (second, Bytes::gib(3)),
        (other, Bytes::ZERO),
    ]);
    assert_eq!(node.host.state().sockets, served);
}

#[tokio::test]
async fn checkpoint_of_another_boot_restores_no_binding() {
    let mut node = TestNode::new().await;
    node.admit_device("a", 0..10);
    node.start_device("a", 0..10).await;
    std::fs::remove_dir(node.cgroup("a")).unwrap();
    if let Some(state) = &mut node.host.state().checkpoint {
        state.boot = "boot-0".into();
    }
    node.restart().await;
    assert!(node.placements().is_empty());
    node.assert_host_matches_bindings();
}

#[tokio::test]
async fn reboot_is_not_reported_as_a_lost_checkpoint() {
    let mut node = TestNode::new().await;
    node.admit_device("a", 0..10);
    node.start_device("a", 0..10).await;
    if let Some(state) = &mut node.host.state().checkpoint {
        state.boot = "boot-0".into();
    }
    node.restart().await;
    assert_eq!(node.allocator.problems().rebuilt, None);
}

#[tokio::test]
async fn changed_quantum_rebuilds_at_the_first_restart_only() {
    let mut node = TestNode::new().await;
    node.admit_device("a", 0..10);
    node.start_device("a", 0..10).await;
    node.restart_with(Quantum::Mib512).await;
    assert!(node.allocator.problems().rebuilt.is_some());
    let rebuilt = node.placements();
    assert_eq!(rebuilt["a/0-9"], [("GPU-a".to_owned(), 20)]);
    node.restart_with(Quantum::Mib512).await;
    assert_eq!(node.allocator.problems().rebuilt, None);
    assert_eq!(node.placements(), rebuilt);
}

#[tokio::test]
async fn pods_that_ended_without_an_agent_are_released_at_start() {
    let mut node = TestNode::new().await;
    node.admit_device("a", 0..10);
    node.start_device("a", 0..10).await;
    std::fs::remove_dir(node.cgroup("a")).unwrap();
    node.restart().await;
    assert!(node.placements().is_empty());
    node.assert_host_matches_bindings();
}

#[tokio::test]
async fn exported_memory_is_reused_once_unmapped_across_restarts() {
    for crash_at in 0..8 {
        let mut node = TestNode::new().await;
        let first = node.admit_device("first", 0..16);
        let second = node.admit_device("second", 16..32);
        node.start_device("first", 0..16).await;
        node.start_device("second", 16..32).await;
        let left = vec![("GPU-a".parse().unwrap(), Bytes::mib(300))];
        node.host.state().exported = [(first, left.clone()), (second, left)].into();
        node.host.state().unreclaimed = Bytes::mib(100);
        let done = node.host.state().steps_done;
        node.host.state().crash_at = Some(done + crash_at);
        node.end("first").await;
        node.restart().await;
        let free = |node: &TestNode, gpu: usize| node.allocator.view(node.now).gpus[gpu].free;
        let ended = node.placements();
        assert_eq!(ended.len(), 1, "crash at {crash_at}: {ended:?}");
        assert_eq!(
            free(&node, 0) + free(&node, 1),
            Quanta(15),
            "crash at {crash_at}"
        );
        node.admit_device("third", 0..16);
        let mut third = node.start_device("third", 0..16).await;
        assert_eq!(try_answer(&mut third), None, "crash at {crash_at}");
        node.tick(10).await;
        let leaked: Vec<Bytes> = node
            .allocator
            .view(node.now)
            .gpus
            .iter()
            .map(|gpu| gpu.leaked)
            .collect();
        assert_eq!(
            leaked,
            [Bytes::mib(100), Bytes::ZERO],
            "crash at {crash_at}"
        );
        node.host.state().unreclaimed = Bytes::ZERO;
        node.tick(1).await;
        assert_eq!(try_answer(&mut third), Some(Ok(())), "crash at {crash_at}");
        node.assert_host_matches_bindings();
    }
}

#[tokio::test]
async fn orphaned_lease_is_not_bound_until_proven_free() {
    let mut node = TestNode::new().await;
    let gpu: GpuUuid = "GPU-a".parse().unwrap();
    node.admit_device("first", 0..16);
    node.start_device("first", 0..16).await;
    node.tick(1).await;
    let inputs = node.host.state().last_lease_inputs.clone();
    assert!(
        inputs.containers.values().all(|container| {
            container.pod.as_str().contains("first") && container.gpus.contains(&gpu)
        }) && inputs.containers.len() == 1,
        "{inputs:?}"
    );
    let orphaned = BTreeMap::from([(LeaseId(7), Bytes::mib(3_500))]);
    node.host.state().lease_answer.orphaned = Some(BTreeMap::from([(gpu.clone(), orphaned)]));
    node.end("first").await;
    node.restart().await;
    // The fd store has not answered yet: the checkpoint's state remains.
    node.host.state().lease_answer.orphaned = None;
    node.tick(1).await;
    assert_eq!(node.allocator.view(node.now).gpus[0].free, Quanta(12));
    // The checkpoint counts this lease as orphaned, which the new agent's leases do not show.
    let update = LedgerUpdate {
        orphaned: Some(BTreeMap::new()),
        ended: vec![(LeaseId(7), gpu, Bytes::mib(3_500))],
    };
    node.host.state().unreclaimed = Bytes::gib(16);
    node.host.state().failing_steps.insert("persist");
    node.host.state().lease_answer = update;
    node.tick(1).await;
    assert_eq!(
        node.host.state().recorded,
        [],
        "its descriptor stays while it is not on record"
    );
    node.host.state().failing_steps.clear();
    node.tick(1).await;
    assert_eq!(node.host.state().recorded, [LeaseId(7)]);
    assert_eq!(node.allocator.view(node.now).gpus[0].free, Quanta(12));
    node.host.state().unreclaimed = Bytes::ZERO;
    node.tick(1).await;
    assert_eq!(node.allocator.view(node.now).gpus[0].free, Quanta(16));
}

#[tokio::test]
async fn orphaned_lease_counts_once_when_fdstore_is_away() {
    let mut node = TestNode::new().await;
    let gpu: GpuUuid = "GPU-a".parse().unwrap();
    let orphaned = BTreeMap::from([(LeaseId(7), Bytes::gib(4))]);
    node.host.state().lease_answer.orphaned = Some(BTreeMap::from([(gpu.clone(), orphaned)]));
    node.host.state().unreclaimed = Bytes::gib(16);
    node.tick(1).await;
    node.host.state().lease_answer = LedgerUpdate {
        orphaned: None,
        ended: vec![(LeaseId(7), gpu, Bytes::gib(4))],
    };
    node.tick(1).await;
    assert_eq!(node.allocator.view(node.now).gpus[0].free, Quanta(12));
    node.host.state().lease_answer.orphaned = Some(BTreeMap::new());
    node.tick(1).await;
    assert_eq!(node.allocator.view(node.now).gpus[0].free, Quanta(12));
    node.host.state().unreclaimed = Bytes::ZERO;
    node.tick(1).await;
    assert_eq!(node.allocator.view(node.now).gpus[0].free, Quanta(16));
}

#[tokio::test]
async fn leases_stay_unreclaimed_while_fdstore_is_unreachable() {
    let mut node = TestNode::new().await;
    let first = node.admit_device("first", 0..16);
    node.start_device("first", 0..16).await;
    let leases = vec![("GPU-a".parse().unwrap(), Bytes::gib(5))];
    node.host.state().leases.insert(first, leases);
    node.host.state().unreclaimed = Bytes::gib(16);
    node.end("first").await;
    assert_eq!(node.allocator.view(node.now).gpus[0].free, Quanta(11));
    node.host.state().unreclaimed = Bytes::ZERO;
    node.tick(1).await;
    assert_eq!(node.allocator.view(node.now).gpus[0].free, Quanta(16));
}

#[tokio::test]
async fn unreadable_cdi_file_stays_while_kubelet_lists_it() {
    let mut node = TestNode::new().await;
    let allocation = node.admit_device("first", 0..4);
    node.start_device("first", 0..4).await;
    node.host.state().checkpoint = None;
    node.host.state().unreadable.insert(allocation);
    node.host.state().unreclaimed = Bytes::gib(4);
    node.restart().await;
    assert!(node.host.state().cdi.contains_key(&allocation));
    let free = |node: &TestNode| {
        let view = node.allocator.view(node.now);
        let gpus = view.gpus.iter();
        gpus.map(|gpu| gpu.free.0).sum::<u32>()
    };
    assert_eq!(free(&node), 12 + 12, "what is in use is given to nobody");
    assert!(node.allocator.problems().rebuilt.is_some());
    let none = DeviceCheckpoint::default();
    node.tick(60).await;
    node.allocator.collect_garbage(Some(&none), node.now).await;
    assert!(node.host.state().cdi.contains_key(&allocation));
    node.tick(10).await;
    node.allocator.collect_garbage(Some(&none), node.now).await;
    node.tick(1).await;
    assert!(!node.host.state().cdi.contains_key(&allocation));
}

#[tokio::test]
async fn lost_checkpoint_binds_nothing_until_gpus_are_proven_free() {
    let mut node = TestNode::new().await;
    node.admit_device("first", 0..4);
    node.start_device("first", 0..4).await;
    node.host.state().checkpoint = None;
    node.host.state().unreclaimed = Bytes::gib(10);
    node.restart().await;
    let free = |node: &TestNode| {
        node.allocator
            .view(node.now)
            .gpus
            .iter()
            .map(|gpu| gpu.free.0)
            .sum::<u32>()
    };
    assert_eq!(free(&node), 2 + 6);
    node.host.state().unreclaimed = Bytes::ZERO;
    node.tick(1).await;
    assert_eq!(free(&node), 12 + 16);
}
