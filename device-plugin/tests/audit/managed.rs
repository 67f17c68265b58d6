//! Tests managed memory: an honest pod that has some on a GPU causes no finding and refuses no
//! neighbour; a pod that has more than its charge is named.

use std::time::{Duration, Instant};

use crate::common::kubelet::Pod;
use crate::container::{Container, configure};
use crate::devices::DeviceCgroups;
use crate::findings::{count_findings, metric_value, wait_for_log, wait_for_value};
use crate::honest::check_no_findings;
use crate::machine::{GPU, Machine};
use crate::programs::start_client;

const GIB: u64 = 1 << 30;
const MANAGED: &str = "bursar.dev/managed-memory-gib";
/// The longest time until a program is told what can be evicted; an audit runs each second.
const AUDITS: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(100);

/// A machine with two GPUs of 16 GiB whose node offers managed memory.
async fn machine() -> Machine {
    machine_with(|_| {}).await
}

/// A machine like that of [`machine`], which `prepare` changes before the agent starts.
pub(crate) async fn machine_with(prepare: impl FnOnce(&Machine)) -> Machine {
    let mut machine = Machine::new().await;
    let config = machine.path("agent.toml");
    let text = std::fs::read_to_string(&config).unwrap();
    let capacity = "[resources]\nmanaged-memory-capacity = \"64Gi\"\n";
    std::fs::write(&config, text + capacity).unwrap();
    configure(&machine, "");
    prepare(&machine);
    machine.start_agent();
    machine.kubelet.until_allocatable(GPU, 32).await;
    machine.kubelet.until_allocatable(MANAGED, 64).await;
    machine
}

/// Starts a pod with managed memory and another one, which share a GPU.
async fn start_both(
    machine: &Machine,
    devices: &mut DeviceCgroups,
    managed: usize,
) -> [(Pod, Container); 2] {
    let (pod, owner) = start_owner(machine, devices, managed).await;
    let beside = machine.admit("neighbour", 15).await;
    let neighbour = start_client(machine, devices, &beside).await;
    [(pod, owner), (beside, neighbour)]
}

/// Starts a pod with managed memory. The other GPU is full.
pub(crate) async fn start_owner(
    machine: &Machine,
    devices: &mut DeviceCgroups,
    managed: usize,
) -> (Pod, Container) {
    machine.run("fills", 16).await;
    let pod = Pod::with("managed", GPU, 1).and(MANAGED, managed);
    machine.kubelet.admit(&pod).await.unwrap();
    std::fs::create_dir_all(machine.cgroup(&pod)).unwrap();
    let owner = start_client(machine, devices, &pod).await;
    (pod, owner)
}

async fn count_audits(machine: &Machine) -> i64 {
    let count = metric_value(machine, "bursar_agent_audit_seconds_count", "").await;
    count.unwrap()
}

/// The free memory that the program is told.
fn free(program: &mut Container) -> u64 {
    program.number("info")
}

async fn run_beside_neighbour(rounds: u64) {
    let machine = machine().await;
    let mut devices = DeviceCgroups::v1(&machine);
    let [(_a, mut owner), (_b, mut neighbour)] = start_both(&machine, &mut devices, 64).await;
    let managed = owner.number(&format!("managed {}", 64 * GIB));
    let quota = free(&mut neighbour) & !(2 * 1024 * 1024 - 1);
    for round in 0..rounds {
        let part = managed + round % 16 * 4 * GIB;
        owner.ok(&format!("touch {part} {}", 4 * GIB));
        let answer = neighbour.call(&format!("alloc {quota}"));
        let pointer = answer.strip_prefix("ok ");
        let pointer = pointer.unwrap_or_else(|| panic!("round {round}: {answer}"));
        neighbour.ok(&format!("free {pointer}"));
    }
    // The GPU is full of managed memory, and the neighbour may have all of its quota.
    owner.ok(&format!("touch {managed} {}", 16 * GIB));
    let begun = Instant::now();
    while free(&mut neighbour) < quota {
        assert!(begun.elapsed() < AUDITS, "less than {quota} is free");
        tokio::time::sleep(PAUSE).await;
    }
    // Unaccounted memory is a finding after 10 audits.
    let enough = count_audits(&machine).await + 12;
    while count_audits(&machine).await < enough {
        assert!(begun.elapsed() < 2 * AUDITS, "the audits have stopped");
        tokio::time::sleep(PAUSE).await;
    }
    check_no_findings(&machine).await;
}

#[tokio::test]
async fn resident_managed_memory_refuses_no_neighbour() {
    let is_long = std::env::var_os("BURSAR_LONG").is_some();
    run_beside_neighbour(if is_long { 1_000 } else { 100 }).await;
}

#[tokio::test]
async fn pod_with_more_managed_memory_than_charged_is_named() {
    let machine = machine().await;
    let mut devices = DeviceCgroups::v1(&machine);
    let [(_a, mut owner), (_b, _neighbour)] = start_both(&machine, &mut devices, 1).await;
    // The program never looks up the variable, so the shim does not see it.
    owner.ok(&format!("variable {}", 4 * GIB));
    wait_for_value(
        &machine,
        "bursar_agent_findings_total",
        "finding=\"over-managed\"",
        1,
    )
    .await;
    assert_eq!(count_findings(&machine, "unaccounted").await, 0);
    wait_for_log(&machine, "OverManaged").await;
}
