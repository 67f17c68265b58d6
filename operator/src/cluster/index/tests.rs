use super::*;
use crate::budget::{Cap, Cohort, Scope};
use crate::cluster::pod_request::Class;
use crate::cluster::{LeftOut, Offer};
use crate::quanta::Quanta;
use bursar_crds::GpuNode;
use bursar_crds::budget::ContextPolicy;
use k8s_openapi::jiff::Timestamp;
use proptest::prelude::*;
use serde_json::json;

fn key(namespace: &str, name: &str) -> Key {
    Key {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    }
}

fn claim(cohort: &str, guaranteed: u64, version: u64) -> Claim {
    Claim {
        cohort: cohort.to_owned(),
        guaranteed: Quanta::new(guaranteed),
        contexts: ContextPolicy::default(),
        version: Some(version.to_string()),
    }
}

fn budget(namespace: &str, claim: Claim) -> Change {
    Change::Budget(Event::Apply((key(namespace, "default"), Some(claim))))
}

fn pod(namespace: &str, name: &str, class: Class, device: u64) -> Change {
    let demand = Demand {
        uid: format!("{namespace}/{name}"),
        created: Timestamp::UNIX_EPOCH,
        node: None,
        ending: false,
        job: None,
        replaced: true,
        class,
        device: Quanta::new(device),
        managed: Quanta::ZERO,
    };
    Change::Pod(Event::Apply((key(namespace, name), Some(demand))))
}

/// A pod on a node.
fn placed(namespace: &str, name: &str, node: &str) -> Change {
    let Change::Pod(Event::Apply((key, Some(demand)))) = pod(namespace, name, Class::Guaranteed, 1)
    else {
        unreachable!("it is one")
    };
    let node = Some(node.to_owned());
    Change::Pod(Event::Apply((key, Some(Demand { node, ..demand }))))
}

fn gone(namespace: &str, name: &str) -> Change {
    Change::Pod(Event::Delete((key(namespace, name), None)))
}

fn node(name: &str, quanta: u64) -> Change {
    Change::GpuNode(Event::Apply((
        key("", name),
        Some(Gpus {
            offer: Some(Offer::Counted(Quanta::new(quanta))),
            ..Gpus::default()
        }),
    )))
}

#[test]
fn a_context_order_that_somebody_else_wrote_is_not_written_against_for_ever() {
    let order = |namespace: &str| ContextOrder {
        namespace: namespace.to_owned(),
        action: bursar_crds::budget::ContextAction::Report,
        max_restarts: 1,
        window_seconds: 60,
    };
    let mut world = World::new(Quantum::Gib1);
    let gpus = Gpus {
        contexts: vec![order("foreign"), order("ours")],
        ..Gpus::default()
    };
    world.apply(Change::GpuNode(Event::Apply((key("", "n"), Some(gpus)))));
    world.apply(budget("ours", reports()));
    assert_eq!(world.nodes_without(&BTreeMap::new()).len(), 1);
    let given = (Arc::new(vec![order("ours")]), Vec::new());
    let written = BTreeMap::from([("n".to_owned(), given)]);
    assert!(world.nodes_without(&written).is_empty());
    world.apply(budget("new", reports()));
    assert_eq!(world.nodes_without(&written).len(), 1);
    for namespace in ["new", "ours"] {
        world.apply(budget(namespace, claim("x", 8, 2)));
    }
    assert_eq!(world.nodes_without(&written).len(), 1, "ours goes");
}

#[test]
fn orders_written_to_a_node_are_forgotten_when_it_is_gone() {
    let mut world = World::new(Quantum::Gib1);
    world.apply(node("stays", 8));
    let mut written = BTreeMap::new();
    for number in 0..1000 {
        let name = format!("autoscaled-{number}");
        world.apply(node(&name, 8));
        written.insert(name.clone(), Default::default());
        written.insert("stays".to_owned(), Default::default());
        world.keep_known(&mut written);
        assert_eq!(written.len(), 2, "both are there");
        world.apply(Change::GpuNode(Event::Delete((key("", &name), None))));
        world.keep_known(&mut written);
    }
    assert_eq!(written.keys().collect::<Vec<_>>(), ["stays"]);
}

