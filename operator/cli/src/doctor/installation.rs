//! Checks Bursar's own parts: versions, agents, fd stores, relays, rights to run, metrics.

mod scraping;
mod versions;

use bursar_crds::GpuNode;

use super::{Finding, Level, preflight};
use crate::amounts::count;
use crate::objects::Pod;
use crate::show::name;
use crate::snapshot::{Kind, Snapshot};
use scraping::scraped;
use versions::{skew, steering};

/// The label of the Pod Security level that a namespace enforces.
const PSA: &str = "pod-security.kubernetes.io/enforce";

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
    if snapshot.has_all(Kind::DaemonSets) && snapshot.daemon_set("agent").is_none() {
        findings.push(Finding::new(
            Level::Fail,
            "NotInstalled",
            "Bursar is not installed: no DaemonSet of its agent",
            "install it by docs/use/guides/quickstart.md: no release is published, so the images come \
             from your registry",
        ));
        return findings;
    }
    findings.extend(crds(snapshot));
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

/// CRDs that the API server does not have, without which agents and operator cannot write.
fn crds(snapshot: &Snapshot) -> Vec<Finding> {
    let crds = [Kind::GpuNodes, Kind::GpuNamespaces, Kind::Budgets].into_iter();
    let missing = crds.filter(|kind| snapshot.absent.contains(kind));
    let finding = |kind: Kind| {
        Finding::new(
            Level::Fail,
            "CrdMissing",
            format!("the API server has no {}.bursar.dev", kind.name()),
            "set crds.enabled to true, or apply the chart's CRDs before the release",
        )
    };
    missing.map(finding).collect()
}

fn pod_security(snapshot: &Snapshot) -> Option<Finding> {
    let own = namespace(snapshot)?;
    let remedy = format!("kubectl label namespace {own} {PSA}=privileged");
    let found = snapshot
        .namespaces
        .iter()
        .find(|namespace| namespace.metadata.name == own);
    let level = found.and_then(|namespace| namespace.metadata.labels.get(PSA));
    let set = snapshot.daemon_set("agent");
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
        _ if !snapshot.has_all(Kind::Namespaces) => return None,
        _ => Finding::ok(
            "PodSecurity",
            format!("namespace {own} allows privileged pods"),
        ),
    })
}

fn operator(snapshot: &Snapshot) -> Option<Finding> {
    snapshot.has_all(Kind::OwnPods).then_some(())?;
    let mut operators = snapshot
        .own_pods
        .iter()
        .filter(|pod| pod.metadata.is_component("operator"));
    let ready = operators.any(Pod::is_ready);
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
        .filter(|pod| pod.metadata.is_component("agent"));
    for agent in agents.clone().filter(|agent| !agent.is_ready()) {
        findings.push(Finding::new(
            Level::Fail,
            "StaleAgent",
            format!(
                "{}: agent {} is not ready: new pods with GPU memory do not start there",
                agent.spec.node_name, agent.metadata.name
            ),
            format!("kubectl -n {own} describe pod {}", agent.metadata.name),
        ));
    }
    let gpu_nodes = snapshot.gpu_nodes.iter();
    findings.extend(gpu_nodes.filter_map(|node| stale_gpu_node(snapshot, node)));
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

/// Whether no agent writes a GpuNode, and why.
fn stale_gpu_node(snapshot: &Snapshot, node: &GpuNode) -> Option<Finding> {
    let node_name = name(node);
    let known = snapshot.node(node_name);
    if known.is_none() && snapshot.has_all(Kind::Nodes) {
        return Some(Finding::new(
            Level::Warn,
            "StaleGpuNode",
            format!("GpuNode {node_name} has no node"),
            format!("kubectl delete gpunode {node_name}"),
        ));
    }
    let status = node.status.as_ref();
    let boot = status.and_then(|status| status.boot_id.as_deref());
    let is_old = boot.zip(known).is_some_and(|(boot, known)| {
        !known.status.node_info.boot_id.is_empty() && known.status.node_info.boot_id != boot
    });
    (snapshot.agent_on(node_name).is_none() || is_old).then(|| {
        Finding::new(
            Level::Fail,
            "StaleGpuNode",
            format!("{node_name}: no agent has written the GpuNode since the node's last boot, or none runs there"),
            "see agent.nodeSelector and agent.tolerations, and the DaemonSet's events",
        )
    })
}

fn fd_stores(snapshot: &Snapshot) -> Option<Finding> {
    let remedy = |namespace: &str| {
        format!(
            "kubectl -n {namespace} delete pod of each; what its node retains is lost (kubectl bursar retained)"
        )
    };
    replaced_by_hand(snapshot, "fdstore", "OldFdStore", "fd store", remedy)
}

fn relays(snapshot: &Snapshot) -> Option<Finding> {
    let remedy = |_: &str| "kubectl bursar roll relay".to_owned();
    replaced_by_hand(snapshot, "relay", "OldRelay", "plugin relay", remedy)
}

/// Pods that an upgrade has not replaced, because an admin has to.
fn replaced_by_hand(
    snapshot: &Snapshot,
    component: &str,
    name: &'static str,
    noun: &str,
    remedy: impl FnOnce(&str) -> String,
) -> Option<Finding> {
    let set = snapshot.daemon_set(component)?;
    let status = &set.status;
    let all = status.current_number_scheduled;
    let old = all.saturating_sub(status.updated_number_scheduled);
    let own = &set.metadata.namespace;
    Some(if old > 0 {
        Finding::new(
            Level::Warn,
            name,
            format!("{old} of {all} {noun}s are of an older version of the chart"),
            remedy(own),
        )
    } else {
        let all = count(usize::try_from(all).unwrap_or(0), noun);
        Finding::ok(name, format!("{all} of this version"))
    })
}
