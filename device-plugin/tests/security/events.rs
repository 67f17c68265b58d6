//! Tests that a hostile container cannot cause Events without bound.

use std::time::{Duration, Instant};

use crate::api_server::FakeApiServer;
use crate::fixture::{Node, Tenant};

/// The Events about one pod in a burst, and the seconds from each to the next.
const POD_BURST: u64 = 8;
const POD_INTERVAL: u64 = 30;
/// The burst of Events about the node, and about all of its pods. Later ones come once a second.
const BURST: u64 = 25;

/// The processes of a wave. Each fault is an Event until the process ends, and
/// processes past the shim are findings.
const PROCESSES_PER_WAVE: u32 = 8;
const WAVES: usize = 16;
/// This is longer than the time from one audit to the next.
const WAVE: Duration = Duration::from_millis(1_200);

/// Starts short-lived processes in two containers.
async fn start_wave(node: &Node, tenants: &[(Tenant, &str); 2]) {
    let crowds = tenants.each_ref().map(|(tenant, how)| {
        let mut crowd = tenant.run_many(node, PROCESSES_PER_WAVE, how);
        crowd.send("go");
        crowd
    });
    tokio::time::sleep(WAVE).await;
    drop(crowds);
    tenants
        .iter()
        .for_each(|(tenant, _)| tenant.remove_processes(node));
}

/// The sum of a metric's samples.
async fn metric_sum(node: &Node, metric: &str) -> u64 {
    let (_, text) = node.machine.get("/metrics").await;
    let samples = text.lines().filter(|line| line.starts_with(metric));
    let values = samples.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok());
    values.sum()
}

#[tokio::test]
async fn events_are_bounded_when_processes_come_in_waves() {
    let api_server = FakeApiServer::start(Duration::from_millis(50)).await;
    let start = Instant::now();
    let node = Node::start_with(&api_server).await;
    let pods = ["faults", "untracked"];
    let [faults, untracked] = pods;
    let tenants = [
        (node.tenant(faults).await, "fault"),
        (node.tenant(untracked).await, "past"),
    ];
    let storm = async {
        for number in 0..WAVES {
            if number == WAVES / 2 {
                api_server.stop_answering();
            }
            start_wave(&node, &tenants).await;
        }
    };
    let ((), result) = node.run_load(storm).await;
    let dropped = metric_sum(&node, "bursar_agent_events_dropped_total").await;
    let findings = metric_sum(&node, "bursar_agent_findings_total").await;
    let (seconds, all) = (start.elapsed().as_secs() + 1, api_server.events());
    println!("{findings} findings, {all} Events and {dropped} dropped in {seconds} s");
    for pod in pods {
        let (about, most) = (
            api_server.reasons_about(pod).len(),
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
    node.check_unharmed(result).await;
}
