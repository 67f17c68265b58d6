//! Tests that namespaces share a GPU without scrubbing only if the admin allows it.

use std::fs;

use crate::common::kubelet::Pod;
use crate::fixture::{Fixture, wait_for_scrub_check};
use crate::machine::{GPU, Machine, TWO_GPUS};

/// The reason that a pod waits although a GPU has room.
const NOT_SHARED: &str = "is not shared with other namespaces";

/// A machine whose driver clears freed memory or not, and whose configuration allows sharing
/// without it or not.
async fn machine_with_scrubbing(scrub: &str, allow: bool) -> Machine {
    let mut machine = Fixture::machine(TWO_GPUS).await;
    machine.lab.run_simgpu(&["scrub", scrub]).unwrap();
    let config = fs::read_to_string(machine.path("agent.toml")).unwrap();
    let config = config.replace(
        "allow-unscrubbed = true",
        &format!("allow-unscrubbed = {allow}"),
    );
    fs::write(machine.path("agent.toml"), config).unwrap();
    machine.start_agent();
    machine.kubelet.until_allocatable(GPU, 32).await;
    machine
}

/// Admits a pod of `gib` GiB in a namespace.
async fn admit(machine: &Machine, namespace: &str, name: &str, gib: usize) -> Pod {
    let pod = Pod {
        namespace: namespace.to_owned(),
        ..Pod::with(name, GPU, gib)
    };
    machine.kubelet.admit(&pod).await.unwrap();
    fs::create_dir_all(machine.cgroup(&pod)).unwrap();
    pod
}

/// Starts a pod of one namespace on each of both GPUs.
async fn two_tenants(machine: &Machine) -> [Pod; 2] {
    let first = admit(machine, "one", "one-a", 4).await;
    machine.until_started(&first).await;
    // This pod exceeds the free memory of the first GPU.
    let second = admit(machine, "two", "two-a", 14).await;
    machine.until_started(&second).await;
    [first, second]
}

#[tokio::test]
async fn unscrubbed_gpu_serves_one_namespace_until_reboot() {
    let mut machine = machine_with_scrubbing("off", false).await;
    let [_, second] = two_tenants(&machine).await;
    let third = admit(&machine, "three", "three-a", 2).await;
    machine.until_refused(&third, NOT_SHARED).await;
    let neighbour = admit(&machine, "one", "one-b", 2).await;
    machine.until_started(&neighbour).await;
    // Memory of the ended pod is still readable, so the agent gives its GPU to no other namespace.
    machine.end(&second);
    machine.until_refused(&third, NOT_SHARED).await;
    machine.restart_agent().await;
    machine.until_refused(&third, NOT_SHARED).await;
}

#[tokio::test]
async fn scrubbed_or_allowed_gpu_is_shared_by_namespaces() {
    for (scrub, allow) in [("on", false), ("off", true)] {
        let machine = machine_with_scrubbing(scrub, allow).await;
        two_tenants(&machine).await;
        if !allow {
            wait_for_scrub_check("both GPUs", || {
                let log = machine.log();
                log.matches("freed memory comes back cleared").count() == 2
            })
            .await;
        }
        let third = admit(&machine, "three", "three-a", 2).await;
        machine.until_started(&third).await;
    }
}
