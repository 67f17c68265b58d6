//! Tests hostile clients of the agent's metrics port.

use std::time::{Duration, Instant};

use crate::fixture::Node;

/// Returns the connections of one pod. The agent serves 32 at a time.
fn connection_count() -> u64 {
    match std::env::var_os("BURSAR_LONG") {
        Some(_) => 10_000,
        None => 1_000,
    }
}

/// The fewest probes: two late ones on a busy machine must not decide the 99th percentile.
const MIN_PROBES: usize = 1_000;

#[tokio::test]
async fn probes_are_answered_when_headers_never_end() {
    let node = Node::start().await;
    let tenant = node.tenant("hostile").await;
    let port = node.machine.address("/metrics").await.port();
    let program = tenant.run(&node);
    let over = std::cell::Cell::new(false);
    let connections = connection_count();
    let connects = async {
        let opened = program.load(&format!("connect {connections} {port}")).await;
        over.set(true);
        opened
    };
    let probes = async {
        let mut took = Vec::new();
        while !over.get() || took.len() < MIN_PROBES {
            let start = Instant::now();
            let (code, body) = node.machine.get("/healthz").await;
            took.push(start.elapsed());
            assert_eq!(code, 200, "{body}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        took.sort();
        took
    };
    let load = async { tokio::join!(connects, probes) };
    let (((program, opened), took), result) = node.run_load(load).await;
    let p99 = took[took.len() * 99 / 100];
    println!("{opened} connections, {} probes, p99 {p99:?}", took.len());
    assert_eq!(opened, connections);
    assert!(p99 < result.limit, "probes waited: {p99:?}");
    // The process keeps all of its connections. The agent has closed its side already.
    node.check_unharmed(result).await;
    assert_eq!(node.machine.get("/metrics").await.0, 200);
    drop(program);
}
