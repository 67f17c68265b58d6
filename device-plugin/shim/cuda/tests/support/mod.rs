//! Runs a container as the agent makes it, without a cluster. It has its own mounts, the shim where
//! the loader finds it, the simulated driver where the shim finds it, and the agent's socket.

#![allow(dead_code, reason = "each test and benchmark uses a part of it")]
#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bursar_host::clock::{self, ClockReading};
use bursar_ledger::BootTime;
use bursar_ledger::units::{AllocationId, Bytes};
use bursar_sessions::{
    Account, ContainerUsage, Fault, Process, RecoveryPolicy, SessionSpec, Sessions,
};
use bursar_sim_state::{MachineDir, Sim};

#[path = "../../../common/tests/support/agent.rs"]
mod agent;
pub mod installed;
#[path = "../../../common/tests/support/program.rs"]
mod program;

pub use agent::{Everyone, SimCharges};
pub use program::Client;

/// The figures of one account, and the container's denials and processes.
#[derive(Clone, Debug)]
pub struct AccountUsage {
    pub quota: Bytes,
    pub granted: Bytes,
    pub used: Bytes,
    pub exited: Bytes,
    pub peak: Bytes,
    pub denied: u64,
    pub processes: usize,
}

pub const GPU: &str = "GPU-5e000000-0000-0000-0000-000000000001";
pub const MIB: u64 = 1 << 20;

/// Returns the UUID of a GPU by its number; [`GPU`] is the first. A benchmark on a real GPU names
/// it by the variable `BURSAR_GPU`.
fn gpu(minor: usize) -> String {
    let simulated = || format!("GPU-5e000000-0000-0000-0000-{:012x}", minor + 1);
    std::env::var("BURSAR_GPU").unwrap_or_else(|_| simulated())
}

/// Returns the folder of this workspace's built libraries; builds them once. A benchmark on a
/// machine without them names theirs by the variable `BURSAR_LIBRARIES`.
pub fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| match std::env::var_os("BURSAR_LIBRARIES") {
        Some(folder) => folder.into(),
        None => bursar_sim_lab::build(&["bursar-sim-cuda", "bursar-shim"], &["--lib"]).unwrap(),
    })
}

/// Returns the CUDA driver under the programs: the simulated one, or that of the variable
/// `BURSAR_DRIVER`.
fn driver() -> PathBuf {
    match std::env::var_os("BURSAR_DRIVER") {
        Some(real) => real.into(),
        None => built().join("libbursar_sim_cuda.so"),
    }
}

/// Returns whether the driver is a real one.
pub fn is_real() -> bool {
    std::env::var_os("BURSAR_DRIVER").is_some()
}

/// Returns the program of the tests, which lies beside the libraries of a benchmark.
fn client() -> PathBuf {
    match std::env::var_os("BURSAR_LIBRARIES") {
        Some(_) => built().join("quota-client"),
        None => env!("CARGO_BIN_EXE_quota-client").into(),
    }
}

fn shim() -> PathBuf {
    built().join("libbursar_shim.so")
}

/// One container with quotas on simulated GPUs of 16 GiB.
pub struct Container {
    folder: tempfile::TempDir,
    served: SessionSpec,
    runtime: tokio::runtime::Runtime,
    sessions: Option<Arc<Sessions>>,
    /// How contexts are charged.
    contexts: Contexts,
    /// The root process of the container; `None` where each process is one.
    root: Option<u32>,
}

/// How contexts are charged.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Contexts {
    Free,
    /// By the agent's estimate, before it measured a context.
    Unmeasured,
    Measured,
}

impl Container {
    /// Starts a container with one GPU. Contexts are free, so that only other memory counts.
    pub fn with_quota(quota: u64) -> Container {
        Container::with_quotas(&[quota])
    }

    /// Starts a container with a GPU for each quota. Contexts are free.
    pub fn with_quotas(quotas: &[u64]) -> Container {
        Container::new(quotas, "16Gi", Contexts::Free, "")
    }

    /// Starts a container on a node whose driver moves host memory of programs to the GPU.
    #[allow(dead_code)]
    pub fn with_pageable_memory(quota: u64) -> Container {
        Container::new(&[quota], "16Gi", Contexts::Free, "pageable-memory = true\n")
    }

    /// Starts a container whose contexts are charged by a measured size. The GPU is an H200.
    pub fn charging_contexts(quota: u64) -> Container {
        Container::new(&[quota], "141Gi", Contexts::Measured, "")
    }

    /// Starts a container whose contexts are charged before the agent has measured one.
    #[allow(dead_code)]
    pub fn with_unmeasured_contexts(quota: u64) -> Container {
        Container::new(&[quota], "141Gi", Contexts::Unmeasured, "")
    }

