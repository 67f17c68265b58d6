//! Checks that quotas hold for pods of every user, and while the agent is replaced.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::time::{Duration, Instant};

use bursar_e2e::chart;
use bursar_e2e::images;
use bursar_e2e::pods::PodBuilder;
use bursar_e2e::wait::{self, Poll};
use bursar_e2e::workspace::{self, Profile};
use k8s_openapi::api::apps::v1::DaemonSet;
use kube::ResourceExt;
use kube::api::{Api, ListParams, Patch, PatchParams};
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use crate::quota::event_line;
use crate::shared_cluster::{START_TIMEOUT, TrialContext, node_trial, trial};

const GIB: u64 = 1 << 30;
/// Pods that allocate and free continuously.
const CHURNING: [&str; 2] = ["churns-a", "churns-b"];
/// A pod that holds half of its quota.
const HALF: &str = "half";
/// The part of a quota that a context may take, with a margin.
const CONTEXT: u64 = GIB;
/// The kubelet stops the old agent within its grace period of 30 s and starts the new one, while
/// programs allocate without pause.
const REPLACED: Duration = Duration::from_secs(300);
/// A program waits so long for an agent before it is refused.
const AGENT_WAIT: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(100);

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial(
            "enforcement/cluster/users",
            quota_holds_for_pods_of_every_user,
        ),
        node_trial(
            "enforcement/cluster/upgrade",
            quotas_hold_while_the_agent_is_replaced,
        ),
    ]
}

async fn quota_holds_for_pods_of_every_user(context: &mut TrialContext) -> Result<(), Failed> {
    let probe = context.environment.probe_image.clone();
    let greedy = |name: &str| {
        PodBuilder::new(name, &probe)
            .arguments(&["greedy", "--chunk=64Mi"])
            .gib(4)
    };
    let plans = [
        greedy("restricted").restricted(),
        greedy("namespaced").user_namespace(),
        greedy("both").restricted().user_namespace(),
    ];
    for plan in &plans {
        context.pods.create(plan).await?;
    }
    for plan in &plans {
        let refused = context
            .pods
            .wait_for_log_line(plan.name(), START_TIMEOUT, event_line("refused"))
            .await?;
        assert_refused_at_quota(&refused, 4);
    }
    context.history.check_none_failed_or_restarted().await
}

/// Checks that a greedy program saw its quota, got all of it except a context, and was refused for
/// lack of memory.
fn assert_refused_at_quota(refused: &Value, gib: u64) {
    let quota = gib * GIB;
    assert_eq!(refused["refused"]["code"], 2, "{refused}");
    assert_eq!(refused["device"]["total"], quota, "{refused}");
    let got = refused["got"].as_u64().unwrap_or(u64::MAX);
    assert!(
        got <= quota && got + CONTEXT >= quota,
        "not its quota: {refused}"
    );
}

