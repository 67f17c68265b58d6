//! Checks managed memory by the steps of its guide: within the quota of a pod's GPU, and beyond it
//! within a quota of its own.

use std::panic::{AssertUnwindSafe, resume_unwind};
use std::time::Duration;

use bursar_e2e::paths;
use bursar_e2e::pods::{GPU_MEMORY, PodBuilder, PodState};
use bursar_e2e::wait::{self, Poll};
use futures::FutureExt as _;
use k8s_openapi::api::core::v1::Node;
use kube::api::Api;
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use crate::budget_enforcement::{TEAMS, cleared, create_team, refusal};
use crate::enforcement::got_by_a_greedy_program;
use crate::quota::event_line;
use crate::shared_cluster::{START_TIMEOUT, TrialContext, node_trial};
use crate::status::{wait_for_metric, wait_for_status};

const GIB: u64 = 1 << 30;
const PAUSE: Duration = Duration::from_millis(200);
const RESOURCE: &str = "bursar.dev/managed-memory-gib";
/// The part of a GPU's quota that a context takes, with a margin.
const CONTEXT: u64 = GIB;
/// The size of an allocation.
const CHUNK: u64 = 256 << 20;
/// The findings of the audit that managed memory could cause.
const FINDINGS: [&str; 3] = ["over-quota", "over-managed", "unaccounted"];

pub(crate) fn trials() -> Vec<Trial> {
    vec![node_trial("enforcement/cluster/managed", async |context| {
        cleared(context, async |context| {
            let outcome = AssertUnwindSafe(guide_holds(context)).catch_unwind().await;
            let none = json!({ "gpuMemory": { "managedPerNode": "0" } });
            let reset = context.upgrade_release(&none).await;
            outcome
                .unwrap_or_else(|panic| resume_unwind(panic))
                .and(reset)
        })
        .await
    })]
}

/// The settings that a reader of the guide writes.
struct Guide {
    /// The chart's values.
    values: Value,
    /// A part of a budget's spec.
    budget: Value,
    /// The limits of a container.
    limits: Value,
}

impl Guide {
    /// Reads the indented blocks of the guide's steps.
    fn read() -> Result<Self, Failed> {
        let text =
            std::fs::read_to_string(paths::repository().join("docs/use/guides/managed-memory.md"))?;
        let mut blocks = vec![String::new()];
        for line in text.lines() {
            match (line.strip_prefix("       "), blocks.last_mut()) {
                (Some(line), Some(block)) => block.extend([line, "\n"]),
                (None, Some(block)) if !block.is_empty() => blocks.push(String::new()),
                _ => {}
            }
        }
        blocks.retain(|block| !block.is_empty());
        let [values, budget, resources] = &blocks[..] else {
            return Err(format!("the guide has other steps: {blocks:#?}").into());
        };
        let resources: Value = serde_yaml_ng::from_str(resources)?;
        Ok(Self {
            values: serde_yaml_ng::from_str(values)?,
            budget: serde_yaml_ng::from_str(budget)?,
            limits: resources["resources"]["limits"].clone(),
        })
    }

    /// A pod with the guide's limits, but for `changed`.
    fn pod(&self, context: &TrialContext, name: &str, changed: &[(&str, &str)]) -> PodBuilder {
        let mut pod = PodBuilder::new(name, &context.environment.probe_image);
        for (resource, amount) in self.limits.as_object().into_iter().flatten() {
            let amount = amount
                .as_str()
                .map_or_else(|| amount.to_string(), str::to_owned);
            let changed = changed.iter().find(|(of, _)| of == resource);
            pod = pod.limit(resource, changed.map_or(&*amount, |(_, amount)| *amount));
        }
        pod
    }

    /// The GiB of a limit.
    fn gib(&self, resource: &str) -> Result<u64, Failed> {
        let amount = self.limits[resource].as_u64();
        Ok(amount.ok_or_else(|| format!("the guide's pod has no {resource}"))?)
    }
}

