//! Tests memory of ended pods: it is bound to no pod while a process maps it, and is bound again
//! afterwards.

use std::time::{Duration, Instant};

use crate::common::kubelet::Pod;
use crate::container::{Container, PLAIN, machine};
use crate::findings::{count_findings, metric_value};
use crate::machine::Machine;

const GIB: u64 = 1 << 30;
/// The longest time until memory that is proven free is bound again, also on a busy machine.
const RECLAIM_LIMIT: Duration = Duration::from_secs(5);

/// A process in no container that holds a descriptor.
pub(crate) struct ParkedProcess(i32);

impl Drop for ParkedProcess {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_raw(self.0).unwrap();
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// Starts a program that exports 6 GiB in a pod of 8 GiB. The other GPU is full.
async fn start_exporter(machine: &Machine) -> (Pod, Container) {
    machine.run("full", 16).await;
    export_from(machine, "a").await
}

/// Starts a program that exports 6 GiB in a pod of 8 GiB.
pub(crate) async fn export_from(machine: &Machine, name: &str) -> (Pod, Container) {
    let pod = machine.admit(name, 8).await;
    let mut program = Container::start(machine, &pod, PLAIN).await;
    program.ok("open libcuda.so.1");
    program.ok(&format!("export {}", 6 * GIB));
    (pod, program)
}

pub(crate) fn park(program: &mut Container) -> ParkedProcess {
    let answer = program.call("park");
    ParkedProcess(answer.strip_prefix("ok ").unwrap().parse().unwrap())
}

/// Waits until this much memory of both GPUs is in a state.
pub(crate) async fn wait_for_bytes_in_state(machine: &Machine, state: &str, bytes: u64) {
    let start = Instant::now();
    while bytes_in_state(machine, state).await < bytes as i64 {
        assert!(
            start.elapsed() < Duration::from_secs(40),
            "{state} memory not reported"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    println!("{state} after {:?}", start.elapsed());
}

async fn bytes_in_state(machine: &Machine, state: &str) -> i64 {
    let mut sum = 0;
    for gpu in ["0001", "0002"] {
        let labels = format!("{gpu} state=\"{state}\"");
        sum += metric_value(machine, "bursar_gpu_memory_bytes", &labels)
            .await
            .unwrap_or(0);
    }
    sum
}

#[tokio::test]
async fn memory_held_by_an_outside_process_is_leaked_until_freed() {
    let mut machine = machine("").await;
    let (pod, mut program) = start_exporter(&machine).await;
    let parked = park(&mut program);
    drop(program);
    machine.end(&pod);
    let queued_pod = machine.admit("b", 12).await;
    let expected = "waiting for 12 GiB on one GPU: largest free 10 GiB";
    machine.until_refused(&queued_pod, expected).await;
    wait_for_bytes_in_state(&machine, "leaked", 6 * GIB).await;
    machine.restart_agent().await;
    machine.until_refused(&queued_pod, expected).await;
    std::fs::remove_file(machine.path("run/checkpoint.json")).unwrap();
    machine.restart_agent().await;
    machine.until_refused(&queued_pod, expected).await;
    assert_eq!(count_findings(&machine, "unaccounted").await, 0);
    let start = Instant::now();
    drop(parked);
    machine.until_started(&queued_pod).await;
    let took = start.elapsed();
    println!("bound {took:?} after it was freed");
    assert!(took < RECLAIM_LIMIT, "{took:?}");
}

#[tokio::test]
async fn uncharged_memory_is_withheld() {
    let mut machine = machine("").await;
    machine.run("full", 16).await;
    let pod = machine.admit("a", 8).await;
    let mut program = Container::start(&machine, &pod, PLAIN).await;
    // This call bypasses the shim, so no account contains the memory.
    program.ok("open /opt/bursar/drv/cuda.so.1");
    program.ok(&format!("export {}", 6 * GIB));
    let parked = park(&mut program);
    drop(program);
    machine.end(&pod);
    // The audit's tolerance is not withheld.
    wait_for_bytes_in_state(&machine, "withheld", 6 * GIB - (64 << 20)).await;
    let queued_pod = machine.admit("b", 12).await;
    let expected = "of the node's GPUs are in use and charged to no pod";
    machine.until_refused(&queued_pod, expected).await;
    machine.restart_agent().await;
    machine.until_refused(&queued_pod, expected).await;
    let start = Instant::now();
    drop(parked);
    machine.until_started(&queued_pod).await;
    println!("bound {:?} after it was freed", start.elapsed());
}

#[tokio::test]
async fn unshared_exports_are_bound_again_at_once() {
    let machine = machine("").await;
    let (pod, program) = start_exporter(&machine).await;
    drop(program);
    machine.end(&pod);
    let start = Instant::now();
    let next = machine.admit("b", 16).await;
    machine.until_started(&next).await;
    println!("bound after {:?}", start.elapsed());
    assert!(start.elapsed() < RECLAIM_LIMIT, "{:?}", start.elapsed());
}

#[tokio::test]
async fn orphaned_exports_are_granted_in_the_pod_once_unmapped() {
    let machine = machine("").await;
    let (pod, mut program) = start_exporter(&machine).await;
    let parked = park(&mut program);
    drop(program);
    let mut other = Container::start(&machine, &pod, PLAIN).await;
    other.ok("open libcuda.so.1");
    for _ in 0..10 {
        assert_eq!(other.call(&format!("alloc {}", 3 * GIB)), "err 2");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert_eq!(count_findings(&machine, "unaccounted").await, 0);
    let start = Instant::now();
    drop(parked);
    while other.call(&format!("alloc {}", 3 * GIB)) == "err 2" {
        assert!(start.elapsed() < RECLAIM_LIMIT, "{:?}", start.elapsed());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    println!("free for another after {:?}", start.elapsed());
    assert!(start.elapsed() < RECLAIM_LIMIT, "{:?}", start.elapsed());
}

#[tokio::test]
async fn export_denied_before_exit_stays_charged() {
    let machine = machine("").await;
    let (pod, mut program) = start_exporter(&machine).await;
    let parked = park(&mut program);
    program.ok("tell 0");
    drop(program);
    let mut other = Container::start(&machine, &pod, PLAIN).await;
    other.ok("open libcuda.so.1");
    for _ in 0..10 {
        assert_eq!(other.call(&format!("alloc {}", 3 * GIB)), "err 2");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert_eq!(count_findings(&machine, "unaccounted").await, 0);
    drop(parked);
    let start = Instant::now();
    while other.call(&format!("alloc {}", 3 * GIB)) == "err 2" {
        assert!(start.elapsed() < RECLAIM_LIMIT, "{:?}", start.elapsed());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
