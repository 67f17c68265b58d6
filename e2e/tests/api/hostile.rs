//! Checks what the policies refuse to tenants and to Bursar's own accounts, beside those on
//! amounts.

use bursar_e2e::chart::NAMESPACE;
use http::{HeaderName, HeaderValue};
use kube::{Client, Config};
use libtest_mimic::Failed;
use serde_json::{Value, json};

use crate::isolated_scope::IsolatedScope;
use crate::server::{Server, acquire_permit};

const DEVICE: &str = "bursar.dev/gpu-memory-gib";
const NVIDIA: &str = "nvidia.com/gpu";
const DEVICE_CLASS: &str = "deviceclass.resource.kubernetes.io/gpu.nvidia.com";
/// The extra field that carries the node of an account's token.
const NODE_CLAIM: &str = "impersonate-extra-authentication.kubernetes.io%2fnode-name";

pub(crate) async fn hostile(server: &Server) -> Result<String, Failed> {
    let _permit = acquire_permit().await;
    let at = IsolatedScope::set_up(server, "hostile").await?;
    let pods = unmanaged(server, &at).await?;
    let later = ephemeral(&at).await?;
    let claims = device_claims(&at).await?;
    labels(server, &at).await?;
    let operators = operators_writes(server, &at).await?;
    let events = agents_events(server, &at).await?;
    let nodes = agents_gpu_node(server, &at).await?;
    Ok(format!(
        "{pods} pods, {later} added containers, {claims} claims, {operators} writes of the operator, {events} Events and {nodes} writes of a GpuNode let in or refused"
    ))
}

/// Fails unless the API server has refused with these words, or has accepted if there are none.
pub(crate) fn check(what: &str, result: kube::Result<Value>, words: &str) -> Result<(), Failed> {
    let refusal = match result {
        Ok(_) => String::new(),
        Err(kube::Error::Api(status)) => status.message.clone(),
        Err(other) => return Err(other.into()),
    };
    match refusal.contains(words) && refusal.is_empty() == words.is_empty() {
        true => Ok(()),
        false => Err(format!("{what}: not {words:?} but {refusal:?}").into()),
    }
}

/// Makes a pod with these limits and further fields of its spec.
fn pod(name: &str, limits: Value, more: Value) -> Value {
    let mut pod = json!({
        "metadata": { "name": name },
        "spec": { "containers": [{ "name": "c", "image": "i", "resources": { "limits": limits } }] },
    });
    for (field, value) in more.as_object().into_iter().flatten() {
        pod["spec"][field] = value.clone();
    }
    pod
}

fn sees(value: &str) -> Value {
    json!([{ "name": "NVIDIA_VISIBLE_DEVICES", "value": value }])
}

fn host_path(path: &str) -> Value {
    json!({ "volumes": [{ "name": "v", "hostPath": { "path": path } }] })
}

