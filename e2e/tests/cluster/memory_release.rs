//! Measures the time from a pod's end to the release of its memory.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use kube::ResourceExt;
use libtest_mimic::{Failed, Trial};

use crate::on_node::NodeFiles;
use crate::placement::holder;
use crate::restarts::percentile;
use crate::shared_cluster::{START_TIMEOUT, TrialContext, node_trial};

const ROUNDS: usize = 5;
/// The pods that end at the same time: as many of 3 GiB as two GPUs of 16 GiB have room for.
const PODS: usize = 10;
/// The agent releases a pod's memory this soon after the kubelet has removed its cgroup.
const MAX_RELEASE_SECONDS: f64 = 2.0;
const PAUSE: Duration = Duration::from_millis(10);

pub(crate) fn trials() -> Vec<Trial> {
    vec![node_trial(
        "main/cluster/release",
        memory_is_released_after_pods_end,
    )]
}

async fn memory_is_released_after_pods_end(context: &mut TrialContext) -> Result<(), Failed> {
    let mut seconds = Vec::new();
    for _ in 0..ROUNDS {
        seconds.append(&mut release_delays(context).await?);
    }
    seconds.sort_by(f64::total_cmp);
    let (median, p99) = (percentile(&seconds, 50), percentile(&seconds, 99));
    context.progress.report(format_args!(
        "{} pods: released {median:.3} s (median), {p99:.3} s (p99) after the end of the cgroup",
        seconds.len()
    ));
    assert!(p99 < MAX_RELEASE_SECONDS, "too late: {seconds:?}");
    context.history.check_none_failed_or_restarted()
}

/// A pod that is being deleted.
struct PodEnd {
    uid: String,
    cgroups: Vec<PathBuf>,
    /// The time at which its cgroups were removed.
    gone: Option<Instant>,
    /// The time at which its CDI file was removed.
    released: Option<Instant>,
}

/// Returns the seconds from each pod's end to the release of its memory.
async fn release_delays(context: &mut TrialContext) -> Result<Vec<f64>, Failed> {
    let names: Vec<String> = (0..PODS).map(|number| format!("three-{number}")).collect();
    for name in &names {
        context.pods.create(&holder(context, name, 3)).await?;
    }
    for name in &names {
        context.pods.wait_until_running(name, START_TIMEOUT).await?;
    }
    let node = context.node_files()?;
    let pods = context.pods.list().await?;
    let mut endings: Vec<PodEnd> = pods
        .iter()
        .filter_map(|pod| pod.uid())
        .map(|uid| PodEnd {
            cgroups: node.cgroups(&uid),
            uid,
            gone: None,
            released: None,
        })
        .collect();
    let unseen = endings
        .iter()
        .filter(|ending| ending.cgroups.is_empty())
        .count();
    assert_eq!(
        (endings.len(), unseen),
        (PODS, 0),
        "pods, and those without a cgroup"
    );
    for name in &names {
        context.pods.delete(name).await?;
    }
    let begin = Instant::now();
    while endings
        .iter()
        .any(|ending| ending.gone.is_none() || ending.released.is_none())
    {
        if begin.elapsed() > START_TIMEOUT {
            let left: Vec<&str> = endings
                .iter()
                .filter(|ending| ending.released.is_none())
                .map(|ending| ending.uid.as_str())
                .collect();
            return Err(
                format!("after {START_TIMEOUT:?} these hold their memory: {left:?}").into(),
            );
        }
        observe_ends(&node, &mut endings)?;
        tokio::time::sleep(PAUSE).await;
    }
    for name in &names {
        context.pods.wait_until_deleted(name, START_TIMEOUT).await?;
    }
    let delay = |ending: &PodEnd| {
        Some(
            ending
                .released?
                .saturating_duration_since(ending.gone?)
                .as_secs_f64(),
        )
    };
    Ok(endings.iter().filter_map(delay).collect())
}

fn observe_ends(node: &NodeFiles, endings: &mut [PodEnd]) -> Result<(), Failed> {
    let held = node.cdi_files()?;
    let now = Instant::now();
    for ending in endings {
        if ending.gone.is_none() && !ending.cgroups.iter().any(|path| path.exists()) {
            ending.gone = Some(now);
        }
        let holds = held.values().any(|file| file.contains(&ending.uid));
        if ending.released.is_none() && !holds {
            ending.released = Some(now);
        }
    }
    Ok(())
}
