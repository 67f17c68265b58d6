use std::time::Duration;

use bursar_crds::context_policy::{ContextAction, ContextPolicy};
use bursar_crds::{COHORT_LABEL, GpuNode};
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::budget::{BudgetInputs, Cohort, QuotaKind, QuotaSpec, Scope};
use crate::cluster::aggregates::CohortMember;
use crate::cluster::facts::node::GpuFacts;
use crate::cluster::facts::pod::{Placement, PodFacts, PriorityKind};
use crate::cluster::projections::OpenFault;
use crate::cluster::{Capacity, ExclusionReason, QuotaOverrides, WatchEvent};
use crate::quanta::Quanta;

fn key(namespace: &str, name: &str) -> Key {
    Key {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    }
}

fn summary(cohort: &str, guaranteed: u64, version: u64) -> BudgetSummary {
    BudgetSummary {
        cohort: cohort.to_owned(),
        guaranteed: Quanta::new(guaranteed),
        context_policy: None,
        overrides: QuotaOverrides::new(),
        resource_version: Some(version.to_string()),
    }
}

fn budget(namespace: &str, summary: BudgetSummary) -> WatchEvent {
    WatchEvent::Budget(Event::Apply((key(namespace, "default"), Some(summary))))
}

fn pod(namespace: &str, name: &str, class: PriorityKind, device: u64) -> WatchEvent {
    WatchEvent::Pod(requesting(namespace, name, class, device, None))
}

fn requesting(
    namespace: &str,
    name: &str,
    kind: PriorityKind,
    device: u64,
    node: Option<&str>,
) -> Event<CacheEntry<PodSummary>> {
    let node = node.map(|node| Placement::Node(node.to_owned()));
    let facts = PodFacts {
        api_uid: format!("{namespace}/{name}"),
        kind,
        device: Quanta::new(device),
        placement: node.unwrap_or_default(),
        ..PodFacts::default()
    };
    Event::Apply((key(namespace, name), Some(PodSummary::of_facts(facts))))
}

/// A pod on a node.
fn placed(namespace: &str, name: &str, node: &str) -> WatchEvent {
    let kind = PriorityKind::Guaranteed;
    WatchEvent::Pod(requesting(namespace, name, kind, 1, Some(node)))
}

fn gone(namespace: &str, name: &str) -> WatchEvent {
    WatchEvent::Pod(Event::Delete((key(namespace, name), None)))
}

fn node(name: &str, quanta: u64) -> WatchEvent {
    WatchEvent::GpuNode(Event::Apply((
        key("", name),
        Some(GpuNodeSummary {
            capacity: Some(Capacity::Counted(Quanta::new(quanta))),
            ..GpuNodeSummary::default()
        }),
    )))
}

#[test]
fn restarts_written_to_a_node_are_forgotten_when_it_is_gone() {
    let uid = |uid: &str| GpuNodeSummary {
        facts: Box::new(GpuFacts {
            uid: uid.to_owned(),
            ..GpuFacts::default()
        }),
        ..GpuNodeSummary::default()
    };
    let there = |name: &str| WatchEvent::GpuNode(Event::Apply((key("", name), Some(uid(name)))));
    let mut index = index([there("stays")]);
    let mut written = BTreeMap::new();
    for number in 0..1000 {
        let name = format!("autoscaled-{number}");
        index.apply(there(&name));
        written.insert(name.clone(), Vec::new());
        written.insert("stays".to_owned(), Vec::new());
        index.outdated_restarts(&mut written);
        assert_eq!(written.len(), 2, "both are there");
        index.apply(WatchEvent::GpuNode(Event::Delete((key("", &name), None))));
        index.outdated_restarts(&mut written);
    }
    assert_eq!(written.keys().collect::<Vec<_>>(), ["stays"]);
}

/// A budget whose policy only reports poisoned contexts.
fn reports() -> BudgetSummary {
    let contexts = ContextPolicy {
        action: Some(ContextAction::Report),
        max_restarts: 1,
        window_seconds: 60,
        grace_seconds: 10,
    };
    BudgetSummary {
        context_policy: Some(contexts),
        ..summary("x", 8, 1)
    }
}

/// The GpuNamespace of a namespace, with this policy.
fn gpu_namespace(name: &str, context_policy: Option<ContextPolicy>) -> WatchEvent {
    let uid = format!("uid of {name}");
    let summary = GpuNamespaceSummary {
        uid,
        context_policy,
    };
    WatchEvent::GpuNamespace(Event::Apply((key("", name), Some(summary))))
}

