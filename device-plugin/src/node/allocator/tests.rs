//! Tests the allocator over a host in memory that can crash before any step, or fail a step.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use super::*;
use crate::gpu::health::{Health, PersistedHealth, UnhealthyReason};
use crate::gpu::{Gpu, GpuState};
use crate::node::host::HostSurvey;
use crate::units::{Bytes, Quantum};

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
        let dead = disk.crash_at.is_some_and(|at| disk.steps_done >= at);
        if dead || disk.failing_steps.contains(name) {
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
            unreclaimed: std::mem::take(&mut disk.lease_answer.unreclaimed),
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
    let uuid = name.parse().unwrap();
    let gpu = Gpu {
        uuid,
        minor,
        model: "T".into(),
        memory: Bytes::gib(16),
        pci: None,
        mig_parent: None,
        capabilities: Vec::new(),
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
    };
    NodeAllocator::new(
        config,
        "boot-1".into(),
        host.clone(),
        PodCgroups::new(cgroups.path().to_owned()),
        Metrics::new(),
    )
}

fn device_ids(range: std::ops::Range<u16>) -> DeviceIdSet {
    DeviceIdSet::from_indexes(range).unwrap()
}

impl TestNode {
    async fn new() -> Self {
        let (host, cgroups) = (FakeHost::default(), tempfile::tempdir().unwrap());
        std::fs::create_dir(cgroups.path().join("kubepods")).unwrap();
        let mut core = new_allocator(&host, &cgroups);
        core.set_gpus(two_gpus(), BootTime(0)).await;
        Self {
            host,
            cgroups,
            kubelet: Vec::new(),
            now: BootTime(1_000),
            allocator: core,
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
        tokens: DeviceIdSet,
    ) -> AllocationId {
        let _ = std::fs::create_dir(self.cgroup(pod));
        let allocation = AllocationId::from_bits(self.next);
        self.next += 1;
        self.allocator
            .allocate(allocation, resource, tokens.clone(), self.now);
        let (pod, container) = (pod.parse().unwrap(), container.to_owned());
        self.kubelet.push(CheckpointEntry {
            pod,
            container,
            resource,
            tokens,
            allocation,
        });
        allocation
    }

    fn admit_device(&mut self, pod: &str, tokens: std::ops::Range<u16>) -> AllocationId {
        self.admit(pod, "main", Resource::DeviceMemory, device_ids(tokens))
    }

    /// The kubelet starts the container with these device ids.
    async fn start(
        &mut self,
        pod: &str,
        resource: Resource,
        tokens: DeviceIdSet,
    ) -> oneshot::Receiver<Result<(), PrepareError>> {
        let pod: PodUid = pod.parse().unwrap();
        let holds = |held: &&CheckpointEntry| {
            held.pod == pod && held.tokens == tokens && held.resource == resource
        };
        let of_pod = |held: &&CheckpointEntry| held.pod == pod && held.resource == resource;
        let containers = self.kubelet.iter().filter(of_pod);
        let identity = ContainerIdentity {
            pod_device_ids: containers.map(|held| held.tokens.clone()).collect(),
            checkpoint_entries: self.kubelet.iter().filter(holds).cloned().collect(),
            pod,
            pod_name: None,
            container: String::new(),
            gpu_spread: GpuSpread::default(),
            priority: Priority(0),
        };
        let (reply, answer) = oneshot::channel();
        let bind = PrepareRequest {
            resource,
            tokens,
            identity,
            deadline: self.now + WAIT,
        };
        self.allocator.bind(bind, reply, self.now).await;
        answer
    }

    async fn start_device(
        &mut self,
        pod: &str,
        tokens: std::ops::Range<u16>,
    ) -> oneshot::Receiver<Result<(), PrepareError>> {
        self.start(pod, Resource::DeviceMemory, device_ids(tokens))
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
        let place = |binding: Binding| {
            let shares = match binding.placement {
                Placement::Device(shares) => shares
                    .iter()
                    .map(|s| (s.gpu.to_string(), s.quanta.0))
                    .collect(),
                Placement::Managed(quanta) => vec![("managed".to_owned(), quanta.0)],
            };
            (format!("{}/{}", binding.pod, binding.device_ids), shares)
        };
        self.allocator.bindings().map(place).collect()
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
                let told: Vec<_> = disk.cdi[allocation]
                    .gpus
                    .iter()
                    .map(|gpu| (&gpu.uuid, gpu.quota))
                    .collect();
                let true_: Vec<_> = shares
                    .iter()
                    .map(|s| (&s.gpu, s.quanta.bytes(Quantum::Gib1)))
                    .collect();
                assert_eq!(told, true_);
            }
        }
        for gpu in self.allocator.view(self.now).gpus {
            assert!(gpu.bound <= gpu.capacity, "{gpu:?}");
        }
    }
}

