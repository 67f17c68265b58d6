//! Tests the plan against a simulated namespace: late quotas, excess pods, crashes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bursar_crds::budget::MAX_EVICTIONS;
use bursar_crds::conditions::budget as names;
use bursar_crds::context_policy::{ContextAction, ContextPolicy, FaultAction};
use bursar_crds::gpu_node::{Fault, FaultKind};
use bursar_crds::{GpuMemoryBudget, Quantum};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use proptest::prelude::*;
use serde_json::json;

use super::plan::plan_without_budget;
use super::{AffectedPod, BudgetInputs, Cohort, ReportedUsage};
use super::{
    ObservedQuota, ParsedSpec, Plan, QuotaKind, Remedy, Step, excess_pods, is_exceeded, plan,
    remedy,
};
use crate::cluster::facts::pod::{JobRef, Owner, Placement, PodFacts, PriorityKind};
use crate::cluster::on_node::on_node;
use crate::property_cases::cases;
use crate::quanta::Quanta;

/// How many seconds other machines' clocks are ahead of the API server's.
#[derive(Clone, Copy, Debug, Default)]
struct Skew {
    operator: i64,
    node: i64,
}

/// Clocks that agree, and clocks that are an hour ahead or behind.
fn skews() -> impl Strategy<Value = Skew> {
    let off = || prop::sample::select([-3_600, 0, 3_600].as_slice());
    (off(), off()).prop_map(|(operator, node)| Skew { operator, node })
}

/// A namespace as the API server has it.
struct Namespace {
    budget: GpuMemoryBudget,
    quotas: BTreeMap<QuotaKind, ObservedQuota>,
    labelled: bool,
    pods: BTreeMap<String, PodFacts>,
    /// The API server's clock.
    second: i64,
    skew: Skew,
    /// The faults by pod, each with the time at which the operator first observed it.
    faults: Vec<(String, Fault, i64)>,
    /// Since when the status has said that the budget is exceeded.
    exceeded: Option<i64>,
    /// The policies of the Jobs read so far.
    jobs: BTreeMap<String, bool>,
    /// How long PodDisruptionBudgets have refused evictions.
    refused: BTreeMap<String, Duration>,
    /// How long evictions have been refused or have failed.
    ineffective: BTreeMap<String, Duration>,
    /// How many evictions were requested for each pod.
    evicted: BTreeMap<String, usize>,
}

const REPLICA_SET: Owner = Owner::Other { uid: String::new() };

fn request(uid: &str, class: PriorityKind, device: u64, created: i64) -> PodFacts {
    PodFacts {
        api_uid: uid.to_owned(),
        created: Timestamp::from_second(created).unwrap(),
        placement: Placement::Node("n".to_owned()),
        owner: REPLICA_SET,
        kind: class,
        device: Quanta::new(device),
        ..PodFacts::default()
    }
}

impl Namespace {
    fn new(guaranteed: u64, limit: u64) -> Self {
        let budget = json!({
            "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget",
            "metadata": { "name": "default", "namespace": "team", "uid": "b", "generation": 1 },
            "spec": { "deviceMemory": { "guaranteed": format!("{guaranteed}Gi"), "limit": format!("{limit}Gi") } },
        });
        Self {
            budget: serde_json::from_value(budget).unwrap(),
            quotas: BTreeMap::new(),
            labelled: false,
            pods: BTreeMap::new(),
            second: 1_000,
            skew: Skew::default(),
            faults: Vec::new(),
            exceeded: None,
            jobs: BTreeMap::new(),
            refused: BTreeMap::new(),
            ineffective: BTreeMap::new(),
            evicted: BTreeMap::new(),
        }
    }

    fn parsed(&self) -> ParsedSpec {
        ParsedSpec::of(&self.budget.spec, Quantum::Gib1).unwrap()
    }

    fn inputs(&self) -> BudgetInputs {
        BudgetInputs {
            default_action: ContextAction::default(),
            quantum: Quantum::Gib1,
            requested: self.pods.values().collect(),
            pods: self
                .pods
                .iter()
                .map(|(name, request)| (name.clone(), Arc::new(request.clone())))
                .collect(),
            refused_for: self.refused.clone(),
            evictions_ineffective_for: self.ineffective.clone(),
            exceeded_for: is_exceeded(&self.budget)
                .then(|| self.since(self.exceeded.unwrap_or(self.second))),
            cohort: Cohort {
                nodes: 1,
                allocatable: Quanta::new(1000),
                ..Cohort::default()
            },
            guaranteed_quota: self.quotas.get(&QuotaKind::Guaranteed).cloned(),
            limit_quota: self.quotas.get(&QuotaKind::Limit).cloned(),
            failed_step: None,
            is_labelled: self.labelled,
            affected_pods: self
                .faults
                .iter()
                .filter_map(|(pod, fault, since)| {
                    Some(AffectedPod {
                        pod: pod.clone(),
                        request: on_node("n", Arc::new(self.pods.get(pod)?.clone()))?,
                        fault: fault.clone(),
                        observed_for: self.since(*since),
                    })
                })
                .collect(),
            jobs_ignoring_disruption: self.jobs.clone(),
            reported: ReportedUsage::default(),
        }
    }

