//! Checks pods that fit the node in total but no GPU: they wait, never fail, and start once a GPU
//! has room.

use std::time::{Duration, Instant};

use bursar_e2e::pods::{PodBuilder, PodState};
use libtest_mimic::{Failed, Trial};

use crate::shared_cluster::{START_TIMEOUT, TrialContext, trial};

/// A waiting pod runs this soon after the end of the pod that made room. The agent's answer, and
/// not the kubelet's next attempt, starts it.
const STARTED: Duration = Duration::from_secs(20);

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("main/cluster/waiting", an_8_waits),
        trial("main/cluster/full", two_12s_and_two_4s),
        trial("compute/cluster", a_weight_waits_for_a_gpu_with_room),
    ]
}

/// Makes a pod that holds 1 GiB of its requested memory.
pub(crate) fn holder(context: &TrialContext, name: &str, gib: u32) -> PodBuilder {
    PodBuilder::new(name, &context.environment.probe_image)
        .arguments(&["hold", "--bytes=1Gi"])
        .gib(gib)
}

/// Creates holders one after another, each once the previous one runs.
pub(crate) async fn run_each(
    context: &TrialContext,
    holders: &[(&str, u32)],
) -> Result<(), Failed> {
    for (name, gib) in holders {
        context.pods.create(&holder(context, name, *gib)).await?;
        context.pods.wait_until_running(name, START_TIMEOUT).await?;
    }
    Ok(())
}

async fn an_8_waits(context: &mut TrialContext) -> Result<(), Failed> {
    run_each(context, &[("ten-a", 10), ("ten-b", 10)]).await?;
    let pods = context.pods.clone();
    pods.create(&holder(context, "eight", 8)).await?;
    let created = Instant::now();
    let state = pods
        .wait_until_waiting("eight", "waiting for 8 GiB on one GPU", START_TIMEOUT)
        .await?;
    context.progress.report(format_args!(
        "after {:.1?} the 8's status says {:?}",
        created.elapsed(),
        state.waiting_reason
    ));
    assert!(
        state.waiting_reason.contains("largest free 6 GiB"),
        "{}",
        state.waiting_reason
    );
    pods.delete("ten-a").await?;
    pods.wait_until_deleted("ten-a", START_TIMEOUT).await?;
    let room = Instant::now();
    pods.wait_until_running("eight", STARTED).await?;
    context.progress.report(format_args!(
        "the 8 runs {:.1?} after the 10's end",
        room.elapsed()
    ));
    context.history.check_none_failed_or_restarted().await
}

async fn a_weight_waits_for_a_gpu_with_room(context: &mut TrialContext) -> Result<(), Failed> {
    let gpus = context.environment.gpu_sizes_in_quanta().await?.len();
    let pods = context.pods.clone();
    let weighted = |context: &TrialContext, name: &str, weight: &str| {
        holder(context, name, 4).limit("bursar.dev/gpu-compute", weight)
    };
    for gpu in 0..gpus {
        let name = format!("most-{gpu}");
        pods.create(&weighted(context, &name, "60")).await?;
        pods.wait_until_running(&name, START_TIMEOUT).await?;
    }
    pods.create(&weighted(context, "late", "50")).await?;
    let reason = "its weight of 50 hundredths of a GPU fits on none: the most left is 40";
    pods.wait_until_waiting("late", reason, START_TIMEOUT)
        .await?;
    // Nothing is kept from the pods after this one.
    pods.create(&weighted(context, "less", "30")).await?;
    pods.wait_until_running("less", START_TIMEOUT).await?;
    run_each(context, &[("weightless", 4)]).await?;
    pods.delete("most-0").await?;
    pods.wait_until_running("late", STARTED).await?;
    context.history.check_none_failed_or_restarted().await
}

async fn two_12s_and_two_4s(context: &mut TrialContext) -> Result<(), Failed> {
    let all = [("12-a", 12), ("12-b", 12), ("4-a", 4), ("4-b", 4)];
    run_each(context, &all).await?;
    let pods = context.pods.clone();
    pods.create(&holder(context, "five", 5)).await?;
    let unscheduled = |state: &PodState| state.waiting_reason.contains("Insufficient");
    let state = pods
        .wait_until("five", "to be unscheduled", START_TIMEOUT, unscheduled)
        .await?;
    assert!(!state.scheduled, "{state:?}");
    // A later pod that needs no GPU memory is scheduled meanwhile.
    let later = PodBuilder::new("later", &context.environment.probe_image)
        .with_empty_dir("/parked")
        .arguments(&["park", "--socket=/parked/socket"]);
    pods.create(&later).await?;
    pods.wait_until_running("later", START_TIMEOUT).await?;
    let state = pods.state("five").await?;
    assert_eq!((state.phase.as_str(), state.scheduled), ("Pending", false));
    for (name, _) in all {
        let state = pods.state(name).await?;
        assert!(state.running && state.restarts == 0, "{name}: {state:?}");
    }
    context.history.check_none_failed_or_restarted().await
}