fn try_answer(
    answer: &mut oneshot::Receiver<Result<(), PrepareError>>,
) -> Option<Result<(), String>> {
    answer
        .try_recv()
        .ok()
        .map(|result| result.map_err(|error| error.to_string()))
}

#[tokio::test]
async fn container_is_bound_to_one_gpu_named_in_its_cdi_file() {
    let mut bed = TestNode::new().await;
    let allocation = bed.admit_device("a", 0..10);
    let mut answer = bed.start_device("a", 0..10).await;
    assert_eq!(try_answer(&mut answer), Some(Ok(())));
    bed.assert_host_matches_bindings();
    let disk = bed.host.state();
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
    let mut bed = TestNode::new().await;
    let mut instance = gpu("MIG-1", 3, Health::Healthy);
    instance.gpu.mig_parent = Some("GPU-c".parse().unwrap());
    instance.gpu.capabilities = vec![30, 32];
    bed.allocator.set_gpus(vec![instance], bed.now).await;
    let allocation = bed.admit_device("a", 0..10);
    bed.start_device("a", 0..10).await;
    assert_eq!(
        bed.host.state().cdi[&allocation].gpus[0].nodes,
        [
            "nvidia3",
            "nvidia-caps/nvidia-cap30",
            "nvidia-caps/nvidia-cap32"
        ]
    );
}

#[tokio::test]
async fn container_without_room_waits_until_deadline_with_reason() {
    let mut bed = TestNode::new().await;
    for (pod, tokens) in [("a", 0..10), ("b", 10..20)] {
        bed.admit_device(pod, tokens.clone());
        bed.start_device(pod, tokens).await;
    }
    bed.admit_device("c", 20..28);
    let mut answer = bed.start_device("c", 20..28).await;
    bed.tick(24).await;
    assert_eq!(try_answer(&mut answer), None);
    bed.tick(1).await;
    let message = "waiting for 8 GiB on one GPU: largest free 6 GiB (GPU-a)";
    assert_eq!(try_answer(&mut answer), Some(Err(message.to_owned())));
}

#[tokio::test]
async fn reserved_gpu_is_bound_to_another_pod_after_five_minutes() {
    let mut bed = TestNode::new().await;
    let held = ["GPU-a", "GPU-b"].map(|gpu| Reservation {
        gpu: gpu.to_owned(),
        waiter: "nobody".to_owned(),
        quanta: 16,
    });
    bed.allocator.set_reservations(&held, bed.now).await;
    bed.tick(1).await;
    let steps = bed.host.state().steps_done;
    bed.allocator.set_reservations(&held, bed.now).await;
    bed.tick(289).await;
    assert_eq!(
        bed.host.state().steps_done,
        steps,
        "nothing new is on record"
    );
    bed.admit_device("a", 0..10);
    let _waits = bed.start_device("a", 0..10).await;
    assert!(bed.placements().is_empty());
    bed.tick(11).await;
    assert_eq!(bed.placements().len(), 1);
}

#[tokio::test]
async fn queued_claim_is_bound_when_a_pod_ends() {
    let mut bed = TestNode::new().await;
    for (pod, tokens) in [("a", 0..10), ("b", 10..20)] {
        bed.admit_device(pod, tokens.clone());
        bed.start_device(pod, tokens).await;
    }
    bed.admit_device("c", 20..28);
    let mut answer = bed.start_device("c", 20..28).await;
    bed.end("a").await;
    assert_eq!(try_answer(&mut answer), Some(Ok(())));
    assert_eq!(
        bed.placements().keys().collect::<Vec<_>>(),
        ["b/10-19", "c/20-27"]
    );
    bed.assert_host_matches_bindings();
}

