//! Builds the `GpuNode` status from a report. Pure.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use bursar_crds::Amount;
use bursar_crds::conditions::{self, ConditionUpdate, gpu_node as names};
use bursar_crds::context_policy::{ContextAction, FaultAction};
use bursar_crds::gpu_node::{
    Fault, FaultKind, GpuContainer, GpuNodeStatus, GpuPod, GpuRuntime, GpuStatus, Health,
    HealthStatus, MAX_CONTAINERS, MAX_GPUS, MAX_NAMESPACES, MAX_NOT_ENFORCED, MAX_POD_ENTRIES,
    MAX_POD_NAMES, MAX_PODS, MAX_QUOTAS, MAX_RETAINED, MAX_SET_ASIDE, MAX_WAITING, NodeMemory,
    TokenKey,
};
use bursar_crds::numbers::{to_i32, to_i64};
use bursar_gpu::Gpu;
use bursar_ledger::GpuView;
use bursar_ledger::units::{Bytes, PodUid, Quanta};
use bursar_node::checkpoint_state::PodName;
use bursar_retained::runtimes::RuntimeReport;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::carry_over::carry_over;
use crate::summary::summarize;

use super::report::{GpuHealth, GpuReport, MemoryReport, NodeReport};

/// The algorithm of [`TokenKey`].
const TOKEN_ALGORITHM: &str = "Ed25519";

/// The longest reason of [`GpuRuntime`].
const MAX_REASON_LENGTH: usize = 256;

/// Returns the status for `report` after `before`. Entries that did not change keep their times.
///
/// `generation` is the object's `metadata.generation`, if known.
pub fn render(
    report: &NodeReport,
    before: &GpuNodeStatus,
    generation: Option<i64>,
    now: &Time,
) -> GpuNodeStatus {
    let NodeReport {
        boot_id,
        driver_version,
        token_key,
        quantum,
        device_memory,
        managed_memory,
        gpus,
        pod_names,
        waiting,
        not_enforced,
        applied_spec,
        faults,
        containers,
        retained_count,
        retained,
        namespaces,
        conditions,
    } = report;
    let mut names = PodNames {
        known: pod_names,
        left: MAX_POD_NAMES,
    };
    let mut entries_left = MAX_POD_ENTRIES;
    let mut statements = vec![ready_condition(conditions)];
    statements.extend_from_slice(conditions);
    let mut after = GpuNodeStatus {
        observed_generation: applied_spec.generation,
        boot_id: Some(boot_id.clone()),
        agent_version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        driver_version: driver_version.clone(),
        token_key: Some(TokenKey {
            algorithm: TOKEN_ALGORITHM.to_owned(),
            public_key: token_key.to_string(),
        }),
        quantum: Some(Amount::from_bytes(quantum.bytes())),
        summary: Some(summarize(report)),
        context_actions: ContextAction::ALL
            .map(|action| action.as_str().to_owned())
            .to_vec(),
        device_memory: memory_status(device_memory),
        managed_memory: memory_status(managed_memory),
        gpus: gpus
            .iter()
            .take(MAX_GPUS)
            .map(|gpu| gpu_status(gpu, &mut names, &mut entries_left))
            .collect(),
        waiting: first(waiting, MAX_WAITING),
        not_enforced_count: to_i32(not_enforced.len()),
        not_enforced: first(not_enforced, MAX_NOT_ENFORCED),
        quotas: first(&applied_spec.quotas, MAX_QUOTAS),
        faults: faults.clone(),
        containers: first(containers, MAX_CONTAINERS),
        retained_count: to_i32(*retained_count),
        retained: first(retained, MAX_RETAINED),
        namespaces: first(namespaces, MAX_NAMESPACES),
        conditions: conditions::update_conditions(&before.conditions, &statements, generation, now),
    };
    carry_over(before, &mut after, now);
    after
}

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