/// A claim of whose pods poisoned contexts are only reported.
fn reports() -> Claim {
    let contexts = ContextPolicy {
        action: bursar_crds::budget::ContextAction::Report,
        max_restarts: 1,
        window_seconds: 60,
    };
    Claim {
        contexts,
        ..claim("x", 8, 1)
    }
}

/// The namespaces whose orders the node `n` is to be given; none while it has what it needs. It is given them.
fn given(world: &mut World, written: &mut BTreeMap<String, ContextOrders>) -> Option<Vec<String>> {
    let (node, uid, orders) = world.nodes_without(written).pop()?;
    let gpus = Gpus {
        uid,
        contexts: orders.0.to_vec(),
        ..Gpus::default()
    };
    world.apply(Change::GpuNode(Event::Apply((key("", &node), Some(gpus)))));
    let namespaces = orders.0.iter().map(|one| one.namespace.clone()).collect();
    written.insert(node, orders);
    Some(namespaces)
}

#[test]
fn of_many_orders_a_node_has_those_of_its_pods_and_of_few_it_has_all() {
    let namespace = |number: usize| format!("n-{number:04}");
    let budgets = |count| (0..count).map(|number| budget(&namespace(number), reports()));
    let node = || Change::GpuNode(Event::Apply((key("", "n"), Some(Gpus::default()))));
    let mut written = BTreeMap::new();
    let mut few = world(budgets(EVERYWHERE));
    few.apply(node());
    let all = given(&mut few, &mut written).unwrap();
    assert_eq!(all.len(), EVERYWHERE);
    assert_eq!(given(&mut few, &mut written), None);

    let (mut many, mut written) = (world(budgets(1000)), BTreeMap::new());
    let mut orders = |many: &mut World| given(many, &mut written);
    many.apply(node());
    assert_eq!(orders(&mut many), None);
    many.apply(placed(&namespace(7), "p", "n"));
    many.apply(placed(&namespace(8), "p", "elsewhere"));
    many.apply(pod(&namespace(9), "p", Class::Guaranteed, 1));
    assert_eq!(orders(&mut many), Some(vec![namespace(7)]));
    assert_eq!(orders(&mut many), None);
    many.apply(placed(&namespace(7), "q", "n"));
    many.apply(gone(&namespace(7), "p"));
    many.apply(placed(&namespace(5), "p", "n"));
    let both = vec![namespace(5), namespace(7)];
    assert_eq!(orders(&mut many), Some(both), "one is left");
    many.apply(gone(&namespace(7), "q"));
    assert_eq!(orders(&mut many), None, "the next pod finds it");
    many.apply(placed(&namespace(7), "r", "n"));
    assert_eq!(orders(&mut many), None);
    many.apply(gone(&namespace(7), "r"));
    many.apply(placed(&namespace(3), "p", "n"));
    let others = vec![namespace(3), namespace(5)];
    assert_eq!(
        orders(&mut many),
        Some(others),
        "it goes with the next write"
    );
    many.apply(gone(&namespace(3), "p"));
    many.apply(budget(&namespace(3), claim("x", 8, 2)));
    assert_eq!(
        orders(&mut many),
        Some(vec![namespace(5)]),
        "it is wrong now"
    );
}

/// A node that lives, with or without a label.
fn host(cohort: Option<&str>) -> Host {
    Host {
        cohort: cohort.map(str::to_owned),
        lives: true,
    }
}

fn label(node: &str, cohort: &str) -> Change {
    Change::Node(Event::Apply((key("", node), Some(host(Some(cohort))))))
}

fn quota(namespace: &str, most: u64) -> Change {
    let hard = BTreeMap::from([(
        "requests.bursar.dev/gpu-memory-gib".to_owned(),
        Quanta::new(most),
    )]);
    let cap = Cap {
        scope: Scope::All,
        hard: hard.clone(),
        owner: String::new(),
        overflows: false,
    };
    let quota = Quota {
        uid: String::new(),
        cap,
        in_force: hard,
        taken_up: None,
    };
    Change::Quota(Event::Apply((
        key(namespace, Which::Limit.name()),
        Some(quota),
    )))
}

fn world(changes: impl IntoIterator<Item = Change>) -> World {
    let mut world = World::new(Quantum::Gib1);
    for change in changes {
        world.apply(change);
    }
    world
}

fn concerned(world: &World, dirty: &Dirty) -> Vec<String> {
    let keys = world.budgets(dirty);
    keys.into_iter().map(|key| key.namespace).collect()
}