#[tokio::test]
async fn cancelled_call_reserves_no_room() {
    let mut bed = TestNode::new().await;
    for (pod, tokens) in [("a", 0..16), ("b", 16..32)] {
        bed.admit_device(pod, tokens.clone());
        bed.start_device(pod, tokens).await;
    }
    bed.admit_device("c", 0..8);
    drop(bed.start_device("c", 0..8).await);
    bed.tick(1).await;
    bed.end("a").await;
    assert_eq!(bed.placements().keys().collect::<Vec<_>>(), ["b/16-31"]);
    let mut again = bed.start_device("c", 0..8).await;
    assert_eq!(try_answer(&mut again), Some(Ok(())));
}

#[tokio::test]
async fn repeated_call_gets_the_same_binding() {
    let mut bed = TestNode::new().await;
    bed.admit_device("a", 0..10);
    bed.start_device("a", 0..10).await;
    let before = bed.placements();
    let mut again = bed.start_device("a", 0..10).await;
    assert_eq!(try_answer(&mut again), Some(Ok(())));
    assert_eq!(bed.placements(), before);
    bed.assert_host_matches_bindings();
}

#[tokio::test]
async fn init_container_is_torn_down_when_its_ids_are_reused() {
    let mut bed = TestNode::new().await;
    bed.admit("a", "init", Resource::DeviceMemory, device_ids(0..12));
    bed.start_device("a", 0..12).await;
    bed.admit("a", "main", Resource::DeviceMemory, device_ids(0..14));
    let mut answer = bed.start_device("a", 0..14).await;
    assert_eq!(try_answer(&mut answer), Some(Ok(())));
    assert_eq!(bed.placements().len(), 1);
    bed.assert_host_matches_bindings();
}

#[tokio::test]
async fn exports_of_init_container_are_charged_to_the_next() {
    for (exported, left) in [
        (Bytes::gib(6), Bytes::ZERO),
        (Bytes::gib(15), Bytes::gib(1)),
    ] {
        let mut bed = TestNode::new().await;
        let init = bed.admit("a", "init", Resource::DeviceMemory, device_ids(0..16));
        let main = bed.admit("a", "main", Resource::DeviceMemory, device_ids(0..14));
        bed.start_device("a", 0..16).await;
        let gpu: GpuUuid = "GPU-a".parse().unwrap();
        bed.host.state().exported = [(init, vec![(gpu.clone(), exported)])].into();
        bed.host.state().unreclaimed = exported;
        let mut answer = bed.start_device("a", 0..14).await;
        assert_eq!(try_answer(&mut answer), Some(Ok(())));
        assert!(
            bed.host.state().served_at_reconcile.contains(&main),
            "it is charged for leases before its program starts"
        );
        let inherited = exported.min(Bytes::gib(14));
        assert_eq!(
            bed.host.state().inherited,
            [(main, (gpu.clone(), inherited))].into()
        );
        bed.restart().await;
        let view = bed.allocator.view(bed.now);
        let of_it = view.gpus.iter().find(|view| view.uuid == gpu).unwrap();
        assert_eq!(
            of_it.unreclaimed, left,
            "what the heir cannot be charged stays the node's"
        );
    }
}

#[tokio::test]
async fn containers_of_a_pod_are_placed_together_across_restart() {
    let mut bed = TestNode::new().await;
    let containers = [0..4, 4..8, 8..20, 20..32];
    for (number, tokens) in containers.iter().enumerate() {
        let name = format!("c{number}");
        bed.admit(
            "a",
            &name,
            Resource::DeviceMemory,
            device_ids(tokens.clone()),
        );
    }
    for tokens in containers {
        let mut answer = bed.start_device("a", tokens).await;
        assert_eq!(try_answer(&mut answer), Some(Ok(())));
        bed.restart().await;
    }
    assert_eq!(bed.placements().len(), 4);
    bed.assert_host_matches_bindings();
}

#[tokio::test]
async fn unallocated_device_ids_are_refused_by_name() {
    let mut bed = TestNode::new().await;
    let mut answer = bed.start_device("a", 0..4).await;
    assert!(
        try_answer(&mut answer)
            .unwrap()
            .unwrap_err()
            .contains("0-3")
    );
}

#[tokio::test]
async fn allocation_known_only_to_kubelet_is_bound() {
    let mut bed = TestNode::new().await;
    bed.admit_device("a", 0..4);
    bed.host.state().checkpoint = None;
    bed.allocator = new_allocator(&bed.host, &bed.cgroups);
    bed.allocator.set_gpus(two_gpus(), bed.now).await;
    let mut answer = bed.start_device("a", 0..4).await;
    assert_eq!(try_answer(&mut answer), Some(Ok(())));
}

