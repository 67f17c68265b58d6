//! Registered, whatever happens to the kubelet, its directory and the agent's predecessors.

use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::Node;
use crate::common::agent::{Agent, GPU, devices, ledger};
use crate::common::kubelet::{Call, FakeKubelet, Pod};
use crate::common::{eventually, in_time, in_time_as_a_rule};

/// The goal of design and issue.
const GOAL: Duration = Duration::from_secs(2);

fn sockets(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap().flatten();
    let sockets = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()));
    let names = sockets.map(|entry| entry.file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| name != "kubelet.sock").collect();
    names.sort();
    names
}

fn registrations(kubelet: &FakeKubelet) -> usize {
    kubelet.count(|call| matches!(call, Call::Register(..)))
}

#[tokio::test]
async fn a_restarted_kubelet_is_registered_with_every_time_in_time() {
    let mut node = Node::new().await;
    let pod = Pod::with("a", GPU, 2);
    node.run(&pod).await;
    let mut times = Vec::new();
    for _ in 0..10 {
        node.kubelet.stop().await;
        node.agent().until_not_registered().await;
        node.kubelet.start();
        node.kubelet.sync_pods().await;
        times.push(node.kubelet.until_allocatable(GPU, 8).await);
    }
    in_time_as_a_rule(GOAL, "re-registered after a kubelet restart", times);
    assert_eq!(node.bound(), [("a-uid".to_owned(), 2)]);
}

#[tokio::test]
async fn a_killed_kubelet_that_left_its_socket_is_registered_with_when_it_is_back() {
    in_time(GOAL, async || {
        let mut node = Node::new().await;
        node.kubelet.kill().await;
        node.agent().until_not_registered().await;
        tokio::time::sleep(Duration::from_millis(700)).await;
        node.kubelet.start();
        node.kubelet.until_allocatable(GPU, 8).await
    })
    .await;
}

#[tokio::test]
async fn wiped_plugin_sockets_are_served_and_registered_anew_and_no_device_is_ever_unhealthy() {
    let node = Node::new().await;
    let (mut unhealthy, mut times) = (0, Vec::new());
    for wipe in 0..10 {
        let (before, served) = (registrations(&node.kubelet), sockets(node.kubelet.dir()));
        node.kubelet.wipe_plugin_sockets();
        let time = eventually("a registration", || {
            unhealthy += usize::from(node.kubelet.capacity(GPU).unwrap().allocatable != 8);
            registrations(&node.kubelet) > before
        })
        .await;
        times.push(time);
        eventually("another socket", || {
            let now = sockets(node.kubelet.dir());
            now.len() == 1 && now != served
        })
        .await;
        // The old streams are let go when they are many; the kubelet then drops the registration.
        assert!(unhealthy == 0 || wipe >= 4, "wipe {wipe}");
        node.until_ready(8).await;
    }
    in_time_as_a_rule(GOAL, "registered anew after a wipe", times);
    node.run(&Pod::with("a", GPU, 2)).await;
}

#[tokio::test]
async fn a_wiped_directory_loses_nothing_and_is_registered_anew_by_the_next_kubelet() {
    let mut node = Node::new().await;
    node.run(&Pod::with("a", GPU, 2)).await;
    let mut times = Vec::new();
    for _ in 0..10 {
        node.kubelet.wipe_directory();
        eventually("a new socket", || sockets(node.kubelet.dir()).len() == 1).await;
        assert!(node.agent().is_registered(), "the stream is open");
        assert_eq!(node.kubelet.capacity(GPU).unwrap().allocatable, 8);
        node.kubelet.stop().await;
        node.kubelet.start();
        times.push(node.kubelet.until_allocatable(GPU, 8).await);
        node.until_ready(8).await;
    }
    in_time_as_a_rule(GOAL, "registered with the next kubelet", times);
    assert_eq!(node.bound(), [("a-uid".to_owned(), 2)]);
}

