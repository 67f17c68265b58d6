//! Fixture of a machine with an fd store.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::common::kubelet::Pod;
use crate::container;
use crate::machine::{GPU, Machine, TWO_GPUS};
use crate::tenant_process::{Opened, Tenant};

pub(crate) const GIB: u64 = 1 << 30;

/// The longest time that a test waits for anything.
const WAIT_LIMIT: Duration = Duration::from_secs(120);

/// The longest time until a scrub check has a verdict. The agent kills a starved check after a
/// minute and starts the next a minute later.
const SCRUB_CHECK_LIMIT: Duration = Duration::from_secs(480);

/// The memory that a scrub check reads in a round.
const SCRUB_CHECK_BYTES: u64 = 4 << 20;

/// The longest time until discarded memory that no process maps is free again. A busy machine's
/// kernel releases the memory of a killed process late.
const RECLAIM_LIMIT: Duration = Duration::from_secs(20);

pub(crate) struct Fixture {
    pub(crate) machine: Machine,
    fdstore: Option<Child>,
}

/// The folder of other packages' programs, which cargo builds once.
pub(crate) fn program_folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let packages = [
        "bursar-fdstore",
        "bursar-gpu-programs",
        "bursar-provisioner",
    ];
    FOLDER.get_or_init(|| bursar_sim_lab::build(&packages, &["--bins"]).unwrap())
}

/// Compiles one of the C files beside this one. The folder is removed when the value is dropped.
pub(crate) fn compile_c(source: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("program");
    let compile = Command::new("cc")
        .args(["-Wall", "-Werror", "-o"])
        .arg(&program)
        .arg(format!(
            "{}/tests/leases/{source}",
            env!("CARGO_MANIFEST_DIR")
        ))
        .status();
    assert!(compile.unwrap().success());
    (folder, program)
}

/// Writes a script that starts the provisioner, with a scrub check of little memory. Six agents
/// that read 6 GiB each at their start leave two cores no time for anything else.
fn write_provisioner_script(machine: &Machine) -> PathBuf {
    let (script, program) = (
        machine.path("provisioner"),
        program_folder().join("bursar-provisioner"),
    );
    let text = format!(
        "#!/bin/sh\n[ \"$1\" = scrub-check ] && set -- \"$@\" --bytes {SCRUB_CHECK_BYTES}\nexec {} \"$@\"\n",
        program.display()
    );
    fs::write(&script, text).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    script
}

impl Fixture {
    /// A fixture with two GPUs of 16 GiB, a registered agent and a connected fd store.
    pub(crate) async fn new() -> Fixture {
        let mut fixture = Self::with_driver(TWO_GPUS).await;
        fixture.start_fdstore();
        fixture
    }

    /// A fixture with this configuration of the simulated driver and no fd store.
    pub(crate) async fn with_driver(config: &str) -> Fixture {
        let mut machine = Self::machine(config).await;
        machine.start_agent();
        machine.kubelet.until_allocatable(GPU, 32).await;
        Self::of(machine)
    }

    /// A fixture of this machine, without an fd store.
    pub(crate) fn of(machine: Machine) -> Fixture {
        Fixture {
            machine,
            fdstore: None,
        }
    }

    /// A machine whose agent has provisioners and is not started.
    pub(crate) async fn machine(config: &str) -> Machine {
        let machine = Machine::with_driver(config).await;
        container::configure(&machine, "");
        let config = fs::read_to_string(machine.path("agent.toml")).unwrap();
        let provisioner = write_provisioner_script(&machine);
        let config = config.replace(
            machine.path("no-provisioner").to_str().unwrap(),
            provisioner.to_str().unwrap(),
        );
        fs::write(machine.path("agent.toml"), config).unwrap();
        machine
    }

    pub(crate) fn start_fdstore(&mut self) {
        self.start_fdstore_with(self.fdstore_command());
    }

    pub(crate) fn fdstore_command(&self) -> Command {
        let program = program_folder().join("bursar-fdstore");
        let mut command = self.machine.lab.command(program);
        command.arg(self.machine.path("fdstore"));
        command.stderr(Stdio::null());
        command
    }

    /// Starts an fd store by a command made from [`Fixture::fdstore_command`].
    pub(crate) fn start_fdstore_with(&mut self, mut command: Command) {
        self.fdstore = Some(command.spawn().unwrap());
    }

    pub(crate) fn fdstore_pid(&self) -> Pid {
        Pid::from_child(self.fdstore.as_ref().unwrap())
    }

    pub(crate) fn kill_fdstore(&mut self) {
        let mut fdstore = self.fdstore.take().unwrap();
        fdstore.kill().unwrap();
        fdstore.wait().unwrap();
    }

