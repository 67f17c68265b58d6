//! Tests managed memory. An honest pod that has some on a GPU causes no finding and refuses no
//! neighbour. A pod that has more than its charge is named.

use std::time::{Duration, Instant};

use crate::api_server::FakeApiServer;
use crate::common::eventually;
use crate::common::kubelet::Pod;
use crate::container::{Container, PLAIN, configure};
use crate::devices::DeviceCgroups;
use crate::findings::{count_findings, metric_value, wait_for_value};
use crate::honest::check_no_findings;
use crate::machine::{GPU, Machine, TWO_GPUS};
use crate::programs::start_client;

const GIB: u64 = 1 << 30;
const MANAGED: &str = "bursar.dev/managed-memory-gib";
/// The longest time until a program finds evictable memory free; an audit runs each second.
const AUDITS: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(100);

/// A machine with two GPUs of 16 GiB whose node offers managed memory. `prepare` changes it before
/// the agent starts.
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

pub(crate) async fn count_audits(machine: &Machine) -> i64 {
    let count = metric_value(machine, "bursar_agent_audit_seconds_count", "").await;
    count.unwrap()
}

/// The free memory that `cuMemGetInfo` reports to the program.
fn free(program: &mut Container) -> u64 {
    program.number("info")
}

/// Waits until a program's free memory is nearly the `gib` GiB of its pod: all but its context.
/// Returns the amount in whole chunks.
pub(crate) async fn wait_for_quota(program: &mut Container, gib: u64) -> u64 {
    let start = Instant::now();
    loop {
        let available = free(program);
        if available > (gib - 1) * GIB {
            return available & !(2 * 1024 * 1024 - 1);
        }
        assert!(start.elapsed() < AUDITS, "only {available} is free");
        tokio::time::sleep(PAUSE).await;
    }
}

/// A pod's managed memory fills the GPU, and a neighbour allocates its whole quota.
async fn run_beside_neighbour(rounds: u64) {
    let machine = machine_with(|_| {}).await;
    let mut devices = DeviceCgroups::v1(&machine);
    let (_owner_pod, mut owner) = start_owner(&machine, &mut devices, 64).await;
    let managed = owner.number(&format!("managed {}", 64 * GIB));
    owner.ok(&format!("touch {managed} {}", 16 * GIB));
    let neighbour_pod = machine.admit("neighbour", 15).await;
    let mut neighbour = start_client(&machine, &mut devices, &neighbour_pod).await;
    let quota = wait_for_quota(&mut neighbour, 15).await;
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
    let start = Instant::now();
    while free(&mut neighbour) < quota {
        assert!(start.elapsed() < AUDITS, "less than {quota} is free");
        tokio::time::sleep(PAUSE).await;
    }
    check_no_findings_in_audits(&machine).await;
}

/// Checks that some more audits have no finding: unaccounted memory is one after 10 audits.
async fn check_no_findings_in_audits(machine: &Machine) {
    let start = Instant::now();
    let enough = count_audits(machine).await + 12;
    while count_audits(machine).await < enough {
        assert!(start.elapsed() < 2 * AUDITS, "the audits have stopped");
        tokio::time::sleep(PAUSE).await;
    }
    check_no_findings(machine).await;
}

#[tokio::test]
async fn managed_memory_is_withdrawn_when_it_is_pinned() {
    let machine = machine_with(|_| {}).await;
    let pod = Pod::with("managed", GPU, 1).and(MANAGED, 8);
    machine.kubelet.admit(&pod).await.unwrap();
    std::fs::create_dir_all(machine.cgroup(&pod)).unwrap();
    machine.start(&pod).await.unwrap();
    let parameter = "sys/module/nvidia_uvm/parameters/uvm_global_oversubscription";
    let parameter = machine.lab.path().join(parameter);
    let is_offered = async |value| {
        let condition = "condition=\"ManagedMemory\"";
        wait_for_value(&machine, "bursar_node_condition", condition, value).await;
    };
    is_offered(1).await;
    std::fs::write(&parameter, "0\n").unwrap();
    // The container keeps its memory, also when it starts again.
    machine.kubelet.until_allocatable(MANAGED, 8).await;
    is_offered(0).await;
    machine.start(&pod).await.unwrap();
    machine.end(&pod);
    machine.kubelet.until_allocatable(MANAGED, 0).await;
    std::fs::write(&parameter, "1\n").unwrap();
    machine.kubelet.until_allocatable(MANAGED, 64).await;
    is_offered(1).await;
}

