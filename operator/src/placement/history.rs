//! Remembers the planner's attempts, which the cluster does not show.
//!
//! A loss costs repeated requests and no second victim. Victims follow from the cluster's state,
//! except in the seconds in which a victim's memory is proven free.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bursar_crds::gpu_node::{MAX_RECORDED_RELOCATIONS, QuotaOverride, Relocation, Reservation};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::node::Gpu;
use super::pod::{Owner, Placement, PodFacts};
use super::snapshot::Snapshot;
use crate::quanta::Quanta;

/// The time since the operator started.
pub type Uptime = Duration;

/// The desired labels of a node. A label without a value is removed.
pub(super) type NodeLabels = BTreeMap<String, Option<String>>;

/// How long a reservation may take. Its pod then gets no reservation for as long, doubled with each
/// further failure up to [`MAX_RESERVATION_BACKOFF`].
pub(super) const RESERVATION_TIMEOUT: Duration = Duration::from_secs(300);
const MAX_RESERVATION_BACKOFF: Duration = Duration::from_secs(3600);
/// How long the memory of a pod that is gone may take to become free. Memory that is held for
/// longer has another holder.
const FREEING_TIME: Duration = Duration::from_secs(5);
/// How long a watch may take to show that a pod is terminating.
const WATCH_LAG: Duration = Duration::from_secs(10);
/// How long a terminating pod may take: twice the default grace period. A victim may take as long
/// as the reservation that it was evicted for, so that no second victim is chosen.
const TERMINATION_TIME: Duration = Duration::from_secs(60);
/// The delay before a refused or failed eviction is requested again.
const EVICTION_RETRY: Duration = Duration::from_secs(5);
/// A refusal is forgotten when no eviction has been requested for this long. The pod that needed
/// the room waits no longer.
const REFUSAL_TTL: Duration = Duration::from_secs(20);
/// How often pods of one owner are relocated, and when the count is forgotten.
const MAX_RELOCATIONS: u32 = 3;
const RELOCATIONS_TTL: Duration = Duration::from_secs(3600);
/// The replacement of a relocated pod begins to wait within this time, if at all.
const REPLACEMENT_WINDOW: Duration = Duration::from_secs(120);
/// The first pause after a relocation; it doubles with each.
const RELOCATION_BACKOFF: Duration = Duration::from_secs(10);
/// How long the room for a relocated pod counts as taken.
const ASSUMED_FOR: Duration = Duration::from_secs(30);
/// Label writes per second, and the burst after a pause.
const LABEL_RATE: f64 = 20.0;

/// A pod whose memory is about to become free.
#[derive(Clone, Debug)]
struct Termination {
    /// The pod object is gone, and only the node still reports the pod.
    ended: bool,
    since: Uptime,
    /// The GPU is reserved. This or an earlier operator may have evicted the pod for that
    /// reservation.
    gpu_reserved: bool,
}

/// The recorded relocations of one owner from a node, with the uptime at which this operator first
/// saw them. The record's own timestamp decides nothing, because another operator's clock wrote it.
pub(super) type RelocationRecord = (Relocation, Uptime);

/// The attempts of this operator.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// The pending pods.
    pending: BTreeMap<String, PendingSince>,
    /// When each reservation was first seen, by node, GPU and pod.
    reserved_since: BTreeMap<(String, String, String), Uptime>,
    /// The pods whose reservations failed.
    reservation_backoffs: BTreeMap<String, ReservationBackoff>,
    /// The memory of pods on contested GPUs, and when it was last seen. By node and GPU, then by
    /// pod.
    holders: BTreeMap<(String, String), BTreeMap<String, (Quanta, Uptime)>>,
    /// The terminating pods.
    terminations: BTreeMap<String, Termination>,
    /// The last eviction attempt of each pod.
    evictions: BTreeMap<String, EvictionAttempt>,
    /// The relocations of each owner's pods.
    relocations: BTreeMap<String, OwnerRelocations>,
    /// The relocations recorded in each node's `GpuNode`, as read or last written.
    recorded_relocations: BTreeMap<String, Vec<RelocationRecord>>,
    /// Room on nodes that relocated pods are expected to take.
    assumed: Vec<(String, Quanta, Uptime)>,
    /// Whether each Job read so far ignores the disruption of its pods, by UID.
    pub(super) jobs: BTreeMap<String, bool>,
    /// The last applied reservations of each node.
    pub(super) reservations: BTreeMap<String, Vec<Reservation>>,
    /// The last applied quota overrides of each node.
    pub(super) quotas: BTreeMap<String, Vec<QuotaOverride>>,
    /// Since when a node's labels have been out of date.
    pub(super) outdated_labels: BTreeMap<String, Uptime>,
    /// The labels last written to such a node, and when.
    pub(super) written_labels: BTreeMap<String, (NodeLabels, Uptime)>,
    /// The tokens for label writes, and when they were last refilled.
    label_tokens: (f64, Uptime),
}

