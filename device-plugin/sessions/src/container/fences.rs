//! Fences process images: the agent grants them no more memory.

use bursar_protocol::fence::Fence;

use super::Container;
use crate::ProcessImage;

impl Container {
    /// Whether the agent grants nothing more to a process's image.
    pub(super) fn is_fenced(&self, pid: u32) -> bool {
        let image = self.memory.image_of(pid);
        self.is_drained
            || self.memory.has_broken_page(pid)
            || image.is_some_and(|image| self.fence_of(&image).is_some())
    }

    /// Writes into every process's page whether the agent has fenced it, and why.
    pub(super) fn publish_fences(&self) {
        self.memory.publish_fences(|image| self.fence_of(image));
    }

    pub(super) fn fence_of(&self, image: &ProcessImage) -> Option<Fence> {
        let fault = self.fault_log.fault_of(image.process, image.generation);
        let poisoned = fault.map(|fault| Fence::Poisoned(fault.cuda_error.unwrap_or_default()));
        poisoned.or(self.is_drained.then_some(Fence::Drained))
    }
}
