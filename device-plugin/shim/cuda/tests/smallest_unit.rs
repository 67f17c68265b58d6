//! Tests that a fault ends its process alone: what ends, what stays, and what is free after it.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod support;

use std::process::{Child, Command};
use std::time::{Duration, Instant};

use bursar_crds::context_policy::ContextAction;
use bursar_enforcement::faults::killer::Killer;
use bursar_host::clock;
use bursar_sessions::{RecoveryAction, RecoveryPolicy};
use support::{Client, Container, MIB};

const QUOTA: u64 = 256 * MIB;

/// The wait for the end of a process on a busy machine.
const SOON: Duration = Duration::from_secs(60);

/// A container whose processes descend from a launcher that never waits for them.
struct Launched {
    container: Container,
    launcher: Child,
    /// `None` before the running agent has looked for processes to kill.
    killer: Option<Killer>,
}

impl Launched {
    fn new(grace_seconds: i32) -> Launched {
        let launcher = Command::new("sleep").arg("600").spawn().unwrap();
        let mut container = Container::with_quota(QUOTA);
        container.set_root(launcher.id());
        let policy = RecoveryPolicy::new(ContextAction::Process, 5, 600, grace_seconds);
        container.set_policy(policy);
        Launched {
            container,
            launcher,
            killer: None,
        }
    }

    /// Kills as the agent does each 200 ms.
    fn kill(&mut self) {
        let new = || Killer::new("/proc".into(), self.container.sessions());
        let killer = self.killer.get_or_insert_with(new);
        killer.kill_condemned(clock::now());
    }

