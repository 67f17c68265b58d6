use bursar_gpu::Gpu;
use bursar_gpu::cuda_fitness::{CudaFitness, CudaVerdict};
use bursar_gpu::health::PersistedHealth;
use bursar_ledger::units::{Bytes, LeaseId};
use proptest::prelude::*;

use super::first_starts::FIRST_START_WAIT;
use super::*;
use crate::provisioners::Program;
use crate::runtimes::{Failure, FailureClass, ManagedAccess};

/// A node whose runtimes do what the plan says.
struct Fixture {
    gpus: Vec<GpuState>,
    drained: BTreeSet<GpuUuid>,
    leases: LiveLeases,
    runtimes: BTreeMap<GpuUuid, RuntimeRecord>,
    supervision: Supervision,
    first_starts: FirstStarts,
    now: Instant,
}

fn uuid(name: &str) -> GpuUuid {
    name.parse().unwrap()
}

fn state(name: &str) -> GpuState {
    GpuState {
        gpu: Gpu {
            mig_parent: name.starts_with("MIG-").then(|| uuid("GPU-parent")),
            ..Gpu::with_uuid(name)
        },
        health: Health::Healthy,
        persisted: PersistedHealth::default(),
    }
}

impl Fixture {
    fn new(gpus: &[&str]) -> Self {
        Self {
            gpus: gpus.iter().map(|name| state(name)).collect(),
            drained: BTreeSet::new(),
            leases: LiveLeases::new(),
            runtimes: BTreeMap::new(),
            supervision: Supervision::default(),
            first_starts: FirstStarts::default(),
            now: Instant::now(),
        }
    }

    /// A node whose GPUs have runtimes already.
    fn running(gpus: &[&str]) -> Self {
        let mut node = Self::new(gpus);
        for name in gpus {
            let now = node.now;
            node.record(name).succeed(ManagedAccess::Concurrent, now);
        }
        node
    }

    fn record(&mut self, name: &str) -> &mut RuntimeRecord {
        self.runtimes.entry(uuid(name)).or_default()
    }

    fn lease(&mut self, name: &str) {
        let lease = [(LeaseId(1), Bytes::gib(1))].into();
        self.leases.insert(uuid(name), lease);
    }

    fn plan(&mut self) -> Plan {
        let inventory = Inventory::Gpus {
            driver: None,
            gpus: self.gpus.clone(),
        };
        self.plan_with(&inventory)
    }

    fn plan_with(&mut self, inventory: &Inventory) -> Plan {
        let observed = Observed {
            inventory,
            drained: &self.drained,
            leases: &self.leases,
            runtimes: &self.runtimes,
        };
        self.supervision.plan(observed, self.now)
    }

    /// The GPUs on which CUDA was tried, and when the next wait ends.
    fn tried(&mut self) -> (Vec<String>, Option<Instant>) {
        let inventory = Inventory::Gpus {
            driver: None,
            gpus: self.gpus.clone(),
        };
        let observed = Observed {
            inventory: &inventory,
            drained: &self.drained,
            leases: &self.leases,
            runtimes: &self.runtimes,
        };
        let mut plan = Plan::default();
        let tried = self.first_starts.tried(observed, self.now, &mut plan);
        let tried = tried.iter().map(GpuUuid::to_string).collect();
        (tried, plan.wake_at)
    }

    /// The runtimes to start.
    fn starts(&mut self) -> Vec<String> {
        let plan = self.plan();
        plan.start.iter().map(GpuUuid::to_string).collect()
    }
}

fn failure() -> Failure {
    Failure {
        class: FailureClass::Refused,
        reason: "802".to_owned(),
    }
}

