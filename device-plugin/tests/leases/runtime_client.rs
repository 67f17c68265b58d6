//! Tests the runtime's own lease client, in a container made of its CDI file and through the shim.

use std::time::{Duration, Instant};

use bursar_protocol::messages::token::Generation;
use serde_json::{Value, json};

use crate::api::FakeGpuNodeApi;
use crate::common::eventually;
use crate::common::kubelet::Pod;
use crate::container::{Container, PLAIN};
use crate::fixture::{Fixture, GIB, open_retrying, program_folder};
use crate::machine::{GPU, TWO_GPUS};
use crate::tokens::{is_fenced, redeem};

/// Starts the client in a pod's container. Returns its report of the memory that it found or
/// created.
pub(crate) async fn start_client(fixture: &Fixture, pod: &Pod) -> (Container, Value) {
    let program = program_folder().join("retained");
    let mut client =
        Container::run(&fixture.machine, pod, PLAIN, &program, "image - 67108864").await;
    fixture.machine.adopt(pod, client.pid());
    let line = client.read();
    let report = serde_json::from_str(&line);
    (
        client,
        report.unwrap_or_else(|error| panic!("{error}: {line}")),
    )
}

/// Starts a program in a pod's container that answers each line with what its runtime knows.
async fn start_watcher(fixture: &Fixture, pod: &Pod) -> Container {
    let program = program_folder().join("references");
    let mut image = Container::run(&fixture.machine, pod, PLAIN, &program, "watch").await;
    // The client sends its first message only once it has loaded the driver, so this comes before.
    fixture.machine.adopt(pod, image.pid());
    assert_eq!(image.call("?"), "good");
    image
}

#[tokio::test]
async fn runtime_knows_the_pods_quota_and_its_generation() {
    let mut machine = Fixture::machine(TWO_GPUS).await;
    let api = FakeGpuNodeApi::start(&machine);
    machine.start_agent();
    machine.kubelet.until_allocatable(GPU, 32).await;
    let fixture = Fixture::of(machine);
    let pod = fixture.machine.admit("a", 4).await;
    let mut first = start_watcher(&fixture, &pod).await;
    let mut second = start_watcher(&fixture, &pod).await;
    assert_eq!(first.call("generation"), "1");
    assert_eq!(second.call("generation"), "2");
    eventually("the last generation in the status", || {
        let status = api.status();
        let containers = status["containers"].as_array().into_iter().flatten();
        let of_pod = containers.filter(|container| container["podUid"] == pod.uid.as_str());
        of_pod
            .map(|container| &container["processGeneration"])
            .eq([&json!(2)])
    })
    .await;
    for gib in [4, 2, 3] {
        if gib != 4 {
            let quota = json!({ "podUid": pod.uid.as_str(), "container": "main", "quota": format!("{gib}Gi") });
            api.set_spec(json!({ "quotas": [quota] }));
        }
        for image in [&mut first, &mut second] {
            let limit = (gib * GIB).to_string();
            eventually("the limit", || image.call("limit") == limit).await;
        }
    }
}

#[tokio::test]
async fn runtime_client_finds_its_lease_after_restarts() {
    let mut fixture = Fixture::new().await;
    // An answer means that both GPUs have passed the scrub check. The client would not wait so
    // long.
    let other = fixture.machine.run("other", 2).await;
    let mut reader = fixture.tenant(&other);
    assert!(open_retrying(&mut reader, "other", GIB).is_ok());
    let pod = fixture.machine.admit("a", 4).await;
    let (mut first, created) = start_client(&fixture, &pod).await;
    assert_eq!(created["found"], false);
    let tokens = first.call("token");
    let (lease_token, own_token) = tokens.split_once(' ').unwrap();
    let lease = redeem(&mut reader, lease_token).map(|(lease, block)| (lease > 0, block));
    assert_eq!(lease, Ok((true, 1)));
    assert_eq!(redeem(&mut reader, own_token), Ok((0, 2)));
    // The client kills itself. The test reads the end of its output, which may come before the
    // process has ended.
    assert_eq!(first.call("kill"), "");
    drop(first);
    for token in [lease_token, own_token] {
        eventually("the end of its tokens", || {
            is_fenced(&redeem(&mut reader, token), Generation::Process)
        })
        .await;
    }
    let (second, found) = start_client(&fixture, &pod).await;
    assert_eq!(
        (&found["found"], &found["checksum"]),
        (&Value::Bool(true), &created["checksum"])
    );
    drop(second);
    fixture.machine.restart_agent().await;
    let (_third, again) = start_client(&fixture, &pod).await;
    assert_eq!(
        (&again["found"], &again["checksum"]),
        (&Value::Bool(true), &created["checksum"])
    );
}

#[tokio::test]
async fn fenced_lease_is_stale_in_its_process_alone() {
    let fixture = Fixture::new().await;
    let (pod, other) = (
        fixture.machine.admit("a", 4).await,
        fixture.machine.admit("b", 4).await,
    );
    let mut images = Vec::new();
    for pod in [&pod, &other] {
        images.push(start_watcher(&fixture, pod).await);
    }
    let (_, gpu) = fixture.allocation_and_gpu(&pod);
    let pid = images[0].pid().to_string();
    let xid = ["xid", &gpu, "31", "--pid", &pid];
    fixture.machine.lab.run_simgpu(&xid).unwrap();
    let injected_at = Instant::now();
    // The client has made no call that could report the fault, and the agent has not killed it yet.
    while images[0].call("?") != "Poisoned(999)" {
        assert!(
            injected_at.elapsed() < Duration::from_secs(3),
            "the client did not observe the fence"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(images[1].call("?"), "good");
}
