//! Follows processes from their hello until the driver has freed their memory.

use std::time::Instant;

use bursar_gpu::memory_sample::ProcessMemory;
use bursar_ledger::BootTime;
use bursar_protocol::messages::{HeldCredit, RejectReason, Response};
use bursar_protocol::{POISON_SINCE, VERSION};

use super::super::{ContainerResolver, Process};
use super::memory::AdmittedProcess;
use super::recorder::ChangeNumber;
use super::{Container, ReclaimQuery};

/// The answer to a hello, and what must happen before the agent sends it.
pub(crate) struct Admission {
    pub(crate) welcome: Response,
    /// The change that the checkpoint must hold before the agent answers.
    pub(crate) change: ChangeNumber,
    pub(crate) process: AdmittedProcess,
}

impl Container {
    /// Admits a process that says hello.
    pub(crate) fn handle_hello(
        &mut self,
        process: Process,
        image: u64,
        version: u16,
        holdings: &[HeldCredit],
        resolver: &dyn ContainerResolver,
    ) -> Result<Admission, RejectReason> {
        let pid = process.pid;
        let cgroup = self.resolve_cgroup(pid, resolver)?;
        if self.memory.is_full_for(pid) {
            return Err(RejectReason::Busy);
        }
        let memory = &mut self.memory;
        let admitted = memory.admit(process, image, version, holdings, resolver);
        let admitted = admitted.map_err(|error| {
            if let Some(suppressed) = self.log_limiter.due("no page", Instant::now()) {
                let allocation = self.spec.allocation;
                tracing::warn!(%allocation, pid, %error, suppressed, "failed to create a credit page");
            }
            RejectReason::Busy
        })?;
        self.cgroup = Some(cgroup);
        self.recorder.drop_requests_of(pid);
        if let Some(replaced) = &admitted.replaced {
            self.record_exit(replaced);
        }
        self.memory.refresh_pages();
        self.publish_fences();
        let welcome = Response::Welcome {
            version: version.min(VERSION),
            generation: (version >= POISON_SINCE).then_some(admitted.generation),
            quotas: self.memory.wire_quotas(),
        };
        Ok(Admission {
            welcome,
            change: self.note_change(),
            process: admitted,
        })
    }

    /// Handles the exit of a process image, whose grants stay charged.
    pub(crate) fn handle_exit(&mut self, process: Process, image: u64) {
        if let Some(ended) = self.memory.end_image(process, image) {
            self.record_exit(&ended);
            self.memory.refresh_pages();
            self.note_change();
        }
    }

    /// The exited processes to look up in the driver; `None` where the agent need not sample.
    pub(crate) fn reclaim_query(&self) -> Option<ReclaimQuery> {
        let [exited, _] = self.memory.credit().exited_and_orphaned();
        (!exited.is_empty() || self.recorder.is_lost()).then(|| exited.clone())
    }

    /// Applies a sample of each GPU. Bytes that the driver no longer charges to an exited process
    /// become free, except its exports. Processes that have exited since the query are not in the
    /// sample.
    pub(crate) fn apply_samples(
        &mut self,
        query: &ReclaimQuery,
        samples: &[ProcessMemory],
        resolver: &dyn ContainerResolver,
        now: BootTime,
    ) {
        let before = (self.memory.credit().clone(), self.recorder.is_lost());
        if self.recorder.end_loss() {
            let is_member = |pid| resolver.container(pid, &self.spec.pod).is_some();
            self.memory.charge_untracked(samples, is_member);
        }
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
}