    fn since(&self, second: i64) -> Duration {
        Duration::from_secs((self.second - second).unsigned_abs())
    }

    fn plan(&self) -> Plan {
        let now = Time(Timestamp::from_second(self.second + self.skew.operator).unwrap());
        plan(&self.budget, &self.inputs(), &now)
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::ApplyQuota(kind, desired) => {
                let before = self.quotas.remove(&kind);
                let (in_force, taken_up) = before
                    .map(|quota| (quota.status_hard, quota.status_updated))
                    .unwrap_or_default();
                let quota = ObservedQuota {
                    uid: String::new(),
                    spec: desired,
                    status_hard: in_force,
                    status_updated: taken_up,
                };
                self.quotas.insert(kind, quota);
            }
            Step::LabelNamespace => self.labelled = true,
            Step::Evict { pod, .. } => {
                *self.evicted.entry(pod.uid).or_default() += 1;
                if let Some(request) = self.pods.get_mut(&pod.pod) {
                    request.terminating = true;
                }
            }
            Step::ReadJob(job) => drop(self.jobs.insert(job.uid, job.name == "lets-go")),
            Step::ApplyStatus(status) => {
                self.budget.status = Some(*status);
                let since = self.exceeded.unwrap_or(self.second);
                self.exceeded = is_exceeded(&self.budget).then_some(since);
            }
        }
    }

    /// The controller manager copies quotas, and kubelets end pods.
    fn others(&mut self, copies: bool) {
        self.second += 1;
        self.pods.retain(|_, request| !request.terminating);
        if copies {
            let now = Time(Timestamp::from_second(self.second).unwrap());
            for quota in self.quotas.values_mut() {
                if quota.status_hard != quota.spec.hard {
                    quota.status_hard.clone_from(&quota.spec.hard);
                    quota.status_updated = Some(now.clone());
                }
            }
        }
    }

    /// Lowers the budget.
    fn shrink(&mut self, limit: u64) {
        self.budget.spec.device_memory.guaranteed = format!("{limit}Gi").as_str().into();
        self.budget.spec.device_memory.limit = None;
        self.budget.metadata.generation = Some(2);
    }

    /// Plans and applies until the plan is empty.
    fn settle(&mut self) {
        for _ in 0..200 {
            self.others(true);
            let plan = self.plan();
            if plan == Plan::default() {
                return;
            }
            plan.steps.into_iter().for_each(|step| self.take(step));
        }
        panic!("no fixed point: {:?}", self.plan());
    }

    fn requested(&self, of: impl Fn(&PodFacts) -> bool) -> i64 {
        let pods = self.pods.values().filter(|request| of(request));
        pods.map(|request| request.device.count()).sum()
    }

    fn holds(&self, type_: &str) -> bool {
        let status = self.budget.status.as_ref().expect("a status is written");
        let mut conditions = status.conditions.iter();
        conditions.any(|condition| condition.type_ == type_ && condition.status == "True")
    }
}

#[test]
fn new_budget_gets_quotas_then_label_then_nothing() {
    let mut namespace = Namespace::new(16, 24);
    let first = namespace.plan();
    let written = |step: &Step| matches!(step, Step::ApplyQuota(..));
    assert_eq!(first.steps.iter().filter(|step| written(step)).count(), 2);
    assert!(
        !first.steps.contains(&Step::LabelNamespace),
        "not in force yet"
    );
    namespace.settle();
    assert!(
        namespace.labelled && namespace.holds(names::ENFORCED) && namespace.holds(names::READY)
    );
}

#[test]
fn new_or_lowered_budget_evicts_no_running_pod() {
    for operator in [-3_600, 0, 3_600] {
        nobody_goes(Skew { operator, node: 0 });
    }
}

fn nobody_goes(skew: Skew) {
    let mut namespace = Namespace::new(16, 16);
    namespace.skew = skew;
    let old = request("old", PriorityKind::Guaranteed, 40, 900);
    namespace.pods.insert("old".to_owned(), old);
    namespace.settle();
    assert!(namespace.holds(names::EXCEEDED));
    namespace.shrink(8);
    namespace.second += 100;
    namespace.settle();
    namespace.second += 1000;
    namespace.settle();
    assert!(namespace.evicted.is_empty());
}