/// Checks pods that would use GPUs without being counted.
async fn unmanaged(server: &Server, at: &IsolatedScope) -> Result<usize, Failed> {
    let container = |env: Value| json!({ "name": "x", "image": "i", "env": env });
    let with = |env: Value| json!({ "containers": [container(env)] });
    let variable = "sets NVIDIA_VISIBLE_DEVICES";
    let class = "RuntimeClass nvidia hands out whole GPUs";
    let device = "a hostPath volume is of NVIDIA's device nodes";
    let listing = "mounts a volume at nvidia-container-devices";
    let mounted = |path: &str| {
        let container = json!({ "name": "c", "image": "i", "volumeMounts": [{ "name": "v", "mountPath": path }] });
        json!({ "containers": [container], "volumes": [{ "name": "v", "emptyDir": {} }] })
    };
    let from_elsewhere = json!([{ "name": "NVIDIA_VISIBLE_DEVICES",
        "valueFrom": { "fieldRef": { "fieldPath": "metadata.name" } } }]);
    let classed = json!({ "runtimeClassName": "nvidia" });
    let counted = |node: Option<&str>, limit: &str| {
        let mut pod = pod("row", json!({ NVIDIA: limit }), classed.clone());
        pod["spec"]["containers"][0]["env"] = sees("all");
        pod["spec"]["nodeName"] = json!(node);
        pod
    };
    let row = |more: Value| pod("row", json!({}), more);
    for name in ["nvidia", "other"] {
        let class = json!({ "metadata": { "name": name }, "handler": "runc" });
        let path = "/apis/node.k8s.io/v1/runtimeclasses";
        at.create(path, class).await?;
    }
    let rows = [
        (row(with(sees("all"))), variable),
        (row(with(sees("0"))), variable),
        (row(with(from_elsewhere)), variable),
        (row(with(sees("void"))), ""),
        (row(with(sees("none"))), ""),
        (row(with(sees(""))), ""),
        (
            row(json!({ "initContainers": [container(sees("all"))] })),
            variable,
        ),
        (row(classed.clone()), class),
        (row(json!({ "runtimeClassName": "other" })), ""),
        (pod("row", json!({ DEVICE: "1" }), classed.clone()), class),
        (row(host_path("/dev/nvidia0")), device),
        (row(host_path("//dev/./nvidiactl")), device),
        (row(host_path("/dev/nvidia-caps")), device),
        (row(host_path("/dev/char/195:0")), device),
        (
            row(mounted("/var/run/nvidia-container-devices/all")),
            listing,
        ),
        (
            row(mounted("/run/x/../nvidia-container-devices/0")),
            listing,
        ),
        (row(mounted("/data/nvidia-container-devices.txt")), ""),
        (
            pod("row", json!({ DEVICE_CLASS: "1" }), json!({})),
            "which hands out whole GPUs",
        ),
        // A mixed cluster has such pods legitimately.
        (row(host_path("/dev")), ""),
        (row(host_path("/dev/disk")), ""),
        (row(host_path("/data/dev/nvidia0")), ""),
        (pod("row", json!({ NVIDIA: "1" }), json!({})), ""),
        (counted(None, "1"), ""),
        // Such a pod would bypass the scheduler, or request nothing.
        (counted(Some(&at.name), "1"), variable),
        (counted(None, "0"), variable),
    ];
    let count = rows.len();
    let path = format!("{}?dryRun=All", at.pods_path());
    for (pod, words) in rows {
        let what = pod.to_string();
        check(&what, at.create(&path, pod).await, words)?;
    }
    let exempt = at.in_namespace("gpu-operator");
    let namespace = json!({ "metadata": { "name": exempt.name } });
    at.create("/api/v1/namespaces", namespace).await?;
    let account = json!({ "metadata": { "name": "default" } });
    let accounts = format!("{}/serviceaccounts", exempt.namespace_path());
    // The controller manager may have created the account already.
    let _ = at.create(&accounts, account).await;
    let path = format!("{}?dryRun=All", exempt.pods_path());
    check("exempt", at.create(&path, row(classed)).await, "")?;
    let off = server
        .control_plane
        .chart_without_workloads(&["--set=policies.refuseUnmanagedGpus.enabled=false"]);
    let off = off.await?;
    let mut named = off.iter().map(|object| &object["metadata"]["name"]);
    assert!(!named.any(|name| name == "bursar-unmanaged-gpus"));
    Ok(count + 1)
}

/// Checks containers that are added to existing pods.
async fn ephemeral(at: &IsolatedScope) -> Result<usize, Failed> {
    let requesting = pod(
        "asking",
        json!({ DEVICE: "1" }),
        json!({ "volumes": [{ "name": "v", "emptyDir": {} }] }),
    );
    at.create(&at.pods_path(), requesting).await?;
    at.create(&at.pods_path(), pod("quiet", json!({}), json!({})))
        .await?;
    let variable = "sets NVIDIA_VISIBLE_DEVICES";
    let over = "a volume is mounted at /opt/bursar/lib";
    let rows = [
        ("asking", sees("all"), "/data", variable),
        ("asking", json!([]), "/opt/bursar/lib", over),
        ("quiet", sees("all"), "", variable),
        ("quiet", sees("void"), "", ""),
        ("asking", json!([]), "/data", ""),
    ];
    let count = rows.len();
    for (pod, env, mount, words) in rows {
        let mounts = match mount {
            "" => json!([]),
            path => json!([{ "name": "v", "mountPath": path }]),
        };
        let added = json!({ "name": "debug", "image": "i", "env": env, "volumeMounts": mounts });
        let patch = json!({ "spec": { "ephemeralContainers": [added] } });
        let path = format!("{}/ephemeralcontainers", at.pod_path(pod));
        check(&path, at.try_merge(&path, patch).await, words)?;
    }
    Ok(count)
}

