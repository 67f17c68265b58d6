//! Runs a node as the agent makes it, without a cluster: a simulated GPU, the agent's sockets, and
//! containers with both shims.

#![allow(dead_code, reason = "each test uses a part of it")]
#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bursar_ledger::units::{AllocationId, Bytes};
use bursar_sessions::{Account, SessionSpec, Sessions};
use bursar_sim_state::MachineDir;

#[path = "../../../common/tests/support/agent.rs"]
mod agent;
#[path = "../../../common/tests/support/program.rs"]
mod program;

use agent::{Everyone, SimCharges};
pub use program::Client;

pub const GPU: &str = "GPU-5e000000-0000-0000-0000-000000000001";
pub const INSTANCE: &str = "MIG-5e000000-0000-0000-0000-000000000002";
pub const MIB: u64 = 1 << 20;

/// The driver's library behind the shim.
const DRIVER: &str = "/opt/bursar/drv/nvidia-ml.so.1";

/// A little longer than the shim reuses an answer.
const FRESH: Duration = Duration::from_millis(120);

/// Returns the folder of this workspace's built libraries; builds them once.
pub fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let packages = [
            "bursar-sim-cuda",
            "bursar-sim-nvml",
            "bursar-shim",
            "bursar-nvml-shim",
        ];
        bursar_sim_lab::build(&packages, &["--lib"]).unwrap()
    })
}

/// A node with one GPU of 16 GiB, and a container for each quota.
pub struct Node {
    folder: tempfile::TempDir,
    served: Vec<SessionSpec>,
    runtime: tokio::runtime::Runtime,
    sessions: Option<Sessions>,
}

/// The pid namespace of a program.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Pids {
    /// Its own: the program is process 1 there.
    Own,
    /// The host's, as with `hostPID`.
    Host,
}

impl Node {
    /// Starts containers with these quotas of the GPU.
    pub fn with_quotas(quotas: &[u64]) -> Node {
        Node::new(GPU, "", quotas)
    }

    /// Starts a node whose GPU is in MIG mode, with one instance and a container with a quota of
    /// it.
    pub fn with_quota_of_an_instance(quota: u64) -> Node {
        let instance =
            format!("[[gpu.mig]]\nprofile = \"1g.8gb\"\nuuid = \"{INSTANCE}\"\nmemory = \"8Gi\"\n");
        Node::new(INSTANCE, &instance, &[quota])
    }

    fn new(device: &str, instances: &str, quotas: &[u64]) -> Node {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("sim.toml");
        let gpu = format!(
            "[[gpu]]\nname = \"NVIDIA H200\"\nuuid = \"{GPU}\"\nmemory = \"16Gi\"\nminor = 0\n{instances}"
        );
        std::fs::write(&config, gpu).unwrap();
        MachineDir::at(folder.path().join("sim"))
            .init(&config, &[])
            .unwrap();
        let served = |(number, quota): (u64, &u64)| SessionSpec {
            allocation: AllocationId::from_bits(number),
            pod: format!("8b2e3f0a-1f5c-4c41-9d53-{number:012}")
                .parse()
                .unwrap(),
            gpus: vec![(device.parse().unwrap(), Bytes(*quota))],
            managed: Bytes::ZERO,
            device_ids: None,
        };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let mut node = Node {
            folder,
            served: (0..).zip(quotas).map(served).collect(),
            runtime,
            sessions: None,
        };
        node.start_agent();
        node
    }

    pub fn start_agent(&mut self) {
        let charges = Arc::new(SimCharges::of(&self.folder.path().join("sim")));
        let everyone = Arc::new(Everyone::here());
        let sessions = Sessions::new(self.folder.path().join("run"), charges, everyone);
        for served in &self.served {
            self.runtime
                .block_on(sessions.serve(served.clone()))
                .unwrap();
        }
        self.sessions = Some(sessions);
    }

    pub fn stop_agent(&mut self) {
        let _entered = self.runtime.enter();
        self.sessions = None;
        // The agent's tasks end at their next step.
        std::thread::sleep(Duration::from_millis(50));
    }

    pub fn resize(&self, container: usize, quota: u64) {
        let account = Account::Gpu(GPU.parse().unwrap());
        let sessions = self.sessions.as_ref().unwrap();
        sessions
            .set_requested_quota(&self.served[container].allocation, &account, Bytes(quota))
            .unwrap();
    }

    /// Starts a program in a container, in a pid namespace of its own.
    pub fn program(&self, container: usize) -> Client {
        self.start(container, Pids::Own, DRIVER)
    }

    /// Starts a program that is not the tests' own in a container, and waits until it is ready.
    pub fn foreign_program(&self, container: usize, program: &str) -> Client {
        self.start_program(container, Pids::Own, DRIVER, program)
    }

    /// Starts a program in a container whose pod shares the host's pid namespace.
    pub fn program_among_the_hosts(&self, container: usize) -> Client {
        self.start(container, Pids::Host, DRIVER)
    }

    /// Starts a program in a container without the driver.
    pub fn program_without_driver(&self, container: usize) -> Client {
        self.start(container, Pids::Own, "/opt/bursar/drv/unused")
    }

    fn start(&self, container: usize, pids: Pids, driver: &str) -> Client {
        self.start_program(container, pids, driver, env!("CARGO_BIN_EXE_nvml-client"))
    }

    fn start_program(&self, container: usize, pids: Pids, driver: &str, program: &str) -> Client {
        // The program's own namespaces, which any user may create: its mounts are private.
        let script = "set -e; mount -t tmpfs none /opt; mkdir -p /opt/bursar/lib /opt/bursar/drv; \
            for f in lib/libcuda.so.1:$BUILT/libbursar_shim.so lib/libnvidia-ml.so.1:$BUILT/libbursar_nvml_shim.so \
            drv/cuda.so.1:$BUILT/libbursar_sim_cuda.so ${DRIVER#/opt/bursar/}:$BUILT/libbursar_sim_nvml.so; do \
            touch /opt/bursar/${f%%:*}; mount --bind ${f#*:} /opt/bursar/${f%%:*}; done; \
            mount -t tmpfs none /run; mkdir /run/bursar; mount --bind -o ro $ALLOC /run/bursar; exec $CLIENT";
        let mut command = Command::new("unshare");
        command.arg("--mount");
        if pids == Pids::Own {
            command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
        }
        // SAFETY: the call takes nothing and returns a number.
        if unsafe { libc::geteuid() } != 0 {
            command.args(["--user", "--map-root-user"]);
        }
        let sim = self.folder.path().join("sim");
        let alloc = Sessions::alloc_dir(&self.folder.path().join("run"))
            .join(self.served[container].allocation.to_string());
        command
            .args(["sh", "-c", script])
            .env("BUILT", built())
            .env("DRIVER", driver)
            .env("ALLOC", alloc)
            .env("CLIENT", program)
            .env("LD_LIBRARY_PATH", "/opt/bursar/lib")
            .env("SIMGPU_DEV", sim.join("dev"))
            .env("SIMGPU_DIR", sim);
        Client::spawn(&mut command)
    }
}

impl Client {
    /// Sends a line, once no earlier answer is reused.
    pub fn fresh(&mut self, line: impl AsRef<str>) -> Vec<u64> {
        std::thread::sleep(FRESH);
        self.ok(line)
    }
}
