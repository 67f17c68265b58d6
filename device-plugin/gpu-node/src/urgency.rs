//! Decides which changes of the status are written at once: pure.

use std::collections::BTreeSet;

use bursar_crds::context_policy::FaultAction;
use bursar_crds::gpu_node::{Fault, FaultKind, GpuContainer, GpuNodeStatus, GpuRuntime};

/// Whether `after` differs from `before` in more than what tenants change as they like, and the
/// counts of allocator runtimes. Tenants change process generations, leases and further faults that
/// are only reported.
pub(crate) fn is_urgent(before: &GpuNodeStatus, after: &GpuNodeStatus) -> bool {
    if are_faults_urgent(&before.faults, &after.faults) {
        return true;
    }
    let mut settled = GpuNodeStatus {
        retained_count: before.retained_count,
        retained: before.retained.clone(),
        faults: before.faults.clone(),
        ..after.clone()
    };
    if let (Some(summary), Some(old)) = (&mut settled.summary, &before.summary) {
        summary.faults = old.faults;
    }
    for container in &mut settled.containers {
        let is_same = |old: &&GpuContainer| {
            (&old.pod_uid, &old.container) == (&container.pod_uid, &container.container)
        };
        if let Some(old) = before.containers.iter().find(is_same) {
            container.process_generation = old.process_generation;
            if let (Some(last), Some(old)) = (&mut container.last_fault, &old.last_fault) {
                last.clone_from(old);
            }
        }
    }
    for used in &mut settled.namespaces {
        let mut known = before.namespaces.iter().filter(|old| old.poisoned > 0);
        if let Some(old) = known.find(|old| old.namespace == used.namespace) {
            used.poisoned = old.poisoned;
        }
    }
    for gpu in &mut settled.gpus {
        let old = before.gpus.iter().find(|old| old.uuid == gpu.uuid);
        if let (Some(runtime), Some(old)) =
            (&mut gpu.runtime, old.and_then(|old| old.runtime.as_ref()))
        {
            *runtime = GpuRuntime {
                state: runtime.state,
                reason: std::mem::take(&mut runtime.reason),
                ..old.clone()
            };
        }
    }
    settled != *before
}

/// Whether the operator may act on a difference between these faults. It does nothing about a fault
/// without an action. It acts on a fault that is only reported where the policy has changed since.
/// It then needs one such fault of the container, and the new policy changes the status anyway.
fn are_faults_urgent(before: &[Fault], after: &[Fault]) -> bool {
    let has_action =
        |fault: &Fault, action| fault.kind == FaultKind::Context && fault.action == action;
    let is_reported = |fault: &Fault| has_action(fault, Some(FaultAction::Report));
    let container_of = |fault: &Fault| {
        let container = fault.container.as_ref()?;
        Some((container.pod_uid.clone(), container.container.clone()))
    };
    let waiting = |faults: &[Fault]| {
        let mut waiting = faults.to_vec();
        waiting.retain(|fault| !has_action(fault, None) && !is_reported(fault));
        waiting
    };
    let reported = |faults: &[Fault]| -> BTreeSet<_> {
        let reported = faults.iter().filter(|fault| is_reported(fault));
        reported.map(container_of).collect()
    };
    waiting(before) != waiting(after) || !reported(after).is_subset(&reported(before))
}

#[cfg(test)]
mod tests {
    use bursar_crds::Amount;
    use bursar_crds::gpu_node::{
        LastFault, LeaseState, NamespaceUse, NodeSummary, RuntimeState, TokenKey,
    };
    use bursar_crds::numbers::to_i32;

    use super::*;
    use crate::fixtures::{at, container, fault, lease, report};

