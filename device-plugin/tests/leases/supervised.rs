//! Tests the supervision of allocator runtimes: a provisioner for each healthy GPU, and GPUs on
//! which NVML works and CUDA does not.

use std::fmt::Write as _;
use std::fs;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::api::FakeGpuNodeApi;
use crate::common::eventually;
use crate::fixture::{Fixture, GIB, open_retrying, wait_for_scrub_check};
use crate::machine::{GPU, Machine, TWO_GPUS};
use crate::tenant_process::Opened;

const FIRST: &str = "GPU-00000000-0000-0000-0000-000000000001";
const MANAGED: &str = "bursar.dev/managed-memory-gib";
const SECOND: &str = "GPU-00000000-0000-0000-0000-000000000002";

/// The time limit of a start (`retained/provisioners.rs`).
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// How long a test looks for what must not happen.
const WATCHED: Duration = Duration::from_secs(1);

/// Several GPUs of 4 GiB.
fn gpus(count: usize) -> String {
    (0..count).fold(String::new(), |mut text, minor| {
        let number = minor + 1;
        writeln!(
            text,
            "[[gpu]]\nname = \"NVIDIA H200\"\nuuid = \"GPU-00000000-0000-0000-0000-{number:012}\"\n\
             memory = \"4Gi\"\nminor = {minor}"
        )
        .unwrap();
        text
    })
}

/// A machine whose agent is not started, and its API server.
async fn machine(config: &str) -> (Fixture, FakeGpuNodeApi) {
    let machine = Fixture::machine(config).await;
    let api = FakeGpuNodeApi::start(&machine);
    (Fixture::of(machine), api)
}

fn simgpu(machine: &Machine, arguments: &[&str]) {
    machine.lab.run_simgpu(arguments).unwrap();
}

/// The provisioners of this agent, by the UUID of their GPU.
fn runtimes(fixture: &Fixture) -> Vec<(Pid, String)> {
    let pids = fixture.provisioners().into_iter();
    let serving = pids.filter_map(|pid| {
        let words = fs::read_to_string(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).ok()?;
        let words: Vec<&str> = words.split('\0').collect();
        match words[..] {
            [_, "--gpu", gpu, ..] => Some((pid, gpu.to_owned())),
            _ => None,
        }
    });
    serving.collect()
}

/// The provisioner of a GPU.
fn runtime_of(fixture: &Fixture, gpu: &str) -> Option<Pid> {
    let mut running = runtimes(fixture).into_iter();
    running.find(|(_, of)| of == gpu).map(|(pid, _)| pid)
}

async fn until_state(api: &FakeGpuNodeApi, gpu: &str, state: &str) -> Value {
    let is_there = || api.gpu(gpu)["runtime"]["state"] == state;
    eventually(&format!("{state} of {gpu}"), is_there).await;
    api.gpu(gpu)["runtime"].clone()
}