async fn guide_holds(context: &mut TrialContext) -> Result<(), Failed> {
    let guide = Guide::read()?;
    let probe = context.environment.probe_image.clone();
    // Covered: device and managed memory together stay within the quota.
    let covered = PodBuilder::new("covered", &probe)
        .arguments(&["hold", "--managed", "--bytes=2Gi"])
        .gib(4);
    let pods = context.pods.clone();
    pods.create(&covered).await?;
    pods.wait_for_log_line("covered", START_TIMEOUT, event_line("holding"))
        .await?;
    covered_quota_holds(context).await?;
    // The row of the guide's table for a node that offers none.
    pods.create(&guide.pod(context, "oversubscribed", &[]))
        .await?;
    let missing = format!("Insufficient {RESOURCE}");
    let is_unscheduled = |state: &PodState| state.waiting_reason.contains(&missing);
    let what = "to be told that no node offers the memory";
    pods.wait_until("oversubscribed", what, START_TIMEOUT, is_unscheduled)
        .await?;
    pods.delete("oversubscribed").await?;
    pods.wait_until_deleted("oversubscribed", START_TIMEOUT)
        .await?;

    let node = pods.node("covered").await?;
    capacity_is_offered(context, &node, &guide.values).await?;
    budget_and_policy_refuse(context, &guide).await?;
    pods.delete("covered").await?;
    pods.wait_until_deleted("covered", START_TIMEOUT).await?;
    let gpu = oversubscribed_pod_has_a_quota_of_its_own(context, &guide).await?;
    neighbour_gets_its_quota(context, &guide, &gpu).await?;
    // Unaccounted memory is a finding after 10 of 30 audits.
    let (audits, all) = ("bursar_agent_audit_seconds_bucket", [("le", "+Inf")]);
    let before = wait_for_metric(context, &node, audits, &all, |_| true).await?;
    wait_for_metric(context, &node, audits, &all, |now| now >= before + 12.0).await?;
    for finding in FINDINGS {
        let (name, labels) = ("bursar_agent_findings_total", [("finding", finding)]);
        wait_for_metric(context, &node, name, &labels, |count| count == 0.0).await?;
    }
    context.history.check_none_failed_or_restarted().await
}

/// Step 1. The running pod is not affected.
async fn capacity_is_offered(
    context: &TrialContext,
    node: &str,
    values: &Value,
) -> Result<(), Failed> {
    context.upgrade_release(values).await?;
    let capacity = values["gpuMemory"]["managedPerNode"]
        .as_str()
        .unwrap_or_default();
    let gib: i32 = capacity.trim_end_matches("Gi").parse()?;
    wait_for_status(context, node, "managed memory", |status| {
        status.managed_memory.allocatable == gib
    })
    .await?;
    let nodes: Api<Node> = Api::all(context.environment.cluster.client());
    // The kubelet tells the API server a moment later.
    let poll = async || {
        let status = nodes.get(node).await.ok().and_then(|node| node.status);
        let allocatable = status.and_then(|status| status.allocatable);
        let offered = allocatable.and_then(|all| all.get(RESOURCE).cloned());
        match offered {
            Some(amount) if amount.0 == gib.to_string() => Poll::Ready(()),
            other => Poll::Pending(format!("{other:?}")),
        }
    };
    let what = format!("the node to offer {RESOURCE}");
    wait::poll_until(&what, START_TIMEOUT, PAUSE, poll).await?;
    covered_quota_holds(context).await
}

/// Device and managed memory together stay within the pod's 4 GiB, of which its own program holds 2
/// GiB of managed memory.
async fn covered_quota_holds(context: &TrialContext) -> Result<(), Failed> {
    for arguments in [&[][..], &["--managed"]] {
        let got = got_by_a_greedy_program(context, "covered", arguments).await?;
        // The contexts of both programs are charged.
        assert!(
            (GIB / 2..=2 * GIB).contains(&got),
            "{arguments:?} got {got} bytes"
        );
    }
    Ok(())
}

