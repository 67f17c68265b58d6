//! A machine with a vault.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::common::kubelet::Pod;
use crate::machine::{GPU, Machine, TWO_GPUS};
use crate::tenant::{Opened, Tenant};

pub(crate) const GIB: u64 = 1 << 30;

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// How soon what was discarded, and nobody holds, is free again.
const FREE_AGAIN: Duration = Duration::from_secs(3);

pub(crate) struct Bed {
    pub(crate) machine: Machine,
    vault: Option<Child>,
}

/// Where cargo puts programs of other packages, built once.
fn programs() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let build = Command::new(env!("CARGO"))
            .args(["build", "--quiet"])
            .args(["--package", "bursar-vault", "--package", "bursar-worker"])
            .status();
        assert!(build.unwrap().success());
        // target/<profile>/deps/<this test>
        let test = std::env::current_exe().unwrap();
        test.ancestors().nth(2).unwrap().to_owned()
    })
}

impl Bed {
    /// Two GPUs of 16 GiB, the agent registered, the vault heard.
    pub(crate) async fn new() -> Bed {
        let mut bed = Self::with_driver(TWO_GPUS).await;
        bed.start_vault();
        bed
    }

    /// The same with this configuration of the simulated driver, and no vault.
    pub(crate) async fn with_driver(config: &str) -> Bed {
        let mut machine = Machine::with_driver(config).await;
        fs::create_dir_all(machine.path("proc")).unwrap();
        symlink("/proc/self", machine.path("proc/self")).unwrap();
        let config = fs::read_to_string(machine.path("agent.toml")).unwrap();
        let proc = machine.path("proc");
        let paths = format!("[paths]\nproc = \"{}\"", proc.display());
        let worker = programs().join("bursar-worker");
        let kept = format!("[kept]\nworker = \"{}\"", worker.display());
        let config = config.replace("[paths]", &paths).replace("[kept]", &kept);
        fs::write(machine.path("agent.toml"), config).unwrap();
        machine.start_agent();
        machine.kubelet.until_allocatable(GPU, 32).await;
        Bed {
            machine,
            vault: None,
        }
    }

    pub(crate) fn start_vault(&mut self) {
        let mut command = self.machine.lab.command(programs().join("bursar-vault"));
        command
            .arg(self.machine.path("vault"))
            .stderr(Stdio::null());
        self.vault = Some(command.spawn().unwrap());
    }

    pub(crate) fn kill_vault(&mut self) {
        let mut vault = self.vault.take().unwrap();
        vault.kill().unwrap();
        vault.wait().unwrap();
    }

    /// SIGKILL to every worker of this machine's agent.
    pub(crate) fn kill_workers(&self) -> usize {
        let agent = self.machine.agent_pid();
        let children = fs::read_to_string(format!("/proc/{agent}/task/{agent}/children"));
        let threads = fs::read_dir(format!("/proc/{agent}/task"))
            .unwrap()
            .flatten();
        let of_threads =
            threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
        let mut killed = 0;
        for pids in of_threads.chain(children) {
            for pid in pids.split_whitespace() {
                let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                let pid = rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap();
                if name.starts_with("bursar-worker") {
                    let gone = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                    killed += usize::from(gone.is_ok());
                }
            }
        }
        killed
    }

    /// A process in a pod's container that knows where the agent is.
    pub(crate) fn tenant(&self, pod: &Pod) -> Tenant {
        let mut tenant = Tenant::spawn();
        self.machine.adopt(pod, tenant.pid());
        self.tell(pod, &mut tenant);
        tenant
    }

    /// Tells a process of a pod where the agent is.
    pub(crate) fn tell(&self, pod: &Pod, tenant: &mut Tenant) {
        let (allocation, gpu) = self.device(pod);
        let socket = self
            .machine
            .path(&format!("run/alloc/{allocation}/agent.sock"));
        let at = format!("at {} {gpu}", socket.display());
        assert_eq!(tenant.ask(&at).as_deref(), Some("ok"));
    }

    /// The allocation and the GPU that a pod was given.
    fn device(&self, pod: &Pod) -> (String, String) {
        let devices = self.machine.devices();
        let of_pod = devices.iter().find_map(|(file, binding)| {
            let binding: serde_json::Value = serde_json::from_str(binding).unwrap();
            let allocation = file
                .strip_prefix("bursar.dev-gpu-")?
                .strip_suffix(".json")?;
            let gpu = binding["gpus"][0]["uuid"].as_str()?.to_owned();
            (binding["pod"] == pod.uid.as_str()).then(|| (allocation.to_owned(), gpu))
        });
        of_pod.unwrap()
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        if let Some(mut vault) = self.vault.take() {
            let _ = vault.kill();
            let _ = vault.wait();
        }
    }
}

/// Opens until that is no longer refused for what passes by itself.
pub(crate) fn open(tenant: &mut Tenant, name: &str, bytes: u64) -> Result<Opened, String> {
    let begun = Instant::now();
    loop {
        match tenant.open(name, bytes) {
            Err(why) if passes(&why) && begun.elapsed() < patience(&why) => {
                std::thread::sleep(Duration::from_millis(20));
            }
            opened => return opened,
        }
    }
}

fn patience(why: &str) -> Duration {
    match why.starts_with("refused Quota") {
        true => FREE_AGAIN,
        false => PATIENCE,
    }
}

/// Whether to ask again.
pub(crate) fn passes(why: &str) -> bool {
    why.starts_with("refused Unavailable")
        || why.starts_with("refused Quota")
        || why.starts_with("away")
}

/// Opens a lease that is there; what it is marked with.
pub(crate) fn read(tenant: &mut Tenant, name: &str) -> (u64, u64) {
    match open(tenant, name, 0) {
        Ok(Opened::Ready { lease, mark }) => (lease, mark),
        other => panic!("{name}: {other:?}"),
    }
}