#[tokio::test]
async fn eight_gpus_get_runtimes_two_at_a_time_and_then_pods() {
    let (mut fixture, api) = machine(&gpus(8)).await;
    for gpu in 0..8 {
        simgpu(&fixture.machine, &["refuse", &gpu.to_string(), "hang"]);
    }
    fixture.machine.start_agent();
    fixture.machine.kubelet.until_allocatable(GPU, 32).await;
    let queued_pod = fixture.machine.admit("a", 2).await;
    eventually("the first starts", || runtimes(&fixture).len() == 2).await;
    let start = Instant::now();
    while start.elapsed() < WATCHED {
        assert!(runtimes(&fixture).len() <= 2);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(until_state(&api, FIRST, "Starting").await["starts"], 0);
    for gpu in 0..8 {
        simgpu(&fixture.machine, &["accept", &gpu.to_string()]);
    }
    for number in 1..=8 {
        let gpu = format!("GPU-00000000-0000-0000-0000-{number:012}");
        let runtime = until_state(&api, &gpu, "Ready").await;
        assert_eq!(
            (&runtime["starts"], &runtime["lent"]),
            (&json!(1), &json!("0"))
        );
    }
    assert_eq!(runtimes(&fixture).len(), 8);
    fixture.machine.until_started(&queued_pod).await;
}

/// A GPU's first pod waits for the result of the first start, and other GPUs take pods.
#[tokio::test]
async fn pod_before_the_first_result_gets_no_refused_gpu() {
    let (mut fixture, api) = machine(TWO_GPUS).await;
    simgpu(&fixture.machine, &["refuse", "0", "802"]);
    let script = fixture.machine.path("provisioner");
    let text = fs::read_to_string(&script).unwrap();
    let late = "#!/bin/sh\n[ \"$1\" = --gpu ] && sleep 2\n";
    fs::write(&script, text.replace("#!/bin/sh\n", late)).unwrap();
    fixture.machine.start_agent();
    fixture.machine.kubelet.until_allocatable(GPU, 32).await;
    let queued_pod = fixture.machine.admit("a", 10).await;
    fixture.machine.until_started(&queued_pod).await;
    assert_eq!(fixture.allocation_and_gpu(&queued_pod).1, SECOND);
    until_state(&api, FIRST, "Refused").await;
}

/// The hang is no result before the start's deadline, and a refusal after it.
#[tokio::test]
async fn gpu_whose_start_hangs_takes_no_pods_until_one_succeeds() {
    let (mut fixture, api) = machine(TWO_GPUS).await;
    fixture.machine.start_agent();
    fixture.machine.kubelet.until_allocatable(GPU, 32).await;
    let bound = fixture.machine.run("a", 10).await;
    let (_, first) = fixture.allocation_and_gpu(&bound);
    until_state(&api, FIRST, "Ready").await;
    until_state(&api, SECOND, "Ready").await;
    fixture.machine.kill_agent();
    let minor = if first == FIRST { "0" } else { "1" };
    let second = if first == FIRST { SECOND } else { FIRST };
    simgpu(&fixture.machine, &["refuse", minor, "hang"]);
    fixture.machine.start_successor().await;
    // A container of a bound pod starts again, beside the hang.
    fixture.machine.until_started(&bound).await;
    assert_eq!(fixture.allocation_and_gpu(&bound).1, first);
    let other = fixture.machine.admit("b", 4).await;
    fixture.machine.until_started(&other).await;
    assert_eq!(fixture.allocation_and_gpu(&other).1, second);
    // The status follows a moment later.
    until_state(&api, &first, "Starting").await;
    let refused = until_state(&api, &first, "Refused").await;
    let reason = refused["reason"].as_str().unwrap();
    assert!(reason.contains("no answer within 20 s"), "{reason}");
    fixture.machine.run("c", 10).await;
    let queued_pod = fixture.machine.admit("d", 5).await;
    let expected = format!("CUDA refuses {first}");
    fixture.machine.until_refused(&queued_pod, &expected).await;
    simgpu(&fixture.machine, &["accept", minor]);
    fixture.machine.until_started(&queued_pod).await;
    assert_eq!(fixture.allocation_and_gpu(&queued_pod).1, first);
}

#[tokio::test]
async fn gpu_takes_no_pods_after_three_starts_with_another_code() {
    let (mut fixture, api) = machine(TWO_GPUS).await;
    simgpu(&fixture.machine, &["refuse", "1", "999"]);
    fixture.machine.start_agent();
    fixture.machine.kubelet.until_allocatable(GPU, 32).await;
    let refused = until_state(&api, SECOND, "Refused").await;
    let failures = refused["failures"].as_u64().unwrap();
    assert!(failures >= 3, "{refused}");
    assert!(
        refused["reason"].as_str().unwrap().contains("999"),
        "{refused}"
    );
    fixture.machine.run("a", 10).await;
    let queued_pod = fixture.machine.admit("b", 10).await;
    let expected = format!("CUDA refuses {SECOND}");
    fixture.machine.until_refused(&queued_pod, &expected).await;
    simgpu(&fixture.machine, &["accept", "1"]);
    fixture.machine.until_started(&queued_pod).await;
}

#[tokio::test]
async fn gpu_that_cuda_refuses_takes_no_pods_until_a_start_succeeds() {
    let (mut fixture, api) = machine(TWO_GPUS).await;
    simgpu(&fixture.machine, &["refuse", "1", "802"]);
    fixture.machine.start_agent();
    fixture.machine.kubelet.until_allocatable(GPU, 32).await;
    let refused = until_state(&api, SECOND, "Refused").await;
    assert!(
        refused["reason"].as_str().unwrap().contains("802"),
        "{refused}"
    );
    until_state(&api, FIRST, "Ready").await;
    fixture.machine.run("a", 10).await;
    let queued_pod = fixture.machine.admit("b", 10).await;
    let expected = format!("CUDA refuses {SECOND}");
    fixture.machine.until_refused(&queued_pod, &expected).await;
    let took = fixture.machine.kubelet.until_allocatable(GPU, 16).await;
    assert!(took >= Duration::from_secs(20), "too few tries: {took:?}");
    let is_unhealthy = || api.gpu(SECOND)["health"]["reason"] == "CudaRefused";
    eventually("the reason", is_unhealthy).await;
    assert_eq!(api.gpu(FIRST)["health"]["reason"], "Ok");
    let is_reported = || !api.events("GpuUnhealthy").is_empty();
    eventually("the Event", is_reported).await;
    let (_, metrics) = fixture.machine.get("/metrics").await;
    for line in [
        format!("bursar_gpu_runtime_state{{gpu=\"{SECOND}\",state=\"refused\"}} 1"),
        format!("bursar_gpu_runtime_state{{gpu=\"{FIRST}\",state=\"ready\"}} 1"),
        format!("bursar_gpu_healthy{{gpu=\"{SECOND}\"}} 0"),
    ] {
        assert!(metrics.contains(&line), "{line}: {metrics}");
    }
    simgpu(&fixture.machine, &["accept", "1"]);
    fixture.machine.kubelet.until_allocatable(GPU, 32).await;
    let ready = until_state(&api, SECOND, "Ready").await;
    assert!(ready["failures"].as_u64().unwrap() >= 3, "{ready}");
    assert_eq!(ready["reason"], Value::Null);
    fixture.machine.until_started(&queued_pod).await;
}

/// The runtime of a GPU that cannot share managed memory with the host withdraws the node's offer.
#[tokio::test]
async fn managed_memory_is_withdrawn_without_concurrent_access() {
    let config = gpus(2) + "concurrent-managed-access = false\n";
    let (mut fixture, api) = machine(&config).await;
    let path = fixture.machine.path("agent.toml");
    let text = fs::read_to_string(&path).unwrap();
    let capacity = "[resources]\nmanaged-memory-capacity = \"8Gi\"\n";
    fs::write(&path, text + capacity).unwrap();
    let condition = || {
        let status = api.status();
        let mut conditions = status["conditions"].as_array().into_iter().flatten();
        let managed = conditions.find(|condition| condition["type"] == "ManagedMemory");
        managed.cloned().unwrap_or_default()
    };
    simgpu(&fixture.machine, &["refuse", "1", "hang"]);
    fixture.machine.start_agent();
    fixture.machine.kubelet.until_allocatable(GPU, 8).await;
    // The first GPU has reported, and the offer waits for the second.
    until_state(&api, FIRST, "Ready").await;
    eventually("the wait", || condition()["reason"] == "Pending").await;
    assert_eq!(fixture.machine.kubelet.capacity(MANAGED), None);
    // A lost GPU delays no offer.
    simgpu(&fixture.machine, &["lose", "1"]);
    fixture.machine.kubelet.until_allocatable(MANAGED, 8).await;
    eventually("an offer", || condition()["status"] == "True").await;
    simgpu(&fixture.machine, &["accept", "1"]);
    simgpu(&fixture.machine, &["restore", "1"]);
    until_state(&api, SECOND, "Ready").await;
    fixture.machine.kubelet.until_allocatable(MANAGED, 0).await;
    eventually("the reason", || condition()["reason"] == "EvictionUnsafe").await;
    let message = condition()["message"].to_string();
    assert!(message.contains(SECOND), "{message}");
    // The agent keeps the finding of a runtime that has ended.
    api.drain(&[SECOND]);
    fixture.machine.kubelet.until_allocatable(GPU, 4).await;
    until_state(&api, SECOND, "Drained").await;
    assert_eq!(condition()["reason"], "EvictionUnsafe");
}

#[tokio::test]
async fn start_that_hangs_is_killed_and_tried_again() {
    let (mut fixture, api) = machine(TWO_GPUS).await;
    simgpu(&fixture.machine, &["refuse", "0", "hang"]);
    fixture.machine.start_agent();
    let mut hanging = None;
    eventually("a start", || {
        hanging = runtime_of(&fixture, FIRST);
        hanging.is_some()
    })
    .await;
    let start = Instant::now();
    until_state(&api, SECOND, "Ready").await;
    let is_another = || runtime_of(&fixture, FIRST).is_some_and(|now| Some(now) != hanging);
    eventually("the next start", is_another).await;
    assert!(start.elapsed() >= START_TIMEOUT - Duration::from_secs(2));
    let late = api.gpu(FIRST);
    assert_eq!(late["health"]["reason"], "Ok", "one hang is not for long");
    until_state(&api, FIRST, "Refused").await;
    simgpu(&fixture.machine, &["accept", "0"]);
    let ready = until_state(&api, FIRST, "Ready").await;
    assert_eq!(
        (&ready["starts"], &ready["failures"]),
        (&json!(1), &json!(1))
    );
}

#[tokio::test]
async fn drain_ends_a_runtime_that_is_starting() {
    let (mut fixture, api) = machine(TWO_GPUS).await;
    simgpu(&fixture.machine, &["refuse", "0", "hang"]);
    fixture.machine.start_agent();
    eventually("a start", || runtime_of(&fixture, FIRST).is_some()).await;
    let start = Instant::now();
    api.drain(&[FIRST]);
    eventually("its end", || runtime_of(&fixture, FIRST).is_none()).await;
    assert!(start.elapsed() < START_TIMEOUT / 2, "{:?}", start.elapsed());
    let drained = until_state(&api, FIRST, "Drained").await;
    assert_eq!(drained["failures"], 0, "the agent ended it");
    simgpu(&fixture.machine, &["accept", "0"]);
    api.drain(&[]);
    until_state(&api, FIRST, "Ready").await;
}

#[tokio::test]
async fn runtime_ends_with_a_lost_gpu_and_starts_when_it_is_back() {
    let (mut fixture, api) = machine(TWO_GPUS).await;
    fixture.machine.start_agent();
    until_state(&api, FIRST, "Ready").await;
    let other = until_state(&api, SECOND, "Ready").await;
    simgpu(&fixture.machine, &["lose", "0"]);
    eventually("its end", || runtime_of(&fixture, FIRST).is_none()).await;
    until_state(&api, FIRST, "Stopped").await;
    simgpu(&fixture.machine, &["restore", "0"]);
    assert_eq!(until_state(&api, FIRST, "Ready").await["starts"], 2);
    assert_eq!(api.gpu(SECOND)["runtime"], other);
}

#[tokio::test]
async fn runtime_killed_amid_a_create_lends_nothing_and_restarts() {
    let (mut fixture, api) = machine(TWO_GPUS).await;
    fixture.start_fdstore();
    fixture.machine.start_agent();
    fixture.machine.kubelet.until_allocatable(GPU, 32).await;
    let pod = fixture.machine.run("a", 8).await;
    let (_, gpu) = fixture.allocation_and_gpu(&pod);
    let mut tenant = fixture.tenant(&pod);
    let first = open_retrying(&mut tenant, "first", GIB).unwrap();
    assert!(matches!(first, Opened::Write { .. }));
    until_state(&api, &gpu, "Ready").await;
    let runtime = runtime_of(&fixture, &gpu).unwrap();
    kill_process(runtime, Signal::STOP).unwrap();
    let opening = std::thread::spawn(move || {
        let opened = tenant.open("second", 2 * GIB);
        (tenant, opened)
    });
    // The request is in the stopped process's socket by then.
    tokio::time::sleep(Duration::from_millis(500)).await;
    kill_process(runtime, Signal::KILL).unwrap();
    let (_tenant, opened) = opening.join().unwrap();
    assert!(matches!(opened, Ok(Opened::Write { .. })), "{opened:?}");
    let lent = format!("bursar_gpu_retained_bytes{{gpu=\"{gpu}\"}} {}\n", 3 * GIB);
    let failed = format!("bursar_gpu_runtime_failures_total{{gpu=\"{gpu}\",class=\"exit\"}} 1\n");
    let started = format!("bursar_gpu_runtime_starts_total{{gpu=\"{gpu}\"}} 2\n");
    let start = Instant::now();
    loop {
        let (_, metrics) = fixture.machine.get("/metrics").await;
        if [&lent, &failed, &started]
            .iter()
            .all(|line| metrics.contains(*line))
        {
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(20), "{metrics}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // An idle runtime that is killed starts again without a request.
    let runtime = runtime_of(&fixture, &gpu).unwrap();
    kill_process(runtime, Signal::KILL).unwrap();
    let is_another = || runtime_of(&fixture, &gpu).is_some_and(|now| now != runtime);
    eventually("another runtime", is_another).await;
    until_state(&api, &gpu, "Ready").await;
}

#[tokio::test]
async fn mig_instance_gets_a_runtime_with_its_first_lease() {
    let instance = "MIG-00000000-0000-0000-0000-000000000011";
    let config = format!(
        "{}[[gpu.mig]]\nprofile = \"1g.4gb\"\nuuid = \"{instance}\"\nmemory = \"4Gi\"\n",
        gpus(2)
    );
    let (mut fixture, api) = machine(&config).await;
    fixture.start_fdstore();
    fixture.machine.start_agent();
    fixture.machine.kubelet.until_allocatable(GPU, 8).await;
    until_state(&api, FIRST, "Ready").await;
    let start = Instant::now();
    while start.elapsed() < WATCHED {
        assert_eq!(runtime_of(&fixture, instance), None);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(api.gpu(instance)["runtime"]["state"], "Stopped");
    // The pods leave no room for the check.
    wait_for_scrub_check("both", || {
        let status = api.status();
        let mut conditions = status["conditions"].as_array().into_iter().flatten();
        conditions
            .any(|condition| condition["type"] == "MemoryScrubbed" && condition["status"] == "True")
    })
    .await;
    let pods = [
        fixture.machine.run("a", 3).await,
        fixture.machine.run("b", 3).await,
    ];
    let on_instance = |pod: &&_| fixture.allocation_and_gpu(pod).1 == instance;
    let pod = pods.iter().find(on_instance).unwrap();
    assert!(open_retrying(&mut fixture.tenant(pod), "weights", GIB).is_ok());
    until_state(&api, instance, "Ready").await;
}

#[tokio::test]
async fn agent_without_retained_memory_starts_no_runtime() {
    let (mut fixture, api) = machine(TWO_GPUS).await;
    let config = fs::read_to_string(fixture.machine.path("agent.toml")).unwrap();
    let config = config.replace(
        "[retained-memory]\n",
        "[retained-memory]\nenabled = false\n",
    );
    fs::write(fixture.machine.path("agent.toml"), config).unwrap();
    fixture.machine.start_agent();
    fixture.machine.kubelet.until_allocatable(GPU, 32).await;
    let start = Instant::now();
    while start.elapsed() < WATCHED {
        assert!(runtimes(&fixture).is_empty());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let is_written = || api.gpu(FIRST)["state"] == "Active";
    eventually("the status", is_written).await;
    assert_eq!(api.gpu(FIRST)["runtime"], Value::Null);
}
