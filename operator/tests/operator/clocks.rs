//! Tests clocks that are an hour apart: the API server's, the operator's and the nodes'.

use std::time::Duration;

use bursar_operator::clock::Clock;
use bursar_sim_api::SimApiServer;
use futures::future::join_all;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::{BUDGETS, Running, budget, condition, pod, small};

/// The difference of the clocks.
const HOUR: SignedDuration = SignedDuration::from_hours(1);
/// A wide bound: the graces are 5 s and 30 s.
const END: Duration = Duration::from_secs(90);

/// A time as the API server writes it.
fn written(time: Timestamp) -> Value {
    json!(time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string())
}

/// A pod created that many seconds ago. A negative number is in the future.
fn created(name: &str, quanta: u64, seconds_ago: i64) -> Value {
    let mut pod = pod(name, quanta);
    let created = Timestamp::now() - SignedDuration::from_secs(seconds_ago);
    pod["metadata"]["creationTimestamp"] = written(created);
    pod
}

/// Waits until the pod is gone.
async fn until_gone(api: &SimApiServer, pod: &str) {
    let begin = Instant::now();
    while !api.get("pods", "team", pod).is_null() {
        assert!(begin.elapsed() < END, "{pod} is there: {:?}", api.writes());
        sleep(Duration::from_millis(20)).await;
    }
}

/// Creates a budget over a running pod. A second pod passes the late quota.
async fn over_a_running_pod(clock: Clock) {
    let api = SimApiServer::start();
    small(&api);
    api.put("pods", created("p", 4, 60));
    api.put(BUDGETS, budget("team", "2Gi"));
    let running = Running::by_clock(api, clock).await;
    let enforced = running.until("it is exceeded", |status| {
        !status.is_null() && condition(status, "Enforced")["status"] == "True"
    });
    let status = enforced.await;
    assert_eq!(condition(&status, "Exceeded")["status"], "True");
    running.api.put("pods", created("late", 3, -30));
    until_gone(&running.api, "late").await;
    let there = running.api.get("pods", "team", "p");
    assert!(!there.is_null(), "{:?}", running.api.writes());
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn pod_from_before_its_budget_stays_by_any_operators_clock() {
    let clocks: [Clock; 3] = [
        || Timestamp::now() - HOUR,
        Timestamp::now,
        || Timestamp::now() + HOUR,
    ];
    join_all(clocks.map(over_a_running_pod)).await;
}

/// How long a pod stays on a lost GPU when its node's clock is off by this.
async fn stays_on_a_lost_gpu(off: SignedDuration) -> Duration {
    let running = Running::start(|api| {
        small(api);
        let mut evicting = budget("team", "16Gi");
        evicting["spec"]["contextPolicy"] = json!({ "action": "Evict" });
        api.put(BUDGETS, evicting);
    })
    .await;
    running.until_ready().await;
    let mut node = running.api.get("gpunodes", "", "n");
    node["status"]["gpus"] = json!([{
        "uuid": "GPU-0", "index": 0, "model": "m", "memory": "32Gi", "state": "Lost", "generation": 1,
        "health": { "status": "Unhealthy", "reason": "GpuLost" }, "capacity": 0, "free": 0, "largestFree": 0,
        "pods": [{ "uid": "p", "quanta": 4 }] }]);
    node["status"]["faults"] = json!([{
        "id": "lost-1", "kind": "Gpu", "gpu": "GPU-0", "gpuGeneration": 1, "action": "Wait",
        "time": written(Timestamp::now() + off) }]);
    let begin = Instant::now();
    running.api.put("gpunodes", node);
    until_gone(&running.api, "p").await;
    let stayed = begin.elapsed();
    running.stop().await;
    stayed
}

#[tokio::test(start_paused = true)]
async fn lost_gpu_has_the_same_grace_by_any_nodes_clock() {
    let stays = join_all([-HOUR, SignedDuration::ZERO, HOUR].map(stays_on_a_lost_gpu)).await;
    let (shortest, longest) = (stays.iter().min().unwrap(), stays.iter().max().unwrap());
    assert!(*shortest >= Duration::from_secs(25), "{stays:?}");
    assert!(*longest - *shortest <= Duration::from_secs(2), "{stays:?}");
}
