//! Charges the processes of a container from their hello to their exit.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use bursar_host::checkpoint::version::Version;
use bursar_protocol::credit::CreditWord;
use bursar_protocol::credit_page::CreditPage;
use bursar_protocol::fence::Fence;
use bursar_protocol::messages::HeldCredit;
use bursar_protocol::units::Units;
use tokio_util::sync::CancellationToken;

use super::super::pages::PageUnavailable;
use super::super::{RestoredProcess, to_wire_account};
use super::ContainerMemory;
use super::process::ProcessState;
use crate::checkpoint::{CheckpointContent, ProcessEntry};
use crate::recovery::FaultLog;
use crate::{ContainerResolver, MAX_PROCESSES, Process, ProcessImage};

/// A process that is charged since its hello.
pub(crate) struct AdmittedProcess {
    pub(crate) page: Arc<OwnedFd>,
    /// The process generation of its image.
    pub(crate) generation: u64,
    /// Cancelled when another connection takes over the process.
    pub(crate) superseded: CancellationToken,
    /// The image that the process had before.
    pub(crate) replaced: Option<ProcessImage>,
}

impl ContainerMemory {
    /// Whether the container has as many processes as it may, without this one.
    pub(crate) fn is_full_for(&self, pid: u32) -> bool {
        !self.processes.contains_key(&pid) && self.processes.len() >= MAX_PROCESSES
    }

    /// Charges a process that says hello, and fills a page for it. A process has a new image after
    /// an exec, and the same image when it connects again. A new number without an exec is the same
    /// image, because a process would otherwise end the fault of its poisoned context by a second
    /// hello.
    ///
    /// # Errors
    /// Why the process gets no page. Nothing has changed then.
    pub(crate) fn admit(
        &mut self,
        process: Process,
        image: u64,
        version: u16,
        holdings: &[HeldCredit],
        resolver: &dyn ContainerResolver,
    ) -> Result<AdmittedProcess, PageUnavailable> {
        let pid = process.pid;
        let former = self.processes.get(&pid);
        let former = former.filter(|state| state.process == process);
        let known = former.is_some_and(|state| state.image == image || state.keeps_image());
        // The agent takes a page before it changes anything, so that a process without a page keeps
        // its state.
        let now = Instant::now();
        let (page, fd) = self.pages.take_page(self.accounts.len(), now)?;
        let mut page_fds = vec![Arc::clone(&fd)];
        let mut former = self.end_former_connection(pid, known, now, &mut page_fds);
        let replaced = former
            .take_if(|_| !known)
            .map(|state| state.process_image());
        let state = former.unwrap_or_else(|| {
            self.generation = self.generation.saturating_add(1);
            ProcessState::new(process, image, self.generation)
        });
        let untracked = self.credit.take_untracked(pid);
        self.claim.update(&mut self.credit);
        self.fill_page(&page, pid, known, holdings, &untracked, &state.exported);
        let (generation, superseded) = (state.generation, CancellationToken::new());
        let state = ProcessState {
            image,
            image_memory: state.image_memory.or_else(|| resolver.image_memory(pid)),
            protocol_version: version,
            namespace_pids: resolver.namespace_pids(pid),
            page: Some(page),
            page_fds,
            has_adopted_page: false,
            superseded: superseded.clone(),
            ..state
        };
        self.processes.insert(pid, state);
        Ok(AdmittedProcess {
            page: fd,
            generation,
            superseded,
            replaced,
        })
    }

