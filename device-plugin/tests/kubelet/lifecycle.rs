//! Tests that the agent registers again after each event at the kubelet, its directory or the
//! agent's predecessors.

use std::collections::BTreeSet;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::Fixture;
use crate::common::agent::{Agent, GPU, devices, ledger};
use crate::common::kubelet::{Call, FakeKubelet, Pod};
use crate::common::{assert_median_within, assert_within, eventually};

/// The longest time from a kubelet's start until the agent has registered.
const REGISTRATION_LIMIT: Duration = Duration::from_secs(2);

fn sockets(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap().flatten();
    let sockets = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()));
    let names = sockets.map(|entry| entry.file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| name != "kubelet.sock").collect();
    names.sort();
    names
}

fn count_registrations(kubelet: &FakeKubelet) -> usize {
    kubelet.count(|call| matches!(call, Call::Register(..)))
}

#[tokio::test]
async fn agent_registers_in_time_after_each_kubelet_restart() {
    let mut node = Fixture::new().await;
    let pod = Pod::with("a", GPU, 2);
    node.run_pod(&pod).await;
    let mut times = Vec::new();
    for _ in 0..10 {
        node.kubelet.stop().await;
        node.agent().until_not_registered().await;
        node.kubelet.start();
        node.kubelet.sync_pods().await;
        times.push(node.kubelet.until_allocatable(GPU, 8).await);
    }
    assert_median_within(
        REGISTRATION_LIMIT,
        "re-registered after a kubelet restart",
        times,
    );
    assert_eq!(node.bound(), [("a-uid".to_owned(), 2)]);
}

#[tokio::test]
async fn agent_registers_after_a_kubelet_left_its_socket() {
    assert_within(REGISTRATION_LIMIT, async || {
        let mut node = Fixture::new().await;
        node.kubelet.kill().await;
        node.agent().until_not_registered().await;
        tokio::time::sleep(Duration::from_millis(700)).await;
        node.kubelet.start();
        node.kubelet.until_allocatable(GPU, 8).await
    })
    .await;
}

#[tokio::test]
async fn agent_serves_again_after_plugin_sockets_are_wiped() {
    let node = Fixture::new().await;
    let (mut unhealthy, mut times) = (0, Vec::new());
    for wipe in 0..10 {
        let (before, served) = (
            count_registrations(&node.kubelet),
            sockets(node.kubelet.dir()),
        );
        node.kubelet.wipe_plugin_sockets();
        let time = eventually("a registration", || {
            unhealthy += usize::from(node.kubelet.capacity(GPU).unwrap().allocatable != 8);
            count_registrations(&node.kubelet) > before
        })
        .await;
        times.push(time);
        eventually("another socket", || {
            let now = sockets(node.kubelet.dir());
            now.len() == 1 && now != served
        })
        .await;
        // The agent drops old streams when there are many, and the kubelet then drops the
        // registration.
        assert!(unhealthy == 0 || wipe >= 4, "wipe {wipe}");
        node.until_ready(8).await;
    }
    assert_median_within(REGISTRATION_LIMIT, "registered again after a wipe", times);
    node.run_pod(&Pod::with("a", GPU, 2)).await;
}

#[tokio::test]
async fn agent_registers_after_its_directory_is_wiped() {
    let mut node = Fixture::new().await;
    node.run_pod(&Pod::with("a", GPU, 2)).await;
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
    assert_median_within(
        REGISTRATION_LIMIT,
        "registered with the next kubelet",
        times,
    );
    assert_eq!(node.bound(), [("a-uid".to_owned(), 2)]);
}

#[tokio::test]
async fn agent_removes_the_socket_of_a_killed_predecessor() {
    let mut node = Fixture::new().await;
    node.run_pod(&Pod::with("a", GPU, 2)).await;
    for _ in 0..10 {
        node.restart_agent().await;
    }
    let left = sockets(node.kubelet.dir());
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(node.bound(), [("a-uid".to_owned(), 2)]);
}

