//! Checks with one untrusted node that no step names a pod of another node, whatever that node
//! reports.
//!
//! The objects are as the API server has them. They pass through the index and through both
//! planners.

use bursar_crds::{GpuMemoryBudget, GpuNode};
use serde_json::{Value, json};

use super::*;
use crate::budget;
use crate::cluster::slim_node::SlimNode;
use crate::cluster::slim_pod::SlimPod;

/// The pods by UID: namespace, node, quanta, whether it borrows, and whether it waits.
const PODS: [(&str, &str, &str, u64, bool, bool); 7] = [
    ("a1", "a", "good", 8, true, false),
    ("a2", "a", "good", 8, false, false),
    ("b1", "b", "good", 12, true, false),
    ("c1", "c", "good", 4, false, true),
    ("a3", "a", "evil", 8, true, false),
    ("b2", "b", "evil", 4, false, false),
    ("b3", "b", "evil", 8, false, true),
];
/// UIDs for reports: those of all pods, and of none.
const UIDS: [&str; 9] = ["a1", "a2", "b1", "c1", "a3", "b2", "b3", "gone", ""];
const NAMESPACES: [&str; 4] = ["a", "b", "c", "none"];
const GPUS: [&str; 4] = ["evil-0", "good-0", "good-1", "made-up"];
const KINDS: [&str; 2] = ["Context", "Gpu"];
const ACTIONS: [&str; 8] = [
    "InPlace",
    "Restart",
    "BeyondMaximum",
    "Evict",
    "Report",
    "ResetGpu",
    "RestartNode",
    "Wait",
];

fn pick(from: &'static [&'static str]) -> impl Strategy<Value = &'static str> {
    prop::sample::select(from)
}

/// A report of `evil` on one GPU.
fn gpu() -> impl Strategy<Value = Value> {
    let pods = prop::collection::vec((pick(&UIDS), 0_i32..20), 0..6);
    let held = prop::option::of(pick(&UIDS));
    (pick(&GPUS), pods, held, -1_i32..20, any::<bool>()).prop_map(
        |(uuid, pods, held, free, healthy)| {
            let pods = pods.iter();
            let pods = pods.map(|(uid, quanta)| json!({ "uid": uid, "quanta": quanta }));
            let health = if healthy { "Healthy" } else { "Unhealthy" };
            json!({
                "uuid": uuid, "index": 0, "model": "m", "memory": "16Gi", "state": "Active", "generation": 1,
                "health": { "status": health, "reason": "r" }, "capacity": 16, "free": free, "largestFree": free,
                "reservedFor": held, "pods": pods.collect::<Vec<_>>() })
        },
    )
}

/// A report of `evil` on one fault.
fn fault() -> impl Strategy<Value = Value> {
    let container = prop::option::of((pick(&UIDS), pick(&NAMESPACES), pick(&UIDS)));
    let kind = pick(&KINDS);
    (any::<u16>(), kind, pick(&ACTIONS), pick(&GPUS), container).prop_map(
        |(id, kind, action, gpu, container)| {
            let container = container.map(|(uid, namespace, name)| {
                json!({ "podUid": uid, "namespace": namespace, "pod": name, "container": "c", "processGeneration": 1 })
            });
            json!({ "id": id.to_string(), "kind": kind, "gpu": gpu, "gpuGeneration": 1, "action": action,
                "container": container, "time": "2026-01-01T00:00:00Z" })
        },
    )
}

/// A whole status of `evil`.
fn status() -> impl Strategy<Value = Value> {
    let waiting = prop::collection::vec((pick(&UIDS), -1_i32..20), 0..4);
    let uses = prop::collection::vec((pick(&NAMESPACES), 0_i32..1000), 0..4);
    (
        prop::collection::vec(gpu(), 0..3),
        waiting,
        prop::collection::vec(fault(), 0..4),
        uses,
        -1_i32..64,
    )
        .prop_map(|(gpus, waiting, faults, uses, allocatable)| {
            let waiting = waiting.iter().map(|(uid, quanta)| {
                json!({ "podUid": uid, "namespace": "a", "pod": uid, "container": "c", "quanta": quanta,
                    "since": "2026-01-01T00:00:00Z" })
            });
            let uses = uses.iter().map(|(namespace, observed)| {
                json!({ "namespace": namespace, "observed": observed, "denials": 1, "poisoned": 1, "restarts": 1 })
            });
            json!({
                "quantum": "1Gi", "gpus": gpus, "waiting": waiting.collect::<Vec<_>>(), "faults": faults,
                "namespaces": uses.collect::<Vec<_>>(),
                "deviceMemory": { "allocatable": allocatable, "free": 0, "largestFree": 0 } })
        })
}

