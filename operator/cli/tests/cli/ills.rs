//! Plants ills in a healthy cluster, and checks that `doctor` finds each with a remedy.

use bursar_cli::doctor::{Finding, Level, examine, preflight, render, worst};
use bursar_cli::objects::Node;
use bursar_cli::snapshot::{Kind, Snapshot, Unreadable};
use bursar_cli::table::Terminal;
use serde_json::{Value, json};

use crate::fixtures::{
    NOW, ago, budget, cluster, condition, golden, gpu, gpu_node, node, own_pod, parse, tenant,
};

fn daemon_set(component: &str) -> Value {
    json!({ "metadata": { "name": format!("bursar-{component}"), "namespace": "bursar-system", "labels": {
                "app.kubernetes.io/component": component, "app.kubernetes.io/version": env!("CARGO_PKG_VERSION") } },
            "status": { "desiredNumberScheduled": 1, "currentNumberScheduled": 1, "updatedNumberScheduled": 1, "numberReady": 1 } })
}

fn healthy() -> Snapshot {
    let named = |name: &str| {
        parse(
            json!({ "metadata": { "name": name, "labels": { "kubernetes.io/metadata.name": name } } }),
        )
    };
    Snapshot {
        now: NOW.parse().unwrap(),
        server_version: Some("v1.36.3".to_owned()),
        gpu_nodes: vec![parse(gpu_node("n", vec![gpu("GPU-1", 0, 79, &[])]))],
        nodes: vec![parse(node("n"))],
        own_pods: vec![
            parse(own_pod("agent", "n")),
            parse(own_pod("operator", "n")),
        ],
        daemon_sets: vec![parse(daemon_set("agent")), parse(daemon_set("fdstore"))],
        namespaces: vec![named("bursar-system"), named("monitoring")],
        mutating_policies: vec![named("bursar-steering")],
        budgets: vec![parse(budget("ml", 64, 64, 8, 0))],
        pod_monitors: vec![
            json!({ "metadata": { "name": "bursar" }, "spec": { "selector": { "matchLabels": { "app.kubernetes.io/name": "bursar" } } } }),
        ],
        network_policies: vec![
            json!({ "spec": { "policyTypes": ["Ingress"], "ingress": [{ "from": [{ "namespaceSelector": { "matchExpressions": [
                { "key": "kubernetes.io/metadata.name", "operator": "In", "values": ["observability", "monitoring"] } ] } }] }] } }),
        ],
        leases: vec![parse(
            json!({ "metadata": { "name": "n" }, "spec": { "renewTime": ago(5) } }),
        )],
        ..Snapshot::default()
    }
}

fn with(change: impl FnOnce(&mut Snapshot)) -> Vec<Finding> {
    let mut snapshot = healthy();
    change(&mut snapshot);
    examine(&snapshot)
}

fn finds(findings: &[Finding], check: &str, level: Level) {
    let found = findings
        .iter()
        .find(|finding| finding.check == check && finding.level == level);
    let found = found.unwrap_or_else(|| panic!("{check} is not in {findings:#?}"));
    assert!(
        found
            .remedy
            .as_ref()
            .is_some_and(|remedy| !remedy.is_empty()),
        "{found:?}"
    );
    let others = findings.iter().filter(|finding| finding.check != check);
    for other in others {
        assert!(other.level < Level::Warn, "besides {check}: {other:?}");
    }
}

fn status(change: impl FnOnce(&mut Value)) -> Vec<Finding> {
    let mut changed = gpu_node("n", vec![gpu("GPU-1", 0, 79, &[])]);
    change(&mut changed["status"]);
    with(|snapshot| snapshot.gpu_nodes = vec![parse(changed)])
}

fn budget_condition(type_: &str, status: &str, reason: &str) -> Vec<Finding> {
    let mut changed = budget("ml", 64, 64, 8, 0);
    changed["status"]["conditions"] =
        json!([condition(type_, status, reason, "as the operator says")]);
    with(|snapshot| snapshot.budgets = vec![parse(changed)])
}

#[test]
fn healthy_cluster_has_no_finding() {
    let findings = examine(&healthy());
    assert_eq!(worst(&findings), Level::Ok, "{findings:#?}");
    golden("doctor-healthy", &render(&findings, Terminal::default()));
}