/// What a node says of a namespace's pods.
fn told_of(node: &str, namespace: &str, observed: i32) -> Change {
    let object: GpuNode = serde_json::from_value(json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuNode", "metadata": { "name": node }, "spec": {},
        "status": { "quantum": "1Gi", "deviceMemory": { "allocatable": 8, "free": 8, "largestFree": 8 },
            "namespaces": [{ "namespace": namespace, "observed": observed, "denials": 0, "poisoned": 0, "restarts": 0 }] },
    }))
    .unwrap();
    let gpus = Gpus::of(&object, Quantum::Gib1);
    Change::GpuNode(Event::Apply((key("", node), Some(gpus))))
}

#[test]
fn what_a_node_says_of_a_namespace_concerns_its_budget_and_what_it_offers_all() {
    let mut world = world([
        budget("a", claim("x", 8, 1)),
        budget("b", claim("x", 8, 1)),
        budget("c", claim("x", 8, 1)),
        told_of("n", "a", 1),
    ]);
    let dirty = world.apply(told_of("n", "a", 2));
    assert_eq!(concerned(&world, &dirty), ["a"]);
    assert!(world.apply(told_of("n", "a", 2)).is_empty());
    let moved_on = world.apply(told_of("n", "b", 2));
    assert_eq!(concerned(&world, &moved_on), ["a", "b"]);
    let shrunk = world.apply(node("n", 4));
    assert_eq!(concerned(&world, &shrunk), ["a", "b", "c"]);
}

#[test]
fn a_gpus_fault_concerns_the_pods_that_have_memory_of_it_and_a_contexts_its_own() {
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
    let gpus = Gpus::of(&object, Quantum::Gib1);
    let mut world = world([
        budget("a", claim("x", 8, 1)),
        placed("a", "p", "n"),
        placed("a", "q", "n"),
        placed("b", "p", "n"),
        Change::GpuNode(Event::Apply((key("", "n"), Some(gpus)))),
    ]);
    let suffers = |world: &World, namespace: &str| -> Vec<(String, String)> {
        let facts = world.facts(namespace, "x");
        let all = facts.sufferers.into_iter();
        all.map(|one| (one.pod, one.fault.id)).collect()
    };
    let pair = |pod: &str, fault: &str| (pod.to_owned(), fault.to_owned());
    assert_eq!(suffers(&world, "a"), [pair("p", "g"), pair("q", "c")]);
    assert_eq!(suffers(&world, "b"), [pair("p", "g")]);
    // Without another policy a context is restarted: to one number above that of the fault.
    let due = &world.nodes_without(&BTreeMap::new())[0].2.1;
    assert_eq!((due[0].fault.as_str(), due[0].process_generation), ("c", 5));
    let policy = ContextPolicy {
        action: bursar_crds::budget::ContextAction::Evict,
        ..ContextPolicy::default()
    };
    let evicts = Claim {
        contexts: policy,
        ..claim("x", 8, 2)
    };
    world.apply(budget("a", evicts));
    let (contexts, due) = &world.nodes_without(&BTreeMap::new())[0].2;
    assert_eq!((contexts.len(), due.len()), (1, 0), "of its own order only");
}

#[test]
fn a_pod_concerns_the_budget_of_its_namespace_and_no_other() {
    let mut world = world([budget("a", claim("x", 8, 1)), budget("b", claim("x", 8, 1))]);
    let dirty = world.apply(pod("a", "p", Class::Guaranteed, 4));
    assert_eq!(concerned(&world, &dirty), ["a"]);
    let same = world.apply(pod("a", "p", Class::Guaranteed, 4));
    assert!(same.is_empty());
    let without_budget = world.apply(pod("c", "p", Class::Guaranteed, 4));
    assert!(concerned(&world, &without_budget).is_empty());
}

#[test]
fn a_guarantee_concerns_every_budget_and_a_new_status_only_its_own() {
    let mut world = world([budget("a", claim("x", 8, 1)), budget("b", claim("x", 8, 1))]);
    let status = world.apply(budget("a", claim("x", 8, 2)));
    assert_eq!(concerned(&world, &status), ["a"]);
    let spec = world.apply(budget("a", claim("x", 9, 3)));
    assert_eq!(concerned(&world, &spec), ["a", "b"]);
    let gone = world.apply(Change::Budget(Event::Delete((key("a", "default"), None))));
    assert_eq!(concerned(&world, &gone), ["b"]);
}

