//! Sets memory of a GPU aside for one pod, as the operator orders while victims are evicted there.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Ledger;
use super::time::Moment;
use super::types::Health;
use crate::units::{GpuUuid, PodUid, Quanta};

/// How long memory is set aside for a pod without a claim here. The pod may have no node yet, but
/// the operator that would lift the reservation may be gone too.
const UNHEARD: Duration = Duration::from_secs(300);

/// A reservation whose pod has no claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unheard {
    since: Moment,
    /// Set where the pod has stayed away for too long: the reservation counts again once the pod
    /// comes.
    lapsed: bool,
}

/// A reservation on one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Reserved {
    /// The pod whose claim may use the memory.
    pub waiter: PodUid,
    /// The memory set aside, what is bound to the pod there already included.
    pub quanta: Quanta,
}

impl Ledger {
    /// Replaces all reservations. Bound memory yields to none. True where this changed them.
    pub fn reserve(&mut self, reserved: BTreeMap<GpuUuid, Reserved>) -> bool {
        self.unheard
            .retain(|gpu, _| reserved.get(gpu) == self.reserved.get(gpu));
        let news = self.reserved != reserved;
        self.reserved = reserved;
        news
    }

    /// Suspends reservations for pods that have had no claim for too long, until those pods come.
    pub fn lapse(&mut self, now: Moment) {
        let pods = self.pods();
        let unheard = self.reserved.iter();
        let unheard = unheard.filter(|(_, reserved)| !pods.contains(&reserved.waiter));
        let unheard = unheard.map(|(gpu, _)| {
            let since = self.unheard.get(gpu).map_or(now, |unheard| unheard.since);
            let lapsed = now.since(since) >= UNHEARD;
            (gpu.clone(), Unheard { since, lapsed })
        });
        self.unheard = unheard.collect();
    }

    /// The reservation that is in force on a GPU.
    fn in_force(&self, gpu: &GpuUuid) -> Option<&Reserved> {
        let lapsed = self.unheard.get(gpu).is_some_and(|unheard| unheard.lapsed);
        self.reserved.get(gpu).filter(|_| !lapsed)
    }

    /// The pod that the GPU's memory is set aside for.
    pub(super) fn held_for(&self, gpu: &GpuUuid) -> Option<&PodUid> {
        let state = self.gpus.get(gpu)?;
        let reserved = self.in_force(gpu)?;
        (state.health == Health::Healthy).then_some(&reserved.waiter)
    }

    /// The part of the GPU that is still to be set aside for that pod.
    pub(super) fn reserved_on(&self, gpu: &GpuUuid) -> Quanta {
        let Some(Reserved { waiter, quanta }) = self.in_force(gpu) else {
            return Quanta::ZERO;
        };
        let used = self.usage();
        let bound = used.get(gpu).and_then(|used| used.pods.get(waiter));
        quanta.saturating_sub(bound.copied().unwrap_or_default())
    }