fn read<T: serde::de::DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap()
}

/// An operator and the state of the API server.
struct Operator {
    index: ClusterIndex,
    history: History,
    budgets: Vec<GpuMemoryBudget>,
    /// The reservations of each node, with its agent's report.
    nodes: BTreeMap<&'static str, (Vec<Reservation>, Value)>,
    /// The pods that a step named, each with its node.
    named: BTreeSet<String>,
}

impl Operator {
    fn new(policies: &[&str]) -> Self {
        let mut operator = Self {
            index: ClusterIndex::new(Quantum::Gib1),
            history: History::default(),
            budgets: Vec::new(),
            nodes: BTreeMap::new(),
            named: BTreeSet::new(),
        };
        for (namespace, policy) in NAMESPACES.iter().zip(policies) {
            let budget: GpuMemoryBudget = read(json!({
                "metadata": { "name": "default", "namespace": namespace, "uid": namespace },
                "spec": { "deviceMemory": { "guaranteed": "16Gi" }, "contextPolicy": { "action": policy } },
            }));
            let summary = BudgetSummary::of(&budget, Quantum::Gib1);
            operator.apply(WatchEvent::Budget(Event::Apply((
                key(namespace, "default"),
                Some(summary),
            ))));
            operator.budgets.push(budget);
        }
        for node in ["good", "evil"] {
            let slim: SlimNode = read(json!({
                "metadata": { "name": node, "uid": node }, "spec": {},
                "status": { "allocatable": { "bursar.dev/gpu-memory-gib": "32", "pods": "99" }, "conditions": [
                    { "type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z" }] },
            }));
            let facts = NodeFacts::of(&slim, Quantum::Gib1);
            operator.apply(WatchEvent::Node(Event::Apply((key("", node), Some(facts)))));
        }
        for (uid, namespace, node, quanta, borrows, waits) in PODS {
            let class = borrows.then_some("bursar-borrowed");
            let resources =
                json!({ "requests": { "bursar.dev/gpu-memory-gib": quanta.to_string() } });
            let pod: SlimPod = read(json!({
                "metadata": { "name": uid, "namespace": namespace, "uid": uid,
                    "creationTimestamp": "2026-01-01T00:00:00Z", "ownerReferences": [{
                        "apiVersion": "v1", "kind": "ReplicaSet", "name": "o", "uid": "o", "controller": true }] },
                "spec": { "nodeName": node, "priorityClassName": class,
                    "priority": if borrows { BORROWED } else { GUARANTEED },
                    "containers": [{ "name": "c", "resources": resources }] },
                "status": { "phase": if waits { "Pending" } else { "Running" } },
            }));
            let summary = PodSummary::of(&pod, Quantum::Gib1);
            operator.apply(WatchEvent::Pod(Event::Apply((
                key(namespace, uid),
                summary,
            ))));
        }
        let truth = json!({ "quantum": "1Gi", "namespaces": [],
            "deviceMemory": { "allocatable": 32, "free": 0, "largestFree": 0 }, "gpus": [] });
        operator.set_report("good", truth);
        operator
    }

    fn apply(&mut self, change: WatchEvent) {
        drop(self.index.apply(change));
    }

    /// Sets a node's report. The agent of `evil` acknowledges each reservation or reports something
    /// else.
    fn set_report(&mut self, node: &'static str, status: Value) {
        let (reservations, last) = self.nodes.entry(node).or_default();
        *last = status;
        let object: GpuNode = read(json!({
            "metadata": { "name": node, "uid": node },
            "spec": { "reservations": reservations }, "status": last }));
        let gpus = GpuNodeSummary::of(&object, Quantum::Gib1);
        self.apply(WatchEvent::GpuNode(Event::Apply((
            key("", node),
            Some(gpus),
        ))));
    }

