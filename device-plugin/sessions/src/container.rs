//! Tracks the processes of one container, their credit pages and its accounts.
//!
//! No call waits: each takes a few memory operations and at most one small write to tmpfs.

mod contexts;
pub(super) mod denials;
pub(super) mod drain;
mod exports;
mod faults;
pub(super) mod leases;
mod pages;
pub(super) mod recording;
pub(super) mod siblings;
mod usage;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_gpu::memory_sample::ProcessMemory;
use bursar_ledger::BootTime;
use bursar_ledger::units::{Bytes, GpuUuid};
use bursar_protocol::credit::CreditWord;
use bursar_protocol::credit_page::CreditPage;
use bursar_protocol::messages::{self, HeldCredit, ProcessUsage, Quota, RejectReason, Response};
use bursar_protocol::units::Units;
use bursar_protocol::{POISON_SINCE, VERSION};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::accounts::{AmountsByPid, NO_PID};
use super::checkpoint::{CheckpointContent, ProcessEntry, SessionCheckpoint};
use super::closer::SocketCloser;
use super::context_size::ContextSizes;
use super::orphan_bound::OwnMemory;
use super::recovery::{Fault, FaultLog};
use super::usage::DeniedAllocation;
use super::{
    Account, AccountUsage, ContainerResolver, CreditAccounts, MAX_PROCESSES, Process, SessionSpec,
};
use denials::{LogLimiter, RefusalReason, SharedLogLimiter};
use pages::PagePool;
use recording::{ChangeNumber, PendingChanges};
use siblings::ClaimSiblings;

/// The bytes that a process may take without a charge: code of kernels, heaps of the device. The
/// margin only decides when memory of a replaced image counts as freed, and which part of an
/// importer's bytes an exporter left.
const UNCHARGED_MARGIN: Bytes = Bytes::mib(256);

/// The margin where the agent does not charge contexts: a little more than a context of any model.
const UNCHARGED_MARGIN_WITH_CONTEXT: Bytes = Bytes::gib(1);

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

