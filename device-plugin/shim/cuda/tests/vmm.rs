//! Tests that memory of `cuMemCreate` is charged until its last handle and mapping is gone.
//!
//! Exported memory stays charged.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod support;

use bursar_ledger::units::Bytes;
use support::{Client, Container, MIB};

const QUOTA: u64 = 256 * MIB;
/// Sizes are multiples of this.
const BLOCK: u64 = 2 * MIB;

/// Creates and maps memory. Returns the handle and the address.
fn mapped(program: &mut Client, bytes: u64) -> (u64, u64) {
    let handle = program.ok(format!("create {bytes} 0 0"))[0];
    let address = program.ok(format!("reserve {bytes}"))[0];
    program.ok(format!("map {address} {bytes} {handle}"));
    (handle, address)
}

#[test]
fn vmm_block_beyond_the_quota_is_denied() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    for bytes in [QUOTA - BLOCK, QUOTA] {
        let handle = program.ok(format!("create {bytes} 0 0"))[0];
        assert_eq!(container.usage().used, Bytes(bytes));
        assert_eq!(
            program.call(format!("create {} 0 0", QUOTA - bytes + BLOCK)),
            "err 2"
        );
        program.ok(format!("releasehandle {handle}"));
        assert_eq!(container.usage().used, Bytes::ZERO);
    }
    assert_eq!(
        program.call(format!("create {} 0 0", QUOTA + BLOCK)),
        "err 2"
    );
    container.wait_for("three denials", |usage| usage.denied == 3);
}

#[test]
fn last_vmm_block_is_denied_beside_other_memory() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let byte = program.ok("alloc 1")[0];
    assert_eq!(program.call(format!("create {QUOTA} 0 0")), "err 2");
    program.ok(format!("free {byte}"));
    program.ok(format!("create {QUOTA} 0 0"));
    assert_eq!(program.call("alloc 1"), "err 2");
}

#[test]
fn size_that_the_driver_refuses_is_not_charged() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    assert_eq!(program.call(format!("create {} 0 0", BLOCK + 1)), "err 1");
    assert_eq!(program.call("create 0 0 0"), "err 1");
    assert_eq!(container.usage().used, Bytes::ZERO);
}

#[test]
fn processes_of_a_container_share_one_quota() {
    let container = Container::with_quota(QUOTA);
    let (mut first, mut second) = (container.program(), container.program());
    first.ok(format!("create {} 0 0", 200 * MIB));
    assert_eq!(second.call(format!("create {} 0 0", 58 * MIB)), "err 2");
    second.ok(format!("create {} 0 0", 56 * MIB));
    assert_eq!(second.call(format!("create {BLOCK} 0 0")), "err 2");
    first.kill();
    container.wait_for("its memory is free", |usage| {
        usage.processes == 1 && usage.exited.0 == 0
    });
    second.ok(format!("create {} 0 0", 200 * MIB));
}

#[test]
fn memory_stays_charged_while_it_is_mapped() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let (handle, address) = mapped(&mut program, QUOTA);
    program.ok(format!("releasehandle {handle}"));
    assert_eq!(container.usage().used, Bytes(QUOTA));
    assert_eq!(program.call("alloc 1"), "err 2");
    assert_eq!(program.ok(format!("retainhandle {address}")), [handle]);
    program.ok(format!("unmap {address} {QUOTA}"));
    assert_eq!(
        container.usage().used,
        Bytes(QUOTA),
        "the handle was retained"
    );
    program.ok(format!("releasehandle {handle}"));
    assert_eq!(container.usage().used, Bytes::ZERO);
    assert!(
        program
            .call(format!("releasehandle {handle}"))
            .starts_with("err")
    );
    program.ok(format!("alloc {QUOTA}"));
}

#[test]
fn sleep_and_wake_a_hundred_times_leaks_no_charge() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let (before, taken) = (container.usage(), container.taken());
    program.ok(format!("sleepwake 100 {QUOTA}"));
    assert_eq!(container.usage().used, before.used);
    assert_eq!(container.usage().denied, before.denied);
    assert_eq!(container.taken(), taken);
    program.ok(format!("create {QUOTA} 0 0"));
}

#[test]
fn vmm_memory_stays_charged_after_its_context_ends() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let (handle, address) = mapped(&mut program, 64 * MIB);
    program.ok("reset");
    assert_eq!(container.usage().used, Bytes(64 * MIB));
    program.ok(format!("unmap {address} {}", 64 * MIB));
    program.ok(format!("releasehandle {handle}"));
    assert_eq!(container.usage().used, Bytes::ZERO);
}

#[test]
fn vmm_memory_is_charged_to_the_gpu_in_its_properties() {
    let container = Container::with_quotas(&[QUOTA, QUOTA / 2]);
    let mut program = container.program();
    program.ok(format!("create {} 1 0", QUOTA / 2));
    assert_eq!(program.call(format!("create {BLOCK} 1 0")), "err 2");
    program.ok(format!("create {QUOTA} 0 0"));
    assert_eq!(container.usage_of(0).used, Bytes(QUOTA));
    assert_eq!(container.usage_of(1).used, Bytes(QUOTA / 2));
}

#[test]
fn exported_memory_stays_charged_after_its_release() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let handle = program.ok(format!("create {} 0 1", 64 * MIB))[0];
    let descriptor = program.ok(format!("exporthandle {handle} 1"))[0];
    program.ok(format!("exporthandle {handle} 1"));
    program.ok(format!("releasehandle {handle}"));
    assert_eq!(container.usage().used, Bytes(64 * MIB));
    // The descriptor alone keeps the memory: it can be imported again without a charge.
    let imported = program.ok(format!("importhandle {descriptor}"))[0];
    assert_eq!(container.usage().used, Bytes(64 * MIB));
    program.ok(format!("releasehandle {imported}"));
    assert_eq!(container.usage().used, Bytes(64 * MIB));
    program.ok(format!("alloc {}", 192 * MIB));
    assert_eq!(program.call("alloc 1"), "err 2");
}

