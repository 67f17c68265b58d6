//! Checks that Prometheus reads the metrics.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::core::{Selector, SelectorExt as _};
use serde::Deserialize as _;
use serde_json::Value;

use super::super::{Finding, Level};
use super::namespace;
use crate::objects::Named;
use crate::snapshot::{ABSENT, Kind, Snapshot};

/// Whether a PodMonitor selects Bursar's pods, and a namespace may read their metrics.
pub(super) fn scraped(snapshot: &Snapshot) -> Option<Finding> {
    let own = namespace(snapshot)?;
    if let Some(closed) = closed(snapshot) {
        return Some(Finding::new(
            Level::Warn,
            "NotScraped",
            closed,
            "set networkPolicy.monitoringNamespaces or metricsPeers to the namespace of \
             Prometheus",
        ));
    }
    let remedy = "create a PodMonitor for port metrics of pods with app.kubernetes.io/name=bursar";
    if snapshot
        .unread
        .get(&Kind::PodMonitors)
        .is_some_and(|reason| reason != ABSENT)
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

/// States that a NetworkPolicy of Bursar's admits no namespace to the metrics, if so.
fn closed(snapshot: &Snapshot) -> Option<String> {
    if !snapshot.has_all(Kind::Namespaces) || snapshot.namespaces.is_empty() {
        return None;
    }
    let limits_ingress = |spec: &&Value| {
        let types = spec["policyTypes"].as_array();
        types.is_none_or(|types| types.iter().any(|name| name == "Ingress"))
    };
    let policies = snapshot.network_policies.iter();
    let mut specs = policies
        .map(|policy| &policy["spec"])
        .filter(limits_ingress);
    specs.find_map(|spec| match spec["ingress"].as_array() {
        None => Some("the NetworkPolicy admits nobody to the metrics".to_owned()),
        Some(rules) => rules
            .iter()
            .find_map(|rule| closed_to(rule, &snapshot.namespaces)),
    })
}

fn closed_to(rule: &Value, namespaces: &[Named]) -> Option<String> {
    let peers = rule["from"].as_array().filter(|peers| !peers.is_empty())?;
    // A peer without a selector of namespaces is of another kind, such as an address.
    let selectors: Option<Vec<Selector>> = peers.iter().map(namespace_selector).collect();
    let selectors = selectors?;
    let is_admitted = |of: &Named| {
        let mut selectors = selectors.iter();
        selectors.any(|selector| selector.matches(&of.metadata.labels))
    };
    if namespaces.iter().any(is_admitted) {
        return None;
    }
    let list: Vec<String> = selectors.iter().map(Selector::to_string).collect();
    let list = list.join(" or ");
    Some(format!(
        "no namespace has the labels that may read the metrics: {list}"
    ))
}

fn namespace_selector(peer: &Value) -> Option<Selector> {
    let selector = LabelSelector::deserialize(&peer["namespaceSelector"]).ok()?;
    selector.try_into().ok()
}
