//! Tests that memory is charged as the driver takes and keeps it: pieces by their chunk, and what
//! graphs, heaps and variables take.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod support;

use support::{Client, Container, MIB};

const QUOTA: u64 = 256 * MIB;
const GIB: u64 = 1 << 30;
const CONTEXT: u64 = 518 * MIB;
const CHUNK: u64 = 2 * MIB;

/// Returns the charged bytes. Asserts that the driver took as much besides its contexts, which are
/// free here.
#[track_caller]
fn charged(container: &Container, contexts: u64) -> u64 {
    let used = container.usage().used.0;
    assert_eq!(used, container.taken() - contexts * CONTEXT);
    used
}

#[test]
fn fragmented_pieces_stay_within_the_quota() {
    for bytes in [512, 4096, 64 << 10, 1 << 20] {
        let container = Container::with_quota(QUOTA);
        let mut program = container.program();
        let pieces = 64 * MIB / bytes;
        assert_eq!(
            program.call(format!("pieces {pieces} {bytes}")),
            format!("ok {pieces} 0")
        );
        assert_eq!(charged(&container, 1), 64 * MIB);
        program.ok("thin");
        assert_eq!(charged(&container, 1), 64 * MIB, "the driver keeps them");
        let large = program.call(format!("greedy {CHUNK}"));
        assert_eq!(large, format!("ok {} 2", 192 * MIB / CHUNK), "{bytes}");
        assert_eq!(charged(&container, 1), QUOTA);
        program.ok("drop");
        assert_eq!(charged(&container, 1), QUOTA - 64 * MIB);
    }
}

#[test]
fn hole_of_a_chunk_is_used_at_the_quota() {
    let container = Container::with_quota(8 * MIB);
    let mut program = container.program();
    let all = 8 * MIB / 65536;
    assert_eq!(program.call("greedy 65536"), format!("ok {all} 2"));
    let container = Container::with_quota(8 * MIB);
    let mut program = container.program();
    program.ok(format!("pieces {all} 65536"));
    program.ok("halve");
    assert_eq!(
        program.call(format!("pieces {all} 65536")),
        format!("ok {} 2", all / 2)
    );
    assert_eq!(charged(&container, 1), 8 * MIB);
    container.wait_for("the denial is counted", |usage| usage.denied > 0);
}

#[test]
fn sizes_share_chunks_without_a_free() {
    for (count, step) in [(126, 8192), (2048, 512)] {
        let container = Container::with_quota(2 * GIB);
        let mut program = container.program();
        assert_eq!(
            program.call(format!("sizes {count} {step}")),
            format!("ok {count} 0")
        );
        assert!(charged(&container, 1) >= count * (count + 1) / 2 * step);
        program.ok("drop");
        assert_eq!(charged(&container, 1), 0);
    }
}

#[test]
fn piece_is_freed_by_thread_context_and_event() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let own = program.ok("current")[0];
    let pieces: Vec<u64> = (0..3).map(|_| program.ok("alloc 4096")[0]).collect();
    assert_eq!(program.call(format!("start free {}", pieces[0])), "ok");
    assert_eq!(program.call("join"), "ok");
    program.ok("context");
    program.ok(format!("free {}", pieces[1]));
    program.ok(format!("setcurrent {own}"));
    assert_eq!(charged(&container, 2), CHUNK);
    let stream = program.ok("stream")[0];
    program.ok(format!("spin {stream} 500"));
    program.ok(format!("asyncfree {} {stream}", pieces[2]));
    assert_eq!(charged(&container, 2), CHUNK);
    program.ok(format!("sync {stream}"));
    program.ok("info");
    assert_eq!(charged(&container, 2), 0);
}

#[test]
fn free_in_a_stream_of_another_context_keeps_the_charge() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let own = program.ok("current")[0];
    for bytes in [4096, 32 * MIB] {
        let pointer = program.ok(format!("alloc {bytes}"))[0];
        let stream = program.ok("stream")[0];
        program.ok(format!("spin {stream} 500"));
        let other = program.ok("context")[0];
        program.ok(format!("asyncfree {pointer} {stream}"));
        program.ok("info");
        assert!(charged(&container, 2) > 0);
        program.ok(format!("setcurrent {own}"));
        program.ok(format!("sync {stream}"));
        program.ok("info");
        assert_eq!(charged(&container, 2), 0);
        program.ok(format!("destroy {other}"));
    }
}

#[test]
fn chunks_are_discharged_with_their_context() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    program.ok("alloc 512");
    let other = program.ok("context")[0];
    for _ in 0..3 {
        program.ok("alloc 4096");
        program.ok("array 16 16 0 0");
    }
    assert_eq!(charged(&container, 2), 3 * CHUNK);
    program.ok(format!("destroy {other}"));
    assert_eq!(charged(&container, 1), CHUNK);
    program.ok("reset");
    assert_eq!(charged(&container, 1), 0);
}

