//! Gives the weights of GPUs' compute time to pods: those of one GPU are at most the whole GPU.

use std::collections::{BTreeMap, BTreeSet};

use bursar_crds::resources::WHOLE_GPU;
use serde::{Deserialize, Serialize};

use super::Ledger;
use super::types::Health;
use crate::units::PodUid;

/// The weights of pods, in hundredths of a GPU. A pod has its weight on each GPU of its memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Weights(BTreeMap<PodUid, u16>);

impl Weights {
    /// Whether the pod has a weight.
    pub(super) fn has(&self, pod: &PodUid) -> bool {
        self.0.contains_key(pod)
    }

    /// The weights of those pods that have one.
    pub(super) fn of<'a>(&self, pods: impl Iterator<Item = &'a PodUid>) -> BTreeMap<PodUid, u16> {
        pods.filter_map(|pod| self.0.get_key_value(pod))
            .map(|(pod, weight)| (pod.clone(), *weight))
            .collect()
    }

    /// The part of a GPU that the weights of other pods leave; `pods` have memory on the GPU.
    fn left(&self, pods: &BTreeSet<&PodUid>, pod: &PodUid) -> u16 {
        let others = pods.iter().filter(|other| **other != pod);
        let given = others.filter_map(|other| self.0.get(*other));
        given.fold(WHOLE_GPU, |left, weight| left.saturating_sub(*weight))
    }

    /// Whether a GPU on which `pods` have memory has room for the pod's weight.
    pub(super) fn fits(&self, pods: &BTreeSet<&PodUid>, pod: &PodUid) -> bool {
        let weight = self.0.get(pod);
        weight.is_none_or(|weight| *weight <= self.left(pods, pod))
    }
}

impl Ledger {
    /// Records the weight of a pod that is about to start; zero is none.
    pub fn set_weight(&mut self, pod: &PodUid, weight: u16) {
        let pods: BTreeSet<PodUid> = self.pods().into_iter().cloned().collect();
        let Weights(weights) = &mut self.weights;
        weights.retain(|known, _| known != pod && pods.contains(known));
        weights.extend((weight > 0).then(|| (pod.clone(), weight)));
    }

    /// The pods with memory of each GPU, in order of GPUs.
    pub(super) fn given_weights(&self) -> Vec<BTreeSet<&PodUid>> {
        let mut usage = self.usage();
        let gpus = self.gpus.keys().map(|gpu| usage.remove(gpu));
        gpus.map(|used| used.map_or_else(BTreeSet::new, |used| used.pods.into_keys().collect()))
            .collect()
    }

