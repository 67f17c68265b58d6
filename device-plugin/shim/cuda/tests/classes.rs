//! Tests that each class of call that takes memory is charged the driver's size, to the byte.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod support;

use support::{Client, Container, MIB};

const QUOTA: u64 = 256 * MIB;

/// Runs a call that takes memory, and the call that frees it. Returns what the driver took and what
/// was charged.
fn taken_and_charged(
    container: &Container,
    program: &mut Client,
    make: &str,
    end: &str,
) -> (u64, u64) {
    let (taken, charged) = (container.taken(), container.usage().used.0);
    let handle = program.ok(make)[0];
    let now = (
        container.taken() - taken,
        container.usage().used.0 - charged,
    );
    program.ok(format!("{end} {handle}"));
    assert_eq!(
        (container.taken(), container.usage().used.0),
        (taken, charged),
        "{make}"
    );
    now
}

/// Asserts that the charge is what the driver took, in whole units.
#[track_caller]
fn assert_exact(container: &Container, program: &mut Client, make: &str, end: &str) {
    let (taken, charged) = taken_and_charged(container, program, make, end);
    assert!(taken > 0, "{make}");
    assert_eq!(charged, taken.next_multiple_of(4096), "{make}");
}

#[test]
fn linear_memory_is_charged_the_drivers_size() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    for bytes in [
        1,
        512,
        4096,
        262_144,
        262_145,
        524_289,
        MIB - 1,
        MIB,
        MIB + 1,
        2 * MIB,
        2 * MIB + 1,
        10 * MIB + 1,
    ] {
        assert_exact(&container, &mut program, &format!("alloc {bytes}"), "free");
    }
    for rows in ["1 1", "1000 1024", "1025 2049"] {
        assert_exact(&container, &mut program, &format!("pitch {rows}"), "free");
    }
}

#[test]
fn arrays_are_charged_the_drivers_size() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    // Two dimensions, one, three, layered, cubemap, with surfaces.
    for shape in [
        "1 1 0 0",
        "65536 1 0 0",
        "1000 1000 0 0",
        "1000 1000 3 0",
        "100 100 17 0",
        "512 512 5 1",
        "256 256 6 4",
        "300 300 1 2",
    ] {
        assert_exact(
            &container,
            &mut program,
            &format!("array {shape}"),
            "unarray",
        );
    }
    for shape in ["1024 1024 0 11", "100 100 100 3", "4096 64 0 1"] {
        assert_exact(
            &container,
            &mut program,
            &format!("mipmap {shape}"),
            "unmipmap",
        );
    }
}

#[test]
fn array_is_denied_one_row_beyond_the_quota() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    // Rows of 32 KiB; the driver rounds their number up to 128.
    for rows in [8191, 8192] {
        let array = program.ok(format!("array 8192 {rows} 0 0"))[0];
        assert_eq!(program.call("array 1 1 0 0"), "err 2");
        assert_eq!(program.call("alloc 1"), "err 2");
        program.ok(format!("unarray {array}"));
    }
    assert_eq!(program.call("array 8192 8193 0 0"), "err 2");
    assert_eq!(program.call("mipmap 8192 8192 0 2"), "err 2");
    assert_eq!(program.call("array 8192 8192 2 1"), "err 2", "two layers");
    container.wait_for("denials are counted", |usage| usage.denied > 0);
    let mipmap = program.ok("mipmap 8192 4096 0 1")[0];
    program.ok(format!("alloc {}", QUOTA / 2));
    assert_eq!(program.call("alloc 1"), "err 2");
    program.ok(format!("unmipmap {mipmap}"));
    program.ok(format!("alloc {}", QUOTA / 2));
}

#[test]
fn array_with_deferred_mapping_is_not_charged() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    for flags in [0x40, 0x80] {
        let call = format!("array 65536 65536 0 {flags}");
        assert_eq!(
            taken_and_charged(&container, &mut program, &call, "unarray"),
            (0, 0)
        );
    }
}

#[test]
fn array_is_discharged_with_its_context() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    program.ok("array 8192 8192 0 0");
    assert_eq!(container.usage().used.0, QUOTA);
    program.ok("reset");
    assert_eq!(container.usage().used.0, 0);
    program.ok("array 8192 8192 0 0");
}

#[test]
fn denial_without_a_request_is_reported_too() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    // More than any quota can be.
    assert_eq!(program.call(format!("alloc {}", 1_u64 << 60)), "err 2");
    container.wait_for("it is counted", |usage| usage.denied == 1);
}

#[test]
fn steps_of_a_process_checkpoint_are_refused() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    // A checkpoint of a process that maps retained memory could not be restored.
    for name in [
        "cuCheckpointProcessLock",
        "cuCheckpointProcessCheckpoint",
        "cuCheckpointProcessRestore",
        "cuCheckpointProcessUnlock",
    ] {
        assert_eq!(program.call(format!("bare {name}")), "err 801", "{name}");
        let address = program.call(format!("address {name} 12080 0"));
        assert!(address.starts_with("ok 1 "), "{name}: {address}");
    }
    // A question is the driver's to answer. Process 0 does not exist.
    assert_eq!(program.call("bare cuCheckpointProcessGetState"), "err 1");
}

#[test]
fn table_of_cuda_checkpoint_is_refused_and_others_are_passed_on() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let checkpoint = "69a28e9f24498b47b030c5da330ea4e9";
    assert_eq!(program.call(format!("table {checkpoint}")), "err 801");
    // The simulated driver's table that allocates, "bursar-sim-alloc".
    let other = "6275727361722d73696d2d616c6c6f63";
    assert_eq!(program.call(format!("table {other}")), "ok true");
    let unknown = "00".repeat(16);
    assert_eq!(program.call(format!("table {unknown}")), "err 500");
}

#[test]
fn functions_of_cuda_2_are_refused() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    for name in [
        "cuMemAlloc",
        "cuMemAllocPitch",
        "cuArrayCreate",
        "cuArray3DCreate",
        "cuMemGetInfo",
    ] {
        assert_eq!(program.call(format!("bare {name}")), "err 801", "{name}");
    }
}