#[test]
fn gpu_namespace_says_what_the_budget_says() {
    let policy = reports().context_policy.unwrap();
    let mut index = index([
        budget("a", reports()),
        budget("b", summary("x", 8, 1)),
        gpu_namespace("gone", Some(policy.clone())),
    ]);
    assert_eq!(index.outdated_namespaces(), [], "none is listed");
    index.apply(WatchEvent::GpuNamespace(Event::Init));
    index.apply(match gpu_namespace("gone", Some(policy.clone())) {
        WatchEvent::GpuNamespace(Event::Apply(entry)) => {
            WatchEvent::GpuNamespace(Event::InitApply(entry))
        }
        other => other,
    });
    index.apply(WatchEvent::GpuNamespace(Event::InitDone));
    let apply = |policy: &ContextPolicy| NamespaceWrite::Apply(policy.clone());
    let delete = |name: &str| NamespaceWrite::Delete(format!("uid of {name}"));
    let due = [
        ("gone".to_owned(), delete("gone")),
        ("a".to_owned(), apply(&policy)),
    ];
    assert_eq!(index.outdated_namespaces(), due);
    index.apply(gpu_namespace("a", Some(policy.clone())));
    index.apply(WatchEvent::GpuNamespace(Event::Delete((
        key("", "gone"),
        None,
    ))));
    assert_eq!(index.outdated_namespaces(), []);
    // One that another client edited, or that this version cannot read, is written again.
    let edited = ContextPolicy {
        max_restarts: 2,
        ..policy.clone()
    };
    for other in [Some(edited), None] {
        index.apply(gpu_namespace("a", other));
        assert_eq!(
            index.outdated_namespaces(),
            [("a".to_owned(), apply(&policy))]
        );
    }
    index.apply(budget("a", summary("x", 8, 2)));
    assert_eq!(index.outdated_namespaces(), [("a".to_owned(), delete("a"))]);
}

#[test]
fn policy_that_equals_the_default_needs_no_gpu_namespace() {
    let default = BudgetSummary {
        context_policy: Some(ContextPolicy::default()),
        ..summary("x", 8, 1)
    };
    let index = index([
        budget("a", default),
        WatchEvent::GpuNamespace(Event::InitDone),
    ]);
    assert_eq!(index.outdated_namespaces(), []);
}

#[test]
fn gpu_namespace_of_an_unreadable_budget_stays() {
    let mut index = index([
        WatchEvent::GpuNamespace(Event::InitDone),
        gpu_namespace("a", reports().context_policy),
    ]);
    assert_eq!(index.outdated_namespaces().len(), 1);
    let unreadable = Event::Apply((key("a", "default"), Some("a later version".to_owned())));
    index.apply(WatchEvent::Unreadable(kinds::BUDGETS, unreadable));
    assert_eq!(index.outdated_namespaces(), []);
}

/// A node that is alive, with or without a cohort label.
fn host(cohort: Option<&str>) -> NodeFacts {
    let label = cohort.map(|cohort| (COHORT_LABEL.to_owned(), cohort.to_owned()));
    NodeFacts {
        labels: label.into_iter().collect(),
        is_ready: true,
        allocatable: Quanta::new(1),
        ..NodeFacts::default()
    }
}

fn label(node: &str, cohort: &str) -> WatchEvent {
    WatchEvent::Node(Event::Apply((key("", node), Some(host(Some(cohort))))))
}

fn quota(namespace: &str, most: u64) -> WatchEvent {
    let hard = BTreeMap::from([(
        "requests.bursar.dev/gpu-memory-gib".to_owned(),
        Quanta::new(most),
    )]);
    let cap = QuotaSpec {
        scope: Scope::All,
        hard: hard.clone(),
        owner: String::new(),
        overflows: false,
    };
    let quota = ObservedQuota {
        uid: String::new(),
        spec: cap,
        status_hard: hard,
        status_updated: None,
    };
    WatchEvent::Quota(Event::Apply((
        key(namespace, QuotaKind::Limit.name()),
        Some(quota),
    )))
}

fn index(changes: impl IntoIterator<Item = WatchEvent>) -> ClusterIndex {
    let mut index = ClusterIndex::new(Quantum::Gib1);
    for change in changes {
        index.apply(change);
    }
    index
}

fn concerned(index: &ClusterIndex, affected: &Affected) -> Vec<String> {
    let keys = index.affected_budgets(affected);
    keys.into_iter().map(|key| key.namespace).collect()
}

/// A node's report on a namespace's pods.
fn node_report(node: &str, namespace: &str, observed: i32) -> WatchEvent {
    let object: GpuNode = serde_json::from_value(json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuNode", "metadata": { "name": node }, "spec": {},
        "status": { "quantum": "1Gi", "deviceMemory": { "allocatable": 8, "free": 8, "largestFree": 8 },
            "namespaces": [{ "namespace": namespace, "observed": observed, "denials": 0, "poisoned": 0, "restarts": 0 }] },
    }))
    .unwrap();
    let gpus = GpuNodeSummary::of(&object, Quantum::Gib1);
    WatchEvent::GpuNode(Event::Apply((key("", node), Some(gpus))))
}

#[test]
fn node_report_affects_its_namespaces_and_capacity_all() {
    let mut index = index([
        budget("a", summary("x", 8, 1)),
        budget("b", summary("x", 8, 1)),
        budget("c", summary("x", 8, 1)),
        node_report("n", "a", 1),
    ]);
    let affected = index.apply(node_report("n", "a", 2));
    assert_eq!(concerned(&index, &affected), ["a"]);
    assert!(index.apply(node_report("n", "a", 2)).is_empty());
    let moved_on = index.apply(node_report("n", "b", 2));
    assert_eq!(concerned(&index, &moved_on), ["a", "b"]);
    let shrunk = index.apply(node("n", 4));
    assert_eq!(concerned(&index, &shrunk), ["a", "b", "c"]);
}