#[test]
fn refused_export_changes_no_charge() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let handle = program.ok(format!("create {BLOCK} 0 0"))[0];
    assert_eq!(program.call(format!("exporthandle {handle} 1")), "err 1");
    program.ok(format!("releasehandle {handle}"));
    assert_eq!(container.usage().used, Bytes::ZERO);
}

#[test]
fn memory_with_a_dma_buf_stays_charged_after_its_free() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let pointer = program.ok(format!("alloc {}", QUOTA / 2))[0];
    let (handle, address) = mapped(&mut program, QUOTA / 2);
    let taken = container.taken();
    let of_linear = program.ok(format!("dmabuf {pointer} {}", QUOTA / 2))[0];
    let of_mapped = program.ok(format!("dmabuf {address} {}", QUOTA / 2))[0];
    program.ok(format!("free {pointer}"));
    program.ok(format!("unmap {address} {}", QUOTA / 2));
    program.ok(format!("releasehandle {handle}"));
    assert_eq!(container.taken(), taken, "the descriptors keep it");
    assert_eq!(container.usage().used, Bytes(QUOTA));
    assert_eq!(program.call("alloc 1"), "err 2");
    program.ok(format!("close {of_linear}"));
    program.ok(format!("close {of_mapped}"));
    assert_eq!(program.call("alloc 1"), "err 2", "another may have them");
    program.kill();
    container.wait_for("the last of it is free", |usage| {
        usage.processes == 0 && usage.exited.0 == 0
    });
    container.program().ok(format!("alloc {QUOTA}"));
}

#[test]
fn refused_address_range_export_changes_no_charge() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let pointer = program.ok(format!("alloc {QUOTA}"))[0];
    assert_eq!(
        program.call(format!("dmabuf {pointer} {}", QUOTA + 1)),
        "err 1"
    );
    program.ok(format!("free {pointer}"));
    assert_eq!(container.usage().used, Bytes::ZERO);
}

#[test]
fn memory_stays_charged_while_a_multicast_object_binds_it() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let object = program.ok(format!("multicast {QUOTA}"))[0];
    assert_eq!(container.usage().used, Bytes::ZERO);
    let taken = container.taken();
    for bind in ["bind", "bindat"] {
        let (handle, address) = mapped(&mut program, QUOTA);
        let what = if bind == "bind" { handle } else { address };
        program.ok(format!("{bind} {object} {what} {QUOTA}"));
        program.ok(format!("unmap {address} {QUOTA}"));
        program.ok(format!("releasehandle {handle}"));
        assert!(container.taken() >= taken + QUOTA);
        assert_eq!(container.usage().used, Bytes(QUOTA));
        assert_eq!(program.call(format!("create {BLOCK} 0 0")), "err 2");
        program.ok(format!("unbind {object} {QUOTA}"));
        assert_eq!(container.usage().used, Bytes::ZERO);
    }
    program.ok(format!("create {QUOTA} 0 0"));
}

#[test]
fn sparse_array_tile_stays_charged_until_the_process_exits() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let array = program.ok("array 8192 8192 0 64")[0];
    let handle = program.ok(format!("create {QUOTA} 0 0"))[0];
    let taken = container.taken();
    program.ok(format!("tile {array} {handle}"));
    program.ok(format!("releasehandle {handle}"));
    assert_eq!(container.taken(), taken, "the array keeps it");
    assert_eq!(container.usage().used, Bytes(QUOTA));
    program.ok(format!("untile {array}"));
    assert_eq!(container.taken(), taken - QUOTA);
    assert_eq!(program.call("alloc 1"), "err 2", "when is not seen");
    program.kill();
    container.wait_for("its memory is free", |usage| {
        usage.processes == 0 && usage.exited.0 == 0
    });
    container.program().ok(format!("alloc {QUOTA}"));
}

#[test]
fn refused_sparse_array_tile_changes_no_charge() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let handle = program.ok(format!("create {QUOTA} 0 0"))[0];
    assert_eq!(program.call(format!("tile 1 {handle}")), "err 1");
    program.ok(format!("releasehandle {handle}"));
    assert_eq!(container.usage().used, Bytes::ZERO);
}

#[test]
fn fabric_handles_are_refused() {
    let container = Container::with_quota(QUOTA);
    let mut program = container.program();
    let handle = program.ok(format!("create {BLOCK} 0 1"))[0];
    assert_eq!(program.call(format!("exporthandle {handle} 8")), "err 800");
    program.ok(format!("releasehandle {handle}"));
    assert_eq!(container.usage().used, Bytes::ZERO);
}

#[test]
fn owner_pays_for_linear_memory_that_another_process_opens() {
    let container = Container::with_quota(QUOTA);
    let (mut owner, mut other) = (container.program(), container.program());
    let pointer = owner.ok(format!("alloc {}", 200 * MIB))[0];
    let object = owner.ok(format!("ipcget {pointer}"))[0];
    let opened = other.ok(format!("ipcopen {object}"))[0];
    assert_eq!(container.usage().used, Bytes(200 * MIB));
    assert_eq!(other.ok("info")[0], 56 * MIB);
    other.ok(format!("ipcclose {opened}"));
    owner.ok(format!("free {pointer}"));
    assert_eq!(container.usage().used, Bytes::ZERO);
    other.ok(format!("alloc {QUOTA}"));
}
