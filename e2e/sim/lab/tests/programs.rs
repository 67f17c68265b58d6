//! Runs programs that were not written for the simulated driver.
#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

use bursar_sim_lab::{ONE_GPU, SimMachine};
use std::process::Command;
use std::time::Duration;

/// Bytes of a context.
const CONTEXT: u64 = 518 << 20;
const UUID: &str = "GPU-00000000-0000-0000-0000-000000000001";

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}: {stderr}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn c_program_runs_when_linked_against_libcuda() {
    let machine = SimMachine::new(ONE_GPU).unwrap();
    let (source, program) = (
        machine.path().join("program.c"),
        machine.path().join("program"),
    );
    std::fs::write(&source, include_str!("program.c")).unwrap();
    let mut compile = Command::new("cc");
    compile
        .arg("-Wall")
        .arg("-Werror")
        .arg("-o")
        .arg(&program)
        .arg(&source)
        .arg(machine.library("libcuda.so.1"));
    run(&mut compile);
    // The program's small allocations share one chunk of 2 MiB.
    let used = CONTEXT + (2 << 20);
    assert_eq!(
        run(&mut machine.command(&program)),
        format!("NVIDIA H200 17179869184 used {used} sum 1700 oom 2\n")
    );
}

#[test]
fn python_program_runs_over_ctypes() {
    let machine = SimMachine::new(ONE_GPU).unwrap();
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
        run(machine.command("python3").args(["-c", program])),
        "bursar\n"
    );
}

#[test]
fn null_outputs_get_the_codes_of_the_real_driver() {
    let machine = SimMachine::new(ONE_GPU).unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../gpu/nulls.py");
    let answers = run(machine.command("python3").arg(script));
    assert!(
        answers.starts_with("ready\n") && answers.ends_with("end\n"),
        "{answers}"
    );
    for row in answers.lines().filter(|line| line.contains(' ')) {
        let words: Vec<_> = row.split(' ').collect();
        let [_, _, code, expected] = words[..] else {
            panic!("{row}");
        };
        // A real driver that crashes is not imitated, and neither is a function that is missing
        // here.
        let is_exempt = expected == "crash" || ["absent", "801"].contains(&code);
        assert!(is_exempt || code == expected, "{row}");
    }
}

#[test]
fn cudarc_program_runs_unchanged() {
    let machine = SimMachine::new(ONE_GPU).unwrap();
    let mut client = machine.spawn_client().unwrap();
    assert_eq!(
        client.request("cudarc"),
        Ok(format!("sum 8128 used {}", CONTEXT + (32 << 20)))
    );
}

#[test]
fn device_memory_takes_no_host_memory_until_touched() {
    let machine = SimMachine::new(ONE_GPU).unwrap();
    let mut client = machine.spawn_client().unwrap();
    client.request("context 0").unwrap();
    client.request_number("alloc 8589934592");
    let handle = client.request_number("create 4294967296");
    client.request_number(&format!("attach {handle} 4294967296"));
    let status = std::fs::read_to_string(format!("/proc/{}/status", client.pid())).unwrap();
    let resident = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    let kibibytes: u64 = resident.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(kibibytes < 64 << 10, "{kibibytes} KiB are resident");
}

#[test]
fn nvml_returns_gpu_is_lost_until_gpu_is_restored() {
    let machine = SimMachine::new(ONE_GPU).unwrap();
    let (mut observer, mut program) = (
        machine.spawn_client().unwrap(),
        machine.spawn_client().unwrap(),
    );
    program.request("context 0").unwrap();
    assert_eq!(observer.request_number("nvml-used 0"), 518 << 20);
    machine.run_simgpu(&["lose", UUID]).unwrap();
    assert_eq!(observer.request("nvml-used 0"), Err(15));
    assert_eq!(observer.request_number("nvml-count"), 1);
    assert_eq!(program.request("sync"), Err(46));
    machine.run_simgpu(&["restore", "0"]).unwrap();
    assert_eq!(observer.request_number("nvml-used 0"), 518 << 20);
    assert_eq!(program.request("sync"), Ok(String::new()));
}

