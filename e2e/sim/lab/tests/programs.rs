//! Programs that nobody wrote for the simulated driver run over it.
#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

use bursar_sim_lab::{Lab, ONE_GPU};
use std::process::Command;
use std::time::Duration;

/// A context's bytes.
const CONTEXT: u64 = 518 << 20;
const UUID: &str = "GPU-00000000-0000-0000-0000-000000000001";

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}: {told}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_plain_c_program_linked_against_libcuda_runs() {
    let lab = Lab::new(ONE_GPU).unwrap();
    let (source, program) = (lab.path().join("program.c"), lab.path().join("program"));
    std::fs::write(&source, include_str!("program.c")).unwrap();
    let mut compile = Command::new("cc");
    compile
        .arg("-Wall")
        .arg("-Werror")
        .arg("-o")
        .arg(&program)
        .arg(&source)
        .arg(lab.library("libcuda.so.1"));
    run(&mut compile);
    // 20 of 100 KiB are cut of 2 MiB, in steps of 512 bytes; the sum takes the smallest allocation there is.
    let used = CONTEXT + (205 << 9) + 512;
    assert_eq!(
        run(&mut lab.command(&program)),
        format!("NVIDIA H200 17179869184 used {used} sum 1700 oom 2\n")
    );
}

#[test]
fn python_ctypes_runs() {
    let lab = Lab::new(ONE_GPU).unwrap();
    let program = r#"
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
context, at = ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(1 << 30)) == 0
assert cuda.cuMemcpyHtoD_v2(at, b"bursar", ctypes.c_size_t(6)) == 0
back = ctypes.create_string_buffer(6)
assert cuda.cuMemcpyDtoH_v2(back, at, ctypes.c_size_t(6)) == 0
print(back.raw.decode())
"#;
    assert_eq!(
        run(lab.command("python3").args(["-c", program])),
        "bursar\n"
    );
}

#[test]
fn cudarcs_safe_interface_runs_unchanged() {
    let lab = Lab::new(ONE_GPU).unwrap();
    let mut actor = lab.actor().unwrap();
    assert_eq!(
        actor.ask("cudarc"),
        Ok(format!("sum 8128 used {}", CONTEXT + (32 << 20)))
    );
}

#[test]
fn untouched_device_memory_takes_no_host_memory() {
    let lab = Lab::new(ONE_GPU).unwrap();
    let mut actor = lab.actor().unwrap();
    actor.ask("context 0").unwrap();
    actor.number("alloc 8589934592");
    let handle = actor.number("create 4294967296");
    actor.number(&format!("attach {handle} 4294967296"));
    let status = std::fs::read_to_string(format!("/proc/{}/status", actor.pid())).unwrap();
    let resident = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    let kibibytes: u64 = resident.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(kibibytes < 64 << 10, "{kibibytes} KiB are resident");
}

#[test]
fn a_lost_gpu_answers_gpu_is_lost_until_it_is_restored() {
    let lab = Lab::new(ONE_GPU).unwrap();
    let (mut observer, mut program) = (lab.actor().unwrap(), lab.actor().unwrap());
    program.ask("context 0").unwrap();
    assert_eq!(observer.number("nvml-used 0"), 518 << 20);
    lab.simgpu(&["lose", UUID]).unwrap();
    assert_eq!(observer.ask("nvml-used 0"), Err(15));
    assert_eq!(observer.number("nvml-count"), 1);
    assert_eq!(program.ask("sync"), Err(46));
    lab.simgpu(&["restore", "0"]).unwrap();
    assert_eq!(observer.number("nvml-used 0"), 518 << 20);
    assert_eq!(program.ask("sync"), Ok(String::new()));
}

#[test]
fn an_xid_wakes_a_waiting_event_set() {
    let lab = Lab::new(ONE_GPU).unwrap();
    let mut observer = lab.actor().unwrap();
    observer.tell("nvml-wait 10000");
    assert_eq!(observer.answer(), Ok("waiting".to_owned()));
    lab.simgpu(&["xid", "0", "48", "--pid", "77"]).unwrap();
    let event = observer.answer().unwrap();
    assert!(event.contains("48"), "{event}");
    assert!(
        lab.simgpu(&["status"])
            .unwrap()
            .contains(&format!("xid 48 on {UUID} pid 77"))
    );
}

