//! Checks the steering policy with every shape of pod: its additions are right, and no field is
//! lost.

use std::collections::BTreeMap;
use std::time::Duration;

use libtest_mimic::Failed;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::isolated_scope::{IsolatedScope, QUOTA_RESOURCE};
use crate::server::{Server, acquire_permit, is_long};

/// The pods' request in GiB.
const REQUESTED_GIB: i64 = 12;
const RESOURCE: &str = "bursar.dev/gpu-memory-gib";
const BORROWED_CLASS: &str = "bursar-borrowed";
/// The class that the chart's values call the cluster's default.
const DEFAULT_CLASS: &str = "everyday";
const LARGEST_FREE_LABEL: &str = "bursar.dev/largest-free-gib";
const LARGEST_RECLAIMABLE_LABEL: &str = "bursar.dev/largest-reclaimable-gib";
const LARGEST_GPU_LABEL: &str = "bursar.dev/largest-gpu-gib";
/// The label of the nodes that cluster-autoscaler simulates (kubernetes/autoscaler#9702).
const TEMPLATE_LABEL: &str = "cluster-autoscaler.kubernetes.io/template-node";
/// The page that shows the policy's additions for manual use, and the request of its example in
/// GiB.
const BY_HAND: (&str, i64) = (
    include_str!("../../../docs/use/guides/steering-and-preemption.md"),
    8,
);
/// The API server's log lines about a panic: of a request, of another task, and its stacks.
const PANICS: [&str; 3] = ["panicked: true", "Observed a panic", "goroutine "];
/// A changed policy is in force within this time.
const IN_FORCE: Duration = Duration::from_secs(30);
/// The API server reloads changed policies at this interval, and then calls them in another order.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The number of reloads, enough for both orders of two policies to occur.
const ORDERS: u32 = 12;

/// Makes node selector terms of the pod's own.
fn terms(count: usize) -> Value {
    let term = |number: usize| {
        let zone = if number.is_multiple_of(2) { "a" } else { "b" };
        json!({ "matchExpressions": [
            { "key": "zone", "operator": "In", "values": [zone] },
            { "key": "rank", "operator": "Lt", "values": [(number + 3).to_string()] } ] })
    };
    let terms: Vec<_> = (0..count).map(term).collect();
    json!({ "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": terms } } })
}

/// Every shape of affinity, by name.
fn affinities() -> Vec<(&'static str, Value)> {
    let apart = json!({ "podAntiAffinity": { "preferredDuringSchedulingIgnoredDuringExecution": [{ "weight": 3,
        "podAffinityTerm": { "topologyKey": "zone", "labelSelector": { "matchLabels": { "a": "b" } } } }] } });
    let prefers = json!([{ "weight": 7, "preference": { "matchExpressions": [
        { "key": "zone", "operator": "NotIn", "values": ["b"] }] } }]);
    let required_apart = json!({
        "podAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": [
            { "topologyKey": "zone", "labelSelector": { "matchLabels": { "a": "b" } } }] },
        "podAntiAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": [
            { "topologyKey": "zone", "labelSelector": { "matchLabels": { "a": "c" } } }] } });
    let zone_a = json!({ "weight": 100, "preference": { "matchExpressions": [
        { "key": "zone", "operator": "In", "values": ["a"] }] } });
    let pinned = json!({ "nodeSelectorTerms": [{ "matchFields": [
        { "key": "metadata.name", "operator": "In", "values": ["node-a"] }] }] });
    let mixed = json!({ "nodeSelectorTerms": [
        { "matchFields": [{ "key": "metadata.name", "operator": "In", "values": ["node-a"] }],
          "matchExpressions": [{ "key": "zone", "operator": "Exists" }] },
        { "matchExpressions": [{ "key": "rank", "operator": "Gt", "values": ["1"] },
                               { "key": "zone", "operator": "DoesNotExist" }] }] });
    let required = "requiredDuringSchedulingIgnoredDuringExecution";
    let preferred = "preferredDuringSchedulingIgnoredDuringExecution";
    let mut both = terms(2);
    both["nodeAffinity"][preferred] = prefers.clone();
    both["podAntiAffinity"] = apart["podAntiAffinity"].clone();
    vec![
        ("none", Value::Null),
        ("empty", json!({})),
        ("an empty one of nodes", json!({ "nodeAffinity": {} })),
        ("of pods", apart),
        ("of pods, required", required_apart),
        (
            "preferred",
            json!({ "nodeAffinity": { preferred: prefers } }),
        ),
        (
            "several preferred",
            json!({ "nodeAffinity": { preferred: [prefers[0], zone_a, prefers[0]] } }),
        ),
        (
            "preferred and empty",
            json!({ "nodeAffinity": { preferred: [] } }),
        ),
        ("one term", terms(1)),
        ("two terms", terms(2)),
        ("eight terms", terms(8)),
        ("nine terms", terms(9)),
        (
            "pinned by name",
            json!({ "nodeAffinity": { required: pinned } }),
        ),
        (
            "names and labels",
            json!({ "nodeAffinity": { required: mixed } }),
        ),
        (
            "a term that selects nothing",
            json!({ "nodeAffinity": { required: { "nodeSelectorTerms": [{}] } } }),
        ),
        ("everything", both),
    ]
}

