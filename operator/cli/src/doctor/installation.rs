//! Checks Bursar's own parts: versions, agents, fd stores, relays, rights to run, metrics.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Finding, Level, preflight, version};
use crate::amounts::count;
use crate::objects::{Pod, Workload};
use crate::show::name;
use crate::snapshot::{Kind, Snapshot};

/// The first version of Kubernetes with MutatingAdmissionPolicies by default.
const STEERING: (u32, u32, u32) = (1, 36, 0);
/// The label of the Pod Security level that a namespace enforces.
const PSA: &str = "pod-security.kubernetes.io/enforce";

pub(super) fn component<'a>(labels: &'a BTreeMap<String, String>, wanted: &str) -> bool {
    labels
        .get("app.kubernetes.io/component")
        .is_some_and(|component: &'a String| component == wanted)
}

pub(super) fn daemon_set<'a>(snapshot: &'a Snapshot, wanted: &str) -> Option<&'a Workload> {
    let mut all = snapshot.daemon_sets.iter();
    all.find(|set| component(&set.metadata.labels, wanted))
}

/// Bursar's namespace.
pub(crate) fn namespace(snapshot: &Snapshot) -> Option<&str> {
    let sets = snapshot
        .daemon_sets
        .iter()
        .map(|set| &set.metadata.namespace);
    let pods = snapshot.own_pods.iter().map(|pod| &pod.metadata.namespace);
    sets.chain(pods).next().map(String::as_str)
}

pub(super) fn examine(snapshot: &Snapshot) -> Vec<Finding> {
    let mut findings = vec![preflight::kubernetes(snapshot)];
    if snapshot.has_all(Kind::DaemonSets) && daemon_set(snapshot, "agent").is_none() {
        findings.push(Finding::new(
            Level::Fail,
            "NotInstalled",
            "Bursar is not installed: no DaemonSet of its agent",
            "helm install bursar charts/bursar --namespace bursar-system --create-namespace",
        ));
        return findings;
    }
    findings.extend(steering(snapshot));
    findings.extend(pod_security(snapshot));
    findings.extend(operator(snapshot));
    findings.extend(agents(snapshot));
    findings.extend(skew(snapshot));
    findings.extend(fd_stores(snapshot));
    findings.extend(relays(snapshot));
    findings.extend(scraped(snapshot));
    findings
}

fn steering(snapshot: &Snapshot) -> Option<Finding> {
    let version = version(snapshot.server_version.as_ref()?)?;
    if version < STEERING {
        return Some(Finding::new(
            Level::Warn,
            "Steering",
            "steering and overflow: Borrow are unavailable before Kubernetes 1.36",
            "write the affinity of docs/guides/steering-and-preemption.md into pods by hand",
        ));
    }
    if !snapshot.has_all(Kind::MutatingPolicies) {
        return None;
    }
    Some(if snapshot.mutating_policies.is_empty() {
        Finding::new(
            Level::Warn,
            "Steering",
            "steering is unavailable: the chart's MutatingAdmissionPolicy is missing",
            "upgrade the chart on this version of Kubernetes; see steering.mode",
        )
    } else {
        Finding::ok("Steering", "steering and overflow are available")
    })
}

fn pod_security(snapshot: &Snapshot) -> Option<Finding> {
    let own = namespace(snapshot)?;
    let remedy = format!("kubectl label namespace {own} {PSA}=privileged");
    let found = snapshot
        .namespaces
        .iter()
        .find(|namespace| namespace.metadata.name == own);
    let level = found.and_then(|namespace| namespace.metadata.labels.get(PSA));
    let set = daemon_set(snapshot, "agent");
    let refused = set.is_some_and(|set| {
        set.status.desired_number_scheduled > 0 && set.status.current_number_scheduled == 0
    });
    Some(match level.map(String::as_str) {
        Some(level @ ("baseline" | "restricted")) => Finding::new(
            Level::Fail,
            "PodSecurity",
            format!(
                "namespace {own} enforces Pod Security level {level}, which refuses the agent's pods"
            ),
            remedy,
        ),
        _ if refused => Finding::new(
            Level::Fail,
            "PodSecurity",
            format!("the DaemonSet of the agent in {own} has no pods"),
            format!("{remedy}; or see the DaemonSet's events"),
        ),
        _ => Finding::ok(
            "PodSecurity",
            format!("namespace {own} allows privileged pods"),
        ),
    })
}