#[test]
fn versions_and_rights_to_run_are_found() {
    finds(
        &status(|status| status["agentVersion"] = json!("0.0.9")),
        "VersionSkew",
        Level::Warn,
    );
    finds(
        &with(|all| {
            all.namespaces[0].metadata.labels.insert(
                "pod-security.kubernetes.io/enforce".to_owned(),
                "baseline".to_owned(),
            );
        }),
        "PodSecurity",
        Level::Fail,
    );
    finds(
        &with(|all| all.daemon_sets[0].status.current_number_scheduled = 0),
        "PodSecurity",
        Level::Fail,
    );
    finds(
        &with(|all| all.server_version = Some("v1.33.1".to_owned()))
            .into_iter()
            .filter(|finding| finding.check != "Steering")
            .collect::<Vec<_>>(),
        "Kubernetes",
        Level::Fail,
    );
    finds(
        &with(|all| all.server_version = Some("v1.35.0".to_owned())),
        "Steering",
        Level::Warn,
    );
    finds(
        &with(|all| all.mutating_policies.clear()),
        "Steering",
        Level::Warn,
    );
    finds(
        &with(|all| all.daemon_sets.clear()),
        "NotInstalled",
        Level::Fail,
    );
    for kind in [Kind::GpuNodes, Kind::Budgets] {
        finds(
            &with(|all| all.absent = [kind, Kind::PodMonitors].into()),
            "CrdMissing",
            Level::Fail,
        );
    }
}

#[test]
fn namespace_that_was_not_read_is_not_called_fine() {
    let findings = with(|all| {
        all.namespaces.clear();
        all.unread.insert(Kind::Namespaces, "forbidden".to_owned());
    });
    let checks: Vec<&str> = findings.iter().map(|finding| finding.check).collect();
    assert!(!checks.contains(&"PodSecurity"), "{findings:#?}");
    let text = render(&findings, Terminal::default());
    assert!(
        text.ends_with("0 failures, 0 warnings, 1 could not be looked at\n"),
        "{text}"
    );
}

#[test]
fn runtimes_and_other_plugins_are_found() {
    finds(
        &status(|status| {
            status["conditions"] = json!([condition(
                "CdiReady",
                "False",
                "CdiUnsupported",
                "containerd has CDI off"
            )])
        }),
        "CdiOff",
        Level::Fail,
    );
    finds(
        &status(|status| {
            status["conditions"] = json!([condition(
                "DriverChanged",
                "True",
                "ModuleNotReloaded",
                "files of 595.1, module of 580.95.05"
            )])
        }),
        "Node",
        Level::Fail,
    );
    finds(
        &with(|all| {
            all.nodes[0].status.node_info.container_runtime_version =
                "containerd://1.7.24".to_owned()
        }),
        "RuntimeTooOld",
        Level::Fail,
    );
    finds(
        &with(|all| {
            all.nodes[0]
                .status
                .allocatable
                .insert("nvidia.com/gpu".to_owned(), "8".to_owned());
        }),
        "TwoOwners",
        Level::Warn,
    );
}

#[test]
fn lost_gpus_and_pods_without_enforcement_are_found() {
    finds(
        &status(|status| {
            status["gpus"][0]["state"] = json!("Lost");
            status["gpus"][0]["health"] = json!({ "status": "Unhealthy", "reason": "Xid79" });
        }),
        "LostGpu",
        Level::Fail,
    );
    finds(
        &status(|status| {
            status["notEnforced"] = json!([{ "podUid": "u", "namespace": "ml", "pod": "p", "container": "c",
        "reason": "Privileged", "message": "take privileged out" }])
        }),
        "NotEnforced",
        Level::Warn,
    );
}

#[test]
fn memory_without_a_running_pod_is_found() {
    for (field, check) in [("leaked", "LeakedMemory"), ("withheld", "WithheldMemory")] {
        let findings = status(|status| status["gpus"][0][field] = json!("13Gi"));
        finds(&findings, check, Level::Warn);
        let text = render(&findings, Terminal::default());
        assert!(text.contains("n: GPU 0 has 13 GiB"), "{text}");
    }
}

#[test]
fn path_of_a_tenant_reaches_the_terminal_without_escapes() {
    let findings = status(|status| {
        status["notEnforced"] = json!([{ "podUid": "u", "namespace": "ml", "pod": "p", "container": "c",
            "reason": "ForeignDriver", "message": "/tmp/\u{1b}]0;owned\u{7}\u{1b}[2J/libcuda.so.1" }])
    });
    let text = render(&findings, Terminal::default());
    assert!(
        text.contains("/tmp/ ]0;owned  [2J/libcuda.so.1\n"),
        "{text}"
    );
}

#[test]
fn drain_is_called_complete_once_the_gpu_is_free() {
    let draining = |reason: &str| {
        status(|status| {
            status["gpus"][0]["state"] = json!("Draining");
            status["gpus"][0]["health"] = json!({ "status": "Unhealthy", "reason": reason });
        })
    };
    for (reason, message) in [
        ("Draining", "n: GPU 0 is being drained"),
        ("Drained", "n: GPU 0 is drained"),
    ] {
        let findings = draining(reason);
        finds(&findings, "Drained", Level::Warn);
        assert!(
            findings.iter().any(|finding| finding.text == message),
            "{findings:#?}"
        );
    }
}