#[tokio::test]
async fn unwritable_cdi_dir_fails_call_and_retry_succeeds() {
    let mut bed = TestNode::new().await;
    bed.admit_device("a", 0..10);
    bed.host.state().failing_steps.insert("describe");
    let mut answer = bed.start_device("a", 0..10).await;
    assert!(
        try_answer(&mut answer)
            .unwrap()
            .unwrap_err()
            .contains("describe")
    );
    assert!(bed.allocator.problems().host.is_some());
    let mut again = bed.start_device("a", 0..10).await;
    assert!(try_answer(&mut again).unwrap().is_err());
    bed.host.state().failing_steps.clear();
    let mut last = bed.start_device("a", 0..10).await;
    assert_eq!(try_answer(&mut last), Some(Ok(())));
    assert_eq!(bed.allocator.problems().host, None);
    bed.assert_host_matches_bindings();
}

#[tokio::test]
async fn full_disk_answers_allocate_and_delays_bindings() {
    let mut bed = TestNode::new().await;
    bed.host.state().failing_steps.insert("persist");
    bed.admit_device("a", 0..10);
    let mut answer = bed.start_device("a", 0..10).await;
    assert!(try_answer(&mut answer).unwrap().is_err());
    assert!(
        bed.host.state().cdi.is_empty(),
        "nothing is shown that is not on record"
    );
    assert!(bed.allocator.problems().checkpoint.is_some());
    bed.host.state().failing_steps.clear();
    bed.tick(1).await;
    assert_eq!(bed.allocator.problems().checkpoint, None);
    let mut again = bed.start_device("a", 0..10).await;
    assert_eq!(try_answer(&mut again), Some(Ok(())));
    bed.restart().await;
    assert_eq!(bed.placements().len(), 1);
    bed.assert_host_matches_bindings();
}

#[tokio::test]
async fn failed_teardown_is_retried() {
    let mut bed = TestNode::new().await;
    bed.admit_device("a", 0..10);
    bed.start_device("a", 0..10).await;
    bed.host.state().failing_steps.insert("withdraw cdi");
    bed.end("a").await;
    assert_eq!(bed.host.state().cdi.len(), 1);
    bed.host.state().failing_steps.clear();
    bed.tick(1).await;
    bed.assert_host_matches_bindings();
}

#[tokio::test]
async fn lost_gpu_gets_no_new_pod_until_it_is_back() {
    let mut bed = TestNode::new().await;
    bed.admit_device("a", 0..10);
    bed.start_device("a", 0..10).await;
    let before = bed.placements();
    let lost = Health::Unhealthy(UnhealthyReason::Lost);
    bed.allocator
        .set_gpus(
            vec![gpu("GPU-a", 0, lost), gpu("GPU-b", 1, Health::Healthy)],
            bed.now,
        )
        .await;
    assert_eq!(bed.placements(), before);
    bed.admit_device("b", 10..26);
    bed.start_device("b", 10..26).await;
    bed.admit_device("c", 26..30);
    let mut waits = bed.start_device("c", 26..30).await;
    assert_eq!(try_answer(&mut waits), None);
    bed.allocator.set_gpus(two_gpus(), bed.now).await;
    assert_eq!(try_answer(&mut waits), Some(Ok(())));
    bed.assert_host_matches_bindings();
}

#[tokio::test]
async fn container_is_not_restarted_while_its_gpu_drains() {
    let mut bed = TestNode::new().await;
    bed.admit_device("a", 0..10);
    bed.start_device("a", 0..10).await;
    let before = bed.placements();
    for why in [UnhealthyReason::Draining, UnhealthyReason::Drained] {
        let gpus = ["GPU-a", "GPU-b"].into_iter().zip(0..);
        let gpus = gpus.map(|(uuid, minor)| gpu(uuid, minor, Health::Unhealthy(why)));
        bed.allocator.set_gpus(gpus.collect(), bed.now).await;
        let mut refused = bed.start_device("a", 0..10).await;
        let refused = try_answer(&mut refused).unwrap().unwrap_err();
        assert!(refused.contains("is drained"), "{refused}");
    }
    bed.allocator.set_gpus(two_gpus(), bed.now).await;
    let mut again = bed.start_device("a", 0..10).await;
    assert_eq!(try_answer(&mut again), Some(Ok(())));
    assert_eq!(bed.placements(), before);
}

