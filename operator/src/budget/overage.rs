//! Which pods a quota let in by mistake.
//!
//! A quota counts late, so that under a storm of creates and deletes more pods are admitted than fit. Those
//! are told from pods that were there before the budget's amounts came into force: a budget that was made smaller, or
//! made over running pods, takes nothing from anybody. A quota that is changed by hand, or gone for a while, lets pods
//! in by mistake too.

use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::ParsedSpec;
use super::plan::PodEviction;
use crate::cluster::pod_request::{JobRef, PodRequest, PriorityKind};
use crate::quanta::Quanta;

/// The reason of their Events.
pub(super) const EXCEEDED: &str = "GpuMemoryBudgetExceeded";

/// Pods created this long after the budget's amounts came into force were admitted by it. Both times are the API
/// server's, rounded to seconds; where there are several, their clocks are at most so far apart.
const CREATION_MARGIN: SignedDuration = SignedDuration::from_secs(5);

/// The pods to end so that the rest fits `terms`, in force since `since`: borrowed before guaranteed, the
/// newest first, none that is not needed. Pods of Jobs that would fail by it are passed over, for
/// they end anyway; but no borrowers.
pub fn excess_pods(
    parsed: &ParsedSpec,
    pods: &[(String, PodRequest)],
    since: Timestamp,
    ignores_disruption: impl Fn(&JobRef) -> bool,
) -> Vec<PodEviction> {
    let alive = || pods.iter().filter(|(_, request)| !request.terminating);
    let mut over = Overage::of(parsed, alive().map(|(_, request)| request));
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
    // A small one that came later is not needed where a larger one had to go as well.
    ended.retain(|(_, request, _)| {
        let needed = !over.fits(request);
        if !needed {
            over.add_pod(request);
        }
        needed
    });
    let evictions = ended.into_iter().map(|(name, request, why)| PodEviction {
        pod: name.clone(),
        uid: request.uid.clone(),
        reason: EXCEEDED,
        message: why.to_owned(),
    });
    evictions.collect()
}

/// What is asked for beyond each bound, by signed counts: below zero there is room.
struct Overage {
    guaranteed: i64,
    total: i64,
    managed: i64,
}

impl Overage {
    fn of<'a>(parsed: &ParsedSpec, requests: impl Iterator<Item = &'a PodRequest>) -> Self {
        let room = |most: Quanta| -most.count();
        let mut over = Self {
            guaranteed: room(parsed.guaranteed),
            total: room(parsed.limit),
            managed: room(parsed.managed),
        };
        requests.for_each(|request| over.add_pod(request));
        over
    }

    /// The bound that ending `demand` would ease.
    fn exceeded_bound(&self, request: &PodRequest) -> Option<&'static str> {
        let guaranteed = request.kind == PriorityKind::Guaranteed;
        let asks = |amount: Quanta| amount != Quanta::ZERO;
        if self.guaranteed > 0 && guaranteed && asks(request.device) {
            Some("it was admitted beyond the namespace's guarantee")
        } else if self.total > 0 && asks(request.device) {
            Some("it was admitted beyond the namespace's limit")
        } else if self.managed > 0 && asks(request.managed) {
            Some("it was admitted beyond the namespace's limit of managed memory")
        } else {
            None
        }
    }

    fn add_pod(&mut self, request: &PodRequest) {
        self.adjust(request, 1);
    }

    fn remove_pod(&mut self, request: &PodRequest) {
        self.adjust(request, -1);
    }

    fn adjust(&mut self, request: &PodRequest, sign: i64) {
        if request.kind == PriorityKind::Guaranteed {
            self.guaranteed += sign * request.device.count();
        }
        self.total += sign * request.device.count();
        self.managed += sign * request.managed.count();
    }

    /// Whether nothing that `demand` adds to goes beyond its bound with it.
    fn fits(&self, request: &PodRequest) -> bool {
        let fits = |over: i64, amount: Quanta| amount == Quanta::ZERO || over + amount.count() <= 0;
        let guaranteed =
            request.kind == PriorityKind::Borrowed || fits(self.guaranteed, request.device);
        guaranteed && fits(self.total, request.device) && fits(self.managed, request.managed)
    }
}
