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
        sample: &GpuSample,
        bytes: Bytes,
        usage: &[ContainerUsage],
        containers: &AttestedState,
    ) {
        let gpu = &sample.gpu;
        let users = driver_users(gpu, usage, containers);
        let mut allocations = users.iter().map(|(container, ..)| container.allocation);
        let first = allocations.next();
        let only = first.filter(|first| allocations.all(|other| other == *first));
        self.findings.push(Finding::Unaccounted {
            gpu: gpu.clone(),
            bytes,
            only_container: only,
        });
        let is_listed = |pid: u32| sample.processes.iter().any(|listed| listed.pid == pid);
        let is_holder = |(container, pid, running): &&(&ContainerUsage, u32, &AttestedProcess)| {
            let is_older = running.has_shim && running.start < containers.agent_start;
            !is_listed(*pid)
                && !is_older
                && !container.has_session(*pid, running.start)
                && !is_forked_copy(running, container, containers)
        };
        let holders: Vec<_> = users.iter().filter(is_holder).collect();
        for (container, pid, running) in &holders {
            let allocation = container.allocation;
            let mut all = holders.iter();
            self.findings.push(Finding::Holder {
                gpu: gpu.clone(),
                process: Process {
                    pid: *pid,
                    start: running.start,
                },
                bytes,
                allocation,
                is_only_suspect: all.all(|(container, ..)| container.allocation == allocation),
            });
        }
    }
}

/// The processes that use the driver, of containers with this GPU, each with its container's usage.
fn driver_users<'a>(
    gpu: &GpuUuid,
    usage: &'a [ContainerUsage],
    containers: &'a AttestedState,
) -> Vec<(&'a ContainerUsage, u32, &'a AttestedProcess)> {
    let processes = containers.processes.iter();
    let uses_gpu = |(pid, (allocation, running)): (&u32, &'a (AllocationId, AttestedProcess))| {
        let container = usage
            .iter()
            .find(|container| container.allocation == *allocation)?;
        let uses_gpu = !running.device_mappings.is_empty() && account_of(container, gpu).is_some();
        uses_gpu.then_some((container, *pid, running))
    };
    processes.filter_map(uses_gpu).collect()
}

/// Whether all driver mappings of a process come from a fork of a process with a session. The
/// driver refuses to work in a forked child, and a child's own mappings have other addresses. If
/// the parent has exited, a comparison is impossible; its memory stays charged as long as the child
/// holds it.
fn is_forked_copy(
    running: &AttestedProcess,
    container: &ContainerUsage,
    containers: &AttestedState,
) -> bool {
    if running.forked && !container.exited_pids.is_empty() {
        return true;
    }
    let mut members = container.processes.iter();
    members.any(|member| {
        let attested = containers.processes.get(&member.process.pid);
        attested.is_some_and(|(_, parent)| {
            parent.start == member.process.start
                && running.device_mappings.is_subset(&parent.device_mappings)
        })
    })
}
