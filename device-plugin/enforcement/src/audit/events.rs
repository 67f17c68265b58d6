//! Publishes Events about findings: on pods, or on the node where the pod's name is unknown.
//!
//! Tenants read Events, so Events name no process by its pid on the host. The agent's log does.

use std::collections::BTreeMap;

use bursar_apiserver::{Events, PodRef, Reason};
use bursar_host::procfs::ProcessOwner;
use bursar_ledger::units::{AllocationId, Bytes};
use bursar_node::allocator::BoundContainer;

use super::compare::Finding;
use crate::attestation::{EnforcementGap, GapReason};

/// Decides when a change of a container's enforcement is an Event.
#[derive(Debug, Default)]
pub(crate) struct EnforcementEvents(BTreeMap<AllocationId, LastEvent>);

/// The gap in the last Event of a container, and whether that Event was on its pod.
#[derive(Debug, Default)]
struct LastEvent {
    gap: Option<GapReason>,
    on_pod: bool,
}

impl EnforcementEvents {
    /// Forgets the containers that do not run.
    pub(crate) fn retain<T>(&mut self, running: &BTreeMap<AllocationId, T>) {
        self.0
            .retain(|allocation, _| running.contains_key(allocation));
    }

    /// Whether an Event about this gap is due. A gap that was published on the node is due again
    /// once the pod's name is known, because a pod's owner reads no Events of nodes.
    pub(crate) fn is_due(&mut self, container: &BoundContainer, gap: Option<GapReason>) -> bool {
        let last = self.0.entry(container.allocation).or_default();
        let on_pod = has_pod_name(container);
        let is_due = last.gap != gap || (gap.is_some() && on_pod && !last.on_pod);
        if is_due {
            *last = LastEvent { gap, on_pod };
        }
        is_due
    }
}

/// Whether Events about a container are published on its pod. The kubelet may list a pod after its
/// container has started.
pub(crate) fn has_pod_name(container: &BoundContainer) -> bool {
    let name = container.name.as_ref();
    name.is_some_and(|name| name.pod.is_some())
}

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
    use bursar_node::checkpoint_state::{ContainerName, PodName};
    use bursar_sessions::Process;

    use super::*;

    #[test]
    fn gap_is_published_again_once_the_pod_has_a_name() {
        let unnamed = BoundContainer::with_ids(1, 1);
        let named = BoundContainer {
            name: Some(ContainerName {
                container: "main".into(),
                pod: Some(PodName {
                    namespace: "n".into(),
                    name: "p".into(),
                }),
            }),
            ..unnamed.clone()
        };
        let (mut events, gap) = (EnforcementEvents::default(), Some(GapReason::MountedOver));
        assert!(!events.is_due(&unnamed, None), "nothing has changed");
        assert!(events.is_due(&unnamed, gap), "on the node");
        assert!(!events.is_due(&unnamed, gap));
        assert!(events.is_due(&named, gap), "on the pod");
        assert!(!events.is_due(&named, gap));
        assert!(events.is_due(&named, Some(GapReason::Privileged)));
        assert!(events.is_due(&named, None), "under enforcement again");
        assert!(!events.is_due(&named, None));
    }

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
