use super::*;

use std::time::Duration;

use bursar_crds::conditions::budget as names;
use bursar_crds::{Amount, GpuMemoryBudget, GpuMemoryBudgetStatus, Quantum};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::budget::{Cohort, Facts, Usage};
use crate::cluster::LeftOut;
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

/// One budget of 16 with room for 24, on a node of 32 with nothing running.
fn plain() -> GpuMemoryBudget {
    budget(json!({ "deviceMemory": { "guaranteed": "16Gi", "limit": "24Gi" } }))
}

fn idle() -> Facts {
    Facts {
        quantum: Quantum::Gib1,
        usage: Usage::default(),
        cohort: Cohort {
            guaranteed: Quanta::new(16),
            nodes: 1,
            allocatable: Quanta::new(32),
            left_out: Vec::new(),
            unknown: None,
        },
        pods: Vec::new(),
        refused: Default::default(),
        exceeded_for: Duration::ZERO,
        guaranteed_quota: None,
        limit_quota: None,
        labelled: true,
        sufferers: Vec::new(),
        jobs: std::collections::BTreeMap::new(),
        told: crate::budget::AgentsSay::default(),
    }
}

/// With both quotas of `budget` in force.
fn in_force(budget: &GpuMemoryBudget, facts: Facts) -> Facts {
    let terms = Terms::of(&budget.spec, facts.quantum).unwrap();
    let quota = |which| {
        let cap = Cap::wanted(which, budget, &terms, facts.quantum);
        let in_force = cap.hard.clone();
        let uid = which.name().to_owned();
        let taken_up = Some(at(1));
        Some(Quota {
            uid,
            cap,
            in_force,
            taken_up,
        })
    };
    Facts {
        guaranteed_quota: quota(Which::Guaranteed),
        limit_quota: quota(Which::Limit),
        ..facts
    }
}

fn using(guaranteed: u64, borrowed: u64, managed: u64) -> Facts {
    let usage = Usage {
        pods: 2,
        borrowed_pods: 1,
        guaranteed: Quanta::new(guaranteed),
        borrowed: Quanta::new(borrowed),
        managed: Quanta::new(managed),
    };
    Facts { usage, ..idle() }
}

fn condition<'a>(status: &'a GpuMemoryBudgetStatus, type_: &str) -> &'a Condition {
    status
        .conditions
        .iter()
        .find(|condition| condition.type_ == type_)
        .unwrap()
}

fn said(status: &GpuMemoryBudgetStatus, type_: &str) -> (String, String) {
    let condition = condition(status, type_);
    (condition.status.clone(), condition.reason.clone())
}

fn is(status: &str, reason: &str) -> (String, String) {
    (status.to_owned(), reason.to_owned())
}

