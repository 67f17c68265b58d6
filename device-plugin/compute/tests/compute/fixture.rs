//! Runs a simulated machine with tenants, and the holder of its GPU.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use bursar_compute::holder::{PodOrder, Report};
use bursar_compute::process::{Answer, Request};
use bursar_compute::turns::Weight;
use bursar_sim_lab::{DriverClient, H200, KernelModule, SimGroup, SimMachine};

/// The UUID of the GPU of [`H200`].
pub(crate) const GPU: &str = "GPU-00000000-0000-0000-0000-000000000001";

/// The longest wait for an answer of the holder, and for a state of the machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// How long shares are measured: tens of rounds.
const WINDOW: Duration = Duration::from_millis(800);

/// How often the agent passes on which processes are active.
const ACTIVITY: Duration = Duration::from_millis(100);

/// The folder of the holder's program and of the load's, which are built once.
pub(crate) fn built() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let packages = ["bursar-compute", "bursar-provisioner"];
        bursar_sim_lab::build(&packages, &["--bins", "--examples"]).unwrap()
    })
}

/// A machine with one GPU and a kernel module.
pub(crate) struct Lab {
    pub(crate) machine: SimMachine,
    pub(crate) module: KernelModule,
}

impl Lab {
    pub(crate) fn new() -> Lab {
        // Nothing waits for a compiler once the machine runs.
        built();
        // A hundred contexts fit.
        let machine = SimMachine::new(H200).unwrap();
        let module = machine.load_kernel_module().unwrap();
        Lab { machine, module }
    }

    pub(crate) fn device(&self) -> PathBuf {
        self.machine.dev().join("nvidia0")
    }

    /// A process with a context that has no work.
    pub(crate) fn idle(&self) -> DriverClient {
        let mut client = self.machine.spawn_client().unwrap();
        client.request("context 0").unwrap();
        client
    }

    /// A process with a context that has work without an end.
    pub(crate) fn busy(&self) -> DriverClient {
        let mut client = self.idle();
        client.request("launch spin 0").unwrap();
        client
    }

    /// The groups of a process that have work.
    pub(crate) fn working(&mut self, pid: u32) -> Vec<SimGroup> {
        let mut groups = self.module.groups(0).unwrap();
        groups.retain(|group| group.pid == pid && group.is_busy);
        groups
    }

    /// The slices of a process's groups for kernels, in microseconds.
    pub(crate) fn slice(&mut self, pid: u32) -> u64 {
        self.working(pid)[0].slice
    }

    /// How long the processes have had the GPU.
    fn finished(&mut self, pids: &[u32]) -> Duration {
        let groups = self.module.groups(0).unwrap();
        let own = groups.iter().filter(|group| pids.contains(&group.pid));
        own.map(|group| group.finished).sum()
    }

    /// The part of the GPU's time that the processes have while `meanwhile` is called again and
    /// again.
    pub(crate) fn part(&mut self, pids: &[u32], mut meanwhile: impl FnMut()) -> f64 {
        // Slices are set first.
        meanwhile();
        let before = self.finished(pids);
        let begun = Instant::now();
        while begun.elapsed() < WINDOW {
            meanwhile();
            thread::sleep(ACTIVITY);
        }
        let ran = self.finished(pids) - before;
        ran.as_secs_f64() / begun.elapsed().as_secs_f64()
    }
}

/// Waits until the condition holds.
pub(crate) fn wait_until(mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < PATIENCE, "waited for {PATIENCE:?}");
        thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) fn near(part: f64, expected: f64) -> bool {
    (part - expected).abs() < 0.05
}

pub(crate) fn pids(clients: &[DriverClient]) -> Vec<u32> {
    clients.iter().map(DriverClient::pid).collect()
}

/// A pod of these processes.
pub(crate) fn pod(uid: &str, weight: Option<u16>, processes: &[u32]) -> PodOrder {
    PodOrder {
        uid: uid.to_owned(),
        weight: weight.map(|weight| Weight::try_from(weight).unwrap()),
        processes: processes.iter().copied().collect(),
    }
}

/// The holder's process. Dropped, it is killed, as the agent does.
pub(crate) struct FakeAgent {
    child: Child,
    socket: UnixStream,
    answers: BufReader<UnixStream>,
}

impl FakeAgent {
    /// Starts a holder with a round of 20 ms.
    pub(crate) fn start(lab: &Lab) -> FakeAgent {
        let (socket, peer) = UnixStream::pair().unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let child = Command::new(built().join("examples/holder"))
            .arg(GPU)
            .arg(lab.device())
            .arg("20000")
            .stdin(OwnedFd::from(peer.try_clone().unwrap()))
            .stdout(Stdio::from(OwnedFd::from(peer)))
            .spawn()
            .unwrap();
        FakeAgent {
            child,
            answers: BufReader::new(socket.try_clone().unwrap()),
            socket,
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn send(&mut self, request: &Request) {
        let mut line = serde_json::to_vec(request).unwrap();
        line.push(b'\n');
        self.socket.write_all(&line).unwrap();
    }

    /// Orders the pods until the holder has found so many groups of each, within ten looks: a look
    /// searches for a bounded time.
    pub(crate) fn find(&mut self, pods: &[PodOrder], groups: &[usize]) {
        let wanted: Vec<(&String, usize)> = pods
            .iter()
            .map(|pod| &pod.uid)
            .zip(groups.iter().copied())
            .collect();
        let found = (0..10).any(|_| {
            let report = self.order(pods);
            wanted
                .iter()
                .all(|(uid, groups)| report.pods[*uid].groups == *groups)
        });
        assert!(found, "{:?}", self.order(pods));
    }

    /// Passes the pods on, and returns the report.
    pub(crate) fn order(&mut self, pods: &[PodOrder]) -> Report {
        self.send(&Request::Pods {
            pods: pods.to_vec(),
        });
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        match serde_json::from_str(&line).unwrap() {
            Answer::Report(report) => report,
            Answer::Failed(why) => panic!("the holder has failed: {why}"),
        }
    }

    /// Passes on that these processes launch work.
    pub(crate) fn mark_active(&mut self, pids: &[u32]) {
        let processes: BTreeSet<u32> = pids.iter().copied().collect();
        self.send(&Request::Active { processes });
    }

    /// The processor time that the holder has used, which the kernel counts in nanoseconds.
    pub(crate) fn processor_time(&self) -> Duration {
        let path = format!("/proc/{}/schedstat", self.pid());
        let text = fs::read_to_string(path).unwrap();
        Duration::from_nanos(text.split_whitespace().next().unwrap().parse().unwrap())
    }
}

impl Drop for FakeAgent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        // A holder that hangs in a tenant's file system must not hang the test too.
        for _ in 0..500 {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}
