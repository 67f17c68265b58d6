//! Tests nodes that go down and recover.

use std::time::Duration;

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
