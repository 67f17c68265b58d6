//! Which pods a quota let in by mistake.
//!
//! A quota counts late, so that under a storm of creates and deletes more pods are admitted than fit. Those
//! are told from pods that were there before the budget's amounts came into force: a budget that was made smaller, or
//! made over running pods, takes nothing from anybody. A quota that is changed by hand, or gone for a while, lets pods
//! in by mistake too.

use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::Terms;
use super::plan::Leaver;
use crate::cluster::pod_request::{Class, Demand, Owner};
use crate::quanta::Quanta;

/// The reason of their Events.
pub(super) const EXCEEDED: &str = "GpuMemoryBudgetExceeded";

/// Pods created this long after the budget's amounts came into force were admitted by it. Both times are the API
/// server's, rounded to seconds; where there are several, their clocks are at most so far apart.
const SETTLED: SignedDuration = SignedDuration::from_secs(5);

/// The pods to end so that the rest fits `terms`, in force since `since`: borrowed before guaranteed, the
/// newest first, none that is not needed. Pods of Jobs that would fail by it are passed over, for
/// they end anyway; but no borrowers.
pub fn surplus(
    terms: &Terms,
    pods: &[(String, Demand)],
    since: Timestamp,
    lets_go: impl Fn(&Owner) -> bool,
) -> Vec<Leaver> {
    let alive = || pods.iter().filter(|(_, demand)| !demand.ending);
    let mut over = Over::of(terms, alive().map(|(_, demand)| demand));
    let mut candidates: Vec<_> = alive()
        .filter(|(_, demand)| demand.created > since + SETTLED)
        .filter(|(_, demand)| demand.asked_job().is_none_or(&lets_go))
        .collect();
    candidates.sort_by_key(|(name, demand)| {
        let class = demand.class == Class::Guaranteed;
        (class, std::cmp::Reverse(demand.created), name)
    });
    let mut ended = Vec::new();
    for (name, demand) in candidates {
        if let Some(why) = over.eased_by(demand) {
            over.without(demand);
            ended.push((name, demand, why));
        }
    }
    // A small one that came later is not needed where a larger one had to go as well.
    ended.retain(|(_, demand, _)| {
        let needed = !over.fits_with(demand);
        if !needed {
            over.with(demand);
        }
        needed
    });
    let surplus = ended.into_iter().map(|(name, demand, why)| Leaver {
        pod: name.clone(),
        uid: demand.uid.clone(),
        reason: EXCEEDED,
        why: why.to_owned(),
    });
    surplus.collect()
}

/// What is asked for beyond each bound, by signed counts: below zero there is room.
struct Over {
    guaranteed: i64,
    total: i64,
    managed: i64,
}

impl Over {
    fn of<'a>(terms: &Terms, demands: impl Iterator<Item = &'a Demand>) -> Self {
        let room = |most: Quanta| -most.count();
        let mut over = Self {
            guaranteed: room(terms.guaranteed),
            total: room(terms.limit),
            managed: room(terms.managed),
        };
        demands.for_each(|demand| over.with(demand));
        over
    }

    /// The bound that ending `demand` would ease.
    fn eased_by(&self, demand: &Demand) -> Option<&'static str> {
        let guaranteed = demand.class == Class::Guaranteed;
        let asks = |amount: Quanta| amount != Quanta::ZERO;
        if self.guaranteed > 0 && guaranteed && asks(demand.device) {
            Some("it was admitted beyond the namespace's guarantee")
        } else if self.total > 0 && asks(demand.device) {
            Some("it was admitted beyond the namespace's limit")
        } else if self.managed > 0 && asks(demand.managed) {
            Some("it was admitted beyond the namespace's limit of managed memory")
        } else {
            None
        }
    }

    fn with(&mut self, demand: &Demand) {
        self.add(demand, 1);
    }

    fn without(&mut self, demand: &Demand) {
        self.add(demand, -1);
    }

    fn add(&mut self, demand: &Demand, sign: i64) {
        if demand.class == Class::Guaranteed {
            self.guaranteed += sign * demand.device.count();
        }
        self.total += sign * demand.device.count();
        self.managed += sign * demand.managed.count();
    }

    /// Whether nothing that `demand` adds to goes beyond its bound with it.
    fn fits_with(&self, demand: &Demand) -> bool {
        let fits = |over: i64, amount: Quanta| amount == Quanta::ZERO || over + amount.count() <= 0;
        let guaranteed = demand.class == Class::Borrowed || fits(self.guaranteed, demand.device);
        guaranteed && fits(self.total, demand.device) && fits(self.managed, demand.managed)
    }
}
