//! Releases the memory of processes that have exited, once the driver shows that it is free.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use bursar_gpu::memory_sample::ProcessMemory;
use bursar_ledger::BootTime;
use bursar_ledger::units::Bytes;
use bursar_protocol::units::Units;

use super::super::orphan_bound::OwnMemory;
use super::super::{ContainerResolver, Process};
use super::{Container, ProcessState, ReclaimQuery};

/// The bytes that a process may take without a charge: code of kernels, heaps of the device. The
/// margin only decides when memory of a replaced image counts as freed, and which part of an
/// importer's bytes an exporter left.
const UNCHARGED_MARGIN: Bytes = Bytes::mib(256);

/// The margin where the agent does not charge contexts: a little more than a context of any model.
pub(super) const UNCHARGED_MARGIN_WITH_CONTEXT: Bytes = Bytes::gib(1);

impl Container {
    /// Handles the exit of a process image, whose grants stay charged.
    pub(in super::super) fn handle_exit(&mut self, process: Process, image: u64) {
        let state = self.memory.processes.get(&process.pid);
        if state.is_none_or(|state| (state.process, state.image) != (process, image)) {
            return;
        }
        let Some(state) = self.memory.processes.remove(&process.pid) else {
            return;
        };
        self.memory
            .credit
            .mark_exited(process.pid, &state.current_exports());
        let now = Instant::now();
        self.return_pages(state.page_fds, now);
        self.memory.claim.record_exit(now);
        self.fault_log.record_exit(process, state.generation);
        self.close_released_faults();
        self.memory.refresh_pages();
        self.note_change();
    }

    pub(super) fn return_pages(
        &mut self,
        fds: impl IntoIterator<Item = Arc<OwnedFd>>,
        now: Instant,
    ) {
        for fd in fds {
            self.pages.return_page(fd, now);
        }
    }

    /// The exited processes to look up in the driver; `None` where the agent need not sample.
    pub(in super::super) fn reclaim_query(&self) -> Option<ReclaimQuery> {
        let [exited, _] = self.memory.credit.exited_and_orphaned();
        (!exited.is_empty() || self.is_checkpoint_lost).then(|| exited.clone())
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
        let before = (self.memory.credit.clone(), self.is_checkpoint_lost);
        self.find_untracked(samples, resolver);
        for (pid, units) in query {
            if self.memory.credit.exited_and_orphaned()[0].get(pid) == Some(units)
                && self.is_reclaimed(*pid, samples)
            {
                self.memory.credit.release_exited(*pid);
            }
        }
        self.close_released_faults();
        self.escalate_held_memory(samples, now);
        if before != (self.memory.credit.clone(), self.is_checkpoint_lost) {
            self.memory.refresh_pages();
            self.note_change();
        }
    }

    /// Whether the driver has freed all memory of an exited image.
    pub(super) fn is_reclaimed(&self, pid: u32, samples: &[ProcessMemory]) -> bool {
        samples.iter().enumerate().all(|(index, sample)| {
            // After an exec the pid lives on with a new image.
            let state = self.memory.processes.get(&pid);
            let own = state.map(|state| self.own_memory(pid, state, index));
            let own = |charged| own.map_or(Bytes::ZERO, |own| own.own_part(charged));
            sample
                .bytes_of(pid)
                .is_some_and(|charged| charged == own(charged))
        })
    }

    /// The bytes that a live process itself has allocated.
    pub(super) fn own_memory(&self, pid: u32, state: &ProcessState, index: usize) -> OwnMemory {
        let exported = self.memory.exports_of(pid, state, index);
        OwnMemory {
            allocation: self.spec.allocation,
            charged: Bytes(self.memory.used_by(pid, state, index).bytes()),
            exported: Bytes(exported.bytes()),
            uncharged_margin: self.uncharged_margin(),
        }
    }

    pub(super) fn uncharged_margin(&self) -> Bytes {
        match self.context_sizes {
            Some(_) => UNCHARGED_MARGIN,
            None => UNCHARGED_MARGIN_WITH_CONTEXT,
        }
    }

    /// Finds untracked processes after the loss of a checkpoint, and charges them what the driver
    /// reports. From then on the audit maintains the figures.
    pub(super) fn find_untracked(
        &mut self,
        samples: &[ProcessMemory],
        resolver: &dyn ContainerResolver,
    ) {
        if !self.is_checkpoint_lost {
            return;
        }
        self.is_checkpoint_lost = false;
        for (index, sample) in samples.iter().enumerate() {
            let untracked = sample.iter().filter(|(pid, _)| {
                let has_session = self.memory.processes.contains_key(pid);
                !has_session && resolver.container(*pid, &self.spec.pod).is_some()
            });
            // Where the driver does not report an amount, the process may have all of the quota.
            let all = self.memory.credit.quota(index);
            let units = |bytes: Option<Bytes>| Units::holding(bytes?.0);
            let untracked = untracked
                .map(|(pid, bytes)| (pid, units(bytes).unwrap_or(all)))
                .collect();
            self.memory.credit.set_untracked(index, untracked);
        }
    }
}
