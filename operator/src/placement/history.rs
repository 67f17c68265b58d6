//! Remembers the planner's attempts, which the cluster does not show.
//!
//! A loss costs repeated requests and no second victim. Victims follow from the cluster's state,
//! except in the seconds in which a victim's memory is proven free.

mod evictions;
mod freeing;
mod relocations;
mod reservations;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bursar_crds::gpu_node::{QuotaOverride, Reservation};

use crate::cluster::facts::pod::{Owner, Placement};
use crate::cluster::facts::snapshot::Snapshot;
use crate::quanta::Quanta;
use evictions::EvictionAttempt;
use freeing::Termination;
use relocations::{OwnerRelocations, RELOCATIONS_TTL};
use reservations::ReservationBackoff;

pub(super) use relocations::RelocationRecord;
pub(super) use reservations::RESERVATION_TIMEOUT;

/// The time since the operator started.
pub type Uptime = Duration;

/// The desired labels of a node. A label without a value is removed.
pub(super) type NodeLabels = BTreeMap<String, Option<String>>;

/// Label writes per second, and the burst after a pause.
const LABEL_RATE: f64 = 20.0;

/// The attempts of this operator.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// The pending pods.
    pending: BTreeMap<String, PendingSince>,
    /// When each reservation was first observed, by node, GPU and pod.
    reserved_since: BTreeMap<(String, String, String), Uptime>,
    /// The pods whose reservations failed.
    reservation_backoffs: BTreeMap<String, ReservationBackoff>,
    /// The memory of pods on contested GPUs, and when it was last observed. By node and GPU, then
    /// by pod.
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
    /// How many quota overrides the last apply omitted on each node, for lack of room.
    pub(super) omitted_quotas: BTreeMap<String, usize>,
    /// Since when a node's labels have been out of date.
    pub(super) outdated_labels: BTreeMap<String, Uptime>,
    /// The labels last written to such a node, and when.
    pub(super) written_labels: BTreeMap<String, (NodeLabels, Uptime)>,
    /// The tokens for label writes, and when they were last refilled.
    label_tokens: (f64, Uptime),
}

/// Since when a pod has been pending.
#[derive(Clone, Copy, Debug)]
struct PendingSince {
    since: Uptime,
    /// When the planner last considered the pod.
    last_considered: Option<Uptime>,
}

impl History {
    /// Updates the history from a snapshot, and drops what is gone.
    pub(super) fn observe(&mut self, snapshot: &Snapshot<'_>, now: Uptime) {
        self.restore(snapshot, now);
        self.observe_pending(snapshot, now);
        self.observe_reservations(snapshot, now);
        self.observe_holders(snapshot, now);
        self.observe_terminations(snapshot, now);
        self.forget_gone(snapshot, now);
    }

    fn observe_pending(&mut self, snapshot: &Snapshot<'_>, now: Uptime) {
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
            .map(|container| container.pod.as_str())
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
    }

    /// Drops what concerns pods, Jobs and nodes that are gone, and what is too old.
    fn forget_gone(&mut self, snapshot: &Snapshot<'_>, now: Uptime) {
        let has_pod = |pod: &String| snapshot.pods.contains_key(pod.as_str());
        self.reservation_backoffs.retain(|pod, _| has_pod(pod));
        self.evictions.retain(|pod, _| has_pod(pod));
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
        let has_node = |node: &String| snapshot.gpu_nodes.contains_key(node.as_str());
        self.reservations.retain(|node, _| has_node(node));
        self.quotas.retain(|node, _| has_node(node));
        self.omitted_quotas.retain(|node, _| has_node(node));
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
    use crate::api::error::ApiError;
    use crate::api::write::EvictionResult;

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
        let failed = Err(ApiError::TimedOut {
            verb: "write",
            object: "the eviction".to_owned(),
        });
        assert_eq!(history.refused_for("p", at(1)), None);
        history.record_eviction("p", &Ok(EvictionResult::BlockedByPdb), at(1));
        history.record_eviction("p", &failed, at(7));
        history.record_eviction("p", &Ok(EvictionResult::BlockedByPdb), at(13));
        assert_eq!(history.refused_for("p", at(21)), Some(at(20)));
        assert!(!history.may_evict("p", at(14)) && history.may_evict("p", at(18)));
        history.record_eviction("p", &Ok(EvictionResult::Accepted), at(22));
        assert!(history.eviction_accepted("p", at(23)));
        assert_eq!(history.refused_for("p", at(23)), None);
    }

    #[test]
    fn unanswered_evictions_count_as_refusals() {
        let mut history = History::default();
        for second in (0..=60).step_by(10) {
            let unanswered = Err(ApiError::TimedOut {
                verb: "write",
                object: "the eviction".to_owned(),
            });
            history.record_eviction("p", &unanswered, at(second));
        }
        assert_eq!(history.refused_for("p", at(61)), Some(at(61)));
        // A relocation without an answer is tried again.
        assert!(!history.was_blocked("p"));
    }

    #[test]
    fn refusal_for_one_pod_expires_before_a_later_one() {
        let mut history = History::default();
        history.record_eviction("p", &Ok(EvictionResult::BlockedByPdb), at(1));
        assert_eq!(history.refused_for("p", at(20)), Some(at(19)));
        assert_eq!(history.refused_for("p", at(7200)), None);
        assert!(history.was_blocked("p"));
        history.record_eviction("p", &Ok(EvictionResult::BlockedByPdb), at(7200));
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