#[test]
fn a_budget_that_is_as_declared_and_in_force_is_ready() {
    let facts = in_force(&plain(), using(16, 8, 0));
    let status = status(&plain(), &facts, &at(1));
    assert_eq!(said(&status, names::READY), is("True", names::AS_DECLARED));
    assert_eq!(
        said(&status, names::ACCEPTED),
        is("True", names::AS_DECLARED)
    );
    assert_eq!(
        said(&status, names::COVERED),
        is("True", names::GUARANTEES_FIT)
    );
    assert_eq!(
        said(&status, names::EXCEEDED),
        is("False", names::WITHIN_BUDGET)
    );
    assert_eq!(
        said(&status, names::ENFORCED),
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
fn a_budget_is_not_enforced_before_the_controller_manager_has_taken_its_quotas_up() {
    let mut facts = idle();
    let said_of = |facts: &Facts| {
        let status = status(&plain(), facts, &at(1));
        assert_eq!(
            said(&status, names::ENFORCED),
            is("False", names::QUOTA_PENDING)
        );
        assert_eq!(
            said(&status, names::READY),
            is("False", names::QUOTA_PENDING)
        );
        condition(&status, names::ENFORCED).message.clone()
    };
    assert!(said_of(&facts).contains("not written yet"));
    facts = in_force(&plain(), facts);
    let quota = facts.limit_quota.as_mut().unwrap();
    quota.cap.scope = Scope::Strange;
    let message = said_of(&facts);
    assert!(
        message.contains("the quota was changed: it is put right"),
        "{message}"
    );
    facts = in_force(&plain(), facts);
    let quota = facts.guaranteed_quota.as_mut().unwrap();
    quota.in_force.clear();
    let message = said_of(&facts);
    assert!(message.contains("controller manager"), "{message}");
}

#[test]
fn what_is_asked_for_is_counted_by_class_in_quanta_and_bytes() {
    let status = status(&plain(), &using(10, 4, 3), &at(1));
    assert_eq!(status.device_memory.requested.quanta, 14);
    assert_eq!(status.device_memory.requested.bytes, Amount::from("14Gi"));
    assert_eq!(status.device_memory.borrowed.quanta, 4);
    assert_eq!(status.device_memory.limit.bytes, Amount::from("24Gi"));
    assert_eq!(status.managed_memory.requested.quanta, 3);
    assert_eq!((status.pods, status.borrowed_pods), (2, 1));
}

#[test]
fn more_than_is_allowed_is_exceeded_for_the_gravest_reason_and_tells_all() {
    let cases = [
        (using(20, 8, 1), names::OVER_LIMIT),
        (using(17, 0, 0), names::OVER_GUARANTEE),
        (using(16, 8, 1), names::OVER_MANAGED_LIMIT),
    ];
    for (facts, reason) in cases {
        let status = status(&plain(), &facts, &at(1));
        assert_eq!(said(&status, names::EXCEEDED), is("True", reason));
        assert_eq!(said(&status, names::READY), is("False", reason));
    }
    let worst = status(&plain(), &using(20, 8, 1), &at(1));
    let message = &condition(&worst, names::EXCEEDED).message;
    for part in [
        "28Gi, 24Gi is allowed",
        "20Gi, 16Gi is allowed",
        "1Gi, 0 is allowed",
    ] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn a_budget_without_limit_borrows_nothing() {
    let strict = budget(json!({ "deviceMemory": { "guaranteed": "16Gi" } }));
    let status = status(&strict, &using(12, 5, 0), &at(1));
    assert_eq!(
        said(&status, names::EXCEEDED),
        is("True", names::OVER_LIMIT)
    );
}

#[test]
fn guarantees_beyond_the_nodes_are_overcommitted_with_the_remedy_and_where_the_sums_are() {
    let mut facts = idle();
    facts.cohort.guaranteed = Quanta::new(40);
    let status = status(&plain(), &facts, &at(1));
    assert_eq!(
        said(&status, names::COVERED),
        is("False", names::OVERCOMMITTED)
    );
    assert_eq!(
        condition(&status, names::COVERED).message,
        "cohort default: more is guaranteed than its nodes offer (both sums: metric bursar_cohort_memory_bytes): \
         lower guarantees, or add GPUs"
    );
}

#[test]
fn nothing_is_written_for_a_node_or_a_budget_more_while_guarantees_fit_or_while_they_do_not() {
    for guaranteed in [16, 200] {
        let (mut budget, mut facts) = (plain(), in_force(&plain(), idle()));
        facts.cohort.guaranteed = Quanta::new(guaranteed);
        budget.status = Some(status(&budget, &facts, &at(1)));
        assert_eq!(plan(&budget, &facts, &at(2)).steps, []);
        facts.cohort.allocatable = facts.cohort.allocatable.plus(Quanta::new(1));
        facts.cohort.nodes += 1;
        facts.cohort.guaranteed = facts.cohort.guaranteed.plus(Quanta::new(1));
        assert_eq!(plan(&budget, &facts, &at(2)).steps, []);
    }
}

#[test]
fn a_cohort_without_nodes_says_how_a_node_joins_it() {
    let elsewhere = budget(json!({ "deviceMemory": { "guaranteed": 0 }, "cohort": "lab" }));
    let mut facts = idle();
    facts.cohort.nodes = 0;
    let other = LeftOut::OtherQuantum("512Mi".to_owned());
    facts.cohort.left_out = vec![("n1".to_owned(), other)];
    let status = status(&elsewhere, &facts, &at(1));
    assert_eq!(said(&status, names::COVERED), is("False", names::NO_NODES));
    let message = &condition(&status, names::COVERED).message;
    assert!(message.contains("bursar.dev/cohort=lab"), "{message}");
    assert!(
        message.contains("1 node left out, for n1 counts in 512Mi"),
        "{message}"
    );
}

#[test]
fn nodes_that_do_not_count_are_named_by_reason() {
    let mut facts = idle();
    let left_out = |node: &str, why| (node.to_owned(), why);
    facts.cohort.left_out = vec![
        left_out("a", LeftOut::Dead),
        left_out("b", LeftOut::Unreadable),
        left_out("c", LeftOut::Dead),
    ];
    let status = status(&plain(), &facts, &at(1));
    let message = &condition(&status, names::COVERED).message;
    for told in [
        "2 nodes left out, for node a is not Ready, or its kubelet has no agent",
        "1 node left out, for GpuNode b cannot be read",
    ] {
        assert!(message.contains(told), "{message}");
    }
}

#[test]
fn a_spec_that_contradicts_itself_is_invalid_and_names_field_and_remedy() {
    let cases = [
        (
            json!({ "deviceMemory": { "guaranteed": "20Gi", "limit": "16Gi" } }),
            "spec.deviceMemory.guaranteed is 20Gi, more than spec.deviceMemory.limit (16Gi): lower it",
        ),
        (
            json!({ "deviceMemory": { "guaranteed": "16Gi" }, "perContainer": { "max": "17Gi" } }),
            "spec.perContainer.max is 17Gi, more than spec.deviceMemory.guaranteed (16Gi)",
        ),
    ];
    for (spec, message) in cases {
        let status = status(&budget(spec), &using(4, 0, 0), &at(1));
        assert_eq!(
            said(&status, names::ACCEPTED),
            is("False", names::INVALID_SPEC)
        );
        assert_eq!(
            said(&status, names::READY),
            is("False", names::INVALID_SPEC)
        );
        assert_eq!(
            said(&status, names::COVERED),
            is("Unknown", names::INVALID_SPEC)
        );
        assert_eq!(
            said(&status, names::EXCEEDED),
            is("Unknown", names::INVALID_SPEC)
        );
        let found = &condition(&status, names::ACCEPTED).message;
        assert!(found.contains(message), "{found}");
        assert_eq!(status.device_memory.requested.quanta, 4);
    }
}

#[test]
fn an_override_that_cannot_be_read_is_named_and_spoils_nothing_else() {
    let odd = budget(
        json!({ "deviceMemory": { "guaranteed": "16Gi", "limit": "24Gi" }, "overrides": [
        { "pod": "a", "deviceMemory": "1Gi" }, { "pod": "b", "deviceMemory": "0.5" }] }),
    );
    let facts = in_force(&odd, using(20, 0, 0));
    let status = status(&odd, &facts, &at(1));
    for (type_, wanted) in [
        (names::ACCEPTED, is("False", names::INVALID_SPEC)),
        (names::READY, is("False", names::INVALID_SPEC)),
        (names::COVERED, is("True", names::GUARANTEES_FIT)),
        (names::EXCEEDED, is("True", names::OVER_GUARANTEE)),
        (names::ENFORCED, is("True", names::QUOTAS_IN_FORCE)),
    ] {
        assert_eq!(said(&status, type_), wanted);
    }
    assert_eq!(
        condition(&status, names::ACCEPTED).message,
        "spec.overrides[1].deviceMemory: `0.5` is not a whole number of bytes; the rest holds"
    );
    assert_eq!(status.device_memory.limit.quanta, 24);
    let claim = crate::cluster::Claim::of(&odd, Quantum::Gib1);
    assert_eq!(claim.guaranteed, Quanta::new(16));
}

#[test]
fn an_amount_between_two_quanta_counts_for_less_and_says_so() {
    let odd = budget(json!({ "deviceMemory": { "guaranteed": "16Gi", "limit": "25088Mi" } }));
    let status = status(&odd, &idle(), &at(1));
    assert_eq!(status.device_memory.limit.quanta, 24);
    let message = &condition(&status, names::ACCEPTED).message;
    assert!(
        message.contains("deviceMemory.limit 25088Mi counts as 24Gi"),
        "{message}"
    );
}

/// A change of facts that keeps every condition's status, or not.
fn facts() -> impl Strategy<Value = Facts> {
    let usage = (0i64..5, 0u64..40, 0u64..40, 0u64..40);
    let cohort = (0u64..40, 0usize..3, 0u64..40);
    (usage, cohort).prop_map(|((pods, guaranteed, borrowed, managed), cohort)| {
        let (promised, nodes, allocatable) = cohort;
        let mut facts = using(guaranteed, borrowed, managed);
        facts.usage.pods = pods;
        facts.cohort = Cohort {
            guaranteed: Quanta::new(promised),
            nodes,
            allocatable: Quanta::new(allocatable),
            left_out: Vec::new(),
            unknown: None,
        };
        facts
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
    fn a_status_is_a_fixed_point_whatever_the_hour(spec in spec(), facts in facts()) {
        let mut budget = budget(spec);
        let first = status(&budget, &facts, &at(1));
        budget.status = Some(first.clone());
        prop_assert_eq!(status(&budget, &facts, &at(99)), first);
    }

    #[test]
    fn a_transition_time_moves_with_its_status_and_never_without(
        spec in spec(), before in facts(), after in facts(),
    ) {
        let mut budget = budget(spec);
        let first = status(&budget, &before, &at(1));
        budget.status = Some(first.clone());
        let second = status(&budget, &after, &at(2));
        for (old, new) in first.conditions.iter().zip(&second.conditions) {
            let moved = old.status != new.status;
            prop_assert_eq!(&new.last_transition_time, &at(if moved { 2 } else { 1 }));
        }
    }

    #[test]
    fn ready_is_the_sum_of_the_others(spec in spec(), facts in facts()) {
        let status = status(&budget(spec), &facts, &at(1));
        let holds = |type_: &str, wanted: &str| condition(&status, type_).status == wanted;
        let good = holds(names::ACCEPTED, "True") && holds(names::COVERED, "True")
            && holds(names::EXCEEDED, "False") && holds(names::ENFORCED, "True");
        prop_assert_eq!(holds(names::READY, "True"), good);
    }

    /// The CRD's schema takes 19 digits at most; a status that it refuses would never be written.
    #[test]
    fn whatever_pods_ask_for_the_status_can_be_written(
        spec in spec(), guaranteed in any::<u64>(), borrowed in any::<u64>(), managed in any::<u64>(),
    ) {
        let status = status(&budget(spec), &using(guaranteed, borrowed, managed), &at(1));
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
