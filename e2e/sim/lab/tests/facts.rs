//! Verifies that the simulated driver has the properties in `docs/internals/facts.md` (F1 to F6,
//! F8, F13 to F15, F22 to F28).

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

use bursar_sim_lab::{DriverClient, H200, ONE_GPU, SimMachine};
use rustix::process::{Pid, Signal, kill_process};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Bytes of a context.
const CONTEXT: u64 = 518 * MIB;
/// Bytes of a process that owns memory without a context.
const CONTEXT_FREE_OVERHEAD: u64 = 4 * MIB;

fn start_machine() -> SimMachine {
    SimMachine::new(ONE_GPU).unwrap()
}

fn spawn_client_with_context(machine: &SimMachine) -> DriverClient {
    let mut client = machine.spawn_client().unwrap();
    client.request("context 0").unwrap();
    client
}

/// Reads NVML: the used bytes, and each process with its bytes.
fn read_nvml(machine: &SimMachine) -> (u64, Vec<(u32, u64)>) {
    let mut observer = machine.spawn_client().unwrap();
    let used = observer.request_number("nvml-used 0");
    let processes = observer.request("nvml-processes 0").unwrap();
    let parse = |process: &str| {
        let (pid, bytes) = process.split_once(':').unwrap();
        (pid.parse().unwrap(), bytes.parse().unwrap())
    };
    (used, processes.split_whitespace().map(parse).collect())
}

/// Waits until NVML reports `expected`.
///
/// A client that another test starts shares this process's descriptors until its `execve`.
fn wait_for_nvml(machine: &SimMachine, expected: (u64, Vec<(u32, u64)>)) {
    let start = Instant::now();
    while read_nvml(machine) != expected && start.elapsed() < Duration::from_secs(5) {}
    assert_eq!(read_nvml(machine), expected);
}

