//! Tests the agent's probes and metrics.

use std::time::{Duration, Instant};

use crate::common::PATIENCE;
use crate::machine::Machine;

/// Waits until the answer to a GET of `path` is as `wanted`. Returns its body.
async fn wait_for_status(
    machine: &Machine,
    path: &str,
    wanted: impl Fn(u16, &str) -> bool,
) -> String {
    let begun = Instant::now();
    loop {
        let (code, body) = machine.get(path).await;
        if wanted(code, &body) {
            return body;
        }
        assert!(begun.elapsed() < PATIENCE, "{path} answers {code}:\n{body}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn probes_report_health_and_why_the_agent_is_not_ready() {
    let mut machine = Machine::started().await;
    wait_for_status(&machine, "/readyz", |code, _| code == 200).await;
    machine.kubelet.stop().await;
    let why = wait_for_status(&machine, "/readyz", |code, _| code == 503).await;
    assert!(why.contains("Registered"), "{why}");
    let (alive, _) = machine.get("/healthz").await;
    assert_eq!(alive, 200, "the agent's restart would mend nothing");
    machine.kubelet.start();
    machine.kubelet.sync_pods().await;
    wait_for_status(&machine, "/readyz", |code, _| code == 200).await;
}

#[tokio::test]
async fn metrics_follow_a_pod_from_allocation_to_end() {
    let machine = Machine::started().await;
    let shows = |line: &'static str| {
        move |code, text: &str| code == 200 && text.lines().any(|shown| shown == line)
    };
    wait_for_status(
        &machine,
        "/metrics",
        shows(r#"bursar_agent_tokens{resource="gpu-memory"} 32"#),
    )
    .await;
    let pod = machine.run("a", 10).await;
    wait_for_status(
        &machine,
        "/metrics",
        shows(r#"bursar_agent_bound{resource="gpu-memory"} 1"#),
    )
    .await;
    wait_for_status(
        &machine,
        "/metrics",
        shows("bursar_agent_allocate_seconds_count 1"),
    )
    .await;
    let started = r#"bursar_agent_bind_seconds_count{result="bound"} 1"#;
    wait_for_status(&machine, "/metrics", shows(started)).await;
    machine.end(&pod);
    wait_for_status(
        &machine,
        "/metrics",
        shows(r#"bursar_agent_bound{resource="gpu-memory"} 0"#),
    )
    .await;
    wait_for_status(&machine, "/metrics", shows("bursar_agent_releases_total 1")).await;
}