#[test]
fn gpu_fault_affects_its_pods_and_context_fault_its_own() {
    let fault = |id: &str, kind: &str, container: serde_json::Value| {
        json!({ "id": id, "kind": kind, "gpu": "GPU-a", "gpuGeneration": 1, "time": "2026-01-01T00:00:00Z",
            "action": if kind == "Gpu" { "ResetGpu" } else { "Evict" }, "container": container })
    };
    let of = json!({ "podUid": "a/q", "namespace": "a", "pod": "q", "container": "c", "processGeneration": 4 });
    let object: GpuNode = serde_json::from_value(json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuNode", "metadata": { "name": "n", "uid": "u" }, "spec": {},
        "status": {
            "faults": [fault("g", "Gpu", json!(null)), fault("c", "Context", of)],
            "gpus": [{ "uuid": "GPU-a", "index": 0, "model": "m", "memory": "16Gi", "state": "Draining",
                "generation": 1, "health": { "status": "Unhealthy", "reason": "Xid48" }, "capacity": 0, "free": 0,
                "largestFree": 0, "pods": [{ "uid": "a/p", "quanta": 4 }, { "uid": "b/p", "quanta": 4 }] }] },
    }))
    .unwrap();
    let gpus = GpuNodeSummary::of(&object, Quantum::Gib1);
    let mut index = index([
        budget("a", summary("x", 8, 1)),
        placed("a", "p", "n"),
        placed("a", "q", "n"),
        placed("b", "p", "n"),
        WatchEvent::GpuNode(Event::Apply((key("", "n"), Some(gpus)))),
    ]);
    let suffers = |index: &ClusterIndex, namespace: &str| -> Vec<(String, String)> {
        let facts = index.budget_inputs(namespace, "x");
        let all = facts.affected_pods.into_iter();
        all.map(|affected| (affected.pod, affected.fault.id))
            .collect()
    };
    let pair = |pod: &str, fault: &str| (pod.to_owned(), fault.to_owned());
    assert_eq!(suffers(&index, "a"), [pair("p", "g"), pair("q", "c")]);
    assert_eq!(suffers(&index, "b"), [pair("p", "g")]);
    // Without a policy a context is restarted, to the generation after the fault's.
    let due = &index.outdated_restarts(&mut BTreeMap::new())[0].2;
    assert_eq!((due[0].fault.as_str(), due[0].process_generation), ("c", 5));
    let policy = ContextPolicy {
        action: Some(ContextAction::Evict),
        ..ContextPolicy::default()
    };
    let evicts = BudgetSummary {
        context_policy: Some(policy),
        ..summary("x", 8, 2)
    };
    index.apply(budget("a", evicts));
    assert_eq!(index.outdated_restarts(&mut BTreeMap::new()), []);
}

/// A node whose agent has reported the context of pod `a/q` only.
fn reported() -> WatchEvent {
    let object: GpuNode = serde_json::from_value(json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuNode", "metadata": { "name": "n", "uid": "u" }, "spec": {},
        "status": { "faults": [{ "id": "c", "kind": "Context", "gpu": "GPU-a",
            "gpuGeneration": 1, "time": "2026-01-01T00:00:00Z", "action": "Report",
            "container": { "podUid": "a/q", "namespace": "a", "pod": "q", "container": "c", "processGeneration": 4 } }] },
    }))
    .unwrap();
    let gpus = GpuNodeSummary::of(&object, Quantum::Gib1);
    WatchEvent::GpuNode(Event::Apply((key("", "n"), Some(gpus))))
}

#[test]
fn reported_fault_without_a_budget_follows_the_cluster_default() {
    for (default, orders) in [
        (ContextAction::Report, 0),
        (ContextAction::Process, 1),
        (ContextAction::Restart, 1),
        (ContextAction::InPlace, 1),
    ] {
        let mut index = ClusterIndex::new(Quantum::Gib1).with_default_action(default);
        index.apply(placed("a", "q", "n"));
        index.apply(reported());
        let outdated = index.outdated_restarts(&mut BTreeMap::new());
        let due = outdated.first().map_or(0, |(.., restarts)| restarts.len());
        assert_eq!(due, orders, "{default:?}");
        assert_eq!(index.budget_inputs("a", "x").default_action, default);
    }
}

#[test]
fn pod_affects_the_budget_of_its_namespace_only() {
    let mut index = index([
        budget("a", summary("x", 8, 1)),
        budget("b", summary("x", 8, 1)),
    ]);
    let affected = index.apply(pod("a", "p", PriorityKind::Guaranteed, 4));
    assert_eq!(concerned(&index, &affected), ["a"]);
    let same = index.apply(pod("a", "p", PriorityKind::Guaranteed, 4));
    assert!(same.is_empty());
    let without_budget = index.apply(pod("c", "p", PriorityKind::Guaranteed, 4));
    assert!(concerned(&index, &without_budget).is_empty());
}

