//! The plan against a cluster as values: quotas that are taken up late, pods that slip in, crashes.

use std::collections::BTreeMap;
use std::time::Duration;

use bursar_crds::budget::{ContextAction, ContextPolicy, MAX_EVICTIONS};
use bursar_crds::conditions::budget as names;
use bursar_crds::gpu_node::{Fault, FaultAction, FaultKind};
use bursar_crds::{GpuMemoryBudget, Quantum};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use proptest::prelude::*;
use serde_json::json;

use super::{AgentsSay, Cohort, Facts, Sufferer};
use super::{Plan, Quota, Remedy, Step, Terms, Which, is_exceeded, plan, remedy, surplus};
use crate::cluster::on_node::there;
use crate::cluster::pod_request::{Class, Demand, Owner};
use crate::quanta::Quanta;

/// How many seconds other machines' clocks are ahead of the API server's.
#[derive(Clone, Copy, Debug, Default)]
struct Skew {
    operator: i64,
    node: i64,
}

/// Clocks that are an hour apart, each of them ahead or behind, and clocks that agree.
fn skews() -> impl Strategy<Value = Skew> {
    let off = || prop::sample::select([-3_600, 0, 3_600].as_slice());
    (off(), off()).prop_map(|(operator, node)| Skew { operator, node })
}

/// A namespace as the API server has it.
struct Namespace {
    budget: GpuMemoryBudget,
    quotas: BTreeMap<Which, Quota>,
    labelled: bool,
    pods: BTreeMap<String, Demand>,
    /// The API server's clock.
    second: i64,
    skew: Skew,
    /// The faults that pods suffer from, each with when the operator first saw it.
    faults: Vec<(String, Fault, i64)>,
    /// Since when the status has said that the budget is exceeded.
    exceeded: Option<i64>,
    /// What was asked about Jobs so far.
    jobs: BTreeMap<String, bool>,
    /// For how long disruption budgets have kept pods.
    refused: BTreeMap<String, Duration>,
    /// How often each pod's end was asked for.
    evicted: BTreeMap<String, usize>,
}

