//! Simulates a small cluster that applies plans. It has GPUs, pods, an agent that binds by
//! reservation and priority, and a scheduler that counts quanta and honours nominations.

mod guarantees;
mod node_reports;
mod node_writes;
mod preemption;
mod random;
mod relocation;
mod untrusted_reports;

use std::collections::{BTreeMap, BTreeSet};

use bursar_crds::COHORT_LABEL;
use bursar_crds::gpu_node::{MAX_PODS, Relocation};
use bursar_crds::shares::{GpuCapacity, split_quanta};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::runtime::watcher::Event;
use proptest::prelude::*;

use super::*;
use crate::api::write::EvictionResult;
use crate::cluster::ClusterIndex;
use crate::cluster::facts::node::{Gpu, GpuFacts, NodeFacts, PendingContainer};
use crate::cluster::facts::pod::{
    Constraints, Owner, Placement, PodFacts, PodSummary, PriorityKind,
};
use crate::cluster::{BudgetSummary, GpuNodeSummary, QuotaOverrides, WatchEvent};
use crate::property_cases::cases;

/// How many random clusters each property is checked on. In at least a fifth of them a pod has to
/// be evicted.
const CASES: u32 = 100_000;

const OPTIONS: PlacementOptions = PlacementOptions {
    quantum: Quantum::Gib1,
    relocate_pending_pods: true,
    disruption_grace: Duration::from_secs(60),
    drain_for_nvidia: true,
};
/// The wall clock at the operator's uptime `now`.
fn wall(now: Uptime) -> Timestamp {
    Timestamp::UNIX_EPOCH + now
}

const GUARANTEED: i32 = 0;
const HIGH: i32 = 10;
/// A lower priority than the others, but not borrowed.
const LOW: i32 = -5;
const BORROWED: i32 = -10;

/// How a pod's memory lies on GPUs.
#[derive(Clone, Debug, PartialEq)]
enum Shape {
    /// On one GPU.
    One,
    /// Evenly over so many GPUs.
    Spread(u64),
    /// In containers of these sizes, each of them on one GPU.
    Containers(Vec<u64>),
}

/// A pod of the simulated cluster.
#[derive(Clone, Debug, PartialEq)]
struct FakePod {
    request: u64,
    shape: Shape,
    /// The CPU request.
    cpu: u64,
    priority: i32,
    owner: Owner,
    node: Option<String>,
    nominated: Option<String>,
    /// The GPUs that the pod is bound to, and its memory there beside the first container's.
    places: Vec<(String, u64)>,
    /// The GPU of the pod's first container, and that container's part of the request.
    first: Option<(String, u64)>,
    /// The cohort label of the nodes that the pod may use. Any node without it.
    cohort: Option<String>,
    ending: bool,
}

impl FakePod {
    /// The request beside the first container's.
    fn rest(&self) -> u64 {
        self.request - self.first.as_ref().map_or(0, |(_, quanta)| *quanta)
    }

    fn is_bound(&self) -> bool {
        !self.places.is_empty()
    }

    /// The memory that the pod still needs on GPUs of these capacities, in shares that need one GPU
    /// each, largest first.
    fn shares(&self, capacities: &[u64]) -> Vec<u64> {
        let least = match &self.shape {
            Shape::One => 1,
            Shape::Spread(gpus) => *gpus as u16,
            Shape::Containers(sizes) => {
                let mut sizes = sizes.clone();
                sizes.sort_unstable_by(|a, b| b.cmp(a));
                return sizes;
            }
        };
        let gpu = |quanta: &u64| GpuCapacity {
            quanta: *quanta as u32,
            is_combinable: true,
        };
        let gpus: Vec<_> = capacities.iter().map(gpu).collect();
        // A share that no GPU holds stands for a pod that the node never holds.
        let shares = split_quanta(&gpus, self.rest() as u32, least);
        let shares = shares.unwrap_or(vec![u32::MAX]).into_iter();
        shares.map(u64::from).collect()
    }

