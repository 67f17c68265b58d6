//! Selects the pods that a late quota admitted beyond the budget.
//!
//! The quota controller counts late. Under many creates and deletes the API server admits more pods
//! than fit. The same happens while a quota is edited by hand or missing. Pods from before the
//! amounts came into force are not selected: a new or lowered budget evicts no running pod.

use std::sync::Arc;

use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::ParsedSpec;
use super::plan::PodEviction;
use crate::cluster::facts::pod::{JobRef, PodFacts, PriorityKind};
use crate::quanta::Quanta;

/// The reason of the Events.
pub(super) const EXCEEDED: &str = "GpuMemoryBudgetExceeded";

/// A pod created this long after the amounts came into force was admitted under them. The API
/// server rounds both times to seconds, and the clocks of several API servers differ by less.
const CREATION_MARGIN: SignedDuration = SignedDuration::from_secs(5);

/// The pods to evict so that the rest fits `parsed`, in force since `since`.
///
/// Borrowed pods come before guaranteed pods and newer pods before older ones. No pod is selected
/// needlessly. Guaranteed pods of a Job that would fail are skipped, because they end by
/// themselves.
pub fn excess_pods(
    parsed: &ParsedSpec,
    pods: &[(String, Arc<PodFacts>)],
    since: Timestamp,
    ignores_disruption: impl Fn(&JobRef) -> bool,
) -> Vec<PodEviction> {
    let alive = || pods.iter().filter(|(_, request)| !request.terminating);
    let mut over = Overage::of(parsed, alive().map(|(_, request)| &**request));
    let mut candidates: Vec<_> = alive()
        .filter(|(_, request)| request.created > since + CREATION_MARGIN)
        .filter(|(_, request)| request.job_if_guaranteed().is_none_or(&ignores_disruption))
        .collect();
    candidates.sort_by_key(|(name, request)| {
        let class = request.kind == PriorityKind::Guaranteed;
        (class, std::cmp::Reverse(request.created), name)
    });
    let mut ended = Vec::new();
    for (name, request) in candidates {
        if let Some(why) = over.exceeded_bound(request) {
            over.remove_pod(request);
            ended.push((name, request, why));
        }
    }
    // A small pod selected earlier is not needed when a larger pod was selected as well.
    ended.retain(|(_, request, _)| {
        let needed = !over.fits(request);
        if !needed {
            over.add_pod(request);
        }
        needed
    });
    let evictions = ended.into_iter().map(|(name, request, why)| PodEviction {
        pod: name.clone(),
        uid: request.api_uid.clone(),
        reason: EXCEEDED,
        message: why.to_owned(),
    });
    evictions.collect()
}

/// The excess over each bound. Negative values are room.
struct Overage {
    guaranteed: i64,
    total: i64,
    managed: i64,
}

impl Overage {
    fn of<'a>(parsed: &ParsedSpec, requests: impl Iterator<Item = &'a PodFacts>) -> Self {
        let room = |most: Quanta| -most.count();
        let mut over = Self {
            guaranteed: room(parsed.guaranteed),
            total: room(parsed.limit),
            managed: room(parsed.managed),
        };
        requests.for_each(|request| over.add_pod(request));
        over
    }

    /// The exceeded bound that the eviction of this pod would ease.
    fn exceeded_bound(&self, request: &PodFacts) -> Option<&'static str> {
        let guaranteed = request.kind == PriorityKind::Guaranteed;
        let is_requested = |amount: Quanta| amount != Quanta::ZERO;
        if self.guaranteed > 0 && guaranteed && is_requested(request.device) {
            Some("the pod was admitted beyond the namespace's guarantee")
        } else if self.total > 0 && is_requested(request.device) {
            Some("the pod was admitted beyond the namespace's limit")
        } else if self.managed > 0 && is_requested(request.managed) {
            Some("the pod was admitted beyond the namespace's limit of managed memory")
        } else {
            None
        }
    }

    fn add_pod(&mut self, request: &PodFacts) {
        self.adjust(request, 1);
    }

    fn remove_pod(&mut self, request: &PodFacts) {
        self.adjust(request, -1);
    }

    fn adjust(&mut self, request: &PodFacts, sign: i64) {
        if request.kind == PriorityKind::Guaranteed {
            self.guaranteed += sign * request.device.count();
        }
        self.total += sign * request.device.count();
        self.managed += sign * request.managed.count();
    }

    /// Whether the pod fits every bound that its request adds to.
    fn fits(&self, request: &PodFacts) -> bool {
        let fits = |over: i64, amount: Quanta| amount == Quanta::ZERO || over + amount.count() <= 0;
        let guaranteed =
            request.kind == PriorityKind::Borrowed || fits(self.guaranteed, request.device);
        guaranteed && fits(self.total, request.device) && fits(self.managed, request.managed)
    }
}
