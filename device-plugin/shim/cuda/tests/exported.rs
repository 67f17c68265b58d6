//! Tests that a dead process's exported memory stays charged while another process holds it.
//!
//! The memory is free for another process soon after its last holder's end (facts F4, F13).

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod support;

use std::time::{Duration, Instant};

use support::{Client, Container, MIB};

const GIB: u64 = 1 << 30;
const QUOTA: u64 = 8 * GIB;
const SHARED: u64 = 4 * GIB;
/// The memory that a second process may take beside the exported memory; its context needs some
/// too.
const BESIDE: u64 = 2 * GIB;

/// The most that may be discharged too early: what the driver does not list of each of three
/// processes.
const UNLISTED: u64 = 3 * 9 * MIB;

/// The most from a holder's end until another process gets the memory on a busy machine. The proof
/// takes half a second on a quiet one.
const SOON: Duration = Duration::from_secs(5);

fn exporter(container: &Container) -> (Client, u64) {
    let mut exporter = container.program();
    let handle = exporter.ok(format!("create {SHARED} 0 1"))[0];
    let descriptor = exporter.ok(format!("exporthandle {handle} 1"))[0];
    (exporter, descriptor)
}

/// Passes a descriptor to another program. Returns its number there.
fn hand_over(from: &mut Client, descriptor: u64, to: &mut Client) -> u64 {
    let name = format!("bursar-test-{}-{}", std::process::id(), to.pid());
    to.send(&format!("recvfd {name}"));
    from.ok(format!("sendfd {descriptor} {name}"));
    let answer = to.read();
    answer.strip_prefix("ok ").unwrap().parse().unwrap()
}

/// Asserts that no process gets the memory for a while after the exporter's death.
fn is_held(container: &Container, other: &mut Client) {
    container.wait_for("its death is noticed", |usage| usage.exited.0 > 0);
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(1_500) {
        let usage = container.usage();
        assert!(usage.exited.0 + UNLISTED >= SHARED, "{usage:?}");
        let pointer = other.ok(format!("alloc {BESIDE}"))[0];
        other.ok(format!("free {pointer}"));
        assert_eq!(other.call(format!("alloc {}", BESIDE + SHARED)), "err 2");
    }
}

/// Waits until another process gets the memory. Returns how long that took.
fn is_free(container: &Container, other: &mut Client) -> Duration {
    let start = Instant::now();
    while other.call(format!("alloc {}", BESIDE + SHARED)) == "err 2" {
        let took = start.elapsed();
        assert!(took < SOON, "{took:?}: {:?}", container.usage());
        std::thread::sleep(Duration::from_millis(10));
    }
    let took = start.elapsed();
    assert_eq!(container.usage().exited.0, 0);
    println!("free for another {took:?} after the last holder's end");
    assert!(took < SOON, "{took:?}");
    took
}

#[test]
fn killed_exporters_memory_stays_charged_while_a_sibling_has_fd() {
    let container = Container::charging_contexts(QUOTA);
    let (mut exporter, descriptor) = exporter(&container);
    let (mut sibling, mut other) = (container.program(), container.program());
    let parked = hand_over(&mut exporter, descriptor, &mut sibling);
    exporter.kill();
    is_held(&container, &mut other);
    sibling.ok(format!("close {parked}"));
    is_free(&container, &mut other);
}

#[test]
fn killed_sibling_releases_the_exported_memory_too() {
    let container = Container::charging_contexts(QUOTA);
    let (mut exporter, descriptor) = exporter(&container);
    let (mut sibling, mut other) = (container.program(), container.program());
    hand_over(&mut exporter, descriptor, &mut sibling);
    exporter.kill();
    is_held(&container, &mut other);
    sibling.kill();
    is_free(&container, &mut other);
}

#[test]
fn imported_memory_stays_charged_after_owner_and_fds_are_gone() {
    let container = Container::charging_contexts(QUOTA);
    let (mut exporter, descriptor) = exporter(&container);
    let (mut importer, mut other) = (container.program(), container.program());
    let taken = hand_over(&mut exporter, descriptor, &mut importer);
    let handle = importer.ok(format!("importhandle {taken}"))[0];
    let address = importer.ok(format!("reserve {SHARED}"))[0];
    importer.ok(format!("map {address} {SHARED} {handle}"));
    importer.ok(format!("close {taken}"));
    exporter.kill();
    is_held(&container, &mut other);
    importer.ok(format!("releasehandle {handle}"));
    is_held(&container, &mut other);
    importer.ok(format!("unmap {address} {SHARED}"));
    is_free(&container, &mut other);
}

#[test]
fn ipc_memory_stays_charged_while_an_importer_has_it_open() {
    let container = Container::charging_contexts(QUOTA);
    let mut exporter = container.program();
    let pointer = exporter.ok(format!("alloc {SHARED}"))[0];
    let object = exporter.ok(format!("ipcget {pointer}"))[0];
    let (mut importer, mut other) = (container.program(), container.program());
    let opened = importer.ok(format!("ipcopen {object}"))[0];
    exporter.kill();
    is_held(&container, &mut other);
    importer.ok(format!("ipcclose {opened}"));
    is_free(&container, &mut other);
}

#[test]
fn restarted_agent_keeps_exported_memory_charged() {
    let mut container = Container::charging_contexts(QUOTA);
    let (mut exporter, descriptor) = exporter(&container);
    let (mut sibling, mut other) = (container.program(), container.program());
    let parked = hand_over(&mut exporter, descriptor, &mut sibling);
    container.stop_agent();
    exporter.kill();
    container.start_agent();
    // Both programs connect to the new agent.
    sibling.ok("info");
    is_held(&container, &mut other);
    container.stop_agent();
    container.start_agent();
    is_held(&container, &mut other);
    sibling.ok(format!("close {parked}"));
    is_free(&container, &mut other);
}

#[test]
fn unshared_memory_of_a_killed_exporter_is_free_at_once() {
    let container = Container::charging_contexts(QUOTA);
    let mut living = container.program();
    let handle = living.ok(format!("create {} 0 1", 256 * MIB))[0];
    living.ok(format!("exporthandle {handle} 1"));
    let mut other = container.program();
    for _ in 0..3 {
        let (exporter, _) = exporter(&container);
        exporter.kill();
        let start = Instant::now();
        while other.call(format!("alloc {SHARED}")) == "err 2" {
            assert!(start.elapsed() < SOON, "{:?}", container.usage());
        }
        println!("free for another after {:?}", start.elapsed());
        other.kill();
        container.wait_for("only the one that lives has memory", |usage| {
            usage.processes == 1 && usage.exited.0 == 0
        });
        other = container.program();
    }
}