/// `Ready` holds if all other conditions hold; the first that does not hold supplies the message.
pub fn ready_condition(others: &[ConditionUpdate]) -> ConditionUpdate {
    match others.iter().find(|condition| condition.is_problem()) {
        None if others.is_empty() => ConditionUpdate {
            type_: names::READY,
            holds: None,
            reason: names::PENDING,
            message: "the agent is starting".to_owned(),
        },
        None => ConditionUpdate::new(names::READY, true, names::OK, "pods are given GPU memory"),
        Some(problem) => ConditionUpdate {
            type_: names::READY,
            holds: problem.holds,
            reason: match problem.holds {
                Some(_) => names::NOT_READY,
                None => names::PENDING,
            },
            message: format!("{}: {}", problem.type_, problem.message),
        },
    }
}

/// The names of pods, of which the object has a bounded number.
struct PodNames<'a> {
    known: &'a BTreeMap<PodUid, PodName>,
    left: usize,
}

impl PodNames<'_> {
    /// The pods with the most memory, in a stable order.
    fn largest(&mut self, pods: &BTreeMap<PodUid, Quanta>, most: usize) -> Vec<GpuPod> {
        let mut pods: Vec<_> = pods.iter().collect();
        pods.sort_by_key(|(pod, quanta)| (Reverse(**quanta), *pod));
        let pods = pods.into_iter().take(most);
        pods.map(|(pod, quanta)| self.pod(pod, *quanta)).collect()
    }

    fn pod(&mut self, uid: &PodUid, quanta: Quanta) -> GpuPod {
        let name = self.known.get(uid).filter(|_| self.left > 0);
        self.left -= usize::from(name.is_some());
        let part = |of: fn(&PodName) -> &String| name.map(of).cloned().unwrap_or_default();
        GpuPod {
            uid: uid.as_str().to_owned(),
            namespace: part(|name| &name.namespace),
            name: part(|name| &name.name),
            quanta: to_i32(quanta.0),
        }
    }
}

fn gpu_status(report: &GpuReport, names: &mut PodNames<'_>, entries_left: &mut usize) -> GpuStatus {
    let GpuReport {
        gpu,
        state,
        generation,
        health,
        memory: in_ledger,
        runtime,
        leftover,
        has_managed_memory: _,
    } = report;
    let Gpu {
        uuid,
        minor,
        model,
        memory,
        pci: _,
        mig_parent: _,
        capabilities: _,
    } = gpu;
    let GpuView {
        uuid: _,
        health: _,
        capacity: _,
        bound: _,
        unreclaimed: _,
        leaked,
        orphaned_leases: _,
        withheld,
        free,
        reserved: _,
        set_aside,
        pods,
        reserved_for,
        only_for,
    } = in_ledger;
    let set_aside = names.largest(set_aside, MAX_SET_ASIDE);
    let listed = names.largest(pods, MAX_PODS.min(*entries_left));
    *entries_left -= listed.len();
    let (status, reason) = match health {
        GpuHealth::Healthy => (HealthStatus::Healthy, "Ok"),
        GpuHealth::Unhealthy { reason } => (HealthStatus::Unhealthy, reason.as_str()),
    };
    let kept = *leaked + *leftover;
    GpuStatus {
        uuid: uuid.as_str().to_owned(),
        index: to_i32(*minor),
        model: model.clone(),
        memory: Amount::from_bytes(memory.0),
        state: *state,
        generation: to_i64(*generation),
        health: Health {
            status,
            reason: reason.to_owned(),
            since: None,
        },
        capacity: to_i32(report.capacity().0),
        // The API's `free` includes memory that the agent sets aside; the ledger's does not.
        free: to_i32(in_ledger.unbound().0),
        largest_free: to_i32(free.0),
        leaked: (kept.0 > 0).then(|| Amount::from_bytes(kept.0)),
        withheld: (withheld.0 > 0).then(|| Amount::from_bytes(withheld.0)),
        reserved_for: reserved_for.as_ref().map(|pod| pod.as_str().to_owned()),
        set_aside,
        only_for: only_for.clone(),
        pods_omitted: to_i32(pods.len() - listed.len()),
        pods: listed,
        runtime: runtime.as_ref().map(runtime_status),
    }
}

