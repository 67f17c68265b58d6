//! Attributes a process that the driver lists to an account.

use std::collections::BTreeSet;

use bursar_host::procfs::ProcessOwner;
use bursar_ledger::units::AllocationId;
use bursar_sessions::ContainerUsage;

use super::{GpuAccount, GpuFigures, ListedProcess, LiveProcess};

/// The account to which a listed process belongs.
pub(super) enum Attribution<'a> {
    /// A session of this container, or an exited process whose memory is still charged there.
    Tracked(AllocationId),
    /// A process of this container that has the shim and is older than this agent. The agent has
    /// lost the record of its session. The process connects again when it next needs the agent.
    SessionLost(AllocationId),
    /// A process without a session, with its owner. The allocation is that of its container, or one
    /// of its pod; none if the agent gave the pod no memory of the GPU.
    Untracked(&'a ProcessOwner, Option<AllocationId>),
    /// The process has ended since the agent asked the driver.
    Exited,
}

impl GpuFigures<'_> {
    pub(super) fn attribute<'a>(&self, listed: &'a ListedProcess) -> Attribution<'a> {
        let pid = listed.pid;
        let tracked = |account: GpuAccount<'_>| Attribution::Tracked(account.container.allocation);
        let member = |process| self.find(|container| container.has_session(process));
        if let Some(member) = listed.process().and_then(member) {
            return tracked(member);
        }
        let exited = self.find(|container| container.exited_pids.contains(&pid));
        let Some(LiveProcess { start, owner }) = &listed.live else {
            return exited.map_or(Attribution::Exited, tracked);
        };
        if let Some(exited) = exited {
            // A new process may get a pid that the driver still lists for an exited one.
            let most = exited.balance.exited + self.limits.process_allowance;
            if listed.bytes.is_some_and(|bytes| bytes <= most) {
                return tracked(exited);
            }
        } else if self.containers.exited_pids.contains(&pid) {
            // Accounts charged an exited process of this pid before the agent asked the driver, and
            // none since.
            return Attribution::Exited;
        }
        let Some(allocation) = self.allocation_of(owner) else {
            return Attribution::Untracked(owner, None);
        };
        let attested = self.containers.processes.get(&pid);
        // A process that the attestation has not probed yet counts as one with the shim.
        let has_shim = attested.is_none_or(|(_, running)| running.has_shim);
        // The shim connects before the driver lists the process, so only older sessions can be
        // lost.
        let may_be_lost = has_shim && *start < self.containers.agent_start;
        match self.find(|container| container.allocation == allocation) {
            Some(_) if may_be_lost => Attribution::SessionLost(allocation),
            _ => Attribution::Untracked(owner, Some(allocation)),
        }
    }

    /// The allocation of a process by the pod and the container's cgroup in its cgroup path, which
    /// no tenant shapes. A process belongs to the allocation of its own container. That of a
    /// container without an allocation belongs to the pod's largest allocation of the GPU, of those
    /// whose cgroup is unknown if there are some.
    pub(super) fn allocation_of(&self, owner: &ProcessOwner) -> Option<AllocationId> {
        let ProcessOwner::Container { pod, cgroup } = owner else {
            return None;
        };
        let allocations = &self.containers.allocations;
        let said_hello = |container: &&ContainerUsage| {
            container.pod == *pod && container.cgroup.as_deref() == Some(cgroup)
        };
        let own = || {
            let mut usage = self.usage.iter();
            usage.find(said_hello).map(|found| found.allocation)
        };
        let of_pod = || {
            let attested = allocations.iter().filter(|((of, _), _)| of == pod);
            let attested: BTreeSet<_> = attested.map(|(_, allocation)| allocation).collect();
            let in_pod = self.accounts.iter();
            let in_pod = in_pod.filter(|account| account.container.pod == *pod);
            let candidates = in_pod.map(|account| {
                let ContainerUsage {
                    allocation, cgroup, ..
                } = account.container;
                let is_free = cgroup.is_none() && !attested.contains(allocation);
                (is_free, account.balance.quota, *allocation)
            });
            candidates.max().map(|(.., allocation)| allocation)
        };
        let attested = allocations.get(&(pod.clone(), cgroup.clone())).copied();
        attested.or_else(own).or_else(of_pod)
    }
}
