//! Records the results of a budget's steps, for later reconciles.

use std::collections::BTreeMap;
use std::time::Duration;

use bursar_crds::{GpuMemoryBudget, GpuMemoryBudgetStatus};
use tokio::time::Instant;
use tracing::{debug, warn};

use super::BudgetState;
use crate::api::error::ApiError;
use crate::api::write::{EvictionResult, is_obstructed};
use crate::cluster::facts::pod::JobRef;
use crate::error::error_chain;

/// The bounds of the back-off, which doubles with each failure.
const MIN_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(30);

/// The longest text of a failed step, which may quote an admission webhook.
const MAX_FAILURE_LENGTH: usize = 512;

/// How long a requested eviction is not repeated.
const EVICTION_TTL: Duration = Duration::from_secs(30);

impl BudgetState {
    /// Whether the pod's eviction was requested recently, so that a late watch causes no second
    /// one.
    pub(in crate::budget) fn was_evicted(&mut self, uid: &str, now: Instant) -> bool {
        self.evicted
            .retain(|_, at| now.saturating_duration_since(*at) < EVICTION_TTL);
        self.evicted.contains_key(uid)
    }

    /// Records the answer to the request for a pod's eviction, and logs the first failure of a row.
    /// The operator evicts the pod again later, unless the API server accepted the eviction.
    pub(in crate::budget) fn record_eviction(
        &mut self,
        uid: &str,
        answer: &Result<EvictionResult, ApiError>,
        now: Instant,
    ) {
        let failed_before = std::mem::replace(&mut self.last_eviction_failed, answer.is_err());
        if is_obstructed(answer) {
            record_request(&mut self.refused, uid, now);
        }
        match answer {
            Ok(EvictionResult::Accepted) => drop(self.evicted.insert(uid.to_owned(), now)),
            Ok(EvictionResult::BlockedByPdb) => {
                record_request(&mut self.ineffective_evictions, uid, now);
            }
            Err(error) => {
                record_request(&mut self.ineffective_evictions, uid, now);
                if !failed_before {
                    warn!(error = %error_chain(error), "failed to evict a pod; retrying");
                }
            }
        }
    }

    /// Records whether a Job ignores disruption. After a failure the operator reads the Job again.
    pub(in crate::budget) fn record_job(&mut self, job: JobRef, answer: Result<bool, ApiError>) {
        match answer {
            Ok(ignores_disruption) => drop(self.jobs.insert(job.uid, ignores_disruption)),
            Err(error) => debug!(error = %error_chain(&error), "failed to read a Job; retrying"),
        }
    }

    /// Records that `status` replaced the status of `budget`.
    pub(in crate::budget) fn record_status(
        &mut self,
        budget: &GpuMemoryBudget,
        list: u64,
        status: GpuMemoryBudgetStatus,
    ) {
        let over = budget.metadata.resource_version.clone();
        self.last_status = over.map(|over| (list, over, status));
    }

    /// Records why a reconcile failed to write the label or a quota, or that it did not fail.
    pub(in crate::budget) fn record_failed_step(&mut self, failure: Option<&ApiError>) {
        self.failed_step = failure.map(|error| {
            let mut text = error_chain(error);
            text.truncate(text.floor_char_boundary(MAX_FAILURE_LENGTH));
            text
        });
    }

    /// Records a failed write. Returns whether it is the first of a row, and the back-off.
    ///
    /// The back-off grows only while the same write fails. Another failing write shows that the
    /// former one succeeded.
    pub(in crate::budget) fn record_failure(
        &mut self,
        write: &str,
        now: Instant,
    ) -> (bool, Duration) {
        if self.failed_write.as_deref() != Some(write) {
            self.failed_write = Some(write.to_owned());
            self.repeated_failures = 0;
        }
        self.repeated_failures = self.repeated_failures.saturating_add(1);
        self.failures = self.failures.saturating_add(1);
        let wait = backoff(self.repeated_failures);
        self.not_before = Some(now + wait);
        (self.failures == 1, wait)
    }

    /// Records a success. Returns how many reconciles failed before it.
    pub(in crate::budget) fn record_success(&mut self) -> u32 {
        self.not_before = None;
        self.failed_write = None;
        std::mem::take(&mut self.failures)
    }
}

fn record_request(requests: &mut BTreeMap<String, (Instant, Instant)>, uid: &str, now: Instant) {
    requests.entry(uid.to_owned()).or_insert((now, now)).1 = now;
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
        for write in ["quota", "other quota", "label", "status"] {
            assert_eq!(state.record_failure(write, now).1, MIN_BACKOFF);
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
}
