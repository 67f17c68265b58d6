//! A GPU whose driver does not clear freed memory is shared by no two namespaces without the admin's word.

use std::fs;

use crate::bed::{Bed, seen};
use crate::common::kubelet::Pod;
use crate::machine::{GPU, Machine, TWO_GPUS};

/// Why a pod gets nothing of a GPU that has room.
const NOT_SHARED: &str = "is not shared with other namespaces";

/// A machine whose driver clears freed memory or not, and whose admin allows what that leads to or not.
async fn machine(scrub: &str, allow: bool) -> Machine {
    let mut machine = Bed::machine(TWO_GPUS).await;
    machine.lab.simgpu(&["scrub", scrub]).unwrap();
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

/// A pod of a namespace with `gib`, admitted.
async fn admit(machine: &Machine, namespace: &str, name: &str, gib: usize) -> Pod {
    let pod = Pod {
        namespace: namespace.to_owned(),
        ..Pod::with(name, GPU, gib)
    };
    machine.kubelet.admit(&pod).await.unwrap();
    fs::create_dir_all(machine.cgroup(&pod)).unwrap();
    pod
}

/// The same on both GPUs: a pod of one namespace on each.
async fn taken(machine: &Machine) -> [Pod; 2] {
    let one = admit(machine, "one", "one-a", 4).await;
    machine.until_started(&one).await;
    // Larger than what is left of the first.
    let two = admit(machine, "two", "two-a", 14).await;
    machine.until_started(&two).await;
    [one, two]
}

#[tokio::test]
async fn unscrubbed_gpu_is_for_one_namespace_until_the_boot() {
    let mut machine = machine("off", false).await;
    let [_, two] = taken(&machine).await;
    let third = admit(&machine, "three", "three-a", 2).await;
    machine.until_refused(&third, NOT_SHARED).await;
    let mate = admit(&machine, "one", "one-b", 2).await;
    machine.until_started(&mate).await;
    // What its pods left can be read still, whoever looks after it.
    machine.end(&two);
    machine.until_refused(&third, NOT_SHARED).await;
    machine.restart_agent().await;
    machine.until_refused(&third, NOT_SHARED).await;
}

#[tokio::test]
async fn scrubbed_gpu_and_one_that_the_admin_allows_are_shared() {
    for (scrub, allow) in [("on", false), ("off", true)] {
        let machine = machine(scrub, allow).await;
        taken(&machine).await;
        if !allow {
            seen("both GPUs", || {
                let said = machine.log();
                said.matches("freed memory comes back cleared").count() == 2
            })
            .await;
        }
        let third = admit(&machine, "three", "three-a", 2).await;
        machine.until_started(&third).await;
    }
}
