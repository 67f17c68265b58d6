//! Measures when a kubelet with its default settings restarts a container that is killed again and
//! again (F18).

use std::fs;
use std::time::{Duration, Instant};

use bursar_e2e::images::PAUSE;
use bursar_e2e::pods::PodBuilder;
use bursar_e2e::wait::{self, Poll};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use libtest_mimic::Failed;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{BareCluster, POLL_INTERVAL};
use crate::on_node::NodeFiles;
use crate::shared_cluster::START_TIMEOUT;

const POD: &str = "killed";
/// The kubelet's back-off before each restart: none, then 10 s, which double.
const BACKOFFS: [Duration; 4] = [
    Duration::ZERO,
    Duration::from_secs(10),
    Duration::from_secs(20),
    Duration::from_secs(40),
];

pub(super) async fn kubelet_backs_off_by_default(cluster: &mut BareCluster) -> Result<(), Failed> {
    remove_backoff_settings(cluster)?;
    cluster.local.restart_kubelet(false).await?;
    let pod = PodBuilder::new(POD, PAUSE).restart_always();
    cluster.pods.create(&pod).await?;
    let mut times = Vec::new();
    let mut container = wait_until_restarted(cluster, 0).await?;
    for restarts in 1..=BACKOFFS.len() {
        let begin = Instant::now();
        kill(cluster, &container).await?;
        container = wait_until_restarted(cluster, i32::try_from(restarts)?).await?;
        times.push(begin.elapsed());
    }
    cluster.progress.report(format_args!(
        "without maxContainerRestartPeriod the kubelet restarts a killed container after {times:.1?}"
    ));
    let pairs = times.iter().zip(&BACKOFFS);
    let kept = pairs.clone().all(|(time, backoff)| time >= backoff);
    assert!(kept, "{times:?}, and not after {BACKOFFS:?}");
    assert!(times[0] < BACKOFFS[1], "the first restart: {:?}", times[0]);
    Ok(())
}

/// Removes the harness's setting from the kubelet's configuration.
fn remove_backoff_settings(cluster: &BareCluster) -> Result<(), Failed> {
    let path = cluster.local.folder().config("kubelet.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path)?)?;
    let settings = config.as_object_mut().ok_or("no object")?;
    settings.remove("crashLoopBackOff").ok_or("no setting")?;
    Ok(fs::write(&path, config.to_string())?)
}

/// Waits until the container runs after this number of restarts, and returns its id.
async fn wait_until_restarted(cluster: &BareCluster, restarts: i32) -> Result<String, Failed> {
    let poll = async || match cluster.pods.get(POD).await {
        Ok(pod) => match container_of(pod) {
            Some(ContainerStatus {
                container_id: Some(id),
                restart_count,
                state: Some(state),
                ..
            }) if restart_count == restarts && state.running.is_some() => {
                Poll::Ready(id.trim_start_matches("containerd://").to_owned())
            }
            other => Poll::Pending(format!("{other:?}")),
        },
        Err(error) => Poll::Pending(error.to_string()),
    };
    let what = format!("restart {restarts}");
    Ok(wait::poll_until(&what, START_TIMEOUT, POLL_INTERVAL, poll).await?)
}

fn container_of(pod: Pod) -> Option<ContainerStatus> {
    let containers = pod.status?.container_statuses?;
    containers.into_iter().next()
}

/// Kills the processes of a container.
async fn kill(cluster: &BareCluster, container: &str) -> Result<(), Failed> {
    let uid = cluster.pods.get(POD).await?.metadata.uid;
    let uid = uid.ok_or("the pod has no UID")?;
    let cgroups = NodeFiles::of(&cluster.local).cgroups(&uid);
    let pod = cgroups.first().ok_or("the pod has no cgroup")?;
    let processes = fs::read_to_string(pod.join(container).join("cgroup.procs"))?;
    for process in processes.lines() {
        let process = Pid::from_raw(process.parse()?).ok_or("no process id")?;
        kill_process(process, Signal::KILL)?;
    }
    Ok(())
}
