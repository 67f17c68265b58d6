//! Decides whether all managed memory of a GPU may be moved to the host without harm to its owners:
//! pure.
//!
//! The driver takes host memory for moved pages in the cgroup of the owner. Pages that are on the
//! host already need none, but no figure counts these pages. So each owner must have room for all
//! managed memory that its pod has mapped, on any GPU. The node must have room for the managed
//! memory of all pods. No figure covers a process that the attestation does not know, so no such
//! process may use the GPU.

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
    /// The pod may have more managed memory than was read.
    #[error(
        "the mappings of the pod with the UID {0} were not read in time; end its process that hangs in the kernel or has very many mappings"
    )]
    UnreadPod(PodUid),
    /// The kernel might kill any process for want of host memory.
    #[error(
        "pods have more managed memory than the node has host memory available for them; add host memory"
    )]
    NodeRoom,
    /// A process outside the agent's containers may have managed memory.
    #[error("process {0} in no pod with GPU memory uses the GPU; end it")]
    UnknownProcess(u32),
}

/// The host memory of the node.
pub(super) struct NodeState<'a> {
    /// The memory that programs can still have.
    pub(super) room: Option<Bytes>,
    /// The pods whose attestation is old.
    pub(super) unread: &'a BTreeSet<PodUid>,
}

/// Checks one GPU.
///
/// # Errors
/// The first risk.
pub(super) fn check_eviction(
    sample: &GpuSample,
    usage: &[ContainerUsage],
    attested: &[AttestedContainer],
    node: &NodeState,
) -> Result<(), EvictionRisk> {
    let is_attested = |pid: u32, start| {
        let mut processes = attested
            .iter()
            .filter_map(|container| container.processes.get(&pid));
        processes.any(|process| process.start == start)
    };
    let live = sample.processes.iter().filter_map(|listed| {
        let live = listed.live.as_ref()?;
        Some((listed.pid, live.start))
    });
    let mut unknown = live.filter(|(pid, start)| !is_attested(*pid, *start));
    if let Some((pid, _)) = unknown.next() {
        return Err(EvictionRisk::UnknownProcess(pid));
    }
    let users: BTreeSet<_> = usage
        .iter()
        .filter(|container| container.gpus().any(|gpu| *gpu == sample.gpu))
        .map(|container| container.allocation)
        .collect();
    let is_user = |container: &&AttestedContainer| users.contains(&container.allocation);
    let users: BTreeSet<_> = attested
        .iter()
        .filter(is_user)
        .map(|container| &container.pod)
        .collect();
    // Containers of a pod share its limit, and pods the limits above it.
    let (mut pods, mut all) = (BTreeMap::<_, u64>::new(), 0_u64);
    for container in attested {
        let processes = container.processes.values();
        let mapped = processes.map(|process| process.managed_mapped);
        let mapped = mapped.filter(|bytes| *bytes > UNMANAGED_MAPPING.0);
        let mapped = mapped.fold(0, u64::saturating_add);
        let of_pod = pods.entry(&container.pod).or_default();
        *of_pod = of_pod.saturating_add(mapped);
        all = all.saturating_add(mapped);
    }
    let mut node_room = node.room.unwrap_or_default();
    for container in attested
        .iter()
        .filter(|container| users.contains(&container.pod))
    {
        let pod = &container.pod;
        let mut processes = container.processes.values();
        if node.unread.contains(pod) || processes.any(|process| process.is_stale) {
            return Err(EvictionRisk::UnreadPod(pod.clone()));
        }
        let mapped = pods.get(pod).copied().unwrap_or_default();
        if mapped == 0 {
            continue;
        }
        let unknown = || EvictionRisk::UnknownRoom(pod.clone());
        let room = container.host_room.ok_or_else(unknown)?;
        if room.pod.0 < mapped {
            return Err(EvictionRisk::PodRoom(pod.clone()));
        }
        node_room = node_room.min(room.shared);
    }
    match node_room.0 >= all {
        true => Ok(()),
        false => Err(EvictionRisk::NodeRoom),
    }
}

#[cfg(test)]
mod tests {
    use bursar_host::host_memory::ContainerRoom;
    use bursar_host::procfs::ProcessOwner;
    use bursar_ledger::units::{AllocationId, GpuUuid};
    use bursar_sessions::{Account, AccountBalance};

    use super::*;
    use crate::attestation::AttestedProcess;
    use crate::audit::compare::{ListedProcess, LiveProcess};

    fn gpu() -> GpuUuid {
        "GPU-a".parse().unwrap()
    }

