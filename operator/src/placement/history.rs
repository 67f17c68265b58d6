//! What was tried, and when: what the cluster itself does not show.
//!
//! Losing it costs a repeated request, and no second victim: who has to go is chosen from what the cluster shows, but
//! for the seconds in which the memory of one that went is proven free.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bursar_crds::gpu_node::{MAX_MOVES, Moved, QuotaOrder, Reservation};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::node::Gpu;
use super::pod::{Owner, Place, PodFacts};
use super::snapshot::Scene;
use crate::quanta::Quanta;

/// Time since the operator started.
pub type Moment = Duration;

/// What a node's labels should say; those without a value go.
pub(super) type NodeLabels = BTreeMap<String, Option<String>>;

/// How long a reservation may take to come to something, and how long its waiter is left alone after the first that
/// did not. With each more that is doubled, up to [`ALONE_AT_MOST`].
pub(super) const RESERVED_AT_MOST: Duration = Duration::from_secs(300);
const ALONE_AT_MOST: Duration = Duration::from_secs(3600);
/// How long a GPU may take to have free what a pod had that is gone; what is held for longer, somebody else has.
const SETTLING: Duration = Duration::from_secs(5);
/// How long a watch may take to show that a pod is ending.
const SHOWN: Duration = Duration::from_secs(10);
/// How long who is ending is expected to go: twice the grace that pods have by default. Who was asked for a waiter is
/// expected to for as long as that one's reservation lasts, so that nobody goes for it a second time.
const LEAVES: Duration = Duration::from_secs(60);
/// When a request that was refused, or failed, is made again.
const AGAIN: Duration = Duration::from_secs(5);
/// A refusal is forgotten when nobody has asked the pod to go for this long: whom it was for waits no more.
const REFUSAL_FORGOTTEN: Duration = Duration::from_secs(20);
/// How often pods of one owner are moved, and after which quiet it is forgotten.
const MOVES: u32 = 3;
const MOVES_FORGOTTEN: Duration = Duration::from_secs(3600);
/// The pod that comes for one that was moved begins to wait within this time, if it has to.
const RETURNS_WITHIN: Duration = Duration::from_secs(120);
/// The first wait after a move of an owner's pod; doubled with each.
const MOVE_PAUSE: Duration = Duration::from_secs(10);
/// How long the room that a pod was moved for counts as taken.
const PROMISED: Duration = Duration::from_secs(30);
/// Node writes in a second, and at once after a quiet time.
const LABELS_A_SECOND: f64 = 20.0;

/// A pod that is to leave its GPU.
#[derive(Clone, Debug)]
struct Leaving {
    /// It has ended already, and its node alone still has it.
    ended: bool,
    since: Moment,
    /// The GPU is held for somebody: for whom this one may have been asked, by an operator before this one too.
    held: bool,
}

/// What is on record of one owner's moves from a node, and when this operator first saw that. The record's own time is
/// of the clock of the operator that wrote it, and decides nothing.
pub(super) type Record = (Moved, Moment);

/// What was tried.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// Who has been seen to wait.
    waits: BTreeMap<String, Wait>,
    /// Since when each reservation has been seen, by node, GPU and waiter.
    reserved: BTreeMap<(String, String, String), Moment>,
    /// The waiters whose reservations came to nothing.
    in_vain: BTreeMap<String, InVain>,
    /// Who had how much of GPUs where somebody waits, and when it was seen last; by node, GPU and
    /// pod.
    had: BTreeMap<(String, String), BTreeMap<String, (Quanta, Moment)>>,
    /// Who is to leave its GPU.
    leaving: BTreeMap<String, Leaving>,
    /// What became of asking pods to go.
    asked: BTreeMap<String, Asked>,
    /// How often pods of an owner were moved.
    moves: BTreeMap<String, Moves>,
    /// What is on record of that with each node's `GpuNode`, or was last written there.
    recorded: BTreeMap<String, Vec<Record>>,
    /// Room on nodes that pods were moved for.
    promised: Vec<(String, Quanta, Moment)>,
    /// The Jobs that were looked at, by UID: whether they let their pods be disrupted.
    pub(super) jobs: BTreeMap<String, bool>,
    /// What was last written to each node's `GpuNode`.
    pub(super) reservations: BTreeMap<String, Vec<Reservation>>,
    /// The same of quotas.
    pub(super) quotas: BTreeMap<String, Vec<QuotaOrder>>,
    /// Since when a node's labels have not said what is so.
    pub(super) mislabelled: BTreeMap<String, Moment>,
    /// The labels that such a node was given, and when.
    pub(super) labelled: BTreeMap<String, (NodeLabels, Moment)>,
    /// Node writes that were saved up, and until when.
    labels: (f64, Moment),
}

