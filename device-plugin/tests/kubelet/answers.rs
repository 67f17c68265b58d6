//! What the kubelet is told when it allocates and starts containers.

use std::time::Duration;

use bursar_device_plugin::kubelet::device_checkpoint::DeviceCheckpoint;
use bursar_device_plugin::kubelet::pod_resources::{
    PodResourcesClient, PodResourcesError, holder_of,
};
use bursar_device_plugin::units::{Resource, TokenId, TokenSet};

use crate::Node;
use crate::common::agent::{Agent, GPU, devices};
use crate::common::kubelet::{Faults, Kind, Phase, Pod};

fn set(ids: &[String]) -> TokenSet {
    TokenSet::from_ids(Resource::DeviceMemory, ids).unwrap()
}

#[tokio::test]
async fn a_pod_that_fits_on_no_gpu_is_admitted_waits_with_a_reason_and_starts_when_there_is_room() {
    let node = Node::with(&[4, 4], 8).await;
    let (a, b, c) = (
        Pod::with("a", GPU, 3),
        Pod::with("b", GPU, 3),
        Pod::with("c", GPU, 2),
    );
    node.run(&a).await;
    node.run(&b).await;
    node.kubelet.admit(&c).await.unwrap();
    let reason = node.kubelet.start_container(&c, "main").await.unwrap_err();
    assert!(
        reason.contains("waiting for 2 GiB on one GPU: largest free 1 GiB"),
        "{reason}"
    );
    assert_eq!(node.kubelet.phase(&c), Some(Phase::Active));
    node.kubelet.pod_deleted(&a);
    node.agent().allocator.pod_gone(&a.uid);
    node.start(&c).await;
    assert_eq!(
        node.bound(),
        [("b-uid".to_owned(), 3), ("c-uid".to_owned(), 2)]
    );
}

/// One GPU of 4 quanta, whose agent lets a bind wait for longer than any of these tests does.
async fn patient_node() -> Node {
    let mut node = Node::with(&[4], 4).await;
    let (books, tokens) = node.kill_agent().await;
    let (dir, patience) = (node.kubelet.dir().to_owned(), Duration::from_secs(60));
    node.agent = Some(Agent::start_patient(&dir, books, tokens, patience));
    node.until_ready(4).await;
    node
}

#[tokio::test]
async fn a_waiting_call_is_answered_as_soon_as_there_is_room() {
    let node = patient_node().await;
    let (a, b) = (Pod::with("a", GPU, 4), Pod::with("b", GPU, 4));
    node.run(&a).await;
    // The kubelet may give a's tokens away as soon as a is not active; its memory still counts.
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
async fn a_call_that_the_kubelet_gave_up_does_not_bar_the_next() {
    let node = patient_node().await;
    let (a, b) = (Pod::with("a", GPU, 4), Pod::with("b", GPU, 4));
    node.run(&a).await;
    node.kubelet.pod_ended(&a, Phase::Succeeded);
    node.kubelet.admit(&b).await.unwrap();
    // Only the call that cannot be answered in time.
    let mut limit = Duration::from_millis(50);
    let mut exchange = || {
        let faults = |faults: &mut Faults| std::mem::swap(&mut faults.pre_start_limit, &mut limit);
        node.kubelet.break_with(faults);
    };
    exchange();
    let error = node.kubelet.start_container(&b, "main").await.unwrap_err();
    exchange();
    assert!(error.contains("DeadlineExceeded"), "{error}");
    node.agent().allocator.pod_gone(&a.uid);
    node.start(&b).await;
}

#[tokio::test]
async fn containers_of_a_pod_get_allocations_of_their_own() {
    let node = Node::new().await;
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
async fn a_pods_containers_all_start_where_together_they_fit() {
    let node = Node::with(&[16, 16], 32).await;
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
async fn an_allocation_is_found_in_the_kubelet_s_checkpoint_by_tokens_and_by_id() {
    let node = Node::new().await;
    let pod = Pod::with("a", GPU, 3);
    let cdi = node.run(&pod).await;
    let names = [(Resource::DeviceMemory, GPU.to_owned())];
    let checkpoint = DeviceCheckpoint::read(node.kubelet.dir(), &names).unwrap();
    let tokens = set(&node.tokens_of(&pod));
    let held = checkpoint
        .holders(Resource::DeviceMemory, &tokens)
        .next()
        .unwrap();
    assert_eq!(
        (held.pod.as_str(), held.container.as_str()),
        ("a-uid", "main")
    );
    assert_eq!(cdi, [format!("bursar.dev/gpu={}", held.allocation)]);
}

#[tokio::test]
async fn pods_are_named_by_the_pod_resources_api() {
    let node = Node::new().await;
    let (a, b) = (Pod::with("a", GPU, 2), Pod::with("b", GPU, 3));
    node.run(&a).await;
    node.run(&b).await;
    let client = PodResourcesClient::new(node.kubelet.pod_resources_socket());
    let listed = client.list(Resource::DeviceMemory, GPU).await.unwrap();
    let name = holder_of(&listed, &set(&node.tokens_of(&b))).unwrap();
    assert_eq!(
        (name.namespace.as_str(), name.pod.as_str()),
        ("default", "b")
    );
}

#[tokio::test]
async fn pods_are_named_again_at_once_after_each_kubelet_restart() {
    let mut node = Node::new().await;
    let pod = Pod::with("a", GPU, 2);
    node.run(&pod).await;
    let client = PodResourcesClient::new(node.kubelet.pod_resources_socket());
    for _ in 0..10 {
        let listed = client.list(Resource::DeviceMemory, GPU).await.unwrap();
        assert_eq!(listed.len(), 1);
        node.restart_kubelet().await;
    }
}

#[tokio::test]
async fn a_kubelet_without_pod_resources_is_an_error_in_time() {
    let mut node = Node::new().await;
    node.kubelet.stop().await;
    let client = PodResourcesClient::new(node.kubelet.pod_resources_socket());
    let error = client.list(Resource::DeviceMemory, GPU).await.unwrap_err();
    assert!(matches!(error, PodResourcesError::Unreachable { .. }));
}

#[tokio::test]
async fn a_node_full_of_tokens_registers_and_allocates() {
    let node = Node::with(&[1024; 4], 4096).await;
    let pod = Pod::with("a", GPU, 1000);
    node.run(&pod).await;
    let tokens = node.tokens_of(&pod);
    assert_eq!(tokens.len(), 1000);
    assert!(tokens.iter().all(|id| id.parse::<TokenId>().is_ok()));
    node.agent().devices.send_replace(devices(3072, 4096));
    node.kubelet.until_allocatable(GPU, 3072).await;
}
