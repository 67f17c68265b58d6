//! A container as the agent makes one, without a cluster: its own mounts, the shim where the
//! loader finds it, the simulated driver where the shim finds it, and the agent's socket.

#![allow(dead_code, reason = "each test and benchmark uses a part of it")]
#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bursar_device_plugin::ledger::Moment;
use bursar_device_plugin::node::clock::{self, Present};
use bursar_device_plugin::sessions::{
    Account, Books, Fault, Policy, Process, Served, Sessions, Usage,
};
use bursar_device_plugin::units::{AllocationId, Bytes};
use bursar_sim_state::{Folder, Sim};

mod agent;
mod program;

pub use agent::{Everyone, SimCharges};
pub use program::Client;

pub const GPU: &str = "GPU-5e000000-0000-0000-0000-000000000001";
pub const MIB: u64 = 1 << 20;

/// The UUID of a GPU by its number; [`GPU`] is the first.
fn gpu(minor: usize) -> String {
    format!("GPU-5e000000-0000-0000-0000-{:012x}", minor + 1)
}

/// Where cargo puts this workspace's libraries; they are built once.
pub fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| program::build(&["bursar-sim-cuda", "bursar-shim"]))
}

/// One container with quotas on simulated GPUs of 16 GiB.
pub struct Container {
    folder: tempfile::TempDir,
    served: Served,
    runtime: tokio::runtime::Runtime,
    sessions: Option<Sessions>,
    /// Whether contexts are charged, as the agent does it.
    contexts: Contexts,
}

/// What programs pay for contexts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Contexts {
    Free,
    /// What the agent takes for their size before it could measure one.
    Unmeasured,
    Measured,
}

impl Container {
    /// Makes the GPU, and serves the container; contexts are free, so that other memory is all that counts.
    pub fn with_quota(quota: u64) -> Container {
        Container::with_quotas(&[quota])
    }

    /// As above, with a GPU for each quota.
    pub fn with_quotas(quotas: &[u64]) -> Container {
        Container::new(quotas, "16Gi", Contexts::Free)
    }

    /// As the agent does it: contexts are charged. The GPU is an H200.
    pub fn charging_contexts(quota: u64) -> Container {
        Container::new(&[quota], "141Gi", Contexts::Measured)
    }

    /// The same while the agent has not measured one.
    #[allow(dead_code)]
    pub fn with_unmeasured_contexts(quota: u64) -> Container {
        Container::new(&[quota], "141Gi", Contexts::Unmeasured)
    }

    fn new(quotas: &[u64], memory: &str, contexts: Contexts) -> Container {
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
        std::fs::write(&config, gpus).unwrap();
        Folder::at(folder.path().join("sim"))
            .init(&config, &[])
            .unwrap();
        let served = Served {
            allocation: AllocationId::from_bits(7),
            pod: "8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11".parse().unwrap(),
            gpus: quotas
                .iter()
                .enumerate()
                .map(|(minor, quota)| (gpu(minor).parse().unwrap(), Bytes(*quota)))
                .collect(),
            managed: Bytes::ZERO,
            tokens: None,
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
        };
        container.start_agent();
        container
    }

    pub fn start_agent(&mut self) {
        let charges = Arc::new(SimCharges::of(&self.folder.path().join("sim")));
        let sessions = Sessions::new(
            self.folder.path().join("run"),
            charges,
            Arc::new(Everyone::here()),
        );
        let sessions = match self.contexts {
            Contexts::Free => sessions,
            Contexts::Unmeasured | Contexts::Measured => {
                sessions.charging_contexts(self.folder.path().join("contexts.json"))
            }
        };
        if self.contexts == Contexts::Measured {
            sessions.context_measured(&gpu(0).parse().unwrap(), "580", Bytes(self.context()));
        }
        self.runtime
            .block_on(sessions.serve(self.served.clone()))
            .unwrap();
        self.sessions = Some(sessions);
    }

    pub fn stop_agent(&mut self) {
        let _entered = self.runtime.enter();
        self.sessions = None;
        // The tasks end at their next step.
        std::thread::sleep(Duration::from_millis(50));
    }

    pub fn resize(&self, account: &Account, quota: Bytes) {
        self.sessions
            .as_ref()
            .unwrap()
            .resize(&self.served.allocation, account, quota)
            .unwrap();
    }

    /// What the driver has taken of the GPU.
    pub fn taken(&self) -> u64 {
        let sim = Sim::open(&self.folder.path().join("sim")).unwrap();
        sim.used(0)
    }

    /// What a context takes of the GPU: no account pays for it here.
    pub fn context(&self) -> u64 {
        let sim = Sim::open(&self.folder.path().join("sim")).unwrap();
        sim.config.context
    }

    /// The GPU's account.
    pub fn usage(&self) -> Usage {
        self.usage_of(0)
    }

    /// The account with a number: the GPUs', then managed memory's.
    pub fn usage_of(&self, account: usize) -> Usage {
        self.sessions.as_ref().unwrap().usage().remove(account)
    }