    /// Places shares into the free memory of GPUs by trying every choice. Returns each share with
    /// its GPU.
    fn fit(&self, shares: &[u64], mut free: Vec<u64>) -> Option<Vec<(usize, u64)>> {
        fn place(
            shares: &[u64],
            on_distinct_gpus: bool,
            free: &mut [u64],
            at: &mut Vec<usize>,
        ) -> bool {
            let Some((share, rest)) = shares.split_first() else {
                return true;
            };
            (0..free.len()).any(|gpu| {
                if free[gpu] < *share || on_distinct_gpus && at.contains(&gpu) {
                    return false;
                }
                free[gpu] -= share;
                at.push(gpu);
                let placed = place(rest, on_distinct_gpus, free, at);
                if !placed {
                    at.pop();
                    free[gpu] += share;
                }
                placed
            })
        }
        let (on_distinct_gpus, mut at) = (!matches!(self.shape, Shape::Containers(_)), Vec::new());
        let found = place(shares, on_distinct_gpus, &mut free, &mut at);
        found.then(|| at.into_iter().zip(shares.iter().copied()).collect())
    }

    /// The pod's memory on a GPU.
    fn on(&self, gpu: &str) -> u64 {
        let all = self.places.iter().chain(&self.first);
        let there = all.filter(|(on, _)| on == gpu);
        there.map(|(_, quanta)| *quanta).sum()
    }

    /// Whether the pod is never evicted: it is guaranteed and its Job counts an eviction as a
    /// failure.
    fn sticks(&self) -> bool {
        let keeps = matches!(&self.owner, Owner::Job(job) if job.uid.len() % 2 == 1);
        keeps && self.priority != BORROWED
    }
}

/// The victims of one pod on one GPU.
#[derive(Clone, Debug, Default, PartialEq)]
struct Round {
    /// The amount that the pod lacked there at the first eviction.
    lacked: u64,
    /// The memory of each victim.
    gone: Vec<u64>,
}

impl Round {
    /// Whether the pod needed every victim.
    fn needed_all(&self) -> bool {
        let least = self.gone.iter().min().copied().unwrap_or_default();
        self.gone.iter().sum::<u64>() - least < self.lacked
    }
}

/// A simulated cluster.
#[derive(Clone, Debug, Default)]
struct FakeCluster {
    /// The capacity of each node's GPUs.
    nodes: BTreeMap<String, BTreeMap<String, u64>>,
    pods: BTreeMap<String, FakePod>,
    reservations: BTreeMap<String, Vec<Reservation>>,
    /// The reservations that the agents have acknowledged.
    held: BTreeMap<String, Reservation>,
    labels: BTreeMap<String, BTreeMap<String, String>>,
    /// Memory of ended pods that is not proven free, by GPU.
    left: BTreeMap<String, u64>,
    /// The pods for which agents set free memory aside without a reservation, by GPU.
    set_aside: BTreeMap<String, (String, u64)>,
    /// The namespaces that have GPUs for themselves, by GPU.
    only_for: BTreeMap<String, String>,
    quotas: BTreeMap<String, Vec<QuotaOverride>>,
    moves: BTreeMap<String, Vec<Relocation>>,
    lowered: QuotaOverrides,
    /// The pods whose eviction a PodDisruptionBudget refuses.
    kept: Vec<String>,
    /// The pods of all accepted evictions.
    evicted: Vec<String>,
    /// The victims by preemptor and node, then by GPU.
    rounds: BTreeMap<(String, String), BTreeMap<String, Round>>,
    moved: Vec<String>,
    writes: usize,
    /// Every evicted pod is recreated, like a relocated pod.
    all_return: bool,
    /// The scheduler preempts borrowers on a node that lacks quanta.
    preempts: bool,
    /// Nodes on which the scheduler places no guaranteed pod, for a reason that the operator does
    /// not see.
    shut: Vec<String>,
    /// The CPUs of nodes that have few.
    processors: BTreeMap<String, u64>,
    /// Pods that never terminate.
    slow: Vec<String>,
}

/// The event of a node's report.
fn report(node: &str, facts: GpuFacts) -> WatchEvent {
    let summary = GpuNodeSummary {
        facts: Box::new(facts),
        ..GpuNodeSummary::default()
    };
    WatchEvent::GpuNode(Event::Apply((key("", node), Some(summary))))
}

impl FakeCluster {
    fn node(mut self, name: &str, gpus: &[u64]) -> Self {
        let gpus = gpus.iter().enumerate();
        let gpus = gpus.map(|(index, capacity)| (format!("{name}-{index}"), *capacity));
        self.nodes.insert(name.to_owned(), gpus.collect());
        self
    }

