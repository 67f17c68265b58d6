//! A GPU falls off the bus and comes back.

use std::time::{Duration, Instant};

use bursar_e2e::sim;
use libtest_mimic::{Failed, Trial};

use crate::placement::run_each;
use crate::quota::event;
use crate::stage::{SOON, Stage, node_trial};

/// The agent sees an XID in 0.25 s; the kubelet writes the node's status every 4 s.
const LOST: Duration = Duration::from_secs(30);
/// Quiet for 10 s, three good probes 2 s apart, and the kubelet's 4 s.
const BACK: Duration = Duration::from_secs(60);

pub(crate) fn trials() -> Vec<Trial> {
    vec![node_trial(
        "main/cluster/health",
        a_gpu_is_lost_and_restored,
    )]
}

async fn a_gpu_is_lost_and_restored(stage: &mut Stage) -> Result<(), Failed> {
    let Some(gpus) = stage.scene.gpus.clone() else {
        return Err("GPUs that are real are not broken for a test".into());
    };
    run_each(stage, &[("on-one", 10), ("on-other", 10)]).await?;
    let all = stage.scene.until_allocatable(|_| true, LOST).await?;
    let holding = stage
        .pods
        .until_logged("on-other", SOON, event("holding"))
        .await?;
    let uuid = holding["device"]["uuid"].as_str().unwrap_or_default();
    let lost = (0..2)
        .find(|gpu| sim::uuid(*gpu) == uuid)
        .ok_or_else(|| format!("no GPU is {uuid}"))?;

    let begin = Instant::now();
    gpus.lose(lost)?;
    let followed = stage
        .scene
        .until_allocatable(|quanta| quanta == all / 2, LOST)
        .await;
    stage.progress.say(format_args!(
        "allocatable follows a lost GPU in {:.1?}",
        begin.elapsed()
    ));
    // The other GPU's pod goes on: it can still take memory, and sees what it saw.
    let unaware = stage
        .exec("on-one", &["hold", "--bytes=1Gi", "--then=exit"])
        .await;
    let restored = Instant::now();
    gpus.restore(lost)?;
    followed?;
    let unaware = unaware?;
    let unaware = unaware
        .lines()
        .find_map(event("holding"))
        .ok_or_else(|| format!("the other GPU's pod was refused: {unaware}"))?;
    assert_ne!(unaware["device"]["uuid"], uuid);
    stage
        .scene
        .until_allocatable(|quanta| quanta == all, BACK)
        .await?;
    stage.progress.say(format_args!(
        "and a restored one in {:.1?}",
        restored.elapsed()
    ));
    for name in ["on-one", "on-other"] {
        let state = stage.pods.state(name).await?;
        assert!(state.running && state.restarts == 0, "{name}: {state:?}");
    }
    stage.witness.nobody_failed_or_restarted()
}
