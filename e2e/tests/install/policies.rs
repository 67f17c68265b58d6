//! Checks rights, admission policies, network policies and security contexts.

use serde_json::{Value, json};

use crate::render::{arguments, pod_spec, render, try_render};

#[test]
fn rules_on_other_pods_warn_until_an_admin_lets_them_deny() {
    let deny_nothing = |values: &[&str]| {
        let objects = render(values);
        let bindings = objects.of_kind("ValidatingAdmissionPolicyBinding");
        let warning = bindings.filter(|binding| {
            let actions = &binding["spec"]["validationActions"];
            assert!([json!(["Warn", "Audit"]), json!(["Warn"]), json!(["Deny"])].contains(actions));
            *actions != json!(["Deny"])
        });
        let names = warning.map(|binding| binding["metadata"]["name"].as_str().unwrap());
        let mut names: Vec<_> = names.map(str::to_owned).collect();
        names.sort_unstable();
        names
    };
    let others = ["bursar-unmanaged-gpus", "bursar-unmanaged-gpus-claims"];
    assert_eq!(
        deny_nothing(&[]),
        [&["bursar-borrowed"][..], &others].concat()
    );
    let refused = r#"policies.refuseUnmanagedGpus.validationActions=["Deny"]"#;
    assert_eq!(deny_nothing(&[refused]), ["bursar-borrowed"]);
    let own = ["bursar-borrowed", "bursar-per-container", "bursar-pods"];
    let warned = r#"policies.validationActions=["Warn","Audit"]"#;
    assert_eq!(deny_nothing(&[warned]), [&own[..], &others].concat());
}

