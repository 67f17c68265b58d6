//! Checks Bursar on three nodes, each with a kubelet, a containerd and an agent of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use bursar_crds::{GpuMemoryBudget, GpuNode, GpuNodeStatus};
use bursar_e2e::chart;
use bursar_e2e::wait::{self, Poll};
use futures::future::try_join_all;
use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt as _;
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use libtest_mimic::{Failed, Trial};
use serde_json::json;

use crate::budget_enforcement::{as_account, refused};
use crate::placement::{holder, run_each};
use crate::shared_cluster::{NAMESPACE, START_TIMEOUT, TrialContext, nodes_trial};
use crate::status;
use crate::waiters::{
    LARGEST_FREE, kill_operator, remove_workloads, template, wait_for_label, wait_for_pods,
    wait_until_running,
};

const PAUSE: Duration = Duration::from_millis(200);
const NODES: [&str; 3] = ["node-1", "node-2", "node-3"];
/// The node that loses its power.
const LOST: &str = NODES[1];
/// The node with MIG instances.
const WITH_MIG: &str = NODES[2];

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        nodes_trial("pods/nodes/steering", pod_is_steered_to_the_node_with_room),
        nodes_trial("pods/nodes/tokens", token_of_a_node_serves_that_node_only),
        nodes_trial("pods/nodes/loss", node_returns_after_a_loss_of_power),
        nodes_trial(
            "pods/nodes/moved",
            queued_pod_is_relocated_to_a_node_with_room,
        ),
        nodes_trial("pods/nodes/drain", drained_node_yields_its_pods),
        nodes_trial("pods/nodes/owners", async |context| {
            owners_against_borrowers(context, 3).await
        }),
        nodes_trial("pods/nodes/owners-long", async |context| {
            owners_against_borrowers(context, 100).await
        }),
    ]
}

fn nodes(context: &TrialContext) -> Api<Node> {
    Api::all(context.environment.cluster.client())
}

/// Creates pods that hold memory on these nodes, and waits until they run.
async fn run_on(context: &TrialContext, holders: &[(&str, &str, u32)]) -> Result<(), Failed> {
    for (node, name, gib) in holders {
        let plan = holder(context, name, *gib).on_node(node);
        context.pods.create(&plan).await?;
    }
    for (_, name, _) in holders {
        context.pods.wait_until_running(name, START_TIMEOUT).await?;
    }
    Ok(())
}

async fn pod_is_steered_to_the_node_with_room(context: &mut TrialContext) -> Result<(), Failed> {
    let holders = [
        (NODES[0], "first-a", 10),
        (NODES[0], "first-b", 10),
        (NODES[1], "second-a", 10),
        (NODES[1], "second-b", 10),
    ];
    run_on(context, &holders).await?;
    for node in &NODES[..2] {
        wait_for_label(context, node, LARGEST_FREE, "6").await?;
    }
    let begin = Instant::now();
    run_each(context, &[("eight", 8)]).await?;
    assert_eq!(context.pods.node("eight").await?, NODES[2]);
    context.progress.report(format_args!(
        "the 8 runs on {} after {:.1?}",
        NODES[2],
        begin.elapsed()
    ));
    context.history.check_none_failed_or_restarted().await
}

