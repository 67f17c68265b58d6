//! Decides whether all managed memory of a GPU may be moved to the host without harm to its owners:
//! pure.
//!
//! The driver takes host memory for it in the cgroup of the owner. Its part that is on the host
//! already needs none, but no figure tells that part. So each owner must have room for all managed
//! memory that it has mapped. The driver tells nothing of processes that the attestation does not
//! know, so none may use the GPU.

use std::collections::{BTreeMap, BTreeSet};

use bursar_ledger::units::{Bytes, PodUid};
use bursar_sessions::ContainerUsage;

use super::compare::{GpuSample, UNMANAGED_MAPPING};
use crate::attestation::AttestedContainer;

/// Why managed memory of a GPU may not be moved to the host.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EvictionRisk {
    /// A pod might be killed for want of host memory.
    #[error(
        "the pod with the UID {0} has more managed memory than room for host memory; raise its limits.memory"
    )]
    PodRoom(PodUid),
    /// The pod's cgroup does not tell.
    #[error("the host memory of the pod with the UID {0} is unknown; the node needs cgroup v2")]
    UnknownRoom(PodUid),
    /// The kernel might kill any process for want of host memory.
    #[error(
        "pods have more managed memory than the node has host memory available; add host memory"
    )]
    NodeRoom,
    /// A process in no container of ours may have managed memory.
    #[error("process {0} in no pod with GPU memory uses the GPU; end it")]
    UnknownProcess(u32),
}

/// Checks one GPU; `node_room` is the host memory that the node can still have.
///
/// # Errors
/// The first risk.
pub(super) fn check_eviction(
    seen: &GpuSample,
    books: &[ContainerUsage],
    attested: &[AttestedContainer],
    node_room: Option<Bytes>,
) -> Result<(), EvictionRisk> {
    let is_attested = |pid: u32, start| {
        let mut processes = attested
            .iter()
            .filter_map(|of_it| of_it.processes.get(&pid));
        processes.any(|process| process.start == start)
    };
    let live = seen.processes.iter().filter_map(|listed| {
        let live = listed.live.as_ref()?;
        Some((listed.pid, live.start))
    });
    let mut unknown = live.filter(|(pid, start)| !is_attested(*pid, *start));
    if let Some((pid, _)) = unknown.next() {
        return Err(EvictionRisk::UnknownProcess(pid));
    }
    let users: BTreeSet<_> = books
        .iter()
        .filter(|books| books.gpus().any(|gpu| *gpu == seen.gpu))
        .map(|books| books.allocation)
        .collect();
    // Containers of a pod share its limit.
    let mut pods: BTreeMap<&PodUid, (u64, Option<Bytes>)> = BTreeMap::new();
    for container in attested
        .iter()
        .filter(|of_it| users.contains(&of_it.allocation))
    {
        let mapped = container
            .processes
            .values()
            .map(|process| process.managed_mapped);
        let mapped = mapped.filter(|bytes| *bytes > UNMANAGED_MAPPING.0);
        let mapped = mapped.fold(0, u64::saturating_add);
        if mapped > 0 {
            let pod = pods
                .entry(&container.pod)
                .or_insert((0, Some(Bytes(u64::MAX))));
            pod.0 = pod.0.saturating_add(mapped);
            pod.1 = pod.1.min(container.host_room);
        }
    }
    for (pod, (mapped, room)) in &pods {
        let room = room.ok_or_else(|| EvictionRisk::UnknownRoom((*pod).clone()))?;
        if room.0 < *mapped {
            return Err(EvictionRisk::PodRoom((*pod).clone()));
        }
    }
    let all = pods
        .values()
        .fold(0, |sum: u64, (mapped, _)| sum.saturating_add(*mapped));
    match node_room.unwrap_or_default().0 >= all {
        true => Ok(()),
        false => Err(EvictionRisk::NodeRoom),
    }
}

#[cfg(test)]
mod tests {
    use bursar_host::procfs::ProcessOwner;
    use bursar_ledger::units::{AllocationId, GpuUuid};
    use bursar_sessions::{Account, AccountBalance};

    use super::*;
    use crate::attestation::AttestedProcess;
    use crate::audit::compare::{ListedProcess, LiveProcess};

    fn gpu() -> GpuUuid {
        "GPU-a".parse().unwrap()
    }

    fn books() -> Vec<ContainerUsage> {
        let account = AccountBalance::empty(Account::Gpu(gpu()), Bytes::gib(1));
        [1, 2]
            .map(|number| ContainerUsage::empty(number, vec![account.clone()]))
            .into()
    }

    /// A container with one process, which has the container's number as its pid.
    fn container(number: u64, mapped: Bytes, host_room: Option<Bytes>) -> AttestedContainer {
        let process = AttestedProcess {
            start: 1,
            forked: false,
            has_shim: true,
            device_mappings: BTreeSet::new(),
            managed_mapped: mapped.0,
        };
        AttestedContainer {
            allocation: AllocationId::from_bits(number),
            pod: "p".parse().unwrap(),
            cgroup: format!("c{number}"),
            gap: None,
            processes: BTreeMap::from([(number as u32, process)]),
            host_room,
        }
    }

    fn seen(pids: &[u32]) -> GpuSample {
        let listed = |pid: &u32| ListedProcess {
            pid: *pid,
            bytes: Some(Bytes::gib(1)),
            sm_percent: None,
            live: Some(LiveProcess {
                start: 1,
                owner: ProcessOwner::Host,
            }),
        };
        GpuSample {
            gpu: gpu(),
            unattributed_signed: 0,
            unattributed: None,
            unreclaimed_or_retained: Bytes::ZERO,
            processes: pids.iter().map(listed).collect(),
        }
    }

    #[test]
    fn managed_memory_is_evicted_only_with_host_memory_for_all() {
        let check = |containers: &[AttestedContainer], node: Option<u64>| {
            check_eviction(&seen(&[1]), &books(), containers, node.map(Bytes::gib))
        };
        let owner = |room| container(1, Bytes::gib(4), room);
        assert_eq!(check(&[owner(Some(Bytes::gib(4)))], Some(4)), Ok(()));
        let pod: PodUid = "p".parse().unwrap();
        let unknown = EvictionRisk::UnknownRoom(pod.clone());
        assert_eq!(check(&[owner(None)], Some(4)), Err(unknown));
        let little = Err(EvictionRisk::PodRoom(pod));
        assert_eq!(check(&[owner(Some(Bytes::gib(3)))], Some(4)), little);
        let other = container(2, Bytes::gib(2), Some(Bytes::gib(5)));
        let both = [owner(Some(Bytes::gib(9))), other];
        assert_eq!(check(&both, Some(9)), little, "they share the pod's");
        for available in [Some(3), None] {
            let result = check(&[owner(Some(Bytes::gib(4)))], available);
            assert_eq!(result, Err(EvictionRisk::NodeRoom));
        }
        let without = container(1, UNMANAGED_MAPPING, None);
        assert_eq!(check(&[without], None), Ok(()), "a context alone");
    }

    #[test]
    fn no_managed_memory_is_evicted_beside_an_unknown_process() {
        let containers = [container(1, Bytes::ZERO, None)];
        let unknown = check_eviction(&seen(&[1, 7]), &books(), &containers, None);
        assert_eq!(unknown, Err(EvictionRisk::UnknownProcess(7)));
        let mut exited = seen(&[1, 7]);
        exited.processes[1].live = None;
        assert_eq!(check_eviction(&exited, &books(), &containers, None), Ok(()));
    }
}
