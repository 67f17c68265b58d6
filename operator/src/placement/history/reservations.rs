//! Remembers which reservations failed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bursar_crds::gpu_node::Reservation;

use super::{History, Uptime};
use crate::cluster::facts::snapshot::Snapshot;

/// How long a reservation may take. Its pod then gets no reservation for as long, doubled with each
/// further failure up to [`MAX_RESERVATION_BACKOFF`].
pub(in super::super) const RESERVATION_TIMEOUT: Duration = Duration::from_secs(300);
const MAX_RESERVATION_BACKOFF: Duration = Duration::from_secs(3600);

/// The failed reservations of one pod.
#[derive(Clone, Debug, Default)]
pub(super) struct ReservationBackoff {
    /// The number of failures by GPU.
    failures: BTreeMap<String, u32>,
    /// The number of failures, each of which may be of several GPUs.
    attempts: u32,
    /// The end of the back-off.
    until: Uptime,
}

impl ReservationBackoff {
    /// Counts failed reservations of some GPUs once. They stay visible for a while after their
    /// removal.
    fn record_failure(&mut self, gpus: &BTreeSet<&str>, now: Uptime) {
        if self.until > now {
            return;
        }
        for gpu in gpus {
            *self.failures.entry((*gpu).to_owned()).or_default() += 1;
        }
        let alone = RESERVATION_TIMEOUT * 2_u32.pow(self.attempts.min(8));
        self.attempts += 1;
        self.until = now + alone.min(MAX_RESERVATION_BACKOFF);
    }
}

impl History {
    /// Counts the reservations that have not led to a binding in time.
    pub(super) fn observe_reservations(&mut self, snapshot: &Snapshot<'_>, now: Uptime) {
        let reservations = snapshot.gpu_nodes.iter().flat_map(|(node, gpus)| {
            let name = |reserved: &Reservation| {
                (
                    (*node).to_owned(),
                    reserved.gpu.clone(),
                    reserved.pod_uid.clone(),
                )
            };
            gpus.reservations.iter().map(name)
        });
        self.reserved_since = reservations
            .map(|key| {
                let since = self.reserved_since.get(&key).copied().unwrap_or(now);
                (key, since)
            })
            .collect();
        let mut failed: BTreeMap<&String, BTreeSet<&str>> = BTreeMap::new();
        for ((_, gpu, pod_uid), since) in &self.reserved_since {
            if now.saturating_sub(*since) >= RESERVATION_TIMEOUT {
                failed.entry(pod_uid).or_default().insert(gpu);
            }
        }
        for (pod_uid, gpus) in failed {
            let backoff = self.reservation_backoffs.entry(pod_uid.clone());
            backoff.or_default().record_failure(&gpus, now);
        }
    }

    /// Whether a pod gets no reservation for now.
    pub(in super::super) fn in_backoff(&self, pod: &str, now: Uptime) -> bool {
        self.reservation_backoffs
            .get(pod)
            .is_some_and(|backoff| backoff.until > now)
    }

    /// How many reservations of a GPU failed for a pod.
    pub(in super::super) fn failed_reservations(&self, pod: &str, gpu: &str) -> u32 {
        let backoff = self.reservation_backoffs.get(pod);
        backoff
            .and_then(|backoff| backoff.failures.get(gpu).copied())
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(second: u64) -> Uptime {
        Duration::from_secs(second)
    }

    #[test]
    fn failed_reservations_of_a_pod_blame_each_gpu_once() {
        let mut backoff = ReservationBackoff::default();
        let both = BTreeSet::from(["GPU-a", "GPU-b"]);
        backoff.record_failure(&both, at(300));
        backoff.record_failure(&both, at(301));
        assert_eq!(backoff.until, at(600));
        backoff.record_failure(&BTreeSet::from(["GPU-c"]), at(600));
        assert_eq!(backoff.until, at(1_200), "the second failure");
        assert!(backoff.failures.values().eq([&1, &1, &1]));
    }
}
