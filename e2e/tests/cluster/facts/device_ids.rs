//! Measures the largest list of device ids that the kubelet accepts, and its time for a change of
//! all ids (F10).

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bursar_e2e::images::PAUSE;
use bursar_e2e::pods::PodBuilder;
use bursar_e2e::wait::{self, Poll};
use bursar_kubelet::api::deviceplugin::{Device, HEALTHY, ListAndWatchResponse, UNHEALTHY};
use libtest_mimic::Failed;
use prost::Message as _;
use serde_json::Value;

use super::BareCluster;
use super::fake_plugin::FakePlugin;
use crate::shared_cluster::START_TIMEOUT;

/// gRPC's default maximum of a received message, which the kubelet does not change.
const MAX_MESSAGE: usize = 4 << 20;
const LARGE_IDS: usize = 1024;
/// The numbers of ids whose health changes, each four times the one before.
const NUMBERS: [usize; 3] = [640, 2_560, 10_240];
/// Four times the ids take four times as long if the time is linear, and 16 times if it is
/// quadratic.
const MIN_RATIO: f64 = 6.0;
/// The changes of each number of ids: an even number, so that the last makes all ids healthy.
const CHANGES: usize = 4;
const CHECKPOINT_INTERVAL: Duration = Duration::from_millis(20);

pub(super) async fn kubelet_limits_and_times_lists(
    cluster: &mut BareCluster,
) -> Result<(), Failed> {
    limit_of_a_message(cluster).await?;
    ended_stream_stays_closed(cluster).await?;
    for number in NUMBERS {
        let median = time_of_free_ids(cluster, number).await?;
        cluster.progress.report(format_args!(
            "a change of {number} free ids takes the kubelet {median:.3?} (median)"
        ));
    }
    let mut medians = Vec::new();
    for number in NUMBERS {
        let median = time_of_allocated_ids(cluster, number).await?;
        cluster.progress.report(format_args!(
            "a change of {number} allocated ids takes the kubelet {median:.3?} (median)"
        ));
        medians.push(median.as_secs_f64());
    }
    let [.., less, most] = medians[..] else {
        return Err("two numbers of ids are compared".into());
    };
    assert!(most > MIN_RATIO * less, "{medians:?} s for {NUMBERS:?} ids");
    Ok(())
}

/// The kubelet accepts a message of 4 MiB, and ends its stream at a message of one byte more.
async fn limit_of_a_message(cluster: &BareCluster) -> Result<(), Failed> {
    const RESOURCE: &str = "facts.bursar.dev/large";
    let plugin = register(cluster, "large", RESOURCE, list_of_size(MAX_MESSAGE)).await?;
    cluster.wait_for_allocatable(RESOURCE, LARGE_IDS).await?;
    plugin.send(list_of_size(MAX_MESSAGE + 1));
    tokio::time::timeout(START_TIMEOUT, plugin.closed()).await?;
    cluster.wait_for_allocatable(RESOURCE, 0).await?;
    let log = fs::read_to_string(cluster.local.folder().log("kubelet"))?;
    let refusal = format!("larger than max ({} vs. {MAX_MESSAGE})", MAX_MESSAGE + 1);
    assert!(
        log.contains(&refusal),
        "no {refusal:?} in the kubelet's log"
    );
    assert_eq!(plugin.opened(), 1, "streams");
    cluster.progress.report(format_args!(
        "the kubelet accepts a list of {MAX_MESSAGE} bytes, and ends the stream at one byte more"
    ));
    Ok(())
}

/// The kubelet opens one stream for each registration. The second registration is the event after
/// which a stream of the first would have been there.
async fn ended_stream_stays_closed(cluster: &BareCluster) -> Result<(), Failed> {
    const RESOURCE: &str = "facts.bursar.dev/ended";
    let first = register(cluster, "ended", RESOURCE, list(3, HEALTHY)).await?;
    cluster.wait_for_allocatable(RESOURCE, 3).await?;
    first.end_stream();
    tokio::time::timeout(START_TIMEOUT, first.closed()).await?;
    cluster.wait_for_allocatable(RESOURCE, 0).await?;
    // A kubelet that opened the stream again would get a list.
    first.send(list(3, HEALTHY));
    let second = register(cluster, "again", RESOURCE, list(4, HEALTHY)).await?;
    cluster.wait_for_allocatable(RESOURCE, 4).await?;
    assert_eq!((first.opened(), second.opened()), (1, 1), "streams");
    cluster.progress.report(format_args!(
        "an ended stream stays closed until the plugin registers again"
    ));
    Ok(())
}

