//! Gives the lease service what it needs of the ledger, and applies what it answers.

use std::collections::{BTreeMap, BTreeSet};

use bursar_ledger::units::{Bytes, GpuUuid, Resource};
use bursar_ledger::{BindingRef, BootTime, Placement};
use bursar_sessions::lease_handle::{ContainerBinding, LedgerUpdate, NodeView};
use tracing::info;

use super::super::host::HostOps;
use super::NodeAllocator;

impl<H: HostOps> NodeAllocator<H> {
    /// Reconciles retained leases with the node's bindings; returns whether the leases are known.
    pub(super) async fn reconcile_leases(&mut self, now: BootTime) -> bool {
        let LedgerUpdate { orphaned, ended } =
            self.host.reconcile_leases(self.lease_inputs()).await;
        // `end_lease` skips a lease that the ledger lists as orphaned. Its bytes become unreclaimed
        // when `set_orphaned_leases` replaces that list, so this loop runs first.
        for (lease, gpu, bytes) in ended {
            info!(%lease, %gpu, bytes = bytes.0, "retained lease ended");
            self.ledger.end_lease(lease, gpu, bytes, now);
            self.unrecorded_leases.push(lease);
            self.checkpoint_dirty = true;
        }
        let known = orphaned.is_some();
        if let Some(orphaned) = orphaned {
            self.checkpoint_dirty |= self.ledger.set_orphaned_leases(orphaned, now);
        }
        known
    }

    pub(super) fn lease_inputs(&self) -> NodeView {
        let mut containers = BTreeMap::new();
        for bound in self.device_bindings() {
            let gpus: BTreeSet<GpuUuid> = match bound.placement {
                Placement::Device(shares) => shares.iter().map(|share| share.gpu.clone()).collect(),
                Placement::Managed(_) => BTreeSet::new(),
            };
            for id in bound.allocations {
                let named = self
                    .container_names
                    .get(id)
                    .and_then(|holder| holder.pod.as_ref());
                let binding = ContainerBinding {
                    pod: bound.pod.clone(),
                    namespace: named.map(|named| named.namespace.clone()),
                    gpus: gpus.clone(),
                };
                containers.insert(*id, binding);
            }
        }
        NodeView {
            quotas: self.namespace_quotas(),
            containers,
            generations: self.gpu_generations.clone(),
            free: self.ledger.free_by_gpu().collect(),
        }
    }

    pub(super) fn device_bindings(&self) -> impl Iterator<Item = BindingRef<'_>> {
        let bound = self.ledger.binding_refs();
        bound.filter(|bound| bound.resource == Resource::DeviceMemory)
    }

    /// The quota of each namespace on each GPU, summed over the bindings.
    pub(super) fn namespace_quotas(&self) -> BTreeMap<String, BTreeMap<GpuUuid, Bytes>> {
        let mut quotas: BTreeMap<&str, BTreeMap<&GpuUuid, Bytes>> = BTreeMap::new();
        for bound in self.device_bindings() {
            let holders = bound
                .allocations
                .iter()
                .map(|id| self.container_names.get(id));
            let pod = holders.flatten().find_map(|holder| holder.pod.as_ref());
            let (Some(pod), Placement::Device(shares)) = (pod, bound.placement) else {
                continue;
            };
            let of_namespace = quotas.entry(&pod.namespace).or_default();
            for share in shares {
                let quota = of_namespace.entry(&share.gpu).or_default();
                quota.0 = quota
                    .0
                    .saturating_add(share.quanta.bytes(self.config.quantum).0);
            }
        }
        let of_namespace = |(namespace, gpus): (&str, BTreeMap<&GpuUuid, Bytes>)| {
            let gpus = gpus.into_iter();
            let gpus = gpus.map(|(gpu, quota)| (gpu.clone(), quota)).collect();
            (namespace.to_owned(), gpus)
        };
        quotas.into_iter().map(of_namespace).collect()
    }
}
