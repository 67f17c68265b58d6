//! Checks that the operator reports a GpuNode whose agent is away.

use std::time::Duration;

use bursar_sim_api::faults::{Faults, WatchFault, WriteFault};
use libtest_mimic::Failed;
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::isolated_scope::{IsolatedScope, condition};
use crate::server::Server;
use crate::test_case::{GIVE_UP_AFTER, Operator, POLL_INTERVAL, READ_TIMEOUT};

/// The shortest absence that is reported.
const GRACE: Duration = Duration::from_secs(60);

/// Lets a node's agent go away, beside a node that never had one. The trial makes few
/// requests and waits most of the time, so it needs no permit.
pub(crate) async fn absent_agents(server: &Server) -> Result<String, Failed> {
    let name = "absent-agents";
    let at = IsolatedScope::set_up(server, name).await?;
    let beside = at.second_node().await?;
    let agent = json!({
        "metadata": { "name": "agent", "labels": { "app.kubernetes.io/name": "bursar", "app.kubernetes.io/component": "agent" } },
        "spec": { "nodeName": at.name, "containers": [{ "name": "agent", "image": "i" }] },
    });
    at.create(&at.pods_path(), agent).await?;
    set_ready(&at, "True").await?;
    at.report_ready().await?;
    let faults = Faults::new(name, WriteFault::RequestDropped, WatchFault::NoFault);
    let config = server.control_plane.operator_config();
    let operator = Operator::start(config, READ_TIMEOUT, &faults, Some(name)).await?;

    let begin = Instant::now();
    let never = wait_until_reported(&beside, begin).await?;
    if never < GRACE {
        return Err(format!("a node without an agent is reported after {never:.1?}").into());
    }
    let there = at.gpu_node().await?;
    if condition(&there, "Ready") != "True" {
        return Err(format!("a node with an agent is reported: {}", there["status"]).into());
    }
    let begin = Instant::now();
    set_ready(&at, "False").await?;
    let gone = wait_until_reported(&at, begin).await?;
    operator.stop().await?;
    Ok(format!("reported after {never:.1?} and {gone:.1?}"))
}

/// Writes the agent's readiness, in the kubelet's place.
async fn set_ready(at: &IsolatedScope, status: &str) -> Result<(), Failed> {
    let ready = json!({ "type": "Ready", "status": status,
        "lastTransitionTime": "2026-01-01T00:00:00Z" });
    let path = format!("{}/status", at.pod_path("agent"));
    at.merge(
        &path,
        json!({ "status": { "phase": "Running", "conditions": [ready] } }),
    )
    .await
}

/// Waits until the GpuNode is reported, and returns the time since `begin`.
async fn wait_until_reported(at: &IsolatedScope, begin: Instant) -> Result<Duration, Failed> {
    loop {
        let node = at.gpu_node().await?;
        let took = begin.elapsed();
        let mut conditions = node["status"]["conditions"]
            .as_array()
            .into_iter()
            .flatten();
        if conditions.any(|one| one["status"] == "Unknown" && one["reason"] == "AgentAway") {
            return Ok(took);
        }
        if took > GRACE + GIVE_UP_AFTER {
            return Err(format!("{} is not reported: {}", at.name, node["status"]).into());
        }
        sleep(POLL_INTERVAL).await;
    }
}