/// The last attempt to evict a pod.
#[derive(Clone, Copy, Debug)]
struct EvictionAttempt {
    last: Uptime,
    /// Since when PodDisruptionBudgets have refused it.
    refused: Option<Uptime>,
    /// The API server accepted it.
    accepted: bool,
}

/// The failed reservations of one pod.
#[derive(Clone, Debug, Default)]
struct ReservationBackoff {
    /// The number of failures by GPU.
    failures: BTreeMap<String, u32>,
    /// The end of the back-off.
    until: Uptime,
}

/// Since when a pod has been pending.
#[derive(Clone, Copy, Debug)]
struct PendingSince {
    since: Uptime,
    /// When the planner last considered the pod.
    last_considered: Option<Uptime>,
}

#[derive(Clone, Debug, Default)]
struct OwnerRelocations {
    count: u32,
    last: Uptime,
    /// The node with room at the last relocation.
    target: Option<String>,
    /// Nodes with room that the scheduler did not choose for the replacement.
    failed_targets: BTreeSet<String>,
}

impl ReservationBackoff {
    /// Counts a failed reservation once. It stays visible for a while after its removal.
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
    /// Updates the history from a snapshot, and drops what is gone.
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
            let name = |reserved: &Reservation| {
                (
                    (*node).to_owned(),
                    reserved.gpu.clone(),
                    reserved.waiter.clone(),
                )
            };
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
            .retain(|_, relocations| now.saturating_sub(relocations.last) < RELOCATIONS_TTL);
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

    /// A pod begins to wait. When a pod of its owner was relocated just before, the scheduler did
    /// not use the room.
    fn observe_replacement(&mut self, pod: Option<&PodFacts>, now: Uptime) {
        let relocation = pod
            .and_then(|pod| Some((pod, self.relocations.get_mut(pod.owner.relocatable_uid()?)?)));
        if let Some((pod, relocations)) = relocation
            && now.saturating_sub(relocations.last) < REPLACEMENT_WINDOW
            && let Some(to) = relocations.target.take_if(|to| pod.node() != Some(to))
        {
            relocations.failed_targets.insert(to);
        }
    }