    /// Applies both plans at this time.
    fn acts(&mut self, now: Uptime) {
        for budget in &mut self.budgets {
            let namespace = budget.metadata.namespace.clone().unwrap_or_default();
            let mut facts = self.index.budget_inputs(&namespace, "default");
            // The fault counts as old.
            for affected in &mut facts.affected_pods {
                affected.observed_for = Duration::from_secs(3600);
            }
            for step in budget::plan(budget, &facts, &Time(wall(now))).steps {
                match step {
                    budget::Step::ApplyStatus(status) => budget.status = Some(*status),
                    budget::Step::Evict { pod, .. } => drop(self.named.insert(pod.uid)),
                    _ => {}
                }
            }
        }
        let steps = plan(
            &self.index.placement_view(),
            &mut self.history,
            &OPTIONS,
            now,
        );
        for step in steps {
            match step {
                Step::Reserve {
                    node, reservations, ..
                } => {
                    let at = self.nodes.iter_mut().find(|(name, _)| **name == node.name);
                    let (name, (reserved, status)) = at.expect("it is known");
                    *reserved = reservations;
                    let (name, mut status) = (*name, status.clone());
                    for reservation in reserved.iter() {
                        let mut gpus = status["gpus"].as_array_mut().into_iter().flatten();
                        if let Some(gpu) = gpus.find(|gpu| gpu["uuid"] == reservation.gpu) {
                            gpu["reservedFor"] = json!(reservation.pod_uid);
                        }
                    }
                    self.set_report(name, status);
                }
                Step::Preempt { victims, .. } => {
                    let victims = victims.into_iter().map(|victim| victim.pod.uid);
                    self.named.extend(victims);
                }
                Step::Relocate { pod, .. } => drop(self.named.insert(pod.uid)),
                Step::Label { .. } | Step::OverrideQuotas { .. } | Step::ReadJob { .. } => {}
            }
        }
        for (node, _, restarts) in self.index.outdated_restarts(&mut BTreeMap::new()) {
            // The order goes to the node that asks for it, which has no other node's containers.
            assert!(
                node == "evil" || restarts.is_empty(),
                "{node}: {restarts:?}"
            );
        }
    }
}

/// The pods that any step named during a sequence of reports of `evil`.
fn named(reports: Vec<Value>, policies: &[&str]) -> BTreeSet<String> {
    let mut operator = Operator::new(policies);
    for (at, status) in reports.into_iter().enumerate() {
        operator.set_report("evil", status);
        for second in 0..12 {
            operator.acts(Duration::from_secs(12 * at as u64 + second));
        }
        // A report on a namespace without a pod on the node counts for nothing.
        let of_c = operator
            .index
            .budget_inputs("c", "default")
            .reported
            .observed;
        assert_eq!(of_c, Quanta::ZERO);
    }
    operator.named
}

#[test]
fn honest_node_report_names_its_pods() {
    let status = json!({
        "quantum": "1Gi", "deviceMemory": { "allocatable": 16, "free": 0, "largestFree": 0 },
        "gpus": [{ "uuid": "evil-0", "index": 0, "model": "m", "memory": "16Gi", "state": "Active", "generation": 1,
            "health": { "status": "Healthy", "reason": "Ok" }, "capacity": 16, "free": 0, "largestFree": 0,
            "pods": [{ "uid": "a3", "quanta": 16 }] }],
        "waiting": [{ "podUid": "b3", "namespace": "b", "pod": "b3", "container": "c", "quanta": 8,
            "since": "2026-01-01T00:00:00Z" }],
        "faults": [{ "id": "f", "kind": "Context", "gpu": "evil-0", "gpuGeneration": 1, "action": "BeyondMaximum",
            "time": "2026-01-01T00:00:00Z", "container": { "podUid": "b2", "namespace": "b", "pod": "b2",
                "container": "c", "processGeneration": 1 } }] });
    let named = named(vec![status], &["Evict", "Evict", "Evict"]);
    assert_eq!(named, ["a3".to_owned(), "b2".to_owned()].into());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(CASES)))]
    #[test]
    fn no_step_names_a_pod_of_another_node_for_any_report(
        reports in prop::collection::vec(status(), 1..4),
        policies in prop::collection::vec(pick(&["InPlace", "Restart", "Evict", "Report"]), 3),
    ) {
        let there = |uid: &String| PODS.iter().any(|pod| pod.0 == uid.as_str() && pod.2 == "evil");
        for uid in named(reports, &policies) {
            prop_assert!(there(&uid), "{} is not on the node", uid);
        }
    }
}