fn pod(affinity: &Value, asks: &[(&str, i64)], meta: Value) -> Value {
    let container = |name: &str, gib: i64| {
        let limits = if gib == 0 {
            json!({ "cpu": "1" })
        } else {
            json!({ RESOURCE: gib.to_string() })
        };
        let restarts = name.ends_with("sidecar").then_some("Always");
        json!({ "name": name, "image": "i", "resources": { "limits": limits }, "restartPolicy": restarts })
    };
    let of = |init: bool| -> Vec<Value> {
        let asks = asks
            .iter()
            .filter(|(name, _)| name.starts_with("init") == init);
        asks.map(|(name, gib)| container(name, *gib)).collect()
    };
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": meta,
        "spec": { "containers": of(false), "initContainers": of(true) },
    });
    pod["metadata"]["name"] = json!("shape");
    if !affinity.is_null() {
        pod["spec"]["affinity"] = affinity.clone();
    }
    pod
}

/// Returns the pod's spec as the API server would store it.
async fn admitted(at: &IsolatedScope, pod: Value) -> Result<Value, Failed> {
    let path = format!("{}?dryRun=All", at.pods_path());
    Ok(at.create(&path, pod).await?["spec"].take())
}

/// Returns the affinity to other pods.
fn of_pods(affinity: &Value) -> [&Value; 2] {
    ["podAffinity", "podAntiAffinity"].map(|about| &affinity[about])
}

fn required(affinity: &Value) -> &Value {
    &affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
}

fn preferred(affinity: &Value) -> Vec<Value> {
    let list = &affinity["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"];
    list.as_array().cloned().unwrap_or_default()
}

/// Returns the affinity as the API server stores it, without empty lists.
fn stored(mut affinity: Value) -> Value {
    let of_nodes = affinity
        .get_mut("nodeAffinity")
        .and_then(Value::as_object_mut);
    if let Some(of_nodes) = of_nodes {
        of_nodes.retain(|_, list| list != &json!([]));
    }
    affinity
}

/// Returns the spec without the fields of the policy, to compare the other fields.
fn rest(spec: &Value) -> Value {
    let mut spec = spec.clone();
    let of = |field: &str| field == "affinity" || field == "topologySpreadConstraints";
    if let Some(fields) = spec.as_object_mut() {
        fields.retain(|field, _| !of(field));
    }
    // Volumes differ from pod to pod.
    spec["volumes"] = Value::Null;
    for containers in ["containers", "initContainers"] {
        for container in spec[containers].as_array_mut().into_iter().flatten() {
            container["volumeMounts"] = Value::Null;
            container["resources"] = Value::Null;
        }
    }
    spec
}

type Labels = BTreeMap<&'static str, String>;

/// Returns the labels of the node that cluster-autoscaler makes from one with these labels.
fn simulated(labels: &Labels) -> Labels {
    let mut labels = labels.clone();
    labels.insert(TEMPLATE_LABEL, "true".to_owned());
    labels
}

