//! Names pods whose names the kubelet did not tell when their containers started, or that a lost checkpoint had.

use super::allocator::Core;
use super::checkpoint_state::PodName;
use super::host::Host;
use crate::kubelet::device_checkpoint::Held;
use crate::kubelet::pod_resources::{Holder, holder_of};
use crate::ledger::Binding;
use crate::units::{AllocationId, Resource};

impl<H: Host> Core<H> {
    /// Whether some container has device memory whose pod has no name here.
    pub fn lacks_names(&self) -> bool {
        self.nameless().next().is_some()
    }

    /// The kubelet lists these holders of device memory, and its checkpoint has `held`. Tokens that somebody else has
    /// by now name nobody: memory counts until its pod is gone, and its tokens may be given away before that.
    pub fn learn(&mut self, listed: &[Holder], held: &[Held]) {
        for binding in self.nameless().collect::<Vec<_>>() {
            let Binding { pod, tokens, .. } = &binding;
            let is_its = |id| {
                let mut held = held.iter();
                held.any(|held| held.allocation == id && held.pod == *pod)
            };
            let is_alone = {
                let mut sharers = self.ledger.sharers(binding.resource, tokens);
                sharers.all(|(id, of)| of.map_or_else(|| is_its(id), |of| of == pod))
            };
            let named = holder_of(listed, tokens).filter(|_| is_alone);
            if let Some(named) = named.cloned() {
                let name = PodName {
                    namespace: named.namespace,
                    name: named.pod,
                };
                self.name(pod, Some(name), &named.container, held);
                self.unsaved = true;
            }
        }
    }

    fn nameless(&self) -> impl Iterator<Item = Binding> {
        let has_name = |id: &AllocationId| {
            self.holders
                .get(id)
                .is_some_and(|holder| holder.pod.is_some())
        };
        let bindings = self.ledger.bindings();
        bindings.filter(move |binding| {
            let is_device = binding.resource == Resource::DeviceMemory;
            is_device && !binding.allocations.iter().all(has_name)
        })
    }
}
