//! Lists the versions of Bursar's parts in a cluster.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::snapshot::Snapshot;
use crate::table::clean;

/// The version of this program.
pub const CLIENT: &str = env!("CARGO_PKG_VERSION");

/// The number of parts at each version.
type Versions<'a> = BTreeMap<&'a str, usize>;

fn labelled<'a>(snapshot: &'a Snapshot, component: &str) -> Versions<'a> {
    let mut versions = Versions::new();
    for pod in &snapshot.own_pods {
        if pod.metadata.is_component(component) {
            let labels = &pod.metadata.labels;
            let version = labels
                .get("app.kubernetes.io/version")
                .map_or("unknown", String::as_str);
            *versions.entry(version).or_default() += 1;
        }
    }
    versions
}

fn agents(snapshot: &Snapshot) -> Versions<'_> {
    let mut versions = Versions::new();
    for node in &snapshot.gpu_nodes {
        let version = node
            .status
            .as_ref()
            .and_then(|status| status.agent_version.as_deref());
        *versions.entry(version.unwrap_or("unknown")).or_default() += 1;
    }
    versions
}

fn chart(snapshot: &Snapshot) -> Option<&str> {
    let mut labels = snapshot.daemon_sets.iter().map(|set| &set.metadata.labels);
    labels
        .find_map(|labels| labels.get("helm.sh/chart"))
        .map(String::as_str)
}

fn list(versions: &Versions<'_>) -> String {
    let list: Vec<String> = versions
        .iter()
        .map(|(version, number)| format!("{number} at {version}"))
        .collect();
    if list.is_empty() {
        "not found".to_owned()
    } else {
        clean(list.join(", "))
    }
}

/// The versions as text.
pub fn render(snapshot: &Snapshot) -> String {
    let mut text = format!("kubectl bursar   {CLIENT}\n");
    let server = snapshot.server_version.as_deref().unwrap_or("not known");
    text.push_str(&format!("Kubernetes       {}\n", clean(server.to_owned())));
    text.push_str(&format!(
        "chart            {}\n",
        chart(snapshot).unwrap_or("not found")
    ));
    text.push_str(&format!(
        "operators        {}\n",
        list(&labelled(snapshot, "operator"))
    ));
    text.push_str(&format!("agents           {}\n", list(&agents(snapshot))));
    text.push_str(&format!(
        "fd stores        {}\n",
        list(&labelled(snapshot, "fdstore"))
    ));
    text.push_str(&format!(
        "plugin relays    {}\n",
        list(&labelled(snapshot, "relay"))
    ));
    for note in snapshot.unread_notes() {
        text.push_str(&format!("{note}\n"));
    }
    text
}

/// The versions in the documented `v1` shape.
pub fn json(snapshot: &Snapshot) -> Value {
    json!({ "apiVersion": "cli.bursar.dev/v1", "kind": "Versions", "client": CLIENT,
            "kubernetes": snapshot.server_version, "chart": chart(snapshot),
            "operators": labelled(snapshot, "operator"), "agents": agents(snapshot),
            "fdStores": labelled(snapshot, "fdstore"), "relays": labelled(snapshot, "relay"),
            "notRead": snapshot.unread_notes() })
}
