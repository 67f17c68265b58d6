//! Measures the resident memory of a Pod as each type that a watch could parse it to (fact F20).
//!
//! The Pod is like that of a Deployment: two containers with environment, probes and mounts, and
//! the managed fields of three writers. Each type is measured in a process of its own, which would
//! otherwise use freed memory of another type again.
//!
//! `cargo bench -p bursar-e2e --bench pod_memory`

use std::hint::black_box;
use std::process::Command;

use anyhow::{Context as _, ensure};
use bursar_crds::Quantum;
use bursar_operator::cluster::facts::pod::PodSummary;
use bursar_operator::cluster::slim_pod::SlimPod;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Map, Value, json};

const PODS: usize = 2_000;
/// The variables of a container.
const VARIABLES: usize = 20;
const WHOLE: &str = "typed Pod";
const PRUNED: &str = "typed Pod without unused fields";
const SLIM: &str = "the operator's SlimPod";
const KEPT: &str = "what the operator keeps of it";

fn main() -> anyhow::Result<()> {
    // cargo passes `--bench`.
    if let Some(kind) = std::env::args().nth(1).filter(|word| word != "--bench") {
        println!("{}", measure(&kind)?);
        return Ok(());
    }
    let json = serde_json::to_vec(&pod())?.len();
    println!("a Pod of {:.1} KiB of JSON, {PODS} of each", kib(json));
    let mut sizes = Vec::new();
    for kind in [WHOLE, PRUNED, SLIM, KEPT] {
        let output = Command::new(std::env::current_exe()?).arg(kind).output()?;
        ensure!(output.status.success(), "{kind}: {output:?}");
        let bytes = String::from_utf8(output.stdout)?.trim().parse()?;
        println!("| {kind} | {:.1} KiB |", kib(bytes));
        sizes.push(bytes);
    }
    let falls = sizes.is_sorted_by(|larger, smaller| *larger > 2 * *smaller);
    ensure!(falls, "a type saves less than half of the one before it");
    Ok(())
}

/// Returns the resident bytes of a Pod as this type.
fn measure(kind: &str) -> anyhow::Result<usize> {
    let json = serde_json::to_vec(&pod())?;
    match kind {
        WHOLE => resident_each(|| serde_json::from_slice::<Pod>(&json)),
        PRUNED => resident_each(|| serde_json::from_slice(&json).map(pruned)),
        SLIM => resident_each(|| serde_json::from_slice::<SlimPod>(&json)),
        KEPT => resident_each(|| serde_json::from_slice(&json).map(|pod| kept(&pod))),
        _ => anyhow::bail!("no type {kind:?}"),
    }
}

fn resident_each<T>(parse: impl Fn() -> serde_json::Result<T>) -> anyhow::Result<usize> {
    drop(black_box(parse()?));
    let before = resident()?;
    let parsed = (0..PODS).map(|_| parse()).collect::<Result<Vec<T>, _>>()?;
    let after = resident()?;
    black_box(parsed);
    Ok(after.saturating_sub(before) / PODS)
}