#[tokio::test]
async fn allocation_without_a_pod_is_collected() {
    let mut bed = TestNode::new().await;
    bed.admit_device("a", 0..10);
    let none = BTreeSet::new();
    for _ in 0..3 {
        bed.now = bed.now + Duration::from_secs(61);
        bed.allocator.collect_garbage(Some(&none), bed.now).await;
    }
    assert_eq!(bed.allocator.view(bed.now).unbound_allocations, 0);
}

/// A step of the kubelet.
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
    async fn apply(&mut self, act: &KubeletStep) {
        match act.clone() {
            KubeletStep::Admit(pod, tokens) => drop(self.admit_device(pod, tokens)),
            // The kubelet retries while the pod exists; the test reads the result from the
            // placements.
            KubeletStep::Start(pod, tokens) => {
                let answer = self.start_device(pod, tokens).await;
                // The call stays open, as the kubelet's would.
                std::mem::forget(answer);
            }
            KubeletStep::End(pod) => self.end(pod).await,
        }
    }

    /// Repeats the kubelet's call for every container that has not started.
    async fn retry_all(&mut self, started: &[KubeletStep]) {
        for act in started {
            if let KubeletStep::Start(pod, tokens) = act
                && self.cgroup(pod).exists()
                && !started.iter().any(
                    |later| matches!(later, KubeletStep::Start(p, t) if p == pod && t.end > tokens.end),
                )
            {
                self.apply(act).await;
            }
        }
    }
}

#[tokio::test]
async fn crash_before_any_step_changes_no_binding() {
    let mut undisturbed = TestNode::new().await;
    for act in pod_history() {
        undisturbed.apply(&act).await;
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
        let mut bed = TestNode::new().await;
        bed.host.state().crash_at = Some(crash_at);
        let mut done = Vec::new();
        for act in pod_history() {
            bed.apply(&act).await;
            done.push(act);
            let crashed = {
                let disk = bed.host.state();
                disk.crash_at.is_some_and(|at| disk.steps_done >= at)
            };
            if crashed {
                bed.restart().await;
                bed.assert_host_matches_bindings();
                bed.retry_all(&done).await;
            }
        }
        bed.tick(1).await;
        bed.assert_host_matches_bindings();
        assert_eq!(bed.placements(), expected, "crash before step {crash_at}");
    }
}

#[tokio::test]
async fn deleted_checkpoint_is_rebuilt_with_the_same_bindings() {
    for length in 1..=pod_history().len() {
        let mut bed = TestNode::new().await;
        for act in pod_history().iter().take(length) {
            bed.apply(act).await;
        }
        let before = bed.placements();
        bed.host.state().checkpoint = None;
        bed.restart().await;
        assert_eq!(bed.placements(), before, "after {length} acts");
        bed.assert_host_matches_bindings();
    }
}