#[test]
fn two_runtimes_start_at_a_time() {
    let mut node = Fixture::new(&["GPU-a", "GPU-b", "GPU-c"]);
    assert_eq!(node.starts(), ["GPU-a", "GPU-b"]);
    for gpu in ["GPU-a", "GPU-b"] {
        node.record(gpu).begin_start();
    }
    assert!(node.starts().is_empty());
    let now = node.now;
    node.record("GPU-b").succeed(ManagedAccess::Concurrent, now);
    assert_eq!(node.starts(), ["GPU-c"]);
    // A tenant's request starts one without a decision; it counts.
    node.record("GPU-c").begin_start();
    node.gpus.push(state("GPU-d"));
    assert!(node.starts().is_empty());
}

#[test]
fn failed_start_waits_for_its_back_off_and_for_others() {
    let mut node = Fixture::new(&["GPU-a", "GPU-b", "GPU-c"]);
    let now = node.now;
    let retry_at = node.record("GPU-a").fail_start(failure(), now);
    let plan = node.plan();
    assert_eq!(plan.start, [uuid("GPU-b"), uuid("GPU-c")]);
    assert_eq!(plan.wake_at, Some(retry_at));
    node.now = retry_at;
    assert_eq!(node.starts(), ["GPU-b", "GPU-c"], "those without a failure");
    for gpu in ["GPU-b", "GPU-c"] {
        node.record(gpu).succeed(ManagedAccess::Concurrent, now);
    }
    assert_eq!(node.starts(), ["GPU-a"]);
}

#[test]
fn gpu_is_tried_with_its_first_result_or_after_a_time() {
    let mut node = Fixture::new(&["GPU-a", "GPU-b", "GPU-c", "MIG-d"]);
    let start = node.now;
    let end = start + FIRST_START_WAIT;
    assert_eq!(node.tried(), (vec![], Some(end)));
    node.now += FIRST_START_WAIT / 2;
    let now = node.now;
    node.record("GPU-a").succeed(ManagedAccess::Concurrent, now);
    node.record("GPU-b").fail_start(failure(), now);
    node.record("GPU-c").begin_start();
    let both = || vec!["GPU-a".to_owned(), "GPU-b".to_owned()];
    assert_eq!(node.tried(), (both(), Some(end)));
    node.now = end;
    let (tried, wake_at) = node.tried();
    assert_eq!((tried.len(), wake_at), (3, None));
    // A GPU that fails while its runtime runs was tried; one whose runtime was ended was not.
    node.gpus[0].health = Health::Unhealthy(UnhealthyReason::NoAnswer);
    node.record("GPU-b").end();
    let (tried, wake_at) = node.tried();
    assert_eq!(tried, ["GPU-a", "GPU-c"]);
    assert_eq!(wake_at, Some(end + FIRST_START_WAIT));
}

#[test]
fn wait_for_a_start_begins_when_the_gpu_may_have_one() {
    let mut node = Fixture::new(&["GPU-a", "GPU-b", "GPU-c"]);
    node.gpus[0].health = Health::Unhealthy(UnhealthyReason::Lost);
    node.gpus[1].health = Health::Unhealthy(UnhealthyReason::NoAnswer);
    node.drained = [uuid("GPU-c")].into();
    assert_eq!(node.tried(), (vec![], None));
    node.now += 2 * FIRST_START_WAIT;
    node.gpus[0] = state("GPU-a");
    node.gpus[1] = state("GPU-b");
    node.drained.clear();
    let end = node.now + FIRST_START_WAIT;
    assert_eq!(node.tried(), (vec![], Some(end)));
}

#[test]
fn drained_gpu_gets_no_runtime_until_the_drain_ends() {
    let mut node = Fixture::new(&["GPU-a"]);
    node.drained = [uuid("GPU-a")].into();
    // The lease service ends the runtimes of drained GPUs.
    assert_eq!(node.plan(), Plan::default());
    node.drained.clear();
    assert_eq!(node.starts(), ["GPU-a"]);
    let mut instance = Fixture::new(&["MIG-a"]);
    instance.lease("MIG-a");
    instance.drained = [uuid("GPU-parent")].into();
    assert_eq!(instance.plan(), Plan::default());
}

