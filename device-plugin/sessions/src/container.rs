//! Coordinates the memory, the faults and the checkpoint of one container.
//!
//! No call waits: each takes a few memory operations and at most one small write to tmpfs.

pub(super) mod denials;
pub(super) mod faults;
pub(super) mod memory;
mod pages;
mod processes;
mod quotas;
pub(super) mod recorder;
mod recording;
pub(super) mod siblings;

use std::sync::Arc;

use bursar_ledger::BootTime;
use bursar_ledger::units::{AllocationId, PodUid};
use bursar_protocol::messages::{self, RejectReason, Response};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::accounts::AmountsByPid;
use super::checkpoint::SessionCheckpoint;
use super::closer::SocketCloser;
use super::usage::ContainerUsage;
use super::{Account, ContainerResolver, MAX_PROCESSES, Process, SessionSpec};
use denials::{Denials, LogLimiter, SharedLogLimiter};
use faults::Faults;
use memory::ContainerMemory;
use recorder::Recorder;

pub(super) use processes::Admission;

pub(super) struct Container {
    spec: SessionSpec,
    memory: ContainerMemory,
    recorder: Recorder,
    /// The cgroup of the container that its live processes are in.
    cgroup: Option<String>,
    denials: Denials,
    /// Limits the log lines of this container.
    log_limiter: LogLimiter,
    faults: Faults,
    /// `None` in tests without sockets.
    closer: Option<Arc<SocketCloser>>,
}

const _: () = assert!(MAX_PROCESSES <= messages::MAX_LISTED);

/// The exited processes to look up in a sample, by pid and account. The agent takes this copy
/// before it samples, since later exits are not in the sample.
pub(super) type ReclaimQuery = AmountsByPid;

/// A live process that the checkpoint lists.
pub(super) struct RestoredProcess {
    pub(super) process: Process,
    pub(super) image: u64,
    pub(super) superseded: CancellationToken,
}

/// Why a process may not send a request to the lease service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotAuthorized {
    /// The process belongs to another container, or names a GPU of another one.
    Rejected(RejectReason),
    /// The process is poisoned, or its GPU is being drained.
    Fenced,
}

impl Container {
    /// Restores a container from its checkpoint, with its live processes. Where the agent
    /// `served_before`, a missing checkpoint means that unknown processes may live.
    pub(crate) fn restore(
        spec: SessionSpec,
        checkpoint: SessionCheckpoint,
        served_before: bool,
        resolver: &dyn ContainerResolver,
        now: BootTime,
    ) -> (Container, Vec<RestoredProcess>) {
        let content = checkpoint.read();
        let is_checkpoint_lost = content
            .as_ref()
            .map_or(served_before, |content| content.incomplete);
        let mut content = content.unwrap_or_default();
        if content.generation == 0 && is_checkpoint_lost {
            // Generations issued since the boot are lower, since a container has at most one image
            // each microsecond. The wall clock may have been set back.
            content.generation = now.0.saturating_mul(1_000);
        }
        let fault_log = std::mem::take(&mut content.fault_log);
        let mut memory = ContainerMemory::new(&spec);
        let (restored, exited) = memory.restore(content, resolver);
        let mut container = Container {
            spec,
            memory,
            recorder: Recorder::new(checkpoint, is_checkpoint_lost),
            cgroup: None,
            denials: Denials::default(),
            log_limiter: LogLimiter::default(),
            faults: Faults::restore(fault_log, &exited),
            closer: None,
        };
        container.close_released_faults();
        // After this write, a checkpoint that is missing next time is a lost one.
        container.write_checkpoint();
        (container, restored)
    }

    /// The cgroup of a process, if the process belongs to this container.
    fn resolve_cgroup(
        &self,
        pid: u32,
        resolver: &dyn ContainerResolver,
    ) -> Result<String, RejectReason> {
        let cgroup = resolver
            .container(pid, &self.spec.pod)
            .ok_or(RejectReason::Identity)?;
        let mut images = self.memory.images();
        let others = images.any(|image| image.process.pid != pid);
        match &self.cgroup {
            Some(known) if others && *known != cgroup => Err(RejectReason::Identity),
            _ => Ok(cgroup),
        }
    }

