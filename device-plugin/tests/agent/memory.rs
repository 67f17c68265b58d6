//! Tests that pods get memory, wait for memory, and release it.

use std::time::{Duration, Instant};

use crate::common::{assert_median_within, assert_within, eventually};
use crate::machine::{GPU, Machine};

/// The longest time from the end of a pod's cgroup until its memory is free for another pod.
const CLEANUP_LIMIT: Duration = Duration::from_secs(2);

#[tokio::test]
async fn pod_gets_a_cdi_device_with_its_quota_and_a_socket() {
    let machine = Machine::started().await;
    let pod = machine.admit("a", 10).await;
    let devices = machine.start(&pod).await.unwrap();
    let (file, binding) = machine.devices().pop_first().unwrap();
    let allocation = devices[0].strip_prefix("bursar.dev/gpu=").unwrap();
    assert_eq!(file, format!("bursar.dev-gpu-{allocation}.json"));
    let binding: serde_json::Value = serde_json::from_str(&binding).unwrap();
    assert_eq!(binding["pod"], "a-uid");
    assert_eq!(binding["container"], "main");
    assert_eq!(binding["gpus"].as_array().unwrap().len(), 1);
    assert_eq!(binding["gpus"][0]["quota"], 10u64 << 30);
    assert_eq!(machine.sockets(), 1);
}

#[tokio::test]
async fn pod_waits_with_a_reason_until_memory_is_free() {
    assert_within(CLEANUP_LIMIT, async || {
        let machine = Machine::started().await;
        let (first, _second) = (machine.run("a", 10).await, machine.run("b", 10).await);
        let queued_pod = machine.admit("c", 8).await;
        let error = machine.start(&queued_pod).await.unwrap_err();
        assert!(
            error.contains("waiting for 8 GiB on one GPU: largest free 6 GiB (GPU-0"),
            "{error}"
        );
        machine.end(&first);
        let time = machine.until_started(&queued_pod).await;
        assert_eq!(machine.devices().len(), 2);
        time
    })
    .await;
}

#[tokio::test]
async fn host_files_are_removed_soon_after_the_pod_cgroup() {
    let machine = Machine::started().await;
    let mut times = Vec::new();
    for round in 0..20 {
        let pod = machine.run(&format!("p{round}"), 4).await;
        assert_eq!((machine.devices().len(), machine.sockets()), (1, 1));
        let ended = Instant::now();
        machine.end(&pod);
        eventually("nothing left", || {
            machine.devices().is_empty() && machine.sockets() == 0
        })
        .await;
        times.push(ended.elapsed());
    }
    assert_median_within(CLEANUP_LIMIT, "released after a cgroup's end", times);
}

#[tokio::test]
async fn two_hundred_ended_pods_leave_no_files() {
    let machine = Machine::started().await;
    let mut alive = std::collections::VecDeque::new();
    for round in 0..200_usize {
        // All pods together request at most 6 x 5 of 32 GiB, so the kubelet admits each.
        if alive.len() == 6 {
            machine.end(&alive.pop_front().unwrap());
        }
        let pod = machine.admit(&format!("p{round}"), 1 + round * 7 % 5).await;
        machine.until_started(&pod).await;
        alive.push_back(pod);
    }
    for pod in alive {
        machine.end(&pod);
    }
    eventually("nothing left", || {
        machine.devices().is_empty() && machine.sockets() == 0
    })
    .await;
    assert_eq!(machine.kubelet.capacity(GPU).unwrap().allocatable, 32);
}
