//! Tests objects that another version wrote.

use std::time::Duration;

use bursar_sim_api::SimApiServer;
use futures::future::join_all;
use serde_json::Value;
use serde_json::json;
use tokio::time::sleep;

use super::{BUDGETS, Running, budget, condition, gpu_node, pod, small};

/// The metric of an unreadable object.
fn unreadable(kind: &str, namespace: &str, name: &str) -> String {
    format!(
        r#"bursar_operator_unreadable{{kind="{kind}",namespace="{namespace}",name="{name}"}} 1"#
    )
}

#[tokio::test(start_paused = true)]
async fn unreadable_objects_stop_nothing_but_themselves() {
    let running = Running::start(|api| {
        small(api);
        let mut node = gpu_node("odd", 8);
        node["status"]["deviceMemory"]["allocatable"] = json!("many");
        api.put("gpunodes", node);
        let mut odd = budget("other", "4Gi");
        odd["spec"]["deviceMemory"] = json!("much");
        api.put(BUDGETS, odd);
        // The namespace's budget was in force.
        let labels = json!({ "bursar.dev/budget": "enforced" });
        let namespace = json!({ "apiVersion": "v1", "kind": "Namespace",
            "metadata": { "name": "other", "labels": labels } });
        api.put("namespaces", namespace);
    })
    .await;
    let status = running.until_ready().await;
    let message = condition(&status, "Covered")["message"].to_string();
    assert!(
        message.contains("because GpuNode odd cannot be parsed"),
        "{message}"
    );
    assert!(running.get("/readyz").await.starts_with("HTTP/1.1 200"));
    let metrics = running.get("/metrics").await;
    let (node, odd) = (
        unreadable("GpuNodes", "", "odd"),
        unreadable("GpuMemoryBudgets", "other", "default"),
    );
    assert!(
        metrics.contains(&node) && metrics.contains(&odd),
        "{metrics}"
    );
    // One object becomes unreadable, and the first two become readable.
    running.api.put("gpunodes", gpu_node("odd", 8));
    running.api.put(BUDGETS, budget("other", "4Gi"));
    let mut team = budget("team", "16Gi");
    team["spec"]["deviceMemory"] = json!("much");
    team["status"] = running.api.status(BUDGETS, "team", "default");
    running.api.put(BUDGETS, team);
    let named = unreadable("GpuMemoryBudgets", "team", "default");
    while !running.get("/metrics").await.contains(&named) {
        sleep(Duration::from_millis(50)).await;
    }
    let of_other = || running.api.status(BUDGETS, "other", "default");
    while of_other().is_null() || condition(&of_other(), "Ready")["status"] != "True" {
        sleep(Duration::from_millis(50)).await;
    }
    let metrics = running.get("/metrics").await;
    assert!(
        !metrics.contains(&node) && !metrics.contains(&odd),
        "{metrics}"
    );
    let label = |namespace: &str| {
        let object = running.api.get("namespaces", "", namespace);
        object["metadata"]["labels"]["bursar.dev/budget"].clone()
    };
    assert_eq!(
        (label("team"), label("other")),
        (json!("enforced"), json!("enforced"))
    );
    running.stop().await;
}

/// The enum fields of a `GpuNode`, as JSON pointers into [`full`].
const OF_NODES: [&str; 5] = [
    "/status/gpus/0/state",
    "/status/gpus/0/health/status",
    "/status/quotas/0/state",
    "/status/faults/0/kind",
    "/status/faults/0/action",
];
/// The enum fields of a budget.
const OF_BUDGETS: [&str; 2] = ["/spec/overflow", "/spec/contextPolicy/action"];