/// Returns nodes of every relevant kind, by name.
fn nodes() -> Vec<(&'static str, Labels)> {
    let mut nodes = Vec::new();
    let values = [
        None,
        Some(REQUESTED_GIB - 1),
        Some(REQUESTED_GIB),
        Some(REQUESTED_GIB + 50),
    ];
    for name in ["node-a", "node-b"] {
        for zone in [None, Some("a"), Some("b")] {
            for rank in [None, Some(2), Some(5), Some(9)] {
                for free in values {
                    for reclaimable in values {
                        for gpu in values {
                            let labels = [
                                ("zone", zone.map(str::to_owned)),
                                ("rank", rank.map(|rank: i64| rank.to_string())),
                                (
                                    "bursar.dev/largest-free-gib",
                                    free.map(|gib| gib.to_string()),
                                ),
                                (
                                    "bursar.dev/largest-reclaimable-gib",
                                    reclaimable.map(|gib| gib.to_string()),
                                ),
                                (LARGEST_GPU_LABEL, gpu.map(|gib| gib.to_string())),
                            ];
                            let labels = labels.into_iter();
                            let labels = labels.filter_map(|(key, value)| Some((key, value?)));
                            let labels: Labels = labels.collect();
                            nodes.push((name, simulated(&labels)));
                            nodes.push((name, labels));
                        }
                    }
                }
            }
        }
    }
    nodes
}

/// Returns whether a node selector matches a node, as in the scheduler; an absent selector matches
/// any.
fn selects(selector: &Value, name: &str, labels: &Labels) -> bool {
    let Some(terms) = selector["nodeSelectorTerms"].as_array() else {
        return true;
    };
    let all = |list: &Value, get: &dyn Fn(&str) -> Option<String>| {
        let mut requirements = list.as_array().into_iter().flatten();
        requirements.all(|requirement| {
            let value = get(requirement["key"].as_str().unwrap_or_default());
            let values = requirement["values"]
                .as_array()
                .cloned()
                .unwrap_or_default();
            let first: Option<i64> = values.first().and_then(|one| one.as_str()?.parse().ok());
            let number: Option<i64> = value.as_ref().and_then(|value| value.parse().ok());
            let among = value
                .as_ref()
                .is_some_and(|value| values.contains(&json!(value)));
            let compared = number.zip(first);
            match requirement["operator"].as_str().unwrap_or_default() {
                "In" => among,
                "NotIn" => !among,
                "Exists" => value.is_some(),
                "DoesNotExist" => value.is_none(),
                "Gt" => compared.is_some_and(|(number, bound)| number > bound),
                "Lt" => compared.is_some_and(|(number, bound)| number < bound),
                _ => false,
            }
        })
    };
    let length = |list: &Value| list.as_array().map_or(0, Vec::len);
    terms.iter().any(|term| {
        let (expressions, fields) = (&term["matchExpressions"], &term["matchFields"]);
        // A term without requirements matches no node.
        length(expressions) + length(fields) > 0
            && all(expressions, &|key| labels.get(key).cloned())
            && all(fields, &|_| Some(name.to_owned()))
    })
}

/// Returns whether the pod should be steered to the node.
fn has_room(label: &str, labels: &Labels) -> bool {
    let value = |label: &str| {
        labels
            .get(label)
            .and_then(|value| value.parse::<i64>().ok())
    };
    value(label).is_none_or(|gib| gib >= REQUESTED_GIB)
        || value(LARGEST_GPU_LABEL)
            .is_some_and(|gib| gib < REQUESTED_GIB || labels.contains_key(TEMPLATE_LABEL))
}

/// Checks that the pod waits for a node beside a full one, and that cluster-autoscaler would add
/// that node to the group of the full one and to an empty group.
async fn check_full_group_is_scaled_up(at: &IsolatedScope) -> Result<(), Failed> {
    let steered = admitted(at, pod(&Value::Null, &[("c", REQUESTED_GIB)], json!({}))).await?;
    let is_for = |labels: &Labels| selects(required(&steered["affinity"]), "node", labels);
    let full = Labels::from([
        (LARGEST_FREE_LABEL, "0".to_owned()),
        (LARGEST_RECLAIMABLE_LABEL, "0".to_owned()),
        (LARGEST_GPU_LABEL, REQUESTED_GIB.to_string()),
    ]);
    assert!(!is_for(&full), "{steered}");
    assert!(is_for(&simulated(&full)), "{steered}");
    assert!(is_for(&simulated(&Labels::new())), "{steered}");
    Ok(())
}

