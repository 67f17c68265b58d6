//! Tests the drain of a GPU.

use std::fs;
use std::time::{Duration, Instant};

use bursar_crds::GpuNodeStatus;
use bursar_crds::gpu_node::LeaseState;
use serde_json::{Value, json};

use crate::api::FakeGpuNodeApi;
use crate::common::kubelet::Pod;
use crate::common::{PATIENCE, eventually};
use crate::fixture::{Fixture, GIB, assert_unscrubbed, open_retrying};
use crate::machine::GPU;
use crate::runtime_client::start_client;
use crate::tenant_process::Opened;

/// The device nodes that the agent and its child processes have open.
fn open_device_nodes(fixture: &Fixture) -> Vec<String> {
    let nodes = open_nodes_by_pid(fixture).into_iter();
    nodes.map(|(_, node)| node).collect()
}

/// Each open device node with its process.
fn open_nodes_by_pid(fixture: &Fixture) -> Vec<(u32, String)> {
    let provisioners = fixture.provisioners().into_iter();
    let provisioners = provisioners.map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
    let nvml_processes = fixture.machine.nvml_processes();
    let pids = provisioners
        .chain(nvml_processes)
        .chain([fixture.machine.agent_pid()]);
    let files = pids.flat_map(|pid| {
        let files = fs::read_dir(format!("/proc/{pid}/fd"));
        files.into_iter().flatten().map(move |file| (pid, file))
    });
    let nodes = files.filter_map(|(pid, file)| {
        let path = fs::read_link(file.ok()?.path()).ok()?;
        let node = path.strip_prefix(fixture.machine.lab.path().join("dev"));
        Some((pid, node.ok()?.to_str().unwrap().to_owned()))
    });
    nodes.collect()
}

/// The used memory of a GPU and the number of its processes.
fn gpu_usage(fixture: &Fixture, gpu: &str) -> (u64, usize) {
    let sim = fixture.machine.lab.sim().unwrap();
    let usage = sim.usage(sim.gpu_unit(sim.find_gpu(gpu).unwrap()));
    (usage.used, usage.processes.len())
}

async fn wait_for_gpu_state(api: &FakeGpuNodeApi, gpu: &str, state: &str, reason: &str) -> Value {
    let expected = [json!(state), json!(reason)];
    let actual = || {
        let actual = api.gpu(gpu);
        [actual["state"].clone(), actual["health"]["reason"].clone()]
    };
    eventually(&format!("{state}, {reason}"), || actual() == expected).await;
    api.gpu(gpu)
}