/// Checks claims of devices, and their templates, by DeviceClass.
async fn device_claims(at: &IsolatedScope) -> Result<usize, Failed> {
    let exactly = |class: &str| json!({ "name": "gpu", "exactly": { "deviceClassName": class } });
    let alternative = |class: &str| json!({ "name": "gpu", "firstAvailable": [{ "name": "a", "deviceClassName": class }] });
    let whole = "DeviceClass gpu.nvidia.com hands out whole GPUs";
    let rows = [
        (exactly("gpu.nvidia.com"), whole),
        (alternative("gpu.nvidia.com"), whole),
        (exactly("nic.example.com"), ""),
    ];
    let count = rows.len() * 2;
    let path = |kind: &str| {
        let name = &at.name;
        format!("/apis/resource.k8s.io/v1/namespaces/{name}/{kind}?dryRun=All")
    };
    for (request, words) in rows {
        let spec = json!({ "devices": { "requests": [request] } });
        let claim = json!({ "metadata": { "name": "claim" }, "spec": spec });
        let template = json!({ "metadata": { "name": "claim" }, "spec": { "spec": spec } });
        for (kind, object) in [
            ("resourceclaims", claim),
            ("resourceclaimtemplates", template),
        ] {
            let what = format!("{kind} {object}");
            check(&what, at.create(&path(kind), object).await, words)?;
        }
    }
    Ok(count)
}

/// Checks the label of an enforced budget on new and existing namespaces.
async fn labels(server: &Server, at: &IsolatedScope) -> Result<(), Failed> {
    let path = "/api/v1/namespaces?dryRun=All";
    let labelled = json!({ "metadata": { "name": "labelled", "labels": { "bursar.dev/budget": "enforced" } } });
    let words = "the label bursar.dev/budget is set by Bursar's operator";
    check("labelled", at.create(path, labelled.clone()).await, words)?;
    let plain = json!({ "metadata": { "name": "labelled", "labels": { "team": "a" } } });
    check("plain", at.create(path, plain).await, "")?;
    let operator = at.with_client(Client::try_from(server.control_plane.operator_config())?);
    let label = |value: Value| json!({ "metadata": { "labels": { "bursar.dev/budget": value } } });
    let namespace = at.namespace_path();
    operator
        .try_merge(&namespace, label(json!("enforced")))
        .await?;
    let keep = "keep bursar.dev/budget=enforced";
    check(
        "removed",
        at.try_merge(&namespace, label(Value::Null)).await,
        keep,
    )?;
    let status = format!("{namespace}/status");
    check(
        "removed",
        at.try_merge(&status, label(Value::Null)).await,
        keep,
    )?;
    let other = json!({ "metadata": { "labels": { "team": "a" } } });
    check("another label", at.try_merge(&namespace, other).await, "")?;
    operator.try_merge(&namespace, label(Value::Null)).await?;
    let chart = server
        .control_plane
        .chart_without_workloads(&["--set=policies.labelRestorers={restorer}"]);
    let chart = chart.await?;
    let restores = |object: &&Value| object.to_string().contains("in ['restorer']");
    assert_eq!(chart.iter().filter(restores).count(), 1);
    Ok(())
}

pub(crate) fn as_account(config: Config, part: &str, node: Option<&str>) -> Result<Client, Failed> {
    let mut config = config;
    let account = format!("system:serviceaccount:{NAMESPACE}:bursar-{part}");
    config.auth_info.impersonate = Some(account);
    if let Some(node) = node {
        let name = HeaderName::from_static(NODE_CLAIM);
        config.headers.push((name, HeaderValue::from_str(node)?));
    }
    Ok(Client::try_from(config)?)
}

/// Checks the operator's writes to pods and quotas, allowed and refused.
async fn operators_writes(server: &Server, at: &IsolatedScope) -> Result<usize, Failed> {
    let operator = at.with_client(Client::try_from(server.control_plane.operator_config())?);
    let dry = |path: String| format!("{path}?dryRun=All");
    let status = |pod: &str| dry(format!("{}/status", at.pod_path(pod)));
    let nominates = json!({ "status": { "nominatedNodeName": at.name } });
    let fails = json!({ "status": { "phase": "Failed" } });
    let ready = json!({ "status": { "conditions": [{ "type": "Ready", "status": "True" }] } });
    let of_status = "the operator changes nominatedNodeName";
    let patches = [
        ("asking", &nominates, ""),
        ("asking", &fails, of_status),
        ("asking", &ready, of_status),
        ("quiet", &nominates, of_status),
    ];
    for (pod, patch, words) in patches {
        let what = format!("{pod}: {patch}");
        check(
            &what,
            operator.try_merge(&status(pod), patch.clone()).await,
            words,
        )?;
    }
    let quotas = dry(format!("{}/resourcequotas", at.namespace_path()));
    for (name, words) in [
        ("gpu-memory-budget-limit", ""),
        ("others", "the operator writes gpu-memory-budget-"),
    ] {
        let hard = json!({ "requests.bursar.dev/gpu-memory-gib": "0" });
        let quota = json!({ "metadata": { "name": name }, "spec": { "hard": hard } });
        check(name, operator.create(&quotas, quota).await, words)?;
    }
    let words = "the operator deletes those that ask for GPU memory";
    for (pod, words) in [("asking", ""), ("quiet", words)] {
        let deleted = operator.try_delete(&dry(at.pod_path(pod))).await;
        check(pod, deleted, words)?;
    }
    Ok(patches.len() + 4)
}

