//! Makes snapshots of recorded objects.

use std::fs;
use std::path::Path;

use bursar_cli::agent_metrics::AgentMetrics;
use bursar_cli::objects::{Event, Pod};
use bursar_cli::snapshot::Snapshot;
use serde_json::{Value, json};

/// The time of the snapshots.
pub(crate) const NOW: &str = "2026-11-25T12:00:00Z";

/// A time this many seconds before [`NOW`].
pub(crate) fn ago(seconds: i64) -> String {
    let now: k8s_openapi::jiff::Timestamp = NOW.parse().unwrap();
    let then = now.as_second() - seconds;
    k8s_openapi::jiff::Timestamp::from_second(then)
        .unwrap()
        .to_string()
}

pub(crate) fn parse<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

/// A pod whose container `main` requests `gib`.
pub(crate) fn pod(namespace: &str, name: &str, node: &str, gib: i64) -> Value {
    json!({
        "metadata": { "namespace": namespace, "name": name, "uid": format!("{namespace}-{name}"),
                      "creationTimestamp": ago(3600), "labels": { "app": name } },
        "spec": { "nodeName": node, "priority": 0, "containers": [{ "name": "main", "image": "i", "resources": {
            "limits": { "bursar.dev/gpu-memory-gib": gib.to_string() } } }] },
        "status": { "phase": if node.is_empty() { "Pending" } else { "Running" }, "containerStatuses": if node.is_empty() {
            json!([]) } else { json!([{ "name": "main", "state": { "running": { "startedAt": ago(3600) } } }]) } },
    })
}

/// A pod that waits on its node with the agent's message.
pub(crate) fn waiting_pod(
    namespace: &str,
    name: &str,
    node: &str,
    gib: i64,
    message: &str,
) -> Value {
    let mut pod = pod(namespace, name, node, gib);
    pod["status"] = json!({ "phase": "Pending", "containerStatuses": [{ "name": "main", "state": { "waiting": {
        "reason": "RunContainerError", "message": message } } }] });
    pod
}

/// A healthy GPU with these pods, each with its quanta.
pub(crate) fn gpu(uuid: &str, index: i32, capacity: i32, pods: &[(&str, i32)]) -> Value {
    let bound: i32 = pods.iter().map(|(_, quanta)| quanta).sum();
    let pods: Vec<Value> = pods
        .iter()
        .map(|(uid, quanta)| json!({ "uid": uid, "quanta": quanta }))
        .collect();
    json!({ "uuid": uuid, "index": index, "model": "NVIDIA H100 80GB HBM3", "memory": format!("{capacity}Gi"),
            "state": "Active", "generation": 1, "health": { "status": "Healthy", "reason": "Ok" },
            "capacity": capacity, "free": capacity - bound, "largestFree": capacity - bound, "pods": pods })
}

/// A node's GPUs, all conditions as they should be.
pub(crate) fn gpu_node(name: &str, gpus: Vec<Value>) -> Value {
    let sum = |field: &str| {
        gpus.iter()
            .map(|gpu| gpu[field].as_i64().unwrap())
            .sum::<i64>()
    };
    let largest = gpus
        .iter()
        .map(|gpu| gpu["largestFree"].as_i64().unwrap())
        .max()
        .unwrap_or(0);
    let memory =
        json!({ "allocatable": sum("capacity"), "free": sum("free"), "largestFree": largest });
    json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuNode",
        "metadata": { "name": name, "uid": name, "generation": 1, "resourceVersion": "7" }, "spec": {},
        "status": { "observedGeneration": 1, "quantum": "1Gi", "agentVersion": "0.1.0", "driverVersion": "580.95",
                    "bootId": format!("boot-{name}"), "deviceMemory": memory, "gpus": gpus,
                    "conditions": [condition("Ready", "True", "Ok", ""), condition("GpusFound", "True", "Ok", "")] },
    })
}

pub(crate) fn condition(type_: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({ "type": type_, "status": status, "reason": reason, "message": message, "lastTransitionTime": ago(120) })
}

