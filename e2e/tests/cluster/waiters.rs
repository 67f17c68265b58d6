//! Pods that wait for a GPU: kept from nodes that have none for them, moved to one that has, or given room; by an
//! operator that is killed in the middle of it.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use bursar_crds::{GpuMemoryBudget, GpuNode};
use bursar_e2e::pods::{GPU_MEMORY, State};
use bursar_e2e::wait::{self, Look};
use futures::future::try_join_all;
use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Node, NodeAffinity, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use crate::operator;
use crate::placement::{holder, run_each};
use crate::stage::{NAMESPACE, SOON, Stage, trial};
use crate::told;

const PAUSE: Duration = Duration::from_millis(200);
/// A node that exists in the API server only: pods can be scheduled to it.
const ELSEWHERE: &str = "elsewhere";
const LARGEST_FREE: &str = "bursar.dev/largest-free-gib";
/// How long the chart lets a disruption budget keep a pod.
const GRACE: Duration = Duration::from_secs(bursar_e2e::chart::DISRUPTION_GRACE_SECONDS);
/// Owner against borrower, so many times.
const ROUNDS: usize = 100;
/// Each time that so many pairs have come the operator is killed.
const KILLED: usize = 10;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("operator/cluster/steered", steered),
        trial("operator/cluster/moved", moved),
        trial("operator/cluster/owners", owners_against_borrowers),
        trial("operator/cluster/disruption", a_disruption_budget_and_a_job),
        trial("operator/cluster/override", an_override_lowers_a_quota),
    ]
}

async fn kill_operator(stage: &Stage) -> Result<(), Failed> {
    operator::kill(&stage.scene.cluster.client()).await
}

fn nodes(stage: &Stage) -> Api<Node> {
    Api::all(stage.scene.cluster.client())
}

/// Waits until a label of a node says so much; how long that took.
async fn until_label(
    stage: &Stage,
    node: &str,
    label: &str,
    value: &str,
) -> Result<Duration, Failed> {
    let begin = Instant::now();
    let nodes = nodes(stage);
    let look = async || match nodes.get(node).await {
        Ok(found) if found.labels().get(label).map(String::as_str) == Some(value) => {
            Look::Found(())
        }
        Ok(found) => Look::NotYet(format!("{:?}", found.labels().get(label))),
        Err(error) => Look::NotYet(error.to_string()),
    };
    let what = format!("{label} of {node} to be {value}");
    wait::until(&what, SOON, PAUSE, look).await?;
    Ok(begin.elapsed())
}

/// Makes the node that is not there, with one GPU of 16 GiB.
async fn add_elsewhere(stage: &Stage) -> Result<(), Failed> {
    let room = json!({ "cpu": "8", "memory": "32Gi", "pods": "110", GPU_MEMORY: "16" });
    let ready = json!([{ "type": "Ready", "status": "True", "reason": "Here", "message": "",
        "lastHeartbeatTime": jiff::Timestamp::now(), "lastTransitionTime": jiff::Timestamp::now() }]);
    let node = json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": { "name": ELSEWHERE, "labels": { "kubernetes.io/hostname": ELSEWHERE } },
        "status": { "capacity": room, "allocatable": room, "conditions": ready },
    });
    let nodes = nodes(stage);
    nodes
        .create(
            &PostParams::default(),
            &serde_json::from_value(node.clone())?,
        )
        .await?;
    let status = Patch::Merge(json!({ "status": node["status"] }));
    nodes
        .patch_status(ELSEWHERE, &PatchParams::default(), &status)
        .await?;
    let gpus: Api<GpuNode> = Api::all(stage.scene.cluster.client());
    let object = json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuNode",
        "metadata": { "name": ELSEWHERE }, "spec": {},
    });
    gpus.create(&PostParams::default(), &serde_json::from_value(object)?)
        .await?;
    let gpu = json!({ "uuid": "GPU-elsewhere", "index": 0, "model": "None", "memory": "16Gi", "state": "Active",
        "generation": 1, "health": { "status": "Healthy", "reason": "Ok" },
        "capacity": 16, "free": 16, "largestFree": 16 });
    let memory = json!({ "allocatable": 16, "free": 16, "largestFree": 16 });
    let status = json!({ "status": { "quantum": "1Gi", "deviceMemory": memory, "gpus": [gpu] } });
    gpus.patch_status(ELSEWHERE, &PatchParams::default(), &Patch::Merge(status))
        .await?;
    // New nodes are tainted until they are seen to be Ready.
    let look = async || match nodes.get(ELSEWHERE).await {
        Ok(node) if node.spec.clone().unwrap_or_default().taints.is_none() => Look::Found(()),
        Ok(node) => Look::NotYet(format!("{:?}", node.spec)),
        Err(error) => Look::NotYet(error.to_string()),
    };
    wait::until("the node elsewhere to take pods", SOON, PAUSE, look).await?;
    Ok(())
}

