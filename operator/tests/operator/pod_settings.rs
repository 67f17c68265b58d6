//! Tests that agents learn of the pods on their nodes.

use std::time::Duration;

use axum::http::StatusCode;
use bursar_sim_api::SimApiServer;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

use super::{Running, gpu_node, node, pod, small};

const NODES: usize = 10;
const PODS: usize = 500;

fn node_of(index: usize) -> String {
    format!("node-{}", index % NODES)
}

fn over_two_gpus(index: usize) -> Value {
    let mut pod = pod(&format!("pod-{index:03}"), 2);
    pod["spec"]["nodeName"] = node_of(index).into();
    pod["spec"]["priority"] = json!(-10);
    pod["status"]["phase"] = json!("Pending");
    pod["metadata"]["annotations"] = json!({ "bursar.dev/gpus": "2", "bursar.dev/x": "y" });
    pod
}

fn with_nodes(api: &SimApiServer) {
    small(api);
    for index in 0..NODES {
        api.put("nodes", node(&node_of(index), true));
        api.put("gpunodes", gpu_node(&node_of(index), 200));
    }
}

/// The settings in the GpuNode of a node.
fn settings(api: &SimApiServer, node: &str) -> Vec<Value> {
    let pods = api.get("gpunodes", "", node)["spec"]["pods"].clone();
    pods.as_array().cloned().unwrap_or_default()
}

fn node_writes(api: &SimApiServer) -> usize {
    let writes = api.writes();
    writes
        .iter()
        .filter(|write| write.contains("/gpunodes/"))
        .count()
}

/// Waits until the GpuNodes have `count` settings together.
async fn until_told(api: &SimApiServer, count: usize) {
    let told = async {
        let nodes = || (0..NODES).map(|index| settings(api, &node_of(index)).len());
        while nodes().sum::<usize>() != count {
            sleep(Duration::from_millis(20)).await;
        }
    };
    // A wide bound: the tests beside this one share two cores.
    let told = timeout(Duration::from_secs(60), told).await;
    told.unwrap_or_else(|_| panic!("{count} settings"));
}

#[tokio::test]
async fn all_of_500_pods_at_once_are_told_to_their_nodes() {
    let running = Running::start(with_nodes).await;
    running.until_ready().await;
    let begin = Instant::now();
    for index in 0..PODS {
        running.api.put("pods", over_two_gpus(index));
    }
    let created = begin.elapsed();
    until_told(&running.api, PODS).await;
    println!(
        "500 pods on 10 nodes told after {:?}, created in {created:?}",
        begin.elapsed()
    );
    for index in 0..PODS {
        let name = format!("pod-{index:03}");
        let told = json!({ "podUid": name, "namespace": "team", "name": name, "priority": -10,
            "annotations": { "bursar.dev/gpus": "2" } });
        let settings = settings(&running.api, &node_of(index));
        assert!(settings.contains(&told), "{index}: {settings:?}");
    }
    let written = node_writes(&running.api);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(node_writes(&running.api), written, "none is written again");
    running.stop().await;
}

#[tokio::test]
async fn single_pod_is_told_within_its_sandbox_creation() {
    let running = Running::start(with_nodes).await;
    running.until_ready().await;
    let mut times = Vec::new();
    for index in 0..20 {
        let begin = Instant::now();
        running.api.put("pods", over_two_gpus(index));
        until_told(&running.api, index + 1).await;
        times.push(begin.elapsed());
    }
    times.sort();
    println!(
        "one pod told after {:?} (median), {:?} (most)",
        times[10], times[19]
    );
    assert!(times[10] < Duration::from_secs(1), "{times:?}");
    running.stop().await;
}

#[tokio::test]
async fn settings_are_written_after_refusals_and_go_with_the_pod() {
    let running = Running::start(with_nodes).await;
    running.until_ready().await;
    let refused = StatusCode::INTERNAL_SERVER_ERROR;
    running.api.refuse_requests("gpunodes/node-0", refused, 2);
    running.api.put("pods", over_two_gpus(0));
    until_told(&running.api, 1).await;
    let mut deleted = over_two_gpus(0);
    deleted["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    deleted["metadata"]["deletionGracePeriodSeconds"] = json!(30);
    running.api.put("pods", deleted);
    let told = timeout(Duration::from_secs(20), async {
        while settings(&running.api, "node-0")[0]["deletionGraceSeconds"] != 30 {
            sleep(Duration::from_millis(5)).await;
        }
    });
    told.await.expect("the deletion is told");
    running.api.delete("pods", "team", "pod-000");
    until_told(&running.api, 0).await;
    running.stop().await;
}
