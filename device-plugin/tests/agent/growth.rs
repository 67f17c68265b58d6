//! Counts an agent's descriptors, threads, tasks, processes and files while pods, MIG instances and
//! builds come and go.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::eventually;
use crate::machine::Machine;

/// Builds of the agent. Each runs on a node with new MIG instances.
const BUILDS: usize = 3;
/// Rounds of pods for each build.
const ROUNDS: usize = 10;
/// Builds and rounds of the long tier.
const LONG_BUILDS_AND_ROUNDS: (usize, usize) = (20, 300);
/// Pods of a round.
const PODS: usize = 4;
/// The growth that is no leak: the runtime's blocking threads, the sockets of a scrape, files with
/// a late first write. A leak for each pod or each build exceeds this.
const SLACK: usize = 10;
/// How long the counts of an idle agent are sampled. The runtime ends its idle threads after ten
/// seconds.
const SAMPLE_TIME: Duration = Duration::from_secs(3);

/// The configuration of the simulated node: a GPU with two MIG instances, whose UUIDs no other
/// round uses.
fn driver_config(round: usize) -> String {
    let instance = |slice: usize| {
        format!(
            "[[gpu.mig]]\nprofile = \"3g.16gb\"\nuuid = \"MIG-00000000-0000-0000-{round:04}-{slice:012}\"\nmemory = \"16Gi\"\n"
        )
    };
    format!(
        "[[gpu]]\nname = \"NVIDIA H200\"\nuuid = \"GPU-00000000-0000-0000-0000-000000000001\"\nmemory = \"40Gi\"\nminor = 0\n{}{}",
        instance(1),
        instance(2)
    )
}

/// Replaces the node's MIG instances and the shim in the agent's image.
fn change_instances_and_shim(machine: &Machine, round: usize) {
    fs::write(machine.lab.path().join("config.toml"), driver_config(round)).unwrap();
    let shim = machine.path("shim/libcuda.so.1");
    fs::copy(machine.lab.library("libcuda.so.1"), &shim).unwrap();
    let mut bytes = fs::read(&shim).unwrap();
    // The loader ignores bytes after the last section.
    bytes.extend(format!("{round}").bytes());
    fs::write(&shim, bytes).unwrap();
}

fn count_files(folder: &Path) -> usize {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let count = |path: &Path| match path.is_dir() && !path.is_symlink() {
        true => 1 + count_files(path),
        false => 1,
    };
    entries.map(|entry| count(&entry.path())).sum()
}

/// The largest of each count within [`SAMPLE_TIME`].
async fn peak_counts(machine: &Machine) -> BTreeMap<&'static str, usize> {
    let mut most = BTreeMap::new();
    let start = Instant::now();
    while start.elapsed() < SAMPLE_TIME {
        for (kind, count) in current_counts(machine).await {
            let before = most.entry(kind).or_default();
            *before = count.max(*before);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    most
}

async fn current_counts(machine: &Machine) -> BTreeMap<&'static str, usize> {
    let entries = |path: String| fs::read_dir(path).unwrap().count();
    let pid = machine.agent_pid();
    let (_, metrics) = machine.get("/metrics").await;
    let mut lines = metrics.lines();
    let tasks = lines.find_map(|line| line.strip_prefix("bursar_agent_tasks "));
    BTreeMap::from([
        ("descriptors", entries(format!("/proc/{pid}/fd"))),
        ("threads", entries(format!("/proc/{pid}/task"))),
        ("processes that call NVML", machine.nvml_processes().len()),
        ("tasks", tasks.unwrap().parse().unwrap()),
        ("files of state", count_files(&machine.path("state"))),
        ("files of run", count_files(&machine.path("run"))),
        ("CDI files", count_files(&machine.path("cdi"))),
    ])
}

/// Waits until no count exceeds `before` by more than [`SLACK`].
async fn wait_until_not_above(machine: &Machine, before: &BTreeMap<&'static str, usize>) {
    let start = Instant::now();
    loop {
        let now = current_counts(machine).await;
        let more = |(kind, count): (&&'static str, &usize)| {
            before
                .get(kind)
                .is_none_or(|before| before + SLACK < *count)
        };
        if !now.iter().any(more) {
            return;
        }
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "before: {before:?}, now: {now:?}"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn run_rounds(machine: &Machine, build: usize, rounds: std::ops::Range<usize>) {
    for round in rounds {
        let mut pods = Vec::new();
        for number in 0..PODS {
            let name = format!("p{build}-{round}-{number}");
            let pod = machine.admit(&name, 1 + (round + number) % 7).await;
            machine.until_started(&pod).await;
            pods.push(pod);
        }
        assert_eq!(machine.sockets(), PODS);
        pods.iter().for_each(|pod| machine.end(pod));
        eventually("nothing left", || {
            machine.devices().is_empty() && machine.sockets() == 0
        })
        .await;
    }
}

async fn check_no_growth(builds: usize, rounds_each: usize) {
    let mut machine = Machine::with_driver(&driver_config(0)).await;
    change_instances_and_shim(&machine, 0);
    machine.start_successor().await;
    // The first pods create files and threads that exist once.
    run_rounds(&machine, 0, 0..1).await;
    let first = peak_counts(&machine).await;
    println!("at first {first:?}");
    for build in 1..=builds {
        run_rounds(&machine, build, 0..rounds_each).await;
        wait_until_not_above(&machine, &first).await;
        machine.kill_agent();
        change_instances_and_shim(&machine, build);
        machine.start_successor().await;
    }
    run_rounds(&machine, builds + 1, 0..1).await;
    wait_until_not_above(&machine, &first).await;
    println!("in the end {:?}", current_counts(&machine).await);
    let kept = fs::read_dir(machine.path("state/shim")).unwrap().count();
    assert_eq!(kept, 1, "the last build alone");
}

#[tokio::test]
async fn agent_leaks_nothing_when_pods_and_instances_change() {
    check_no_growth(BUILDS, ROUNDS).await;
}

#[tokio::test]
#[ignore = "takes minutes"]
async fn agent_leaks_nothing_over_many_builds_and_rounds() {
    let (builds, rounds) = LONG_BUILDS_AND_ROUNDS;
    check_no_growth(builds, rounds).await;
}
