//! Tests that memory of exited processes is proven free beside managed memory, by a balloon of the
//! agent that harms no tenant.

use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, Instant};

use crate::common::assert_within;
use crate::common::kubelet::Pod;
use crate::container::{Container, PLAIN};
use crate::devices::DeviceCgroups;
use crate::honest::check_no_findings;
use crate::machine::Machine;
use crate::managed::{machine_with, start_owner, wait_for_quota};
use crate::programs::start_client;
use crate::reclaim::{ParkedProcess, park};

const GIB: u64 = 1 << 30;
/// The longest time until a balloon, of which there are two in about 40 s at first.
pub(crate) const BALLOON_LIMIT: Duration = Duration::from_secs(120);
/// The longest time that a grant waits for a balloon.
const GRANT_LIMIT: Duration = Duration::from_secs(5);

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
    let built = bursar_sim_lab::build(&["bursar-provisioner"], &["--bins"]);
    let program = built.unwrap().join("bursar-provisioner");
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

/// A pod whose managed memory fills a GPU, and one whose program exited and left exports, which a
/// process holds.
pub(crate) struct Fixture {
    pub(crate) machine: Machine,
    pub(crate) owner: Container,
    owner_pod: Pod,
    /// The address of the owner's managed memory.
    pub(crate) managed: u64,
    pub(crate) exporter: Pod,
    pub(crate) parked: Option<ParkedProcess>,
    /// The last field: the cgroups are removed after their processes have ended.
    pub(crate) devices: DeviceCgroups,
}

