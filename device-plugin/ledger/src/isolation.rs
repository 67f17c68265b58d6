//! Restricts a GPU whose driver does not clear freed memory to the pods of one namespace.
//!
//! A pod can read memory that an ended pod left on such a GPU. So the GPU belongs to the namespace
//! of its first pod until the node reboots. A pod of unknown namespace gets no such GPU.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::Ledger;
use super::binder::{self, Bin, Plan};
use super::types::{ClaimId, Health, Placement};
use crate::units::{GpuUuid, PodUid};

/// The namespaces that may use each GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NamespaceIsolation {
    /// The GPUs that pods of several namespaces may share; all GPUs where this is none.
    pub(super) shareable: Option<BTreeSet<GpuUuid>>,
    /// The part that is written to the checkpoint.
    pub(super) past_tenants: PastTenants,
}

/// The namespaces whose pods had memory of each GPU in this boot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct PastTenants {
    /// The namespaces of pods, where known.
    namespaces: BTreeMap<PodUid, String>,
    tenants: BTreeMap<GpuUuid, Tenants>,
}

/// The namespaces whose pods had memory of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Tenants {
    /// Pods of this namespace only.
    One(String),
    /// Pods of several namespaces, or of an unknown one.
    Several,
}

impl PastTenants {
    /// The history of GPUs whose tenants are unknown.
    pub(super) fn unknown<'a>(gpus: impl IntoIterator<Item = &'a GpuUuid>) -> PastTenants {
        let several = |gpu: &GpuUuid| (gpu.clone(), Tenants::Several);
        PastTenants {
            namespaces: BTreeMap::new(),
            tenants: gpus.into_iter().map(several).collect(),
        }
    }

    /// Records that the pod has memory of the GPU.
    pub(super) fn record(&mut self, gpu: &GpuUuid, pod: &PodUid) {
        let tenants = match (self.namespaces.get(pod), self.tenants.get(gpu)) {
            (Some(namespace), None) => Tenants::One(namespace.clone()),
            (Some(namespace), Some(Tenants::One(other))) if namespace == other => return,
            _ => Tenants::Several,
        };
        self.tenants.insert(gpu.clone(), tenants);
    }

    fn is_tenant(&self, gpu: &GpuUuid, pod: &PodUid) -> bool {
        match (self.namespaces.get(pod), self.tenants.get(gpu)) {
            (Some(_), None) => true,
            (Some(namespace), Some(Tenants::One(tenant))) => namespace == tenant,
            (None, _) | (_, Some(Tenants::Several)) => false,
        }
    }
}

impl NamespaceIsolation {
    /// Whether the pod may have memory of the GPU.
    pub(super) fn may_use(&self, gpu: &GpuUuid, pod: &PodUid) -> bool {
        let shareable = self.shareable.as_ref();
        shareable.is_none_or(|shareable| shareable.contains(gpu))
            || self.past_tenants.is_tenant(gpu, pod)
    }

    /// The namespace whose pods alone may have memory of the GPU. Empty where no pod may, none
    /// where pods of any namespace may.
    pub(super) fn only_for(&self, gpu: &GpuUuid) -> Option<&str> {
        let shareable = self.shareable.as_ref()?;
        let tenants = self.past_tenants.tenants.get(gpu);
        match tenants.filter(|_| !shareable.contains(gpu))? {
            Tenants::One(namespace) => Some(namespace),
            Tenants::Several => Some(""),
        }
    }
}

impl Ledger {
    /// Replaces the GPUs that pods of several namespaces may share. True where this changed them.
    pub fn set_shareable_gpus(&mut self, shareable: BTreeSet<GpuUuid>) -> bool {
        let shareable = Some(shareable);
        let changed = self.isolation.shareable != shareable;
        self.isolation.shareable = shareable;
        changed
    }

    /// Records the namespace of a pod that is about to start.
    pub fn set_namespace(&mut self, pod: &PodUid, namespace: &str) {
        let pods: BTreeSet<PodUid> = self.pods().into_iter().cloned().collect();
        let namespaces = &mut self.isolation.past_tenants.namespaces;
        namespaces.retain(|known, _| pods.contains(known));
        namespaces.insert(pod.clone(), namespace.to_owned());
    }

    /// Marks the former tenants of a GPU as unknown, so that it counts as used by several
    /// namespaces.
    pub fn mark_tenants_unknown(&mut self, gpu: &GpuUuid) {
        let tenants = &mut self.isolation.past_tenants.tenants;
        tenants.insert(gpu.clone(), Tenants::Several);
    }

