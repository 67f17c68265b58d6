//! A small cluster that plans are carried out on: GPUs, pods, an agent that binds by reservation and priority, a
//! scheduler that counts tokens and keeps them for whom it nominated.

mod promises;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bursar_crds::gpu_node::Moved;
use kube::runtime::watcher::Event;
use proptest::prelude::*;

use super::*;
use crate::demand::Class;
use crate::placement::Told;
use crate::placement::memory::Answer;
use crate::placement::node::{Gpu, GpuFacts, NodeFacts, Waiter};
use crate::placement::pod::{Owner, Place, PodFacts, Wants};

const RULES: Rules = Rules {
    quantum: Quantum::Gib1,
    move_waiters: true,
    disruption_grace: Duration::from_secs(60),
};
/// The world's clock when the operator's shows `now`.
fn wall(now: Moment) -> Timestamp {
    Timestamp::UNIX_EPOCH + now
}

const GUARANTEED: i32 = 0;
const BORROWED: i32 = -10;

/// One pod of the model.
#[derive(Clone, Debug, PartialEq)]
struct Life {
    asks: u64,
    priority: i32,
    owner: Owner,
    node: Option<String>,
    nominated: Option<String>,
    /// The GPU that it is bound to.
    gpu: Option<String>,
    ending: bool,
}

/// Who went for one waiter.
#[derive(Clone, Debug, Default, PartialEq)]
struct Round {
    /// From these GPUs.
    gpus: BTreeSet<String>,
    /// What the waiter lacked on the first of them when the first went.
    lacked: u64,
    /// What each had.
    gone: Vec<u64>,
}

/// The model.
#[derive(Clone, Debug, Default)]
struct Cluster {
    /// Nodes, their GPUs and what each has.
    nodes: BTreeMap<String, BTreeMap<String, u64>>,
    pods: BTreeMap<String, Life>,
    reservations: BTreeMap<String, Vec<Reservation>>,
    /// What the agents have answered.
    held: BTreeMap<String, Reservation>,
    labels: BTreeMap<String, BTreeMap<String, String>>,
    /// What pods that are gone left on GPUs, and is not proven free.
    left: BTreeMap<String, u64>,
    quotas: BTreeMap<String, Vec<QuotaOrder>>,
    moves: BTreeMap<String, Vec<Moved>>,
    lowered: BTreeMap<String, String>,
    /// Whom a disruption budget keeps.
    kept: Vec<String>,
    /// Who was asked to go, each time.
    evicted: Vec<String>,
    /// Who went, by the waiter that it was for and its node.
    rounds: BTreeMap<(String, String), Round>,
    moved: Vec<String>,
    writes: usize,
    /// Whoever is evicted comes again, as what is moved does.
    all_return: bool,
    /// The scheduler preempts borrowers where a node lacks quanta.
    preempts: bool,
}

impl Cluster {
    fn node(mut self, name: &str, gpus: &[u64]) -> Self {
        let gpus = gpus.iter().enumerate();
        let gpus = gpus.map(|(index, capacity)| (format!("{name}-{index}"), *capacity));
        self.nodes.insert(name.to_owned(), gpus.collect());
        self
    }

    fn pod(
        mut self,
        uid: &str,
        asks: u64,
        priority: i32,
        at: Option<(&str, Option<usize>)>,
    ) -> Self {
        let life = Life {
            asks,
            priority,
            owner: Owner::Other {
                uid: format!("owner of {uid}"),
            },
            node: at.map(|(node, _)| node.to_owned()),
            nominated: None,
            gpu: at.and_then(|(node, gpu)| Some(format!("{node}-{}", gpu?))),
            ending: false,
        };
        self.pods.insert(uid.to_owned(), life);
        self
    }

    fn free(&self, node: &str, gpu: &str) -> u64 {
        let used = self
            .pods
            .values()
            .filter(|pod| pod.gpu.as_deref() == Some(gpu));
        let used: u64 = used.map(|pod| pod.asks).sum();
        let left = self.left.get(gpu).copied().unwrap_or_default();
        self.nodes[node][gpu].saturating_sub(used + left)
    }

    fn tokens(&self, node: &str) -> u64 {
        let there = self
            .pods
            .values()
            .filter(|pod| pod.node.as_deref() == Some(node));
        let all: u64 = self.nodes[node].values().sum();
        all.saturating_sub(there.map(|pod| pod.asks).sum())
    }