/// Takes it away, with all that was sent there.
async fn remove_elsewhere(stage: &Stage) -> Result<(), Failed> {
    let client = stage.scene.cluster.client();
    let delete = DeleteParams::default();
    let _ = nodes(stage).delete(ELSEWHERE, &delete).await;
    let _ = Api::<GpuNode>::all(client.clone())
        .delete(ELSEWHERE, &delete)
        .await;
    let there = ListParams::default().fields(&format!("spec.nodeName={ELSEWHERE}"));
    for pod in Api::<Pod>::all(client.clone()).list(&there).await?.items {
        let pods = Api::<Pod>::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
        let _ = pods
            .delete(&pod.name_any(), &delete.clone().grace_period(0))
            .await;
    }
    Ok(())
}

/// Deletes what makes pods.
async fn remove_workloads(stage: &Stage) -> Result<(), Failed> {
    let client = stage.scene.cluster.client();
    let (delete, all) = (DeleteParams::background(), ListParams::default());
    let sets = Api::<ReplicaSet>::namespaced(client.clone(), NAMESPACE);
    sets.delete_collection(&delete, &all).await?;
    let jobs = Api::<Job>::namespaced(client.clone(), NAMESPACE);
    jobs.delete_collection(&delete, &all).await?;
    let budgets = Api::<PodDisruptionBudget>::namespaced(client.clone(), NAMESPACE);
    budgets.delete_collection(&delete, &all).await?;
    let budgets = Api::<GpuMemoryBudget>::namespaced(client, NAMESPACE);
    budgets.delete_collection(&delete, &all).await?;
    Ok(())
}

/// A pod's template: it holds 1 GiB of what it asks for.
fn template(stage: &Stage, app: &str, gib: u32, borrows: bool, restart: &str) -> Value {
    let class = borrows.then_some("bursar-borrowed");
    json!({
        "metadata": { "labels": { "app": app } },
        "spec": {
            "priorityClassName": class, "terminationGracePeriodSeconds": 1, "restartPolicy": restart,
            "automountServiceAccountToken": false,
            "containers": [{ "name": "main", "image": stage.scene.probe, "args": ["hold", "--bytes=1Gi"],
                "resources": { "limits": { GPU_MEMORY: gib.to_string() } } }],
        },
    })
}

async fn replicas(
    stage: &Stage,
    app: &str,
    count: usize,
    gib: u32,
    borrows: bool,
) -> Result<(), Failed> {
    let set = json!({
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": { "name": app },
        "spec": { "replicas": count, "selector": { "matchLabels": { "app": app } },
            "template": template(stage, app, gib, borrows, "Always") },
    });
    let sets = Api::<ReplicaSet>::namespaced(stage.scene.cluster.client(), NAMESPACE);
    sets.create(&PostParams::default(), &serde_json::from_value(set)?)
        .await?;
    Ok(())
}

