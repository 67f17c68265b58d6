//! Tests what NVML reports to programs in containers, over the simulated driver and real sessions.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod support;

use std::time::{Duration, Instant};

use support::{MIB, Node};

const GIB: u64 = 1 << 30;

/// `nvmlReturn_t`.
const INSUFFICIENT_SIZE: u64 = 7;
const UNKNOWN: u64 = 999;

#[test]
fn memory_info_equals_the_quota_and_usage_of_cuda() {
    let node = Node::with_quotas(&[4 * GIB]);
    let mut program = node.program(0);
    program.ok("init");
    assert_eq!(program.ok("memory"), [4 * GIB, 4 * GIB, 0]);
    program.ok("start");
    let before = program.fresh("memory")[2];
    program.ok(format!("alloc {}", 300 * MIB));
    let [total, free] = program.ok("info")[..] else {
        panic!("two numbers");
    };
    assert_eq!(program.fresh("memory"), [total, free, total - free]);
    assert_eq!((total, total - free), (4 * GIB, before + 300 * MIB));
    let version_2 = 40 | 2 << 24;
    let memory = program.ok(format!("memory2 {version_2}"));
    assert_eq!(
        memory,
        [total, free, total - free, 0],
        "nothing is reserved"
    );
}

#[test]
fn null_outputs_of_both_shims_get_the_drivers_codes() {
    let node = Node::with_quotas(&[4 * GIB]);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../e2e/gpu/nulls.py");
    let mut program = node.foreign_program(0, script);
    let rows: Vec<_> =
        std::iter::from_fn(|| Some(program.read()).filter(|row| row != "end" && !row.is_empty()))
            .collect();
    assert!(rows.len() > 90, "{rows:?}");
    for row in &rows {
        let words: Vec<_> = row.split(' ').collect();
        let [function, _, code, expected] = words[..] else {
            panic!("{row}");
        };
        // The shim reports accounting as disabled. The simulated driver lacks some functions.
        let is_exempt = function.starts_with("nvmlDeviceGetAccounting") && code == "3"
            || expected == "crash"
            || ["absent", "801", "13"].contains(&code);
        assert!(is_exempt || code == expected, "{row}");
    }
}

#[test]
fn structure_of_another_version_is_refused() {
    let node = Node::with_quotas(&[GIB]);
    let mut program = node.program(0);
    program.ok("init");
    for version in [0, 2, 40 | 1 << 24, 48 | 3 << 24] {
        assert_eq!(program.call(format!("memory2 {version}")), "err 25");
    }
}

#[test]
fn process_list_has_the_containers_pids_and_charged_bytes() {
    let node = Node::with_quotas(&[4 * GIB]);
    let mut program = node.program(0);
    program.ok("init");
    assert_eq!(program.ok("pid"), [1], "it has a pid namespace of its own");
    assert_eq!(program.ok("list Compute 3 4"), [0], "it has no memory yet");
    program.ok("start");
    program.ok(format!("alloc {}", 300 * MIB));
    let used = program.fresh("memory")[2];
    assert!(used >= 300 * MIB);
    for version in [1, 2, 3] {
        assert_eq!(
            program.ok(format!("list Compute {version} 4")),
            [1, 1, used]
        );
        assert_eq!(
            program.ok(format!("list Compute {version} 1")),
            [1, 1, used]
        );
        let small = format!("err {INSUFFICIENT_SIZE} 1");
        assert_eq!(program.call(format!("list Compute {version} 0")), small);
        assert_eq!(program.ok(format!("list Graphics {version} 4")), [0]);
        assert_eq!(program.ok(format!("list MPSCompute {version} 4")), [0]);
    }
    let [compute, graphics, mps, all] = [0, 1, 2, 3];
    for mode in [compute, all] {
        assert_eq!(program.ok(format!("details {mode} 4")), [1, 1, used]);
        let small = format!("err {INSUFFICIENT_SIZE} 1");
        assert_eq!(program.call(format!("details {mode} 0")), small);
    }
    for mode in [graphics, mps] {
        assert_eq!(program.ok(format!("details {mode} 4")), [0]);
    }
    assert_eq!(
        program.call("details 4 4"),
        "err 2 4",
        "the driver's own answer"
    );
}

#[test]
fn containers_on_one_gpu_do_not_list_each_other() {
    let node = Node::with_quotas(&[4 * GIB, 2 * GIB]);
    // In the host's pid namespace the driver lists every process.
    let (mut one, mut other) = (
        node.program_among_the_hosts(0),
        node.program_among_the_hosts(1),
    );
    for (program, mib) in [(&mut one, 100), (&mut other, 200)] {
        program.ok("init");
        program.ok("start");
        program.ok(format!("alloc {}", mib * MIB));
    }
    for (program, quota, mib) in [(&mut one, 4 * GIB, 100), (&mut other, 2 * GIB, 200)] {
        let pid = program.ok("pid")[0];
        let memory = program.fresh("memory");
        let used = memory[2];
        assert_eq!(memory[0], quota);
        assert!((mib * MIB..(mib + 600) * MIB).contains(&used), "{used}");
        assert_eq!(program.ok("list Compute 3 9"), [1, pid, used]);
        assert_eq!(program.ok("details 3 9"), [1, pid, used]);
        assert_eq!(program.ok("busy 9"), [1, pid]);
        assert_eq!(program.ok("busy1 9"), [1, pid]);
    }
}

