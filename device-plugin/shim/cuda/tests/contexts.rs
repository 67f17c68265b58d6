//! Tests the charges of contexts, their stacks and kernels' local memory.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod support;

use support::{Client, Container, MIB};

/// Bytes of a context of the simulated GPU.
const CONTEXT: u64 = 518 * MIB;
/// Bytes charged before a context was measured.
const UNMEASURED: u64 = 512 * MIB;
/// Stacks of 16 KiB, and 64 KiB of local memory, on 132 multiprocessors with 2,048 threads (fact
/// F14).
const STACK: u64 = 3960 * MIB;
const LOCALS: u64 = 16_632 * MIB;

const GIB: u64 = 1 << 30;

/// Returns the charged bytes, and asserts that the driver took as much.
#[track_caller]
fn charged(container: &Container) -> u64 {
    let used = container.usage().used.0;
    assert_eq!(used, container.taken());
    used
}

/// Starts a container whose agent has measured a context, and its first program.
fn measured(quota: u64) -> (Container, Client) {
    let container = Container::charging_contexts(quota);
    let program = container.program();
    assert_eq!(charged(&container), CONTEXT);
    (container, program)
}

#[test]
fn context_is_charged_its_size() {
    let (container, mut program) = measured(GIB);
    assert_eq!(program.ok("info"), [GIB - CONTEXT, GIB]);
    assert_eq!(program.ok("total"), [GIB]);
    let pointer = program.ok(format!("alloc {}", GIB - CONTEXT))[0];
    assert_eq!(program.call("alloc 1"), "err 2");
    program.ok(format!("free {pointer}"));
    assert_eq!(
        program.call(format!("alloc {}", GIB - CONTEXT + 1)),
        "err 2"
    );
    program.ok("release");
    assert_eq!(charged(&container), 0);
    program.ok("retain");
    program.ok("retain");
    assert_eq!(charged(&container), CONTEXT, "the primary context is one");
    program.ok("reset");
    assert_eq!(charged(&container), CONTEXT);
}

#[test]
fn context_is_denied_one_unit_below_its_size() {
    for container in [
        Container::charging_contexts(CONTEXT - 4096),
        Container::with_unmeasured_contexts(UNMEASURED - 4096),
    ] {
        assert_eq!(container.program().call("retain"), "err 2");
        assert_eq!(charged(&container), 0);
    }
    let container = Container::with_unmeasured_contexts(UNMEASURED);
    let _program = container.program();
    assert_eq!(container.usage().used.0, UNMEASURED, "an estimate");
    let (container, mut program) = measured(CONTEXT);
    assert_eq!(program.call("alloc 1"), "err 2");
    assert_eq!(program.call("context"), "err 2");
    assert_eq!(charged(&container), CONTEXT);
}

#[test]
fn every_context_of_every_process_is_charged() {
    let (container, mut program) = measured(3 * CONTEXT);
    let second = program.ok("context")[0];
    let mut sibling = container.program();
    assert_eq!(charged(&container), 3 * CONTEXT);
    assert_eq!(sibling.call("context"), "err 2");
    assert_eq!(program.call("alloc 1"), "err 2");
    program.ok(format!("destroy {second}"));
    assert_eq!(charged(&container), 2 * CONTEXT);
    sibling.ok("context");
    sibling.kill();
    container.wait_for("the dead one's contexts are free", |usage| {
        usage.exited.0 == 0 && usage.used.0 == CONTEXT
    });
    program.ok("context");
}

#[test]
fn context_is_discharged_when_its_last_user_detaches() {
    let (container, mut program) = measured(3 * CONTEXT);
    let second = program.ok("context")[0];
    program.ok("attach");
    program.ok(format!("alloc {}", 100 * MIB));
    assert_eq!(charged(&container), 2 * CONTEXT + 100 * MIB);
    program.ok(format!("detach {second}"));
    assert_eq!(charged(&container), 2 * CONTEXT + 100 * MIB, "another user");
    program.ok(format!("detach {second}"));
    assert_eq!(charged(&container), CONTEXT);
    assert_eq!(program.call(format!("detach {second}")), "err 201");
    program.ok(format!("alloc {}", 2 * CONTEXT));
    assert_eq!(program.call("alloc 1"), "err 2");
}

#[test]
fn detach_does_not_discharge_a_primary_context() {
    let (container, mut program) = measured(GIB);
    let primary = program.ok("current")[0];
    program.ok(format!("detach {primary}"));
    assert_eq!(charged(&container), CONTEXT);
    program.ok("alloc 1");
}

#[test]
fn racing_threads_are_charged_one_primary_context() {
    let (container, mut program) = measured(GIB);
    for _ in 0..5 {
        program.ok("release");
        assert_eq!(charged(&container), 0);
        assert_eq!(program.ok("retains 8"), [0; 8]);
        assert_eq!(charged(&container), CONTEXT);
        for _ in 0..7 {
            program.ok("release");
        }
    }
}

