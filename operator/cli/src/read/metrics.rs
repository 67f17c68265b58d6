//! Reads the metrics of agents.

use std::time::Duration;

use futures::{StreamExt as _, stream};
use kube::Client;
use tokio::time::timeout;

use super::reason;
use crate::agent_metrics::{AgentMetrics, MAX_BYTES};
use crate::objects::Pod;
use crate::snapshot::{Kind, Snapshot};

/// Requests to agents at the same time.
const AGENTS_AT_ONCE: usize = 32;

/// The time for one agent's response.
const AGENT_TIMEOUT: Duration = Duration::from_secs(5);

/// The port of an agent's metrics in the chart, for a pod that names none.
const METRICS_PORT: u16 = 9445;

/// Reads the metrics of the agents on wanted nodes, through the API server's pod proxy.
pub async fn read_metrics(
    client: &Client,
    snapshot: &mut Snapshot,
    is_wanted: impl Fn(&str) -> bool,
) {
    let agents = snapshot
        .own_pods
        .iter()
        .filter(|pod| pod.metadata.is_component("agent") && is_wanted(&pod.spec.node_name));
    let (ready, away): (Vec<&Pod>, Vec<&Pod>) = agents.partition(|pod| pod.is_ready());
    let agents: Vec<(String, String)> = ready
        .into_iter()
        .map(|pod| (pod.spec.node_name.clone(), metrics_path(pod)))
        .collect();
    let away = away.first().map(|pod| {
        let (namespace, name) = (&pod.metadata.namespace, &pod.metadata.name);
        format!(
            "the agent of {} is not ready; look at kubectl -n {namespace} describe pod {name}",
            pod.spec.node_name
        )
    });
    if let Some(away) = away {
        snapshot.unread.insert(Kind::AgentMetrics, away);
    }
    if let Some(reason) = snapshot.unread.get(&Kind::OwnPods) {
        snapshot.unread.insert(Kind::AgentMetrics, reason.clone());
    }
    let reads = agents.into_iter().map(|(node, path)| async move {
        let metrics = timeout(AGENT_TIMEOUT, agent_metrics(client, &path)).await;
        (node, metrics)
    });
    let mut reads = stream::iter(reads).buffer_unordered(AGENTS_AT_ONCE);
    while let Some((node, metrics)) = reads.next().await {
        let failure = match metrics {
            Ok(Ok(metrics)) => {
                snapshot.metrics.insert(node, metrics);
                continue;
            }
            Ok(Err(error)) => reason(&error),
            Err(_) => format!(
                "the agent of {node} did not answer within {} s; networkPolicy.metricsPeers has to \
                 admit the API server",
                AGENT_TIMEOUT.as_secs()
            ),
        };
        snapshot.unread.insert(Kind::AgentMetrics, failure);
    }
}

/// The path of an agent's metrics through the API server's pod proxy.
fn metrics_path(pod: &Pod) -> String {
    let mut ports = pod
        .spec
        .containers
        .iter()
        .flat_map(|container| &container.ports);
    let port = ports
        .find(|port| port.name == "metrics")
        .map_or(METRICS_PORT, |port| port.container_port);
    let (namespace, name) = (&pod.metadata.namespace, &pod.metadata.name);
    format!("/api/v1/namespaces/{namespace}/pods/{name}:{port}/proxy/metrics")
}

async fn agent_metrics(client: &Client, path: &str) -> Result<AgentMetrics, kube::Error> {
    let request = http::Request::get(path)
        .body(Vec::new())
        .map_err(kube::Error::HttpError)?;
    let mut text = client.request_text(request).await?;
    text.truncate(text.floor_char_boundary(MAX_BYTES));
    Ok(AgentMetrics::parse(&text))
}
