//! Tests that pools are charged what they have taken of the GPU, in steps of 32 MiB.
//!
//! A program at its quota gets what its pools have cached before an allocation fails.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

#[path = "soak/rng.rs"]
mod rng;
mod support;

use std::time::{Duration, Instant};

use bursar_ledger::units::Bytes;
use bursar_sessions::Account;
use rng::Rng;
use support::{Client, Container, MIB};

const QUOTA: u64 = 256 * MIB;
/// A quota with room for prefetching.
const LARGE: u64 = 8 << 30;
/// The amount that a pool takes at a time.
const STEP: u64 = 32 * MIB;
/// A release threshold that keeps everything.
const KEEP: u64 = u64::MAX;

/// Returns the charged bytes, after the program reconciled its pools.
fn charged(container: &Container, program: &mut Client) -> u64 {
    program.ok("info");
    container.usage().used.0
}

/// Starts a program whose device pool keeps freed memory. Returns the pool too.
fn keeping(container: &Container) -> (Client, u64) {
    let mut program = container.program();
    let pool = program.ok("devicepool 0")[0];
    program.ok(format!("threshold {pool} {KEEP}"));
    (program, pool)
}

#[test]
fn pool_is_charged_whole_steps() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    for (bytes, taken) in [
        (1, STEP),
        (STEP - 1, STEP),
        (STEP, STEP),
        (STEP + 1, 2 * STEP),
        (100 * MIB, 4 * STEP),
    ] {
        let before = container.taken();
        let pointer = program.ok(format!("asyncalloc {bytes} 0"))[0];
        assert_eq!(container.taken() - before, taken, "{bytes}");
        assert_eq!(container.usage().used, Bytes(taken), "{bytes}");
        program.ok(format!("asyncfree {pointer} 0"));
        program.ok("sync 0");
        assert_eq!(charged(&container, &mut program), 0);
    }
}

#[test]
fn quota_fits_exactly_and_one_byte_more_is_denied() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    for bytes in [QUOTA - 1, QUOTA] {
        let pointer = program.ok(format!("asyncalloc {bytes} 0"))[0];
        assert_eq!(container.usage().used, Bytes(QUOTA));
        assert_eq!(program.call("asyncalloc 1 0"), "err 2");
        assert_eq!(program.call("alloc 1"), "err 2");
        program.ok(format!("asyncfree {pointer} 0"));
        program.ok("sync 0");
    }
    // Denials are reported without an answer.
    container.wait_for("those four", |usage| usage.denied == 4);
    assert_eq!(program.call(format!("asyncalloc {} 0", QUOTA + 1)), "err 2");
    container.wait_for("another", |usage| usage.denied == 5);
    assert_eq!(charged(&container, &mut program), 0);
    program.ok(format!("asyncalloc {QUOTA} 0"));
}

#[test]
fn quota_inside_a_step_allows_whole_steps_only() {
    let container = Container::with_quota(QUOTA + STEP - 1);
    let mut program = container.program();
    assert_eq!(program.call(format!("asyncalloc {} 0", QUOTA + 1)), "err 2");
    program.ok(format!("asyncalloc {QUOTA} 0"));
    assert_eq!(program.call("asyncalloc 1 0"), "err 2");
    program.ok(format!("alloc {}", 16 * MIB));
}

#[test]
fn linear_and_pool_memory_can_be_freed_either_way() {
    let container = Container::with_quota(QUOTA);
    let (mut program, pool) = keeping(&container);
    for _ in 0..3 {
        let pooled = program.ok(format!("asyncalloc {} 0", 100 * MIB))[0];
        let linear = program.ok(format!("alloc {}", 100 * MIB))[0];
        program.ok(format!("free {pooled}"));
        program.ok(format!("asyncfree {linear} 0"));
        program.ok("sync 0");
        program.ok(format!("pooltrim {pool} 0"));
        assert_eq!(charged(&container, &mut program), 0);
        assert!(program.call(format!("free {linear}")).starts_with("err"));
        assert!(
            program
                .call(format!("asyncfree {pooled} 0"))
                .starts_with("err")
        );
    }
    program.ok(format!("alloc {QUOTA}"));
}

