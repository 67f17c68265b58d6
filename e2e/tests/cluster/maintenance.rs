//! Sets the labels by which NVIDIA's operators announce work on a node's GPUs, and checks that the
//! GPUs are drained and given back.

use std::time::{Duration, Instant};

use bursar_crds::{GpuNode, GpuNodeStatus};
use bursar_e2e::pods::PodBuilder;
use bursar_e2e::wait::{self, Poll};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::events::v1::Event;
use kube::ResourceExt as _;
use kube::api::{Api, ListParams, Patch, PatchParams};
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use crate::quota::event_line;
use crate::shared_cluster::{START_TIMEOUT, TrialContext, node_trial};
use crate::status::wait_for_status;

const DRIVER_UPGRADE: &str = "nvidia.com/gpu-driver-upgrade-state";
const MIG_CONFIG: &str = "nvidia.com/mig.config.state";
const HOLDER: &str = "holder";
/// A drain takes 3 s, and the probes of a GPU that returns as many. The kubelet starts a killed
/// container again after its back-off.
const TIMEOUT: Duration = Duration::from_secs(180);
const PAUSE: Duration = Duration::from_millis(200);

pub(crate) fn trials() -> Vec<Trial> {
    vec![node_trial(
        "operator/cluster/maintenance",
        nvidias_labels_drain_and_return_gpus,
    )]
}

async fn nvidias_labels_drain_and_return_gpus(context: &mut TrialContext) -> Result<(), Failed> {
    let plan = PodBuilder::new(HOLDER, &context.environment.probe_image)
        .arguments(&["hold", "--bytes=1Gi"])
        .restart_always()
        .gib(4);
    context.pods.create(&plan).await?;
    context
        .pods
        .wait_for_log_line(HOLDER, START_TIMEOUT, event_line("holding"))
        .await?;
    let node = context.pods.node(HOLDER).await?;
    let result = drain_and_return(context, &node).await;
    // The next trials use the same node.
    return_gpus(context).await?;
    result
}

/// Removes the labels and drains of the trial from every node.
///
/// # Errors
/// When the API server refuses.
pub(crate) async fn return_gpus(context: &TrialContext) -> Result<(), Failed> {
    let nodes: Api<GpuNode> = Api::all(context.environment.cluster.client());
    for node in nodes.list(&ListParams::default()).await?.items {
        let node = node.name_any();
        for label in [DRIVER_UPGRADE, MIG_CONFIG] {
            set_label(context, &node, label, None).await?;
        }
        set_drain(context, &node, &json!([])).await?;
    }
    Ok(())
}

async fn drain_and_return(context: &TrialContext, node: &str) -> Result<(), Failed> {
    let begin = Instant::now();
    set_label(context, node, DRIVER_UPGRADE, Some("pod-deletion-required")).await?;
    let drained = wait_for_status(context, node, "drained GPUs", all_drained).await?;
    context.progress.report(format_args!(
        "{:.1?} from the driver upgrade's label to drained GPUs",
        begin.elapsed()
    ));
    for state in [
        "pod-restart-required",
        "validation-required",
        "upgrade-failed",
    ] {
        set_label(context, node, DRIVER_UPGRADE, Some(state)).await?;
    }
    wait_for_node_event(context, node, "GpusDraining").await?;
    assert!(all_drained(&status(context, node).await?));
    let begin = Instant::now();
    set_label(context, node, DRIVER_UPGRADE, Some("upgrade-done")).await?;
    wait_for_status(context, node, "returned GPUs", |status| {
        drained_gpus(status).is_empty()
    })
    .await?;
    wait_until_held_again(context).await?;
    context.progress.report(format_args!(
        "{:.1?} from the end of the upgrade to the pod's memory",
        begin.elapsed()
    ));
    wait_for_node_event(context, node, "GpusReturned").await?;

    // An admin has drained the GPU that the pod does not use, and this drain stays.
    let unused = drained.gpus.iter().find(|gpu| gpu.pods.is_empty());
    let admins = unused.ok_or("the pod uses every GPU")?.uuid.clone();
    set_drain(context, node, &json!([admins])).await?;
    set_label(context, node, MIG_CONFIG, Some("pending")).await?;
    wait_for_status(context, node, "drained GPUs", all_drained).await?;
    set_label(context, node, MIG_CONFIG, Some("success")).await?;
    let only_admins = |status: &GpuNodeStatus| drained_gpus(status) == [admins.as_str()];
    wait_for_status(context, node, "the admin's drain alone", only_admins).await?;
    wait_until_held_again(context).await
}

/// Returns the UUIDs of the GPUs that are drained or about to be.
fn drained_gpus(status: &GpuNodeStatus) -> Vec<&str> {
    let gpus = status.gpus.iter();
    gpus.filter(|gpu| gpu.health.reason.starts_with("Drain"))
        .map(|gpu| gpu.uuid.as_str())
        .collect()
}

fn all_drained(status: &GpuNodeStatus) -> bool {
    let mut gpus = status.gpus.iter();
    !status.gpus.is_empty() && gpus.all(|gpu| gpu.health.reason == "Drained")
}

async fn status(context: &TrialContext, node: &str) -> Result<GpuNodeStatus, Failed> {
    let nodes: Api<GpuNode> = Api::all(context.environment.cluster.client());
    Ok(nodes.get(node).await?.status.unwrap_or_default())
}

/// Waits until a program of the pod can allocate again.
async fn wait_until_held_again(context: &TrialContext) -> Result<(), Failed> {
    let hold = ["hold", "--bytes=1Gi", "--then=exit"];
    let held = async || match context.exec(HOLDER, &hold).await {
        Ok(_) => Poll::Ready(()),
        Err(failed) => Poll::Pending(failed.message().unwrap_or_default().to_owned()),
    };
    Ok(wait::poll_until("the pod's memory", TIMEOUT, PAUSE, held).await?)
}

async fn set_label(
    context: &TrialContext,
    node: &str,
    label: &str,
    value: Option<&str>,
) -> Result<(), Failed> {
    let nodes: Api<Node> = Api::all(context.environment.cluster.client());
    let patch = json!({ "metadata": { "labels": { label: value } } });
    nodes
        .patch(node, &PatchParams::default(), &Patch::Merge(patch))
        .await?;
    Ok(())
}

async fn set_drain(context: &TrialContext, node: &str, gpus: &Value) -> Result<(), Failed> {
    let nodes: Api<GpuNode> = Api::all(context.environment.cluster.client());
    let patch = json!({ "spec": { "drain": gpus } });
    nodes
        .patch(node, &PatchParams::default(), &Patch::Merge(patch))
        .await?;
    Ok(())
}

async fn wait_for_node_event(
    context: &TrialContext,
    node: &str,
    reason: &str,
) -> Result<(), Failed> {
    let events: Api<Event> = Api::all(context.environment.cluster.client());
    let params = ListParams::default().fields(&format!("reason={reason}"));
    let is_about_node = |event: &Event| {
        let regarding = event.regarding.as_ref();
        regarding.is_some_and(|object| object.name.as_deref() == Some(node))
    };
    let poll = async || match events.list(&params).await {
        Ok(list) if list.items.iter().any(is_about_node) => Poll::Ready(()),
        Ok(list) => Poll::Pending(format!("{:?}", list.items)),
        Err(error) => Poll::Pending(error.to_string()),
    };
    let what = format!("an Event {reason}");
    Ok(wait::poll_until(&what, TIMEOUT, PAUSE, poll).await?)
}
