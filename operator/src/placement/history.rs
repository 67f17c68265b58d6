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
use super::pod::{Owner, Placement, PodFacts};
use super::snapshot::Snapshot;
use crate::quanta::Quanta;

/// Time since the operator started.
pub type Uptime = Duration;

/// What a node's labels should say; those without a value go.
pub(super) type NodeLabels = BTreeMap<String, Option<String>>;

/// How long a reservation may take to come to something, and how long its waiter is left alone after the first that
/// did not. With each more that is doubled, up to [`ALONE_AT_MOST`].
pub(super) const RESERVATION_TIMEOUT: Duration = Duration::from_secs(300);
const MAX_RESERVATION_BACKOFF: Duration = Duration::from_secs(3600);
/// How long a GPU may take to have free what a pod had that is gone; what is held for longer, somebody else has.
const FREEING_TIME: Duration = Duration::from_secs(5);
/// How long a watch may take to show that a pod is ending.
const WATCH_LAG: Duration = Duration::from_secs(10);
/// How long who is ending is expected to go: twice the grace that pods have by default. Who was asked for a waiter is
/// expected to for as long as that one's reservation lasts, so that nobody goes for it a second time.
const TERMINATION_TIME: Duration = Duration::from_secs(60);
/// When a request that was refused, or failed, is made again.
const EVICTION_RETRY: Duration = Duration::from_secs(5);
/// A refusal is forgotten when nobody has asked the pod to go for this long: whom it was for waits no more.
const REFUSAL_TTL: Duration = Duration::from_secs(20);
/// How often pods of one owner are moved, and after which quiet it is forgotten.
const MAX_RELOCATIONS: u32 = 3;
const RELOCATIONS_TTL: Duration = Duration::from_secs(3600);
/// The pod that comes for one that was moved begins to wait within this time, if it has to.
const REPLACEMENT_WINDOW: Duration = Duration::from_secs(120);
/// The first wait after a move of an owner's pod; doubled with each.
const RELOCATION_BACKOFF: Duration = Duration::from_secs(10);
/// How long the room that a pod was moved for counts as taken.
const ASSUMED_FOR: Duration = Duration::from_secs(30);
/// Node writes in a second, and at once after a quiet time.
const LABEL_RATE: f64 = 20.0;

/// A pod that is to leave its GPU.
#[derive(Clone, Debug)]
struct Termination {
    /// It has ended already, and its node alone still has it.
    ended: bool,
    since: Uptime,
    /// The GPU is held for somebody: for whom this one may have been asked, by an operator before this one too.
    gpu_reserved: bool,
}

/// What is on record of one owner's moves from a node, and when this operator first saw that. The record's own time is
/// of the clock of the operator that wrote it, and decides nothing.
pub(super) type RelocationRecord = (Moved, Uptime);

/// What was tried.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// Who has been seen to wait.
    pending: BTreeMap<String, PendingSince>,
    /// Since when each reservation has been seen, by node, GPU and waiter.
    reserved_since: BTreeMap<(String, String, String), Uptime>,
    /// The waiters whose reservations came to nothing.
    reservation_backoffs: BTreeMap<String, ReservationBackoff>,
    /// Who had how much of GPUs where somebody waits, and when it was seen last; by node, GPU and
    /// pod.
    holders: BTreeMap<(String, String), BTreeMap<String, (Quanta, Uptime)>>,
    /// Who is to leave its GPU.
    terminations: BTreeMap<String, Termination>,
    /// What became of asking pods to go.
    evictions: BTreeMap<String, EvictionAttempt>,
    /// How often pods of an owner were moved.
    relocations: BTreeMap<String, OwnerRelocations>,
    /// What is on record of that with each node's `GpuNode`, or was last written there.
    recorded_relocations: BTreeMap<String, Vec<RelocationRecord>>,
    /// Room on nodes that pods were moved for.
    assumed: Vec<(String, Quanta, Uptime)>,
    /// The Jobs that were looked at, by UID: whether they let their pods be disrupted.
    pub(super) jobs: BTreeMap<String, bool>,
    /// What was last written to each node's `GpuNode`.
    pub(super) reservations: BTreeMap<String, Vec<Reservation>>,
    /// The same of quotas.
    pub(super) quotas: BTreeMap<String, Vec<QuotaOrder>>,
    /// Since when a node's labels have not said what is so.
    pub(super) outdated_labels: BTreeMap<String, Uptime>,
    /// The labels that such a node was given, and when.
    pub(super) written_labels: BTreeMap<String, (NodeLabels, Uptime)>,
    /// Node writes that were saved up, and until when.
    label_tokens: (f64, Uptime),
}

