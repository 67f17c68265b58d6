//! Keeps the state of a budget between two reconciles.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bursar_crds::conditions::budget as names;
use bursar_crds::{GpuMemoryBudget, GpuMemoryBudgetStatus};
use tokio::time::Instant;

use super::{AffectedPod, BudgetInputs};
use crate::cluster::pod_request::{JobRef, PodRequest};

/// The bounds of the back-off, which doubles with each failure.
const MIN_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(30);

/// How long a requested eviction is not repeated.
const EVICTION_TTL: Duration = Duration::from_secs(30);

/// A refusal is forgotten when the eviction has not been requested again for this long.
const REFUSAL_TTL: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct BudgetState {
    /// The last failed write, and how often it failed in a row.
    failed_write: Option<String>,
    repeated_failures: u32,
    /// The number of failed reconciles in a row.
    failures: u32,
    /// The end of the back-off.
    not_before: Option<Instant>,
    /// The last written status, with the list number and the resource version that it replaced.
    last_status: Option<(u64, String, GpuMemoryBudgetStatus)>,
    /// When the eviction of each pod was requested, by UID.
    evicted: BTreeMap<String, Instant>,
    /// Whether each Job read so far ignores the disruption of its pods, by UID.
    jobs: BTreeMap<String, bool>,
    /// The first and the last refusal of each pod's eviction, by UID.
    refused: BTreeMap<String, (Instant, Instant)>,
    /// Whether the last eviction failed.
    last_eviction_failed: bool,
    /// When each fault was first seen, by the fault's id and the pod's UID.
    faults_since: BTreeMap<(String, String), Instant>,
    /// Since when the status has said that the budget is exceeded.
    exceeded_since: Option<Instant>,
}

impl BudgetState {
    /// Completes a budget and its inputs by what earlier reconciles have left: the last written
    /// status, if the watch has not delivered it yet, and how long faults and refusals have lasted.
    /// `list` is the number of the list that `budget` is from.
    ///
    /// # Errors
    /// The rest of the back-off after a failed write.
    pub(super) fn recall(
        &mut self,
        budget: &mut GpuMemoryBudget,
        inputs: &mut BudgetInputs,
        list: u64,
        now: Instant,
    ) -> Result<(), Duration> {
        if let Some(wait) = self.backoff_remaining(now) {
            return Err(wait);
        }
        if let Some(status) = self.last_written_status(budget, list) {
            budget.status = Some(status.clone());
        }
        inputs.jobs_ignoring_disruption = self.known_jobs(&inputs.pods);
        inputs.refused_for = self.refused_for(now);
        self.update_fault_ages(&mut inputs.affected_pods, now);
        inputs.exceeded_for = self.exceeded_for(is_exceeded(budget), now);
        Ok(())
    }

    /// The rest of the back-off after a failed write.
    fn backoff_remaining(&self, now: Instant) -> Option<Duration> {
        let wait = self.not_before?.checked_duration_since(now);
        wait.filter(|wait| !wait.is_zero())
    }

    /// The last written status, if `budget` is still the version that it replaced.
    ///
    /// A reconcile uses it, so that a late watch causes no second write. It does not survive a new
    /// list: after a restore of etcd the same version may belong to another object.
    fn last_written_status(
        &self,
        budget: &GpuMemoryBudget,
        list: u64,
    ) -> Option<&GpuMemoryBudgetStatus> {
        let (of_list, over, status) = self.last_status.as_ref()?;
        let is_same = *of_list == list && Some(over) == budget.metadata.resource_version.as_ref();
        is_same.then_some(status)
    }

    /// Whether the pod's eviction was requested recently, so that a late watch causes no second
    /// one.
    pub(super) fn was_evicted(&mut self, uid: &str, now: Instant) -> bool {
        self.evicted
            .retain(|_, at| now.saturating_duration_since(*at) < EVICTION_TTL);
        self.evicted.contains_key(uid)
    }

    /// Records the request for a pod's eviction.
    pub(super) fn record_eviction(&mut self, uid: &str, now: Instant) {
        self.evicted.insert(uid.to_owned(), now);
    }

    /// The policies of the Jobs of `pods`. All others are dropped.
    fn known_jobs(&mut self, pods: &[(String, PodRequest)]) -> BTreeMap<String, bool> {
        let jobs: BTreeSet<_> = pods
            .iter()
            .filter_map(|(_, pod)| pod.job.as_ref())
            .collect();
        let uids: BTreeSet<_> = jobs.into_iter().map(|job| &job.uid).collect();
        self.jobs.retain(|uid, _| uids.contains(uid));
        self.jobs.clone()
    }

    /// Records whether a Job ignores disruption.
    pub(super) fn record_job(&mut self, job: JobRef, ignores_disruption: bool) {
        self.jobs.insert(job.uid, ignores_disruption);
    }

    /// Records that PodDisruptionBudgets refused a pod's eviction.
    pub(super) fn record_refusal(&mut self, uid: &str, now: Instant) {
        let refused = self.refused.entry(uid.to_owned()).or_insert((now, now));
        refused.1 = now;
    }

    /// How long PodDisruptionBudgets have refused evictions, by UID.
    fn refused_for(&mut self, now: Instant) -> BTreeMap<String, Duration> {
        self.refused
            .retain(|_, (_, last)| now.saturating_duration_since(*last) < REFUSAL_TTL);
        let refused = self.refused.iter();
        refused
            .map(|(uid, (since, _))| (uid.clone(), now.saturating_duration_since(*since)))
            .collect()
    }