#[test]
fn lowered_budget_evicts_no_admitted_pod_after_missed_status() {
    let mut namespace = Namespace::new(100, 100);
    namespace.settle();
    namespace.second += 100;
    let pod = request(
        "admitted",
        PriorityKind::Guaranteed,
        60,
        namespace.second - 10,
    );
    namespace.pods.insert("admitted".to_owned(), pod);
    namespace.settle();
    namespace.shrink(50);
    let first = namespace.plan().steps.into_iter().next();
    assert!(
        matches!(first, Some(Step::ApplyStatus(_))),
        "before the quotas: {first:?}"
    );
    // The status write was lost.
    let quotas = namespace.plan().steps.into_iter();
    let quotas: Vec<_> = quotas
        .filter(|step| matches!(step, Step::ApplyQuota(..)))
        .collect();
    quotas.into_iter().for_each(|step| namespace.take(step));
    namespace.settle();
    namespace.second += 1000;
    namespace.settle();
    assert!(namespace.holds(names::EXCEEDED) && namespace.evicted.is_empty());
}

#[test]
fn excess_pod_gets_its_pdb_grace_after_long_overage() {
    let mut namespace = Namespace::new(16, 16);
    let old = request("old", PriorityKind::Guaranteed, 40, 900);
    namespace.pods.insert("old".to_owned(), old);
    namespace.settle();
    namespace.second += 10_000;
    let late = request("late", PriorityKind::Borrowed, 4, namespace.second - 10);
    namespace.pods.insert("late".to_owned(), late);
    let status = namespace.plan().steps;
    status
        .into_iter()
        .filter(|step| matches!(step, Step::ApplyStatus(_)))
        .for_each(|step| namespace.take(step));
    let forced = |namespace: &Namespace| match &namespace.plan().steps[..] {
        [Step::Evict { pod, by_force }] if pod.uid == "late" => *by_force,
        other => panic!("{other:?}"),
    };
    assert!(!forced(&namespace), "nobody has asked");
    for (second, by_force) in [(59, false), (60, true)] {
        let refused = ("late".to_owned(), Duration::from_secs(second));
        namespace.refused = [refused].into();
        assert_eq!(forced(&namespace), by_force);
    }
}

#[test]
fn excess_pods_are_evicted_newest_borrower_first() {
    let mut namespace = Namespace::new(16, 24);
    namespace.settle();
    namespace.second += 100;
    let now = namespace.second;
    for (name, class, device, created) in [
        ("a", PriorityKind::Guaranteed, 16, now - 50),
        ("b", PriorityKind::Borrowed, 4, now - 40),
        ("c", PriorityKind::Borrowed, 4, now - 30),
        ("d", PriorityKind::Borrowed, 4, now - 20),
    ] {
        let pod = request(name, class, device, created);
        namespace.pods.insert(name.to_owned(), pod);
    }
    let evicts = |plan: &Plan| {
        let mut steps = plan.steps.iter();
        steps.any(|step| matches!(step, Step::Evict { .. }))
    };
    assert!(!evicts(&namespace.plan()), "no status yet");
    namespace
        .plan()
        .steps
        .into_iter()
        .for_each(|step| namespace.take(step));
    let waiting = namespace.plan();
    assert!(!evicts(&waiting) && waiting.requeue_after.is_some());
    namespace.second += 5;
    assert!(evicts(&namespace.plan()));
    namespace.settle();
    assert_eq!(namespace.evicted, BTreeMap::from([("d".to_owned(), 1)]));
    assert!(!namespace.holds(names::EXCEEDED));
}

#[test]
fn edited_quota_is_restored_and_job_pods_stay() {
    let mut namespace = Namespace::new(16, 16);
    namespace.settle();
    namespace.second += 100;
    let mut pod = request("j", PriorityKind::Guaranteed, 20, namespace.second - 10);
    pod.owner = job("would-fail");
    namespace.pods.insert("j".to_owned(), pod);
    let quota = namespace.quotas.get_mut(&QuotaKind::Limit).unwrap();
    quota
        .spec
        .hard
        .values_mut()
        .for_each(|most| *most = Quanta::new(99));
    quota.status_hard.clone_from(&quota.spec.hard);
    namespace.settle();
    assert!(namespace.evicted.is_empty() && namespace.holds(names::EXCEEDED));
    let limit = &namespace.quotas[&QuotaKind::Limit];
    assert_eq!(
        limit.status_hard["requests.bursar.dev/gpu-memory-gib"],
        Quanta::new(16)
    );
}

