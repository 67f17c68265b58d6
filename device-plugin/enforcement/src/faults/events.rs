//! Publishes Events about faults and builds their entries in the GpuNode's status.

use bursar_apiserver::{Events, Reason};
use bursar_crds::gpu_node::{self, FaultContainer, FaultKind};
use bursar_crds::numbers::{to_i64, truncate_to_seconds};
use bursar_ledger::units::AllocationId;
use bursar_node::allocator::BoundContainer;
use bursar_node::checkpoint_state::ContainerName;
use bursar_sessions::{Fault, RecoveryAction};

use super::restarts::Restart;
use crate::audit::events::publish;

/// The identifier of a fault; an image is poisoned at most once.
pub(crate) fn fault_id(allocation: &AllocationId, fault: &Fault) -> String {
    format!("{allocation}-{}", fault.image.generation)
}

/// The entry of an open fault in the GpuNode's status.
pub(crate) fn open_fault(
    allocation: &AllocationId,
    fault: &Fault,
    gpu_generation: u64,
    containers: &[BoundContainer],
) -> gpu_node::Fault {
    let mut bound = containers.iter();
    let bound = bound.find(|container| container.allocation == *allocation);
    let container = bound.map(|bound| {
        let [namespace, pod, container] = ContainerName::parts(bound.name.as_ref());
        FaultContainer {
            pod_uid: bound.pod.to_string(),
            namespace,
            pod,
            container,
            process_generation: to_i64(fault.image.generation),
        }
    });
    gpu_node::Fault {
        id: fault_id(allocation, fault),
        kind: FaultKind::Context,
        gpu: fault.gpu.to_string(),
        gpu_generation: to_i64(gpu_generation),
        cuda_error: fault.cuda_error,
        xid: fault.xid.and_then(|xid| i32::try_from(xid).ok()),
        action: fault.decision().map(RecoveryAction::to_api),
        container,
        time: truncate_to_seconds(fault.time),
    }
}

/// Publishes an Event about a new fault.
pub(crate) fn publish_fault(
    events: &Events,
    allocation: &AllocationId,
    fault: &Fault,
    containers: &[BoundContainer],
) {
    let reason = Reason::ContextPoisoned;
    publish(
        events,
        reason,
        message(fault),
        Some(*allocation),
        containers,
    );
}

/// Publishes an Event about a program that runs again.
pub(crate) fn publish_restart(events: &Events, restart: &Restart, containers: &[BoundContainer]) {
    let reason = Reason::ContextRestarted;
    let message = restart_message(restart);
    publish(
        events,
        reason,
        message,
        Some(restart.allocation),
        containers,
    );
}

fn restart_message(restart: &Restart) -> String {
    let seconds = restart.took.as_secs_f64();
    let (before, generation) = (restart.before, restart.generation);
    let outcome = restart.action.describe_successor();
    format!(
        "{outcome}, {seconds:.1} s after the fault (generation {generation} instead of {before})"
    )
}

fn message(fault: &Fault) -> String {
    let cause = match (fault.cuda_error, fault.xid) {
        (Some(code), _) => format!("CUDA error {code}"),
        (None, Some(xid)) => format!("XID {xid}"),
        (None, None) => "a fault".to_owned(),
    };
    if fault.is_memory_held() {
        let generation = fault.image.generation;
        return format!(
            "{cause} ended a process (generation {generation}), and another process still holds its \
             memory (MemoryHeld): its container is restarted"
        );
    }
    let decision = fault.decision();
    let done = decision.map_or("it gets no more memory", RecoveryAction::describe);
    // Tenants read the Event and must not learn a pid of the host.
    let generation = fault.image.generation;
    format!("{cause} poisoned the context of a process (generation {generation}): {done}")
}

#[cfg(test)]
mod tests {
    use bursar_crds::context_policy::FaultAction;
    use bursar_ledger::BootTime;
    use bursar_sessions::{Process, ProcessImage, RecordedMoment};
    use jiff::Timestamp;

    use super::*;

    fn fault() -> Fault {
        Fault {
            image: ProcessImage {
                process: Process { pid: 7, start: 70 },
                generation: 3,
            },
            gpu: "GPU-a".parse().unwrap(),
            cuda_error: Some(700),
            xid: Some(31),
            time: Timestamp::UNIX_EPOCH,
            since: BootTime::default(),
            decided: Some((
                RecoveryAction::ReexecInPlace,
                RecordedMoment(BootTime::default()),
            )),
            executed: false,
            ended: false,
            root: None,
            held_since: None,
        }
    }

    #[test]
    fn message_of_a_fault_has_cause_generation_and_action() {
        let expected = "CUDA error 700 poisoned the context of a process (generation 3): \
            its program is executed again in the same process";
        assert_eq!(message(&fault()), expected);
        let undecided = Fault {
            cuda_error: None,
            decided: None,
            ..fault()
        };
        assert!(message(&undecided).starts_with("XID 31 poisoned"));
        let decided = |action| Some((action, RecordedMoment(BootTime::default())));
        let process_only = Fault {
            decided: decided(RecoveryAction::EndProcess),
            held_since: Some(BootTime::default()),
            ..fault()
        };
        assert!(message(&process_only).ends_with(": it ends, and its container goes on"));
        let held = Fault {
            decided: decided(RecoveryAction::RestartContainer { over_limit: false }),
            ..process_only
        };
        assert!(message(&held).contains("(MemoryHeld)"));
    }

    #[test]
    fn message_of_a_restart_has_time_and_generations() {
        let restart = Restart {
            allocation: AllocationId::from_bits(1),
            before: 3,
            generation: 4,
            took: std::time::Duration::from_millis(312),
            action: RecoveryAction::ReexecInPlace,
        };
        assert_eq!(
            restart_message(&restart),
            "the program runs again in the same process, 0.3 s after the fault \
             (generation 4 instead of 3)"
        );
        let replaced = Restart {
            action: RecoveryAction::EndProcess,
            ..restart
        };
        assert_eq!(
            restart_message(&replaced),
            "another process runs, 0.3 s after the fault (generation 4 instead of 3)"
        );
    }

    #[test]
    fn fault_is_reported_when_its_container_is_unknown() {
        let allocation = AllocationId::from_bits(0xaa);
        let known = BoundContainer::with_ids(0xaa, 1);
        let open = open_fault(&allocation, &fault(), 5, &[known]);
        assert_eq!(
            (open.id.as_str(), open.gpu_generation),
            ("00000000000000aa-3", 5)
        );
        assert_eq!(open.action, Some(FaultAction::InPlace));
        assert_eq!(open.container.unwrap().pod_uid, "p");
        let unknown = open_fault(&allocation, &fault(), 5, &[]);
        assert_eq!(
            (unknown.kind, unknown.container),
            (FaultKind::Context, None)
        );
    }
}