fn runtime_status((runtime, lent): &(RuntimeReport, Bytes)) -> GpuRuntime {
    let RuntimeReport {
        state,
        starts,
        failures,
        reason,
    } = runtime;
    GpuRuntime {
        state: *state,
        starts: to_i64(*starts),
        lent: Amount::from_bytes(lent.0),
        failures: to_i64(failures.values().sum()),
        reason: reason[..reason.floor_char_boundary(MAX_REASON_LENGTH)].to_owned(),
    }
}

fn memory_status(memory: &MemoryReport) -> NodeMemory {
    let MemoryReport {
        allocatable,
        free,
        largest_free,
    } = memory;
    NodeMemory {
        allocatable: to_i32(allocatable.0),
        free: to_i32(free.0),
        largest_free: to_i32(largest_free.0),
    }
}

/// The first entries of a list.
fn first<T: Clone>(all: &[T], most: usize) -> Vec<T> {
    all[..all.len().min(most)].to_vec()
}

#[cfg(test)]
mod tests {
    use bursar_crds::gpu_node::{
        EnforcementGap, LastFault, LeaseState, MemoryResource, NamespaceUse, PendingContainer,
        RetainedLease, RuntimeState,
    };
    use bursar_retained::runtimes::FailureClass;

    use super::*;
    use crate::fixtures::{at, container, fault, report};

    #[test]
    fn unchanged_report_renders_to_the_same_status() {
        let first = render(&report(), &GpuNodeStatus::default(), Some(1), &at(10));
        assert_eq!(render(&report(), &first, Some(1), &at(500)), first);
    }

    #[test]
    fn public_key_of_tokens_is_in_the_status() {
        let mut report = report();
        let first = render(&report, &GpuNodeStatus::default(), Some(1), &at(10));
        let written = serde_json::to_value(&first.token_key).unwrap();
        let expected = serde_json::json!({ "algorithm": "Ed25519", "publicKey": "07".repeat(32) });
        assert_eq!(written, expected);
        report.token_key.0[0] = 8;
        let replaced = render(&report, &first, Some(1), &at(20));
        assert!(is_urgent(&first, &replaced), "a verifier needs it");
    }

    fn lease(gib: u64) -> RetainedLease {
        RetainedLease {
            namespace: "team".into(),
            name: "weights".into(),
            gpu: "GPU-0".into(),
            generation: 7,
            gpu_generation: 2,
            size: Amount::from_bytes(gib << 30),
            state: LeaseState::Committed,
            owner_uid: "0f".into(),
            owner: String::new(),
            openers: 3,
        }
    }

    #[test]
    fn containers_and_leases_of_the_status_are_bounded() {
        let mut report = report();
        report.containers = vec![container("a"); 1_000];
        report.retained = vec![lease(1); 1_000];
        report.retained_count = 5_000;
        let status = render(&report, &GpuNodeStatus::default(), Some(1), &at(10));
        assert_eq!(status.containers.len(), MAX_CONTAINERS);
        assert_eq!(status.retained.len(), MAX_RETAINED);
        assert_eq!(status.retained_count, 5_000);
    }

    #[test]
    fn only_what_tenants_change_at_will_may_wait() {
        let mut report = report();
        report.containers = vec![container("a"), container("b")];
        report.retained = vec![lease(1)];
        report.retained_count = 1;
        let render = |report: &NodeReport| {
            super::render(report, &GpuNodeStatus::default(), Some(1), &at(10))
        };
        let before = render(&report);
        report.containers[1].process_generation = 9;
        report.retained[0].state = LeaseState::Releasing;
        report.retained.push(lease(2));
        report.retained_count = 2;
        let after = render(&report);
        assert_ne!(after, before);
        assert!(!is_urgent(&before, &after));
        report.containers[1].restarts = 1;
        assert!(is_urgent(&before, &render(&report)), "a restart");
        report.containers[1].restarts = 0;
        report.containers.push(container("c"));
        assert!(is_urgent(&before, &render(&report)), "a new container");
        report.containers.pop();
        report.gpus[0].generation += 1;
        assert!(is_urgent(&before, &render(&report)), "a lost GPU");
    }

    fn context_fault(generation: i64, action: Option<FaultAction>) -> Fault {
        Fault {
            action,
            ..fault(&format!("a-{generation}"), FaultKind::Context, generation)
        }
    }

