//! The core over a host in memory that can crash before any step, or refuse one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use super::*;
use crate::gpu::health::{Health, Memory, Sickness};
use crate::gpu::{Gpu, GpuState};
use crate::node::host::Found;
use crate::units::{Bytes, Quantum};

/// What is on the host: it outlives the agent.
#[derive(Debug, Default)]
struct Disk {
    checkpoint: Option<State>,
    /// What is served, with its managed memory.
    sockets: BTreeMap<AllocationId, Bytes>,
    cdi: BTreeMap<AllocationId, cdi::Binding>,
    /// What the sessions say that allocations had exported.
    exported: BTreeMap<AllocationId, Vec<(GpuUuid, Bytes)>>,
    /// What allocations were charged for of what others had exported.
    inherited: BTreeMap<AllocationId, (GpuUuid, Bytes)>,
    /// What is held on each GPU of what was left.
    held: Bytes,
    /// The kept leases that allocations are charged for.
    leases: BTreeMap<AllocationId, Vec<(GpuUuid, Bytes)>>,
    /// What was served when kept leases were last asked for.
    served_then: BTreeSet<AllocationId>,
    /// How the node stood then, and what is answered.
    stood: Node,
    turn: Turn,
    /// The kept leases that the ledger has on record.
    recorded: Vec<LeaseId>,
    /// The allocations whose CDI file the next agent cannot read.
    unread: BTreeSet<AllocationId>,
    /// Steps that were done.
    done: usize,
    /// The agent dies before the step with this number.
    crash_at: Option<usize>,
    /// Steps that fail.
    refused: BTreeSet<&'static str>,
}

#[derive(Debug, Clone, Default)]
struct MemoryHost(Arc<Mutex<Disk>>);

impl MemoryHost {
    fn disk(&self) -> MutexGuard<'_, Disk> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn step(&self, name: &'static str, effect: impl FnOnce(&mut Disk)) -> Result<(), HostError> {
        let mut disk = self.disk();
        let dead = disk.crash_at.is_some_and(|at| disk.done >= at);
        if dead || disk.refused.contains(name) {
            let source = std::io::Error::from(std::io::ErrorKind::StorageFull);
            return Err(HostError::Folder {
                path: name.into(),
                source,
            });
        }
        disk.done += 1;
        effect(&mut disk);
        Ok(())
    }

    fn found(&self) -> Found {
        let disk = self.disk();
        Found {
            checkpoint: Ok(disk.checkpoint.clone()),
            cdi: disk
                .cdi
                .values()
                .filter(|binding| !disk.unread.contains(&binding.allocation))
                .cloned()
                .collect(),
            unread: disk.unread.clone(),
            allocations: disk.sockets.keys().copied().collect(),
        }
    }
}

impl Host for MemoryHost {
    fn persist(&mut self, state: &State) -> Result<(), HostError> {
        // What is kept is what can be read back.
        let text = serde_json::to_string(state).unwrap();
        self.step("persist", |disk| {
            disk.checkpoint = Some(serde_json::from_str(&text).unwrap())
        })
    }

    async fn expose(&mut self, binding: &cdi::Binding, managed: Bytes) -> Result<(), HostError> {
        self.step("expose", |disk| {
            disk.sockets.insert(binding.allocation, managed);
        })
    }

    fn allow_managed(&mut self, allocation: AllocationId, managed: Bytes) -> Result<(), HostError> {
        self.step("allow managed", |disk| {
            if let Some(served) = disk.sockets.get_mut(&allocation) {
                *served = managed;
            }
        })
    }

    fn exported(&self, allocation: AllocationId) -> Vec<(GpuUuid, Bytes)> {
        self.disk()
            .exported
            .get(&allocation)
            .cloned()
            .unwrap_or_default()
    }

    /// As far as a quota of 14 GiB goes.
    fn inherit(&mut self, allocation: AllocationId, gpu: &GpuUuid, bytes: Bytes) -> Bytes {
        let inherited = bytes.min(Bytes::gib(14));
        let mut disk = self.disk();
        disk.inherited.insert(allocation, (gpu.clone(), inherited));
        inherited
    }

    fn held(&self, left: BTreeMap<GpuUuid, u64>) -> BTreeMap<GpuUuid, Bytes> {
        let held = self.disk().held;
        left.into_keys().map(|gpu| (gpu, held)).collect()
    }

    fn leases(&self, allocation: AllocationId) -> Vec<(GpuUuid, Bytes)> {
        self.disk()
            .leases
            .get(&allocation)
            .cloned()
            .unwrap_or_default()
    }

    async fn keep(&mut self, node: Node) -> Turn {
        let mut disk = self.disk();
        disk.stood = node;
        disk.served_then = disk.sockets.keys().copied().collect();
        Turn {
            orphaned: disk.turn.orphaned.clone(),
            // Told once.
            left: std::mem::take(&mut disk.turn.left),
        }
    }

    async fn recorded(&mut self, leases: Vec<LeaseId>) {
        self.disk().recorded.extend(leases);
    }

    async fn describe(&mut self, binding: &cdi::Binding) -> Result<(), HostError> {
        self.step("describe", |disk| {
            drop(disk.cdi.insert(binding.allocation, binding.clone()))
        })
    }