    /// Whether the same plan would result later while nothing changes.
    pub(super) fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.reserved_since.is_empty() && self.outdated_labels.is_empty()
    }

    /// Restores the relocations that an earlier operator recorded.
    fn restore(&mut self, snapshot: &Snapshot<'_>, now: Uptime) {
        for (node, gpus) in &snapshot.gpu_nodes {
            // The entries that this operator wrote are newer than those of a late watch.
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
        for (relocation, seen) in self.recorded_relocations.values().flatten() {
            if is_fresh(*seen, now) {
                let (count, last) = sums.entry(&relocation.owner).or_default();
                *count += relocation.count.unsigned_abs();
                *last = (*last).max(*seen);
            }
        }
        for (owner, (count, last)) in sums {
            if !self.relocations.contains_key(owner) {
                let relocations = OwnerRelocations {
                    count,
                    last,
                    ..OwnerRelocations::default()
                };
                self.relocations.insert(owner.to_owned(), relocations);
            }
        }
    }

    /// Whether this operator has not tried to evict the pod before.
    pub(super) fn is_first_eviction(&self, pod: &str) -> bool {
        !self.evictions.contains_key(pod)
    }

    /// The node's record with one more relocation of the owner's pods. Expired entries are left
    /// out.
    pub(super) fn relocations_with(
        &self,
        node: &str,
        owner: &str,
        now: Uptime,
        timestamp: Timestamp,
    ) -> Vec<RelocationRecord> {
        let recorded = self.recorded_relocations.get(node).into_iter().flatten();
        let (mut of_owner, mut others) = (0, Vec::new());
        for (relocation, seen) in recorded.filter(|(_, seen)| is_fresh(*seen, now)) {
            if relocation.owner == owner {
                of_owner = relocation.count;
            } else {
                others.push((relocation.clone(), *seen));
            }
        }
        others.sort_by_key(|(_, seen)| *seen);
        let over = (others.len() + 1).saturating_sub(MAX_RECORDED_RELOCATIONS);
        others.drain(..over);
        let relocation = Relocation {
            owner: owner.to_owned(),
            count: of_owner.saturating_add(1),
            last: Time(timestamp),
        };
        others.push((relocation, now));
        others
    }

    /// Stores the record of a node's relocations.
    pub(super) fn set_relocations(&mut self, node: String, relocations: Vec<RelocationRecord>) {
        self.recorded_relocations.insert(node, relocations);
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
            let holders = self.holders.entry(key).or_default();
            let pods = gpu.pods.iter();
            holders.extend(pods.map(|(pod, quanta)| (pod.clone(), (*quanta, now))));
        }
        self.holders.retain(|_, holders| {
            holders.retain(|_, (_, seen)| now.saturating_sub(*seen) < FREEING_TIME);
            !holders.is_empty()
        });
    }

    fn observe_terminations(&mut self, snapshot: &Snapshot<'_>, now: Uptime) {
        let ending = snapshot.pods.iter().filter(|(_, (_, pod))| pod.terminating);
        let gpus = snapshot.gpu_nodes.values().flat_map(|gpus| &gpus.gpus);
        let have = gpus.flat_map(|gpu| gpu.pods.keys().map(String::as_str));
        let ended = have.filter(|uid| !snapshot.pods.contains_key(uid));
        let terminating = ending.map(|(uid, _)| (*uid, false));
        let terminating = terminating.chain(ended.map(|uid| (uid, true)));
        let reserved = snapshot.gpu_nodes.values().flat_map(|gpus| &gpus.gpus);
        let reserved = reserved.filter(|gpu| gpu.reserved_for.is_some());
        let reserved: BTreeSet<&str> = reserved
            .flat_map(|gpu| gpu.pods.keys().map(String::as_str))
            .collect();
        self.terminations = terminating
            .map(|(uid, ended)| {
                let before = self.terminations.get(uid).filter(|was| was.ended == ended);
                let terminating = Termination {
                    ended,
                    since: before.map_or(now, |was| was.since),
                    gpu_reserved: reserved.contains(uid),
                };
                (uid.to_owned(), terminating)
            })
            .collect();
    }

    /// Whether a terminating pod has taken so long that the planner no longer expects its memory.
    pub(super) fn termination_overdue(&self, pod: &str, now: Uptime) -> bool {
        let Some(Termination {
            since,
            gpu_reserved: reserved,
            ..
        }) = self.terminations.get(pod)
        else {
            return false;
        };
        let attempt = self
            .evictions
            .get(pod)
            .is_some_and(|attempt| attempt.accepted);
        let expected = if attempt || *reserved {
            RESERVATION_TIMEOUT
        } else {
            TERMINATION_TIME
        };
        now.saturating_sub(*since) >= expected
    }

    /// Memory of pods that ended a moment ago, which is not free yet.
    pub(super) fn recently_freed(&self, node: &str, gpu: &Gpu) -> Quanta {
        let holders = self.holders.get(&(node.to_owned(), gpu.uuid.clone()));
        let holders = holders.into_iter().flatten();
        let freed = holders.filter(|(pod, _)| !gpu.pods.contains_key(*pod));
        let freed: Quanta = freed.map(|(_, (quanta, _))| *quanta).sum();
        let bound: Quanta = gpu.pods.values().copied().sum();
        freed.min(gpu.capacity.minus(gpu.free).minus(bound))
    }

    /// How long a pod has been pending.
    pub(super) fn waited(&self, pod: &str, now: Uptime) -> Duration {
        let wait = self.pending.get(pod);
        wait.map_or(Duration::ZERO, |wait| now.saturating_sub(wait.since))
    }

    /// When the planner last considered a pod.
    pub(super) fn last_considered(&self, pod: &str) -> Option<Uptime> {
        self.pending.get(pod)?.last_considered
    }

    /// Records that the planner considered these pods.
    pub(super) fn record_considered(&mut self, pods: Vec<String>, now: Uptime) {
        for pod in pods {
            if let Some(wait) = self.pending.get_mut(&pod) {
                wait.last_considered = Some(now);
            }
        }
    }

    /// Whether a pod gets no reservation for now.
    pub(super) fn in_backoff(&self, pod: &str, now: Uptime) -> bool {
        self.reservation_backoffs
            .get(pod)
            .is_some_and(|backoff| backoff.until > now)
    }

    /// How many reservations of a GPU failed for a pod.
    pub(super) fn failed_reservations(&self, pod: &str, gpu: &str) -> u32 {
        let backoff = self.reservation_backoffs.get(pod);
        backoff
            .and_then(|backoff| backoff.failures.get(gpu).copied())
            .unwrap_or(0)
    }

    /// Whether the API server has accepted the eviction and the watch may not show it yet.
    pub(super) fn eviction_accepted(&self, pod: &str, now: Uptime) -> bool {
        let attempt = self.evictions.get(pod);
        attempt
            .is_some_and(|attempt| attempt.accepted && now.saturating_sub(attempt.last) < WATCH_LAG)
    }

    /// Whether the eviction of a pod may be requested now.
    pub(super) fn may_evict(&self, pod: &str, now: Uptime) -> bool {
        let attempt = self.evictions.get(pod);
        attempt.is_none_or(|attempt| now.saturating_sub(attempt.last) >= EVICTION_RETRY)
    }

    /// How long PodDisruptionBudgets have refused the eviction of a pod.
    pub(super) fn refused_for(&self, pod: &str, now: Uptime) -> Option<Duration> {
        let attempt = self.evictions.get(pod)?;
        let forgotten = now.saturating_sub(attempt.last) >= REFUSAL_TTL;
        let since = attempt.refused.filter(|_| !forgotten)?;
        Some(now.saturating_sub(since))
    }

    /// Whether PodDisruptionBudgets refused the last eviction of a pod.
    pub(super) fn was_refused(&self, pod: &str) -> bool {
        let attempt = self.evictions.get(pod);
        attempt.is_some_and(|attempt| attempt.refused.is_some())
    }

    /// Records an eviction attempt.
    pub(super) fn record_eviction(&mut self, pod: &str, outcome: EvictionOutcome, now: Uptime) {
        let refused = self.refused_for(pod, now);
        let refused = refused.map(|lasted| now.saturating_sub(lasted));
        let attempt = EvictionAttempt {
            last: now,
            refused: match outcome {
                EvictionOutcome::Accepted => None,
                EvictionOutcome::BlockedByPdb => Some(refused.unwrap_or(now)),
                EvictionOutcome::Failed => refused,
            },
            accepted: outcome == EvictionOutcome::Accepted,
        };
        self.evictions.insert(pod.to_owned(), attempt);
    }

    /// When a pod of this owner may be relocated next. `None` after too many relocations.
    pub(super) fn next_relocation(&self, owner: &str) -> Option<Uptime> {
        let Some(relocations) = self.relocations.get(owner) else {
            return Some(Uptime::ZERO);
        };
        let pause = RELOCATION_BACKOFF * 2_u32.pow(relocations.count.saturating_sub(1).min(8));
        (relocations.count < MAX_RELOCATIONS).then_some(relocations.last + pause)
    }

    /// Whether an earlier relocation of the owner's pods to `node` failed.
    pub(super) fn relocation_failed(&self, owner: &str, node: &str) -> bool {
        let relocations = self.relocations.get(owner);
        relocations.is_some_and(|relocations| relocations.failed_targets.contains(node))
    }

    /// Records the relocation of a pod of this owner to `node`.
    pub(super) fn record_relocation(&mut self, owner: &str, node: &str, room: Quanta, now: Uptime) {
        let relocations = self.relocations.entry(owner.to_owned()).or_default();
        relocations.count += 1;
        relocations.last = now;
        relocations.target = Some(node.to_owned());
        self.assumed
            .push((node.to_owned(), room, now + ASSUMED_FOR));
    }

    /// Room on a node that relocated pods are about to take.
    pub(super) fn assumed_room(&self, node: &str) -> Quanta {
        let there = self.assumed.iter().filter(|(name, ..)| name == node);
        there.map(|(_, room, _)| *room).sum()
    }

    /// How many label writes the rate allows now.
    pub(super) fn available_label_writes(&mut self, now: Uptime) -> usize {
        let (saved, at) = self.label_tokens;
        let passed = now.saturating_sub(at).as_secs_f64();
        let saved = (saved + passed * LABEL_RATE).min(LABEL_RATE);
        self.label_tokens = (saved, now);
        // The value is small and never negative.
        saved as usize
    }

    /// Takes one token for a label write.
    pub(super) fn record_label_write(&mut self) {
        self.label_tokens.0 -= 1.0;
    }
}

/// The result of an eviction request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EvictionOutcome {
    /// The pod terminates or is gone.
    Accepted,
    /// A PodDisruptionBudget refused the eviction.
    BlockedByPdb,
    /// The request failed otherwise.
    Failed,
}

/// Whether a recorded relocation first seen at `seen` still counts.
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
        let mut relocation = Vec::new();
        for second in 0..1_000 {
            if history
                .next_relocation("o")
                .is_some_and(|next| next <= at(second))
            {
                history.record_relocation("o", "n", Quanta::new(1), at(second));
                relocation.push(second);
            }
        }
        assert_eq!(relocation, [0, 10, 30]);
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
