//! Mirrors `test/e2e_node/device_plugin_test.go` of Kubernetes 1.36.3, case by case and with its
//! names. Where the sample plugin of that file would fail a case, this agent must pass, and the
//! comment says so.

use crate::Fixture;
use crate::common::agent::{Agent, GPU, devices, ledger};
use crate::common::kubelet::{Capacity, Kind, Phase, Pod};

#[tokio::test]
async fn can_schedule_a_pod_that_requires_a_device() {
    let node = Fixture::new().await;
    let pod = Pod::with("a", GPU, 2);
    let cdi = node.run_pod(&pod).await;
    assert_eq!(node.device_ids_of(&pod).len(), 2);
    assert_eq!(cdi.len(), 1);
    assert!(cdi[0].starts_with("bursar.dev/gpu="), "{cdi:?}");
    assert_eq!(node.bound(), [("a-uid".to_owned(), 2)]);
}

#[tokio::test]
async fn keeps_device_plugin_assignments_across_pod_restarts() {
    let node = Fixture::new().await;
    let pod = Pod::with("a", GPU, 2);
    let (cdi, device_ids) = (node.run_pod(&pod).await, node.device_ids_of(&pod));
    node.kubelet.container_ended(&pod, "main");
    assert_eq!(node.start_pod(&pod).await, cdi);
    assert_eq!(node.device_ids_of(&pod), device_ids);
    assert_eq!(node.bound(), [("a-uid".to_owned(), 2)]);

    let other = Pod::with("b", GPU, 2);
    assert_ne!(node.run_pod(&other).await, cdi);
    assert!(
        node.device_ids_of(&other)
            .iter()
            .all(|id| !device_ids.contains(id))
    );
}

#[tokio::test]
async fn keeps_device_plugin_assignments_across_kubelet_restarts() {
    let mut node = Fixture::new().await;
    let pod = Pod::with("a", GPU, 2);
    let (_, device_ids) = (node.run_pod(&pod).await, node.device_ids_of(&pod));
    node.restart_kubelet().await;
    assert_eq!(node.kubelet.phase(&pod), Some(Phase::Active));
    assert_eq!(node.device_ids_of(&pod), device_ids);
    assert_eq!(node.bound(), [("a-uid".to_owned(), 2)]);
}

#[tokio::test]
async fn keeps_device_plugin_assignments_across_pod_and_kubelet_restarts() {
    let mut node = Fixture::new().await;
    let pod = Pod::with("a", GPU, 2);
    let (cdi, device_ids) = (node.run_pod(&pod).await, node.device_ids_of(&pod));
    node.kubelet.container_ended(&pod, "main");
    node.start_pod(&pod).await;
    node.restart_kubelet().await;
    node.kubelet.container_ended(&pod, "main");
    assert_eq!(node.start_pod(&pod).await, cdi);
    assert_eq!(node.device_ids_of(&pod), device_ids);
    assert_eq!(node.bound(), [("a-uid".to_owned(), 2)]);
}

#[tokio::test]
async fn will_not_attempt_to_admit_the_succeeded_pod_after_the_kubelet_restart_and_device_plugin_removed()
 {
    let mut node = Fixture::new().await;
    let pod = Pod::with("a", GPU, 2);
    node.run_pod(&pod).await;
    node.kubelet.pod_ended(&pod, Phase::Succeeded);
    node.kill_agent().await;
    node.kubelet.restart().await;
    assert_eq!(node.kubelet.phase(&pod), Some(Phase::Succeeded));
}

#[tokio::test]
async fn keeps_device_plugin_assignments_after_the_device_plugin_has_restarted() {
    let mut node = Fixture::new().await;
    let pod = Pod::with("a", GPU, 2);
    let (cdi, device_ids) = (node.run_pod(&pod).await, node.device_ids_of(&pod));
    node.restart_agent().await;
    node.kubelet.container_ended(&pod, "main");
    assert_eq!(node.start_pod(&pod).await, cdi);
    assert_eq!(node.device_ids_of(&pod), device_ids);
    assert_eq!(node.bound(), [("a-uid".to_owned(), 2)]);
}

#[tokio::test]
async fn keeps_device_plugin_assignments_after_kubelet_restart_and_device_plugin_restart() {
    let mut node = Fixture::new().await;
    let pod = Pod::with("a", GPU, 2);
    let (_, device_ids) = (node.run_pod(&pod).await, node.device_ids_of(&pod));
    node.restart_kubelet().await;
    node.restart_agent().await;
    assert_eq!(node.kubelet.phase(&pod), Some(Phase::Active));
    assert_eq!(node.device_ids_of(&pod), device_ids);
    assert_eq!(node.bound(), [("a-uid".to_owned(), 2)]);
}