#[test]
fn a_node_concerns_every_budget_when_its_memory_or_its_cohort_changes() {
    let mut world = world([budget("a", claim("x", 8, 1)), node("n", 16)]);
    for change in [node("n", 32), label("n", "x")] {
        let dirty = world.apply(change);
        assert_eq!(concerned(&world, &dirty), ["a"]);
    }
    assert!(world.apply(node("n", 32)).is_empty());
}

#[test]
fn nodes_without_a_label_are_the_default_cohort() {
    let world = world([node("m", 16), node("n", 32), label("n", "x")]);
    assert_eq!(
        world.facts("a", "default").cohort.allocatable,
        Quanta::new(16)
    );
    assert_eq!(world.facts("a", "x").cohort.allocatable, Quanta::new(32));
    assert_eq!(world.facts("a", "y").cohort, Cohort::default());
}

#[test]
fn a_labelled_namespace_without_budget_is_deserted_once_all_is_known() {
    let enforced = |namespace: &str| {
        let label = Some("enforced".to_owned());
        Change::Namespace(Event::Apply((key("", namespace), label)))
    };
    let mut world = world([enforced("a"), enforced("b"), budget("a", claim("x", 8, 1))]);
    assert!(world.deserted().is_empty());
    world.apply(Change::Pod(Event::InitDone));
    world.apply(Change::Node(Event::InitDone));
    world.apply(Change::GpuNode(Event::InitDone));
    world.apply(Change::Quota(Event::InitDone));
    for event in [
        Event::Init,
        Event::InitApply((key("a", "default"), Some(claim("x", 8, 1)))),
        Event::InitDone,
    ] {
        world.apply(Change::Budget(event));
    }
    world.apply(Change::Namespace(Event::InitDone));
    assert!(world.deserted().is_empty(), "a new list has neither");
    world.apply(enforced("a"));
    world.apply(enforced("b"));
    assert_eq!(world.deserted(), ["b"]);
}

#[test]
fn what_has_not_been_listed_is_named() {
    let mut world = World::new(Quantum::Gib1);
    assert_eq!(world.missing().len(), 6);
    world.apply(Change::Pod(Event::InitDone));
    world.apply(Change::Node(Event::InitDone));
    world.apply(Change::Quota(Event::InitDone));
    world.apply(Change::Namespace(Event::InitDone));
    assert_eq!(world.missing(), ["GpuMemoryBudgets", "GpuNodes"]);
}

#[test]
fn a_node_that_counts_in_another_quantum_is_left_out_and_named() {
    let offer = |quantum: &str, allocatable: i32| {
        let node: GpuNode = serde_json::from_value(json!({
            "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuNode", "metadata": { "name": "n" }, "spec": {},
            "status": { "quantum": quantum, "deviceMemory": { "allocatable": allocatable, "free": 0, "largestFree": 0 } },
        }))
        .unwrap();
        Offer::of(&node, Quantum::Gib1)
    };
    assert_eq!(offer("1Gi", 16), Some(Offer::Counted(Quanta::new(16))));
    assert_eq!(offer("1024Mi", 16), Some(Offer::Counted(Quanta::new(16))));
    assert_eq!(
        offer("512Mi", 16),
        Some(Offer::LeftOut(LeftOut::OtherQuantum("512Mi".to_owned())))
    );
    assert_eq!(offer("1Gi", 0), None);
    let gpus = Gpus {
        offer: offer("512Mi", 16),
        ..Gpus::default()
    };
    let node = (key("", "n"), Some(gpus));
    let world = world([Change::GpuNode(Event::Apply(node))]);
    let cohort = world.facts("a", "default").cohort;
    let other = LeftOut::OtherQuantum("512Mi".to_owned());
    assert_eq!(cohort.left_out, [("n".to_owned(), other)]);
    assert_eq!(cohort.nodes, 0);
}

/// A node that does not live.
fn dead(node: &str) -> Change {
    let host = Host {
        lives: false,
        ..host(None)
    };
    Change::Node(Event::Apply((key("", node), Some(host))))
}