/// What became of asking one pod to go.
#[derive(Clone, Copy, Debug)]
struct Asked {
    last: Moment,
    /// Since when a disruption budget has refused it.
    refused: Option<Moment>,
    /// The API server took it.
    goes: bool,
}

/// The reservations of one waiter that came to nothing.
#[derive(Clone, Debug, Default)]
struct InVain {
    /// How many, by GPU.
    rounds: BTreeMap<String, u32>,
    /// No GPU is reserved for it before then.
    until: Moment,
}

/// How a pod waits.
#[derive(Clone, Copy, Debug)]
struct Wait {
    since: Moment,
    /// When help for it was looked for last.
    looked: Option<Moment>,
}

#[derive(Clone, Debug, Default)]
struct Moves {
    count: u32,
    last: Moment,
    /// The node that had room when the last one was moved.
    to: Option<String>,
    /// The nodes that had room, and that the next pod was not put on: the scheduler knows why.
    in_vain: BTreeSet<String>,
}

impl InVain {
    /// One of these was of `gpu`, once: it is seen for a while after it was given up.
    fn count(&mut self, gpu: &str, now: Moment) {
        if self.until > now {
            return;
        }
        *self.rounds.entry(gpu.to_owned()).or_default() += 1;
        let before = self.rounds.values().sum::<u32>() - 1;
        let alone = RESERVED_AT_MOST * 2_u32.pow(before.min(8));
        self.until = now + alone.min(ALONE_AT_MOST);
    }
}

impl Memory {
    /// Looks at who waits, and forgets who does not any more.
    pub(super) fn see(&mut self, scene: &Scene<'_>, now: Moment) {
        self.recall(scene, now);
        let on_nodes = scene.gpu_nodes.values().flat_map(|gpus| &gpus.waiting);
        let unplaced = scene.pods.iter().filter(|(_, (_, pod))| {
            matches!(
                pod.place,
                Place::Nowhere {
                    refused: Some(_),
                    ..
                }
            )
        });
        let waiting: BTreeSet<&str> = on_nodes
            .map(|waiter| waiter.pod.as_str())
            .chain(unplaced.map(|(uid, _)| *uid))
            .collect();
        let mut before = std::mem::take(&mut self.waits);
        for pod in waiting {
            let wait = before.remove(pod).unwrap_or_else(|| {
                self.see_return(scene.pod(pod), now);
                Wait {
                    since: now,
                    looked: None,
                }
            });
            self.waits.insert(pod.to_owned(), wait);
        }
        let reservations = scene.gpu_nodes.iter().flat_map(|(node, gpus)| {
            let name =
                |held: &Reservation| ((*node).to_owned(), held.gpu.clone(), held.waiter.clone());
            gpus.reservations.iter().map(name)
        });
        self.reserved = reservations
            .map(|key| {
                let since = self.reserved.get(&key).copied().unwrap_or(now);
                (key, since)
            })
            .collect();
        for ((_, gpu, waiter), since) in &self.reserved {
            if now.saturating_sub(*since) >= RESERVED_AT_MOST {
                self.in_vain
                    .entry(waiter.clone())
                    .or_default()
                    .count(gpu, now);
            }
        }
        self.see_who_has(scene, now);
        self.see_who_leaves(scene, now);
        self.in_vain
            .retain(|pod, _| scene.pods.contains_key(pod.as_str()));
        self.asked
            .retain(|pod, _| scene.pods.contains_key(pod.as_str()));
        self.moves
            .retain(|_, moves| now.saturating_sub(moves.last) < MOVES_FORGOTTEN);
        self.promised.retain(|(_, _, until)| *until > now);
        let owners = scene.pods.values().map(|(_, pod)| &pod.owner);
        let jobs: BTreeSet<&String> = owners
            .filter_map(|owner| match owner {
                Owner::Job(job) => Some(&job.uid),
                _ => None,
            })
            .collect();
        self.jobs.retain(|job, _| jobs.contains(job));
        let known = |node: &String| scene.gpu_nodes.contains_key(node.as_str());
        self.reservations.retain(|node, _| known(node));
        self.quotas.retain(|node, _| known(node));
    }

