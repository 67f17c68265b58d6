//! Attributes a process that the driver lists to an account.

use std::collections::BTreeSet;

use bursar_config::AuditConfig;
use bursar_host::procfs::ProcessOwner;
use bursar_ledger::units::{AllocationId, GpuUuid, PodUid};
use bursar_sessions::{ContainerUsage, Process};

use super::finding::Finding;
use super::{AttestedState, ListedProcess, LiveProcess, account_of};

/// The account to which a listed process belongs.
pub(super) enum Attribution {
    /// A session of this container, or an exited process whose memory is still charged there.
    Tracked(AllocationId),
    /// A process of this container that has the shim and is older than this agent. The record of
    /// its session is lost; it connects again when it next needs the agent.
    SessionLost(AllocationId),
    /// A process that lacks a session; with an allocation of its pod, if the agent gave it the GPU.
    Untracked(Option<AllocationId>),
    /// The process has ended since the driver was asked.
    Exited,
}

pub(super) fn attribute(
    listed: &ListedProcess,
    gpu: &GpuUuid,
    usage: &[ContainerUsage],
    known: &AttestedState,
    limits: &AuditConfig,
) -> Attribution {
    let pid = listed.pid;
    let has_gpu = |container: &&ContainerUsage| account_of(container, gpu).is_some();
    let exited = || {
        let exited = |container: &&ContainerUsage| container.exited_pids.contains(&pid);
        usage.iter().filter(has_gpu).find(exited)
    };
    let Some(LiveProcess { start, owner }) = &listed.live else {
        return exited().map_or(Attribution::Exited, |container| {
            Attribution::Tracked(container.allocation)
        });
    };
    let is_member = |container: &&ContainerUsage| container.has_session(pid, *start);
    if let Some(container) = usage.iter().filter(has_gpu).find(is_member) {
        return Attribution::Tracked(container.allocation);
    }
    // A new process may get a pid that the driver still lists for an exited one.
    let may_be_exited = |container: &&ContainerUsage| {
        let left = account_of(container, gpu).map_or(0, |(_, account)| account.exited.0);
        let most = left.saturating_add(limits.process_allowance.0);
        listed.bytes.is_some_and(|bytes| bytes.0 <= most)
    };
    if let Some(container) = exited().filter(may_be_exited) {
        return Attribution::Tracked(container.allocation);
    }
    // Accounts charged an exited process of this pid before the driver was asked, and none since.
    if exited().is_none() && known.exited_pids.contains(&pid) {
        return Attribution::Exited;
    }
    let ProcessOwner::Container { pod, cgroup } = owner else {
        return Attribution::Untracked(None);
    };
    let Some(allocation) = allocation_of(pod, cgroup, gpu, usage, known) else {
        return Attribution::Untracked(None);
    };
    let container = usage
        .iter()
        .find(|container| container.allocation == allocation);
    let attested = known.processes.get(&pid);
    // A process that the attestation has not probed yet counts as one with the shim.
    let has_shim = attested.is_none_or(|(_, running)| running.has_shim);
    // The shim connects before the driver lists the process, so only older sessions can be lost.
    match container.filter(has_gpu) {
        Some(_) if has_shim && *start < known.agent_start => Attribution::SessionLost(allocation),
        _ => Attribution::Untracked(Some(allocation)),
    }
}

/// The allocation of a process by the pod and the container's cgroup in its cgroup path, which no
/// tenant shapes. It is the container's own. A container without one belongs to its pod: to the
/// pod's largest allocation of the GPU, of those whose cgroup is unknown if there are some.
pub(super) fn allocation_of(
    pod: &PodUid,
    cgroup: &str,
    gpu: &GpuUuid,
    usage: &[ContainerUsage],
    known: &AttestedState,
) -> Option<AllocationId> {
    let key = (pod.clone(), cgroup.to_owned());
    let in_pod = || usage.iter().filter(|container| container.pod == *pod);
    let said_hello = |container: &&ContainerUsage| container.cgroup.as_deref() == Some(cgroup);
    let own = || in_pod().find(said_hello).map(|found| found.allocation);
    let of_pod = || {
        let attested = known.allocations.iter().filter(|((of, _), _)| of == pod);
        let attested: BTreeSet<_> = attested.map(|(_, allocation)| *allocation).collect();
        let candidates = in_pod().filter_map(|container| {
            let (_, account) = account_of(container, gpu)?;
            let is_free = container.cgroup.is_none() && !attested.contains(&container.allocation);
            Some((is_free, account.quota, container.allocation))
        });
        candidates.max().map(|(.., allocation)| allocation)
    };
    let attested = known.allocations.get(&key).copied();
    attested.or_else(own).or_else(of_pod)
}

/// Whether the process is a program of the host that the configuration allows. Its memory is
/// withheld from pods as that of others is.
pub(super) fn is_allowed(listed: &ListedProcess) -> bool {
    let live = listed.live.as_ref();
    live.is_some_and(|live| live.owner == ProcessOwner::AllowedHost)
}

pub(super) fn untracked_finding(
    gpu: &GpuUuid,
    listed: &ListedProcess,
    allocation: Option<AllocationId>,
) -> Option<Finding> {
    let LiveProcess { start, owner } = listed.live.clone()?;
    let pid = listed.pid;
    Some(Finding::UntrackedProcess {
        gpu: gpu.clone(),
        process: Process { pid, start },
        bytes: listed.bytes,
        owner,
        allocation,
    })
}
