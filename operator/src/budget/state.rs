//! What is remembered of a budget between two looks at it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bursar_crds::{GpuMemoryBudget, GpuMemoryBudgetStatus};
use tokio::time::Instant;

use super::Sufferer;
use crate::cluster::pod_request::{Demand, Owner};

/// The first wait after a failure, doubled from then on, and the longest.
const RETRY_FIRST: Duration = Duration::from_secs(1);
const RETRY_MOST: Duration = Duration::from_secs(30);

/// A pod that was ended is left to the API server for this long.
const ENDED: Duration = Duration::from_secs(30);

/// A disruption budget's refusal is forgotten when the pod has not been asked to end for this long.
const REFUSED: Duration = Duration::from_secs(60);

/// What is remembered of one budget.
#[derive(Debug, Default)]
pub(super) struct Memory {
    /// The write that failed last, and how often it did in a row.
    failing: Option<String>,
    repeated: u32,
    /// How many looks failed in a row.
    failures: u32,
    /// No write before, whatever changes.
    not_before: Option<Instant>,
    /// The last write: the list of budgets and the version that it was made over, and the status that came of it.
    written: Option<(u64, String, GpuMemoryBudgetStatus)>,
    /// The UIDs of pods whose end was asked for, and when.
    ended: BTreeMap<String, Instant>,
    /// The Jobs that were looked at, by UID: whether they let their pods be disrupted.
    jobs: BTreeMap<String, bool>,
    /// The UIDs of pods that a disruption budget keeps: since when, and when it said so last.
    refused: BTreeMap<String, (Instant, Instant)>,
    /// The last eviction failed.
    evicts_badly: bool,
    /// Since when each fault has been seen, by its name and the UID of the pod that suffers from it.
    faults: BTreeMap<(String, String), Instant>,
    /// Since when the status has said that the budget is exceeded.
    exceeded: Option<Instant>,
}

impl Memory {
    /// How long a budget whose last write failed has to wait still.
    pub(super) fn held_back(&self, now: Instant) -> Option<Duration> {
        let wait = self.not_before?.checked_duration_since(now);
        wait.filter(|wait| !wait.is_zero())
    }

    /// The status that was written last, where `budget` is still the version that it was written over.
    /// A look goes by it then, so that a watch that is late brings no change twice. After a new list, which may be the
    /// one after a restore of etcd, the same version may be of another object.
    pub(super) fn newer(
        &self,
        budget: &GpuMemoryBudget,
        list: u64,
    ) -> Option<&GpuMemoryBudgetStatus> {
        let (of_list, over, status) = self.written.as_ref()?;
        let is_same = *of_list == list && Some(over) == budget.metadata.resource_version.as_ref();
        is_same.then_some(status)
    }

    /// Whether the end of the pod `uid` was asked for lately, so that a watch that is late ends none twice.
    pub(super) fn has_ended(&mut self, uid: &str, now: Instant) -> bool {
        self.ended
            .retain(|_, at| now.saturating_duration_since(*at) < ENDED);
        self.ended.contains_key(uid)
    }

    /// The end of the pod `uid` was asked for.
    pub(super) fn ends(&mut self, uid: &str, now: Instant) {
        self.ended.insert(uid.to_owned(), now);
    }

    /// What is known of the Jobs of `pods`; others are forgotten.
    pub(super) fn jobs(&mut self, pods: &[(String, Demand)]) -> BTreeMap<String, bool> {
        let jobs: BTreeSet<_> = pods
            .iter()
            .filter_map(|(_, pod)| pod.job.as_ref())
            .collect();
        let uids: BTreeSet<_> = jobs.into_iter().map(|job| &job.uid).collect();
        self.jobs.retain(|uid, _| uids.contains(uid));
        self.jobs.clone()
    }

    /// A Job was looked at.
    pub(super) fn looked_at(&mut self, job: Owner, lets_go: bool) {
        self.jobs.insert(job.uid, lets_go);
    }

    /// A disruption budget keeps the pod `uid`.
    pub(super) fn is_refused(&mut self, uid: &str, now: Instant) {
        let refused = self.refused.entry(uid.to_owned()).or_insert((now, now));
        refused.1 = now;
    }

    /// For how long disruption budgets have kept pods, by UID.
    pub(super) fn refused(&mut self, now: Instant) -> BTreeMap<String, Duration> {
        self.refused
            .retain(|_, (_, last)| now.saturating_duration_since(*last) < REFUSED);
        let refused = self.refused.iter();
        refused
            .map(|(uid, (since, _))| (uid.clone(), now.saturating_duration_since(*since)))
            .collect()
    }