/// How long a request waits for the driver to free the memory of an exited image. The driver takes
/// 112 ms for 100 GiB (F8 in docs/facts.md).
const RECLAIM_WINDOW: Duration = Duration::from_secs(1);

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
    /// The descriptors of that page and of the former one, for reuse. Threads of the process may
    /// still use the former page.
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
    /// Restores a container from its checkpoint, with its live processes. Where the agent
    /// `served_before`, a missing checkpoint means that unknown processes may live.
    pub(super) fn restore(
        spec: SessionSpec,
        checkpoint: SessionCheckpoint,
        served_before: bool,
        resolver: &dyn ContainerResolver,
        now: BootTime,
    ) -> (Container, Vec<RestoredProcess>) {
        let accounts: Vec<_> = spec
            .gpus
            .iter()
            .map(|(gpu, _)| Account::Gpu(gpu.clone()))
            .chain([Account::Managed])
            .collect();
        let quotas = spec
            .gpus
            .iter()
            .map(|(_, quota)| quota)
            .chain([&spec.managed]);
        let requested: Vec<_> = quotas.map(|quota| Units::within(quota.0)).collect();
        let credit = CreditAccounts::new(requested.clone());
        let denials = vec![0; accounts.len()];
        let content = checkpoint.read();
        let is_lost = content
            .as_ref()
            .map_or(served_before, |content| content.incomplete);
        let content = content.unwrap_or_default();
        let mut overrides: Vec<_> = content
            .overrides
            .iter()
            .map(|units| units.map(Units))
            .collect();
        overrides.resize(accounts.len(), None);
        let mut container = Container {
            spec,
            accounts,
            credit,
            checkpoint,
            processes: BTreeMap::new(),
            is_checkpoint_lost: is_lost,
            cgroup: None,
            denials,
            context_sizes: None,
            denials_by_function: BTreeMap::new(),
            last_denied: None,
            log_limiter: LogLimiter::default(),
            shared_log_limiter: SharedLogLimiter::default(),
            requests: 0,
            requested,
            overrides,
            evictable: Vec::new(),
            last_exit: None,
            generation: match content.generation {
                // Generations issued since the boot are lower, since a container has at most one
                // image each microsecond. The wall clock may have been set back.
                0 if is_lost => now.0.saturating_mul(1_000),
                known => known,
            },
            fault_log: content.fault_log,
            unreported_faults: Vec::new(),
            is_drained: false,
            pages: PagePool::new(CreditPage::create),
            pending_changes: PendingChanges::default(),
            change_notify: Arc::default(),
            orphans_changed: watch::Sender::default(),
            closer: None,
            siblings: None,
        };
        for index in 0..container.accounts.len() {
            container.apply_quota(index);
        }
        for (pid, units) in content.exited {
            container.credit.restore_grant(pid, &to_units(&units));
            container.credit.mark_exited(pid, &[]);
        }
        for (pid, units) in content.orphaned {
            container.credit.restore_grant(pid, &to_units(&units));
            container.credit.mark_exited(pid, &to_units(&units));
        }
        for (lease, account, units) in content.leases {
            let units = Units(units).min(Units::MAX);
            container.credit.adopt_lease(lease, account, units);
        }
        let mut known = Vec::new();
        for ProcessEntry {
            process,
            image,
            generation,
            granted,
            exported,
        } in content.processes
        {
            let exported = to_units(&exported);
            container
                .credit
                .restore_grant(process.pid, &to_units(&granted));
            if resolver.process(process.pid) != Some(process) {
                container.credit.mark_exited(process.pid, &exported);
                container.fault_log.record_exit(process, generation);
                continue;
            }
            let superseded = CancellationToken::new();
            known.push(RestoredProcess {
                process,
                image,
                superseded: superseded.clone(),
            });
            container.processes.insert(
                process.pid,
                ProcessState {
                    process,
                    image,
                    generation,
                    protocol_version: 1,
                    namespace_pids: resolver.namespace_pids(process.pid),
                    page: None,
                    page_fds: Vec::new(),
                    has_adopted_page: false,
                    exported,
                    has_broken_page: false,
                    superseded,
                },
            );
        }
        container.close_released_faults();
        let [exited, _] = container.credit.exited_and_orphaned();
        if !exited.is_empty() {
            // This agent has not sampled the memory of the exited processes yet.
            container.last_exit = Some(Instant::now());
        }
        // After this write, a checkpoint that is missing next time is a lost one.
        container.write_checkpoint();
        (container, known)
    }

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
            exported = before.current_exports();
            generation = Some(before.generation).filter(|_| known);
            has_broken_page = known && before.has_broken_page;
            let mut former = before.page_fds.into_iter();
            page_fds.extend(former.next());
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

    /// Notes that a process has sent a message, and so has its page. The checkpoint holds its
    /// exports before the agent answers.
    fn mark_active(&mut self, pid: u32) {
        if self.update_exports(pid) {
            self.write_checkpoint();
        }
    }

    /// Notes that a process has sent a message. Returns whether its exports have changed and the
    /// checkpoint must hold them.
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

    /// Whether a request would be refused only for bytes of an image that exited a moment ago, or
    /// whose kill is due: the driver is about to free them. A re-executed program requests its
    /// whole quota at once. A request that the agent received before the window waits no more.
    pub(super) fn is_reclaim_pending(
        &self,
        pid: u32,
        account: u8,
        need: Units,
        received_at: Instant,
        now: BootTime,
    ) -> bool {
        let index = usize::from(account);
        let recently = |then: Instant| then.elapsed() < RECLAIM_WINDOW;
        let free = self
            .credit
            .free(index)
            .saturating_add(self.idle_credit_for(pid, index));
        let of_ending: Units = self
            .fault_log
            .ending_pids(now)
            .map(|ending| self.credit.granted_against(ending, index))
            .sum();
        let with_ended = free
            .saturating_add(of_ending)
            .saturating_add(self.credit.exited_against(index))
            .saturating_add(self.credit.sibling_charges(index));
        let has_ended = self.last_exit_in_claim().is_some_and(recently);
        recently(received_at)
            && (has_ended || of_ending > Units::ZERO)
            && !self.is_fenced(pid)
            && (free.saturating_add(Units(1))..=with_ended).contains(&need)
    }

    /// Reserves credit for a process in the accounts: first from free bytes, then from idle credit
    /// of other processes.
    fn reserve_credit(
        &mut self,
        pid: u32,
        index: usize,
        need: Units,
    ) -> Result<Units, RefusalReason> {
        if self.is_fenced(pid) {
            return Err(RefusalReason::Fenced);
        }
        if self.is_checkpoint_lost {
            return Err(RefusalReason::RecordLost);
        }
        self.update_from_siblings();
        if self.credit.free(index) < need {
            self.reclaim_for(pid, index, need);
        }
        let granted = self.credit.grant(pid, index, need);
        granted.map_err(|_| RefusalReason::Quota)
    }

    /// Grants reserved credit to the page of a process. A page that the process has left is frozen.
    /// Any other page that rejects a grant is being overwritten without pause, or was.
    fn grant_to_page(
        &mut self,
        pid: u32,
        index: usize,
        units: Units,
    ) -> Result<Units, RefusalReason> {
        let state = self.processes.get_mut(&pid);
        let granted = state.is_some_and(|state| {
            let page = state.page.as_ref();
            let Some(slot) = page.and_then(|page| page.slot(index)) else {
                return false;
            };
            let granted = slot.grant(units);
            state.has_broken_page |= !granted && !slot.word().is_frozen();
            granted
        });
        if granted {
            if self.credit.covered() == Some(index) {
                // The pages of the GPUs' accounts must show the bytes.
                self.refresh_pages();
            }
            return Ok(units);
        }
        self.credit.revoke(pid, index, units);
        Err(RefusalReason::NoPage)
    }

    /// Handles the exit of a process image, whose grants stay charged.
    pub(super) fn handle_exit(&mut self, process: Process, image: u64) {
        let state = self.processes.get(&process.pid);
        if state.is_none_or(|state| (state.process, state.image) != (process, image)) {
            return;
        }
        let Some(state) = self.processes.remove(&process.pid) else {
            return;
        };
        self.credit
            .mark_exited(process.pid, &state.current_exports());
        let now = Instant::now();
        self.return_pages(state.page_fds, now);
        self.last_exit = Some(now);
        self.fault_log.record_exit(process, state.generation);
        self.close_released_faults();
        self.refresh_pages();
        self.note_change();
    }

    fn return_pages(&mut self, fds: impl IntoIterator<Item = Arc<OwnedFd>>, now: Instant) {
        for fd in fds {
            self.pages.return_page(fd, now);
        }
    }

    /// The exited processes to look up in the driver; `None` where the agent need not sample.
    pub(super) fn reclaim_query(&self) -> Option<ReclaimQuery> {
        let [exited, _] = self.credit.exited_and_orphaned();
        (!exited.is_empty() || self.is_checkpoint_lost).then(|| exited.clone())
    }

    /// The GPUs, in the order of the accounts.
    pub(super) fn gpus(&self) -> Vec<GpuUuid> {
        let gpus = self.spec.gpus.iter();
        gpus.map(|(gpu, _)| gpu.clone()).collect()
    }

    /// Applies a sample of each GPU. Bytes that the driver no longer charges to an exited process
    /// become free, except its exports. Processes that have exited since the query are not in the
    /// sample.
    pub(super) fn apply_samples(
        &mut self,
        query: &ReclaimQuery,
        samples: &[ProcessMemory],
        resolver: &dyn ContainerResolver,
        now: BootTime,
    ) {
        let before = (self.credit.clone(), self.is_checkpoint_lost);
        self.find_untracked(samples, resolver);
        for (pid, units) in query {
            if self.credit.exited_and_orphaned()[0].get(pid) == Some(units)
                && self.is_reclaimed(*pid, samples)
            {
                self.credit.release_exited(*pid);
            }
        }
        self.close_released_faults();
        self.escalate_held_memory(samples, now);
        if before != (self.credit.clone(), self.is_checkpoint_lost) {
            self.refresh_pages();
            self.note_change();
        }
    }

    /// Whether the driver has freed all memory of an exited image.
    fn is_reclaimed(&self, pid: u32, samples: &[ProcessMemory]) -> bool {
        samples.iter().enumerate().all(|(index, sample)| {
            // After an exec the pid lives on with a new image.
            let state = self.processes.get(&pid);
            let own = state.map(|state| self.own_memory(pid, state, index));
            let own = |charged| own.map_or(Bytes::ZERO, |own| own.own_part(charged));
            sample
                .bytes_of(pid)
                .is_some_and(|charged| charged == own(charged))
        })
    }

    /// The bytes that a live process itself has allocated.
    fn own_memory(&self, pid: u32, state: &ProcessState, index: usize) -> OwnMemory {
        let exported = self.exports_of(pid, state, index);
        OwnMemory {
            allocation: self.spec.allocation,
            charged: Bytes(self.used_by(pid, state, index).bytes()),
            exported: Bytes(exported.bytes()),
            uncharged_margin: self.uncharged_margin(),
        }
    }

    fn uncharged_margin(&self) -> Bytes {
        match self.context_sizes {
            Some(_) => UNCHARGED_MARGIN,
            None => UNCHARGED_MARGIN_WITH_CONTEXT,
        }
    }

    /// Finds untracked processes after the loss of a checkpoint, and charges them what the driver
    /// reports. From then on the audit maintains the figures.
    fn find_untracked(&mut self, samples: &[ProcessMemory], resolver: &dyn ContainerResolver) {
        if !self.is_checkpoint_lost {
            return;
        }
        self.is_checkpoint_lost = false;
        for (index, sample) in samples.iter().enumerate() {
            let untracked = sample.iter().filter(|(pid, _)| {
                let has_session = self.processes.contains_key(pid);
                !has_session && resolver.container(*pid, &self.spec.pod).is_some()
            });
            // Where the driver does not report an amount, the process may have all of the quota.
            let all = self.credit.quota(index);
            let units = |bytes: Option<Bytes>| Units::holding(bytes?.0);
            let untracked = untracked
                .map(|(pid, bytes)| (pid, units(bytes).unwrap_or(all)))
                .collect();
            self.credit.set_untracked(index, untracked);
        }
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

    fn idle_credit_of_others(&self, pid: u32, account: usize) -> Units {
        let others = self.processes.iter().filter(|(other, _)| **other != pid);
        others
            .filter_map(|(other, state)| {
                let slot = state.adopted_page()?.slot(account)?;
                Some(Units(slot.word().idle()).min(self.credit.granted_to(*other, account)))
            })
            .sum()
    }

    /// The covered managed memory that counts against an account.
    fn covered_use(&self, account: usize) -> Units {
        let Some(covered) = self.credit.covered_by(account) else {
            return Units::ZERO;
        };
        let members = self.processes.iter();
        let live: Units = members
            .map(|(pid, state)| self.used_by(*pid, state, covered))
            .sum();
        live.saturating_add(self.credit.exited(covered))
    }

    /// The idle credit that may be taken for a request: that of the account's other processes, and
    /// that of all processes in accounts that share its quota.
    fn idle_credit_for(&self, pid: u32, account: usize) -> Units {
        let own = self.idle_credit_of_others(pid, account);
        let of_all = |account| self.idle_credit_of_others(NO_PID, account);
        let sharing = match self.credit.covered_by(account) {
            Some(covered) => Some(of_all(covered)),
            None if self.credit.covered() == Some(account) => {
                self.credit.covering().map(of_all).min()
            }
            None => None,
        };
        own.saturating_add(sharing.unwrap_or(Units::ZERO))
    }

    /// Takes back idle credit until an account has `need` free, if there is enough of it. Managed
    /// memory that is covered needs room on every GPU.
    fn reclaim_for(&mut self, pid: u32, account: usize, need: Units) {
        let covered = self.credit.covered();
        let limiting: Vec<_> = match covered == Some(account) {
            true => self.credit.covering().collect(),
            false => vec![account],
        };
        // The process has used up its idle credit of the account itself.
        let asker = |of: usize| if of == account { pid } else { NO_PID };
        let idle = |of: usize| self.idle_credit_of_others(asker(of), of);
        let shared = covered.map_or(Units::ZERO, idle);
        let missing = |credit: &CreditAccounts, of: usize| need.saturating_sub(credit.free(of));
        let is_enough = |of: &usize| idle(*of).saturating_add(shared) >= missing(&self.credit, *of);
        if !limiting.iter().all(is_enough) {
            return;
        }
        if let Some(covered) = covered {
            let most = limiting.iter().map(|of| missing(&self.credit, *of)).max();
            self.reclaim_idle(asker(covered), covered, most.unwrap_or(Units::ZERO));
        }
        for of in limiting {
            let left = missing(&self.credit, of);
            self.reclaim_idle(asker(of), of, left);
        }
    }

    fn reclaim_idle(&mut self, pid: u32, account: usize, mut missing: Units) {
        for (other, state) in self.processes.iter().filter(|(other, _)| **other != pid) {
            let Some(slot) = state.adopted_page().and_then(|page| page.slot(account)) else {
                continue;
            };
            let at_most = missing.min(self.credit.granted_to(*other, account));
            let taken = slot.reclaim(at_most);
            missing = missing.saturating_sub(self.credit.revoke(*other, account, taken));
        }
    }

    /// Writes the accounts to the checkpoint, and returns whether the checkpoint now holds them.
    /// The caller accounts for the time of the write.
    fn store_checkpoint(&mut self) -> bool {
        if self.checkpoint.is_closed() {
            return false;
        }
        self.publish_to_siblings();
        let units =
            |accounts: &[Units]| -> Vec<u32> { accounts.iter().map(|units| units.0).collect() };
        let by_pid = |by_pid: &BTreeMap<u32, Vec<Units>>| {
            by_pid
                .iter()
                .map(|(pid, accounts)| (*pid, units(accounts)))
                .collect()
        };
        let [exited, orphaned] = self.credit.exited_and_orphaned();
        let content = CheckpointContent {
            processes: self
                .processes
                .values()
                .map(|state| ProcessEntry {
                    process: state.process,
                    image: state.image,
                    generation: state.generation,
                    granted: units(
                        self.credit
                            .grants()
                            .get(&state.process.pid)
                            .map_or(&[], Vec::as_slice),
                    ),
                    exported: units(&state.exported),
                })
                .collect(),
            exited: by_pid(exited),
            orphaned: by_pid(orphaned),
            leases: self
                .credit
                .leases()
                .iter()
                .map(|(lease, (account, units))| (*lease, *account, units.0))
                .collect(),
            gpus: self.gpus(),
            incomplete: self.is_checkpoint_lost || self.has_untracked(),
            overrides: self
                .overrides
                .iter()
                .map(|order| order.map(|units| units.0))
                .collect(),
            generation: self.generation,
            fault_log: self.fault_log.clone(),
        };
        let written = self.checkpoint.write(content);
        if let Err(error) = &written
            && let Some(suppressed) = self.shared_log_limiter.due("record", Instant::now())
        {
            let allocation = self.spec.allocation;
            tracing::warn!(%allocation, %error, suppressed, "failed to write a session checkpoint; free space in /run");
        }
        written.is_ok()
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
