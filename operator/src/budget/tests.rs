use super::*;

use std::sync::Arc;

use bursar_crds::conditions::budget as names;
use bursar_crds::{Amount, GpuMemoryBudget, GpuMemoryBudgetStatus, Quantum};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::budget::{BudgetInputs, Cohort, RequestedUsage};
use crate::cluster::ExclusionReason;
use crate::cluster::facts::pod::{PodFacts, PriorityKind};
use crate::quanta::Quanta;

fn at(second: i64) -> Time {
    Time(Timestamp::from_second(second).unwrap())
}

fn budget(spec: Value) -> GpuMemoryBudget {
    serde_json::from_value(json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget",
        "metadata": { "name": "default", "namespace": "team", "generation": 3 },
        "spec": spec,
    }))
    .unwrap()
}

/// A budget of 16 with room for 24, on a node of 32 without pods.
fn plain() -> GpuMemoryBudget {
    budget(json!({ "deviceMemory": { "guaranteed": "16Gi", "limit": "24Gi" } }))
}

fn idle() -> BudgetInputs {
    BudgetInputs {
        default_action: Default::default(),
        quantum: Quantum::Gib1,
        requested: RequestedUsage::default(),
        cohort: Cohort {
            budgets: 1,
            guaranteed: Quanta::new(16),
            nodes: 1,
            allocatable: Quanta::new(32),
            excluded: Vec::new(),
            unknown_field: None,
        },
        pods: Vec::new(),
        refused_for: Default::default(),
        evictions_ineffective_for: Default::default(),
        exceeded_for: None,
        guaranteed_quota: None,
        limit_quota: None,
        failed_step: None,
        is_labelled: true,
        affected_pods: Vec::new(),
        jobs_ignoring_disruption: std::collections::BTreeMap::new(),
        reported: crate::budget::ReportedUsage::default(),
    }
}

/// The status that the plan gives the budget.
fn desired_status(
    budget: &GpuMemoryBudget,
    inputs: &BudgetInputs,
    now: &Time,
) -> GpuMemoryBudgetStatus {
    let mut steps = plan(budget, inputs, now).steps.into_iter();
    let written = steps.find_map(|step| match step {
        Step::ApplyStatus(status) => Some(*status),
        _ => None,
    });
    written.unwrap_or_else(|| budget.status.clone().unwrap())
}

/// The inputs with both quotas of `budget` in force.
fn in_force(budget: &GpuMemoryBudget, inputs: BudgetInputs) -> BudgetInputs {
    let parsed = ParsedSpec::of(&budget.spec, inputs.quantum).unwrap();
    let quota = |kind| {
        let desired = QuotaSpec::desired(kind, budget, &parsed, inputs.quantum);
        let in_force = desired.hard.clone();
        let uid = kind.name().to_owned();
        let taken_up = Some(at(1));
        Some(ObservedQuota {
            uid,
            spec: desired,
            status_hard: in_force,
            status_updated: taken_up,
        })
    };
    BudgetInputs {
        guaranteed_quota: quota(QuotaKind::Guaranteed),
        limit_quota: quota(QuotaKind::Limit),
        ..inputs
    }
}

/// A guaranteed pod with all the managed memory, and a borrowed pod.
fn using(guaranteed: u64, borrowed: u64, managed: u64) -> BudgetInputs {
    let pod = |kind, device, managed| PodFacts {
        api_uid: format!("{kind:?}"),
        kind,
        device: Quanta::new(device),
        managed: Quanta::new(managed),
        ..PodFacts::default()
    };
    let pods = [
        pod(PriorityKind::Guaranteed, guaranteed, managed),
        pod(PriorityKind::Borrowed, borrowed, 0),
    ];
    BudgetInputs {
        requested: pods.iter().collect(),
        pods: pods.map(|pod| (pod.api_uid.clone(), Arc::new(pod))).into(),
        ..idle()
    }
}

fn condition<'a>(status: &'a GpuMemoryBudgetStatus, type_: &str) -> &'a Condition {
    status
        .conditions
        .iter()
        .find(|condition| condition.type_ == type_)
        .unwrap()
}

