//! Checks that the quota of a running pod follows the quota overrides of its `GpuNode`, and that of
//! its managed memory those of its budget.

use std::panic::{AssertUnwindSafe, resume_unwind};

use bursar_crds::gpu_node::{QuotaState, QuotaStatus};
use bursar_crds::{GpuMemoryBudget, GpuNode};
use bursar_e2e::pods::PodBuilder;
use futures::FutureExt as _;
use kube::api::{Api, Patch, PatchParams};
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use crate::budget_enforcement::create_team;
use crate::quota::event_line;
use crate::shared_cluster::{NAMESPACE, START_TIMEOUT, TrialContext, node_trial, trial};
use crate::status;
use crate::waiters::remove_workloads;

const GIB: u64 = 1 << 30;
/// A pod that requests 8 GiB and holds one.
const POD: &str = "resized";
/// A pod that requests 4 GiB of managed memory besides.
const MANAGED_POD: &str = "resized-managed";
/// The part of the quota that the contexts of its two programs take, with a margin.
const CONTEXTS: u64 = 2 * GIB;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial(
            "enforcement/cluster/resize",
            running_pods_quota_follows_the_gpu_node,
        ),
        node_trial("enforcement/cluster/resize-managed", async |context| {
            let resized = AssertUnwindSafe(managed_quota_follows_the_budget(context));
            let outcome = resized.catch_unwind().await;
            let removed = remove_workloads(context).await;
            let none = json!({ "gpuMemory": { "managedPerNode": "0" } });
            let reset = context.upgrade_release(&none).await;
            let outcome = outcome.unwrap_or_else(|panic| resume_unwind(panic));
            outcome.and(removed).and(reset)
        }),
    ]
}

/// The pod, container and GPU of a quota override.
struct QuotaOverride {
    node: String,
    pod_uid: String,
    gpu: String,
}

impl QuotaOverride {
    async fn of(context: &TrialContext, pod: &str) -> Result<Self, Failed> {
        let pods = &context.pods;
        let holding = pods
            .wait_for_log_line(pod, START_TIMEOUT, event_line("holding"))
            .await?;
        let gpu = holding["device"]["uuid"].as_str();
        let pod_uid = pods.get(pod).await?.metadata.uid;
        Ok(Self {
            node: pods.node(pod).await?,
            pod_uid: pod_uid.ok_or("the pod has no UID")?,
            gpu: gpu.ok_or("the GPU has no UUID")?.to_owned(),
        })
    }

    /// Sets or lifts the override, and waits until the agent has observed it.
    async fn apply(&self, context: &TrialContext, quota: Option<&str>) -> Result<(), Failed> {
        let Self { node, pod_uid, .. } = self;
        let quotas: Vec<Value> = quota
            .iter()
            .map(|quota| json!({ "podUid": pod_uid, "container": "main", "quota": quota }))
            .collect();
        let nodes: Api<GpuNode> = Api::all(context.environment.cluster.client());
        let patch = Patch::Merge(json!({ "spec": { "quotas": quotas } }));
        let patched = nodes.patch(node, &PatchParams::default(), &patch).await?;
        let generation = patched.metadata.generation;
        let what = format!("{quota:?} to be seen");
        status::wait_for_status(context, node, &what, |status| {
            status.observed_generation >= generation && status.quotas.len() == quotas.len()
        })
        .await?;
        Ok(())
    }

    /// Waits until the override has this state and amount.
    async fn wait_for_state(
        &self,
        context: &TrialContext,
        state: QuotaState,
        gib: u64,
    ) -> Result<QuotaStatus, Failed> {
        let is_so = |quota: &&QuotaStatus| {
            let in_force = quota.quota.as_ref().map(bursar_crds::Amount::bytes);
            quota.pod_uid == self.pod_uid
                && quota.state == state
                && matches!(in_force, Some(Ok(bytes)) if bytes == gib * GIB)
        };
        let what = format!("{gib} GiB to be {state:?}");
        let status = status::wait_for_status(context, &self.node, &what, |status| {
            status.quotas.iter().any(|quota| is_so(&quota))
        })
        .await?;
        let found = status.quotas.iter().find(is_so);
        Ok(found.ok_or("it was there")?.clone())
    }

    /// Waits until the agent's metric of an amount of the pod's memory satisfies `wanted`.
    async fn wait_for_metric(
        &self,
        context: &TrialContext,
        amount: &str,
        wanted: impl Fn(u64) -> bool,
    ) -> Result<(), Failed> {
        let (amount, part) = match amount {
            "granted" => ("charged", Some(amount)),
            _ => (amount, None),
        };
        let name = format!("bursar_container_memory_{amount}_bytes");
        let mut labels = vec![("pod", POD), ("account", &self.gpu)];
        labels.extend(part.map(|part| ("part", part)));
        status::wait_for_metric(context, &self.node, &name, &labels, |value| {
            wanted(value as u64)
        })
        .await?;
        Ok(())
    }
}

fn held_bytes(answer: &Value) -> u64 {
    answer["held"].as_u64().unwrap_or(u64::MAX)
}

