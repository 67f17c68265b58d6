//! Writes a container to its checkpoint, and restores it from there.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use bursar_ledger::BootTime;
use bursar_protocol::credit_page::CreditPage;
use bursar_protocol::units::Units;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::super::checkpoint::{CheckpointContent, ProcessEntry, SessionCheckpoint};
use super::super::recovery::FaultLog;
use super::super::{Account, ContainerResolver, CreditAccounts, SessionSpec};
use super::denials::{Denials, LogLimiter, SharedLogLimiter};
use super::faults::UnreportedFaults;
use super::memory::ContainerMemory;
use super::pages::PagePool;
use super::quotas::Quotas;
use super::recording::PendingChanges;
use super::siblings::ClaimMember;
use super::{Container, ProcessState, RestoredProcess};

impl Container {
    /// Restores a container from its checkpoint, with its live processes. Where the agent
    /// `served_before`, a missing checkpoint means that unknown processes may live.
    pub(in super::super) fn restore(
        spec: SessionSpec,
        checkpoint: SessionCheckpoint,
        served_before: bool,
        resolver: &dyn ContainerResolver,
        now: BootTime,
    ) -> (Container, Vec<RestoredProcess>) {
        let content = checkpoint.read();
        let is_lost = content
            .as_ref()
            .map_or(served_before, |content| content.incomplete);
        let content = content.unwrap_or_default();
        let mut container = Container::without_processes(spec, checkpoint);
        container.is_checkpoint_lost = is_lost;
        container.generation = match content.generation {
            // Generations issued since the boot are lower, since a container has at most one image
            // each microsecond. The wall clock may have been set back.
            0 if is_lost => now.0.saturating_mul(1_000),
            known => known,
        };
        container.fault_log = content.fault_log;
        container.memory.restore_quotas(&content.overrides);
        container.restore_exited(&content.exited, &content.orphaned);
        container.restore_leases(&content.leases);
        let known = container.restore_processes(content.processes, resolver);
        container.close_released_faults();
        let [exited, _] = container.memory.credit.exited_and_orphaned();
        if !exited.is_empty() {
            // This agent has not sampled the memory of the exited processes yet.
            container.memory.claim.record_exit(Instant::now());
        }
        // After this write, a checkpoint that is missing next time is a lost one.
        container.write_checkpoint();
        (container, known)
    }

    /// A container with the accounts of `spec` to which nothing is charged.
    fn without_processes(spec: SessionSpec, checkpoint: SessionCheckpoint) -> Container {
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
        Container {
            memory: ContainerMemory {
                allocation: spec.allocation,
                accounts,
                credit: CreditAccounts::new(requested.clone()),
                processes: BTreeMap::new(),
                quotas: Quotas::new(requested),
                context_sizes: None,
                evictable: Vec::new(),
                claim: ClaimMember::new(spec.allocation, spec.gpus.len()),
            },
            spec,
            checkpoint,
            is_checkpoint_lost: false,
            cgroup: None,
            denials: Denials::default(),
            log_limiter: LogLimiter::default(),
            shared_log_limiter: SharedLogLimiter::default(),
            requests: 0,
            generation: 0,
            fault_log: FaultLog::default(),
            unreported_faults: UnreportedFaults::default(),
            is_drained: false,
            pages: PagePool::new(CreditPage::create),
            pending_changes: PendingChanges::default(),
            change_notify: Arc::default(),
            orphans_changed: watch::Sender::default(),
            closer: None,
        }
    }

    /// Charges the bytes of images that had exited, and their `orphaned` exports.
    fn restore_exited(&mut self, exited: &[(u32, Vec<Units>)], orphaned: &[(u32, Vec<Units>)]) {
        for (pid, units) in exited {
            self.memory.credit.restore_grant(*pid, units);
            self.memory.credit.mark_exited(*pid, &[]);
        }
        for (pid, units) in orphaned {
            self.memory.credit.restore_grant(*pid, units);
            self.memory.credit.mark_exited(*pid, units);
        }
    }

    fn restore_leases(&mut self, leases: &[(u64, usize, Units)]) {
        for (lease, account, units) in leases {
            self.memory.credit.adopt_lease(*lease, *account, *units);
        }
    }

    /// Charges the processes that lived, and returns those that still do.
    fn restore_processes(
        &mut self,
        entries: Vec<ProcessEntry>,
        resolver: &dyn ContainerResolver,
    ) -> Vec<RestoredProcess> {
        let mut known = Vec::new();
        for ProcessEntry {
            process,
            image,
            generation,
            granted,
            exported,
        } in entries
        {
            self.memory.credit.restore_grant(process.pid, &granted);
            if resolver.process(process.pid) != Some(process) {
                self.memory.credit.mark_exited(process.pid, &exported);
                self.fault_log.record_exit(process, generation);
                continue;
            }
            let superseded = CancellationToken::new();
            known.push(RestoredProcess {
                process,
                image,
                superseded: superseded.clone(),
            });
            self.memory.processes.insert(
                process.pid,
                ProcessState {
                    process,
                    image,
                    image_memory: None,
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
        known
    }

    /// Writes the accounts to the checkpoint, and returns whether the checkpoint now holds them.
    /// The caller accounts for the time of the write.
    pub(super) fn store_checkpoint(&mut self) -> bool {
        if self.checkpoint.is_closed() {
            return false;
        }
        self.memory.publish_to_siblings();
        let by_pid = |by_pid: &BTreeMap<u32, Vec<Units>>| by_pid.clone().into_iter().collect();
        let [exited, orphaned] = self.memory.credit.exited_and_orphaned();
        let content = CheckpointContent {
            processes: self
                .memory
                .processes
                .values()
                .map(|state| ProcessEntry {
                    process: state.process,
                    image: state.image,
                    generation: state.generation,
                    granted: self
                        .memory
                        .credit
                        .grants()
                        .get(&state.process.pid)
                        .cloned()
                        .unwrap_or_default(),
                    exported: state.exported.clone(),
                })
                .collect(),
            exited: by_pid(exited),
            orphaned: by_pid(orphaned),
            leases: self
                .memory
                .credit
                .leases()
                .iter()
                .map(|(lease, (account, units))| (*lease, *account, *units))
                .collect(),
            gpus: self.memory.gpus().cloned().collect(),
            incomplete: self.is_checkpoint_lost || self.memory.has_untracked(),
            overrides: self.memory.quotas.ordered().to_vec(),
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
