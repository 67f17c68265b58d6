//! Releases the memory of processes that have exited, once the driver shows that it is free.

use bursar_gpu::memory_sample::ProcessMemory;
use bursar_ledger::BootTime;

use super::super::{ContainerResolver, Process};
use super::{Container, ReclaimQuery};

impl Container {
    /// Handles the exit of a process image, whose grants stay charged.
    pub(in super::super) fn handle_exit(&mut self, process: Process, image: u64) {
        if let Some(ended) = self.memory.end_image(process, image) {
            self.record_exit(&ended);
            self.memory.refresh_pages();
            self.note_change();
        }
    }

    /// The exited processes to look up in the driver; `None` where the agent need not sample.
    pub(in super::super) fn reclaim_query(&self) -> Option<ReclaimQuery> {
        let [exited, _] = self.memory.credit().exited_and_orphaned();
        (!exited.is_empty() || self.recorder.is_lost()).then(|| exited.clone())
    }

    /// Applies a sample of each GPU. Bytes that the driver no longer charges to an exited process
    /// become free, except its exports. Processes that have exited since the query are not in the
    /// sample.
    pub(in super::super) fn apply_samples(
        &mut self,
        query: &ReclaimQuery,
        samples: &[ProcessMemory],
        resolver: &dyn ContainerResolver,
        now: BootTime,
    ) {
        let before = (self.memory.credit().clone(), self.recorder.is_lost());
        self.find_untracked(samples, resolver);
        for (pid, units) in query {
            if self.memory.credit().exited_and_orphaned()[0].get(pid) == Some(units)
                && self.memory.is_reclaimed(*pid, samples)
            {
                self.memory.credit_mut().release_exited(*pid);
            }
        }
        self.close_released_faults();
        self.escalate_held_memory(samples, now);
        if before != (self.memory.credit().clone(), self.recorder.is_lost()) {
            self.memory.refresh_pages();
            self.note_change();
        }
    }

    /// Finds untracked processes after the loss of a checkpoint.
    pub(super) fn find_untracked(
        &mut self,
        samples: &[ProcessMemory],
        resolver: &dyn ContainerResolver,
    ) {
        if self.recorder.end_loss() {
            let pod = &self.spec.pod;
            let is_member = |pid| resolver.container(pid, pod).is_some();
            self.memory.charge_untracked(samples, is_member);
        }
    }
}