/// Waits until the pods of an app that are not ending are as wanted.
async fn until_pods(
    stage: &Stage,
    app: &str,
    what: &str,
    wanted: impl Fn(&[(String, State, Pod)]) -> bool,
) -> Result<Vec<(String, State, Pod)>, Failed> {
    let pods = Api::<Pod>::namespaced(stage.scene.cluster.client(), NAMESPACE);
    let of_it = ListParams::default().labels(&format!("app={app}"));
    let look = async || match pods.list(&of_it).await {
        Ok(list) => {
            let alive = list.items.into_iter();
            let alive = alive.filter(|pod| pod.metadata.deletion_timestamp.is_none());
            let alive: Vec<_> = alive
                .map(|pod| (pod.name_any(), State::of(&pod), pod))
                .collect();
            let told: Vec<_> = alive.iter().map(|(name, state, _)| (name, state)).collect();
            let told = format!("{told:?}");
            match wanted(&alive) {
                true => Look::Found(alive),
                false => Look::NotYet(told),
            }
        }
        Err(error) => Look::NotYet(error.to_string()),
    };
    Ok(wait::until(what, Duration::from_secs(90), PAUSE, look).await?)
}

async fn until_running(
    stage: &Stage,
    app: &str,
    count: usize,
) -> Result<Vec<(String, State, Pod)>, Failed> {
    let what = format!("{count} of {app} to run");
    until_pods(stage, app, &what, |pods| {
        pods.iter().filter(|(_, state, _)| state.running).count() == count
    })
    .await
}

/// With steering preferred, a node with room is taken; required, a pod is held back until there is one.
async fn steered(stage: &mut Stage) -> Result<(), Failed> {
    run_each(stage, &[("ten-a", 10), ("ten-b", 10)]).await?;
    let here = stage.pods.node("ten-a").await?;
    let took = until_label(stage, &here, LARGEST_FREE, "6").await?;
    stage
        .progress
        .say(format_args!("the label says 6 after {took:.1?}"));
    add_elsewhere(stage).await?;
    let placed = placed_elsewhere(stage).await;
    remove_elsewhere(stage).await?;
    placed?;

    stage.steer("required").await?;
    let held = held_back(stage).await;
    stage.steer("preferred").await?;
    held?;
    stage.witness.nobody_failed_or_restarted()
}

async fn placed_elsewhere(stage: &Stage) -> Result<(), Failed> {
    kill_operator(stage).await?;
    until_label(stage, ELSEWHERE, LARGEST_FREE, "16").await?;
    stage.pods.create(&holder(stage, "eight", 8)).await?;
    stage
        .pods
        .until("eight", "to have a node", SOON, |state| state.scheduled)
        .await?;
    assert_eq!(stage.pods.node("eight").await?, ELSEWHERE);
    stage.pods.forget("eight").await?;
    Ok(())
}

async fn held_back(stage: &Stage) -> Result<(), Failed> {
    until_steering_is_required(stage).await?;
    stage.pods.create(&holder(stage, "eight", 8)).await?;
    let told = |state: &State| state.waiting.contains("didn't match");
    stage
        .pods
        .until("eight", "to be held back", SOON, told)
        .await?;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(!stage.pods.state("eight").await?.scheduled);
    stage.pods.delete("ten-a").await?;
    kill_operator(stage).await?;
    let room = Instant::now();
    stage.pods.until_running("eight", SOON).await?;
    stage.progress.say(format_args!(
        "held back, the 8 runs {:.1?} after a 10 was deleted",
        room.elapsed()
    ));
    Ok(())
}

