//! Withholds memory from pods: what is in use and charged to no container, and GPUs that CUDA
//! refused or that await its first try.

use std::collections::{BTreeMap, BTreeSet};

use super::types::Health;
use super::{GpuState, Ledger};
use crate::units::{Bytes, GpuUuid};

impl Ledger {
    /// Sets the withheld memory of these GPUs; other GPUs keep theirs, and bound memory stays
    /// bound. True where this changed it.
    pub fn set_withheld(&mut self, withheld: BTreeMap<GpuUuid, Bytes>) -> bool {
        let before = self.withheld.clone();
        self.withheld.extend(withheld);
        let gpus = &self.gpus;
        self.withheld
            .retain(|gpu, bytes| *bytes > Bytes::ZERO && gpus.contains_key(gpu));
        self.withheld != before
    }

    /// Sets the GPUs that CUDA refused last: their bound memory stays bound, and no more is bound.
    /// They keep their capacity, so that pods wait for them. True where this changed the set.
    pub fn set_refused_gpus(&mut self, refused: BTreeSet<GpuUuid>) -> bool {
        let changed = self.refused != refused;
        self.refused = refused;
        changed
    }

    /// Sets the GPUs on which CUDA was tried. No memory of other GPUs is bound until then, but for
    /// MIG instances. True where this changed the set.
    pub fn set_tried_gpus(&mut self, tried: BTreeSet<GpuUuid>) -> bool {
        let tried = Some(tried);
        let changed = self.tried != tried;
        self.tried = tried;
        changed
    }

    /// Whether no memory of the GPU may be bound before CUDA was tried there.
    pub(super) fn is_untried(&self, gpu: &GpuUuid) -> bool {
        let tried = self.tried.as_ref();
        tried.is_some_and(|tried| !gpu.is_mig() && !tried.contains(gpu))
    }

    /// A healthy GPU on which CUDA was not tried yet.
    pub(super) fn untried_gpu(&self) -> Option<&GpuUuid> {
        let healthy = |(_, gpu): &(&GpuUuid, &GpuState)| gpu.health == Health::Healthy;
        let mut uuids = self.gpus.iter().filter(healthy).map(|(uuid, _)| uuid);
        uuids.find(|uuid| self.is_untried(uuid))
    }

    /// A healthy GPU that CUDA refused last.
    pub(super) fn refused_gpu(&self) -> Option<&GpuUuid> {
        self.refused.iter().find(|uuid| {
            let gpu = self.gpus.get(*uuid);
            gpu.is_some_and(|gpu| gpu.health == Health::Healthy)
        })
    }

    /// The withheld memory of a GPU.
    pub(super) fn withheld_on(&self, gpu: &GpuUuid) -> Bytes {
        self.withheld.get(gpu).copied().unwrap_or_default()
    }

    /// The withheld memory of all healthy GPUs.
    pub(super) fn withheld_total(&self) -> Bytes {
        let gpus = self.gpus.iter();
        let healthy = gpus.filter(|(_, gpu)| gpu.health == Health::Healthy);
        healthy.map(|(gpu, _)| self.withheld_on(gpu)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{AllocationId, DeviceIdSet, Quanta, Quantum, Resource};
    use crate::{BindOutcome, BindRequest, BootTime, Gpu};

    const NOW: BootTime = BootTime(0);

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
            spread: Default::default(),
            priority: Default::default(),
        };
        ledger.bind(start, NOW).unwrap().outcome
    }

    #[test]
    fn withheld_memory_is_not_bound_and_bindings_stay() {
        let gpu: GpuUuid = "GPU-a".parse().unwrap();
        let mut ledger = Ledger::new(Quantum::Gib1);
        ledger.set_gpus([Gpu {
            uuid: gpu.clone(),
            capacity: Quanta(16),
            health: Health::Healthy,
        }]);
        assert!(matches!(
            start(&mut ledger, "a", 0, 8),
            BindOutcome::Bound(_)
        ));
        let on_gpu = |bytes| BTreeMap::from([(gpu.clone(), bytes)]);
        assert!(ledger.set_withheld(on_gpu(Bytes::mib(5_500))));
        assert!(!ledger.set_withheld(on_gpu(Bytes::mib(5_500))), "unchanged");
        assert!(
            !ledger.set_withheld(BTreeMap::new()),
            "nothing is measured on it"
        );
        let BindOutcome::Queued(ticket, reason) = start(&mut ledger, "b", 8, 4) else {
            panic!("two are free");
        };
        assert_eq!(
            reason.to_string(),
            "waiting for 4 GiB on one GPU: largest free 2 GiB (GPU-a); \
             5500 MiB of the node's GPUs are in use and charged to no pod"
        );
        // The next agent knows the withheld memory before its audit has measured it.
        let mut ledger = Ledger::restore(ledger.snapshot(), Quantum::Gib1, NOW).unwrap();
        let view = ledger.view(NOW);
        assert_eq!(
            (view.gpus[0].bound, view.gpus[0].withheld),
            (Quanta(8), Bytes::mib(5_500))
        );
        // More than is free is withheld: bound memory stays bound.
        ledger.set_withheld(on_gpu(Bytes::gib(20)));
        let view = ledger.view(NOW);
        assert_eq!(
            (view.gpus[0].bound, view.gpus[0].free),
            (Quanta(8), Quanta(0))
        );
        assert!(matches!(
            start(&mut ledger, "a", 0, 8),
            BindOutcome::Bound(_)
        ));
        ledger.set_withheld(on_gpu(Bytes::ZERO));
        let BindOutcome::Bound(bound) = start(&mut ledger, "b", 8, 4) else {
            panic!("eight are free");
        };
        assert_eq!(bound.claim, ticket.claim);
    }

