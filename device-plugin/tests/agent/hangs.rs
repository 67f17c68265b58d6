//! Tests a node on which NVML, the disk of the agent's state or the API server hangs.

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::eventually;
use crate::common::kubelet::Pod;
use crate::machine::{GPU, INSTALLATION_LATE, Machine};

/// The UUIDs of the machine's GPUs.
const GPUS: [&str; 2] = [
    "GPU-00000000-0000-0000-0000-000000000001",
    "GPU-00000000-0000-0000-0000-000000000002",
];

/// The longest time until a recovered GPU is allocatable again: a quiet time of 10 s, on a busy
/// machine.
const RECOVERY_LIMIT: Duration = Duration::from_secs(90);

fn allocatable(machine: &Machine) -> Option<usize> {
    machine.kubelet.capacity(GPU).map(|c| c.allocatable)
}

async fn wait_until_allocatable(machine: &Machine, count: usize) -> Duration {
    let start = Instant::now();
    while allocatable(machine) != Some(count) {
        let now = allocatable(machine);
        assert!(
            start.elapsed() < RECOVERY_LIMIT,
            "{count} device ids expected, {now:?} allocatable"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    start.elapsed()
}

/// Lets every access to a file hang until [`Fifo::release`].
struct Fifo(PathBuf);

impl Fifo {
    fn at(path: PathBuf) -> Self {
        // The agent may be writing a file of this name, so a rename replaces it in one step.
        let fifo = path.with_extension("fifo");
        let status = Command::new("mkfifo").arg(&fifo).status();
        assert!(status.unwrap().success());
        fs::rename(fifo, &path).unwrap();
        Self(path)
    }

    /// Ends the hang: a reader finds an empty file, and a writer continues.
    fn release(self) {
        let moved = self.0.with_extension("aside");
        // A writer that continued may have renamed the file already.
        let path = match fs::rename(&self.0, &moved) {
            Ok(()) => moved,
            Err(_) => return,
        };
        let both = fs::File::options().read(true).write(true).open(path);
        std::thread::spawn(move || {
            let _ends = both;
            std::thread::sleep(Duration::from_millis(500));
        });
    }
}

/// Lets every write of the agent's state hang.
fn hang_state(machine: &Machine) -> [Fifo; 2] {
    ["generations.new", "namespaces.new"].map(|file| Fifo::at(machine.path("state").join(file)))
}

/// Starts an API server for the next agent of this machine. It accepts connections and never
/// answers.
fn silent_api(machine: &Machine) -> TcpListener {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let config = serde_json::json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "a", "cluster": {
            "server": format!("http://{}", silent.local_addr().unwrap()),
        } }],
        "users": [{ "name": "a", "user": {} }],
        "contexts": [{ "name": "a", "context": { "cluster": "a", "user": "a" } }],
        "current-context": "a",
    });
    fs::create_dir_all(machine.path(".kube")).unwrap();
    fs::write(machine.path(".kube/config"), config.to_string()).unwrap();
    silent
}

/// The GPU of each container's binding.
fn gpus_of(devices: &BTreeMap<String, String>) -> Vec<String> {
    let gpu = |binding: &String| {
        let binding: serde_json::Value = serde_json::from_str(binding).unwrap();
        binding["gpus"][0]["uuid"].as_str().unwrap().to_owned()
    };
    devices.values().map(gpu).collect()
}