fn kill_and_wait(child: u64) {
    let pid = Pid::from_raw(i32::try_from(child).unwrap()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    // The child is by now init's, or a zombie of the client's; the kernel drops its locks with its
    // files.
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
fn f1_image_stays_poisoned_after_reset() {
    let machine = start_machine();
    let mut client = spawn_client_with_context(&machine);
    assert_eq!(
        client.request("launch fault"),
        Ok(String::new()),
        "a launch does not see its own fault"
    );
    assert_eq!(client.request("sync"), Err(700));
    assert_eq!(client.request("alloc 1024"), Err(700));
    assert_eq!(client.request("create 2097152"), Err(700));
    assert_eq!(client.request("reset 0"), Ok(String::new()));
    assert_eq!(client.request("context 0"), Err(700));
}

#[test]
fn f1_image_is_clean_after_execve_with_same_pid() {
    let machine = start_machine();
    let mut client = spawn_client_with_context(&machine);
    client.request_number("alloc 1073741824");
    client.request("launch trap").unwrap();
    assert_eq!(client.request("sync"), Err(719));
    let pid = client.request_number("pid");
    client.send_request("exec");
    assert_eq!(client.request_number("pid"), pid);
    assert_eq!(
        read_nvml(&machine),
        (0, vec![]),
        "the old image's memory is back"
    );
    client.request("context 0").unwrap();
    let at = client.request_number("alloc 1024");
    client.request(&format!("launch fill {at} 7 1024")).unwrap();
    assert_eq!(client.request_number(&format!("read {at}")), 7);
}

#[test]
fn f1_injected_error_is_sticky() {
    let machine = start_machine();
    let mut client = spawn_client_with_context(&machine);
    let mut neighbour = spawn_client_with_context(&machine);
    machine
        .run_simgpu(&["poison", &client.pid().to_string(), "702"])
        .unwrap();
    assert_eq!(client.request("sync"), Err(702));
    assert_eq!(client.request("context 0"), Err(702));
    assert_eq!(neighbour.request("sync"), Ok(String::new()));
}

#[test]
fn f2_owner_memory_survives_when_importer_faults_and_dies() {
    let machine = start_machine();
    let mut owner = machine.spawn_client().unwrap();
    let handle = owner.request_number("create 67108864");
    let descriptor = owner.export_fd(handle).unwrap();
    let mut client = spawn_client_with_context(&machine);
    let imported: u64 = client.import_fd(&descriptor).unwrap().parse().unwrap();
    let at = client.request_number(&format!("attach {imported} 67108864"));
    client.request(&format!("fill {at} 42 1000")).unwrap();
    client.request("launch fault").unwrap();
    assert_eq!(client.request("sync"), Err(700));
    client.kill();
    let mut next = spawn_client_with_context(&machine);
    let imported: u64 = next.import_fd(&descriptor).unwrap().parse().unwrap();
    let at = next.request_number(&format!("attach {imported} 67108864"));
    assert_eq!(next.request_number(&format!("read {}", at + 999)), 42);
    assert_eq!(next.request_number(&format!("read {}", at + 1000)), 0);
}

#[test]
fn f3_owner_without_context_is_not_listed() {
    let machine = start_machine();
    let mut owner = machine.spawn_client().unwrap();
    let handle = owner.request_number("create 1073741824");
    let _descriptor = owner.export_fd(handle).unwrap();
    assert_eq!(read_nvml(&machine), (GIB + CONTEXT_FREE_OVERHEAD, vec![]));
    let mut neighbour = spawn_client_with_context(&machine);
    neighbour.request("launch fault").unwrap();
    assert_eq!(neighbour.request("sync"), Err(700));
    owner.request_number("create 2097152");
}

#[test]
fn f4_memory_stays_importable_while_a_descriptor_is_open() {
    let machine = start_machine();
    let mut owner = machine.spawn_client().unwrap();
    let handle = owner.request_number("create 1073741824");
    let descriptor = owner.export_fd(handle).unwrap();
    owner.kill();
    assert_eq!(read_nvml(&machine), (GIB, vec![]));
    let mut client = spawn_client_with_context(&machine);
    client.import_fd(&descriptor).unwrap();
    drop(descriptor);
    client.kill();
    wait_for_nvml(&machine, (0, vec![]));
}

#[test]
fn f4_mapping_outlives_owner_handle_and_descriptor() {
    let machine = start_machine();
    let mut owner = machine.spawn_client().unwrap();
    let handle = owner.request_number("create 1073741824");
    let descriptor = owner.export_fd(handle).unwrap();
    let mut client = spawn_client_with_context(&machine);
    let imported: u64 = client.import_fd(&descriptor).unwrap().parse().unwrap();
    let at = client.request_number(&format!("attach {imported} 1073741824"));
    owner.kill();
    drop(descriptor);
    client.request(&format!("release {imported}")).unwrap();
    client.request(&format!("fill {at} 9 4096")).unwrap();
    assert_eq!(read_nvml(&machine).0, GIB + CONTEXT);
    client.request(&format!("unmap {at} 1073741824")).unwrap();
    assert_eq!(read_nvml(&machine).0, CONTEXT);
}

#[test]
fn f4_export_fails_when_handle_was_imported() {
    let machine = start_machine();
    let mut owner = machine.spawn_client().unwrap();
    let handle = owner.request_number("create 2097152");
    let descriptor = owner.export_fd(handle).unwrap();
    let mut client = spawn_client_with_context(&machine);
    let imported = client.import_fd(&descriptor).unwrap();
    assert_eq!(client.request(&format!("export {imported}")), Err(1));
}

#[test]
fn f4_memory_stays_while_descriptor_is_in_a_socket() {
    let machine = start_machine();
    let mut owner = machine.spawn_client().unwrap();
    let handle = owner.request_number("create 1073741824");
    let descriptor = owner.export_fd(handle).unwrap();
    let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
    bursar_sim_lab::send_with_fd(&near, b"!", Some(std::os::fd::AsFd::as_fd(&descriptor))).unwrap();
    drop(descriptor);
    owner.kill();
    assert_eq!(read_nvml(&machine).0, GIB, "it is in the socket's queue");
    let received = bursar_sim_lab::receive_fd(&far).unwrap();
    assert_eq!(read_nvml(&machine).0, GIB, "it is here again");
    drop(received);
    wait_for_nvml(&machine, (0, vec![]));
}

#[test]
fn f5_memory_is_charged_to_last_importer_after_owner_dies() {
    let machine = start_machine();
    let mut owner = machine.spawn_client().unwrap();
    let handle = owner.request_number("create 1073741824");
    let descriptor = owner.export_fd(handle).unwrap();
    let mut client = spawn_client_with_context(&machine);
    client.import_fd(&descriptor).unwrap();
    let pid = client.pid();
    assert_eq!(
        read_nvml(&machine),
        (GIB + CONTEXT_FREE_OVERHEAD + CONTEXT, vec![(pid, CONTEXT)])
    );
    owner.kill();
    assert_eq!(
        read_nvml(&machine),
        (GIB + CONTEXT, vec![(pid, CONTEXT)]),
        "the descriptor is a reference"
    );
    drop(descriptor);
    wait_for_nvml(&machine, (GIB + CONTEXT, vec![(pid, GIB + CONTEXT)]));
}

/// Measured on an H200 with driver 580.
#[test]
fn f5_creator_is_charged_while_it_refers_to_memory() {
    let machine = start_machine();
    let mut owner = spawn_client_with_context(&machine);
    let pid = owner.pid();
    let handle = owner.request_number("create 1073741824");
    let descriptor = owner.export_fd(handle).unwrap();
    let with = (GIB + CONTEXT, vec![(pid, GIB + CONTEXT)]);
    assert_eq!(read_nvml(&machine), with, "a descriptor is open");
    owner.request(&format!("release {handle}")).unwrap();
    assert_eq!(
        read_nvml(&machine),
        (GIB + CONTEXT, vec![(pid, CONTEXT)]),
        "nothing else is"
    );
    drop(descriptor);
    wait_for_nvml(&machine, (CONTEXT, vec![(pid, CONTEXT)]));
}

#[test]
fn f5_process_is_charged_for_context_and_own_allocations() {
    let machine = start_machine();
    let mut client = spawn_client_with_context(&machine);
    let pid = client.pid();
    assert_eq!(read_nvml(&machine), (CONTEXT, vec![(pid, CONTEXT)]));
    client.request_number("alloc 2097152");
    let handle = client.request_number("create 4194304");
    assert_eq!(
        read_nvml(&machine),
        (CONTEXT + 6 * MIB, vec![(pid, CONTEXT + 6 * MIB)])
    );
    client.request(&format!("release {handle}")).unwrap();
    assert_eq!(
        read_nvml(&machine),
        (CONTEXT + 2 * MIB, vec![(pid, CONTEXT + 2 * MIB)])
    );
    assert_eq!(client.request_number("info"), CONTEXT + 2 * MIB);
}

#[test]
fn f6_freed_memory_is_zeroed_unless_scrubbing_is_off() {
    let machine = start_machine();
    let mut client = spawn_client_with_context(&machine);
    let reallocated_byte = |client: &mut DriverClient| {
        let address = client.request_number("alloc 1048576");
        client
            .request(&format!("fill {address} 165 1048576"))
            .unwrap();
        client.request(&format!("free {address}")).unwrap();
        let address = client.request_number("alloc 1048576");
        let byte = client.request_number(&format!("read {address}"));
        client.request(&format!("free {address}")).unwrap();
        byte
    };
    assert_eq!(reallocated_byte(&mut client), 0);
    machine.run_simgpu(&["scrub", "off"]).unwrap();
    assert_eq!(reallocated_byte(&mut client), 165);
    machine.run_simgpu(&["scrub", "on"]).unwrap();
    assert_eq!(reallocated_byte(&mut client), 0);
}

#[test]
fn f8_memory_is_freed_when_sigkill_hits_running_kernel() {
    let machine = start_machine();
    let mut client = spawn_client_with_context(&machine);
    client.request_number("alloc 10737418240");
    client.request("launch spin 0").unwrap();
    client.send_request("sync");
    client.kill();
    assert_eq!(read_nvml(&machine), (0, vec![]));
}

#[test]
fn f13_memory_stays_under_dead_pid_while_forked_child_lives() {
    let machine = start_machine();
    let mut client = spawn_client_with_context(&machine);
    client.request_number("alloc 1073741824");
    let child = client.request_number("fork");
    let pid = client.pid();
    client.kill();
    assert_eq!(
        read_nvml(&machine),
        (GIB + CONTEXT, vec![(pid, GIB + CONTEXT)])
    );
    kill_and_wait(child);
    assert_eq!(read_nvml(&machine), (0, vec![]));
}

#[test]
fn f13_exported_memory_is_uncharged_while_descriptor_is_open() {
    let machine = start_machine();
    let mut exporter = spawn_client_with_context(&machine);
    let handle = exporter.request_number("create 1073741824");
    let descriptor = exporter.export_fd(handle).unwrap();
    exporter.kill();
    assert_eq!(read_nvml(&machine), (GIB, vec![]));
    drop(descriptor);
    wait_for_nvml(&machine, (0, vec![]));
}

#[test]
fn f13_ipc_memory_is_charged_to_importer_when_exporter_dies() {
    let machine = start_machine();
    let (mut exporter, mut importer) = (
        spawn_client_with_context(&machine),
        spawn_client_with_context(&machine),
    );
    let at = exporter.request_number("alloc 1073741824");
    exporter.request(&format!("fill {at} 3 100")).unwrap();
    let object = exporter.request_number(&format!("share {at}"));
    let there = importer.request_number(&format!("open {object}"));
    assert_eq!(importer.request_number(&format!("read {there}")), 3);
    let (first, second) = (exporter.pid(), importer.pid());
    let mut listed = read_nvml(&machine).1;
    listed.sort_unstable();
    let mut expected = vec![(first, GIB + CONTEXT), (second, CONTEXT)];
    expected.sort_unstable();
    assert_eq!(listed, expected);
    exporter.kill();
    assert_eq!(
        read_nvml(&machine),
        (GIB + CONTEXT, vec![(second, GIB + CONTEXT)])
    );
    assert_eq!(importer.request_number(&format!("read {there}")), 3);
}

#[test]
fn f14_stack_limit_charges_all_resident_threads() {
    let machine = SimMachine::new(H200).unwrap();
    let mut client = spawn_client_with_context(&machine);
    client.request("limit 16384").unwrap();
    assert_eq!(client.request_number("info"), CONTEXT + 3_960 * MIB);
    client.request("limit 262144").unwrap();
    assert_eq!(client.request_number("info"), CONTEXT + 67_320 * MIB);
    client.request("limit 1024").unwrap();
    assert_eq!(client.request_number("info"), CONTEXT);
}

#[test]
fn f14_local_memory_stays_charged_after_launch() {
    let machine = SimMachine::new(H200).unwrap();
    let mut client = spawn_client_with_context(&machine);
    client.request("launch locals").unwrap();
    client.request("sync").unwrap();
    assert_eq!(client.request_number("info"), CONTEXT + 16_632 * MIB);
    client.kill();
    assert_eq!(read_nvml(&machine).0, 0);
}

#[test]
fn f14_stack_limit_fails_when_memory_does_not_suffice() {
    let machine = start_machine();
    let mut client = spawn_client_with_context(&machine);
    assert_eq!(client.request("limit 262144"), Err(2));
    assert_eq!(client.request_number("info"), CONTEXT);
}

#[test]
fn f15_pool_grows_by_32_mib_and_shrinks_at_synchronize() {
    let machine = start_machine();
    let mut client = spawn_client_with_context(&machine);
    let small = client.request_number("poolalloc 1");
    assert_eq!(client.request_number("reserved"), 32 * MIB);
    assert_eq!(client.request_number("info"), CONTEXT + 32 * MIB);
    client.request(&format!("poolfree {small}")).unwrap();
    assert_eq!(
        client.request_number("reserved"),
        32 * MIB,
        "a free keeps it"
    );
    client.request("sync").unwrap();
    assert_eq!(client.request_number("reserved"), 0);
    let big = client.request_number("poolalloc 34603008");
    assert_eq!(client.request_number("reserved"), 64 * MIB);
    client.request("sync").unwrap();
    assert_eq!(
        client.request_number("reserved"),
        64 * MIB,
        "what is used stays"
    );
    client.request(&format!("free {big}")).unwrap();
    client.request("sync").unwrap();
    assert_eq!(client.request_number("info"), CONTEXT);
}

#[test]
fn f15_stream_ordered_free_completes_at_synchronize() {
    let machine = start_machine();
    let mut client = spawn_client_with_context(&machine);
    let at = client.request_number("alloc 1073741824");
    client.request(&format!("poolfree {at}")).unwrap();
    assert_eq!(client.request_number("info"), CONTEXT + GIB);
    client.request("sync").unwrap();
    assert_eq!(client.request_number("info"), CONTEXT);
}

#[test]
fn f22_chunk_stays_while_one_piece_lives() {
    let machine = start_machine();
    let mut client = spawn_client_with_context(&machine);
    let pieces: Vec<u64> = (0..64)
        .map(|_| client.request_number("alloc 65536"))
        .collect();
    assert_eq!(client.request_number("info"), CONTEXT + 4 * MIB);
    for piece in pieces.iter().filter(|piece| *piece % (2 * MIB) != 0) {
        client.request(&format!("free {piece}")).unwrap();
    }
    assert_eq!(client.request_number("info"), CONTEXT + 4 * MIB);
    // Holes fill first, whatever the size.
    for _ in 0..100 {
        let piece = client.request_number("alloc 4097");
        assert_eq!(piece / (2 * MIB), (piece + 4096) / (2 * MIB));
    }
    assert_eq!(client.request_number("info"), CONTEXT + 4 * MIB);
}

#[test]
fn f22_pieces_of_2048_sizes_take_594_chunks() {
    let machine = start_machine();
    let mut client = spawn_client_with_context(&machine);
    for place in 1..=2048 {
        client.request_number(&format!("alloc {}", place * 512));
    }
    assert_eq!(client.request_number("info"), CONTEXT + 1_188 * MIB);
}

#[test]
fn f23_exported_piece_shares_its_whole_chunk() {
    let machine = start_machine();
    let mut exporter = spawn_client_with_context(&machine);
    let mut importer = spawn_client_with_context(&machine);
    exporter.request_number("alloc 65536");
    let piece = exporter.request_number("alloc 65536");
    exporter.request(&format!("fill {piece} 7 16")).unwrap();
    let handle = exporter.request(&format!("share {piece}")).unwrap();
    let there = importer.request_number(&format!("open {handle}"));
    assert_eq!(importer.request_number(&format!("read {there}")), 7);
    let importers = importer.pid();
    exporter.kill();
    wait_for_nvml(
        &machine,
        (CONTEXT + 2 * MIB, vec![(importers, CONTEXT + 2 * MIB)]),
    );
}

#[test]
fn f25_first_use_of_the_heap_takes_its_limit() {
    let machine = SimMachine::new(H200).unwrap();
    let mut client = spawn_client_with_context(&machine);
    client.request("launch heap").unwrap();
    assert_eq!(client.request_number("info"), CONTEXT + 148 * MIB);
}