    fn pod(
        mut self,
        uid: &str,
        request: u64,
        priority: i32,
        at: Option<(&str, Option<usize>)>,
    ) -> Self {
        let gpu = at.and_then(|(node, gpu)| Some((format!("{node}-{}", gpu?), request)));
        let pod = FakePod {
            request,
            shape: Shape::One,
            cpu: 0,
            priority,
            owner: other(&format!("owner of {uid}")),
            node: at.map(|(node, _)| node.to_owned()),
            nominated: None,
            places: gpu.into_iter().collect(),
            first: None,
            cohort: None,
            ending: false,
        };
        self.pods.insert(uid.to_owned(), pod);
        self
    }

    /// Binds a first container of the pod to a GPU.
    fn first(mut self, uid: &str, gpu: &str, quanta: u64) -> Self {
        self.pods.get_mut(uid).unwrap().first = Some((gpu.to_owned(), quanta));
        self
    }

    fn shape(mut self, uid: &str, shape: Shape) -> Self {
        self.pods.get_mut(uid).unwrap().shape = shape;
        self
    }

    fn cpu(mut self, uid: &str, processors: u64) -> Self {
        self.pods.get_mut(uid).unwrap().cpu = processors;
        self
    }

    fn owned(mut self, uid: &str, owner: Owner) -> Self {
        self.pods.get_mut(uid).unwrap().owner = owner;
        self
    }

    /// The shares that the pod still needs on this node.
    fn shares(&self, node: &str, pod: &FakePod) -> Vec<u64> {
        let capacities: Vec<u64> = self.nodes[node].values().copied().collect();
        pod.shares(&capacities)
    }

    fn free(&self, node: &str, gpu: &str) -> u64 {
        let used: u64 = self.pods.values().map(|pod| pod.on(gpu)).sum();
        let left = self.left.get(gpu).copied().unwrap_or_default();
        self.nodes[node][gpu].saturating_sub(used + left)
    }

    /// The free memory that is reserved for a pod. The reservation includes what the pod has.
    fn kept(&self, gpu: &str) -> u64 {
        let Some(held) = self.held.get(gpu) else {
            return 0;
        };
        let has = self.pods.get(&held.pod_uid).map_or(0, |pod| pod.on(gpu));
        u64::from(held.quanta.unsigned_abs()).saturating_sub(has)
    }

    fn tokens(&self, node: &str) -> u64 {
        let there = self
            .pods
            .values()
            .filter(|pod| pod.node.as_deref() == Some(node));
        let all: u64 = self.nodes[node].values().sum();
        all.saturating_sub(there.map(|pod| pod.request).sum())
    }