#[test]
fn processes_of_one_container_list_each_other() {
    let node = Node::with_quotas(&[4 * GIB]);
    let (mut program, mut sibling) = (
        node.program_among_the_hosts(0),
        node.program_among_the_hosts(0),
    );
    for each in [&mut program, &mut sibling] {
        each.ok("init");
        each.ok("start");
        each.ok(format!("alloc {}", 100 * MIB));
    }
    let mut pids = [program.ok("pid")[0], sibling.ok("pid")[0]];
    pids.sort_unstable();
    let used = program.fresh("memory")[2];
    let listed = program.ok("list Compute 3 9");
    assert_eq!(listed, [2, pids[0], used / 2, pids[1], used / 2]);
    let small = format!("err {INSUFFICIENT_SIZE} 2");
    assert_eq!(program.call("list Compute 3 1"), small);
    assert_eq!(program.ok("busy 9").len(), 3);
    drop(sibling);
    // The dead process's memory is discharged once the driver reports it free.
    let start = Instant::now();
    while program.fresh("memory")[2] != used / 2 {
        assert!(start.elapsed() < Duration::from_secs(5));
    }
    assert_eq!(
        program.ok("list Compute 3 9"),
        [1, program.ok("pid")[0], used / 2]
    );
}

#[test]
fn parent_gpu_of_a_mig_instance_reports_nothing() {
    let node = Node::with_quota_of_an_instance(2 * GIB);
    let mut program = node.program(0);
    program.ok("init");
    let no_permission = "err 4";
    assert_eq!(program.call("memory"), no_permission);
    assert_eq!(program.call("list Compute 3 9"), "err 4 9");
    program.ok("instance");
    assert_eq!(program.ok("memory"), [2 * GIB, 2 * GIB, 0]);
    program.ok("start");
    program.ok(format!("alloc {}", 100 * MIB));
    let used = program.fresh("memory")[2];
    assert_eq!(program.ok("list Compute 3 9"), [1, 1, used]);
}

#[test]
fn resized_quota_is_shown_with_free_memory_never_negative() {
    let node = Node::with_quotas(&[4 * GIB]);
    let mut program = node.program(0);
    program.ok("init");
    program.ok("start");
    program.ok(format!("alloc {GIB}"));
    node.resize(0, 8 * GIB);
    assert_eq!(program.fresh("memory")[0], 8 * GIB);
    node.resize(0, GIB / 2);
    assert_eq!(program.fresh("memory"), [GIB / 2, 0, GIB / 2]);
}

#[test]
fn last_answer_is_shown_while_the_agent_is_down() {
    let mut node = Node::with_quotas(&[4 * GIB]);
    let mut program = node.program(0);
    program.ok("init");
    program.ok("start");
    program.ok(format!("alloc {GIB}"));
    let before = program.fresh("memory");
    node.stop_agent();
    let start = Instant::now();
    assert_eq!(program.fresh("memory"), before);
    assert_eq!(program.ok("list Compute 3 9"), [1, 1, before[2]]);
    assert!(start.elapsed() < Duration::from_secs(1), "nothing waits");
    node.start_agent();
    node.resize(0, 3 * GIB);
    let start = Instant::now();
    while program.fresh("memory")[0] != 3 * GIB {
        assert!(
            start.elapsed() < Duration::from_secs(3),
            "never asked again"
        );
    }
}

#[test]
fn whole_card_is_never_shown_without_an_agent() {
    let mut node = Node::with_quotas(&[4 * GIB]);
    node.stop_agent();
    let mut program = node.program(0);
    program.ok("init");
    assert_eq!(program.call("memory"), format!("err {UNKNOWN}"));
    assert_eq!(program.call("list Compute 3 9"), format!("err {UNKNOWN} 9"));
    node.start_agent();
    let start = Instant::now();
    while program.call("memory").starts_with("err") {
        assert!(
            start.elapsed() < Duration::from_secs(3),
            "never asked again"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(program.ok("memory"), [4 * GIB, 4 * GIB, 0]);
}

#[test]
fn forked_child_gets_the_same_answers() {
    let node = Node::with_quotas(&[4 * GIB]);
    let mut program = node.program(0);
    program.ok("init");
    assert_eq!(program.ok("fork"), [4 * GIB, 4 * GIB, 0]);
    let memory = program.ok("memory");
    assert_eq!(program.ok("fork"), memory);
}

#[test]
fn driver_errors_are_passed_on() {
    let node = Node::with_quotas(&[4 * GIB]);
    let mut program = node.program(0);
    let uninitialized = "err 1";
    assert_eq!(program.call("memory"), uninitialized);
    assert_eq!(program.call("list Compute 3 9"), "err 1 9");
    program.ok("init");
    let missing = "err 13";
    assert_eq!(program.call("call nvmlSystemGetHicVersion"), missing);
    assert_eq!(
        program.call("encoders"),
        missing,
        "the simulated one has no encoders"
    );
    assert_eq!(
        program.call("accounting"),
        "err 3",
        "it is off in a container"
    );
    assert_eq!(program.call("error 2"), "ok Invalid Argument");
}

#[test]
fn every_call_fails_cleanly_without_a_driver() {
    let node = Node::with_quotas(&[4 * GIB]);
    let mut program = node.program_without_driver(0);
    for call in ["init", "memory", "call nvmlShutdown"] {
        assert_eq!(program.call(call), "err 12");
    }
    assert_eq!(program.call("list Compute 3 9"), "err 12 9");
    assert_eq!(program.call("error 12"), "ok NVML Shared Library Not Found");
}