#[test]
fn a_fault_raises_an_xid_and_silence_is_a_timeout() {
    let lab = Lab::new(ONE_GPU).unwrap();
    let (mut observer, mut program) = (lab.actor().unwrap(), lab.actor().unwrap());
    program.ask("context 0").unwrap();
    observer.tell("nvml-wait 10000");
    observer.answer().unwrap();
    program.ask("launch fault").unwrap();
    assert!(observer.answer().unwrap().contains("31"));
    observer.tell("nvml-wait 50");
    observer.answer().unwrap();
    assert_eq!(observer.answer(), Err(10));
}

#[test]
fn a_device_without_its_node_is_not_there() {
    let lab = Lab::new(&format!(
        "{ONE_GPU}{}",
        ONE_GPU
            .replace("0001", "0002")
            .replace("minor = 0", "minor = 1")
    ))
    .unwrap();
    let node = lab.path().join("dev/nvidia0");
    std::fs::remove_file(&node).unwrap();
    // `cuInit` of root would make it again; it makes nothing in the place of a link.
    std::os::unix::fs::symlink("nothing", node).unwrap();
    let mut actor = lab.actor().unwrap();
    assert_eq!(actor.number("nvml-count"), 1);
    actor.ask("context 0").unwrap();
    assert_eq!(actor.ask("context 1"), Err(101));
    std::thread::sleep(Duration::from_millis(1));
    let sim = lab.sim().unwrap();
    assert_eq!((sim.used(0), sim.used(1)), (0, 518 << 20));
}

#[test]
fn an_instance_has_its_own_memory_and_its_gpu_the_sum() {
    let mig = "mig = [{ profile = \"3g.8gb\", uuid = \"MIG-00000000-0000-0000-0000-000000000009\", memory = \"8Gi\" }]\n";
    let lab = Lab::new(&format!("{ONE_GPU}{mig}")).unwrap();
    let mut actor = lab.actor().unwrap();
    actor.ask("context 0").unwrap();
    assert_eq!(actor.ask("alloc 8589934592"), Err(2));
    actor.number("alloc 4294967296");
    assert_eq!(actor.number("nvml-used 0"), (4 << 30) + (518 << 20));
    let sim = lab.sim().unwrap();
    assert_eq!(sim.usage(1).total, 8 << 30);
    assert_eq!(sim.used(1), (4 << 30) + (518 << 20));
}

#[test]
fn a_call_that_is_not_supported_says_so_and_is_logged() {
    let lab = Lab::new(ONE_GPU).unwrap();
    let program = "import ctypes\ncuda = ctypes.CDLL('libcuda.so.1')\ncuda.cuInit(0)\nprint(cuda.cuTexRefCreate(0))";
    assert_eq!(run(lab.command("python3").args(["-c", program])), "801\n");
    let log = std::fs::read_to_string(lab.path().join("state/log")).unwrap();
    assert!(log.ends_with("cuTexRefCreate is not supported\n"), "{log}");
}

#[test]
fn a_container_process_has_the_hosts_pid_on_the_hosts_list_and_its_own_on_that_of_its_namespace() {
    let lab = Lab::new(ONE_GPU).unwrap();
    let (mut contained, mut observer) =
        (lab.actor_in_pid_namespace().unwrap(), lab.actor().unwrap());
    contained.ask("context 0").unwrap();
    assert_eq!(contained.ask("pid"), Ok("1".to_owned()));
    assert_eq!(
        contained.ask("nvml-processes 0"),
        Ok(format!("1:{CONTEXT}"))
    );
    let mut elsewhere = lab.actor_in_pid_namespace().unwrap();
    assert_eq!(elsewhere.ask("nvml-processes 0"), Ok(String::new()));
    let listed = observer.ask("nvml-processes 0").unwrap();
    let (pid, bytes) = listed.split_once(':').unwrap();
    assert_eq!(bytes.parse(), Ok(CONTEXT));
    assert_eq!(
        std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap(),
        "sim-actor\n"
    );
}
