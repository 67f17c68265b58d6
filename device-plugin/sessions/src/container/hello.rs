//! Admits processes that say hello.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use bursar_protocol::credit::CreditWord;
use bursar_protocol::credit_page::CreditPage;
use bursar_protocol::messages::{HeldCredit, Quota, RejectReason, Response};
use bursar_protocol::units::Units;
use bursar_protocol::{POISON_SINCE, VERSION};
use tokio_util::sync::CancellationToken;

use super::super::{Account, ContainerResolver, ImageMemory, MAX_PROCESSES, Process};
use super::recording::ChangeNumber;
use super::{Container, ProcessState, to_wire_account};

/// The answer to a hello, and what must happen before the agent sends it.
pub(in super::super) struct Admission {
    pub(in super::super) welcome: Response,
    pub(in super::super) page: Arc<OwnedFd>,
    /// The change that the checkpoint must hold before the agent answers.
    pub(in super::super) change: ChangeNumber,
    /// Cancelled when another connection takes over this process.
    pub(in super::super) superseded: CancellationToken,
    /// Whether the process had another image before.
    pub(in super::super) replaced_image: bool,
}

/// The state of a process's former connection that the new one keeps.
#[derive(Default)]
struct FormerConnection {
    exported: Vec<Units>,
    /// The process generation, if the process has the same image.
    generation: Option<u64>,
    image_memory: Option<ImageMemory>,
    has_broken_page: bool,
    page_fds: Vec<Arc<OwnedFd>>,
    /// Whether the process had another image.
    replaced_image: bool,
}

impl Container {
    /// Admits a process that says hello. A process has a new image after an exec, and the same
    /// image when it connects again. A new number without an exec is the same image, because a
    /// process would otherwise end the fault of its poisoned context by a second hello.
    pub(in super::super) fn handle_hello(
        &mut self,
        process: Process,
        image: u64,
        version: u16,
        holdings: &[HeldCredit],
        resolver: &dyn ContainerResolver,
    ) -> Result<Admission, RejectReason> {
        let pid = process.pid;
        let cgroup = self.resolve_cgroup(pid, resolver)?;
        let former = self.memory.processes.get(&pid);
        let former = former.filter(|state| state.process == process);
        let known = former.is_some_and(|state| state.image == image || state.keeps_image());
        if !self.memory.processes.contains_key(&pid) && self.memory.processes.len() >= MAX_PROCESSES
        {
            return Err(RejectReason::Busy);
        }
        // The agent takes a page before it changes anything, so that a process without a page keeps
        // its state.
        let now = Instant::now();
        let (page, fd) = self.take_page(pid, now)?;
        let FormerConnection {
            exported,
            generation,
            image_memory,
            has_broken_page,
            page_fds,
            replaced_image,
        } = self.end_former_connection(pid, known, now);
        let image_memory = image_memory.or_else(|| resolver.image_memory(pid));
        let generation = generation.unwrap_or_else(|| {
            self.generation = self.generation.saturating_add(1);
            self.generation
        });
        let untracked = self.memory.untracked_by(pid);
        self.memory.credit.clear_untracked(pid);
        self.memory.update_from_siblings();
        self.fill_page(&page, pid, known, holdings, &untracked, &exported);
        self.cgroup = Some(cgroup);
        let superseded = CancellationToken::new();
        self.memory.processes.insert(
            pid,
            ProcessState {
                process,
                image,
                image_memory,
                generation,
                protocol_version: version,
                namespace_pids: resolver.namespace_pids(pid),
                page: Some(page),
                page_fds: [Arc::clone(&fd)].into_iter().chain(page_fds).collect(),
                has_adopted_page: false,
                exported,
                has_broken_page,
                superseded: superseded.clone(),
            },
        );
        self.memory.refresh_pages();
        self.publish_fences();
        Ok(Admission {
            welcome: self.welcome(version, generation),
            page: fd,
            change: self.note_change(),
            superseded,
            replaced_image,
        })
    }

    fn take_page(
        &mut self,
        pid: u32,
        now: Instant,
    ) -> Result<(CreditPage, Arc<OwnedFd>), RejectReason> {
        let page = self.pages.take_page(self.memory.accounts.len(), now);
        page.map_err(|error| {
            if let Some(suppressed) = self.log_limiter.due("no page", now) {
                let allocation = self.spec.allocation;
                tracing::warn!(%allocation, pid, %error, suppressed, "failed to create a credit page");
            }
            RejectReason::Busy
        })
    }

    /// Ends the connection that a process had before, and its image if the new one is not `known`.
    fn end_former_connection(&mut self, pid: u32, known: bool, now: Instant) -> FormerConnection {
        let Some(before) = self.memory.processes.remove(&pid) else {
            return FormerConnection::default();
        };
        before.superseded.cancel();
        self.drop_requests_of(pid);
        let mut exported = before.current_exports();
        let mut former = before.page_fds.into_iter();
        let mut page_fds: Vec<_> = former.next().into_iter().collect();
        if !before.has_adopted_page {
            // The last adopted page is the oldest.
            page_fds.extend(former.next_back());
        }
        self.return_pages(former, now);
        if !known {
            self.memory
                .credit
                .mark_exited(pid, &std::mem::take(&mut exported));
            self.memory.claim.record_exit(now);
            self.fault_log
                .record_exit(before.process, before.generation);
            self.close_released_faults();
        }
        FormerConnection {
            exported,
            generation: Some(before.generation).filter(|_| known),
            image_memory: before.image_memory.filter(|_| known),
            has_broken_page: known && before.has_broken_page,
            page_fds,
            replaced_image: !known,
        }
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
        for (index, account) in self.memory.accounts.iter().enumerate() {
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
                .saturating_sub(Units::within(self.memory.uncharged_margin().0));
            let granted = if known {
                self.memory.credit.granted_to(pid, index)
            } else {
                self.memory
                    .credit
                    .admit_claimed(pid, index, claimed.max(minimum))
            };
            slot.set_quota(self.memory.credit.quota(index));
            slot.set_context(self.memory.context_charge(account));
            slot.set_evictable(amount_of(&self.memory.evictable, index));
            slot.set_exported(amount_of(exported, index));
            slot.set(CreditWord {
                granted: granted.0,
                used: used.0,
            });
        }
    }

    /// The answer to a hello, in the lower of both protocol versions.
    fn welcome(&self, version: u16, generation: u64) -> Response {
        let quota = |(index, account): (usize, &Account)| Quota {
            account: to_wire_account(account),
            bytes: self.memory.credit.quota(index).bytes(),
        };
        Response::Welcome {
            version: version.min(VERSION),
            generation: (version >= POISON_SINCE).then_some(generation),
            quotas: self.memory.accounts.iter().enumerate().map(quota).collect(),
        }
    }
}