    /// A pod begins to wait. If one of its owner was moved just before, it was not put where there was room for that one.
    fn see_return(&mut self, pod: Option<&PodFacts>, now: Moment) {
        let moved = pod.and_then(|pod| Some((pod, self.moves.get_mut(pod.owner.uid()?)?)));
        if let Some((pod, moves)) = moved
            && now.saturating_sub(moves.last) < RETURNS_WITHIN
            && let Some(to) = moves.to.take_if(|to| pod.node() != Some(to))
        {
            moves.in_vain.insert(to);
        }
    }

    /// Whether nothing is to be done later that was not to be done when it was planned last, while nothing changes.
    pub(super) fn is_at_rest(&self) -> bool {
        self.waits.is_empty() && self.reserved.is_empty() && self.mislabelled.is_empty()
    }

    /// Takes in what an operator before put on record of moves.
    fn recall(&mut self, scene: &Scene<'_>, now: Moment) {
        for (node, gpus) in &scene.gpu_nodes {
            // What was written last here is newer than what a watch tells late.
            let recorded = self.recorded.entry((*node).to_owned());
            recorded.or_insert_with(|| gpus.moves.iter().map(|one| (one.clone(), now)).collect());
        }
        let known = |node: &String| scene.gpu_nodes.contains_key(node.as_str());
        self.recorded.retain(|node, _| known(node));
        let mut sums: BTreeMap<&str, (u32, Moment)> = BTreeMap::new();
        for (moved, seen) in self.recorded.values().flatten() {
            if is_fresh(*seen, now) {
                let (count, last) = sums.entry(&moved.owner).or_default();
                *count += moved.count.unsigned_abs();
                *last = (*last).max(*seen);
            }
        }
        for (owner, (count, last)) in sums {
            if !self.moves.contains_key(owner) {
                let moves = Moves {
                    count,
                    last,
                    ..Moves::default()
                };
                self.moves.insert(owner.to_owned(), moves);
            }
        }
    }

    /// Whether nobody has asked this pod to go before.
    pub(super) fn is_first_ask(&self, pod: &str) -> bool {
        !self.asked.contains_key(pod)
    }

    /// The record of a node with one move more of `owner`'s pods, at this time of day; what is forgotten is left out.
    pub(super) fn moves_with(
        &self,
        node: &str,
        owner: &str,
        now: Moment,
        wall: Timestamp,
    ) -> Vec<Record> {
        let recorded = self.recorded.get(node).into_iter().flatten();
        let (mut of_owner, mut others) = (0, Vec::new());
        for (moved, seen) in recorded.filter(|(_, seen)| is_fresh(*seen, now)) {
            if moved.owner == owner {
                of_owner = moved.count;
            } else {
                others.push((moved.clone(), *seen));
            }
        }
        others.sort_by_key(|(_, seen)| *seen);
        let over = (others.len() + 1).saturating_sub(MAX_MOVES);
        others.drain(..over);
        let moved = Moved {
            owner: owner.to_owned(),
            count: of_owner.saturating_add(1),
            last: Time(wall),
        };
        others.push((moved, now));
        others
    }

    /// So much is on record of a node's moves by now.
    pub(super) fn recorded(&mut self, node: String, moves: Vec<Record>) {
        self.recorded.insert(node, moves);
    }

    fn see_who_has(&mut self, scene: &Scene<'_>, now: Moment) {
        let concerned = scene
            .gpu_nodes
            .iter()
            .filter(|(_, gpus)| !gpus.waiting.is_empty() || !gpus.reservations.is_empty());
        for (node, gpu) in
            concerned.flat_map(|(node, gpus)| gpus.gpus.iter().map(move |gpu| (node, gpu)))
        {
            let key = ((*node).to_owned(), gpu.uuid.clone());
            let had = self.had.entry(key).or_default();
            let pods = gpu.pods.iter();
            had.extend(pods.map(|(pod, quanta)| (pod.clone(), (*quanta, now))));
        }
        self.had.retain(|_, had| {
            had.retain(|_, (_, seen)| now.saturating_sub(*seen) < SETTLING);
            !had.is_empty()
        });
    }

    fn see_who_leaves(&mut self, scene: &Scene<'_>, now: Moment) {
        let ending = scene.pods.iter().filter(|(_, (_, pod))| pod.ending);
        let gpus = scene.gpu_nodes.values().flat_map(|gpus| &gpus.gpus);
        let have = gpus.flat_map(|gpu| gpu.pods.keys().map(String::as_str));
        let ended = have.filter(|uid| !scene.pods.contains_key(uid));
        let leaving = ending.map(|(uid, _)| (*uid, false));
        let leaving = leaving.chain(ended.map(|uid| (uid, true)));
        let held = scene.gpu_nodes.values().flat_map(|gpus| &gpus.gpus);
        let held = held.filter(|gpu| gpu.held_for.is_some());
        let held: BTreeSet<&str> = held
            .flat_map(|gpu| gpu.pods.keys().map(String::as_str))
            .collect();
        self.leaving = leaving
            .map(|(uid, ended)| {
                let before = self.leaving.get(uid).filter(|was| was.ended == ended);
                let leaving = Leaving {
                    ended,
                    since: before.map_or(now, |was| was.since),
                    held: held.contains(uid),
                };
                (uid.to_owned(), leaving)
            })
            .collect();
    }

