//! Tests programs whose kernels fault: they are fenced, executed again, or handed their error.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod support;

use std::time::{Duration, Instant};

use bursar_crds::context_policy::ContextAction;
use bursar_sessions::RecoveryPolicy;
use support::{Client, Container, MIB};

const QUOTA: u64 = 256 * MIB;

fn container(action: ContextAction) -> Container {
    let container = Container::with_quota(QUOTA);
    container.set_policy(RecoveryPolicy::new(action, 100, 600, 0));
    container
}

/// Launches a kernel that faults, which the launch itself does not report.
fn fault(program: &mut Client, kernel: &str) {
    let function = program.ok(format!("function {kernel}"))[0];
    program.ok(format!("launch {function}"));
}

/// The kernels that fault, and the code that every later call returns.
const FAULTS: [(&str, &str); 4] = [
    ("fault", "err 700"),
    ("trap", "err 719"),
    ("misaligned", "err 716"),
    ("assertion", "err 710"),
];

#[test]
fn main_process_is_reexecuted_under_policy_in_place() {
    let container = container(ContextAction::InPlace);
    let mut program = container.main_program();
    for (round, (kernel, _)) in FAULTS.iter().cycle().take(8).enumerate() {
        program.ok(format!("alloc {QUOTA}"));
        fault(&mut program, kernel);
        let start = Instant::now();
        assert_eq!(program.call("sync 0"), "ready", "{kernel}");
        println!("{kernel}: {:?}", start.elapsed());
        let usage = &container.container_usage()[0];
        assert_eq!(usage.generation, round as u64 + 2);
        assert_eq!(usage.processes.len(), 1, "it is the same process");
        assert!(container.faults().is_empty(), "{:?}", container.faults());
    }
    // The memory of eight images was discharged once each.
    container.wait_for("nothing is charged", |usage| {
        usage.granted.0 == 0 && usage.exited.0 == 0
    });
    program.ok(format!("alloc {QUOTA}"));
}

#[test]
fn sticky_error_is_seen_by_every_call_that_reports_it() {
    let container = container(ContextAction::InPlace);
    let mut program = container.main_program();
    for call in [
        "sync 0",
        "streamquery",
        "eventquery",
        "copy POINTER",
        "alloc 4096",
        "asyncalloc 4096 0",
        "free POINTER",
        "launch KERNEL",
        "launchex KERNEL",
        "cooperative KERNEL",
        "launchgraph GRAPH",
        "newstream",
        "load",
        "hostmemory",
    ] {
        let pointer = program.ok("alloc 4096")[0].to_string();
        let kernel = program.ok("function fault")[0].to_string();
        let graph = program.ok("graph 0")[0];
        let graph = program.ok(format!("instantiate {graph}"))[0].to_string();
        program.ok(format!("launch {kernel}"));
        let call = call
            .replace("POINTER", &pointer)
            .replace("KERNEL", &kernel)
            .replace("GRAPH", &graph);
        assert_eq!(program.call(&call), "ready", "{call}");
    }
}

#[test]
fn reexecuted_image_equals_the_containers_start() {
    let container = container(ContextAction::InPlace);
    let mut program = container.main_program();
    // The test's own shell leaves descriptors open to the program.
    let split = |image: String| {
        let (before, rest) = image.split_once(" fds [").unwrap();
        let (descriptors, after) = rest.split_once(']').unwrap();
        (format!("{before}{after}"), descriptors.to_owned())
    };
    let (before, _) = split(program.call("image"));
    assert_eq!(program.call("disturb"), "ok");
    assert_ne!(split(program.call("image")).0, before, "it was disturbed");
    fault(&mut program, "fault");
    assert_eq!(program.call("sync 0"), "ready");
    let after = (before, "0, 1, 2".to_owned());
    assert_eq!(split(program.call("image")), after);
}

#[test]
fn no_thread_gets_its_error_before_the_agents_decision() {
    let mut container = container(ContextAction::InPlace);
    let mut program = container.main_program();
    container.stop_agent();
    program.send("faultthreads 8");
    std::thread::sleep(Duration::from_millis(300));
    container.start_agent();
    assert_eq!(program.read(), "ready");
}

#[test]
fn replaced_standard_descriptors_end_with_their_image() {
    let container = container(ContextAction::InPlace);
    let mut program = container.main_program();
    assert_eq!(program.call("replace"), "ok");
    assert!(program.call("image").contains("stderr /dev/zero "));
    fault(&mut program, "fault");
    assert_eq!(program.call("sync 0"), "ready");
    assert!(program.call("image").contains("stderr /dev/null "));
}