    fn new(quotas: &[u64], memory: &str, contexts: Contexts, driver: &str) -> Container {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("sim.toml");
        let gpus: String = (0..quotas.len())
            .map(|minor| {
                format!(
                    "[[gpu]]\nname = \"NVIDIA H200\"\nuuid = \"{}\"\nmemory = \"{memory}\"\nminor = {minor}\n",
                    gpu(minor)
                )
            })
            .collect();
        std::fs::write(&config, format!("{driver}{gpus}")).unwrap();
        MachineDir::at(folder.path().join("sim"))
            .init(&config, &[])
            .unwrap();
        let served = SessionSpec {
            allocation: AllocationId::from_bits(7),
            pod: "8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11".parse().unwrap(),
            gpus: quotas
                .iter()
                .enumerate()
                .map(|(minor, quota)| (gpu(minor).parse().unwrap(), Bytes(*quota)))
                .collect(),
            managed: Bytes::ZERO,
            device_ids: None,
        };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let mut container = Container {
            folder,
            served,
            runtime,
            sessions: None,
            contexts,
            root: None,
        };
        container.start_agent();
        container
    }

    pub fn start_agent(&mut self) {
        let charges = Arc::new(SimCharges::of(&self.folder.path().join("sim")));
        let sessions = Sessions::new(
            self.folder.path().join("run"),
            charges,
            Arc::new(self.root.map_or_else(Everyone::here, Everyone::below)),
        );
        let sessions = match self.contexts {
            Contexts::Free => sessions,
            Contexts::Unmeasured | Contexts::Measured => {
                sessions.with_context_sizes(self.folder.path().join("contexts.json"))
            }
        };
        if self.contexts == Contexts::Measured {
            sessions.record_context_size(&gpu(0).parse().unwrap(), "580", Bytes(self.context()));
        }
        self.runtime
            .block_on(sessions.serve(self.served.clone()))
            .unwrap();
        self.sessions = Some(Arc::new(sessions));
    }

    /// Starts the agent again in a container whose processes descend from this one.
    pub fn set_root(&mut self, root: u32) {
        self.stop_agent();
        self.root = Some(root);
        self.start_agent();
    }

    /// Returns the sessions of the running agent.
    pub fn sessions(&self) -> Arc<Sessions> {
        Arc::clone(self.sessions.as_ref().unwrap())
    }

    pub fn stop_agent(&mut self) {
        let _entered = self.runtime.enter();
        self.sessions = None;
        // The agent's tasks end at their next step.
        std::thread::sleep(Duration::from_millis(50));
    }

    pub fn resize(&self, account: &Account, quota: Bytes) {
        self.sessions
            .as_ref()
            .unwrap()
            .set_requested_quota(&self.served.allocation, account, quota)
            .unwrap();
    }

    /// Returns the bytes that the driver has taken of the GPU.
    pub fn taken(&self) -> u64 {
        let sim = Sim::open(&self.folder.path().join("sim")).unwrap();
        sim.used(0)
    }

    /// Returns the bytes that a context takes of the GPU; no account pays for them here.
    pub fn context(&self) -> u64 {
        let sim = Sim::open(&self.folder.path().join("sim")).unwrap();
        sim.config.context
    }

    /// Returns the usage of the GPU's account.
    pub fn usage(&self) -> AccountUsage {
        self.usage_of(0)
    }

    /// Returns the usage of an account by number: the GPUs', then managed memory's.
    pub fn usage_of(&self, account: usize) -> AccountUsage {
        let usage = self.container_usage().remove(0);
        let balance = &usage.accounts[account];
        AccountUsage {
            quota: balance.quota,
            granted: balance.granted,
            used: balance.used,
            exited: balance.exited,
            peak: balance.peak,
            denied: usage.denied.iter().map(|(_, count)| count).sum(),
            processes: usage.processes.len(),
        }
    }

    /// Returns the agent's records of the container.
    pub fn container_usage(&self) -> Vec<ContainerUsage> {
        self.sessions.as_ref().unwrap().container_usage()
    }

