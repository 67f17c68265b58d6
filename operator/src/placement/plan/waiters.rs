//! Pods that wait for a GPU: moved to another node, or given room by pods of lower priority.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bursar_crds::gpu_node::Reservation;

use super::room::{Candidate, fewest};
use super::{Pod, Rules, Step, Victim, gpu_node};
use crate::orders::has_to_be_written;
use crate::placement::landscape::Scene;
use crate::placement::matching::may_be_on;
use crate::placement::memory::{Memory, Moment, RESERVED_AT_MOST};
use crate::placement::node::Gpu;
use crate::placement::pod::{Owner, Place, PodFacts};
use crate::quanta::Quanta;
use crate::world::Key;

/// How long a pod has waited on its node before anybody goes for it: who is ending anyway may be enough.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long before the waiter itself is moved.
const MOVE_PATIENCE: Duration = Duration::from_secs(8);
/// How long the scheduler has had no node for a pod before anybody goes for it: its own preemption comes first.
const UNPLACED_PATIENCE: Duration = Duration::from_secs(10);
/// How many waiters are helped, and pods asked to go for one, in one plan.
const AT_ONCE: usize = 20;

/// What a Job that was not looked at yet is taken for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unseen {
    /// One that keeps its pods: nobody goes on a guess.
    Keeps,
    /// One that lets them go: nothing that is under way is given up on a guess either.
    LetsGo,
}

/// The reservations of each node.
type Reserved = BTreeMap<String, Vec<Reservation>>;

/// A pod that waits for room on one GPU.
struct Want<'a> {
    key: &'a Key,
    pod: &'a PodFacts,
    quanta: Quanta,
    /// The node that it is on; none where the scheduler has none.
    node: Option<&'a str>,
}

/// The steps for everybody who waits.
pub(super) fn plan(scene: &Scene<'_>, memory: &Memory, rules: &Rules, now: Moment) -> Vec<Step> {
    let mut planner = Planner {
        scene,
        memory,
        rules,
        now,
        going: BTreeMap::new(),
        nominated: BTreeMap::new(),
        jobs: BTreeMap::new(),
    };
    for (uid, (_, pod)) in &scene.pods {
        match &pod.place {
            Place::On(node) if planner.is_going(uid, pod) => {
                let going = planner.going.entry(node).or_default();
                *going = going.plus(pod.asks);
            }
            Place::Nowhere {
                nominated: Some(node),
                ..
            } => planner.nominated.entry(node).or_default().push(pod),
            Place::On(_) | Place::Nowhere { .. } => {}
        }
    }
    let mut steps = planner.steps();
    steps.extend(planner.jobs.into_values());
    steps
}

struct Planner<'a> {
    scene: &'a Scene<'a>,
    memory: &'a Memory,
    rules: &'a Rules,
    now: Moment,
    /// What those ask for who are going, by node.
    going: BTreeMap<&'a str, Quanta>,
    /// The pods for whom the scheduler keeps room, by node.
    nominated: BTreeMap<&'a str, Vec<&'a PodFacts>>,
    /// Looks at the Jobs whose answer would matter.
    jobs: BTreeMap<String, Step>,
}

impl<'a> Planner<'a> {
    fn steps(&mut self) -> Vec<Step> {
        let wants = self.wants();
        let mut reserved = self.still_reserved(&wants);
        let held = reserved.values().flatten();
        let helped: BTreeSet<String> = held.map(|held| held.waiter.clone()).collect();
        let unhelped = wants
            .iter()
            .filter(|want| !helped.contains(&want.pod.uid))
            .take(AT_ONCE);
        let mut steps = Vec::new();
        for want in unhelped {
            if let Some(step) = self.elsewhere(want) {
                steps.push(step);
            } else if let Some((node, reservation)) = self.here(want, &wants, &reserved) {
                reserved.entry(node).or_default().push(reservation);
            }
        }
        steps.extend(self.writes(&reserved));
        for (node, held) in &reserved {
            for reservation in held {
                steps.extend(self.make_room(node, reservation, &wants));
            }
        }
        steps
    }