    /// Records that the pod has this memory.
    pub(super) fn record_tenant(&mut self, pod: &PodUid, placement: &Placement) {
        if let Placement::Device(shares) = placement {
            for share in shares {
                self.isolation.past_tenants.record(&share.gpu, pod);
            }
        }
    }

    /// A healthy GPU that is closed to the claim's pod, even if it has free memory.
    pub(super) fn closed_gpu(&self, claim: ClaimId) -> Option<&GpuUuid> {
        let pod = &self.claims.get(&claim)?.pod;
        let mut gpus = self.gpus.iter();
        let closed = gpus.find(|(uuid, gpu)| {
            gpu.health == Health::Healthy && !self.isolation.may_use(uuid, pod)
        });
        closed.map(|(uuid, _)| uuid)
    }

    /// Whether every pod may have memory of every GPU.
    pub(super) fn are_all_gpus_shareable(&self) -> bool {
        let shareable = self.isolation.shareable.as_ref();
        shareable.is_none_or(|shareable| self.gpus.keys().all(|gpu| shareable.contains(gpu)))
    }

    /// The GPUs as bins; those that are closed to the pod have no room.
    pub(super) fn bins_open_to(&self, pod: &PodUid, bins: &[Bin]) -> Vec<Bin> {
        let mut open = without_closed_bins(&self.isolation, self.gpus.keys(), pod, bins);
        for (bin, given) in open.iter_mut().zip(self.given_weights()) {
            if !self.weights.fits(&given, pod) {
                bin.free = 0;
            }
        }
        open
    }

    /// The binder's plan where some GPUs are closed to some pods. Each claim is placed by itself,
    /// among the GPUs that are open to it then.
    pub(super) fn plan_one_by_one(
        &self,
        mut bins: Vec<Bin>,
        reserved: &[u32],
        queue: &[ClaimId],
    ) -> Plan {
        let uuids: Vec<&GpuUuid> = self.gpus.keys().collect();
        let mut isolation = self.isolation.clone();
        let mut given = self.given_weights();
        let (mut places, mut waits) = (Vec::with_capacity(queue.len()), false);
        let mut first_waiting = None;
        let mut set_aside: Vec<u32> = bins
            .iter()
            .zip(reserved)
            .map(|(bin, reserved)| bin.free.min(*reserved))
            .collect();
        for (position, id) in queue.iter().enumerate() {
            let claim = &self.claims[id];
            let request = self.request_of(claim);
            let has_own = !request.reserved_bins.is_empty();
            let mut open = without_closed_bins(&isolation, self.gpus.keys(), &claim.pod, &bins);
            // Nothing is set aside, and no turn is taken, on a GPU without room for the weight.
            for (bin, given) in open.iter_mut().zip(&given) {
                if !self.weights.fits(given, &claim.pod) {
                    close(bin);
                }
            }
            let mut step = binder::plan(&open, &set_aside, std::slice::from_ref(&request));
            let place = step.places.pop().flatten();
            // Memory is set aside for the first waiting claim only.
            if place.is_some() || !(waits || has_own) {
                waits |= step.first_waiting.is_some();
                first_waiting = first_waiting.or(step.first_waiting.map(|_| position));
                let open_bins = open.iter().zip(step.set_aside).enumerate();
                for (index, (_, step)) in open_bins.filter(|(_, (bin, _))| bin.capacity > 0) {
                    set_aside[index] = step;
                }
            }
            for (index, bin) in bins.iter_mut().enumerate() {
                let taken = place
                    .as_ref()
                    .map_or(0, |place| request.taken(place, index));
                if taken > 0 {
                    bin.free = bin.free.saturating_sub(taken);
                    isolation.past_tenants.record(uuids[index], &claim.pod);
                    given[index].insert(&claim.pod);
                }
            }
            places.push(place);
        }
        Plan {
            places,
            set_aside,
            first_waiting,
        }
    }
}

fn without_closed_bins<'a>(
    isolation: &NamespaceIsolation,
    gpus: impl Iterator<Item = &'a GpuUuid>,
    pod: &PodUid,
    bins: &[Bin],
) -> Vec<Bin> {
    let mut bins = bins.to_vec();
    for (gpu, bin) in gpus.zip(&mut bins) {
        if !isolation.may_use(gpu, pod) {
            close(bin);
        }
    }
    bins
}

