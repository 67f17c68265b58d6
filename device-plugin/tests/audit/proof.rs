//! Tests that memory of exited processes is proven free beside managed memory, by a balloon of the
//! agent that harms no tenant.

use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::kubelet::Pod;
use crate::container::{Container, PLAIN};
use crate::devices::DeviceCgroups;
use crate::honest::check_no_findings;
use crate::machine::Machine;
use crate::managed::{machine_with, start_owner};
use crate::programs::start_client;
use crate::reclaim::{ParkedProcess, park};

const GIB: u64 = 1 << 30;
/// The longest time until a balloon, of which there are two in about 40 s at first.
const BALLOON_LIMIT: Duration = Duration::from_secs(120);

/// Sets the host memory that a pod can have, and has.
fn set_host_memory(machine: &Machine, pod: &Pod, limit: u64, current: u64) {
    for folder in [machine.cgroup(pod), machine.cgroup(pod).join("main")] {
        std::fs::write(folder.join("memory.max"), limit.to_string()).unwrap();
        std::fs::write(folder.join("memory.current"), current.to_string()).unwrap();
    }
}

/// Gives the agent the program that holds balloons, with a scrub check of little memory, and the
/// node enough host memory.
fn prepare(machine: &Machine) {
    let build = ["build", "--quiet", "--package", "bursar-provisioner"];
    let built = Command::new(env!("CARGO")).args(build).status();
    assert!(built.unwrap().success());
    // target/<profile>/deps/<this test>
    let test = std::env::current_exe().unwrap();
    let program = test.ancestors().nth(2).unwrap().join("bursar-provisioner");
    let script = machine.path("no-provisioner");
    let text = format!(
        "#!/bin/sh\n[ \"$1\" = scrub-check ] && set -- \"$@\" --bytes 4194304\nexec {} \"$@\"\n",
        program.display()
    );
    std::fs::write(&script, text).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::write(
        machine.path("proc/meminfo"),
        "MemAvailable: 1000000000 kB\n",
    )
    .unwrap();
}

/// A pod whose managed memory fills a GPU, and one whose program exited and left 6 GiB of exports.
struct Fixture {
    machine: Machine,
    owner: Container,
    owner_pod: Pod,
    managed: u64,
    exporter: Pod,
    parked: Option<ParkedProcess>,
    /// The last field: the cgroups are removed after their processes have ended.
    devices: DeviceCgroups,
}

impl Fixture {
    async fn new() -> Fixture {
        let machine = machine_with(prepare).await;
        let mut devices = DeviceCgroups::v1(&machine);
        let (owner_pod, mut owner) = start_owner(&machine, &mut devices, 64).await;
        let managed = owner.number(&format!("managed {}", 64 * GIB));
        let exporter = machine.admit("exporter", 8).await;
        let mut program = Container::start(&machine, &exporter, PLAIN).await;
        program.ok("open libcuda.so.1");
        program.ok(&format!("export {}", 6 * GIB));
        let parked = park(&mut program);
        owner.ok(&format!("touch {managed} {}", 16 * GIB));
        drop(program);
        Fixture {
            machine,
            owner,
            owner_pod,
            managed,
            exporter,
            parked: Some(parked),
            devices,
        }
    }

    /// Fills the GPU with managed memory.
    fn touch(&mut self) {
        self.owner
            .ok(&format!("touch {} {}", self.managed, 16 * GIB));
    }

    fn balloons(&self) -> usize {
        self.machine.log().matches("balloon held").count()
    }
}

#[tokio::test]
async fn memory_is_proven_free_beside_managed_memory_once_released() {
    let mut fixture = Fixture::new().await;
    set_host_memory(&fixture.machine, &fixture.owner_pod, 65 * GIB, GIB);
    let beside = fixture.machine.admit("neighbour", 4).await;
    let mut neighbour = start_client(&fixture.machine, &mut fixture.devices, &beside).await;
    let mut next = Container::start(&fixture.machine, &fixture.exporter, PLAIN).await;
    next.ok("open libcuda.so.1");
    let (mut rounds, mut longest) = (0, Duration::ZERO);
    let mut run_round = |fixture: &mut Fixture| {
        fixture.touch();
        let begun = Instant::now();
        let pointer = neighbour.number(&format!("alloc {}", 3 * GIB));
        longest = longest.max(begun.elapsed());
        neighbour.ok(&format!("free {pointer}"));
        rounds += 1;
    };
    let begun = Instant::now();
    while fixture.balloons() == 0 {
        assert!(begun.elapsed() < BALLOON_LIMIT, "no balloon");
        run_round(&mut fixture);
        assert_eq!(next.call(&format!("alloc {}", 3 * GIB)), "err 2");
    }
    for _ in 0..10 {
        run_round(&mut fixture);
        let refused = next.call(&format!("alloc {}", 3 * GIB));
        assert_eq!(refused, "err 2", "a descriptor holds the memory");
    }
    let begun = Instant::now();
    fixture.parked = None;
    while next.call(&format!("alloc {}", 3 * GIB)) == "err 2" {
        assert!(begun.elapsed() < BALLOON_LIMIT, "not proven free");
        run_round(&mut fixture);
    }
    println!(
        "free after {:?}; {rounds} rounds, the longest {longest:?}",
        begun.elapsed()
    );
    check_no_findings(&fixture.machine).await;
}

#[tokio::test]
async fn managed_memory_stays_while_its_owner_lacks_host_memory() {
    let mut fixture = Fixture::new().await;
    fixture.parked = None;
    set_host_memory(&fixture.machine, &fixture.owner_pod, 8 * GIB, GIB);
    let mut next = Container::start(&fixture.machine, &fixture.exporter, PLAIN).await;
    next.ok("open libcuda.so.1");
    let begun = Instant::now();
    // A balloon is due after five seconds.
    while begun.elapsed() < Duration::from_secs(10) {
        fixture.touch();
        assert_eq!(next.call(&format!("alloc {}", 3 * GIB)), "err 2");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(fixture.balloons(), 0);
    let log = fixture.machine.log();
    assert!(
        log.contains("risks=") && log.contains("PodRoom"),
        "no reason"
    );
    set_host_memory(&fixture.machine, &fixture.owner_pod, 65 * GIB, GIB);
    let begun = Instant::now();
    while next.call(&format!("alloc {}", 3 * GIB)) == "err 2" {
        assert!(begun.elapsed() < BALLOON_LIMIT, "not proven free");
        fixture.touch();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(fixture.balloons() > 0);
}