    fn landscape(&self) -> Landscape {
        let mut landscape = Landscape::default();
        let key = |namespace: &str, name: &str| Key {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        };
        for (uid, pod) in &self.pods {
            let facts = PodFacts {
                uid: uid.clone(),
                class: match pod.priority {
                    BORROWED => Class::Borrowed,
                    _ => Class::Guaranteed,
                },
                asks: Quanta::new(pod.asks),
                containers: vec![("main".to_owned(), Quanta::new(pod.asks))],
                priority: pod.priority,
                preempts: pod.priority != BORROWED,
                place: match &pod.node {
                    Some(node) => Place::On(node.clone()),
                    None => Place::Nowhere {
                        refused: Some(k8s_openapi::jiff::Timestamp::UNIX_EPOCH),
                        nominated: pod.nominated.clone(),
                    },
                },
                ending: pod.ending,
                pending: pod.gpu.is_none(),
                one_gpu: true,
                owner: pod.owner.clone(),
                wants: Wants::default(),
            };
            landscape.apply(Told::Pod(Event::Apply((key("n", uid), Some(facts)))));
        }
        for (node, gpus) in &self.nodes {
            let all: u64 = gpus.values().sum();
            let facts = NodeFacts {
                uid: node.clone(),
                labels: self.labels.get(node).cloned().unwrap_or_default(),
                taints: Vec::new(),
                takes_pods: true,
                allocatable: Quanta::new(all),
            };
            landscape.apply(Told::Node(Event::Apply((key("", node), Some(facts)))));
            let gpu = |(uuid, capacity): (&String, &u64)| {
                let held = self.held.get(uuid);
                let free = self.free(node, uuid);
                let kept = held.map_or(0, |held| held.quanta.unsigned_abs().into());
                Gpu {
                    uuid: uuid.clone(),
                    capacity: Quanta::new(*capacity),
                    free: Quanta::new(free),
                    largest_free: Quanta::new(free.saturating_sub(kept)),
                    held_for: held.map(|held| held.waiter.clone()),
                    pods: self
                        .pods
                        .iter()
                        .filter(|(_, pod)| pod.gpu.as_ref() == Some(uuid))
                        .map(|(uid, pod)| (uid.clone(), Quanta::new(pod.asks)))
                        .collect(),
                }
            };
            let waits = |(_, pod): &(&String, &Life)| {
                pod.node.as_ref() == Some(node) && pod.gpu.is_none() && !pod.ending
            };
            let facts = GpuFacts {
                uid: node.clone(),
                gpus: gpus.iter().map(gpu).collect(),
                waiting: self
                    .pods
                    .iter()
                    .filter(waits)
                    .map(|(uid, pod)| Waiter {
                        pod: uid.clone(),
                        quanta: Quanta::new(pod.asks),
                    })
                    .collect(),
                reservations: self.reservations.get(node).cloned().unwrap_or_default(),
                quotas: self.quotas.get(node).cloned().unwrap_or_default(),
                moves: self.moves.get(node).cloned().unwrap_or_default(),
            };
            landscape.apply(Told::Gpus(Event::Apply((key("", node), Some(facts)))));
        }
        if !self.lowered.is_empty() {
            let lowered = self.lowered.iter();
            let lowered = lowered.map(|(pod, amount)| (pod.clone(), amount.as_str().into()));
            let budget = (key("n", "default"), Some(lowered.collect()));
            landscape.apply(Told::Lowered(Event::Apply(budget)));
        }
        landscape
    }

    fn act(&mut self, step: Step, memory: &mut Memory, now: Moment) {
        self.writes += 1;
        match step {
            Step::Label { node, labels } => {
                memory.label_written();
                let there = self.labels.entry(node.name.clone()).or_default();
                for (label, value) in &labels {
                    match value {
                        Some(value) => drop(there.insert(label.clone(), value.clone())),
                        None => drop(there.remove(label)),
                    }
                }
                memory.labelled.insert(node.name, (labels, now));
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
                memory.reservations.insert(node.name, reservations);
            }
            Step::Lower { node, quotas } => {
                self.quotas.insert(node.name.clone(), quotas.clone());
                memory.quotas.insert(node.name, quotas);
            }
            Step::MakeRoom {
                waiter,
                node,
                gpu,
                nominate,
                victims,
            } => {
                let of_waiter = |held: &Reservation| held.gpu == gpu && held.waiter == waiter.uid;
                let mut reserved = self.reservations.get(&node).into_iter().flatten();
                let is_held = reserved.any(of_waiter) && self.held.get(&gpu).is_some_and(of_waiter);
                if !self.waits(&waiter.uid, &node) || !is_held {
                    return;
                }
                if nominate {
                    self.pods.get_mut(&waiter.uid).unwrap().nominated = Some(node.clone());
                }
                for victim in victims {
                    let uid = &victim.pod.uid;
                    let kept = self.kept.contains(uid) && !victim.overdue;
                    let answer = match kept {
                        true => Answer::Refused,
                        false => Answer::Goes,
                    };
                    if !kept {
                        self.end(uid, &waiter.uid, &node, &gpu);
                    }
                    memory.asked(uid, answer, now);
                }
            }
            Step::Move {
                pod,
                owner,
                from,
                to,
                room,
            } => {
                if !self.waits(&pod.uid, &from.name) {
                    return;
                }
                let moves = memory.moves_with(&from.name, &owner, wall(now));
                self.moves.insert(from.name.clone(), moves.clone());
                memory.recorded(from.name, moves);
                memory.asked(&pod.uid, Answer::Goes, now);
                memory.moved(&owner, &to, room, now);
                self.moved.push(pod.uid.clone());
                self.pods.get_mut(&pod.uid).unwrap().ending = true;
            }
            Step::LookAtJob { job, .. } => {
                // Those with an even number of letters let go.
                let lets = job.uid.len() % 2 == 0;
                memory.jobs.insert(job.uid, lets);
            }
        }
    }

    /// The API server's own word of a waiter.
    fn waits(&self, uid: &str, node: &str) -> bool {
        let pod = self.pods.get(uid);
        pod.is_some_and(|pod| {
            let at = pod.node.as_ref().or(pod.nominated.as_ref());
            let here = at.is_none_or(|at| at == node);
            here && pod.gpu.is_none() && !pod.ending
        })
    }

    /// A pod is evicted for a waiter. Who is gone, or ends already, does not go again.
    fn end(&mut self, uid: &str, waiter: &str, node: &str, gpu: &str) {
        let free = self.free(node, gpu);
        let needs = self.pods[waiter].asks;
        let Some(pod) = self.pods.get_mut(uid) else {
            return;
        };
        self.evicted.push(uid.to_owned());
        if !std::mem::replace(&mut pod.ending, true) {
            let round = self.rounds.entry((waiter.to_owned(), node.to_owned()));
            let round = round.or_default();
            if round.gone.is_empty() {
                round.lacked = needs.saturating_sub(free);
            }
            round.gpus.insert(gpu.to_owned());
            round.gone.push(pod.asks);
        }
    }

