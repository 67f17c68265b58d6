//! Shows claims, bindings and containers to the parts that report them.

use std::cmp::Reverse;
use std::sync::Arc;

use bursar_ledger::units::{AllocationId, Resource};
use bursar_ledger::{Binding, BindingRef, BootTime, LedgerView};

use super::super::host::HostOps;
use super::NodeAllocator;
use super::records::{BoundContainer, NodeProblems, QueuedClaim};
use crate::metrics::Counts;

impl<H: HostOps> NodeAllocator<H> {
    /// The node's memory at `now`.
    pub fn view(&self, now: BootTime) -> LedgerView {
        self.ledger.view(now)
    }

    /// The queued claims: first those that emptier GPUs could hold, by priority, and the oldest
    /// first. Only a number of them is published, and the others get no help.
    pub fn queued_claims(&mut self) -> Vec<QueuedClaim> {
        self.queued_claims
            .retain(|claim, _| self.ledger.is_queued(*claim));
        let mut claims: Vec<QueuedClaim> = self.queued_claims.values().cloned().collect();
        claims.sort_by_cached_key(|claim| {
            let urgency = (!claim.fits_when_empty, Reverse(claim.priority));
            (urgency, claim.queued_at, claim.pod.clone())
        });
        claims
    }

    /// The numbers of `resource` in the ledger.
    pub fn counts(&self, resource: Resource) -> Counts {
        let of_resource = |bound: &BindingRef<'_>| bound.resource == resource;
        Counts {
            pending: self.ledger.unbound_allocations(resource),
            bound: self
                .ledger
                .binding_refs()
                .filter(of_resource)
                .map(|bound| bound.allocations.len())
                .sum(),
            waiting: self
                .queued_claims
                .values()
                .filter(|claim| claim.resource == resource)
                .count(),
        }
    }

    /// All bindings.
    pub fn bindings(&self) -> impl Iterator<Item = Binding> {
        self.ledger.bindings()
    }

    /// All containers with device memory.
    pub fn containers(&self) -> Arc<[BoundContainer]> {
        let container = |bound: BindingRef<'_>, allocation: AllocationId| BoundContainer {
            claim: bound.claim,
            allocation,
            name: self.container_names.get(&allocation).cloned(),
            cgroup: self.pod_cgroups.path(bound.pod).map(Into::into),
            pod: bound.pod.clone(),
        };
        let containers = self.device_bindings().flat_map(|bound| {
            let allocations = bound.allocations.iter();
            allocations.map(move |allocation| container(bound, *allocation))
        });
        containers.collect()
    }

    /// The node's problems.
    pub fn problems(&self) -> &NodeProblems {
        &self.problems
    }
}
