//! Tests the driver's own memory limits, over simulated drivers with and without them.

use std::fs;
use std::time::Duration;

use crate::common::eventually;
use crate::common::kubelet::Pod;
use crate::machine::{GPU, Machine, TWO_GPUS};

/// The hard limits in GiB that the agent has set in the simulated driver for `pod`'s cgroup, in
/// order.
fn limits_set(machine: &Machine, pod: &Pod) -> Vec<u64> {
    let path = machine.lab.path().join("state/memory-limits");
    let text = fs::read_to_string(path).unwrap_or_default();
    let cgroup = machine.cgroup(pod);
    let limit = |line: &str| {
        let [uuid, soft, hard, of]: [&str; 4] =
            line.split(' ').collect::<Vec<_>>().try_into().unwrap();
        assert!(uuid.starts_with("GPU-00000000"));
        assert_eq!(soft, "0", "nothing is reserved");
        (of == cgroup.to_str().unwrap()).then(|| hard.parse::<u64>().unwrap() >> 30)
    };
    text.lines().filter_map(limit).collect()
}

/// A machine with a registered agent over a driver of this branch.
async fn machine_with_driver(driver: &str) -> Machine {
    let config = format!("driver-version = \"{driver}\"\n{TWO_GPUS}");
    let mut machine = Machine::with_driver(&config).await;
    machine.start_agent();
    machine.kubelet.until_allocatable(GPU, 32).await;
    machine
}

/// Admits a pod with a cgroup of version 2.
async fn admit_with_cgroup_v2(machine: &Machine, name: &str, gib: usize) -> Pod {
    let pod = machine.admit(name, gib).await;
    fs::write(machine.cgroup(&pod).join("cgroup.controllers"), "dmem\n").unwrap();
    pod
}

#[tokio::test]
async fn driver_limits_a_pod_from_its_start_and_after_restarts() {
    let mut machine = machine_with_driver("615.71.09").await;
    let pod = admit_with_cgroup_v2(&machine, "a", 10).await;
    machine.start(&pod).await.unwrap();
    eventually("a limit", || limits_set(&machine, &pod) == [10]).await;
    machine.restart_agent().await;
    eventually("the same again", || limits_set(&machine, &pod) == [10, 10]).await;
}

#[tokio::test]
async fn driver_limit_is_not_set_without_support_or_cgroup_v2() {
    let old = machine_with_driver("580.95.05").await;
    let pod = admit_with_cgroup_v2(&old, "a", 10).await;
    old.start(&pod).await.unwrap();
    let new = machine_with_driver("615.71.09").await;
    let pod_of_1 = new.run("a", 10).await;
    let pod_of_2 = admit_with_cgroup_v2(&new, "b", 4).await;
    new.start(&pod_of_2).await.unwrap();
    eventually("a limit", || limits_set(&new, &pod_of_2) == [4]).await;
    assert_eq!(limits_set(&new, &pod_of_1), [0_u64; 0]);
    // This is longer than the agent's interval between two polls.
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert_eq!(limits_set(&old, &pod), [0_u64; 0]);
    assert!(!old.log().contains("failed to set a driver limit"));
}

#[tokio::test]
async fn refused_driver_limit_is_reported_and_retried() {
    let machine = machine_with_driver("615.71.09").await;
    // A folder in the place of the simulated driver's record makes the write fail.
    let record = machine.lab.path().join("state/memory-limits");
    fs::create_dir(&record).unwrap();
    let pod = admit_with_cgroup_v2(&machine, "a", 10).await;
    machine.start(&pod).await.unwrap();
    eventually("the refused limit in the log", || {
        machine.log().contains("failed to set a driver limit")
    })
    .await;
    fs::remove_dir(record).unwrap();
    eventually("a limit", || limits_set(&machine, &pod) == [10]).await;
    assert_eq!(
        machine
            .log()
            .matches("failed to set a driver limit")
            .count(),
        1
    );
}

#[tokio::test]
async fn driver_limit_that_is_set_and_not_enforced_is_told() {
    let machine = machine_with_driver("615.71.09").await;
    let pod = admit_with_cgroup_v2(&machine, "a", 2).await;
    machine.start(&pod).await.unwrap();
    eventually("a limit", || limits_set(&machine, &pod) == [2]).await;
    let record = fs::read_to_string(machine.lab.path().join("state/memory-limits")).unwrap();
    // The GPUs' UUIDs end with their number.
    let gpu = record.split(' ').next().unwrap().ends_with('2');
    let mut tenant = machine.lab.spawn_client().unwrap();
    machine.adopt(&pod, tenant.pid());
    tenant
        .request(&format!("context {}", u8::from(gpu)))
        .unwrap();
    let logged = |line: &str| machine.log().contains(line);
    eventually("its memory is counted", || {
        logged("driver limit counts the pod's memory")
    })
    .await;
    assert!(!logged("driver limit is not enforced"));
    tenant.request("alloc 4294967296").unwrap();
    eventually("the breach", || logged("driver limit is not enforced")).await;
}