/// Policies take a moment to come into force.
async fn until_steering_is_required(stage: &Stage) -> Result<(), Failed> {
    let pods = Api::<Pod>::namespaced(stage.scene.cluster.client(), NAMESPACE);
    let mut pod = template(stage, "tried", 8, false, "Always");
    pod["metadata"]["name"] = json!("tried");
    let pod: Pod = serde_json::from_value(pod)?;
    let dry = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let look = async || match pods.create(&dry, &pod).await {
        Ok(pod) => {
            let affinity = pod.spec.and_then(|spec| spec.affinity?.node_affinity);
            match affinity {
                Some(NodeAffinity {
                    required_during_scheduling_ignored_during_execution: Some(_),
                    ..
                }) => Look::Found(()),
                other => Look::NotYet(format!("{other:?}")),
            }
        }
        Err(error) => Look::NotYet(error.to_string()),
    };
    Ok(wait::until("steering to be required", SOON, PAUSE, look).await?)
}

/// Without steering, a pod that waits is moved to a node that has room, and nobody else notices.
async fn moved(stage: &mut Stage) -> Result<(), Failed> {
    run_each(stage, &[("ten-a", 10), ("ten-b", 10)]).await?;
    stage.steer("off").await?;
    let outcome = moves(stage).await;
    remove_workloads(stage).await?;
    remove_elsewhere(stage).await?;
    stage.steer("preferred").await?;
    outcome?;
    stage.witness.nobody_failed_or_restarted()
}

async fn moves(stage: &Stage) -> Result<(), Failed> {
    replicas(stage, "eight", 1, 8, false).await?;
    let waits = until_pods(stage, "eight", "the 8 to wait on its node", |pods| {
        pods.iter()
            .any(|(_, state, _)| state.scheduled && !state.running)
    })
    .await?;
    add_elsewhere(stage).await?;
    kill_operator(stage).await?;
    let begin = Instant::now();
    let first = &waits[0].0;
    let there = until_pods(stage, "eight", "another 8 elsewhere", |pods| {
        pods.iter().any(|(name, _, pod)| {
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
            name != first && node == Some(ELSEWHERE)
        })
    })
    .await?;
    told::until_event(stage, first, "GpuMemoryWaiterMoved", ELSEWHERE).await?;
    stage.progress.say(format_args!(
        "moved {:.1?} after there was room elsewhere",
        begin.elapsed()
    ));
    assert_eq!(there.len(), 1);
    for ten in ["ten-a", "ten-b"] {
        assert!(stage.pods.state(ten).await?.running);
    }
    Ok(())
}

/// Borrowers have everything; two owners of half a GPU come, and get it, again and again.
async fn owners_against_borrowers(stage: &mut Stage) -> Result<(), Failed> {
    let outcome = rounds(stage).await;
    remove_workloads(stage).await?;
    outcome
}

async fn rounds(stage: &Stage) -> Result<(), Failed> {
    let pods = &stage.pods;
    replicas(stage, "borrower", 8, 4, true).await?;
    let mut times = Vec::new();
    for round in 0..ROUNDS / 2 {
        until_running(stage, "borrower", 8).await?;
        let owners = ["a", "b"].map(|one| format!("owner-{round}-{one}"));
        let run = owners.each_ref().map(async |owner| {
            pods.create(&holder(stage, owner, 8)).await?;
            let begin = Instant::now();
            pods.until_running(owner, SOON).await?;
            Ok::<_, Failed>(begin.elapsed())
        });
        let kill = async {
            match round % KILLED == KILLED - 1 {
                true => kill_operator(stage).await,
                false => Ok(()),
            }
        };
        let (took, ()) = futures::try_join!(try_join_all(run), kill)?;
        times.extend(took);
        until_running(stage, "borrower", 4).await?;
        for owner in &owners {
            pods.delete(owner).await?;
        }
        for owner in &owners {
            pods.until_gone(owner, SOON).await?;
        }
    }
    let events = told::events(stage, "GpuMemoryReclaimed").await?;
    let gone: Vec<_> = events.iter().filter_map(told::pod_of).collect();
    let once: BTreeSet<_> = gone.iter().collect();
    assert_eq!(once.len(), gone.len(), "somebody went twice: {gone:?}");
    // Beside those whom the scheduler chose at most one had to go for each.
    for round in 0..ROUNDS / 2 {
        for one in ["a", "b"] {
            let owner = format!("/owner-{round}-{one},");
            let of_it = events.iter().filter_map(|event| event.note.as_deref());
            let of_it: Vec<_> = of_it.filter(|note| note.contains(&owner)).collect();
            assert!(of_it.len() <= 1, "{of_it:?}");
        }
    }
    times.sort_unstable();
    stage.progress.say(format_args!(
        "{ROUNDS} owners ran after {:.1?} to {:.1?}, median {:.1?}; {} borrowers went beside the scheduler's",
        times[0],
        times[ROUNDS - 1],
        times[ROUNDS / 2],
        gone.len()
    ));
    Ok(())
}