async fn quotas_hold_while_the_agent_is_replaced(context: &mut TrialContext) -> Result<(), Failed> {
    let before = agent_image(context).await?;
    let folder = tempfile::tempdir()?;
    let after = import_another_build(context, folder.path()).await?;
    assert_ne!(before, after);

    let probe = context.environment.probe_image.clone();
    let pods = context.pods.clone();
    for name in CHURNING {
        let plan = PodBuilder::new(name, &probe)
            .arguments(&["churn", "--bytes=4Gi"])
            .gib(6);
        pods.create(&plan).await?;
        pods.wait_for_log_line(name, START_TIMEOUT, event_line("churning"))
            .await?;
    }
    let plan = PodBuilder::new(HALF, &probe)
        .arguments(&["hold", "--bytes=2Gi"])
        .gib(4);
    pods.create(&plan).await?;
    pods.wait_for_log_line(HALF, START_TIMEOUT, event_line("holding"))
        .await?;
    assert_eq!(mapped_shims(context)?.len(), 1);

    for (round, image) in [&after, &before].into_iter().enumerate() {
        quota_holds(context, HALF).await?;
        let begin = Instant::now();
        replace_agent(context, image).await?;
        // The old agent exits and the new one starts; quotas must hold throughout.
        let (mut held, mut refused) = (0, 0);
        loop {
            let start = Instant::now();
            match quota_holds(context, HALF).await {
                Ok(()) => held += 1,
                // A program that starts without an agent waits for one, and is then refused.
                Err(failed) if start.elapsed() >= AGENT_WAIT && is_refused_at_start(&failed) => {
                    refused += 1;
                }
                Err(failed) => return Err(failed),
            }
            if is_replaced(context, image).await? {
                break;
            }
            assert!(begin.elapsed() < REPLACED, "no agent of {image} is ready");
        }
        context.progress.report(format_args!(
            "the agent of another build is ready after {:.1?}; meanwhile {held} greedy programs were held and \
             {refused} refused at their start",
            begin.elapsed()
        ));
        quota_holds(context, HALF).await?;
        let newcomer = format!("newcomer-{round}");
        let plan = PodBuilder::new(&newcomer, &probe)
            .arguments(&["greedy", "--chunk=64Mi"])
            .gib(4);
        pods.create(&plan).await?;
        let refused = pods
            .wait_for_log_line(&newcomer, START_TIMEOUT, event_line("refused"))
            .await?;
        assert_refused_at_quota(&refused, 4);
    }
    // The newcomer of the other build uses the other shim, and all other containers use the first
    // one.
    assert_eq!(mapped_shims(context)?.len(), 2);
    for name in CHURNING {
        assert_still_running(context, name).await?;
        let log = pods.log(name).await?;
        assert!(!log.contains("refused"), "{name} was refused: {log}");
    }
    context.history.check_none_failed_or_restarted().await
}

/// Whether a program got no context for lack of memory.
fn is_refused_at_start(failed: &Failed) -> bool {
    let message = failed.message().unwrap_or_default();
    message.contains("cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY")
}

/// Checks that a greedy program gets at most the 2 GiB that the other program leaves of the quota.
pub(crate) async fn quota_holds(context: &TrialContext, pod: &str) -> Result<(), Failed> {
    let got = got_by_a_greedy_program(context, pod, &[]).await?;
    assert!(got <= 2 * GIB, "{pod} got {got} bytes, more than its quota");
    Ok(())
}

/// Returns the bytes that a greedy program with these arguments gets in the pod before the first
/// refusal.
pub(crate) async fn got_by_a_greedy_program(
    context: &TrialContext,
    pod: &str,
    arguments: &[&str],
) -> Result<u64, Failed> {
    let greedy = ["greedy", "--chunk=64Mi", "--then=exit"];
    let output = context.exec(pod, &[&greedy, arguments].concat()).await?;
    let refused = output.lines().find_map(event_line("refused"));
    let refused = refused.ok_or_else(|| format!("not refused: {output}"))?;
    assert_eq!(refused["refused"]["code"], 2, "{refused}");
    let got = refused["got"].as_u64();
    Ok(got.ok_or_else(|| format!("no amount: {refused}"))?)
}

/// Checks that the program in the pod still allocates and frees.
async fn assert_still_running(context: &TrialContext, pod: &str) -> Result<(), Failed> {
    let rounds = |log: &str| log.lines().filter_map(event_line("churning")).count();
    let rounds_before = rounds(&context.pods.log(pod).await?);
    let poll = async || match context.pods.log(pod).await {
        Ok(log) if rounds(&log) > rounds_before => Poll::Ready(()),
        Ok(log) => Poll::Pending(format!("{} lines", rounds(&log))),
        Err(error) => Poll::Pending(error.to_string()),
    };
    let what = format!("{pod} to go on");
    Ok(wait::poll_until(&what, START_TIMEOUT, PAUSE, poll).await?)
}

