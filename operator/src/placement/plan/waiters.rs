//! Pods that wait for a GPU: moved to another node, or given room by pods of lower priority.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bursar_crds::gpu_node::Reservation;

use super::room::{Candidate, fewest};
use super::{Pod, Rules, Step, Victim, gpu_node};
use crate::demand::Class;
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
/// How many waiters are looked at in one plan. It has to be made in less than the time between two.
const LOOKS: usize = 100;

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
#[derive(Clone, Copy)]
struct Want<'a> {
    key: &'a Key,
    pod: &'a PodFacts,
    quanta: Quanta,
    /// The node that it is on; none where the scheduler has none.
    node: Option<&'a str>,
}

/// The steps for everybody who waits.
pub(super) fn plan(
    scene: &Scene<'_>,
    memory: &mut Memory,
    rules: &Rules,
    now: Moment,
) -> Vec<Step> {
    let mut planner = Planner {
        scene,
        memory,
        rules,
        now,
        wants: BTreeMap::new(),
        going: BTreeMap::new(),
        nominated: BTreeMap::new(),
        moves: Vec::new(),
        looked: Vec::new(),
        hopeless: Vec::new(),
        jobs: BTreeMap::new(),
    };
    planner.wants = planner.wants();
    for (uid, (_, pod)) in &scene.pods {
        match &pod.place {
            Place::On(node)
                if planner.is_ending(uid, pod) && !planner.memory.overstays(uid, now) =>
            {
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
    let Planner { looked, jobs, .. } = planner;
    memory.looked_at(looked, now);
    steps.extend(jobs.into_values());
    steps
}

struct Planner<'a> {
    scene: &'a Scene<'a>,
    memory: &'a Memory,
    rules: &'a Rules,
    now: Moment,
    /// Who waits for one GPU, by UID.
    wants: BTreeMap<&'a str, Want<'a>>,
    /// What those ask for who are going, by node.
    going: BTreeMap<&'a str, Quanta>,
    /// The pods for whom the scheduler keeps room, by node.
    nominated: BTreeMap<&'a str, Vec<&'a PodFacts>>,
    /// The moves of this plan: the owner, the node that has room, and how much of that is taken by it.
    moves: Vec<(&'a str, &'a str, Quanta)>,
    /// The waiters that were looked at.
    looked: Vec<String>,
    /// Those without a node for whom no GPU has room, whoever goes: others like them need no look at all nodes.
    hopeless: Vec<Want<'a>>,
    /// Looks at the Jobs whose answer would matter.
    jobs: BTreeMap<String, Step>,
}

impl<'a> Planner<'a> {
    fn steps(&mut self) -> Vec<Step> {
        let mut reserved = self.still_reserved();
        let (mut steps, mut helped) = (Vec::new(), 0);
        for want in self.unhelped(&reserved) {
            if helped == AT_ONCE {
                break;
            }
            self.looked.push(want.pod.uid.clone());
            if let Some((owner, at, to)) = self.elsewhere(&want) {
                // Before it is time nobody goes for it either: it loses nothing by going, and they do.
                if self.may_go_now(&want, owner) {
                    self.moves.push((owner, to, want.pod.asks));
                    helped += 1;
                    steps.push(Step::Move {
                        pod: pod(want.key, want.pod),
                        owner: owner.to_owned(),
                        from: gpu_node(self.scene, at),
                        to: to.to_owned(),
                        room: want.pod.asks,
                    });
                }
            } else if let Some((node, reservation)) = self.here(&want, &reserved) {
                helped += 1;
                reserved.entry(node).or_default().push(reservation);
            }
        }
        steps.extend(self.writes(&reserved));
        for (node, held) in &reserved {
            for reservation in held {
                steps.extend(self.make_room(node, reservation));
            }
        }
        steps
    }

    /// Who waits for one GPU.
    fn wants(&self) -> BTreeMap<&'a str, Want<'a>> {
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
        let waits = |want: &Want<'_>| {
            !self.is_ending(&want.pod.uid, want.pod) && want.pod.pending && want.pod.one_gpu
        };
        let mut wants = BTreeMap::new();
        for want in on_nodes.chain(unplaced).filter(waits) {
            // Of several containers that wait the one that has waited longest is first.
            wants.entry(want.pod.uid.as_str()).or_insert(want);
        }
        wants
    }

    /// Who has waited for long enough and has no reservation, the most important first, and then the longest waiting.
    /// Of too many those whose turn it is: whose last look is the longest ago.
    fn unhelped(&self, reserved: &Reserved) -> Vec<Want<'a>> {
        let helped = reserved.values().flatten();
        let helped: BTreeSet<&str> = helped.map(|held| held.waiter.as_str()).collect();
        let rank = |want: &Want<'a>| {
            let pod = want.pod;
            (Reverse(pod.priority), Reverse(self.waited(want)), &pod.uid)
        };
        let waits = |want: &Want<'_>| {
            let patience = match want.node {
                Some(_) => PATIENCE,
                None => UNPLACED_PATIENCE,
            };
            self.waited(want) >= patience && !helped.contains(want.pod.uid.as_str())
        };
        let mut wants: Vec<Want<'a>> = self.wants.values().copied().filter(waits).collect();
        wants.sort_by_cached_key(|want| (self.memory.last_look(&want.pod.uid), rank(want)));
        wants.truncate(LOOKS);
        wants.sort_by_cached_key(rank);
        wants
    }

    fn waited(&self, want: &Want<'_>) -> Duration {
        self.memory.waited(&want.pod.uid, self.now)
    }

    /// The reservations that there are, without those that came to their end: one for each waiter, for nobody goes
    /// from two nodes for the same one.
    fn still_reserved(&mut self) -> Reserved {
        let mut held = Vec::new();
        for (node, gpus) in &self.scene.gpu_nodes {
            // What was written last a watch may tell late.
            let written = self.memory.reservations.get(*node).into_iter().flatten();
            let late = written.filter(|held| !gpus.reservations.contains(held));
            let told = gpus.reservations.iter().map(|held| (false, held));
            for (late, one) in told.chain(late.map(|held| (true, held))) {
                if self.is_of_use(node, one) {
                    held.push((late, *node, one));
                }
            }
        }
        let scene = self.scene;
        let is_nominated = |waiter: &str, node: &str| match scene.pod(waiter).map(|pod| &pod.place)
        {
            Some(Place::Nowhere { nominated, .. }) => nominated.as_deref() == Some(node),
            Some(Place::On(_)) | None => false,
        };
        held.sort_by_key(|(late, node, held)| {
            let gpu = scene.gpu(node, &held.gpu);
            let answered = gpu.is_some_and(|gpu| gpu.held_for.as_ref() == Some(&held.waiter));
            (!is_nominated(&held.waiter, node), !answered, *late)
        });
        let (mut waiters, mut gpus) = (BTreeSet::new(), BTreeSet::new());
        let mut kept = Reserved::new();
        for (_, node, held) in held {
            let taken = kept.entry(node.to_owned()).or_default();
            if !gpus.contains(&(node, &held.gpu))
                && !waiters.contains(&held.waiter)
                && self.tokens_suffice(node, held, taken)
                // Seen to before it was nominated: others that come by now make room for themselves.
                && (is_nominated(&held.waiter, node)
                    || self.rest_suffices(node, &held.waiter, taken))
            {
                gpus.insert((node, &held.gpu));
                waiters.insert(&held.waiter);
                // Another container of the waiter may have got memory there since.
                let again = self
                    .wants
                    .get(held.waiter.as_str())
                    .zip(self.scene.gpu(node, &held.gpu));
                let again = again.and_then(|(want, gpu)| reservation(want, gpu));
                taken.push(again.unwrap_or_else(|| held.clone()));
            }
        }
        kept
    }

    /// Its waiter is still to be bound, and would be if those went who may.
    fn is_of_use(&mut self, node: &str, held: &Reservation) -> bool {
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
        let given_up = self.memory.is_left_alone(&held.waiter, self.now);
        if pod.ending || !pod.pending || elsewhere || given_up {
            return false;
        }
        match self.wants.get(held.waiter.as_str()).copied() {
            Some(want) => self.room_on(node, gpu, &want, Unseen::LetsGo).is_some(),
            // Bound; or scheduled and not started, or between two looks of the scheduler.
            None => !gpu.pods.contains_key(&held.waiter),
        }
    }

    /// Whether a waiter that is to be moved goes now, and not later.
    fn may_go_now(&self, want: &Want<'_>, owner: &str) -> bool {
        let next = self.memory.next_move(owner);
        let another = self.moves.iter().any(|(other, ..)| *other == owner);
        self.waited(want) >= MOVE_PATIENCE
            && self.memory.may_ask(&want.pod.uid, self.now)
            && next.is_some_and(|next| next <= self.now)
            && !another
    }

    /// Another node for the waiter, where it may go there by the rules, now or soon, and there is room now: its owner, the
    /// node that it is on, and the other one.
    fn elsewhere(&mut self, want: &Want<'a>) -> Option<(&'a str, &'a str, &'a str)> {
        let (at, uid) = (want.node?, &want.pod.uid);
        let owner = want.pod.owner.uid()?;
        let kept = self.memory.was_refused(uid);
        let too_often = self.memory.next_move(owner).is_none();
        let begun = self.scene.gpu_nodes.get(at)?.may_have_begun(want.pod);
        if !self.rules.move_waiters || kept || too_often || begun {
            return None;
        }
        let (to, _) = self.scene.nodes.iter().find(|(name, node)| {
            **name != at
                && may_be_on(&want.pod.wants, name, node)
                && !self.memory.moved_in_vain(owner, name)
                && self.has_room(name, want)
        })?;
        let unseen = match self.waited(want) >= MOVE_PATIENCE {
            true => Unseen::Keeps,
            false => Unseen::LetsGo,
        };
        let lets_go = self.lets_go(want.key, want.pod, unseen);
        lets_go.then_some((owner, at, to))
    }

    /// The node has the pod's memory free, on one GPU and among its tokens, and all else that it asks for.
    fn has_room(&self, node: &str, want: &Want<'_>) -> bool {
        let pod = want.pod;
        let planned = self.moves.iter().filter(|(_, to, _)| *to == node);
        let planned: Quanta = planned.map(|(.., room)| *room).sum();
        let promised = self.memory.promised(node).plus(planned);
        let gpus = self.scene.gpu_nodes.get(node);
        let largest = gpus.and_then(|gpus| gpus.gpus.iter().map(|gpu| gpu.largest_free).max());
        largest.unwrap_or_default().minus(promised) >= pod.asks
            && self.scene.unasked(node).minus(promised) >= pod.asks
            && self.scene.takes(node, want.key, &[])
    }

    /// A GPU to reserve for the waiter: where that has not come to nothing, or most seldom, and then where the fewest go.
    fn here(&mut self, want: &Want<'a>, reserved: &Reserved) -> Option<(String, Reservation)> {
        if !want.pod.preempts || self.memory.is_left_alone(&want.pod.uid, self.now) {
            return None;
        }
        let nodes: Vec<&str> = match want.node {
            Some(node) => vec![node],
            None => self.nodes_for(want)?,
        };
        let kind = |want: &Want<'a>| {
            let Want { key, pod, .. } = *want;
            let rest = self.scene.load(key).map(|load| &load.asks);
            (pod.priority, pod.asks, &pod.wants, rest)
        };
        let mut hopeless = self.hopeless.iter();
        if want.node.is_none() && hopeless.any(|other| kind(other) == kind(want)) {
            return None;
        }
        let mut choices = Vec::new();
        for node in nodes {
            let Some(gpus) = self.scene.gpu_nodes.get(node) else {
                continue;
            };
            let taken = reserved.get(node).map(Vec::as_slice).unwrap_or_default();
            if !self.rest_suffices(node, &want.pod.uid, taken) {
                continue;
            }
            for gpu in &gpus.gpus {
                if gpu.held_for.is_some() || taken.iter().any(|held| held.gpu == gpu.uuid) {
                    continue;
                }
                let Some(room) = self.room_on(node, gpu, want, Unseen::Keeps) else {
                    continue;
                };
                if room.is_empty() && want.node.is_some() {
                    // Who is leaving anyway will do.
                    return None;
                }
                let reservation = reservation(want, gpu)?;
                if !self.tokens_suffice(node, &reservation, taken) {
                    continue;
                }
                let highest = room.iter().map(|one| one.priority).max();
                let freed: Quanta = room.iter().map(|one| one.quanta).sum();
                let in_vain = self.memory.in_vain(&want.pod.uid, &gpu.uuid);
                let rank = (in_vain, room.len(), highest, freed, node, gpu.uuid.as_str());
                choices.push((rank, reservation));
            }
        }
        if want.node.is_none() && choices.is_empty() {
            self.hopeless.push(*want);
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
        let some = may.iter().any(|name| self.has_room(name, want));
        (!some).then_some(may)
    }

    /// The scheduler could put the waiter on the node if those went who go for it, beside those that are `taken` care
    /// of there and those that it keeps room for: pods that are nominated to the same node keep each other off.
    fn tokens_suffice(&mut self, node: &str, held: &Reservation, taken: &[Reservation]) -> bool {
        let waiter = self.scene.pod(&held.waiter);
        let Some(waiter) = waiter.filter(|pod| pod.node().is_none()) else {
            return true;
        };
        // Who goes from several GPUs makes room in the node's quanta once.
        let mut counted = BTreeSet::new();
        let mut theirs = Quanta::ZERO;
        for held in taken {
            theirs = theirs.plus(self.needs(node, held, &mut counted));
        }
        let needs = self.needs(node, held, &mut counted);
        if needs == Quanta::ZERO {
            return true;
        }
        let is_ours = |uid: &String| taken.iter().chain([held]).any(|held| held.waiter == *uid);
        let nominated = self.nominated.get(node).into_iter().flatten();
        let others = nominated.filter(|pod| pod.priority >= waiter.priority && !is_ours(&pod.uid));
        let others: Vec<&PodFacts> = others.copied().collect();
        let gpus = self.scene.gpu_nodes.get(node);
        let written = gpus.map(|gpus| gpus.reservations.as_slice());
        let written = written.unwrap_or_default();
        for pod in others {
            theirs = theirs.plus(match written.iter().find(|held| held.waiter == pod.uid) {
                // Somebody goes here for this one too, and its turn comes later.
                Some(later) => self.needs(node, later, &mut counted),
                None => pod.asks,
            });
        }
        let coming = self.going.get(node).copied().unwrap_or_default();
        self.scene.unasked(node).plus(coming) >= needs.plus(theirs)
    }

    /// The same of all else that the waiter asks for, without anybody gone: where others would have to go for that, the
    /// scheduler asks them itself.
    fn rest_suffices(&self, node: &str, waiter: &str, taken: &[Reservation]) -> bool {
        let Some((key, waiter)) = self.scene.pods.get(waiter) else {
            return false;
        };
        if waiter.node().is_some() {
            return true;
        }
        let nominated = self.nominated.get(node).into_iter().flatten();
        let nominated = nominated.filter(|pod| pod.priority >= waiter.priority);
        let others = nominated.map(|pod| pod.uid.as_str());
        let others = others.chain(taken.iter().map(|held| held.waiter.as_str()));
        // Who is both counts once.
        let others: BTreeSet<&str> = others.filter(|uid| *uid != waiter.uid).collect();
        let others = others.iter().filter_map(|uid| self.scene.pods.get(uid));
        let others = others.filter(|(_, pod)| pod.node().is_none());
        let others: Vec<&Key> = others.map(|(key, _)| *key).collect();
        self.scene.takes(node, key, &others)
    }

    /// What a waiter takes of what nobody on the node asks for, beside what those ask for who go for it and were not
    /// `counted` before. Who is on the node has its share.
    fn needs(&mut self, node: &str, held: &Reservation, counted: &mut BTreeSet<&'a str>) -> Quanta {
        let Some(pod) = self
            .scene
            .pod(&held.waiter)
            .filter(|pod| pod.node().is_none())
        else {
            return Quanta::ZERO;
        };
        let want = self.wants.get(held.waiter.as_str()).copied();
        let gpu = self.scene.gpu(node, &held.gpu);
        let room = want
            .zip(gpu)
            .and_then(|(want, gpu)| self.room_on(node, gpu, &want, Unseen::LetsGo));
        let room = room.unwrap_or_default().into_iter();
        let news = room.filter(|one| counted.insert(one.uid));
        let of = |one: Candidate<'_>| self.scene.pod(one.uid).map(|pod| pod.asks);
        pod.asks.minus(news.filter_map(of).sum())
    }

    /// Who has to go from a GPU for the waiter, besides those who leave soon; none where that would not help.
    fn room_on(
        &mut self,
        node: &str,
        gpu: &Gpu,
        want: &Want<'a>,
        unseen: Unseen,
    ) -> Option<Vec<Candidate<'a>>> {
        if gpu.capacity < want.quanta {
            return None;
        }
        let (mut coming, mut candidates) = (self.memory.settling(node, gpu), Vec::new());
        for (uid, quanta) in &gpu.pods {
            // Who has ended is there until the agent sees that.
            let there = self.scene.pods.get_key_value(uid.as_str());
            let lives = there.filter(|(uid, (_, pod))| !self.is_ending(uid, pod));
            let Some((uid, (key, pod))) = lives else {
                if !self.memory.overstays(uid, self.now) {
                    coming = coming.plus(*quanta);
                }
                continue;
            };
            if pod.priority < want.pod.priority
                && want.pod.preempts
                && pod.owner != Owner::Node
                && (pod.class == Class::Borrowed || self.lets_go(key, pod, unseen))
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

    fn is_ending(&self, uid: &str, pod: &PodFacts) -> bool {
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
    fn make_room(&mut self, node: &str, held: &Reservation) -> Option<Step> {
        let want = *self.wants.get(held.waiter.as_str())?;
        let gpu = self.scene.gpu(node, &held.gpu)?;
        if gpu.held_for.as_ref() != Some(&held.waiter) {
            return None;
        }
        let nominate = match &want.pod.place {
            Place::Nowhere { nominated, .. } => nominated.as_deref() != Some(node),
            Place::On(_) => false,
        };
        let room = self.room_on(node, gpu, &want, Unseen::Keeps)?;
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
        // A Job takes a pod that was deleted, and not evicted, for a failed one whatever its policy
        // says. A borrower has agreed to that by its class.
        let stays = matches!(facts.owner, Owner::Job(_)) && facts.class == Class::Guaranteed;
        Some(Victim {
            pod: pod(key, facts),
            overdue: !stays && refused.is_some_and(|refused| refused >= grace),
        })
    }
}

/// The waiter's reservation of a GPU. What is bound for it there already is included: so the agent counts.
fn reservation(want: &Want<'_>, gpu: &Gpu) -> Option<Reservation> {
    let has = gpu.pods.get(&want.pod.uid).copied().unwrap_or_default();
    Some(Reservation {
        gpu: gpu.uuid.clone(),
        waiter: want.pod.uid.clone(),
        quanta: i32::try_from(want.quanta.plus(has).count()).ok()?,
    })
}

fn pod(key: &Key, facts: &PodFacts) -> Pod {
    Pod {
        key: key.clone(),
        uid: facts.uid.clone(),
    }
}