#[tokio::test]
async fn resident_managed_memory_refuses_no_neighbour() {
    let is_long = std::env::var_os("BURSAR_LONG").is_some();
    run_beside_neighbour(if is_long { 1_000 } else { 100 }).await;
}

/// Waits until the pod `managed` is named, and no other one, for memory that it is not charged.
async fn wait_until_named(machine: &Machine, api_server: &FakeApiServer) {
    let over = "finding=\"over-managed\"";
    wait_for_value(machine, "bursar_agent_findings_total", over, 1).await;
    assert_eq!(count_findings(machine, "unaccounted").await, 0);
    let is_named = |pod| {
        let reasons = api_server.reasons_about(pod);
        reasons.iter().any(|reason| reason == "GpuMemoryOverQuota")
    };
    eventually("an Event", || is_named("managed")).await;
    assert!(!is_named("neighbour"));
}

#[tokio::test]
async fn pod_with_more_managed_memory_than_charged_is_named() {
    let api_server = FakeApiServer::start(Duration::ZERO).await;
    let machine = machine_with(|machine| api_server.configure(machine)).await;
    let mut devices = DeviceCgroups::v1(&machine);
    let (_pod, mut owner) = start_owner(&machine, &mut devices, 1).await;
    let neighbour_pod = machine.admit("neighbour", 15).await;
    let _neighbour = start_client(&machine, &mut devices, &neighbour_pod).await;
    // The program never looks up the variable, so the shim does not see it.
    owner.ok(&format!("variable {}", 4 * GIB));
    wait_until_named(&machine, &api_server).await;
}

#[tokio::test]
async fn pod_with_managed_memory_past_the_shim_is_named() {
    let api_server = FakeApiServer::start(Duration::ZERO).await;
    let machine = machine_with(|machine| api_server.configure(machine)).await;
    machine.run("fills", 16).await;
    let pods = [
        machine.admit("managed", 1).await,
        machine.admit("neighbour", 15).await,
    ];
    let mut programs = Vec::new();
    for pod in &pods {
        let mut program = Container::start(&machine, pod, PLAIN).await;
        program.ok("open libcuda.so.1");
        programs.push(program);
    }
    programs[0].ok(&format!("managed {}", 4 * GIB));
    wait_until_named(&machine, &api_server).await;
}

/// The agent cannot tell whose host memory is on a GPU, so it names and kills no pod for it.
#[tokio::test]
async fn host_memory_on_a_gpu_is_a_finding_about_no_pod() {
    let api_server = FakeApiServer::start(Duration::ZERO).await;
    let mut machine = Machine::with_driver(&format!("pageable-memory = true\n{TWO_GPUS}")).await;
    configure(&machine, "policy = \"kill\"\nkill-after = 1");
    api_server.configure(&machine);
    machine.start_agent();
    machine.kubelet.until_allocatable(GPU, 32).await;
    let on_gpu = "condition=\"PageableMemoryOnGpu\"";
    wait_for_value(&machine, "bursar_node_condition", on_gpu, 1).await;
    let mut devices = DeviceCgroups::v1(&machine);
    machine.run("fills", 16).await;
    let pods = ["owner", "neighbour"];
    let mut programs = Vec::new();
    for name in pods {
        let pod = machine.admit(name, 8).await;
        programs.push(start_client(&machine, &mut devices, &pod).await);
    }
    let pointer = programs[0].number(&format!("host {GIB}"));
    programs[0].ok(&format!("touch {pointer} {GIB}"));
    let reports = |name| {
        let reasons = api_server.reasons_about(name);
        let is_finding = |reason: &String| reason == "GpuMemoryUnaccounted";
        reasons.iter().any(is_finding)
    };
    eventually("an Event about the node", || reports("node-1")).await;
    assert!(!pods.into_iter().any(reports));
    assert_eq!(count_findings(&machine, "over-managed").await, 0);
    let kills = metric_value(&machine, "bursar_agent_audit_kills_total", "").await;
    assert_eq!(kills, Some(0));
    programs[0].ok(&format!("alloc {GIB}"));
}