    /// Whether a pod that is to leave its GPU has taken so long that nobody waits for that any more.
    pub(super) fn overstays(&self, pod: &str, now: Moment) -> bool {
        let Some(Leaving { since, held, .. }) = self.leaving.get(pod) else {
            return false;
        };
        let asked = self.asked.get(pod).is_some_and(|asked| asked.goes);
        let expected = if asked || *held {
            RESERVED_AT_MOST
        } else {
            LEAVES
        };
        now.saturating_sub(*since) >= expected
    }

    /// What of a GPU pods had that went a moment ago, and is not free yet.
    pub(super) fn settling(&self, node: &str, gpu: &Gpu) -> Quanta {
        let had = self.had.get(&(node.to_owned(), gpu.uuid.clone()));
        let had = had.into_iter().flatten();
        let gone = had.filter(|(pod, _)| !gpu.pods.contains_key(*pod));
        let gone: Quanta = gone.map(|(_, (quanta, _))| *quanta).sum();
        let bound: Quanta = gpu.pods.values().copied().sum();
        gone.min(gpu.capacity.minus(gpu.free).minus(bound))
    }

    /// For how long a pod has been waiting.
    pub(super) fn waited(&self, pod: &str, now: Moment) -> Duration {
        let wait = self.waits.get(pod);
        wait.map_or(Duration::ZERO, |wait| now.saturating_sub(wait.since))
    }

    /// When help for a pod was looked for last.
    pub(super) fn last_look(&self, pod: &str) -> Option<Moment> {
        self.waits.get(pod)?.looked
    }

    /// Help for these pods was looked for.
    pub(super) fn looked_at(&mut self, pods: Vec<String>, now: Moment) {
        for pod in pods {
            if let Some(wait) = self.waits.get_mut(&pod) {
                wait.looked = Some(now);
            }
        }
    }

    /// Whether no GPU is to be reserved for a pod for now.
    pub(super) fn is_left_alone(&self, pod: &str, now: Moment) -> bool {
        self.in_vain.get(pod).is_some_and(|vain| vain.until > now)
    }

    /// How often a GPU was reserved for a pod and that came to nothing.
    pub(super) fn in_vain(&self, pod: &str, gpu: &str) -> u32 {
        let vain = self.in_vain.get(pod);
        vain.and_then(|vain| vain.rounds.get(gpu).copied())
            .unwrap_or(0)
    }

    /// The API server took it that this pod has to go, and the watch may not show it yet.
    pub(super) fn goes(&self, pod: &str, now: Moment) -> bool {
        let asked = self.asked.get(pod);
        asked.is_some_and(|asked| asked.goes && now.saturating_sub(asked.last) < SHOWN)
    }

    /// Whether a pod may be asked to go now.
    pub(super) fn may_ask(&self, pod: &str, now: Moment) -> bool {
        let asked = self.asked.get(pod);
        asked.is_none_or(|asked| now.saturating_sub(asked.last) >= AGAIN)
    }

    /// For how long a disruption budget has kept a pod that is being asked to go.
    pub(super) fn refused_for(&self, pod: &str, now: Moment) -> Option<Duration> {
        let asked = self.asked.get(pod)?;
        let forgotten = now.saturating_sub(asked.last) >= REFUSAL_FORGOTTEN;
        let since = asked.refused.filter(|_| !forgotten)?;
        Some(now.saturating_sub(since))
    }

    /// Whether a disruption budget kept a pod when it was last asked to go.
    pub(super) fn was_refused(&self, pod: &str) -> bool {
        let asked = self.asked.get(pod);
        asked.is_some_and(|asked| asked.refused.is_some())
    }

    /// A pod was asked to go.
    pub(super) fn asked(&mut self, pod: &str, answer: Answer, now: Moment) {
        let refused = self.refused_for(pod, now);
        let refused = refused.map(|lasted| now.saturating_sub(lasted));
        let asked = Asked {
            last: now,
            refused: match answer {
                Answer::Goes => None,
                Answer::Refused => Some(refused.unwrap_or(now)),
                Answer::Failed => refused,
            },
            goes: answer == Answer::Goes,
        };
        self.asked.insert(pod.to_owned(), asked);
    }