    fn index(&self) -> ClusterIndex {
        let mut index = ClusterIndex::new(Quantum::Gib1);
        for (uid, pod) in &self.pods {
            let facts = PodFacts {
                uid: uid.clone(),
                api_uid: uid.clone(),
                kind: match pod.priority {
                    BORROWED => PriorityKind::Borrowed,
                    _ => PriorityKind::Guaranteed,
                },
                device: Quanta::new(pod.request),
                containers: match &pod.shape {
                    Shape::Containers(sizes) => sizes.clone(),
                    Shape::One | Shape::Spread(_) => vec![pod.request - pod.rest(), pod.rest()],
                }
                .into_iter()
                .zip(["first", "main", "last"])
                .filter(|(request, _)| *request > 0)
                .map(|(request, name)| (name.to_owned(), Quanta::new(request)))
                .collect(),
                managed_containers: vec!["main".to_owned()],
                has_larger_init: false,
                priority: pod.priority,
                preempts: pod.priority != BORROWED,
                placement: match &pod.node {
                    Some(node) => Placement::Node(node.clone()),
                    None => Placement::Unscheduled {
                        unschedulable_since: Some(k8s_openapi::jiff::Timestamp::UNIX_EPOCH),
                        nominated: pod.nominated.clone(),
                    },
                },
                terminating: pod.ending,
                pending: !pod.is_bound(),
                min_gpus: match pod.shape {
                    Shape::Spread(gpus) => gpus as u16,
                    Shape::One | Shape::Containers(_) => 1,
                },
                owner: pod.owner.clone(),
                constraints: Constraints {
                    selector: pod
                        .cohort
                        .iter()
                        .map(|cohort| (COHORT_LABEL.to_owned(), cohort.clone()))
                        .collect(),
                    ..Constraints::default()
                },
                ..PodFacts::default()
            };
            let mut summary = PodSummary::of_facts(facts);
            summary.requests.milli =
                [("cpu".into(), 1_000 * pod.cpu), ("pods".into(), 1_000)].into();
            index.apply(WatchEvent::Pod(Event::Apply((
                key("n", uid),
                Some(summary),
            ))));
        }
        for (node, gpus) in &self.nodes {
            let all: u64 = gpus.values().sum();
            let facts = NodeFacts {
                uid: node.clone(),
                labels: self.labels.get(node).cloned().unwrap_or_default(),
                taints: Vec::new(),
                is_ready: true,
                is_cordoned: false,
                allocatable: Quanta::new(all),
                allocatable_milli: [("cpu", self.all_processors(node)), ("pods", 110)]
                    .map(|(resource, amount)| (resource.to_owned(), 1_000 * amount))
                    .into(),
            };
            index.apply(WatchEvent::Node(Event::Apply((key("", node), Some(facts)))));
            let gpu = |(uuid, capacity): (&String, &u64)| {
                let held = self.held.get(uuid);
                let free = self.free(node, uuid);
                let reserved = held.map(|held| (held.pod_uid.clone(), self.kept(uuid)));
                let set_aside = reserved
                    .into_iter()
                    .chain(self.set_aside.get(uuid).cloned());
                let kept: u64 = set_aside.clone().map(|(_, quanta)| quanta).sum();
                let pods = self.pods.iter().filter(|(_, pod)| pod.on(uuid) > 0);
                let mut pods: Vec<_> = pods.map(|(uid, pod)| (pod.on(uuid), uid)).collect();
                pods.sort_by_key(|(quanta, _)| std::cmp::Reverse(*quanta));
                let listed = pods.iter().take(MAX_PODS);
                Gpu {
                    uuid: uuid.clone(),
                    capacity: Quanta::new(*capacity),
                    free: Quanta::new(free),
                    largest_free: Quanta::new(free.saturating_sub(kept)),
                    reserved_for: held.map(|held| held.pod_uid.clone()),
                    only_for: self.only_for.get(uuid).cloned(),
                    set_aside: set_aside
                        .map(|(uid, quanta)| (uid, Quanta::new(quanta)))
                        .collect(),
                    pods: listed
                        .map(|(quanta, uid)| ((*uid).clone(), Quanta::new(*quanta)))
                        .collect(),
                    omits_pods: pods.len() > MAX_PODS,
                }
            };
            let waits = |(_, pod): &(&String, &FakePod)| {
                pod.node.as_ref() == Some(node) && !pod.is_bound() && !pod.ending
            };
            let facts = GpuFacts {
                uid: node.clone(),
                gpus: gpus.iter().map(gpu).collect(),
                pending: self
                    .pods
                    .iter()
                    .filter(waits)
                    .map(|(uid, pod)| PendingContainer {
                        pod: uid.clone(),
                        quanta: Quanta::new(match &pod.shape {
                            // The first container waits, and the others come after it.
                            Shape::Containers(sizes) => sizes[0],
                            Shape::One | Shape::Spread(_) => pod.rest(),
                        }),
                    })
                    .collect(),
                reservations: self.reservations.get(node).cloned().unwrap_or_default(),
                quotas: self.quotas.get(node).cloned().unwrap_or_default(),
                relocations: self.moves.get(node).cloned().unwrap_or_default(),
            };
            index.apply(report(node, facts));
        }
        if !self.lowered.is_empty() {
            let budget = BudgetSummary {
                overrides: self.lowered.clone(),
                ..BudgetSummary::default()
            };
            let budget = (key("n", "default"), Some(budget));
            index.apply(WatchEvent::Budget(Event::Apply(budget)));
        }
        index
    }

