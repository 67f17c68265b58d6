//! Loses GPUs and restores them, and checks that the node's capacity follows and that an upgrade of
//! the agents goes on.

use std::time::{Duration, Instant};

use bursar_e2e::sim;
use libtest_mimic::{Failed, Trial};

use crate::enforcement::roll_out_agents;
use crate::placement::run_each;
use crate::quota::event_line;
use crate::shared_cluster::{START_TIMEOUT, TrialContext, node_trial};

/// The GPUs of the cluster's node.
const GPUS: u32 = 2;
/// The agent reads an XID within 0.25 s; the kubelet updates the node's status every second.
const LOSS_TIMEOUT: Duration = Duration::from_secs(90);
/// The agent waits for 10 s without errors and three good probes 2 s apart, the kubelet another
/// second.
const RESTORE_TIMEOUT: Duration = Duration::from_secs(180);

pub(crate) fn trials() -> Vec<Trial> {
    vec![node_trial(
        "main/cluster/health",
        gpu_capacity_follows_loss_and_restore,
    )]
}

async fn gpu_capacity_follows_loss_and_restore(context: &mut TrialContext) -> Result<(), Failed> {
    let Some(gpus) = context.environment.simulated_gpus.clone() else {
        return Err("GPUs that are real are not broken for a test".into());
    };
    run_each(context, &[("on-one", 10), ("on-other", 10)]).await?;
    let all = context
        .environment
        .wait_for_allocatable(|_| true, LOSS_TIMEOUT)
        .await?;
    let holding = context
        .pods
        .wait_for_log_line("on-other", START_TIMEOUT, event_line("holding"))
        .await?;
    let uuid = holding["device"]["uuid"].as_str().unwrap_or_default();
    let lost = (0..GPUS)
        .find(|gpu| sim::uuid(*gpu) == uuid)
        .ok_or_else(|| format!("no GPU is {uuid}"))?;

    let begin = Instant::now();
    gpus.lose(lost)?;
    let followed = context
        .environment
        .wait_for_allocatable(|quanta| quanta == all / 2, LOSS_TIMEOUT)
        .await;
    context.progress.report(format_args!(
        "allocatable follows a lost GPU in {:.1?}",
        begin.elapsed()
    ));
    // The pod on the other GPU can still allocate, and sees the same device.
    let unaware = context
        .exec("on-one", &["hold", "--bytes=1Gi", "--then=exit"])
        .await;
    let restored = Instant::now();
    gpus.restore(lost)?;
    followed?;
    let unaware = unaware?;
    let unaware = unaware
        .lines()
        .find_map(event_line("holding"))
        .ok_or_else(|| format!("the other GPU's pod was refused: {unaware}"))?;
    assert_ne!(unaware["device"]["uuid"], uuid);
    context
        .environment
        .wait_for_allocatable(|quanta| quanta == all, RESTORE_TIMEOUT)
        .await?;
    context.progress.report(format_args!(
        "and a restored one in {:.1?}",
        restored.elapsed()
    ));

    (0..GPUS).try_for_each(|gpu| gpus.lose(gpu))?;
    let none = context
        .environment
        .wait_for_allocatable(|quanta| quanta == 0, LOSS_TIMEOUT)
        .await;
    let begin = Instant::now();
    let rolled_out = roll_out_agents(context).await;
    (0..GPUS).try_for_each(|gpu| gpus.restore(gpu))?;
    none?;
    rolled_out?;
    context.progress.report(format_args!(
        "agents are replaced without a healthy GPU in {:.1?}",
        begin.elapsed()
    ));
    context
        .environment
        .wait_for_allocatable(|quanta| quanta == all, RESTORE_TIMEOUT)
        .await?;
    for name in ["on-one", "on-other"] {
        let state = context.pods.state(name).await?;
        assert!(state.running && state.restarts == 0, "{name}: {state:?}");
    }
    context.history.check_none_failed_or_restarted().await
}