/// Returns the resident bytes of this process (proc(5), `status`).
fn resident() -> anyhow::Result<usize> {
    let text = std::fs::read_to_string("/proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let amount = line.and_then(|line| line.trim().strip_suffix(" kB"));
    Ok(amount.context("status has VmRSS in kB")?.parse::<usize>()? << 10)
}

fn kib(bytes: usize) -> f64 {
    bytes as f64 / 1024.0
}

/// Returns what the operator's watch makes of a Pod that requests GPU memory.
fn kept(pod: &SlimPod) -> Box<PodSummary> {
    Box::new(PodSummary::of(pod, Quantum::Gib1).expect("the Pod has not ended"))
}

/// Clears what the operator does not read.
fn pruned(mut pod: Pod) -> Pod {
    pod.metadata.managed_fields = None;
    if let Some(spec) = &mut pod.spec {
        spec.volumes = None;
        for container in &mut spec.containers {
            container.env = None;
            container.volume_mounts = None;
            container.liveness_probe = None;
            container.readiness_probe = None;
        }
    }
    if let Some(status) = &mut pod.status {
        status.container_statuses = None;
    }
    pod
}

fn pod() -> Value {
    let since = "2026-01-01T00:00:00Z";
    let names = ["main", "proxy"];
    let conditions = [
        "PodReadyToStartContainers",
        "Initialized",
        "Ready",
        "ContainersReady",
        "PodScheduled",
    ]
    .map(|type_| json!({ "type": type_, "status": "True", "lastTransitionTime": since }));
    let spec = json!({
        "containers": names.map(container), "nodeName": "gpu-node-1", "priority": 0,
        "priorityClassName": "bursar-borrowed", "restartPolicy": "Always",
        "schedulerName": "default-scheduler", "serviceAccountName": "default",
        "terminationGracePeriodSeconds": 30,
        "tolerations": [{ "key": "node.kubernetes.io/not-ready", "operator": "Exists",
            "effect": "NoExecute", "tolerationSeconds": 300 }],
        "volumes": [
            { "name": "config", "configMap": { "name": "config", "defaultMode": 420 } },
            { "name": "token", "projected": { "defaultMode": 420, "sources": [
                { "serviceAccountToken": { "expirationSeconds": 3607, "path": "token" } },
                { "configMap": { "name": "kube-root-ca.crt",
                    "items": [{ "key": "ca.crt", "path": "ca.crt" }] } }] } },
        ],
    });
    let status = json!({
        "phase": "Running", "startTime": since, "podIP": "10.0.0.1", "hostIP": "10.1.0.1",
        "podIPs": [{ "ip": "10.0.0.1" }], "qosClass": "Burstable", "conditions": conditions,
        "containerStatuses": names.map(|name| json!({ "name": name, "ready": true,
            "started": true, "restartCount": 0, "image": "registry.example/team/model:1",
            "imageID": format!("registry.example/team/model@sha256:{}", "0123456789abcdef".repeat(4)),
            "containerID": format!("containerd://{}", "0123456789abcdef".repeat(4)),
            "state": { "running": { "startedAt": since } } })),
    });
    let labels = json!({ "app": "model", "team": "research", "pod-template-hash": "7d4b9c6f5d" });
    let managed = json!([
        managed(
            "kube-controller-manager",
            None,
            &json!({ "metadata": { "labels": labels }, "spec": spec })
        ),
        managed(
            "bursar-operator",
            None,
            &json!({ "metadata": { "labels": labels } })
        ),
        managed("kubelet", Some("status"), &json!({ "status": status })),
    ]);
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": "model-7d4b9c6f5d-x2x4k", "generateName": "model-7d4b9c6f5d-",
            "namespace": "research", "uid": "6f1b1f0e-0000-4000-8000-000000000001",
            "resourceVersion": "123456", "creationTimestamp": since, "labels": labels,
            "ownerReferences": [{ "apiVersion": "apps/v1", "kind": "ReplicaSet",
                "name": "model-7d4b9c6f5d", "uid": "6f1b1f0e-0000-4000-8000-000000000002",
                "controller": true, "blockOwnerDeletion": true }],
            "managedFields": managed,
        },
        "spec": spec, "status": status,
    })
}

fn container(name: &str) -> Value {
    let env: Vec<Value> = (0..VARIABLES)
        .map(|number| json!({ "name": format!("SETTING_{number}"), "value": "a value as long as they are" }))
        .collect();
    let probe = json!({ "httpGet": { "path": "/healthz", "port": 8080, "scheme": "HTTP" },
        "periodSeconds": 10, "timeoutSeconds": 1, "successThreshold": 1, "failureThreshold": 3 });
    let amounts = json!({ "bursar.dev/gpu-memory-gib": "16", "cpu": "4", "memory": "16Gi" });
    json!({
        "name": name, "image": "registry.example/team/model:1", "imagePullPolicy": "IfNotPresent",
        "args": ["serve", "--port=8080"], "env": env, "livenessProbe": probe,
        "readinessProbe": probe, "ports": [{ "containerPort": 8080, "protocol": "TCP" }],
        "resources": { "limits": amounts, "requests": amounts },
        "volumeMounts": [{ "name": "config", "mountPath": "/etc/model" },
            { "name": "token", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount" }],
    })
}

/// Returns the entry of a writer of these fields.
fn managed(manager: &str, subresource: Option<&str>, written: &Value) -> Value {
    let mut entry = json!({ "manager": manager, "operation": "Update", "apiVersion": "v1",
        "time": "2026-01-01T00:00:00Z", "fieldsType": "FieldsV1", "fieldsV1": fields(written) });
    if let Some(subresource) = subresource {
        entry["subresource"] = json!(subresource);
    }
    entry
}

/// Returns the field set of a value in the format of `FieldsV1`. Items of a list with a key are
/// listed by it, and other lists are one field.
fn fields(value: &Value) -> Value {
    let mut set = Map::new();
    match value {
        Value::Object(object) => {
            set.extend(
                object
                    .iter()
                    .map(|(name, value)| (format!("f:{name}"), fields(value))),
            );
        }
        Value::Array(items) => {
            for item in items {
                let keys = ["name", "type", "containerPort", "ip", "mountPath"];
                let key = keys.into_iter().find(|key| !item[*key].is_null());
                if let Some(key) = key {
                    let mut of_item = fields(item);
                    of_item["."] = json!({});
                    set.insert(format!("k:{}", json!({ key: item[key] })), of_item);
                }
            }
        }
        _ => {}
    }
    Value::Object(set)
}
