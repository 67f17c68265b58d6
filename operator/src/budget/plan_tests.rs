//! The plan against a cluster as values: quotas that are taken up late, pods that slip in, crashes.

use std::collections::BTreeMap;

use bursar_crds::conditions::budget as names;
use bursar_crds::{GpuMemoryBudget, Quantum};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use proptest::prelude::*;
use serde_json::json;

use super::{Plan, Quota, Step, Terms, Which, plan, surplus};
use crate::demand::{Class, Demand};
use crate::quanta::Quanta;
use crate::world::{Cohort, Facts};

/// A namespace as the API server has it.
struct Namespace {
    budget: GpuMemoryBudget,
    quotas: BTreeMap<Which, Quota>,
    labelled: bool,
    pods: BTreeMap<String, Demand>,
    second: i64,
    /// How often each pod's end was asked for.
    evicted: BTreeMap<String, usize>,
}

fn demand(uid: &str, class: Class, device: u64, created: i64) -> Demand {
    Demand {
        uid: uid.to_owned(),
        created: Timestamp::from_second(created).unwrap(),
        ending: false,
        of_job: false,
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
            cohort: Cohort {
                nodes: 1,
                allocatable: Quanta::new(1000),
                ..Cohort::default()
            },
            guaranteed_quota: self.quotas.get(&Which::Guaranteed).cloned(),
            limit_quota: self.quotas.get(&Which::Limit).cloned(),
            labelled: self.labelled,
        }
    }

    fn plan(&self) -> Plan {
        let now = Time(Timestamp::from_second(self.second).unwrap());
        plan(&self.budget, &self.facts(), &now)
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Quota(which, cap) => {
                let before = self.quotas.remove(&which);
                let in_force = before.map(|quota| quota.in_force).unwrap_or_default();
                self.quotas.insert(which, Quota { cap, in_force });
            }
            Step::Label => self.labelled = true,
            Step::Evict { pod, .. } => {
                *self.evicted.entry(pod.uid).or_default() += 1;
                if let Some(demand) = self.pods.get_mut(&pod.pod) {
                    demand.ending = true;
                }
            }
            Step::Status(status) => self.budget.status = Some(*status),
        }
    }

    /// What others do meanwhile: the controller manager copies, kubelets end pods.
    fn others(&mut self, copies: bool) {
        self.second += 1;
        self.pods.retain(|_, demand| !demand.ending);
        if copies {
            for quota in self.quotas.values_mut() {
                quota.in_force.clone_from(&quota.cap.hard);
            }
        }
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
    let mut namespace = Namespace::new(16, 16);
    let old = demand("old", Class::Guaranteed, 40, 900);
    namespace.pods.insert("old".to_owned(), old);
    namespace.settle();
    assert!(namespace.holds(names::EXCEEDED));
    namespace.budget.spec.device_memory.guaranteed = "8Gi".into();
    namespace.budget.spec.device_memory.limit = None;
    namespace.budget.metadata.generation = Some(2);
    namespace.second += 100;
    namespace.settle();
    namespace.second += 1000;
    namespace.settle();
    assert!(namespace.evicted.is_empty());
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
    pod.of_job = true;
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
        let ended = surplus(&terms, &pods, Timestamp::from_second(-10).unwrap());
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
        for one in surplus(&terms, &pods, since) {
            let (_, demand) = pods.iter().find(|(name, _)| *name == one.pod).unwrap();
            prop_assert!(demand.created > since);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    /// The operator crashes after any prefix of any of its plans, the controller manager sleeps, pods come:
    /// in the end the budget is in force, what was admitted beyond it is gone, and each went once.
    #[test]
    fn a_crash_after_any_step_converges_to_the_same_end(
        pods in pods(), guaranteed in 0u64..30, beyond in 0u64..20,
        crashes in prop::collection::vec((0usize..5, any::<bool>(), 0i64..8), 0..12),
    ) {
        let mut namespace = Namespace::new(guaranteed, guaranteed + beyond);
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
}