/// Sets the policy's mode, and waits until it is in force.
async fn mode(server: &Server, at: &IsolatedScope, mode: &str) -> Result<(), Failed> {
    let chart = server
        .control_plane
        .chart_without_workloads(&[
            &format!("--set=placement.steering={mode}"),
            &format!("--set=policies.defaultPriorityClass={DEFAULT_CLASS}"),
        ])
        .await?;
    let steers = |object: &Value| {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        name.ends_with("-steering") || name.ends_with("-overflow")
    };
    server
        .control_plane
        .apply(chart.into_iter().filter(steers).collect())
        .await?;
    let begin = Instant::now();
    loop {
        let spec = admitted(at, pod(&Value::Null, &[("c", REQUESTED_GIB)], json!({}))).await?;
        let is = if required(&spec["affinity"]).is_null() {
            "preferred"
        } else {
            "required"
        };
        if is == mode && !spec["affinity"].is_null() {
            return Ok(());
        }
        if begin.elapsed() > IN_FORCE {
            return Err(format!("steering is not {mode}: {spec}").into());
        }
        sleep(Duration::from_millis(200)).await;
    }
}

pub(crate) async fn steering(server: &Server) -> Result<String, Failed> {
    let _permit = acquire_permit().await;
    let at = IsolatedScope::set_up(server, "steered").await?;
    mode(server, &at, "preferred").await?;
    by_hand(&at, "preferred").await?;
    let preferred = preferences(&at).await?;
    let left_alone = check_exempt_pods_unchanged(&at).await?;
    by_controllers(&at).await?;
    mode(server, &at, "required").await?;
    check_full_group_is_scaled_up(&at).await?;
    by_hand(&at, "required").await?;
    let required = requirements(&at).await?;
    let untouched = check_exempt_pods_unchanged(&at).await?;
    check_overflowing_pods_steered_as_borrowers(&at).await?;
    // Later trials expect the chart's default.
    mode(server, &at, "preferred").await?;
    let log = server.control_plane.api_server_log().await?;
    let is_panic = |line: &&str| PANICS.iter().any(|words| line.contains(words));
    if let Some(panic) = log.lines().find(is_panic) {
        return Err(format!("the API server panicked: {panic}").into());
    }
    Ok(format!(
        "{preferred} shapes preferred, {required} required, {} left alone",
        left_alone + untouched
    ))
}

/// Checks that the policy adds one preference, and a neutral spread constraint if there is none.
async fn preferences(at: &IsolatedScope) -> Result<usize, Failed> {
    let mut shapes = 0;
    for (number, (name, affinity)) in affinities().into_iter().enumerate() {
        let own = admitted(at, pod(&affinity, &[("c", 0)], json!({}))).await?;
        let steered = admitted(at, pod(&affinity, &[("c", REQUESTED_GIB)], json!({}))).await?;
        assert_eq!(rest(&steered), rest(&own), "{name}");
        let (before, after) = (&own["affinity"], &steered["affinity"]);
        assert_eq!(required(after), required(before), "{name}");
        assert_eq!(of_pods(after), of_pods(before), "{name}");
        let mut wanted = preferred(before);
        wanted.push(json!({ "weight": 100, "preference": { "matchExpressions": [{
            "key": "bursar.dev/largest-free-gib", "operator": "Gt", "values": [(REQUESTED_GIB - 1).to_string()] }] } }));
        assert_eq!(preferred(after), wanted, "{name}");
        let spread = steered["topologySpreadConstraints"].as_array();
        assert_eq!(spread.map(Vec::len), Some(1), "{name}");
        shapes +=
            1 + check_steered_like_scheduler(at, &affinity, &Value::Null, &steered, number).await?;
    }
    // The policy keeps an existing spread constraint.
    let mut spread = pod(&Value::Null, &[("c", REQUESTED_GIB)], json!({}));
    spread["spec"]["topologySpreadConstraints"] = json!([
        { "maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule",
          "labelSelector": { "matchLabels": { "a": "b" } } }]);
    let kept = admitted(at, spread.clone()).await?;
    assert_eq!(
        kept["topologySpreadConstraints"],
        spread["spec"]["topologySpreadConstraints"]
    );
    Ok(shapes)
}

