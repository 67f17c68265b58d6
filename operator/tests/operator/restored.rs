//! Tests a restore of etcd from a backup.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::{BUDGETS, Running, budget, pod, small};

/// The bound on the time until the operator follows again.
const PROMISED: Duration = Duration::from_secs(30);

fn amended(running: &Running, guaranteed: &str, generation: u64) -> Value {
    let mut budget = budget("team", guaranteed);
    budget["metadata"]["generation"] = json!(generation);
    budget["status"] = running.api.status(BUDGETS, "team", "default");
    budget
}

async fn until_guaranteed(running: &Running, quanta: &str) {
    let hard = || {
        let quota = running
            .api
            .get("resourcequotas", "team", "gpu-memory-budget-guaranteed");
        quota["spec"]["hard"]["requests.bursar.dev/gpu-memory-gib"].clone()
    };
    let begin = Instant::now();
    while hard() != quanta {
        assert!(begin.elapsed() < PROMISED, "{quanta}; at last {}", hard());
        sleep(Duration::from_millis(50)).await;
    }
    running.until_ready().await;
}

#[tokio::test(start_paused = true)]
async fn operator_follows_again_after_a_restore_of_etcd() {
    let running = Running::start(small).await;
    running.until_ready().await;
    // The watches have been resumed and have delivered no event of these objects.
    sleep(Duration::from_secs(300)).await;
    let backup = running.api.backup();
    running.api.put(BUDGETS, amended(&running, "24Gi", 2));
    until_guaranteed(&running, "24").await;
    for number in 0..100 {
        running.api.put("pods", pod("lost", number % 3 + 1));
    }
    running.until_requested(5).await;
    running.api.restore(&backup);
    let restored = Instant::now();
    // The generation and the version are the same as before, but the object differs.
    running.api.put(BUDGETS, amended(&running, "20Gi", 2));
    until_guaranteed(&running, "20").await;
    running.until_requested(4).await;
    assert!(restored.elapsed() < PROMISED, "{:?}", restored.elapsed());
    running.stop().await;
}