/// Starts the pod as the kubelet does until the agent refuses. The agent may still have to
/// register.
async fn wait_until_refused(fixture: &Fixture, pod: &Pod) {
    let start = Instant::now();
    loop {
        let error = fixture.machine.start(pod).await.unwrap_err();
        if error.contains("is drained") {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "{error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn drained_gpu_is_released_and_serves_again_afterwards() {
    let mut fixture = Fixture::new().await;
    let api = FakeGpuNodeApi::start(&fixture.machine);
    fixture.machine.restart_agent().await;
    // Each pod has a GPU of its own.
    let (pod, other) = (
        fixture.machine.admit("a", 4).await,
        fixture.machine.run("b", 14).await,
    );
    let mut neighbour = fixture.tenant(&other);
    assert!(open_retrying(&mut neighbour, "before", GIB).is_ok());
    fixture.machine.start(&pod).await.unwrap();
    let (_, gpu) = fixture.allocation_and_gpu(&pod);
    let (_, other_gpu) = fixture.allocation_and_gpu(&other);
    let mut first = fixture.tenant(&pod);
    // An answer to this request means that the GPU has passed the scrub check.
    assert!(open_retrying(&mut first, "first", GIB).is_ok());
    first.kill();
    let (mut tenant, report) = start_client(&fixture, &pod).await;
    assert_eq!(report["found"], false);
    let before = wait_for_gpu_state(&api, &gpu, "Active", "Ok").await;
    // A starting agent's status has no GPUs for a moment.
    let [node, other_node] =
        [&gpu, &other_gpu].map(|gpu| format!("nvidia{}", api.gpu(gpu)["index"]));
    let only_the_other = |fixture: &Fixture| {
        let nodes = open_device_nodes(fixture);
        nodes.contains(&other_node) && !nodes.contains(&node)
    };
    assert!(
        open_device_nodes(&fixture).contains(&node),
        "NVML keeps the nodes of probed GPUs open"
    );
    assert_ne!(gpu_usage(&fixture, &gpu), (0, 0));

    api.drain(&[&gpu]);
    wait_for_gpu_state(&api, &gpu, "Draining", "Draining").await;
    fixture.machine.kill_agent();
    fixture.machine.start_agent();
    wait_for_gpu_state(&api, &gpu, "Draining", "Drained").await;
    assert!(!tenant.is_alive());
    assert_eq!(gpu_usage(&fixture, &gpu), (0, 0));
    assert!(!open_device_nodes(&fixture).contains(&node));
    eventually("the other GPU is probed", || only_the_other(&fixture)).await;
    fixture.machine.kubelet.until_allocatable(GPU, 16).await;
    wait_until_refused(&fixture, &pod).await;
    // The other GPU serves as before.
    assert!(matches!(
        open_retrying(&mut neighbour, "meanwhile", GIB),
        Ok(Opened::Write { .. })
    ));

    fixture.machine.kill_agent();
    fixture.machine.start_agent();
    let start = Instant::now();
    while !only_the_other(&fixture) {
        let open = open_nodes_by_pid(&fixture);
        assert!(
            start.elapsed() < PATIENCE,
            "{node} is drained, and {other_node} is not; open: {open:?}"
        );
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    wait_for_gpu_state(&api, &gpu, "Draining", "Drained").await;
    wait_until_refused(&fixture, &pod).await;

    api.drain(&[]);
    let after = wait_for_gpu_state(&api, &gpu, "Active", "Ok").await;
    assert_eq!(
        after["generation"].as_u64(),
        before["generation"].as_u64().map(|before| before + 1)
    );
    assert_eq!(api.gpu(&other_gpu)["generation"], before["generation"]);
    let (was, is) = (&before["generation"], &after["generation"]);
    let expected_note = format!("the memory of {gpu} has generation {is} instead of {was}");
    let is_reported = || {
        let notes = api.events("GpuMemoryLost");
        notes.iter().any(|note| note.starts_with(&expected_note))
    };
    eventually("the Event of the lost memory", is_reported).await;
    let status: GpuNodeStatus = serde_json::from_value(api.status()).unwrap();
    let drained = status
        .containers
        .iter()
        .find(|container| container.pod == "a");
    assert!(drained.unwrap().process_generation >= 1, "{status:?}");
    let kept = status.retained.iter().find(|lease| lease.name == "before");
    let kept = kept.unwrap();
    assert_eq!((&kept.gpu, kept.state), (&other_gpu, LeaseState::Writing));
    assert_eq!(kept.size.bytes(), Ok(GIB));
    assert_eq!((kept.owner.as_str(), kept.openers), ("b", 1));
    // An answer to this request means that the GPU has passed the scrub check again.
    assert!(open_retrying(&mut fixture.tenant(&pod), "after", GIB).is_ok());
    let (_tenant, anew) = start_client(&fixture, &pod).await;
    assert_eq!(anew["found"], false, "the retained memory is lost");
}

#[tokio::test]
async fn reloaded_driver_passes_the_scrub_check_before_leases() {
    let mut fixture = Fixture::new().await;
    let api = FakeGpuNodeApi::start(&fixture.machine);
    fixture.machine.restart_agent().await;
    let pod = fixture.machine.run("a", 4).await;
    let (_, gpu) = fixture.allocation_and_gpu(&pod);
    let mut tenant = fixture.tenant(&pod);
    assert!(open_retrying(&mut tenant, "weights", GIB).is_ok());
    tenant.kill();
    api.drain(&[&gpu]);
    wait_for_gpu_state(&api, &gpu, "Draining", "Drained").await;
    // A kernel module loaded with RmDisableScrubOnFree behaves like this.
    fixture.machine.lab.run_simgpu(&["scrub", "off"]).unwrap();
    api.drain(&[]);
    wait_for_gpu_state(&api, &gpu, "Active", "Ok").await;
    assert_unscrubbed(&mut fixture.tenant(&pod));
}
