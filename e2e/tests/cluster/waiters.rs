//! Checks pods that wait for a GPU: steered, moved to another node, or served by preemption, while
//! the operator is killed.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use bursar_crds::{GpuMemoryBudget, GpuNode};
use bursar_e2e::pods::{GPU_MEMORY, PodState, Role};
use bursar_e2e::wait::{self, Poll};
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
use crate::shared_cluster::{NAMESPACE, START_TIMEOUT, TrialContext, trial};
use crate::status;

const PAUSE: Duration = Duration::from_millis(200);
/// A node that exists in the API server only, to which pods can be scheduled.
const ELSEWHERE: &str = "elsewhere";
pub(crate) const LARGEST_FREE: &str = "bursar.dev/largest-free-gib";
/// The time that the chart grants to disruption budgets before preemption.
const GRACE: Duration = Duration::from_secs(bursar_e2e::chart::DISRUPTION_GRACE_SECONDS);
/// The operator is killed after each such number of pairs of owners.
const KILLED: usize = 2;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial(
            "operator/cluster/steered",
            pods_are_steered_to_nodes_with_room,
        ),
        trial(
            "operator/cluster/moved",
            pending_pod_is_moved_to_a_node_with_room,
        ),
        trial("operator/cluster/owners", async |context| {
            owners_against_borrowers(context, 6).await
        }),
        trial("operator/cluster/owners-long", async |context| {
            owners_against_borrowers(context, 100).await
        }),
        trial("operator/cluster/shapes", owners_of_several_shares),
        trial("operator/cluster/disruption", a_disruption_budget_and_a_job),
        trial("operator/cluster/override", an_override_lowers_a_quota),
    ]
}

pub(crate) async fn kill_operator(context: &TrialContext) -> Result<(), Failed> {
    operator::kill(&context.environment.cluster.client()).await
}

fn nodes(context: &TrialContext) -> Api<Node> {
    Api::all(context.environment.cluster.client())
}

/// Waits until a label of a node has this value, and returns the duration.
pub(crate) async fn wait_for_label(
    context: &TrialContext,
    node: &str,
    label: &str,
    value: &str,
) -> Result<Duration, Failed> {
    let begin = Instant::now();
    let nodes = nodes(context);
    let poll = async || match nodes.get(node).await {
        Ok(found) if found.labels().get(label).map(String::as_str) == Some(value) => {
            Poll::Ready(())
        }
        Ok(found) => Poll::Pending(format!("{:?}", found.labels().get(label))),
        Err(error) => Poll::Pending(error.to_string()),
    };
    let what = format!("{label} of {node} to be {value}");
    wait::poll_until(&what, START_TIMEOUT, PAUSE, poll).await?;
    Ok(begin.elapsed())
}

/// Creates the node that exists as an object only, with one GPU of 16 GiB.
async fn add_elsewhere(context: &TrialContext) -> Result<(), Failed> {
    let room = json!({ "cpu": "8", "memory": "32Gi", "pods": "110", GPU_MEMORY: "16" });
    let ready = json!([{ "type": "Ready", "status": "True", "reason": "Here", "message": "",
        "lastHeartbeatTime": jiff::Timestamp::now(), "lastTransitionTime": jiff::Timestamp::now() }]);
    let node = json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": { "name": ELSEWHERE, "labels": { "kubernetes.io/hostname": ELSEWHERE } },
        "status": { "capacity": room, "allocatable": room, "conditions": ready },
    });
    let nodes = nodes(context);
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
    let gpus: Api<GpuNode> = Api::all(context.environment.cluster.client());
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
    // The API server taints new nodes until the node controller sees them Ready.
    let poll = async || match nodes.get(ELSEWHERE).await {
        Ok(node) if node.spec.clone().unwrap_or_default().taints.is_none() => Poll::Ready(()),
        Ok(node) => Poll::Pending(format!("{:?}", node.spec)),
        Err(error) => Poll::Pending(error.to_string()),
    };
    wait::poll_until(
        "the node elsewhere to take pods",
        START_TIMEOUT,
        PAUSE,
        poll,
    )
    .await?;
    Ok(())
}

