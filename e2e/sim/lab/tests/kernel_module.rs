//! Verifies that the simulated kernel module has the properties of a real one that
//! `docs/internals/adr/0001-compute-shares.md` lists.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use bursar_sim_lab::{DriverClient, KernelModule, ONE_GPU, SimMachine};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

const MIB: u64 = 1 << 20;
const CONTEXT: u64 = 518 * MIB;

fn start() -> (SimMachine, KernelModule) {
    let machine = SimMachine::new(ONE_GPU).unwrap();
    let module = machine.load_kernel_module().unwrap();
    (machine, module)
}

fn spawn_with_context(machine: &SimMachine) -> DriverClient {
    let mut client = machine.spawn_client().unwrap();
    client.request("context 0").unwrap();
    client
}

/// Waits until the condition holds, for at most ten seconds.
fn wait_until(mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(10), "waited too long");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Duplicates a control file of a process.
fn duplicate_control_file(pid: u32) -> OwnedFd {
    let process = pidfd_open(Pid::from_raw(pid as i32).unwrap(), PidfdFlags::empty()).unwrap();
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let mut controls = entries.filter_map(|entry| {
        let path = entry.unwrap().path();
        let link = std::fs::read_link(&path).ok()?;
        let descriptor = path.file_name()?.to_str()?.parse().ok()?;
        link.ends_with("nvidiactl").then_some(descriptor)
    });
    let descriptor = controls.next().unwrap();
    pidfd_getfd(process.as_fd(), descriptor, PidfdGetfdFlags::empty()).unwrap()
}

#[test]
fn context_has_four_groups_with_libcudas_slice_until_its_end() {
    let (machine, mut module) = start();
    let mut client = spawn_with_context(&machine);
    let groups = module.groups(0).unwrap();
    assert_eq!(groups.len(), 4);
    for group in &groups {
        assert_eq!((group.pid, group.slice), (client.pid(), 2_048));
        assert!(!group.is_busy && group.finished.is_zero());
    }
    client.request("new-context 0").unwrap();
    assert_eq!(module.groups(0).unwrap().len(), 8);
    client.request("reset 0").unwrap();
    assert_eq!(module.groups(0).unwrap().len(), 4);
    client.kill();
    wait_until(|| module.clients().unwrap() == 0);
    assert!(module.groups(0).unwrap().is_empty());
}

#[test]
fn held_duplicate_keeps_memory_and_groups_of_a_killed_process() {
    let (machine, mut module) = start();
    let sim = machine.sim().unwrap();
    let mut client = spawn_with_context(&machine);
    client.request(&format!("alloc {}", 100 * MIB)).unwrap();
    let (pid, held) = (client.pid(), duplicate_control_file(client.pid()));
    client.kill();
    assert_eq!(sim.usage(0).used, CONTEXT + 100 * MIB);
    assert_eq!(sim.usage(0).processes[0].pid, pid);
    assert_eq!(module.groups(0).unwrap().len(), 4);
    drop(held);
    wait_until(|| sim.usage(0).used == 0);
    assert_eq!(module.clients().unwrap(), 0);
}

#[test]
fn memory_of_a_killed_process_is_free_without_a_duplicate() {
    let (machine, _module) = start();
    let sim = machine.sim().unwrap();
    let client = spawn_with_context(&machine);
    assert_eq!(sim.usage(0).used, CONTEXT);
    client.kill();
    wait_until(|| sim.usage(0).used == 0);
}

/// The part of the GPU that the first of two busy processes has with slices of 8,000 and 500 us.
fn part_of_the_longer_slice(machine: &SimMachine, module: &mut KernelModule) -> f64 {
    let mut clients = [(); 2].map(|()| spawn_with_context(machine));
    for client in &mut clients {
        client.request("launch spin 0").unwrap();
    }
    let busy = |module: &mut KernelModule| {
        let mut groups = module.groups(0).unwrap();
        groups.retain(|group| group.is_busy);
        groups
    };
    for (group, micros) in busy(module).iter().zip([8_000, 500]) {
        let mut owners = clients.iter_mut();
        let owner = owners.find(|client| client.pid() == group.pid);
        let request = format!("rm-slice {} {} {micros}", group.client, group.handle);
        owner.unwrap().request(&request).unwrap();
    }
    let before = busy(module);
    assert_eq!([before[0].slice, before[1].slice], [8_000, 500]);
    std::thread::sleep(Duration::from_millis(300));
    let after = busy(module);
    let ran = |at: usize| (after[at].finished - before[at].finished).as_secs_f64();
    ran(0) / (ran(0) + ran(1))
}

#[test]
fn busy_groups_share_the_gpu_by_slices_that_have_an_effect() {
    let (machine, mut module) = start();
    let part = part_of_the_longer_slice(&machine, &mut module);
    assert!((part - 16.0 / 17.0).abs() < 0.03, "{part}");
    wait_until(|| module.clients().unwrap() == 0);
    module.set_inert(true).unwrap();
    let part = part_of_the_longer_slice(&machine, &mut module);
    assert!((part - 0.5).abs() < 0.03, "{part}");
}

#[test]
fn stream_is_busy_until_its_groups_turns_have_done_the_work() {
    let (machine, _module) = start();
    let mut client = spawn_with_context(&machine);
    let mut time = || {
        let begun = Instant::now();
        client.request("launch spin 100000000").unwrap();
        client.request("sync").unwrap();
        begun.elapsed().as_millis()
    };
    let alone = time();
    assert!((100..180).contains(&alone), "{alone} ms");
    let mut other = spawn_with_context(&machine);
    other.request("launch spin 0").unwrap();
    let beside = time();
    assert!((190..300).contains(&beside), "{beside} ms");
}

#[test]
fn hidden_groups_count_and_another_process_sets_no_slice() {
    let (machine, mut module) = start();
    let mut client = spawn_with_context(&machine);
    let made = client
        .request(&format!("rm-groups {}", 0x7000_0000))
        .unwrap();
    let groups = module.groups(0).unwrap();
    assert_eq!(groups.len(), 8);
    let (root, group) = made.split_once(' ').unwrap();
    let hidden = groups.iter().find(|group| group.client.to_string() == root);
    assert_eq!(hidden.unwrap().handle.to_string(), group);
    let request = format!("rm-slice {root} {group} 77");
    client.request(&request).unwrap();
    let slices = module.groups(0).unwrap();
    assert_eq!(slices.iter().filter(|group| group.slice == 77).count(), 1);
    let mut other = spawn_with_context(&machine);
    assert_eq!(other.request(&request), Err(0x23));
}

#[test]
fn module_that_ends_leaves_errors_and_no_mount() {
    let (machine, module) = start();
    let mut client = spawn_with_context(&machine);
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains("nvidiactl"));
    drop(module);
    assert!(client.request("new-context 0").is_err());
    // The kernel may answer from its cache for a moment.
    let node = machine.dev().join("nvidiactl");
    let is_gone = (0..100).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(50));
        !node.exists()
    });
    assert!(is_gone, "{}", node.display());
    client.kill();
}