    /// What the agent has on its books.
    pub fn books(&self) -> Vec<Books> {
        self.sessions.as_ref().unwrap().books()
    }

    /// Waits until the GPU's account is as told.
    pub fn wait_for(&self, what: &str, is_so: impl Fn(&Usage) -> bool) {
        let begun = Instant::now();
        while !is_so(&self.usage()) {
            assert!(
                begun.elapsed() < Duration::from_secs(5),
                "{what}: {:?}",
                self.usage()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The socket as the agent made it.
    pub fn socket(&self) -> PathBuf {
        self.alloc_dir().join("agent.sock")
    }

    /// The simulated machine's folder.
    pub fn sim(&self) -> PathBuf {
        self.folder.path().join("sim")
    }

    /// What the container sees as its folder with the agent's socket.
    pub fn alloc_dir(&self) -> PathBuf {
        Sessions::alloc_dir(&self.folder.path().join("run"))
            .join(self.served.allocation.to_string())
    }

    /// Starts a program in the container.
    pub fn program(&self) -> Client {
        self.start("libbursar_shim.so", "/opt/bursar/drv/cuda.so.1", &[])
    }

    /// Starts a program as the container's main process: the first of its pid namespace, with the shim preloaded.
    pub fn main_program(&self) -> Client {
        let drv = "/opt/bursar/drv/cuda.so.1";
        let namespace = ["--pid", "--fork", "--kill-child", "--mount-proc"];
        self.start("libbursar_shim.so", drv, &namespace)
    }

    /// What is done about poisoned contexts.
    pub fn set_policy(&self, policy: Policy) {
        let sessions = self.sessions.as_ref().unwrap();
        sessions.set_context_policy(&self.served.allocation, policy);
    }

    /// The kernel's log has an XID of a program.
    pub fn xid(&self, program: &Client, code: u32) {
        let sessions = self.sessions.as_ref().unwrap();
        let on: Vec<_> = self
            .served
            .gpus
            .iter()
            .map(|(gpu, _)| gpu.clone())
            .collect();
        let suspect = sessions.suspect(program.pid(), &on, Moment(u64::MAX));
        sessions.xid(&suspect.unwrap(), code, clock::present());
    }

    /// While there is such a file programs say `busy`, and do not call CUDA yet.
    pub fn busy(&self) -> PathBuf {
        self.folder.path().join("busy")
    }

    /// Decides what is overdue when so much time has passed.
    pub fn overdue(&self, after: Duration) {
        let now = clock::present();
        let then = Present {
            moment: now.moment + after,
            ..now
        };
        self.sessions
            .as_ref()
            .unwrap()
            .new_faults(Duration::ZERO, then);
    }

    /// The faults that are open.
    pub fn faults(&self) -> Vec<Fault> {
        let faults = self.sessions.as_ref().unwrap().faults();
        faults.into_iter().map(|(_, fault)| fault).collect()
    }

    /// The processes that are to be killed.
    pub fn condemned(&self) -> Vec<Process> {
        let condemned = self.sessions.as_ref().unwrap().condemned();
        condemned.into_iter().map(|(_, process)| process).collect()
    }

    /// Starts a program beside it, on the bare driver: what the benchmark compares with.
    #[allow(dead_code)]
    pub fn bare_program(&self) -> Client {
        self.start("libbursar_sim_cuda.so", "/opt/bursar/drv/unused", &[])
    }

    fn start(&self, library: &str, driver: &str, namespace: &[&str]) -> Client {
        // Namespaces of its own, as any user may make them: mounts are private to the program.
        let script = "set -e; mount -t tmpfs none /opt; mkdir -p /opt/bursar/lib /opt/bursar/drv; \
            for f in lib/libcuda.so.1:$LIBRARY ${DRIVER#/opt/bursar/}:$REAL; do \
            touch /opt/bursar/${f%%:*}; mount --bind ${f#*:} /opt/bursar/${f%%:*}; done; \
            mount -t tmpfs none /run; mkdir /run/bursar; mount --bind -o ro $ALLOC /run/bursar; \
            cd ${CLIENT%/*}; exec ${PRELOAD:+env LD_PRELOAD=$PRELOAD} ./${CLIENT##*/} $BUSY";
        let mut command = Command::new("unshare");
        command.arg("--mount").args(namespace);
        // SAFETY: asks for a number.
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
            .env("LIBRARY", built().join(library))
            .env("DRIVER", driver)
            .env("REAL", built().join("libbursar_sim_cuda.so"))
            .env("PRELOAD", preload)
            .env("ALLOC", self.alloc_dir())
            .env("CLIENT", env!("CARGO_BIN_EXE_quota-client"))
            .env("BUSY", self.busy())
            .env("LD_LIBRARY_PATH", "/opt/bursar/lib")
            .env("SIMGPU_DEV", sim.join("dev"))
            .env("SIMGPU_DIR", sim);
        Client::spawn(&mut command)
    }
}