#[test]
fn dead_node_leaves_its_cohort_and_returns_when_it_lives() {
    let mut world = world([
        budget("a", claim("default", 8, 1)),
        label("m", "default"),
        label("n", "default"),
        node("m", 16),
        node("n", 32),
    ]);
    let start = Instant::now();
    let at = |seconds| Change::Clock(start + Duration::from_secs(seconds));
    let offered = |world: &World| world.facts("a", "default").cohort.allocatable;
    assert!(world.apply(dead("n")).is_empty(), "an upgrade looks so too");
    for second in [0, 30, 59] {
        assert!(world.awaits_time());
        assert!(world.apply(at(second)).is_empty());
        assert_eq!(offered(&world), Quanta::new(48));
    }
    let died = world.apply(at(60));
    assert_eq!(concerned(&world, &died), ["a"]);
    let cohort = world.facts("a", "default").cohort;
    assert_eq!((cohort.nodes, cohort.allocatable), (1, Quanta::new(16)));
    assert_eq!(cohort.left_out, [("n".to_owned(), LeftOut::Dead)]);
    assert_eq!(world.nodes_left_out(), BTreeMap::from([("Dead", 1)]));
    // What its agent said last, and says no more, changes nothing.
    world.apply(node("n", 64));
    assert_eq!(offered(&world), Quanta::new(16));
    let lives = world.apply(label("n", "default"));
    assert_eq!(concerned(&world, &lives), ["a"]);
    assert_eq!(offered(&world), Quanta::new(80));
}

#[test]
fn gpus_of_no_node_count_for_a_while() {
    let mut world = world([node("n", 16)]);
    let start = Instant::now();
    for (second, offered) in [(0, 16), (60, 0)] {
        world.apply(Change::Clock(start + Duration::from_secs(second)));
        let cohort = world.facts("a", "default").cohort;
        assert_eq!(cohort.allocatable, Quanta::new(offered));
    }
    world.apply(Change::GpuNode(Event::Delete((key("", "n"), None))));
    assert_eq!(world.facts("a", "default").cohort, Cohort::default());
    assert_eq!(world.absence, Absence::default());
}

#[test]
fn node_lives_by_its_condition_and_its_kubelets_offer() {
    let host = |ready: &str, offers: &str| {
        let node = json!({
            "metadata": { "name": "n" }, "spec": { "unschedulable": true },
            "status": { "conditions": [{ "type": "Ready", "status": ready }],
                "allocatable": { "bursar.dev/gpu-memory-gib": offers } },
        });
        Host::of(&serde_json::from_value(node).unwrap(), Quantum::Gib1)
    };
    assert!(host("True", "8").lives, "cordoned is not dead");
    for (ready, offers) in [("Unknown", "8"), ("False", "8"), ("True", "0")] {
        assert!(!host(ready, offers).lives, "{ready} {offers}");
    }
}

#[test]
fn unreadable_objects_are_named_and_no_budget_is_taken_for_gone() {
    let unreadable = |kind, namespace: &str, name: &str| {
        let entry = (key(namespace, name), Some("unknown word".to_owned()));
        Change::Unreadable(kind, Event::Apply(entry))
    };
    let enforced = Some("enforced".to_owned());
    let mut world = world([
        unreadable(kinds::BUDGETS, "a", "default"),
        unreadable(kinds::GPU_NODES, "", "n"),
        Change::GpuNode(Event::Apply((key("", "n"), Some(Gpus::unreadable())))),
        Change::Budget(Event::InitDone),
        Change::Pod(Event::InitDone),
        Change::Node(Event::InitDone),
        Change::Quota(Event::InitDone),
        Change::Namespace(Event::InitDone),
        Change::Namespace(Event::Apply((key("", "a"), enforced))),
    ]);
    // The list that names them is followed by what was read of it.
    world.apply(Change::GpuNode(Event::Init));
    world.apply(Change::GpuNode(Event::InitApply((
        key("", "n"),
        Some(Gpus::unreadable()),
    ))));
    world.apply(Change::GpuNode(Event::InitDone));
    assert_eq!(world.missing(), Vec::<&str>::new());
    let (budget, node) = (key("a", "default"), key("", "n"));
    let named: Vec<_> = world.unreadable().collect();
    assert_eq!(
        named,
        [(kinds::BUDGETS, &budget), (kinds::GPU_NODES, &node)]
    );
    assert_eq!(world.deserted(), Vec::<String>::new());
    assert!(world.nodes_without(&BTreeMap::new()).is_empty());
    let cohort = world.facts("a", "default").cohort;
    assert_eq!(cohort.left_out, [("n".to_owned(), LeftOut::Unreadable)]);
    let gone = Change::Unreadable(kinds::BUDGETS, Event::Delete((budget, None)));
    world.apply(gone);
    assert_eq!(world.deserted(), ["a"]);
}

