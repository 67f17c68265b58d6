//! Remembers the planner's attempts, which the cluster does not show.
//!
//! A loss costs repeated requests and no second victim. Victims follow from the cluster's state,
//! except in the seconds in which a victim's memory is proven free.

mod evictions;
mod freeing;
mod relocations;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bursar_crds::gpu_node::{QuotaOverride, Reservation};

use super::pod::{Owner, Placement};
use super::snapshot::Snapshot;
use crate::quanta::Quanta;
use evictions::EvictionAttempt;
use freeing::Termination;
use relocations::{OwnerRelocations, RELOCATIONS_TTL};

pub(super) use evictions::EvictionOutcome;
pub(super) use relocations::RelocationRecord;

/// The time since the operator started.
pub type Uptime = Duration;

/// The desired labels of a node. A label without a value is removed.
pub(super) type NodeLabels = BTreeMap<String, Option<String>>;

/// How long a reservation may take. Its pod then gets no reservation for as long, doubled with each
/// further failure up to [`MAX_RESERVATION_BACKOFF`].
pub(super) const RESERVATION_TIMEOUT: Duration = Duration::from_secs(300);
const MAX_RESERVATION_BACKOFF: Duration = Duration::from_secs(3600);
/// Label writes per second, and the burst after a pause.
const LABEL_RATE: f64 = 20.0;

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

/// The failed reservations of one pod.
#[derive(Clone, Debug, Default)]
struct ReservationBackoff {
    /// The number of failures by GPU.
    failures: BTreeMap<String, u32>,
    /// The number of failures, each of which may be of several GPUs.
    attempts: u32,
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

impl ReservationBackoff {
    /// Counts failed reservations of some GPUs once. They stay visible for a while after their
    /// removal.
    fn record_failure(&mut self, gpus: &BTreeSet<&str>, now: Uptime) {
        if self.until > now {
            return;
        }
        for gpu in gpus {
            *self.failures.entry((*gpu).to_owned()).or_default() += 1;
        }
        let alone = RESERVATION_TIMEOUT * 2_u32.pow(self.attempts.min(8));
        self.attempts += 1;
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
        let mut failed: BTreeMap<&String, BTreeSet<&str>> = BTreeMap::new();
        for ((_, gpu, waiter), since) in &self.reserved_since {
            if now.saturating_sub(*since) >= RESERVATION_TIMEOUT {
                failed.entry(waiter).or_default().insert(gpu);
            }
        }
        for (waiter, gpus) in failed {
            let backoff = self.reservation_backoffs.entry(waiter.clone());
            backoff.or_default().record_failure(&gpus, now);
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

    /// Whether the same plan would result later while nothing changes.
    pub(super) fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.reserved_since.is_empty() && self.outdated_labels.is_empty()
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

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(second: u64) -> Uptime {
        Duration::from_secs(second)
    }

    #[test]
    fn failed_reservations_of_a_pod_blame_each_gpu_once() {
        let mut backoff = ReservationBackoff::default();
        let both = BTreeSet::from(["GPU-a", "GPU-b"]);
        backoff.record_failure(&both, at(300));
        backoff.record_failure(&both, at(301));
        assert_eq!(backoff.until, at(600));
        backoff.record_failure(&BTreeSet::from(["GPU-c"]), at(600));
        assert_eq!(backoff.until, at(1_200), "the second failure");
        assert!(backoff.failures.values().eq([&1, &1, &1]));
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