    fn apply(&mut self, step: Step, history: &mut History, now: Uptime) {
        self.writes += 1;
        match step {
            Step::Label { nodes } => {
                for (node, labels) in nodes {
                    history.record_label_write();
                    let there = self.labels.entry(node.name.clone()).or_default();
                    for (label, value) in &labels {
                        match value {
                            Some(value) => drop(there.insert(label.clone(), value.clone())),
                            None => drop(there.remove(label)),
                        }
                    }
                    history.written_labels.insert(node.name, (labels, now));
                }
            }
            Step::Reserve {
                node,
                over,
                reservations,
            } => {
                let there = self.reservations.get(&node.name);
                if there.map_or([].as_slice(), Vec::as_slice) != over {
                    return;
                }
                self.reservations
                    .insert(node.name.clone(), reservations.clone());
                history.reservations.insert(node.name, reservations);
            }
            Step::OverrideQuotas {
                node,
                quotas,
                omitted,
            } => {
                self.quotas.insert(node.name.clone(), quotas.clone());
                history.omitted_quotas.insert(node.name.clone(), omitted);
                history.quotas.insert(node.name, quotas);
            }
            Step::Preempt {
                pending_pod,
                node,
                reservations,
                nominate,
                victims,
            } => {
                let are_held = reservations.iter().all(|wanted| {
                    let mut reserved = self.reservations.get(&node).into_iter().flatten();
                    let held = self.held.get(&wanted.gpu);
                    reserved.any(|reservation| reservation == wanted)
                        && held.is_some_and(|held| held.pod_uid == wanted.pod_uid)
                });
                if !self.waits(&pending_pod.uid, &node) || !are_held {
                    return;
                }
                if nominate {
                    self.pods.get_mut(&pending_pod.uid).unwrap().nominated = Some(node.clone());
                }
                for victim in victims {
                    let uid = &victim.pod.uid;
                    let kept = self.kept.contains(uid) && !victim.force;
                    let answer = match kept {
                        true => EvictionResult::BlockedByPdb,
                        false => EvictionResult::Accepted,
                    };
                    if !kept {
                        self.end(uid, &pending_pod.uid, &node, &victim.gpu);
                    }
                    history.record_eviction(uid, &Ok(answer), now);
                }
            }
            Step::Relocate {
                pod,
                owner,
                from,
                to,
                room,
            } => {
                if !self.waits(&pod.uid, &from.name) {
                    return;
                }
                let moves = history.relocations_with(&from.name, &owner, now, wall(now));
                let records = moves.iter().map(|(moved, _)| moved.clone()).collect();
                self.moves.insert(from.name.clone(), records);
                history.set_relocations(from.name, moves);
                history.record_eviction(&pod.uid, &Ok(EvictionResult::Accepted), now);
                history.record_relocation(&owner, &to, room, now);
                self.moved.push(pod.uid.clone());
                self.pods.get_mut(&pod.uid).unwrap().ending = true;
            }
            Step::ReadJob { job, .. } => {
                // Jobs with an even number of letters ignore disruption.
                let lets = job.uid.len() % 2 == 0;
                history.jobs.insert(job.uid, lets);
            }
        }
    }

    /// Whether the API server shows the pod as waiting for this node.
    fn waits(&self, uid: &str, node: &str) -> bool {
        let pod = self.pods.get(uid);
        pod.is_some_and(|pod| {
            let at = pod.node.as_ref().or(pod.nominated.as_ref());
            let is_on_node = at.is_none_or(|at| at == node);
            is_on_node && !pod.is_bound() && !pod.ending
        })
    }

    /// Evicts a pod for another. A pod that is terminating or gone is not evicted again.
    fn end(&mut self, uid: &str, pending_pod: &str, node: &str, gpu: &str) {
        let lacked = self.kept(gpu).saturating_sub(self.free(node, gpu));
        let priority = self.pods[pending_pod].priority;
        let Some(pod) = self.pods.get_mut(uid) else {
            return;
        };
        self.evicted.push(uid.to_owned());
        assert!(
            pod.priority < priority,
            "{uid} was evicted for {pending_pod}"
        );
        if !std::mem::replace(&mut pod.ending, true) {
            let round = self.rounds.entry((pending_pod.to_owned(), node.to_owned()));
            let round = round.or_default().entry(gpu.to_owned()).or_default();
            if round.gone.is_empty() {
                round.lacked = lacked;
            }
            round.gone.push(pod.on(gpu));
        }
    }