    /// The index, in the order of GPUs, of the one with a reservation for `pod`.
    pub(super) fn gpu_reserved_for(&self, pod: &PodUid) -> Option<usize> {
        let mut gpus = self.gpus.keys();
        gpus.position(|gpu| self.held_for(gpu) == Some(pod))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{AllocationId, Quantum, Resource, TokenSet};
    use crate::{Answer, Gpu, Moment, Shape, Start};

    const NOW: Moment = Moment(0);

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

    /// `pod` starts with the tokens from `first` on.
    fn start(ledger: &mut Ledger, pod: &str, first: u16, quanta: u16) -> Answer {
        let tokens = TokenSet::from_indexes(first..first + quanta).unwrap();
        let (id, resource) = (
            AllocationId::from_bits(first.into()),
            Resource::DeviceMemory,
        );
        ledger.book(id, resource, tokens.clone(), NOW);
        let start = Start {
            resource,
            tokens,
            containers: Vec::new(),
            pod: pod.parse().unwrap(),
            shape: Shape::default(),
            priority: Default::default(),
        };
        ledger.start(start, NOW).unwrap().answer
    }

    fn hold(ledger: &mut Ledger, gpu: &str, waiter: &str, quanta: u32) {
        let reserved = Reserved {
            waiter: waiter.parse().unwrap(),
            quanta: Quanta(quanta),
        };
        ledger.reserve([(gpu.parse().unwrap(), reserved)].into());
    }

    fn gpu(ledger: &Ledger, uuid: &str, of: impl Fn(&crate::GpuView) -> u32) -> u32 {
        let view = ledger.view(NOW);
        of(view
            .gpus
            .iter()
            .find(|gpu| gpu.uuid.as_str() == uuid)
            .unwrap())
    }

    #[test]
    fn a_reserved_gpu_is_for_its_pod_alone_and_no_more_once_that_is_bound() {
        let mut ledger = ledger();
        assert!(matches!(start(&mut ledger, "old", 0, 6), Answer::Bound(_)));
        hold(&mut ledger, "GPU-a", "owner", 8);
        assert_eq!(gpu(&ledger, "GPU-a", |gpu| gpu.free.0), 0);
        assert_eq!(gpu(&ledger, "GPU-a", |gpu| gpu.reserved.0), 2);
        // Other pods are bound elsewhere, or wait.
        assert!(matches!(
            start(&mut ledger, "small", 10, 2),
            Answer::Bound(_)
        ));
        assert_eq!(gpu(&ledger, "GPU-b", |gpu| gpu.free.0), 6);
        assert!(matches!(
            start(&mut ledger, "owner", 20, 8),
            Answer::Wait(..)
        ));
        ledger.pod_gone(&"old".parse().unwrap());
        assert!(matches!(
            start(&mut ledger, "thief", 30, 7),
            Answer::Wait(..)
        ));
        let bound = ledger.advance(NOW);
        assert_eq!(bound.len(), 1);
        assert_eq!(bound[0].pod.as_str(), "owner");
        assert_eq!(gpu(&ledger, "GPU-a", |gpu| gpu.bound.0), 8);
        assert_eq!(gpu(&ledger, "GPU-a", |gpu| gpu.reserved.0), 0);
    }

    #[test]
    fn a_reservation_outlives_the_agent_and_not_its_pod() {
        let mut ledger = ledger();
        assert!(matches!(
            start(&mut ledger, "owner", 0, 2),
            Answer::Bound(_)
        ));
        hold(&mut ledger, "GPU-b", "owner", 4);
        let mut ledger = Ledger::restore(ledger.snapshot(), Quantum::Gib1, NOW).unwrap();
        assert_eq!(gpu(&ledger, "GPU-b", |gpu| gpu.free.0), 4);
        ledger.pod_gone(&"owner".parse().unwrap());
        assert_eq!(gpu(&ledger, "GPU-b", |gpu| gpu.free.0), 8);
    }

    #[test]
    fn a_reservation_lapses_while_its_pod_is_not_heard_of_and_no_sooner() {
        let mut ledger = ledger();
        assert!(matches!(
            start(&mut ledger, "known", 0, 2),
            Answer::Bound(_)
        ));
        let both: BTreeMap<_, _> = [("GPU-a", "known"), ("GPU-b", "unheard")]
            .map(|(gpu, waiter)| {
                let (waiter, quanta) = (waiter.parse().unwrap(), Quanta(8));
                (gpu.parse().unwrap(), Reserved { waiter, quanta })
            })
            .into();
        assert!(ledger.reserve(both.clone()));
        let free =
            |ledger: &Ledger| ["GPU-a", "GPU-b"].map(|uuid| gpu(ledger, uuid, |gpu| gpu.free.0));
        ledger.lapse(NOW);
        ledger.lapse(NOW + (UNHEARD - Duration::from_secs(1)));
        assert_eq!(free(&ledger), [0, 0]);
        ledger.lapse(NOW + UNHEARD);
        assert_eq!(free(&ledger), [0, 8]);
        // Repeated orders change nothing, and the pod has its GPU once it comes.
        assert!(!ledger.reserve(both));
        assert_eq!(free(&ledger), [0, 8]);
        assert!(matches!(
            start(&mut ledger, "unheard", 10, 8),
            Answer::Bound(_)
        ));
        ledger.lapse(NOW + UNHEARD);
        assert_eq!(gpu(&ledger, "GPU-b", |gpu| gpu.bound.0), 8);
        assert!(ledger.unheard.is_empty());
    }

    #[test]
    fn a_gpu_that_fails_or_is_not_there_is_held_for_nobody() {
        let mut ledger = ledger();
        hold(&mut ledger, "GPU-a", "owner", 8);
        let held = |ledger: &Ledger| {
            let gpus = ledger.view(NOW).gpus;
            gpus.into_iter().filter_map(|gpu| gpu.held_for).count()
        };
        assert_eq!(held(&ledger), 1);
        ledger.set_gpus([Gpu {
            uuid: "GPU-a".parse().unwrap(),
            capacity: Quanta(8),
            health: Health::Unhealthy,
        }]);
        assert_eq!(held(&ledger), 0);
        hold(&mut ledger, "GPU-x", "owner", 8);
        assert_eq!(held(&ledger), 0);
    }
}
