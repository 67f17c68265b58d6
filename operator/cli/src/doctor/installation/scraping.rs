//! Checks that Prometheus reads the metrics.

use serde_json::{Map, Value};

use super::super::{Finding, Level};
use super::namespace;
use crate::objects::Named;
use crate::snapshot::{ABSENT, Kind, Snapshot};

/// Whether a PodMonitor selects Bursar's pods, and a namespace may read their metrics.
pub(super) fn scraped(snapshot: &Snapshot) -> Option<Finding> {
    let own = namespace(snapshot)?;
    if let Some(selected) = closed_to(snapshot) {
        return Some(Finding::new(
            Level::Warn,
            "NotScraped",
            format!("no namespace has the labels that may read the metrics: {selected}"),
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

/// The namespace labels in a rule of a NetworkPolicy of Bursar's that admits no namespace.
fn closed_to(snapshot: &Snapshot) -> Option<String> {
    if !snapshot.has_all(Kind::Namespaces) || snapshot.namespaces.is_empty() {
        return None;
    }
    let policies = snapshot.network_policies.iter();
    let rules = policies.filter_map(|policy| policy["spec"]["ingress"].as_array());
    rules.flatten().find_map(|rule| {
        let peers = rule["from"].as_array()?;
        let admits = |peer: &Value| {
            // A peer without namespace labels is of another kind, such as an address.
            let labels = peer["namespaceSelector"]["matchLabels"].as_object();
            labels.is_none_or(|labels| snapshot.namespaces.iter().any(|of| has_labels(of, labels)))
        };
        if peers.iter().any(admits) {
            return None;
        }
        let labels = peers.first()?["namespaceSelector"]["matchLabels"].as_object()?;
        let labels = labels.iter();
        let list =
            labels.map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or_default()));
        Some(list.collect::<Vec<_>>().join(","))
    })
}

fn has_labels(namespace: &Named, labels: &Map<String, Value>) -> bool {
    let found = &namespace.metadata.labels;
    labels
        .iter()
        .all(|(key, value)| found.get(key).map(String::as_str) == value.as_str())
}