    /// Advances by a second: pods terminate, agents acknowledge and bind, the scheduler places
    /// pods.
    fn advance(&mut self) {
        // A relocated pod is recreated under another name.
        let again: Vec<(String, FakePod)> = self
            .pods
            .iter()
            .filter(|(uid, pod)| pod.ending && (self.moved.contains(uid) || self.all_return))
            .map(|(uid, pod)| {
                let fresh = FakePod {
                    node: None,
                    nominated: None,
                    places: Vec::new(),
                    first: None,
                    ending: false,
                    ..pod.clone()
                };
                (format!("{uid}'"), fresh)
            })
            .collect();
        let slow = &self.slow;
        self.pods
            .retain(|uid, pod| !pod.ending || slow.contains(uid));
        self.pods.extend(again);
        self.held = self
            .reservations
            .values()
            .flatten()
            .map(|held| (held.gpu.clone(), held.clone()))
            .collect();
        // Borrowers come first: an unlucky order, in which only a nomination protects the room.
        let mut queue: Vec<String> = self.pods.keys().cloned().collect();
        queue.sort_by_key(|uid| self.pods[uid].priority);
        for uid in &queue {
            let pod = self.pods[uid].clone();
            if pod.node.is_some() {
                continue;
            }
            let kept = |node: &str| -> u64 {
                let others = self.pods.iter().filter(|(other, waiting)| {
                    *other != uid
                        && waiting.node.is_none()
                        && waiting.priority >= pod.priority
                        && waiting.nominated.as_deref() == Some(node)
                });
                others.map(|(_, waiting)| waiting.request).sum()
            };
            let fits = self
                .nodes
                .keys()
                .filter(|node| self.takes(node, &pod))
                .filter(|node| self.tokens(node) >= pod.request + kept(node))
                .max_by_key(|node| (pod.nominated.as_ref() == Some(node), self.tokens(node)));
            if let Some(node) = fits.cloned() {
                self.pods.get_mut(uid).unwrap().node = Some(node);
            } else if self.preempts && pod.priority != BORROWED {
                let short = self.nodes.keys().map(|node| match self.takes(node, &pod) {
                    true => (pod.request + kept(node)).saturating_sub(self.tokens(node)),
                    false => u64::MAX,
                });
                let short: Vec<u64> = short.collect();
                self.preempt(uid, &short);
            }
        }
        // The agents bind the pod of a reservation first, and then by priority.
        queue.sort_by_key(|uid| std::cmp::Reverse(self.pods[uid].priority));
        for uid in &queue {
            let pod = self.pods[uid].clone();
            let Some(node) = pod.node.as_ref().filter(|_| !pod.is_bound()) else {
                continue;
            };
            let gpus: Vec<&String> = self.nodes[node].keys().collect();
            let room = |gpu: &&String| {
                let held = self.held.get(*gpu);
                let kept = held.filter(|held| held.pod_uid != *uid);
                let kept = kept.map_or(0, |_| self.kept(gpu));
                let first = self.set_aside.get(*gpu).filter(|(first, _)| first != uid);
                let kept = kept + first.map_or(0, |(_, quanta)| *quanta);
                // All pods are of the namespace `n`.
                match self
                    .only_for
                    .get(*gpu)
                    .is_none_or(|only_for| only_for == "n")
                {
                    true => self.free(node, gpu).saturating_sub(kept),
                    false => 0,
                }
            };
            let free: Vec<u64> = gpus.iter().map(room).collect();
            let places = pod
                .fit(&self.shares(node, &pod), free)
                .into_iter()
                .flatten();
            let places = places.map(|(gpu, share)| (gpus[gpu].clone(), share));
            let places = places.collect();
            self.pods.get_mut(uid).unwrap().places = places;
        }
    }

    /// Whether the pod may be on a node, by labels and by what only the scheduler knows.
    fn takes(&self, node: &str, pod: &FakePod) -> bool {
        if self.shut.iter().any(|shut| shut == node) && pod.priority != BORROWED {
            return false;
        }
        let label = self.labels.get(node).and_then(|all| all.get(COHORT_LABEL));
        let there = self.pods.values();
        let there = there.filter(|other| other.node.as_deref() == Some(node));
        let cpu: u64 = there.map(|other| other.cpu).sum();
        (pod.cohort.is_none() || pod.cohort.as_ref() == label)
            && cpu + pod.cpu <= self.all_processors(node)
    }

    fn all_processors(&self, node: &str) -> u64 {
        self.processors.get(node).copied().unwrap_or(64)
    }