#[tokio::test]
async fn agent_registers_when_the_kubelet_starts_later() {
    assert_within(REGISTRATION_LIMIT, async || {
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
async fn agent_registers_when_the_plugin_directory_appears() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("device-plugins");
    let agent = Agent::start(&dir, ledger(&[8]), devices(8, 8));
    eventually("a reason", || {
        let registration = format!("{:?}", *agent.registration.borrow());
        registration.contains("device-plugins") && !registration.contains("Starting")
    })
    .await;
    let mut kubelet = FakeKubelet::new(root.path(), 1);
    kubelet.start();
    kubelet.until_allocatable(GPU, 8).await;
    agent.until_registered().await;
}

#[tokio::test]
async fn agent_names_the_kubelet_once_its_directory_appears() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("device-plugins");
    let agent = Agent::start(&dir, ledger(&[8]), devices(8, 8));
    let registration = || format!("{:?}", *agent.registration.borrow());
    eventually("the missing directory", || {
        registration().contains("Directory")
    })
    .await;
    std::fs::create_dir(&dir).unwrap();
    eventually("the missing kubelet", || {
        registration().contains("NoKubelet")
    })
    .await;
}

#[tokio::test]
async fn agent_watches_a_recreated_plugin_directory() {
    let mut node = Fixture::new().await;
    node.kubelet.stop().await;
    let dir = node.kubelet.dir().to_owned();
    std::fs::rename(&dir, node.root.path().join("moved")).unwrap();
    std::fs::create_dir(&dir).unwrap();
    node.kubelet.start();
    node.until_ready(8).await;
    assert_eq!(sockets(&dir).len(), 1);
}

#[tokio::test]
async fn agent_removes_its_sockets_on_graceful_stop() {
    let mut node = Fixture::new().await;
    assert_eq!(sockets(node.kubelet.dir()).len(), 1);
    node.agent.take().unwrap().stop().await;
    assert_eq!(sockets(node.kubelet.dir()), [""; 0]);
}

#[tokio::test]
async fn agent_keeps_sockets_of_other_plugins() {
    let root = tempfile::tempdir().unwrap();
    let mut kubelet = FakeKubelet::new(root.path(), 1);
    kubelet.start();
    drop(UnixListener::bind(kubelet.dir().join("nvidia-gpu.sock")).unwrap());
    // Process 1 always runs.
    drop(UnixListener::bind(kubelet.dir().join("bursar-gpu-memory-1-0.sock")).unwrap());
    // No process has this pid: the largest on Linux is 2^22.
    drop(UnixListener::bind(kubelet.dir().join("bursar-gpu-memory-4999999-0.sock")).unwrap());
    let agent = Agent::start(kubelet.dir(), ledger(&[8]), devices(8, 8));
    agent.until_registered().await;
    let own_socket = format!("bursar-gpu-memory-{}-0.sock", std::process::id());
    let mut expected = vec!["bursar-gpu-memory-1-0.sock", &own_socket, "nvidia-gpu.sock"];
    expected.sort_unstable();
    assert_eq!(sockets(kubelet.dir()), expected);
}

#[tokio::test]
async fn agent_backs_off_when_the_kubelet_cuts_each_stream() {
    let root = tempfile::tempdir().unwrap();
    let mut kubelet = FakeKubelet::new(root.path(), 1);
    kubelet.inject(|faults| faults.streams = u32::MAX);
    kubelet.start();
    let start = Instant::now();
    let _agent = Agent::start(kubelet.dir(), ledger(&[8]), devices(8, 8));
    eventually("five registrations", || count_registrations(&kubelet) >= 5).await;
    // The pauses are 0.1, 0.2, 0.4 and 0.8 s. A busy machine only lengthens them.
    let least = Duration::from_millis(1_500);
    assert!(start.elapsed() >= least, "{:?}", start.elapsed());
}

#[tokio::test]
async fn agent_registers_no_socket_twice_when_streams_are_cut() {
    let root = tempfile::tempdir().unwrap();
    let mut kubelet = FakeKubelet::new(root.path(), 1);
    kubelet.inject(|faults| faults.streams = 3);
    kubelet.start();
    let agent = Agent::start(kubelet.dir(), ledger(&[8]), devices(8, 8));
    kubelet.until_allocatable(GPU, 8).await;
    agent.until_registered().await;
    let endpoints = kubelet.calls().into_iter().filter_map(|call| match call {
        Call::Register(_, endpoint) => Some(endpoint),
        _ => None,
    });
    let distinct: BTreeSet<_> = endpoints.collect();
    assert!(distinct.len() >= 4, "{distinct:?}");
    assert_eq!(distinct.len(), count_registrations(&kubelet));
    assert_eq!(sockets(kubelet.dir()).len(), 1, "former sockets are gone");
}

#[tokio::test]
async fn open_stream_stays_while_registrations_are_refused() {
    let node = Fixture::new().await;
    let before = count_registrations(&node.kubelet);
    node.kubelet.inject(|faults| faults.options = 6);
    node.kubelet.wipe_plugin_sockets();
    eventually("registrations that are refused", || {
        let allocatable = node.kubelet.capacity(GPU).unwrap().allocatable;
        assert_eq!(allocatable, 8, "the kubelet has the first stream");
        count_registrations(&node.kubelet) > before + 6
    })
    .await;
    node.until_ready(8).await;
    node.run_pod(&Pod::with("a", GPU, 2)).await;
}
