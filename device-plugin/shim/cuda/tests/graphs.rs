//! Tests that memory nodes are charged when their graph gets its memory.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod support;

use std::time::Duration;

use support::{Client, Container, MIB};

const QUOTA: u64 = 256 * MIB;

/// Returns the charged bytes. Asserts that the driver took as much besides its context, which is
/// free here.
#[track_caller]
fn charged(container: &Container) -> u64 {
    let used = container.usage().used.0;
    assert_eq!(used, container.taken() - 518 * MIB);
    used
}

#[test]
fn graph_is_charged_from_its_launch_until_a_trim() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    for place in ["launchgraph", "upload"] {
        let graph = program.ok(format!("graph {}", 100 * MIB))[0];
        let executable = program.ok(format!("instantiate {graph}"))[0];
        assert_eq!(charged(&container), 0);
        for _ in 0..3 {
            program.ok(format!("{place} {executable}"));
            assert_eq!(charged(&container), 128 * MIB);
        }
        program.ok(format!("ungraph {executable}"));
        assert_eq!(charged(&container), 128 * MIB, "the pool keeps it");
        program.ok("trim");
        assert_eq!(charged(&container), 0);
    }
}

#[test]
fn graph_launch_is_denied_one_byte_beyond_the_quota() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    for bytes in [QUOTA - 1, QUOTA] {
        let graph = program.ok(format!("graph {bytes}"))[0];
        let executable = program.ok(format!("instantiate {graph}"))[0];
        program.ok(format!("launchgraph {executable}"));
        assert_eq!(charged(&container), QUOTA);
        program.ok(format!("launchgraph {executable}"));
        program.ok(format!("ungraph {executable}"));
        program.ok("trim");
    }
    let graph = program.ok(format!("graph {}", QUOTA + 1))[0];
    let executable = program.ok(format!("instantiate {graph}"))[0];
    assert_eq!(program.call(format!("launchgraph {executable}")), "err 2");
    assert_eq!(program.call(format!("upload {executable}")), "err 2");
    assert_eq!(program.call(format!("instantiateupload {graph}")), "err 2");
    assert_eq!(charged(&container), 0);
    program.ok(format!("alloc {QUOTA}"));
}

/// Returns a graph of an allocation and a free that a stream captured.
fn captured(program: &mut Client, bytes: u64) -> u64 {
    let stream = program.ok("stream")[0];
    program.ok(format!("capture {stream}"));
    let pointer = program.ok(format!("asyncalloc {bytes} {stream}"))[0];
    program.ok(format!("asyncfree {pointer} {stream}"));
    program.ok(format!("endcapture {stream}"))[0]
}

#[test]
fn captured_allocation_is_charged_when_its_graph_is_launched() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    for bytes in [QUOTA - 1, QUOTA] {
        let graph = captured(&mut program, bytes);
        let executable = program.ok(format!("instantiate {graph}"))[0];
        assert_eq!(charged(&container), 0);
        program.ok(format!("launchgraph {executable}"));
        assert_eq!(charged(&container), QUOTA);
        program.ok(format!("ungraph {executable}"));
        program.ok("trim");
    }
    let graph = captured(&mut program, QUOTA + 1);
    let executable = program.ok(format!("instantiate {graph}"))[0];
    assert_eq!(program.call(format!("launchgraph {executable}")), "err 2");
    assert_eq!(charged(&container), 0);
    program.ok(format!("alloc {QUOTA}"));
}

#[test]
fn graph_is_charged_when_instantiation_uploads_it() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let graph = program.ok(format!("graph {}", 40 * MIB))[0];
    let executable = program.ok(format!("instantiateupload {graph}"))[0];
    assert_eq!(charged(&container), 64 * MIB);
    program.ok(format!("launchgraph {executable}"));
    assert_eq!(charged(&container), 64 * MIB);
}

#[test]
fn child_graphs_are_charged_with_their_parent() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let inner = program.ok(format!("graph {}", 40 * MIB))[0];
    let outer = program.ok(format!("graph {} {inner}", 40 * MIB))[0];
    let plain = program.ok("graph 0")[0];
    let (outer, plain) = (
        program.ok(format!("instantiate {outer}"))[0],
        program.ok(format!("instantiate {plain}"))[0],
    );
    program.ok(format!("launchgraph {plain}"));
    assert_eq!(charged(&container), 0);
    program.ok(format!("launchgraph {outer}"));
    assert_eq!(charged(&container), 128 * MIB);
    let small = program.ok(format!("graph {}", 10 * MIB))[0];
    let several = program.ok(format!("graph {} {small}", 10 * MIB))[0];
    let several = program.ok(format!("instantiate {several}"))[0];
    program.ok("trim");
    program.ok(format!("launchgraph {several}"));
    assert_eq!(charged(&container), 32 * MIB, "small ones share a step");
}

#[test]
fn unused_graph_memory_is_trimmed_before_a_denial() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let executables = [200 * MIB, 100 * MIB].map(|bytes| {
        let graph = program.ok(format!("graph {bytes}"))[0];
        program.ok(format!("instantiate {graph}"))[0]
    });
    let streams = [(); 2].map(|()| program.ok("stream")[0]);
    for _ in 0..2 {
        for (executable, stream) in executables.into_iter().zip(streams) {
            program.ok(format!("launchgraph {executable} {stream}"));
        }
    }
    assert_eq!(charged(&container), 128 * MIB);
    let pointer = program.ok(format!("alloc {QUOTA}"))[0];
    assert_eq!(charged(&container), QUOTA);
    assert_eq!(
        program.call(format!("launchgraph {}", executables[0])),
        "err 2"
    );
    program.ok(format!("free {pointer}"));
    program.ok(format!("launchgraph {}", executables[0]));
}