    /// Who waits for one GPU, the most important first, and then the longest waiting.
    fn wants(&self) -> Vec<Want<'a>> {
        let scene = self.scene;
        let on_nodes = scene.gpu_nodes.iter().flat_map(|(node, gpus)| {
            gpus.waiting.iter().filter_map(|waiter| {
                let (key, pod) = *scene.pods.get(waiter.pod.as_str())?;
                (pod.node() == Some(*node)).then_some(Want {
                    key,
                    pod,
                    quanta: waiter.quanta,
                    node: Some(*node),
                })
            })
        });
        let unplaced = scene.pods.values().filter_map(|(key, pod)| {
            // What a pod with several containers needs of one GPU is seen when they start.
            let [(_, quanta)] = pod.containers.as_slice() else {
                return None;
            };
            let refused = matches!(
                pod.place,
                Place::Nowhere {
                    refused: Some(_),
                    ..
                }
            );
            (refused && *quanta == pod.asks).then_some(Want {
                key,
                pod,
                quanta: *quanta,
                node: None,
            })
        });
        let waits = |want: &Want<'_>| !want.pod.ending && want.pod.pending && want.pod.one_gpu;
        let mut wants: Vec<Want<'a>> = on_nodes.chain(unplaced).filter(waits).collect();
        wants.sort_by_key(|want| {
            let waited = self.memory.waited(&want.pod.uid, self.now);
            (
                Reverse(want.pod.priority),
                Reverse(waited),
                want.pod.uid.as_str(),
            )
        });
        wants.dedup_by(|a, b| a.pod.uid == b.pod.uid);
        wants
    }

    /// The reservations that there are, without those that came to their end: one for each waiter, for nobody goes
    /// from two nodes for the same one.
    fn still_reserved(&mut self, wants: &[Want<'a>]) -> Reserved {
        let mut held = Vec::new();
        for (node, gpus) in &self.scene.gpu_nodes {
            // What was written last a watch may tell late.
            let written = self.memory.reservations.get(*node).into_iter().flatten();
            let late = written.filter(|held| !gpus.reservations.contains(held));
            let told = gpus.reservations.iter().map(|held| (false, held));
            for (late, one) in told.chain(late.map(|held| (true, held))) {
                if self.is_of_use(node, one, wants) {
                    held.push((late, *node, one));
                }
            }
        }
        held.sort_by_key(|(late, node, held)| {
            let gpu = self.scene.gpu(node, &held.gpu);
            let answered = gpu.is_some_and(|gpu| gpu.held_for.as_ref() == Some(&held.waiter));
            let nominated = match self.scene.pod(&held.waiter).map(|pod| &pod.place) {
                Some(Place::Nowhere { nominated, .. }) => nominated.as_deref() == Some(*node),
                Some(Place::On(_)) | None => false,
            };
            (!nominated, !answered, *late)
        });
        let (mut waiters, mut gpus) = (BTreeSet::new(), BTreeSet::new());
        let mut kept = Reserved::new();
        for (_, node, held) in held {
            let taken = kept.entry(node.to_owned()).or_default();
            if !gpus.contains(&held.gpu)
                && !waiters.contains(&held.waiter)
                && self.tokens_suffice(node, held, wants, taken)
            {
                gpus.insert(&held.gpu);
                waiters.insert(&held.waiter);
                taken.push(held.clone());
            }
        }
        kept
    }

    /// Its waiter is still to be bound, and would be if those went who may.
    fn is_of_use(&mut self, node: &str, held: &Reservation, wants: &[Want<'a>]) -> bool {
        let (Some(pod), Some(gpu)) = (
            self.scene.pod(&held.waiter),
            self.scene.gpu(node, &held.gpu),
        ) else {
            return false;
        };
        let elsewhere = match &pod.place {
            Place::On(at) => at != node,
            // Another operator, or the scheduler itself, has room made there.
            Place::Nowhere { nominated, .. } => nominated.as_ref().is_some_and(|at| at != node),
        };
        let bound = gpu.pods.contains_key(&held.waiter);
        let given_up = self.memory.is_left_alone(&held.waiter);
        if pod.ending || !pod.pending || elsewhere || bound || given_up {
            return false;
        }
        match wants.iter().find(|want| want.pod.uid == held.waiter) {
            Some(want) => self.room_on(gpu, want, Unseen::LetsGo).is_some(),
            // Scheduled and not started, or between two looks of the scheduler.
            None => true,
        }
    }

    /// Another node for the waiter, where it may go there by the rules and there is room now.
    fn elsewhere(&mut self, want: &Want<'a>) -> Option<Step> {
        let at = want.node?;
        let uid = &want.pod.uid;
        let patient = self.memory.waited(uid, self.now) >= MOVE_PATIENCE;
        let kept = self.memory.was_refused(uid);
        if !self.rules.move_waiters || !patient || kept || !self.memory.may_ask(uid, self.now) {
            return None;
        }
        let (to, _) = self.scene.nodes.iter().find(|(name, node)| {
            **name != at && may_be_on(&want.pod.wants, name, node) && self.has_room(name, want.pod)
        })?;
        let owner = match &want.pod.owner {
            Owner::Other { uid } => uid,
            Owner::Job(job) if self.lets_go(want.key, want.pod, Unseen::Keeps) => &job.uid,
            Owner::Job(_) | Owner::Nobody | Owner::Node | Owner::DaemonSet => return None,
        };
        self.memory.may_move(owner, self.now).then(|| Step::Move {
            pod: pod(want.key, want.pod),
            owner: owner.clone(),
            from: gpu_node(self.scene, at),
            to: (*to).to_owned(),
            room: want.pod.asks,
        })
    }

    /// The node has the pod's memory free, on one GPU and among its tokens.
    fn has_room(&self, node: &str, pod: &PodFacts) -> bool {
        let promised = self.memory.promised(node);
        let gpus = self.scene.gpu_nodes.get(node);
        let largest = gpus.and_then(|gpus| gpus.gpus.iter().map(|gpu| gpu.largest_free).max());
        largest.unwrap_or_default().minus(promised) >= pod.asks
            && self.scene.unasked(node).minus(promised) >= pod.asks
    }

    /// A GPU to reserve for the waiter: where the fewest go.
    fn here(
        &mut self,
        want: &Want<'a>,
        wants: &[Want<'a>],
        reserved: &Reserved,
    ) -> Option<(String, Reservation)> {
        let waited = self.memory.waited(&want.pod.uid, self.now);
        if !want.pod.preempts || self.memory.is_left_alone(&want.pod.uid) {
            return None;
        }
        let nodes: Vec<&str> = match want.node {
            Some(node) if waited >= PATIENCE => vec![node],
            None if waited >= UNPLACED_PATIENCE => self.nodes_for(want)?,
            _ => return None,
        };
        let mut choices = Vec::new();
        for node in nodes {
            let Some(gpus) = self.scene.gpu_nodes.get(node) else {
                continue;
            };
            let taken = reserved.get(node).map(Vec::as_slice).unwrap_or_default();
            for gpu in &gpus.gpus {
                if gpu.held_for.is_some() || taken.iter().any(|held| held.gpu == gpu.uuid) {
                    continue;
                }
                let Some(room) = self.room_on(gpu, want, Unseen::Keeps) else {
                    continue;
                };
                if room.is_empty() && want.node.is_some() {
                    // Who is ending anyway will do.
                    return None;
                }
                let reservation = Reservation {
                    gpu: gpu.uuid.clone(),
                    waiter: want.pod.uid.clone(),
                    quanta: i32::try_from(want.quanta.count()).ok()?,
                };
                if !self.tokens_suffice(node, &reservation, wants, taken) {
                    continue;
                }
                let highest = room.iter().map(|one| one.priority).max();
                let freed: Quanta = room.iter().map(|one| one.quanta).sum();
                let rank = (room.len(), highest, freed, node, gpu.uuid.as_str());
                choices.push((rank, reservation));
            }
        }
        let best = choices.into_iter().min_by_key(|(rank, _)| *rank);
        best.map(|((.., node, _), reservation)| (node.to_owned(), reservation))
    }

    /// The nodes that a pod without one may be on; none where it is for the scheduler to do: it keeps room for the
    /// pod, or some node has room.
    fn nodes_for(&self, want: &Want<'a>) -> Option<Vec<&'a str>> {
        let Place::Nowhere {
            nominated: None, ..
        } = want.pod.place
        else {
            return None;
        };
        let may = self.scene.nodes.iter();
        let may = may.filter(|(name, node)| may_be_on(&want.pod.wants, name, node));
        let may: Vec<&'a str> = may.map(|(name, _)| *name).collect();
        let some = may.iter().any(|name| self.has_room(name, want.pod));
        (!some).then_some(may)
    }

    /// The scheduler could put the waiter on the node if those went who go for it, beside those that are `taken` care
    /// of there and those that it keeps room for: pods that are nominated to the same node keep each other off.
    fn tokens_suffice(
        &mut self,
        node: &str,
        held: &Reservation,
        wants: &[Want<'a>],
        taken: &[Reservation],
    ) -> bool {
        let needs = self.needs(node, held, wants);
        if needs == Quanta::ZERO {
            return true;
        }
        let priority = self.scene.pod(&held.waiter).map(|pod| pod.priority);
        let is_ours = |uid: &String| taken.iter().chain([held]).any(|held| held.waiter == *uid);
        let nominated = self.nominated.get(node).into_iter().flatten();
        let others = nominated.filter(|pod| Some(pod.priority) >= priority && !is_ours(&pod.uid));
        let others: Vec<&PodFacts> = others.copied().collect();
        let gpus = self.scene.gpu_nodes.get(node);
        let written = gpus.map(|gpus| gpus.reservations.as_slice());
        let written = written.unwrap_or_default();
        let others = others.into_iter().map(|pod| {
            match written.iter().find(|held| held.waiter == pod.uid) {
                // Somebody goes here for this one too, and its turn comes later.
                Some(later) => self.needs(node, later, wants),
                None => pod.asks,
            }
        });
        let others: Quanta = others.sum();
        let theirs = taken.iter().map(|held| self.needs(node, held, wants));
        let theirs: Quanta = theirs.sum();
        let coming = self.going.get(node).copied().unwrap_or_default();
        self.scene.unasked(node).plus(coming) >= needs.plus(theirs).plus(others)
    }

    /// What a waiter takes of what nobody on the node asks for, beside what those ask for who go for it. Who is on the
    /// node has its share.
    fn needs(&mut self, node: &str, held: &Reservation, wants: &[Want<'a>]) -> Quanta {
        let Some(pod) = self
            .scene
            .pod(&held.waiter)
            .filter(|pod| pod.node().is_none())
        else {
            return Quanta::ZERO;
        };
        let want = wants.iter().find(|want| want.pod.uid == held.waiter);
        let gpu = self.scene.gpu(node, &held.gpu);
        let room = want
            .zip(gpu)
            .and_then(|(want, gpu)| self.room_on(gpu, want, Unseen::LetsGo));
        let room = room.unwrap_or_default();
        let of = |one: &Candidate<'_>| self.scene.pod(one.uid).map(|pod| pod.asks);
        pod.asks.minus(room.iter().filter_map(of).sum())
    }

    /// Who has to go from a GPU for the waiter, besides those who are going; none where that would not help.
    fn room_on(
        &mut self,
        gpu: &Gpu,
        want: &Want<'a>,
        unseen: Unseen,
    ) -> Option<Vec<Candidate<'a>>> {
        if gpu.capacity < want.quanta {
            return None;
        }
        let (mut coming, mut candidates) = (self.memory.settling(gpu), Vec::new());
        for (uid, quanta) in &gpu.pods {
            let Some((uid, (key, pod))) = self.scene.pods.get_key_value(uid.as_str()) else {
                // It has ended, and the agent has not seen that yet.
                coming = coming.plus(*quanta);
                continue;
            };
            if self.is_going(uid, pod) {
                coming = coming.plus(*quanta);
            } else if pod.priority < want.pod.priority
                && want.pod.preempts
                && pod.owner != Owner::Node
                && self.lets_go(key, pod, unseen)
            {
                candidates.push(Candidate {
                    uid,
                    priority: pod.priority,
                    quanta: *quanta,
                });
            }
        }
        fewest(&candidates, want.quanta.minus(gpu.free).minus(coming))
    }

    fn is_going(&self, uid: &str, pod: &PodFacts) -> bool {
        pod.ending || self.memory.goes(uid, self.now)
    }

    /// Whether nothing is lost with the pod but its own work: a Job may take a deleted pod for a failed one.
    fn lets_go(&mut self, key: &Key, pod: &PodFacts, unseen: Unseen) -> bool {
        let Owner::Job(job) = &pod.owner else {
            return true;
        };
        if let Some(lets) = self.memory.jobs.get(&job.uid) {
            return *lets;
        }
        let look = Step::LookAtJob {
            namespace: key.namespace.clone(),
            job: job.clone(),
        };
        self.jobs.insert(job.uid.clone(), look);
        unseen == Unseen::LetsGo
    }

    /// The writes of reservations that differ.
    fn writes(&self, reserved: &Reserved) -> Vec<Step> {
        let mut steps = Vec::new();
        for (node, gpus) in &self.scene.gpu_nodes {
            let wanted = reserved.get(*node).map(Vec::as_slice).unwrap_or_default();
            let written = self.memory.reservations.get(*node);
            if has_to_be_written(&gpus.reservations, wanted, written) {
                steps.push(Step::Reserve {
                    node: gpu_node(self.scene, node),
                    over: gpus.reservations.clone(),
                    reservations: wanted.to_vec(),
                });
            }
        }
        steps
    }

    /// Who goes from a GPU that the agent holds.
    fn make_room(&mut self, node: &str, held: &Reservation, wants: &[Want<'a>]) -> Option<Step> {
        let want = wants.iter().find(|want| want.pod.uid == held.waiter)?;
        let gpu = self.scene.gpu(node, &held.gpu)?;
        if gpu.held_for.as_ref() != Some(&held.waiter) {
            return None;
        }
        let nominate = match &want.pod.place {
            Place::Nowhere { nominated, .. } => nominated.as_deref() != Some(node),
            Place::On(_) => false,
        };
        let room = self.room_on(gpu, want, Unseen::Keeps)?;
        let victims: Vec<Victim> = room
            .iter()
            .filter(|one| self.memory.may_ask(one.uid, self.now))
            .filter_map(|one| self.victim(one))
            .take(AT_ONCE)
            .collect();
        (nominate || !victims.is_empty()).then(|| Step::MakeRoom {
            waiter: pod(want.key, want.pod),
            node: node.to_owned(),
            gpu: held.gpu.clone(),
            nominate,
            victims,
        })
    }

    fn victim(&self, one: &Candidate<'_>) -> Option<Victim> {
        let (key, facts) = self.scene.pods.get(one.uid)?;
        let refused = self.memory.refused_for(one.uid, self.now);
        // The reservation must live to see the end of it.
        let grace = self.rules.disruption_grace.min(RESERVED_AT_MOST / 2);
        // A Job takes a pod that was deleted, and not evicted, for a failed one whatever its policy says.
        let of_job = matches!(facts.owner, Owner::Job(_));
        Some(Victim {
            pod: pod(key, facts),
            overdue: !of_job && refused.is_some_and(|refused| refused >= grace),
        })
    }
}

fn pod(key: &Key, facts: &PodFacts) -> Pod {
    Pod {
        key: key.clone(),
        uid: facts.uid.clone(),
    }
}