#[test]
fn event_set_wakes_when_xid_is_raised() {
    let machine = SimMachine::new(ONE_GPU).unwrap();
    let mut observer = machine.spawn_client().unwrap();
    observer.send_request("nvml-wait 10000");
    assert_eq!(observer.read_reply(), Ok("waiting".to_owned()));
    machine
        .run_simgpu(&["xid", "0", "48", "--pid", "77"])
        .unwrap();
    let event = observer.read_reply().unwrap();
    assert!(event.contains("48"), "{event}");
    assert!(
        machine
            .run_simgpu(&["status"])
            .unwrap()
            .contains(&format!("xid 48 on {UUID} pid 77"))
    );
}

#[test]
fn event_wait_gets_fault_xid_and_times_out_without_one() {
    let machine = SimMachine::new(ONE_GPU).unwrap();
    let (mut observer, mut program) = (
        machine.spawn_client().unwrap(),
        machine.spawn_client().unwrap(),
    );
    program.request("context 0").unwrap();
    observer.send_request("nvml-wait 10000");
    observer.read_reply().unwrap();
    program.request("launch fault").unwrap();
    assert!(observer.read_reply().unwrap().contains("31"));
    observer.send_request("nvml-wait 50");
    observer.read_reply().unwrap();
    assert_eq!(observer.read_reply(), Err(10));
}

#[test]
fn device_is_absent_when_its_node_is_missing() {
    let machine = SimMachine::new(&format!(
        "{ONE_GPU}{}",
        ONE_GPU
            .replace("0001", "0002")
            .replace("minor = 0", "minor = 1")
    ))
    .unwrap();
    let node = machine.path().join("dev/nvidia0");
    std::fs::remove_file(&node).unwrap();
    // `cuInit` as root would create a missing node; a dangling link in its place prevents that.
    std::os::unix::fs::symlink("nothing", node).unwrap();
    let mut client = machine.spawn_client().unwrap();
    assert_eq!(client.request_number("nvml-count"), 1);
    client.request("context 0").unwrap();
    assert_eq!(client.request("context 1"), Err(101));
    std::thread::sleep(Duration::from_millis(1));
    let sim = machine.sim().unwrap();
    assert_eq!((sim.used(0), sim.used(1)), (0, 518 << 20));
}

#[test]
fn gpu_usage_is_sum_of_mig_instances() {
    let mig = "mig = [{ profile = \"3g.8gb\", uuid = \"MIG-00000000-0000-0000-0000-000000000009\", memory = \"8Gi\" }]\n";
    let machine = SimMachine::new(&format!("{ONE_GPU}{mig}")).unwrap();
    let mut client = machine.spawn_client().unwrap();
    client.request("context 0").unwrap();
    assert_eq!(client.request("alloc 8589934592"), Err(2));
    client.request_number("alloc 4294967296");
    assert_eq!(
        client.request_number("nvml-used 0"),
        (4 << 30) + (518 << 20)
    );
    let sim = machine.sim().unwrap();
    assert_eq!(sim.usage(1).total, 8 << 30);
    assert_eq!(sim.used(1), (4 << 30) + (518 << 20));
}

#[test]
fn unsupported_call_returns_not_supported_and_is_logged() {
    let machine = SimMachine::new(ONE_GPU).unwrap();
    let program = "import ctypes\ncuda = ctypes.CDLL('libcuda.so.1')\ncuda.cuInit(0)\nprint(cuda.cuTexRefCreate(0))";
    assert_eq!(
        run(machine.command("python3").args(["-c", program])),
        "801\n"
    );
    let log = std::fs::read_to_string(machine.path().join("state/log")).unwrap();
    assert!(log.ends_with("cuTexRefCreate is not supported\n"), "{log}");
}

#[test]
fn nvml_lists_pids_of_observers_pid_namespace() {
    let machine = SimMachine::new(ONE_GPU).unwrap();
    let (mut contained, mut observer) = (
        machine.spawn_client_in_pid_namespace().unwrap(),
        machine.spawn_client().unwrap(),
    );
    contained.request("context 0").unwrap();
    assert_eq!(contained.request("pid"), Ok("1".to_owned()));
    assert_eq!(
        contained.request("nvml-processes 0"),
        Ok(format!("1:{CONTEXT}"))
    );
    let mut other_namespace = machine.spawn_client_in_pid_namespace().unwrap();
    assert_eq!(
        other_namespace.request("nvml-processes 0"),
        Ok(String::new())
    );
    let listed = observer.request("nvml-processes 0").unwrap();
    let (pid, bytes) = listed.split_once(':').unwrap();
    assert_eq!(bytes.parse(), Ok(CONTEXT));
    assert_eq!(
        std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap(),
        "sim-actor\n"
    );
}