#[test]
fn view_of_a_plan_stays_as_it_is_while_events_are_applied() {
    let mut index = index([placed("n", "a", "node-1"), node("node-1", 8)]);
    let view = index.placement_view();
    for event in [
        placed("n", "b", "node-1"),
        gone("n", "a"),
        node("node-2", 8),
    ] {
        index.apply(event);
    }
    let pods = |view: &PlacementView| {
        let keys = view
            .gpu_pods
            .iter()
            .filter(|key| view.pods.contains_key(*key));
        keys.map(|key| key.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!((pods(&view), view.gpu_nodes.size()), (vec!["a".into()], 1));
    let next = index.placement_view();
    assert_eq!((pods(&next), next.gpu_nodes.size()), (vec!["b".into()], 2));
}

#[test]
fn guarantee_affects_every_budget_and_status_only_its_own() {
    let mut index = index([
        budget("a", summary("x", 8, 1)),
        budget("b", summary("x", 8, 1)),
    ]);
    let status = index.apply(budget("a", summary("x", 8, 2)));
    assert_eq!(concerned(&index, &status), ["a"]);
    let spec = index.apply(budget("a", summary("x", 9, 3)));
    assert_eq!(concerned(&index, &spec), ["a", "b"]);
    let gone = index.apply(WatchEvent::Budget(Event::Delete((
        key("a", "default"),
        None,
    ))));
    assert_eq!(concerned(&index, &gone), ["b"]);
}

#[test]
fn node_affects_every_budget_when_memory_or_cohort_changes() {
    let mut index = index([budget("a", summary("x", 8, 1)), node("n", 16)]);
    for change in [node("n", 32), label("n", "x")] {
        let affected = index.apply(change);
        assert_eq!(concerned(&index, &affected), ["a"]);
    }
    assert!(index.apply(node("n", 32)).is_empty());
}

#[test]
fn unlabelled_nodes_are_in_the_default_cohort() {
    let index = index([node("m", 16), node("n", 32), label("n", "x")]);
    assert_eq!(
        index.budget_inputs("a", "default").cohort.allocatable,
        Quanta::new(16)
    );
    assert_eq!(
        index.budget_inputs("a", "x").cohort.allocatable,
        Quanta::new(32)
    );
    assert_eq!(index.budget_inputs("a", "y").cohort, Cohort::default());
}

#[test]
fn namespace_without_budget_is_named_once_all_is_listed() {
    let enforced = |namespace: &str| {
        let label = Some("enforced".to_owned());
        WatchEvent::Namespace(Event::Apply((key("", namespace), label)))
    };
    let mut index = index([
        enforced("a"),
        enforced("b"),
        budget("a", summary("x", 8, 1)),
    ]);
    assert!(index.namespaces_without_budget().is_empty());
    index.apply(WatchEvent::Pod(Event::InitDone));
    index.apply(WatchEvent::Node(Event::InitDone));
    index.apply(WatchEvent::GpuNode(Event::InitDone));
    index.apply(WatchEvent::Quota(Event::InitDone));
    for event in [
        Event::Init,
        Event::InitApply((key("a", "default"), Some(summary("x", 8, 1)))),
        Event::InitDone,
    ] {
        index.apply(WatchEvent::Budget(event));
    }
    index.apply(WatchEvent::Namespace(Event::InitDone));
    assert!(
        index.namespaces_without_budget().is_empty(),
        "a new list has neither"
    );
    index.apply(enforced("a"));
    index.apply(enforced("b"));
    assert_eq!(index.namespaces_without_budget(), ["b"]);
}

#[test]
fn unlisted_kinds_are_named() {
    let mut index = ClusterIndex::new(Quantum::Gib1);
    assert_eq!(index.unlisted_kinds().len(), 6);
    index.apply(WatchEvent::Pod(Event::InitDone));
    index.apply(WatchEvent::Node(Event::InitDone));
    index.apply(WatchEvent::Quota(Event::InitDone));
    index.apply(WatchEvent::Namespace(Event::InitDone));
    assert_eq!(index.unlisted_kinds(), ["GpuMemoryBudgets", "GpuNodes"]);
}

#[test]
fn node_with_another_quantum_is_excluded_and_named() {
    let offer = |quantum: &str, allocatable: i32| {
        let node: GpuNode = serde_json::from_value(json!({
            "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuNode", "metadata": { "name": "n" }, "spec": {},
            "status": { "quantum": quantum, "deviceMemory": { "allocatable": allocatable, "free": 0, "largestFree": 0 } },
        }))
        .unwrap();
        Capacity::of(&node, Quantum::Gib1)
    };
    assert_eq!(offer("1Gi", 16), Some(Capacity::Counted(Quanta::new(16))));
    assert_eq!(
        offer("1024Mi", 16),
        Some(Capacity::Counted(Quanta::new(16)))
    );
    assert_eq!(
        offer("512Mi", 16),
        Some(Capacity::Excluded(ExclusionReason::OtherQuantum(
            "512Mi".to_owned()
        )))
    );
    assert_eq!(offer("1Gi", 0), None);
    let gpus = GpuNodeSummary {
        capacity: offer("512Mi", 16),
        ..GpuNodeSummary::default()
    };
    let node = (key("", "n"), Some(gpus));
    let index = index([WatchEvent::GpuNode(Event::Apply(node))]);
    let cohort = index.budget_inputs("a", "default").cohort;
    let other = ExclusionReason::OtherQuantum("512Mi".to_owned());
    assert_eq!(cohort.excluded, [("n".to_owned(), other)]);
    assert_eq!(cohort.nodes, 0);
}

/// A node that is down.
fn dead(node: &str) -> WatchEvent {
    let host = NodeFacts {
        is_ready: false,
        ..host(None)
    };
    WatchEvent::Node(Event::Apply((key("", node), Some(host))))
}

#[test]
fn dead_node_leaves_its_cohort_and_returns_when_it_lives() {
    let mut index = index([
        budget("a", summary("default", 8, 1)),
        label("m", "default"),
        label("n", "default"),
        node("m", 16),
        node("n", 32),
    ]);
    let start = Instant::now();
    let at = |seconds| WatchEvent::Clock(start + Duration::from_secs(seconds));
    let offered = |index: &ClusterIndex| index.budget_inputs("a", "default").cohort.allocatable;
    assert!(index.apply(dead("n")).is_empty(), "an upgrade looks so too");
    for second in [0, 30, 59] {
        assert!(index.has_deadlines());
        assert!(index.apply(at(second)).is_empty());
        assert_eq!(offered(&index), Quanta::new(48));
    }
    let died = index.apply(at(60));
    assert_eq!(concerned(&index, &died), ["a"]);
    let cohort = index.budget_inputs("a", "default").cohort;
    assert_eq!((cohort.nodes, cohort.allocatable), (1, Quanta::new(16)));
    assert_eq!(cohort.excluded, [("n".to_owned(), ExclusionReason::Dead)]);
    assert_eq!(index.excluded_nodes(), BTreeMap::from([("Dead", 1)]));
    // The agent's last report changes nothing.
    index.apply(node("n", 64));
    assert_eq!(offered(&index), Quanta::new(16));
    let affected = index.apply(label("n", "default"));
    assert_eq!(concerned(&index, &affected), ["a"]);
    assert_eq!(offered(&index), Quanta::new(80));
}

#[test]
fn gpus_without_a_node_count_until_the_grace_ends() {
    let mut index = index([node("n", 16)]);
    let start = Instant::now();
    for (second, offered) in [(0, 16), (60, 0)] {
        index.apply(WatchEvent::Clock(start + Duration::from_secs(second)));
        let cohort = index.budget_inputs("a", "default").cohort;
        assert_eq!(cohort.allocatable, Quanta::new(offered));
    }
    index.apply(WatchEvent::GpuNode(Event::Delete((key("", "n"), None))));
    assert_eq!(
        index.budget_inputs("a", "default").cohort,
        Cohort::default()
    );
    assert_eq!(index.liveness, NodeLiveness::default());
}

#[test]
fn node_is_alive_when_ready_and_its_kubelet_offers_memory() {
    let host = |ready: &str, offers: &str| {
        let node = json!({
            "metadata": { "name": "n" }, "spec": { "unschedulable": true },
            "status": { "conditions": [{ "type": "Ready", "status": ready }],
                "allocatable": { "bursar.dev/gpu-memory-gib": offers } },
        });
        NodeFacts::of(&serde_json::from_value(node).unwrap(), Quantum::Gib1)
    };
    assert!(host("True", "8").is_alive(), "cordoned is not dead");
    for (ready, offers) in [("Unknown", "8"), ("False", "8"), ("True", "0")] {
        assert!(!host(ready, offers).is_alive(), "{ready} {offers}");
    }
}

#[test]
fn unreadable_objects_are_named_and_no_budget_counts_as_gone() {
    let unreadable = |kind, namespace: &str, name: &str| {
        let entry = (key(namespace, name), Some("unknown word".to_owned()));
        WatchEvent::Unreadable(kind, Event::Apply(entry))
    };
    let enforced = Some("enforced".to_owned());
    let mut index = index([
        unreadable(kinds::BUDGETS, "a", "default"),
        unreadable(kinds::GPU_NODES, "", "n"),
        WatchEvent::GpuNode(Event::Apply((
            key("", "n"),
            Some(GpuNodeSummary::unreadable()),
        ))),
        WatchEvent::Budget(Event::InitDone),
        WatchEvent::Pod(Event::InitDone),
        WatchEvent::Node(Event::InitDone),
        WatchEvent::Quota(Event::InitDone),
        WatchEvent::Namespace(Event::InitDone),
        WatchEvent::Namespace(Event::Apply((key("", "a"), enforced))),
    ]);
    // After the list of unreadable objects comes the list of their projections.
    index.apply(WatchEvent::GpuNode(Event::Init));
    index.apply(WatchEvent::GpuNode(Event::InitApply((
        key("", "n"),
        Some(GpuNodeSummary::unreadable()),
    ))));
    index.apply(WatchEvent::GpuNode(Event::InitDone));
    assert_eq!(index.unlisted_kinds(), Vec::<&str>::new());
    let (budget, node) = (key("a", "default"), key("", "n"));
    let named: Vec<_> = index.unreadable().collect();
    assert_eq!(
        named,
        [(kinds::BUDGETS, &budget), (kinds::GPU_NODES, &node)]
    );
    assert_eq!(index.namespaces_without_budget(), Vec::<String>::new());
    assert_eq!(index.outdated_restarts(&mut BTreeMap::new()), []);
    let cohort = index.budget_inputs("a", "default").cohort;
    assert_eq!(
        cohort.excluded,
        [("n".to_owned(), ExclusionReason::Unreadable)]
    );
    let gone = WatchEvent::Unreadable(kinds::BUDGETS, Event::Delete((budget, None)));
    index.apply(gone);
    assert_eq!(index.namespaces_without_budget(), ["a"]);
}

/// The aggregates, counted from scratch.
fn tallied(index: &ClusterIndex) -> Aggregates {
    let mut aggregates = Aggregates::default();
    for (_, summary) in index.budgets.iter() {
        aggregates.update_budget(None, Some(summary));
    }
    for (key, gpus) in index.gpu_nodes.iter() {
        let member = CohortMember {
            gpus,
            cohort: cohort_of(index.nodes.get(key)),
            is_dead: index.liveness.is_dead(key),
        };
        aggregates.update_node(key, None, Some(member));
    }
    for (key, pod) in index.pods.iter() {
        aggregates.update_pod(key, None, Some(pod));
    }
    aggregates
}

/// A node that reports usage of one namespace, a poisoned context of another and a GPU fault.
fn eventful(offer: u64, uses: u8, fault: u8, gpu_fault: bool) -> GpuNodeSummary {
    let object: GpuNode = serde_json::from_value(json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuNode", "metadata": { "name": "n" }, "spec": {},
        "status": {
            "quantum": if offer == 3 { "512Mi" } else { "1Gi" },
            "deviceMemory": { "allocatable": offer, "free": 0, "largestFree": 0 },
            "namespaces": [{ "namespace": uses.to_string(), "observed": 1, "denials": 0, "poisoned": 0, "restarts": 0 }],
            "faults": [{ "id": "f", "kind": if gpu_fault { "Gpu" } else { "Context" }, "gpu": "g", "gpuGeneration": 1,
                "time": "2026-01-01T00:00:00Z", "container": if gpu_fault { json!(null) } else { json!({
                    "podUid": format!("{fault}/p"), "namespace": fault.to_string(), "pod": "p", "container": "c",
                    "processGeneration": 1 }) } }],
            "gpus": [{ "uuid": "g", "index": 0, "model": "m", "memory": "8Gi", "state": "Active", "generation": 1,
                "health": { "status": "Healthy", "reason": "Ok" }, "capacity": 8, "free": 0, "largestFree": 0,
                "pods": [{ "uid": format!("{fault}/p"), "quanta": 4 }] }],
        },
    }))
    .unwrap();
    GpuNodeSummary::of(&object, Quantum::Gib1)
}