    /// When a pod of this owner may be moved again; none after too many.
    pub(super) fn next_move(&self, owner: &str) -> Option<Moment> {
        let Some(moves) = self.moves.get(owner) else {
            return Some(Moment::ZERO);
        };
        let pause = MOVE_PAUSE * 2_u32.pow(moves.count.saturating_sub(1).min(8));
        (moves.count < MOVES).then_some(moves.last + pause)
    }

    /// Whether a pod of this owner was moved for room on `node` in vain.
    pub(super) fn moved_in_vain(&self, owner: &str, node: &str) -> bool {
        let moves = self.moves.get(owner);
        moves.is_some_and(|moves| moves.in_vain.contains(node))
    }

    /// A pod of this owner was moved, for room on `node`.
    pub(super) fn moved(&mut self, owner: &str, node: &str, room: Quanta, now: Moment) {
        let moves = self.moves.entry(owner.to_owned()).or_default();
        moves.count += 1;
        moves.last = now;
        moves.to = Some(node.to_owned());
        self.promised.push((node.to_owned(), room, now + PROMISED));
    }

    /// Room on a node that pods are on their way to.
    pub(super) fn promised(&self, node: &str) -> Quanta {
        let there = self.promised.iter().filter(|(name, ..)| name == node);
        there.map(|(_, room, _)| *room).sum()
    }

    /// How many node writes may be made now.
    pub(super) fn label_writes(&mut self, now: Moment) -> usize {
        let (saved, at) = self.labels;
        let passed = now.saturating_sub(at).as_secs_f64();
        let saved = (saved + passed * LABELS_A_SECOND).min(LABELS_A_SECOND);
        self.labels = (saved, now);
        // Never negative, and small.
        saved as usize
    }

    /// A node was written.
    pub(super) fn label_written(&mut self) {
        self.labels.0 -= 1.0;
    }
}

/// What the API server said when a pod was asked to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// It goes, or is gone.
    Goes,
    /// A disruption budget keeps it.
    Refused,
    /// Something else.
    Failed,
}

/// Whether a record of moves that this operator first saw then still counts.
fn is_fresh(seen: Moment, now: Moment) -> bool {
    now.saturating_sub(seen) < MOVES_FORGOTTEN
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(second: u64) -> Moment {
        Duration::from_secs(second)
    }

    #[test]
    fn an_owners_pods_are_moved_three_times_with_a_longer_pause_each_time() {
        let mut memory = Memory::default();
        let mut moved = Vec::new();
        for second in 0..1_000 {
            if memory.next_move("o").is_some_and(|next| next <= at(second)) {
                memory.moved("o", "n", Quanta::new(1), at(second));
                moved.push(second);
            }
        }
        assert_eq!(moved, [0, 10, 30]);
    }

    #[test]
    fn a_refusal_lasts_from_the_first_one_until_the_pod_goes() {
        let mut memory = Memory::default();
        assert_eq!(memory.refused_for("p", at(1)), None);
        memory.asked("p", Answer::Refused, at(1));
        memory.asked("p", Answer::Failed, at(7));
        memory.asked("p", Answer::Refused, at(13));
        assert_eq!(memory.refused_for("p", at(21)), Some(at(20)));
        assert!(!memory.may_ask("p", at(14)) && memory.may_ask("p", at(18)));
        memory.asked("p", Answer::Goes, at(22));
        assert!(memory.goes("p", at(23)));
        assert_eq!(memory.refused_for("p", at(23)), None);
    }

    #[test]
    fn a_refusal_for_one_waiter_is_not_held_against_the_pod_hours_later() {
        let mut memory = Memory::default();
        memory.asked("p", Answer::Refused, at(1));
        assert_eq!(memory.refused_for("p", at(20)), Some(at(19)));
        assert_eq!(memory.refused_for("p", at(7200)), None);
        assert!(memory.was_refused("p"));
        memory.asked("p", Answer::Refused, at(7200));
        assert_eq!(memory.refused_for("p", at(7201)), Some(at(1)));
    }

    #[test]
    fn nodes_are_written_no_faster_than_the_rate() {
        let mut memory = Memory::default();
        let mut written = 0;
        for tick in 0..100_u64 {
            let now = Duration::from_millis(tick * 100);
            for _ in 0..memory.label_writes(now) {
                memory.label_written();
                written += 1;
            }
        }
        assert!((190..=200).contains(&written), "{written} in 10 s");
    }
}
