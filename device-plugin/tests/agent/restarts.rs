//! Tests that bindings stay when the agent dies, loses its checkpoint, stops or restarts.

use std::fs;
use std::time::Duration;

use bursar_host::checkpoint::Checkpoint;

use crate::common::{assert_median_within, eventually};
use crate::machine::{GPU, Machine};

/// A machine with two running pods and one that waits.
async fn machine_with_pods() -> Machine {
    let machine = Machine::started().await;
    machine.run("a", 10).await;
    machine.run("b", 12).await;
    let queued_pod = machine.admit("c", 8).await;
    machine.start(&queued_pod).await.unwrap_err();
    machine
}

#[tokio::test]
async fn restarted_agent_keeps_bindings_and_registers_in_time() {
    let mut machine = machine_with_pods().await;
    let before = machine.devices();
    let mut times = Vec::new();
    for _ in 0..10 {
        times.push(machine.restart_agent().await);
        assert_eq!(machine.devices(), before);
        assert_eq!(machine.sockets(), 2);
    }
    assert_median_within(Duration::from_secs(2), "registered after SIGKILL", times);
    let queued_pod = crate::common::kubelet::Pod::with("c", GPU, 8);
    let expected = "waiting for 8 GiB on one GPU: largest free 6 GiB";
    machine.until_refused(&queued_pod, expected).await;
}

#[tokio::test]
async fn lost_or_corrupt_checkpoint_is_rebuilt_with_same_bindings() {
    let mut machine = machine_with_pods().await;
    let before = machine.devices();
    let checkpoint = machine.path("run/checkpoint.json");
    for damage in ["deleted", "cut", "garbage", "a field of a later version"] {
        machine.kill_agent();
        match damage {
            "deleted" => fs::remove_file(&checkpoint).unwrap(),
            "cut" => {
                let text = fs::read(&checkpoint).unwrap();
                fs::write(&checkpoint, &text[..text.len() / 2]).unwrap();
            }
            "garbage" => fs::write(&checkpoint, "garbage").unwrap(),
            _ => {
                let file = Checkpoint::new(checkpoint.clone());
                let mut state: serde_json::Value = file.load().unwrap().unwrap();
                state["later"] = 1.into();
                file.save(&state).unwrap();
            }
        }
        machine.start_successor().await;
        assert_eq!(machine.devices(), before, "{damage}");
        assert_eq!(machine.sockets(), 2, "{damage}");
        let queued_pod = crate::common::kubelet::Pod::with("c", GPU, 8);
        machine
            .until_refused(&queued_pod, "largest free 6 GiB")
            .await;
        let name = |pod: &&str| format!(r#""name":"{pod}""#);
        eventually("the pods' names from the kubelet", || {
            let text = fs::read_to_string(&checkpoint).unwrap_or_default();
            ["a", "b"].iter().all(|pod| text.contains(&name(pod)))
        })
        .await;
    }
    assert!(
        machine.path("run/checkpoint.unread").exists(),
        "kept for people"
    );
}

#[tokio::test]
async fn pod_that_ended_without_an_agent_is_released_by_the_next() {
    let mut machine = Machine::started().await;
    let pod = machine.run("a", 10).await;
    machine.kill_agent();
    machine.end(&pod);
    machine.start_agent();
    crate::common::eventually("nothing left", || machine.devices().is_empty()).await;
}

#[tokio::test]
async fn agent_keeps_files_of_running_pods_on_sigterm() {
    let mut machine = Machine::started().await;
    machine.run("a", 10).await;
    let status = machine.stop_agent().await;
    assert!(status.success(), "{status}");
    assert_eq!(machine.devices().len(), 1);
    machine.start_successor().await;
    assert_eq!((machine.devices().len(), machine.sockets()), (1, 1));
}

#[tokio::test]
async fn kubelet_restart_changes_no_binding() {
    let mut machine = machine_with_pods().await;
    let before = machine.devices();
    for _ in 0..3 {
        machine.kubelet.restart().await;
        machine.kubelet.until_allocatable(GPU, 32).await;
        assert_eq!(machine.devices(), before);
    }
}
