//! Verifies that ordinary host memory moves to the GPU that accesses it, as with HMM.
#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

use bursar_sim_lab::{DriverClient, ONE_GPU, SimMachine, TWO_GPUS};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Bytes of a context.
const CONTEXT: u64 = 518 * MIB;
const CHUNK: u64 = 2 * MIB;

/// A machine whose driver keeps no free chunks.
fn start_machine(gpus: &str) -> SimMachine {
    SimMachine::new(&format!("pageable-memory = true\nuvm-batch = 0\n{gpus}")).unwrap()
}

fn start_client(machine: &SimMachine) -> DriverClient {
    let mut client = machine.spawn_client().unwrap();
    client.request("context 0").unwrap();
    client
}

/// Allocates host memory. Returns its address, and the bytes of the chunks that contain it.
fn allocate_host(client: &mut DriverClient, len: u64) -> (u64, u64) {
    let at = client.request_number(&format!("host {len}"));
    let chunks = (at + len - 1) / CHUNK - at / CHUNK + 1;
    (at, chunks * CHUNK)
}

fn touch(client: &mut DriverClient, at: u64, len: u64) {
    client.request(&format!("launch touch {at} {len}")).unwrap();
    assert_eq!(client.request("sync"), Ok(String::new()));
}

#[test]
fn pageable_memory_is_in_use_and_charged_to_no_process() {
    let machine = start_machine(ONE_GPU);
    let mut client = start_client(&machine);
    let sim = machine.sim().unwrap();
    let (at, resident) = allocate_host(&mut client, GIB);
    assert_eq!(sim.used(0), CONTEXT);
    for _ in 0..2 {
        touch(&mut client, at, GIB);
        let usage = sim.usage(0);
        assert_eq!(usage.used, CONTEXT + resident);
        let [process] = usage.processes[..] else {
            panic!("{usage:?}");
        };
        assert_eq!((process.pid, process.bytes), (client.pid(), CONTEXT));
    }
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", client.pid())).unwrap();
    assert!(!maps.contains("nvidia-uvm"), "{maps}");
    client.kill();
    assert_eq!(sim.used(0), 0);
}

#[test]
fn fill_and_copy_make_pageable_memory_resident() {
    let machine = start_machine(ONE_GPU);
    let mut client = start_client(&machine);
    let sim = machine.sim().unwrap();
    let (at, filled) = allocate_host(&mut client, 8 * MIB);
    client.request(&format!("fill {at} 7 {}", 8 * MIB)).unwrap();
    assert_eq!(sim.used(0), CONTEXT + filled);
    let (copy, copied) = allocate_host(&mut client, 8 * MIB);
    client
        .request(&format!("launch copy {copy} {at} {}", 8 * MIB))
        .unwrap();
    assert_eq!(client.request_number(&format!("read {copy}")), 7);
    // Both may have a part of one chunk.
    let both = CONTEXT + filled + copied;
    assert!((both - CHUNK..=both).contains(&sim.used(0)));
}

#[test]
fn neighbours_allocation_displaces_pageable_memory() {
    let machine = start_machine(&ONE_GPU.replace("16Gi", "4Gi"));
    let mut owner = start_client(&machine);
    let sim = machine.sim().unwrap();
    let (at, resident) = allocate_host(&mut owner, 2 * GIB);
    touch(&mut owner, at, 2 * GIB);
    let mut neighbour = start_client(&machine);
    let free = 4 * GIB - 2 * CONTEXT;
    neighbour.request_number(&format!("alloc {}", free - GIB));
    assert_eq!(sim.used(0), 4 * GIB, "{resident} were resident");
    neighbour.request_number(&format!("alloc {GIB}"));
    assert_eq!(neighbour.request("alloc 2097152"), Err(2));
    touch(&mut owner, at, 2 * GIB);
    owner.kill();
    assert_eq!(sim.used(0), 4 * GIB - CONTEXT, "none had come back");
}

#[test]
fn pageable_memory_moves_to_the_gpu_that_accesses_it() {
    let machine = start_machine(TWO_GPUS);
    let mut client = start_client(&machine);
    let sim = machine.sim().unwrap();
    let (at, resident) = allocate_host(&mut client, GIB);
    touch(&mut client, at, GIB);
    client.request("context 1").unwrap();
    touch(&mut client, at, GIB);
    assert_eq!((sim.used(0), sim.used(1)), (CONTEXT, CONTEXT + resident));
}

#[test]
fn unmapped_address_is_no_pageable_memory() {
    let machine = start_machine(ONE_GPU);
    let mut client = start_client(&machine);
    let freed = client.request_number("alloc 1073741824");
    client.request(&format!("free {freed}")).unwrap();
    assert_eq!(client.request(&format!("fill {freed} 7 1")), Err(1));
    let reserved = client.request_number("reserve 2097152");
    assert_eq!(client.request(&format!("fill {reserved} 7 1")), Err(1));
    client.request(&format!("launch touch {freed} 1")).unwrap();
    assert_eq!(client.request("sync"), Err(700));
}

#[test]
fn host_memory_is_no_operand_unless_it_is_pageable() {
    let machine = SimMachine::new(ONE_GPU).unwrap();
    let mut client = start_client(&machine);
    let (at, _) = allocate_host(&mut client, 8 * MIB);
    assert_eq!(client.request(&format!("fill {at} 7 1")), Err(1));
    client.request(&format!("launch touch {at} 1")).unwrap();
    assert_eq!(client.request("sync"), Err(700));
    assert_eq!(machine.sim().unwrap().used(0), CONTEXT);
}
