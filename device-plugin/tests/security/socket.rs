//! Tests hostile processes on their container's socket.

use std::time::{Duration, Instant};

use crate::fixture::Node;

/// The most credit pages of a container: twice the limit of processes.
const MAX_PAGES: u64 = 1024;

/// How many of six passed descriptors the agent gets: since Linux 6.16, the kernel refuses them.
fn expected_taken() -> u64 {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let numbers = release.split(|letter: char| !letter.is_ascii_digit());
    let version: Vec<u32> = numbers
        .map_while(|part| part.parse().ok())
        .take(2)
        .collect();
    if version >= vec![6, 16] { 0 } else { 6 }
}

#[tokio::test]
async fn neighbour_is_answered_when_six_sockets_linger() {
    let node = Node::start().await;
    let tenant = node.tenant("hostile").await;
    let program = tenant.run(&node);
    let ((program, taken), result) = node.run_load(program.load("linger 6")).await;
    assert_eq!(taken, expected_taken());
    drop(program);
    node.check_unharmed(result).await;
}

#[tokio::test]
async fn neighbour_is_answered_when_six_sessions_linger() {
    let node = Node::start().await;
    let tenant = node.tenant("hostile").await;
    // A process has one session: its next hello ends the one before.
    let program = tenant.run_many(&node, 6, "linger");
    let ((program, taken), result) = node.run_load(program.load("go")).await;
    assert_eq!(taken, expected_taken());
    drop(program);
    node.check_unharmed(result).await;
}

#[tokio::test]
async fn credit_pages_are_bounded_when_a_process_keeps_them() {
    let node = Node::start().await;
    let tenant = node.tenant("hostile").await;
    let start = Instant::now();
    let program = tenant.run(&node);
    let ((program, kept), result) = node.run_load(program.load("hellos 8000")).await;
    println!("{kept} pages after {:?}", start.elapsed());
    assert!((1..=MAX_PAGES).contains(&kept), "{kept} pages");
    drop(program);
    node.check_unharmed(result).await;
}

#[tokio::test]
async fn neighbour_is_answered_when_512_processes_start() {
    let node = Node::start().await;
    let tenant = node.tenant("crowd").await;
    let program = tenant.run_many(&node, 512, "grant");
    let start = Instant::now();
    let ((program, granted), result) = node.run_load(program.load("go")).await;
    println!("{granted} granted after {:?}", start.elapsed());
    assert_eq!(granted, 512);
    assert!(start.elapsed() < Duration::from_secs(60));
    drop(program);
    node.check_unharmed(result).await;
}
