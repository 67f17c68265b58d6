//! Tests the agent's recovery of containers whose kernels fault.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::time::{Duration, Instant};

use crate::common::assert_within;
use crate::container::{Container, PLAIN, machine};
use crate::findings::{metric_value, wait_for_value};
use crate::machine::Machine;

/// The longest time until the agent acts on a reported fault.
const KILL_LIMIT: Duration = Duration::from_secs(2);
/// The time from a fault to the kill, by the default policy. The agent waits half of it for the
/// shim's report of a fault in the kernel log.
const GRACE: Duration = Duration::from_secs(10);

/// The metric that counts the agent's actions on faults.
const POISONED: &str = "bursar_agent_poisoned_contexts_total";

/// Waits until the program has ended. Returns the time since `start`.
async fn wait_until_killed(program: &mut Container, start: Instant) -> Duration {
    while program.is_alive() {
        assert!(start.elapsed() < Duration::from_secs(20), "it lives on");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    start.elapsed()
}

#[tokio::test]
async fn reported_fault_returns_the_error_and_kills_the_container() {
    assert_within(GRACE + KILL_LIMIT, async || {
        let machine = machine("").await;
        let pod = machine.admit("a", 8).await;
        let mut program = Container::start(&machine, &pod, PLAIN).await;
        program.ok("open libcuda.so.1");
        program.ok("fault");
        assert_eq!(program.call("sync"), "err 700");
        let took = wait_until_killed(&mut program, Instant::now()).await;
        assert!(took > GRACE - KILL_LIMIT, "{took:?}");
        // The fault is counted once, by the XID where the kernel's log comes before the report.
        wait_for_value(&machine, POISONED, "cause=", 1).await;
        took
    })
    .await;
}

#[tokio::test]
async fn fault_of_a_silent_program_is_found_in_the_kernel_log() {
    assert_within(GRACE + KILL_LIMIT, async || {
        let machine = machine("").await;
        let pod = machine.admit("a", 8).await;
        let neighbour = machine.admit("b", 4).await;
        let mut program = Container::start(&machine, &pod, PLAIN).await;
        let mut other = Container::start(&machine, &neighbour, PLAIN).await;
        other.ok("open libcuda.so.1");
        program.ok("open libcuda.so.1");
        let start = Instant::now();
        program.ok("fault");
        let took = wait_until_killed(&mut program, start).await;
        assert!(took > GRACE - KILL_LIMIT, "{took:?}");
        let fence = r#"cause="xid-31" action="fence""#;
        wait_for_value(&machine, POISONED, fence, 1).await;
        other.ok("alloc 4096");
        other.ok("sync");
        took
    })
    .await;
}

/// Appends a record of this facility and level to the kernel log, with a time stamp as the kernel
/// writes it.
fn log_record(machine: &Machine, facility_and_level: u32, text: &str) {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let stamp = now.tv_sec * 1_000_000 + now.tv_nsec / 1_000;
    let log = machine.lab.path().join("state/kernel-log");
    let mut log = OpenOptions::new().append(true).open(log).unwrap();
    writeln!(log, "{facility_and_level},1,{stamp},-;{text}").unwrap();
}

#[tokio::test]
async fn foreign_kernel_log_record_fences_no_process() {
    let machine = machine("").await;
    let pod = machine.admit("a", 8).await;
    let mut victim = Container::start(&machine, &pod, PLAIN).await;
    victim.ok("open libcuda.so.1");
    let pid = victim.pid();
    let xid = |gpu: &str| format!("NVRM: Xid ({gpu}): 31, pid={pid}, name=x");
    // The kernel writes such a record for a program and a file whose names the tenant chooses.
    let segfault = |name: &str, file: &str| {
        format!("{name}[6895]: segfault at 0 ip 000055 sp 00007f error 6 in {file}[1132,55+1000]")
    };
    // These are the addresses of the simulated GPUs.
    for gpu in ["PCI:0000:17:00", "PCI:0000:18:00"] {
        log_record(&machine, 6, &segfault("NVRM: Xid (PCI:", &xid(gpu)));
        log_record(&machine, 6, &segfault("python3", &xid(gpu)));
        // A program wrote this record to `/dev/kmsg`, and the kernel marks that by the facility.
        log_record(&machine, 14, &xid(gpu));
        // The record is in the driver's format, but NVML reports no such event.
        log_record(&machine, 6, &xid(gpu));
    }
    log_record(&machine, 6, &xid("PCI:0000:ff:1f"));
    tokio::time::sleep(GRACE + KILL_LIMIT).await;
    assert!(victim.is_alive());
    victim.ok("alloc 4096");
    let fence = r#"cause="xid-31" action="fence""#;
    assert_eq!(metric_value(&machine, POISONED, fence).await, None);
}
