//! Remembers whose memory is about to become free.

use std::collections::BTreeSet;
use std::time::Duration;

use super::evictions::EvictionAttempt;
use super::{History, RESERVATION_TIMEOUT, Uptime};
use crate::cluster::facts::node::Gpu;
use crate::cluster::facts::snapshot::Snapshot;
use crate::quanta::Quanta;

/// How long the memory of a pod that is gone may take to become free. Memory that is held for
/// longer has another holder.
const FREEING_TIME: Duration = Duration::from_secs(5);

/// How long a terminating pod may take: twice the default grace period. A victim may take as long
/// as the reservation that it was evicted for, so that no second victim is chosen.
const TERMINATION_TIME: Duration = Duration::from_secs(60);

/// A pod whose memory is about to become free.
#[derive(Clone, Debug)]
pub(super) struct Termination {
    /// The pod object is gone, and only the node still reports the pod.
    ended: bool,
    since: Uptime,
    /// The GPU is reserved. This or an earlier operator may have evicted the pod for that
    /// reservation.
    gpu_reserved: bool,
}

impl History {
    pub(super) fn observe_holders(&mut self, snapshot: &Snapshot<'_>, now: Uptime) {
        let concerned = snapshot
            .gpu_nodes
            .iter()
            .filter(|(_, gpus)| !gpus.pending.is_empty() || !gpus.reservations.is_empty());
        for (node, gpu) in
            concerned.flat_map(|(node, gpus)| gpus.gpus.iter().map(move |gpu| (node, gpu)))
        {
            let key = ((*node).to_owned(), gpu.uuid.clone());
            let holders = self.holders.entry(key).or_default();
            let pods = gpu.pods.iter();
            holders.extend(pods.map(|(pod, quanta)| (pod.clone(), (*quanta, now))));
        }
        self.holders.retain(|_, holders| {
            holders.retain(|_, (_, observed)| now.saturating_sub(*observed) < FREEING_TIME);
            !holders.is_empty()
        });
    }

    pub(super) fn observe_terminations(&mut self, snapshot: &Snapshot<'_>, now: Uptime) {
        let ending = snapshot.pods.iter().filter(|(_, (_, pod))| pod.terminating);
        let gpus = snapshot.gpu_nodes.values().flat_map(|gpus| &gpus.gpus);
        let have = gpus.flat_map(|gpu| gpu.pods.keys().map(String::as_str));
        let ended = have.filter(|uid| !snapshot.pods.contains_key(uid));
        let terminating = ending.map(|(uid, _)| (*uid, false));
        let terminating = terminating.chain(ended.map(|uid| (uid, true)));
        let reserved = snapshot.gpu_nodes.values().flat_map(|gpus| &gpus.gpus);
        let reserved = reserved.filter(|gpu| gpu.reserved_for.is_some());
        let reserved: BTreeSet<&str> = reserved
            .flat_map(|gpu| gpu.pods.keys().map(String::as_str))
            .collect();
        self.terminations = terminating
            .map(|(uid, ended)| {
                let before = self.terminations.get(uid).filter(|was| was.ended == ended);
                let terminating = Termination {
                    ended,
                    since: before.map_or(now, |was| was.since),
                    gpu_reserved: reserved.contains(uid),
                };
                (uid.to_owned(), terminating)
            })
            .collect();
    }

    /// Whether a terminating pod has taken so long that the planner no longer expects its memory.
    pub(in super::super) fn termination_overdue(&self, pod: &str, now: Uptime) -> bool {
        let Some(Termination {
            since,
            gpu_reserved: reserved,
            ..
        }) = self.terminations.get(pod)
        else {
            return false;
        };
        let attempt = self
            .evictions
            .get(pod)
            .is_some_and(EvictionAttempt::is_accepted);
        let expected = if attempt || *reserved {
            RESERVATION_TIMEOUT
        } else {
            TERMINATION_TIME
        };
        now.saturating_sub(*since) >= expected
    }

    /// Memory of pods that ended a moment ago, which is not free yet.
    pub(in super::super) fn recently_freed(&self, node: &str, gpu: &Gpu) -> Quanta {
        let holders = self.holders.get(&(node.to_owned(), gpu.uuid.clone()));
        let holders = holders.into_iter().flatten();
        let freed = holders.filter(|(pod, _)| !gpu.pods.contains_key(*pod));
        let freed: Quanta = freed.map(|(_, (quanta, _))| *quanta).sum();
        let bound: Quanta = gpu.pods.values().copied().sum();
        freed.min(gpu.capacity.minus(gpu.free).minus(bound))
    }
}