fn status_and_reason(status: &GpuMemoryBudgetStatus, type_: &str) -> (String, String) {
    let condition = condition(status, type_);
    (condition.status.clone(), condition.reason.clone())
}

fn is(status: &str, reason: &str) -> (String, String) {
    (status.to_owned(), reason.to_owned())
}

#[test]
fn budget_is_ready_when_declared_state_is_in_force() {
    let inputs = in_force(&plain(), using(16, 8, 0));
    let status = desired_status(&plain(), &inputs, &at(1));
    assert_eq!(
        status_and_reason(&status, names::READY),
        is("True", names::AS_DECLARED)
    );
    assert_eq!(
        status_and_reason(&status, names::ACCEPTED),
        is("True", names::AS_DECLARED)
    );
    assert_eq!(
        status_and_reason(&status, names::COVERED),
        is("True", names::GUARANTEES_FIT)
    );
    assert_eq!(
        status_and_reason(&status, names::EXCEEDED),
        is("False", names::WITHIN_BUDGET)
    );
    assert_eq!(
        status_and_reason(&status, names::ENFORCED),
        is("True", names::QUOTAS_IN_FORCE)
    );
    assert_eq!(status.observed_generation, Some(3));
    assert!(
        status
            .conditions
            .iter()
            .all(|condition| condition.observed_generation == Some(3))
    );
}

#[test]
fn budget_is_not_enforced_before_quota_status_is_synced() {
    let mut inputs = idle();
    let enforced_message = |inputs: &BudgetInputs| {
        let status = desired_status(&plain(), inputs, &at(1));
        assert_eq!(
            status_and_reason(&status, names::ENFORCED),
            is("False", names::QUOTA_PENDING)
        );
        assert_eq!(
            status_and_reason(&status, names::READY),
            is("False", names::QUOTA_PENDING)
        );
        condition(&status, names::ENFORCED).message.clone()
    };
    assert!(enforced_message(&inputs).contains("not written yet"));
    inputs = in_force(&plain(), inputs);
    let quota = inputs.limit_quota.as_mut().unwrap();
    quota.spec.scope = Scope::Foreign;
    let message = enforced_message(&inputs);
    assert!(
        message.contains("one of them was changed: the operator updates it"),
        "{message}"
    );
    inputs = in_force(&plain(), inputs);
    let quota = inputs.guaranteed_quota.as_mut().unwrap();
    quota.status_hard.clear();
    let message = enforced_message(&inputs);
    assert!(message.contains("controller manager"), "{message}");
}

#[test]
fn enforced_names_the_failed_step_while_it_is_due() {
    let failed = BudgetInputs {
        failed_step: Some("failed to write it: denied".to_owned()),
        ..idle()
    };
    let message_of = |inputs: &BudgetInputs| {
        let status = desired_status(&plain(), inputs, &at(1));
        condition(&status, names::ENFORCED).message.clone()
    };
    let unwritten = message_of(&failed);
    assert!(
        unwritten.ends_with("is not written yet; failed to write it: denied"),
        "{unwritten}"
    );
    let mut in_force = in_force(&plain(), failed);
    let message = "the API server refuses pods that do not fit";
    assert_eq!(message_of(&in_force), message);
    in_force.is_labelled = false;
    let unlabelled = format!("{message}; failed to write it: denied");
    assert_eq!(message_of(&in_force), unlabelled);
}

#[test]
fn requests_are_counted_by_class_in_quanta_and_bytes() {
    let status = desired_status(&plain(), &using(10, 4, 3), &at(1));
    assert_eq!(status.device_memory.requested.quanta, 14);
    assert_eq!(status.device_memory.requested.bytes, Amount::from("14Gi"));
    assert_eq!(status.device_memory.borrowed.quanta, 4);
    assert_eq!(status.device_memory.limit.bytes, Amount::from("24Gi"));
    assert_eq!(status.managed_memory.requested.quanta, 3);
    assert_eq!((status.pods, status.borrowed_pods), (2, 1));
}

