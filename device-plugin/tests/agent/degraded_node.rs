//! Tests a degraded node: the agent names the fault, loses nothing, and recovers after the repair.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::common::{assert_within, eventually};
use crate::machine::{GPU, Machine};
use crate::observability::wait_for_status;

#[tokio::test]
async fn unwritable_cdi_folder_is_named_and_binding_survives() {
    let machine = Machine::started().await;
    let cdi = machine.path("cdi");
    fs::remove_dir(&cdi).unwrap();
    fs::write(&cdi, "in its place").unwrap();
    let pod = machine.admit("a", 10).await;
    let error = machine.start(&pod).await.unwrap_err();
    assert!(error.contains("cdi/bursar.dev-gpu-"), "{error}");
    fs::remove_file(&cdi).unwrap();
    machine.until_started(&pod).await;
    assert_eq!(machine.devices().len(), 1);
}

#[tokio::test]
async fn full_run_folder_is_named_and_recovers() {
    let machine = Machine::started().await;
    // A folder with the checkpoint's temporary name makes its write fail, as a full tmpfs does,
    // without a mount.
    let temporary = machine.path("run/checkpoint.new");
    let blocked = async {
        // The agent may be writing its first checkpoint.
        while let Err(error) = fs::create_dir(&temporary) {
            assert_eq!(error.kind(), std::io::ErrorKind::AlreadyExists);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let blocked = tokio::time::timeout(Duration::from_secs(30), blocked).await;
    blocked.expect("the agent leaves a checkpoint half written");
    let pod = machine.admit("a", 10).await;
    let error = machine.start(&pod).await.unwrap_err();
    assert!(error.contains("checkpoint"), "{error}");
    assert!(
        machine.devices().is_empty(),
        "nothing is shown that is not on record"
    );
    fs::remove_dir(&temporary).unwrap();
    machine.until_started(&pod).await;
    assert_eq!(machine.devices().len(), 1);
}

#[tokio::test]
async fn lost_gpu_withdraws_its_device_ids_until_it_returns() {
    assert_within(Duration::from_secs(2), async || {
        let machine = Machine::started().await;
        machine.run("a", 10).await;
        let before = machine.devices();
        machine.lab.run_simgpu(&["lose", "0"]).unwrap();
        let unhealthy = machine.kubelet.until_allocatable(GPU, 16).await;
        assert_eq!(machine.devices(), before);
        // The scheduler would still bind this pod: 16 healthy device ids less the 10 that are
        // taken.
        machine.run("b", 6).await;
        machine.lab.run_simgpu(&["restore", "0"]).unwrap();
        let time = machine.kubelet.until_allocatable(GPU, 32).await;
        println!("healthy after it is back: {time:?}");
        machine.run("c", 6).await;
        assert_eq!(machine.devices().len(), 3);
        unhealthy
    })
    .await;
}

/// Whether the agent has recorded that the first GPU is away.
fn is_first_gpu_recorded_away(machine: &Machine) -> bool {
    let text = fs::read_to_string(machine.path("run/generations.json")).unwrap_or_default();
    let file: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    file["data"]["GPU-00000000-0000-0000-0000-000000000001"]["memory"]["away"] == true
}

#[tokio::test]
async fn gpu_needing_a_reset_stays_withdrawn_until_it_was_away() {
    let mut machine = Machine::started().await;
    machine.lab.run_simgpu(&["xid", "0", "48"]).unwrap();
    machine.kubelet.until_allocatable(GPU, 16).await;
    let registrations = machine.registrations();
    machine.stop_agent().await;
    machine.start_agent();
    eventually("a registration", || machine.registrations() > registrations).await;
    machine.kubelet.until_allocatable(GPU, 16).await;
    // This is longer than good probes need to make a GPU healthy.
    tokio::time::sleep(Duration::from_secs(14)).await;
    assert_eq!(
        machine.kubelet.capacity(GPU).map(|c| c.allocatable),
        Some(16)
    );
    machine.lab.run_simgpu(&["lose", "0"]).unwrap();
    eventually("the loss on record", || {
        is_first_gpu_recorded_away(&machine)
    })
    .await;
    machine.lab.run_simgpu(&["restore", "0"]).unwrap();
    machine.kubelet.until_allocatable(GPU, 32).await;
}

#[tokio::test]
async fn xid_of_a_healthy_gpu_is_handled_while_another_is_lost() {
    let machine = Machine::started().await;
    machine.lab.run_simgpu(&["lose", "0"]).unwrap();
    machine.kubelet.until_allocatable(GPU, 16).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    machine.lab.run_simgpu(&["xid", "1", "48"]).unwrap();
    machine.kubelet.until_allocatable(GPU, 0).await;
}

#[tokio::test]
async fn xid_is_handled_as_soon_as_a_lost_gpu_returns() {
    let machine = Machine::started().await;
    machine.lab.run_simgpu(&["lose", "0"]).unwrap();
    machine.kubelet.until_allocatable(GPU, 16).await;
    machine.lab.run_simgpu(&["restore", "0"]).unwrap();
    machine.kubelet.until_allocatable(GPU, 32).await;
    machine.lab.run_simgpu(&["xid", "0", "48"]).unwrap();
    machine.kubelet.until_allocatable(GPU, 16).await;
}

#[tokio::test]
async fn agent_registers_when_a_driver_appears() {
    let mut machine = Machine::new().await;
    let (driver, away) = (
        machine.lab.path().join("driver"),
        machine.lab.path().join("away"),
    );
    fs::rename(&driver, &away).unwrap();
    machine.start_agent();
    eventually("the log line", || {
        machine.log().contains("nvml not available")
    })
    .await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(machine.is_agent_alive());
    assert_eq!(
        machine.log().matches("nvml not available").count(),
        1,
        "logged once"
    );
    assert_eq!(machine.kubelet.capacity(GPU), None, "nothing to register");
    fs::rename(&away, &driver).unwrap();
    machine.kubelet.until_allocatable(GPU, 32).await;
}

/// The names of the driver's API library that the CDI files mount.
fn mounted_drivers(machine: &Machine) -> BTreeSet<String> {
    let files = fs::read_dir(machine.path("cdi")).unwrap().flatten();
    let texts = files.map(|file| fs::read_to_string(file.path()).unwrap());
    let specs = texts.map(|text| serde_json::from_str::<serde_json::Value>(&text).unwrap());
    let mounts = specs.flat_map(|spec| {
        let mounts = &spec["devices"][0]["containerEdits"]["mounts"];
        mounts.as_array().unwrap().clone()
    });
    let is_driver =
        |mount: &serde_json::Value| mount["containerPath"] == "/opt/bursar/drv/cuda.so.1";
    let paths = mounts
        .filter(is_driver)
        .map(|mount| mount["hostPath"].clone());
    let names = paths.filter_map(|path| Some(path.as_str()?.rsplit_once('/')?.1.to_owned()));
    names.collect()
}

#[tokio::test]
async fn replaced_driver_reaches_each_container_with_its_next_start() {
    let machine = Machine::started().await;
    let folder = machine.lab.path().join(format!(
        "driver/usr/lib/{}-linux-gnu",
        std::env::consts::ARCH
    ));
    let link = folder.join("libcuda.so.1");
    // As a package lays it out: a link to a file with the version.
    let replace = |from: &Path, version: &str| {
        let file = folder.join(format!("libcuda.so.{version}"));
        fs::copy(from, &file).unwrap();
        fs::remove_file(from).unwrap();
        let _already = fs::remove_file(&link);
        std::os::unix::fs::symlink(file.file_name().unwrap(), &link).unwrap();
        file
    };
    let earlier = replace(&link, "580.95.05");
    let pod = machine.admit("a", 10).await;
    machine.until_started(&pod).await;
    assert_eq!(
        mounted_drivers(&machine),
        ["libcuda.so.580.95.05".to_owned()].into()
    );

    replace(&earlier, "595.1");
    let another = machine.admit("b", 10).await;
    machine.start(&another).await.unwrap();
    // Restarted in place, as the kubelet restarts a container.
    machine.start(&pod).await.unwrap();
    assert_eq!(
        mounted_drivers(&machine),
        ["libcuda.so.595.1".to_owned()].into()
    );
    assert!(machine.log().contains("the driver's files were replaced"));

    // Without a start of a container.
    let changed = |value| {
        let line = format!("bursar_node_condition{{condition=\"DriverChanged\"}} {value}");
        move |_, text: &str| text.lines().any(|shown| shown == line)
    };
    wait_for_status(&machine, "/metrics", changed(1)).await;
    replace(&folder.join("libcuda.so.595.1"), "580.95.05");
    wait_for_status(&machine, "/metrics", changed(0)).await;
    let earlier = ["libcuda.so.580.95.05".to_owned()].into();
    eventually("the earlier files in CDI files", || {
        mounted_drivers(&machine) == earlier
    })
    .await;
}

#[tokio::test]
async fn invalid_config_is_rejected_with_field_value_and_remedy() {
    let machine = Machine::new().await;
    for (config, parts) in [
        (
            "[resources]\nquantum = \"0\"",
            ["resources.quantum", "\"0\"", "256Mi, 512Mi, 1Gi"],
        ),
        (
            "[resources]\nquantum = 1",
            ["agent.toml", "line 2", "quantum"],
        ),
    ] {
        fs::write(machine.path("agent.toml"), config).unwrap();
        let output = machine.command().stderr(Stdio::piped()).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1));
        for part in parts {
            assert!(text.contains(part), "{part} is missing in: {text}");
        }
    }
}

#[tokio::test]
async fn excess_device_ids_are_not_registered_and_agent_runs() {
    let mut machine = Machine::new().await;
    let config = fs::read_to_string(machine.path("agent.toml")).unwrap();
    let many = "[resources]\nmanaged-memory-capacity = \"5000Gi\"\n";
    fs::write(machine.path("agent.toml"), format!("{many}{config}")).unwrap();
    machine.start_agent();
    eventually("the log line", || {
        machine.log().contains("TooManyDeviceIds")
    })
    .await;
    assert!(machine.is_agent_alive());
    assert_eq!(machine.kubelet.capacity(GPU), None);
}