    /// Waits until the usage of the GPU's account satisfies a condition.
    pub fn wait_for(&self, what: &str, is_so: impl Fn(&AccountUsage) -> bool) {
        let start = Instant::now();
        while !is_so(&self.usage()) {
            assert!(
                start.elapsed() < Duration::from_secs(5),
                "{what}: {:?}",
                self.usage()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Returns the path of the agent's socket on the host.
    pub fn socket(&self) -> PathBuf {
        self.alloc_dir().join("agent.sock")
    }

    /// Returns the folder of the simulated machine.
    pub fn sim(&self) -> PathBuf {
        self.folder.path().join("sim")
    }

    /// Returns the folder that the container sees as `/run/bursar`.
    pub fn alloc_dir(&self) -> PathBuf {
        Sessions::alloc_dir(&self.folder.path().join("run"))
            .join(self.served.allocation.to_string())
    }

    /// Starts a program in the container.
    pub fn program(&self) -> Client {
        self.start(&shim(), "/opt/bursar/drv/cuda.so.1", &[])
    }

    /// Starts a program as the container's main process: the first of its pid namespace, with the
    /// shim preloaded.
    pub fn main_program(&self) -> Client {
        let drv = "/opt/bursar/drv/cuda.so.1";
        let namespace = ["--pid", "--fork", "--kill-child", "--mount-proc"];
        self.start(&shim(), drv, &namespace)
    }

    /// Sets the policy for poisoned contexts.
    pub fn set_policy(&self, policy: RecoveryPolicy) {
        let sessions = self.sessions.as_ref().unwrap();
        sessions.set_recovery_policy(&self.served.allocation, policy);
    }

    /// Reports an XID of a program, as from the kernel's log.
    pub fn xid(&self, program: &Client, code: u32) {
        let sessions = self.sessions.as_ref().unwrap();
        let on: Vec<_> = self
            .served
            .gpus
            .iter()
            .map(|(gpu, _)| gpu.clone())
            .collect();
        let suspect = sessions.find_xid_target(program.pid(), &on, BootTime(u64::MAX));
        sessions.record_xid(&suspect.unwrap(), code, clock::read_clocks());
    }

    /// Returns a file: while it exists, programs print `busy` and do not call CUDA.
    pub fn busy(&self) -> PathBuf {
        self.folder.path().join("busy")
    }

    /// Runs the decisions that are due after some time.
    pub fn overdue(&self, after: Duration) {
        let now = clock::read_clocks();
        let then = ClockReading {
            moment: now.moment + after,
            ..now
        };
        self.sessions
            .as_ref()
            .unwrap()
            .take_new_faults(Duration::ZERO, then);
    }

    /// Returns the open faults.
    pub fn faults(&self) -> Vec<Fault> {
        let faults = self.sessions.as_ref().unwrap().open_faults();
        faults.into_iter().map(|(_, fault)| fault).collect()
    }

    /// Returns the processes that the agent is to kill.
    pub fn condemned(&self) -> Vec<Process> {
        let condemned = self.sessions().processes_to_kill(clock::now());
        condemned.into_iter().map(|image| image.process).collect()
    }

    /// Starts a program on the bare driver, for benchmarks to compare with.
    #[allow(dead_code)]
    pub fn bare_program(&self) -> Client {
        self.start(&driver(), "/opt/bursar/drv/unused", &[])
    }

    fn start(&self, library: &Path, place: &str, namespace: &[&str]) -> Client {
        // The program's own namespaces, which any user may create: its mounts are private.
        let script = "set -e; mount -t tmpfs none /opt; mkdir -p /opt/bursar/lib /opt/bursar/drv; \
            for f in lib/libcuda.so.1:$LIBRARY ${DRIVER#/opt/bursar/}:$REAL; do \
            touch /opt/bursar/${f%%:*}; mount --bind ${f#*:} /opt/bursar/${f%%:*}; done; \
            mount -t tmpfs none /run; mkdir /run/bursar; mount --bind -o ro $ALLOC /run/bursar; \
            cd ${CLIENT%/*}; exec ${PRELOAD:+env LD_PRELOAD=$PRELOAD} ./${CLIENT##*/} $BUSY";
        let mut command = Command::new("unshare");
        command.arg("--mount").args(namespace);
        // SAFETY: the call takes nothing and returns a number.
        if unsafe { libc::geteuid() } != 0 {
            command.args(["--user", "--map-root-user"]);
        }
        let sim = self.folder.path().join("sim");
        let preload = if namespace.is_empty() {
            ""
        } else {
            "/opt/bursar/lib/libcuda.so.1"
        };
        command
            .args(["sh", "-c", script])
            .env("LIBRARY", library)
            .env("DRIVER", place)
            .env("REAL", driver())
            .env("PRELOAD", preload)
            .env("ALLOC", self.alloc_dir())
            .env("CLIENT", client())
            .env("BUSY", self.busy())
            .env("LD_LIBRARY_PATH", "/opt/bursar/lib")
            .env("SIMGPU_DEV", sim.join("dev"))
            .env("SIMGPU_DIR", sim);
        Client::spawn(&mut command)
    }
}