/// What became of asking one pod to go.
#[derive(Clone, Copy, Debug)]
struct EvictionAttempt {
    last: Uptime,
    /// Since when a disruption budget has refused it.
    refused: Option<Uptime>,
    /// The API server took it.
    accepted: bool,
}

/// The reservations of one waiter that came to nothing.
#[derive(Clone, Debug, Default)]
struct ReservationBackoff {
    /// How many, by GPU.
    failures: BTreeMap<String, u32>,
    /// No GPU is reserved for it before then.
    until: Uptime,
}

/// How a pod waits.
#[derive(Clone, Copy, Debug)]
struct PendingSince {
    since: Uptime,
    /// When help for it was looked for last.
    last_considered: Option<Uptime>,
}

#[derive(Clone, Debug, Default)]
struct OwnerRelocations {
    count: u32,
    last: Uptime,
    /// The node that had room when the last one was moved.
    target: Option<String>,
    /// The nodes that had room, and that the next pod was not put on: the scheduler knows why.
    failed_targets: BTreeSet<String>,
}

impl ReservationBackoff {
    /// One of these was of `gpu`, once: it is seen for a while after it was given up.
    fn record_failure(&mut self, gpu: &str, now: Uptime) {
        if self.until > now {
            return;
        }
        *self.failures.entry(gpu.to_owned()).or_default() += 1;
        let before = self.failures.values().sum::<u32>() - 1;
        let alone = RESERVATION_TIMEOUT * 2_u32.pow(before.min(8));
        self.until = now + alone.min(MAX_RESERVATION_BACKOFF);
    }
}

impl History {
    /// Looks at who waits, and forgets who does not any more.
    pub(super) fn observe(&mut self, snapshot: &Snapshot<'_>, now: Uptime) {
        self.restore(snapshot, now);
        let on_nodes = snapshot.gpu_nodes.values().flat_map(|gpus| &gpus.pending);
        let unplaced = snapshot.pods.iter().filter(|(_, (_, pod))| {
            matches!(
                pod.placement,
                Placement::Unscheduled {
                    unschedulable_since: Some(_),
                    ..
                }
            )
        });
        let waiting: BTreeSet<&str> = on_nodes
            .map(|waiter| waiter.pod.as_str())
            .chain(unplaced.map(|(uid, _)| *uid))
            .collect();
        let mut before = std::mem::take(&mut self.pending);
        for pod in waiting {
            let wait = before.remove(pod).unwrap_or_else(|| {
                self.observe_replacement(snapshot.pod(pod), now);
                PendingSince {
                    since: now,
                    last_considered: None,
                }
            });
            self.pending.insert(pod.to_owned(), wait);
        }
        let reservations = snapshot.gpu_nodes.iter().flat_map(|(node, gpus)| {
            let name =
                |held: &Reservation| ((*node).to_owned(), held.gpu.clone(), held.waiter.clone());
            gpus.reservations.iter().map(name)
        });
        self.reserved_since = reservations
            .map(|key| {
                let since = self.reserved_since.get(&key).copied().unwrap_or(now);
                (key, since)
            })
            .collect();
        for ((_, gpu, waiter), since) in &self.reserved_since {
            if now.saturating_sub(*since) >= RESERVATION_TIMEOUT {
                self.reservation_backoffs
                    .entry(waiter.clone())
                    .or_default()
                    .record_failure(gpu, now);
            }
        }
        self.observe_holders(snapshot, now);
        self.observe_terminations(snapshot, now);
        self.reservation_backoffs
            .retain(|pod, _| snapshot.pods.contains_key(pod.as_str()));
        self.evictions
            .retain(|pod, _| snapshot.pods.contains_key(pod.as_str()));
        self.relocations
            .retain(|_, moves| now.saturating_sub(moves.last) < RELOCATIONS_TTL);
        self.assumed.retain(|(_, _, until)| *until > now);
        let owners = snapshot.pods.values().map(|(_, pod)| &pod.owner);
        let jobs: BTreeSet<&String> = owners
            .filter_map(|owner| match owner {
                Owner::Job(job) => Some(&job.uid),
                _ => None,
            })
            .collect();
        self.jobs.retain(|job, _| jobs.contains(job));
        let known = |node: &String| snapshot.gpu_nodes.contains_key(node.as_str());
        self.reservations.retain(|node, _| known(node));
        self.quotas.retain(|node, _| known(node));
    }