/// Returns an executable graph, and two streams that are busy for a while.
fn busy(program: &mut Client, bytes: u64) -> (u64, [u64; 2]) {
    let graph = program.ok(format!("graph {bytes}"))[0];
    let executable = program.ok(format!("instantiate {graph}"))[0];
    let streams = [(); 2].map(|()| program.ok("stream")[0]);
    for stream in streams {
        program.ok(format!("spin {stream} 3000"));
    }
    (executable, streams)
}

#[test]
fn graph_is_charged_again_when_launched_into_another_stream() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let (executable, [first, second]) = busy(&mut program, 100 * MIB);
    let linear = program.ok(format!("alloc {}", 64 * MIB))[0];
    for _ in 0..2 {
        program.ok(format!("launchgraph {executable} {first}"));
        assert_eq!(charged(&container), 192 * MIB);
    }
    program.ok(format!("launchgraph {executable} {second}"));
    assert_eq!(charged(&container), 192 * MIB, "the first has ended");
    program.ok(format!("free {linear}"));
    program.ok(format!("launchgraph {executable} {first}"));
    assert_eq!(charged(&container), QUOTA);
    // The graph has its memory in both streams by now.
    for stream in [first, second, first] {
        program.ok(format!("launchgraph {executable} {stream}"));
        assert_eq!(charged(&container), QUOTA);
    }
}

#[test]
fn graphs_of_a_stream_are_charged_the_memory_they_share() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let (first, [stream, _]) = busy(&mut program, 150 * MIB);
    let graph = program.ok(format!("graph {}", 150 * MIB))[0];
    let second = program.ok(format!("instantiate {graph}"))[0];
    for executable in [first, second, first, second] {
        program.ok(format!("launchgraph {executable} {stream}"));
        assert_eq!(charged(&container), 160 * MIB);
    }
    let graph = program.ok(format!("graph {QUOTA}"))[0];
    let larger = program.ok(format!("instantiate {graph}"))[0];
    program.ok(format!("launchgraph {larger} {stream}"));
    assert_eq!(charged(&container), QUOTA);
}

#[test]
fn graph_launch_at_the_quota_waits_for_running_graphs() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let (running, [first, _]) = busy(&mut program, 150 * MIB);
    let graph = program.ok(format!("graph {}", 150 * MIB))[0];
    let executable = program.ok(format!("instantiate {graph}"))[0];
    program.ok(format!("launchgraph {running} {first}"));
    program.ok(format!("launchgraph {executable}"));
    assert_eq!(charged(&container), 160 * MIB);
    assert_eq!(container.usage().denied, 0);
}

#[test]
fn graph_launch_that_waits_blocks_no_other_thread() {
    let container = Container::with_quota(2 * QUOTA);
    let mut program = container.program();
    let graph = program.ok(format!("graph {}", 32 * MIB))[0];
    let other = program.ok(format!("instantiate {graph}"))[0];
    let (executable, [first, second]) = busy(&mut program, 100 * MIB);
    program.ok(format!("launchgraph {executable} {first}"));
    program.ok(format!("start launchgraph {executable} {second}"));
    container.wait_for("the launch is charged", |usage| usage.used.0 == 256 * MIB);
    for _ in 0..2 {
        program.ok(format!("launchgraph {other}"));
        assert_eq!(container.usage().used.0, 288 * MIB);
        program.ok("trim");
        assert_eq!(container.usage().used.0, 256 * MIB);
    }
    assert_eq!(program.ok("started"), [1], "it waits still");
    assert_eq!(program.call("join"), "ok");
    assert_eq!(charged(&container), 256 * MIB);
}

#[test]
fn running_graph_is_launched_again_at_the_quota() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let (executable, [stream, _]) = busy(&mut program, QUOTA);
    program.ok(format!("launchgraph {executable} {stream}"));
    assert_eq!(program.call("alloc 1"), "err 2");
    program.ok(format!("launchgraph {executable} {stream}"));
    assert_eq!(charged(&container), QUOTA);
}

#[test]
fn reclaim_beside_running_graphs_does_not_hang() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let (executable, [first, second]) = busy(&mut program, 64 * MIB);
    program.ok(format!("launchgraph {executable} {first}"));
    program.ok(format!("alloc {}", 192 * MIB));
    program.ok(format!("start asyncalloc {} 0", 32 * MIB));
    assert_eq!(program.call("join"), "err 2");
    program.ok(format!("launchgraph {executable} {second}"));
    program.ok(format!("asyncalloc {} 0", 32 * MIB));
}

#[test]
fn context_destruction_that_waits_blocks_no_graph_launch() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let graph = program.ok(format!("graph {}", 32 * MIB))[0];
    let executable = program.ok(format!("instantiate {graph}"))[0];
    let context = program.ok("context")[0];
    program.ok("spin 0 4000");
    program.ok("device 0");
    program.ok(format!("start destroy {context}"));
    std::thread::sleep(Duration::from_millis(300));
    program.ok(format!("launchgraph {executable}"));
    assert_eq!(program.ok("started"), [1], "it waits still");
    assert_eq!(program.call("join"), "ok");
    program.ok(format!("launchgraph {executable}"));
    assert_eq!(charged(&container), 32 * MIB);
}

#[test]
fn device_reset_discharges_its_graph_memory() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let graph = program.ok(format!("graph {QUOTA}"))[0];
    let executable = program.ok(format!("instantiate {graph}"))[0];
    program.ok(format!("launchgraph {executable}"));
    program.ok("reset");
    assert_eq!(charged(&container), 0);
    program.ok(format!("alloc {QUOTA}"));
}
