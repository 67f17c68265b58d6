//! Tests that the agent reads a bounded amount of processes with huge mappings, environments and
//! paths.

use std::time::{Duration, Instant};

use crate::container::{Container, PLAIN, machine};
use crate::findings::{count_findings, metric_value, wait_until_not_enforced};
use crate::machine::Machine;

const GIB: u64 = 1 << 30;
/// The most by which the agent's resident memory may grow, in KiB.
const MAX_GROWTH_KIB: u64 = 64 << 10;

/// The agent's resident memory in KiB, now or at its peak.
fn resident_kib(machine: &Machine, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", machine.agent_pid()));
    let status = status.unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let number = line.unwrap().trim().trim_end_matches(" kB");
    number.trim().parse().unwrap()
}

/// The times of a program's requests while `during` lasts, sorted.
async fn time_requests(program: &mut Container, during: Duration) -> Vec<Duration> {
    let (start, mut took) = (Instant::now(), Vec::new());
    while start.elapsed() < during {
        let sent_at = Instant::now();
        assert_eq!(program.call(&format!("alloc {}", 9 * GIB)), "err 2");
        took.push(sent_at.elapsed());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    took.sort();
    took
}

#[tokio::test]
async fn attestation_memory_is_bounded_for_huge_processes() {
    let machine = machine("").await;
    let neighbour = machine.admit("neighbour", 8).await;
    let mut honest = Container::start(&machine, &neighbour, PLAIN).await;
    honest.ok("open libcuda.so.1");
    let mut hostile = Vec::new();
    for name in ["a", "b", "c"] {
        let pod = machine.admit(name, 4).await;
        let mut container = Container::start(&machine, &pod, PLAIN).await;
        let folders = format!("/{}", "d".repeat(200)).repeat(16);
        let path = format!("/proc/{}/root{folders}", container.pid());
        std::fs::create_dir_all(path).unwrap();
        container.ok("environ 100");
        hostile.push((container, folders));
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    let before = resident_kib(&machine, "VmRSS:");
    for (container, folders) in &mut hostile {
        // The program reads words of up to 511 characters, so links shorten the path.
        let link = format!("/proc/{}/root/l", container.pid());
        std::os::unix::fs::symlink(&folders[1..], link).unwrap();
        container.ok("map 65000 /l/libcuda.so.1");
    }
    let start = Instant::now();
    wait_until_not_enforced(&machine, "NotAttested").await;
    println!("reported after {:?}", start.elapsed());
    let took = time_requests(&mut honest, Duration::from_secs(20)).await;
    let at = |part: usize| took[(took.len() - 1) * part / 100];
    println!(
        "a neighbour's requests: {} median {:?} p99 {:?}",
        took.len(),
        at(50),
        at(99)
    );
    let (now, most) = (
        resident_kib(&machine, "VmRSS:"),
        resident_kib(&machine, "VmHWM:"),
    );
    println!("resident: {before} KiB before, {now} now, {most} at most");
    assert!(most < before + MAX_GROWTH_KIB, "{before} {most}");
    assert!(at(99) < Duration::from_millis(100), "{:?}", at(99));
    assert_eq!(count_findings(&machine, "untracked-process").await, 0);
    let count = metric_value(&machine, "bursar_agent_audit_seconds_count", "").await;
    println!("{count:?} audits");
    let labels = "pod=\"neighbour\" reason=\"\"";
    let neighbour = metric_value(&machine, "bursar_container_enforced", labels).await;
    assert_eq!(neighbour, Some(1));
}