#[test]
fn stale_agents_and_nodes_are_found() {
    finds(
        &with(|all| all.own_pods[0].status.conditions.clear()),
        "StaleAgent",
        Level::Fail,
    );
    let findings = with(|all| {
        all.own_pods.remove(0);
        all.gpu_nodes.clear();
    });
    finds(&findings, "StaleAgent", Level::Warn);
    finds(
        &with(|all| all.own_pods[1].status.conditions.clear()),
        "Operator",
        Level::Fail,
    );
    finds(
        &status(|status| status["bootId"] = json!("another")),
        "StaleGpuNode",
        Level::Fail,
    );
    finds(
        &with(|all| all.nodes[0].metadata.name = "other".to_owned()),
        "StaleGpuNode",
        Level::Warn,
    );
}

#[test]
fn budgets_and_unreadable_objects_are_found() {
    finds(
        &budget_condition("Covered", "False", "Overcommitted"),
        "Overcommitted",
        Level::Warn,
    );
    finds(
        &budget_condition("Exceeded", "True", "OverLimit"),
        "Exceeded",
        Level::Warn,
    );
    finds(
        &budget_condition("Enforced", "False", "QuotaPending"),
        "QuotaPending",
        Level::Fail,
    );
    finds(
        &budget_condition("Accepted", "False", "InvalidSpec"),
        "Unreadable",
        Level::Fail,
    );
    let bad = Unreadable {
        kind: Kind::GpuNodes,
        name: "n".to_owned(),
        error: "invalid type".to_owned(),
    };
    finds(
        &with(|all| all.unreadable.push(bad)),
        "Unreadable",
        Level::Fail,
    );
}

#[test]
fn metrics_fd_stores_relays_and_clocks_are_found() {
    finds(
        &with(|all| all.pod_monitors.clear()),
        "NotScraped",
        Level::Warn,
    );
    finds(
        &with(|all| {
            all.namespaces.pop();
        }),
        "NotScraped",
        Level::Warn,
    );
    finds(
        &with(|all| {
            // The chart's policy without namespaces and peers.
            all.network_policies[0] = json!({ "spec": { "policyTypes": ["Ingress"] } });
        }),
        "NotScraped",
        Level::Warn,
    );
    let another = json!({ "namespaceSelector": { "matchLabels": { "team": "none" } } });
    let beside_another = with(|all| {
        let peers = all.network_policies[0]["spec"]["ingress"][0]["from"].as_array_mut();
        peers.unwrap().insert(0, another);
    });
    let is_scraped = |found: &Finding| found.check == "NotScraped" && found.level == Level::Ok;
    assert!(beside_another.iter().any(is_scraped));
    finds(
        &with(|all| {
            all.namespaces.pop();
            let egress_only = json!({ "spec": { "policyTypes": ["Egress"] } });
            all.network_policies.insert(0, egress_only);
        }),
        "NotScraped",
        Level::Warn,
    );
    finds(
        &with(|all| all.daemon_sets[1].status.updated_number_scheduled = 0),
        "OldFdStore",
        Level::Warn,
    );
    finds(
        &with(|all| {
            let mut relays = all.daemon_sets[1].clone();
            let labels = &mut relays.metadata.labels;
            labels.insert("app.kubernetes.io/component".into(), "relay".into());
            relays.status.updated_number_scheduled = 0;
            all.daemon_sets.push(relays);
        }),
        "OldRelay",
        Level::Warn,
    );
    finds(
        &with(|all| all.leases[0].spec.renew_time = Some(ago(-30).parse().unwrap())),
        "ClockSkew",
        Level::Warn,
    );
    finds(
        &with(|all| all.leases[0].spec.renew_time = Some(ago(300).parse().unwrap())),
        "ClockSkew",
        Level::Warn,
    );
}

#[test]
fn tenant_learns_what_it_may_not_read() {
    let findings = examine(&tenant(cluster()));
    let skipped = findings
        .iter()
        .filter(|finding| finding.level == Level::Skip);
    assert!(skipped.clone().count() >= 4, "{findings:#?}");
    assert!(
        skipped
            .clone()
            .any(|finding| finding.text == "could not read gpunodes: forbidden")
    );
}

#[test]
fn preflight_looks_at_each_node() {
    let mut old: Node = parse(node("old"));
    old.status.node_info.container_runtime_version = "containerd://1.7.24".to_owned();
    let mut crio: Node = parse(node("crio"));
    crio.status.node_info.container_runtime_version = "cri-o://1.34.0".to_owned();
    let snapshot = Snapshot {
        server_version: Some("v1.36.3".to_owned()),
        nodes: vec![old, crio],
        ..Snapshot::default()
    };
    golden(
        "doctor-preflight",
        &render(&preflight::examine(&snapshot), Terminal::default()),
    );
}