async fn token_of_a_node_serves_that_node_only(context: &mut TrialContext) -> Result<(), Failed> {
    let client = context.environment.cluster.client();
    let pods: Api<Pod> = Api::namespaced(client, chart::NAMESPACE);
    let agents = ListParams::default().labels("app.kubernetes.io/component=agent");
    let agents = pods.list(&agents).await?.items;
    assert_eq!(agents.len(), NODES.len());
    let dry = PatchParams {
        dry_run: true,
        ..PatchParams::apply("trial")
    };
    for agent in agents {
        let own = agent.spec.as_ref().and_then(|spec| spec.node_name.clone());
        let own = own.ok_or("the agent has no node")?;
        let objects: Api<GpuNode> = Api::all(as_account(context, "agent", Some(&agent)).await?);
        for node in NODES {
            let patch = Patch::Apply(json!({
                "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuNode",
                "metadata": { "name": node }, "spec": {},
            }));
            let written = [
                objects.patch(node, &dry, &patch).await,
                objects.patch_status(node, &dry, &patch).await,
            ];
            for written in written {
                if node == own {
                    written?;
                } else {
                    let message = refused(written)?;
                    assert!(
                        message.contains(&format!("its token is of node {own}")),
                        "{message}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// Creates a ReplicaSet of pods that hold 1 GiB, for one node if it is named.
async fn replicas(
    context: &TrialContext,
    app: &str,
    count: usize,
    gib: u32,
    borrows: bool,
    node: Option<&str>,
) -> Result<(), Failed> {
    let mut template = template(context, app, gib, borrows, "Always");
    if let Some(node) = node {
        template["spec"]["nodeSelector"] = json!({ "kubernetes.io/hostname": node });
    }
    let set = json!({
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": { "name": app },
        "spec": { "replicas": count, "selector": { "matchLabels": { "app": app } }, "template": template },
    });
    let sets = Api::<ReplicaSet>::namespaced(context.environment.cluster.client(), NAMESPACE);
    sets.create(&PostParams::default(), &serde_json::from_value(set)?)
        .await?;
    Ok(())
}

/// The quanta that a node's status reports for each pod by its UID.
fn bound(status: &GpuNodeStatus) -> BTreeMap<String, i32> {
    let mut bound = BTreeMap::new();
    for pod in status.gpus.iter().flat_map(|gpu| &gpu.pods) {
        *bound.entry(pod.uid.clone()).or_default() += pod.quanta;
    }
    bound
}

async fn node_returns_after_a_loss_of_power(context: &mut TrialContext) -> Result<(), Failed> {
    let outcome = lose_power(context).await;
    remove_workloads(context).await?;
    outcome
}

async fn lose_power(context: &mut TrialContext) -> Result<(), Failed> {
    let client = context.environment.cluster.client();
    let budgets = Api::<GpuMemoryBudget>::namespaced(client.clone(), NAMESPACE);
    let budget = json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget", "metadata": { "name": "default" },
        "spec": { "deviceMemory": { "guaranteed": "64Gi" } },
    });
    let budget = serde_json::from_value(budget)?;
    budgets.create(&PostParams::default(), &budget).await?;
    run_on(context, &[(NODES[0], "neighbour", 8)]).await?;
    replicas(context, "stays", 3, 6, false, Some(LOST)).await?;
    let before = wait_until_running(context, "stays", 3).await?;
    let of_all = "the node to report its pods";
    let full = status::wait_for_status(context, LOST, of_all, |status| bound(status).len() == 3);
    let generations = |status: &GpuNodeStatus| -> Vec<i64> {
        status.gpus.iter().map(|gpu| gpu.generation).collect()
    };
    let earlier = generations(&full.await?);

    let [lost, _] = &mut context.workers[..] else {
        return Err("there are not three nodes".into());
    };
    lost.cut_power().await?;
    lost.boot().await?;
    let begin = Instant::now();
    let old: BTreeSet<String> = before
        .iter()
        .map(|(_, _, pod)| pod.uid().unwrap_or_default())
        .collect();
    // The kubelet starts the containers of a pod again, or fails the pod because no agent runs
    // yet. Its controller replaces the pod then.
    let alive = |pod: &Pod| {
        let status = pod.status.as_ref();
        let phase = status.and_then(|status| status.phase.as_deref());
        phase != Some("Failed")
    };
    let agents = wait_for_pods(context, "stays", "3 pods to run again", |pods| {
        let again = pods.iter().filter(|(_, state, pod)| {
            let uid = pod.uid().unwrap_or_default();
            alive(pod) && state.running && (!old.contains(&uid) || state.restarts > 0)
        });
        again.count() == 3
    });
    let now = agents.await?;
    let running = begin.elapsed();
    let uids: BTreeMap<String, i32> = now
        .iter()
        .filter(|(_, state, pod)| alive(pod) && state.running)
        .map(|(_, _, pod)| (pod.uid().unwrap_or_default(), 6))
        .collect();
    let true_again = "the node to report exactly the pods that run";
    let status = status::wait_for_status(context, LOST, true_again, |status| {
        bound(status) == uids && status.waiting.is_empty()
    });
    let status = status.await?;
    let later = generations(&status);
    let grown = later
        .iter()
        .zip(&earlier)
        .all(|(later, earlier)| later >= earlier);
    assert!(
        grown && later.len() == earlier.len(),
        "{earlier:?}, {later:?}"
    );
    let requested = async || match budgets.get("default").await {
        Ok(budget) => match budget.status {
            Some(status) if status.device_memory.requested.quanta == 26 && status.pods == 4 => {
                Poll::Ready(())
            }
            other => Poll::Pending(format!("{other:?}")),
        },
        Err(error) => Poll::Pending(error.to_string()),
    };
    let what = "the budget to count 26 GiB of 4 pods";
    wait::poll_until(what, START_TIMEOUT, PAUSE, requested).await?;
    context.progress.report(format_args!(
        "{} of 3 pods were replaced; all run {running:.1?} after the boot, and bindings and budget are true after {:.1?}",
        uids.keys().filter(|uid| !old.contains(*uid)).count(),
        begin.elapsed()
    ));
    let neighbour = context.pods.state("neighbour").await?;
    assert!(
        neighbour.running && neighbour.restarts == 0,
        "{neighbour:?}"
    );
    Ok(())
}

/// Sets whether the scheduler leaves a node out.
async fn cordon(context: &TrialContext, node: &str, cordoned: bool) -> Result<(), Failed> {
    let patch = Patch::Merge(json!({ "spec": { "unschedulable": cordoned } }));
    let nodes = nodes(context);
    nodes.patch(node, &PatchParams::default(), &patch).await?;
    Ok(())
}

/// Runs a trial that cordons nodes, and removes what it leaves.
async fn uncordoned(
    context: &mut TrialContext,
    act: impl AsyncFnOnce(&mut TrialContext) -> Result<(), Failed>,
) -> Result<(), Failed> {
    let outcome = act(context).await;
    for node in NODES {
        cordon(context, node, false).await?;
    }
    remove_workloads(context).await?;
    outcome
}

/// Returns the node of a pod.
fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

async fn queued_pod_is_relocated_to_a_node_with_room(
    context: &mut TrialContext,
) -> Result<(), Failed> {
    context.set_steering_mode("off").await?;
    let outcome = uncordoned(context, async |context| {
        run_on(context, &[(NODES[0], "ten-a", 10), (NODES[0], "ten-b", 10)]).await?;
        for node in &NODES[1..] {
            cordon(context, node, true).await?;
        }
        replicas(context, "eight", 1, 8, false, None).await?;
        let waits = |pods: &[(String, bursar_e2e::pods::PodState, Pod)]| {
            let mut pods = pods.iter();
            pods.any(|(_, state, _)| state.scheduled && !state.running)
        };
        wait_for_pods(context, "eight", "the 8 to wait on its node", waits).await?;
        status::wait_for_status(context, NODES[0], "the 8 to be reported", |status| {
            !status.waiting.is_empty()
        })
        .await?;
        cordon(context, NODES[1], false).await?;
        kill_operator(context).await?;
        let begin = Instant::now();
        wait_for_pods(context, "eight", "the 8 to run elsewhere", |pods| {
            let mut pods = pods.iter();
            pods.any(|(_, state, pod)| state.running && node_of(pod) == Some(NODES[1]))
        })
        .await?;
        context.progress.report(format_args!(
            "the 8 runs on {} {:.1?} after that took pods again",
            NODES[1],
            begin.elapsed()
        ));
        Ok(())
    })
    .await;
    context.set_steering_mode("preferred").await?;
    outcome
}

async fn drained_node_yields_its_pods(context: &mut TrialContext) -> Result<(), Failed> {
    uncordoned(context, async |context| {
        for node in &NODES[1..] {
            cordon(context, node, true).await?;
        }
        replicas(context, "goes", 2, 6, false, None).await?;
        wait_until_running(context, "goes", 2).await?;
        for node in &NODES[1..] {
            cordon(context, node, false).await?;
        }
        let begin = Instant::now();
        let drain = [
            "drain",
            NODES[0],
            "--ignore-daemonsets",
            "--delete-emptydir-data",
            "--timeout=60s",
        ];
        context.run_kubectl(&drain, Vec::new()).await?;
        wait_for_pods(context, "goes", "both pods to run elsewhere", |pods| {
            let moved = pods
                .iter()
                .filter(|(_, state, pod)| state.running && node_of(pod) != Some(NODES[0]));
            moved.count() == 2
        })
        .await?;
        let none = "the drained node to have no pod";
        let free = |status: &GpuNodeStatus| bound(status).is_empty();
        status::wait_for_status(context, NODES[0], none, free).await?;
        context.progress.report(format_args!(
            "drained, and both pods run elsewhere after {:.1?}",
            begin.elapsed()
        ));
        cordon(context, NODES[0], false).await
    })
    .await
}

/// The borrowers of [`preempt_in_rounds`], 8 GiB each: all memory of whole GPUs.
const BORROWERS: usize = 10;

async fn owners_against_borrowers(context: &mut TrialContext, rounds: usize) -> Result<(), Failed> {
    let outcome = preempt_in_rounds(context, rounds).await;
    remove_workloads(context).await?;
    outcome
}

/// Borrowers hold every whole GPU of three nodes. Two owners at a time get a GPU each.
async fn preempt_in_rounds(context: &TrialContext, rounds: usize) -> Result<(), Failed> {
    let pods = &context.pods;
    // The borrowers fill the whole GPUs, so nothing is left for the instances but these pods.
    replicas(context, "borrower", BORROWERS, 8, true, None).await?;
    run_on(context, &[(WITH_MIG, "mig-a", 7), (WITH_MIG, "mig-b", 7)]).await?;
    let (mut times, mut evicted) = (Vec::new(), 0);
    let mut before = wait_until_running(context, "borrower", BORROWERS).await?;
    for round in 0..rounds {
        let owners = ["a", "b"].map(|one| format!("owner-{round}-{one}"));
        let run = owners.each_ref().map(async |owner| {
            pods.create(&holder(context, owner, 12)).await?;
            let begin = Instant::now();
            pods.wait_until_running(owner, START_TIMEOUT).await?;
            Ok::<_, Failed>(begin.elapsed())
        });
        times.extend(try_join_all(run).await?);
        for owner in &owners {
            pods.delete(owner).await?;
        }
        for owner in &owners {
            pods.wait_until_deleted(owner, START_TIMEOUT).await?;
        }
        let after = wait_until_running(context, "borrower", BORROWERS).await?;
        let stay = |(name, ..): &&(String, _, _)| after.iter().any(|(later, ..)| later == name);
        let gone = BORROWERS - before.iter().filter(stay).count();
        // The scheduler evicts two by a node's total, and the operator two on one GPU.
        assert!(gone <= 2 * 4, "{gone} borrowers went in round {round}");
        evicted += gone;
        before = after;
    }
    times.sort_unstable();
    context.progress.report(format_args!(
        "{} owners ran after {:.1?} to {:.1?}, median {:.1?}; {evicted} borrowers went",
        times.len(),
        times[0],
        times[times.len() - 1],
        times[times.len() / 2],
    ));
    Ok(())
}
