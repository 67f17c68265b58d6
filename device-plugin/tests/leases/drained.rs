//! A GPU that is drained.

use std::fs;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::api::Api;
use crate::bed::{Bed, GIB, open};
use crate::common::kubelet::Pod;
use crate::common::{PATIENCE, eventually};
use crate::machine::GPU;
use crate::real::client;
use crate::tenant::Opened;

/// The device nodes that the agent and the processes that it started have open.
fn open_nodes(bed: &Bed) -> Vec<String> {
    let workers = bed.workers().into_iter();
    let workers = workers.map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
    let callers = bed.machine.callers();
    let pids = workers.chain(callers).chain([bed.machine.agent_pid()]);
    let files = pids.flat_map(|pid| {
        fs::read_dir(format!("/proc/{pid}/fd"))
            .into_iter()
            .flatten()
    });
    let paths = files
        .flatten()
        .filter_map(|file| fs::read_link(file.path()).ok());
    let nodes = paths.filter_map(|path| {
        let node = path.strip_prefix(bed.machine.lab.path().join("dev")).ok()?;
        Some(node.to_str().unwrap().to_owned())
    });
    nodes.collect()
}

/// How much memory of a GPU is used, and by how many processes.
fn used(bed: &Bed, gpu: &str) -> (u64, usize) {
    let sim = bed.machine.lab.sim().unwrap();
    let usage = sim.usage(sim.gpu_unit(sim.find_gpu(gpu).unwrap()));
    (usage.used, usage.processes.len())
}

async fn until(api: &Api, gpu: &str, state: &str, reason: &str) -> Value {
    let expected = [json!(state), json!(reason)];
    let said = || {
        let said = api.gpu(gpu);
        [said["state"].clone(), said["health"]["reason"].clone()]
    };
    eventually(&format!("{state}, {reason}"), || said() == expected).await;
    api.gpu(gpu)
}

/// The kubelet's tries, until the agent, which may still have to register, refuses.
async fn until_refused(bed: &Bed, pod: &Pod) {
    let begun = Instant::now();
    loop {
        let error = bed.machine.start(pod).await.unwrap_err();
        if error.contains("is drained") {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "{error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_drained_gpu_is_held_by_nobody_and_begins_anew_when_that_is_over() {
    let mut bed = Bed::new().await;
    let api = Api::of(&bed.machine);
    bed.machine.restart_agent().await;
    // Each on a GPU of its own.
    let (pod, other) = (
        bed.machine.admit("a", 4).await,
        bed.machine.run("b", 14).await,
    );
    let mut neighbour = bed.tenant(&other);
    assert!(open(&mut neighbour, "before", GIB).is_ok());
    bed.machine.start(&pod).await.unwrap();
    let (_, gpu) = bed.device(&pod);
    let (_, elsewhere) = bed.device(&other);
    let mut first = bed.tenant(&pod);
    // Once this answers the GPU was seen to clear freed memory.
    assert!(open(&mut first, "first", GIB).is_ok());
    first.kill();
    let (mut tenant, made) = client(&bed, &pod).await;
    assert_eq!(made["found"], false);
    let before = until(&api, &gpu, "Active", "Ok").await;
    let node = |gpu: &str| format!("nvidia{}", api.gpu(gpu)["index"]);
    let only_the_other = |bed: &Bed| {
        let nodes = open_nodes(bed);
        nodes.contains(&node(&elsewhere)) && !nodes.contains(&node(&gpu))
    };
    assert!(
        open_nodes(&bed).contains(&node(&gpu)),
        "NVML holds what it looks at"
    );
    assert_ne!(used(&bed, &gpu), (0, 0));

    api.drain(&[&gpu]);
    until(&api, &gpu, "Draining", "Draining").await;
    bed.machine.kill_agent();
    bed.machine.start_agent();
    until(&api, &gpu, "Draining", "Drained").await;
    assert!(!tenant.is_alive());
    assert_eq!(used(&bed, &gpu), (0, 0));
    assert!(!open_nodes(&bed).contains(&node(&gpu)));
    eventually("the other GPU is looked at", || only_the_other(&bed)).await;
    bed.machine.kubelet.until_allocatable(GPU, 16).await;
    until_refused(&bed, &pod).await;
    // The others' GPU goes on.
    assert!(matches!(
        open(&mut neighbour, "meanwhile", GIB),
        Ok(Opened::Write { .. })
    ));

    bed.machine.kill_agent();
    bed.machine.start_agent();
    eventually("the other GPU is looked at again", || only_the_other(&bed)).await;
    until(&api, &gpu, "Draining", "Drained").await;
    until_refused(&bed, &pod).await;

    api.drain(&[]);
    let after = until(&api, &gpu, "Active", "Ok").await;
    assert_eq!(
        after["generation"].as_u64(),
        before["generation"].as_u64().map(|before| before + 1)
    );
    assert_eq!(api.gpu(&elsewhere)["generation"], before["generation"]);
    // Once this answers the GPU was seen to clear freed memory anew.
    assert!(open(&mut bed.tenant(&pod), "seen", GIB).is_ok());
    let (_tenant, anew) = client(&bed, &pod).await;
    assert_eq!(anew["found"], false, "what was kept is lost");
}

#[tokio::test]
async fn a_driver_that_was_loaded_anew_is_seen_to_clear_memory_before_any_is_kept() {
    let mut bed = Bed::new().await;
    let api = Api::of(&bed.machine);
    bed.machine.restart_agent().await;
    let pod = bed.machine.run("a", 4).await;
    let (_, gpu) = bed.device(&pod);
    let mut tenant = bed.tenant(&pod);
    assert!(open(&mut tenant, "weights", GIB).is_ok());
    tenant.kill();
    api.drain(&[&gpu]);
    until(&api, &gpu, "Draining", "Drained").await;
    // As a module that is loaded with RmDisableScrubOnFree.
    bed.machine.lab.simgpu(&["scrub", "off"]).unwrap();
    api.drain(&[]);
    until(&api, &gpu, "Active", "Ok").await;
    let refused = open(&mut bed.tenant(&pod), "weights", GIB).unwrap_err();
    assert!(refused.contains("NotScrubbed"), "{refused}");
}