/// Checks that the required nodes are those of the pod's own terms that have room or unknown room.
async fn requirements(at: &IsolatedScope) -> Result<usize, Failed> {
    let nodes = nodes();
    let mut shapes = 0;
    let classes = [
        (Value::Null, LARGEST_RECLAIMABLE_LABEL),
        (json!(BORROWED_CLASS), LARGEST_FREE_LABEL),
    ];
    for (class, label) in classes {
        for (number, (name, affinity)) in affinities().into_iter().enumerate() {
            let mut asking = pod(&affinity, &[("c", REQUESTED_GIB)], json!({}));
            asking["spec"]["priorityClassName"] = class.clone();
            let mut plain = pod(&affinity, &[("c", 0)], json!({}));
            plain["spec"]["priorityClassName"] = class.clone();
            let own = admitted(at, plain).await?;
            let steered = admitted(at, asking).await?;
            assert_eq!(rest(&steered), rest(&own), "{name}");
            let (before, after) = (&own["affinity"], &steered["affinity"]);
            assert_eq!(of_pods(after), of_pods(before), "{name}");
            assert_eq!(preferred(after), preferred(before), "{name}");
            let left = name == "nine terms" || name == "a term that selects nothing";
            for (node, labels) in &nodes {
                let mut wanted = selects(required(before), node, labels);
                wanted &= left || has_room(label, labels);
                let is = selects(required(after), node, labels);
                assert_eq!(is, wanted, "{name}, {node} {labels:?}: {after}");
            }
            shapes +=
                1 + check_steered_like_scheduler(at, &affinity, &class, &steered, number).await?;
        }
    }
    Ok(shapes)
}

/// Checks that the largest request of any container counts, whatever the pod's node selector and
/// namespace. Each shape is compared with `steered`, the pod of one container. The long tier
/// compares all shapes for each affinity; by default the affinity's number chooses one of them.
/// Returns the number of shapes.
async fn check_steered_like_scheduler(
    at: &IsolatedScope,
    affinity: &Value,
    class: &Value,
    steered: &Value,
    number: usize,
) -> Result<usize, Failed> {
    let system = at.in_namespace("kube-system");
    let requests: [&[(&str, i64)]; 4] = [
        &[("c", REQUESTED_GIB)],
        &[("c", 4), ("init", REQUESTED_GIB), ("web", 0)],
        &[("c", REQUESTED_GIB - 1), ("d", REQUESTED_GIB), ("init", 1)],
        &[("c", 4), ("init-sidecar", REQUESTED_GIB)],
    ];
    let in_scope = |scope| requests.map(|request| (scope, request));
    let all = [in_scope(at), in_scope(&system)].concat();
    let turn = number % all.len();
    let shapes = if is_long() {
        &all[..]
    } else {
        &all[turn..=turn]
    };
    for (scope, request) in shapes {
        let admitted = |request: &[(&str, i64)]| {
            let mut pod = pod(affinity, request, json!({}));
            pod["spec"]["priorityClassName"] = class.clone();
            pod["spec"]["nodeSelector"] = json!({ "zone": "a" });
            admitted(scope, pod)
        };
        let without: Vec<_> = request.iter().map(|(name, _)| (*name, 0)).collect();
        let (own, alike) = (admitted(&without).await?, admitted(request).await?);
        assert_eq!(rest(&alike), rest(&own), "{request:?}");
        for field in ["affinity", "topologySpreadConstraints"] {
            assert_eq!(alike[field], steered[field], "{request:?}");
        }
    }
    Ok(shapes.len())
}

