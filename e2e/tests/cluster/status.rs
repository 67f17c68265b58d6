//! Waits for reports of the agents about containers: in `GpuNode`s, metrics and Events.

use std::time::Duration;

use bursar_crds::{GpuNode, GpuNodeStatus};
use bursar_e2e::chart;
use bursar_e2e::wait::{self, Poll};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::events::v1::Event;
use kube::ResourceExt as _;
use kube::api::{Api, ListParams};
use libtest_mimic::Failed;

use crate::shared_cluster::{NAMESPACE, START_TIMEOUT, TrialContext};

/// The default port of the agent's metrics.
const METRICS_PORT: u16 = 9445;
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Waits until the status of a node's `GpuNode` satisfies `wanted`.
///
/// # Errors
/// After the timeout, with the present status.
pub(crate) async fn wait_for_status(
    context: &TrialContext,
    node: &str,
    what: &str,
    wanted: impl Fn(&GpuNodeStatus) -> bool,
) -> Result<GpuNodeStatus, Failed> {
    let nodes: Api<GpuNode> = Api::all(context.environment.cluster.client());
    let poll = async || match nodes.get_status(node).await {
        Ok(GpuNode {
            status: Some(status),
            ..
        }) if wanted(&status) => Poll::Ready(status),
        Ok(GpuNode { status, .. }) => Poll::Pending(format!("{status:?}")),
        Err(error) => Poll::Pending(error.to_string()),
    };
    Ok(wait::poll_until(what, START_TIMEOUT, POLL_INTERVAL, poll).await?)
}

/// Waits for a series of the metric `name` with each of `labels` and a value that satisfies
/// `wanted`, at a node's agent.
///
/// # Errors
/// After the timeout, with all series of that name.
pub(crate) async fn wait_for_metric(
    context: &TrialContext,
    node: &str,
    name: &str,
    labels: &[(&str, &str)],
    wanted: impl Fn(f64) -> bool,
) -> Result<f64, Failed> {
    let labels: Vec<String> = labels
        .iter()
        .map(|(key, value)| format!("{key}=\"{value}\""))
        .collect();
    let poll = async || {
        let text = match metrics(context, node).await {
            Ok(text) => text,
            Err(failed) => return Poll::Pending(failed.message().unwrap_or_default().to_owned()),
        };
        let series = text.lines().filter(|line| {
            let rest = line.strip_prefix(name);
            rest.is_some_and(|rest| rest.starts_with('{'))
        });
        let labelled = |line: &&str| labels.iter().all(|label| line.contains(label));
        let value = |line: &str| line.rsplit(' ').next()?.parse().ok();
        let found = series.clone().filter(labelled).find_map(value);
        match found.filter(|value| wanted(*value)) {
            Some(value) => Poll::Ready(value),
            None => Poll::Pending(series.collect::<Vec<_>>().join("\n")),
        }
    };
    let what = format!("{name} {labels:?}");
    Ok(wait::poll_until(&what, START_TIMEOUT, POLL_INTERVAL, poll).await?)
}

/// Reads the metrics of a node's agent.
async fn metrics(context: &TrialContext, node: &str) -> Result<String, Failed> {
    let client = context.environment.cluster.client();
    let pods: Api<Pod> = Api::namespaced(client.clone(), chart::NAMESPACE);
    let here = ListParams::default()
        .labels("app.kubernetes.io/component=agent")
        .fields(&format!("spec.nodeName={node}"));
    let agents = pods.list(&here).await?.items;
    let agent = agents.first().ok_or("the node has no agent")?.name_any();
    let namespace = chart::NAMESPACE;
    let path = format!("/api/v1/namespaces/{namespace}/pods/{agent}:{METRICS_PORT}/proxy/metrics");
    let request = http::Request::get(path).body(Vec::new())?;
    Ok(client.request_text(request).await?)
}

/// Returns the Events with this reason about pods of this and earlier trials.
///
/// # Errors
/// When the API server refuses.
pub(crate) async fn events(context: &TrialContext, reason: &str) -> Result<Vec<Event>, Failed> {
    let events: Api<Event> = Api::namespaced(context.environment.cluster.client(), NAMESPACE);
    let mut list = events.list(&ListParams::default()).await?.items;
    list.retain(|event| event.reason.as_deref() == Some(reason));
    Ok(list)
}

/// Returns the name of the pod that an Event is about.
pub(crate) fn pod_of(event: &Event) -> Option<&str> {
    event.regarding.as_ref()?.name.as_deref()
}

/// Waits for an Event about the pod with this reason and a note that contains `what`. Returns its
/// time and its note.
///
/// # Errors
/// After the timeout, with all Events of that reason.
pub(crate) async fn wait_for_event(
    context: &TrialContext,
    pod: &str,
    reason: &str,
    what: &str,
) -> Result<(Timestamp, String), Failed> {
    let poll = async || {
        let events = match events(context, reason).await {
            Ok(events) => events,
            Err(failed) => return Poll::Pending(failed.message().unwrap_or_default().to_owned()),
        };
        let about_pod = events.iter().filter(|event| pod_of(event) == Some(pod));
        let mut notes = about_pod.filter_map(|event| {
            let time = event.event_time.as_ref()?.0;
            Some((time, event.note.clone()?))
        });
        match notes.find(|(_, note)| note.contains(what)) {
            Some(found) => Poll::Ready(found),
            None => {
                let told = |event: &Event| {
                    let note = event.note.as_deref().unwrap_or_default();
                    format!("{}: {note}", pod_of(event).unwrap_or_default())
                };
                Poll::Pending(events.iter().map(told).collect::<Vec<_>>().join("\n"))
            }
        }
    };
    let what = format!("an event {reason} about {pod} and {what}");
    Ok(wait::poll_until(&what, START_TIMEOUT, POLL_INTERVAL, poll).await?)
}