    async fn withdraw(&mut self, allocation: AllocationId) -> Result<(), HostError> {
        self.step("withdraw cdi", |disk| drop(disk.cdi.remove(&allocation)))?;
        self.step("withdraw socket", |disk| {
            disk.sockets.remove(&allocation);
        })
    }
}

/// A node of two GPUs of 16 GiB, with its kubelet's checkpoint and cgroups.
struct Bed {
    host: MemoryHost,
    cgroups: tempfile::TempDir,
    kubelet: Vec<Held>,
    now: Moment,
    core: Core<MemoryHost>,
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
        memory: Memory::default(),
    }
}

fn two_gpus() -> Vec<GpuState> {
    vec![
        gpu("GPU-a", 0, Health::Healthy),
        gpu("GPU-b", 1, Health::Healthy),
    ]
}

fn core(host: &MemoryHost, cgroups: &tempfile::TempDir) -> Core<MemoryHost> {
    let config = ResourcesConfig {
        quantum: Quantum::Gib1,
        managed_capacity: Bytes::gib(8),
        reserved: Bytes::ZERO,
    };
    Core::new(
        config,
        "boot-1".into(),
        host.clone(),
        Pods::new(cgroups.path().to_owned()),
        Metrics::new(),
    )
}

fn set(range: std::ops::Range<u16>) -> TokenSet {
    TokenSet::from_indexes(range).unwrap()
}

impl Bed {
    async fn new() -> Self {
        let (host, cgroups) = (MemoryHost::default(), tempfile::tempdir().unwrap());
        std::fs::create_dir(cgroups.path().join("kubepods")).unwrap();
        let mut core = core(&host, &cgroups);
        core.set_gpus(two_gpus(), Moment(0)).await;
        Self {
            host,
            cgroups,
            kubelet: Vec::new(),
            now: Moment(1_000),
            core,
            next: 1,
        }
    }

    fn cgroup(&self, pod: &str) -> std::path::PathBuf {
        self.cgroups
            .path()
            .join("kubepods")
            .join(format!("pod{pod}"))
    }

    /// The kubelet admits a container: Allocate, then its checkpoint.
    fn admit(
        &mut self,
        pod: &str,
        container: &str,
        resource: Resource,
        tokens: TokenSet,
    ) -> AllocationId {
        let _ = std::fs::create_dir(self.cgroup(pod));
        let allocation = AllocationId::from_bits(self.next);
        self.next += 1;
        self.core
            .book(allocation, resource, tokens.clone(), self.now);
        let (pod, container) = (pod.parse().unwrap(), container.to_owned());
        self.kubelet.push(Held {
            pod,
            container,
            resource,
            tokens,
            allocation,
        });
        allocation
    }

    fn device(&mut self, pod: &str, tokens: std::ops::Range<u16>) -> AllocationId {
        self.admit(pod, "main", Resource::DeviceMemory, set(tokens))
    }

    /// The kubelet starts the container that holds `tokens`.
    async fn start(
        &mut self,
        pod: &str,
        resource: Resource,
        tokens: TokenSet,
    ) -> oneshot::Receiver<Result<(), NotBound>> {
        let pod: PodUid = pod.parse().unwrap();
        let holds =
            |held: &&Held| held.pod == pod && held.tokens == tokens && held.resource == resource;
        let of_pod = |held: &&Held| held.pod == pod && held.resource == resource;
        let containers = self.kubelet.iter().filter(of_pod);
        let identity = Identity {
            containers: containers.map(|held| held.tokens.clone()).collect(),
            held: self.kubelet.iter().filter(holds).cloned().collect(),
            pod,
            name: None,
            container: String::new(),
            shape: Shape::default(),
            priority: Priority(0),
        };
        let (reply, answer) = oneshot::channel();
        let bind = Bind {
            resource,
            tokens,
            identity,
            until: self.now + WAIT,
        };
        self.core.bind(bind, reply, self.now).await;
        answer
    }

    async fn start_device(
        &mut self,
        pod: &str,
        tokens: std::ops::Range<u16>,
    ) -> oneshot::Receiver<Result<(), NotBound>> {
        self.start(pod, Resource::DeviceMemory, set(tokens)).await
    }

    /// The pod's cgroup goes, then its tokens are free for others.
    async fn end(&mut self, pod: &str) {
        let _ = std::fs::remove_dir(self.cgroup(pod));
        self.tick(1).await;
        self.kubelet.retain(|held| held.pod.as_str() != pod);
    }

    async fn tick(&mut self, seconds: u64) {
        self.now = self.now + Duration::from_secs(seconds);
        self.core.tick(self.now).await;
    }

    /// The agent is gone, without a chance to do anything; the next one comes.
    async fn restart(&mut self) {
        self.restart_with(Quantum::Gib1).await;
    }

    /// The next one is configured with another quantum.
    async fn restart_with(&mut self, quantum: Quantum) {
        self.host.disk().crash_at = None;
        self.core = core(&self.host, &self.cgroups);
        self.core.config.quantum = quantum;
        self.core.ledger = Ledger::new(quantum);
        self.core
            .recover(self.host.found(), &self.kubelet, self.now)
            .await;
        self.core.set_gpus(two_gpus(), self.now).await;
        self.tick(0).await;
    }