#[test]
fn lost_gpu_and_one_that_waits_for_a_reset_have_none() {
    let mut node = Fixture::running(&["GPU-a", "GPU-b", "GPU-c"]);
    node.gpus[0].health = Health::Unhealthy(UnhealthyReason::Lost);
    node.gpus[1].health = Health::Unhealthy(UnhealthyReason::Xid(48));
    node.gpus[1].persisted.awaits_reset = Some(48);
    let plan = node.plan();
    assert_eq!(plan.barred, [uuid("GPU-a"), uuid("GPU-b")].into());
    assert_eq!((plan.start.len(), plan.end.len()), (0, 0));
    for gpu in ["GPU-a", "GPU-b"] {
        node.record(gpu).end();
    }
    node.gpus[0] = state("GPU-a");
    node.gpus[1] = state("GPU-b");
    let plan = node.plan();
    assert!(plan.barred.is_empty());
    assert_eq!(plan.start, [uuid("GPU-a"), uuid("GPU-b")]);
}

#[test]
fn runtime_ends_with_a_gpu_that_is_not_listed_any_more() {
    let mut node = Fixture::running(&["GPU-a", "MIG-b"]);
    node.gpus.pop();
    assert_eq!(node.plan().end, [uuid("MIG-b")].into());
}

#[test]
fn unhealthy_gpu_keeps_its_runtime_and_gets_none() {
    for reason in [UnhealthyReason::NoAnswer, UnhealthyReason::Xid(74)] {
        let mut node = Fixture::running(&["GPU-a"]);
        node.gpus[0].health = Health::Unhealthy(reason);
        assert_eq!(node.plan(), Plan::default());
        node.record("GPU-a").end();
        assert_eq!(node.plan(), Plan::default());
    }
}

#[test]
fn stuck_runtime_is_not_started_again() {
    let mut node = Fixture::new(&["GPU-a"]);
    node.record("GPU-a").set_stuck();
    assert_eq!(node.plan(), Plan::default());
    node.record("GPU-a").set_exited();
    assert_eq!(node.starts(), ["GPU-a"]);
}

#[test]
fn ended_runtime_keeps_its_report_on_managed_memory() {
    let mut node = Fixture::new(&["GPU-a", "GPU-b", "GPU-c"]);
    let now = node.now;
    for (gpu, access) in [
        ("GPU-a", ManagedAccess::Concurrent),
        ("GPU-b", ManagedAccess::Exclusive),
    ] {
        node.record(gpu).succeed(access, now);
    }
    node.record("GPU-b").end();
    // GPU-c has waited for a result.
    let tried = [uuid("GPU-a"), uuid("GPU-c")].into();
    let fitness = |verdict, lacks_concurrent_access| CudaFitness {
        verdict,
        lacks_concurrent_access,
    };
    assert_eq!(
        fitness_of_all(&node.runtimes, &tried),
        CudaFitnesses::from([
            (uuid("GPU-a"), fitness(CudaVerdict::Works, false)),
            (uuid("GPU-b"), fitness(CudaVerdict::Untried, true)),
            (uuid("GPU-c"), fitness(CudaVerdict::Works, false)),
        ])
    );
}

#[test]
fn nothing_changes_while_nvml_does_not_answer() {
    let mut node = Fixture::running(&["GPU-a"]);
    for inventory in [Inventory::Starting, Inventory::NoGpu] {
        assert_eq!(node.plan_with(&inventory), Plan::default());
    }
}