    #[test]
    fn only_what_tenants_change_at_will_may_wait() {
        let mut status = report().status;
        status.containers = vec![container("a"), container("b")];
        status.retained = vec![lease(1)];
        status.retained_count = 1;
        let before = status.clone();
        status.containers[1].process_generation = 9;
        status.retained[0].state = LeaseState::Releasing;
        status.retained.push(lease(2));
        status.retained_count = 2;
        let after = status.clone();
        assert_ne!(after, before);
        assert!(!is_urgent(&before, &after));
        status.containers[1].restarts = 1;
        assert!(is_urgent(&before, &status), "a restart");
        status.containers[1].restarts = 0;
        status.containers.push(container("c"));
        assert!(is_urgent(&before, &status), "a new container");
        status.containers.pop();
        status.gpus[0].generation += 1;
        assert!(is_urgent(&before, &status), "a lost GPU");
        status.gpus[0].generation -= 1;
        status.token_key = Some(TokenKey {
            algorithm: "Ed25519".into(),
            public_key: "08".repeat(32),
        });
        assert!(is_urgent(&before, &status), "a verifier needs the key");
    }

    fn context_fault(generation: i64, action: Option<FaultAction>) -> Fault {
        Fault {
            action,
            ..fault(&format!("a-{generation}"), FaultKind::Context, generation)
        }
    }

    /// A status in which container "a" has this last fault, and these faults are open.
    fn status_with_faults(last: i64, open: &[(i64, Option<FaultAction>)]) -> GpuNodeStatus {
        let last_fault = LastFault {
            gpu: "GPU-00000000".into(),
            process_generation: last,
            cuda_error: Some(700),
            xid: None,
            action: Some(FaultAction::Report),
            time: at(last),
        };
        let faults = open.iter();
        GpuNodeStatus {
            summary: Some(NodeSummary {
                faults: to_i32(open.len()),
                ..NodeSummary::default()
            }),
            containers: vec![GpuContainer {
                process_generation: last,
                last_fault: Some(last_fault).filter(|_| last > 0),
                ..container("a")
            }],
            namespaces: vec![NamespaceUse {
                namespace: "team".into(),
                observed: 4,
                observed_managed: 2,
                denials: 0,
                poisoned: last,
                restarts: 0,
            }],
            faults: faults
                .map(|(id, action)| context_fault(*id, *action))
                .collect(),
            ..report().status
        }
    }

    #[test]
    fn further_faults_that_are_only_reported_may_wait() {
        use FaultAction::{Evict, Process, Report};
        let status = status_with_faults;
        let first = status(1, &[(1, Some(Report))]);
        assert!(is_urgent(&status(0, &[]), &first), "the first fault");
        for quiet in [
            status(9, &[]),
            status(9, &[(9, Some(Report))]),
            status(9, &[(8, Some(Report)), (9, None)]),
        ] {
            assert_ne!(quiet, first);
            assert!(!is_urgent(&first, &quiet), "{:?}", quiet.faults);
        }
        for action in [Evict, Process] {
            let open = status(9, &[(9, Some(action))]);
            assert!(is_urgent(&first, &open), "{action:?}");
            assert!(is_urgent(&open, &status(9, &[])), "the end of {action:?}");
        }
        let none_open = status(2, &[]);
        assert!(
            is_urgent(&none_open, &status(9, &[(9, Some(Report))])),
            "the operator knows no fault of the container"
        );
        let mut other_container = status(9, &[(9, Some(Report))]);
        let container = other_container.faults[0].container.as_mut();
        container.unwrap().container = "sidecar".into();
        assert!(is_urgent(&first, &other_container), "another container");
    }

    #[test]
    fn runtime_is_written_at_once_for_its_state_alone() {
        let mut status = report().status;
        let runtime = |state, starts, failures, gib: u64| {
            Some(GpuRuntime {
                state,
                starts,
                lent: Amount::from_bytes(gib << 30),
                failures,
                reason: "why".into(),
            })
        };
        status.gpus[1].runtime = runtime(RuntimeState::Refused, 1, 2, 3);
        let before = status.clone();
        status.gpus[1].runtime = runtime(RuntimeState::Refused, 2, 9, 4);
        let after = status.clone();
        assert_ne!(after, before);
        assert!(!is_urgent(&before, &after));
        status.gpus[1].runtime = runtime(RuntimeState::Ready, 2, 9, 4);
        assert!(is_urgent(&before, &status), "its state");
    }
}