#[test]
fn primary_context_is_discharged_when_racing_threads_release_it() {
    let (container, mut program) = measured(GIB);
    program.ok("release");
    for round in 0..20 {
        assert_eq!(program.ok("toggles 4 20"), [0; 4], "round {round}");
        assert_eq!(charged(&container), 0, "round {round}");
    }
}

#[test]
fn green_context_is_charged_with_its_primary_context() {
    let (container, mut program) = measured(CONTEXT + 6 * MIB);
    let green = program.ok("green")[0];
    assert_eq!(charged(&container), CONTEXT + 6 * MIB);
    assert_eq!(program.call("green"), "err 2");
    program.ok(format!("ungreen {green}"));
    program.ok("release");
    assert_eq!(charged(&container), 0);
    let green = program.ok("green")[0];
    assert_eq!(charged(&container), CONTEXT + 6 * MIB);
    program.ok(format!("ungreen {green}"));
    assert_eq!(charged(&container), 0, "it was the primary one's last user");
}

#[test]
fn stack_charge_follows_the_stack_limit() {
    let (container, mut program) = measured(CONTEXT + STACK);
    for below in [16 << 10, (16 << 10) - 16] {
        program.ok(format!("limit {below}"));
        assert_eq!(
            charged(&container),
            CONTEXT + STACK - 132 * 2048 * ((16 << 10) - below)
        );
    }
    program.ok("limit 16384");
    assert_eq!(program.call("alloc 1"), "err 2");
    assert_eq!(program.call("limit 16385"), "err 2");
    assert_eq!(charged(&container), CONTEXT + STACK);
    program.ok("limit 1024");
    assert_eq!(charged(&container), CONTEXT);
    program.ok("limit 16384");
    program.ok("reset");
    assert_eq!(charged(&container), CONTEXT);
    program.ok(format!("alloc {STACK}"));
    assert_eq!(program.call("limit 2048"), "err 2");
}

#[test]
fn local_memory_is_charged_when_a_kernel_handle_is_returned() {
    for (one, all) in [("function", "functions"), ("kernel", "kernels")] {
        let (container, mut program) = measured(CONTEXT + LOCALS);
        program.ok(format!("{one} fill"));
        assert_eq!(charged(&container), CONTEXT);
        let kernel = program.ok(format!("{one} locals"))[0];
        assert_eq!(container.usage().used.0, CONTEXT + LOCALS);
        assert_eq!(program.call("alloc 1"), "err 2");
        program.ok(format!("launch {kernel}"));
        assert_eq!(charged(&container), CONTEXT + LOCALS);
        program.ok(format!("{one} locals"));
        assert!(program.ok(all)[0] > 1);
        assert_eq!(charged(&container), CONTEXT + LOCALS, "once");
        // A stack that is no larger is already charged.
        program.ok("limit 65536");
        assert_eq!(program.call("limit 65552"), "err 2");
    }
}

#[test]
fn kernel_handle_is_denied_when_its_local_memory_exceeds_quota() {
    for (one, all) in [("function", "functions"), ("kernel", "kernels")] {
        let (container, mut program) = measured(CONTEXT + LOCALS - 4096);
        assert_eq!(program.call(format!("{one} locals")), "err 2");
        assert_eq!(program.call(all), "err 2");
        assert_eq!(charged(&container), CONTEXT);
        program.ok(format!("{one} spin"));
        program.ok(format!("alloc {}", LOCALS - 2 * MIB));
    }
}

#[test]
fn denied_kernel_handle_leaves_no_context_charged() {
    for lookup in ["function locals", "functions", "kernel locals", "kernels"] {
        let (container, mut program) = measured(2 * CONTEXT + LOCALS);
        program.ok("context");
        assert_eq!(program.call(lookup), "err 2", "{lookup}: twice");
        assert_eq!(charged(&container), 2 * CONTEXT, "{lookup}");
        program.ok("limit 16384");
        assert_eq!(charged(&container), 2 * CONTEXT + STACK, "{lookup}");
    }
}

#[test]
fn denied_kernel_handle_leaves_no_device_charged() {
    let container = Container::with_quotas(&[2 * LOCALS, MIB]);
    let mut program = container.program();
    program.ok("device 1");
    assert_eq!(program.call("kernel locals"), "err 2");
    assert_eq!(container.usage_of(0).used.0, 0);
    assert_eq!(container.usage_of(1).used.0, 0);
}

#[test]
fn new_context_is_charged_for_known_kernels() {
    let (container, mut program) = measured(3 * CONTEXT + LOCALS);
    program.ok("kernel locals");
    assert_eq!(program.call("context"), "err 2", "twice the local memory");
    assert_eq!(container.usage().used.0, CONTEXT + LOCALS);
    program.ok("reset");
    assert_eq!(container.usage().used.0, CONTEXT + LOCALS);
}

#[test]
fn context_creation_fails_without_the_agent() {
    let mut container = Container::charging_contexts(GIB);
    container.stop_agent();
    let mut program = container.program();
    assert_eq!(program.call("retain"), "err 2");
    container.start_agent();
    program.ok("retain");
    assert_eq!(charged(&container), CONTEXT);
}
