//! Checks where Bursar's pods run, and how they are kept running.

use serde_json::{Value, json};

use crate::render::{arguments, pod_spec, render};

/// The alternatives of a pod's node affinity.
fn terms(spec: &Value) -> &Vec<Value> {
    let affinity = &spec["affinity"]["nodeAffinity"];
    let required = &affinity["requiredDuringSchedulingIgnoredDuringExecution"];
    required["nodeSelectorTerms"].as_array().unwrap()
}

#[test]
fn agents_run_on_gpu_nodes_only_by_default() {
    let objects = render(&[]);
    for workload in [objects.agent(), objects.fdstore(), objects.relay()] {
        let terms = terms(pod_spec(workload));
        let optout = json!({ "key": "bursar.dev/agent", "operator": "NotIn", "values": ["false"] });
        assert!(
            terms
                .iter()
                .all(|term| term["matchExpressions"][1] == optout),
            "{terms:?}"
        );
        let by = |expression: Value| {
            terms
                .iter()
                .any(|term| term["matchExpressions"][0] == expression)
        };
        assert!(by(
            json!({ "key": "bursar.dev/agent", "operator": "In", "values": ["true"] })
        ));
        assert!(by(
            json!({ "key": "nvidia.com/gpu.present", "operator": "In", "values": ["true"] })
        ));
        assert!(by(
            json!({ "key": "cloud.google.com/gke-accelerator", "operator": "Exists" })
        ));
    }
    let everywhere = render(&["agent.gpuNodeLabels=[]"]);
    let kept_out = json!({ "key": "bursar.dev/agent", "operator": "NotIn", "values": ["false"] });
    let term = json!({ "matchExpressions": [kept_out] });
    assert_eq!(
        pod_spec(everywhere.agent())["affinity"]["nodeAffinity"],
        json!({ "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": [term] } })
    );
}

#[test]
fn own_affinity_replaces_the_default() {
    let own = json!({ "podAntiAffinity": {} });
    let objects = render(&[&format!("agent.affinity={own}")]);
    assert_eq!(pod_spec(objects.agent())["affinity"], own);
    assert_eq!(pod_spec(objects.fdstore())["affinity"], own);
    assert_eq!(pod_spec(objects.relay())["affinity"], own);
}

#[test]
fn operator_has_two_replicas_and_a_lease() {
    let objects = render(&[]);
    let operator = objects.operator();
    assert_eq!(operator["spec"]["replicas"], 2);
    let arguments = arguments(operator);
    assert!(
        arguments.contains(&"--lease=bursar-system/bursar-operator"),
        "{arguments:?}"
    );
    assert!(
        arguments.contains(&"--identity=$(POD_NAME)"),
        "{arguments:?}"
    );
    let rules = &objects.get("Role", "bursar-operator")["rules"];
    assert_eq!(rules[0]["verbs"], json!(["create"]));
    assert_eq!(rules[1]["resourceNames"], json!(["bursar-operator"]));
    assert_eq!(rules[1]["verbs"], json!(["get", "update"]));
    let budget = objects.get("PodDisruptionBudget", "bursar-operator");
    assert_eq!(budget["spec"]["maxUnavailable"], 1);
    let selector = &operator["spec"]["selector"];
    assert_eq!(&budget["spec"]["selector"], selector);
    let spread = &pod_spec(operator)["topologySpreadConstraints"][0];
    assert_eq!(spread["topologyKey"], "kubernetes.io/hostname");
    assert_eq!(&spread["labelSelector"], selector);
    assert_eq!(
        operator["spec"]["strategy"],
        json!({ "type": "RollingUpdate" }),
        "a new replica waits for the Lease"
    );
    let alone = render(&["operator.replicas=1"]);
    assert_eq!(
        alone.operator()["spec"]["strategy"],
        json!({ "type": "RollingUpdate", "rollingUpdate": { "maxSurge": 0, "maxUnavailable": 1 } }),
        "a server-side apply cannot change the type"
    );
    assert!(alone.find("Role", "bursar-operator").is_none());
    assert_eq!(alone.of_kind("PodDisruptionBudget").count(), 0);
}

#[test]
fn critical_pods_quota_covers_both_priorities() {
    let objects = render(&[]);
    let quota = objects.get("ResourceQuota", "bursar-critical-pods");
    let classes = &quota["spec"]["scopeSelector"]["matchExpressions"][0]["values"];
    let besides = [objects.fdstore(), objects.relay()];
    for workload in [objects.agent(), objects.operator()]
        .into_iter()
        .chain(besides)
    {
        let class = &pod_spec(workload)["priorityClassName"];
        assert!(classes.as_array().unwrap().contains(class), "{class}");
    }
    assert_eq!(
        pod_spec(objects.operator())["priorityClassName"],
        "system-cluster-critical"
    );
}

#[test]
fn agents_priority_class_is_that_of_relay_and_fd_store_too() {
    let objects = render(&[r#"agent.priorityClassName="mine""#]);
    for workload in [objects.agent(), objects.relay(), objects.fdstore()] {
        assert_eq!(pod_spec(workload)["priorityClassName"], "mine");
    }
}

#[test]
fn agents_are_updated_as_chosen_and_never_doubled() {
    let strategy = |values: &[&str]| render(values).agent()["spec"]["updateStrategy"].clone();
    let rolling = json!({ "type": "RollingUpdate", "rollingUpdate": { "maxSurge": 0, "maxUnavailable": "10%" } });
    assert_eq!(strategy(&[]), rolling);
    assert_eq!(
        strategy(&["agent.maxUnavailable=3"])["rollingUpdate"]["maxUnavailable"],
        3
    );
    assert_eq!(
        strategy(&[r#"agent.updateStrategy="OnDelete""#]),
        json!({ "type": "OnDelete" })
    );
}

#[test]
fn probes_leave_time_to_start_and_never_end_fd_store_or_relay() {
    let objects = render(&[]);
    let container = |workload| &pod_spec(workload)["containers"][0];
    let agent = container(objects.agent());
    assert_eq!(agent["startupProbe"]["failureThreshold"], 180);
    assert_eq!(agent["livenessProbe"]["failureThreshold"], 6);
    for beside in [container(objects.fdstore()), container(objects.relay())] {
        assert!(beside["livenessProbe"].is_null() && beside["startupProbe"].is_null());
    }
}