fn demand(uid: &str, class: Class, device: u64, created: i64) -> Demand {
    Demand {
        uid: uid.to_owned(),
        created: Timestamp::from_second(created).unwrap(),
        node: Some("n".to_owned()),
        ending: false,
        job: None,
        replaced: true,
        class,
        device: Quanta::new(device),
        managed: Quanta::ZERO,
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
            evicted: BTreeMap::new(),
        }
    }

    fn terms(&self) -> Terms {
        Terms::of(&self.budget.spec, Quantum::Gib1).unwrap()
    }

    fn facts(&self) -> Facts {
        Facts {
            quantum: Quantum::Gib1,
            usage: self.pods.values().collect(),
            pods: self
                .pods
                .iter()
                .map(|(name, demand)| (name.clone(), demand.clone()))
                .collect(),
            refused: self.refused.clone(),
            exceeded_for: match is_exceeded(&self.budget) {
                true => self.since(self.exceeded.unwrap_or(self.second)),
                false => Duration::ZERO,
            },
            cohort: Cohort {
                nodes: 1,
                allocatable: Quanta::new(1000),
                ..Cohort::default()
            },
            guaranteed_quota: self.quotas.get(&Which::Guaranteed).cloned(),
            limit_quota: self.quotas.get(&Which::Limit).cloned(),
            labelled: self.labelled,
            sufferers: self
                .faults
                .iter()
                .filter_map(|(pod, fault, seen)| {
                    Some(Sufferer {
                        pod: pod.clone(),
                        demand: there("n", self.pods.get(pod)?)?.cloned(),
                        fault: fault.clone(),
                        seen_for: self.since(*seen),
                    })
                })
                .collect(),
            jobs: self.jobs.clone(),
            told: AgentsSay::default(),
        }
    }

    fn since(&self, second: i64) -> Duration {
        Duration::from_secs((self.second - second).unsigned_abs())
    }

    fn plan(&self) -> Plan {
        let now = Time(Timestamp::from_second(self.second + self.skew.operator).unwrap());
        plan(&self.budget, &self.facts(), &now)
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Quota(which, cap) => {
                let before = self.quotas.remove(&which);
                let (in_force, taken_up) = before
                    .map(|quota| (quota.in_force, quota.taken_up))
                    .unwrap_or_default();
                let quota = Quota {
                    uid: String::new(),
                    cap,
                    in_force,
                    taken_up,
                };
                self.quotas.insert(which, quota);
            }
            Step::Label => self.labelled = true,
            Step::Evict { pod, .. } => {
                *self.evicted.entry(pod.uid).or_default() += 1;
                if let Some(demand) = self.pods.get_mut(&pod.pod) {
                    demand.ending = true;
                }
            }
            Step::LookAtJob(job) => drop(self.jobs.insert(job.uid, job.name == "lets-go")),
            Step::Status(status) => {
                self.budget.status = Some(*status);
                let since = self.exceeded.unwrap_or(self.second);
                self.exceeded = is_exceeded(&self.budget).then_some(since);
            }
        }
    }

    /// What others do meanwhile: the controller manager copies, kubelets end pods.
    fn others(&mut self, copies: bool) {
        self.second += 1;
        self.pods.retain(|_, demand| !demand.ending);
        if copies {
            let now = Time(Timestamp::from_second(self.second).unwrap());
            for quota in self.quotas.values_mut() {
                if quota.in_force != quota.cap.hard {
                    quota.in_force.clone_from(&quota.cap.hard);
                    quota.taken_up = Some(now.clone());
                }
            }
        }
    }

    /// The budget is made smaller.
    fn shrink(&mut self, limit: u64) {
        self.budget.spec.device_memory.guaranteed = format!("{limit}Gi").as_str().into();
        self.budget.spec.device_memory.limit = None;
        self.budget.metadata.generation = Some(2);
    }

    /// Plans and does until nothing is left to do.
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

    fn asked(&self, of: impl Fn(&Demand) -> bool) -> i64 {
        let pods = self.pods.values().filter(|demand| of(demand));
        pods.map(|demand| demand.device.count()).sum()
    }

    fn holds(&self, type_: &str) -> bool {
        let status = self.budget.status.as_ref().expect("it was told");
        let mut conditions = status.conditions.iter();
        conditions.any(|condition| condition.type_ == type_ && condition.status == "True")
    }
}

#[test]
fn a_new_budget_gets_its_quotas_then_its_label_and_then_nothing() {
    let mut namespace = Namespace::new(16, 24);
    let first = namespace.plan();
    let written = |step: &Step| matches!(step, Step::Quota(..));
    assert_eq!(first.steps.iter().filter(|step| written(step)).count(), 2);
    assert!(!first.steps.contains(&Step::Label), "not in force yet");
    namespace.settle();
    assert!(
        namespace.labelled && namespace.holds(names::ENFORCED) && namespace.holds(names::READY)
    );
}

#[test]
fn a_budget_over_running_pods_or_made_smaller_takes_nothing_from_anybody() {
    for operator in [-3_600, 0, 3_600] {
        nobody_goes(Skew { operator, node: 0 });
    }
}

