//! Tests the agent's answers when the kubelet allocates and starts containers.

use std::time::Duration;

use bursar_kubelet::device_checkpoint::DeviceCheckpoint;
use bursar_kubelet::pod_resources::{PodResourcesClient, PodResourcesError, find_container};
use bursar_ledger::units::{DeviceId, DeviceIdSet, Resource};

use crate::Fixture;
use crate::common::agent::{Agent, GPU, devices};
use crate::common::kubelet::{Kind, Phase, Pod};

fn device_id_set(ids: &[String]) -> DeviceIdSet {
    DeviceIdSet::from_ids(Resource::DeviceMemory, ids).unwrap()
}

#[tokio::test]
async fn pod_is_admitted_and_waits_when_no_gpu_fits() {
    let node = Fixture::with_gpus(&[4, 4], 8).await;
    let (a, b, c) = (
        Pod::with("a", GPU, 3),
        Pod::with("b", GPU, 3),
        Pod::with("c", GPU, 2),
    );
    node.run_pod(&a).await;
    node.run_pod(&b).await;
    node.kubelet.admit(&c).await.unwrap();
    let reason = node.kubelet.start_container(&c, "main").await.unwrap_err();
    assert!(
        reason.contains("waiting for 2 GiB on one GPU: largest free 1 GiB"),
        "{reason}"
    );
    assert_eq!(node.kubelet.phase(&c), Some(Phase::Active));
    node.kubelet.pod_deleted(&a);
    node.agent().allocator.pod_gone(&a.uid);
    node.start_pod(&c).await;
    assert_eq!(
        node.bound(),
        [("b-uid".to_owned(), 3), ("c-uid".to_owned(), 2)]
    );
}

/// A node with one GPU of 4 quanta. A bind there may wait for memory longer than any of these tests
/// runs.
async fn fixture_with_long_bind_wait() -> Fixture {
    let mut node = Fixture::with_gpus(&[4], 4).await;
    let (ledger, devices) = node.kill_agent().await;
    let (dir, bind_wait) = (node.kubelet.dir().to_owned(), Duration::from_secs(60));
    node.agent = Some(Agent::start_with_bind_wait(
        &dir, ledger, devices, bind_wait,
    ));
    node.until_ready(4).await;
    node
}

#[tokio::test]
async fn waiting_call_returns_when_memory_is_free() {
    let node = fixture_with_long_bind_wait().await;
    let (a, b) = (Pod::with("a", GPU, 4), Pod::with("b", GPU, 4));
    node.run_pod(&a).await;
    // The kubelet may reuse the device ids of pod a once it is not active. Its memory still counts.
    node.kubelet.pod_ended(&a, Phase::Succeeded);
    node.kubelet.admit(&b).await.unwrap();
    let waiting = node.kubelet.start_container(&b, "main");
    let end_of_a = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(node.bound(), [("a-uid".to_owned(), 4)]);
        node.agent().allocator.pod_gone(&a.uid);
    };
    let (started, ()) = tokio::join!(waiting, end_of_a);
    started.unwrap();
    assert_eq!(node.bound(), [("b-uid".to_owned(), 4)]);
}

#[tokio::test]
async fn cancelled_call_does_not_block_the_next() {
    let node = fixture_with_long_bind_wait().await;
    let (a, b) = (Pod::with("a", GPU, 4), Pod::with("b", GPU, 4));
    node.run_pod(&a).await;
    node.kubelet.pod_ended(&a, Phase::Succeeded);
    node.kubelet.admit(&b).await.unwrap();
    let call = node.kubelet.start_container(&b, "main");
    let cancelled = tokio::time::timeout(Duration::from_millis(50), call).await;
    assert!(cancelled.is_err(), "{cancelled:?}");
    node.agent().allocator.pod_gone(&a.uid);
    node.start_pod(&b).await;
}

#[tokio::test]
async fn each_container_gets_its_own_allocation() {
    let node = Fixture::new().await;
    let pod = Pod::new("a")
        .container(Kind::Init, "warm-up", GPU, 4)
        .container(Kind::App, "main", GPU, 2)
        .container(Kind::App, "second", GPU, 3);
    node.kubelet.admit(&pod).await.unwrap();
    let mut cdi = Vec::new();
    for container in ["warm-up", "main", "second"] {
        let options = node.kubelet.start_container(&pod, container).await.unwrap();
        cdi.extend(options.cdi_devices);
    }
    cdi.sort();
    cdi.dedup();
    assert_eq!(cdi.len(), 3);
    assert_eq!(
        node.bound(),
        [("a-uid".to_owned(), 2), ("a-uid".to_owned(), 3)]
    );
}

