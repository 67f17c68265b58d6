//! The simulated driver keeps the facts of the design (section 1) that the product rests on.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

use bursar_sim_lab::{Actor, H200, Lab, ONE_GPU};
use rustix::process::{Pid, Signal, kill_process};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// A context's bytes.
const CONTEXT: u64 = 518 * MIB;
/// A context-free owner's bytes.
const CLIENT: u64 = 4 * MIB;

fn lab() -> Lab {
    Lab::new(ONE_GPU).unwrap()
}

fn in_context(lab: &Lab) -> Actor {
    let mut actor = lab.actor().unwrap();
    actor.ask("context 0").unwrap();
    actor
}

/// What NVML says: used bytes, and the processes with theirs.
fn nvml(lab: &Lab) -> (u64, Vec<(u32, u64)>) {
    let mut observer = lab.actor().unwrap();
    let used = observer.number("nvml-used 0");
    let processes = observer.ask("nvml-processes 0").unwrap();
    let parse = |process: &str| {
        let (pid, bytes) = process.split_once(':').unwrap();
        (pid.parse().unwrap(), bytes.parse().unwrap())
    };
    (used, processes.split_whitespace().map(parse).collect())
}

/// Waits until that is so: an actor that another test starts has our descriptors for a moment.
fn until_nvml(lab: &Lab, expected: (u64, Vec<(u32, u64)>)) {
    let begun = Instant::now();
    while nvml(lab) != expected && begun.elapsed() < Duration::from_secs(5) {}
    assert_eq!(nvml(lab), expected);
}

