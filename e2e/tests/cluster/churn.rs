//! Creates and deletes pods of random sizes in every state, and checks that no state remains.

use std::time::{Duration, Instant};

use bursar_e2e::pods::{PodBuilder, Pods};
use futures::future::try_join_all;
use libtest_mimic::{Failed, Trial};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::shared_cluster::{RECLAIM_TIMEOUT, START_TIMEOUT, TrialContext, node_trial};

/// The number of concurrent cycles: at a mean size of 6 GiB, more than the node has room for.
const AT_ONCE: u64 = 8;
/// A pod that waits for memory runs within this time: others are deleted meanwhile.
const RUN_TIMEOUT: Duration = Duration::from_secs(600);
/// The seed, so that every run has the same sizes and durations.
const SEED: u64 = 0x0b75_a12f_4c0f_fee5;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        node_trial("main/cluster/churn", async |context| {
            churn(context, 40).await
        }),
        node_trial("main/cluster/churn-long", async |context| {
            churn(context, 200).await
        }),
    ]
}

async fn churn(context: &mut TrialContext, cycles: u64) -> Result<(), Failed> {
    let begin = Instant::now();
    let provisioners = (0..AT_ONCE).map(|provisioner| {
        let (pods, probe) = (
            context.pods.clone(),
            context.environment.probe_image.clone(),
        );
        come_and_go(provisioner, cycles / AT_ONCE, pods, probe)
    });
    try_join_all(provisioners).await?;
    context.progress.report(format_args!(
        "{cycles} creates and deletes took {:.1?}",
        begin.elapsed()
    ));
    context.history.check_none_failed_or_restarted().await?;
    let records = context.history.records();
    let ran = records.iter().filter(|record| record.ran).count();
    let never = records.len() - ran;
    context.progress.report(format_args!(
        "{ran} pods ran, {never} were deleted before they could"
    ));
    assert_eq!(records.len() as u64, cycles, "pods that were seen");
    assert!(ran as u64 >= cycles / 2, "only {ran} pods ran");
    let end = Instant::now();
    context
        .node_files()?
        .wait_until_no_pod_state(RECLAIM_TIMEOUT)
        .await?;
    context.progress.report(format_args!(
        "nothing is held {:.1?} after the last pod's end",
        end.elapsed()
    ));
    Ok(())
}

/// Runs one provisioner's share of the cycles: a pod of a random size, deleted after a random time.
async fn come_and_go(
    provisioner: u64,
    cycles: u64,
    pods: Pods,
    probe: String,
) -> Result<(), Failed> {
    let mut random = StdRng::seed_from_u64(SEED ^ provisioner);
    for cycle in 0..cycles {
        let name = format!("churn-{provisioner}-{cycle}");
        // One pod in eight may be as large as a GPU.
        let most = if random.random_range(0..8) == 0 {
            16
        } else {
            10
        };
        let gib = random.random_range(1..=most);
        // The smallest pods have room for their context beside this.
        let plan = PodBuilder::new(&name, &probe)
            .arguments(&["hold", "--bytes=256Mi"])
            .gib(gib);
        pods.create(&plan).await?;
        // Every second pod is deleted once it runs, and the others whatever their state is.
        if cycle % 2 == 0 {
            pods.wait_until_running(&name, RUN_TIMEOUT).await?;
        }
        tokio::time::sleep(Duration::from_millis(random.random_range(0..3_000))).await;
        // One pod in four is deleted by force, so that the next starts while its containers still
        // stop.
        if random.random_range(0..4) == 0 {
            pods.force_delete(&name).await?;
        } else {
            pods.delete(&name).await?;
        }
        pods.wait_until_deleted(&name, START_TIMEOUT).await?;
    }
    Ok(())
}
