//! Checks that Prometheus reads the metrics.

use serde_json::Value;

use super::super::{Finding, Level};
use super::namespace;
use crate::snapshot::{Kind, Snapshot};

/// Whether a PodMonitor selects Bursar's pods, and a namespace may read their metrics.
pub(super) fn scraped(snapshot: &Snapshot) -> Option<Finding> {
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
        let rules = policy["spec"]["ingress"].as_array();
        let peers = rules
            .into_iter()
            .flatten()
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