#[test]
fn pod_admitted_by_edited_or_deleted_quota_is_excess() {
    for gone in [false, true] {
        let mut namespace = Namespace::new(16, 16);
        namespace.settle();
        namespace.second += 100;
        for kind in QuotaKind::ALL {
            let mut quota = namespace.quotas.remove(&kind).unwrap();
            let raise = |most: &mut Quanta| *most = Quanta::new(99);
            quota.spec.hard.values_mut().for_each(raise);
            quota.status_hard.clone_from(&quota.spec.hard);
            if !gone {
                namespace.quotas.insert(kind, quota);
            }
        }
        for name in ["a", "b"] {
            let pod = request(name, PriorityKind::Guaranteed, 12, namespace.second);
            namespace.pods.insert(name.to_owned(), pod);
        }
        namespace.settle();
        assert!(!namespace.holds(names::EXCEEDED) && namespace.holds(names::ENFORCED));
        assert_eq!(namespace.evicted, BTreeMap::from([("a".to_owned(), 1)]));
    }
}

#[test]
fn enforced_since_is_the_later_quotas_time_or_absent() {
    let mut namespace = Namespace::new(16, 16);
    namespace.skew.operator = 3_600;
    namespace.settle();
    let later = Some(Time(Timestamp::from_second(1_500).unwrap()));
    let limit = namespace.quotas.get_mut(&QuotaKind::Limit).unwrap();
    limit.status_updated.clone_from(&later);
    for expected in [later, None] {
        namespace.budget.status.as_mut().unwrap().enforced_since = None;
        namespace.settle();
        let status = namespace.budget.status.as_ref().unwrap();
        assert_eq!(status.enforced_since, expected);
        namespace
            .quotas
            .get_mut(&QuotaKind::Limit)
            .unwrap()
            .status_updated = None;
    }
}

fn job(name: &str) -> Owner {
    Owner::Job(JobRef {
        name: name.to_owned(),
        uid: name.to_owned(),
    })
}

#[test]
fn job_pod_is_evicted_if_job_ignores_it_and_never_deleted() {
    let mut namespace = Namespace::new(16, 16);
    namespace.settle();
    namespace.second += 100;
    for (name, created) in [("would-fail", 5), ("lets-go", 10), ("before", 20)] {
        let mut pod = request(
            name,
            PriorityKind::Guaranteed,
            16,
            namespace.second - created,
        );
        if name != "before" {
            pod.owner = job(name);
        }
        namespace.pods.insert(name.to_owned(), pod);
    }
    namespace
        .plan()
        .steps
        .into_iter()
        .for_each(|step| namespace.take(step));
    namespace.second += 100;
    let plan = namespace.plan();
    assert!(
        matches!(plan.steps[..], [Step::ReadJob(_), Step::ReadJob(_), ..]),
        "{plan:?}"
    );
    plan.steps.into_iter().for_each(|step| namespace.take(step));
    for step in namespace.plan().steps {
        let forced = matches!(&step, Step::Evict { pod, by_force: true } if pod.uid != "before");
        assert!(!forced, "{step:?}");
    }
    namespace.settle();
    let gone: Vec<_> = namespace.evicted.keys().collect();
    assert_eq!(gone, ["before", "lets-go"]);
}

fn fault(id: &str, kind: FaultKind, action: FaultAction, second: i64) -> Fault {
    Fault {
        id: id.to_owned(),
        kind,
        gpu: "GPU-a".to_owned(),
        gpu_generation: 1,
        cuda_error: Some(700),
        xid: None,
        action: Some(action),
        container: None,
        time: Time(Timestamp::from_second(second).unwrap()),
    }
}

impl Namespace {
    /// A budget in force, with one pod for each name.
    fn running(action: ContextAction, pods: &[&str]) -> Self {
        let mut namespace = Self::new(100, 100);
        namespace.budget.spec.context_policy = Some(ContextPolicy {
            action: Some(action),
            ..ContextPolicy::default()
        });
        for pod in pods {
            let request = request(pod, PriorityKind::Guaranteed, 1, namespace.second);
            namespace.pods.insert((*pod).to_owned(), request);
        }
        namespace.settle();
        namespace
    }

    fn strike(&mut self, pod: &str, kind: FaultKind, action: FaultAction) {
        let fault = fault(
            &format!("f-{pod}"),
            kind,
            action,
            self.second + self.skew.node,
        );
        self.faults.push((pod.to_owned(), fault, self.second));
    }

    fn on_record(&self) -> Vec<(&str, &str)> {
        let status = self.budget.status.as_ref().unwrap();
        let evictions = status.evictions.iter();
        evictions
            .map(|eviction| (eviction.pod.as_str(), eviction.reason.as_str()))
            .collect()
    }
}