fn nobody_goes(skew: Skew) {
    let mut namespace = Namespace::new(16, 16);
    namespace.skew = skew;
    let old = demand("old", Class::Guaranteed, 40, 900);
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
fn a_budget_made_smaller_takes_nothing_from_those_whom_it_had_admitted_even_if_a_status_is_missed()
{
    let mut namespace = Namespace::new(100, 100);
    namespace.settle();
    namespace.second += 100;
    let pod = demand("admitted", Class::Guaranteed, 60, namespace.second - 10);
    namespace.pods.insert("admitted".to_owned(), pod);
    namespace.settle();
    namespace.shrink(50);
    let first = namespace.plan().steps.into_iter().next();
    assert!(
        matches!(first, Some(Step::Status(_))),
        "before the quotas: {first:?}"
    );
    // As if it had been lost.
    let quotas = namespace.plan().steps.into_iter();
    let quotas: Vec<_> = quotas
        .filter(|step| matches!(step, Step::Quota(..)))
        .collect();
    quotas.into_iter().for_each(|step| namespace.take(step));
    namespace.settle();
    namespace.second += 1000;
    namespace.settle();
    assert!(namespace.holds(names::EXCEEDED) && namespace.evicted.is_empty());
}

#[test]
fn who_slips_into_a_budget_that_is_exceeded_for_long_has_its_disruption_budget_asked_all_the_same()
{
    let mut namespace = Namespace::new(16, 16);
    let old = demand("old", Class::Guaranteed, 40, 900);
    namespace.pods.insert("old".to_owned(), old);
    namespace.settle();
    namespace.second += 10_000;
    let late = demand("late", Class::Borrowed, 4, namespace.second - 10);
    namespace.pods.insert("late".to_owned(), late);
    let status = namespace.plan().steps;
    status
        .into_iter()
        .filter(|step| matches!(step, Step::Status(_)))
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
fn who_slipped_in_is_ended_after_a_while_the_newest_borrower_first() {
    let mut namespace = Namespace::new(16, 24);
    namespace.settle();
    namespace.second += 100;
    let now = namespace.second;
    for (name, class, device, created) in [
        ("a", Class::Guaranteed, 16, now - 50),
        ("b", Class::Borrowed, 4, now - 40),
        ("c", Class::Borrowed, 4, now - 30),
        ("d", Class::Borrowed, 4, now - 20),
    ] {
        let pod = demand(name, class, device, created);
        namespace.pods.insert(name.to_owned(), pod);
    }
    let evicts = |plan: &Plan| {
        let mut steps = plan.steps.iter();
        steps.any(|step| matches!(step, Step::Evict { .. }))
    };
    assert!(!evicts(&namespace.plan()), "not told yet");
    namespace
        .plan()
        .steps
        .into_iter()
        .for_each(|step| namespace.take(step));
    let waiting = namespace.plan();
    assert!(!evicts(&waiting) && waiting.again.is_some());
    namespace.second += 5;
    assert!(evicts(&namespace.plan()));
    namespace.settle();
    assert_eq!(namespace.evicted, BTreeMap::from([("d".to_owned(), 1)]));
    assert!(!namespace.holds(names::EXCEEDED));
}

#[test]
fn a_quota_changed_by_hand_is_put_back_and_a_jobs_pod_is_left_alone() {
    let mut namespace = Namespace::new(16, 16);
    namespace.settle();
    namespace.second += 100;
    let mut pod = demand("j", Class::Guaranteed, 20, namespace.second - 10);
    pod.job = job("would-fail");
    namespace.pods.insert("j".to_owned(), pod);
    let quota = namespace.quotas.get_mut(&Which::Limit).unwrap();
    quota
        .cap
        .hard
        .values_mut()
        .for_each(|most| *most = Quanta::new(99));
    quota.in_force.clone_from(&quota.cap.hard);
    namespace.settle();
    assert!(namespace.evicted.is_empty() && namespace.holds(names::EXCEEDED));
    let limit = &namespace.quotas[&Which::Limit];
    assert_eq!(
        limit.in_force["requests.bursar.dev/gpu-memory-gib"],
        Quanta::new(16)
    );
}

#[test]
fn who_comes_while_a_quota_is_raised_by_hand_or_gone_has_slipped_in() {
    for gone in [false, true] {
        let mut namespace = Namespace::new(16, 16);
        namespace.settle();
        namespace.second += 100;
        for which in Which::ALL {
            let mut quota = namespace.quotas.remove(&which).unwrap();
            let raise = |most: &mut Quanta| *most = Quanta::new(99);
            quota.cap.hard.values_mut().for_each(raise);
            quota.in_force.clone_from(&quota.cap.hard);
            if !gone {
                namespace.quotas.insert(which, quota);
            }
        }
        for name in ["a", "b"] {
            let pod = demand(name, Class::Guaranteed, 12, namespace.second);
            namespace.pods.insert(name.to_owned(), pod);
        }
        namespace.settle();
        assert!(!namespace.holds(names::EXCEEDED) && namespace.holds(names::ENFORCED));
        assert_eq!(namespace.evicted, BTreeMap::from([("a".to_owned(), 1)]));
    }
}

#[test]
fn status_is_dated_by_the_later_quota_and_not_where_that_is_unknown() {
    let mut namespace = Namespace::new(16, 16);
    namespace.skew.operator = 3_600;
    namespace.settle();
    let later = Some(Time(Timestamp::from_second(1_500).unwrap()));
    let limit = namespace.quotas.get_mut(&Which::Limit).unwrap();
    limit.taken_up.clone_from(&later);
    for expected in [later, None] {
        namespace.budget.status.as_mut().unwrap().enforced_since = None;
        namespace.settle();
        let status = namespace.budget.status.as_ref().unwrap();
        assert_eq!(status.enforced_since, expected);
        namespace.quotas.get_mut(&Which::Limit).unwrap().taken_up = None;
    }
}

fn job(name: &str) -> Option<Owner> {
    Some(Owner {
        name: name.to_owned(),
        uid: name.to_owned(),
    })
}

#[test]
fn of_jobs_pods_those_go_whose_job_takes_no_eviction_for_a_failure_and_never_by_force() {
    let mut namespace = Namespace::new(16, 16);
    namespace.settle();
    namespace.second += 100;
    for (name, created) in [("would-fail", 5), ("lets-go", 10), ("before", 20)] {
        let mut pod = demand(name, Class::Guaranteed, 16, namespace.second - created);
        pod.job = job(name).filter(|_| name != "before");
        namespace.pods.insert(name.to_owned(), pod);
    }
    namespace
        .plan()
        .steps
        .into_iter()
        .for_each(|step| namespace.take(step));
    namespace.second += 100;
    let asks = namespace.plan();
    assert!(
        matches!(asks.steps[..], [Step::LookAtJob(_), Step::LookAtJob(_), ..]),
        "{asks:?}"
    );
    asks.steps.into_iter().for_each(|step| namespace.take(step));
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
    /// In force, with one pod for each name.
    fn running(action: ContextAction, pods: &[&str]) -> Self {
        let mut namespace = Self::new(100, 100);
        namespace.budget.spec.context_policy.action = action;
        for pod in pods {
            let demand = demand(pod, Class::Guaranteed, 1, namespace.second);
            namespace.pods.insert((*pod).to_owned(), demand);
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
            .map(|one| (one.pod.as_str(), one.reason.as_str()))
            .collect()
    }
}

#[test]
fn what_is_done_about_a_fault_goes_by_what_the_agent_did_and_the_policy_now() {
    use ContextAction as Now;
    use FaultAction as Agent;
    let evict = |reason| Some(Remedy::Evict(reason));
    let restart = Some(Remedy::Restart);
    let table = [
        (Agent::InPlace, [None; 4]),
        (Agent::Restart, [None; 4]),
        (
            Agent::Report,
            [restart, restart, evict("ContextPolicy"), None],
        ),
        (
            Agent::Evict,
            [restart, restart, evict("ContextPolicy"), None],
        ),
        (
            Agent::BeyondMaximum,
            [
                evict("TooManyRestarts"),
                evict("TooManyRestarts"),
                evict("TooManyRestarts"),
                None,
            ],
        ),
    ];
    for (agent, wanted) in table {
        for (action, wanted) in [Now::InPlace, Now::Restart, Now::Evict, Now::Report]
            .into_iter()
            .zip(wanted)
        {
            let policy = ContextPolicy {
                action,
                ..ContextPolicy::default()
            };
            let of_context = fault("f", FaultKind::Context, agent, 0);
            assert_eq!(
                remedy(&of_context, &policy),
                wanted,
                "{agent:?}, {action:?}"
            );
            let of_gpu = fault("f", FaultKind::Gpu, Agent::ResetGpu, 0);
            let goes = evict("GpuFault").filter(|_| action != Now::Report);
            assert_eq!(remedy(&of_gpu, &policy), goes);
            let undecided = Fault {
                action: None,
                ..of_context
            };
            assert_eq!(remedy(&undecided, &policy), None);
        }
    }
}

#[test]
fn who_has_to_go_for_a_fault_is_on_record_first_and_stays_there_after() {
    let mut namespace = Namespace::running(ContextAction::Restart, &["a", "b"]);
    namespace.strike("a", FaultKind::Context, FaultAction::BeyondMaximum);
    let first = namespace.plan();
    assert!(matches!(first.steps[..], [Step::Status(_)]), "{first:?}");
    namespace.settle();
    assert_eq!(namespace.evicted, BTreeMap::from([("a".to_owned(), 1)]));
    assert_eq!(namespace.on_record(), [("a", "TooManyRestarts")]);
    namespace.faults.clear();
    namespace.second += 10_000;
    namespace.settle();
    assert_eq!(namespace.on_record(), [("a", "TooManyRestarts")]);
}

#[test]
fn a_pod_goes_for_its_gpu_only_after_a_while_and_where_another_takes_its_place() {
    let pods = ["bare", "lets-go", "other", "would-fail"];
    let mut namespace = Namespace::running(ContextAction::Restart, &pods);
    namespace.pods.get_mut("bare").unwrap().replaced = false;
    for name in ["lets-go", "would-fail"] {
        namespace.pods.get_mut(name).unwrap().job = job(name);
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
    assert!(early.again.is_some());
    namespace.second += 30;
    namespace.settle();
    let gone: Vec<_> = namespace.evicted.keys().collect();
    assert_eq!(gone, ["lets-go", "other"]);
}

#[test]
fn no_more_pods_go_at_a_time_than_the_record_has_room_for_and_all_of_them_go() {
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
fn records_of_pods_that_recovered_and_live_on_take_nobodys_place() {
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
        // Its agent restarted it alone.
        namespace.faults.clear();
        namespace.settle();
    }
    assert_eq!(namespace.evicted.len(), 0);
}

#[test]
fn a_pod_that_a_disruption_budget_keeps_is_deleted_after_its_grace_but_a_jobs() {
    for (of_job, forced) in [(None, true), (job("lets-go"), false)] {
        let mut namespace = Namespace::running(ContextAction::Evict, &["a"]);
        namespace.pods.get_mut("a").unwrap().job = of_job;
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
        // The record may be old when somebody asks first: the operator was away, or the policy was another one.
        namespace.second += 10_000;
        assert_eq!(by_force(namespace.plan()), [false], "nobody has asked");
        for (second, by_now) in [(59, false), (60, forced)] {
            namespace.refused = [("a".to_owned(), Duration::from_secs(second))].into();
            assert_eq!(by_force(namespace.plan()), [by_now]);
        }
    }
}

#[test]
fn a_borrower_beyond_the_limit_goes_whatever_its_job_says() {
    let mut namespace = Namespace::new(16, 16);
    namespace.settle();
    namespace.second += 100;
    for (name, class) in [("owns", Class::Guaranteed), ("borrows", Class::Borrowed)] {
        let mut pod = demand(name, class, 16, namespace.second - 10);
        pod.job = job("would-fail");
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

fn demands(pods: &[(bool, u64, i64)]) -> Vec<(String, Demand)> {
    let pods = pods
        .iter()
        .enumerate()
        .map(|(index, (borrows, device, created))| {
            let class = if *borrows {
                Class::Borrowed
            } else {
                Class::Guaranteed
            };
            let name = format!("p{index}");
            (name.clone(), demand(&name, class, *device, *created))
        });
    pods.collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100_000))]

    /// What is left fits, nothing was taken that could stay, and no borrower stays for whom an owner went
    /// by the limit.
    #[test]
    fn the_surplus_is_what_is_needed_and_no_more(
        pods in pods(), guaranteed in 0u64..30, beyond in 0u64..20,
    ) {
        let terms = Namespace::new(guaranteed, guaranteed + beyond).terms();
        let pods = demands(&pods);
        let ended = surplus(&terms, &pods, Timestamp::from_second(-10).unwrap(), |_| true);
        let left = |without: &dyn Fn(&str) -> bool| -> (i64, i64) {
            let stays = pods.iter().filter(|(name, _)| !without(name)).map(|(_, demand)| demand);
            stays.fold((0, 0), |(owned, all), demand| {
                let device = demand.device.count();
                (owned + if demand.class == Class::Guaranteed { device } else { 0 }, all + device)
            })
        };
        let fits = |(owned, all): (i64, i64)| owned <= terms.guaranteed.count() && all <= terms.limit.count();
        let ends = |name: &str| ended.iter().any(|one| one.pod == name);
        prop_assert!(fits(left(&ends)));
        for one in &ended {
            let spared = |name: &str| name != one.pod && ends(name);
            prop_assert!(!fits(left(&spared)), "{} could stay", one.pod);
        }
    }

    /// Whoever was there before the budget came into force stays.
    #[test]
    fn nobody_from_before_is_taken(pods in pods(), limit in 0u64..20, since in 0i64..60) {
        let terms = Namespace::new(0, limit).terms();
        let pods = demands(&pods);
        let since = Timestamp::from_second(since).unwrap();
        for one in surplus(&terms, &pods, since, |_| true) {
            let (_, demand) = pods.iter().find(|(name, _)| *name == one.pod).unwrap();
            prop_assert!(demand.created > since);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    /// The operator crashes after any prefix of any of its plans, the controller manager sleeps, pods come, a quota goes:
    /// in the end the budget is in force, what was admitted beyond it is gone, and each went once.
    #[test]
    fn a_crash_after_any_step_converges_to_the_same_end(
        pods in pods(), guaranteed in 0u64..30, beyond in 0u64..20,
        crashes in prop::collection::vec((0usize..5, any::<bool>(), 0i64..8), 0..12),
        deleted in prop::option::of(prop::sample::select(Which::ALL.as_slice())),
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
        for (name, mut demand) in demands(&pods) {
            demand.created = Timestamp::from_second(now - demand.created.as_second()).unwrap();
            namespace.pods.insert(name, demand);
        }
        deleted.map(|which| namespace.quotas.remove(&which));
        for (done, copies, pause) in crashes {
            namespace.plan().steps.into_iter().take(done).for_each(|step| namespace.take(step));
            namespace.others(copies);
            namespace.second += pause;
        }
        namespace.second += 20;
        namespace.settle();
        prop_assert!(namespace.asked(|_| true) <= namespace.terms().limit.count());
        let owned = namespace.asked(|demand| demand.class == Class::Guaranteed);
        prop_assert!(owned <= namespace.terms().guaranteed.count());
        prop_assert!(namespace.labelled && namespace.holds(names::ENFORCED) && namespace.holds(names::READY));
        prop_assert!(namespace.evicted.values().all(|times| *times == 1));
        prop_assert_eq!(namespace.plan(), Plan::default());
    }

    /// Faults come, the operator crashes after any prefix of any of its plans: in the end all who had to go are gone,
    /// each was asked once, and why is on record as far as there is room.
    #[test]
    fn whatever_is_cut_short_who_had_to_go_for_a_fault_goes_once_with_the_reason_on_record(
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

    /// The operator crashes after any prefix of any of its plans while the budget is made smaller than what it
    /// admitted: nobody goes for it.
    #[test]
    fn a_crash_while_a_budget_is_made_smaller_takes_nothing_from_anybody(
        pods in pods(), limit in 0u64..30,
        crashes in prop::collection::vec((0usize..5, any::<bool>(), 0i64..8), 0..12),
        skew in skews(),
    ) {
        let mut namespace = Namespace::new(200, 200);
        namespace.skew = skew;
        namespace.settle();
        namespace.second += 100;
        let now = namespace.second;
        for (name, mut demand) in demands(&pods) {
            demand.created = Timestamp::from_second(now - demand.created.as_second()).unwrap();
            namespace.pods.insert(name, demand);
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
