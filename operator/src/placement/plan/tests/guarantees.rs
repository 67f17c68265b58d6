//! Checks the guarantees of cohorts over random budgets, nodes and pods. Both planners act on one
//! cluster.

use std::cell::Cell;

use bursar_crds::GpuMemoryBudget;
use bursar_crds::conditions::budget as names;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;

use super::*;
use crate::budget::{self, ObservedQuota};
use crate::cluster::Capacity;

/// The last second at which pods are created, and the time without an event after which the cluster
/// is at rest.
const COMING_END: u64 = 22;
const REST: u64 = 21 + LONGEST_PAUSE;

/// The condition that blocks or permits a pod's eviction.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Plain,
    /// A PodDisruptionBudget refuses the eviction.
    Kept,
    /// The pod belongs to a Job, which ignores disruption or does not.
    OfJob(bool),
}

/// A pod that a user creates.
#[derive(Clone, Debug)]
struct NewPod {
    at: u64,
    team: usize,
    request: u64,
    priority: i32,
    /// The quota counts the pod too late.
    slips: bool,
    kind: Kind,
}

/// Small borrowers, and larger guaranteed pods that are created later.
fn coming() -> impl Strategy<Value = NewPod> {
    let borrows = (10..14_u64, 2_u64..8, Just(BORROWED));
    let owns = (
        14..COMING_END,
        2_u64..14,
        prop_oneof![3 => Just(GUARANTEED), 1 => Just(HIGH)],
    );
    let kind = prop_oneof![
        8 => Just(Kind::Plain), 1 => Just(Kind::Kept), 1 => any::<bool>().prop_map(Kind::OfJob)];
    let slips = prop::bool::weighted(0.1);
    (prop_oneof![borrows, owns], 0_usize..3, slips, kind).prop_map(
        |((at, request, priority), team, slips, kind)| NewPod {
            at,
            team,
            request,
            priority,
            slips,
            kind,
        },
    )
}

/// Namespaces that share the nodes of their cohorts.
struct Teams {
    live: FakeCluster,
    operator: Watching,
    cohorts: usize,
    /// The guarantee and the limit of each namespace.
    bounds: Vec<(u64, u64)>,
    budgets: Vec<GpuMemoryBudget>,
    /// When each budget is reconciled next.
    due: Vec<Option<u64>>,
    index: ClusterIndex,
    /// When each pod was created, and whether the index saw it terminating.
    indexed: BTreeMap<String, (u64, bool)>,
    /// Since when PodDisruptionBudgets have refused the eviction of excess pods.
    refused: BTreeMap<String, u64>,
    /// Since when each budget's status has said that it is exceeded.
    exceeded: Vec<Option<u64>>,
    /// The Jobs read so far.
    jobs: BTreeMap<String, bool>,
    /// The pods evicted for an exceeded budget.
    repaired: BTreeMap<String, FakePod>,
    /// The namespaces in which a late quota admitted too much.
    slipped: BTreeSet<usize>,
}

fn name(team: usize) -> String {
    format!("t{team}")
}

fn cohort(number: usize) -> String {
    format!("c{number}")
}

/// The namespace of a pod.
fn team(uid: &str) -> usize {
    usize::from(uid.as_bytes()[1] - b'0')
}

fn owns(pod: &FakePod) -> bool {
    pod.priority != BORROWED
}