/// Deletes that node with the pods bound to it.
pub(crate) async fn remove_elsewhere(context: &TrialContext) -> Result<(), Failed> {
    let client = context.environment.cluster.client();
    let delete = DeleteParams::default();
    let _ = nodes(context).delete(ELSEWHERE, &delete).await;
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

/// Deletes the workload objects, which create pods.
pub(crate) async fn remove_workloads(context: &TrialContext) -> Result<(), Failed> {
    let client = context.environment.cluster.client();
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

/// Makes a pod template that holds 1 GiB of its request.
pub(crate) fn template(
    context: &TrialContext,
    app: &str,
    gib: u32,
    borrows: bool,
    restart: &str,
) -> Value {
    let class = borrows.then_some("bursar-borrowed");
    json!({
        "metadata": { "labels": { "app": app } },
        "spec": {
            "priorityClassName": class, "terminationGracePeriodSeconds": 1, "restartPolicy": restart,
            "automountServiceAccountToken": false,
            "containers": [{ "name": "main", "image": context.environment.probe_image, "args": ["hold", "--bytes=1Gi"],
                "resources": { "limits": { GPU_MEMORY: gib.to_string() } } }],
        },
    })
}

async fn replicas(
    context: &TrialContext,
    app: &str,
    count: usize,
    gib: u32,
    borrows: bool,
) -> Result<(), Failed> {
    let set = json!({
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": { "name": app },
        "spec": { "replicas": count, "selector": { "matchLabels": { "app": app } },
            "template": template(context, app, gib, borrows, "Always") },
    });
    let sets = Api::<ReplicaSet>::namespaced(context.environment.cluster.client(), NAMESPACE);
    sets.create(&PostParams::default(), &serde_json::from_value(set)?)
        .await?;
    Ok(())
}

/// Waits until the pods of an app that are not being deleted satisfy `wanted`.
pub(crate) async fn wait_for_pods(
    context: &TrialContext,
    app: &str,
    what: &str,
    wanted: impl Fn(&[(String, PodState, Pod)]) -> bool,
) -> Result<Vec<(String, PodState, Pod)>, Failed> {
    let pods = Api::<Pod>::namespaced(context.environment.cluster.client(), NAMESPACE);
    let of_app = ListParams::default().labels(&format!("app={app}"));
    let poll = async || match pods.list(&of_app).await {
        Ok(list) => {
            let alive = list.items.into_iter();
            let alive = alive.filter(|pod| pod.metadata.deletion_timestamp.is_none());
            let alive: Vec<_> = alive
                .map(|pod| (pod.name_any(), PodState::of(&pod), pod))
                .collect();
            let states: Vec<_> = alive.iter().map(|(name, state, _)| (name, state)).collect();
            let states = format!("{states:?}");
            match wanted(&alive) {
                true => Poll::Ready(alive),
                false => Poll::Pending(states),
            }
        }
        Err(error) => Poll::Pending(error.to_string()),
    };
    Ok(wait::poll_until(what, START_TIMEOUT, PAUSE, poll).await?)
}

pub(crate) async fn wait_until_running(
    context: &TrialContext,
    app: &str,
    count: usize,
) -> Result<Vec<(String, PodState, Pod)>, Failed> {
    let what = format!("{count} of {app} to run");
    wait_for_pods(context, app, &what, |pods| {
        pods.iter().filter(|(_, state, _)| state.running).count() == count
    })
    .await
}

/// Preferred steering chooses a node with room; required steering holds a pod back until a node has
/// room.
async fn pods_are_steered_to_nodes_with_room(context: &mut TrialContext) -> Result<(), Failed> {
    run_each(context, &[("ten-a", 10), ("ten-b", 10)]).await?;
    let here = context.pods.node("ten-a").await?;
    let took = wait_for_label(context, &here, LARGEST_FREE, "6").await?;
    context
        .progress
        .report(format_args!("the label says 6 after {took:.1?}"));
    add_elsewhere(context).await?;
    let placed = placed_elsewhere(context).await;
    remove_elsewhere(context).await?;
    placed?;

    context.set_steering_mode("required").await?;
    let held = held_back(context).await;
    context.set_steering_mode("preferred").await?;
    held?;
    context.history.check_none_failed_or_restarted().await
}

async fn placed_elsewhere(context: &TrialContext) -> Result<(), Failed> {
    kill_operator(context).await?;
    wait_for_label(context, ELSEWHERE, LARGEST_FREE, "16").await?;
    context.pods.create(&holder(context, "eight", 8)).await?;
    context
        .pods
        .wait_until("eight", "to have a node", START_TIMEOUT, |state| {
            state.scheduled
        })
        .await?;
    assert_eq!(context.pods.node("eight").await?, ELSEWHERE);
    context.pods.force_delete("eight").await?;
    Ok(())
}

async fn held_back(context: &TrialContext) -> Result<(), Failed> {
    wait_for_required_steering(context).await?;
    context.pods.create(&holder(context, "eight", 8)).await?;
    let is_held_back = |state: &PodState| state.waiting_reason.contains("didn't match");
    context
        .pods
        .wait_until("eight", "to be held back", START_TIMEOUT, is_held_back)
        .await?;
    // A later pod is steered and scheduled meanwhile.
    run_each(context, &[("later", 2)]).await?;
    assert!(!context.pods.state("eight").await?.scheduled);
    context.pods.delete("ten-a").await?;
    kill_operator(context).await?;
    let room = Instant::now();
    context
        .pods
        .wait_until_running("eight", START_TIMEOUT)
        .await?;
    context.progress.report(format_args!(
        "held back, the 8 runs {:.1?} after a 10 was deleted",
        room.elapsed()
    ));
    Ok(())
}

/// The API server takes a moment to apply changed policies.
async fn wait_for_required_steering(context: &TrialContext) -> Result<(), Failed> {
    let pods = Api::<Pod>::namespaced(context.environment.cluster.client(), NAMESPACE);
    let mut pod = template(context, "tried", 8, false, "Always");
    pod["metadata"]["name"] = json!("tried");
    let pod: Pod = serde_json::from_value(pod)?;
    let dry = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let poll = async || match pods.create(&dry, &pod).await {
        Ok(pod) => {
            let affinity = pod.spec.and_then(|spec| spec.affinity?.node_affinity);
            match affinity {
                Some(NodeAffinity {
                    required_during_scheduling_ignored_during_execution: Some(_),
                    ..
                }) => Poll::Ready(()),
                other => Poll::Pending(format!("{other:?}")),
            }
        }
        Err(error) => Poll::Pending(error.to_string()),
    };
    Ok(wait::poll_until("steering to be required", START_TIMEOUT, PAUSE, poll).await?)
}

/// Without steering, the operator moves a waiting pod to a node with room, and no other pod is
/// disturbed.
async fn pending_pod_is_moved_to_a_node_with_room(
    context: &mut TrialContext,
) -> Result<(), Failed> {
    run_each(context, &[("ten-a", 10), ("ten-b", 10)]).await?;
    context.set_steering_mode("off").await?;
    let outcome = moves(context).await;
    remove_workloads(context).await?;
    remove_elsewhere(context).await?;
    context.set_steering_mode("preferred").await?;
    outcome?;
    context.history.check_none_failed_or_restarted().await
}

async fn moves(context: &TrialContext) -> Result<(), Failed> {
    replicas(context, "eight", 1, 8, false).await?;
    let waits = wait_for_pods(context, "eight", "the 8 to wait on its node", |pods| {
        pods.iter()
            .any(|(_, state, _)| state.scheduled && !state.running)
    })
    .await?;
    add_elsewhere(context).await?;
    kill_operator(context).await?;
    let begin = Instant::now();
    let first = &waits[0].0;
    let there = wait_for_pods(context, "eight", "another 8 elsewhere", |pods| {
        pods.iter().any(|(name, _, pod)| {
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
            name != first && node == Some(ELSEWHERE)
        })
    })
    .await?;
    status::wait_for_event(context, first, "RelocatedForGpuMemory", ELSEWHERE).await?;
    context.progress.report(format_args!(
        "moved {:.1?} after there was room elsewhere",
        begin.elapsed()
    ));
    assert_eq!(there.len(), 1);
    for ten in ["ten-a", "ten-b"] {
        assert!(context.pods.state(ten).await?.running);
    }
    Ok(())
}

/// Borrowers hold all memory; two owners of half a GPU get theirs, again and again.
async fn owners_against_borrowers(context: &mut TrialContext, owners: usize) -> Result<(), Failed> {
    let outcome = preempt_in_rounds(context, owners / 2).await;
    remove_workloads(context).await?;
    outcome
}

async fn preempt_in_rounds(context: &TrialContext, rounds: usize) -> Result<(), Failed> {
    let pods = &context.pods;
    // Events outlast their trial, so that owners of another trial have other names.
    let name = |round: usize, one: &str| format!("owner-{rounds}-{round}-{one}");
    replicas(context, "borrower", 8, 4, true).await?;
    let mut times = Vec::new();
    for round in 0..rounds {
        wait_until_running(context, "borrower", 8).await?;
        let owners = ["a", "b"].map(|suffix| name(round, suffix));
        let run = owners.each_ref().map(async |owner| {
            pods.create(&holder(context, owner, 8)).await?;
            let begin = Instant::now();
            pods.wait_until_running(owner, START_TIMEOUT).await?;
            Ok::<_, Failed>(begin.elapsed())
        });
        let kill = async {
            match round % KILLED == KILLED - 1 {
                true => kill_operator(context).await,
                false => Ok(()),
            }
        };
        let (took, ()) = futures::try_join!(try_join_all(run), kill)?;
        times.extend(took);
        wait_until_running(context, "borrower", 4).await?;
        for owner in &owners {
            pods.delete(owner).await?;
        }
        for owner in &owners {
            pods.wait_until_deleted(owner, START_TIMEOUT).await?;
        }
    }
    let events = status::events(context, "GpuMemoryReclaimed").await?;
    let gone: Vec<_> = events.iter().filter_map(status::pod_of).collect();
    let once: BTreeSet<_> = gone.iter().collect();
    assert_eq!(once.len(), gone.len(), "somebody went twice: {gone:?}");
    // Beside the scheduler's victims the operator evicts at most one borrower per owner.
    for round in 0..rounds {
        for suffix in ["a", "b"] {
            let owner = format!("/{},", name(round, suffix));
            let about_owner = events.iter().filter_map(|event| event.note.as_deref());
            let about_owner: Vec<_> = about_owner.filter(|note| note.contains(&owner)).collect();
            assert!(about_owner.len() <= 1, "{about_owner:?}");
        }
    }
    times.sort_unstable();
    context.progress.report(format_args!(
        "{} owners ran after {:.1?} to {:.1?}, median {:.1?}; {} borrowers went beside the scheduler's",
        times.len(),
        times[0],
        times[times.len() - 1],
        times[times.len() / 2],
        gone.len()
    ));
    Ok(())
}

/// A borrower holds most of each GPU. The scheduler evicts one for a pod that needs both GPUs, and
/// the operator the other.
async fn owners_of_several_shares(context: &mut TrialContext) -> Result<(), Failed> {
    let outcome = preempt_for_several_shares(context).await;
    remove_workloads(context).await?;
    outcome
}

async fn preempt_for_several_shares(context: &TrialContext) -> Result<(), Failed> {
    let pods = &context.pods;
    let hold: &[&str] = &["hold", "--bytes=1Gi"];
    let owners = [
        holder(context, "over-two-gpus", 16).annotation("bursar.dev/gpus", "2"),
        holder(context, "of-three-containers", 9)
            .container(Role::Beside, "second", 8, hold)
            .container(Role::Beside, "third", 4, hold),
    ];
    replicas(context, "borrower", 2, 10, true).await?;
    for owner in owners {
        let name = owner.name();
        wait_until_running(context, "borrower", 2).await?;
        pods.create(&owner).await?;
        let begin = Instant::now();
        let all = "to run all of its containers";
        pods.wait_until(name, all, START_TIMEOUT, |state| state.all_running)
            .await?;
        let took = begin.elapsed();
        let reclaimed = status::events(context, "GpuMemoryReclaimed").await?;
        let notes = reclaimed.iter().filter_map(|event| event.note.as_deref());
        let victims = notes.filter(|note| note.contains(name)).count();
        context
            .progress
            .report(format_args!("{name} ran after {took:.1?}"));
        assert_eq!(victims, 1, "beside the scheduler's: {reclaimed:?}");
        pods.delete(name).await?;
        pods.wait_until_deleted(name, START_TIMEOUT).await?;
    }
    Ok(())
}

/// A borrowing Job yields a pod, and a Job of an owner keeps its pods. A pod with a disruption
/// budget yields after the grace.
async fn a_disruption_budget_and_a_job(context: &mut TrialContext) -> Result<(), Failed> {
    let outcome = match job_yields_to_an_owner(context).await {
        Ok(()) => disruption_budget_delays_preemption(context).await,
        failed => failed,
    };
    remove_workloads(context).await?;
    outcome
}

/// A Job that ignores disruptions yields as any other, and counts no failure.
async fn job_yields_to_an_owner(context: &TrialContext) -> Result<(), Failed> {
    let ignores =
        json!([{ "action": "Ignore", "onPodConditions": [{ "type": "DisruptionTarget" }] }]);
    let mut template = template(context, "gives", 10, true, "Never");
    // With this exit code the Job's evicted pods have failed; with 0 they would have succeeded.
    let arguments = json!(["hold", "--bytes=1Gi", "--told=143"]);
    template["spec"]["containers"][0]["args"] = arguments;
    let job = json!({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": { "name": "gives" },
        "spec": { "parallelism": 2, "completions": 2, "backoffLimit": 2, "podFailurePolicy": { "rules": ignores },
            "template": template },
    });
    let jobs = Api::<Job>::namespaced(context.environment.cluster.client(), NAMESPACE);
    jobs.create(&PostParams::default(), &serde_json::from_value(job)?)
        .await?;
    let begin = Instant::now();
    let before = wait_until_running(context, "gives", 2).await?;
    context.pods.create(&holder(context, "taker", 8)).await?;
    context
        .pods
        .wait_until_running("taker", START_TIMEOUT)
        .await?;
    let what = "one of the Job's pods to be another one";
    let after = wait_for_pods(context, "gives", what, |pods| pods.len() == 2).await?;
    let stays =
        |(name, ..): &&(String, PodState, Pod)| after.iter().any(|(later, ..)| later == name);
    let stay = before.iter().filter(stays).count();
    assert_eq!(stay, 1, "{before:?}, {after:?}");
    context.pods.delete("taker").await?;
    wait_until_running(context, "gives", 2).await?;
    let status = jobs.get("gives").await?.status.unwrap_or_default();
    assert_eq!(status.failed.unwrap_or(0), 0, "{status:?}");
    context.progress.report(format_args!(
        "a Job that ignores disruptions gave and counted no failure, in {:.1?}",
        begin.elapsed()
    ));
    // The pods are deleted before their Job, because the scheduler counts pods that are being
    // deleted.
    jobs.delete("gives", &DeleteParams::foreground()).await?;
    let poll = async || match jobs.get_opt("gives").await {
        Ok(None) => Poll::Ready(()),
        Ok(Some(job)) => Poll::Pending(format!("{:?}", job.status)),
        Err(error) => Poll::Pending(error.to_string()),
    };
    Ok(wait::poll_until("the end of the Job", START_TIMEOUT, PAUSE, poll).await?)
}

async fn disruption_budget_delays_preemption(context: &TrialContext) -> Result<(), Failed> {
    let client = context.environment.cluster.client();
    let job = json!({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": { "name": "job" },
        "spec": { "backoffLimit": 2, "template": template(context, "job", 10, false, "Never") },
    });
    let jobs = Api::<Job>::namespaced(client.clone(), NAMESPACE);
    jobs.create(&PostParams::default(), &serde_json::from_value(job)?)
        .await?;
    let of_job = wait_until_running(context, "job", 1).await?;
    replicas(context, "kept", 1, 10, true).await?;
    let kept = wait_until_running(context, "kept", 1).await?;
    let budget = json!({
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": { "name": "kept" },
        "spec": { "maxUnavailable": 0, "selector": { "matchLabels": { "app": "kept" } } },
    });
    let budgets = Api::<PodDisruptionBudget>::namespaced(client, NAMESPACE);
    budgets
        .create(&PostParams::default(), &serde_json::from_value(budget)?)
        .await?;
    let begin = Instant::now();
    context.pods.create(&holder(context, "owner", 8)).await?;
    let node = context.pods.node(&kept[0].0).await?;
    status::wait_for_status(context, &node, "the owner to wait", |status| {
        !status.waiting.is_empty()
    })
    .await?;
    // The operator has tried the eviction by then, or its next attempt follows.
    tokio::time::sleep(GRACE / 10).await;
    kill_operator(context).await?;
    tokio::time::sleep((GRACE / 2).saturating_sub(begin.elapsed())).await;
    let still = wait_until_running(context, "kept", 1).await?;
    assert_eq!(still[0].0, kept[0].0, "it went within the grace");
    context
        .pods
        .wait_until_running("owner", GRACE + START_TIMEOUT)
        .await?;
    let took = begin.elapsed();
    assert!(took >= GRACE, "{took:?}");
    context.progress.report(format_args!(
        "the owner runs {took:.1?} after its creation, {GRACE:?} of them by the disruption budget"
    ));
    status::wait_for_event(context, &kept[0].0, "GpuMemoryReclaimed", "/owner,").await?;
    let now = wait_until_running(context, "job", 1).await?;
    assert_eq!(
        now[0].0, of_job[0].0,
        "the pod of a Job that does not borrow went"
    );
    let status = jobs.get("job").await?.status.unwrap_or_default();
    assert_eq!(status.failed.unwrap_or(0), 0);
    Ok(())
}

/// A budget's override lowers the quota of a running pod, and ends with the override.
async fn an_override_lowers_a_quota(context: &mut TrialContext) -> Result<(), Failed> {
    let outcome = overridden(context).await;
    remove_workloads(context).await?;
    outcome?;
    context.history.check_none_failed_or_restarted().await
}

async fn overridden(context: &TrialContext) -> Result<(), Failed> {
    run_each(context, &[("large", 8)]).await?;
    let mut program = context.scripted_program("large")?;
    let budgets =
        Api::<GpuMemoryBudget>::namespaced(context.environment.cluster.client(), NAMESPACE);
    let budget = json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget", "metadata": { "name": "default" },
        "spec": { "deviceMemory": { "guaranteed": "16Gi" }, "overrides": [{ "pod": "large", "deviceMemory": "4Gi" }] },
    });
    let begin = Instant::now();
    budgets
        .create(&PostParams::default(), &serde_json::from_value(budget)?)
        .await?;
    kill_operator(context).await?;
    for total in [4_u64 << 30, 8 << 30] {
        let bound = Instant::now() + START_TIMEOUT;
        loop {
            let report = program.execute("look").await?;
            if report["device"]["total"] == total {
                break;
            }
            if Instant::now() > bound {
                return Err(format!("the program sees {report}, not {total}").into());
            }
            tokio::time::sleep(PAUSE).await;
        }
        context.progress.report(format_args!(
            "the program sees {total} bytes {:.1?} after the budget came",
            begin.elapsed()
        ));
        if total == 4 << 30 {
            let refused = program.execute("take 6Gi").await?;
            assert_eq!(refused["refused"]["code"], 2, "{refused}");
            let lifted = Patch::Merge(json!({ "spec": { "overrides": [] } }));
            budgets
                .patch("default", &PatchParams::default(), &lifted)
                .await?;
            kill_operator(context).await?;
        }
    }
    Ok(())
}
