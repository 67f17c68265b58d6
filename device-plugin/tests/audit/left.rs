//! What a pod leaves to others: bound to nobody while they hold it, and bound again once they do not.

use std::time::{Duration, Instant};

use crate::common::kubelet::Pod;
use crate::container::{Container, PLAIN, machine};
use crate::found::{findings, value};
use crate::machine::Machine;

const GIB: u64 = 1 << 30;
/// What is proven free is bound again after at most this long, on a busy machine too.
const SOON: Duration = Duration::from_secs(5);

/// A process that has a descriptor, in no container.
struct Parked(i32);

impl Drop for Parked {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_raw(self.0).unwrap();
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// The other GPU is full; a pod of 8 GiB has a program that exports 6.
async fn exporter(machine: &Machine) -> (Pod, Container) {
    machine.run("full", 16).await;
    let pod = machine.admit("a", 8).await;
    let mut program = Container::start(machine, &pod, PLAIN).await;
    program.ok("open libcuda.so.1");
    program.ok(&format!("export {}", 6 * GIB));
    (pod, program)
}

fn park(program: &mut Container) -> Parked {
    let answer = program.call("park");
    Parked(answer.strip_prefix("ok ").unwrap().parse().unwrap())
}

/// Waits until so much of both GPUs is in a state.
async fn until_in_state(machine: &Machine, state: &str, bytes: u64) {
    let begun = Instant::now();
    while in_state(machine, state).await < bytes as i64 {
        assert!(begun.elapsed() < Duration::from_secs(40), "not told");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    println!("{state} after {:?}", begun.elapsed());
}

async fn in_state(machine: &Machine, state: &str) -> i64 {
    let mut sum = 0;
    for gpu in ["0001", "0002"] {
        let labels = format!("{gpu} state=\"{state}\"");
        sum += value(machine, "bursar_gpu_memory_bytes", &labels)
            .await
            .unwrap_or(0);
    }
    sum
}

#[tokio::test]
async fn memory_that_a_process_outside_of_the_ended_pod_holds_is_leaked_until_it_lets_go() {
    let mut machine = machine("").await;
    let (pod, mut program) = exporter(&machine).await;
    let parked = park(&mut program);
    drop(program);
    machine.end(&pod);
    let waiter = machine.admit("b", 12).await;
    let expected = "waiting for 12 GiB on one GPU: largest free 10 GiB";
    machine.until_refused(&waiter, expected).await;
    until_in_state(&machine, "leaked", 6 * GIB).await;
    machine.restart_agent().await;
    machine.until_refused(&waiter, expected).await;
    std::fs::remove_file(machine.path("run/checkpoint.json")).unwrap();
    machine.restart_agent().await;
    machine.until_refused(&waiter, expected).await;
    assert_eq!(findings(&machine, "unaccounted").await, 0);
    let begun = Instant::now();
    drop(parked);
    machine.until_started(&waiter).await;
    let took = begun.elapsed();
    println!("bound {took:?} after it was let go");
    assert!(took < SOON, "{took:?}");
}

#[tokio::test]
async fn what_is_charged_to_nobody_is_promised_to_nobody() {
    let mut machine = machine("").await;
    machine.run("full", 16).await;
    let pod = machine.admit("a", 8).await;
    let mut program = Container::start(&machine, &pod, PLAIN).await;
    // Past the shim: no ledger knows of it.
    program.ok("open /opt/bursar/drv/cuda.so.1");
    program.ok(&format!("export {}", 6 * GIB));
    let parked = park(&mut program);
    drop(program);
    machine.end(&pod);
    // All but the tolerance.
    until_in_state(&machine, "withheld", 6 * GIB - (64 << 20)).await;
    let waiter = machine.admit("b", 12).await;
    let expected = "of the node's GPUs are in use and charged to no pod";
    machine.until_refused(&waiter, expected).await;
    machine.restart_agent().await;
    machine.until_refused(&waiter, expected).await;
    let begun = Instant::now();
    drop(parked);
    machine.until_started(&waiter).await;
    println!("bound {:?} after it was let go", begun.elapsed());
}

#[tokio::test]
async fn what_an_exporter_left_with_nobody_is_bound_again_at_once() {
    let machine = machine("").await;
    let (pod, program) = exporter(&machine).await;
    drop(program);
    machine.end(&pod);
    let begun = Instant::now();
    let next = machine.admit("b", 16).await;
    machine.until_started(&next).await;
    println!("bound after {:?}", begun.elapsed());
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn in_its_pod_what_a_dead_exporter_left_is_anothers_once_nobody_holds_it() {
    let machine = machine("").await;
    let (pod, mut program) = exporter(&machine).await;
    let parked = park(&mut program);
    drop(program);
    let mut other = Container::start(&machine, &pod, PLAIN).await;
    other.ok("open libcuda.so.1");
    for _ in 0..10 {
        assert_eq!(other.call(&format!("alloc {}", 3 * GIB)), "err 2");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert_eq!(findings(&machine, "unaccounted").await, 0);
    let begun = Instant::now();
    drop(parked);
    while other.call(&format!("alloc {}", 3 * GIB)) == "err 2" {
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    println!("free for another after {:?}", begun.elapsed());
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn what_an_exporter_unsays_before_its_death_stays_charged() {
    let machine = machine("").await;
    let (pod, mut program) = exporter(&machine).await;
    let parked = park(&mut program);
    program.ok("tell 0");
    drop(program);
    let mut other = Container::start(&machine, &pod, PLAIN).await;
    other.ok("open libcuda.so.1");
    for _ in 0..10 {
        assert_eq!(other.call(&format!("alloc {}", 3 * GIB)), "err 2");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert_eq!(findings(&machine, "unaccounted").await, 0);
    drop(parked);
    let begun = Instant::now();
    while other.call(&format!("alloc {}", 3 * GIB)) == "err 2" {
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