/// Checks that a pod that a quota turns into a borrower is steered by free memory, in either order
/// of the policies. Pods stay owners while the quota has no status.
async fn check_overflowing_pods_steered_as_borrowers(at: &IsolatedScope) -> Result<(), Failed> {
    let quotas = format!("/api/v1/namespaces/{}/resourcequotas", at.name);
    let quota = json!({
        "metadata": { "name": "overflow", "labels": { "bursar.dev/overflow": "Borrow" } },
        "spec": { "hard": { QUOTA_RESOURCE: "0" }, "scopeSelector": { "matchExpressions": [
            { "scopeName": "PriorityClass", "operator": "NotIn", "values": [BORROWED_CLASS] }] } },
    });
    at.create(&quotas, quota).await?;
    let asking = || admitted(at, pod(&terms(2), &[("c", REQUESTED_GIB)], json!({})));
    let until = async |class: Value| {
        let begin = Instant::now();
        loop {
            let spec = match asking().await {
                Ok(spec) if spec["priorityClassName"] == class => return Ok(spec),
                spec => spec,
            };
            if begin.elapsed() > IN_FORCE {
                return Err::<Value, Failed>(format!("not {class}: {spec:?}").into());
            }
            sleep(Duration::from_millis(200)).await;
        }
    };
    let quota = format!("{quotas}/overflow");
    let hard =
        |memory: Value| json!({ "spec": { "hard": { QUOTA_RESOURCE: memory, "pods": "100" } } });
    until(json!(BORROWED_CLASS)).await?;
    at.merge(&quota, hard(Value::Null)).await?;
    until(Value::Null).await?;
    at.merge(&quota, hard(json!("0"))).await?;
    for order in 0..ORDERS {
        let affinity = until(json!(BORROWED_CLASS)).await?["affinity"].take();
        let keys = required(&affinity).to_string();
        assert!(
            keys.contains(LARGEST_FREE_LABEL) && !keys.contains(LARGEST_RECLAIMABLE_LABEL),
            "{affinity}"
        );
        let policy =
            "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies/bursar-steering";
        let another = json!({ "metadata": { "annotations": { "order": order.to_string() } } });
        at.merge(policy, another).await?;
        sleep(2 * POLL_INTERVAL).await;
    }
    check_default_class_counts_as_none(at).await?;
    at.delete(&quota).await
}

/// Checks that a pod with the cluster's default class borrows, and a pod with another class does
/// not.
async fn check_default_class_counts_as_none(at: &IsolatedScope) -> Result<(), Failed> {
    for (class, expected) in [(DEFAULT_CLASS, BORROWED_CLASS), ("urgent", "urgent")] {
        let classes = "/apis/scheduling.k8s.io/v1/priorityclasses";
        let object = json!({ "metadata": { "name": class }, "value": 7 });
        at.create(classes, object).await?;
        let mut asking = pod(&Value::Null, &[("c", REQUESTED_GIB)], json!({}));
        asking["spec"]["priorityClassName"] = json!(class);
        let begin = Instant::now();
        let admitted_class = loop {
            // The API server knows a new class a moment later.
            match admitted(at, asking.clone()).await {
                Ok(mut spec) => break spec["priorityClassName"].take(),
                // The quota refuses an owner.
                Err(refusal) if format!("{refusal:?}").contains("exceeded quota") => {
                    break json!(class);
                }
                Err(error) if begin.elapsed() > IN_FORCE => return Err(error),
                Err(_) => sleep(POLL_INTERVAL).await,
            }
        };
        assert_eq!(admitted_class, json!(expected), "class {class}");
        at.delete(&format!("{classes}/{class}")).await?;
    }
    Ok(())
}

/// Checks that the policy's additions equal the manual ones in
/// docs/use/guides/steering-and-preemption.md.
async fn by_hand(at: &IsolatedScope, mode: &str) -> Result<(), Failed> {
    let (page, gib) = BY_HAND;
    let blocks = page
        .split("\n\n")
        .filter(|block| block.starts_with("    affinity:"));
    let mut written = Vec::new();
    for block in blocks {
        written.push(serde_yaml_ng::from_str::<Value>(block)?["affinity"].take());
    }
    let [by_preference, by_requirement] = written.as_slice() else {
        return Err(format!(
            "docs/use/guides/steering-and-preemption.md has it {} times",
            written.len()
        )
        .into());
    };
    for (class, label) in [
        (Value::Null, LARGEST_RECLAIMABLE_LABEL),
        (json!(BORROWED_CLASS), LARGEST_FREE_LABEL),
    ] {
        let mut asking = pod(&Value::Null, &[("c", gib)], json!({}));
        asking["spec"]["priorityClassName"] = class;
        let steered = admitted(at, asking).await?["affinity"].take();
        if mode == "preferred" {
            assert_eq!(steered, *by_preference);
        } else {
            let wanted = by_requirement
                .to_string()
                .replace(LARGEST_RECLAIMABLE_LABEL, label);
            assert_eq!(steered, serde_json::from_str::<Value>(&wanted)?);
        }
    }
    Ok(())
}