#[tokio::test]
async fn nothing_starts_before_the_first_offer() {
    let folder = tempfile::tempdir().unwrap();
    let provisioners = Arc::new(Provisioners::new(Program::without_driver(
        folder.path(),
        "no-provisioner",
    )));
    let (drain, leases) = (watch::Sender::default(), watch::Sender::default());
    let inventory = watch::Sender::new(Inventory::Gpus {
        driver: None,
        gpus: vec![state("GPU-a")],
    });
    let supervisor = Supervisor {
        provisioners: Arc::clone(&provisioners),
        inventory: inventory.subscribe(),
        drain: drain.subscribe(),
        live_leases: leases.subscribe(),
        fitness: watch::Sender::default(),
    };
    let mut fitnesses = supervisor.fitness.subscribe();
    let (offer, offered) = tokio::sync::oneshot::channel::<()>();
    let stop = CancellationToken::new();
    let offered = async { offered.await.unwrap() };
    let task = tokio::spawn(supervisor.run(offered, Instant::now, stop.clone()));
    // Changes wake the task, if it listens to them.
    inventory.send_modify(|_| {});
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(provisioners.runtimes().borrow().is_empty());
    assert!(fitnesses.borrow_and_update().is_empty());
    offer.send(()).unwrap();
    let mut runtimes = provisioners.runtimes();
    let has_failed = |all: &BTreeMap<GpuUuid, RuntimeRecord>| {
        all.get(&uuid("GPU-a"))
            .is_some_and(|record| record.failures_in_a_row() >= 2)
    };
    let tried = tokio::time::timeout(Duration::from_secs(20), runtimes.wait_for(has_failed));
    assert!(tried.await.is_ok(), "it starts, and again");
    let verdict = |fitnesses: &CudaFitnesses| Some(fitnesses.get(&uuid("GPU-a"))?.verdict);
    assert_ne!(verdict(&fitnesses.borrow()), Some(CudaVerdict::Untried));
    stop.cancel();
    task.await.unwrap();
}

#[test]
fn mig_runtime_lasts_from_first_lease_until_after_the_last() {
    let mut node = Fixture::new(&["MIG-a"]);
    assert_eq!(node.plan(), Plan::default());
    node.lease("MIG-a");
    assert_eq!(node.starts(), ["MIG-a"]);
    let start = node.now;
    node.record("MIG-a")
        .succeed(ManagedAccess::Concurrent, start);
    node.now += 2 * IDLE_MIG;
    assert_eq!(node.plan(), Plan::default());
    node.leases.clear();
    let plan = node.plan();
    assert_eq!(
        (plan.end.len(), plan.wake_at),
        (0, Some(node.now + IDLE_MIG))
    );
    // Another lease begins the time again.
    node.now += IDLE_MIG / 2;
    node.lease("MIG-a");
    node.plan();
    node.leases.clear();
    node.plan();
    node.now += IDLE_MIG / 2;
    assert!(node.plan().end.is_empty());
    node.now += IDLE_MIG / 2;
    assert_eq!(node.plan().end, [uuid("MIG-a")].into());
    node.record("MIG-a").end();
    assert_eq!(node.plan(), Plan::default());
}

/// A change of the node of [`NAMES`].
#[derive(Clone, Debug)]
enum Change {
    Health(usize, Health),
    Drain(usize, bool),
    Lease(usize, bool),
    EndOfStart(usize, bool),
    Wait(u64),
}

const NAMES: [&str; 4] = ["GPU-a", "GPU-b", "GPU-c", "MIG-d"];

fn change() -> impl Strategy<Value = Change> {
    let gpu = 0..NAMES.len();
    let health = prop_oneof![
        Just(Health::Healthy),
        Just(Health::Unhealthy(UnhealthyReason::NoAnswer)),
        Just(Health::Unhealthy(UnhealthyReason::Lost)),
    ];
    prop_oneof![
        (gpu.clone(), health).prop_map(|(gpu, health)| Change::Health(gpu, health)),
        (gpu.clone(), any::<bool>()).prop_map(|(gpu, drain)| Change::Drain(gpu, drain)),
        (gpu.clone(), any::<bool>()).prop_map(|(gpu, lease)| Change::Lease(gpu, lease)),
        (gpu, any::<bool>()).prop_map(|(gpu, good)| Change::EndOfStart(gpu, good)),
        (0..700_u64).prop_map(Change::Wait),
    ]
}