    /// A report in which container "a" has this last fault, and these faults are open.
    fn report_with_faults(last: i64, open: &[(i64, Option<FaultAction>)]) -> NodeReport {
        let last_fault = LastFault {
            gpu: "GPU-00000000".into(),
            process_generation: last,
            cuda_error: Some(700),
            xid: None,
            action: Some(FaultAction::Report),
            time: at(last),
        };
        let open = open.iter();
        NodeReport {
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
            faults: open
                .map(|(id, action)| context_fault(*id, *action))
                .collect(),
            ..report()
        }
    }

    #[test]
    fn further_faults_that_are_only_reported_may_wait() {
        use FaultAction::{Evict, Process, Report};
        let status = |last, open: &[_]| {
            let report = report_with_faults(last, open);
            render(&report, &GpuNodeStatus::default(), Some(1), &at(10))
        };
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
        let mut other_container = report_with_faults(9, &[(9, Some(Report))]);
        let container = other_container.faults[0].container.as_mut();
        container.unwrap().container = "sidecar".into();
        let other_container = render(
            &other_container,
            &GpuNodeStatus::default(),
            Some(1),
            &at(10),
        );
        assert!(is_urgent(&first, &other_container), "another container");
    }

    #[test]
    fn runtime_is_written_at_once_for_its_state_alone() {
        let mut report = report();
        let runtime = |state, starts, failures, gib| {
            let report = RuntimeReport {
                state,
                starts,
                failures: [(FailureClass::Refused, failures), (FailureClass::Exit, 1)].into(),
                reason: "ü".repeat(200),
            };
            Some((report, Bytes::gib(gib)))
        };
        let render = |report: &NodeReport| {
            super::render(report, &GpuNodeStatus::default(), Some(1), &at(10))
        };
        report.gpus[1].runtime = runtime(RuntimeState::Refused, 1, 2, 3);
        let before = render(&report);
        let written = before.gpus[1].runtime.as_ref().unwrap();
        assert_eq!((written.starts, written.failures), (1, 3));
        assert_eq!(written.lent.bytes(), Ok(3 << 30));
        assert_eq!(written.reason, "ü".repeat(128));
        assert_eq!(before.gpus[0].runtime, None);
        report.gpus[1].runtime = runtime(RuntimeState::Refused, 2, 9, 4);
        let after = render(&report);
        assert_ne!(after, before);
        assert!(!is_urgent(&before, &after));
        report.gpus[1].runtime = runtime(RuntimeState::Ready, 2, 9, 4);
        assert!(is_urgent(&before, &render(&report)), "its state");
    }

    #[test]
    fn status_read_back_equals_what_was_written() {
        let mut report = report();
        report.waiting.push(PendingContainer {
            pod_uid: "0f".into(),
            namespace: "team".into(),
            pod: "p".into(),
            container: "c".into(),
            resource: MemoryResource::ManagedMemory,
            quanta: 8,
            since: at(10),
        });
        let written = render(&report, &GpuNodeStatus::default(), Some(1), &at(10));
        let read: GpuNodeStatus =
            serde_json::from_value(serde_json::to_value(&written).unwrap()).unwrap();
        assert_eq!(read, written);
        assert_eq!(render(&report, &read, Some(1), &at(60)), written);
    }

    #[test]
    fn pods_of_a_gpu_have_names_as_soon_as_these_are_known() {
        let uid = |text: &str| text.parse::<PodUid>().unwrap();
        let mut report = report();
        report.gpus[0].memory.pods = [(uid("a"), Quanta(4)), (uid("b"), Quanta(8))].into();
        report.gpus[0].memory.set_aside = [(uid("c"), Quanta(2))].into();
        for (pod, namespace, name) in [("b", "team-b", "train"), ("c", "team-a", "late")] {
            let (namespace, name) = (namespace.to_owned(), name.to_owned());
            report
                .pod_names
                .insert(uid(pod), PodName { namespace, name });
        }
        let status = render(&report, &GpuNodeStatus::default(), Some(1), &at(10));
        let names = |pods: &[GpuPod]| {
            let names = pods.iter();
            let names = names
                .map(|pod| format!("{} {}/{} {}", pod.uid, pod.namespace, pod.name, pod.quanta));
            names.collect::<Vec<_>>()
        };
        assert_eq!(names(&status.gpus[0].pods), ["b team-b/train 8", "a / 4"]);
        assert_eq!(names(&status.gpus[0].set_aside), ["c team-a/late 2"]);
        let read: GpuNodeStatus =
            serde_json::from_value(serde_json::to_value(&status).unwrap()).unwrap();
        assert_eq!(read, status);
    }