proptest! {
    /// For any earlier events, and also after a new list.
    #[test]
    fn aggregates_equal_a_full_recount(
        steps in prop::collection::vec((0u8..11, 0u8..3, 0u8..3, 0u64..4), 1..60),
    ) {
        let mut index = ClusterIndex::new(Quantum::Gib1);
        let mut now = Instant::now();
        for (kind, which, other, amount) in steps {
            let (name, cohort) = (which.to_string(), ["default", "x", "y"][usize::from(other)]);
            let gpus = || eventful(amount, which, other, amount % 2 == 1);
            let listed = (key("", &name), Some(gpus()));
            let changes = match kind {
                0 => vec![WatchEvent::Budget(Event::Delete((key(&name, "default"), None)))],
                1 => vec![budget(&name, summary(cohort, amount.saturating_mul(1 << 62), amount))],
                2 => vec![WatchEvent::GpuNode(Event::Delete((key("", &name), None)))],
                3 => vec![WatchEvent::GpuNode(Event::Apply(listed))],
                4 => vec![WatchEvent::Node(Event::Delete((key("", &name), None)))],
                5 => vec![label(&name, cohort)],
                6 => vec![placed(&name, &amount.to_string(), cohort)],
                7 => vec![gone(&name, &amount.to_string())],
                8 => vec![dead(&name)],
                9 => {
                    now += Duration::from_secs(40);
                    vec![WatchEvent::Clock(now)]
                }
                _ => [Event::Init, Event::InitApply(listed), Event::InitDone].map(WatchEvent::GpuNode).into(),
            };
            for change in changes {
                index.apply(change);
            }
            prop_assert_eq!(&index.aggregates, &tallied(&index));
            // Only nodes that are consulted affect or report a namespace, and only while its pods
            // are on them.
            for at in 0..9u8 {
                let (namespace, on) = ((at / 3).to_string(), (at % 3).to_string());
                index.apply(placed(&namespace, "p", &on));
                let facts = index.budget_inputs(&namespace, "x");
                let node = index.gpu_nodes.get(&key("", &on));
                let nodes = || node.into_iter();
                let reported = nodes().flat_map(|node| &node.namespaces);
                let reported = reported.filter(|usage| usage.namespace == namespace).count();
                prop_assert_eq!(facts.reported.observed, Quanta::new(reported as u64));
                let on = |open: &&OpenFault| {
                    let pods = &open.pods;
                    let container = open.fault.container.as_ref();
                    let uid = container.map_or_else(|| pods[0].clone(), |container| container.pod_uid.clone());
                    uid == format!("{namespace}/p")
                };
                let suffered = nodes().flat_map(|node| &node.faults).filter(on).count();
                prop_assert_eq!(facts.affected_pods.len(), suffered);
            }
        }
    }

    /// The pods of three namespaces are on `good`, on `evil` or unscheduled. The report of `evil`
    /// is random.
    #[test]
    fn node_report_affects_only_pods_on_that_node(
        pods in prop::collection::btree_map((0u8..3, 0u8..4), 0u8..3, 1..10),
        faults in prop::collection::vec((0u8..3, 0u8..4, any::<bool>()), 1..6),
        uses in prop::collection::vec((0u8..3, 0i32..100), 0..4),
    ) {
        let mut index = ClusterIndex::new(Quantum::Gib1);
        for ((namespace, name), on) in &pods {
            let (namespace, name) = (namespace.to_string(), name.to_string());
            index.apply(match on {
                0 => placed(&namespace, &name, "good"),
                1 => placed(&namespace, &name, "evil"),
                _ => pod(&namespace, &name, PriorityKind::Guaranteed, 1),
            });
        }
        let uid = |namespace: u8, name: u8| format!("{namespace}/{name}");
        let faults = faults.iter().enumerate().map(|(id, (namespace, name, gpu))| json!({
            "id": id.to_string(), "kind": if *gpu { "Gpu" } else { "Context" }, "gpu": "g", "gpuGeneration": 1,
            "time": "2026-01-01T00:00:00Z", "action": if *gpu { "ResetGpu" } else { "BeyondMaximum" },
            "container": if *gpu { json!(null) } else { json!({
                "podUid": uid(*namespace, *name), "namespace": namespace.to_string(), "pod": name.to_string(),
                "container": "c", "processGeneration": 1 }) } }));
        let uses = uses.iter().map(|(namespace, observed)| json!({ "namespace": namespace.to_string(),
            "observed": observed, "denials": 0, "poisoned": 0, "restarts": 0 }));
        let named: Vec<_> = pods.keys().map(|(namespace, name)| json!({ "uid": uid(*namespace, *name), "quanta": 1 })).collect();
        let object: GpuNode = serde_json::from_value(json!({
            "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuNode", "metadata": { "name": "evil" }, "spec": {},
            "status": { "faults": faults.collect::<Vec<_>>(), "namespaces": uses.collect::<Vec<_>>(), "gpus": [{
                "uuid": "g", "index": 0, "model": "m", "memory": "8Gi", "state": "Active", "generation": 1,
                "health": { "status": "Unhealthy", "reason": "Xid48" }, "capacity": 0, "free": 0, "largestFree": 0,
                "pods": named }] },
        })).unwrap();
        index.apply(WatchEvent::GpuNode(Event::Apply((key("", "evil"), Some(GpuNodeSummary::of(&object, Quantum::Gib1))))));
        for namespace in 0..3u8 {
            let facts = index.budget_inputs(&namespace.to_string(), "x");
            for affected in &facts.affected_pods {
                prop_assert_eq!(affected.request.node(), Some("evil"), "{:?}", affected);
            }
            let has_pods = pods.iter().any(|((of, _), on)| *of == namespace && *on == 1);
            prop_assert!(has_pods || facts.reported.observed == Quanta::ZERO, "{:?}", facts.reported);
        }
    }

    /// Each quantum of a request counts once.
    #[test]
    fn pod_counts_once_in_its_namespace_and_class(
        pods in prop::collection::btree_map((0u8..4, 0u8..8), (any::<bool>(), 1u64..100), 0..24),
    ) {
        let changes = pods.iter().map(|((namespace, name), (borrows, device))| {
            let class = if *borrows { PriorityKind::Borrowed } else { PriorityKind::Guaranteed };
            pod(&namespace.to_string(), &name.to_string(), class, *device)
        });
        let index = index(changes);
        for namespace in 0..4u8 {
            let usage = index.budget_inputs(&namespace.to_string(), "default").requested;
            let of_namespace = pods.iter().filter(|((of, _), _)| *of == namespace);
            let sum = |borrowed: bool| -> u64 {
                of_namespace.clone().filter(|(_, (b, _))| *b == borrowed).map(|(_, (_, device))| device).sum()
            };
            prop_assert_eq!(usage.guaranteed, Quanta::new(sum(false)));
            prop_assert_eq!(usage.borrowed, Quanta::new(sum(true)));
            prop_assert_eq!(usage.pods.unsigned_abs() as usize, of_namespace.count());
        }
    }

    /// A budget whose inputs changed is always among the affected budgets.
    #[test]
    fn changed_inputs_always_mark_the_budget_affected(
        steps in prop::collection::vec((0u8..8, 0u8..3, 0u8..3, 0u64..4), 1..60),
    ) {
        let mut index = ClusterIndex::new(Quantum::Gib1);
        let mut clock = Instant::now();
        let facts = |index: &ClusterIndex| -> BTreeMap<Key, BudgetInputs> {
            let of = |(key, summary): (&Key, &BudgetSummary)| (key.clone(), index.budget_inputs(&key.namespace, &summary.cohort));
            index.budgets.iter().map(of).collect()
        };
        for (kind, which, other, amount) in steps {
            let (name, cohort) = (which.to_string(), ["default", "x", "y"][usize::from(other)]);
            let change = match (kind, amount) {
                (0, 0) => WatchEvent::Budget(Event::Delete((key(&name, "default"), None))),
                (0, _) => budget(&name, summary(cohort, amount, amount)),
                (1, 0) => WatchEvent::Pod(Event::Delete((key(&name, "p"), None))),
                (1, _) => pod(&name, "p", PriorityKind::Guaranteed, amount),
                (2, 0) => WatchEvent::GpuNode(Event::Delete((key("", &name), None))),
                (2, _) => node(&name, amount),
                (3, 0) => WatchEvent::Node(Event::Delete((key("", &name), None))),
                (3, _) => label(&name, cohort),
                (4, 0) => WatchEvent::Quota(Event::Delete((key(&name, QuotaKind::Limit.name()), None))),
                (4, _) => quota(&name, amount),
                (5, _) => dead(&name),
                (6, _) => {
                    clock += Duration::from_secs(40);
                    WatchEvent::Clock(clock)
                }
                (_, 0) => WatchEvent::Namespace(Event::Delete((key("", &name), None))),
                (_, _) => WatchEvent::Namespace(Event::Apply((key("", &name), Some("enforced".to_owned())))),
            };
            let before = facts(&index);
            let affected = index.apply(change);
            let named = index.affected_budgets(&affected);
            for (key, now) in facts(&index) {
                prop_assert!(before.get(&key) == Some(&now) || named.contains(&key));
            }
        }
    }
}

