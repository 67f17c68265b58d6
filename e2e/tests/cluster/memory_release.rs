//! Measures the time from a pod's end to the release of its memory.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use kube::ResourceExt;
use libtest_mimic::{Failed, Trial};

use crate::on_node::NodeFiles;
use crate::placement::holder;
use crate::restarts::percentile;
use crate::shared_cluster::{START_TIMEOUT, TrialContext, node_trial};

/// The pods that end at the same time: as many of 3 GiB as two GPUs of 16 GiB have room for.
const PODS: usize = 10;
/// The agent releases half of the pods' memory this soon after the kubelet has removed the cgroups.
const MEDIAN_RELEASE_SECONDS: f64 = 5.0;
/// The agent releases all memory this soon, on a busy machine too.
const MAX_RELEASE_SECONDS: f64 = 60.0;
const PAUSE: Duration = Duration::from_millis(10);

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        node_trial("main/cluster/release", async |context| {
            memory_is_released_after_pods_end(context, 2).await
        }),
        node_trial("main/cluster/release-long", async |context| {
            memory_is_released_after_pods_end(context, 5).await
        }),
    ]
}

async fn memory_is_released_after_pods_end(
    context: &mut TrialContext,
    rounds: usize,
) -> Result<(), Failed> {
    let mut seconds = Vec::new();
    for _ in 0..rounds {
        seconds.append(&mut release_delays(context).await?);
    }
    seconds.sort_by(f64::total_cmp);
    let (median, p99) = (percentile(&seconds, 50), percentile(&seconds, 99));
    context.progress.report(format_args!(
        "{} pods: released {median:.3} s (median), {p99:.3} s (p99) after the end of the cgroup",
        seconds.len()
    ));
    assert!(
        median < MEDIAN_RELEASE_SECONDS && p99 < MAX_RELEASE_SECONDS,
        "too late: {seconds:?}"
    );
    context.history.check_none_failed_or_restarted().await
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
    let mut pod_ends: Vec<PodEnd> = pods
        .iter()
        .filter_map(|pod| pod.uid())
        .map(|uid| PodEnd {
            cgroups: node.cgroups(&uid),
            uid,
            gone: None,
            released: None,
        })
        .collect();
    let without_cgroup = pod_ends
        .iter()
        .filter(|pod_end| pod_end.cgroups.is_empty())
        .count();
    assert_eq!(
        (pod_ends.len(), without_cgroup),
        (PODS, 0),
        "pods, and those without a cgroup"
    );
    for name in &names {
        context.pods.delete(name).await?;
    }
    let begin = Instant::now();
    while pod_ends
        .iter()
        .any(|pod_end| pod_end.gone.is_none() || pod_end.released.is_none())
    {
        if begin.elapsed() > START_TIMEOUT {
            let left: Vec<&str> = pod_ends
                .iter()
                .filter(|pod_end| pod_end.released.is_none())
                .map(|pod_end| pod_end.uid.as_str())
                .collect();
            return Err(
                format!("after {START_TIMEOUT:?} these hold their memory: {left:?}").into(),
            );
        }
        observe_ends(&node, &mut pod_ends)?;
        tokio::time::sleep(PAUSE).await;
    }
    for name in &names {
        context.pods.wait_until_deleted(name, START_TIMEOUT).await?;
    }
    let delay = |pod_end: &PodEnd| {
        Some(
            pod_end
                .released?
                .saturating_duration_since(pod_end.gone?)
                .as_secs_f64(),
        )
    };
    Ok(pod_ends.iter().filter_map(delay).collect())
}

fn observe_ends(node: &NodeFiles, pod_ends: &mut [PodEnd]) -> Result<(), Failed> {
    let held = node.cdi_files()?;
    let now = Instant::now();
    for pod_end in pod_ends {
        if pod_end.gone.is_none() && !pod_end.cgroups.iter().any(|path| path.exists()) {
            pod_end.gone = Some(now);
        }
        let holds = held.values().any(|file| file.contains(&pod_end.uid));
        if pod_end.released.is_none() && !holds {
            pod_end.released = Some(now);
        }
    }
    Ok(())
}
