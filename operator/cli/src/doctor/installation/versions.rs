//! Checks the versions of Kubernetes and of Bursar's own parts.

use std::collections::BTreeMap;

use super::super::{Finding, Level, version};
use crate::snapshot::{Kind, Snapshot};

/// The first version of Kubernetes with MutatingAdmissionPolicies by default.
const STEERING: (u32, u32, u32) = (1, 36, 0);

pub(super) fn steering(snapshot: &Snapshot) -> Option<Finding> {
    let version = version(snapshot.server_version.as_ref()?)?;
    if version < STEERING {
        return Some(Finding::new(
            Level::Warn,
            "Steering",
            "steering and overflow: Borrow are unavailable before Kubernetes 1.36",
            "write the affinity of docs/use/guides/steering-and-preemption.md into pods by hand",
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
            "upgrade the chart on this version of Kubernetes; see placement.steering",
        )
    } else {
        Finding::ok("Steering", "steering and overflow are available")
    })
}

/// Versions of agents and operator that differ from the chart's.
pub(super) fn skew(snapshot: &Snapshot) -> Option<Finding> {
    let set = snapshot.daemon_set("agent")?;
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
        .filter(|pod| pod.metadata.is_component("operator"));
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