    /// A pod begins to wait. If one of its owner was moved just before, it was not put where there was room for that one.
    fn observe_replacement(&mut self, pod: Option<&PodFacts>, now: Uptime) {
        let moved = pod
            .and_then(|pod| Some((pod, self.relocations.get_mut(pod.owner.relocatable_uid()?)?)));
        if let Some((pod, moves)) = moved
            && now.saturating_sub(moves.last) < REPLACEMENT_WINDOW
            && let Some(to) = moves.target.take_if(|to| pod.node() != Some(to))
        {
            moves.failed_targets.insert(to);
        }
    }

    /// Whether nothing is to be done later that was not to be done when it was planned last, while nothing changes.
    pub(super) fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.reserved_since.is_empty() && self.outdated_labels.is_empty()
    }

    /// Takes in what an operator before put on record of moves.
    fn restore(&mut self, snapshot: &Snapshot<'_>, now: Uptime) {
        for (node, gpus) in &snapshot.gpu_nodes {
            // What was written last here is newer than what a watch tells late.
            let recorded = self.recorded_relocations.entry((*node).to_owned());
            recorded.or_insert_with(|| {
                gpus.relocations
                    .iter()
                    .map(|one| (one.clone(), now))
                    .collect()
            });
        }
        let known = |node: &String| snapshot.gpu_nodes.contains_key(node.as_str());
        self.recorded_relocations.retain(|node, _| known(node));
        let mut sums: BTreeMap<&str, (u32, Uptime)> = BTreeMap::new();
        for (moved, seen) in self.recorded_relocations.values().flatten() {
            if is_fresh(*seen, now) {
                let (count, last) = sums.entry(&moved.owner).or_default();
                *count += moved.count.unsigned_abs();
                *last = (*last).max(*seen);
            }
        }
        for (owner, (count, last)) in sums {
            if !self.relocations.contains_key(owner) {
                let moves = OwnerRelocations {
                    count,
                    last,
                    ..OwnerRelocations::default()
                };
                self.relocations.insert(owner.to_owned(), moves);
            }
        }
    }

    /// Whether nobody has asked this pod to go before.
    pub(super) fn is_first_eviction(&self, pod: &str) -> bool {
        !self.evictions.contains_key(pod)
    }

    /// The record of a node with one move more of `owner`'s pods, at this time of day; what is forgotten is left out.
    pub(super) fn relocations_with(
        &self,
        node: &str,
        owner: &str,
        now: Uptime,
        wall: Timestamp,
    ) -> Vec<RelocationRecord> {
        let recorded = self.recorded_relocations.get(node).into_iter().flatten();
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
    pub(super) fn set_relocations(&mut self, node: String, moves: Vec<RelocationRecord>) {
        self.recorded_relocations.insert(node, moves);
    }

    fn observe_holders(&mut self, snapshot: &Snapshot<'_>, now: Uptime) {
        let concerned = snapshot
            .gpu_nodes
            .iter()
            .filter(|(_, gpus)| !gpus.pending.is_empty() || !gpus.reservations.is_empty());
        for (node, gpu) in
            concerned.flat_map(|(node, gpus)| gpus.gpus.iter().map(move |gpu| (node, gpu)))
        {
            let key = ((*node).to_owned(), gpu.uuid.clone());
            let had = self.holders.entry(key).or_default();
            let pods = gpu.pods.iter();
            had.extend(pods.map(|(pod, quanta)| (pod.clone(), (*quanta, now))));
        }
        self.holders.retain(|_, had| {
            had.retain(|_, (_, seen)| now.saturating_sub(*seen) < FREEING_TIME);
            !had.is_empty()
        });
    }

    fn observe_terminations(&mut self, snapshot: &Snapshot<'_>, now: Uptime) {
        let ending = snapshot.pods.iter().filter(|(_, (_, pod))| pod.terminating);
        let gpus = snapshot.gpu_nodes.values().flat_map(|gpus| &gpus.gpus);
        let have = gpus.flat_map(|gpu| gpu.pods.keys().map(String::as_str));
        let ended = have.filter(|uid| !snapshot.pods.contains_key(uid));
        let leaving = ending.map(|(uid, _)| (*uid, false));
        let leaving = leaving.chain(ended.map(|uid| (uid, true)));
        let held = snapshot.gpu_nodes.values().flat_map(|gpus| &gpus.gpus);
        let held = held.filter(|gpu| gpu.reserved_for.is_some());
        let held: BTreeSet<&str> = held
            .flat_map(|gpu| gpu.pods.keys().map(String::as_str))
            .collect();
        self.terminations = leaving
            .map(|(uid, ended)| {
                let before = self.terminations.get(uid).filter(|was| was.ended == ended);
                let leaving = Termination {
                    ended,
                    since: before.map_or(now, |was| was.since),
                    gpu_reserved: held.contains(uid),
                };
                (uid.to_owned(), leaving)
            })
            .collect();
    }

    /// Whether a pod that is to leave its GPU has taken so long that nobody waits for that any more.
    pub(super) fn termination_overdue(&self, pod: &str, now: Uptime) -> bool {
        let Some(Termination {
            since,
            gpu_reserved: held,
            ..
        }) = self.terminations.get(pod)
        else {
            return false;
        };
        let asked = self.evictions.get(pod).is_some_and(|asked| asked.accepted);
        let expected = if asked || *held {
            RESERVATION_TIMEOUT
        } else {
            TERMINATION_TIME
        };
        now.saturating_sub(*since) >= expected
    }

    /// What of a GPU pods had that went a moment ago, and is not free yet.
    pub(super) fn recently_freed(&self, node: &str, gpu: &Gpu) -> Quanta {
        let had = self.holders.get(&(node.to_owned(), gpu.uuid.clone()));
        let had = had.into_iter().flatten();
        let gone = had.filter(|(pod, _)| !gpu.pods.contains_key(*pod));
        let gone: Quanta = gone.map(|(_, (quanta, _))| *quanta).sum();
        let bound: Quanta = gpu.pods.values().copied().sum();
        gone.min(gpu.capacity.minus(gpu.free).minus(bound))
    }

    /// For how long a pod has been waiting.
    pub(super) fn waited(&self, pod: &str, now: Uptime) -> Duration {
        let wait = self.pending.get(pod);
        wait.map_or(Duration::ZERO, |wait| now.saturating_sub(wait.since))
    }

    /// When help for a pod was looked for last.
    pub(super) fn last_considered(&self, pod: &str) -> Option<Uptime> {
        self.pending.get(pod)?.last_considered
    }

    /// Help for these pods was looked for.
    pub(super) fn record_considered(&mut self, pods: Vec<String>, now: Uptime) {
        for pod in pods {
            if let Some(wait) = self.pending.get_mut(&pod) {
                wait.last_considered = Some(now);
            }
        }
    }

    /// Whether no GPU is to be reserved for a pod for now.
    pub(super) fn in_backoff(&self, pod: &str, now: Uptime) -> bool {
        self.reservation_backoffs
            .get(pod)
            .is_some_and(|vain| vain.until > now)
    }

    /// How often a GPU was reserved for a pod and that came to nothing.
    pub(super) fn failed_reservations(&self, pod: &str, gpu: &str) -> u32 {
        let vain = self.reservation_backoffs.get(pod);
        vain.and_then(|vain| vain.failures.get(gpu).copied())
            .unwrap_or(0)
    }

    /// The API server took it that this pod has to go, and the watch may not show it yet.
    pub(super) fn eviction_accepted(&self, pod: &str, now: Uptime) -> bool {
        let asked = self.evictions.get(pod);
        asked.is_some_and(|asked| asked.accepted && now.saturating_sub(asked.last) < WATCH_LAG)
    }

    /// Whether a pod may be asked to go now.
    pub(super) fn may_evict(&self, pod: &str, now: Uptime) -> bool {
        let asked = self.evictions.get(pod);
        asked.is_none_or(|asked| now.saturating_sub(asked.last) >= EVICTION_RETRY)
    }

    /// For how long a disruption budget has kept a pod that is being asked to go.
    pub(super) fn refused_for(&self, pod: &str, now: Uptime) -> Option<Duration> {
        let asked = self.evictions.get(pod)?;
        let forgotten = now.saturating_sub(asked.last) >= REFUSAL_TTL;
        let since = asked.refused.filter(|_| !forgotten)?;
        Some(now.saturating_sub(since))
    }

    /// Whether a disruption budget kept a pod when it was last asked to go.
    pub(super) fn was_refused(&self, pod: &str) -> bool {
        let asked = self.evictions.get(pod);
        asked.is_some_and(|asked| asked.refused.is_some())
    }

    /// A pod was asked to go.
    pub(super) fn record_eviction(&mut self, pod: &str, answer: EvictionOutcome, now: Uptime) {
        let refused = self.refused_for(pod, now);
        let refused = refused.map(|lasted| now.saturating_sub(lasted));
        let asked = EvictionAttempt {
            last: now,
            refused: match answer {
                EvictionOutcome::Accepted => None,
                EvictionOutcome::BlockedByPdb => Some(refused.unwrap_or(now)),
                EvictionOutcome::Failed => refused,
            },
            accepted: answer == EvictionOutcome::Accepted,
        };
        self.evictions.insert(pod.to_owned(), asked);
    }

    /// When a pod of this owner may be moved again; none after too many.
    pub(super) fn next_relocation(&self, owner: &str) -> Option<Uptime> {
        let Some(moves) = self.relocations.get(owner) else {
            return Some(Uptime::ZERO);
        };
        let pause = RELOCATION_BACKOFF * 2_u32.pow(moves.count.saturating_sub(1).min(8));
        (moves.count < MAX_RELOCATIONS).then_some(moves.last + pause)
    }

    /// Whether a pod of this owner was moved for room on `node` in vain.
    pub(super) fn relocation_failed(&self, owner: &str, node: &str) -> bool {
        let moves = self.relocations.get(owner);
        moves.is_some_and(|moves| moves.failed_targets.contains(node))
    }

    /// A pod of this owner was moved, for room on `node`.
    pub(super) fn record_relocation(&mut self, owner: &str, node: &str, room: Quanta, now: Uptime) {
        let moves = self.relocations.entry(owner.to_owned()).or_default();
        moves.count += 1;
        moves.last = now;
        moves.target = Some(node.to_owned());
        self.assumed
            .push((node.to_owned(), room, now + ASSUMED_FOR));
    }

    /// Room on a node that pods are on their way to.
    pub(super) fn assumed_room(&self, node: &str) -> Quanta {
        let there = self.assumed.iter().filter(|(name, ..)| name == node);
        there.map(|(_, room, _)| *room).sum()
    }

    /// How many node writes may be made now.
    pub(super) fn available_label_writes(&mut self, now: Uptime) -> usize {
        let (saved, at) = self.label_tokens;
        let passed = now.saturating_sub(at).as_secs_f64();
        let saved = (saved + passed * LABEL_RATE).min(LABEL_RATE);
        self.label_tokens = (saved, now);
        // Never negative, and small.
        saved as usize
    }

    /// A node was written.
    pub(super) fn record_label_write(&mut self) {
        self.label_tokens.0 -= 1.0;
    }
}