impl Teams {
    fn new(cohorts: usize, nodes: &[Vec<u64>], budgets: &[(u64, u64)]) -> Self {
        let mut index = ClusterIndex::new(Quantum::Gib1);
        let mut live = FakeCluster {
            all_return: true,
            preempts: true,
            ..FakeCluster::default()
        };
        for (number, gpus) in nodes.iter().enumerate() {
            let (name, cohort) = (format!("node{number}"), cohort(number % cohorts));
            live = live.node(&name, gpus);
            let label = (COHORT_LABEL.to_owned(), cohort.clone());
            live.labels.insert(name.clone(), [label].into());
            let gpus = GpuNodeSummary {
                capacity: Some(Capacity::Counted(Quanta::new(gpus.iter().sum()))),
                ..GpuNodeSummary::default()
            };
            let host = NodeFacts {
                labels: live.labels[&name].clone(),
                is_ready: true,
                allocatable: Quanta::new(1),
                ..NodeFacts::default()
            };
            index.apply(WatchEvent::Node(Event::Apply((key("", &name), Some(host)))));
            index.apply(WatchEvent::GpuNode(Event::Apply((
                key("", &name),
                Some(gpus),
            ))));
        }
        let bounds: Vec<_> = budgets
            .iter()
            .map(|(guaranteed, more)| (*guaranteed, guaranteed + more))
            .collect();
        let budgets = bounds.iter().enumerate().map(|(number, (guaranteed, limit))| {
            let budget = json!({
                "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget",
                "metadata": { "name": "default", "namespace": name(number), "uid": name(number), "generation": 1 },
                "spec": {
                    "deviceMemory": { "guaranteed": format!("{guaranteed}Gi"), "limit": format!("{limit}Gi") },
                    "cohort": cohort(number % cohorts),
                },
            });
            serde_json::from_value(budget).unwrap()
        });
        let budgets: Vec<GpuMemoryBudget> = budgets.collect();
        for budget in &budgets {
            let summary = BudgetSummary::of(budget, Quantum::Gib1);
            index.apply(WatchEvent::Budget(Event::Apply((
                Key::of(budget),
                Some(summary),
            ))));
        }
        Self {
            live,
            operator: Watching::default(),
            cohorts,
            due: vec![Some(0); bounds.len()],
            exceeded: vec![None; bounds.len()],
            bounds,
            budgets,
            index,
            indexed: BTreeMap::new(),
            refused: BTreeMap::new(),
            jobs: BTreeMap::new(),
            repaired: BTreeMap::new(),
            slipped: BTreeSet::new(),
        }
    }

    /// The requests of a namespace's guaranteed pods, and of all its pods.
    fn requested(&self, of: usize) -> (u64, u64) {
        let pods = self.live.pods.iter().filter(|(uid, _)| team(uid) == of);
        pods.fold((0, 0), |(guaranteed, all), (_, pod)| {
            (
                guaranteed + u64::from(owns(pod)) * pod.request,
                all + pod.request,
            )
        })
    }

    /// Creates a pod. Its quotas refuse it or count it too late.
    fn create(&mut self, number: usize, pod: &NewPod) {
        let of = pod.team % self.bounds.len();
        let ((guaranteed, all), (guarantee, limit)) = (self.requested(of), self.bounds[of]);
        let borrows = pod.priority == BORROWED;
        let fits = all + pod.request <= limit && (borrows || guaranteed + pod.request <= guarantee);
        if !fits && !pod.slips {
            return;
        }
        if !fits {
            self.slipped.insert(of);
        }
        let uid = format!("t{of}-{number}");
        let live = std::mem::take(&mut self.live);
        self.live = live.pod(&uid, pod.request, pod.priority, None);
        let fake_pod = self.live.pods.get_mut(&uid).unwrap();
        fake_pod.cohort = Some(cohort(of % self.cohorts));
        match pod.kind {
            Kind::Plain => {}
            Kind::Kept => self.live.kept.push(uid),
            Kind::OfJob(true) => fake_pod.owner = job(&format!("{number:02}lets")),
            Kind::OfJob(false) => fake_pod.owner = job(&format!("{number:02}keeps")),
        }
        self.operator.view = None;
    }