#[test]
fn linear_memory_freed_in_a_stream_is_charged_until_a_sync() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let stream = program.ok("stream")[0];
    let pointer = program.ok(format!("alloc {QUOTA}"))[0];
    let taken = container.taken();
    program.ok(format!("spin {stream} 500"));
    program.ok(format!("asyncfree {pointer} {stream}"));
    assert_eq!(charged(&container, &mut program), QUOTA);
    assert_eq!(program.call("alloc 1"), "err 2");
    assert_eq!(container.taken(), taken, "the driver still has it");
    program.ok(format!("sync {stream}"));
    program.ok(format!("alloc {QUOTA}"));
    assert_eq!(container.taken(), taken);
}

#[test]
fn destroyed_context_discharges_its_deferred_frees() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let context = program.ok("context")[0];
    let pointer = program.ok(format!("alloc {}", 64 * MIB))[0];
    program.ok("spin 0 100");
    program.ok(format!("asyncfree {pointer} 0"));
    assert_eq!(charged(&container, &mut program), 64 * MIB);
    program.ok(format!("destroy {context}"));
    assert_eq!(charged(&container, &mut program), 0);
    program.ok(format!("alloc {QUOTA}"));
}

#[test]
fn racing_processes_get_exactly_the_pool_steps_that_fit() {
    let container = Container::with_quota(QUOTA);
    let mut programs: Vec<_> = (0..3).map(|_| container.program()).collect();
    programs
        .iter_mut()
        .for_each(|program| program.send(&format!("asyncgreedy 2 {STEP}")));
    let count = |answer: String| {
        let words: Vec<&str> = answer.split_whitespace().collect();
        assert_eq!((words[0], words[2]), ("ok", "2"), "{answer}");
        words[1].parse::<u64>().unwrap()
    };
    let got: u64 = programs
        .iter_mut()
        .map(|program| count(program.read()))
        .sum();
    assert_eq!(got, QUOTA / STEP);
    assert_eq!(container.usage().used, Bytes(QUOTA));
    programs.drain(..).for_each(Client::kill);
    container.wait_for("everything is free again", |usage| {
        usage.processes == 0 && usage.exited.0 == 0
    });
    container.program().ok(format!("asyncalloc {QUOTA} 0"));
}

#[test]
fn racing_threads_get_exactly_the_pool_steps_that_fit() {
    let container = Container::with_quota(QUOTA);
    for _ in 0..5 {
        let mut program = container.program();
        assert_eq!(
            program.ok(format!("asyncgreedy 6 {STEP}")),
            [QUOTA / STEP, 2]
        );
        assert_eq!(charged(&container, &mut program), QUOTA);
        program.kill();
        container.wait_for("the memory is free", |usage| {
            usage.processes == 0 && usage.exited.0 == 0
        });
    }
}

#[test]
fn pool_prefetches_until_it_is_reconciled_when_room_is_ample() {
    let container = Container::with_quota(LARGE);
    let (mut program, pool) = keeping(&container);
    program.ok("retain");
    let before = container.taken();
    for _ in 0..30 {
        program.ok(format!("asyncalloc {STEP} 0"));
        let (used, taken) = (container.usage().used.0, container.taken() - before);
        assert!(
            (taken..=taken + 8 * STEP).contains(&used),
            "{used} for {taken}"
        );
    }
    assert_eq!(charged(&container, &mut program), 30 * STEP);
    program.ok(format!("asyncchurn 100 {MIB}"));
    program.ok("sync 0");
    program.ok(format!("pooltrim {pool} 0"));
    assert_eq!(container.usage().used, Bytes(30 * STEP));
    program.ok(format!("alloc {}", LARGE - 30 * STEP));
    assert_eq!(program.call("asyncalloc 1 0"), "err 2");
}

#[test]
fn prefetched_credit_is_not_exported_with_its_pool() {
    let container = Container::with_quota(LARGE);
    let mut program = container.program();
    let pool = program.ok("pool 1 1 1")[0];
    program.ok(format!("poolalloc {pool} {MIB}"));
    assert_eq!(container.usage().used, Bytes(8 * STEP));
    program.ok(format!("poolexport {pool} 1"));
    assert_eq!(container.usage().used, Bytes(STEP));
    program.ok(format!("poolalloc {pool} {}", 2 * STEP));
    assert_eq!(container.usage().used, Bytes(3 * STEP));
}

