//! Tests that honest programs cause no finding, whenever they exit and whatever the audit does
//! meanwhile.

use crate::common::kubelet::Pod;
use crate::container::{Container, PLAIN, machine};
use crate::devices::DeviceCgroups;
use crate::findings::{count_findings, metric_value};
use crate::machine::Machine;
use crate::managed::count_audits;

const GIB: u64 = 1 << 30;

/// Checks that there is no finding of any kind and no kill.
pub(crate) async fn check_no_findings(machine: &Machine) {
    for kind in [
        "over-quota",
        "untracked-process",
        "tampered-page",
        "holder",
        "over-managed",
        "unaccounted",
    ] {
        assert_eq!(count_findings(machine, kind).await, 0, "{kind}");
    }
    let kills = metric_value(machine, "bursar_agent_audit_kills_total", "").await;
    assert_eq!(kills, Some(0));
}

/// Starts a process of another pod whose `/proc` files cannot be read. Each audit waits for
/// attestation's timeout between the driver's list and the sessions' accounts.
async fn start_unreadable_process(machine: &Machine) -> (Pod, Container) {
    let pod = machine.admit("slow", 1).await;
    let container = Container::start(machine, &pod, PLAIN).await;
    let maps = machine.path(&format!("proc/{}/maps", container.pid()));
    std::fs::remove_file(&maps).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, &maps, 0o600.into()).unwrap();
    (pod, container)
}

async fn run_crash_loops(loops: u32) {
    let machine = machine("policy = \"kill\"\nkill-after = 1").await;
    let _slow = start_unreadable_process(&machine).await;
    let mut devices = DeviceCgroups::v1(&machine);
    let pod = machine.admit("a", 8).await;
    let mut program = Container::as_root(&machine, &pod, "").await;
    devices.add_container(&machine, &pod, &program);
    let before = count_audits(&machine).await;
    for number in 0..loops {
        // These range from a program that exits at once to one that outlives an audit's timeout.
        let milliseconds = [0, 20, 60, 150, 300][number as usize % 5];
        let child = program.number(&format!("child {} {milliseconds}", 8 * GIB)) as u32;
        machine.adopt(&pod, child);
        program.ok("crash");
        machine.remove_process(child);
    }
    check_no_findings(&machine).await;
    let audits = count_audits(&machine).await - before;
    println!("{loops} crash loops, {audits} audits");
    // A loop takes a tenth of a second and more.
    assert!(audits >= i64::from(loops) / 20, "the audits hang: {audits}");
}

#[tokio::test]
async fn crash_looping_program_causes_no_finding() {
    run_crash_loops(60).await;
}

#[tokio::test]
#[ignore = "ten minutes"]
async fn program_crashing_a_thousand_times_causes_no_finding() {
    run_crash_loops(1_000).await;
}