/// Upstream has no such case: kubelet, plugin and pod all restart.
#[tokio::test]
async fn keeps_device_plugin_assignments_across_pod_kubelet_and_device_plugin_restarts() {
    let mut node = Fixture::new().await;
    let pod = Pod::with("a", GPU, 2);
    let (cdi, device_ids) = (node.run_pod(&pod).await, node.device_ids_of(&pod));
    let kept = node.kill_agent().await;
    node.kubelet.restart().await;
    node.start_agent(kept).await;
    node.kubelet.container_ended(&pod, "main");
    assert_eq!(node.start_pod(&pod).await, cdi);
    assert_eq!(node.device_ids_of(&pod), device_ids);
    assert_eq!(node.bound(), [("a-uid".to_owned(), 2)]);
}

#[tokio::test]
async fn ensures_pods_consuming_devices_deleted_while_kubelet_is_down_are_cleaned_up_correctly() {
    let mut node = Fixture::new().await;
    let pod = Pod::with("a", GPU, 6);
    node.run_pod(&pod).await;
    node.kubelet.stop().await;
    node.kubelet.pod_deleted(&pod);
    node.agent().allocator.pod_gone(&pod.uid);
    node.kubelet.start();
    node.kubelet.sync_pods().await;
    node.until_ready(8).await;
    let next = Pod::with("b", GPU, 6);
    node.run_pod(&next).await;
    assert_eq!(node.device_ids_of(&pod), [""; 0]);
    assert_eq!(node.bound(), [("b-uid".to_owned(), 6)]);
}

#[tokio::test]
async fn can_schedule_a_pod_with_a_restartable_init_container() {
    let node = Fixture::new().await;
    let pod = Pod::new("a")
        .container(Kind::Init, "init-1", GPU, 1)
        .container(Kind::Sidecar, "restartable-init-2", GPU, 1)
        .container(Kind::App, "regular-1", GPU, 1);
    node.kubelet.admit(&pod).await.unwrap();
    let mut device_ids = Vec::new();
    for container in ["init-1", "restartable-init-2", "regular-1"] {
        node.kubelet.start_container(&pod, container).await.unwrap();
        device_ids.push(node.kubelet.assigned(&pod, container, GPU));
    }
    assert_eq!(
        device_ids[0], device_ids[1],
        "a sidecar takes over the device ids of the init container"
    );
    assert_ne!(
        device_ids[1], device_ids[2],
        "which it does not share with the regular container"
    );
    assert_eq!(
        node.bound(),
        [("a-uid".to_owned(), 1), ("a-uid".to_owned(), 1)]
    );
}

/// Upstream "node reboots": the kubelet admits the pod before the plugin has registered, and fails
/// it.
#[tokio::test]
async fn does_not_keep_device_plugin_assignments_across_node_reboots_if_fails_admission() {
    let mut node = Fixture::new().await;
    let pod = Pod::with("a", GPU, 2);
    node.run_pod(&pod).await;
    node.kill_agent().await;
    node.kubelet.stop().await;
    node.kubelet.reboot();
    node.kubelet.start();
    node.kubelet.sync_pods().await;
    let Some(Phase::Failed(message)) = node.kubelet.phase(&pod) else {
        panic!("was admitted")
    };
    assert!(message.contains("no healthy devices present"), "{message}");

    // A reboot also loses the agent's ledger, so a new agent starts, and a new pod replaces the
    // failed one.
    node.agent = Some(Agent::start(
        node.kubelet.dir(),
        ledger(&[8]),
        devices(8, 8),
    ));
    node.until_ready(8).await;
    node.run_pod(&Pod::with("b", GPU, 8)).await;
    assert_eq!(node.bound(), [("b-uid".to_owned(), 8)]);
}

/// Upstream's sample plugin has no such case. Only this agent has pods that are admitted and wait
/// to start.
#[tokio::test]
async fn waiting_pod_survives_a_kubelet_restart() {
    let mut node = Fixture::with_gpus(&[4, 4], 8).await;
    let pods = [Pod::with("a", GPU, 3), Pod::with("b", GPU, 3)];
    for pod in &pods {
        node.run_pod(pod).await;
    }
    let waiting = Pod::with("c", GPU, 2);
    node.kubelet.admit(&waiting).await.unwrap();
    node.kubelet
        .start_container(&waiting, "main")
        .await
        .unwrap_err();
    node.kubelet.stop().await;
    node.kubelet.start();
    node.until_ready(8).await;
    node.kubelet.sync_pods().await;
    assert_eq!(node.kubelet.phase(&waiting), Some(Phase::Active));
    assert_eq!(
        node.kubelet.capacity(GPU),
        Some(Capacity {
            capacity: 8,
            allocatable: 8
        })
    );
    node.agent().allocator.pod_gone(&pods[0].uid);
    node.start_pod(&waiting).await;
}