    pub(super) fn pod(&self) -> &PodUid {
        &self.spec.pod
    }

    /// Answers a query of a process for the container's usage of an account.
    pub(super) fn query_usage(
        &self,
        pid: u32,
        account: &messages::Account,
        resolver: &dyn ContainerResolver,
    ) -> Result<Response, RejectReason> {
        self.resolve_cgroup(pid, resolver)?;
        let index = self.memory.wire_account_index(account);
        let index = index.ok_or(RejectReason::Account)?;
        let level = resolver.namespace_pids(pid).len().checked_sub(1);
        Ok(self.memory.answer_query(index, level))
    }

    /// The accounts, and the processes that use them.
    pub(super) fn memory(&self) -> &ContainerMemory {
        &self.memory
    }

    pub(super) fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    pub(super) fn memory_mut(&mut self) -> &mut ContainerMemory {
        &mut self.memory
    }

    /// Authorizes a process to request leases or memory tokens. Returns the allocation that the
    /// request counts for; a named GPU must be the allocation's.
    pub(crate) fn authorize(
        &self,
        pid: u32,
        gpu: Option<&messages::Account>,
        resolver: &dyn ContainerResolver,
    ) -> Result<AllocationId, NotAuthorized> {
        self.resolve_cgroup(pid, resolver)
            .map_err(NotAuthorized::Rejected)?;
        if self.is_fenced(pid) {
            return Err(NotAuthorized::Fenced);
        }
        let has = |account: &messages::Account| {
            self.memory
                .gpus()
                .any(|gpu| account.device_uuid() == Some(gpu.as_str()))
        };
        match gpu.is_none_or(has) {
            true => Ok(self.spec.allocation),
            false => Err(NotAuthorized::Rejected(RejectReason::Account)),
        }
    }

    /// The usage at this moment.
    pub(crate) fn container_usage(&self) -> ContainerUsage {
        ContainerUsage {
            allocation: self.spec.allocation,
            pod: self.spec.pod.clone(),
            cgroup: self.cgroup.clone(),
            accounts: self.memory.balances(),
            processes: self.memory.process_credits(),
            generation: self.memory.generation(),
            exited_pids: self.memory.credit().exited_pids(),
            had_managed: self.memory.had_managed(),
            requests: self.recorder.request_count(),
            denied: self.denials.by_function(),
            last_denied: self.denials.last().cloned(),
            driver_refusals: self.denials.by_driver(),
            unclosed_sockets: self.closer.as_ref().map_or(0, |closer| closer.unclosed()),
            poisoned_images: self.faults.log().poisoned,
            ordered_restarts: self.faults.log().restarted,
            restarts_in_place: self.faults.log().restarted_in_place,
            last_fault: self.faults.log().last_fault().cloned(),
        }
    }

    /// Reports to what the containers of the node share, and to the closer of its own sockets.
    pub(crate) fn connect(
        &mut self,
        closer: Arc<SocketCloser>,
        orphans_changed: watch::Sender<()>,
        log_limiter: SharedLogLimiter,
    ) {
        self.closer = Some(closer);
        self.recorder.connect(orphans_changed, log_limiter);
    }

    /// Records that a process was denied memory.
    pub(crate) fn record_denial(&mut self, pid: u32, account: u8, bytes: u64, function: &str) {
        let (denials, limiter) = (&mut self.denials, &mut self.log_limiter);
        denials.record(&self.memory, limiter, pid, account, bytes, function);
    }
}

fn to_wire_account(account: &Account) -> messages::Account {
    match account {
        Account::Gpu(uuid) => messages::Account::Device(uuid.as_str().to_owned()),
        Account::Managed => messages::Account::Managed,
    }
}

#[cfg(test)]
mod tests;