    /// Updates the budgets' index. Returns the changed namespaces.
    fn update_index(&mut self, second: u64) -> BTreeSet<usize> {
        let mut changed = BTreeSet::new();
        for (uid, pod) in &self.live.pods {
            let before = self.indexed.get(uid).copied();
            let (created, _) = before.unwrap_or((second, false));
            if before == Some((created, pod.ending)) {
                continue;
            }
            self.indexed.insert(uid.clone(), (created, pod.ending));
            let facts = PodFacts {
                api_uid: uid.clone(),
                created: wall(Duration::from_secs(created)),
                terminating: pod.ending,
                owner: pod.owner.clone(),
                kind: match owns(pod) {
                    true => PriorityKind::Guaranteed,
                    false => PriorityKind::Borrowed,
                },
                device: Quanta::new(pod.request),
                ..PodFacts::default()
            };
            let key = key(&name(team(uid)), uid);
            self.index.apply(WatchEvent::Pod(Event::Apply((
                key,
                Some(PodSummary::of_facts(facts)),
            ))));
            changed.insert(team(uid));
        }
        let (live, index) = (&self.live, &mut self.index);
        self.indexed.retain(|uid, _| {
            let exists = live.pods.contains_key(uid);
            if !exists {
                let key = key(&name(team(uid)), uid);
                index.apply(WatchEvent::Pod(Event::Delete((key, None))));
                changed.insert(team(uid));
            }
            exists
        });
        changed
    }

    /// Reconciles each due budget once. Returns whether anything was done.
    fn reconcile(&mut self, second: u64) -> bool {
        let changed = self.update_index(second);
        let mut done = false;
        for of in 0..self.budgets.len() {
            if changed.contains(&of) || self.due[of].is_some_and(|due| due <= second) {
                let again = self.reconcile_budget(of, second);
                self.due[of] = again.map(|again| second + again);
                done |= again == Some(1);
            }
        }
        done
    }

    /// Reconciles one budget. Returns the seconds until the next time: one after a step.
    fn reconcile_budget(&mut self, of: usize, second: u64) -> Option<u64> {
        let namespace = name(of);
        let budget = &mut self.budgets[of];
        let mut facts = self.index.budget_inputs(&namespace, &budget.spec.cohort);
        facts.jobs_ignoring_disruption.clone_from(&self.jobs);
        let refused = self.refused.iter();
        facts.refused_for = refused
            .map(|(uid, since)| (uid.clone(), Duration::from_secs(second - since)))
            .collect();
        facts.exceeded_for = budget::is_exceeded(budget)
            .then(|| Duration::from_secs(second - self.exceeded[of].unwrap_or(second)));
        let plan = budget::plan(budget, &facts, &Time(wall(Duration::from_secs(second))));
        let mut done = false;
        for step in plan.steps {
            done |= !matches!(step, budget::Step::Evict { .. });
            match step {
                budget::Step::ApplyQuota(which, cap) => {
                    let in_force = cap.hard.clone();
                    let quota = (
                        key(&namespace, which.name()),
                        Some(ObservedQuota {
                            uid: String::new(),
                            spec: cap,
                            status_hard: in_force,
                            status_updated: Some(Time(wall(Duration::from_secs(second)))),
                        }),
                    );
                    self.index.apply(WatchEvent::Quota(Event::Apply(quota)));
                }
                budget::Step::LabelNamespace => {
                    let label = (key("", &namespace), Some("enforced".to_owned()));
                    self.index.apply(WatchEvent::Namespace(Event::Apply(label)));
                }
                budget::Step::ApplyStatus(status) => {
                    budget.status = Some(*status);
                    let since = self.exceeded[of].unwrap_or(second);
                    self.exceeded[of] = budget::is_exceeded(budget).then_some(since);
                }
                budget::Step::Evict { pod, by_force } => {
                    let fake_pod = &self.live.pods[&pod.uid];
                    let sticks =
                        by_force && owns(fake_pod) && matches!(fake_pod.owner, Owner::Job(_));
                    assert!(!sticks, "{} of a Job is deleted", pod.uid);
                    if self.live.kept.contains(&pod.uid) && !by_force {
                        self.refused.entry(pod.uid).or_insert(second);
                        continue;
                    }
                    let evicted = self.live.pods.get_mut(&pod.uid).unwrap();
                    evicted.ending = true;
                    self.repaired.insert(pod.uid, evicted.clone());
                    self.operator.view = None;
                    done = true;
                }
                budget::Step::ReadJob(job) => {
                    self.jobs.insert(job.uid.clone(), job.uid.len() % 2 == 0);
                }
            }
        }
        let again = plan.requeue_after.map(|again| again.as_secs().max(1) + 1);
        if done { Some(1) } else { again }
    }

