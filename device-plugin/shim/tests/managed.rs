//! Tests that managed memory is charged, whatever makes it.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod support;

use bursar_ledger::units::Bytes;
use bursar_sessions::Account;
use support::{Container, MIB};

const QUOTA: u64 = 256 * MIB;

/// Bytes that the driver keeps once managed memory was on a GPU, and the first chunk.
const FIRST_BATCH: u64 = 128 * MIB;

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
fn programs_are_told_that_host_memory_stays_on_the_host() {
    let container = Container::with_quota(QUOTA);
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