/// Checks that the policy skips pods without a request or with one of 0, pods of DaemonSets, bound
/// pods, and pods with several GPUs.
async fn check_exempt_pods_unchanged(at: &IsolatedScope) -> Result<usize, Failed> {
    let owned = json!({ "ownerReferences": [{ "apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "u",
        "controller": true }] });
    let several = json!({ "annotations": { "bursar.dev/gpus": "2" } });
    let mut shapes = 0;
    let system = at.in_namespace("kube-system");
    for (_, affinity) in affinities() {
        let quiet = pod(&affinity, &[("c", 0), ("init", 0)], json!({}));
        let mut on_node = pod(&affinity, &[("c", REQUESTED_GIB)], json!({}));
        on_node["spec"]["nodeName"] = json!(at.name);
        let mut nothing = quiet.clone();
        nothing["spec"]["containers"][0]["resources"] = json!({ "limits": { RESOURCE: "0" } });
        for (scope, pod) in [
            (at, quiet.clone()),
            (&system, quiet),
            (at, nothing),
            (at, pod(&affinity, &[("c", REQUESTED_GIB)], owned.clone())),
            (at, pod(&affinity, &[("c", REQUESTED_GIB)], several.clone())),
            (at, on_node),
        ] {
            let spec = admitted(scope, pod.clone()).await?;
            assert_eq!(spec["affinity"], stored(affinity.clone()), "{pod}");
            assert_eq!(spec["topologySpreadConstraints"], Value::Null, "{pod}");
            shapes += 1;
        }
    }
    Ok(shapes)
}

/// Checks pods of controllers: those of a DaemonSet keep their nodes, those of a Job are steered.
async fn by_controllers(at: &IsolatedScope) -> Result<(), Failed> {
    let template = |restarts: &str| {
        // The API server taints a new node as not ready.
        let everywhere = json!([{ "operator": "Exists" }]);
        json!({
            "metadata": { "labels": { "app": restarts } },
            "spec": { "restartPolicy": restarts, "tolerations": everywhere, "nodeSelector": { "bursar.dev/cohort": at.name }, "containers": [
                { "name": "c", "image": "i", "resources": { "limits": { RESOURCE: REQUESTED_GIB.to_string() } } }] },
        })
    };
    let daemons = json!({ "metadata": { "name": "d" }, "spec": {
        "selector": { "matchLabels": { "app": "Always" } }, "template": template("Always") } });
    let job = json!({ "metadata": { "name": "j" }, "spec": { "template": template("Never") } });
    let name = &at.name;
    at.create(
        &format!("/apis/apps/v1/namespaces/{name}/daemonsets"),
        daemons,
    )
    .await?;
    at.create(&format!("/apis/batch/v1/namespaces/{name}/jobs"), job)
        .await?;
    let (of_daemons, of_job) = (made(at, "Always").await?, made(at, "Never").await?);
    let pinned = json!([{ "matchFields": [{ "key": "metadata.name", "operator": "In", "values": [name] }] }]);
    let affinity = &of_daemons["spec"]["affinity"];
    assert_eq!(
        required(affinity)["nodeSelectorTerms"],
        pinned,
        "{affinity}"
    );
    assert!(preferred(affinity).is_empty(), "{affinity}");
    assert_eq!(preferred(&of_job["spec"]["affinity"]).len(), 1, "{of_job}");
    Ok(())
}

/// Waits for the pod that a controller creates from this template.
async fn made(at: &IsolatedScope, app: &str) -> Result<Value, Failed> {
    let begin = Instant::now();
    loop {
        let path = format!("{}?labelSelector=app%3D{app}", at.pods_path());
        let pods = at.get(&path).await?;
        if let Some(pod) = pods["items"].as_array().and_then(|pods| pods.first()) {
            return Ok(pod.clone());
        }
        if begin.elapsed() > IN_FORCE {
            let events = format!("/api/v1/namespaces/{}/events", at.name);
            let events = at.get(&events).await?;
            let messages = events["items"].as_array().into_iter().flatten();
            let messages: Vec<_> = messages.map(|event| event["message"].clone()).collect();
            return Err(format!("no pod of {app}: {messages:?}").into());
        }
        sleep(Duration::from_millis(200)).await;
    }
}