    /// A ledger of two GPUs of 16 quanta.
    fn with_two_gpus() -> (Ledger, [GpuUuid; 2]) {
        let gpus = ["GPU-a", "GPU-b"].map(|uuid| uuid.parse().unwrap());
        let mut ledger = Ledger::new(Quantum::Gib1);
        ledger.set_gpus(gpus.clone().map(|uuid| Gpu {
            uuid,
            capacity: Quanta(16),
            health: Health::Healthy,
        }));
        (ledger, gpus)
    }

    #[test]
    fn refused_gpu_binds_no_more_until_it_is_accepted() {
        let (mut ledger, gpus) = with_two_gpus();
        assert!(matches!(
            start(&mut ledger, "a", 0, 16),
            BindOutcome::Bound(_)
        ));
        let refused = BTreeSet::from(gpus.clone());
        assert!(ledger.set_refused_gpus(refused.clone()));
        assert!(!ledger.set_refused_gpus(refused), "unchanged");
        let BindOutcome::Queued(ticket, reason) = start(&mut ledger, "b", 16, 16) else {
            panic!("CUDA refuses both");
        };
        assert_eq!(
            reason.to_string(),
            "waiting for 16 GiB on one GPU: largest free 0 GiB (GPU-a); \
             CUDA refuses GPU-a, and the agent tries it again"
        );
        let bound: Vec<Quanta> = ledger.view(NOW).gpus.iter().map(|gpu| gpu.bound).collect();
        assert_eq!(bound, [Quanta(16), Quanta(0)], "what is bound stays bound");
        assert!(ledger.set_refused_gpus(BTreeSet::new()));
        let bound = ledger.advance(NOW);
        assert_eq!(bound[0].claim, ticket.claim);
    }

    #[test]
    fn untried_gpu_binds_no_more_until_cuda_was_tried() {
        let (mut ledger, gpus) = with_two_gpus();
        assert!(matches!(
            start(&mut ledger, "a", 0, 10),
            BindOutcome::Bound(_)
        ));
        assert!(ledger.set_tried_gpus(BTreeSet::new()));
        assert!(!ledger.set_tried_gpus(BTreeSet::new()), "unchanged");
        assert!(
            matches!(start(&mut ledger, "a", 0, 10), BindOutcome::Bound(_)),
            "what is bound stays bound"
        );
        let BindOutcome::Queued(ticket, reason) = start(&mut ledger, "b", 10, 4) else {
            panic!("neither was tried");
        };
        let expected = "the agent is trying CUDA on GPU-a";
        assert!(reason.to_string().contains(expected), "{reason}");
        let free: Vec<Quanta> = ledger.view(NOW).gpus.iter().map(|gpu| gpu.free).collect();
        assert_eq!(free, [Quanta(6), Quanta(16)], "status shows no full GPU");
        // The tightest fit would be on the first GPU, and only the second was tried.
        assert!(ledger.set_tried_gpus([gpus[1].clone()].into()));
        let bound = ledger.advance(NOW);
        assert_eq!(bound[0].claim, ticket.claim);
        assert_eq!(ledger.view(NOW).gpus[1].bound, Quanta(4));
        let BindOutcome::Queued(..) = start(&mut ledger, "c", 14, 16) else {
            panic!("the second holds a pod");
        };
        // The next agent tries the GPUs again.
        let mut ledger = Ledger::restore(ledger.snapshot(), Quantum::Gib1, NOW).unwrap();
        ledger.set_tried_gpus(BTreeSet::new());
        assert!(matches!(
            start(&mut ledger, "b", 10, 4),
            BindOutcome::Bound(_)
        ));
    }

    #[test]
    fn mig_instance_binds_before_cuda_was_tried() {
        let mut ledger = Ledger::new(Quantum::Gib1);
        ledger.set_gpus([Gpu {
            uuid: "MIG-a".parse().unwrap(),
            capacity: Quanta(4),
            health: Health::Healthy,
        }]);
        ledger.set_tried_gpus(BTreeSet::new());
        let outcome = start(&mut ledger, "a", 0, 4);
        assert!(matches!(outcome, BindOutcome::Bound(_)));
    }

    #[test]
    fn whole_gpu_is_awaited_where_no_memory_is_withheld() {
        let (mut ledger, gpus) = with_two_gpus();
        let on_first = |bytes| BTreeMap::from([(gpus[0].clone(), bytes)]);
        ledger.set_withheld(on_first(Bytes::gib(16)));
        for (pod, first) in [("b1", 0), ("b2", 8)] {
            let outcome = start(&mut ledger, pod, first, 8);
            assert!(matches!(outcome, BindOutcome::Bound(_)));
        }
        ledger.set_withheld(on_first(Bytes::mib(1)));
        let outcome = start(&mut ledger, "whole", 16, 16);
        assert!(matches!(outcome, BindOutcome::Queued(..)));
        ledger.release_pod(&"b1".parse().unwrap());
        // The first GPU can never hold the whole, and has more free memory than the second.
        let outcome = start(&mut ledger, "large", 32, 15);
        assert!(matches!(outcome, BindOutcome::Bound(_)));
        let outcome = start(&mut ledger, "small", 47, 8);
        assert!(matches!(outcome, BindOutcome::Queued(..)));
        ledger.release_pod(&"b2".parse().unwrap());
        let bound = ledger.advance(NOW);
        assert_eq!(bound[0].pod.as_str(), "whole");
    }
}
