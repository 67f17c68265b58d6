//! Sets memory of a GPU aside for one pod, as the operator requests while victims are evicted
//! there.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Ledger;
use super::boot_time::BootTime;
use super::types::Health;
use crate::units::{GpuUuid, PodUid, Quanta};

/// How long memory is set aside for a pod without a claim here. The pod may have no node yet, but
/// the operator that would lift the reservation may be gone too.
const UNCLAIMED_TIMEOUT: Duration = Duration::from_secs(300);

/// A reservation whose pod has no claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unclaimed {
    since: BootTime,
    /// Whether the pod has had no claim for too long. The reservation counts again once the pod has
    /// one.
    is_suspended: bool,
}

/// A reservation on one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Reservation {
    /// The pod whose claim may use the memory.
    pub pod: PodUid,
    /// The memory set aside, including memory that is bound to the pod there already.
    pub quanta: Quanta,
}

impl Ledger {
    /// Replaces all reservations. Bound memory stays bound. True where this changed them.
    pub fn set_reservations(&mut self, reserved: BTreeMap<GpuUuid, Reservation>) -> bool {
        self.unclaimed
            .retain(|gpu, _| reserved.get(gpu) == self.reservations.get(gpu));
        let changed = self.reservations != reserved;
        self.reservations = reserved;
        changed
    }

    /// Suspends reservations for pods that have had no claim for too long, until those pods have
    /// one.
    pub fn suspend_unclaimed_reservations(&mut self, now: BootTime) {
        let pods = self.pods();
        let unclaimed = self.reservations.iter();
        let unclaimed = unclaimed.filter(|(_, reserved)| !pods.contains(&reserved.pod));
        let unclaimed = unclaimed.map(|(gpu, _)| {
            let since = self
                .unclaimed
                .get(gpu)
                .map_or(now, |unclaimed| unclaimed.since);
            let is_suspended = now.since(since) >= UNCLAIMED_TIMEOUT;
            (
                gpu.clone(),
                Unclaimed {
                    since,
                    is_suspended,
                },
            )
        });
        self.unclaimed = unclaimed.collect();
    }

    /// The reservation on a GPU, unless it is suspended.
    fn active_reservation(&self, gpu: &GpuUuid) -> Option<&Reservation> {
        let is_suspended = self
            .unclaimed
            .get(gpu)
            .is_some_and(|unclaimed| unclaimed.is_suspended);
        self.reservations.get(gpu).filter(|_| !is_suspended)
    }

    /// The pod that the GPU's memory is set aside for.
    pub(super) fn reserved_for(&self, gpu: &GpuUuid) -> Option<&PodUid> {
        let state = self.gpus.get(gpu)?;
        let reserved = self.active_reservation(gpu)?;
        (state.health == Health::Healthy).then_some(&reserved.pod)
    }

    /// The part of the GPU that is still to be set aside for that pod.
    pub(super) fn reserved_on(&self, gpu: &GpuUuid) -> Quanta {
        let Some(Reservation { pod, quanta }) = self.active_reservation(gpu) else {
            return Quanta::ZERO;
        };
        let used = self.usage();
        let bound = used.get(gpu).and_then(|used| used.pods.get(pod));
        quanta.saturating_sub(bound.copied().unwrap_or_default())
    }

