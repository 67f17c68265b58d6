//! Finds the processes that may hold unaccounted memory.

use bursar_ledger::units::{AllocationId, Bytes, GpuUuid};
use bursar_sessions::{ContainerUsage, Process};

use super::finding::Finding;
use super::{AttestedState, AuditResult, GpuSample, account_of};
use crate::attestation::AttestedProcess;

impl AuditResult {
    /// Finds processes that may hold unaccounted memory.
    pub(super) fn unaccounted(
        &mut self,
        seen: &GpuSample,
        bytes: Bytes,
        books: &[ContainerUsage],
        containers: &AttestedState,
    ) {
        let gpu = &seen.gpu;
        let users = driver_users(gpu, books, containers);
        let mut of_them = users.iter().map(|(books, ..)| books.allocation);
        let first = of_them.next();
        let only = first.filter(|first| of_them.all(|other| other == *first));
        self.findings.push(Finding::Unaccounted {
            gpu: gpu.clone(),
            bytes,
            only_container: only,
        });
        let is_listed = |pid: u32| seen.processes.iter().any(|listed| listed.pid == pid);
        let is_holder = |(books, pid, running): &&(&ContainerUsage, u32, &AttestedProcess)| {
            let is_older = running.has_shim && running.start < containers.agent_start;
            !is_listed(*pid)
                && !is_older
                && !books.has_session(*pid, running.start)
                && !is_forked_copy(running, books, containers)
        };
        let holders: Vec<_> = users.iter().filter(is_holder).collect();
        for (books, pid, running) in &holders {
            let allocation = books.allocation;
            let mut all = holders.iter();
            self.findings.push(Finding::Holder {
                gpu: gpu.clone(),
                process: Process {
                    pid: *pid,
                    start: running.start,
                },
                bytes,
                allocation,
                is_only_suspect: all.all(|(of_it, ..)| of_it.allocation == allocation),
            });
        }
    }
}

/// The processes that use the driver, of containers with this GPU, each with its container's usage.
fn driver_users<'a>(
    gpu: &GpuUuid,
    books: &'a [ContainerUsage],
    containers: &'a AttestedState,
) -> Vec<(&'a ContainerUsage, u32, &'a AttestedProcess)> {
    let processes = containers.processes.iter();
    let uses_it = |(pid, (allocation, running)): (&u32, &'a (AllocationId, AttestedProcess))| {
        let of_it = books.iter().find(|books| books.allocation == *allocation)?;
        let uses_it = !running.device_mappings.is_empty() && account_of(of_it, gpu).is_some();
        uses_it.then_some((of_it, *pid, running))
    };
    processes.filter_map(uses_it).collect()
}

/// Whether all driver mappings of a process come from a fork of a process with a session. The
/// driver refuses to work in a forked child, and a child's own mappings have other addresses. If
/// the parent has exited, a comparison is impossible; its memory stays charged as long as the child
/// holds it.
fn is_forked_copy(
    running: &AttestedProcess,
    books: &ContainerUsage,
    containers: &AttestedState,
) -> bool {
    if running.forked && !books.exited_pids.is_empty() {
        return true;
    }
    let mut members = books.processes.iter();
    members.any(|member| {
        let of_it = containers.processes.get(&member.process.pid);
        of_it.is_some_and(|(_, parent)| {
            parent.start == member.process.start
                && running.device_mappings.is_subset(&parent.device_mappings)
        })
    })
}