    fn usage() -> Vec<ContainerUsage> {
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
            is_stale: false,
        };
        AttestedContainer {
            allocation: AllocationId::from_bits(number),
            pod: "p".parse().unwrap(),
            cgroup: format!("c{number}"),
            gap: None,
            processes: BTreeMap::from([(number as u32, process)]),
            host_room: host_room.map(|pod| ContainerRoom {
                pod,
                shared: Bytes(u64::MAX),
            }),
        }
    }

    fn check(
        sample: &GpuSample,
        containers: &[AttestedContainer],
        node: Option<Bytes>,
    ) -> Result<(), EvictionRisk> {
        let node = NodeState {
            room: node,
            unread: &BTreeSet::new(),
        };
        check_eviction(sample, &usage(), containers, &node)
    }

    fn sample(pids: &[u32]) -> GpuSample {
        let listed = |pid: &u32| ListedProcess {
            pid: *pid,
            bytes: Some(Bytes::gib(1)),
            sm_percent: None,
            live: Some(LiveProcess {
                start: 1,
                owner: ProcessOwner::Host,
            }),
            is_gone: false,
        };
        GpuSample {
            gpu: gpu(),
            unattributed_signed: 0,
            unattributed: None,
            unreclaimed_or_retained: Bytes::ZERO,
            processes: pids.iter().map(listed).collect(),
            importers: Vec::new(),
            has_all_holders: true,
        }
    }

    #[test]
    fn managed_memory_is_evicted_only_with_host_memory_for_all() {
        let check = |containers: &[AttestedContainer], node: Option<u64>| {
            self::check(&sample(&[1]), containers, node.map(Bytes::gib))
        };
        let owner = |room| container(1, Bytes::gib(4), room);
        assert_eq!(check(&[owner(Some(Bytes::gib(4)))], Some(4)), Ok(()));
        let pod: PodUid = "p".parse().unwrap();
        let unknown = EvictionRisk::UnknownRoom(pod.clone());
        assert_eq!(check(&[owner(None)], Some(4)), Err(unknown));
        let too_little = Err(EvictionRisk::PodRoom(pod));
        assert_eq!(check(&[owner(Some(Bytes::gib(3)))], Some(4)), too_little);
        let other = container(2, Bytes::gib(2), Some(Bytes::gib(5)));
        let both = [owner(Some(Bytes::gib(9))), other];
        assert_eq!(check(&both, Some(9)), too_little, "they share the pod's");
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
        let unknown = check(&sample(&[1, 7]), &containers, None);
        assert_eq!(unknown, Err(EvictionRisk::UnknownProcess(7)));
        let mut exited = sample(&[1, 7]);
        exited.processes[1].live = None;
        assert_eq!(check(&exited, &containers, None), Ok(()));
    }

    #[test]
    fn managed_memory_of_all_gpus_needs_host_memory() {
        let on_other = |number, pod: &str| AttestedContainer {
            pod: pod.parse().unwrap(),
            ..container(number, Bytes::gib(4), Some(Bytes::gib(6)))
        };
        let owner = container(1, Bytes::gib(4), Some(Bytes::gib(6)));
        let both = |pod| [owner.clone(), on_other(3, pod)];
        let sample = sample(&[1]);
        assert_eq!(check(&sample, &both("q"), Some(Bytes::gib(8))), Ok(()));
        let too_little = check(&sample, &both("q"), Some(Bytes::gib(6)));
        assert_eq!(too_little, Err(EvictionRisk::NodeRoom));
        let too_little = check(&sample, &both("p"), Some(Bytes::gib(8)));
        assert_eq!(too_little, Err(EvictionRisk::PodRoom(owner.pod.clone())));
        let mut below = both("q");
        below[0].host_room = below[0].host_room.map(|room| ContainerRoom {
            shared: Bytes::gib(7),
            ..room
        });
        let too_little = check(&sample, &below, Some(Bytes::gib(8)));
        assert_eq!(too_little, Err(EvictionRisk::NodeRoom), "above both pods");
    }

    #[test]
    fn no_managed_memory_is_evicted_by_an_old_attestation() {
        let owner = container(1, Bytes::gib(4), Some(Bytes::gib(4)));
        let unread = Err(EvictionRisk::UnreadPod(owner.pod.clone()));
        let hanging = NodeState {
            room: Some(Bytes::gib(4)),
            unread: &[owner.pod.clone()].into(),
        };
        let owners = std::slice::from_ref(&owner);
        let hangs = check_eviction(&sample(&[1]), &usage(), owners, &hanging);
        assert_eq!(hangs, unread);
        let mut stale = owner;
        stale
            .processes
            .values_mut()
            .for_each(|process| process.is_stale = true);
        assert_eq!(check(&sample(&[1]), &[stale], Some(Bytes::gib(4))), unread);
    }
}
