//! Keeps the state of a budget between two reconciles.

mod results;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bursar_crds::conditions::budget as names;
use bursar_crds::{GpuMemoryBudget, GpuMemoryBudgetStatus};
use tokio::time::Instant;

use super::{AffectedPod, BudgetInputs};
use crate::cluster::facts::pod::PodFacts;

/// A refusal or a failure is forgotten when the eviction has not been requested again for this
/// long.
const REFUSAL_TTL: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct BudgetState {
    /// The last failed write, and how often it failed in a row.
    failed_write: Option<String>,
    repeated_failures: u32,
    /// Why the last reconcile failed to write the label or a quota.
    failed_step: Option<String>,
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
    /// The first and the last request for each pod's eviction that was refused or failed, by UID.
    ineffective_evictions: BTreeMap<String, (Instant, Instant)>,
    /// The pods whose Event about their eviction is published, by UID.
    announced: BTreeSet<String>,
    /// Whether the last eviction failed.
    last_eviction_failed: bool,
    /// When each fault was first observed, by the fault's id and the pod's UID.
    faults_since: BTreeMap<(String, String), Instant>,
    /// Since when the status has said that the budget is exceeded.
    exceeded_since: Option<Instant>,
}

impl BudgetState {
    /// Completes a budget and its inputs by what earlier reconciles have left. That is the last
    /// written status, if the watch has not delivered it yet, and how long faults and refusals have
    /// lasted. The inputs also get the failed step. `list` is the number of the list that `budget`
    /// is from.
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
        self.recall_evictions(inputs, now);
        inputs.exceeded_for = self.exceeded_for(is_exceeded(budget), now);
        inputs.failed_step.clone_from(&self.failed_step);
        Ok(())
    }

    /// Completes the inputs of evictions for faults.
    pub(super) fn recall_evictions(&mut self, inputs: &mut BudgetInputs, now: Instant) {
        inputs.jobs_ignoring_disruption = self.known_jobs(&inputs.pods);
        inputs.refused_for = lasting(&mut self.refused, now);
        inputs.evictions_ineffective_for = lasting(&mut self.ineffective_evictions, now);
        let affected = inputs.affected_pods.iter();
        let affected = affected.map(|affected| affected.request.api_uid.as_str());
        let pods = inputs.pods.iter().map(|(_, pod)| pod.api_uid.as_str());
        let present: BTreeSet<&str> = pods.chain(affected).collect();
        self.announced.retain(|uid| present.contains(uid.as_str()));
        self.update_fault_ages(&mut inputs.affected_pods, now);
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

    /// The policies of the Jobs of `pods`. All others are dropped.
    fn known_jobs(&mut self, pods: &[(String, Arc<PodFacts>)]) -> BTreeMap<String, bool> {
        let jobs = pods.iter().filter_map(|(_, pod)| pod.job());
        let uids: BTreeSet<_> = jobs.map(|job| &job.uid).collect();
        self.jobs.retain(|uid, _| uids.contains(uid));
        self.jobs.clone()
    }

    /// Whether the Event about the pod's eviction is published.
    pub(super) fn is_announced(&self, uid: &str) -> bool {
        self.announced.contains(uid)
    }

    /// Records that the Event about the pod's eviction is published.
    pub(super) fn record_announcement(&mut self, uid: &str) {
        self.announced.insert(uid.to_owned());
    }

    /// Sets how long each fault has been observed, and drops what is known of pods without a fault.
    fn update_fault_ages(&mut self, affected_pods: &mut [AffectedPod], now: Instant) {
        let before = std::mem::take(&mut self.faults_since);
        for affected in affected_pods {
            let name = (affected.fault.id.clone(), affected.request.api_uid.clone());
            let since = before.get(&name).copied().unwrap_or(now);
            affected.observed_for = now.saturating_duration_since(since);
            self.faults_since.insert(name, since);
        }
    }

    /// How long the status has said that the budget is exceeded, if it says so now.
    fn exceeded_for(&mut self, is_exceeded: bool, now: Instant) -> Option<Duration> {
        self.exceeded_since = is_exceeded.then(|| self.exceeded_since.unwrap_or(now));
        let since = self.exceeded_since?;
        Some(now.saturating_duration_since(since))
    }
}

/// How long the requests have been ineffective, by UID. Forgotten requests are dropped.
fn lasting(
    requests: &mut BTreeMap<String, (Instant, Instant)>,
    now: Instant,
) -> BTreeMap<String, Duration> {
    requests.retain(|_, (_, last)| now.saturating_duration_since(*last) < REFUSAL_TTL);
    let requests = requests.iter();
    requests
        .map(|(uid, (since, _))| (uid.clone(), now.saturating_duration_since(*since)))
        .collect()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::error::ApiError;
    use crate::api::write::EvictionResult;

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
        state.record_eviction("p", &Ok(EvictionResult::BlockedByPdb), at(0));
        state.record_eviction("p", &Ok(EvictionResult::BlockedByPdb), at(30));
        let refused = &mut state.refused;
        assert_eq!(lasting(refused, at(70))["p"], Duration::from_secs(70));
        assert!(lasting(refused, at(90)).is_empty());
        state.record_eviction("p", &Ok(EvictionResult::BlockedByPdb), at(500));
        let refused = &mut state.refused;
        assert_eq!(lasting(refused, at(501))["p"], Duration::from_secs(1));
    }

    #[test]
    fn unanswered_eviction_is_refused_and_ineffective() {
        let (mut state, start) = (BudgetState::default(), Instant::now());
        let at = |second| start + Duration::from_secs(second);
        let unanswered = Err(ApiError::TimedOut {
            verb: "write",
            object: "the eviction".to_owned(),
        });
        for second in (0..=60).step_by(10) {
            state.record_eviction("p", &unanswered, at(second));
        }
        let (refused, ineffective) = (&mut state.refused, &mut state.ineffective_evictions);
        assert_eq!(lasting(refused, at(61))["p"], Duration::from_secs(61));
        assert_eq!(lasting(ineffective, at(61))["p"], Duration::from_secs(61));
    }

    #[test]
    fn denied_eviction_is_ineffective_but_not_refused() {
        let (mut state, start) = (BudgetState::default(), Instant::now());
        let at = |second| start + Duration::from_secs(second);
        let failed = Err(ApiError::Forbidden {
            verb: "write",
            object: "the eviction".to_owned(),
            source: Box::new(kube::Error::LinesCodecMaxLineLengthExceeded),
        });
        state.record_eviction("p", &failed, at(0));
        state.record_eviction("p", &Ok(EvictionResult::BlockedByPdb), at(30));
        let (refused, ineffective) = (&mut state.refused, &mut state.ineffective_evictions);
        assert_eq!(lasting(refused, at(40))["p"], Duration::from_secs(10));
        assert_eq!(lasting(ineffective, at(40))["p"], Duration::from_secs(40));
    }
}