    /// The pod's weight and the most that a healthy GPU has left of its weights; none where that
    /// is enough.
    pub(super) fn most_weight_left(&self, pod: &PodUid) -> Option<(u16, u16)> {
        let weight = *self.weights.0.get(pod)?;
        let gpus = self.gpus.values().zip(self.given_weights());
        let healthy = gpus.filter(|(gpu, _)| gpu.health == Health::Healthy);
        let left = healthy.map(|(_, pods)| self.weights.left(&pods, pod)).max();
        Some((weight, left?)).filter(|(weight, left)| weight > left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{AllocationId, DeviceIdSet, Quanta, Quantum, Resource};
    use crate::{BindOutcome, BindRequest, BootTime, Gpu, GpuSpread};

    const NOW: BootTime = BootTime(1_000);

    fn ledger() -> Ledger {
        let mut ledger = Ledger::new(Quantum::Gib1);
        ledger.set_gpus(["GPU-a", "GPU-b"].map(|uuid| Gpu {
            uuid: uuid.parse().unwrap(),
            capacity: Quanta(16),
            health: Health::Healthy,
        }));
        ledger
    }

    /// Starts a container of a pod with 4 GiB over so many GPUs.
    fn start(ledger: &mut Ledger, pod: &str, first: u16, weight: u16, gpus: u16) -> BindOutcome {
        start_with(ledger, pod, first, 4, weight, gpus)
    }

    fn start_with(
        ledger: &mut Ledger,
        pod: &str,
        first: u16,
        quanta: u16,
        weight: u16,
        gpus: u16,
    ) -> BindOutcome {
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
            spread: GpuSpread {
                gpus: gpus.try_into().unwrap(),
            },
            priority: Default::default(),
        };
        ledger.set_weight(&start.pod, weight);
        ledger.bind(start, NOW).unwrap().outcome
    }

    /// The weights of each GPU.
    fn weights(ledger: &Ledger) -> Vec<Vec<(String, u16)>> {
        let gpus = ledger.view(NOW).gpus.into_iter();
        let named = |(pod, weight): (PodUid, u16)| (pod.to_string(), weight);
        gpus.map(|gpu| gpu.weights.into_iter().map(named).collect())
            .collect()
    }

    #[test]
    fn gpu_whose_weights_are_given_out_is_refused() {
        let mut ledger = ledger();
        for (pod, first, weight) in [("a", 0, 60), ("b", 4, 60), ("c", 8, 40), ("d", 12, 40)] {
            let outcome = start(&mut ledger, pod, first, weight, 1);
            assert!(matches!(outcome, BindOutcome::Bound(_)), "{pod}");
        }
        let two = |first: &str, second: &str| vec![(first.to_owned(), 60), (second.to_owned(), 40)];
        assert_eq!(weights(&ledger), [two("a", "c"), two("b", "d")]);
        let BindOutcome::Queued(_, reason) = start(&mut ledger, "e", 16, 5, 1) else {
            panic!("bound")
        };
        let text = "its weight of 5 hundredths of a GPU fits on none: the most left is 0";
        assert!(reason.to_string().contains(text), "{reason}");
        assert_eq!(reason.gpus.map(Into::into), Some(1_u16), "it fits later");
        // A pod without a weight needs memory alone, and waits for no pod with one.
        let outcome = start(&mut ledger, "f", 20, 0, 1);
        assert!(matches!(outcome, BindOutcome::Bound(_)));
        let mut ledger = Ledger::restore(ledger.snapshot(), Quantum::Gib1, NOW).unwrap();
        assert!(ledger.advance(NOW).is_empty());
        ledger.release_pod(&"d".parse().unwrap());
        let bound: Vec<_> = ledger.advance(NOW).into_iter().map(|of| of.pod).collect();
        // The call ended with the agent before, so that the memory awaits the retry.
        assert!(bound.is_empty());
        assert_eq!(
            weights(&ledger)[1],
            [("b".to_owned(), 60), ("e".to_owned(), 5)]
        );
    }

    #[test]
    fn claims_of_one_round_do_not_share_a_weight() {
        let mut ledger = ledger();
        for (pod, first) in [("a", 0), ("b", 4)] {
            start(&mut ledger, pod, first, 100, 1);
        }
        for (pod, first) in [("c", 8), ("d", 12)] {
            let outcome = start(&mut ledger, pod, first, 60, 1);
            assert!(matches!(outcome, BindOutcome::Queued(..)), "{pod}");
        }
        ledger.release_pod(&"a".parse().unwrap());
        assert_eq!(ledger.advance(NOW).len(), 1);
        ledger.release_pod(&"b".parse().unwrap());
        assert_eq!(ledger.advance(NOW).len(), 1);
    }

    #[test]
    fn claim_whose_weight_fits_nowhere_takes_no_turn() {
        let mut ledger = ledger();
        let mut start = |pod, first, quanta, weight| {
            let outcome = start_with(&mut ledger, pod, first, quanta, weight, 1);
            matches!(outcome, BindOutcome::Bound(_))
        };
        assert!(start("a", 0, 12, 100) && start("b", 12, 12, 100));
        // A larger claim comes first.
        assert!(!start("c", 24, 10, 60), "all weights are given out");
        assert!(!start("d", 34, 8, 0), "no GPU has room");
        // The memory that is free on one GPU is set aside for the pod that waits for memory.
        assert!(start("e", 42, 4, 0));
        assert!(!start("f", 46, 4, 0));
    }

    #[test]
    fn failed_gpu_and_one_of_two_gpus_give_a_weight_no_turn() {
        for (gpus, is_failed) in [(1, true), (2, false)] {
            let mut ledger = ledger();
            assert!(matches!(
                start_with(&mut ledger, "a", 0, 12, 100, 1),
                BindOutcome::Bound(_)
            ));
            if is_failed {
                let states = [("GPU-a", Health::Healthy), ("GPU-b", Health::Unhealthy)];
                ledger.set_gpus(states.map(|(uuid, health)| Gpu {
                    uuid: uuid.parse().unwrap(),
                    capacity: Quanta(16),
                    health,
                }));
            }
            let waits = start_with(&mut ledger, "b", 12, 10, 60, gpus);
            assert!(matches!(waits, BindOutcome::Queued(..)), "{gpus} {waits:?}");
            // The memory that a pod waits for is set aside, and not that beside a weight.
            let quanta = if is_failed { 8 } else { 16 };
            let large = start_with(&mut ledger, "c", 22, quanta, 0, 1);
            assert_eq!(
                matches!(large, BindOutcome::Queued(..)),
                is_failed,
                "{large:?}"
            );
            if is_failed {
                let late = start_with(&mut ledger, "d", 40, 4, 0, 1);
                assert!(matches!(late, BindOutcome::Queued(..)), "{late:?}");
            }
        }
    }

    #[test]
    fn pod_over_two_gpus_has_its_weight_on_both() {
        let mut ledger = ledger();
        start(&mut ledger, "a", 0, 30, 2);
        assert_eq!(
            weights(&ledger),
            [[("a".to_owned(), 30)], [("a".to_owned(), 30)]]
        );
        // The pod's own weight is no obstacle to its other containers.
        start(&mut ledger, "b", 4, 70, 1);
        let again = start(&mut ledger, "a", 8, 30, 2);
        assert!(matches!(again, BindOutcome::Bound(_)));
    }
}