#[test]
fn exported_pieces_chunks_stay_charged_after_their_exporter() {
    const CHUNKS: u64 = 400;
    // An importer can hide so much, and the driver does not list so much of each process.
    const HIDDEN: u64 = 256 * MIB + 3 * 9 * MIB;
    let container = Container::charging_contexts(4 * GIB);
    let (mut exporter, mut importer) = (container.program(), container.program());
    for _ in 0..CHUNKS {
        exporter.ok(format!("alloc {}", CHUNK / 2));
        let piece = exporter.ok(format!("alloc {}", CHUNK / 2))[0];
        let handle = exporter.ok(format!("ipcget {piece}"))[0];
        importer.ok(format!("ipcopen {handle}"));
    }
    exporter.kill();
    container.wait_for("the rest is free", |usage| {
        usage.exited.0 > 0 && usage.exited.0 <= CHUNKS * CHUNK
    });
    let start = std::time::Instant::now();
    while start.elapsed() < std::time::Duration::from_secs(1) {
        let exited = container.usage().exited.0;
        assert!(exited + HIDDEN >= CHUNKS * CHUNK, "{exited}");
    }
    importer.kill();
    container.wait_for("the chunks are free", |usage| usage.exited.0 == 0);
}

#[test]
fn small_arrays_are_charged_by_their_chunks() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let make = |program: &mut Client, count: u64| -> Vec<u64> {
        let array = |_| program.ok("array 256 256 0 0")[0];
        (0..count).map(array).collect()
    };
    let arrays = make(&mut program, 200);
    assert_eq!(charged(&container, 1), 25 * CHUNK);
    let keeps = |(place, array): (usize, &u64)| (place % 32 != 0).then_some(*array);
    for array in arrays.iter().enumerate().filter_map(keeps) {
        program.ok(format!("unarray {array}"));
    }
    assert_eq!(charged(&container, 1), 7 * CHUNK);
    make(&mut program, 193);
    assert_eq!(charged(&container, 1), 25 * CHUNK);
}

/// Asserts that what is charged covers what the driver took, and is not much more.
#[track_caller]
fn covers(container: &Container, least: u64) {
    let (used, taken) = (container.usage().used.0, container.taken() - CONTEXT);
    assert!(taken >= least, "{taken}");
    assert!(taken <= used && used <= taken + taken / 5, "{taken} {used}");
}

#[test]
fn graph_of_many_nodes_is_charged_until_its_context_ends() {
    let container = Container::with_quota(512 * MIB);
    let mut program = container.program();
    let graph = program.ok("nodes 100000 1")[0];
    let executable = program.ok(format!("instantiate {graph}"))[0];
    covers(&container, 200 * MIB);
    program.ok(format!("ungraph {executable}"));
    covers(&container, 200 * MIB);
    let executable = program.ok(format!("instantiate {graph}"))[0];
    let used = container.usage().used.0;
    assert_eq!(program.call(format!("instantiate {graph}")), "err 2");
    assert_eq!(container.usage().used.0, used);
    let small = program.ok("nodes 100 100")[0];
    program.ok(format!("instantiate {small}"));
    covers(&container, 200 * MIB);
    program.ok(format!("launchgraph {executable}"));
    program.ok("reset");
    assert_eq!(charged(&container, 1), 0);
}

#[test]
fn large_heap_is_charged_when_its_limit_is_set() {
    let container = Container::with_quota(9 * GIB);
    let mut program = container.program();
    let charge = 8 * GIB + 140 * MIB;
    assert_eq!(program.call(format!("heap {}", 10 * GIB)), "err 2");
    assert_eq!(program.ok(format!("heap {}", 8 * GIB)), [8 * GIB]);
    assert_eq!(container.usage().used.0, charge);
    let kernel = program.ok("function heap")[0];
    program.ok(format!("launch {kernel}"));
    assert_eq!(charged(&container, 1), charge);
    assert_eq!(program.call(format!("heap {GIB}")), "err 1");
    assert_eq!(charged(&container, 1), charge);
    program.ok("reset");
    assert_eq!(charged(&container, 1), 0);
    program.ok(format!("heap {}", 8 * GIB));
    program.ok(format!("heap {}", 32 * MIB));
    assert_eq!(container.usage().used.0, 0);
}

#[test]
fn variable_is_charged_from_its_look_up_until_its_unload() {
    let container = Container::with_quota(4 * GIB);
    let mut program = container.program();
    for ends_by in ["unload", "reset"] {
        let module = program.ok(format!("device-variable {}", 3 * GIB))[0];
        for _ in 0..2 {
            program.ok(format!("device-global {module}"));
            assert_eq!(charged(&container, 1), 3 * GIB);
        }
        let second = program.ok(format!("device-variable {}", 2 * GIB))[0];
        assert_eq!(program.call(format!("device-global {second}")), "err 2");
        program.ok(format!("unload {second}"));
        match ends_by {
            "unload" => program.ok(format!("unload {module}")),
            _ => program.ok("reset"),
        };
        assert_eq!(charged(&container, 1), 0);
    }
}

#[test]
fn charge_is_the_drivers_after_random_calls_of_threads() {
    let rounds = if std::env::var_os("BURSAR_LONG").is_some() {
        200
    } else {
        12
    };
    let container = Container::with_quota(96 * MIB);
    let mut program = container.program();
    let own = program.ok("current")[0];
    let other = program.ok("context")[0];
    program.ok(format!("setcurrent {own}"));
    for seed in 0..rounds {
        program.ok(format!("mix {seed} 4 400 {other}"));
        for context in [other, own] {
            program.ok(format!("setcurrent {context}"));
            program.ok("sync 0");
        }
        program.ok("info");
        assert!(charged(&container, 2) <= 96 * MIB, "seed {seed}");
    }
    program.ok("drop");
    assert_eq!(charged(&container, 2), 0);
}