    /// A second passes: who is ending ends, agents answer and bind, the scheduler places.
    fn live(&mut self) {
        // What is moved comes again, under another name.
        let again: Vec<(String, Life)> = self
            .pods
            .iter()
            .filter(|(uid, pod)| pod.ending && (self.moved.contains(uid) || self.all_return))
            .map(|(uid, pod)| {
                let fresh = Life {
                    node: None,
                    nominated: None,
                    gpu: None,
                    ending: false,
                    ..pod.clone()
                };
                (format!("{uid}'"), fresh)
            })
            .collect();
        self.pods.retain(|_, pod| !pod.ending);
        self.pods.extend(again);
        self.held = self
            .reservations
            .values()
            .flatten()
            .map(|held| (held.gpu.clone(), held.clone()))
            .collect();
        // Borrowers first: the scheduler may be unlucky, and only a nomination keeps them off.
        let mut queue: Vec<String> = self.pods.keys().cloned().collect();
        queue.sort_by_key(|uid| self.pods[uid].priority);
        for uid in &queue {
            let pod = self.pods[uid].clone();
            if pod.node.is_some() {
                continue;
            }
            let kept = |node: &str| -> u64 {
                let others = self.pods.iter().filter(|(other, life)| {
                    *other != uid
                        && life.node.is_none()
                        && life.priority >= pod.priority
                        && life.nominated.as_deref() == Some(node)
                });
                others.map(|(_, life)| life.asks).sum()
            };
            let fits = self
                .nodes
                .keys()
                .filter(|node| self.tokens(node) >= pod.asks + kept(node))
                .max_by_key(|node| (pod.nominated.as_ref() == Some(node), self.tokens(node)));
            if let Some(node) = fits.cloned() {
                self.pods.get_mut(uid).unwrap().node = Some(node);
            } else if self.preempts && pod.priority != BORROWED {
                let short = self
                    .nodes
                    .keys()
                    .map(|node| (pod.asks + kept(node)).saturating_sub(self.tokens(node)));
                let short: Vec<u64> = short.collect();
                self.preempt(uid, &short);
            }
        }
        // The agents: who is held a GPU, then by priority.
        queue.sort_by_key(|uid| std::cmp::Reverse(self.pods[uid].priority));
        for uid in &queue {
            let pod = self.pods[uid].clone();
            let Some(node) = pod.node.filter(|_| pod.gpu.is_none()) else {
                continue;
            };
            let room = |gpu: &&String| {
                let kept = match self.held.get(*gpu) {
                    Some(held) if held.waiter != *uid => held.quanta.unsigned_abs().into(),
                    _ => 0,
                };
                self.free(&node, gpu) >= pod.asks + kept
            };
            let gpu = self.nodes[&node].keys().find(room).cloned();
            self.pods.get_mut(uid).unwrap().gpu = gpu;
        }
    }

    fn borrowers(&self, node: &str) -> impl Iterator<Item = (&String, &Life)> {
        let there = self
            .pods
            .iter()
            .filter(move |(_, pod)| pod.node.as_deref() == Some(node));
        there.filter(|(_, pod)| pod.priority == BORROWED)
    }