/// A node with each enum field set. Its report makes pod `p` of `team` due for eviction.
fn full(name: &str) -> Value {
    let mut node = gpu_node(name, 8);
    node["status"]["gpus"] = json!([{
        "uuid": "GPU-0", "index": 0, "model": "m", "memory": "8Gi", "state": "Lost", "generation": 1,
        "health": { "status": "Unhealthy", "reason": "GpuLost" }, "capacity": 0, "free": 0, "largestFree": 0,
        "pods": [{ "uid": "p", "quanta": 4 }] }]);
    node["status"]["quotas"] =
        json!([{ "podUid": "p", "container": "c", "account": "device", "state": "Applied" }]);
    node["status"]["faults"] = json!([{
        "id": "f", "kind": "Gpu", "gpu": "GPU-0", "gpuGeneration": 1, "action": "Wait",
        "time": "2026-01-01T00:00:00Z" }]);
    node
}

fn set_later(object: &mut Value, field: &str) {
    *object.pointer_mut(field).expect("it is set") = json!("Later");
}

/// Runs an operator over `small` and one object with a later value, until `team` is ready. A new
/// pod is counted and an amended budget applied.
async fn goes_on(field: &str, put: impl FnOnce(&SimApiServer)) -> Running {
    let running = Running::start(|api| {
        small(api);
        put(api);
    })
    .await;
    running.until_requested(4).await;
    running.api.put("pods", pod("q", 2));
    running.until_requested(6).await;
    assert!(
        running.get("/readyz").await.starts_with("HTTP/1.1 200"),
        "{field}"
    );
    running
}

#[tokio::test(start_paused = true)]
async fn later_value_in_a_node_is_named_and_stops_nothing() {
    join_all(OF_NODES.map(in_a_node)).await;
}

async fn in_a_node(field: &'static str) {
    let mut node = full("odd");
    set_later(&mut node, field);
    let running = goes_on(field, |api| api.put("gpunodes", node)).await;
    let status = running.until_ready().await;
    let covered = condition(&status, "Covered")["message"].to_string();
    let text = "GpuNode odd has a value of another version";
    assert!(covered.contains(text), "{field}: {covered}");
    let metrics = running.get("/metrics").await;
    let named = unreadable("GpuNodes", "", "odd");
    assert!(metrics.contains(&named), "{metrics}");
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn later_value_in_a_budget_is_named_and_stops_nothing() {
    join_all(OF_BUDGETS.map(in_a_budget)).await;
}

async fn in_a_budget(field: &'static str) {
    let mut odd = budget("other", "4Gi");
    odd["spec"]["overflow"] = json!("Borrow");
    odd["spec"]["contextPolicy"] = json!({ "action": "Evict" });
    set_later(&mut odd, field);
    let running = goes_on(field, |api| api.put(BUDGETS, odd)).await;
    running.until_ready().await;
    let status = running.api.status(BUDGETS, "other", "default");
    let accepted = condition(&status, "Accepted").to_string();
    assert!(
        accepted.contains("has a value of another version"),
        "{accepted}"
    );
    assert_eq!(
        condition(&status, "Enforced")["status"],
        "True",
        "the rest applies"
    );
    let metrics = running.get("/metrics").await;
    let named = unreadable("GpuMemoryBudgets", "other", "default");
    assert!(metrics.contains(&named), "{metrics}");
    running.stop().await;
}

/// Whether the pod on a lost GPU exists a minute later, with this fault and this policy.
async fn stays(fault_action: &str, policy: &str) -> bool {
    let running = Running::start(|api| {
        small(api);
        let mut evicting = budget("team", "16Gi");
        evicting["spec"]["contextPolicy"] = json!({ "action": policy });
        api.put(BUDGETS, evicting);
        let mut node = full("n");
        node["status"]["faults"][0]["action"] = json!(fault_action);
        api.put("gpunodes", node);
    })
    .await;
    running.until_requested(4).await;
    sleep(Duration::from_secs(60)).await;
    let stays = !running.api.get("pods", "team", "p").is_null();
    running.stop().await;
    stays
}

#[tokio::test(start_paused = true)]
async fn later_action_evicts_nobody() {
    assert!(!stays("Wait", "Evict").await, "a known one does");
    assert!(stays("Later", "Evict").await);
    assert!(stays("Wait", "Later").await);
}
