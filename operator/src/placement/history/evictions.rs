//! Remembers the attempts to evict pods.

use std::time::Duration;

use super::{History, Uptime};
use crate::api::error::ApiError;
use crate::api::write::{EvictionResult, is_obstructed};

/// How long a watch may take to show that a pod is terminating.
const WATCH_LAG: Duration = Duration::from_secs(10);

/// The delay before a refused or failed eviction is requested again.
const EVICTION_RETRY: Duration = Duration::from_secs(5);

/// A refusal is forgotten when no eviction has been requested for this long. The pod that needed
/// the room waits no longer.
const REFUSAL_TTL: Duration = Duration::from_secs(20);

/// The last attempt to evict a pod.
#[derive(Clone, Copy, Debug)]
pub(super) struct EvictionAttempt {
    pub(super) last: Uptime,
    /// Since when PodDisruptionBudgets have refused it, or the API server has not answered.
    pub(super) refused: Option<Uptime>,
    /// None if the API server gave no answer.
    pub(super) result: Option<EvictionResult>,
}

impl EvictionAttempt {
    /// Whether the API server accepted it.
    pub(super) fn is_accepted(&self) -> bool {
        self.result == Some(EvictionResult::Accepted)
    }
}

impl History {
    /// Whether the API server has accepted the eviction and the watch may not show it yet.
    pub(in super::super) fn eviction_accepted(&self, pod: &str, now: Uptime) -> bool {
        let attempt = self.evictions.get(pod);
        attempt.is_some_and(|attempt| {
            attempt.is_accepted() && now.saturating_sub(attempt.last) < WATCH_LAG
        })
    }

    /// Whether the eviction of a pod may be requested now.
    pub(in super::super) fn may_evict(&self, pod: &str, now: Uptime) -> bool {
        let attempt = self.evictions.get(pod);
        attempt.is_none_or(|attempt| now.saturating_sub(attempt.last) >= EVICTION_RETRY)
    }

    /// How long PodDisruptionBudgets have refused the eviction of a pod, or the API server has not
    /// answered it.
    pub(in super::super) fn refused_for(&self, pod: &str, now: Uptime) -> Option<Duration> {
        let attempt = self.evictions.get(pod)?;
        let forgotten = now.saturating_sub(attempt.last) >= REFUSAL_TTL;
        let since = attempt.refused.filter(|_| !forgotten)?;
        Some(now.saturating_sub(since))
    }

    /// Whether a PodDisruptionBudget refused the last eviction of a pod.
    pub(in super::super) fn was_blocked(&self, pod: &str) -> bool {
        let attempt = self.evictions.get(pod);
        attempt.and_then(|attempt| attempt.result) == Some(EvictionResult::BlockedByPdb)
    }

    /// Records the answer to an eviction request.
    pub(in super::super) fn record_eviction(
        &mut self,
        pod: &str,
        answer: &Result<EvictionResult, ApiError>,
        now: Uptime,
    ) {
        let refused = self.refused_for(pod, now);
        let refused = refused.map(|lasted| now.saturating_sub(lasted));
        let result = answer.as_ref().ok().copied();
        let attempt = EvictionAttempt {
            last: now,
            refused: match result {
                Some(EvictionResult::Accepted) => None,
                _ if is_obstructed(answer) => Some(refused.unwrap_or(now)),
                _ => refused,
            },
            result,
        };
        self.evictions.insert(pod.to_owned(), attempt);
    }

    /// Whether this operator has not tried to evict the pod before.
    pub(in super::super) fn is_first_eviction(&self, pod: &str) -> bool {
        !self.evictions.contains_key(pod)
    }
}