impl Fixture {
    fn apply(&mut self, change: &Change) {
        match *change {
            Change::Health(gpu, health) => self.gpus[gpu].health = health,
            Change::Drain(gpu, true) => {
                self.drained.insert(uuid(NAMES[gpu]));
                self.record(NAMES[gpu]).end();
            }
            Change::Drain(gpu, false) => drop(self.drained.remove(&uuid(NAMES[gpu]))),
            Change::Lease(gpu, true) => self.lease(NAMES[gpu]),
            Change::Lease(gpu, false) => drop(self.leases.remove(&uuid(NAMES[gpu]))),
            Change::EndOfStart(gpu, good) => {
                let now = self.now;
                let record = self.record(NAMES[gpu]);
                match (record.activity(), good) {
                    (Activity::Starting, true) => record.succeed(ManagedAccess::Concurrent, now),
                    (Activity::Starting, false) => drop(record.fail(failure(), now)),
                    _ => {}
                }
            }
            Change::Wait(seconds) => self.now += Duration::from_secs(seconds),
        }
    }

    /// Carries out what is planned. Returns the GPUs whose runtimes it starts.
    fn carry_out(&mut self) -> Vec<GpuUuid> {
        let plan = self.plan();
        for gpu in plan.barred.iter().chain(&plan.end) {
            self.record(gpu.as_str()).end();
        }
        for gpu in &plan.start {
            self.record(gpu.as_str()).begin_start();
        }
        plan.start
    }

    /// Whether a start is due by the table of this module.
    fn may_start(&self, gpu: &GpuUuid) -> bool {
        let healthy = self
            .gpus
            .iter()
            .any(|state| state.gpu.uuid == *gpu && state.health.is_healthy());
        let record = self.runtimes.get(gpu).cloned().unwrap_or_default();
        healthy
            && !self.drained.contains(gpu)
            && (!gpu.is_mig() || self.leases.contains_key(gpu))
            && record.activity() == Activity::Stopped
            && record.retry_at().is_none_or(|at| at <= self.now)
    }
}

proptest! {
    #[test]
    fn starts_are_bounded_allowed_and_not_forgotten(
        changes in proptest::collection::vec(change(), 0..60),
    ) {
        let mut node = Fixture::new(&NAMES);
        for change in &changes {
            node.apply(change);
            let due: Vec<_> = NAMES.map(uuid).into_iter().filter(|gpu| node.may_start(gpu)).collect();
            let starting = |node: &Fixture| {
                let active = node.runtimes.values();
                active
                    .filter(|record| record.activity() == Activity::Starting)
                    .count()
            };
            let before = starting(&node);
            let started = node.carry_out();
            prop_assert!(started.iter().all(|gpu| due.contains(gpu)), "{started:?} of {due:?}");
            prop_assert!(starting(&node) <= STARTS_AT_A_TIME);
            // A start that ends only now makes room for the next decision.
            let is_full = before + started.len() == STARTS_AT_A_TIME;
            prop_assert!(started.len() == due.len() || is_full);
        }
        // Each GPU that is well in the end gets its runtime.
        for gpu in 0..NAMES.len() {
            node.apply(&Change::Health(gpu, Health::Healthy));
            node.apply(&Change::Drain(gpu, false));
        }
        for _ in 0..NAMES.len() {
            node.apply(&Change::Wait(10));
            node.carry_out();
            for gpu in 0..NAMES.len() {
                node.apply(&Change::EndOfStart(gpu, true));
            }
        }
        for gpu in ["GPU-a", "GPU-b", "GPU-c"] {
            let is_running = matches!(node.record(gpu).activity(), Activity::Running { .. });
            prop_assert!(is_running);
        }
    }
}