/// A borrowing Job's pod goes, and a Job's pod that does not borrow stays; a pod with a disruption budget goes when that
/// has had its time.
async fn a_disruption_budget_and_a_job(stage: &mut Stage) -> Result<(), Failed> {
    let outcome = match a_job_gives(stage).await {
        Ok(()) => kept_and_let_go(stage).await,
        failed => failed,
    };
    remove_workloads(stage).await?;
    outcome
}

/// A Job that ignores disruptions gives as any other does, and counts no failure.
async fn a_job_gives(stage: &Stage) -> Result<(), Failed> {
    let ignores =
        json!([{ "action": "Ignore", "onPodConditions": [{ "type": "DisruptionTarget" }] }]);
    let mut template = template(stage, "gives", 10, true, "Never");
    // Its pods have failed then: with 0 they would have succeeded.
    let arguments = json!(["hold", "--bytes=1Gi", "--told=143"]);
    template["spec"]["containers"][0]["args"] = arguments;
    let job = json!({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": { "name": "gives" },
        "spec": { "parallelism": 2, "completions": 2, "backoffLimit": 2, "podFailurePolicy": { "rules": ignores },
            "template": template },
    });
    let jobs = Api::<Job>::namespaced(stage.scene.cluster.client(), NAMESPACE);
    jobs.create(&PostParams::default(), &serde_json::from_value(job)?)
        .await?;
    let begin = Instant::now();
    let before = until_running(stage, "gives", 2).await?;
    stage.pods.create(&holder(stage, "taker", 8)).await?;
    stage.pods.until_running("taker", SOON).await?;
    let what = "one of the Job's pods to be another one";
    let after = until_pods(stage, "gives", what, |pods| pods.len() == 2).await?;
    let stays = |(name, ..): &&(String, State, Pod)| after.iter().any(|(one, ..)| one == name);
    let stay = before.iter().filter(stays).count();
    assert_eq!(stay, 1, "{before:?}, {after:?}");
    stage.pods.delete("taker").await?;
    until_running(stage, "gives", 2).await?;
    let status = jobs.get("gives").await?.status.unwrap_or_default();
    assert_eq!(status.failed.unwrap_or(0), 0, "{status:?}");
    stage.progress.say(format_args!(
        "a Job that ignores disruptions gave and counted no failure, in {:.1?}",
        begin.elapsed()
    ));
    // Its pods go before it: the scheduler counts them while they end.
    jobs.delete("gives", &DeleteParams::foreground()).await?;
    let look = async || match jobs.get_opt("gives").await {
        Ok(None) => Look::Found(()),
        Ok(Some(job)) => Look::NotYet(format!("{:?}", job.status)),
        Err(error) => Look::NotYet(error.to_string()),
    };
    Ok(wait::until("the end of the Job", SOON, PAUSE, look).await?)
}

