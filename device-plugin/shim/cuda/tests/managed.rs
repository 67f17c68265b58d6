//! Tests that managed memory is charged, whatever makes it.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod support;

use std::time::{Duration, Instant};

use bursar_ledger::units::Bytes;
use bursar_sessions::Account;
use bursar_sim_state::Sim;
use support::{Client, Container, GPU, MIB};

const QUOTA: u64 = 256 * MIB;

/// Bytes that the driver keeps once managed memory was on a GPU, and the first chunk.
const FIRST_BATCH: u64 = 128 * MIB;

const GIB: u64 = 1 << 30;
/// The longest time until the driver's refusal is final.
const FINAL: Duration = Duration::from_millis(1_500);
/// The last pause of a refused allocation begins 200 ms after the call, and lasts for 600 ms. A
/// call that is later than this may get no last try.
const LAST_PAUSE: Duration = Duration::from_millis(350);

#[test]
fn managed_memory_has_a_quota_of_its_own() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    container.resize(&Account::Managed, Bytes(64 * MIB));
    program.ok(format!("managed {}", 64 * MIB));
    assert_eq!(program.call("managed 1"), "err 2");
    assert_eq!(container.usage().used, Bytes::ZERO);
}

#[test]
fn gpus_quota_covers_managed_memory_without_a_quota() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    assert_eq!(program.call(format!("managed {}", QUOTA + 1)), "err 2");
    let pointer = program.ok(format!("managed {}", QUOTA / 2))[0];
    assert_eq!(program.ok("info"), [QUOTA / 2, QUOTA]);
    assert_eq!(program.call(format!("alloc {}", QUOTA / 2 + MIB)), "err 2");
    program.ok(format!("free {pointer}"));
    assert_eq!(program.ok("info"), [QUOTA, QUOTA]);
    program.ok(format!("alloc {QUOTA}"));
    assert_eq!(program.call("managed 1"), "err 2");
}

#[test]
fn covered_memory_needs_room_on_every_gpu() {
    let container = Container::with_quotas(&[QUOTA, 2 * QUOTA]);
    let mut program = container.program();
    assert_eq!(program.call(format!("managed {}", QUOTA + 1)), "err 2");
    program.ok(format!("managed {QUOTA}"));
    assert_eq!(program.call("alloc 1"), "err 2");
    program.ok("device 1");
    assert_eq!(program.call(format!("alloc {}", QUOTA + MIB)), "err 2");
    program.ok(format!("alloc {QUOTA}"));
}

#[test]
fn managed_variable_is_charged_until_its_module_is_unloaded() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let module = program.ok(format!("variable {}", 200 * MIB))[0];
    for _ in 0..2 {
        assert_eq!(program.ok(format!("global {module}"))[1], 200 * MIB);
        assert_eq!(program.ok("info")[0], 56 * MIB, "charged once");
    }
    let other = program.ok(format!("variable {}", 57 * MIB))[0];
    assert_eq!(program.call(format!("global {other}")), "err 2");
    program.ok(format!("unload {module}"));
    program.ok(format!("global {other}"));
    assert_eq!(program.ok("info")[0], QUOTA - 57 * MIB);
    let empty = program.ok("variable 0")[0];
    assert_eq!(program.call(format!("global {empty}")), "err 500");
}

#[test]
fn managed_variable_of_a_library_is_charged_by_either_call() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    for call in ["library-global", "library-managed"] {
        let library = program.ok(format!("library {}", 200 * MIB))[0];
        assert_eq!(program.ok("info")[0], QUOTA, "no call has found it");
        for again in ["library-global", call] {
            assert_eq!(program.ok(format!("{again} {library}"))[1], 200 * MIB);
            assert_eq!(program.ok("info")[0], 56 * MIB, "charged once");
        }
        let other = program.ok(format!("library {}", 57 * MIB))[0];
        assert_eq!(program.call(format!("{call} {other}")), "err 2");
        program.ok(format!("unload-library {library}"));
        program.ok(format!("unload-library {other}"));
        assert_eq!(program.ok("info")[0], QUOTA);
    }
}

#[test]
fn call_of_cuda_2_finds_no_managed_variable() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let module = program.ok(format!("variable {}", 200 * MIB))[0];
    assert_eq!(program.call(format!("global-v1 {module}")), "err 801");
}

#[test]
fn programs_learn_that_host_memory_stays_on_the_host() {
    let container = Container::with_pageable_memory(QUOTA);
    let mut program = container.program();
    for attribute in [88, 100] {
        assert_eq!(program.ok(format!("attribute {attribute}")), [0]);
    }
    assert_eq!(
        program.ok("attribute 83"),
        [1],
        "managed memory is supported"
    );
}

