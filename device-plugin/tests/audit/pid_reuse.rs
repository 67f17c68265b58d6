//! Tests that a program which gets the pid of an ended process is not killed for it, and adds
//! nothing to the pod's charge.

use std::fs;

use bursar_sim_lab::DriverClient;
use rustix::process::{Pid, Signal, kill_process};

use crate::container::{Container, PLAIN, machine};
use crate::findings::{metric_value, wait_for_metric, wait_for_value};
use crate::machine::Machine;

const GIB: u64 = 1 << 30;
/// The most tries to get a pid, because other programs of the machine start processes as well.
const MAX_TRIES: usize = 500;
/// The audits until a finding is killed.
const KILL_AFTER: i64 = 4;

/// Ends the container's process, and starts another program of the host under its pid.
fn replace(machine: &Machine, old: Container) -> DriverClient {
    let pid = old.pid();
    drop(old);
    machine.remove_process(pid);
    let newcomer = (0..MAX_TRIES).find_map(|_| {
        // The kernel gives the next process the next free pid.
        fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string()).unwrap();
        let newcomer = machine.lab.spawn_client().unwrap();
        (newcomer.pid() == pid).then_some(newcomer)
    });
    let mut newcomer = newcomer.expect("the pid is taken");
    machine.show(pid, "0::/system.slice/other.service\n");
    newcomer.request("context 0").unwrap();
    newcomer.request_number(&format!("alloc {GIB}"));
    newcomer
}

#[tokio::test]
async fn program_with_an_ended_processes_pid_is_not_killed() {
    let machine = machine(&format!("policy = \"kill\"\nkill-after = {KILL_AFTER}")).await;
    let pod = machine.admit("a", 8).await;
    let mut honest = Container::start(&machine, &pod, PLAIN).await;
    honest.ok("open libcuda.so.1");
    honest.ok(&format!("alloc {}", 5 * GIB));
    let of = r#"pod="a",container="main",account="GPU-"#;
    let used = "bursar_container_memory_used_bytes";
    wait_for_metric(&machine, used, of, |used| used >= (5 * GIB) as i64).await;
    let before = metric_value(&machine, used, of).await.unwrap();
    let mut bypass = Container::start(&machine, &pod, PLAIN).await;
    bypass.ok("open /opt/bursar/drv/cuda.so.1");
    bypass.ok("alloc 4096");
    let findings = "bursar_agent_findings_total";
    wait_for_value(&machine, findings, "untracked-process", 1).await;

    // The agent learns of nothing in between.
    let agent = Pid::from_raw(machine.agent_pid().cast_signed()).unwrap();
    kill_process(agent, Signal::STOP).unwrap();
    fs::write(machine.cgroup(&pod).join("main/cgroup.procs"), "").unwrap();
    let mut newcomers = [honest, bypass].map(|old| replace(&machine, old));
    kill_process(agent, Signal::CONT).unwrap();

    let count = "bursar_agent_audit_seconds_count";
    let seen = metric_value(&machine, count, "").await.unwrap();
    wait_for_metric(&machine, count, "", |now| now > seen + KILL_AFTER).await;
    for newcomer in &mut newcomers {
        newcomer.request("context 0").unwrap();
    }
    let kills = metric_value(&machine, "bursar_agent_audit_kills_total", "").await;
    assert_eq!(kills, Some(0), "{}", machine.log());
    // The driver lists the pid with memory, which a child of the ended process could have as well.
    // So the pod stays charged for the ended process and its context, and for no more.
    wait_for_value(&machine, used, of, 0).await;
    let charged = "bursar_container_memory_charged_bytes";
    let exited = r#"pod="a" part="exited""#;
    wait_for_metric(&machine, charged, exited, |now| now <= before + GIB as i64).await;
    drop(newcomers);
    wait_for_value(&machine, charged, exited, 0).await;
    let mut next = Container::start(&machine, &pod, PLAIN).await;
    next.ok("open libcuda.so.1");
    next.ok(&format!("alloc {}", 7 * GIB));
}