async fn kept_and_let_go(stage: &Stage) -> Result<(), Failed> {
    let client = stage.scene.cluster.client();
    let job = json!({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": { "name": "job" },
        "spec": { "backoffLimit": 2, "template": template(stage, "job", 10, false, "Never") },
    });
    let jobs = Api::<Job>::namespaced(client.clone(), NAMESPACE);
    jobs.create(&PostParams::default(), &serde_json::from_value(job)?)
        .await?;
    let of_job = until_running(stage, "job", 1).await?;
    replicas(stage, "kept", 1, 10, true).await?;
    let kept = until_running(stage, "kept", 1).await?;
    let budget = json!({
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": { "name": "kept" },
        "spec": { "maxUnavailable": 0, "selector": { "matchLabels": { "app": "kept" } } },
    });
    let budgets = Api::<PodDisruptionBudget>::namespaced(client, NAMESPACE);
    budgets
        .create(&PostParams::default(), &serde_json::from_value(budget)?)
        .await?;
    let begin = Instant::now();
    stage.pods.create(&holder(stage, "owner", 8)).await?;
    let node = stage.pods.node(&kept[0].0).await?;
    told::until_status(stage, &node, "the owner to wait", |status| {
        !status.waiting.is_empty()
    })
    .await?;
    // It has asked for the eviction by then, or the next one will.
    tokio::time::sleep(GRACE / 10).await;
    kill_operator(stage).await?;
    tokio::time::sleep((GRACE / 2).saturating_sub(begin.elapsed())).await;
    let still = until_running(stage, "kept", 1).await?;
    assert_eq!(still[0].0, kept[0].0, "it went within the grace");
    stage.pods.until_running("owner", GRACE + SOON).await?;
    let took = begin.elapsed();
    assert!(took >= GRACE, "{took:?}");
    stage.progress.say(format_args!(
        "the owner runs {took:.1?} after its creation, {GRACE:?} of them by the disruption budget"
    ));
    told::until_event(stage, &kept[0].0, "GpuMemoryReclaimed", "/owner,").await?;
    let now = until_running(stage, "job", 1).await?;
    assert_eq!(
        now[0].0, of_job[0].0,
        "the pod of a Job that does not borrow went"
    );
    let status = jobs.get("job").await?.status.unwrap_or_default();
    assert_eq!(status.failed.unwrap_or(0), 0);
    Ok(())
}

/// A budget's override lowers the quota of a running pod, and ends with it.
async fn an_override_lowers_a_quota(stage: &mut Stage) -> Result<(), Failed> {
    let outcome = overridden(stage).await;
    remove_workloads(stage).await?;
    outcome?;
    stage.witness.nobody_failed_or_restarted()
}

async fn overridden(stage: &Stage) -> Result<(), Failed> {
    run_each(stage, &[("large", 8)]).await?;
    let mut program = stage.obedient("large")?;
    let budgets = Api::<GpuMemoryBudget>::namespaced(stage.scene.cluster.client(), NAMESPACE);
    let budget = json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget", "metadata": { "name": "default" },
        "spec": { "deviceMemory": { "guaranteed": "16Gi" }, "overrides": [{ "pod": "large", "deviceMemory": "4Gi" }] },
    });
    let begin = Instant::now();
    budgets
        .create(&PostParams::default(), &serde_json::from_value(budget)?)
        .await?;
    kill_operator(stage).await?;
    for total in [4_u64 << 30, 8 << 30] {
        let bound = Instant::now() + SOON;
        loop {
            let seen = program.told("look").await?;
            if seen["device"]["total"] == total {
                break;
            }
            if Instant::now() > bound {
                return Err(format!("the program sees {seen}, not {total}").into());
            }
            tokio::time::sleep(PAUSE).await;
        }
        stage.progress.say(format_args!(
            "the program sees {total} bytes {:.1?} after the budget came",
            begin.elapsed()
        ));
        if total == 4 << 30 {
            let refused = program.told("take 6Gi").await?;
            assert_eq!(refused["refused"]["code"], 2, "{refused}");
            let lifted = Patch::Merge(json!({ "spec": { "overrides": [] } }));
            budgets
                .patch("default", &PatchParams::default(), &lifted)
                .await?;
            kill_operator(stage).await?;
        }
    }
    Ok(())
}