    fn borrowers(&self, node: &str) -> impl Iterator<Item = (&String, &FakePod)> {
        let there = self
            .pods
            .iter()
            .filter(move |(_, pod)| pod.node.as_deref() == Some(node));
        there.filter(|(_, pod)| pod.priority == BORROWED)
    }

    /// The scheduler's preemption: borrowers terminate on the node where the fewest have the
    /// `short` quanta.
    fn preempt(&mut self, uid: &str, short: &[u64]) {
        let nominated = self.pods[uid].nominated.as_ref();
        if nominated.is_some_and(|node| self.borrowers(node).any(|(_, pod)| pod.ending)) {
            return;
        }
        let choices = self.nodes.keys().zip(short).filter_map(|(node, short)| {
            let mut there: Vec<_> = self
                .borrowers(node)
                .filter(|(_, pod)| !pod.ending)
                .collect();
            there.sort_by_key(|(_, pod)| std::cmp::Reverse(pod.request));
            let mut freed = 0;
            let last = there.iter().position(|(_, pod)| {
                freed += pod.request;
                freed >= *short
            });
            there.truncate(last? + 1);
            let victims: Vec<String> = there.into_iter().map(|(uid, _)| uid.clone()).collect();
            Some((victims.len(), node.clone(), victims))
        });
        let choice = choices.min();
        self.pods.get_mut(uid).unwrap().nominated =
            choice.as_ref().map(|(_, node, _)| node.clone());
        for victim in choice.into_iter().flat_map(|(.., victims)| victims) {
            self.pods.get_mut(&victim).unwrap().ending = true;
        }
    }

    /// Plans and advances for `seconds`. Ends early once no plan has had a step for a while.
    fn run(&mut self, history: &mut History, from: u64, seconds: u64) {
        for second in from..from + seconds {
            let now = Duration::from_secs(second);
            for step in plan(&self.index().placement_view(), history, &OPTIONS, now) {
                self.apply(step, history, now);
            }
            self.advance();
        }
    }

    fn bound(&self, uid: &str) -> bool {
        self.pods.get(uid).is_some_and(FakePod::is_bound)
    }
}

/// The longest pause in seconds.
const LONGEST_PAUSE: u64 = 16;

/// An operator over a cluster that nothing else changes. It plans after changes, and ever more
/// rarely without them, which makes 100,000 clusters cheap.
#[derive(Default)]
struct Watching {
    history: History,
    view: Option<ClusterIndex>,
    pause: u64,
}

impl Watching {
    /// Applies the first `most` steps of one plan. Returns whether anything happened.
    fn act(&mut self, live: &mut FakeCluster, second: u64, most: usize) -> bool {
        let now = Duration::from_secs(second);
        let anew = self.view.is_none();
        let view = self.view.get_or_insert_with(|| live.index());
        let steps = plan(&view.placement_view(), &mut self.history, &OPTIONS, now);
        let planned = !steps.is_empty();
        if !planned && !anew {
            return false;
        }
        let before = (!planned).then(|| (live.pods.clone(), live.held.clone()));
        for step in steps.into_iter().take(most) {
            live.apply(step, &mut self.history, now);
        }
        live.advance();
        let happened = before.is_none_or(|(pods, held)| pods != live.pods || held != live.held);
        if happened {
            self.view = None;
        }
        happened
    }

    /// The seconds until the next plan, by whether anything happened.
    fn pause(&mut self, happened: bool) -> u64 {
        self.pause = if happened {
            1
        } else {
            (2 * self.pause).clamp(1, LONGEST_PAUSE)
        };
        self.pause
    }
}

fn key(namespace: &str, name: &str) -> Key {
    Key {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    }
}

/// A Job. With an even number of letters it ignores disruption.
fn job(uid: &str) -> Owner {
    Owner::Job(pod::JobRef {
        name: "j".to_owned(),
        uid: uid.to_owned(),
    })
}

/// Another controller, such as a ReplicaSet.
fn other(uid: &str) -> Owner {
    Owner::Other {
        uid: uid.to_owned(),
    }
}

fn reservation(gpu: &str, pod_uid: &str, quanta: i32) -> Reservation {
    Reservation {
        gpu: gpu.to_owned(),
        pod_uid: pod_uid.to_owned(),
        quanta,
    }
}