/// A pod of a node with the agents' label.
fn agent(name: &str, namespace: &str, node: &str, is_ready: bool) -> WatchEvent {
    let pod = json!({
        "metadata": { "name": name, "labels": { "app.kubernetes.io/name": "bursar", "app.kubernetes.io/component": "agent" } },
        "spec": { "nodeName": node },
        "status": { "conditions": [{ "type": "Ready", "status": if is_ready { "True" } else { "False" } }] },
    });
    let pod = serde_json::from_value(pod).unwrap();
    let summary = PodSummary::of(&pod, Quantum::Gib1);
    WatchEvent::Pod(Event::Apply((key(namespace, name), summary)))
}

#[test]
fn absence_of_an_agent_is_reported_after_its_grace_and_rarely_again() {
    let gpu_node = |uid: &str, ready: &str| {
        let facts = GpuFacts {
            uid: uid.to_owned(),
            ..GpuFacts::default()
        };
        let summary = GpuNodeSummary {
            conditions: vec![("Ready".to_owned(), ready.to_owned())],
            facts: Box::new(facts),
            ..GpuNodeSummary::default()
        };
        WatchEvent::GpuNode(Event::Apply((key("", "a"), Some(summary))))
    };
    let mut index = ClusterIndex::new(Quantum::Gib1).with_agents_in(Some("n".to_owned()));
    let start = Instant::now();
    let mut reported = BTreeMap::new();
    let mut due_at = |index: &mut ClusterIndex, seconds| {
        let now = start + Duration::from_secs(seconds);
        index.apply(WatchEvent::Clock(now));
        let due = index.unreported_absences(&mut reported, now);
        reported.extend(due.iter().map(|(_, uid)| (uid.clone(), now)));
        due.len()
    };
    index.apply(gpu_node("u", "True"));
    index.apply(agent("agent", "n", "a", true));
    assert!(!index.agents.have_deadlines());
    // A tenant's pod may have the label, and a canary's agent may overlap the other.
    index.apply(agent("agent", "tenant", "a", true));
    index.apply(agent("canary", "n", "a", true));
    index.apply(agent("agent", "n", "a", false));
    assert_eq!(due_at(&mut index, 0), 0);
    assert_eq!(due_at(&mut index, 100), 0, "the canary's agent is there");
    index.apply(agent("canary", "n", "a", false));
    assert_eq!(due_at(&mut index, 100), 0);
    assert_eq!(due_at(&mut index, 159), 0);
    assert_eq!(due_at(&mut index, 160), 1);
    // An agent that is not Ready writes, perhaps in a crash loop.
    index.apply(gpu_node("u", "True"));
    assert_eq!(due_at(&mut index, 300), 0);
    assert_eq!(due_at(&mut index, 759), 0);
    assert_eq!(due_at(&mut index, 760), 1);
    index.apply(agent("agent", "n", "a", true));
    assert_eq!(due_at(&mut index, 1_301), 0);
    index.apply(WatchEvent::Pod(Event::Delete((key("n", "agent"), None))));
    assert_eq!(due_at(&mut index, 1_302), 0);
    assert_eq!(due_at(&mut index, 1_362), 1, "another absence");
    index.apply(gpu_node("v", "Unknown"));
    assert_eq!(
        due_at(&mut index, 363),
        0,
        "another operator has reported it"
    );
}
