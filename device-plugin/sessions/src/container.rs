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
pub(super) mod leases;
mod pages;
mod persistence;
pub(super) mod recording;
pub(super) mod siblings;
mod usage;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use bursar_ledger::units::{Bytes, GpuUuid};
use bursar_protocol::credit::CreditWord;
use bursar_protocol::credit_page::CreditPage;
use bursar_protocol::messages::{self, HeldCredit, ProcessUsage, Quota, RejectReason, Response};
use bursar_protocol::units::Units;
use bursar_protocol::{POISON_SINCE, VERSION};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::accounts::AmountsByPid;
use super::checkpoint::SessionCheckpoint;
use super::closer::SocketCloser;
use super::context_size::ContextSizes;
use super::recovery::{Fault, FaultLog};
use super::usage::DeniedAllocation;
use super::{
    Account, AccountUsage, ContainerResolver, CreditAccounts, MAX_PROCESSES, Process, SessionSpec,
};
use denials::{LogLimiter, SharedLogLimiter};
use pages::PagePool;
use recording::{ChangeNumber, PendingChanges};
use siblings::ClaimSiblings;

pub(super) struct Container {
    spec: SessionSpec,
    accounts: Vec<Account>,
    credit: CreditAccounts,
    checkpoint: SessionCheckpoint,
    processes: BTreeMap<u32, ProcessState>,
    /// Whether the checkpoint is lost and the driver has not yet shown which processes have memory.
    /// Until then the agent grants nothing.
    is_checkpoint_lost: bool,
    /// The cgroup of the container that its live processes are in.
    cgroup: Option<String>,
    denials: Vec<u64>,
    /// `None` where the agent does not charge contexts.
    context_sizes: Option<Arc<ContextSizes>>,
    denials_by_function: BTreeMap<String, u64>,
    last_denied: Option<DeniedAllocation>,
    /// Limits the log lines of this container.
    log_limiter: LogLimiter,
    /// Limits the log lines that concern all containers.
    shared_log_limiter: SharedLogLimiter,
    requests: u64,
    /// The quota that the pod requested, by account.
    requested: Vec<Units>,
    /// The lower quotas that the operator has ordered since, by account.
    overrides: Vec<Option<Units>>,
    /// The managed memory that the driver moves away for device memory, by account.
    evictable: Vec<Units>,
    /// When the last image exited.
    last_exit: Option<Instant>,
    /// The process generation of the last image that said hello.
    generation: u64,
    fault_log: FaultLog,
    /// The faults that the fault task has not taken yet.
    unreported_faults: Vec<Fault>,
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
    /// The containers of the same claim, which share the quota.
    siblings: Option<ClaimSiblings>,
}

const _: () = assert!(MAX_PROCESSES <= messages::MAX_LISTED);

/// A process that has said hello, or that the checkpoint lists.
struct ProcessState {
    process: Process,
    image: u64,
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

/// The answer to a hello, and what must happen before the agent sends it.
pub(super) struct Admission {
    pub(super) welcome: Response,
    pub(super) page: Arc<OwnedFd>,
    /// The change that the checkpoint must hold before the agent answers.
    pub(super) change: ChangeNumber,
    /// Cancelled when another connection takes over this process.
    pub(super) superseded: CancellationToken,
    /// Whether the process had another image before.
    pub(super) replaced_image: bool,
}

/// A live process that the checkpoint lists.
pub(super) struct RestoredProcess {
    pub(super) process: Process,
    pub(super) image: u64,
    pub(super) superseded: CancellationToken,
}

impl Container {
    /// Admits a process that says hello. A process has a new image after an exec, and the same
    /// image when it connects again.
    pub(super) fn handle_hello(
        &mut self,
        process: Process,
        image: u64,
        version: u16,
        holdings: &[HeldCredit],
        resolver: &dyn ContainerResolver,
    ) -> Result<Admission, RejectReason> {
        let pid = process.pid;
        let cgroup = self.resolve_cgroup(pid, resolver)?;
        let known = self
            .processes
            .get(&pid)
            .is_some_and(|state| (state.process, state.image) == (process, image));
        if !self.processes.contains_key(&pid) && self.processes.len() >= MAX_PROCESSES {
            return Err(RejectReason::Busy);
        }
        // The agent takes a page before it changes anything, so that a process without a page keeps
        // its state.
        let now = Instant::now();
        let page = self.pages.take_page(self.accounts.len(), now);
        let (page, fd) = page.map_err(|error| {
            if let Some(suppressed) = self.log_limiter.due("no page", now) {
                let allocation = self.spec.allocation;
                tracing::warn!(%allocation, pid, %error, suppressed, "failed to create a credit page");
            }
            RejectReason::Busy
        })?;
        let (mut exported, mut generation, mut has_broken_page) = (Vec::new(), None, false);
        let mut page_fds = vec![Arc::clone(&fd)];
        let before = self.processes.remove(&pid);
        let replaced_image = before.is_some() && !known;
        if let Some(before) = before {
            before.superseded.cancel();
            self.drop_requests_of(pid);
            exported = before.current_exports();
            generation = Some(before.generation).filter(|_| known);
            has_broken_page = known && before.has_broken_page;
            let mut former = before.page_fds.into_iter();
            page_fds.extend(former.next());
            if !before.has_adopted_page {
                // The last adopted page is the oldest.
                page_fds.extend(former.next_back());
            }
            self.return_pages(former, now);
            if !known {
                self.credit.mark_exited(pid, &std::mem::take(&mut exported));
                self.last_exit = Some(now);
                self.fault_log
                    .record_exit(before.process, before.generation);
                self.close_released_faults();
            }
        }
        let generation = generation.unwrap_or_else(|| {
            self.generation = self.generation.saturating_add(1);
            self.generation
        });
        let untracked = self.untracked_by(pid);
        self.credit.clear_untracked(pid);
        self.update_from_siblings();
        self.fill_page(&page, pid, known, holdings, &untracked, &exported);
        self.cgroup = Some(cgroup);
        let superseded = CancellationToken::new();
        self.processes.insert(
            pid,
            ProcessState {
                process,
                image,
                generation,
                protocol_version: version,
                namespace_pids: resolver.namespace_pids(pid),
                page: Some(page),
                page_fds,
                has_adopted_page: false,
                exported,
                has_broken_page,
                superseded: superseded.clone(),
            },
        );
        self.refresh_pages();
        self.publish_fences();
        Ok(Admission {
            welcome: self.welcome(version, generation),
            page: fd,
            change: self.note_change(),
            superseded,
            replaced_image,
        })
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
        let others = self.processes.keys().any(|other| *other != pid);
        match &self.cgroup {
            Some(known) if others && *known != cgroup => Err(RejectReason::Identity),
            _ => Ok(cgroup),
        }
    }

