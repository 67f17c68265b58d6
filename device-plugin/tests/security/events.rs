//! What a container does to be told of in Events without end.

use std::time::{Duration, Instant};

use crate::api_server::FakeApiServer;
use crate::fixture::{Node, Tenant};

/// Events about one pod at once, and the time from each to the next (`status::events`).
const POD_BURST: u64 = 8;
const POD_INTERVAL: u64 = 30;
/// The same about the node, and about all of its pods: an Event a second.
const BURST: u64 = 25;

/// Processes of a wave: each fault is another Event until the agent kills the container for it, and
/// processes past the shim are findings.
const CROWD: u32 = 8;
const WAVES: usize = 16;
/// Longer than from one audit to the next.
const WAVE: Duration = Duration::from_millis(1_200);

/// Short-lived processes of two containers.
async fn wave(node: &Node, tenants: &[(Tenant, &str); 2]) {
    let crowds = tenants.each_ref().map(|(tenant, how)| {
        let mut crowd = tenant.crowd(node, CROWD, how);
        crowd.say("go");
        crowd
    });
    tokio::time::sleep(WAVE).await;
    drop(crowds);
    tenants.iter().for_each(|(tenant, _)| tenant.empty(node));
}

/// The sum of a metric's samples.
async fn sum(node: &Node, metric: &str) -> u64 {
    let (_, text) = node.machine.get("/metrics").await;
    let samples = text.lines().filter(|line| line.starts_with(metric));
    let values = samples.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok());
    values.sum()
}

#[tokio::test]
async fn events_are_bounded_when_processes_come_in_waves() {
    let api_server = FakeApiServer::start(Duration::from_millis(50)).await;
    let begun = Instant::now();
    let node = Node::start_with(&api_server).await;
    let pods = ["faults", "intruders"];
    let [faults, intruders] = pods;
    let tenants = [
        (node.tenant(faults).await, "fault"),
        (node.tenant(intruders).await, "past"),
    ];
    let storm = async {
        for number in 0..WAVES {
            if number == WAVES / 2 {
                api_server.fall_silent();
            }
            wave(&node, &tenants).await;
        }
    };
    let ((), seen) = node.under(storm).await;
    let dropped = sum(&node, "bursar_agent_events_dropped_total").await;
    let findings = sum(&node, "bursar_agent_findings_total").await;
    let (seconds, all) = (begun.elapsed().as_secs() + 1, api_server.events());
    println!("{findings} findings, {all} Events and {dropped} dropped in {seconds} s");
    for pod in pods {
        let (about, most) = (
            api_server.events_about(pod),
            POD_BURST + seconds / POD_INTERVAL + 1,
        );
        println!("{about} Events about {pod}");
        assert!(
            (1..=most).contains(&(about as u64)),
            "{about} Events about {pod}"
        );
    }
    assert!(all as u64 <= 2 * (BURST + seconds), "{all} Events");
    assert!(findings > 0 && dropped > 0, "it is no storm");
    node.holds(seen).await;
}