/// Waits until the agent reports that it is ready and live.
async fn wait_until_ready(machine: &Machine) {
    let start = Instant::now();
    loop {
        let (code, body) = machine.get("/readyz").await;
        if code == 200 {
            break;
        }
        assert!(start.elapsed() < RECOVERY_LIMIT, "{body}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(machine.get("/healthz").await.0, 200);
}

#[tokio::test]
async fn agent_serves_other_gpus_while_nvml_hangs_for_one() {
    let mut machine = Machine::started().await;
    machine.run("before", 4).await;
    let before = machine.devices();
    machine.lab.run_simgpu(&["hang", "0"]).unwrap();
    println!(
        "withdrawn after {:?}",
        wait_until_allocatable(&machine, 16).await
    );
    assert!(
        before
            .iter()
            .all(|held| machine.devices().contains_key(held.0))
    );
    for pod in 0..3 {
        machine.run(&format!("meanwhile-{pod}"), 4).await;
    }
    let mut bound = machine.devices();
    bound.retain(|name, _| !before.contains_key(name));
    assert_eq!(gpus_of(&bound), [GPUS[1]; 3]);
    let stale = |gpu: &str, is: u8| format!(r#"bursar_gpu_audit_stale{{gpu="{gpu}"}} {is}"#);
    let start = Instant::now();
    loop {
        let metrics = machine.get("/metrics").await.1;
        // On a busy machine the audits of the other GPU may be late for a while too.
        if metrics.contains(&stale(GPUS[0], 1)) && metrics.contains(&stale(GPUS[1], 0)) {
            break;
        }
        assert!(start.elapsed() < RECOVERY_LIMIT, "{metrics}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    wait_until_ready(&machine).await;
    // One process queries each GPU, and another one the driver. Hanging calls must not accumulate.
    assert!(
        machine.nvml_processes().len() <= 3,
        "{:?}",
        machine.nvml_processes()
    );
    machine.lab.run_simgpu(&["release", "0"]).unwrap();
    wait_until_allocatable(&machine, 32).await;
    machine.lab.run_simgpu(&["hang", "0"]).unwrap();
    machine.lab.run_simgpu(&["xid", "1", "48"]).unwrap();
    wait_until_allocatable(&machine, 0).await;
    assert!(machine.stop_agent().await.success());
}

#[tokio::test]
async fn agent_offers_nothing_and_ends_while_nvml_hangs_for_all() {
    let mut machine = Machine::started().await;
    machine.run("before", 4).await;
    let before = machine.devices();
    machine.lab.run_simgpu(&["hang", "all"]).unwrap();
    wait_until_allocatable(&machine, 0).await;
    assert!(
        machine
            .kubelet
            .admit(&Pod::with("a", GPU, 4))
            .await
            .is_err()
    );
    wait_until_ready(&machine).await;
    assert!(
        machine.nvml_processes().len() <= 3,
        "{:?}",
        machine.nvml_processes()
    );
    let left = machine.nvml_processes();
    assert!(machine.stop_agent().await.success());
    eventually("no process that hangs is left", || {
        let is_gone = |pid: &u32| !Path::new(&format!("/proc/{pid}/stat")).exists();
        left.iter().all(is_gone)
    })
    .await;
    machine.start_agent();
    wait_until_ready(&machine).await;
    assert_eq!(machine.devices(), before);
    machine.lab.run_simgpu(&["release", "all"]).unwrap();
    wait_until_allocatable(&machine, 32).await;
    machine.run("after", 4).await;
}

#[tokio::test]
async fn agent_finds_its_other_gpus_when_one_hangs_at_its_start() {
    let mut machine = Machine::started().await;
    machine.lab.run_simgpu(&["hang", "0"]).unwrap();
    machine.kill_agent();
    machine.start_agent();
    wait_until_allocatable(&machine, 16).await;
    machine.run("meanwhile", 4).await;
    assert_eq!(gpus_of(&machine.devices()), [GPUS[1]]);
    wait_until_ready(&machine).await;
    machine.lab.run_simgpu(&["release", "0"]).unwrap();
    wait_until_allocatable(&machine, 32).await;
}

#[tokio::test]
async fn agent_offers_and_binds_while_the_state_disk_hangs() {
    let machine = Machine::started().await;
    machine.run("before", 4).await;
    let generation = |folder: &str| generation(&machine.path(folder));
    eventually("the disk knows the GPU", || generation("state") == 1).await;
    let hung = hang_state(&machine);
    machine.lab.run_simgpu(&["lose", "0"]).unwrap();
    wait_until_allocatable(&machine, 16).await;
    machine.run("meanwhile", 4).await;
    wait_until_write_lag(&machine, |seconds| seconds >= 5).await;
    machine.lab.run_simgpu(&["restore", "0"]).unwrap();
    wait_until_allocatable(&machine, 32).await;
    machine.run("later", 12).await;
    wait_until_ready(&machine).await;
    assert_eq!((generation("run"), generation("state")), (2, 1));
    hung.into_iter().for_each(Fifo::release);
    eventually("the disk has what the run folder has", || {
        generation("state") == 2
    })
    .await;
    wait_until_write_lag(&machine, |seconds| seconds == 0).await;
}

/// Waits until the agent's metric of late writes to the state directory is so many seconds.
async fn wait_until_write_lag(machine: &Machine, is: impl Fn(u64) -> bool) {
    let start = Instant::now();
    loop {
        let metrics = machine.get("/metrics").await.1;
        let mut lines = metrics.lines();
        let lag = lines.find_map(|line| line.strip_prefix("bursar_agent_state_write_lag_seconds "));
        if lag.is_some_and(|lag| is(lag.parse().unwrap())) {
            return;
        }
        assert!(start.elapsed() < RECOVERY_LIMIT, "{lag:?}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// The generation of the first GPU in the file of this folder.
fn generation(folder: &Path) -> u64 {
    let text = fs::read_to_string(folder.join("generations.json")).unwrap_or_default();
    let file: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    file["data"][GPUS[0]]["generation"]
        .as_u64()
        .unwrap_or_default()
}

#[tokio::test]
async fn agent_registers_when_started_while_disks_hang() {
    let mut machine = Machine::started().await;
    machine.run("before", 4).await;
    let before = machine.devices();
    machine.kill_agent();
    let state = ["generations.json", "namespaces.json"];
    let mut hung: Vec<Fifo> = Vec::from(hang_state(&machine));
    hung.extend(state.map(|file| Fifo::at(machine.path("state").join(file))));
    let shim = machine.path("shim/libcuda.so.1");
    let (real, content) = (shim.with_extension("real"), fs::read(&shim).unwrap());
    fs::write(&real, content).unwrap();
    let image = Fifo::at(shim.clone());
    println!("registered after {:?}", machine.start_successor().await);
    wait_until_ready(&machine).await;
    assert_eq!((machine.devices(), machine.sockets()), (before, 1));
    let pod = machine.admit("meanwhile", 4).await;
    let error = machine.start_once(&pod).await.unwrap_err();
    assert!(error.contains(INSTALLATION_LATE), "{error}");
    assert_eq!(machine.get("/healthz").await.0, 200);
    image.release();
    fs::rename(&real, &shim).unwrap();
    machine.until_started(&pod).await;
    hung.into_iter().for_each(Fifo::release);
}

#[tokio::test]
async fn agent_is_ready_on_a_node_without_a_healthy_gpu() {
    let mut machine = Machine::started().await;
    machine.lab.run_simgpu(&["lose", "0"]).unwrap();
    machine.lab.run_simgpu(&["xid", "1", "48"]).unwrap();
    wait_until_allocatable(&machine, 0).await;
    wait_until_ready(&machine).await;
    // An upgrade of the DaemonSet does the same. It continues with the next node once this node's
    // agent is ready.
    assert!(machine.stop_agent().await.success());
    machine.start_agent();
    wait_until_ready(&machine).await;
    eventually("both GPUs reported unhealthy", || {
        machine
            .kubelet
            .capacity(GPU)
            .is_some_and(|c| c.capacity == 32 && c.allocatable == 0)
    })
    .await;
    let metrics = machine.get("/metrics").await.1;
    for gpu in GPUS {
        assert!(metrics.contains(&format!(r#"bursar_gpu_healthy{{gpu="{gpu}"}} 0"#)));
    }
}

/// The kubelet's view of the agent while a component hung.
struct Measurement {
    hung_part: &'static str,
    admission_times: Vec<Duration>,
    admission_errors: usize,
    bind_times: Vec<Duration>,
    bind_errors: Vec<(Duration, String)>,
    /// The number of allocatable device ids, with the time of each change.
    allocatable_changes: Vec<(Duration, usize)>,
}

impl std::fmt::Display for Measurement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let most = |times: &[Duration]| times.iter().max().map_or(0, Duration::as_millis);
        let offered = |(after, count): &(Duration, usize)| {
            format!("{count} from {:.1} s", after.as_secs_f32())
        };
        let offered: Vec<_> = self.allocatable_changes.iter().map(offered).collect();
        let refused: Vec<_> = self.bind_errors.iter().map(|(took, _)| *took).collect();
        write!(
            f,
            "| {} | {} in at most {} ms, {} refused | {} | {} in at most {} ms | {} in at most {} ms |",
            self.hung_part,
            self.admission_times.len(),
            most(&self.admission_times),
            self.admission_errors,
            offered.join(", "),
            self.bind_times.len(),
            most(&self.bind_times),
            self.bind_errors.len(),
            most(&refused),
        )
    }
}

/// Admits and starts a pod of 1 GiB four times a second, and ends each at once, for the time of
/// `hang`.
async fn measure_pods(machine: &Machine, hung_part: &'static str, hang: Duration) -> Measurement {
    let mut measurement = Measurement {
        hung_part,
        admission_times: Vec::new(),
        admission_errors: 0,
        bind_times: Vec::new(),
        bind_errors: Vec::new(),
        allocatable_changes: Vec::new(),
    };
    let start = Instant::now();
    let mut every = tokio::time::interval(Duration::from_millis(250));
    while start.elapsed() < hang {
        every.tick().await;
        let offered = allocatable(machine).unwrap_or_default();
        if measurement
            .allocatable_changes
            .last()
            .is_none_or(|last| last.1 != offered)
        {
            measurement
                .allocatable_changes
                .push((start.elapsed(), offered));
        }
        let pod = Pod::with(&format!("p{}", start.elapsed().as_micros()), GPU, 1);
        let sent_at = Instant::now();
        if machine.kubelet.admit(&pod).await.is_err() {
            measurement.admission_errors += 1;
            continue;
        }
        measurement.admission_times.push(sent_at.elapsed());
        fs::create_dir_all(machine.cgroup(&pod)).unwrap();
        let sent_at = Instant::now();
        match machine.start_once(&pod).await {
            Ok(_) => measurement.bind_times.push(sent_at.elapsed()),
            Err(error) => measurement.bind_errors.push((sent_at.elapsed(), error)),
        }
        machine.end(&pod);
    }
    measurement
}

/// Prints a row for each hanging component. `docs/internals/reliability.md` shows the rows of a
/// minute.
async fn measure_hangs(hang: Duration) {
    let one_gpu = async {
        let machine = Machine::started().await;
        machine.lab.run_simgpu(&["hang", "0"]).unwrap();
        measure_pods(&machine, "NVML of one of two GPUs", hang).await
    };
    let all_gpus = async {
        let machine = Machine::started().await;
        machine.lab.run_simgpu(&["hang", "all"]).unwrap();
        measure_pods(&machine, "NVML of all GPUs", hang).await
    };
    let disk = async {
        let machine = Machine::started().await;
        let _hung = hang_state(&machine);
        // The agent writes its state at each change of a GPU.
        machine.lab.run_simgpu(&["lose", "0"]).unwrap();
        measure_pods(&machine, "the state's disk, one of two GPUs lost", hang).await
    };
    let api = async {
        let mut machine = Machine::new().await;
        let _silent = silent_api(&machine);
        machine.start_agent();
        machine.kubelet.until_allocatable(GPU, 32).await;
        measure_pods(&machine, "the API server", hang).await
    };
    let (one_gpu, all_gpus, disk, api) = tokio::join!(one_gpu, all_gpus, disk, api);
    for measurement in [&one_gpu, &all_gpus, &disk, &api] {
        println!("{measurement}");
        let Measurement {
            bind_times: bound,
            bind_errors: refused,
            ..
        } = measurement;
        let has_other_reason = |refused: &&(Duration, String)| !refused.1.contains("waiting for");
        let odd: Vec<_> = refused.iter().filter(has_other_reason).collect();
        assert!(
            !bound.is_empty() && odd.is_empty(),
            "{}: {odd:?}",
            measurement.hung_part
        );
    }
    let last =
        |measurement: &Measurement| measurement.allocatable_changes.last().map(|last| last.1);
    assert_eq!((last(&one_gpu), last(&all_gpus)), (Some(16), Some(0)));
    assert_eq!((last(&disk), last(&api)), (Some(16), Some(32)));
    for measurement in [one_gpu, disk, api] {
        assert_eq!(measurement.admission_errors, 0, "{}", measurement.hung_part);
    }
}

#[tokio::test]
async fn hangs_leave_the_rest_of_the_node_in_service() {
    measure_hangs(Duration::from_secs(20)).await;
}

#[tokio::test]
#[ignore = "takes a minute and prints the table of docs/internals/reliability.md"]
async fn hangs_of_a_minute_leave_the_rest_in_service() {
    measure_hangs(Duration::from_secs(60)).await;
}