    /// The scheduler's own: borrowers end on the node where the fewest have the quanta that it is `short` of.
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
            there.sort_by_key(|(_, pod)| std::cmp::Reverse(pod.asks));
            let mut freed = 0;
            let last = there.iter().position(|(_, pod)| {
                freed += pod.asks;
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

    /// Seconds of planning and living; ends early once nothing is planned any more for a while.
    fn run(&mut self, memory: &mut Memory, from: u64, seconds: u64) {
        for second in from..from + seconds {
            let now = Duration::from_secs(second);
            for step in plan(&self.landscape(), memory, &RULES, now, wall(now)) {
                self.act(step, memory, now);
            }
            self.live();
        }
    }

    fn bound(&self, uid: &str) -> bool {
        self.pods.get(uid).is_some_and(|pod| pod.gpu.is_some())
    }
}

#[test]
fn an_owner_on_its_node_gets_a_gpu_from_the_fewest_borrowers() {
    let mut cluster = Cluster::default()
        .node("a", &[16, 16])
        .pod("b1", 8, BORROWED, Some(("a", Some(0))))
        .pod("b2", 4, BORROWED, Some(("a", Some(1))))
        .pod("b3", 4, BORROWED, Some(("a", Some(1))))
        .pod("owner", 16, GUARANTEED, Some(("a", None)));
    cluster.run(&mut Memory::default(), 0, 10);
    assert_eq!(cluster.evicted, ["b1"]);
    assert!(cluster.bound("owner") && cluster.bound("b2") && cluster.bound("b3"));
    assert_eq!(cluster.reservations["a"], [], "it is cleared");
}

#[test]
fn an_owner_without_a_node_is_nominated_before_anybody_goes_and_wins_against_a_pending_borrower() {
    let mut cluster = Cluster::default()
        .node("a", &[16])
        .pod("b1", 16, BORROWED, Some(("a", Some(0))))
        .pod("owner", 16, GUARANTEED, None)
        .pod("thief", 16, BORROWED, None);
    cluster.run(&mut Memory::default(), 0, 30);
    assert_eq!(cluster.evicted, ["b1"]);
    assert!(cluster.bound("owner"));
    assert!(!cluster.bound("thief"));
}

#[test]
fn who_may_not_preempt_or_is_not_more_important_takes_from_nobody() {
    for priority in [BORROWED, GUARANTEED] {
        let mut cluster = Cluster::default()
            .node("a", &[16])
            .pod("old", 10, priority, Some(("a", Some(0))))
            .pod("same", 8, priority, Some(("a", None)));
        let mut memory = Memory::default();
        cluster.run(&mut memory, 0, 30);
        assert_eq!(cluster.evicted, [] as [&str; 0]);
        let writes = cluster.writes;
        cluster.run(&mut memory, 30, 600);
        assert_eq!(cluster.writes, writes, "and nothing is written for ever");
    }
}

#[test]
fn a_waiter_goes_to_a_node_with_room_rather_than_that_anybody_goes_for_it() {
    let mut cluster = Cluster::default()
        .node("a", &[16, 16])
        .node("b", &[16])
        .pod("10a", 10, BORROWED, Some(("a", Some(0))))
        .pod("10b", 10, GUARANTEED, Some(("a", Some(1))))
        .pod("8", 8, GUARANTEED, Some(("a", None)));
    // Nobody goes before the time for a move has come: both may.
    cluster.pods.get_mut("10a").unwrap().priority = GUARANTEED;
    cluster.run(&mut Memory::default(), 0, 30);
    assert_eq!(cluster.moved, ["8"]);
    assert!(cluster.bound("8'"));
    assert_eq!(cluster.evicted, [] as [&str; 0]);
}

/// One with an even number of letters lets its pods go.
fn job(uid: &str) -> Owner {
    Owner::Job(demand::Owner {
        name: "j".to_owned(),
        uid: uid.to_owned(),
    })
}

#[test]
fn an_operator_that_starts_anew_moves_no_owners_pods_more_often_than_one_that_lives_on() {
    let mut moves = Vec::new();
    for reborn in [false, true] {
        let mut memory = Memory::default();
        let mut cluster = Cluster::default().node("a", &[16]).node("b", &[16]);
        let mut count = 0;
        for round in 0..8 {
            // It always comes to rest where it has to wait, and there is always room elsewhere.
            cluster.pods.clear();
            cluster = cluster.pod("10", 10, GUARANTEED, Some(("a", Some(0)))).pod(
                "8",
                8,
                GUARANTEED,
                Some(("a", None)),
            );
            cluster.pods.get_mut("8").unwrap().owner = Owner::Other {
                uid: "o".to_owned(),
            };
            cluster.moved.clear();
            if reborn {
                memory = Memory::default();
            }
            cluster.run(&mut memory, round * 400, 60);
            count += cluster.moved.len();
        }
        moves.push(count);
    }
    assert_eq!(moves, [3, 3]);
}

#[test]
fn a_jobs_pod_that_a_disruption_budget_keeps_is_never_deleted_past_it() {
    let mut cluster = Cluster::default()
        .node("a", &[16])
        .pod("b", 10, BORROWED, Some(("a", Some(0))))
        .pod("owner", 8, GUARANTEED, Some(("a", None)));
    cluster.kept = vec!["b".to_owned()];
    cluster.pods.get_mut("b").unwrap().owner = job("even");
    cluster.run(&mut Memory::default(), 0, 150);
    assert_eq!(cluster.evicted, [] as [&str; 0]);
}

#[test]
fn a_daemon_sets_a_bare_and_a_static_pod_are_never_moved_and_a_job_only_if_it_lets_go() {
    let table = [
        (Owner::DaemonSet, false),
        (Owner::Nobody, false),
        (Owner::Node, false),
        (job("odd"), false),
        (job("even"), true),
    ];
    for (owner, moves) in table {
        let mut cluster = Cluster::default()
            .node("a", &[16])
            .node("b", &[16])
            .pod("10", 10, GUARANTEED, Some(("a", Some(0))))
            .pod("8", 8, GUARANTEED, Some(("a", None)));
        cluster.pods.get_mut("8").unwrap().owner = owner.clone();
        cluster.run(&mut Memory::default(), 0, 60);
        assert_eq!(!cluster.moved.is_empty(), moves, "{owner:?}");
    }
}

#[test]
fn a_jobs_pod_goes_for_an_owner_only_if_the_job_lets_it() {
    for (uid, goes) in [("even", true), ("odd", false)] {
        let mut cluster = Cluster::default()
            .node("a", &[16])
            .pod("job", 10, BORROWED, Some(("a", Some(0))))
            .pod("owner", 8, GUARANTEED, Some(("a", None)));
        cluster.pods.get_mut("job").unwrap().owner = job(uid);
        cluster.run(&mut Memory::default(), 0, 20);
        assert_eq!(cluster.bound("owner"), goes);
    }
}

#[test]
fn a_disruption_budget_keeps_a_pod_for_its_grace_and_no_longer() {
    let mut cluster = Cluster::default()
        .node("a", &[16])
        .pod("b", 10, BORROWED, Some(("a", Some(0))))
        .pod("owner", 8, GUARANTEED, Some(("a", None)));
    cluster.kept = vec!["b".to_owned()];
    let mut memory = Memory::default();
    cluster.run(&mut memory, 0, 60);
    assert_eq!(cluster.evicted, [] as [&str; 0]);
    cluster.run(&mut memory, 60, 15);
    assert_eq!(cluster.evicted, ["b"]);
    assert!(cluster.bound("owner"));
}

#[test]
fn who_waits_for_a_kept_pod_costs_nobody_else_the_gpu_that_somebody_left_for_it() {
    let mut cluster = Cluster::default()
        .node("a", &[8, 8, 3, 3])
        .pod("b1", 8, BORROWED, Some(("a", Some(0))))
        .pod("b2", 8, BORROWED, Some(("a", Some(1))))
        .pod("owner1", 8, GUARANTEED, None)
        .pod("owner2", 8, GUARANTEED, None)
        .pod("thief", 4, BORROWED, Some(("a", None)));
    cluster.kept = vec!["b2".to_owned()];
    let mut memory = Memory::default();
    cluster.run(&mut memory, 0, 60);
    assert_eq!(cluster.evicted, ["b1"]);
    let waiters = cluster.reservations["a"].iter().map(|held| &held.waiter);
    assert_eq!(waiters.collect::<Vec<_>>(), ["owner1", "owner2"]);
    cluster.run(&mut memory, 60, 30);
    assert_eq!(cluster.evicted, ["b1", "b2"]);
    assert!(cluster.bound("owner1") && cluster.bound("owner2") && !cluster.bound("thief"));
}

#[test]
fn an_operator_that_starts_anew_gives_up_nothing_before_it_has_looked_at_a_job() {
    let mut cluster = Cluster::default()
        .node("a", &[16])
        .pod("job", 10, BORROWED, Some(("a", Some(0))))
        .pod("owner", 8, GUARANTEED, Some(("a", None)));
    cluster.pods.get_mut("job").unwrap().owner = job("even");
    cluster.kept = vec!["job".to_owned()];
    cluster.run(&mut Memory::default(), 0, 20);
    assert_eq!(cluster.reservations["a"].len(), 1);
    let now = Duration::from_secs(20);
    let steps = plan(
        &cluster.landscape(),
        &mut Memory::default(),
        &RULES,
        now,
        wall(now),
    );
    assert!(
        steps
            .iter()
            .any(|step| matches!(step, Step::LookAtJob { .. })),
        "{steps:?}"
    );
    assert!(
        !steps
            .iter()
            .any(|step| matches!(step, Step::Reserve { .. } | Step::MakeRoom { .. })),
        "{steps:?}"
    );
}

#[test]
fn a_reservation_that_comes_to_nothing_is_given_up_for_a_while() {
    let mut cluster = Cluster::default()
        .node("a", &[16])
        .pod("b", 10, BORROWED, Some(("a", Some(0))))
        .pod("owner", 8, GUARANTEED, Some(("a", None)));
    let mut memory = Memory::default();
    // No agent answers.
    for second in 0..400 {
        let now = Duration::from_secs(second);
        for step in plan(&cluster.landscape(), &mut memory, &RULES, now, wall(now)) {
            cluster.act(step, &mut memory, now);
        }
    }
    assert_eq!(cluster.reservations["a"], []);
    assert_eq!(cluster.evicted, [] as [&str; 0]);
}

#[test]
fn nobody_else_goes_while_what_one_had_is_proven_free() {
    let mut cluster = Cluster::default()
        .node("a", &[16])
        .pod("b1", 8, BORROWED, Some(("a", Some(0))))
        .pod("b2", 8, BORROWED, Some(("a", Some(0))))
        .pod("owner", 8, GUARANTEED, Some(("a", None)));
    let mut memory = Memory::default();
    let mut second = 0;
    while cluster.left.is_empty() {
        let now = Duration::from_secs(second);
        for step in plan(&cluster.landscape(), &mut memory, &RULES, now, wall(now)) {
            cluster.act(step, &mut memory, now);
        }
        if !cluster.evicted.is_empty() {
            cluster.left = [("a-0".to_owned(), 8)].into();
        }
        cluster.live();
        second += 1;
    }
    let (mut quick, mut remembered) = (cluster.clone(), memory.clone());
    quick.run(&mut remembered, second, 4);
    quick.left.clear();
    quick.run(&mut remembered, second + 4, 10);
    assert_eq!(quick.evicted.len(), 1);
    assert!(quick.bound("owner"));
    // What somebody else holds of it does not come back.
    cluster.run(&mut memory, second, 10);
    assert_eq!(cluster.evicted.len(), 2);
    assert!(cluster.bound("owner"));
}

fn reservation(gpu: &str, waiter: &str, quanta: i32) -> Reservation {
    Reservation {
        gpu: gpu.to_owned(),
        waiter: waiter.to_owned(),
        quanta,
    }
}

#[test]
fn who_has_two_reservations_keeps_one_and_takes_from_one_node_only() {
    let mut cluster = Cluster::default()
        .node("a", &[16])
        .node("b", &[16])
        .pod("a1", 16, BORROWED, Some(("a", Some(0))))
        .pod("b1", 16, BORROWED, Some(("b", Some(0))))
        .pod("owner", 16, GUARANTEED, None);
    // Two operators chose for it.
    for node in ["a", "b"] {
        let held = reservation(&format!("{node}-0"), "owner", 16);
        cluster
            .reservations
            .insert(node.to_owned(), vec![held.clone()]);
        cluster.held.insert(held.gpu.clone(), held);
    }
    cluster.pods.get_mut("owner").unwrap().nominated = Some("b".to_owned());
    cluster.run(&mut Memory::default(), 0, 10);
    assert_eq!(cluster.evicted, ["b1"]);
    assert!(cluster.bound("owner"));
}

#[test]
fn a_reservation_that_the_watch_does_not_show_yet_is_not_made_on_another_node() {
    let cluster = Cluster::default()
        .node("a", &[16])
        .node("b", &[16])
        .pod("a1", 16, BORROWED, Some(("a", Some(0))))
        .pod("b1", 8, BORROWED, Some(("b", Some(0))))
        .pod("b2", 8, BORROWED, Some(("b", Some(0))))
        .pod("owner", 16, GUARANTEED, None);
    let mut memory = Memory::default();
    let mut real = cluster.clone();
    let reserved = |steps: &[Step]| -> Vec<String> {
        let nodes = steps.iter().filter_map(|step| match step {
            Step::Reserve {
                node, reservations, ..
            } if !reservations.is_empty() => Some(node.name.clone()),
            _ => None,
        });
        nodes.collect()
    };
    for second in 0..11 {
        let now = Duration::from_secs(second);
        let steps = plan(&real.landscape(), &mut memory, &RULES, now, wall(now));
        assert!(
            second < 10 || reserved(&steps) == ["a"],
            "one goes there, and two on the other"
        );
        steps
            .into_iter()
            .for_each(|step| real.act(step, &mut memory, now));
    }
    // The pods' watch is ahead of the nodes': the other one would be chosen now.
    let mut blind = cluster.pod("b1", 1, BORROWED, Some(("b", Some(0))));
    blind.pods.remove("b2");
    let steps = plan(
        &blind.landscape(),
        &mut memory,
        &RULES,
        Duration::from_secs(11),
        wall(Duration::from_secs(11)),
    );
    assert_eq!(reserved(&steps), ["a"], "it is written again at most");
}

#[test]
fn a_label_that_somebody_else_keeps_on_a_node_without_gpus_starves_nobody() {
    let mut cluster = Cluster::default().node("a", &[]);
    let name = "bursar.dev/largest-gpu-gib".to_owned();
    let mut memory = Memory::default();
    for second in 1..101 {
        let stubborn = [(name.clone(), "80".to_owned())];
        cluster.labels.insert("a".to_owned(), stubborn.into());
        cluster.run(&mut memory, second, 1);
        assert!(
            second > 1 || cluster.labels["a"].is_empty(),
            "it is taken off"
        );
    }
    assert_eq!(cluster.writes, 10);
}

#[test]
fn a_large_cluster_is_planned_for_in_the_time_that_there_is() {
    let mut cluster = Cluster::default();
    for node in 0..100 {
        let name = format!("n{node}");
        cluster = cluster.node(&name, &[16; 8]);
        for gpu in 0..8 {
            cluster = cluster.pod(
                &format!("{name}-{gpu}"),
                16,
                BORROWED,
                Some((&name, Some(gpu))),
            );
        }
    }
    for pod in 0..10_000 {
        cluster = cluster.pod(&format!("p{pod}"), 1, BORROWED, Some(("another", None)));
    }
    for waiter in 0..20 {
        cluster = cluster.pod(&format!("w{waiter}"), 16, GUARANTEED, None);
    }
    let landscape = cluster.landscape();
    let mut memory = Memory::default();
    let look = |memory: &mut Memory, second| {
        let now = Duration::from_secs(second);
        plan(&landscape, memory, &RULES, now, wall(now))
    };
    look(&mut memory, 0);
    let start = std::time::Instant::now();
    let steps = look(&mut memory, 20);
    let took = start.elapsed();
    assert!(
        !steps.is_empty() && took < Duration::from_secs(5),
        "{took:?}"
    );
}

#[test]
fn a_foreign_reservation_and_a_foreign_quota_are_not_written_against_for_ever() {
    let mut cluster = Cluster::default().node("a", &[16]);
    let foreign = Reservation {
        gpu: "a-0".to_owned(),
        waiter: "nobody".to_owned(),
        quanta: 1,
    };
    let mut memory = Memory::default();
    let mut writes = 0;
    for second in 0..100 {
        // Whoever wrote it owns it: our write without it takes nothing away.
        cluster
            .reservations
            .insert("a".to_owned(), vec![foreign.clone()]);
        let now = Duration::from_secs(second);
        for step in plan(&cluster.landscape(), &mut memory, &RULES, now, wall(now)) {
            writes += usize::from(matches!(step, Step::Reserve { .. }));
            cluster.act(step, &mut memory, now);
        }
    }
    assert_eq!(writes, 1);
}

#[test]
fn labels_say_what_one_gpu_has_free_would_have_without_borrowers_and_has_in_all() {
    let mut cluster = Cluster::default()
        .node("a", &[16, 16])
        .pod("g", 10, GUARANTEED, Some(("a", Some(0))))
        .pod("b", 12, BORROWED, Some(("a", Some(1))));
    let mut memory = Memory::default();
    cluster.run(&mut memory, 1, 1);
    let label = |cluster: &Cluster, name: &str| {
        cluster.labels["a"][&format!("bursar.dev/largest-{name}-gib")].clone()
    };
    assert_eq!(label(&cluster, "free"), "6");
    assert_eq!(label(&cluster, "reclaimable"), "16");
    assert_eq!(label(&cluster, "gpu"), "16");
    // A small change is written when it has lasted, a large one at once.
    cluster = cluster.pod("g2", 16, GUARANTEED, None);
    cluster.pods.remove("g2");
    cluster.pods.get_mut("g").unwrap().asks = 5;
    cluster.run(&mut memory, 2, 1);
    assert_eq!(label(&cluster, "free"), "11", "another bucket");
    cluster.pods.get_mut("g").unwrap().asks = 6;
    cluster.run(&mut memory, 3, 5);
    assert_eq!(label(&cluster, "free"), "11", "the same bucket");
    cluster.run(&mut memory, 8, 10);
    assert_eq!(label(&cluster, "free"), "10");
    let writes = cluster.writes;
    cluster.run(&mut memory, 20, 100);
    assert_eq!(cluster.writes, writes);
}

#[test]
fn an_override_is_ordered_of_the_pods_node_and_lifted_with_it() {
    let mut cluster =
        Cluster::default()
            .node("a", &[16])
            .pod("p", 8, GUARANTEED, Some(("a", Some(0))));
    cluster.lowered = [
        ("p".to_owned(), "4Gi".to_owned()),
        ("other".to_owned(), "1Gi".to_owned()),
    ]
    .into();
    let mut memory = Memory::default();
    cluster.run(&mut memory, 0, 2);
    let order = QuotaOrder {
        pod_uid: "p".to_owned(),
        container: "main".to_owned(),
        account: "device".to_owned(),
        quota: "4Gi".into(),
    };
    assert_eq!(cluster.quotas["a"], [order]);
    cluster.lowered.clear();
    cluster.run(&mut memory, 2, 2);
    assert_eq!(cluster.quotas["a"], []);
}

/// Nodes of up to three GPUs, full of borrowers and some others, and owners who wait there or nowhere.
fn layouts() -> impl Strategy<Value = Cluster> {
    let node = prop::collection::vec(
        (
            8_u64..20,
            prop::collection::vec((1_u64..10, prop::bool::weighted(0.8)), 0..5),
        ),
        1..4,
    );
    let waiters = prop::collection::vec((1_u64..20, 0_usize..3, any::<bool>()), 1..4);
    (prop::collection::vec(node, 1..3), waiters).prop_map(|(nodes, waiters)| {
        let mut cluster = Cluster::default();
        for (n, gpus) in nodes.iter().enumerate() {
            let name = format!("node{n}");
            let sizes: Vec<u64> = gpus.iter().map(|(size, _)| *size).collect();
            cluster = cluster.node(&name, &sizes);
            for (g, (size, pods)) in gpus.iter().enumerate() {
                let mut free = *size;
                for (p, (asks, borrowed)) in pods.iter().enumerate() {
                    if *asks > free {
                        continue;
                    }
                    free -= asks;
                    let priority = if *borrowed { BORROWED } else { GUARANTEED };
                    let at = Some((name.as_str(), Some(g)));
                    cluster = cluster.pod(&format!("p{n}-{g}-{p}"), *asks, priority, at);
                }
            }
        }
        for (w, (asks, node, bare)) in waiters.iter().enumerate() {
            let name = format!("node{}", node % cluster.nodes.len());
            let at = (cluster.tokens(&name) >= *asks).then_some((name.as_str(), None));
            let uid = format!("w{w}");
            cluster = cluster.pod(&uid, *asks, GUARANTEED, at);
            if *bare {
                cluster.pods.get_mut(&uid).unwrap().owner = Owner::Nobody;
            }
        }
        cluster
    })
}

/// Who of the waiters could be bound to some GPU of its node if all borrowers there went.
fn hopeful(cluster: &Cluster) -> Vec<String> {
    let waiting = cluster
        .pods
        .iter()
        .filter(|(_, pod)| pod.gpu.is_none() && pod.priority == GUARANTEED);
    let fits = |(_, pod): &(&String, &Life)| {
        pod.node.iter().any(|node| {
            cluster.nodes[node].iter().any(|(gpu, capacity)| {
                let stay = cluster.pods.values().filter(|other| {
                    other.gpu.as_ref() == Some(gpu) && other.priority == GUARANTEED
                });
                stay.map(|other| other.asks).sum::<u64>() + pod.asks <= *capacity
            })
        })
    };
    waiting.filter(fits).map(|(uid, _)| uid.clone()).collect()
}

/// The evictions of a step one by one: an operator may be killed between them.
fn singly(step: Step) -> Vec<Step> {
    let Step::MakeRoom {
        waiter,
        node,
        gpu,
        nominate,
        victims,
    } = step
    else {
        return vec![step];
    };
    let room = |nominate, victims| Step::MakeRoom {
        waiter: waiter.clone(),
        node: node.clone(),
        gpu: gpu.clone(),
        nominate,
        victims,
    };
    let nominated = nominate.then(|| room(true, Vec::new()));
    let evicted = victims.into_iter().map(|victim| room(false, vec![victim]));
    nominated.into_iter().chain(evicted).collect()
}

/// One of the operators that act on the same cluster.
#[derive(Default)]
struct Acting {
    memory: Memory,
    /// The newest of the views that its watches have shown it.
    seen: usize,
}

/// What operators do, told by random bits: how far behind the watches of a single one are, who is killed after how many
/// steps, whose turn it is of two.
fn operate(live: &mut Cluster, two: bool, bits: &[u32]) {
    let mut operators = [Acting::default(), Acting::default()];
    let (mut views, mut clock) = (Vec::new(), 0);
    for bits in bits {
        views.push(live.landscape());
        let now = Duration::from_secs(clock);
        let mut queues = [VecDeque::new(), VecDeque::new()];
        let mut killed = [false; 2];
        for (at, one) in operators.iter_mut().enumerate().take(1 + usize::from(two)) {
            let bits = bits >> (8 * at);
            let behind = (bits & 3).saturating_sub(1);
            one.seen = one
                .seen
                .max((views.len() - 1).saturating_sub(behind as usize));
            let steps = plan(&views[one.seen], &mut one.memory, &RULES, now, wall(now));
            queues[at] = steps.into_iter().flat_map(singly).collect();
            killed[at] = bits >> 2 & 7 == 0;
            if killed[at] {
                queues[at].truncate((bits >> 5 & 3) as usize);
            }
        }
        let idle = queues.iter().all(VecDeque::is_empty);
        let mut turns = bits >> 16;
        while queues.iter().any(|queue| !queue.is_empty()) {
            let at = (turns & 1) as usize;
            turns = turns.rotate_right(1);
            let at = if queues[at].is_empty() { 1 - at } else { at };
            if let Some(step) = queues[at].pop_front() {
                live.act(step, &mut operators[at].memory, now);
            }
        }
        for (one, killed) in operators.iter_mut().zip(killed) {
            if killed {
                one.memory = Memory::default();
            }
        }
        live.live();
        clock += if idle { 4 } else { 1 };
    }
}

/// Whatever befalls the operators: for each waiter only borrowers go, from one GPU of its node, none of them for nothing,
/// whoever else waits for memory.
fn who_goes_goes_for_what_one_waiter_lacks(
    mut live: Cluster,
    thieves: Vec<u64>,
    two: bool,
    bits: &[u32],
) -> Result<(), TestCaseError> {
    for (number, asks) in thieves.into_iter().enumerate() {
        live = live.pod(&format!("thief{number}"), asks, BORROWED, None);
    }
    let before = live.pods.clone();
    operate(&mut live, two, bits);
    for uid in &live.evicted {
        let priority = before.get(uid).map(|pod| pod.priority);
        prop_assert!(priority.is_none_or(|of| of == BORROWED), "{}", uid);
    }
    let mut waiters = BTreeSet::new();
    for ((waiter, node), round) in &live.rounds {
        prop_assert!(
            waiters.insert(waiter),
            "{}: on another node than {} too",
            waiter,
            node
        );
        prop_assert_eq!(round.gpus.len(), 1, "{}: {:?}", waiter, round);
        let all: u64 = round.gone.iter().sum();
        let least = round.gone.iter().min().copied().unwrap_or_default();
        prop_assert!(all - least < round.lacked, "{}: {:?}", waiter, round);
    }
    Ok(())
}

// Together over 100,000 layouts.
proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]
    /// A round is what one plan says, the end of those who go by it, and one look of the scheduler and the agents each.
    /// Nothing may put off the waiter then: neither borrowers, who come again at once, nor owners, whenever they come.
    #[test]
    fn for_whom_somebody_goes_has_its_gpu_within_the_round_and_there_is_no_other_for_it(
        cluster in layouts(),
        others in prop::collection::vec((0_u64..15, 1_u64..12, any::<bool>()), 0..4),
    ) {
        let mut live = cluster;
        live.all_return = true;
        let mut memory = Memory::default();
        for second in 0..25 {
            for (number, (at, asks, borrows)) in others.iter().enumerate() {
                if *at == second {
                    let priority = if *borrows { BORROWED } else { GUARANTEED };
                    live = live.pod(&format!("other{number}"), *asks, priority, None);
                }
            }
            let mut before = live.rounds.clone();
            live.run(&mut memory, second, 1);
            for ((waiter, node), round) in &live.rounds {
                if before.remove(&(waiter.clone(), node.clone())).as_ref() != Some(round) {
                    prop_assert!(live.bound(waiter), "{} in second {}: {:?}", waiter, second, live);
                }
            }
        }
        let helped: BTreeSet<&String> = live.rounds.keys().map(|(waiter, _)| waiter).collect();
        prop_assert_eq!(helped.len(), live.rounds.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40_000))]
    #[test]
    fn an_operator_that_is_killed_anywhere_and_sees_late_takes_what_one_waiter_lacks_and_no_more(
        cluster in layouts(),
        thieves in prop::collection::vec(1_u64..12, 0..3),
        bits in prop::collection::vec(any::<u32>(), 8),
    ) {
        who_goes_goes_for_what_one_waiter_lacks(cluster, thieves, false, &bits)?;
    }

    #[test]
    fn two_operators_whose_steps_alternate_anyhow_take_what_one_waiter_lacks_and_no_more(
        cluster in layouts(),
        thieves in prop::collection::vec(1_u64..12, 0..3),
        bits in prop::collection::vec(any::<u32>(), 8),
    ) {
        who_goes_goes_for_what_one_waiter_lacks(cluster, thieves, true, &bits)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100_000 / 40))]
    /// Carried out whole, cut short anywhere, or by an operator that starts anew each time.
    #[test]
    fn the_plan_comes_to_rest_evicts_only_borrowers_and_nobody_twice(
        cluster in layouts(),
        cuts in prop::collection::vec(prop::option::of(0_usize..4), 60),
    ) {
        let mut live = cluster.clone();
        let mut memory = Memory::default();
        for (second, cut) in cuts.iter().enumerate() {
            let now = Duration::from_secs(second as u64);
            let steps = plan(&live.landscape(), &mut memory, &RULES, now, wall(now));
            // An operator that was killed after so many steps remembers nothing.
            let kept = cut.filter(|_| second % 5 == 4);
            for step in steps.into_iter().take(kept.unwrap_or(usize::MAX)) {
                live.act(step, &mut memory, now);
            }
            if kept.is_some() {
                memory = Memory::default();
            }
            live.live();
        }
        // Three moves and their pauses take some 100 s, and who starts anew counts from none.
        live.run(&mut memory, 60, 180);
        for uid in &live.evicted {
            prop_assert_eq!(live.evicted.iter().filter(|other| *other == uid).count(), 1, "{} twice", uid);
            prop_assert_eq!(cluster.pods[uid].priority, BORROWED);
        }
        let writes = live.writes;
        live.run(&mut memory, 240, 60);
        prop_assert_eq!(live.writes, writes, "it does not come to rest");
        prop_assert_eq!(hopeful(&live), Vec::<String>::new(), "somebody who could be helped waits");
        let held = live.reservations.values().flatten().count();
        let waits = |held: &Reservation| !live.bound(&held.waiter);
        prop_assert_eq!(live.reservations.values().flatten().filter(|held| waits(held)).count(), held);
    }

    /// What is not planned while nothing changes would have come to nothing.
    #[test]
    fn at_rest_nothing_comes_of_time_alone(cluster in layouts(), seconds in 0_u64..240) {
        let mut live = cluster;
        let mut memory = Memory::default();
        live.run(&mut memory, 0, seconds);
        let now = Duration::from_secs(seconds);
        let steps = plan(&live.landscape(), &mut memory, &RULES, now, wall(now));
        if !steps.is_empty() || !memory.is_at_rest() {
            return Ok(());
        }
        for later in [1, 10, 60, 600, 7200] {
            let now = Duration::from_secs(seconds + later);
            let steps = plan(&live.landscape(), &mut memory, &RULES, now, wall(now));
            prop_assert_eq!(steps, Vec::new(), "after {} s", later);
        }
    }

    /// The same facts again, with and without what is remembered: nobody else has to go.
    #[test]
    fn a_replayed_plan_evicts_nobody_else(cluster in layouts()) {
        let mut live = cluster;
        let mut memory = Memory::default();
        for second in 0..20 {
            let now = Duration::from_secs(second);
            let before = live.clone();
            for step in plan(&live.landscape(), &mut memory, &RULES, now, wall(now)) {
                live.act(step, &mut memory, now);
            }
            let gone = live.evicted.len();
            // The watch shows nothing of it yet: memory does.
            let blind = before;
            for step in plan(&blind.landscape(), &mut memory, &RULES, now, wall(now)) {
                let asks = matches!(&step, Step::MakeRoom { victims, .. } if !victims.is_empty());
                prop_assert!(!asks, "{:?}", step);
            }
            // It shows all of it, to an operator that remembers nothing.
            let mut anew = Memory::default();
            for step in plan(&live.landscape(), &mut anew, &RULES, now, wall(now)) {
                let asks = matches!(&step, Step::MakeRoom { victims, .. } if !victims.is_empty());
                prop_assert!(!asks, "{:?}", step);
            }
            prop_assert_eq!(live.evicted.len(), gone);
            live.live();
        }
    }
}