#[test]
fn managed_memory_on_a_gpu_is_in_use_and_charged_to_no_process() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let before = container.taken();
    let pointer = program.ok(format!("managed {}", 200 * MIB))[0];
    assert_eq!(container.taken(), before, "nothing is resident");
    program.ok(format!("touch {pointer} 1"));
    assert_eq!(container.taken(), before + FIRST_BATCH);
    program.ok(format!("touch {pointer} {}", 200 * MIB));
    assert_eq!(container.taken(), before + FIRST_BATCH + 198 * MIB);
    program.ok(format!("free {pointer}"));
    assert_eq!(container.taken(), before + FIRST_BATCH - 2 * MIB);
}

/// A container with a quota of 4 GiB on a GPU that is full of its first program's managed memory.
struct FullGpu {
    container: Container,
    sim: Sim,
    owner: Client,
    /// The owner's managed memory.
    managed: u64,
}

impl FullGpu {
    fn new() -> FullGpu {
        let container = Container::with_quota(4 * GIB);
        container.resize(&Account::Managed, Bytes(20 * GIB));
        let sim = Sim::open(&container.sim()).unwrap();
        let mut owner = container.program();
        let managed = owner.ok(format!("managed {}", 20 * GIB))[0];
        let mut full = FullGpu {
            container,
            sim,
            owner,
            managed,
        };
        full.fill();
        full.set_evictable(15 * GIB);
        full
    }

    /// Fills the GPU with managed memory.
    fn fill(&mut self) {
        let line = format!("touch {} {}", self.managed, 20 * GIB);
        self.owner.ok(line);
    }

    /// Tells the programs how much managed memory the agent has found on the GPU.
    fn set_evictable(&self, bytes: u64) {
        let sessions = self.container.sessions();
        sessions.set_evictable(&GPU.parse().unwrap(), Bytes(bytes));
    }