    /// The pids of this agent's provisioners.
    pub(crate) fn provisioners(&self) -> Vec<Pid> {
        let agent = self.machine.agent_pid();
        let children = fs::read_to_string(format!("/proc/{agent}/task/{agent}/children"));
        let threads = fs::read_dir(format!("/proc/{agent}/task"))
            .unwrap()
            .flatten();
        let children_of_threads =
            threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
        let pids: BTreeSet<String> = children_of_threads
            .chain(children)
            .flat_map(|pids| {
                pids.split_whitespace()
                    .map(str::to_owned)
                    .collect::<Vec<_>>()
            })
            .collect();
        let is_provisioner = |pid: &String| {
            let program = fs::read_link(format!("/proc/{pid}/exe"));
            program.is_ok_and(|program| program.ends_with("bursar-provisioner"))
        };
        let provisioners = pids.into_iter().filter(is_provisioner);
        provisioners
            .map(|pid| Pid::from_raw(pid.parse().unwrap()).unwrap())
            .collect()
    }

    /// Sends SIGKILL to every provisioner of this agent. Returns their number.
    pub(crate) fn kill_provisioners(&self) -> usize {
        let is_killed = |pid: &Pid| kill_process(*pid, Signal::KILL).is_ok();
        self.provisioners()
            .iter()
            .filter(|pid| is_killed(pid))
            .count()
    }

    /// Starts a process in a pod's container and passes it the agent's socket.
    pub(crate) fn tenant(&self, pod: &Pod) -> Tenant {
        let mut tenant = Tenant::spawn();
        self.machine.adopt(pod, tenant.pid());
        self.connect_tenant(pod, &mut tenant);
        tenant
    }

    /// Passes the agent's socket to a process of a pod.
    pub(crate) fn connect_tenant(&self, pod: &Pod, tenant: &mut Tenant) {
        let (allocation, gpu) = self.allocation_and_gpu(pod);
        let socket = self
            .machine
            .path(&format!("run/alloc/{allocation}/agent.sock"));
        let at = format!("at {} {gpu}", socket.display());
        assert_eq!(tenant.ask(&at).as_deref(), Some("ok"));
    }

    pub(crate) fn allocation_and_gpu(&self, pod: &Pod) -> (String, String) {
        let devices = self.machine.devices();
        let found = devices.iter().find_map(|(file, binding)| {
            let binding: serde_json::Value = serde_json::from_str(binding).unwrap();
            let allocation = file
                .strip_prefix("bursar.dev-gpu-")?
                .strip_suffix(".json")?;
            let gpu = binding["gpus"][0]["uuid"].as_str()?.to_owned();
            (binding["pod"] == pod.uid.as_str()).then(|| (allocation.to_owned(), gpu))
        });
        found.unwrap()
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        if let Some(mut fdstore) = self.fdstore.take() {
            let _ = fdstore.kill();
            let _ = fdstore.wait();
        }
    }
}

/// Waits for the result of a scrub check. Over the simulated driver, the check reads some GiB by
/// processor on a busy machine.
pub(crate) async fn wait_for_scrub_check(description: &str, is_finished: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_finished() {
        assert!(
            start.elapsed() < SCRUB_CHECK_LIMIT,
            "no result: {description}"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Opens a lease, and retries while the agent refuses for a transient reason or has no verdict of a
/// scrub check.
pub(crate) fn open_retrying(tenant: &mut Tenant, name: &str, bytes: u64) -> Result<Opened, String> {
    open_while(tenant, name, bytes, |why| {
        is_transient(why) || is_unscrubbed(why)
    })
}

/// Asserts that the agent refuses a lease on a GPU whose driver does not clear memory.
pub(crate) fn assert_unscrubbed(tenant: &mut Tenant) {
    let refused = open_while(tenant, "weights", GIB, is_transient).unwrap_err();
    assert!(is_unscrubbed(&refused), "{refused}");
}

fn open_while(
    tenant: &mut Tenant,
    name: &str,
    bytes: u64,
    is_expected: impl Fn(&str) -> bool,
) -> Result<Opened, String> {
    let start = Instant::now();
    loop {
        match tenant.open(name, bytes) {
            Err(why) if is_expected(&why) && start.elapsed() < retry_limit(&why) => {
                std::thread::sleep(Duration::from_millis(20));
            }
            opened => return opened,
        }
    }
}

fn retry_limit(why: &str) -> Duration {
    if why.starts_with("refused Quota") {
        RECLAIM_LIMIT
    } else if is_unscrubbed(why) {
        SCRUB_CHECK_LIMIT
    } else {
        WAIT_LIMIT
    }
}

fn is_unscrubbed(why: &str) -> bool {
    why.starts_with("refused NotScrubbed")
}

/// Whether the reason for a refusal is transient.
pub(crate) fn is_transient(why: &str) -> bool {
    why.starts_with("refused Unavailable")
        || why.starts_with("refused Quota")
        || why.starts_with("away")
}

/// Opens an existing lease. Returns its id and its mark.
pub(crate) fn read_lease(tenant: &mut Tenant, name: &str) -> (u64, u64) {
    match open_retrying(tenant, name, 0) {
        Ok(Opened::Ready { lease, mark }) => (lease, mark),
        other => panic!("{name}: {other:?}"),
    }
}