/// A budget whose pods request and borrow amounts in GiB.
pub(crate) fn budget(
    namespace: &str,
    guaranteed: i64,
    limit: i64,
    requested: i64,
    borrowed: i64,
) -> Value {
    let gib = |gib: i64| json!({ "quanta": gib, "bytes": format!("{gib}Gi") });
    json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget",
        "metadata": { "name": "default", "namespace": namespace, "uid": format!("budget-{namespace}"), "resourceVersion": "9" },
        "spec": { "deviceMemory": { "guaranteed": format!("{guaranteed}Gi"), "limit": format!("{limit}Gi") } },
        "status": { "quantum": "1Gi", "pods": 3, "deviceMemory": {
                "guaranteed": gib(guaranteed), "limit": gib(limit), "requested": gib(requested), "borrowed": gib(borrowed),
                "observed": gib(requested / 2), "peak": gib(requested) },
            "conditions": [condition("Ready", "True", "AsDeclared", ""), condition("Accepted", "True", "AsDeclared", ""),
                condition("Covered", "True", "GuaranteesFit", ""), condition("Exceeded", "False", "WithinBudget", ""),
                condition("Enforced", "True", "QuotasInForce", "")] },
    })
}

/// A ready node with the runtime of the tests.
pub(crate) fn node(name: &str) -> Value {
    json!({ "metadata": { "name": name, "labels": {} }, "status": {
        "allocatable": { "bursar.dev/gpu-memory-gib": "79" },
        "conditions": [{ "type": "Ready", "status": "True" }],
        "nodeInfo": { "bootID": format!("boot-{name}"), "containerRuntimeVersion": "containerd://2.1.4", "kubeletVersion": "v1.36.3" } } })
}