#[tokio::test]
async fn all_containers_of_a_pod_start_when_they_fit_together() {
    let node = Fixture::with_gpus(&[16, 16], 32).await;
    let names = ["one", "two", "three", "four"];
    let sizes = names.into_iter().zip([4, 4, 12, 12]);
    let pod = sizes.fold(Pod::new("a"), |pod, (name, size)| {
        pod.container(Kind::App, name, GPU, size)
    });
    node.kubelet.admit(&pod).await.unwrap();
    for name in names {
        node.kubelet.start_container(&pod, name).await.unwrap();
    }
    node.kubelet.pod_deleted(&pod);
    node.agent().allocator.pod_gone(&pod.uid);
    let pods = ["b", "c"].map(|name| {
        let pod = Pod::new(name).container(Kind::App, "one", GPU, 7);
        pod.container(Kind::App, "two", GPU, 9)
    });
    for pod in &pods {
        node.kubelet.admit(pod).await.unwrap();
    }
    for name in ["one", "two"] {
        for pod in &pods {
            node.kubelet.start_container(pod, name).await.unwrap();
        }
    }
}

#[tokio::test]
async fn allocation_is_found_in_the_kubelet_checkpoint() {
    let node = Fixture::new().await;
    let pod = Pod::with("a", GPU, 3);
    let cdi = node.run_pod(&pod).await;
    let names = [(Resource::DeviceMemory, GPU.to_owned())];
    let checkpoint = DeviceCheckpoint::read(node.kubelet.dir(), &names).unwrap();
    let device_ids = device_id_set(&node.device_ids_of(&pod));
    let held = checkpoint
        .entries_with(Resource::DeviceMemory, &device_ids)
        .next()
        .unwrap();
    assert_eq!(
        (held.pod.as_str(), held.container.as_str()),
        ("a-uid", "main")
    );
    assert_eq!(cdi, [format!("bursar.dev/gpu={}", held.allocation)]);
}

#[tokio::test]
async fn pod_names_come_from_the_pod_resources_api() {
    let node = Fixture::new().await;
    let (a, b) = (Pod::with("a", GPU, 2), Pod::with("b", GPU, 3));
    node.run_pod(&a).await;
    node.run_pod(&b).await;
    let client = PodResourcesClient::new(node.kubelet.pod_resources_socket());
    let listed = client.list(Resource::DeviceMemory, GPU).await.unwrap();
    let name = find_container(&listed, &device_id_set(&node.device_ids_of(&b))).unwrap();
    assert_eq!(
        (name.namespace.as_str(), name.pod.as_str()),
        ("default", "b")
    );
}

#[tokio::test]
async fn pod_names_resolve_after_each_kubelet_restart() {
    let mut node = Fixture::new().await;
    let pod = Pod::with("a", GPU, 2);
    node.run_pod(&pod).await;
    let client = PodResourcesClient::new(node.kubelet.pod_resources_socket());
    for _ in 0..10 {
        let listed = client.list(Resource::DeviceMemory, GPU).await.unwrap();
        assert_eq!(listed.len(), 1);
        node.restart_kubelet().await;
    }
}

#[tokio::test]
async fn missing_pod_resources_api_fails_in_time() {
    let mut node = Fixture::new().await;
    node.kubelet.stop().await;
    let client = PodResourcesClient::new(node.kubelet.pod_resources_socket());
    let error = client.list(Resource::DeviceMemory, GPU).await.unwrap_err();
    assert!(matches!(error, PodResourcesError::Unreachable { .. }));
}

#[tokio::test]
async fn node_with_most_device_ids_registers_and_allocates() {
    let node = Fixture::with_gpus(&[1024; 4], 4096).await;
    let pod = Pod::with("a", GPU, 1000);
    node.run_pod(&pod).await;
    let device_ids = node.device_ids_of(&pod);
    assert_eq!(device_ids.len(), 1000);
    assert!(device_ids.iter().all(|id| id.parse::<DeviceId>().is_ok()));
    node.agent().devices.send_replace(devices(3072, 4096));
    node.kubelet.until_allocatable(GPU, 3072).await;
}