    /// Says of each fault for how long it has been seen; others are forgotten.
    pub(super) fn see_faults(&mut self, sufferers: &mut [Sufferer], now: Instant) {
        let before = std::mem::take(&mut self.faults);
        for one in sufferers {
            let name = (one.fault.id.clone(), one.demand.uid.clone());
            let since = before.get(&name).copied().unwrap_or(now);
            one.seen_for = now.saturating_duration_since(since);
            self.faults.insert(name, since);
        }
    }

    /// For how long the status has said that the budget is exceeded, where it says so.
    pub(super) fn exceeded_for(&mut self, is_exceeded: bool, now: Instant) -> Duration {
        self.exceeded = is_exceeded.then(|| self.exceeded.unwrap_or(now));
        let since = self.exceeded.unwrap_or(now);
        now.saturating_duration_since(since)
    }

    /// An eviction was answered, or failed. Says whether that is news.
    pub(super) fn evicts(&mut self, well: bool) -> bool {
        std::mem::replace(&mut self.evicts_badly, !well) == well
    }

    /// `status` was written over `budget`.
    pub(super) fn wrote(
        &mut self,
        budget: &GpuMemoryBudget,
        list: u64,
        status: GpuMemoryBudgetStatus,
    ) {
        let over = budget.metadata.resource_version.clone();
        self.written = over.map(|over| (list, over, status));
    }

    /// A look failed with the write of `what`. Says whether it is the first of a row, and how long to wait: longer
    /// with each time that it is the same write. Where it is another one, the last one has come to something.
    pub(super) fn failed(&mut self, what: &str, now: Instant) -> (bool, Duration) {
        if self.failing.as_deref() != Some(what) {
            self.failing = Some(what.to_owned());
            self.repeated = 0;
        }
        self.repeated = self.repeated.saturating_add(1);
        self.failures = self.failures.saturating_add(1);
        let wait = backoff(self.repeated);
        self.not_before = Some(now + wait);
        (self.failures == 1, wait)
    }

    /// A look did not fail. Says how many before it did.
    pub(super) fn succeeded(&mut self) -> u32 {
        self.not_before = None;
        self.failing = None;
        std::mem::take(&mut self.failures)
    }
}

fn backoff(failures: u32) -> Duration {
    let doublings = failures.saturating_sub(1).min(16);
    RETRY_FIRST.saturating_mul(1 << doublings).min(RETRY_MOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_after_failures_doubles_up_to_its_bound() {
        let waits: Vec<_> = (1..8).map(|failures| backoff(failures).as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 8, 16, 30, 30]);
        assert_eq!(backoff(u32::MAX), RETRY_MOST);
    }

    #[test]
    fn writes_that_fail_one_after_another_do_not_add_up() {
        let (mut memory, now) = (Memory::default(), Instant::now());
        for what in ["quota", "other quota", "label", "status"] {
            assert_eq!(memory.failed(what, now).1, RETRY_FIRST);
        }
        assert_eq!(memory.failed("status", now).1, RETRY_FIRST * 2);
        assert_eq!(memory.succeeded(), 5);
        assert_eq!(memory.failed("status", now), (true, RETRY_FIRST));
    }

    #[test]
    fn a_budget_is_held_back_until_its_time_or_a_success() {
        let (mut memory, now) = (Memory::default(), Instant::now());
        assert_eq!(memory.failed("quota", now), (true, RETRY_FIRST));
        assert_eq!(memory.held_back(now), Some(RETRY_FIRST));
        assert_eq!(memory.held_back(now + RETRY_FIRST), None);
        assert_eq!(memory.failed("quota", now), (false, RETRY_FIRST * 2));
        assert_eq!(memory.succeeded(), 2);
        assert_eq!(memory.held_back(now), None);
    }

    #[test]
    fn written_status_is_forgotten_after_a_new_list() {
        let budget: GpuMemoryBudget = serde_json::from_value(serde_json::json!({
            "metadata": { "name": "default", "resourceVersion": "7" },
            "spec": { "deviceMemory": { "guaranteed": "1Gi" } },
        }))
        .unwrap();
        let mut memory = Memory::default();
        memory.wrote(&budget, 1, GpuMemoryBudgetStatus::default());
        assert!(memory.newer(&budget, 1).is_some());
        assert!(memory.newer(&budget, 2).is_none());
    }

    #[test]
    fn a_refusal_lasts_from_the_first_one_and_only_while_the_pod_is_asked() {
        let (mut memory, start) = (Memory::default(), Instant::now());
        let at = |second| start + Duration::from_secs(second);
        memory.is_refused("p", at(0));
        memory.is_refused("p", at(30));
        assert_eq!(memory.refused(at(70))["p"], Duration::from_secs(70));
        assert!(memory.refused(at(90)).is_empty());
        memory.is_refused("p", at(500));
        assert_eq!(memory.refused(at(501))["p"], Duration::from_secs(1));
    }
}
