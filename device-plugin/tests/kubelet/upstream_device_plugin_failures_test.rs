//! Mirrors `test/e2e_node/device_plugin_failures_test.go` and
//! `device_plugin_failures_pod_status_test.go` of Kubernetes 1.36.3, case by case and with their
//! names.
//!
//! Those files break the plugin and check the kubelet. These tests break the connection, and the
//! agent must recover by itself.

use std::time::Duration;

use crate::Fixture;
use crate::common::agent::{Agent, GPU, devices, ledger};
use crate::common::eventually;
use crate::common::kubelet::{Call, Capacity, FakeKubelet, Pod};

fn set_devices(node: &Fixture, healthy: usize, all: usize) {
    node.agent().devices.send_replace(devices(healthy, all));
}

async fn wait_for_capacity(node: &Fixture, capacity: usize, allocatable: usize) {
    let wanted = Some(Capacity {
        capacity,
        allocatable,
    });
    eventually(&format!("{wanted:?}"), || {
        node.kubelet.capacity(GPU) == wanted
    })
    .await;
}

fn is_list(call: &Call) -> bool {
    matches!(call, Call::ListAndWatch(_))
}

#[tokio::test]
async fn when_get_device_plugin_options_fails_device_plugin_will_not_be_used() {
    let root = tempfile::tempdir().unwrap();
    let mut kubelet = FakeKubelet::new(root.path(), 1);
    kubelet.inject(|faults| faults.options = u32::MAX);
    kubelet.start();
    let agent = Agent::start(kubelet.dir(), ledger(&[1]), devices(1, 1));
    eventually("three registrations", || {
        kubelet.count(|call| matches!(call, Call::GetDevicePluginOptions(_))) >= 3
    })
    .await;
    assert_eq!(kubelet.count(is_list), 0);
    assert_eq!(
        kubelet.capacity(GPU),
        None,
        "the kubelet does not even register the resource"
    );
    let registration = format!("{:?}", *agent.registration.borrow());
    assert!(
        registration.contains("failed to get device plugin options"),
        "{registration}"
    );

    kubelet.inject(|faults| faults.options = 0);
    agent.until_registered().await;
    kubelet.until_allocatable(GPU, 1).await;
}

#[tokio::test]
async fn will_set_allocatable_to_zero_when_a_single_device_became_unhealthy_and_then_back_to_1() {
    let node = Fixture::with_gpus(&[1], 1).await;
    wait_for_capacity(&node, 1, 1).await;
    set_devices(&node, 0, 1);
    wait_for_capacity(&node, 1, 0).await;
    set_devices(&node, 1, 1);
    wait_for_capacity(&node, 1, 1).await;
}

#[tokio::test]
async fn will_set_allocatable_to_zero_when_a_single_device_became_unhealthy_but_capacity_will_stay_at_1()
 {
    let node = Fixture::with_gpus(&[1], 1).await;
    let pod = Pod::with("a", GPU, 1);
    node.run_pod(&pod).await;
    wait_for_capacity(&node, 1, 1).await;
    set_devices(&node, 0, 1);
    wait_for_capacity(&node, 1, 0).await;
    assert_eq!(
        node.bound(),
        [("a-uid".to_owned(), 1)],
        "the running pod notices nothing"
    );
    node.kubelet.pod_deleted(&pod);
    wait_for_capacity(&node, 1, 0).await;
}

#[tokio::test]
async fn will_lower_allocatable_to_a_number_of_unhealthy_devices_and_then_back() {
    let node = Fixture::with_gpus(&[4], 4).await;
    for healthy in [3, 4, 2, 3, 4] {
        set_devices(&node, healthy, 4);
        wait_for_capacity(&node, 4, healthy).await;
    }
}

/// Upstream: "and kubelet will not retry to list resources". This kubelet does not retry either,
/// but the agent registers again.
#[tokio::test]
async fn when_list_and_watch_fails_immediately_the_agent_registers_again() {
    let root = tempfile::tempdir().unwrap();
    let mut kubelet = FakeKubelet::new(root.path(), 1);
    kubelet.inject(|faults| faults.streams = 3);
    kubelet.start();
    let agent = Agent::start(kubelet.dir(), ledger(&[1]), devices(1, 1));
    kubelet.until_allocatable(GPU, 1).await;
    agent.until_registered().await;
    let registrations = kubelet.count(|call| matches!(call, Call::Register(..)));
    assert_eq!(
        (registrations, kubelet.count(is_list)),
        (4, 4),
        "one list per registration"
    );
}

/// Upstream: allocatable stays zero for ever. Here the agent restores it.
#[tokio::test]
async fn when_list_and_watch_fails_after_provisioning_devices_the_agent_registers_again() {
    let node = Fixture::with_gpus(&[2], 2).await;
    for lists in 2..5 {
        node.kubelet.cut(GPU);
        wait_for_capacity(&node, 2, 0).await;
        wait_for_capacity(&node, 2, 2).await;
        assert_eq!(
            node.kubelet.count(is_list),
            lists,
            "one list per registration"
        );
    }
    node.run_pod(&Pod::with("a", GPU, 2)).await;
}

#[tokio::test]
async fn when_device_plugin_is_stopped_after_provisioning_devices_node_allocatable_will_be_set_to_zero()
 {
    let mut node = Fixture::with_gpus(&[2], 2).await;
    node.agent.take().unwrap().stop().await;
    wait_for_capacity(&node, 2, 0).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(
        node.kubelet.count(is_list),
        1,
        "a stopped agent does not register"
    );
}

#[tokio::test]
async fn will_report_a_healthy_and_then_unhealthy_single_device_in_the_pod_status() {
    let node = Fixture::with_gpus(&[1], 1).await;
    let pod = Pod::with("a", GPU, 1);
    node.run_pod(&pod).await;
    let status = || node.kubelet.resource_health(&pod, "main");
    assert_eq!(status(), [("m-0000".to_owned(), true)]);
    set_devices(&node, 0, 1);
    wait_for_capacity(&node, 1, 0).await;
    assert_eq!(status(), [("m-0000".to_owned(), false)]);
}

/// Upstream: a pod whose image cannot be pulled. Here: a pod that was admitted and never started.
#[tokio::test]
async fn will_report_a_device_status_for_the_failed_pod_in_the_pod_status() {
    let node = Fixture::with_gpus(&[1], 1).await;
    let pod = Pod::with("a", GPU, 1);
    node.kubelet.admit(&pod).await.unwrap();
    set_devices(&node, 0, 1);
    wait_for_capacity(&node, 1, 0).await;
    assert_eq!(
        node.kubelet.resource_health(&pod, "main"),
        [("m-0000".to_owned(), false)]
    );
    assert_eq!(node.bound(), []);
}
