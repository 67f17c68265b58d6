//! Gives the lease service what it needs of the ledger: pure.

use std::collections::{BTreeMap, BTreeSet};

use bursar_ledger::units::{Bytes, GpuUuid, Quantum, Resource};
use bursar_ledger::{BindingRef, Ledger, Placement};
use bursar_sessions::lease_handle::{ContainerBinding, NodeView};

use super::gpus::NodeGpus;
use super::names::ContainerNames;

/// The bindings, quotas and GPUs for the lease service.
pub(super) fn lease_inputs(
    ledger: &Ledger,
    names: &ContainerNames,
    gpus: &NodeGpus,
    quantum: Quantum,
) -> NodeView {
    let mut containers = BTreeMap::new();
    for bound in device_bindings(ledger) {
        let of_binding: BTreeSet<GpuUuid> = match bound.placement {
            Placement::Device(shares) => shares.iter().map(|share| share.gpu.clone()).collect(),
            Placement::Managed(_) => BTreeSet::new(),
        };
        for id in bound.allocations {
            let binding = ContainerBinding {
                pod: bound.pod.clone(),
                namespace: names.pod(*id).map(|pod| pod.namespace.clone()),
                gpus: of_binding.clone(),
            };
            containers.insert(*id, binding);
        }
    }
    NodeView {
        quotas: namespace_quotas(ledger, names, quantum),
        containers,
        generations: gpus.generations().clone(),
        free: ledger.free_by_gpu().collect(),
    }
}

/// The bindings of device memory.
pub(super) fn device_bindings(ledger: &Ledger) -> impl Iterator<Item = BindingRef<'_>> {
    let bound = ledger.binding_refs();
    bound.filter(|bound| bound.resource == Resource::DeviceMemory)
}

/// The quota of each namespace on each GPU, summed over the bindings.
fn namespace_quotas(
    ledger: &Ledger,
    names: &ContainerNames,
    quantum: Quantum,
) -> BTreeMap<String, BTreeMap<GpuUuid, Bytes>> {
    let mut quotas: BTreeMap<&str, BTreeMap<&GpuUuid, Bytes>> = BTreeMap::new();
    for bound in device_bindings(ledger) {
        let pod = bound.allocations.iter().find_map(|id| names.pod(*id));
        let (Some(pod), Placement::Device(shares)) = (pod, bound.placement) else {
            continue;
        };
        let of_namespace = quotas.entry(&pod.namespace).or_default();
        for share in shares {
            let quota = of_namespace.entry(&share.gpu).or_default();
            quota.0 = quota.0.saturating_add(share.quanta.bytes(quantum).0);
        }
    }
    let of_namespace = |(namespace, gpus): (&str, BTreeMap<&GpuUuid, Bytes>)| {
        let gpus = gpus.into_iter();
        let gpus = gpus.map(|(gpu, quota)| (gpu.clone(), quota)).collect();
        (namespace.to_owned(), gpus)
    };
    quotas.into_iter().map(of_namespace).collect()
}