#[test]
fn pool_does_not_prefetch_beside_another_process() {
    let container = Container::with_quota(LARGE);
    let mut other = container.program();
    other.ok("alloc 1");
    let mut program = container.program();
    for count in 1..=10 {
        program.ok(format!("asyncalloc {STEP} 0"));
        let used = container.usage().used.0;
        assert_eq!(used.next_multiple_of(STEP), (count + 1) * STEP, "{count}");
    }
}

#[test]
fn threads_use_all_of_a_large_quota_and_no_more() {
    let container = Container::with_quota(LARGE);
    let mut program = container.program();
    program.ok("retain");
    let before = container.taken();
    program.send(&format!("asyncgreedy 6 {STEP}"));
    // Both values only grow, so the charge is read last.
    let start = Instant::now();
    loop {
        let (taken, used) = (container.taken() - before, container.usage().used.0);
        assert!(taken <= used, "{taken} of {used}");
        if taken == LARGE || start.elapsed() > Duration::from_secs(10) {
            break;
        }
    }
    let answer = program.read();
    assert_eq!(answer, format!("ok {} 2", LARGE / STEP));
    assert_eq!(charged(&container, &mut program), LARGE);
}

#[test]
fn pool_cache_is_used_at_the_quota_without_the_agent() {
    let mut container = Container::with_quota(QUOTA);
    let (mut program, _) = keeping(&container);
    let pointer = program.ok(format!("asyncalloc {QUOTA} 0"))[0];
    program.ok(format!("asyncfree {pointer} 0"));
    container.stop_agent();
    program.ok(format!("asyncchurn 1000 {}", 200 * MIB));
    let whole = program.ok(format!("asyncalloc {QUOTA} 0"))[0];
    assert_eq!(program.call("asyncalloc 1 0"), "err 2");
    program.ok(format!("asyncfree {whole} 0"));
}

#[test]
fn pool_caches_are_trimmed_for_other_kinds_of_memory() {
    let container = Container::with_quota(QUOTA);
    let (mut program, pool) = keeping(&container);
    let other = program.ok("pool 1 1 0")[0];
    program.ok(format!("threshold {other} {KEEP}"));
    let fill = |program: &mut Client| {
        for pool in [pool, other] {
            let pointer = program.ok(format!("poolalloc {pool} {}", QUOTA / 2))[0];
            program.ok(format!("asyncfree {pointer} 0"));
        }
        program.ok("sync 0");
        assert_eq!(container.usage().used, Bytes(QUOTA));
    };
    fill(&mut program);
    let linear = program.ok(format!("alloc {QUOTA}"))[0];
    program.ok(format!("free {linear}"));
    fill(&mut program);
    let handle = program.ok(format!("create {QUOTA} 0 0"))[0];
    program.ok(format!("releasehandle {handle}"));
    fill(&mut program);
    let pooled = program.ok(format!("poolalloc {other} {QUOTA}"))[0];
    program.ok(format!("asyncfree {pooled} 0"));
    assert_eq!(container.taken() - container.context(), QUOTA);
}

#[test]
fn allocation_at_the_quota_waits_for_frees_of_any_stream() {
    let container = Container::with_quota(QUOTA);
    let (mut program, _) = keeping(&container);
    let streams: Vec<u64> = (0..3).map(|_| program.ok("stream")[0]).collect();
    for round in 0..30 {
        let (here, there) = (streams[round % 3], streams[(round + 2) % 3]);
        let bytes = QUOTA / 2 + (round as u64 % 4) * 40 * MIB;
        let pointer = program.ok(format!("asyncalloc {bytes} {here}"))[0];
        assert!(container.usage().used.0 <= QUOTA);
        assert!(container.taken() - container.context() <= QUOTA);
        program.ok(format!("asyncfree {pointer} {there}"));
    }
}

