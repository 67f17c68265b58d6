//! Tests the agent's probes and metrics.

use std::time::{Duration, Instant};

use bursar_kubelet::device_checkpoint::FILE_NAME;

use crate::common::PATIENCE;
use crate::machine::{GPU, Machine};

/// Waits until the answer to a GET of `path` is as `wanted`. Returns its body.
pub(crate) async fn wait_for_status(
    machine: &Machine,
    path: &str,
    wanted: impl Fn(u16, &str) -> bool,
) -> String {
    let start = Instant::now();
    loop {
        let (code, body) = machine.get(path).await;
        if wanted(code, &body) {
            return body;
        }
        assert!(start.elapsed() < PATIENCE, "{path} answers {code}:\n{body}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn probes_report_health_and_why_the_agent_is_not_ready() {
    let mut machine = Machine::started().await;
    wait_for_status(&machine, "/readyz", |code, _| code == 200).await;
    machine.kubelet.stop().await;
    let why = wait_for_status(&machine, "/readyz", |code, _| code == 503).await;
    assert!(why.contains("Registered"), "{why}");
    let (alive, _) = machine.get("/healthz").await;
    assert_eq!(alive, 200, "the agent's restart would mend nothing");
    machine.kubelet.start();
    machine.kubelet.sync_pods().await;
    wait_for_status(&machine, "/readyz", |code, _| code == 200).await;
}

#[tokio::test]
async fn metrics_follow_a_pod_from_allocation_to_end() {
    let machine = Machine::started().await;
    let shows = |line: &'static str| {
        move |code, text: &str| code == 200 && text.lines().any(|shown| shown == line)
    };
    wait_for_status(
        &machine,
        "/metrics",
        shows(r#"bursar_agent_device_ids{resource="gpu-memory"} 32"#),
    )
    .await;
    let pod = machine.run("a", 10).await;
    wait_for_status(
        &machine,
        "/metrics",
        shows(r#"bursar_agent_bound{resource="gpu-memory"} 1"#),
    )
    .await;
    wait_for_status(
        &machine,
        "/metrics",
        shows("bursar_agent_allocate_seconds_count 1"),
    )
    .await;
    let started = r#"bursar_agent_bind_seconds_count{result="bound"} 1"#;
    wait_for_status(&machine, "/metrics", shows(started)).await;
    machine.end(&pod);
    wait_for_status(
        &machine,
        "/metrics",
        shows(r#"bursar_agent_bound{resource="gpu-memory"} 0"#),
    )
    .await;
    wait_for_status(&machine, "/metrics", shows("bursar_agent_releases_total 1")).await;
}

/// The devices of NVIDIA's plugin on the node.
fn set_other_plugin(machine: &Machine, devices: usize) {
    machine.kubelet.inject(|faults| {
        faults.other_plugins = [("nvidia.com/gpu".to_owned(), devices)].into();
    });
}

#[tokio::test]
async fn other_owner_of_gpus_is_only_reported_by_choice() {
    let mut machine = Machine::new().await;
    let path = machine.path("agent.toml");
    let config = std::fs::read_to_string(&path).unwrap();
    let choice = "[sharing]\nrefuse-beside-other-plugins = false\n";
    std::fs::write(&path, config.replacen("[sharing]\n", choice, 1)).unwrap();
    set_other_plugin(&machine, 2);
    machine.start_agent();
    machine.kubelet.until_allocatable(GPU, 32).await;
    let has_sole_owner = |value| {
        let line = format!(r#"bursar_node_condition{{condition="SoleOwner"}} {value}"#);
        move |code, text: &str| code == 200 && text.lines().any(|shown| shown == line)
    };
    wait_for_status(&machine, "/metrics", has_sole_owner(0)).await;
    wait_for_status(&machine, "/readyz", |code, _| code == 200).await;
    machine.run("a", 10).await;
    set_other_plugin(&machine, 0);
    wait_for_status(&machine, "/metrics", has_sole_owner(1)).await;
}

#[tokio::test]
async fn node_with_another_owner_offers_nothing() {
    let mut machine = Machine::new().await;
    machine.start_agent();
    machine.kubelet.until_allocatable(GPU, 32).await;
    let pod = machine.run("a", 10).await;
    let before = machine.devices();
    set_other_plugin(&machine, 2);
    machine.kubelet.until_allocatable(GPU, 0).await;
    assert_eq!(machine.devices(), before, "running pods keep their gpus");
    machine.end(&pod);
    set_other_plugin(&machine, 0);
    machine.kubelet.until_allocatable(GPU, 32).await;
    machine.run("b", 10).await;
}

#[tokio::test]
async fn kubelets_checkpoint_of_another_form_is_told_until_it_heals() {
    let machine = Machine::started().await;
    machine.run("a", 4).await;
    let pod = machine.admit("b", 4).await;
    let file = machine.kubelet.dir().join(FILE_NAME);
    let replace = |text: &[u8]| {
        let temporary = machine.path("checkpoint-of-kubelet");
        std::fs::write(&temporary, text).unwrap();
        std::fs::rename(temporary, &file).unwrap();
    };
    let is_readable = |value| {
        let line =
            format!(r#"bursar_node_condition{{condition="KubeletCheckpointReadable"}} {value}"#);
        move |code, text: &str| code == 200 && text.lines().any(|shown| shown == line)
    };
    let before = std::fs::read(&file).unwrap();
    wait_for_status(&machine, "/metrics", is_readable(1)).await;
    replace(br#"{"Version":"v3","Pods":{"a-uid":{"main":["0"]}},"Checksum":7}"#);
    wait_for_status(&machine, "/metrics", is_readable(0)).await;
    let refused = machine.start_once(&pod).await.unwrap_err();
    assert!(refused.contains("checkpoint"), "{refused}");
    assert_eq!(machine.devices().len(), 1, "a runs on");
    replace(&before);
    wait_for_status(&machine, "/metrics", is_readable(1)).await;
    machine.until_started(&pod).await;
}
