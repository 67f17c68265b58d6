//! Runs a node with one GPU and one container's quota: a host's driver folder, and the agent's
//! files, sessions and CDI device.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use bursar_config::{AuditConfig, AuditPolicy, HostMount};
use bursar_enforcement::attestation;
use bursar_enforcement::audit::compare::{
    AttestedState, Finding, GpuSample, ListedProcess, LiveProcess, compare_accounts,
};
use bursar_host::driver_files::LIBCUDA;
use bursar_host::procfs::{ProcessOwner, Stat};
use bursar_ledger::units::{AllocationId, Bytes};
use bursar_node::cdi::{self, BoundGpu, CdiBinding, ContainerEdits};
use bursar_sim_state::Sim;

use crate::container::{Container, Running};
use crate::images::{self, Base, Compat, DRIVER};
use crate::support::{self, GPU};

/// The container's quota: most of the GPU, so that memory of programs that have just ended is not
/// missed.
pub const QUOTA: u64 = 12 << 10 << 20;

/// The allocation that the test's agent serves.
const ALLOCATION: AllocationId = AllocationId::from_bits(7);
const POD: &str = "8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11";

/// The limits of the chart's values.
const LIMITS: AuditConfig = AuditConfig {
    policy: AuditPolicy::Report,
    tolerance: Bytes::mib(64),
    process_allowance: Bytes::mib(512),
    kill_after: 3,
    kill_outsiders: true,
    exempt_namespaces: BTreeSet::new(),
    host_programs: BTreeSet::new(),
};

/// The node.
pub struct Machine {
    agent: support::Container,
    folder: tempfile::TempDir,
    edits: ContainerEdits,
    laid_out: std::cell::RefCell<BTreeSet<PathBuf>>,
}

impl Machine {
    /// Starts the node with a running agent.
    pub fn new() -> Machine {
        let agent = support::Container::with_quota(QUOTA);
        let folder = tempfile::tempdir().unwrap();
        let edits = edits(folder.path(), &agent);
        write(
            folder.path(),
            "kernel/nvidia/version",
            &format!(
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER}  Release Build\n"
            ),
        );
        write(
            folder.path(),
            "kernel/nvidia/gpus/0000:01:00.0/information",
            "Model: \t\t NVIDIA H200\nIRQ:   \t\t 16\n",
        );
        Machine {
            agent,
            folder,
            edits,
            laid_out: Default::default(),
        }
    }

    /// Returns the folder of an image, laid out at its first use.
    pub fn image(&self, base: Base, compat: Compat) -> PathBuf {
        let root = self.folder.path().join(format!("{base:?}-{compat:?}"));
        if self.laid_out.borrow_mut().insert(root.clone()) {
            images::lay_out(&root, base, compat);
        }
        root
    }

    /// Starts a container of an image.
    pub fn container(&self, base: Base, compat: Compat) -> Container {
        let kernel = self.folder.path().join("kernel");
        Container::new(&self.image(base, compat), &self.edits, &kernel)
    }

    /// Returns the outcome of a program that allocated 1 MiB and then as much as the whole quota.
    pub fn outcome(&self, program: &Running) -> Result<Outcome, String> {
        let entry = program.has_mapped("/opt/bursar/lib/libcuda.so.1")
            || cdi::CONTAINER_DEFAULT_DIRS.iter().any(|dir| {
                let dir = dir.to_string();
                program.has_mapped(&format!("{dir}/{LIBCUDA}"))
            });
        match (program.line_after("none"), program.line_after("alloc")) {
            (Some(_), None) => Ok(Outcome::NoDriver),
            (None, None) if !program.whole => Ok(Outcome::NoDriver),
            (None, Some("0 2")) if program.has_mapped("/opt/bursar/lib/cuda-shim.so") => {
                Ok(match program.has_mapped("/usr/local/cuda/compat") {
                    true => Outcome::HeldOverImages,
                    false => Outcome::Held,
                })
            }
            (None, Some("0 0")) => match self.finding(program.pid(), entry) {
                Some(finding) => Ok(Outcome::Detected(finding)),
                None => Err(format!("silent: {:?}", program.lines)),
            },
            _ => Err(format!("unexpected: {:?}", program.lines)),
        }
    }

    /// Returns the audit's finding about a process of the container, from what the driver charges
    /// to it.
    fn finding(&self, pid: u32, shim: bool) -> Option<&'static str> {
        let sim = Sim::open(&self.agent.sim()).unwrap();
        let unit = sim.gpu_unit(sim.find_gpu(GPU).unwrap());
        let bytes = sim.usage(unit).processes.into_iter();
        let bytes = bytes
            .filter(|process| process.pid == pid)
            .map(|process| process.bytes)
            .sum();
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let (pod, cgroup) = (POD.parse().unwrap(), "main".to_owned());
        let owner = ProcessOwner::Container { pod, cgroup };
        let sample = GpuSample {
            gpu: GPU.parse().unwrap(),
            unattributed_signed: 0,
            unattributed: None,
            unreclaimed_or_retained: Bytes::ZERO,
            processes: vec![ListedProcess {
                pid,
                bytes: Some(Bytes(bytes)),
                sm_percent: None,
                live: Some(LiveProcess {
                    start: Stat::parse(&stat).unwrap().start_ticks,
                    owner,
                }),
                is_gone: false,
            }],
            importers: Vec::new(),
            has_all_holders: true,
        };
        let home = (POD.parse().unwrap(), "main".to_owned());
        let running = attestation::AttestedProcess {
            start: Stat::parse(&stat).unwrap().start_ticks,
            forked: false,
            has_shim: shim,
            device_mappings: Default::default(),
            managed_mapped: 0,
        };
        let containers = AttestedState {
            allocations: [(home, ALLOCATION)].into(),
            processes: [(pid, (ALLOCATION, running))].into(),
            ..AttestedState::default()
        };
        let verdict = compare_accounts(
            &[sample],
            &self.agent.container_usage(),
            &containers,
            &LIMITS,
        );
        let concerns = |finding: &&Finding| match finding {
            Finding::OverQuota { processes, .. } => {
                processes.iter().any(|process| process.pid == pid)
            }
            Finding::UntrackedProcess { process, .. } => process.pid == pid,
            _ => false,
        };
        verdict.findings.iter().find(concerns).map(Finding::kind)
    }
}