#[test]
fn thread_that_waits_at_the_quota_blocks_no_other() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let stream = program.ok("stream")[0];
    let pointer = program.ok(format!("asyncalloc {} 0", QUOTA - STEP))[0];
    program.ok(format!("spin {stream} 4000"));
    program.ok(format!("asyncfree {pointer} {stream}"));
    program.ok(format!("start asyncalloc {QUOTA} 0"));
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(program.ok("info"), [STEP, QUOTA]);
    assert_eq!(program.call(format!("alloc {}", 2 * STEP)), "err 2");
    program.ok("pool 1 1 0");
    assert_eq!(program.ok("started"), [1], "it waits still");
    let answer = program.call("join");
    assert!(answer.starts_with("ok"), "{answer}");
    assert_eq!(charged(&container, &mut program), QUOTA);
}

#[test]
fn destroyed_pool_is_charged_until_its_last_free() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let pool = program.ok("pool 1 1 0")[0];
    program.ok(format!("setpool 0 {pool}"));
    let pointer = program.ok(format!("asyncalloc {} 0", 200 * MIB))[0];
    assert_eq!(container.usage().used, Bytes(224 * MIB));
    program.ok(format!("pooldestroy {pool}"));
    assert_eq!(program.call(format!("pooldestroy {pool}")), "err 1");
    assert_eq!(program.call(format!("poolalloc {pool} 1")), "err 1");
    assert_eq!(program.call(format!("setpool 0 {pool}")), "err 1");
    assert_ne!(program.ok("devicepool 0")[0], pool);
    assert_eq!(charged(&container, &mut program), 224 * MIB);
    let small = program.ok("asyncalloc 1 0")[0];
    assert_eq!(charged(&container, &mut program), QUOTA);
    assert_eq!(program.call(format!("asyncalloc {} 0", STEP)), "err 2");
    program.ok(format!("asyncfree {pointer} 0"));
    program.ok(format!("asyncfree {small} 0"));
    program.ok("sync 0");
    assert_eq!(charged(&container, &mut program), 0);
    let again = program.ok("pool 1 1 0")[0];
    program.ok(format!("poolalloc {again} {QUOTA}"));
}

#[test]
fn empty_pool_is_destroyed_at_once_but_not_a_default_pool() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    for _ in 0..100 {
        let pool = program.ok("pool 1 1 0")[0];
        let pointer = program.ok(format!("poolalloc {pool} {QUOTA}"))[0];
        program.ok(format!("free {pointer}"));
        program.ok(format!("pooldestroy {pool}"));
    }
    assert_eq!(container.usage().used, Bytes::ZERO);
    let own = program.ok("devicepool 0")[0];
    assert_eq!(program.call(format!("pooldestroy {own}")), "err 1");
}

#[test]
fn destroying_a_null_pool_leaves_the_next_pool_alone() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let pool = program.ok("pool 1 1 0")[0];
    program.ok(format!("pooldestroy {pool}"));
    assert_eq!(program.call("pooldestroy 0"), "err 1");
    let next = program.ok("pool 1 1 0")[0];
    program.ok("info");
    program.ok(format!("poolalloc {next} {STEP}"));
    assert_eq!(charged(&container, &mut program), STEP);
}

#[test]
fn host_pools_are_free_and_managed_pools_use_their_quota() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    for location in [2, 3] {
        let host = program.ok(format!("pool 1 {location} 0"))[0];
        let pointer = program.ok(format!("poolalloc {host} {}", 2 * QUOTA))[0];
        program.ok(format!("asyncfree {pointer} 0"));
        program.ok(format!("pooldestroy {host}"));
    }
    for managed in [program.ok("pool 2 1 0")[0], program.ok("defaultpool 2")[0]] {
        let beyond = format!("poolalloc {managed} {}", QUOTA + 1);
        assert_eq!(program.call(beyond), "err 2", "the GPU's quota covers it");
    }
    container.resize(&Account::Managed, Bytes(64 * MIB));
    let managed = program.ok("defaultpool 2")[0];
    let pointer = program.ok(format!("poolalloc {managed} {}", 64 * MIB))[0];
    assert_eq!(program.call(format!("poolalloc {managed} 1")), "err 2");
    assert_eq!(container.usage_of(1).used, Bytes(64 * MIB));
    program.ok(format!("asyncfree {pointer} 0"));
    program.ok("sync 0");
    program.ok(format!("poolalloc {managed} {}", 33 * MIB));
    assert_eq!(container.usage().used, Bytes::ZERO, "the GPU's account");
}

