//! Publishes Events about findings: on pods, or on the node where the pod's name is unknown.
//!
//! Tenants read Events, so Events name no process by its pid on the host. The agent's log does.

use bursar_apiserver::{Events, PodRef, Reason};
use bursar_host::procfs::ProcessOwner;
use bursar_ledger::units::{AllocationId, Bytes};
use bursar_node::allocator::BoundContainer;

use super::compare::Finding;
use crate::attestation::EnforcementGap;

/// Publishes a finding.
pub(crate) fn publish_finding(events: &Events, finding: &Finding, containers: &[BoundContainer]) {
    let reason = match finding {
        Finding::OverQuota { .. } | Finding::OverManaged { .. } => Reason::OverQuota,
        Finding::UntrackedProcess { .. } | Finding::Holder { .. } => Reason::UntrackedProcess,
        Finding::TamperedPage { .. } => Reason::TamperedPage,
        Finding::Unaccounted { .. } => Reason::Unaccounted,
    };
    let allocation = finding.allocation();
    publish(events, reason, message(finding), allocation, containers);
}

/// Publishes that a process was killed for a finding.
pub(crate) fn publish_kill(events: &Events, finding: &Finding, containers: &[BoundContainer]) {
    let message = format!("a process was killed: {}", message(finding));
    let allocation = finding.allocation();
    publish(events, Reason::Killed, message, allocation, containers);
}

/// Publishes that a container has left the enforcement, or is under enforcement again.
pub(crate) fn publish_enforcement(
    events: &Events,
    container: &BoundContainer,
    gap: Option<&EnforcementGap>,
) {
    let (reason, message) = match gap {
        Some(gap) => (Reason::NotEnforced, gap.to_string()),
        None => (Reason::Enforced, "under enforcement again".to_owned()),
    };
    let (allocation, all) = (container.allocation, std::slice::from_ref(container));
    publish(events, reason, message, Some(allocation), all);
}

/// Publishes that allocations of a container were denied.
pub(crate) fn publish_denials(
    events: &Events,
    message: String,
    allocation: AllocationId,
    containers: &[BoundContainer],
) {
    let reason = Reason::MemoryDenied;
    publish(events, reason, message, Some(allocation), containers);
}

fn message(finding: &Finding) -> String {
    match finding {
        Finding::OverQuota {
            gpu,
            quota,
            charged,
            ..
        } => format!(
            "uses {} of {gpu} with a quota of {quota}",
            whole_mib(*charged)
        ),
        Finding::UntrackedProcess {
            gpu,
            owner,
            allocation,
            ..
        } => match (owner, allocation) {
            (_, Some(_)) => format!("a process uses {gpu} past the shim"),
            (ProcessOwner::Container { pod, .. }, None) => {
                format!("a process of pod {pod}, which has no allocation of the GPU, uses {gpu}")
            }
            (ProcessOwner::Host | ProcessOwner::AllowedHost, None) => {
                format!("a process of the host uses {gpu}")
            }
        },
        Finding::TamperedPage { .. } => {
            "a process wrote a grant into its own credit page".to_owned()
        }
        Finding::Holder {
            gpu,
            bytes,
            pod,
            allocation,
            imported,
            is_only_suspect,
            ..
        } => {
            let process = match (allocation, is_only_suspect) {
                (Some(_), true) => "a process".to_owned(),
                (_, true) => format!("a process of pod {pod}, which has no allocation of the GPU,"),
                (_, false) => format!("one of several suspects, a process of pod {pod},"),
            };
            let how = match imported {
                Some(imported) => format!(
                    "has imported {} of {gpu}, more than all containers are charged to have exported",
                    whole_mib(*imported)
                ),
                None => format!("uses {gpu} past the shim and is not listed for it"),
            };
            format!(
                "{process} {how}, and {} of the GPU is in use and charged to no process",
                whole_mib(*bytes)
            )
        }
        Finding::OverManaged {
            gpu,
            charged,
            mapped,
            bytes,
            ..
        } => format!(
            "has {} of managed memory mapped and is charged {}, and {} of {gpu} is in use and charged to no process",
            whole_mib(*mapped),
            whole_mib(*charged),
            whole_mib(*bytes)
        ),
        Finding::Unaccounted {
            gpu,
            bytes,
            only_container: only,
        } => {
            let only = only.map_or("", |_| "; no other container has memory of the GPU");
            format!(
                "{} of {gpu} is in use and charged to no process{only}; host memory may be on the \
                 GPU if the GpuNode's condition PageableMemoryOnGpu is True",
                whole_mib(*bytes)
            )
        }
    }
}

/// Rounds down to whole MiB, since smaller changes are noise.
fn whole_mib(Bytes(bytes): Bytes) -> Bytes {
    Bytes(bytes & !((1 << 20) - 1))
}

/// Publishes on the pod of the allocation's container. Publishes on the node, with the pod's UID,
/// where the pod's name is unknown.
pub(crate) fn publish(
    events: &Events,
    reason: Reason,
    message: String,
    allocation: Option<AllocationId>,
    containers: &[BoundContainer],
) {
    let mut all = containers.iter();
    let container = all.find(|container| Some(container.allocation) == allocation);
    let Some(container) = container else {
        return events.on_node(reason, message);
    };
    let holder = container.name.as_ref();
    let named = holder.filter(|holder| !holder.container.is_empty());
    let message = match named {
        Some(holder) => format!("container {}: {message}", holder.container),
        None => message,
    };
    match holder.and_then(|holder| holder.pod.clone()) {
        Some(pod) => {
            let pod = PodRef {
                namespace: pod.namespace,
                name: pod.name,
                uid: container.pod.clone(),
            };
            events.on_pod(pod, reason, message);
        }
        None => events.on_node(reason, format!("pod {}: {message}", container.pod)),
    }
}

#[cfg(test)]
mod tests {
    use bursar_ledger::units::GpuUuid;
    use bursar_sessions::Process;

    use super::*;

    #[test]
    fn event_of_a_finding_names_no_pid() {
        let (gpu, allocation) = ("GPU-a".parse().unwrap(), AllocationId::from_bits(1));
        let process = |pid| Process { pid, start: 7 };
        let messages = |pid| {
            let forged = Finding::TamperedPage {
                allocation,
                process: process(pid),
            };
            let untracked = |owner: &ProcessOwner, allocation| Finding::UntrackedProcess {
                gpu: GpuUuid::clone(&gpu),
                process: process(pid),
                bytes: None,
                owner: owner.clone(),
                allocation,
            };
            let pod = ProcessOwner::Container {
                pod: "p".parse().unwrap(),
                cgroup: "c".into(),
            };
            let all = [
                forged,
                untracked(&pod, Some(allocation)),
                untracked(&pod, None),
                untracked(&ProcessOwner::Host, None),
            ];
            all.map(|finding| message(&finding))
        };
        assert_eq!(messages(4711), messages(4712));
    }
}