    /// Sets how long each fault has been seen, and drops faults that are gone.
    fn update_fault_ages(&mut self, affected_pods: &mut [AffectedPod], now: Instant) {
        let before = std::mem::take(&mut self.faults_since);
        for one in affected_pods {
            let name = (one.fault.id.clone(), one.request.uid.clone());
            let since = before.get(&name).copied().unwrap_or(now);
            one.observed_for = now.saturating_duration_since(since);
            self.faults_since.insert(name, since);
        }
    }

    /// How long the status has said that the budget is exceeded, if it says so now.
    fn exceeded_for(&mut self, is_exceeded: bool, now: Instant) -> Option<Duration> {
        self.exceeded_since = is_exceeded.then(|| self.exceeded_since.unwrap_or(now));
        let since = self.exceeded_since?;
        Some(now.saturating_duration_since(since))
    }

    /// Records whether an eviction succeeded. Returns whether that differs from the last one.
    pub(super) fn eviction_outcome_changed(&mut self, succeeded: bool) -> bool {
        std::mem::replace(&mut self.last_eviction_failed, !succeeded) == succeeded
    }

    /// Records that `status` replaced the status of `budget`.
    pub(super) fn record_status(
        &mut self,
        budget: &GpuMemoryBudget,
        list: u64,
        status: GpuMemoryBudgetStatus,
    ) {
        let over = budget.metadata.resource_version.clone();
        self.last_status = over.map(|over| (list, over, status));
    }

    /// Records a failed write. Returns whether it is the first of a row, and the back-off.
    ///
    /// The back-off grows only while the same write fails. Another failing write shows that the
    /// former one succeeded.
    pub(super) fn record_failure(&mut self, what: &str, now: Instant) -> (bool, Duration) {
        if self.failed_write.as_deref() != Some(what) {
            self.failed_write = Some(what.to_owned());
            self.repeated_failures = 0;
        }
        self.repeated_failures = self.repeated_failures.saturating_add(1);
        self.failures = self.failures.saturating_add(1);
        let wait = backoff(self.repeated_failures);
        self.not_before = Some(now + wait);
        (self.failures == 1, wait)
    }

    /// Records a success. Returns how many reconciles failed before it.
    pub(super) fn record_success(&mut self) -> u32 {
        self.not_before = None;
        self.failed_write = None;
        std::mem::take(&mut self.failures)
    }
}

/// Whether the status says that the budget of today's spec is exceeded.
pub fn is_exceeded(budget: &GpuMemoryBudget) -> bool {
    let status = budget.status.as_ref();
    let mut conditions = status.into_iter().flat_map(|status| &status.conditions);
    conditions.any(|condition| {
        condition.type_ == names::EXCEEDED
            && condition.status == "True"
            && condition.observed_generation == budget.metadata.generation
    })
}

fn backoff(failures: u32) -> Duration {
    let doublings = failures.saturating_sub(1).min(16);
    MIN_BACKOFF.saturating_mul(1 << doublings).min(MAX_BACKOFF)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_up_to_its_bound() {
        let waits: Vec<_> = (1..8).map(|failures| backoff(failures).as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 8, 16, 30, 30]);
        assert_eq!(backoff(u32::MAX), MAX_BACKOFF);
    }

    #[test]
    fn backoff_restarts_when_another_write_fails() {
        let (mut state, now) = (BudgetState::default(), Instant::now());
        for what in ["quota", "other quota", "label", "status"] {
            assert_eq!(state.record_failure(what, now).1, MIN_BACKOFF);
        }
        assert_eq!(state.record_failure("status", now).1, MIN_BACKOFF * 2);
        assert_eq!(state.record_success(), 5);
        assert_eq!(state.record_failure("status", now), (true, MIN_BACKOFF));
    }

    #[test]
    fn budget_waits_until_backoff_ends_or_success() {
        let (mut state, now) = (BudgetState::default(), Instant::now());
        assert_eq!(state.record_failure("quota", now), (true, MIN_BACKOFF));
        assert_eq!(state.backoff_remaining(now), Some(MIN_BACKOFF));
        assert_eq!(state.backoff_remaining(now + MIN_BACKOFF), None);
        assert_eq!(state.record_failure("quota", now), (false, MIN_BACKOFF * 2));
        assert_eq!(state.record_success(), 2);
        assert_eq!(state.backoff_remaining(now), None);
    }

    #[test]
    fn written_status_is_forgotten_after_a_new_list() {
        let budget: GpuMemoryBudget = serde_json::from_value(serde_json::json!({
            "metadata": { "name": "default", "resourceVersion": "7" },
            "spec": { "deviceMemory": { "guaranteed": "1Gi" } },
        }))
        .unwrap();
        let mut state = BudgetState::default();
        state.record_status(&budget, 1, GpuMemoryBudgetStatus::default());
        assert!(state.last_written_status(&budget, 1).is_some());
        assert!(state.last_written_status(&budget, 2).is_none());
    }

    #[test]
    fn refusal_lasts_from_the_first_while_eviction_is_retried() {
        let (mut state, start) = (BudgetState::default(), Instant::now());
        let at = |second| start + Duration::from_secs(second);
        state.record_refusal("p", at(0));
        state.record_refusal("p", at(30));
        assert_eq!(state.refused_for(at(70))["p"], Duration::from_secs(70));
        assert!(state.refused_for(at(90)).is_empty());
        state.record_refusal("p", at(500));
        assert_eq!(state.refused_for(at(501))["p"], Duration::from_secs(1));
    }
}