#[test]
fn reexec_works_from_a_second_thread_beside_children() {
    let container = container(ContextAction::InPlace);
    let mut program = container.main_program();
    // Their sleep time tells them from all other processes.
    let seconds = format!("86{:05}", std::process::id() % 100_000);
    program.ok(format!("children 5 {seconds}"));
    let alive = || {
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let lines = processes.map(|process| std::fs::read(process.path().join("cmdline")));
        let of_shells = format!("sleep {seconds};");
        lines
            .flatten()
            .filter(|line| String::from_utf8_lossy(line).contains(&of_shells))
            .count()
    };
    // Each is a copy of its parent for a moment.
    let start = Instant::now();
    while alive() != 5 {
        assert!(start.elapsed() < Duration::from_secs(5), "{}", alive());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(program.call("faultthreads 8"), "ready");
    assert_eq!(alive(), 0);
    assert_eq!(container.container_usage()[0].generation, 2);
}

#[test]
fn slow_new_image_is_not_killed_before_it_calls_cuda() {
    let container = container(ContextAction::InPlace);
    let mut program = container.main_program();
    std::fs::write(container.busy(), "").unwrap();
    fault(&mut program, "fault");
    assert_eq!(program.call("sync 0"), "busy");
    let start = Instant::now();
    while !container.faults().iter().all(|fault| fault.executed) {
        assert!(start.elapsed() < Duration::from_secs(5));
        std::thread::sleep(Duration::from_millis(10));
    }
    container.overdue(Duration::from_secs(3600));
    assert_eq!(container.condemned(), []);
    std::fs::remove_file(container.busy()).unwrap();
    assert_eq!(program.read(), "ready");
    assert!(container.faults().is_empty(), "{:?}", container.faults());
}

#[test]
fn program_gets_its_error_under_policy_restart() {
    let container = container(ContextAction::Restart);
    let mut program = container.main_program();
    fault(&mut program, "fault");
    assert_eq!(program.call("sync 0"), "err 700");
    assert_eq!(container.condemned().len(), 1);
    let [fault] = &container.faults()[..] else {
        panic!()
    };
    assert_eq!((fault.cuda_error, fault.image.generation), (Some(700), 1));
    // The shim's own queries return the driver's error.
    assert_eq!(program.call(format!("alloc {QUOTA}")), "err 700");
    program.kill();
    container.wait_for("the image ended", |usage| usage.processes == 0);
    assert!(container.faults().is_empty() && container.condemned().is_empty());
}

#[test]
fn poisoned_image_gets_its_code_from_every_faulting_kernel() {
    for (kernel, code) in FAULTS {
        let container = container(ContextAction::Report);
        let mut program = container.program();
        fault(&mut program, kernel);
        assert_eq!(program.call("sync 0"), code, "{kernel}");
        assert_eq!(program.call("sync 0"), code, "{kernel}");
        assert_eq!(container.faults().len(), 1);
        assert_eq!(container.condemned().len(), 0);
    }
}

#[test]
fn image_fenced_by_an_xid_gets_its_code_when_memory_is_denied() {
    let container = container(ContextAction::Report);
    let mut program = container.program();
    fault(&mut program, "fault");
    container.xid(&program, 31);
    assert_eq!(program.call(format!("alloc {QUOTA}")), "err 700");
    assert_eq!(container.faults()[0].cuda_error, Some(700));
    // A denial by the quota alone stays a denial.
    let mut other = container.program();
    assert_eq!(other.call(format!("alloc {}", 2 * QUOTA)), "err 2");
}

#[test]
fn process_other_than_the_main_one_is_never_reexecuted() {
    let container = container(ContextAction::InPlace);
    let mut program = container.program();
    fault(&mut program, "fault");
    assert_eq!(program.call("sync 0"), "err 700");
    assert_eq!(container.condemned().len(), 1);
}

#[test]
fn reexec_stops_at_the_maximum() {
    let container = Container::with_quota(QUOTA);
    container.set_policy(RecoveryPolicy::new(ContextAction::InPlace, 2, 600, 0));
    let mut program = container.main_program();
    for _ in 0..2 {
        fault(&mut program, "fault");
        assert_eq!(program.call("sync 0"), "ready");
    }
    fault(&mut program, "fault");
    assert_eq!(program.call("sync 0"), "err 700");
    assert_eq!(container.condemned().len(), 1);
    program.kill();
    container.wait_for("the image ended", |usage| usage.processes == 0);
    assert_eq!(container.faults().len(), 1, "for who decides about the pod");
}

#[test]
fn poison_report_waits_for_a_restarting_agent() {
    let mut container = container(ContextAction::InPlace);
    let mut program = container.main_program();
    container.stop_agent();
    fault(&mut program, "fault");
    program.send("sync 0");
    std::thread::sleep(Duration::from_millis(300));
    container.start_agent();
    assert_eq!(program.read(), "ready");
    container.stop_agent();
    fault(&mut program, "fault");
    let start = Instant::now();
    assert_eq!(program.call("sync 0"), "err 700");
    assert!(start.elapsed() < Duration::from_secs(15));
}