    /// Pods with the GPUs and quanta that they are bound to.
    fn placements(&self) -> BTreeMap<String, Vec<(String, u32)>> {
        let place = |binding: Binding| {
            let shares = match binding.placement {
                Placement::Device(shares) => shares
                    .iter()
                    .map(|s| (s.gpu.to_string(), s.quanta.0))
                    .collect(),
                Placement::Managed(quanta) => vec![("managed".to_owned(), quanta.0)],
            };
            (format!("{}/{}", binding.pod, binding.tokens), shares)
        };
        self.core.bindings().map(place).collect()
    }

    /// The host shows exactly what is bound.
    fn assert_host_is_true(&self) {
        let device = |binding: &Binding| binding.resource == Resource::DeviceMemory;
        let bound: BTreeSet<AllocationId> = self
            .core
            .bindings()
            .filter(device)
            .flat_map(|binding| binding.allocations)
            .collect();
        let disk = self.host.disk();
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
        for binding in self.core.bindings().filter(device) {
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
        for gpu in self.core.view(self.now).gpus {
            assert!(gpu.bound <= gpu.capacity, "{gpu:?}");
        }
    }
}

fn answered(answer: &mut oneshot::Receiver<Result<(), NotBound>>) -> Option<Result<(), String>> {
    answer
        .try_recv()
        .ok()
        .map(|result| result.map_err(|error| error.to_string()))
}

#[tokio::test]
async fn a_container_is_bound_to_one_gpu_and_its_cdi_file_says_so() {
    let mut bed = Bed::new().await;
    let allocation = bed.device("a", 0..10);
    let mut answer = bed.start_device("a", 0..10).await;
    assert_eq!(answered(&mut answer), Some(Ok(())));
    bed.assert_host_is_true();
    let disk = bed.host.disk();
    let binding = &disk.cdi[&allocation];
    assert_eq!(
        (binding.pod.as_str(), binding.container.as_str()),
        ("a", "main")
    );
    assert_eq!(binding.gpus[0].quota, Bytes::gib(10));
    assert_eq!(binding.gpus[0].nodes, ["nvidia0"]);
}

#[tokio::test]
async fn a_mig_instance_comes_with_its_capability_nodes() {
    let mut bed = Bed::new().await;
    let mut instance = gpu("MIG-1", 3, Health::Healthy);
    instance.gpu.mig_parent = Some("GPU-c".parse().unwrap());
    instance.gpu.capabilities = vec![30, 32];
    bed.core.set_gpus(vec![instance], bed.now).await;
    let allocation = bed.device("a", 0..10);
    bed.start_device("a", 0..10).await;
    assert_eq!(
        bed.host.disk().cdi[&allocation].gpus[0].nodes,
        [
            "nvidia3",
            "nvidia-caps/nvidia-cap30",
            "nvidia-caps/nvidia-cap32"
        ]
    );
}

#[tokio::test]
async fn a_container_without_room_waits_and_then_tells_why() {
    let mut bed = Bed::new().await;
    for (pod, tokens) in [("a", 0..10), ("b", 10..20)] {
        bed.device(pod, tokens.clone());
        bed.start_device(pod, tokens).await;
    }
    bed.device("c", 20..28);
    let mut answer = bed.start_device("c", 20..28).await;
    bed.tick(24).await;
    assert_eq!(answered(&mut answer), None);
    bed.tick(1).await;
    let message = "waiting for 8 GiB on one GPU: largest free 6 GiB (GPU-a)";
    assert_eq!(answered(&mut answer), Some(Err(message.to_owned())));
}

#[tokio::test]
async fn a_gpu_held_for_a_pod_that_never_comes_is_bound_to_another_after_five_minutes() {
    let mut bed = Bed::new().await;
    let held = ["GPU-a", "GPU-b"].map(|gpu| Reservation {
        gpu: gpu.to_owned(),
        waiter: "nobody".to_owned(),
        quanta: 16,
    });
    bed.core.reserve(&held, bed.now).await;
    bed.tick(1).await;
    let steps = bed.host.disk().done;
    bed.core.reserve(&held, bed.now).await;
    bed.tick(289).await;
    assert_eq!(bed.host.disk().done, steps, "nothing new is on record");
    bed.device("a", 0..10);
    let _waits = bed.start_device("a", 0..10).await;
    assert!(bed.placements().is_empty());
    bed.tick(11).await;
    assert_eq!(bed.placements().len(), 1);
}

#[tokio::test]
async fn a_waiter_is_bound_when_a_pod_ends_and_what_that_pod_had_is_gone_from_the_host() {
    let mut bed = Bed::new().await;
    for (pod, tokens) in [("a", 0..10), ("b", 10..20)] {
        bed.device(pod, tokens.clone());
        bed.start_device(pod, tokens).await;
    }
    bed.device("c", 20..28);
    let mut answer = bed.start_device("c", 20..28).await;
    bed.end("a").await;
    assert_eq!(answered(&mut answer), Some(Ok(())));
    assert_eq!(
        bed.placements().keys().collect::<Vec<_>>(),
        ["b/10-19", "c/20-27"]
    );
    bed.assert_host_is_true();
}

#[tokio::test]
async fn a_call_that_the_kubelet_gave_up_keeps_no_room() {
    let mut bed = Bed::new().await;
    for (pod, tokens) in [("a", 0..16), ("b", 16..32)] {
        bed.device(pod, tokens.clone());
        bed.start_device(pod, tokens).await;
    }
    bed.device("c", 0..8);
    drop(bed.start_device("c", 0..8).await);
    bed.tick(1).await;
    bed.end("a").await;
    assert_eq!(bed.placements().keys().collect::<Vec<_>>(), ["b/16-31"]);
    let mut again = bed.start_device("c", 0..8).await;
    assert_eq!(answered(&mut again), Some(Ok(())));
}

#[tokio::test]
async fn the_kubelets_second_call_gets_the_same_binding() {
    let mut bed = Bed::new().await;
    bed.device("a", 0..10);
    bed.start_device("a", 0..10).await;
    let before = bed.placements();
    let mut again = bed.start_device("a", 0..10).await;
    assert_eq!(answered(&mut again), Some(Ok(())));
    assert_eq!(bed.placements(), before);
    bed.assert_host_is_true();
}

#[tokio::test]
async fn an_init_containers_device_goes_when_the_next_container_has_its_tokens() {
    let mut bed = Bed::new().await;
    bed.admit("a", "init", Resource::DeviceMemory, set(0..12));
    bed.start_device("a", 0..12).await;
    bed.admit("a", "main", Resource::DeviceMemory, set(0..14));
    let mut answer = bed.start_device("a", 0..14).await;
    assert_eq!(answered(&mut answer), Some(Ok(())));
    assert_eq!(bed.placements().len(), 1);
    bed.assert_host_is_true();
}

#[tokio::test]
async fn what_an_init_container_exported_is_charged_to_the_next() {
    for (exported, left) in [
        (Bytes::gib(6), Bytes::ZERO),
        (Bytes::gib(15), Bytes::gib(1)),
    ] {
        let mut bed = Bed::new().await;
        let init = bed.admit("a", "init", Resource::DeviceMemory, set(0..16));
        let main = bed.admit("a", "main", Resource::DeviceMemory, set(0..14));
        bed.start_device("a", 0..16).await;
        let gpu: GpuUuid = "GPU-a".parse().unwrap();
        bed.host.disk().exported = [(init, vec![(gpu.clone(), exported)])].into();
        bed.host.disk().held = exported;
        let mut answer = bed.start_device("a", 0..14).await;
        assert_eq!(answered(&mut answer), Some(Ok(())));
        assert!(
            bed.host.disk().served_then.contains(&main),
            "it is charged for leases before its program starts"
        );
        let inherited = exported.min(Bytes::gib(14));
        assert_eq!(
            bed.host.disk().inherited,
            [(main, (gpu.clone(), inherited))].into()
        );
        bed.restart().await;
        let view = bed.core.view(bed.now);
        let of_it = view.gpus.iter().find(|view| view.uuid == gpu).unwrap();
        assert_eq!(
            of_it.left, left,
            "what the heir cannot be charged stays the node's"
        );
    }
}

#[tokio::test]
async fn a_pods_containers_are_placed_together_also_across_a_restart() {
    let mut bed = Bed::new().await;
    let containers = [0..4, 4..8, 8..20, 20..32];
    for (number, tokens) in containers.iter().enumerate() {
        let name = format!("c{number}");
        bed.admit("a", &name, Resource::DeviceMemory, set(tokens.clone()));
    }
    for tokens in containers {
        let mut answer = bed.start_device("a", tokens).await;
        assert_eq!(answered(&mut answer), Some(Ok(())));
        bed.restart().await;
    }
    assert_eq!(bed.placements().len(), 4);
    bed.assert_host_is_true();
}

#[tokio::test]
async fn tokens_that_nobody_booked_are_refused_by_name() {
    let mut bed = Bed::new().await;
    let mut answer = bed.start_device("a", 0..4).await;
    assert!(answered(&mut answer).unwrap().unwrap_err().contains("0-3"));
}

#[tokio::test]
async fn a_booking_that_the_kubelet_answered_for_us_is_bound_although_we_forgot_it() {
    let mut bed = Bed::new().await;
    bed.device("a", 0..4);
    bed.host.disk().checkpoint = None;
    bed.core = core(&bed.host, &bed.cgroups);
    bed.core.set_gpus(two_gpus(), bed.now).await;
    let mut answer = bed.start_device("a", 0..4).await;
    assert_eq!(answered(&mut answer), Some(Ok(())));
}

#[tokio::test]
async fn a_cdi_folder_that_cannot_be_written_is_an_error_the_kubelet_retries_and_nothing_is_lost() {
    let mut bed = Bed::new().await;
    bed.device("a", 0..10);
    bed.host.disk().refused.insert("describe");
    let mut answer = bed.start_device("a", 0..10).await;
    assert!(
        answered(&mut answer)
            .unwrap()
            .unwrap_err()
            .contains("describe")
    );
    assert!(bed.core.troubles().host.is_some());
    let mut again = bed.start_device("a", 0..10).await;
    assert!(answered(&mut again).unwrap().is_err());
    bed.host.disk().refused.clear();
    let mut last = bed.start_device("a", 0..10).await;
    assert_eq!(answered(&mut last), Some(Ok(())));
    assert_eq!(bed.core.troubles().host, None);
    bed.assert_host_is_true();
}

#[tokio::test]
async fn with_a_full_disk_allocate_is_answered_and_a_binding_waits_for_its_record() {
    let mut bed = Bed::new().await;
    bed.host.disk().refused.insert("persist");
    bed.device("a", 0..10);
    let mut answer = bed.start_device("a", 0..10).await;
    assert!(answered(&mut answer).unwrap().is_err());
    assert!(
        bed.host.disk().cdi.is_empty(),
        "nothing is shown that is not on record"
    );
    assert!(bed.core.troubles().checkpoint.is_some());
    bed.host.disk().refused.clear();
    bed.tick(1).await;
    assert_eq!(bed.core.troubles().checkpoint, None);
    let mut again = bed.start_device("a", 0..10).await;
    assert_eq!(answered(&mut again), Some(Ok(())));
    bed.restart().await;
    assert_eq!(bed.placements().len(), 1);
    bed.assert_host_is_true();
}

#[tokio::test]
async fn what_cannot_be_withdrawn_now_is_withdrawn_later() {
    let mut bed = Bed::new().await;
    bed.device("a", 0..10);
    bed.start_device("a", 0..10).await;
    bed.host.disk().refused.insert("withdraw cdi");
    bed.end("a").await;
    assert_eq!(bed.host.disk().cdi.len(), 1);
    bed.host.disk().refused.clear();
    bed.tick(1).await;
    bed.assert_host_is_true();
}

#[tokio::test]
async fn a_lost_gpu_keeps_its_pods_and_gets_no_new_one_until_it_is_back() {
    let mut bed = Bed::new().await;
    bed.device("a", 0..10);
    bed.start_device("a", 0..10).await;
    let before = bed.placements();
    let lost = Health::Unhealthy(Sickness::Lost);
    bed.core
        .set_gpus(
            vec![gpu("GPU-a", 0, lost), gpu("GPU-b", 1, Health::Healthy)],
            bed.now,
        )
        .await;
    assert_eq!(bed.placements(), before);
    bed.device("b", 10..26);
    bed.start_device("b", 10..26).await;
    bed.device("c", 26..30);
    let mut waits = bed.start_device("c", 26..30).await;
    assert_eq!(answered(&mut waits), None);
    bed.core.set_gpus(two_gpus(), bed.now).await;
    assert_eq!(answered(&mut waits), Some(Ok(())));
    bed.assert_host_is_true();
}

#[tokio::test]
async fn a_container_is_not_started_again_while_its_gpu_is_drained() {
    let mut bed = Bed::new().await;
    bed.device("a", 0..10);
    bed.start_device("a", 0..10).await;
    let before = bed.placements();
    for why in [Sickness::Draining, Sickness::Drained] {
        let gpus = ["GPU-a", "GPU-b"].into_iter().zip(0..);
        let gpus = gpus.map(|(uuid, minor)| gpu(uuid, minor, Health::Unhealthy(why)));
        bed.core.set_gpus(gpus.collect(), bed.now).await;
        let mut refused = bed.start_device("a", 0..10).await;
        let refused = answered(&mut refused).unwrap().unwrap_err();
        assert!(refused.contains("is drained"), "{refused}");
    }
    bed.core.set_gpus(two_gpus(), bed.now).await;
    let mut again = bed.start_device("a", 0..10).await;
    assert_eq!(answered(&mut again), Some(Ok(())));
    assert_eq!(bed.placements(), before);
}

#[tokio::test]
async fn a_booking_that_never_became_a_pod_is_collected() {
    let mut bed = Bed::new().await;
    bed.device("a", 0..10);
    let none = BTreeSet::new();
    for _ in 0..3 {
        bed.now = bed.now + Duration::from_secs(61);
        bed.core.collect(Some(&none), bed.now).await;
    }
    assert_eq!(bed.core.view(bed.now).booked, 0);
}

/// What the kubelet does, in order.
#[derive(Debug, Clone)]
enum Act {
    Admit(&'static str, std::ops::Range<u16>),
    Start(&'static str, std::ops::Range<u16>),
    End(&'static str),
}

/// Two GPUs full, a waiter, an end that lets it in, an init container's tokens used again.
fn history() -> Vec<Act> {
    use Act::{Admit, End, Start};
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

impl Bed {
    async fn act(&mut self, act: &Act) {
        match act.clone() {
            Act::Admit(pod, tokens) => drop(self.device(pod, tokens)),
            // The kubelet retries for as long as the pod lives; the answer is in the placements.
            Act::Start(pod, tokens) => {
                let answer = self.start_device(pod, tokens).await;
                // It waits on: nobody hangs up.
                std::mem::forget(answer);
            }
            Act::End(pod) => self.end(pod).await,
        }
    }

    /// The kubelet calls again for every container that has not started.
    async fn retry_all(&mut self, started: &[Act]) {
        for act in started {
            if let Act::Start(pod, tokens) = act
                && self.cgroup(pod).exists()
                && !started.iter().any(
                    |later| matches!(later, Act::Start(p, t) if p == pod && t.end > tokens.end),
                )
            {
                self.act(act).await;
            }
        }
    }
}

#[tokio::test]
async fn a_crash_before_any_step_changes_no_binding() {
    let mut undisturbed = Bed::new().await;
    for act in history() {
        undisturbed.act(&act).await;
    }
    undisturbed.assert_host_is_true();
    let (expected, steps) = (undisturbed.placements(), undisturbed.host.disk().done);
    assert!(
        expected.len() == 2 && steps > 20,
        "{expected:?} in {steps} steps"
    );
    for crash_at in 1..steps {
        let mut bed = Bed::new().await;
        bed.host.disk().crash_at = Some(crash_at);
        let mut done = Vec::new();
        for act in history() {
            bed.act(&act).await;
            done.push(act);
            let crashed = {
                let disk = bed.host.disk();
                disk.crash_at.is_some_and(|at| disk.done >= at)
            };
            if crashed {
                bed.restart().await;
                bed.assert_host_is_true();
                bed.retry_all(&done).await;
            }
        }
        bed.tick(1).await;
        bed.assert_host_is_true();
        assert_eq!(bed.placements(), expected, "crash before step {crash_at}");
    }
}

#[tokio::test]
async fn a_deleted_checkpoint_is_rebuilt_with_the_same_bindings_at_any_point() {
    for length in 1..=history().len() {
        let mut bed = Bed::new().await;
        for act in history().iter().take(length) {
            bed.act(act).await;
        }
        let before = bed.placements();
        bed.host.disk().checkpoint = None;
        bed.restart().await;
        assert_eq!(bed.placements(), before, "after {length} acts");
        bed.assert_host_is_true();
    }
}

#[tokio::test]
async fn a_pod_without_a_name_gets_the_one_that_the_kubelet_lists_with_its_tokens() {
    let mut bed = Bed::new().await;
    let listed = |pod: &str, tokens| crate::kubelet::pod_resources::Holder {
        name: crate::kubelet::pod_resources::ContainerName {
            namespace: "team".into(),
            pod: pod.into(),
            container: "main".into(),
        },
        tokens: set(tokens),
    };
    let names = |bed: &Bed| -> Vec<Option<String>> {
        let containers = bed.core.containers();
        let holders = containers.iter().map(|bound| bound.holder.clone());
        holders
            .map(|holder| Some(holder?.pod?.to_string()))
            .collect()
    };
    // As the kubelet's checkpoint has them after a rebuild: an init container's tokens are its pod's, used again.
    bed.admit("a", "init", Resource::DeviceMemory, set(0..2));
    bed.device("a", 0..4);
    bed.start_device("a", 0..4).await;
    assert_eq!(names(&bed), [None]);
    assert!(bed.core.lacks_names());
    let lists = [listed("train", 0..4)];
    // It wrote another pod's entry after it listed that.
    bed.device("b", 3..6);
    let late = bed.kubelet.pop().unwrap();
    bed.core.learn(&lists, &bed.kubelet);
    assert_eq!(names(&bed), [None]);
    bed.kubelet.push(late);
    bed.core.learn(&lists, &bed.kubelet);
    assert_eq!(
        names(&bed),
        [None],
        "the tokens may have been the other's by then"
    );
    bed.end("b").await;
    let none = BTreeSet::new();
    for _ in 0..2 {
        bed.now = bed.now + Duration::from_secs(61);
        bed.core.collect(Some(&none), bed.now).await;
    }
    bed.admit("a", "init", Resource::DeviceMemory, set(0..2));
    bed.core.learn(&lists, &bed.kubelet);
    assert_eq!(names(&bed), [Some("team/train".into())]);
    assert!(!bed.core.lacks_names());
    bed.tick(1).await;
    bed.restart().await;
    assert_eq!(names(&bed), [Some("team/train".into())], "it is on record");
    bed.host.disk().checkpoint = None;
    bed.restart().await;
    assert_eq!(names(&bed), [None]);
    bed.core.learn(&lists, &bed.kubelet);
    assert_eq!(names(&bed), [Some("team/train".into())]);
}

#[tokio::test]
async fn managed_memory_survives_a_deleted_checkpoint_by_the_kubelets_records() {
    let mut bed = Bed::new().await;
    bed.admit("a", "main", Resource::ManagedMemory, set(0..6));
    let mut answer = bed.start("a", Resource::ManagedMemory, set(0..6)).await;
    assert_eq!(answered(&mut answer), Some(Ok(())));
    let before = bed.placements();
    bed.host.disk().checkpoint = None;
    bed.restart().await;
    assert_eq!(bed.placements(), before);
}

#[tokio::test]
async fn a_container_gets_its_managed_memory_whichever_is_bound_first() {
    for managed_first in [false, true] {
        let mut bed = Bed::new().await;
        let device = bed.admit("a", "main", Resource::DeviceMemory, set(0..4));
        bed.admit("a", "main", Resource::ManagedMemory, set(0..3));
        let mut order = [
            (Resource::DeviceMemory, set(0..4)),
            (Resource::ManagedMemory, set(0..3)),
        ];
        if managed_first {
            order.reverse();
        }
        for (resource, tokens) in order {
            let mut answer = bed.start("a", resource, tokens).await;
            assert_eq!(answered(&mut answer), Some(Ok(())));
        }
        let served = BTreeMap::from([(device, Bytes::gib(3))]);
        assert_eq!(
            bed.host.disk().sockets,
            served,
            "managed first: {managed_first}"
        );
        for forgotten in [false, true] {
            // A successor serves all anew.
            let nothing = BTreeMap::from([(device, Bytes::ZERO)]);
            bed.host.disk().sockets = nothing;
            if forgotten {
                bed.host.disk().checkpoint = None;
            }
            bed.restart().await;
            assert_eq!(
                bed.host.disk().sockets,
                served,
                "after a restart; checkpoint lost: {forgotten}"
            );
        }
    }
}

#[tokio::test]
async fn managed_memory_is_its_own_containers_only() {
    let mut bed = Bed::new().await;
    let one = bed.admit("a", "one", Resource::DeviceMemory, set(0..2));
    let two = bed.admit("a", "two", Resource::DeviceMemory, set(2..4));
    let other = bed.admit("b", "two", Resource::DeviceMemory, set(4..6));
    bed.admit("a", "two", Resource::ManagedMemory, set(0..3));
    for (pod, tokens) in [("a", 0..2), ("a", 2..4), ("b", 4..6)] {
        bed.start_device(pod, tokens).await;
    }
    bed.start("a", Resource::ManagedMemory, set(0..3)).await;
    let served = BTreeMap::from([
        (one, Bytes::ZERO),
        (two, Bytes::gib(3)),
        (other, Bytes::ZERO),
    ]);
    assert_eq!(bed.host.disk().sockets, served);
}

#[tokio::test]
async fn a_checkpoint_of_another_boot_gives_no_binding_to_pods_that_died_with_it() {
    let mut bed = Bed::new().await;
    bed.device("a", 0..10);
    bed.start_device("a", 0..10).await;
    std::fs::remove_dir(bed.cgroup("a")).unwrap();
    if let Some(state) = &mut bed.host.disk().checkpoint {
        state.boot = "boot-0".into();
    }
    bed.restart().await;
    assert!(bed.placements().is_empty());
    bed.assert_host_is_true();
}

#[tokio::test]
async fn a_reboot_is_not_told_as_a_lost_checkpoint() {
    let mut bed = Bed::new().await;
    bed.device("a", 0..10);
    bed.start_device("a", 0..10).await;
    if let Some(state) = &mut bed.host.disk().checkpoint {
        state.boot = "boot-0".into();
    }
    bed.restart().await;
    assert_eq!(bed.core.troubles().rebuilt, None);
}

#[tokio::test]
async fn after_a_change_of_the_quantum_only_the_first_restart_rebuilds() {
    let mut bed = Bed::new().await;
    bed.device("a", 0..10);
    bed.start_device("a", 0..10).await;
    bed.restart_with(Quantum::Mib512).await;
    assert!(bed.core.troubles().rebuilt.is_some());
    let rebuilt = bed.placements();
    assert_eq!(rebuilt["a/0-9"], [("GPU-a".to_owned(), 20)]);
    bed.restart_with(Quantum::Mib512).await;
    assert_eq!(bed.core.troubles().rebuilt, None);
    assert_eq!(bed.placements(), rebuilt);
}

#[tokio::test]
async fn pods_that_ended_while_no_agent_ran_are_released_at_the_start() {
    let mut bed = Bed::new().await;
    bed.device("a", 0..10);
    bed.start_device("a", 0..10).await;
    std::fs::remove_dir(bed.cgroup("a")).unwrap();
    bed.restart().await;
    assert!(bed.placements().is_empty());
    bed.assert_host_is_true();
}

#[tokio::test]
async fn what_an_ended_pod_had_exported_is_bound_again_once_nobody_holds_it_past_a_restart_at_any_step()
 {
    for crash_at in 0..8 {
        let mut bed = Bed::new().await;
        let first = bed.device("first", 0..16);
        let second = bed.device("second", 16..32);
        bed.start_device("first", 0..16).await;
        bed.start_device("second", 16..32).await;
        let left = vec![("GPU-a".parse().unwrap(), Bytes::mib(300))];
        bed.host.disk().exported = [(first, left.clone()), (second, left)].into();
        bed.host.disk().held = Bytes::mib(100);
        let done = bed.host.disk().done;
        bed.host.disk().crash_at = Some(done + crash_at);
        bed.end("first").await;
        bed.restart().await;
        let free = |bed: &Bed, gpu: usize| bed.core.view(bed.now).gpus[gpu].free;
        let ended = bed.placements();
        assert_eq!(ended.len(), 1, "crash at {crash_at}: {ended:?}");
        assert_eq!(
            free(&bed, 0) + free(&bed, 1),
            Quanta(15),
            "crash at {crash_at}"
        );
        bed.device("third", 0..16);
        let mut third = bed.start_device("third", 0..16).await;
        assert_eq!(answered(&mut third), None, "crash at {crash_at}");
        bed.tick(10).await;
        let leaked: Vec<Bytes> = bed
            .core
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
        bed.host.disk().held = Bytes::ZERO;
        bed.tick(1).await;
        assert_eq!(answered(&mut third), Some(Ok(())), "crash at {crash_at}");
        bed.assert_host_is_true();
    }
}

#[tokio::test]
async fn what_is_kept_without_an_owner_is_bound_to_nobody_until_it_has_ended_and_is_proven_free() {
    let mut bed = Bed::new().await;
    let gpu: GpuUuid = "GPU-a".parse().unwrap();
    bed.device("first", 0..16);
    bed.start_device("first", 0..16).await;
    bed.tick(1).await;
    let stood = bed.host.disk().stood.clone();
    assert!(
        stood.containers.values().all(|container| {
            container.pod.as_str().contains("first") && container.gpus.contains(&gpu)
        }) && stood.containers.len() == 1,
        "{stood:?}"
    );
    let kept = BTreeMap::from([(LeaseId(7), Bytes::mib(3_500))]);
    bed.host.disk().turn.orphaned = Some(BTreeMap::from([(gpu.clone(), kept)]));
    bed.end("first").await;
    bed.restart().await;
    // The vault is not heard yet: what the checkpoint says stands.
    bed.host.disk().turn.orphaned = None;
    bed.tick(1).await;
    assert_eq!(bed.core.view(bed.now).gpus[0].free, Quanta(12));
    let mut turn = Turn {
        orphaned: Some(BTreeMap::new()),
        ..Turn::default()
    };
    // The ledger was told of it before.
    turn.left = vec![(LeaseId(7), gpu, Bytes::ZERO)];
    bed.host.disk().held = Bytes::gib(16);
    bed.host.disk().refused.insert("persist");
    bed.host.disk().turn = turn;
    bed.tick(1).await;
    assert_eq!(
        bed.host.disk().recorded,
        [],
        "its descriptor stays while it is not on record"
    );
    bed.host.disk().refused.clear();
    bed.tick(1).await;
    assert_eq!(bed.host.disk().recorded, [LeaseId(7)]);
    assert_eq!(bed.core.view(bed.now).gpus[0].free, Quanta(12));
    bed.host.disk().held = Bytes::ZERO;
    bed.tick(1).await;
    assert_eq!(bed.core.view(bed.now).gpus[0].free, Quanta(16));
}

#[tokio::test]
async fn what_a_container_kept_is_left_where_the_vault_is_not_heard_at_its_pods_end() {
    let mut bed = Bed::new().await;
    let first = bed.device("first", 0..16);
    bed.start_device("first", 0..16).await;
    let leases = vec![("GPU-a".parse().unwrap(), Bytes::gib(5))];
    bed.host.disk().leases.insert(first, leases);
    bed.host.disk().held = Bytes::gib(16);
    bed.end("first").await;
    assert_eq!(bed.core.view(bed.now).gpus[0].free, Quanta(11));
    bed.host.disk().held = Bytes::ZERO;
    bed.tick(1).await;
    assert_eq!(bed.core.view(bed.now).gpus[0].free, Quanta(16));
}

#[tokio::test]
async fn unreadable_cdi_file_stays_while_the_kubelet_knows_it() {
    let mut bed = Bed::new().await;
    let allocation = bed.device("first", 0..4);
    bed.start_device("first", 0..4).await;
    bed.host.disk().checkpoint = None;
    bed.host.disk().unread.insert(allocation);
    bed.host.disk().held = Bytes::gib(4);
    bed.restart().await;
    assert!(bed.host.disk().cdi.contains_key(&allocation));
    let free = |bed: &Bed| {
        let view = bed.core.view(bed.now);
        let gpus = view.gpus.iter();
        gpus.map(|gpu| gpu.free.0).sum::<u32>()
    };
    assert_eq!(free(&bed), 12 + 12, "what is in use is given to nobody");
    assert!(bed.core.troubles().rebuilt.is_some());
    let none = BTreeSet::new();
    bed.tick(60).await;
    bed.core.collect(Some(&none), bed.now).await;
    assert!(bed.host.disk().cdi.contains_key(&allocation));
    bed.core.collect(Some(&none), bed.now).await;
    bed.tick(1).await;
    assert!(!bed.host.disk().cdi.contains_key(&allocation));
}

#[tokio::test]
async fn after_a_lost_checkpoint_what_is_held_of_the_gpus_is_found_out_before_anything_is_bound() {
    let mut bed = Bed::new().await;
    bed.device("first", 0..4);
    bed.start_device("first", 0..4).await;
    bed.host.disk().checkpoint = None;
    bed.host.disk().held = Bytes::gib(10);
    bed.restart().await;
    let free = |bed: &Bed| {
        bed.core
            .view(bed.now)
            .gpus
            .iter()
            .map(|gpu| gpu.free.0)
            .sum::<u32>()
    };
    assert_eq!(free(&bed), 2 + 6);
    bed.host.disk().held = Bytes::ZERO;
    bed.tick(1).await;
    assert_eq!(free(&bed), 12 + 16);
}