fn end(child: u64) {
    let pid = Pid::from_raw(i32::try_from(child).unwrap()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    // It is init's child by now, or a zombie of the actor's: its locks are gone once its files are.
    for _ in 0..500 {
        let status = std::fs::read_to_string(format!("/proc/{child}/status")).unwrap_or_default();
        if status.is_empty() || status.contains("State:\tZ") {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{child} did not end");
}

#[test]
fn f1_a_fault_poisons_the_image_and_reset_heals_nothing() {
    let lab = lab();
    let mut actor = in_context(&lab);
    assert_eq!(
        actor.ask("launch fault"),
        Ok(String::new()),
        "a launch does not see its own fault"
    );
    assert_eq!(actor.ask("sync"), Err(700));
    assert_eq!(actor.ask("alloc 1024"), Err(700));
    assert_eq!(actor.ask("create 2097152"), Err(700));
    assert_eq!(actor.ask("reset 0"), Ok(String::new()));
    assert_eq!(actor.ask("context 0"), Err(700));
}

#[test]
fn f1_execve_gives_a_fresh_image_with_the_same_pid() {
    let lab = lab();
    let mut actor = in_context(&lab);
    actor.number("alloc 1073741824");
    actor.ask("launch trap").unwrap();
    assert_eq!(actor.ask("sync"), Err(719));
    let pid = actor.number("pid");
    actor.tell("exec");
    assert_eq!(actor.number("pid"), pid);
    assert_eq!(nvml(&lab), (0, vec![]), "the old image's memory is back");
    actor.ask("context 0").unwrap();
    let at = actor.number("alloc 1024");
    actor.ask(&format!("launch fill {at} 7 1024")).unwrap();
    assert_eq!(actor.number(&format!("read {at}")), 7);
}

#[test]
fn f1_a_code_injected_from_outside_is_as_sticky_as_a_fault() {
    let lab = lab();
    let mut actor = in_context(&lab);
    let mut neighbour = in_context(&lab);
    lab.simgpu(&["poison", &actor.pid().to_string(), "702"])
        .unwrap();
    assert_eq!(actor.ask("sync"), Err(702));
    assert_eq!(actor.ask("context 0"), Err(702));
    assert_eq!(neighbour.ask("sync"), Ok(String::new()));
}

#[test]
fn f2_another_process_memory_survives_a_client_fault_and_death_with_its_contents() {
    let lab = lab();
    let mut owner = lab.actor().unwrap();
    let handle = owner.number("create 67108864");
    let descriptor = owner.take_export(handle).unwrap();
    let mut client = in_context(&lab);
    let imported: u64 = client.import(&descriptor).unwrap().parse().unwrap();
    let at = client.number(&format!("attach {imported} 67108864"));
    client.ask(&format!("fill {at} 42 1000")).unwrap();
    client.ask("launch fault").unwrap();
    assert_eq!(client.ask("sync"), Err(700));
    client.kill();
    let mut next = in_context(&lab);
    let imported: u64 = next.import(&descriptor).unwrap().parse().unwrap();
    let at = next.number(&format!("attach {imported} 67108864"));
    assert_eq!(next.number(&format!("read {}", at + 999)), 42);
    assert_eq!(next.number(&format!("read {}", at + 1000)), 0);
}

#[test]
fn f3_an_owner_needs_no_context_and_is_on_no_list() {
    let lab = lab();
    let mut owner = lab.actor().unwrap();
    let handle = owner.number("create 1073741824");
    let _descriptor = owner.take_export(handle).unwrap();
    assert_eq!(nvml(&lab), (GIB + CLIENT, vec![]));
    let mut neighbour = in_context(&lab);
    neighbour.ask("launch fault").unwrap();
    assert_eq!(neighbour.ask("sync"), Err(700));
    owner.number("create 2097152");
}

#[test]
fn f4_an_open_descriptor_alone_keeps_the_memory_and_can_be_imported_again() {
    let lab = lab();
    let mut owner = lab.actor().unwrap();
    let handle = owner.number("create 1073741824");
    let descriptor = owner.take_export(handle).unwrap();
    owner.kill();
    assert_eq!(nvml(&lab), (GIB, vec![]));
    let mut client = in_context(&lab);
    client.import(&descriptor).unwrap();
    drop(descriptor);
    client.kill();
    until_nvml(&lab, (0, vec![]));
}

#[test]
fn f4_a_mapping_outlives_owner_handle_and_descriptor() {
    let lab = lab();
    let mut owner = lab.actor().unwrap();
    let handle = owner.number("create 1073741824");
    let descriptor = owner.take_export(handle).unwrap();
    let mut client = in_context(&lab);
    let imported: u64 = client.import(&descriptor).unwrap().parse().unwrap();
    let at = client.number(&format!("attach {imported} 1073741824"));
    owner.kill();
    drop(descriptor);
    client.ask(&format!("release {imported}")).unwrap();
    client.ask(&format!("fill {at} 9 4096")).unwrap();
    assert_eq!(nvml(&lab).0, GIB + CONTEXT);
    client.ask(&format!("unmap {at} 1073741824")).unwrap();
    assert_eq!(nvml(&lab).0, CONTEXT);
}

#[test]
fn f4_an_importer_cannot_export_again() {
    let lab = lab();
    let mut owner = lab.actor().unwrap();
    let handle = owner.number("create 2097152");
    let descriptor = owner.take_export(handle).unwrap();
    let mut client = in_context(&lab);
    let imported = client.import(&descriptor).unwrap();
    assert_eq!(client.ask(&format!("export {imported}")), Err(1));
}

#[test]
fn f4_a_descriptor_in_flight_or_in_a_sibling_without_cuda_keeps_the_memory() {
    let lab = lab();
    let mut owner = lab.actor().unwrap();
    let handle = owner.number("create 1073741824");
    let descriptor = owner.take_export(handle).unwrap();
    let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
    bursar_sim_lab::send(&near, b"!", Some(std::os::fd::AsFd::as_fd(&descriptor))).unwrap();
    drop(descriptor);
    owner.kill();
    assert_eq!(nvml(&lab).0, GIB, "it is in the socket's queue");
    let received = bursar_sim_lab::receive(&far).unwrap();
    assert_eq!(nvml(&lab).0, GIB, "it is here again");
    drop(received);
    until_nvml(&lab, (0, vec![]));
}

#[test]
fn f5_brokered_memory_is_charged_to_nobody_and_then_to_the_last_importer() {
    let lab = lab();
    let mut owner = lab.actor().unwrap();
    let handle = owner.number("create 1073741824");
    let descriptor = owner.take_export(handle).unwrap();
    let mut client = in_context(&lab);
    client.import(&descriptor).unwrap();
    let pid = client.pid();
    assert_eq!(nvml(&lab), (GIB + CLIENT + CONTEXT, vec![(pid, CONTEXT)]));
    owner.kill();
    assert_eq!(
        nvml(&lab),
        (GIB + CONTEXT, vec![(pid, CONTEXT)]),
        "the descriptor is a reference"
    );
    drop(descriptor);
    until_nvml(&lab, (GIB + CONTEXT, vec![(pid, GIB + CONTEXT)]));
}

/// As on an H200 with driver 580.
#[test]
fn f5_who_made_memory_is_charged_for_it_while_it_refers_to_it_whatever_others_do() {
    let lab = lab();
    let mut owner = in_context(&lab);
    let pid = owner.pid();
    let handle = owner.number("create 1073741824");
    let descriptor = owner.take_export(handle).unwrap();
    let with = (GIB + CONTEXT, vec![(pid, GIB + CONTEXT)]);
    assert_eq!(nvml(&lab), with, "a descriptor is open");
    owner.ask(&format!("release {handle}")).unwrap();
    assert_eq!(
        nvml(&lab),
        (GIB + CONTEXT, vec![(pid, CONTEXT)]),
        "nothing else is"
    );
    drop(descriptor);
    until_nvml(&lab, (CONTEXT, vec![(pid, CONTEXT)]));
}

#[test]
fn f5_a_process_is_charged_its_context_and_what_it_allocated_itself() {
    let lab = lab();
    let mut actor = in_context(&lab);
    let pid = actor.pid();
    assert_eq!(nvml(&lab), (CONTEXT, vec![(pid, CONTEXT)]));
    actor.number("alloc 1048576");
    let handle = actor.number("create 4194304");
    assert_eq!(
        nvml(&lab),
        (CONTEXT + 5 * MIB, vec![(pid, CONTEXT + 5 * MIB)])
    );
    actor.ask(&format!("release {handle}")).unwrap();
    assert_eq!(nvml(&lab), (CONTEXT + MIB, vec![(pid, CONTEXT + MIB)]));
    assert_eq!(actor.number("info"), CONTEXT + MIB);
}

#[test]
fn f6_freed_memory_comes_back_zeroed_unless_scrubbing_is_off() {
    let lab = lab();
    let mut actor = in_context(&lab);
    let again = |actor: &mut Actor| {
        let at = actor.number("alloc 1048576");
        actor.ask(&format!("fill {at} 165 1048576")).unwrap();
        actor.ask(&format!("free {at}")).unwrap();
        let at = actor.number("alloc 1048576");
        let seen = actor.number(&format!("read {at}"));
        actor.ask(&format!("free {at}")).unwrap();
        seen
    };
    assert_eq!(again(&mut actor), 0);
    lab.simgpu(&["scrub", "off"]).unwrap();
    assert_eq!(again(&mut actor), 165);
    lab.simgpu(&["scrub", "on"]).unwrap();
    assert_eq!(again(&mut actor), 0);
}

#[test]
fn f8_memory_is_back_after_sigkill_under_a_running_kernel() {
    let lab = lab();
    let mut actor = in_context(&lab);
    actor.number("alloc 10737418240");
    actor.ask("launch spin 0").unwrap();
    actor.tell("sync");
    actor.kill();
    assert_eq!(nvml(&lab), (0, vec![]));
}

#[test]
fn f13_a_dead_process_memory_stays_under_its_pid_until_its_forked_child_ends() {
    let lab = lab();
    let mut actor = in_context(&lab);
    actor.number("alloc 1073741824");
    let child = actor.number("fork");
    let pid = actor.pid();
    actor.kill();
    assert_eq!(nvml(&lab), (GIB + CONTEXT, vec![(pid, GIB + CONTEXT)]));
    end(child);
    assert_eq!(nvml(&lab), (0, vec![]));
}

#[test]
fn f13_a_dead_exporter_memory_stays_with_nobody_listed_while_a_descriptor_sits_elsewhere() {
    let lab = lab();
    let mut exporter = in_context(&lab);
    let handle = exporter.number("create 1073741824");
    let descriptor = exporter.take_export(handle).unwrap();
    exporter.kill();
    assert_eq!(nvml(&lab), (GIB, vec![]));
    drop(descriptor);
    until_nvml(&lab, (0, vec![]));
}

#[test]
fn f13_a_dead_ipc_exporter_memory_is_charged_to_the_importer() {
    let lab = lab();
    let (mut exporter, mut importer) = (in_context(&lab), in_context(&lab));
    let at = exporter.number("alloc 1073741824");
    exporter.ask(&format!("fill {at} 3 100")).unwrap();
    let object = exporter.number(&format!("share {at}"));
    let there = importer.number(&format!("open {object}"));
    assert_eq!(importer.number(&format!("read {there}")), 3);
    let (first, second) = (exporter.pid(), importer.pid());
    let mut listed = nvml(&lab).1;
    listed.sort_unstable();
    let mut expected = vec![(first, GIB + CONTEXT), (second, CONTEXT)];
    expected.sort_unstable();
    assert_eq!(listed, expected);
    exporter.kill();
    assert_eq!(nvml(&lab), (GIB + CONTEXT, vec![(second, GIB + CONTEXT)]));
    assert_eq!(importer.number(&format!("read {there}")), 3);
}

#[test]
fn f14_a_stack_limit_takes_memory_for_every_thread_that_can_be_resident() {
    let lab = Lab::new(H200).unwrap();
    let mut actor = in_context(&lab);
    actor.ask("limit 16384").unwrap();
    assert_eq!(actor.number("info"), CONTEXT + 3_960 * MIB);
    actor.ask("limit 262144").unwrap();
    assert_eq!(actor.number("info"), CONTEXT + 67_320 * MIB);
    actor.ask("limit 1024").unwrap();
    assert_eq!(actor.number("info"), CONTEXT);
}

#[test]
fn f14_one_launch_with_64_kib_of_locals_takes_memory_that_stays() {
    let lab = Lab::new(H200).unwrap();
    let mut actor = in_context(&lab);
    actor.ask("launch locals").unwrap();
    actor.ask("sync").unwrap();
    assert_eq!(actor.number("info"), CONTEXT + 16_632 * MIB);
    actor.kill();
    assert_eq!(nvml(&lab).0, 0);
}

#[test]
fn f14_a_stack_that_does_not_fit_is_out_of_memory() {
    let lab = lab();
    let mut actor = in_context(&lab);
    assert_eq!(actor.ask("limit 262144"), Err(2));
    assert_eq!(actor.number("info"), CONTEXT);
}

#[test]
fn f15_a_pool_grows_by_32_mib_and_shrinks_only_at_a_synchronise() {
    let lab = lab();
    let mut actor = in_context(&lab);
    let small = actor.number("poolalloc 1");
    assert_eq!(actor.number("reserved"), 32 * MIB);
    assert_eq!(actor.number("info"), CONTEXT + 32 * MIB);
    actor.ask(&format!("poolfree {small}")).unwrap();
    assert_eq!(actor.number("reserved"), 32 * MIB, "a free keeps it");
    actor.ask("sync").unwrap();
    assert_eq!(actor.number("reserved"), 0);
    let big = actor.number("poolalloc 34603008");
    assert_eq!(actor.number("reserved"), 64 * MIB);
    actor.ask("sync").unwrap();
    assert_eq!(actor.number("reserved"), 64 * MIB, "what is used stays");
    actor.ask(&format!("free {big}")).unwrap();
    actor.ask("sync").unwrap();
    assert_eq!(actor.number("info"), CONTEXT);
}

#[test]
fn f15_linear_memory_that_a_stream_frees_goes_at_a_synchronise() {
    let lab = lab();
    let mut actor = in_context(&lab);
    let at = actor.number("alloc 1073741824");
    actor.ask(&format!("poolfree {at}")).unwrap();
    assert_eq!(actor.number("info"), CONTEXT + GIB);
    actor.ask("sync").unwrap();
    assert_eq!(actor.number("info"), CONTEXT);
}