    /// Checks the numbers of refusals and of denials that the agent counts. The shim does not wait
    /// until the agent has read its report.
    fn assert_counts(&self, expected: (u64, usize), line: &str) {
        let counts = || {
            let usage = self.container.container_usage().remove(0);
            (usage.driver_refusals, usage.denied.len())
        };
        let start = Instant::now();
        while counts() != expected && start.elapsed() < FINAL {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(counts(), expected, "{line}");
    }
}

/// The calls that take 2 GiB of the GPU.
fn allocations() -> [String; 5] {
    [
        format!("alloc {}", 2 * GIB),
        format!("pitch {MIB} 2048"),
        "array 16384 32768 0 0".to_owned(),
        format!("create {} 0 0", 2 * GIB),
        format!("asyncalloc {} 0", 2 * GIB),
    ]
}

/// Checks that one of three attempts holds: a loaded machine may lack the time for further tries.
fn assert_holds_once(line: &str, mut attempt: impl FnMut() -> bool) {
    assert!((0..3).any(|_| attempt()), "{line}");
}

#[test]
fn allocation_succeeds_when_two_evictions_fail() {
    for line in allocations() {
        assert_holds_once(&line, || {
            let full = FullGpu::new();
            let mut neighbour = full.container.program();
            full.sim.refuse_evictions(2);
            let has_succeeded = neighbour.call(&line).starts_with("ok");
            full.assert_counts((u64::from(!has_succeeded), 0), &line);
            has_succeeded
        });
    }
}

#[test]
fn prefetched_allocation_succeeds_when_two_evictions_fail() {
    let line = format!("asyncalloc {} 0", 32 * MIB);
    assert_holds_once(&line, || {
        let mut full = FullGpu::new();
        full.owner.ok("asyncalloc 1 0");
        (0..2).all(|_| {
            full.sim.refuse_evictions(2);
            let has_succeeded = full.owner.call(&line).starts_with("ok");
            full.assert_counts((u64::from(!has_succeeded), 0), &line);
            has_succeeded
        })
    });
}

#[test]
fn allocation_is_refused_in_time_when_no_eviction_succeeds() {
    let full = FullGpu::new();
    let mut neighbour = full.container.program();
    let mut refused = 0;
    for line in allocations() {
        assert_holds_once(&line, || {
            full.sim.refuse_evictions(99);
            let start = Instant::now();
            assert_eq!(neighbour.call(&line), "err 2", "{line}");
            let took = start.elapsed();
            refused += 1;
            assert_eq!(neighbour.ok("info")[0], 4 * GIB, "{line}");
            full.assert_counts((refused, 0), &line);
            took < FINAL
        });
    }
    full.sim.refuse_evictions(0);
    neighbour.ok(format!("alloc {}", 4 * GIB));
}

/// Returns the answer to a call where something changes before the call's last
/// try, which would succeed. The driver refuses the tries before.
fn change_before_last_try(line: &str, refusals: u32, change: fn(&FullGpu)) -> (String, FullGpu) {
    for _ in 0..5 {
        let full = FullGpu::new();
        let mut neighbour = full.container.program();
        full.sim.refuse_evictions(refusals);
        let start = Instant::now();
        neighbour.send(line);
        while full.sim.evictions_to_refuse() > 0 && start.elapsed() < FINAL {
            std::thread::sleep(Duration::from_millis(1));
        }
        change(&full);
        let is_in_time = start.elapsed() < LAST_PAUSE;
        let answer = neighbour.read();
        if is_in_time {
            return (answer, full);
        }
    }
    panic!("the machine is too slow");
}

/// The driver needs 2 GiB for each call.
#[test]
fn refusal_is_final_when_evictions_cannot_make_room() {
    let full = FullGpu::new();
    let mut neighbour = full.container.program();
    full.set_evictable(GIB);
    for line in allocations() {
        full.sim.refuse_evictions(2);
        assert_eq!(neighbour.call(&line), "err 2", "{line}");
    }
    full.assert_counts((0, 0), "all calls");
}

#[test]
fn quotas_denial_is_no_refusal_when_it_ends_the_tries() {
    let line = format!("asyncalloc {} 0", 2 * GIB);
    let lower_quota = |full: &FullGpu| {
        let account = Account::Gpu(GPU.parse().unwrap());
        full.container.resize(&account, Bytes(GIB));
    };
    let (answer, full) = change_before_last_try(&line, 4, lower_quota);
    assert_eq!(answer, "err 2");
    full.assert_counts((0, 1), &line);
}

#[test]
fn refusal_is_final_when_the_process_is_fenced_in_a_pause() {
    let line = format!("alloc {}", 2 * GIB);
    let fence = |full: &FullGpu| {
        let gpus = [GPU.parse().unwrap()].into();
        full.container.sessions().drain_gpus(&gpus);
    };
    let (answer, full) = change_before_last_try(&line, 3, fence);
    assert_eq!(answer, "err 2");
    full.assert_counts((0, 0), &line);
}

/// A second try would succeed.
#[test]
fn refusal_is_final_without_managed_memory_or_in_a_capture() {
    let full = FullGpu::new();
    let mut neighbour = full.container.program();
    let line = format!("create {} 0 0", 2 * GIB);
    full.set_evictable(0);
    full.sim.refuse_evictions(1);
    assert_eq!(neighbour.call(&line), "err 2");
    full.set_evictable(15 * GIB);
    let stream = neighbour.ok("stream")[0];
    neighbour.ok(format!("capture {stream}"));
    full.sim.refuse_evictions(1);
    assert_eq!(neighbour.call(&line), "err 2");
    neighbour.ok(&line);
    full.assert_counts((0, 0), "all calls");
}

#[test]
fn refused_call_is_tried_again_when_a_captured_stream_is_gone() {
    let line = format!("create {} 0 0", 2 * GIB);
    let destroys_stream = |program: &mut Client| {
        let stream = program.ok("stream")[0];
        program.ok(format!("capture {stream}"));
        program.ok(format!("destroystream {stream}"));
    };
    let destroys_context = |program: &mut Client| {
        let context = program.ok("context")[0];
        let stream = program.ok("stream")[0];
        program.ok(format!("capture {stream}"));
        program.ok(format!("destroy {context}"));
        program.ok("retain");
    };
    for ends_capture in [destroys_stream as fn(&mut Client), destroys_context] {
        assert_holds_once(&line, || {
            let full = FullGpu::new();
            let mut neighbour = full.container.program();
            ends_capture(&mut neighbour);
            full.sim.refuse_evictions(1);
            neighbour.call(&line).starts_with("ok")
        });
    }
}

/// A second try would succeed.
#[test]
fn refusal_is_final_when_the_process_is_fenced() {
    let mut full = FullGpu::new();
    let mut neighbour = full.container.program();
    let pointer = neighbour.ok(format!("alloc {}", 2 * GIB))[0];
    neighbour.ok(format!("free {pointer}"));
    full.fill();
    let gpus = [GPU.parse().unwrap()].into();
    full.container.sessions().drain_gpus(&gpus);
    full.sim.refuse_evictions(1);
    assert_eq!(neighbour.call(format!("alloc {}", 2 * GIB)), "err 2");
    full.assert_counts((0, 0), "all calls");
}

#[test]
fn owner_without_host_memory_dies_and_its_neighbour_goes_on() {
    let mut full = FullGpu::new();
    let mut neighbour = full.container.program();
    assert!(full.sim.set_host_room(full.owner.pid(), GIB));
    let pointer = neighbour.ok(format!("alloc {}", 3 * GIB))[0];
    assert_eq!(full.owner.read(), "", "the kernel has killed the owner");
    assert_eq!(full.container.taken(), 3 * GIB + full.container.context());
    neighbour.ok(format!("free {pointer}"));
    assert_eq!(neighbour.ok("info")[0], 4 * GIB);
    full.assert_counts((0, 0), "all calls");
}