/// The outcome of a program that tries to take more than its quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The shim denied it, over the host's driver.
    Held,
    /// The shim denied it, over the image's own driver library.
    HeldOverImages,
    /// The program found no usable driver.
    NoDriver,
    /// The program took it, and the audit has this finding.
    Detected(&'static str),
}

impl Outcome {
    /// Returns the text in the table.
    pub fn word(self) -> String {
        match self {
            Outcome::Held => "held".to_owned(),
            Outcome::HeldOverImages => "held (image's)".to_owned(),
            Outcome::NoDriver => "no driver".to_owned(),
            Outcome::Detected(finding) => format!("detected ({finding})"),
        }
    }
}

fn edits(folder: &Path, agent: &support::Container) -> ContainerEdits {
    let (driver, shim_dir) = support::installed::install_shims(folder, &agent.sim(), DRIVER);
    let node = cdi::CdiNode {
        shim_dir,
        driver,
        alloc_dir: agent.alloc_dir().parent().unwrap().to_owned(),
        extra_mounts: vec![HostMount {
            host_path: agent.sim(),
            container_path: "/run/simgpu".into(),
            read_only: false,
        }],
    };
    let binding = CdiBinding {
        allocation: ALLOCATION,
        pod: POD.parse().unwrap(),
        container: "main".to_owned(),
        device_ids: "0-11".parse().unwrap(),
        gpus: vec![BoundGpu {
            uuid: GPU.parse().unwrap(),
            quota: Bytes(QUOTA),
            nodes: vec!["nvidia0".to_owned()],
        }],
    };
    let mut spec = cdi::build_spec(&node, &binding);
    spec.devices.remove(0).container_edits
}

fn write(folder: &Path, path: &str, text: &str) {
    let path = folder.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}
