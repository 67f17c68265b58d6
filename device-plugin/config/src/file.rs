//! Deserializes the configuration file and checks its fields.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bursar_crds::context_policy::ContextAction;
use bursar_crds::quantity;
use bursar_ledger::units::Bytes;
use jiff::SignedDuration;
use serde::Deserialize;

use super::{
    AuditConfig, AuditPolicy, Config, DriverConfig, HostMount, KubeletConfig, PathsConfig,
    ResourcesConfig, RetainedConfig,
};

/// The longest wait. The kubelet gives up on PreStartContainer after 30 s
/// (`KubeletPreStartContainerRPCTimeoutInSecs`) and would discard a later answer with its reason.
const MAX_BIND_WAIT: Duration = Duration::from_secs(27);

pub(super) struct InvalidField {
    pub(super) field: &'static str,
    pub(super) value: String,
    pub(super) problem: String,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct ConfigFile {
    resources: Resources,
    kubelet: Kubelet,
    driver: Driver,
    paths: Paths,
    binding: Binding,
    audit: Audit,
    context_policy: ContextPolicy,
    retained_memory: RetainedMemory,
    sharing: Sharing,
    http: Http,
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct Resources {
    quantum: String,
    managed_memory_capacity: String,
    reserved_memory: String,
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct Kubelet {
    device_plugin_dir: PathBuf,
    pod_resources_socket: PathBuf,
    relay_dir: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct Driver {
    root: PathBuf,
    host_root: PathBuf,
    dev_root: PathBuf,
    extra_mounts: Vec<Mount>,
    provisioner_user: Option<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Mount {
    host_path: PathBuf,
    /// The path on the host where the field is left out.
    container_path: Option<PathBuf>,
    #[serde(default = "yes")]
    read_only: bool,
}

fn yes() -> bool {
    true
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct Paths {
    state_dir: PathBuf,
    run_dir: PathBuf,
    cdi_dir: PathBuf,
    cgroup_root: PathBuf,
    shim_dir: PathBuf,
    proc: PathBuf,
    sys: PathBuf,
    kernel_log: PathBuf,
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct Binding {
    wait: String,
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct Audit {
    policy: String,
    tolerance: String,
    process_allowance: String,
    kill_after: u32,
    kill_outsiders: bool,
    exempt_namespaces: BTreeSet<String>,
    host_programs: Vec<String>,
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct ContextPolicy {
    default: String,
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct RetainedMemory {
    enabled: bool,
    per_gpu: Option<String>,
    fdstore_socket: PathBuf,
    /// The program beside the agent's own where the field is left out.
    provisioner: Option<PathBuf>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct Sharing {
    allow_unscrubbed: bool,
    refuse_beside_other_plugins: bool,
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct Http {
    listen: String,
    probes: String,
}

impl Default for Resources {
    fn default() -> Self {
        Self {
            quantum: "1Gi".into(),
            managed_memory_capacity: "0".into(),
            reserved_memory: "0".into(),
        }
    }
}

impl Default for Kubelet {
    fn default() -> Self {
        Self {
            device_plugin_dir: "/var/lib/kubelet/device-plugins".into(),
            pod_resources_socket: "/var/lib/kubelet/pod-resources/kubelet.sock".into(),
            relay_dir: None,
        }
    }
}

impl Default for Driver {
    fn default() -> Self {
        Self {
            root: "/driver-root".into(),
            host_root: "/".into(),
            dev_root: "/dev".into(),
            extra_mounts: Vec::new(),
            provisioner_user: None,
        }
    }
}

impl Default for Paths {
    fn default() -> Self {
        Self {
            state_dir: "/var/lib/bursar".into(),
            run_dir: "/run/bursar".into(),
            cdi_dir: "/var/run/cdi".into(),
            cgroup_root: "/sys/fs/cgroup".into(),
            shim_dir: "/opt/bursar/shim".into(),
            proc: "/proc".into(),
            sys: "/sys".into(),
            kernel_log: "/dev/kmsg".into(),
        }
    }
}

impl Default for RetainedMemory {
    fn default() -> Self {
        let folder = Path::new(bursar_protocol::fdstore::RUN_DIR);
        Self {
            enabled: true,
            per_gpu: None,
            fdstore_socket: folder.join(bursar_protocol::fdstore::SOCKET_NAME),
            provisioner: None,
        }
    }
}

impl Default for Binding {
    fn default() -> Self {
        Self { wait: "25s".into() }
    }
}

/// The agent charges contexts. Loaded kernels and the device heaps of printf and malloc are not
/// charged: PyTorch with all of its libraries loads some hundred MiB. The driver's rounding and its
/// small allocations stay below 64 MiB.
impl Default for Audit {
    fn default() -> Self {
        Self {
            policy: "report".into(),
            tolerance: "64Mi".into(),
            process_allowance: "512Mi".into(),
            kill_after: 3,
            kill_outsiders: true,
            exempt_namespaces: ["kube-system".to_owned()].into(),
            host_programs: Vec::new(),
        }
    }
}

impl Default for ContextPolicy {
    fn default() -> Self {
        Self {
            default: ContextAction::default().as_str().into(),
        }
    }
}

impl Default for Http {
    fn default() -> Self {
        Self {
            listen: "[::]:9445".into(),
            probes: "[::]:9402".into(),
        }
    }
}

impl ConfigFile {
    /// Checks every field. The destructuring has no `..`, so that a new field cannot be forgotten.
    pub(super) fn resolve(self) -> Result<Config, InvalidField> {
        let Self {
            resources,
            kubelet,
            driver,
            paths,
            binding,
            audit,
            context_policy: ContextPolicy { default },
            retained_memory,
            sharing:
                Sharing {
                    allow_unscrubbed,
                    refuse_beside_other_plugins,
                },
            http,
        } = self;
        Ok(Config {
            resources: resources.resolve()?,
            kubelet: kubelet.resolve()?,
            driver: driver.resolve()?,
            paths: paths.resolve()?,
            bind_wait: parse_bind_wait(binding.wait)?,
            host_programs: parse_programs(&audit.host_programs)?,
            exempt_namespaces: audit.exempt_namespaces.clone(),
            audit: audit.resolve()?,
            default_context_action: parse_context_action(default)?,
            retained: retained_memory.resolve()?,
            allow_unscrubbed,
            refuse_beside_other_plugins,
            http_listen: parse_address("http.listen", http.listen, "[::]:9445")?,
            http_probes: parse_address("http.probes", http.probes, "[::]:9402")?,
        })
    }
}

impl Resources {
    fn resolve(self) -> Result<ResourcesConfig, InvalidField> {
        let Self {
            quantum,
            managed_memory_capacity,
            reserved_memory,
        } = self;
        Ok(ResourcesConfig {
            quantum: quantum.parse().map_err(|_| InvalidField {
                field: "resources.quantum",
                value: quantum,
                problem: "is not one of 256Mi, 512Mi, 1Gi".into(),
            })?,
            managed_capacity: parse_bytes(
                "resources.managed-memory-capacity",
                managed_memory_capacity,
            )?,
            reserved: parse_bytes("resources.reserved-memory", reserved_memory)?,
        })
    }
}

impl Kubelet {
    fn resolve(self) -> Result<KubeletConfig, InvalidField> {
        let Self {
            device_plugin_dir,
            pod_resources_socket,
            relay_dir,
        } = self;
        let relay_dir = relay_dir.map(|path| require_absolute("kubelet.relay-dir", path));
        Ok(KubeletConfig {
            relay_dir: relay_dir.transpose()?,
            device_plugin_dir: require_absolute("kubelet.device-plugin-dir", device_plugin_dir)?,
            pod_resources_socket: require_absolute(
                "kubelet.pod-resources-socket",
                pod_resources_socket,
            )?,
        })
    }
}

impl Driver {
    fn resolve(self) -> Result<DriverConfig, InvalidField> {
        let Self {
            root,
            host_root,
            dev_root,
            extra_mounts,
            provisioner_user,
        } = self;
        Ok(DriverConfig {
            root: require_absolute("driver.root", root)?,
            host_root: require_absolute("driver.host-root", host_root)?,
            dev_root: require_absolute("driver.dev-root", dev_root)?,
            extra_mounts: extra_mounts
                .into_iter()
                .map(Mount::resolve)
                .collect::<Result<_, _>>()?,
            provisioner_user,
        })
    }
}

impl Mount {
    fn resolve(self) -> Result<HostMount, InvalidField> {
        let Self {
            host_path,
            container_path,
            read_only,
        } = self;
        let container_path = container_path.unwrap_or_else(|| host_path.clone());
        Ok(HostMount {
            host_path: require_absolute("driver.extra-mounts", host_path)?,
            container_path: require_absolute("driver.extra-mounts", container_path)?,
            read_only,
        })
    }
}

impl Paths {
    fn resolve(self) -> Result<PathsConfig, InvalidField> {
        let Self {
            state_dir,
            run_dir,
            cdi_dir,
            cgroup_root,
            shim_dir,
            proc,
            sys,
            kernel_log,
        } = self;
        Ok(PathsConfig {
            state_dir: require_absolute("paths.state-dir", state_dir)?,
            run_dir: require_absolute("paths.run-dir", run_dir)?,
            cdi_dir: require_absolute("paths.cdi-dir", cdi_dir)?,
            cgroup_root: require_absolute("paths.cgroup-root", cgroup_root)?,
            shim_dir: require_absolute("paths.shim-dir", shim_dir)?,
            proc: require_absolute("paths.proc", proc)?,
            sys: require_absolute("paths.sys", sys)?,
            kernel_log: require_absolute("paths.kernel-log", kernel_log)?,
        })
    }
}

impl RetainedMemory {
    fn resolve(self) -> Result<RetainedConfig, InvalidField> {
        let Self {
            enabled,
            per_gpu,
            fdstore_socket,
            provisioner,
        } = self;
        let per_gpu = per_gpu.map(|most| parse_bytes("retained-memory.per-gpu", most));
        let provisioner =
            provisioner.map(|path| require_absolute("retained-memory.provisioner", path));
        Ok(RetainedConfig {
            enabled,
            per_gpu: per_gpu.transpose()?,
            fdstore_socket: require_absolute("retained-memory.fdstore-socket", fdstore_socket)?,
            provisioner: provisioner.transpose()?,
        })
    }
}

impl Audit {
    fn resolve(self) -> Result<AuditConfig, InvalidField> {
        let Self {
            policy,
            tolerance,
            process_allowance,
            kill_after,
            kill_outsiders,
            exempt_namespaces: _,
            host_programs: _,
        } = self;
        let wrong = |field, value: String, problem: &str| InvalidField {
            field,
            value,
            problem: problem.to_owned(),
        };
        Ok(AuditConfig {
            policy: match policy.as_str() {
                "report" => AuditPolicy::Report,
                "kill" => AuditPolicy::Kill,
                _ => return Err(wrong("audit.policy", policy, "is not one of report, kill")),
            },
            tolerance: parse_bytes("audit.tolerance", tolerance)?,
            process_allowance: parse_bytes("audit.process-allowance", process_allowance)?,
            kill_after: match kill_after {
                0 => {
                    let value = kill_after.to_string();
                    return Err(wrong("audit.kill-after", value, "must be 1 or more"));
                }
                kill_after => kill_after,
            },
            kill_outsiders,
        })
    }
}

/// The names of programs, none of which is empty or a path.
fn parse_programs(names: &[String]) -> Result<BTreeSet<String>, InvalidField> {
    let is_wrong = |name: &&String| name.is_empty() || name.len() > 255 || name.contains('/');
    match names.iter().find(is_wrong) {
        Some(name) => Err(InvalidField {
            field: "audit.host-programs",
            value: name.clone(),
            problem: "is no name of a program; write Xorg, not /usr/bin/Xorg".to_owned(),
        }),
        None => Ok(names.iter().cloned().collect()),
    }
}

fn parse_context_action(value: String) -> Result<ContextAction, InvalidField> {
    value.parse().map_err(|problem| InvalidField {
        field: "context-policy.default",
        value,
        problem,
    })
}

fn parse_bytes(field: &'static str, value: String) -> Result<Bytes, InvalidField> {
    match quantity::parse_bytes(&value) {
        Ok(bytes) => Ok(Bytes(bytes)),
        Err(problem) => Err(InvalidField {
            field,
            value,
            problem: problem.to_string(),
        }),
    }
}

fn parse_address(
    field: &'static str,
    value: String,
    example: &str,
) -> Result<SocketAddr, InvalidField> {
    value.parse().map_err(|_| InvalidField {
        field,
        value,
        problem: format!("is not an address and a port: write for example {example}"),
    })
}

fn require_absolute(field: &'static str, path: PathBuf) -> Result<PathBuf, InvalidField> {
    if path.is_absolute() {
        return Ok(path);
    }
    Err(InvalidField {
        field,
        value: path.display().to_string(),
        problem: "is not an absolute path: start it with a slash".into(),
    })
}

fn parse_bind_wait(value: String) -> Result<Duration, InvalidField> {
    let wait = value
        .parse::<SignedDuration>()
        .ok()
        .and_then(|wait| Duration::try_from(wait).ok());
    match wait {
        Some(wait) if wait <= MAX_BIND_WAIT => Ok(wait),
        Some(_) => Err(InvalidField {
            field: "binding.wait",
            value,
            problem: "must be at most 27s: the kubelet itself waits for 30s".into(),
        }),
        None => Err(InvalidField {
            field: "binding.wait",
            value,
            problem: "is not a time of zero or more: write for example 25s".into(),
        }),
    }
}