#[test]
fn exceeded_names_the_gravest_reason_and_lists_all() {
    let cases = [
        (using(20, 8, 1), names::OVER_LIMIT),
        (using(17, 0, 0), names::OVER_GUARANTEE),
        (using(16, 8, 1), names::OVER_MANAGED_LIMIT),
    ];
    for (inputs, reason) in cases {
        let status = desired_status(&plain(), &inputs, &at(1));
        assert_eq!(
            status_and_reason(&status, names::EXCEEDED),
            is("True", reason)
        );
        assert_eq!(
            status_and_reason(&status, names::READY),
            is("False", reason)
        );
    }
    let worst = desired_status(&plain(), &using(20, 8, 1), &at(1));
    let message = &condition(&worst, names::EXCEEDED).message;
    for part in [
        "28Gi, more than 24Gi",
        "20Gi, more than 16Gi",
        "1Gi, more than 0",
    ] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn terminating_pod_is_requested_but_exceeds_nothing() {
    let mut inputs = using(16, 9, 0);
    Arc::make_mut(&mut inputs.pods[1].1).terminating = true;
    let status = desired_status(&plain(), &inputs, &at(1));
    assert_eq!(
        status_and_reason(&status, names::EXCEEDED),
        is("False", names::WITHIN_BUDGET)
    );
    assert_eq!(status.device_memory.requested.quanta, 25);
    assert_eq!(status.pods, 2);
}

#[test]
fn budget_without_limit_borrows_nothing() {
    let strict = budget(json!({ "deviceMemory": { "guaranteed": "16Gi" } }));
    let status = desired_status(&strict, &using(12, 5, 0), &at(1));
    assert_eq!(
        status_and_reason(&status, names::EXCEEDED),
        is("True", names::OVER_LIMIT)
    );
    let status = desired_status(&strict, &using(17, 0, 0), &at(1));
    assert_eq!(
        condition(&status, names::EXCEEDED).message,
        "pods request 17Gi, more than 16Gi: delete pods or raise spec.deviceMemory.guaranteed and limit"
    );
}

/// The inputs of a budget in force whose cohort guarantees 40 GiB of 32 GiB.
fn overcommitted(budgets: usize) -> BudgetInputs {
    let mut inputs = in_force(&plain(), idle());
    inputs.cohort.budgets = budgets;
    inputs.cohort.guaranteed = Quanta::new(40);
    inputs
}

#[test]
fn overcommitted_message_has_both_sums_and_the_remedy() {
    let status = desired_status(&plain(), &overcommitted(3), &at(1));
    assert_eq!(
        status_and_reason(&status, names::COVERED),
        is("False", names::OVERCOMMITTED)
    );
    assert_eq!(
        condition(&status, names::COVERED).message,
        "cohort default: 40Gi guaranteed by 3 budgets, 32Gi offered by 1 node: lower guarantees, \
         or add GPUs"
    );
}

#[test]
fn overcommitted_message_of_a_large_cohort_names_the_metric() {
    let status = desired_status(&plain(), &overcommitted(65), &at(1));
    assert_eq!(
        condition(&status, names::COVERED).message,
        "cohort default: the guarantees exceed the memory of its nodes (metrics \
         bursar_cohort_memory_guaranteed_bytes and bursar_cohort_memory_allocatable_bytes): lower guarantees, or add GPUs"
    );
}

#[test]
fn budget_is_ready_while_only_its_cohort_is_overcommitted() {
    let status = desired_status(&plain(), &overcommitted(3), &at(1));
    assert_eq!(
        status_and_reason(&status, names::READY),
        is("True", names::AS_DECLARED)
    );
}

#[test]
fn overcommitted_cohort_does_not_hide_an_exceeded_budget() {
    let mut inputs = using(20, 8, 0);
    inputs.cohort.guaranteed = Quanta::new(40);
    let status = desired_status(&plain(), &inputs, &at(1));
    assert_eq!(
        status_and_reason(&status, names::READY),
        is("False", names::OVER_LIMIT)
    );
}

#[test]
fn budget_is_not_ready_when_its_cohort_has_no_nodes() {
    let mut inputs = in_force(&plain(), idle());
    inputs.cohort.nodes = 0;
    let status = desired_status(&plain(), &inputs, &at(1));
    assert_eq!(
        status_and_reason(&status, names::READY),
        is("False", names::NO_NODES)
    );
}

#[test]
fn covered_message_is_stable_while_its_status_is() {
    // Covered, and overcommitted in a cohort of so many budgets that its message has no sums.
    for guaranteed in [16, 200] {
        let (mut budget, mut inputs) = (plain(), in_force(&plain(), idle()));
        inputs.cohort.budgets = 65;
        inputs.cohort.guaranteed = Quanta::new(guaranteed);
        budget.status = Some(desired_status(&budget, &inputs, &at(1)));
        assert_eq!(plan(&budget, &inputs, &at(2)).steps, []);
        inputs.cohort.allocatable = inputs.cohort.allocatable.plus(Quanta::new(1));
        inputs.cohort.nodes += 1;
        inputs.cohort.guaranteed = inputs.cohort.guaranteed.plus(Quanta::new(1));
        assert_eq!(plan(&budget, &inputs, &at(2)).steps, []);
    }
}

#[test]
fn cohort_without_nodes_says_how_a_node_joins() {
    let other_cohort = budget(json!({ "deviceMemory": { "guaranteed": 0 }, "cohort": "lab" }));
    let mut inputs = idle();
    inputs.cohort.nodes = 0;
    let other = ExclusionReason::OtherQuantum("512Mi".to_owned());
    inputs.cohort.excluded = vec![("n1".to_owned(), other)];
    let status = desired_status(&other_cohort, &inputs, &at(1));
    assert_eq!(
        status_and_reason(&status, names::COVERED),
        is("False", names::NO_NODES)
    );
    let message = &condition(&status, names::COVERED).message;
    assert!(message.contains("bursar.dev/cohort=lab"), "{message}");
    assert!(
        message.contains("1 node excluded, because n1 uses quantum 512Mi"),
        "{message}"
    );
}

#[test]
fn excluded_nodes_are_named_by_reason() {
    let mut inputs = idle();
    let excluded = |node: &str, why| (node.to_owned(), why);
    inputs.cohort.excluded = vec![
        excluded("a", ExclusionReason::Dead),
        excluded("b", ExclusionReason::Unreadable),
        excluded("c", ExclusionReason::Dead),
    ];
    let status = desired_status(&plain(), &inputs, &at(1));
    let message = &condition(&status, names::COVERED).message;
    for text in [
        "2 nodes excluded, because node a is not Ready or its kubelet has no agent",
        "1 node excluded, because GpuNode b cannot be parsed",
    ] {
        assert!(message.contains(text), "{message}");
    }
}

#[test]
fn excluded_node_changes_no_message_of_a_large_cohort() {
    let mut inputs = idle();
    inputs.cohort.budgets = 65;
    let dead = |node: &str| (node.to_owned(), ExclusionReason::Dead);
    let other = |node: &str, size: &str| {
        let other = ExclusionReason::OtherQuantum(size.to_owned());
        (node.to_owned(), other)
    };
    let mut message_of = |excluded: Vec<_>, unknown: &str| {
        inputs.cohort.excluded = excluded;
        inputs.cohort.unknown_field = Some((unknown.to_owned(), "status"));
        let status = desired_status(&plain(), &inputs, &at(1));
        condition(&status, names::COVERED).message.clone()
    };
    let message = message_of(vec![dead("b"), other("c", "512Mi")], "b");
    let more = vec![
        dead("a"),
        dead("b"),
        other("c", "512Mi"),
        other("d", "256Mi"),
    ];
    assert_eq!(message_of(more, "a"), message);
    for text in [
        "; nodes excluded, because they are not Ready or their kubelets have no agent",
        "; nodes excluded, because their quantum is not the cluster's 1Gi",
        "; a GpuNode has a value of another version",
    ] {
        assert!(message.contains(text), "{message}");
    }
}

#[test]
fn contradictory_spec_is_invalid_and_names_the_remedy() {
    let cases = [
        (
            json!({ "deviceMemory": { "guaranteed": "20Gi", "limit": "16Gi" } }),
            "spec.deviceMemory.guaranteed is 20Gi, more than spec.deviceMemory.limit (16Gi): lower it",
        ),
        (
            json!({ "deviceMemory": { "guaranteed": "16Gi" }, "perContainer": { "max": "17Gi" } }),
            "spec.perContainer.max is 17Gi, more than spec.deviceMemory.guaranteed (16Gi)",
        ),
        (
            json!({ "deviceMemory": { "guaranteed": "16Gi" }, "managedMemory": { "limit": "8Gi" },
                "perContainer": { "maxManaged": "9Gi" } }),
            "spec.perContainer.maxManaged is 9Gi, more than spec.managedMemory.limit (8Gi)",
        ),
        (
            json!({ "deviceMemory": { "guaranteed": "16Gi" }, "perContainer": { "maxManaged": "1Gi" } }),
            "spec.perContainer.maxManaged is 1Gi, more than spec.managedMemory.limit (0)",
        ),
    ];
    for (spec, message) in cases {
        let status = desired_status(&budget(spec), &using(4, 0, 0), &at(1));
        assert_eq!(
            status_and_reason(&status, names::ACCEPTED),
            is("False", names::INVALID_SPEC)
        );
        assert_eq!(
            status_and_reason(&status, names::READY),
            is("False", names::INVALID_SPEC)
        );
        assert_eq!(
            status_and_reason(&status, names::COVERED),
            is("Unknown", names::INVALID_SPEC)
        );
        assert_eq!(
            status_and_reason(&status, names::EXCEEDED),
            is("Unknown", names::INVALID_SPEC)
        );
        let found = &condition(&status, names::ACCEPTED).message;
        assert!(found.contains(message), "{found}");
        assert_eq!(status.device_memory.requested.quanta, 4);
    }
}

#[test]
fn invalid_override_is_named_and_affects_nothing_else() {
    let odd = budget(
        json!({ "deviceMemory": { "guaranteed": "16Gi", "limit": "24Gi" }, "overrides": [
        { "pod": "a", "deviceMemory": "1Gi" }, { "pod": "b", "deviceMemory": "0.5" },
        { "pod": "c", "managedMemory": "0.5" }] }),
    );
    let inputs = in_force(&odd, using(20, 0, 0));
    let status = desired_status(&odd, &inputs, &at(1));
    for (type_, wanted) in [
        (names::ACCEPTED, is("False", names::INVALID_SPEC)),
        (names::READY, is("False", names::INVALID_SPEC)),
        (names::COVERED, is("True", names::GUARANTEES_FIT)),
        (names::EXCEEDED, is("True", names::OVER_GUARANTEE)),
        (names::ENFORCED, is("True", names::QUOTAS_IN_FORCE)),
    ] {
        assert_eq!(status_and_reason(&status, type_), wanted);
    }
    assert_eq!(
        condition(&status, names::ACCEPTED).message,
        "spec.overrides[1].deviceMemory: `0.5` is not a whole number of bytes, \
         spec.overrides[2].managedMemory: `0.5` is not a whole number of bytes; the rest applies"
    );
    assert_eq!(status.device_memory.limit.quanta, 24);
    let summary = crate::cluster::BudgetSummary::of(&odd, Quantum::Gib1);
    assert_eq!(summary.guaranteed, Quanta::new(16));
}

#[test]
fn amount_between_quanta_rounds_down_and_says_so() {
    let odd = budget(json!({ "deviceMemory": { "guaranteed": "16Gi", "limit": "25088Mi" } }));
    let status = desired_status(&odd, &idle(), &at(1));
    assert_eq!(status.device_memory.limit.quanta, 24);
    let message = &condition(&status, names::ACCEPTED).message;
    assert!(
        message.contains("deviceMemory.limit 25088Mi counts as 24Gi"),
        "{message}"
    );
}

/// Inputs that may or may not change a condition's status.
fn inputs() -> impl Strategy<Value = BudgetInputs> {
    let usage = (0i64..5, 0u64..40, 0u64..40, 0u64..40);
    let cohort = (0u64..40, 0usize..3, 0u64..40);
    (usage, cohort).prop_map(|((pods, guaranteed, borrowed, managed), cohort)| {
        let (promised, nodes, allocatable) = cohort;
        let mut inputs = using(guaranteed, borrowed, managed);
        inputs.requested.pods = pods;
        inputs.cohort = Cohort {
            budgets: 1,
            guaranteed: Quanta::new(promised),
            nodes,
            allocatable: Quanta::new(allocatable),
            excluded: Vec::new(),
            unknown_field: None,
        };
        inputs
    })
}

fn spec() -> impl Strategy<Value = Value> {
    let amount = || {
        prop::sample::select(vec![
            "0",
            "16Gi",
            "1.5Gi",
            "24Gi",
            "0.3",
            "7P",
            "9223372036854775807",
        ])
    };
    (
        amount(),
        prop::option::of(amount()),
        prop::option::of(amount()),
    )
        .prop_map(|(guaranteed, limit, managed)| {
            json!({
                "deviceMemory": { "guaranteed": guaranteed, "limit": limit },
                "managedMemory": managed.map(|limit| json!({ "limit": limit })),
            })
        })
}

proptest! {
    #[test]
    fn status_is_a_fixed_point_at_any_time(spec in spec(), inputs in inputs()) {
        let mut budget = budget(spec);
        let first = desired_status(&budget, &inputs, &at(1));
        budget.status = Some(first.clone());
        prop_assert_eq!(desired_status(&budget, &inputs, &at(99)), first);
    }

    #[test]
    fn transition_time_changes_only_with_its_status(
        spec in spec(), before in inputs(), after in inputs(),
    ) {
        let mut budget = budget(spec);
        let first = desired_status(&budget, &before, &at(1));
        budget.status = Some(first.clone());
        let second = desired_status(&budget, &after, &at(2));
        for (old, new) in first.conditions.iter().zip(&second.conditions) {
            let moved = old.status != new.status;
            prop_assert_eq!(&new.last_transition_time, &at(if moved { 2 } else { 1 }));
        }
    }

    #[test]
    fn ready_summarizes_the_other_conditions(spec in spec(), inputs in inputs()) {
        let status = desired_status(&budget(spec), &inputs, &at(1));
        let holds = |type_: &str, wanted: &str| condition(&status, type_).status == wanted;
        let has_nodes = condition(&status, names::COVERED).reason != names::NO_NODES;
        let good = holds(names::ACCEPTED, "True") && has_nodes
            && holds(names::EXCEEDED, "False") && holds(names::ENFORCED, "True");
        prop_assert_eq!(holds(names::READY, "True"), good);
    }

    /// The CRD's schema takes 19 digits at most. The API server would refuse a longer number with
    /// the whole status.
    #[test]
    fn status_is_valid_for_any_requests(
        spec in spec(), guaranteed in any::<u64>(), borrowed in any::<u64>(), managed in any::<u64>(),
    ) {
        let status = desired_status(&budget(spec), &using(guaranteed, borrowed, managed), &at(1));
        let device = &status.device_memory;
        let counted = [&device.requested, &device.borrowed, &device.guaranteed, &device.limit,
            &status.managed_memory.limit, &status.managed_memory.requested];
        for counted in counted {
            let bytes = counted.bytes.bytes();
            prop_assert_eq!(bytes, Ok(counted.quanta.unsigned_abs() * Quantum::Gib1.bytes()));
        }
        prop_assert!(device.requested.quanta >= device.borrowed.quanta);
        prop_assert!(status.conditions.iter().all(|condition| condition.message.len() < 1024));
    }
}