/// What the API server said when a pod was asked to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EvictionOutcome {
    /// It goes, or is gone.
    Accepted,
    /// A disruption budget keeps it.
    BlockedByPdb,
    /// Something else.
    Failed,
}

/// Whether a record of moves that this operator first saw then still counts.
fn is_fresh(seen: Uptime, now: Uptime) -> bool {
    now.saturating_sub(seen) < RELOCATIONS_TTL
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(second: u64) -> Uptime {
        Duration::from_secs(second)
    }

    #[test]
    fn owner_is_relocated_three_times_with_growing_pauses() {
        let mut history = History::default();
        let mut moved = Vec::new();
        for second in 0..1_000 {
            if history
                .next_relocation("o")
                .is_some_and(|next| next <= at(second))
            {
                history.record_relocation("o", "n", Quanta::new(1), at(second));
                moved.push(second);
            }
        }
        assert_eq!(moved, [0, 10, 30]);
    }

    #[test]
    fn refusal_lasts_from_the_first_until_eviction_succeeds() {
        let mut history = History::default();
        assert_eq!(history.refused_for("p", at(1)), None);
        history.record_eviction("p", EvictionOutcome::BlockedByPdb, at(1));
        history.record_eviction("p", EvictionOutcome::Failed, at(7));
        history.record_eviction("p", EvictionOutcome::BlockedByPdb, at(13));
        assert_eq!(history.refused_for("p", at(21)), Some(at(20)));
        assert!(!history.may_evict("p", at(14)) && history.may_evict("p", at(18)));
        history.record_eviction("p", EvictionOutcome::Accepted, at(22));
        assert!(history.eviction_accepted("p", at(23)));
        assert_eq!(history.refused_for("p", at(23)), None);
    }

    #[test]
    fn refusal_for_one_waiter_expires_before_a_later_one() {
        let mut history = History::default();
        history.record_eviction("p", EvictionOutcome::BlockedByPdb, at(1));
        assert_eq!(history.refused_for("p", at(20)), Some(at(19)));
        assert_eq!(history.refused_for("p", at(7200)), None);
        assert!(history.was_refused("p"));
        history.record_eviction("p", EvictionOutcome::BlockedByPdb, at(7200));
        assert_eq!(history.refused_for("p", at(7201)), Some(at(1)));
    }

    #[test]
    fn label_writes_stay_within_the_rate() {
        let mut history = History::default();
        let mut written = 0;
        for tick in 0..100_u64 {
            let now = Duration::from_millis(tick * 100);
            for _ in 0..history.available_label_writes(now) {
                history.record_label_write();
                written += 1;
            }
        }
        assert!((190..=200).contains(&written), "{written} in 10 s");
    }
}
