//! Tracks the processes of one container, their credit pages and its accounts.
//!
//! No call waits: each takes a few memory operations and at most one small write to tmpfs.

mod contexts;
mod credit;
pub(super) mod denials;
pub(super) mod drain;
mod exits;
mod exports;
mod faults;
mod fences;
mod hello;
pub(super) mod leases;
pub(super) mod memory;
mod pages;
mod persistence;
mod quotas;
pub(super) mod recording;
pub(super) mod siblings;
mod usage;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use bursar_protocol::credit_page::CreditPage;
use bursar_protocol::messages::{self, RejectReason, Response};
use bursar_protocol::units::Units;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::accounts::AmountsByPid;
use super::checkpoint::SessionCheckpoint;
use super::closer::SocketCloser;
use super::recovery::FaultLog;
use super::{Account, ContainerResolver, ImageMemory, MAX_PROCESSES, Process, SessionSpec};
use denials::{Denials, LogLimiter, SharedLogLimiter};
use faults::UnreportedFaults;
use memory::ContainerMemory;
use pages::PagePool;
use recording::PendingChanges;

pub(super) use hello::Admission;

pub(super) struct Container {
    spec: SessionSpec,
    memory: ContainerMemory,
    checkpoint: SessionCheckpoint,
    /// Whether the checkpoint is lost and the driver has not yet shown which processes have memory.
    /// Until then the agent grants nothing.
    is_checkpoint_lost: bool,
    /// The cgroup of the container that its live processes are in.
    cgroup: Option<String>,
    denials: Denials,
    /// Limits the log lines of this container.
    log_limiter: LogLimiter,
    /// Limits the log lines that concern all containers.
    shared_log_limiter: SharedLogLimiter,
    requests: u64,
    /// The process generation of the last image that said hello.
    generation: u64,
    fault_log: FaultLog,
    /// The faults that the fault task has not taken yet.
    unreported_faults: UnreportedFaults,
    /// Whether a GPU of the container is being drained.
    is_drained: bool,
    pages: PagePool,
    /// The changes that the checkpoint does not hold yet.
    pending_changes: PendingChanges,
    /// Wakes the task that releases the bytes of exited images.
    change_notify: Arc<Notify>,
    /// Wakes the tasks that prove orphaned exports free.
    orphans_changed: watch::Sender<()>,
    /// `None` in tests without sockets.
    closer: Option<Arc<SocketCloser>>,
}

const _: () = assert!(MAX_PROCESSES <= messages::MAX_LISTED);

/// A process that has said hello, or that the checkpoint lists.
struct ProcessState {
    process: Process,
    image: u64,
    /// The image's memory. `None` until the process says hello to a restarted agent.
    image_memory: Option<ImageMemory>,
    /// The process generation of the image.
    generation: u64,
    /// The protocol version that the process speaks; 1 while the agent does not know.
    protocol_version: u16,
    /// The pid in each pid namespace around the process, which the kernel fixes at the start.
    namespace_pids: Vec<u32>,
    /// `None` until the process says hello to a restarted agent.
    page: Option<CreditPage>,
    /// The descriptors of that page, of the former one and of the last adopted one, for reuse.
    /// Threads of the process may still use each of them.
    page_fds: Vec<Arc<OwnedFd>>,
    /// Whether the process has sent a message after its hello, and so uses the page that it
    /// received. A process that was stopped, or stopped waiting, goes on with its former page.
    has_adopted_page: bool,
    /// The most that the process has reported as exported, by account.
    exported: Vec<Units>,
    /// Whether the page did not accept a grant, which never happens to a process that charges by
    /// the rules. Such a process is fenced.
    has_broken_page: bool,
    /// Cancels the task of the process when another connection takes over.
    superseded: CancellationToken,
}

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
        let others = self.memory.processes.keys().any(|other| *other != pid);
        match &self.cgroup {
            Some(known) if others && *known != cgroup => Err(RejectReason::Identity),
            _ => Ok(cgroup),
        }
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

    pub(super) fn memory_mut(&mut self) -> &mut ContainerMemory {
        &mut self.memory
    }
}

impl ProcessState {
    /// Whether the kernel shows that the process runs the image of its hello.
    fn keeps_image(&self) -> bool {
        let memory = self.image_memory.as_ref();
        memory.is_some_and(|memory| !memory.is_replaced())
    }

    /// The page that the process charges to, as far as the agent can see.
    fn adopted_page(&self) -> Option<&CreditPage> {
        self.page.as_ref().filter(|_| self.has_adopted_page)
    }

    /// The bytes that the process has exported, by GPU; empty where it never did. Managed memory,
    /// the last account, ends with its process, whatever the page says. The figure never falls: a
    /// tenant process may lower its page while others hold its exports.
    fn current_exports(&self) -> Vec<Units> {
        let Some(page) = self.adopted_page() else {
            return self.exported.clone();
        };
        let on_record = |index| self.exported.get(index).copied().unwrap_or(Units::ZERO);
        let mut exported: Vec<_> = (0..)
            .map_while(|index| Some(page.slot(index)?.exported().max(on_record(index))))
            .collect();
        exported.pop();
        if exported.iter().all(|units| *units == Units::ZERO) {
            return Vec::new();
        }
        exported
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