    /// Kills as the agent does, until no process of a fault is left. Returns how long that took.
    fn settle(&mut self) -> Duration {
        let begin = Instant::now();
        loop {
            self.kill();
            if self.container.faults().is_empty() {
                return begin.elapsed();
            }
            let faults = self.container.faults();
            assert!(begin.elapsed() < SOON, "{faults:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn is_launcher_alive(&mut self) -> bool {
        self.launcher.try_wait().unwrap().is_none()
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }
}

/// Lets a program's kernel fault, and the program get its error.
fn fault(program: &mut Client) {
    let function = program.ok("function fault")[0];
    program.ok(format!("launch {function}"));
    assert_eq!(program.call("sync 0"), "err 700");
}

/// Whether a process runs: a zombie does not.
fn runs(pid: u64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| {
        !stat
            .rsplit(')')
            .next()
            .unwrap()
            .trim_start()
            .starts_with('Z')
    })
}

/// Waits for the end of killed processes.
fn wait_until_ended(pids: [u64; 2]) {
    let begin = Instant::now();
    while pids.into_iter().any(runs) {
        assert!(begin.elapsed() < SOON, "{pids:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A shell script goes on without its worker. So does a notebook server, with its other kernels.
#[test]
fn poisoned_process_ends_alone_under_a_parent_that_never_waits() {
    let mut launched = Launched::new(0);
    let mut sibling = launched.container.program();
    sibling.ok(format!("alloc {}", QUOTA / 2));
    let mut program = launched.container.program();
    program.ok(format!("alloc {}", QUOTA / 2));
    fault(&mut program);
    launched.settle();
    // This test is the parent: the process stays a zombie, and its memory is free.
    assert!(!runs(program.pid().into()));
    assert!(launched.is_launcher_alive());
    launched
        .container
        .wait_for("its memory is free", |usage| usage.exited.0 == 0);
    let mut replacement = launched.container.program();
    replacement.ok(format!("alloc {}", QUOTA / 2));
    // The sibling is neither fenced nor ended.
    assert_eq!(sibling.call("alloc 4096"), "err 2", "the quota is used up");
    assert_eq!(sibling.call("sync 0"), "ok");
}

/// torchrun sees the end of one rank, ends the others, and starts all of them again.
#[test]
fn ranks_of_a_launcher_have_all_memory_after_one_has_faulted() {
    let mut launched = Launched::new(0);
    let start = |container: &Container| {
        let mut rank = container.program();
        rank.ok(format!("alloc {}", QUOTA / 2));
        rank
    };
    let [mut faulty, other] = [0, 1].map(|_| start(&launched.container));
    fault(&mut faulty);
    launched.settle();
    assert!(!runs(faulty.pid().into()) && runs(other.pid().into()));
    other.kill();
    for mut rank in [0, 1].map(|_| start(&launched.container)) {
        assert_eq!(rank.call("sync 0"), "ok");
    }
    assert!(launched.is_launcher_alive());
}

/// A worker of PyTorch's loader is forked without an exec.
#[test]
fn forked_child_that_keeps_the_memory_ends_with_its_process() {
    let mut launched = Launched::new(0);
    let mut program = launched.container.program();
    program.ok(format!("alloc {QUOTA}"));
    let child = program.ok("linger 600000")[0];
    assert!(runs(child));
    fault(&mut program);
    launched.settle();
    wait_until_ended([child, program.pid().into()]);
    assert!(launched.is_launcher_alive(), "no memory is held");
    let mut replacement = launched.container.program();
    replacement.ok(format!("alloc {QUOTA}"));
}

/// A child of Python's `subprocess` has executed a program.
#[test]
fn spawned_child_outlives_its_poisoned_process() {
    let mut launched = Launched::new(0);
    let mut program = launched.container.program();
    program.ok(format!("alloc {QUOTA}"));
    let seconds = format!("85{:05}", std::process::id() % 100_000);
    program.ok(format!("children 1 {seconds}"));
    let find = || {
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u64>().ok());
        let sleeps = |pid: &u64| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line == format!("sleep\0{seconds}\0").into_bytes()
        };
        pids.filter(|pid| sleeps(pid)).collect::<Vec<_>>()
    };
    let begin = Instant::now();
    while find().is_empty() {
        assert!(begin.elapsed() < SOON);
        std::thread::sleep(Duration::from_millis(10));
    }
    fault(&mut program);
    launched.settle();
    assert!(!runs(program.pid().into()));
    let children = find();
    assert_eq!(children.len(), 1, "it holds no memory");
    let mut replacement = launched.container.program();
    replacement.ok(format!("alloc {QUOTA}"));
    for child in children {
        let killed = Command::new("kill")
            .arg("-9")
            .arg(child.to_string())
            .status();
        assert!(killed.unwrap().success());
    }
}

/// Ray starts workers ahead: one of them takes the memory of the one that faulted.
#[test]
fn replacement_within_milliseconds_gets_the_full_quota() {
    let mut launched = Launched::new(0);
    let mut program = launched.container.program();
    for _ in 0..4 {
        program.ok(format!("alloc {QUOTA}"));
        let mut replacement = launched.container.program();
        fault(&mut program);
        launched.kill();
        // The request waits until the driver has freed the memory of the ended process.
        replacement.ok(format!("alloc {QUOTA}"));
        let pointer = replacement.call(format!("alloc {QUOTA}"));
        assert_eq!(pointer, "err 2");
        launched.settle();
        drop(std::mem::replace(
            &mut program,
            launched.container.program(),
        ));
        drop(replacement);
        launched
            .container
            .wait_for("all is free", |usage| usage.granted.0 + usage.exited.0 == 0);
    }
    assert!(launched.is_launcher_alive());
}

/// Five bad cells end kernels of a notebook, and the sixth one its server.
#[test]
fn sixth_fault_in_the_window_ends_the_root_process() {
    let mut launched = Launched::new(0);
    for _ in 0..5 {
        let mut program = launched.container.program();
        fault(&mut program);
        launched.settle();
        assert!(launched.is_launcher_alive());
    }
    let mut program = launched.container.program();
    fault(&mut program);
    let [fault] = &launched.container.faults()[..] else {
        panic!()
    };
    let restart = RecoveryAction::RestartContainer { over_limit: false };
    assert_eq!(fault.decision(), Some(restart));
    launched.kill();
    assert!(!launched.launcher.wait().unwrap().success());
}

#[test]
fn agent_that_starts_between_decision_and_kill_kills() {
    let mut launched = Launched::new(5);
    let mut program = launched.container.program();
    let child = program.ok("linger 600000")[0];
    fault(&mut program);
    launched.kill();
    assert!(runs(program.pid().into()), "it has a grace");
    launched.killer = None;
    launched.container.stop_agent();
    launched.container.start_agent();
    assert_eq!(launched.container.faults().len(), 1);
    let took = launched.settle();
    println!("settled {took:?} after the agent's start");
    wait_until_ended([child, program.pid().into()]);
    assert!(launched.is_launcher_alive());
}

#[test]
fn program_that_ends_in_its_grace_is_not_killed_and_counts_once() {
    let mut launched = Launched::new(600);
    let mut programs: Vec<_> = (0..6).map(|_| launched.container.program()).collect();
    for program in &mut programs[..5] {
        fault(program);
    }
    assert!(launched.container.condemned().is_empty());
    let mut last = programs.pop().unwrap();
    for program in programs {
        // The program ends by its own means.
        program.kill();
    }
    launched.settle();
    assert!(launched.is_launcher_alive());
    fault(&mut last);
    let [fault] = &launched.container.faults()[..] else {
        panic!()
    };
    let restart = RecoveryAction::RestartContainer { over_limit: false };
    assert_eq!(fault.decision(), Some(restart), "each of the five counted");
    assert!(
        launched.container.condemned().is_empty(),
        "the grace holds here too"
    );
}

/// Ranks map memory of each other by IPC.
#[test]
fn exported_memory_of_an_ended_process_serves_its_importer() {
    let mut launched = Launched::new(0);
    let mut exporter = launched.container.program();
    let handle = exporter.ok(format!("create {} 0 1", 64 * MIB))[0];
    let descriptor = exporter.ok(format!("exporthandle {handle} 1"))[0];
    let own = exporter.ok(format!("reserve {}", 64 * MIB))[0];
    exporter.ok(format!("map {own} {} {handle}", 64 * MIB));
    exporter.ok(format!("access {own} {}", 64 * MIB));
    exporter.ok(format!("fillbytes {own} 165 {}", 64 * MIB));
    exporter.ok("sync 0");
    let mut importer = launched.container.program();
    let name = format!("bursar-unit-{}-{}", std::process::id(), importer.pid());
    importer.send(&format!("recvfd {name}"));
    exporter.ok(format!("sendfd {descriptor} {name}"));
    let taken = importer.read().strip_prefix("ok ").unwrap().to_owned();
    let handle = importer.ok(format!("importhandle {taken}"))[0];
    let address = importer.ok(format!("reserve {}", 64 * MIB))[0];
    importer.ok(format!("map {address} {} {handle}", 64 * MIB));
    importer.ok(format!("access {address} {}", 64 * MIB));
    fault(&mut exporter);
    launched.settle();
    assert!(!runs(exporter.pid().into()));
    assert!(launched.is_launcher_alive());
    // The importer goes on with every byte, and the memory stays charged until it lets go.
    assert_eq!(importer.call("sync 0"), "ok");
    let charged = launched.container.usage().exited.0;
    assert!(charged >= 64 * MIB, "{charged}");
    let count = |value| format!("countbytes {address} {value} {}", 64 * MIB);
    assert_eq!(importer.ok(count(165))[0], 64 * MIB);
    importer.ok(format!("fillbytes {address} 90 {}", 64 * MIB));
    assert_eq!(importer.ok(count(90))[0], 64 * MIB);
    let charged = launched.container.usage().exited.0;
    assert!(charged > 0);
    importer.kill();
    launched
        .container
        .wait_for("the last holder is gone", |usage| usage.exited.0 == 0);
}