    /// Answers a query for the container's usage of an account. The answer lists each process by
    /// its pid in the caller's pid namespace, and omits processes without a pid there.
    pub(super) fn query_usage(
        &self,
        pid: u32,
        account: &messages::Account,
        resolver: &dyn ContainerResolver,
    ) -> Result<Response, RejectReason> {
        self.resolve_cgroup(pid, resolver)?;
        let index = self
            .accounts
            .iter()
            .position(|other| to_wire_account(other) == *account)
            .ok_or(RejectReason::Account)?;
        let depth = resolver.namespace_pids(pid).len();
        let mut used = self
            .credit
            .exited(index)
            .saturating_add(self.credit.untracked(index))
            .saturating_add(self.credit.leased(index))
            .saturating_add(self.credit.sibling_charges(index))
            .saturating_add(self.covered_use(index));
        let mut processes = Vec::new();
        for (pid, state) in &self.processes {
            let units = self.used_by(*pid, state, index);
            used = used.saturating_add(units);
            let seen = depth
                .checked_sub(1)
                .and_then(|own| state.namespace_pids.get(own));
            if let Some(pid) = seen.filter(|_| units > Units::ZERO) {
                processes.push(ProcessUsage {
                    pid: *pid,
                    bytes: units.bytes(),
                });
            }
        }
        Ok(Response::Usage {
            quota: self.credit.quota(index).bytes(),
            used: used.bytes(),
            processes,
        })
    }

    /// Fills the new page of a process. For a known process the accounts count, not the holdings
    /// that it reports. An unknown process is admitted with its claim, within the quota. The
    /// driver's figure (`untracked`) without the uncharged margin is the least that counts.
    fn fill_page(
        &mut self,
        page: &CreditPage,
        pid: u32,
        known: bool,
        holdings: &[HeldCredit],
        untracked: &[Units],
        exported: &[Units],
    ) {
        let amount_of =
            |amounts: &[Units], index: usize| amounts.get(index).copied().unwrap_or(Units::ZERO);
        for (index, account) in self.accounts.iter().enumerate() {
            let Some(slot) = page.slot(index) else {
                continue;
            };
            let wire_account = to_wire_account(account);
            let held = holdings
                .iter()
                .find(|holding| holding.account == wire_account);
            let (claimed, used) =
                held.map_or((Units::ZERO, Units::ZERO), |held| (held.granted, held.used));
            let minimum = amount_of(untracked, index)
                .saturating_sub(Units::within(self.uncharged_margin().0));
            let granted = if known {
                self.credit.granted_to(pid, index)
            } else {
                self.credit.admit_claimed(pid, index, claimed.max(minimum))
            };
            slot.set_quota(self.credit.quota(index));
            slot.set_context(self.context_charge(account));
            slot.set_evictable(amount_of(&self.evictable, index));
            slot.set_exported(amount_of(exported, index));
            slot.set(CreditWord {
                granted: granted.0,
                used: used.0,
            });
        }
    }

    /// The bytes that a process had as an untracked process, by account.
    fn untracked_by(&self, pid: u32) -> Vec<Units> {
        let accounts = 0..self.accounts.len();
        accounts
            .map(|index| self.credit.untracked_by(pid, index))
            .collect()
    }