#[tokio::test]
async fn pod_without_name_gets_the_one_that_kubelet_lists() {
    let mut bed = TestNode::new().await;
    let listed = |pod: &str, tokens| crate::kubelet::pod_resources::ListedContainer {
        name: crate::kubelet::pod_resources::ContainerRef {
            namespace: "team".into(),
            pod: pod.into(),
            container: "main".into(),
        },
        tokens: device_ids(tokens),
    };
    let names = |bed: &TestNode| -> Vec<Option<String>> {
        let containers = bed.allocator.containers();
        let holders = containers.iter().map(|bound| bound.name.clone());
        holders
            .map(|holder| Some(holder?.pod?.to_string()))
            .collect()
    };
    // After a rebuild the kubelet's checkpoint has the init container's ids as ids of the pod.
    bed.admit("a", "init", Resource::DeviceMemory, device_ids(0..2));
    bed.admit_device("a", 0..4);
    bed.start_device("a", 0..4).await;
    assert_eq!(names(&bed), [None]);
    assert!(bed.allocator.has_unnamed_pods());
    let lists = [listed("train", 0..4)];
    // The kubelet wrote another pod's entry after it had listed the pods.
    bed.admit_device("b", 3..6);
    let late = bed.kubelet.pop().unwrap();
    bed.allocator.resolve_missing_names(&lists, &bed.kubelet);
    assert_eq!(names(&bed), [None]);
    bed.kubelet.push(late);
    bed.allocator.resolve_missing_names(&lists, &bed.kubelet);
    assert_eq!(
        names(&bed),
        [None],
        "the tokens may have been the other's by then"
    );
    bed.end("b").await;
    let none = BTreeSet::new();
    for _ in 0..2 {
        bed.now = bed.now + Duration::from_secs(61);
        bed.allocator.collect_garbage(Some(&none), bed.now).await;
    }
    bed.admit("a", "init", Resource::DeviceMemory, device_ids(0..2));
    bed.allocator.resolve_missing_names(&lists, &bed.kubelet);
    assert_eq!(names(&bed), [Some("team/train".into())]);
    assert!(!bed.allocator.has_unnamed_pods());
    bed.tick(1).await;
    bed.restart().await;
    assert_eq!(names(&bed), [Some("team/train".into())], "it is on record");
    bed.host.state().checkpoint = None;
    bed.restart().await;
    assert_eq!(names(&bed), [None]);
    bed.allocator.resolve_missing_names(&lists, &bed.kubelet);
    assert_eq!(names(&bed), [Some("team/train".into())]);
}

#[tokio::test]
async fn managed_memory_survives_a_deleted_checkpoint() {
    let mut bed = TestNode::new().await;
    bed.admit("a", "main", Resource::ManagedMemory, device_ids(0..6));
    let mut answer = bed
        .start("a", Resource::ManagedMemory, device_ids(0..6))
        .await;
    assert_eq!(try_answer(&mut answer), Some(Ok(())));
    let before = bed.placements();
    bed.host.state().checkpoint = None;
    bed.restart().await;
    assert_eq!(bed.placements(), before);
}

#[tokio::test]
async fn container_gets_managed_memory_in_either_order() {
    for managed_first in [false, true] {
        let mut bed = TestNode::new().await;
        let device = bed.admit("a", "main", Resource::DeviceMemory, device_ids(0..4));
        bed.admit("a", "main", Resource::ManagedMemory, device_ids(0..3));
        let mut order = [
            (Resource::DeviceMemory, device_ids(0..4)),
            (Resource::ManagedMemory, device_ids(0..3)),
        ];
        if managed_first {
            order.reverse();
        }
        for (resource, tokens) in order {
            let mut answer = bed.start("a", resource, tokens).await;
            assert_eq!(try_answer(&mut answer), Some(Ok(())));
        }
        let served = BTreeMap::from([(device, Bytes::gib(3))]);
        assert_eq!(
            bed.host.state().sockets,
            served,
            "managed first: {managed_first}"
        );
        for forgotten in [false, true] {
            // The next agent serves every allocation anew.
            let nothing = BTreeMap::from([(device, Bytes::ZERO)]);
            bed.host.state().sockets = nothing;
            if forgotten {
                bed.host.state().checkpoint = None;
            }
            bed.restart().await;
            assert_eq!(
                bed.host.state().sockets,
                served,
                "after a restart; checkpoint lost: {forgotten}"
            );
        }
    }
}

#[tokio::test]
async fn managed_memory_belongs_to_one_container() {
    let mut bed = TestNode::new().await;
    let one = bed.admit("a", "one", Resource::DeviceMemory, device_ids(0..2));
    let two = bed.admit("a", "two", Resource::DeviceMemory, device_ids(2..4));
    let other = bed.admit("b", "two", Resource::DeviceMemory, device_ids(4..6));
    bed.admit("a", "two", Resource::ManagedMemory, device_ids(0..3));
    for (pod, tokens) in [("a", 0..2), ("a", 2..4), ("b", 4..6)] {
        bed.start_device(pod, tokens).await;
    }
    bed.start("a", Resource::ManagedMemory, device_ids(0..3))
        .await;
    let served = BTreeMap::from([
        (one, Bytes::ZERO),
        (two, Bytes::gib(3)),
        (other, Bytes::ZERO),
    ]);
    assert_eq!(bed.host.state().sockets, served);
}