    /// The indexes, in the order of GPUs, of those with a reservation for `pod`.
    pub(super) fn gpus_reserved_for(&self, pod: &PodUid) -> Vec<usize> {
        let gpus = self.gpus.keys().enumerate();
        gpus.filter(|(_, gpu)| self.reserved_for(gpu) == Some(pod))
            .map(|(index, _)| index)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{AllocationId, DeviceIdSet, Quantum, Resource};
    use crate::{BindOutcome, BindRequest, BootTime, Gpu, GpuSpread};

    const NOW: BootTime = BootTime(0);

    /// Two GPUs of 8 quanta.
    fn ledger() -> Ledger {
        let mut ledger = Ledger::new(Quantum::Gib1);
        ledger.set_gpus(["GPU-a", "GPU-b"].map(|uuid| Gpu {
            uuid: uuid.parse().unwrap(),
            capacity: Quanta(8),
            health: Health::Healthy,
        }));
        ledger
    }

    /// Starts a container of `pod` with the device ids from `first` on.
    fn start(ledger: &mut Ledger, pod: &str, first: u16, quanta: u16) -> BindOutcome {
        let device_ids = DeviceIdSet::from_indexes(first..first + quanta).unwrap();
        let (id, resource) = (
            AllocationId::from_bits(first.into()),
            Resource::DeviceMemory,
        );
        ledger.add_pending(id, resource, device_ids.clone(), NOW);
        let start = BindRequest {
            resource,
            device_ids,
            containers: Vec::new(),
            pod: pod.parse().unwrap(),
            spread: GpuSpread::default(),
            priority: Default::default(),
        };
        ledger.bind(start, NOW).unwrap().outcome
    }

    fn reserve_for(ledger: &mut Ledger, gpu: &str, pod: &str, quanta: u32) {
        let reserved = Reservation {
            pod: pod.parse().unwrap(),
            quanta: Quanta(quanta),
        };
        ledger.set_reservations([(gpu.parse().unwrap(), reserved)].into());
    }

    fn gpu_amount(ledger: &Ledger, uuid: &str, of: impl Fn(&crate::GpuView) -> u32) -> u32 {
        let view = ledger.view(NOW);
        of(view
            .gpus
            .iter()
            .find(|gpu| gpu.uuid.as_str() == uuid)
            .unwrap())
    }

    #[test]
    fn wait_for_more_gpus_than_the_node_has_says_both_numbers() {
        let mut ledger = ledger();
        let device_ids = DeviceIdSet::from_indexes(0..3).unwrap();
        let (id, resource) = (AllocationId::from_bits(1), Resource::DeviceMemory);
        ledger.add_pending(id, resource, device_ids.clone(), NOW);
        let start = BindRequest {
            resource,
            device_ids,
            containers: Vec::new(),
            pod: "wide".parse().unwrap(),
            spread: GpuSpread {
                gpus: std::num::NonZeroU16::new(3).unwrap(),
            },
            priority: Default::default(),
        };
        let BindOutcome::Queued(_, reason) = ledger.bind(start, NOW).unwrap().outcome else {
            panic!("two GPUs are no three");
        };
        assert_eq!(
            reason.to_string(),
            "waiting for 3 GiB on 3 GPUs: 2 GPUs are healthy on this node"
        );
    }

    #[test]
    fn reservation_serves_its_pod_alone_until_the_pod_is_bound() {
        let mut ledger = ledger();
        assert!(matches!(
            start(&mut ledger, "old", 0, 6),
            BindOutcome::Bound(_)
        ));
        reserve_for(&mut ledger, "GPU-a", "owner", 8);
        assert_eq!(gpu_amount(&ledger, "GPU-a", |gpu| gpu.free.0), 0);
        assert_eq!(gpu_amount(&ledger, "GPU-a", |gpu| gpu.reserved.0), 2);
        // Other pods are bound elsewhere, or wait.
        assert!(matches!(
            start(&mut ledger, "small", 10, 2),
            BindOutcome::Bound(_)
        ));
        assert_eq!(gpu_amount(&ledger, "GPU-b", |gpu| gpu.free.0), 6);
        assert!(matches!(
            start(&mut ledger, "owner", 20, 8),
            BindOutcome::Queued(..)
        ));
        ledger.release_pod(&"old".parse().unwrap());
        assert!(matches!(
            start(&mut ledger, "thief", 30, 7),
            BindOutcome::Queued(..)
        ));
        let bound = ledger.advance(NOW);
        assert_eq!(bound.len(), 1);
        assert_eq!(bound[0].pod.as_str(), "owner");
        assert_eq!(gpu_amount(&ledger, "GPU-a", |gpu| gpu.bound.0), 8);
        assert_eq!(gpu_amount(&ledger, "GPU-a", |gpu| gpu.reserved.0), 0);
    }

    #[test]
    fn memory_that_is_set_aside_names_its_pods() {
        fn start_in_team(ledger: &mut Ledger, pod: &str, first: u16, quanta: u16) -> BindOutcome {
            ledger.set_namespace(&pod.parse().unwrap(), "team");
            start(ledger, pod, first, quanta)
        }
        for is_shareable in [true, false] {
            let mut ledger = ledger();
            if !is_shareable {
                ledger.set_shareable_gpus(Default::default());
            }
            for (pod, first, quanta) in [("a", 0, 3), ("b", 10, 6)] {
                let outcome = start_in_team(&mut ledger, pod, first, quanta);
                assert!(matches!(outcome, BindOutcome::Bound(_)));
            }
            reserve_for(&mut ledger, "GPU-a", "other", 2);
            let outcome = start_in_team(&mut ledger, "first", 20, 7);
            assert!(matches!(outcome, BindOutcome::Queued(..)));
            let view = ledger.view(NOW);
            let set_aside = |gpu: &crate::GpuView| {
                let pods = gpu.set_aside.iter();
                let pods = pods.map(|(pod, quanta)| (pod.to_string(), quanta.0));
                pods.collect::<Vec<_>>()
            };
            let expected = [("first".to_owned(), 3), ("other".to_owned(), 2)];
            assert_eq!(set_aside(&view.gpus[0]), expected);
            assert_eq!(view.gpus[0].reserved, Quanta(5));
            assert_eq!(view.gpus[0].free, Quanta::ZERO);
            assert_eq!(set_aside(&view.gpus[1]), []);
            let outcome = start_in_team(&mut ledger, "second", 30, 3);
            let BindOutcome::Queued(_, reason) = outcome else {
                panic!("all free memory but 2 GiB is set aside");
            };
            let text = reason.to_string();
            assert!(
                text.contains(
                    "largest free 5 GiB (GPU-a), 3 GiB of it set aside for first, \
                     2 GiB of it set aside for other"
                ),
                "{text}"
            );
        }
    }

    #[test]
    fn reservation_survives_a_restart_and_ends_with_its_pod() {
        let mut ledger = ledger();
        assert!(matches!(
            start(&mut ledger, "owner", 0, 2),
            BindOutcome::Bound(_)
        ));
        reserve_for(&mut ledger, "GPU-b", "owner", 4);
        let mut ledger = Ledger::restore(ledger.snapshot(), Quantum::Gib1, NOW).unwrap();
        assert_eq!(gpu_amount(&ledger, "GPU-b", |gpu| gpu.free.0), 4);
        ledger.release_pod(&"owner".parse().unwrap());
        assert_eq!(gpu_amount(&ledger, "GPU-b", |gpu| gpu.free.0), 8);
    }

    #[test]
    fn reservation_is_suspended_while_its_pod_has_no_claim() {
        let mut ledger = ledger();
        assert!(matches!(
            start(&mut ledger, "known", 0, 2),
            BindOutcome::Bound(_)
        ));
        let both: BTreeMap<_, _> = [("GPU-a", "known"), ("GPU-b", "unknown")]
            .map(|(gpu, pod)| {
                let (pod, quanta) = (pod.parse().unwrap(), Quanta(8));
                (gpu.parse().unwrap(), Reservation { pod, quanta })
            })
            .into();
        assert!(ledger.set_reservations(both.clone()));
        let free = |ledger: &Ledger| {
            ["GPU-a", "GPU-b"].map(|uuid| gpu_amount(ledger, uuid, |gpu| gpu.free.0))
        };
        ledger.suspend_unclaimed_reservations(NOW);
        ledger.suspend_unclaimed_reservations(NOW + (UNCLAIMED_TIMEOUT - Duration::from_secs(1)));
        assert_eq!(free(&ledger), [0, 0]);
        ledger.suspend_unclaimed_reservations(NOW + UNCLAIMED_TIMEOUT);
        assert_eq!(free(&ledger), [0, 8]);
        // A repeated request changes nothing, and the pod gets its GPU once it starts.
        assert!(!ledger.set_reservations(both));
        assert_eq!(free(&ledger), [0, 8]);
        assert!(matches!(
            start(&mut ledger, "unknown", 10, 8),
            BindOutcome::Bound(_)
        ));
        ledger.suspend_unclaimed_reservations(NOW + UNCLAIMED_TIMEOUT);
        assert_eq!(gpu_amount(&ledger, "GPU-b", |gpu| gpu.bound.0), 8);
        assert!(ledger.unclaimed.is_empty());
    }

    #[test]
    fn failed_or_missing_gpu_is_reserved_for_no_pod() {
        let mut ledger = ledger();
        reserve_for(&mut ledger, "GPU-a", "owner", 8);
        let held = |ledger: &Ledger| {
            let gpus = ledger.view(NOW).gpus;
            gpus.into_iter().filter_map(|gpu| gpu.reserved_for).count()
        };
        assert_eq!(held(&ledger), 1);
        ledger.set_gpus([Gpu {
            uuid: "GPU-a".parse().unwrap(),
            capacity: Quanta(8),
            health: Health::Unhealthy,
        }]);
        assert_eq!(held(&ledger), 0);
        reserve_for(&mut ledger, "GPU-x", "owner", 8);
        assert_eq!(held(&ledger), 0);
    }
}
