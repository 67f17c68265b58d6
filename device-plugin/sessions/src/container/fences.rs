//! Fences process images: the agent grants them no more memory.

use bursar_protocol::fence::Fence;

use super::{Container, ProcessState};

impl Container {
    /// Whether the agent grants nothing more to a process's image.
    pub(super) fn is_fenced(&self, pid: u32) -> bool {
        let state = self.memory.processes.get(&pid);
        self.is_drained
            || state.is_some_and(|state| state.has_broken_page || self.fence_of(state).is_some())
    }

    /// Writes into every process's page whether the agent has fenced it, and why.
    pub(super) fn publish_fences(&self) {
        for state in self.memory.processes.values() {
            if let Some(page) = &state.page {
                page.set_fence(self.fence_of(state));
            }
        }
    }

    pub(super) fn fence_of(
        &self,
        ProcessState {
            process,
            generation,
            ..
        }: &ProcessState,
    ) -> Option<Fence> {
        let fault = self.fault_log.fault_of(*process, *generation);
        let poisoned = fault.map(|fault| Fence::Poisoned(fault.cuda_error.unwrap_or_default()));
        poisoned.or(self.is_drained.then_some(Fence::Drained))
    }
}