async fn running_pods_quota_follows_the_gpu_node(context: &mut TrialContext) -> Result<(), Failed> {
    let plan = PodBuilder::new(POD, &context.environment.probe_image)
        .arguments(&["hold", "--bytes=1Gi"])
        .gib(8);
    context.pods.create(&plan).await?;
    let quota_override = QuotaOverride::of(context, POD).await?;
    let mut program = context.scripted_program(POD)?;
    let report = program.execute("look").await?;
    assert_eq!(report["device"]["total"], 8 * GIB, "{report}");

    // Lowered before use: the program gets no more than the override.
    quota_override.apply(context, Some("4Gi")).await?;
    quota_override
        .wait_for_state(context, QuotaState::Applied, 4)
        .await?;
    let full = program.execute("take 8Gi").await?;
    assert_eq!(full["refused"]["code"], 2, "{full}");
    assert_eq!(full["device"]["total"], 4 * GIB, "{full}");
    let got = held_bytes(&full) + GIB;
    assert!(got <= 4 * GIB && got + CONTEXTS >= 4 * GIB, "{full}");

    // Raised: the refused program gets the added memory, and sees it.
    quota_override.apply(context, Some("7Gi")).await?;
    quota_override
        .wait_for_state(context, QuotaState::Applied, 7)
        .await?;
    let more = program.execute("take 2560Mi").await?;
    assert_eq!(more["refused"], Value::Null, "{more}");
    assert_eq!(more["device"]["total"], 7 * GIB, "{more}");

    // The pod's request is the maximum of an override.
    quota_override.apply(context, Some("100Gi")).await?;
    quota_override
        .wait_for_state(context, QuotaState::Applied, 8)
        .await?;
    let report = program.execute("look").await?;
    assert_eq!(report["device"]["total"], 8 * GIB, "{report}");

    // Lowered below use: no process loses memory, and no process gets more.
    quota_override.apply(context, Some("4Gi")).await?;
    let pending = quota_override
        .wait_for_state(context, QuotaState::Pending, 4)
        .await?;
    let used = pending.used.as_ref().map(bursar_crds::Amount::bytes);
    let holds = held_bytes(&more) + GIB;
    assert!(
        matches!(used, Some(Ok(used)) if used >= holds && used <= 7 * GIB),
        "{pending:?}"
    );
    let refused = program.execute("take 64Mi").await?;
    assert_eq!(refused["refused"]["code"], 2, "{refused}");
    assert_eq!(held_bytes(&refused), held_bytes(&more), "{refused}");
    assert_eq!(refused["device"]["total"], 4 * GIB, "{refused}");
    assert_eq!(refused["device"]["free"], 0, "{refused}");
    quota_override
        .wait_for_metric(context, "used", |used| used >= holds)
        .await?;

    // The program frees; the agent does not grant the freed memory above the quota again.
    let less = program.execute("free 4Gi").await?;
    quota_override
        .wait_for_state(context, QuotaState::Applied, 4)
        .await?;
    for amount in ["quota", "granted", "used"] {
        quota_override
            .wait_for_metric(context, amount, |bytes| bytes <= 4 * GIB)
            .await?;
    }
    // Another program of the pod gets the freed memory within the quota, and no more.
    let output = context
        .exec(POD, &["greedy", "--chunk=64Mi", "--then=exit"])
        .await?;
    let greedy = output.lines().find_map(event_line("refused"));
    let greedy = greedy.ok_or_else(|| format!("not refused: {output}"))?;
    assert_eq!(greedy["refused"]["code"], 2, "{greedy}");
    let got = greedy["got"].as_u64().unwrap_or_default();
    let all = got + held_bytes(&less) + GIB;
    assert!(got > 0 && all <= 4 * GIB, "{greedy}");

    // Lifted: the pod has its requested memory.
    quota_override.apply(context, None).await?;
    let whole = program.execute("take 4Gi").await?;
    assert_eq!(whole["refused"], Value::Null, "{whole}");
    assert_eq!(whole["device"]["total"], 8 * GIB, "{whole}");
    context.history.check_none_failed_or_restarted().await
}

async fn managed_quota_follows_the_budget(context: &mut TrialContext) -> Result<(), Failed> {
    let offered = json!({ "gpuMemory": { "managedPerNode": "8Gi" } });
    context.upgrade_release(&offered).await?;
    let plan = PodBuilder::new(MANAGED_POD, &context.environment.probe_image)
        .arguments(&["hold", "--bytes=1Gi"])
        .gib(4)
        .limit("bursar.dev/managed-memory-gib", "4")
        .limit("memory", "6Gi");
    context.pods.create(&plan).await?;
    let quota_override = QuotaOverride::of(context, MANAGED_POD).await?;
    let client = context.environment.cluster.client();
    let spec =
        json!({ "deviceMemory": { "guaranteed": "16Gi" }, "managedMemory": { "limit": "4Gi" } });
    create_team(&client, NAMESPACE, spec).await?;
    let budgets: Api<GpuMemoryBudget> = Api::namespaced(client, NAMESPACE);
    // Lowered, raised and lifted.
    for (lowered, gib) in [(Some("2Gi"), 2), (Some("3Gi"), 3), (None, 4)] {
        let overrides: Vec<Value> = lowered
            .iter()
            .map(|amount| json!({ "pod": MANAGED_POD, "managedMemory": amount }))
            .collect();
        let patch = Patch::Merge(json!({ "spec": { "overrides": overrides } }));
        budgets
            .patch("default", &PatchParams::default(), &patch)
            .await?;
        if lowered.is_some() {
            quota_override
                .wait_for_state(context, QuotaState::Applied, gib)
                .await?;
        } else {
            let node = &quota_override.node;
            status::wait_for_status(context, node, "no override to be left", |status| {
                status.quotas.is_empty()
            })
            .await?;
        }
        let greedy = ["greedy", "--managed", "--chunk=256Mi", "--then=exit"];
        let output = context.exec(MANAGED_POD, &greedy).await?;
        let refused = output.lines().find_map(event_line("refused"));
        let refused = refused.ok_or_else(|| format!("not refused: {output}"))?;
        assert_eq!(
            (&refused["refused"]["code"], &refused["got"]),
            (&json!(2), &json!(gib * GIB)),
            "{refused}"
        );
    }
    context.history.check_none_failed_or_restarted().await
}