#[tokio::test]
async fn a_killed_agent_is_followed_by_another_and_its_socket_is_swept() {
    let mut node = Node::new().await;
    node.run(&Pod::with("a", GPU, 2)).await;
    for _ in 0..10 {
        node.restart_agent().await;
    }
    let left = sockets(node.kubelet.dir());
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(node.bound(), [("a-uid".to_owned(), 2)]);
}

#[tokio::test]
async fn an_agent_that_starts_before_the_kubelet_registers_when_it_comes() {
    in_time(GOAL, async || {
        let root = tempfile::tempdir().unwrap();
        let mut kubelet = FakeKubelet::new(root.path(), 1);
        let agent = Agent::start(kubelet.dir(), ledger(&[8]), devices(8, 8));
        eventually("a reason", || {
            format!("{:?}", *agent.registration.borrow()).contains("NoKubelet")
        })
        .await;
        kubelet.start();
        kubelet.until_allocatable(GPU, 8).await
    })
    .await;
}

#[tokio::test]
async fn a_missing_plugin_directory_is_a_reason_and_registration_follows_when_it_is_there() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("device-plugins");
    let agent = Agent::start(&dir, ledger(&[8]), devices(8, 8));
    eventually("a reason", || {
        let told = format!("{:?}", *agent.registration.borrow());
        told.contains("device-plugins") && !told.contains("Starting")
    })
    .await;
    let mut kubelet = FakeKubelet::new(root.path(), 1);
    kubelet.start();
    kubelet.until_allocatable(GPU, 8).await;
    agent.until_registered().await;
}

#[tokio::test]
async fn a_plugin_directory_that_is_made_anew_is_watched_anew() {
    let mut node = Node::new().await;
    node.kubelet.stop().await;
    let dir = node.kubelet.dir().to_owned();
    std::fs::rename(&dir, node.root.path().join("moved")).unwrap();
    std::fs::create_dir(&dir).unwrap();
    node.kubelet.start();
    node.until_ready(8).await;
    assert_eq!(sockets(&dir).len(), 1);
}

#[tokio::test]
async fn a_graceful_stop_leaves_no_socket_behind() {
    let mut node = Node::new().await;
    assert_eq!(sockets(node.kubelet.dir()).len(), 1);
    node.agent.take().unwrap().stop().await;
    assert_eq!(sockets(node.kubelet.dir()), [""; 0]);
}

#[tokio::test]
async fn sockets_of_others_are_left_alone() {
    let root = tempfile::tempdir().unwrap();
    let mut kubelet = FakeKubelet::new(root.path(), 1);
    kubelet.start();
    drop(UnixListener::bind(kubelet.dir().join("nvidia-gpu.sock")).unwrap());
    // Process 1 always lives.
    drop(UnixListener::bind(kubelet.dir().join("bursar-gpu-memory-1-0.sock")).unwrap());
    // No process has this number: the largest on Linux is 2^22.
    drop(UnixListener::bind(kubelet.dir().join("bursar-gpu-memory-4999999-0.sock")).unwrap());
    let agent = Agent::start(kubelet.dir(), ledger(&[8]), devices(8, 8));
    agent.until_registered().await;
    let mine = format!("bursar-gpu-memory-{}-0.sock", std::process::id());
    let mut expected = vec!["bursar-gpu-memory-1-0.sock", &mine, "nvidia-gpu.sock"];
    expected.sort_unstable();
    assert_eq!(sockets(kubelet.dir()), expected);
}

#[tokio::test]
async fn a_kubelet_that_keeps_cutting_the_stream_is_not_hammered() {
    let root = tempfile::tempdir().unwrap();
    let mut kubelet = FakeKubelet::new(root.path(), 1);
    kubelet.break_with(|faults| faults.streams = u32::MAX);
    kubelet.start();
    let begun = Instant::now();
    let _agent = Agent::start(kubelet.dir(), ledger(&[8]), devices(8, 8));
    eventually("five registrations", || registrations(&kubelet) >= 5).await;
    // The pauses are 0.1, 0.2, 0.4 and 0.8 s: a busy machine only makes them longer.
    let least = Duration::from_millis(1_500);
    assert!(begun.elapsed() >= least, "{:?}", begun.elapsed());
}
