//! Checks the attestation of containers of a real runtime, whose pods cover driver files by volumes
//! and variables.

use std::collections::BTreeSet;

use bursar_crds::conditions::gpu_node::AUDITED;
use bursar_crds::gpu_node::EnforcementGap;
use bursar_e2e::pods::PodBuilder;
use bursar_e2e::sim;
use jiff::SignedDuration;
use k8s_openapi::api::events::v1::Event;
use libtest_mimic::{Failed, Trial};

use crate::enforcement::quota_holds;
use crate::quota::event_line;
use crate::shared_cluster::{START_TIMEOUT, TrialContext, node_trial};
use crate::status;

const GIB: u64 = 1 << 30;
/// The agent reports the faster of two bypasses within this time of the program's first line. It
/// takes less than a second on an idle machine.
const DETECTED: SignedDuration = SignedDuration::from_secs(10);
/// The agent reports every bypass within this time, also on a busy machine.
const DETECTED_AT_LAST: SignedDuration = SignedDuration::from_secs(60);
const ENFORCED: &str = "bursar_container_enforced";
const NOT_ENFORCED: &str = "GpuQuotaNotEnforced";

pub(crate) fn trials() -> Vec<Trial> {
    vec![node_trial(
        "enforcement/cluster/covered",
        covered_driver_files_are_enforced_or_reported,
    )]
}

/// Makes a pod that holds 1 of its 3 GiB on the GPU with this ordinal, with a variable that asks
/// for all GPUs.
fn holder(context: &TrialContext, name: &str, gpu: u32) -> PodBuilder {
    PodBuilder::new(name, &context.environment.probe_image)
        .arguments(&["hold", "--bytes=1Gi", &format!("--device={gpu}")])
        .with_env("NVIDIA_VISIBLE_DEVICES", "all")
        .gib(3)
}

async fn covered_driver_files_are_enforced_or_reported(
    context: &mut TrialContext,
) -> Result<(), Failed> {
    context.pods.create(&holder(context, "plain", 0)).await?;
    let holding = context
        .pods
        .wait_for_log_line("plain", START_TIMEOUT, event_line("holding"));
    let uuid = holding.await?["device"]["uuid"].clone();
    // All pods are bound to the same GPU, which has room for them.
    let gpu_index = u32::from(uuid != sim::uuid(0));
    let other = 1 - gpu_index;

    // containerd replaces the pod's variables and mounts by the device's of the same name. Of two
    // nested mounts it mounts the deeper one last.
    let covers = holder(context, "covers", 0)
        .with_empty_dir("/opt/bursar")
        .with_empty_dir("/opt/bursar/lib")
        .with_empty_dir("/run/bursar")
        .with_empty_dir("/etc/ld.so.preload")
        .with_downward_api_file("/etc//ld.so.preload")
        .with_downward_api_file("/usr/lib64/libcuda.so.1");
    let inside =
        holder(context, "inside", 0).with_downward_api_file("/opt/bursar/lib/libcuda.so.1");
    // The device cgroup denies this device node, so the agent must not report it. libcuda creates
    // such nodes itself.
    let sees = holder(context, "sees", 0).with_host_path(&format!("/dev/nvidia{other}"));
    let mighty = holder(context, "mighty", gpu_index).privileged();
    for plan in [&covers, &inside, &sees, &mighty] {
        context.pods.create(plan).await?;
    }

    assert_enforced(context, "plain").await?;
    assert_enforced(context, "covers").await?;
    assert_enforced(context, "sees").await?;
    let mounted = "/opt/bursar/lib/libcuda.so.1";
    let times = [
        assert_reported(context, "inside", "MountedOver", mounted).await?,
        assert_reported(context, "mighty", "Privileged", "CAP_SYS_ADMIN").await?,
    ];
    assert!(times.iter().min() <= Some(&DETECTED), "{times:?}");
    let node = context.pods.node("plain").await?;
    let status = status::wait_for_status(context, &node, "an audit", |status| {
        let mut conditions = status.conditions.iter();
        conditions.any(|condition| {
            (condition.type_.as_str(), condition.status.as_str()) == (AUDITED, "True")
        })
    })
    .await?;
    let at_fault = BTreeSet::from(["inside", "mighty"]);
    let pods = status.not_enforced.iter().map(|gap| gap.pod.as_str());
    assert_eq!(pods.collect::<BTreeSet<_>>(), at_fault, "{status:?}");
    // The agent has reported no other pod either, in earlier trials included.
    let events = status::events(context, NOT_ENFORCED).await?;
    let wronged = |event: &&Event| status::pod_of(event).is_none_or(|pod| !at_fault.contains(pod));
    let wronged: Vec<_> = events.iter().filter(wronged).collect();
    assert!(wronged.is_empty(), "{wronged:#?}");
    context.history.check_none_failed_or_restarted().await
}

/// Checks that the pod's programs see one GPU of their quota and get no more, and that the agent
/// counts the pod as enforced.
async fn assert_enforced(context: &TrialContext, pod: &str) -> Result<(), Failed> {
    context
        .pods
        .wait_for_log_line(pod, START_TIMEOUT, event_line("holding"))
        .await?;
    quota_holds(context, pod).await?;
    let output = context.exec(pod, &["report"]).await?;
    let report = output.lines().find_map(event_line("report"));
    let report = report.ok_or_else(|| format!("no report: {output}"))?;
    assert_eq!(report["count"], 1, "{report}");
    assert_eq!(report["devices"][0]["total"], 3 * GIB, "{report}");
    assert_eq!(report["visible"], "void", "{report}");
    assert_enforced_metric(context, pod, "", 1.0).await
}

/// Checks that the agent reports the pod in an Event, a metric and the `GpuNode` with the reason.
/// Returns the time since the pod's first line.
async fn assert_reported(
    context: &TrialContext,
    pod: &str,
    reason: &str,
    what: &str,
) -> Result<SignedDuration, Failed> {
    context
        .pods
        .wait_for_log_line(pod, START_TIMEOUT, event_line("holding"))
        .await?;
    let began = context
        .pods
        .first_log_time(pod)
        .await?
        .ok_or("it said nothing")?;
    let (at, note) = status::wait_for_event(context, pod, NOT_ENFORCED, what).await?;
    let took = at.duration_since(began);
    context
        .progress
        .report(format_args!("{took:#} after {pod}'s first word: {note}"));
    assert!(took <= DETECTED_AT_LAST, "{took:#}");
    assert_enforced_metric(context, pod, reason, 0.0).await?;
    let node = context.pods.node(pod).await?;
    let is_expected = |gap: &EnforcementGap| gap.pod == pod && gap.reason == reason;
    status::wait_for_status(context, &node, &format!("{pod} in it"), |status| {
        status.not_enforced.iter().any(is_expected)
    })
    .await?;
    Ok(took)
}

/// Checks that the agent's metric of the pod has this reason and value.
async fn assert_enforced_metric(
    context: &TrialContext,
    pod: &str,
    reason: &str,
    value: f64,
) -> Result<(), Failed> {
    let node = context.pods.node(pod).await?;
    let labels = [("pod", pod), ("container", "main"), ("reason", reason)];
    status::wait_for_metric(context, &node, ENFORCED, &labels, |now| now == value).await?;
    Ok(())
}