#[test]
fn mutating_policies_follow_the_cluster_or_the_value() {
    let count = |value: &str| {
        let value = format!("policies.mutatingAdmissionPolicies={value}");
        render(&[&value]).of_kind("MutatingAdmissionPolicy").count()
    };
    assert_eq!(
        [count(r#""auto""#), count("true"), count("false")],
        [2, 2, 0]
    );
}

#[test]
fn network_policies_limit_metrics_and_the_way_out() {
    let by_default = render(&[]);
    assert_eq!(by_default.of_kind("NetworkPolicy").count(), 1);
    let ingress = &by_default.get("NetworkPolicy", "bursar-metrics")["spec"]["ingress"][0];
    assert_eq!(ingress["ports"], json!([{ "port": "metrics" }]));
    let from = &ingress["from"][0]["namespaceSelector"]["matchExpressions"];
    assert_eq!(from[0]["key"], "kubernetes.io/metadata.name");
    assert!(
        from[0]["values"]
            .as_array()
            .unwrap()
            .contains(&json!("openshift-monitoring"))
    );
    assert_eq!(ingress["from"].as_array().unwrap().len(), 1);
    let nobody = render(&["networkPolicy.monitoringNamespaces=[]"]);
    let nobody = nobody.get("NetworkPolicy", "bursar-metrics");
    assert!(
        nobody["spec"]["ingress"].is_null(),
        "an empty list would admit everybody"
    );
    let peer = json!({ "ipBlock": { "cidr": "10.0.0.10/32" } });
    let opened = render(&[&format!("networkPolicy.metricsPeers=[{peer}]")]);
    let policy = opened.get("NetworkPolicy", "bursar-metrics");
    assert_eq!(policy["spec"]["ingress"][0]["from"][1], peer);
    let limited = render(&["networkPolicy.apiServerPorts=[6443]"]);
    let egress = &limited.get("NetworkPolicy", "bursar-api-server")["spec"];
    assert_eq!(
        egress["egress"],
        json!([{ "ports": [{ "protocol": "TCP", "port": 6443 }] }])
    );
    let closed = &limited.get("NetworkPolicy", "bursar-no-network")["spec"];
    assert_eq!(
        closed["podSelector"]["matchExpressions"][0]["values"],
        json!(["fdstore", "relay"])
    );
    assert_eq!(closed["policyTypes"], json!(["Ingress", "Egress"]));
    assert!(closed["ingress"].is_null() && closed["egress"].is_null());
    assert_eq!(
        render(&["networkPolicy.enabled=false"])
            .of_kind("NetworkPolicy")
            .count(),
        0
    );
}

#[test]
fn namespace_roles_read_budgets_and_nothing_of_others() {
    let objects = render(&[]);
    let role = |name: &str| objects.get("ClusterRole", name);
    let aggregates = |role: &Value| {
        let labels = role["metadata"]["labels"].as_object().unwrap();
        labels
            .keys()
            .filter(|key| key.contains("aggregate-to-"))
            .count()
    };
    let view = role("bursar-budget-view");
    assert_eq!(aggregates(view), 3);
    assert_eq!(view["rules"][0]["resources"], json!(["gpumemorybudgets"]));
    assert_eq!(view["rules"][0]["verbs"], json!(["get", "list", "watch"]));
    assert_eq!(aggregates(role("bursar-budget-edit")), 0);
    assert_eq!(aggregates(role("bursar-node-view")), 0);
    assert_eq!(
        role("bursar-node-view")["rules"][0]["resources"],
        json!(["gpunodes", "gpunamespaces"])
    );
    let not_aggregated = render(&["roles.aggregateToView=false"]);
    assert_eq!(
        aggregates(not_aggregated.get("ClusterRole", "bursar-budget-view")),
        0
    );
}

#[test]
fn openshift_gets_its_binding_and_no_fixed_user() {
    let objects = render(&["openshift.enabled=true"]);
    let binding = objects.get("RoleBinding", "bursar-privileged");
    assert_eq!(
        binding["roleRef"]["name"],
        "system:openshift:scc:privileged"
    );
    assert_eq!(binding["subjects"][0]["name"], "bursar-agent");
    for spec in [
        pod_spec(objects.operator()),
        &objects.get("Pod", "bursar-test-quota")["spec"],
    ] {
        assert!(spec["securityContext"]["runAsUser"].is_null());
        assert_eq!(spec["securityContext"]["runAsNonRoot"], true);
    }
    let fdstore = pod_spec(objects.fdstore());
    assert_eq!(fdstore["serviceAccountName"], "bursar-agent");
    assert_eq!(fdstore["automountServiceAccountToken"], false);
    assert_eq!(
        fdstore["containers"][0]["securityContext"]["seLinuxOptions"]["type"],
        "spc_t"
    );
    assert!(
        render(&[])
            .find("RoleBinding", "bursar-privileged")
            .is_none()
    );
}

/// The fields that the Pod Security level `restricted` demands of every container.
#[test]
fn pods_but_agent_and_fd_store_are_restricted() {
    let objects = render(&[]);
    for spec in [
        pod_spec(objects.operator()),
        &objects.get("Pod", "bursar-test-quota")["spec"],
    ] {
        assert_eq!(spec["securityContext"]["runAsNonRoot"], true);
        assert_eq!(
            spec["securityContext"]["seccompProfile"]["type"],
            "RuntimeDefault"
        );
        let context = &spec["containers"][0]["securityContext"];
        assert_eq!(context["allowPrivilegeEscalation"], false);
        assert_eq!(context["capabilities"], json!({ "drop": ["ALL"] }));
        assert!(spec["volumes"].is_null() && spec["hostPID"].is_null());
    }
    let fdstore = &pod_spec(objects.fdstore())["containers"][0]["securityContext"];
    assert_eq!(fdstore["runAsNonRoot"], false);
    assert_eq!(fdstore["allowPrivilegeEscalation"], false);
}

#[test]
fn namespace_default_is_refused_with_a_sentence() {
    let message = try_render("bursar", "default", &[]).err().unwrap();
    assert!(
        message.contains("add --namespace bursar-system --create-namespace"),
        "{message}"
    );
}

#[test]
fn test_pod_requests_one_quantum_and_checks_its_size() {
    for (values, resource, bytes) in [
        (&[][..], "bursar.dev/gpu-memory-gib", "--bytes=1073741824"),
        (
            &[r#"gpuMemory.quantum="256Mi""#][..],
            "bursar.dev/gpu-memory-256mib",
            "--bytes=268435456",
        ),
    ] {
        let objects = render(values);
        let pod = objects.get("Pod", "bursar-test-quota");
        assert_eq!(pod["metadata"]["annotations"]["helm.sh/hook"], "test");
        let container = &pod["spec"]["containers"][0];
        assert_eq!(container["resources"]["limits"][resource], 1);
        let command = json!(["/usr/local/bin/bursar-provisioner", "check-quota", bytes]);
        assert_eq!(container["command"], command);
        assert!(arguments(objects.operator()).len() > 5);
    }
}