#[test]
fn pools_are_charged_to_their_own_gpu() {
    let container = Container::with_quotas(&[QUOTA, 2 * QUOTA]);
    let mut program = container.program();
    program.ok(format!("asyncalloc {QUOTA} 0"));
    program.ok("device 1");
    let stream = program.ok("stream")[0];
    program.ok(format!("asyncalloc {} {stream}", 2 * QUOTA));
    assert_eq!(program.call("asyncalloc 1 0"), "err 2");
    assert_eq!(container.usage_of(0).used, Bytes(QUOTA));
    assert_eq!(container.usage_of(1).used, Bytes(2 * QUOTA));
    program.ok("device 0");
    assert_eq!(program.call("asyncalloc 1 0"), "err 2");
}

#[test]
fn pools_outlive_the_contexts_that_used_them() {
    let container = Container::with_quota(QUOTA);
    let (mut program, pool) = keeping(&container);
    let pointer = program.ok(format!("asyncalloc {} 0", 64 * MIB))[0];
    program.ok("reset");
    assert_eq!(
        program.ok(format!("poolsizes {pool}")),
        [64 * MIB, 64 * MIB]
    );
    assert_eq!(charged(&container, &mut program), 64 * MIB);
    program.ok(format!("free {pointer}"));
    program.ok(format!("alloc {QUOTA}"));
}

#[test]
fn exported_pool_stays_charged_for_its_largest_size() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let pool = program.ok("pool 1 1 1")[0];
    assert_eq!(program.call(format!("poolexport {pool} 8")), "err 800");
    let pointer = program.ok(format!("poolalloc {pool} {}", 64 * MIB))[0];
    program.ok(format!("poolexport {pool} 1"));
    let more = program.ok(format!("poolalloc {pool} {}", 64 * MIB))[0];
    for pointer in [pointer, more] {
        program.ok(format!("asyncfree {pointer} 0"));
    }
    program.ok("sync 0");
    assert_eq!(charged(&container, &mut program), 128 * MIB);
    program.ok(format!("poolalloc {pool} {}", 128 * MIB));
    assert_eq!(charged(&container, &mut program), 128 * MIB);
    program.ok(format!("pooldestroy {pool}"));
    assert_eq!(charged(&container, &mut program), 128 * MIB);
    program.ok(format!("asyncalloc {} 0", 128 * MIB));
    assert_eq!(program.call("asyncalloc 1 0"), "err 2");
}

#[test]
fn capture_stays_valid_and_captured_memory_is_not_charged() {
    let container = Container::with_quota(QUOTA);
    let (mut program, pool) = keeping(&container);
    let (captured, other) = (program.ok("stream")[0], program.ok("stream")[0]);
    assert_eq!(program.call(format!("capture {captured}")), "ok");
    let node = program.ok(format!("asyncalloc {} {captured}", 100 * MIB))[0];
    assert_eq!(container.usage().used, Bytes::ZERO);
    // Meanwhile the other thread's pools grow, are reconciled, and are trimmed at the quota.
    let pointer = program.ok(format!("asyncalloc {QUOTA} {other}"))[0];
    assert_eq!(program.call(format!("asyncalloc 1 {other}")), "err 2");
    program.ok(format!("asyncfree {pointer} {other}"));
    program.ok(format!("asyncalloc {} {other}", QUOTA / 2));
    assert_eq!(program.ok("info")[0], 0);
    program.ok(format!("asyncfree {node} {captured}"));
    program.ok(format!("endcapture {captured}"));

    // The program may invalidate its own capture only.
    program.ok(format!("capture {captured}"));
    assert_eq!(program.call(format!("poolsizes {pool}")), "err 900");
    assert_eq!(program.call(format!("endcapture {captured}")), "err 901");
}

#[test]
fn capture_that_the_shim_has_not_counted_stays_valid() {
    // Nor has it counted a capture that another thread begins beside its driver call.
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    program.ok("asyncalloc 1 0");
    let stream = program.ok("stream")[0];
    program.ok(format!("unseencapture {stream}"));
    program.ok("info");
    program.ok(format!("endcapture {stream}"));
}