#[test]
fn remedy_follows_agent_action_and_current_policy() {
    use ContextAction as Now;
    use FaultAction as Agent;
    let evict = |reason| Some(Remedy::Evict(reason));
    let restart = Some(Remedy::Restart);
    let table = [
        (Agent::InPlace, [None; 5]),
        (Agent::Process, [None; 5]),
        (Agent::Restart, [None; 5]),
        (
            Agent::Report,
            [restart, restart, restart, evict("ContextPolicy"), None],
        ),
        (
            Agent::Evict,
            [restart, restart, restart, evict("ContextPolicy"), None],
        ),
        (
            Agent::BeyondMaximum,
            [
                evict("TooManyRestarts"),
                evict("TooManyRestarts"),
                evict("TooManyRestarts"),
                evict("TooManyRestarts"),
                None,
            ],
        ),
    ];
    for (agent, wanted) in table {
        for (action, wanted) in ContextAction::ALL.into_iter().zip(wanted) {
            let of_context = fault("f", FaultKind::Context, agent, 0);
            assert_eq!(remedy(&of_context, action), wanted, "{agent:?}, {action:?}");
            let of_gpu = fault("f", FaultKind::Gpu, Agent::ResetGpu, 0);
            let expected = evict("GpuFault").filter(|_| action != Now::Report);
            assert_eq!(remedy(&of_gpu, action), expected);
            let undecided = Fault {
                action: None,
                ..of_context
            };
            assert_eq!(remedy(&undecided, action), None);
        }
    }
}

#[test]
fn fault_eviction_is_recorded_first_and_stays_recorded() {
    let mut namespace = Namespace::running(ContextAction::Restart, &["a", "b"]);
    namespace.strike("a", FaultKind::Context, FaultAction::BeyondMaximum);
    let first = namespace.plan();
    assert!(
        matches!(first.steps[..], [Step::ApplyStatus(_)]),
        "{first:?}"
    );
    namespace.settle();
    assert_eq!(namespace.evicted, BTreeMap::from([("a".to_owned(), 1)]));
    assert_eq!(namespace.on_record(), [("a", "TooManyRestarts")]);
    namespace.faults.clear();
    namespace.second += 10_000;
    namespace.settle();
    assert_eq!(namespace.on_record(), [("a", "TooManyRestarts")]);
}

#[test]
fn gpu_fault_evicts_replaceable_pod_after_its_grace() {
    let pods = ["bare", "lets-go", "other", "would-fail"];
    let mut namespace = Namespace::running(ContextAction::Restart, &pods);
    namespace.pods.get_mut("bare").unwrap().owner = Owner::Unowned;
    for name in ["lets-go", "would-fail"] {
        namespace.pods.get_mut(name).unwrap().owner = job(name);
    }
    pods.iter()
        .for_each(|pod| namespace.strike(pod, FaultKind::Gpu, FaultAction::ResetGpu));
    namespace
        .plan()
        .steps
        .into_iter()
        .for_each(|step| namespace.take(step));
    let early = namespace.plan();
    assert_eq!(early.steps, []);
    assert!(early.requeue_after.is_some());
    namespace.second += 30;
    namespace.settle();
    let gone: Vec<_> = namespace.evicted.keys().collect();
    assert_eq!(gone, ["lets-go", "other"]);
}

/// The pods that are evicted without a budget where this action is the cluster's default.
fn evicted_without_budget(namespace: &Namespace, default_action: ContextAction) -> Vec<String> {
    let inputs = BudgetInputs {
        default_action,
        ..namespace.inputs()
    };
    let steps = plan_without_budget(&inputs).steps.into_iter();
    let evicted = steps.filter_map(|step| match step {
        Step::Evict { pod, .. } => Some(pod.pod),
        _ => None,
    });
    evicted.collect()
}

#[test]
fn without_budget_faults_evict_by_the_default_action() {
    let mut namespace = Namespace::new(100, 100);
    for pod in ["beyond", "on-gpu", "reported"] {
        let request = request(pod, PriorityKind::Guaranteed, 1, namespace.second);
        namespace.pods.insert(pod.to_owned(), request);
    }
    namespace.strike("beyond", FaultKind::Context, FaultAction::BeyondMaximum);
    namespace.strike("on-gpu", FaultKind::Gpu, FaultAction::ResetGpu);
    namespace.strike("reported", FaultKind::Context, FaultAction::Report);
    for default in ContextAction::DEFAULTS {
        let evicted = evicted_without_budget(&namespace, default);
        let expected = ["beyond"]
            .iter()
            .filter(|_| default != ContextAction::Report);
        assert!(evicted.iter().eq(expected), "{default:?}: {evicted:?}");
    }
    namespace.second += 30;
    let evicted = evicted_without_budget(&namespace, ContextAction::Process);
    assert_eq!(evicted, ["beyond", "on-gpu"]);
}

#[test]
fn without_budget_ineffective_evictions_block_no_others() {
    let names: Vec<String> = (0..30).map(|number| format!("p{number:02}")).collect();
    let mut namespace = Namespace::new(100, 100);
    for name in &names {
        let request = request(name, PriorityKind::Guaranteed, 1, namespace.second);
        namespace.pods.insert(name.clone(), request);
        namespace.strike(name, FaultKind::Context, FaultAction::BeyondMaximum);
    }
    for name in &names[..10] {
        let ineffective = (name.clone(), Duration::from_secs(5));
        namespace.ineffective.extend([ineffective]);
    }
    let evicted = evicted_without_budget(&namespace, ContextAction::Process);
    assert_eq!(evicted, names[10..10 + MAX_EVICTIONS]);
}