#[tokio::test]
async fn checkpoint_of_another_boot_restores_no_binding() {
    let mut bed = TestNode::new().await;
    bed.admit_device("a", 0..10);
    bed.start_device("a", 0..10).await;
    std::fs::remove_dir(bed.cgroup("a")).unwrap();
    if let Some(state) = &mut bed.host.state().checkpoint {
        state.boot = "boot-0".into();
    }
    bed.restart().await;
    assert!(bed.placements().is_empty());
    bed.assert_host_matches_bindings();
}

#[tokio::test]
async fn reboot_is_not_reported_as_a_lost_checkpoint() {
    let mut bed = TestNode::new().await;
    bed.admit_device("a", 0..10);
    bed.start_device("a", 0..10).await;
    if let Some(state) = &mut bed.host.state().checkpoint {
        state.boot = "boot-0".into();
    }
    bed.restart().await;
    assert_eq!(bed.allocator.problems().rebuilt, None);
}

#[tokio::test]
async fn changed_quantum_rebuilds_at_the_first_restart_only() {
    let mut bed = TestNode::new().await;
    bed.admit_device("a", 0..10);
    bed.start_device("a", 0..10).await;
    bed.restart_with(Quantum::Mib512).await;
    assert!(bed.allocator.problems().rebuilt.is_some());
    let rebuilt = bed.placements();
    assert_eq!(rebuilt["a/0-9"], [("GPU-a".to_owned(), 20)]);
    bed.restart_with(Quantum::Mib512).await;
    assert_eq!(bed.allocator.problems().rebuilt, None);
    assert_eq!(bed.placements(), rebuilt);
}

#[tokio::test]
async fn pods_that_ended_without_an_agent_are_released_at_start() {
    let mut bed = TestNode::new().await;
    bed.admit_device("a", 0..10);
    bed.start_device("a", 0..10).await;
    std::fs::remove_dir(bed.cgroup("a")).unwrap();
    bed.restart().await;
    assert!(bed.placements().is_empty());
    bed.assert_host_matches_bindings();
}

#[tokio::test]
async fn exported_memory_is_reused_once_unmapped_across_restarts() {
    for crash_at in 0..8 {
        let mut bed = TestNode::new().await;
        let first = bed.admit_device("first", 0..16);
        let second = bed.admit_device("second", 16..32);
        bed.start_device("first", 0..16).await;
        bed.start_device("second", 16..32).await;
        let left = vec![("GPU-a".parse().unwrap(), Bytes::mib(300))];
        bed.host.state().exported = [(first, left.clone()), (second, left)].into();
        bed.host.state().unreclaimed = Bytes::mib(100);
        let done = bed.host.state().steps_done;
        bed.host.state().crash_at = Some(done + crash_at);
        bed.end("first").await;
        bed.restart().await;
        let free = |bed: &TestNode, gpu: usize| bed.allocator.view(bed.now).gpus[gpu].free;
        let ended = bed.placements();
        assert_eq!(ended.len(), 1, "crash at {crash_at}: {ended:?}");
        assert_eq!(
            free(&bed, 0) + free(&bed, 1),
            Quanta(15),
            "crash at {crash_at}"
        );
        bed.admit_device("third", 0..16);
        let mut third = bed.start_device("third", 0..16).await;
        assert_eq!(try_answer(&mut third), None, "crash at {crash_at}");
        bed.tick(10).await;
        let leaked: Vec<Bytes> = bed
            .allocator
            .view(bed.now)
            .gpus
            .iter()
            .map(|gpu| gpu.leaked)
            .collect();
        assert_eq!(
            leaked,
            [Bytes::mib(100), Bytes::ZERO],
            "crash at {crash_at}"
        );
        bed.host.state().unreclaimed = Bytes::ZERO;
        bed.tick(1).await;
        assert_eq!(try_answer(&mut third), Some(Ok(())), "crash at {crash_at}");
        bed.assert_host_matches_bindings();
    }
}