#[test]
fn forked_child_neither_uses_nor_blocks_on_parents_pools() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    program.ok(format!("asyncalloc {STEP} 0"));
    assert_eq!(program.ok("fork"), [3], "the driver says NOT_INITIALIZED");
    assert_eq!(charged(&container, &mut program), STEP);
}

/// The memory that a program owns.
enum Owned {
    Linear(u64),
    Pooled(u64),
    Handle(u64),
    Mapped { address: u64, bytes: u64 },
}

/// Makes one random call. Returns whether it was denied.
fn step(program: &mut Client, rng: &mut Rng, owned: &mut Vec<Owned>, streams: &[u64]) -> bool {
    let stream = streams[rng.below(3) as usize];
    let size = (1 + rng.below(40)) * MIB + rng.below(2);
    let blocks = (1 + rng.below(20)) * 2 * MIB;
    let (line, kind): (_, fn(u64) -> Owned) = match rng.below(10) {
        0 | 1 => (format!("asyncalloc {size} {stream}"), Owned::Pooled),
        2 => (format!("alloc {size}"), Owned::Linear),
        3 => (format!("create {blocks} 0 0"), Owned::Handle),
        4 => {
            program.ok(format!(
                "sync {}",
                if rng.below(2) == 0 { 0 } else { stream }
            ));
            return false;
        }
        _ => {
            if !owned.is_empty() {
                let place = rng.below(owned.len() as u64) as usize;
                let next = end(program, rng, owned.swap_remove(place), stream);
                owned.extend(next);
            }
            return false;
        }
    };
    let answer = program.call(line);
    if let Some(got) = answer.strip_prefix("ok ") {
        owned.push(kind(got.parse().unwrap()));
        return false;
    }
    assert_eq!(answer, "err 2");
    true
}

/// Frees something, perhaps in several calls.
fn end(program: &mut Client, rng: &mut Rng, what: Owned, stream: u64) -> Option<Owned> {
    let free = |rng: &mut Rng, pointer| match rng.below(2) {
        0 => format!("free {pointer}"),
        _ => format!("asyncfree {pointer} {stream}"),
    };
    match what {
        Owned::Linear(pointer) | Owned::Pooled(pointer) => drop(program.ok(free(rng, pointer))),
        Owned::Handle(handle) if rng.below(2) == 0 => {
            // The size was not recorded: the smallest mappable block is mapped.
            let bytes = 2 * MIB;
            let address = program.ok(format!("reserve {bytes}"))[0];
            program.ok(format!("map {address} {bytes} {handle}"));
            program.ok(format!("releasehandle {handle}"));
            return Some(Owned::Mapped { address, bytes });
        }
        Owned::Handle(handle) => drop(program.ok(format!("releasehandle {handle}"))),
        Owned::Mapped { address, bytes } if rng.below(3) == 0 => {
            let handle = program.ok(format!("retainhandle {address}"))[0];
            program.ok(format!("unmap {address} {bytes}"));
            return Some(Owned::Handle(handle));
        }
        Owned::Mapped { address, bytes } => drop(program.ok(format!("unmap {address} {bytes}"))),
    }
    None
}

#[test]
fn charges_cover_the_drivers_memory_under_random_operations() {
    let container = Container::with_quota(QUOTA);
    for seed in 1..=4_u64 {
        let (mut program, pool) = keeping(&container);
        if seed % 2 == 0 {
            program.ok(format!("threshold {pool} 0"));
        }
        let streams: Vec<u64> = (0..3).map(|_| program.ok("stream")[0]).collect();
        let (mut rng, mut owned, mut denied) = (Rng::seeded(seed), Vec::new(), 0);
        for number in 0..1500 {
            denied += u32::from(step(&mut program, &mut rng, &mut owned, &streams));
            let used = charged(&container, &mut program);
            let taken = container.taken() - container.context();
            assert_eq!(used, taken, "seed {seed}, call {number}");
            assert!(used <= QUOTA, "seed {seed}, call {number}: {used}");
        }
        assert!(denied > 0, "the quota was never reached");
        program.kill();
        container.wait_for("the memory is free", |usage| {
            usage.processes == 0 && usage.exited.0 == 0
        });
    }
}