/// Checks Events of an agent on the scope's node.
async fn agents_events(server: &Server, at: &IsolatedScope) -> Result<usize, Failed> {
    let node_name = at.name.as_str();
    let agent = at.with_client(as_account(
        server.control_plane.operator_config(),
        "agent",
        Some(node_name),
    )?);
    let unbound = at.with_client(as_account(
        server.control_plane.operator_config(),
        "agent",
        None,
    )?);
    let event = |controller: &str, instance: &str, kind: &str, about: &str| {
        let namespace = (kind == "Pod").then_some(node_name);
        json!({
            "metadata": { "name": "e", "labels": { "bursar.dev/writer": "agent" } }, "eventTime": "2026-01-01T00:00:00.000000Z", "type": "Normal",
            "reason": "R", "action": "A", "note": "n",
            "reportingController": controller, "reportingInstance": instance,
            "regarding": { "apiVersion": "v1", "kind": kind, "name": about, "namespace": namespace },
        })
    };
    let local_pod = pod("here", json!({}), json!({ "nodeName": node_name }));
    at.create(&at.pods_path(), local_pod).await?;
    let own_controller = "bursar-agent";
    let written = "an agent writes Events of bursar-agent on its own node";
    let own = "an agent's Events are about its own Node and GpuNode, and about pods in the Event's namespace";
    let mut of_another_namespace = event(own_controller, node_name, "Node", "here");
    of_another_namespace["regarding"] =
        json!({ "apiVersion": "v1", "kind": "Pod", "name": "here", "namespace": node_name });
    of_another_namespace["metadata"]["namespace"] = json!("default");
    let rows = [
        (&agent, event(own_controller, node_name, "Pod", "here"), ""),
        (&agent, event("kubelet", node_name, "Pod", "here"), written),
        (
            &agent,
            event(own_controller, "another", "Pod", "here"),
            written,
        ),
        (
            &unbound,
            event(own_controller, node_name, "Node", node_name),
            "its token is of no node",
        ),
        (
            &agent,
            event(own_controller, node_name, "Node", node_name),
            "",
        ),
        (
            &agent,
            event(own_controller, node_name, "Node", "another"),
            own,
        ),
        (
            &agent,
            event(own_controller, node_name, "Deployment", "here"),
            own,
        ),
        (&agent, event(own_controller, node_name, "pod", "here"), own),
        (&agent, of_another_namespace, own),
    ];
    let count = rows.len();
    for (who, event, words) in rows {
        let what = event.to_string();
        let own = event["metadata"]["namespace"].as_str();
        let about = event["regarding"]["namespace"].as_str();
        let namespace = own.or(about).unwrap_or("default");
        let path = format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events?dryRun=All");
        check(&what, who.create(&path, event).await, words)?;
    }
    Ok(count)
}

/// Checks what an agent may write of the metadata of its GpuNode.
async fn agents_gpu_node(server: &Server, at: &IsolatedScope) -> Result<usize, Failed> {
    let config = server.control_plane.operator_config();
    let agent = at.with_client(as_account(config, "agent", Some(&at.name))?);
    let path = format!("/apis/bursar.dev/v1alpha1/gpunodes/{}?dryRun=All", at.name);
    let owner = |kind: &str, name: &str, controller: bool| json!({ "apiVersion": "v1", "kind": kind, "name": name, "uid": "u", "controller": controller });
    let owned = |owner: Value| json!({ "ownerReferences": [owner] });
    let metadata = "an agent writes no labels, annotations or finalizers";
    let own = "of a GpuNode's owners, an agent writes its own Node";
    let rows = [
        (json!({ "finalizers": ["bursar.dev/stays"] }), metadata),
        (json!({ "labels": { "a": "b" } }), metadata),
        (json!({ "annotations": { "a": "b" } }), metadata),
        (owned(owner("Node", "another", false)), own),
        (owned(owner("ConfigMap", &at.name, false)), own),
        (owned(owner("Node", &at.name, true)), own),
        (owned(owner("Node", &at.name, false)), ""),
    ];
    let count = rows.len();
    for (metadata, words) in rows {
        let what = metadata.to_string();
        let patch = json!({ "metadata": metadata });
        check(&what, agent.try_merge(&path, patch).await, words)?;
    }
    Ok(count)
}
