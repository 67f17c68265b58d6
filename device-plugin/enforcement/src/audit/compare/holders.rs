//! Finds the processes that may hold unaccounted memory.

use std::collections::BTreeMap;

use bursar_host::procfs::ProcessOwner;
use bursar_ledger::units::{AllocationId, Bytes, PodUid};
use bursar_sessions::{ContainerUsage, Process, ProcessCredit};

use super::attribution::Attribution::Untracked;
use super::finding::Finding;
use super::{AuditResult, GpuFigures, LiveProcess};
use crate::attestation::AttestedProcess;

impl AuditResult {
    /// Finds processes that may hold unaccounted memory. The driver's figures are inexact, so at
    /// most `most_unaccounted` is unaccounted. Up to `explained` is what the accounts explain and
    /// what processes of the host may have left: managed memory that they freed stays on the GPU
    /// until its last context ends (F30).
    pub(super) fn unaccounted(
        &mut self,
        figures: &GpuFigures<'_>,
        bytes: Bytes,
        most_unaccounted: Bytes,
        explained: Bytes,
    ) {
        let gpu = &figures.sample.gpu;
        let users = figures.driver_users();
        let only_container = match &figures.accounts[..] {
            [only] if bytes > explained => Some(only.container.allocation),
            _ => None,
        };
        // A listed process of another owner may hold the memory by a descriptor alone, which shows
        // no use of the driver.
        let is_of_others = |listed| match figures.attribute(listed) {
            Untracked(ProcessOwner::AllowedHost, _) => false,
            Untracked(_, allocation) => allocation != only_container,
            _ => false,
        };
        let has_others = figures.sample.processes.iter().any(is_of_others);
        let only_container = only_container.filter(|_| !has_others);
        let uses = |only: &AllocationId| users.iter().any(|(of, ..)| of.allocation == *only);
        self.findings.push(Finding::Unaccounted {
            gpu: gpu.clone(),
            bytes,
            only_container: only_container.filter(uses),
        });
        let mut suspects = figures.suspects(&users);
        suspects.extend(figures.importers(most_unaccounted));
        let mut pods = suspects.iter().map(|suspect| &suspect.pod);
        let first = pods.next();
        let is_only_suspect = pods.all(|pod| Some(pod) == first);
        let holder = |suspect: Suspect| Finding::Holder {
            gpu: gpu.clone(),
            process: suspect.process,
            bytes,
            pod: suspect.pod,
            allocation: suspect.allocation,
            imported: suspect.imported,
            is_only_suspect,
        };
        self.findings.extend(suspects.into_iter().map(holder));
    }
}

/// A process that may hold unaccounted memory.
struct Suspect {
    process: Process,
    pod: PodUid,
    /// The allocation of its container, or one of its pod; none if the agent gave the pod no memory
    /// of the GPU.
    allocation: Option<AllocationId>,
    /// The bytes that the process has imported, if they make it a suspect.
    imported: Option<Bytes>,
}

/// A process that uses the driver, with its container's usage.
type DriverUser<'a> = (&'a ContainerUsage, Process, &'a AttestedProcess);

impl<'a> GpuFigures<'a> {
    /// The processes without a session that have device nodes of the driver mapped.
    fn suspects(&self, users: &[DriverUser<'_>]) -> Vec<Suspect> {
        let mut suspects = BTreeMap::new();
        for (pid, user) in &self.containers.device_users {
            let suspect = self.suspect(*pid, user, None);
            let is_meant = |suspect: &Suspect| !self.may_have_session(suspect.process, user);
            suspects.extend(suspect.filter(is_meant).map(|suspect| (*pid, suspect)));
        }
        for (container, process, running) in users {
            let is_old = running.has_shim && running.start < self.containers.agent_start;
            if is_old || container.has_session(*process) || self.is_forked_copy(running, container)
            {
                continue;
            }
            let suspect = Suspect {
                process: *process,
                pod: container.pod.clone(),
                allocation: Some(container.allocation),
                imported: None,
            };
            suspects.insert(process.pid, suspect);
        }
        let live = self.sample.processes.iter();
        for listed in live.filter(|listed| listed.live.is_some()) {
            suspects.remove(&listed.pid);
        }
        suspects.into_values().collect()
    }

    /// The processes that have imported more than twice what the accounts know to be exported. What
    /// a process has imported beyond the exports is at most `most_unaccounted`.
    fn importers(&self, most_unaccounted: Bytes) -> impl Iterator<Item = Suspect> {
        let accounts = self.accounts.iter().map(|account| account.balance);
        let exported = accounts.map(|account| account.exported + account.exited + account.leased);
        let exported = exported.sum::<Bytes>() + self.sample.unreclaimed_or_retained;
        self.sample.importers.iter().filter_map(move |listed| {
            let imported = listed.bytes?;
            let beyond = imported.saturating_sub(exported);
            let is_meant = beyond > exported && beyond <= most_unaccounted;
            let suspect = self.suspect(listed.pid, listed.live.as_ref()?, Some(imported));
            suspect.filter(|_| is_meant)
        })
    }

    /// Suspects a process of a pod; none of the host.
    fn suspect(&self, pid: u32, live: &LiveProcess, imported: Option<Bytes>) -> Option<Suspect> {
        let LiveProcess { start, owner } = live;
        let ProcessOwner::Container { pod, .. } = owner else {
            return None;
        };
        Some(Suspect {
            process: Process { pid, start: *start },
            pod: pod.clone(),
            allocation: self.allocation_of(owner),
            imported,
        })
    }

    /// Whether a process outside of the attested ones may have the mappings of a session: its own,
    /// or one whose record is lost. So may a process that the attestation has not read yet.
    fn may_have_session(&self, process: Process, LiveProcess { owner, .. }: &LiveProcess) -> bool {
        let is_attested = match owner {
            ProcessOwner::Container { pod, cgroup } => {
                let container = (pod.clone(), cgroup.clone());
                self.containers.allocations.contains_key(&container)
            }
            ProcessOwner::Host | ProcessOwner::AllowedHost => false,
        };
        let mut usage = self.usage.iter();
        process.start < self.containers.agent_start
            || is_attested
            || usage.any(|container| container.has_session(process))
    }

    /// The processes that use the driver, of containers with this GPU.
    fn driver_users(&self) -> Vec<DriverUser<'a>> {
        let processes = self.containers.processes.iter();
        let processes = processes.filter(|(_, (_, running))| !running.device_mappings.is_empty());
        let user = |(pid, (allocation, running)): (&u32, &'a (AllocationId, AttestedProcess))| {
            let account = self.find(|container| container.allocation == *allocation)?;
            let (pid, start) = (*pid, running.start);
            Some((account.container, Process { pid, start }, running))
        };
        processes.filter_map(user).collect()
    }

    /// Whether all driver mappings of a process come from a fork of a process with a session. The
    /// driver refuses to work in a forked child, and a child's own mappings have other addresses.
    /// If the parent has exited, a comparison is impossible; its memory stays charged as long as
    /// the child holds it.
    fn is_forked_copy(&self, running: &AttestedProcess, container: &ContainerUsage) -> bool {
        let mut members = container.processes.iter();
        let is_copy_of = |member: &ProcessCredit| {
            let attested = self.containers.processes.get(&member.process.pid);
            attested.is_some_and(|(_, parent)| {
                parent.start == member.process.start
                    && running.device_mappings.is_subset(&parent.device_mappings)
            })
        };
        (running.forked && !container.exited_pids.is_empty()) || members.any(is_copy_of)
    }
}