/// A pod of Bursar's own.
pub(crate) fn own_pod(component: &str, node: &str) -> Value {
    json!({
        "metadata": { "name": format!("bursar-{component}-{node}"), "namespace": "bursar-system", "uid": format!("{component}-{node}"),
            "labels": { "app.kubernetes.io/name": "bursar", "app.kubernetes.io/component": component, "app.kubernetes.io/version": "0.1.0" } },
        "spec": { "nodeName": node, "containers": [{ "name": component, "ports": [{ "name": "metrics", "containerPort": 9400 }] }] },
        "status": { "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }] },
    })
}

pub(crate) fn event(
    kind: &str,
    name: &str,
    uid: &str,
    reason: &str,
    message: &str,
    seconds: i64,
) -> Value {
    json!({ "metadata": { "name": format!("{name}.{reason}.{seconds}"), "namespace": "ml", "uid": format!("{uid}{reason}{seconds}") },
            "involvedObject": { "kind": kind, "namespace": "ml", "name": name, "uid": uid }, "reason": reason,
            "message": message, "type": "Warning", "eventTime": ago(seconds), "reportingComponent": "bursar-agent",
            "reportingInstance": "gpu-a-1" })
}

/// The operator's Event on a waiting pod about a victim.
pub(crate) fn victim_event(
    pod: &str,
    reason: &str,
    message: &str,
    victim: &str,
    seconds: i64,
) -> Value {
    let mut event = event("Pod", pod, &format!("ml-{pod}"), reason, message, seconds);
    let (namespace, name) = victim.split_once('/').unwrap();
    event["related"] = json!({ "kind": "Pod", "namespace": namespace, "name": name, "uid": format!("{namespace}-{name}") });
    event["type"] = json!("Normal");
    event["reportingComponent"] = json!("bursar-operator");
    event["reportingInstance"] = json!("bursar-operator-1");
    event
}

/// A snapshot of the objects of the documentation's example: five GPUs on four nodes.
pub(crate) fn cluster() -> Snapshot {
    let mut big = waiting_pod(
        "ml",
        "big-0",
        "gpu-a-1",
        50,
        "failed to start: waiting for 50 GiB on one GPU: largest free 39 GiB (GPU-a1)",
    );
    big["spec"]["priority"] = json!(10);
    let mut crawl = pod("search", "crawl-2", "gpu-a-1", 40);
    crawl["spec"]["priority"] = json!(-10);
    crawl["spec"]["priorityClassName"] = json!("bursar-borrowed");
    let pods = [
        big,
        pod("ml", "debug", "gpu-b-1", 8),
        pod("ml", "notebook", "gpu-a-1", 8),
        pod("ml", "serve-0", "gpu-a-1", 40),
        pod("ml", "serve-1", "gpu-a-1", 16),
        crawl,
        pod("shop", "web", "gpu-b-1", 16),
    ];
    let mut held = gpu("GPU-a1", 1, 79, &[("search-crawl-2", 40)]);
    held["state"] = json!("Reserved");
    held["reservedFor"] = json!("ml-big-0");
    held["largestFree"] = json!(0);
    let mut a1 = gpu_node(
        "gpu-a-1",
        vec![
            gpu(
                "GPU-a0",
                0,
                79,
                &[("ml-serve-0", 40), ("ml-serve-1", 16), ("ml-notebook", 8)],
            ),
            held,
        ],
    );
    a1["spec"]["reservations"] = json!([{ "gpu": "GPU-a1", "podUid": "ml-big-0", "quanta": 50 }]);
    a1["status"]["waiting"] = json!([{ "podUid": "ml-big-0", "namespace": "ml", "pod": "big-0", "container": "main",
        "quanta": 50, "since": ago(42) }]);
    let lease = |namespace: &str, name: &str, gib: i64, gpu_generation: i64, state: &str| {
        json!({ "namespace": namespace, "name": name, "gpu": "GPU-a0", "generation": 1_764_000_000_000_001_i64,
            "gpuGeneration": gpu_generation, "size": format!("{gib}Gi"), "state": state,
            "ownerUid": format!("{namespace}-serve-0"), "owner": "serve-0", "openers": 1 })
    };
    let mut unnamed = lease("shop", "embeddings", 28, 0, "Committed");
    unnamed["owner"] = json!("");
    a1["status"]["retained"] = json!([lease("ml", "weights", 12, 1, "Committed"), unnamed]);
    a1["status"]["retainedCount"] = json!(3);
    let mut draining = gpu("GPU-a2", 0, 79, &[]);
    for (field, value) in [
        ("state", json!("Draining")),
        ("capacity", json!(0)),
        ("free", json!(0)),
        ("largestFree", json!(0)),
        ("leaked", json!("2Gi")),
        (
            "health",
            json!({ "status": "Unhealthy", "reason": "Draining" }),
        ),
    ] {
        draining[field] = value;
    }
    let mut instance = gpu("MIG-b1", 0, 39, &[("ml-debug", 8), ("shop-web", 16)]);
    instance["model"] = json!("NVIDIA H100 80GB HBM3 MIG 3g.40gb");
    let mut b1 = gpu_node("gpu-b-1", vec![instance]);
    b1["status"]["notEnforced"] = json!([{ "podUid": "ml-debug", "namespace": "ml", "pod": "debug", "container": "main",
        "reason": "Privileged", "message": "the container has CAP_SYS_ADMIN over the host" }]);
    let mut lost = gpu("GPU-b2", 0, 79, &[]);
    for (field, value) in [
        ("state", json!("Lost")),
        ("capacity", json!(0)),
        ("free", json!(0)),
        ("largestFree", json!(0)),
        (
            "health",
            json!({ "status": "Unhealthy", "reason": "Xid79", "since": ago(720) }),
        ),
    ] {
        lost[field] = value;
    }
    let mut b2 = gpu_node("gpu-b-2", vec![lost]);
    b2["status"]["faults"] = json!([{ "id": "f1", "kind": "Gpu", "gpu": "GPU-b2", "gpuGeneration": 1, "xid": 79,
        "action": "RestartNode", "time": ago(720) }]);
    let mut search = budget("search", 32, 64, 40, 40);
    search["status"]["conditions"] = json!([
        condition("Ready", "False", "QuotaPending", ""),
        condition(
            "Enforced",
            "False",
            "QuotaPending",
            "gpu-memory-budget-limit was changed by hand"
        )
    ]);
    let names = ["gpu-a-1", "gpu-a-2", "gpu-b-1", "gpu-b-2"];
    let metrics = "bursar_container_memory_used_bytes{namespace=\"ml\",pod=\"notebook\",container=\"main\",account=\"GPU-a0\"} 8589934592\n\
        bursar_container_memory_peak_bytes{namespace=\"ml\",pod=\"notebook\",container=\"main\",account=\"GPU-a0\"} 8589934592\n\
        bursar_container_memory_quota_bytes{namespace=\"ml\",pod=\"notebook\",container=\"main\",account=\"GPU-a0\"} 8589934592\n\
        bursar_container_denied_total{namespace=\"ml\",pod=\"notebook\",container=\"main\",function=\"cuMemAlloc_v2\"} 212\n\
        bursar_container_generation{namespace=\"ml\",pod=\"notebook\",container=\"main\"} 1\n\
        bursar_container_memory_used_bytes{namespace=\"ml\",pod=\"serve-0\",container=\"main\",account=\"GPU-a0\"} 40909930496\n\
        bursar_container_memory_peak_bytes{namespace=\"ml\",pod=\"serve-0\",container=\"main\",account=\"GPU-a0\"} 42734723072\n\
        bursar_container_memory_charged_bytes{namespace=\"ml\",pod=\"serve-0\",container=\"main\",account=\"GPU-a0\",part=\"leased\"} 12884901888\n\
        bursar_container_generation{namespace=\"ml\",pod=\"serve-0\",container=\"main\"} 4\n\
        bursar_gpu_retained_leases{gpu=\"GPU-a0\"} 2\nbursar_gpu_retained_bytes{gpu=\"GPU-a0\"} 42949672960\n";
    Snapshot {
        now: NOW.parse().unwrap(),
        server_version: Some("v1.36.3".to_owned()),
        gpu_nodes: vec![
            parse(a1),
            parse(gpu_node("gpu-a-2", vec![draining])),
            parse(b1),
            parse(b2),
        ],
        pods: pods.into_iter().map(parse::<Pod>).collect(),
        budgets: vec![
            parse(budget("ml", 128, 160, 122, 0)),
            parse(search),
            parse(budget("shop", 16, 16, 16, 0)),
        ],
        nodes: names.iter().map(|name| parse(node(name))).collect(),
        own_pods: names
            .iter()
            .map(|name| parse(own_pod("agent", name)))
            .chain([parse(own_pod("operator", "cpu"))])
            .collect(),
        metrics: [("gpu-a-1".to_owned(), AgentMetrics::parse(metrics))].into(),
        events: vec![
            parse(event(
                "Pod",
                "serve-1",
                "ml-serve-1",
                "GpuContextPoisoned",
                "container main: CUDA error 700 poisoned the context of a process (generation 3): its program is executed again in the same process",
                3480,
            )),
            parse(event(
                "Pod",
                "big-0",
                "ml-big-0",
                "WaitingForGpuMemory",
                "waiting for 50 GiB on one GPU: largest free 39 GiB (GPU-a1)",
                42,
            )),
            parse(victim_event(
                "big-0",
                "GpuMemoryVictimEvicted",
                "search/crawl-2 is evicted from GPU-a1 of gpu-a-1 for this pod",
                "search/crawl-2",
                5,
            )),
        ],
        ..Snapshot::default()
    }
}

/// A snapshot of what a tenant of `ml` may read.
pub(crate) fn tenant(mut snapshot: Snapshot) -> Snapshot {
    use bursar_cli::snapshot::Kind;
    for kind in [
        Kind::GpuNodes,
        Kind::Nodes,
        Kind::OwnPods,
        Kind::AgentMetrics,
    ] {
        snapshot.unread.insert(kind, "forbidden".to_owned());
    }
    snapshot
        .unread
        .insert(Kind::Pods, "forbidden in other namespaces".to_owned());
    snapshot.gpu_nodes.clear();
    snapshot.nodes.clear();
    snapshot.own_pods.clear();
    snapshot.metrics.clear();
    snapshot.pods.retain(|pod| pod.metadata.namespace == "ml");
    snapshot
        .budgets
        .retain(|budget| budget.metadata.namespace.as_deref() == Some("ml"));
    snapshot
        .events
        .retain(|event: &Event| event.involved_object.kind != "Node");
    snapshot
}

/// Compares a text with a recorded one. `BURSAR_UPDATE=1` records it.
pub(crate) fn golden(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(format!("{name}.txt"));
    if std::env::var_os("BURSAR_UPDATE").is_some() {
        fs::write(&path, text).unwrap();
    }
    let recorded = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(text, recorded, "{name}: BURSAR_UPDATE=1 records it");
}