#[test]
fn evictions_wait_for_room_in_the_status_and_all_happen() {
    let names: Vec<String> = (0..30).map(|number| format!("p{number:02}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut namespace = Namespace::running(ContextAction::Evict, &names);
    names
        .iter()
        .for_each(|pod| namespace.strike(pod, FaultKind::Context, FaultAction::Evict));
    for _ in 0..20 {
        let plan = namespace.plan();
        let evicts = plan
            .steps
            .iter()
            .filter(|step| matches!(step, Step::Evict { .. }));
        assert!(evicts.count() <= MAX_EVICTIONS);
        plan.steps.into_iter().for_each(|step| namespace.take(step));
        namespace.others(true);
    }
    assert!(namespace.pods.is_empty());
    assert!(namespace.evicted.values().all(|times| *times == 1));
    assert_eq!(namespace.on_record().len(), MAX_EVICTIONS);
}

#[test]
fn ineffective_evictions_block_no_others() {
    let names: Vec<String> = (0..=MAX_EVICTIONS)
        .map(|number| format!("p{number}"))
        .collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let (last, stuck) = names.split_last().unwrap();
    let mut namespace = Namespace::running(ContextAction::Evict, &names);
    let strikes = |namespace: &mut Namespace, pod: &str| {
        namespace.strike(pod, FaultKind::Context, FaultAction::Evict);
    };
    stuck.iter().for_each(|pod| strikes(&mut namespace, pod));
    let writes_status = |namespace: &mut Namespace| {
        let steps = namespace.plan().steps.into_iter();
        let status_writes: Vec<_> = steps
            .filter(|step| matches!(step, Step::ApplyStatus(_)))
            .collect();
        let is_written = !status_writes.is_empty();
        status_writes
            .into_iter()
            .for_each(|step| namespace.take(step));
        is_written
    };
    assert!(writes_status(&mut namespace));
    strikes(&mut namespace, last);
    let lasted = |namespace: &mut Namespace, seconds| {
        let lasted = Duration::from_secs(seconds);
        namespace.ineffective = stuck
            .iter()
            .map(|pod| ((*pod).to_owned(), lasted))
            .collect();
    };
    let recorded = |namespace: &Namespace| -> Vec<_> {
        let records = namespace.on_record().into_iter();
        records.map(|(pod, _)| pod.to_owned()).collect()
    };
    lasted(&mut namespace, 89);
    // The status counts the fault of the last pod too.
    assert!(writes_status(&mut namespace));
    let full = recorded(&namespace);
    assert!(!full.iter().any(|pod| pod == last), "{full:?}");
    lasted(&mut namespace, 90);
    assert!(writes_status(&mut namespace));
    let first = recorded(&namespace);
    assert_eq!((first.len(), &*first[0]), (MAX_EVICTIONS, *last));
    let mut steps = namespace.plan().steps.into_iter();
    assert!(steps.any(|step| matches!(step, Step::Evict { pod, .. } if pod.pod == **last)));
    assert!(!writes_status(&mut namespace), "the dropped pod waits");
    let dropped = stuck
        .iter()
        .find(|pod| !first.iter().any(|name| name == **pod))
        .unwrap();
    namespace.ineffective.remove(*dropped);
    assert!(namespace.plan().requeue_after.is_some());
    assert!(writes_status(&mut namespace));
    assert_eq!(recorded(&namespace)[0], **dropped);
}

#[test]
fn records_of_recovered_pods_make_room_for_new_ones() {
    let names: Vec<String> = (0..20).map(|number| format!("p{number:02}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut namespace = Namespace::running(ContextAction::Evict, &names);
    for pod in names {
        namespace.strike(pod, FaultKind::Context, FaultAction::Evict);
        namespace
            .plan()
            .steps
            .into_iter()
            .for_each(|step| namespace.take(step));
        assert_eq!(namespace.on_record()[0].0, pod);
        // The agent restarted the process by itself.
        namespace.faults.clear();
        namespace.settle();
    }
    assert_eq!(namespace.evicted.len(), 0);
}

#[test]
fn blocked_pod_is_deleted_after_grace_unless_of_a_job() {
    for (owner, forced) in [(REPLICA_SET, true), (job("lets-go"), false)] {
        let mut namespace = Namespace::running(ContextAction::Evict, &["a"]);
        namespace.pods.get_mut("a").unwrap().owner = owner;
        namespace.strike("a", FaultKind::Context, FaultAction::Evict);
        namespace
            .plan()
            .steps
            .into_iter()
            .for_each(|step| namespace.take(step));
        let by_force = |plan: Plan| {
            let steps = plan.steps.into_iter();
            steps
                .filter_map(|step| match step {
                    Step::Evict { by_force, .. } => Some(by_force),
                    _ => None,
                })
                .collect::<Vec<_>>()
        };
        // The record may be old when an operator first requests the eviction.
        namespace.second += 10_000;
        assert_eq!(by_force(namespace.plan()), [false], "nobody has asked");
        for (second, by_now) in [(59, false), (60, forced)] {
            namespace.refused = [("a".to_owned(), Duration::from_secs(second))].into();
            assert_eq!(by_force(namespace.plan()), [by_now]);
        }
    }
}

#[test]
fn borrower_over_limit_is_evicted_whatever_its_job_says() {
    let mut namespace = Namespace::new(16, 16);
    namespace.settle();
    namespace.second += 100;
    for (name, class) in [
        ("owns", PriorityKind::Guaranteed),
        ("borrows", PriorityKind::Borrowed),
    ] {
        let mut pod = request(name, class, 16, namespace.second - 10);
        pod.owner = job("would-fail");
        namespace.pods.insert(name.to_owned(), pod);
    }
    namespace
        .plan()
        .steps
        .into_iter()
        .for_each(|step| namespace.take(step));
    namespace.second += 5;
    let evicts = |plan: Plan| -> Vec<(String, bool)> {
        let steps = plan.steps.into_iter();
        let evicts = steps.filter_map(|step| match step {
            Step::Evict { pod, by_force } => Some((pod.uid, by_force)),
            _ => None,
        });
        evicts.collect()
    };
    let once = |forced| [("borrows".to_owned(), forced)];
    assert_eq!(evicts(namespace.plan()), once(false));
    namespace.refused = [("borrows".to_owned(), Duration::from_secs(60))].into();
    assert_eq!(evicts(namespace.plan()), once(true));
    namespace.settle();
    assert!(namespace.pods.contains_key("owns") && !namespace.holds(names::EXCEEDED));
}

/// Pods by class, size and age in seconds.
fn pods() -> impl Strategy<Value = Vec<(bool, u64, i64)>> {
    prop::collection::vec((any::<bool>(), 1u64..12, 1i64..60), 0..14)
}

fn requests(pods: &[(bool, u64, i64)]) -> Vec<(String, Arc<PodFacts>)> {
    let pods = pods
        .iter()
        .enumerate()
        .map(|(index, (borrows, device, created))| {
            let class = if *borrows {
                PriorityKind::Borrowed
            } else {
                PriorityKind::Guaranteed
            };
            let name = format!("p{index}");
            (
                name.clone(),
                Arc::new(request(&name, class, *device, *created)),
            )
        });
    pods.collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100_000))]

    /// The rest fits, no selected pod could stay, and no borrower stays for which the limit evicts
    /// a guaranteed pod.
    #[test]
    fn excess_pods_are_a_minimal_set(
        pods in pods(), guaranteed in 0u64..30, beyond in 0u64..20,
    ) {
        let parsed = Namespace::new(guaranteed, guaranteed + beyond).parsed();
        let pods = requests(&pods);
        let ended = excess_pods(&parsed, &pods, Timestamp::from_second(-10).unwrap(), |_| true);
        let left = |without: &dyn Fn(&str) -> bool| -> (i64, i64) {
            let stays = pods.iter().filter(|(name, _)| !without(name)).map(|(_, request)| request);
            stays.fold((0, 0), |(owned, all), request| {
                let device = request.device.count();
                (owned + if request.kind == PriorityKind::Guaranteed { device } else { 0 }, all + device)
            })
        };
        let fits = |(owned, all): (i64, i64)| owned <= parsed.guaranteed.count() && all <= parsed.limit.count();
        let ends = |name: &str| ended.iter().any(|eviction| eviction.pod == name);
        prop_assert!(fits(left(&ends)));
        for eviction in &ended {
            let spared = |name: &str| name != eviction.pod && ends(name);
            prop_assert!(!fits(left(&spared)), "{} could stay", eviction.pod);
        }
    }

    /// A pod from before the budget came into force stays.
    #[test]
    fn pod_from_before_enforcement_is_never_excess(pods in pods(), limit in 0u64..20, since in 0i64..60) {
        let parsed = Namespace::new(0, limit).parsed();
        let pods = requests(&pods);
        let since = Timestamp::from_second(since).unwrap();
        for eviction in excess_pods(&parsed, &pods, since, |_| true) {
            let (_, request) = pods.iter().find(|(name, _)| *name == eviction.pod).unwrap();
            prop_assert!(request.created > since);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(200_000)))]

    /// After crashes at any step, late quota controllers, new pods and a deleted quota, the budget
    /// is in force. All excess pods are gone, and each was evicted once.
    #[test]
    fn plan_converges_after_a_crash_at_any_step(
        pods in pods(), guaranteed in 0u64..30, beyond in 0u64..20,
        crashes in prop::collection::vec((0usize..5, any::<bool>(), 0i64..8), 0..12),
        deleted in prop::option::of(prop::sample::select(QuotaKind::ALL.as_slice())),
        skew in skews(),
    ) {
        let mut namespace = Namespace::new(guaranteed, guaranteed + beyond);
        namespace.skew = skew;
        for (done, copies, pause) in &crashes {
            namespace.plan().steps.into_iter().take(*done).for_each(|step| namespace.take(step));
            namespace.others(*copies);
            namespace.second += pause;
        }
        namespace.settle();
        namespace.second += 100;
        let now = namespace.second;
        for (name, request) in requests(&pods) {
            let mut request = Arc::unwrap_or_clone(request);
            request.created = Timestamp::from_second(now - request.created.as_second()).unwrap();
            namespace.pods.insert(name, request);
        }
        deleted.map(|kind| namespace.quotas.remove(&kind));
        for (done, copies, pause) in crashes {
            namespace.plan().steps.into_iter().take(done).for_each(|step| namespace.take(step));
            namespace.others(copies);
            namespace.second += pause;
        }
        namespace.second += 20;
        namespace.settle();
        prop_assert!(namespace.requested(|_| true) <= namespace.parsed().limit.count());
        let owned = namespace.requested(|request| request.kind == PriorityKind::Guaranteed);
        prop_assert!(owned <= namespace.parsed().guaranteed.count());
        prop_assert!(namespace.labelled && namespace.holds(names::ENFORCED) && namespace.holds(names::READY));
        prop_assert!(namespace.evicted.values().all(|times| *times == 1));
        prop_assert_eq!(namespace.plan(), Plan::default());
    }

    /// After faults and crashes at any step all due pods are gone. Each was evicted once, with its
    /// reason on record while there is room.
    #[test]
    fn fault_eviction_happens_once_after_a_crash_at_any_step(
        faults in prop::collection::vec((0usize..12, any::<bool>()), 1..12),
        crashes in prop::collection::vec((0usize..4, 0i64..8), 0..12),
        skew in skews(),
    ) {
        let names: Vec<String> = (0..12).map(|number| format!("p{number:02}")).collect();
        let all: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut namespace = Namespace::running(ContextAction::Restart, &all);
        namespace.skew = skew;
        let mut wanted = std::collections::BTreeSet::new();
        for (pod, of_gpu) in faults {
            if wanted.insert(names[pod].clone()) {
                let kind = if of_gpu { FaultKind::Gpu } else { FaultKind::Context };
                let action = if of_gpu { FaultAction::Wait } else { FaultAction::BeyondMaximum };
                namespace.strike(&names[pod], kind, action);
            }
        }
        for (done, pause) in crashes {
            namespace.plan().steps.into_iter().take(done).for_each(|step| namespace.take(step));
            namespace.others(true);
            namespace.second += pause;
        }
        namespace.second += 60;
        namespace.settle();
        let gone: std::collections::BTreeSet<_> = namespace.evicted.keys().cloned().collect();
        prop_assert_eq!(&gone, &wanted);
        prop_assert!(namespace.evicted.values().all(|times| *times == 1));
        prop_assert_eq!(namespace.on_record().len(), wanted.len().min(MAX_EVICTIONS));
        prop_assert_eq!(namespace.plan(), Plan::default());
    }

    /// A lowered budget evicts no admitted pod, whatever step a crash interrupts.
    #[test]
    fn lowered_budget_evicts_nobody_after_a_crash(
        pods in pods(), limit in 0u64..30,
        crashes in prop::collection::vec((0usize..5, any::<bool>(), 0i64..8), 0..12),
        skew in skews(),
    ) {
        let mut namespace = Namespace::new(200, 200);
        namespace.skew = skew;
        namespace.settle();
        namespace.second += 100;
        let now = namespace.second;
        for (name, request) in requests(&pods) {
            let mut request = Arc::unwrap_or_clone(request);
            request.created = Timestamp::from_second(now - request.created.as_second()).unwrap();
            namespace.pods.insert(name, request);
        }
        namespace.settle();
        namespace.shrink(limit);
        for (done, copies, pause) in crashes {
            namespace.plan().steps.into_iter().take(done).for_each(|step| namespace.take(step));
            namespace.others(copies);
            namespace.second += pause;
        }
        for _ in 0..2 {
            namespace.settle();
            namespace.second += 1000;
        }
        prop_assert!(namespace.evicted.is_empty());
    }
}
