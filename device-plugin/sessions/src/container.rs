//! Tracks the processes of one container, their credit pages and its accounts.
//!
//! No call waits: each takes a few memory operations and at most one small write to tmpfs.

mod contexts;
mod credit;
pub(super) mod denials;
mod exits;
mod exports;
pub(super) mod faults;
mod hello;
pub(super) mod leases;
pub(super) mod memory;
mod pages;
mod persistence;
mod quotas;
pub(super) mod recorder;
mod recording;
pub(super) mod siblings;
mod usage;

use std::sync::Arc;

use bursar_ledger::units::PodUid;
use bursar_protocol::messages::{self, RejectReason, Response};
use tokio_util::sync::CancellationToken;

use super::accounts::AmountsByPid;
use super::closer::SocketCloser;
use super::{Account, ContainerResolver, MAX_PROCESSES, Process, SessionSpec};
use denials::{Denials, LogLimiter};
use faults::Faults;
use memory::ContainerMemory;
use recorder::Recorder;

pub(super) use hello::Admission;

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

impl Container {
    /// The cgroup of a process, if the process belongs to this container.
    fn resolve_cgroup(
        &self,
        pid: u32,
        resolver: &dyn ContainerResolver,
    ) -> Result<String, RejectReason> {
        let cgroup = resolver
            .container(pid, &self.spec.pod)
            .ok_or(RejectReason::Identity)?;
        let others = self.memory.pids().any(|other| other != pid);
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

    pub(super) fn recorder_mut(&mut self) -> &mut Recorder {
        &mut self.recorder
    }

    pub(super) fn memory_mut(&mut self) -> &mut ContainerMemory {
        &mut self.memory
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
