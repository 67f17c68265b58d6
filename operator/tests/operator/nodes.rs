//! Tests nodes that go down and recover, and the labels of nodes.

use std::time::Duration;

use bursar_sim_api::WriteFault;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::{BUDGETS, Running, budget, condition, gpu_node, node, small};

/// A wide bound: the grace is a minute.
const END: Duration = Duration::from_secs(120);

#[tokio::test(start_paused = true)]
async fn node_without_an_agent_leaves_its_cohort_and_comes_back() {
    let running = Running::start(|api| {
        small(api);
        api.put("nodes", node("m", true));
        api.put("gpunodes", gpu_node("m", 32));
        api.put(BUDGETS, budget("team", "40Gi"));
    })
    .await;
    running.until_ready().await;
    // The agent of `m` ends, and its last report stays.
    running.api.put("nodes", node("m", false));
    let covered = || {
        let status = running.api.status(BUDGETS, "team", "default");
        condition(&status, "Covered").clone()
    };
    let begin = Instant::now();
    while covered()["status"] != "False" {
        assert!(begin.elapsed() < END, "{}", covered());
        sleep(Duration::from_millis(50)).await;
    }
    let lasted = begin.elapsed();
    assert!(lasted > Duration::from_secs(50), "an upgrade: {lasted:?}");
    let message = covered()["message"].to_string();
    assert!(
        message.contains("1 node excluded, because node m"),
        "{message}"
    );
    let metrics = running.get("/metrics").await;
    let left_out = r#"bursar_operator_nodes_left_out{reason="Dead"} 1"#;
    assert!(metrics.contains(left_out), "{metrics}");
    running.api.put("nodes", node("m", true));
    running.until_ready().await;
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn label_without_an_answer_delays_no_other() {
    let running = Running::start(|api| {
        for name in ["a", "b"] {
            let (mut node, mut gpus) = (node(name, true), gpu_node(name, 32));
            node["metadata"]["uid"] = name.into();
            gpus["status"]["gpus"] = json!([{ "uuid": "GPU-0", "index": 0, "model": "m", "memory": "32Gi",
                "state": "Active", "generation": 1, "health": { "status": "Healthy", "reason": "Ok" },
                "capacity": 32, "free": 32, "largestFree": 32, "pods": [] }]);
            api.put("nodes", node);
            api.put("gpunodes", gpus);
        }
        api.fail_write(1, WriteFault::RequestDropped);
    })
    .await;
    let labels = || {
        let nodes = ["a", "b"].map(|name| running.api.get("nodes", "", name));
        let labelled =
            |node: &Value| !node["metadata"]["labels"]["bursar.dev/largest-gpu-gib"].is_null();
        nodes.iter().filter(|node| labelled(node)).count()
    };
    let reached = async |count| {
        let begin = Instant::now();
        while labels() < count {
            assert!(begin.elapsed() < END, "{:?}", running.api.writes());
            sleep(Duration::from_millis(50)).await;
        }
        begin.elapsed()
    };
    let first = reached(1).await;
    let both = reached(2).await;
    assert!(running.api.has_failed_write());
    // The operator waits 5 s for the answer.
    assert!(first < Duration::from_secs(3), "after {first:?}, {both:?}");
    running.stop().await;
}