impl Fixture {
    /// Starts an exporter with a quota of `gib` GiB that exported `bytes`.
    pub(crate) async fn new(gib: usize, bytes: u64) -> Fixture {
        let machine = machine_with(prepare).await;
        let mut devices = DeviceCgroups::v1(&machine);
        let (owner_pod, mut owner) = start_owner(&machine, &mut devices, 64).await;
        let managed = owner.number(&format!("managed {}", 64 * GIB));
        let exporter = machine.admit("exporter", gib).await;
        let mut program = Container::start(&machine, &exporter, PLAIN).await;
        program.ok("open libcuda.so.1");
        program.ok(&format!("export {bytes}"));
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
    pub(crate) fn touch(&mut self) {
        self.owner
            .ok(&format!("touch {} {}", self.managed, 16 * GIB));
    }

    /// Gives the owner's pod host memory for all of its managed memory.
    pub(crate) fn permit_balloons(&self) {
        set_host_memory(&self.machine, &self.owner_pod, 65 * GIB, GIB);
    }

    /// The number of balloons that were held to the end.
    pub(crate) fn balloons(&self) -> usize {
        self.machine.log().matches("balloon held").count()
    }

    /// Whether the agent has a process for a balloon.
    fn has_balloon(&self) -> bool {
        let agent = self.machine.agent_pid();
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        processes.map(|process| process.path()).any(|process| {
            let words = std::fs::read(process.join("cmdline")).unwrap_or_default();
            let is_balloon = words
                .split(|byte| *byte == 0)
                .any(|word| word == b"balloon");
            let status = std::fs::read_to_string(process.join("status")).unwrap_or_default();
            is_balloon && status.contains(&format!("\nPPid:\t{agent}\n"))
        })
    }

    async fn wait_for_balloon(&self) {
        let start = Instant::now();
        while !self.has_balloon() {
            assert!(start.elapsed() < BALLOON_LIMIT, "no balloon");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

#[tokio::test]
async fn memory_is_proven_free_beside_managed_memory_once_released() {
    let mut fixture = Fixture::new(8, 6 * GIB).await;
    fixture.permit_balloons();
    let neighbour_pod = fixture.machine.admit("neighbour", 4).await;
    let mut neighbour = start_client(&fixture.machine, &mut fixture.devices, &neighbour_pod).await;
    let quota = wait_for_quota(&mut neighbour, 4).await;
    let mut next = Container::start(&fixture.machine, &fixture.exporter, PLAIN).await;
    next.ok("open libcuda.so.1");
    let (mut rounds, mut longest) = (0, Duration::ZERO);
    let mut run_round = |fixture: &mut Fixture| {
        fixture.touch();
        let start = Instant::now();
        let pointer = neighbour.number(&format!("alloc {quota}"));
        longest = longest.max(start.elapsed());
        neighbour.ok(&format!("free {pointer}"));
        rounds += 1;
    };
    let start = Instant::now();
    while fixture.balloons() == 0 {
        assert!(start.elapsed() < BALLOON_LIMIT, "no balloon");
        run_round(&mut fixture);
        assert_eq!(next.call(&format!("alloc {}", 3 * GIB)), "err 2");
    }
    for _ in 0..10 {
        run_round(&mut fixture);
        let refused = next.call(&format!("alloc {}", 3 * GIB));
        assert_eq!(refused, "err 2", "a descriptor holds the memory");
    }
    let start = Instant::now();
    fixture.parked = None;
    while next.call(&format!("alloc {}", 3 * GIB)) == "err 2" {
        assert!(start.elapsed() < BALLOON_LIMIT, "not proven free");
        run_round(&mut fixture);
    }
    println!(
        "free after {:?}; {rounds} rounds, the longest {longest:?}",
        start.elapsed()
    );
    check_no_findings(&fixture.machine).await;
}

#[tokio::test]
async fn managed_memory_stays_while_its_owner_lacks_host_memory() {
    let mut fixture = Fixture::new(8, 6 * GIB).await;
    fixture.parked = None;
    set_host_memory(&fixture.machine, &fixture.owner_pod, 8 * GIB, GIB);
    let mut next = Container::start(&fixture.machine, &fixture.exporter, PLAIN).await;
    next.ok("open libcuda.so.1");
    let start = Instant::now();
    // A balloon is due after five seconds.
    while start.elapsed() < Duration::from_secs(10) {
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
    fixture.permit_balloons();
    let start = Instant::now();
    while next.call(&format!("alloc {}", 3 * GIB)) == "err 2" {
        assert!(start.elapsed() < BALLOON_LIMIT, "not proven free");
        fixture.touch();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(fixture.balloons() > 0);
}

/// A fixture whose exports no process holds any more, a neighbour, and its quota. Evictions take
/// this many milliseconds a GiB, and no balloon is permitted yet.
async fn start_neighbour(delay: &str) -> (Fixture, Container, u64) {
    let mut fixture = Fixture::new(8, 6 * GIB).await;
    let neighbour_pod = fixture.machine.admit("neighbour", 7).await;
    let mut neighbour = start_client(&fixture.machine, &mut fixture.devices, &neighbour_pod).await;
    let quota = wait_for_quota(&mut neighbour, 7).await;
    fixture.parked = None;
    let set = fixture.machine.lab.run_simgpu(&["uvm", "delay", delay]);
    set.unwrap();
    (fixture, neighbour, quota)
}

/// A request for a grant would wait until the balloon ends.
#[tokio::test]
async fn tenant_has_all_its_credit_while_a_balloon_is_held() {
    let (mut fixture, mut neighbour, quota) = start_neighbour("30").await;
    let mut pointer = neighbour.number(&format!("alloc {quota}"));
    fixture.permit_balloons();
    fixture.wait_for_balloon().await;
    let mut rounds = 0;
    loop {
        neighbour.ok(&format!("free {pointer}"));
        let part = format!("touch {} {GIB}", fixture.managed);
        fixture.owner.ok(&part);
        pointer = neighbour.number(&format!("alloc {quota}"));
        if !fixture.has_balloon() {
            break;
        }
        rounds += 1;
    }
    println!("{rounds} rounds");
    assert!(rounds > 0, "each allocation waited for the balloon");
    check_no_findings(&fixture.machine).await;
}

#[tokio::test]
async fn grant_waits_for_a_slow_balloon_and_succeeds() {
    assert_within(GRANT_LIMIT, async || {
        let (fixture, mut neighbour, quota) = start_neighbour("200").await;
        fixture.permit_balloons();
        fixture.wait_for_balloon().await;
        let start = Instant::now();
        neighbour.ok(&format!("alloc {quota}"));
        let took = start.elapsed();
        assert!(!fixture.has_balloon(), "a grant beside a balloon");
        check_no_findings(&fixture.machine).await;
        took
    })
    .await;
}