/// Step 2, and the rule about host memory of step 3.
async fn budget_and_policy_refuse(context: &TrialContext, guide: &Guide) -> Result<(), Failed> {
    let spec = guide.budget["spec"].clone();
    let limit = spec["managedMemory"]["limit"].as_str().unwrap_or_default();
    let more = limit.trim_end_matches("Gi").parse::<u64>()? + 1;
    let client = context.environment.cluster.client();
    let pods = create_team(&client, TEAMS[0], spec).await?;
    let managed = guide.gib(RESOURCE)?;
    let (beyond, host) = (more.to_string(), format!("{more}Gi"));
    let less = format!("{}Gi", managed - 1);
    let enough = format!("write limits.memory of at least {}Mi", managed * 1024);
    let refused = [
        (
            guide.pod(context, "beyond", &[(RESOURCE, &beyond), ("memory", &host)]),
            "exceeded quota",
        ),
        (
            guide.pod(context, "unbacked", &[("memory", &less)]),
            &*enough,
        ),
    ];
    for (plan, words) in refused {
        let message = refusal(pods.create(&plan).await)?;
        context
            .progress
            .report(format_args!("{}: {message}", plan.name()));
        assert!(message.contains(words), "{message}");
    }
    let fits = guide.pod(context, "fits", &[]).arguments(&["report"]);
    pods.create(&fits).await?;
    pods.wait_for_log_line("fits", START_TIMEOUT, event_line("report"))
        .await?;
    pods.delete("fits").await?;
    Ok(pods.wait_until_deleted("fits", START_TIMEOUT).await?)
}

/// Step 3. Returns the UUID of the GPU, on which the pod's managed memory is.
async fn oversubscribed_pod_has_a_quota_of_its_own(
    context: &TrialContext,
    guide: &Guide,
) -> Result<String, Failed> {
    let pod = guide.pod(context, "oversubscribed", &[]);
    let chunk = format!("--chunk={CHUNK}");
    context
        .pods
        .create(&pod.arguments(&["greedy", "--managed", &chunk]))
        .await?;
    let refused = context
        .pods
        .wait_for_log_line("oversubscribed", START_TIMEOUT, event_line("refused"))
        .await?;
    let managed = guide.gib(RESOURCE)? * GIB;
    assert_eq!(
        (&refused["refused"]["code"], &refused["got"]),
        (&json!(2), &json!(managed)),
        "{refused}"
    );
    // The quota of the GPU is another one.
    let output = context
        .exec("oversubscribed", &["greedy", &chunk, "--then=exit"])
        .await?;
    let refused = output.lines().find_map(event_line("refused"));
    let refused = refused.ok_or_else(|| format!("not refused: {output}"))?;
    let (quota, got) = (guide.gib(GPU_MEMORY)? * GIB, &refused["got"]);
    let got = got.as_u64().unwrap_or(u64::MAX);
    // The contexts of both programs are charged.
    assert!(got <= quota && got + 2 * CONTEXT >= quota, "{refused}");
    let uuid = refused["device"]["uuid"].as_str();
    Ok(uuid.ok_or("the GPU has no UUID")?.to_owned())
}

/// The driver moves managed memory to the host when a neighbour needs the room.
async fn neighbour_gets_its_quota(
    context: &TrialContext,
    guide: &Guide,
    gpu: &str,
) -> Result<(), Failed> {
    let sizes = context.environment.gpu_sizes_in_quanta().await?;
    let quota = sizes[0] - u32::try_from(guide.gib(GPU_MEMORY)?)?;
    // The best fit is the pod's GPU, once the agent has released what ended pods had there.
    let node = context.pods.node("oversubscribed").await?;
    let what = format!("{quota} GiB of {gpu} to be free");
    wait_for_status(context, &node, &what, |status| {
        let mut gpus = status.gpus.iter();
        gpus.any(|report| {
            report.uuid == gpu && report.largest_free == i32::try_from(quota).unwrap_or(0)
        })
    })
    .await?;
    let chunk = format!("--chunk={CHUNK}");
    let plan = PodBuilder::new("neighbour", &context.environment.probe_image)
        .arguments(&["greedy", &chunk])
        .gib(quota);
    context.pods.create(&plan).await?;
    let refused = context
        .pods
        .wait_for_log_line("neighbour", START_TIMEOUT, event_line("refused"))
        .await?;
    assert_eq!(
        refused["device"]["uuid"], gpu,
        "both pods are on one GPU: {refused}"
    );
    let got = refused["got"].as_u64().unwrap_or_default();
    assert!(
        got + CONTEXT >= u64::from(quota) * GIB,
        "not its quota: {refused}"
    );
    // The pod that lost its pages goes on.
    let state = context.pods.state("oversubscribed").await?;
    assert!(state.running && state.restarts == 0, "{state:?}");
    Ok(())
}