/// The tally of what is there, made anew.
fn tallied(world: &World) -> Tally {
    let mut tally = Tally::default();
    for (_, claim) in world.budgets.iter() {
        tally.budget(None, Some(claim));
    }
    for (key, gpus) in world.gpu_nodes.iter() {
        let member = Member {
            gpus,
            cohort: cohort_of(world.hosts.get(key)),
            is_dead: world.absence.is_dead(key),
        };
        tally.node(key, None, Some(member));
    }
    for (key, demand) in world.pods.iter() {
        tally.pod(&key.namespace, None, Some(demand));
    }
    tally
}

/// A node that tells of a namespace's use, of a poisoned context of another one, and of a fault of a GPU.
fn eventful(offer: u64, uses: u8, fault: u8, gpu_fault: bool) -> Gpus {
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
    Gpus::of(&object, Quantum::Gib1)
}

proptest! {
    /// Whatever came before, and also where everything is listed anew.
    #[test]
    fn what_is_kept_up_is_what_is_there(
        steps in prop::collection::vec((0u8..11, 0u8..3, 0u8..3, 0u64..4), 1..60),
    ) {
        let mut world = World::new(Quantum::Gib1);
        let mut now = Instant::now();
        for (kind, which, other, amount) in steps {
            let (name, cohort) = (which.to_string(), ["default", "x", "y"][usize::from(other)]);
            let gpus = || eventful(amount, which, other, amount % 2 == 1);
            let listed = (key("", &name), Some(gpus()));
            let changes = match kind {
                0 => vec![Change::Budget(Event::Delete((key(&name, "default"), None)))],
                1 => vec![budget(&name, claim(cohort, amount.saturating_mul(1 << 62), amount))],
                2 => vec![Change::GpuNode(Event::Delete((key("", &name), None)))],
                3 => vec![Change::GpuNode(Event::Apply(listed))],
                4 => vec![Change::Node(Event::Delete((key("", &name), None)))],
                5 => vec![label(&name, cohort)],
                6 => vec![placed(&name, &amount.to_string(), cohort)],
                7 => vec![gone(&name, &amount.to_string())],
                8 => vec![dead(&name)],
                9 => {
                    now += Duration::from_secs(40);
                    vec![Change::Clock(now)]
                }
                _ => [Event::Init, Event::InitApply(listed), Event::InitDone].map(Change::GpuNode).into(),
            };
            for change in changes {
                world.apply(change);
            }
            prop_assert_eq!(&world.tally, &tallied(&world));
            // Nobody suffers, or is told of, by a node that is not looked at, or by one without
            // pods of the namespace.
            for at in 0..9u8 {
                let (namespace, on) = ((at / 3).to_string(), (at % 3).to_string());
                world.apply(placed(&namespace, "p", &on));
                let facts = world.facts(&namespace, "x");
                let node = world.gpu_nodes.get(&key("", &on));
                let nodes = || node.into_iter();
                let told = nodes().flat_map(|node| &node.namespaces);
                let told = told.filter(|one| one.namespace == namespace).count();
                prop_assert_eq!(facts.told.observed, Quanta::new(told as u64));
                let on = |open: &&OpenFault| {
                    let pods = &open.pods;
                    let container = open.fault.container.as_ref();
                    let uid = container.map_or_else(|| pods[0].clone(), |one| one.pod_uid.clone());
                    uid == format!("{namespace}/p")
                };
                let suffered = nodes().flat_map(|node| &node.faults).filter(on).count();
                prop_assert_eq!(facts.sufferers.len(), suffered);
            }
        }
    }

    /// The pods of three namespaces on `good`, on `evil` and on none; what `evil` says is random.
    #[test]
    fn a_node_decides_about_its_own_pods_whatever_it_says(
        pods in prop::collection::btree_map((0u8..3, 0u8..4), 0u8..3, 1..10),
        faults in prop::collection::vec((0u8..3, 0u8..4, any::<bool>()), 1..6),
        uses in prop::collection::vec((0u8..3, 0i32..100), 0..4),
    ) {
        let mut world = World::new(Quantum::Gib1);
        for ((namespace, name), on) in &pods {
            let (namespace, name) = (namespace.to_string(), name.to_string());
            world.apply(match on {
                0 => placed(&namespace, &name, "good"),
                1 => placed(&namespace, &name, "evil"),
                _ => pod(&namespace, &name, Class::Guaranteed, 1),
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
        world.apply(Change::GpuNode(Event::Apply((key("", "evil"), Some(Gpus::of(&object, Quantum::Gib1))))));
        for namespace in 0..3u8 {
            let facts = world.facts(&namespace.to_string(), "x");
            for one in &facts.sufferers {
                prop_assert_eq!(one.demand.node.as_deref(), Some("evil"), "{:?}", one);
            }
            let has_pods = pods.iter().any(|((of, _), on)| *of == namespace && *on == 1);
            prop_assert!(has_pods || facts.told.observed == Quanta::ZERO, "{:?}", facts.told);
        }
    }

    /// Pods are not kept up but counted, so what is counted is what there is: each quantum once.
    #[test]
    fn every_pod_is_counted_once_in_its_namespace_and_its_class(
        pods in prop::collection::btree_map((0u8..4, 0u8..8), (any::<bool>(), 1u64..100), 0..24),
    ) {
        let changes = pods.iter().map(|((namespace, name), (borrows, device))| {
            let class = if *borrows { Class::Borrowed } else { Class::Guaranteed };
            pod(&namespace.to_string(), &name.to_string(), class, *device)
        });
        let world = world(changes);
        for namespace in 0..4u8 {
            let usage = world.facts(&namespace.to_string(), "default").usage;
            let mine = pods.iter().filter(|((of, _), _)| *of == namespace);
            let sum = |borrowed: bool| -> u64 {
                mine.clone().filter(|(_, (b, _))| *b == borrowed).map(|(_, (_, device))| device).sum()
            };
            prop_assert_eq!(usage.guaranteed, Quanta::new(sum(false)));
            prop_assert_eq!(usage.borrowed, Quanta::new(sum(true)));
            prop_assert_eq!(usage.pods.unsigned_abs() as usize, mine.count());
        }
    }

    /// A budget whose facts changed is never left out of the dirty ones.
    #[test]
    fn no_change_of_facts_goes_unnoticed(
        steps in prop::collection::vec((0u8..8, 0u8..3, 0u8..3, 0u64..4), 1..60),
    ) {
        let mut world = World::new(Quantum::Gib1);
        let mut clock = Instant::now();
        let facts = |world: &World| -> BTreeMap<Key, Facts> {
            let of = |(key, claim): (&Key, &Claim)| (key.clone(), world.facts(&key.namespace, &claim.cohort));
            world.budgets.iter().map(of).collect()
        };
        for (kind, which, other, amount) in steps {
            let (name, cohort) = (which.to_string(), ["default", "x", "y"][usize::from(other)]);
            let change = match (kind, amount) {
                (0, 0) => Change::Budget(Event::Delete((key(&name, "default"), None))),
                (0, _) => budget(&name, claim(cohort, amount, amount)),
                (1, 0) => Change::Pod(Event::Delete((key(&name, "p"), None))),
                (1, _) => pod(&name, "p", Class::Guaranteed, amount),
                (2, 0) => Change::GpuNode(Event::Delete((key("", &name), None))),
                (2, _) => node(&name, amount),
                (3, 0) => Change::Node(Event::Delete((key("", &name), None))),
                (3, _) => label(&name, cohort),
                (4, 0) => Change::Quota(Event::Delete((key(&name, Which::Limit.name()), None))),
                (4, _) => quota(&name, amount),
                (5, _) => dead(&name),
                (6, _) => {
                    clock += Duration::from_secs(40);
                    Change::Clock(clock)
                }
                (_, 0) => Change::Namespace(Event::Delete((key("", &name), None))),
                (_, _) => Change::Namespace(Event::Apply((key("", &name), Some("enforced".to_owned())))),
            };
            let before = facts(&world);
            let dirty = world.apply(change);
            let named = world.budgets(&dirty);
            for (key, now) in facts(&world) {
                prop_assert!(before.get(&key) == Some(&now) || named.contains(&key));
            }
        }
    }
}