/// Makes the binder pass over a GPU.
fn close(bin: &mut Bin) {
    (bin.capacity, bin.attainable, bin.eventual, bin.free) = (0, 0, 0, 0);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::units::{AllocationId, DeviceIdSet, Quanta, Quantum, Resource};
    use crate::{BindOutcome, BindRequest, BootTime, Gpu, GpuSpread};

    const NOW: BootTime = BootTime(0);

    /// Two GPUs of 8 quanta, neither of them shareable.
    fn ledger() -> Ledger {
        let mut ledger = Ledger::new(Quantum::Gib1);
        ledger.set_gpus(["GPU-a", "GPU-b"].map(|uuid| Gpu {
            uuid: uuid.parse().unwrap(),
            capacity: Quanta(8),
            health: Health::Healthy,
        }));
        ledger.set_shareable_gpus(BTreeSet::new());
        ledger
    }

    fn gpu_set(gpus: &[&str]) -> BTreeSet<GpuUuid> {
        gpus.iter().map(|gpu| gpu.parse().unwrap()).collect()
    }

    /// Starts a container of a pod whose name begins with its namespace.
    fn start(ledger: &mut Ledger, pod: &str, first: u16, quanta: u16) -> BindOutcome {
        let uid: PodUid = pod.parse().unwrap();
        if let Some((namespace, _)) = pod.split_once('-') {
            ledger.set_namespace(&uid, namespace);
        }
        let device_ids = DeviceIdSet::from_indexes(first..first + quanta).unwrap();
        let resource = Resource::DeviceMemory;
        let id = AllocationId::from_bits(first.into());
        ledger.add_pending(id, resource, device_ids.clone(), NOW);
        let start = BindRequest {
            resource,
            device_ids,
            containers: Vec::new(),
            pod: uid,
            spread: GpuSpread::default(),
            priority: Default::default(),
        };
        ledger.bind(start, NOW).unwrap().outcome
    }

    /// The GPUs on which a pod has memory.
    fn gpus_of(ledger: &Ledger, pod: &str) -> Vec<String> {
        let gpus = ledger.view(NOW).gpus;
        let pod_gpus = gpus
            .iter()
            .filter(|gpu| gpu.pods.keys().any(|uid| uid.as_str() == pod));
        pod_gpus.map(|gpu| gpu.uuid.to_string()).collect()
    }

    #[test]
    fn unscrubbed_gpu_stays_with_its_first_namespace() {
        let mut ledger = ledger();
        assert!(matches!(
            start(&mut ledger, "one-a", 0, 4),
            BindOutcome::Bound(_)
        ));
        // The fuller GPU would fit best.
        assert!(matches!(
            start(&mut ledger, "two-a", 10, 4),
            BindOutcome::Bound(_)
        ));
        assert_eq!(gpus_of(&ledger, "two-a"), ["GPU-b"]);
        let only_for = |ledger: &Ledger| {
            let gpus = ledger.view(NOW).gpus;
            gpus.into_iter().map(|gpu| gpu.only_for).collect::<Vec<_>>()
        };
        let both = ["one", "two"].map(|namespace| Some(namespace.to_owned()));
        assert_eq!(only_for(&ledger), both);
        let BindOutcome::Queued(_, reason) = start(&mut ledger, "three-a", 20, 2) else {
            panic!("bound")
        };
        let text = reason.to_string();
        assert!(
            text.contains("GPU-a is not shared with other namespaces"),
            "{text}"
        );
        assert_eq!(reason.gpus, None, "no GPU is open to it");
        assert!(matches!(
            start(&mut ledger, "one-b", 30, 4),
            BindOutcome::Bound(_)
        ));
        assert_eq!(gpus_of(&ledger, "one-b"), ["GPU-a"]);
        // Memory of ended pods is still readable, also after the agent's restart.
        ledger.release_pod(&"two-a".parse().unwrap());
        let mut ledger = Ledger::restore(ledger.snapshot(), Quantum::Gib1, NOW).unwrap();
        ledger.set_shareable_gpus(BTreeSet::new());
        assert!(ledger.advance(NOW).is_empty());
        assert!(matches!(
            start(&mut ledger, "three-a", 20, 2),
            BindOutcome::Queued(..)
        ));
        assert!(ledger.advance(NOW).is_empty());
        assert!(ledger.set_shareable_gpus(gpu_set(&["GPU-b"])));
        assert_eq!(only_for(&ledger), [both[0].clone(), None]);
        assert_eq!(ledger.advance(NOW).len(), 1);
        assert_eq!(gpus_of(&ledger, "three-a"), ["GPU-b"]);
        ledger.mark_tenants_unknown(&"GPU-a".parse().unwrap());
        assert_eq!(only_for(&ledger), [Some(String::new()), None]);
    }

    #[test]
    fn pod_closed_everywhere_does_not_starve_a_large_pod() {
        let mut ledger = ledger();
        for (pod, first) in [("one-a", 0), ("two-a", 10)] {
            let outcome = start(&mut ledger, pod, first, 4);
            assert!(matches!(outcome, BindOutcome::Bound(_)));
        }
        for (pod, first, quanta) in [("three-a", 20, 8), ("one-big", 30, 8), ("one-b", 40, 2)] {
            let outcome = start(&mut ledger, pod, first, quanta);
            assert!(matches!(outcome, BindOutcome::Queued(..)), "{pod}");
        }
        ledger.release_pod(&"one-a".parse().unwrap());
        assert_eq!(ledger.advance(NOW).len(), 1);
        assert_eq!(gpus_of(&ledger, "one-big"), ["GPU-a"]);
    }

    #[test]
    fn pod_of_unknown_namespace_has_no_unscrubbed_gpu() {
        let mut ledger = ledger();
        assert!(matches!(
            start(&mut ledger, "nameless", 0, 4),
            BindOutcome::Queued(..)
        ));
        ledger.set_shareable_gpus(gpu_set(&["GPU-b"]));
        assert_eq!(ledger.advance(NOW).len(), 1);
        assert_eq!(gpus_of(&ledger, "nameless"), ["GPU-b"]);
        // From here on the former tenants are unknown, in case the driver does not clear memory.
        ledger.set_shareable_gpus(BTreeSet::new());
        assert!(matches!(
            start(&mut ledger, "one-a", 10, 4),
            BindOutcome::Bound(_)
        ));
        assert_eq!(gpus_of(&ledger, "one-a"), ["GPU-a"]);
    }

    #[test]
    fn missing_tenant_history_closes_unscrubbed_gpus() {
        let mut first = ledger();
        assert!(matches!(
            start(&mut first, "one-a", 0, 4),
            BindOutcome::Bound(_)
        ));
        let mut older = serde_json::to_value(first.snapshot()).unwrap();
        older.as_object_mut().unwrap().remove("past");
        let older = serde_json::from_value(older).unwrap();
        let mut lost = ledger();
        for gpu in gpu_set(&["GPU-a", "GPU-b"]) {
            lost.mark_tenants_unknown(&gpu);
        }
        let restored = Ledger::restore(older, Quantum::Gib1, NOW).unwrap();
        for mut ledger in [restored, lost] {
            ledger.set_shareable_gpus(BTreeSet::new());
            assert!(matches!(
                start(&mut ledger, "one-b", 10, 2),
                BindOutcome::Queued(..)
            ));
        }
    }

    proptest! {
        #[test]
        fn unscrubbed_gpu_has_one_namespace_per_boot(
            steps in proptest::collection::vec((0..3_usize, 1..9_u16, 0..4_u8), 1..40),
        ) {
            let mut ledger = ledger();
            ledger.set_shareable_gpus(gpu_set(&["GPU-b"]));
            let (mut tenants, mut pods) = (BTreeSet::new(), Vec::<String>::new());
            for (number, (namespace, quanta, action)) in steps.into_iter().enumerate() {
                let pod = format!("{}-{number}", ["one", "two", "three"][namespace]);
                match action {
                    0 if !pods.is_empty() => {
                        let gone = pods.remove(number % pods.len());
                        ledger.release_pod(&gone.parse().unwrap());
                    }
                    1 => {
                        let snapshot = ledger.snapshot();
                        ledger = Ledger::restore(snapshot, Quantum::Gib1, NOW).unwrap();
                        ledger.set_shareable_gpus(gpu_set(&["GPU-b"]));
                    }
                    _ => {
                        let _ = start(&mut ledger, &pod, 10 * number as u16, quanta);
                        pods.push(pod);
                    }
                }
                ledger.advance(NOW);
                let view = ledger.view(NOW);
                for uid in view.gpus[0].pods.keys() {
                    let (namespace, _) = uid.as_str().split_once('-').unwrap();
                    tenants.insert(namespace.to_owned());
                }
                prop_assert!(tenants.len() <= 1, "{tenants:?}");
                prop_assert!(view.gpus.iter().all(|gpu| gpu.bound <= gpu.capacity));
            }
        }
    }
}
