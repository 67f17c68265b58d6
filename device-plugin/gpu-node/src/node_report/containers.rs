//! Describes containers, leases and namespaces as the `GpuNode` status does. Pure.

use std::collections::BTreeMap;

use bursar_crds::gpu_node::{
    EnforcementGap, GpuContainer, LastFault, MemoryResource, PendingContainer, RetainedLease,
};
use bursar_crds::numbers::{to_i32, to_i64, truncate_to_seconds};
use bursar_enforcement::attestation;
use bursar_enforcement::audit::AuditStatus;
use bursar_ledger::units::{PodUid, Resource};
use bursar_node::actor::Snapshot;
use bursar_node::allocator::{BoundContainer, QueuedClaim};
use bursar_node::checkpoint_state::{ContainerName, PodName};
use bursar_sessions::{Fault, ProcessHistory, RecoveryAction};

/// The longest message of [`EnforcementGap`].
const MAX_MESSAGE_LENGTH: usize = 512;

/// The containers of the claims, those that wait for device memory first: the operator makes room
/// for these.
pub(super) fn pending_containers(claims: &[QueuedClaim]) -> Vec<PendingContainer> {
    let of_resource = |resource| {
        claims
            .iter()
            .filter(move |claim| claim.resource == resource)
    };
    let ordered = [
        Resource::DeviceMemory,
        Resource::Compute,
        Resource::ManagedMemory,
    ];
    let ordered = ordered.into_iter().flat_map(of_resource);
    ordered.map(pending_container).collect()
}

fn pending_container(claim: &QueuedClaim) -> PendingContainer {
    let [namespace, pod, container] = ContainerName::parts(claim.name.as_ref());
    PendingContainer {
        pod_uid: claim.pod.to_string(),
        namespace,
        pod,
        container,
        resource: match claim.resource {
            Resource::DeviceMemory => MemoryResource::DeviceMemory,
            Resource::ManagedMemory => MemoryResource::ManagedMemory,
            Resource::Compute => MemoryResource::Compute,
        },
        quanta: to_i32(claim.quanta.0),
        since: truncate_to_seconds(claim.since),
    }
}

pub(super) fn enforcement_gap(
    (bound, gap): &(BoundContainer, attestation::EnforcementGap),
) -> EnforcementGap {
    let [namespace, pod, container] = ContainerName::parts(bound.name.as_ref());
    let mut message = gap.to_string();
    message.truncate(message.floor_char_boundary(MAX_MESSAGE_LENGTH));
    EnforcementGap {
        pod_uid: bound.pod.to_string(),
        namespace,
        pod,
        container,
        reason: gap.reason.as_str().to_owned(),
        message,
    }
}

/// The containers with memory, those with faults first.
pub(super) fn gpu_containers(snapshot: &Snapshot, audited: &AuditStatus) -> Vec<GpuContainer> {
    let new = ProcessHistory::default();
    let containers = snapshot.containers.iter().map(|container| {
        let history = audited.histories.get(&container.allocation);
        let weights = snapshot.view.gpus.iter().map(|gpu| &gpu.weights);
        let weight = weights.filter_map(|of| of.get(&container.pod)).next();
        gpu_container(container, history.unwrap_or(&new), weight.copied())
    });
    let mut containers: Vec<_> = containers.collect();
    containers.sort_by_cached_key(|container| {
        let (pod, name) = (container.pod_uid.clone(), container.container.clone());
        (container.last_fault.is_none(), pod, name)
    });
    containers
}

fn gpu_container(
    bound: &BoundContainer,
    history: &ProcessHistory,
    weight: Option<u16>,
) -> GpuContainer {
    let [namespace, pod, container] = ContainerName::parts(bound.name.as_ref());
    GpuContainer {
        pod_uid: bound.pod.to_string(),
        namespace,
        pod,
        container,
        process_generation: to_i64(history.generation),
        restarts: to_i64(history.restarts),
        restarts_in_place: to_i64(history.restarts_in_place),
        compute_weight: weight.map(i32::from),
        last_fault: history.last_fault.as_ref().map(last_fault),
    }
}

/// Without the process, because tenants read the object and must not learn a pid of the host.
fn last_fault(fault: &Fault) -> LastFault {
    LastFault {
        gpu: fault.gpu.to_string(),
        process_generation: to_i64(fault.image.generation),
        cuda_error: fault.cuda_error,
        xid: fault.xid.and_then(|xid| i32::try_from(xid).ok()),
        action: fault.decision().map(RecoveryAction::to_api),
        time: truncate_to_seconds(fault.time),
    }
}

/// Adds the name of a lease's owner where `names` has it.
pub(super) fn with_owner(
    lease: &RetainedLease,
    names: &BTreeMap<PodUid, PodName>,
) -> RetainedLease {
    let owner = lease.owner_uid.parse().ok();
    let owner = owner.and_then(|owner: PodUid| names.get(&owner));
    RetainedLease {
        owner: owner.map(|pod| pod.name.clone()).unwrap_or_default(),
        ..lease.clone()
    }
}

#[cfg(test)]
mod tests {
    use bursar_enforcement::attestation::GapReason;
    use bursar_ledger::BootTime;
    use bursar_sessions::{Process, ProcessImage, RecordedMoment};

    use super::*;

    #[test]
    fn container_has_generation_restarts_and_last_fault() {
        let bound = BoundContainer {
            pod: "pod-1".parse().unwrap(),
            name: Some(ContainerName {
                container: "main".into(),
                pod: None,
            }),
            ..BoundContainer::with_ids(1, 1)
        };
        let fault = Fault {
            image: ProcessImage {
                process: Process { pid: 7, start: 70 },
                generation: 4,
            },
            gpu: "GPU-0".parse().unwrap(),
            cuda_error: Some(700),
            xid: Some(31),
            time: "2026-01-02T03:04:05.678Z".parse().unwrap(),
            since: BootTime(1),
            decided: Some((
                RecoveryAction::ReexecInPlace,
                RecordedMoment(BootTime::default()),
            )),
            executed: true,
            ended: true,
            root: None,
            held_since: None,
        };
        let history = ProcessHistory {
            generation: 5,
            restarts: 2,
            restarts_in_place: 1,
            last_fault: Some(fault),
        };
        let written = serde_json::to_value(gpu_container(&bound, &history, Some(25))).unwrap();
        let expected = serde_json::json!({
            "podUid": "pod-1", "container": "main", "processGeneration": 5, "restarts": 2,
            "restartsInPlace": 1, "computeWeight": 25, "lastFault": { "gpu": "GPU-0", "processGeneration": 4,
                "cudaError": 700, "xid": 31, "action": "InPlace", "time": "2026-01-02T03:04:05Z" },
        });
        assert_eq!(written, expected);
        let new =
            serde_json::to_value(gpu_container(&bound, &ProcessHistory::default(), None)).unwrap();
        let expected = serde_json::json!({
            "podUid": "pod-1", "container": "main", "processGeneration": 0, "restarts": 0,
            "restartsInPlace": 0,
        });
        assert_eq!(new, expected);
    }

    #[test]
    fn message_of_a_gap_is_bounded() {
        let gap = attestation::EnforcementGap {
            reason: GapReason::MountedOver,
            detail: "ü".repeat(4_000),
        };
        let message = enforcement_gap(&(BoundContainer::with_ids(1, 1), gap)).message;
        assert!((511..=512).contains(&message.len()), "{}", message.len());
    }
}