/// Changes the health of all ids, none of which a pod has. No pod may have had ids before: the
/// kubelet keeps those of a deleted pod until it allocates ids to the next pod.
async fn time_of_free_ids(cluster: &BareCluster, number: usize) -> Result<Duration, Failed> {
    let name = format!("free-{number}");
    let resource = format!("facts.bursar.dev/{name}");
    let plugin = register(cluster, &name, &resource, list(number, HEALTHY)).await?;
    cluster.wait_for_allocatable(&resource, number).await?;
    median_time(cluster, &plugin, &resource, number).await
}

/// Changes the health of all ids while a pod has all of them.
async fn time_of_allocated_ids(cluster: &BareCluster, number: usize) -> Result<Duration, Failed> {
    let (name, pods) = (format!("ids-{number}"), &cluster.pods);
    let resource = format!("facts.bursar.dev/{name}");
    let plugin = register(cluster, &name, &resource, list(number, HEALTHY)).await?;
    cluster.wait_for_allocatable(&resource, number).await?;
    let pod = PodBuilder::new(&name, PAUSE).limit(&resource, &number.to_string());
    pods.create(&pod).await?;
    pods.wait_until_running(&name, START_TIMEOUT).await?;
    let median = median_time(cluster, &plugin, &resource, number).await?;
    pods.delete(&name).await?;
    pods.wait_until_deleted(&name, START_TIMEOUT).await?;
    Ok(median)
}

/// Returns the median time from a list in which the health of all ids has changed to the kubelet's
/// checkpoint of it. All ids are healthy before and after.
async fn median_time(
    cluster: &BareCluster,
    plugin: &FakePlugin,
    resource: &str,
    number: usize,
) -> Result<Duration, Failed> {
    let mut times = Vec::new();
    for change in 0..CHANGES {
        let (health, healthy) = match change % 2 {
            0 => (UNHEALTHY, 0),
            _ => (HEALTHY, number),
        };
        let changed = list(number, health);
        let begin = Instant::now();
        plugin.send(changed);
        wait_for_checkpoint(cluster, resource, healthy).await?;
        times.push(begin.elapsed());
    }
    times.sort_unstable();
    Ok(times[CHANGES / 2])
}

/// Waits until the kubelet's checkpoint has this number of healthy devices.
async fn wait_for_checkpoint(
    cluster: &BareCluster,
    resource: &str,
    healthy: usize,
) -> Result<(), Failed> {
    let path = plugin_folder(cluster).join("kubelet_internal_checkpoint");
    let read = || -> Result<usize, Failed> {
        let checkpoint: Value = serde_json::from_slice(&fs::read(&path)?)?;
        let devices = checkpoint["Data"]["RegisteredDevices"][resource].as_array();
        Ok(devices.map_or(0, Vec::len))
    };
    let poll = async || match read() {
        Ok(found) if found == healthy => Poll::Ready(()),
        Ok(found) => Poll::Pending(format!("{found} healthy devices")),
        Err(failed) => Poll::Pending(failed.message().unwrap_or_default().to_owned()),
    };
    let what = format!("{healthy} healthy devices in the kubelet's checkpoint");
    Ok(wait::poll_until(&what, START_TIMEOUT, CHECKPOINT_INTERVAL, poll).await?)
}

async fn register(
    cluster: &BareCluster,
    name: &str,
    resource: &str,
    list: Vec<Device>,
) -> Result<FakePlugin, Failed> {
    let socket = format!("facts-{name}.sock");
    FakePlugin::register(&plugin_folder(cluster), &socket, resource, list).await
}

fn plugin_folder(cluster: &BareCluster) -> PathBuf {
    cluster.local.host_path("/var/lib/kubelet/device-plugins")
}

fn device(id: String, health: &str) -> Device {
    Device {
        id,
        health: health.to_owned(),
        topology: None,
    }
}

fn list(number: usize, health: &str) -> Vec<Device> {
    let ids = (0..number).map(|id| device(id.to_string(), health));
    ids.collect()
}

/// Returns a list whose message has exactly this size.
fn list_of_size(bytes: usize) -> Vec<Device> {
    let ids = (0..LARGE_IDS).map(|id| device(format!("{id:04080}"), HEALTHY));
    let mut message = ListAndWatchResponse {
        devices: ids.collect(),
    };
    let missing = bytes - message.encoded_len();
    if let Some(last) = message.devices.last_mut() {
        last.id.push_str(&"0".repeat(missing));
    }
    assert_eq!(message.encoded_len(), bytes);
    message.devices
}