fn is_ready(pod: &Pod) -> bool {
    pod.status
        .conditions
        .iter()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn operator(snapshot: &Snapshot) -> Option<Finding> {
    snapshot.has_all(Kind::OwnPods).then_some(())?;
    let mut operators = snapshot
        .own_pods
        .iter()
        .filter(|pod| component(&pod.metadata.labels, "operator"));
    let ready = operators.any(is_ready);
    Some(if ready {
        Finding::ok("Operator", "the operator is ready")
    } else {
        Finding::new(
            Level::Fail,
            "Operator",
            "no operator is ready: budgets stay in force, and waiting pods get no help",
            format!(
                "kubectl -n {} describe pod -l app.kubernetes.io/component=operator",
                namespace(snapshot).unwrap_or("bursar-system")
            ),
        )
    })
}

/// Agents that are not ready, and GpuNodes that no agent writes.
fn agents(snapshot: &Snapshot) -> Vec<Finding> {
    let mut findings = Vec::new();
    if !snapshot.has_all(Kind::OwnPods) {
        return findings;
    }
    let own = namespace(snapshot).unwrap_or("bursar-system");
    let agents = snapshot
        .own_pods
        .iter()
        .filter(|pod| component(&pod.metadata.labels, "agent"));
    for agent in agents.clone().filter(|agent| !is_ready(agent)) {
        findings.push(Finding::new(
            Level::Fail,
            "StaleAgent",
            format!(
                "{}: agent {} is not ready: new pods with GPU memory fail there",
                agent.spec.node_name, agent.metadata.name
            ),
            format!("kubectl -n {own} describe pod {}", agent.metadata.name),
        ));
    }
    for node in &snapshot.gpu_nodes {
        let node_name = name(node);
        let known = snapshot.node(node_name);
        if known.is_none() && snapshot.has_all(Kind::Nodes) {
            findings.push(Finding::new(
                Level::Warn,
                "StaleGpuNode",
                format!("GpuNode {node_name} has no node"),
                format!("kubectl delete gpunode {node_name}"),
            ));
            continue;
        }
        let boot = node
            .status
            .as_ref()
            .and_then(|status| status.boot_id.as_deref());
        let is_old = boot.zip(known).is_some_and(|(boot, known)| {
            !known.status.node_info.boot_id.is_empty() && known.status.node_info.boot_id != boot
        });
        if snapshot.agent_on(node_name).is_none() || is_old {
            findings.push(Finding::new(
                Level::Fail,
                "StaleGpuNode",
                format!("{node_name}: no agent has written the GpuNode since the node's last boot, or none runs there"),
                "see agent.nodeSelector and agent.tolerations, and the DaemonSet's events",
            ));
        }
    }
    if findings.is_empty() {
        findings.push(match agents.count() {
            0 => Finding::new(
                Level::Warn,
                "StaleAgent",
                "no agent runs: no node has a label of a GPU",
                "kubectl label node NODE bursar.dev/agent=true, or see agent.gpuNodeLabels",
            ),
            number => Finding::ok("StaleAgent", format!("{} ready", count(number, "agent"))),
        });
    }
    findings
}

/// Versions of agents and operator that differ from the chart's.
fn skew(snapshot: &Snapshot) -> Option<Finding> {
    let set = daemon_set(snapshot, "agent")?;
    let chart = set.metadata.labels.get("app.kubernetes.io/version")?;
    let mut others: BTreeMap<&str, usize> = BTreeMap::new();
    let versions = snapshot
        .gpu_nodes
        .iter()
        .filter_map(|node| node.status.as_ref()?.agent_version.as_deref());
    for version in versions.filter(|version| *version != chart) {
        *others.entry(version).or_default() += 1;
    }
    let operators = snapshot
        .own_pods
        .iter()
        .filter(|pod| component(&pod.metadata.labels, "operator"));
    let operators =
        operators.filter_map(|pod| pod.metadata.labels.get("app.kubernetes.io/version"));
    for version in operators.filter(|version| *version != chart) {
        *others.entry(version).or_default() += 1;
    }
    let client = env!("CARGO_PKG_VERSION");
    if !others.is_empty() {
        let list: Vec<String> = others
            .iter()
            .map(|(version, number)| format!("{number} at {version}"))
            .collect();
        return Some(Finding::new(
            Level::Warn,
            "VersionSkew",
            format!(
                "the chart is at {chart}, and of agents and operators are {}",
                list.join(", ")
            ),
            "wait for the upgrade's end, or run helm upgrade again",
        ));
    }
    if client != chart {
        return Some(Finding::new(
            Level::Warn,
            "VersionSkew",
            format!("kubectl bursar is at {client}, the chart at {chart}"),
            format!("install kubectl bursar {chart}"),
        ));
    }
    Some(Finding::ok(
        "VersionSkew",
        format!("agents, operator and kubectl bursar are at {chart}"),
    ))
}

fn fd_stores(snapshot: &Snapshot) -> Option<Finding> {
    let loss = "what its node retains is lost (kubectl bursar retained)";
    replaced_by_hand(snapshot, "fdstore", "OldFdStore", "fd store", loss)
}

fn relays(snapshot: &Snapshot) -> Option<Finding> {
    let loss = "pods that start on its node fail for 1 to 2 s";
    replaced_by_hand(snapshot, "relay", "OldRelay", "plugin relay", loss)
}

/// Pods that an upgrade has not replaced, because an admin has to, and what is lost then.
fn replaced_by_hand(
    snapshot: &Snapshot,
    component: &str,
    name: &'static str,
    noun: &str,
    loss: &str,
) -> Option<Finding> {
    let set = daemon_set(snapshot, component)?;
    let status = &set.status;
    let all = status.current_number_scheduled;
    let old = all.saturating_sub(status.updated_number_scheduled);
    let own = &set.metadata.namespace;
    Some(if old > 0 {
        Finding::new(
            Level::Warn,
            name,
            format!("{old} of {all} {noun}s are of an older version of the chart"),
            format!("kubectl -n {own} delete pod of each; {loss}"),
        )
    } else {
        let all = count(usize::try_from(all).unwrap_or(0), noun);
        Finding::ok(name, format!("{all} of this version"))
    })
}

/// Whether a PodMonitor selects Bursar's pods, and a namespace may read their metrics.
fn scraped(snapshot: &Snapshot) -> Option<Finding> {
    let own = namespace(snapshot)?;
    if let Some(selected) = closed_to(snapshot) {
        return Some(Finding::new(
            Level::Warn,
            "NotScraped",
            format!("no namespace has the labels that may read the metrics: {selected}"),
            "set networkPolicy.monitoringNamespaceSelector to the namespace of Prometheus",
        ));
    }
    let remedy = "create a PodMonitor for port metrics of pods with app.kubernetes.io/name=bursar";
    if snapshot
        .unread
        .get(&Kind::PodMonitors)
        .is_some_and(|reason| reason != "the API server does not have it")
    {
        return None;
    }
    let is_ours = |monitor: &&Value| {
        monitor
            .to_string()
            .contains("app.kubernetes.io/name\":\"bursar\"")
    };
    Some(match snapshot.pod_monitors.iter().find(is_ours) {
        Some(monitor) => {
            let name = monitor["metadata"]["name"].as_str().unwrap_or_default();
            Finding::ok(
                "NotScraped",
                format!("PodMonitor {name} selects Bursar's pods"),
            )
        }
        None => Finding::new(
            Level::Warn,
            "NotScraped",
            format!(
                "no PodMonitor selects Bursar's pods in {own}; whether Prometheus finds them otherwise is not known"
            ),
            remedy,
        ),
    })
}

/// The namespace labels of a NetworkPolicy of Bursar's that no namespace has.
fn closed_to(snapshot: &Snapshot) -> Option<String> {
    if !snapshot.has_all(Kind::Namespaces) || snapshot.namespaces.is_empty() {
        return None;
    }
    for policy in &snapshot.network_policies {
        let rules = policy["spec"]["ingress"].as_array()?;
        let peers = rules
            .iter()
            .filter_map(|rule| rule["from"].as_array())
            .flatten();
        for peer in peers {
            let labels = &peer["namespaceSelector"]["matchLabels"];
            let Some(labels) = labels.as_object() else {
                continue;
            };
            let has = |namespace: &crate::objects::Named| {
                labels.iter().all(|(key, value)| {
                    namespace.metadata.labels.get(key).map(String::as_str) == value.as_str()
                })
            };
            if !snapshot.namespaces.iter().any(has) {
                let list: Vec<String> = labels
                    .iter()
                    .map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or_default()))
                    .collect();
                return Some(list.join(","));
            }
        }
    }
    None
}