    #[test]
    fn all_pods_of_a_full_node_are_listed_with_their_gpu() {
        let mut report = report();
        let pod = |number: u32| (number.to_string().parse().unwrap(), Quanta(1));
        report.gpus[0].memory.pods = (0..250).map(pod).collect();
        report.gpus[1].memory.pods = (0..300).map(pod).collect();
        let status = render(&report, &GpuNodeStatus::default(), Some(1), &at(10));
        let gpus = status.gpus.iter();
        let counts: Vec<_> = gpus.map(|gpu| (gpu.pods.len(), gpu.pods_omitted)).collect();
        assert_eq!(counts, [(250, 0), (256, 44)]);
    }

    #[test]
    fn ready_names_the_condition_that_does_not_hold() {
        let mut broken = report();
        broken.conditions[0] = ConditionUpdate::new(
            names::GPUS_FOUND,
            false,
            names::NO_GPUS,
            "the driver has no GPU",
        );
        let status = render(&broken, &GpuNodeStatus::default(), None, &at(1));
        let ready = &status.conditions[0];
        assert_eq!(
            (ready.type_.as_str(), ready.status.as_str()),
            ("Ready", "False")
        );
        assert_eq!(ready.message, "GpusFound: the driver has no GPU");
    }

    #[test]
    fn object_stays_small_when_its_lists_are_full() {
        let mut full = report();
        let gpu = full.gpus[0].clone();
        let pod = |number: usize| format!("{number:036}").parse::<PodUid>().unwrap();
        let longest = PodName {
            namespace: "n".repeat(63),
            name: "p".repeat(253),
        };
        full.pod_names = (0..250)
            .map(|number| (pod(number), longest.clone()))
            .collect();
        full.gpus = (0..300)
            .map(|_| GpuReport {
                memory: GpuView {
                    set_aside: (0..9).map(|number| (pod(number), Quanta(1))).collect(),
                    pods: (0..250).map(|number| (pod(number), Quanta(1))).collect(),
                    ..gpu.memory.clone()
                },
                ..gpu.clone()
            })
            .collect();
        let gap = EnforcementGap {
            pod_uid: "0f".into(),
            namespace: "n".repeat(63),
            pod: "p".repeat(253),
            container: "c".repeat(63),
            reason: "MountedOver".into(),
            message: "ü".repeat(256),
        };
        full.not_enforced = vec![gap; 300];
        let status = render(&full, &GpuNodeStatus::default(), Some(1), &at(1));
        assert_eq!(status.gpus.len(), MAX_GPUS);
        let pods = || {
            status
                .gpus
                .iter()
                .flat_map(|gpu| gpu.set_aside.iter().chain(&gpu.pods))
        };
        assert_eq!(pods().count(), MAX_GPUS * MAX_SET_ASIDE + MAX_POD_ENTRIES);
        let omitted = status.gpus.iter().map(|gpu| gpu.pods_omitted);
        let omitted: Vec<i32> = omitted.collect();
        assert_eq!((omitted[0], omitted[MAX_GPUS - 1]), (0, 250));
        assert_eq!(
            pods().filter(|pod| !pod.name.is_empty()).count(),
            MAX_POD_NAMES
        );
        assert_eq!(
            (status.not_enforced.len(), status.not_enforced_count),
            (16, 300)
        );
        let length = serde_json::to_vec(&status).unwrap().len();
        // The API server stores objects of up to 1.5 MiB.
        assert!(length < 768 << 10, "{length}");
    }
}