    /// An excess pod is created again and refused.
    fn refuse(&mut self) {
        let repaired = &self.repaired;
        let count = self.live.pods.len();
        self.live.pods.retain(|uid, _| {
            uid.strip_suffix('\'')
                .is_none_or(|was| !repaired.contains_key(was))
        });
        if self.live.pods.len() < count {
            self.operator.view = None;
        }
    }

    /// Creates the pods and applies both plans until nothing happens any more.
    fn run(&mut self, pods: &[NewPod]) -> Result<(), TestCaseError> {
        let (mut second, mut last) = (0, 0);
        let waits = |due: &[Option<u64>]| due.iter().any(Option::is_some);
        while second < COMING_END || second - last < REST || waits(&self.due) {
            let now = pods.iter().enumerate().filter(|(_, pod)| pod.at == second);
            now.for_each(|(number, pod)| self.create(number, pod));
            let reconciled = self.reconcile(second);
            let happened = self.operator.act(&mut self.live, second, usize::MAX) || reconciled;
            self.refuse();
            if happened {
                last = second;
            }
            let due = self.due.iter().flatten().copied();
            let then = pods.iter().map(|pod| pod.at).chain(due);
            let then = then.filter(|at| *at > second).min().unwrap_or(u64::MAX);
            second = then.min(second + self.operator.pause(happened));
            prop_assert!(second < 900, "it does not come to rest");
        }
        Ok(())
    }

    fn holds(&self, of: usize, type_: &str) -> bool {
        let status = self.budgets[of].status.as_ref().unwrap();
        let condition = status
            .conditions
            .iter()
            .find(|condition| condition.type_ == type_);
        condition.unwrap().status == "True"
    }

    /// The indices of a cohort's budgets.
    fn of_cohort(&self, cohort: usize) -> impl Iterator<Item = usize> {
        (0..self.bounds.len()).filter(move |of| of % self.cohorts == cohort)
    }

    /// Whether all guaranteed pods of a cohort have the same priority.
    fn has_one_priority(&self, pods: &[NewPod], cohort: usize) -> bool {
        let mut there = pods
            .iter()
            .filter(|pod| pod.team % self.bounds.len() % self.cohorts == cohort);
        there.all(|pod| pod.priority != HIGH)
    }

    /// The guaranteed pods that wait although a GPU would have room without evictable borrowers: on
    /// their node, or on any node whose quanta suffice.
    fn left_waiting(&self) -> Vec<&String> {
        let cluster = &self.live;
        let stay = || {
            let pods = cluster.pods.values();
            pods.filter(|pod| owns(pod) || pod.sticks())
        };
        let one_node_covered = |of: usize| {
            let mut teams = self.of_cohort(of);
            cluster.nodes.len() == 1
                && self.cohorts == 1
                && teams.all(|of| !self.slipped.contains(&of) && self.holds(of, names::COVERED))
                && stay().all(owns)
        };
        let fits = |uid: &String, pod: &FakePod, node: &String| {
            let requested: u64 = stay()
                .filter(|other| other.node.as_ref() == Some(node))
                .map(|other| other.request)
                .sum();
            let mut gpus = cluster.nodes[node].iter();
            let all: u64 = cluster.nodes[node].values().sum();
            // The guarantees of a covered cohort fit into its nodes together.
            (pod.node.is_some()
                || one_node_covered(team(uid) % self.cohorts)
                || requested + pod.request <= all)
                && gpus.any(|(gpu, capacity)| {
                    stay().map(|other| other.on(gpu)).sum::<u64>() + pod.request <= *capacity
                })
        };
        let waits = cluster
            .pods
            .iter()
            .filter(|(_, pod)| owns(pod) && !pod.is_bound());
        let left = waits.filter(|(uid, pod)| match &pod.node {
            Some(node) => fits(uid, pod, node),
            None => {
                let mut nodes = cluster.nodes.keys();
                nodes.any(|node| cluster.takes(node, pod) && fits(uid, pod, node))
            }
        });
        left.map(|(uid, _)| uid).collect()
    }
}

