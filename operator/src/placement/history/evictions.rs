//! Remembers the attempts to evict pods.

use std::time::Duration;

use super::{History, Uptime};

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
    /// Since when PodDisruptionBudgets have refused it.
    pub(super) refused: Option<Uptime>,
    /// The API server accepted it.
    pub(super) accepted: bool,
}

/// The result of an eviction request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum EvictionOutcome {
    /// The pod terminates or is gone.
    Accepted,
    /// A PodDisruptionBudget refused the eviction.
    BlockedByPdb,
    /// The request failed otherwise.
    Failed,
}

impl History {
    /// Whether the API server has accepted the eviction and the watch may not show it yet.
    pub(in super::super) fn eviction_accepted(&self, pod: &str, now: Uptime) -> bool {
        let attempt = self.evictions.get(pod);
        attempt
            .is_some_and(|attempt| attempt.accepted && now.saturating_sub(attempt.last) < WATCH_LAG)
    }

    /// Whether the eviction of a pod may be requested now.
    pub(in super::super) fn may_evict(&self, pod: &str, now: Uptime) -> bool {
        let attempt = self.evictions.get(pod);
        attempt.is_none_or(|attempt| now.saturating_sub(attempt.last) >= EVICTION_RETRY)
    }

    /// How long PodDisruptionBudgets have refused the eviction of a pod.
    pub(in super::super) fn refused_for(&self, pod: &str, now: Uptime) -> Option<Duration> {
        let attempt = self.evictions.get(pod)?;
        let forgotten = now.saturating_sub(attempt.last) >= REFUSAL_TTL;
        let since = attempt.refused.filter(|_| !forgotten)?;
        Some(now.saturating_sub(since))
    }

    /// Whether PodDisruptionBudgets refused the last eviction of a pod.
    pub(in super::super) fn was_refused(&self, pod: &str) -> bool {
        let attempt = self.evictions.get(pod);
        attempt.is_some_and(|attempt| attempt.refused.is_some())
    }

    /// Records an eviction attempt.
    pub(in super::super) fn record_eviction(
        &mut self,
        pod: &str,
        outcome: EvictionOutcome,
        now: Uptime,
    ) {
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

    /// Whether this operator has not tried to evict the pod before.
    pub(in super::super) fn is_first_eviction(&self, pod: &str) -> bool {
        !self.evictions.contains_key(pod)
    }
}