/// Imports images whose shim has an additional byte into the node, and returns the reference of the
/// agent's.
async fn import_another_build(
    context: &mut TrialContext,
    folder: &std::path::Path,
) -> Result<String, Failed> {
    const SHIM: &str = "libbursar_shim.so";
    let binaries = workspace::build(Profile::Dev, false)?;
    let built = binaries.get(SHIM).ok_or("no shim was built")?;
    let shim = folder.join(SHIM);
    fs::copy(built, &shim)?;
    // The byte follows the last section, which no loader reads.
    fs::OpenOptions::new()
        .append(true)
        .open(&shim)?
        .write_all(b"2")?;
    let (_, archives) = images::write_all(&binaries.with(SHIM, shim), folder)?;
    let agent = archives.get("agent").ok_or("no image of the agent")?;
    context.local()?.import_image(&agent.path).await?;
    Ok(agent.reference.clone())
}

/// Returns the folders of shims that containers on the node have mounted.
fn mapped_shims(context: &mut TrialContext) -> Result<BTreeSet<String>, Failed> {
    let mut found = BTreeSet::new();
    for text in context.node_files()?.cdi_files()?.values() {
        let spec: Value = serde_json::from_str(text)?;
        let mounts = &spec["devices"][0]["containerEdits"]["mounts"];
        let shim = mounts.as_array().into_iter().flatten().find_map(|mount| {
            (mount["containerPath"] == "/opt/bursar/lib").then(|| mount["hostPath"].to_string())
        });
        found.extend(shim);
    }
    Ok(found)
}

fn agents(context: &TrialContext) -> Api<DaemonSet> {
    Api::namespaced(context.environment.cluster.client(), chart::NAMESPACE)
}

async fn agent_set(context: &TrialContext) -> Result<DaemonSet, Failed> {
    let ours = ListParams::default().labels("app.kubernetes.io/component=agent");
    let sets = agents(context).list(&ours).await?.items;
    Ok(sets.into_iter().next().ok_or("there is no agent")?)
}

async fn agent_image(context: &TrialContext) -> Result<String, Failed> {
    let set = agent_set(context).await?;
    let pod = set.spec.and_then(|spec| spec.template.spec);
    let image = pod.and_then(|pod| pod.containers.into_iter().next()?.image);
    Ok(image.ok_or("the agent has no image")?)
}

/// Replaces the agents by ones of the same image, as an upgrade of their configuration does.
pub(crate) async fn roll_out_agents(context: &TrialContext) -> Result<(), Failed> {
    let (set, image) = (agent_set(context).await?, agent_image(context).await?);
    let annotations = json!({ "bursar.dev/rolled-out": set.metadata.resource_version });
    let patch = json!({ "spec": { "template": { "metadata": { "annotations": annotations } } } });
    let (name, rules) = (set.name_any(), PatchParams::default());
    agents(context)
        .patch(&name, &rules, &Patch::Strategic(patch))
        .await?;
    let poll = async || match is_replaced(context, &image).await {
        Ok(true) => Poll::Ready(()),
        Ok(false) => Poll::Pending("an agent is old or not ready".to_owned()),
        Err(error) => Poll::Pending(format!("{error:?}")),
    };
    Ok(wait::poll_until("the agents' roll-out", REPLACED, PAUSE, poll).await?)
}

/// Changes the agents' image, as `helm upgrade` does.
async fn replace_agent(context: &TrialContext, image: &str) -> Result<(), Failed> {
    let set = agent_set(context).await?;
    let pod = set
        .spec
        .as_ref()
        .and_then(|spec| spec.template.spec.as_ref());
    let container = pod
        .and_then(|pod| pod.containers.first())
        .ok_or("no container")?;
    let patch = json!({"spec": {"template": {"spec": {"containers": [{"name": container.name, "image": image}]}}}});
    agents(context)
        .patch(
            &set.name_any(),
            &PatchParams::default(),
            &Patch::Strategic(patch),
        )
        .await?;
    Ok(())
}

/// Returns whether every agent is ready with this image.
async fn is_replaced(context: &TrialContext, image: &str) -> Result<bool, Failed> {
    let set = agent_set(context).await?;
    let Some(status) = set.status else {
        return Ok(false);
    };
    let is_observed = status.observed_generation == set.metadata.generation;
    let scheduled = status.desired_number_scheduled;
    let is_current =
        status.updated_number_scheduled == Some(scheduled) && status.number_ready == scheduled;
    Ok(is_observed && is_current && agent_image(context).await? == image)
}