#[test]
fn cohorts_get_their_guarantees() {
    let (cases, lent) = (cases(CASES), Cell::new(0));
    proptest!(ProptestConfig::with_cases(cases), |(
        cohorts in 1_usize..3,
        nodes in prop::collection::vec(prop::collection::vec(6_u64..16, 1..4), 1..3),
        budgets in prop::collection::vec((0_u64..40, 0_u64..60), 1..4),
        mut pods in prop::collection::vec(coming(), 4..20),
        ranks in prop::bool::weighted(0.4),
    )| {
        let high = pods.iter_mut().filter(|pod| pod.priority == HIGH && !ranks);
        high.for_each(|pod| pod.priority = GUARANTEED);
        let mut teams = Teams::new(cohorts, &nodes, &budgets);
        teams.run(&pods)?;
        // Lending evicts each pod once, for one pending pod that is then bound, and no more than
        // this pod lacks. A pending pod of higher priority may intervene.
        let live = &teams.live;
        let evicted: BTreeSet<&String> = live.evicted.iter().collect();
        prop_assert_eq!(evicted.len(), live.evicted.len(), "{:?}", live.evicted);
        for ((pending_pod, node), round) in &live.rounds {
            if !teams.has_one_priority(&pods, team(pending_pod) % cohorts) {
                continue;
            }
            let pod = live.pods.get(pending_pod).or_else(|| teams.repaired.get(pending_pod));
            let gpus = pod.map_or(1, |pod| live.shares(node, pod).len());
            prop_assert!(round.len() <= gpus, "{}: {:?}", pending_pod, round);
            prop_assert!(round.values().all(Round::needed_all), "{}: {:?}", pending_pod, round);
            let is_settled = live.bound(pending_pod) || teams.repaired.contains_key(pending_pod);
            prop_assert!(is_settled, "{} waits: {:?}", pending_pod, live);
        }
        for (of, (guaranteed, limit)) in teams.bounds.iter().enumerate() {
            // Only a late quota exceeds a guarantee, and not for long. No other pod is evicted for
            // it, and no Job fails by it.
            let slipped = teams.slipped.contains(&of);
            let mut sticks = live.pods.iter().filter(|(uid, pod)| team(uid) == of && pod.sticks());
            if !slipped || sticks.next().is_none() {
                let requested = teams.requested(of);
                prop_assert!(requested.0 <= *guaranteed && requested.1 <= *limit, "{} requests {:?}", of, requested);
                prop_assert!(!teams.holds(of, names::EXCEEDED));
            }
            let offered: u64 = nodes.iter().skip(of % cohorts).step_by(cohorts).flatten().sum();
            let promised = teams.of_cohort(of % cohorts).map(|of| teams.bounds[of].0).sum();
            prop_assert_eq!(teams.holds(of, names::COVERED), offered >= promised && offered > 0);
        }
        for uid in teams.repaired.keys() {
            prop_assert!(teams.slipped.contains(&team(uid)), "{}", uid);
        }
        // Each pod within a covered guarantee that would have room without borrowers is bound.
        let waiting = teams.left_waiting();
        prop_assert!(waiting.is_empty(), "{:?} wait: {:?}", waiting, live);
        lent.set(lent.get() + u32::from(!live.evicted.is_empty()));
    });
    assert!(lent.get() >= cases / 5, "{} of {cases}", lent.get());
}
