//! Contexts, their stacks and kernels' local memory, charged as the agent does it.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod support;

use support::{Client, Container, MIB};

/// What a context of the simulated GPU takes.
const CONTEXT: u64 = 518 * MIB;
/// What is charged before one was measured.
const UNMEASURED: u64 = 512 * MIB;
/// Stacks of 16 KiB, and 64 KiB of local memory, on 132 multiprocessors with 2,048 threads (F14).
const STACK: u64 = 3960 * MIB;
const LOCALS: u64 = 16_632 * MIB;

const GIB: u64 = 1 << 30;

/// What is charged, and that the driver took as much.
#[track_caller]
fn charged(container: &Container) -> u64 {
    let used = container.usage().used.0;
    assert_eq!(used, container.taken());
    used
}

/// A container whose agent has measured a context, and its first program.
fn measured(quota: u64) -> (Container, Client) {
    let container = Container::charging_contexts(quota);
    let program = container.program();
    assert_eq!(charged(&container), CONTEXT);
    (container, program)
}

#[test]
fn a_context_is_charged_what_it_takes_and_the_rest_of_the_quota_is_free() {
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
fn a_context_fits_in_its_own_size_and_not_in_a_unit_less() {
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
fn every_process_and_every_further_context_is_charged() {
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
        usage.retired.0 == 0 && usage.used.0 == CONTEXT
    });
    program.ok("context");
}

#[test]
fn a_context_that_its_last_user_detaches_gives_back_itself_and_its_memory() {
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
fn a_primary_context_has_no_users_to_detach() {
    let (container, mut program) = measured(GIB);
    let primary = program.ok("current")[0];
    program.ok(format!("detach {primary}"));
    assert_eq!(charged(&container), CONTEXT);
    program.ok("alloc 1");
}

#[test]
fn threads_that_start_together_are_charged_one_primary_context() {
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
fn of_threads_that_retain_and_release_together_the_last_gives_the_primary_context_back() {
    let (container, mut program) = measured(GIB);
    program.ok("release");
    for round in 0..20 {
        assert_eq!(program.ok("toggles 4 20"), [0; 4], "round {round}");
        assert_eq!(charged(&container), 0, "round {round}");
    }
}

#[test]
fn a_green_context_is_charged_and_so_is_the_primary_one_that_it_needs() {
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
fn a_stack_is_charged_when_its_limit_is_set_and_given_back_when_it_is_lowered() {
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
fn a_kernel_with_local_memory_is_charged_when_the_program_gets_hold_of_it() {
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
        // A stack that is no larger is covered.
        program.ok("limit 65536");
        assert_eq!(program.call("limit 65552"), "err 2");
    }
}

#[test]
fn a_kernel_whose_local_memory_does_not_fit_is_out_of_memory() {
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
fn a_context_that_comes_after_its_kernels_is_charged_for_them() {
    let (container, mut program) = measured(3 * CONTEXT + LOCALS);
    program.ok("kernel locals");
    assert_eq!(program.call("context"), "err 2", "twice the local memory");
    assert_eq!(container.usage().used.0, CONTEXT + LOCALS);
    program.ok("reset");
    assert_eq!(container.usage().used.0, CONTEXT + LOCALS);
}

#[test]
fn without_the_agent_no_context_is_made() {
    let mut container = Container::charging_contexts(GIB);
    container.stop_agent();
    let mut program = container.program();
    assert_eq!(program.call("retain"), "err 2");
    container.start_agent();
    program.ok("retain");
    assert_eq!(charged(&container), CONTEXT);
}