    fn has_untracked(&self) -> bool {
        (0..self.accounts.len()).any(|index| self.credit.untracked(index) > Units::ZERO)
    }

    /// The answer to a hello, in the lower of both protocol versions.
    fn welcome(&self, version: u16, generation: u64) -> Response {
        let quota = |(index, account): (usize, &Account)| Quota {
            account: to_wire_account(account),
            bytes: self.credit.quota(index).bytes(),
        };
        Response::Welcome {
            version: version.min(VERSION),
            generation: (version >= POISON_SINCE).then_some(generation),
            quotas: self.accounts.iter().enumerate().map(quota).collect(),
        }
    }

    /// Notes that a process has sent a message, and so has its page. Returns whether its exports
    /// have changed: the checkpoint must hold them before the agent answers.
    fn update_exports(&mut self, pid: u32) -> bool {
        let Some(state) = self.processes.get_mut(&pid) else {
            return false;
        };
        state.has_adopted_page = true;
        let exported = state.current_exports();
        let has_changed = state.exported != exported;
        state.exported = exported;
        has_changed
    }

    /// The GPUs, in the order of the accounts.
    pub(super) fn gpus(&self) -> Vec<GpuUuid> {
        let gpus = self.spec.gpus.iter();
        gpus.map(|(gpu, _)| gpu.clone()).collect()
    }

    /// Changes the requested quota of an account.
    pub(super) fn set_requested_quota(&mut self, account: &Account, quota: Bytes) {
        let Some(index) = self.accounts.iter().position(|other| other == account) else {
            return;
        };
        if let Some(requested) = self.requested.get_mut(index) {
            *requested = Units::within(quota.0);
        }
        self.apply_quota(index);
    }

    /// Writes the usage of the container's other processes into every page.
    pub(super) fn refresh_pages(&self) {
        let exited = self
            .credit
            .exited_and_orphaned()
            .map(|amounts| amounts.len())
            .iter()
            .sum::<usize>();
        let siblings = self.processes.len().saturating_sub(1) + exited;
        let siblings = u32::try_from(siblings).unwrap_or(u32::MAX);
        for index in 0..self.accounts.len() {
            let uses = self
                .processes
                .iter()
                .map(|(pid, state)| (state, self.used_by(*pid, state, index)))
                .collect::<Vec<_>>();
            let all = uses.iter().map(|(_, used)| *used).sum::<Units>();
            let all = all.saturating_add(self.credit.exited(index));
            let all = all.saturating_add(self.credit.untracked(index));
            let all = all.saturating_add(self.credit.leased(index));
            let all = all.saturating_add(self.credit.sibling_charges(index));
            let all = all.saturating_add(self.covered_use(index));
            // A process whose covered managed memory changes must ask for the figure.
            let covered = self.credit.covered_by(index);
            let has_covered =
                covered.is_some_and(|covered| self.credit.granted(covered) > Units::ZERO);
            let siblings = siblings.saturating_add(u32::from(has_covered));
            for (state, used) in uses {
                if let Some(slot) = state.page.as_ref().and_then(|page| page.slot(index)) {
                    slot.set_others(all.saturating_sub(used), siblings);
                }
            }
        }
    }

    /// Every account, for status and metrics.
    pub(super) fn account_usage(&self) -> Vec<AccountUsage> {
        let usage = |(index, account): (usize, &Account)| AccountUsage {
            allocation: self.spec.allocation,
            account: account.clone(),
            quota: Bytes(self.credit.quota(index).bytes()),
            granted: Bytes(self.credit.granted(index).bytes()),
            used: Bytes(
                self.processes
                    .iter()
                    .map(|(pid, state)| self.used_by(*pid, state, index))
                    .sum::<Units>()
                    .bytes(),
            ),
            exited: Bytes(self.credit.exited(index).bytes()),
            peak: Bytes(self.credit.peak(index).bytes()),
            denied: self.denials.get(index).copied().unwrap_or(0),
            processes: self.processes.len(),
        };
        self.accounts.iter().enumerate().map(usage).collect()
    }

    /// The bytes that a process uses: the figure of its page, at most its grant. Without a page the
    /// whole grant counts.
    fn used_by(&self, pid: u32, state: &ProcessState, account: usize) -> Units {
        let granted = self.credit.granted_to(pid, account);
        let slot = state.adopted_page().and_then(|page| page.slot(account));
        slot.map_or(granted, |slot| Units(slot.word().used).min(granted))
    }
}

impl ProcessState {
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

fn to_units(units: &[u32]) -> Vec<Units> {
    units
        .iter()
        .map(|units| Units(*units).min(Units::MAX))
        .collect()
}

fn to_wire_account(account: &Account) -> messages::Account {
    match account {
        Account::Gpu(uuid) => messages::Account::Device(uuid.as_str().to_owned()),
        Account::Managed => messages::Account::Managed,
    }
}

#[cfg(test)]
mod tests;