#[tokio::test]
async fn orphaned_lease_is_not_bound_until_proven_free() {
    let mut bed = TestNode::new().await;
    let gpu: GpuUuid = "GPU-a".parse().unwrap();
    bed.admit_device("first", 0..16);
    bed.start_device("first", 0..16).await;
    bed.tick(1).await;
    let stood = bed.host.state().last_lease_inputs.clone();
    assert!(
        stood.containers.values().all(|container| {
            container.pod.as_str().contains("first") && container.gpus.contains(&gpu)
        }) && stood.containers.len() == 1,
        "{stood:?}"
    );
    let kept = BTreeMap::from([(LeaseId(7), Bytes::mib(3_500))]);
    bed.host.state().lease_answer.orphaned = Some(BTreeMap::from([(gpu.clone(), kept)]));
    bed.end("first").await;
    bed.restart().await;
    // The fd store has not answered yet: the checkpoint's state remains.
    bed.host.state().lease_answer.orphaned = None;
    bed.tick(1).await;
    assert_eq!(bed.allocator.view(bed.now).gpus[0].free, Quanta(12));
    let mut turn = LedgerUpdate {
        orphaned: Some(BTreeMap::new()),
        ..LedgerUpdate::default()
    };
    // The ledger has accounted for this lease before.
    turn.unreclaimed = vec![(LeaseId(7), gpu, Bytes::ZERO)];
    bed.host.state().unreclaimed = Bytes::gib(16);
    bed.host.state().failing_steps.insert("persist");
    bed.host.state().lease_answer = turn;
    bed.tick(1).await;
    assert_eq!(
        bed.host.state().recorded,
        [],
        "its descriptor stays while it is not on record"
    );
    bed.host.state().failing_steps.clear();
    bed.tick(1).await;
    assert_eq!(bed.host.state().recorded, [LeaseId(7)]);
    assert_eq!(bed.allocator.view(bed.now).gpus[0].free, Quanta(12));
    bed.host.state().unreclaimed = Bytes::ZERO;
    bed.tick(1).await;
    assert_eq!(bed.allocator.view(bed.now).gpus[0].free, Quanta(16));
}

#[tokio::test]
async fn leases_stay_unreclaimed_while_fdstore_is_unreachable() {
    let mut bed = TestNode::new().await;
    let first = bed.admit_device("first", 0..16);
    bed.start_device("first", 0..16).await;
    let leases = vec![("GPU-a".parse().unwrap(), Bytes::gib(5))];
    bed.host.state().leases.insert(first, leases);
    bed.host.state().unreclaimed = Bytes::gib(16);
    bed.end("first").await;
    assert_eq!(bed.allocator.view(bed.now).gpus[0].free, Quanta(11));
    bed.host.state().unreclaimed = Bytes::ZERO;
    bed.tick(1).await;
    assert_eq!(bed.allocator.view(bed.now).gpus[0].free, Quanta(16));
}

#[tokio::test]
async fn unreadable_cdi_file_stays_while_kubelet_lists_it() {
    let mut bed = TestNode::new().await;
    let allocation = bed.admit_device("first", 0..4);
    bed.start_device("first", 0..4).await;
    bed.host.state().checkpoint = None;
    bed.host.state().unreadable.insert(allocation);
    bed.host.state().unreclaimed = Bytes::gib(4);
    bed.restart().await;
    assert!(bed.host.state().cdi.contains_key(&allocation));
    let free = |bed: &TestNode| {
        let view = bed.allocator.view(bed.now);
        let gpus = view.gpus.iter();
        gpus.map(|gpu| gpu.free.0).sum::<u32>()
    };
    assert_eq!(free(&bed), 12 + 12, "what is in use is given to nobody");
    assert!(bed.allocator.problems().rebuilt.is_some());
    let none = BTreeSet::new();
    bed.tick(60).await;
    bed.allocator.collect_garbage(Some(&none), bed.now).await;
    assert!(bed.host.state().cdi.contains_key(&allocation));
    bed.allocator.collect_garbage(Some(&none), bed.now).await;
    bed.tick(1).await;
    assert!(!bed.host.state().cdi.contains_key(&allocation));
}

#[tokio::test]
async fn lost_checkpoint_binds_nothing_until_gpus_are_proven_free() {
    let mut bed = TestNode::new().await;
    bed.admit_device("first", 0..4);
    bed.start_device("first", 0..4).await;
    bed.host.state().checkpoint = None;
    bed.host.state().unreclaimed = Bytes::gib(10);
    bed.restart().await;
    let free = |bed: &TestNode| {
        bed.allocator
            .view(bed.now)
            .gpus
            .iter()
            .map(|gpu| gpu.free.0)
            .sum::<u32>()
    };
    assert_eq!(free(&bed), 2 + 6);
    bed.host.state().unreclaimed = Bytes::ZERO;
    bed.tick(1).await;
    assert_eq!(free(&bed), 12 + 16);
}