    /// Ends the connection that a process had before, and its image if the new one is not `known`.
    /// Adds the descriptors of pages that the process may still use to `page_fds`.
    fn end_former_connection(
        &mut self,
        pid: u32,
        known: bool,
        now: Instant,
        page_fds: &mut Vec<Arc<OwnedFd>>,
    ) -> Option<ProcessState> {
        let mut former = self.processes.remove(&pid)?;
        former.superseded.cancel();
        former.exported = former.current_exports();
        let mut fds = std::mem::take(&mut former.page_fds).into_iter();
        page_fds.extend(fds.next());
        if !former.has_adopted_page {
            // The last adopted page is the oldest.
            page_fds.extend(fds.next_back());
        }
        for fd in fds {
            self.pages.return_page(fd, now);
        }
        if !known {
            self.credit.mark_exited(pid, &former.exported);
            self.claim.record_exit(now);
        }
        Some(former)
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
        let margin = Units::within(self.uncharged_margin().0);
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
            let minimum = amount_of(untracked, index).saturating_sub(margin);
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

    /// Ends an image that has exited, unless the process has another one by now. Its grants stay
    /// charged.
    pub(crate) fn end_image(&mut self, process: Process, image: u64) -> Option<ProcessImage> {
        let ended = self.find_image(process, image)?;
        let state = self.processes.remove(&process.pid)?;
        let now = Instant::now();
        self.credit
            .mark_exited(process.pid, &state.current_exports());
        self.claim.record_exit(now);
        for fd in state.page_fds {
            self.pages.return_page(fd, now);
        }
        Some(ended)
    }

    /// The image with this number, if the process has it now.
    pub(crate) fn find_image(&self, process: Process, image: u64) -> Option<ProcessImage> {
        let state = self.processes.get(&process.pid)?;
        let is_it = (state.process, state.image) == (process, image);
        is_it.then(|| state.process_image())
    }

    /// The image that a process has now.
    pub(crate) fn image_of(&self, pid: u32) -> Option<ProcessImage> {
        Some(self.processes.get(&pid)?.process_image())
    }

    /// The images of the live processes.
    pub(crate) fn images(&self) -> impl Iterator<Item = ProcessImage> {
        self.processes.values().map(ProcessState::process_image)
    }

    /// The protocol version that a process speaks.
    pub(crate) fn protocol_version(&self, pid: u32) -> Option<u16> {
        Some(self.processes.get(&pid)?.protocol_version)
    }

    /// A process that is the init of its pid namespace. Such a process is the container's main
    /// process if its parent is outside of the container. `kubectl exec` starts no init of a
    /// namespace, and the init of a namespace that the container created has its parent inside.
    pub(crate) fn pid_namespace_init(&self, pid: u32) -> Option<Process> {
        let state = self.processes.get(&pid)?;
        (state.namespace_pids.last() == Some(&1)).then_some(state.process)
    }

    /// Whether the page of a process did not accept a grant.
    pub(crate) fn has_broken_page(&self, pid: u32) -> bool {
        let state = self.processes.get(&pid);
        state.is_some_and(|state| state.has_broken_page)
    }

    #[cfg(test)]
    pub(crate) fn has_adopted_page(&self, pid: u32) -> bool {
        self.processes[&pid].has_adopted_page
    }

    /// Writes into every process's page whether the agent has fenced it, and why.
    pub(crate) fn publish_fences(&self, fence_of: impl Fn(&ProcessImage) -> Option<Fence>) {
        for state in self.processes.values() {
            if let Some(page) = &state.page {
                page.set_fence(fence_of(&state.process_image()));
            }
        }
    }

    /// Charges what the checkpoint lists. Returns the processes that still live, and the images
    /// that have exited since.
    pub(crate) fn restore(
        &mut self,
        content: CheckpointContent,
        resolver: &dyn ContainerResolver,
    ) -> (Vec<RestoredProcess>, Vec<ProcessImage>) {
        self.restore_quotas(&content.overrides);
        for (pid, units) in &content.exited {
            self.credit.restore_grant(*pid, units);
            self.credit.mark_exited(*pid, &[]);
        }
        for (pid, units) in &content.orphaned {
            self.credit.restore_grant(*pid, units);
            self.credit.mark_exited(*pid, units);
        }
        for (lease, account, units) in &content.leases {
            self.credit.adopt_lease(*lease, *account, *units);
        }
        self.generation = content.generation;
        let (mut live, mut exited) = (Vec::new(), Vec::new());
        for ProcessEntry {
            process,
            image,
            generation,
            granted,
            exported,
        } in content.processes
        {
            self.credit.restore_grant(process.pid, &granted);
            if resolver.process(process.pid) != Some(process) {
                self.credit.mark_exited(process.pid, &exported);
                exited.push(ProcessImage {
                    process,
                    generation,
                });
                continue;
            }
            let state = ProcessState {
                namespace_pids: resolver.namespace_pids(process.pid),
                exported,
                ..ProcessState::new(process, image, generation)
            };
            live.push(RestoredProcess {
                process,
                image,
                superseded: state.superseded.clone(),
            });
            self.processes.insert(process.pid, state);
        }
        if !self.credit.exited_and_orphaned()[0].is_empty() {
            // This agent has not sampled the memory of the exited processes yet.
            self.claim.record_exit(Instant::now());
        }
        (live, exited)
    }

    /// The content of the checkpoint, with the parts that others own.
    pub(crate) fn checkpoint_content(
        &self,
        is_checkpoint_lost: bool,
        fault_log: FaultLog,
    ) -> CheckpointContent {
        let [exited, orphaned] = self.credit.exited_and_orphaned();
        let granted = |pid| self.credit.grants().get(&pid).cloned().unwrap_or_default();
        let entry = |state: &ProcessState| ProcessEntry {
            process: state.process,
            image: state.image,
            generation: state.generation,
            granted: granted(state.process.pid),
            exported: state.exported.clone(),
        };
        let lease = |(id, (account, units)): (&u64, &(usize, Units))| (*id, *account, *units);
        CheckpointContent {
            version: Version,
            processes: self.processes.values().map(entry).collect(),
            exited: exited.clone().into_iter().collect(),
            orphaned: orphaned.clone().into_iter().collect(),
            leases: self.credit.leases().iter().map(lease).collect(),
            gpus: self.gpus().cloned().collect(),
            incomplete: is_checkpoint_lost || self.credit.has_untracked(),
            overrides: self.quotas.ordered().to_vec(),
            generation: self.generation,
            fault_log,
        }
    }
}
