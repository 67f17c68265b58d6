//! Parses the agent's arguments and its TOML file into a checked [`Config`].
//!
//! The chart's `values.yaml` documents each field with its default. An error names the field, its
//! value and the remedy.

mod fields;

use std::collections::BTreeSet;
use std::net::{Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bursar_crds::context_policy::ContextAction;
use bursar_ledger::units::{Bytes, Quantum};
use clap::Parser;
use serde::Deserialize;

/// The most unknown keys that the agent reports.
const MAX_UNKNOWN_KEYS: usize = 16;

/// The agent's arguments. No other code of the agent reads the environment.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "bursar-agent",
    version,
    about = "Shares this node's GPU memory between its pods"
)]
pub struct Args {
    /// The configuration file; without one every field has its default
    #[arg(long, value_name = "FILE", default_value = "/etc/bursar/agent.toml")]
    pub config: PathBuf,
    /// The configuration itself, in place of the file
    #[arg(
        long,
        value_name = "TOML",
        env = "BURSAR_CONFIG",
        hide_env_values = true
    )]
    pub config_text: Option<String>,
    /// This node's name in Kubernetes
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    pub node_name: String,
    /// How log lines are written
    #[arg(long, value_enum, default_value_t = LogFormat::Json)]
    pub log_format: LogFormat,
    /// Which log lines are written, as tracing filter directives
    #[arg(
        long,
        value_name = "FILTER",
        env = "BURSAR_LOG",
        default_value = "info"
    )]
    pub log: String,
}

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// One JSON object per line.
    Json,
    /// Human-readable lines.
    Text,
}

/// The checked configuration. Each table of the file is a struct, and each field one of its fields.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct Config {
    /// The resources that the node offers.
    pub resources: ResourcesConfig,
    /// The paths of the kubelet.
    pub kubelet: KubeletConfig,
    /// The paths of the NVIDIA driver.
    pub driver: DriverConfig,
    /// The paths of the agent's own files.
    pub paths: PathsConfig,
    /// The binding of GPUs.
    pub binding: BindingConfig,
    /// The audit.
    pub audit: AuditConfig,
    /// The reaction to poisoned contexts.
    pub context_policy: ContextPolicyConfig,
    /// Retained memory.
    pub retained_memory: RetainedConfig,
    /// With whom the node shares its GPUs.
    pub sharing: SharingConfig,
    /// The agent's HTTP endpoints.
    pub http: HttpConfig,
    /// The first keys of the file that this version does not know.
    #[serde(skip)]
    pub unknown_keys: Vec<String>,
}

/// The resources that the node offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct ResourcesConfig {
    /// The memory behind one device id.
    #[serde(deserialize_with = "fields::quantum")]
    pub quantum: Quantum,
    /// The managed memory of the whole node; zero switches managed memory off.
    #[serde(rename = "managed-memory-capacity", deserialize_with = "fields::bytes")]
    pub managed_capacity: Bytes,
    /// The memory of each GPU that the agent does not offer.
    #[serde(rename = "reserved-memory", deserialize_with = "fields::bytes")]
    pub reserved: Bytes,
    /// The time in which each pod with work has its part of a GPU's compute time once; without one
    /// the agent offers none.
    #[serde(deserialize_with = "fields::optional_round")]
    pub compute_round: Option<Duration>,
}

impl Default for ResourcesConfig {
    fn default() -> Self {
        Self {
            quantum: Quantum::Gib1,
            managed_capacity: Bytes::ZERO,
            reserved: Bytes::ZERO,
            compute_round: None,
        }
    }
}

/// The paths of the kubelet.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct KubeletConfig {
    /// The directory of `kubelet.sock`, of the plugins' sockets and of the kubelet's device
    /// checkpoint.
    #[serde(deserialize_with = "fields::absolute_path")]
    pub device_plugin_dir: PathBuf,
    /// The socket of the kubelet's PodResources service.
    #[serde(deserialize_with = "fields::absolute_path")]
    pub pod_resources_socket: PathBuf,
    /// The directory of the plugin relay, with which the agent registers; `None` if it registers
    /// with the kubelet itself.
    #[serde(deserialize_with = "fields::optional_absolute_path")]
    pub relay_dir: Option<PathBuf>,
}

impl Default for KubeletConfig {
    fn default() -> Self {
        Self {
            device_plugin_dir: "/var/lib/kubelet/device-plugins".into(),
            pod_resources_socket: "/var/lib/kubelet/pod-resources/kubelet.sock".into(),
            relay_dir: None,
        }
    }
}

/// The paths of the NVIDIA driver.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct DriverConfig {
    /// The driver's root directory as the agent sees it.
    #[serde(deserialize_with = "fields::absolute_path")]
    pub root: PathBuf,
    /// The driver's root directory as the container runtime sees it.
    #[serde(deserialize_with = "fields::absolute_path")]
    pub host_root: PathBuf,
    /// The host's directory of device nodes.
    #[serde(deserialize_with = "fields::absolute_path")]
    pub dev_root: PathBuf,
    /// Further directories to mount into every container with GPU memory.
    pub extra_mounts: Vec<HostMount>,
    /// The user and group that provisioners and scrub checks run as; `None` is the agent's own.
    pub provisioner_user: Option<u32>,
}

impl Default for DriverConfig {
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

/// A directory or file of the host that is mounted into containers.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(from = "fields::Mount")]
pub struct HostMount {
    /// The path on the host.
    pub host_path: PathBuf,
    /// The path in the container.
    pub container_path: PathBuf,
    /// Whether the mount is read-only.
    pub read_only: bool,
}

/// The paths of the agent's own files.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct PathsConfig {
    /// The directory for files that outlive boots: the shim builds.
    #[serde(deserialize_with = "fields::absolute_path")]
    pub state_dir: PathBuf,
    /// The directory for files that die with the boot: the checkpoint and the allocations'
    /// directories.
    #[serde(deserialize_with = "fields::absolute_path")]
    pub run_dir: PathBuf,
    /// The container runtime's directory of CDI files.
    #[serde(deserialize_with = "fields::absolute_path")]
    pub cdi_dir: PathBuf,
    /// The mount point of the host's cgroup file system.
    #[serde(deserialize_with = "fields::absolute_path")]
    pub cgroup_root: PathBuf,
    /// The directory of the image's shim files.
    #[serde(deserialize_with = "fields::absolute_path")]
    pub shim_dir: PathBuf,
    /// The mount point of the host's procfs.
    #[serde(deserialize_with = "fields::absolute_path")]
    pub proc: PathBuf,
    /// The mount point of the host's sysfs.
    #[serde(deserialize_with = "fields::absolute_path")]
    pub sys: PathBuf,
    /// The kernel log, from which the agent learns the process of an XID.
    #[serde(deserialize_with = "fields::absolute_path")]
    pub kernel_log: PathBuf,
}

impl Default for PathsConfig {
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

/// Configuration of the binding of GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct BindingConfig {
    /// `PreStartContainer` waits for room for this time, and then fails, because the kubelet
    /// retries it.
    #[serde(deserialize_with = "fields::bind_wait")]
    pub wait: Duration,
}

impl Default for BindingConfig {
    fn default() -> Self {
        Self {
            wait: Duration::from_secs(25),
        }
    }
}

/// Configuration of the audit. With an unknown key the agent kills nobody, because the key may
/// exempt somebody from that.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct AuditConfig {
    /// The reaction to a container that exceeds its quota or uses untracked memory.
    pub policy: AuditPolicy,
    /// The bytes above the quota that are not yet a finding.
    #[serde(deserialize_with = "fields::bytes")]
    pub tolerance: Bytes,
    /// The bytes that each process may use besides, which no quota covers: loaded code and the
    /// device's own heaps.
    #[serde(deserialize_with = "fields::bytes")]
    pub process_allowance: Bytes,
    /// The consecutive audits that have to confirm a finding before the agent kills a process.
    #[serde(deserialize_with = "fields::one_or_more")]
    pub kill_after: u32,
    /// Whether the agent kills processes of pods without GPU memory too, which use a GPU.
    pub kill_outsiders: bool,
    /// The namespaces whose pods may use GPUs without GPU memory.
    pub exempt_namespaces: BTreeSet<String>,
    /// The names of programs that may use GPUs outside of pods.
    #[serde(deserialize_with = "fields::programs")]
    pub host_programs: BTreeSet<String>,
}

/// The agent charges contexts. Loaded kernels and the device heaps of printf and malloc are not
/// charged: PyTorch with all of its libraries loads some hundred MiB. The driver's rounding and its
/// small allocations stay below 64 MiB.
impl Default for AuditConfig {
    fn default() -> Self {
        Self {
            policy: AuditPolicy::Report,
            tolerance: Bytes::mib(64),
            process_allowance: Bytes::mib(512),
            kill_after: 3,
            kill_outsiders: true,
            exempt_namespaces: ["kube-system".to_owned()].into(),
            host_programs: BTreeSet::new(),
        }
    }
}

/// The reaction to a container that exceeds its quota or uses untracked memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AuditPolicy {
    /// The agent reports the container.
    Report,
    /// The agent reports the container and kills the processes at fault.
    Kill,
}

/// Configuration of the reaction to poisoned contexts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct ContextPolicyConfig {
    /// The action in namespaces without a context policy.
    #[serde(deserialize_with = "fields::context_action")]
    pub default: ContextAction,
}

/// Configuration of retained memory.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct RetainedConfig {
    /// Whether the node offers retained memory where the fd store answers.
    pub enabled: bool,
    /// The most memory that each GPU lends; `None` is the whole GPU.
    #[serde(deserialize_with = "fields::optional_bytes")]
    pub per_gpu: Option<Bytes>,
    /// The fd store's socket.
    #[serde(deserialize_with = "fields::absolute_path")]
    pub fdstore_socket: PathBuf,
    /// The provisioner's program; `None` is `bursar-provisioner` beside the agent's own program.
    #[serde(deserialize_with = "fields::optional_absolute_path")]
    pub provisioner: Option<PathBuf>,
}

impl Default for RetainedConfig {
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

/// With whom the node shares its GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct SharingConfig {
    /// Whether namespaces may share a GPU whose driver has not been proven to clear freed memory.
    pub allow_unscrubbed: bool,
    /// Whether the node offers nothing while another device plugin offers its GPUs too.
    pub refuse_beside_other_plugins: bool,
}

impl Default for SharingConfig {
    fn default() -> SharingConfig {
        SharingConfig {
            allow_unscrubbed: false,
            refuse_beside_other_plugins: true,
        }
    }
}

/// The agent's HTTP endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct HttpConfig {
    /// The address of the metrics endpoint.
    #[serde(deserialize_with = "fields::address")]
    pub listen: SocketAddr,
    /// The address of the kubelet's probes.
    #[serde(deserialize_with = "fields::address")]
    pub probes: SocketAddr,
}

impl Default for HttpConfig {
    fn default() -> Self {
        let any = |port| SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
        Self {
            listen: any(9445),
            probes: any(9402),
        }
    }
}

/// The reason why there is no [`Config`].
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The agent cannot read the file.
    #[error("failed to read config {path}: {source}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The I/O error.
        source: std::io::Error,
    },
    /// The file is not TOML, or has a field of another type or an invalid value.
    #[error("failed to use config {path}: {problem}", path = path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// The line, the value with the problem and the remedy, and the field as `table.field`.
        problem: String,
    },
}

impl Config {
    /// Reads the configuration that the arguments name.
    pub fn of(args: &Args) -> Result<Self, ConfigError> {
        match &args.config_text {
            Some(text) => Self::parse(Path::new("BURSAR_CONFIG"), text),
            None => Self::load(&args.config),
        }
    }

    /// Reads the file at `path`; a missing file is an empty one.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse(path, &text),
            Err(source) if source.kind() == std::io::ErrorKind::NotFound => Self::parse(path, ""),
            Err(source) => Err(ConfigError::Read {
                path: path.to_owned(),
                source,
            }),
        }
    }

    /// Checks the configuration in `text`; the errors name `path`.
    ///
    /// Unknown keys have no effect, because the text may be of another version of the chart.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let mut unknown_keys = Vec::new();
        let mut is_audit_known = true;
        let parsed: Result<Self, _> = toml::Deserializer::parse(text).and_then(|file| {
            serde_ignored::deserialize(file, |key| {
                let key = key.to_string();
                is_audit_known &= !key.starts_with("audit.");
                if unknown_keys.len() < MAX_UNKNOWN_KEYS {
                    unknown_keys.push(key);
                }
            })
        });
        match parsed {
            Ok(mut config) => {
                if !is_audit_known {
                    config.audit.policy = AuditPolicy::Report;
                }
                Ok(Self {
                    unknown_keys,
                    ..config
                })
            }
            Err(error) => Err(ConfigError::Parse {
                path: path.to_owned(),
                problem: describe(error, text),
            }),
        }
    }
}

/// Describes an error in one line, which a log can hold.
fn describe(mut error: toml::de::Error, text: &str) -> String {
    let line = error.span().and_then(|span| {
        let before = text.get(..span.start)?;
        Some(before.matches('\n').count() + 1)
    });
    // Without the input the error's text has the field in place of an excerpt.
    error.set_input(None);
    let problem = error.to_string().trim_end().replace('\n', " ");
    match line {
        Some(line) => format!("line {line}: {problem}"),
        None => problem,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, ConfigError> {
        Config::parse(Path::new("/etc/bursar/agent.toml"), text)
    }

    fn error(text: &str) -> String {
        parse(text).expect_err("must be refused").to_string()
    }

    #[test]
    fn empty_file_has_every_default() {
        let config = parse("").unwrap();
        assert_eq!(config.resources.quantum, Quantum::Gib1);
        assert_eq!(config.resources.managed_capacity, Bytes::ZERO);
        assert_eq!(
            config.kubelet.device_plugin_dir,
            Path::new("/var/lib/kubelet/device-plugins")
        );
        assert_eq!(config.binding.wait, Duration::from_secs(25));
        assert_eq!(config.http.listen.port(), 9445);
        assert_eq!(config.http.probes.port(), 9402);
        assert_eq!(config.audit.policy, AuditPolicy::Report);
        assert!(config.audit.kill_outsiders);
        assert_eq!(config.context_policy.default, ContextAction::Process);
        assert!(config.retained_memory.enabled);
        assert_eq!(config.sharing, SharingConfig::default());
        assert_eq!(
            config.retained_memory.fdstore_socket,
            Path::new("/run/bursar/fdstore/fdstore.sock")
        );
    }

    #[test]
    fn every_field_is_read() {
        let config = parse(
            r#"
            [resources]
            quantum = "512Mi"
            managed-memory-capacity = "64Gi"
            reserved-memory = "1.5Gi"
            compute-round = "20ms"
            [kubelet]
            device-plugin-dir = "/k/device-plugins"
            relay-dir = "/r/relay"
            pod-resources-socket = "/k/pod-resources.sock"
            [driver]
            root = "/driver-root"
            host-root = "/run/nvidia/driver"
            dev-root = "/run/nvidia/driver/dev"
            provisioner-user = 65531
            extra-mounts = [{ host-path = "/a", container-path = "/b", read-only = false }, { host-path = "/c" }]
            [paths]
            state-dir = "/s"
            run-dir = "/r"
            cdi-dir = "/c"
            cgroup-root = "/g"
            shim-dir = "/h"
            proc = "/p"
            sys = "/y"
            kernel-log = "/k"
            [binding]
            wait = "2s 500ms"
            [audit]
            policy = "kill"
            tolerance = "128Mi"
            process-allowance = "512Mi"
            kill-after = 5
            kill-outsiders = false
            exempt-namespaces = ["gpu-operator"]
            host-programs = ["nvidia-persistenced", "Xorg"]
            [context-policy]
            default = "Report"
            [retained-memory]
            enabled = false
            per-gpu = "64Gi"
            fdstore-socket = "/v/fdstore.sock"
            provisioner = "/w/bursar-provisioner"
            [sharing]
            allow-unscrubbed = true
            refuse-beside-other-plugins = false
            [http]
            listen = "[::1]:9"
            probes = "[::1]:10"
            "#,
        )
        .unwrap();
        let mount = |host: &str, container: &str, read_only| HostMount {
            host_path: host.into(),
            container_path: container.into(),
            read_only,
        };
        let expected = Config {
            unknown_keys: Vec::new(),
            resources: ResourcesConfig {
                quantum: Quantum::Mib512,
                managed_capacity: Bytes::gib(64),
                reserved: Bytes::mib(1536),
                compute_round: Some(Duration::from_millis(20)),
            },
            kubelet: KubeletConfig {
                device_plugin_dir: "/k/device-plugins".into(),
                pod_resources_socket: "/k/pod-resources.sock".into(),
                relay_dir: Some("/r/relay".into()),
            },
            driver: DriverConfig {
                root: "/driver-root".into(),
                host_root: "/run/nvidia/driver".into(),
                dev_root: "/run/nvidia/driver/dev".into(),
                extra_mounts: vec![mount("/a", "/b", false), mount("/c", "/c", true)],
                provisioner_user: Some(65531),
            },
            paths: PathsConfig {
                state_dir: "/s".into(),
                run_dir: "/r".into(),
                cdi_dir: "/c".into(),
                cgroup_root: "/g".into(),
                shim_dir: "/h".into(),
                proc: "/p".into(),
                sys: "/y".into(),
                kernel_log: "/k".into(),
            },
            binding: BindingConfig {
                wait: Duration::from_millis(2_500),
            },
            audit: AuditConfig {
                policy: AuditPolicy::Kill,
                tolerance: Bytes::mib(128),
                process_allowance: Bytes::mib(512),
                kill_after: 5,
                kill_outsiders: false,
                exempt_namespaces: ["gpu-operator".to_owned()].into(),
                host_programs: ["nvidia-persistenced", "Xorg"].map(str::to_owned).into(),
            },
            context_policy: ContextPolicyConfig {
                default: ContextAction::Report,
            },
            retained_memory: RetainedConfig {
                enabled: false,
                per_gpu: Some(Bytes::gib(64)),
                fdstore_socket: "/v/fdstore.sock".into(),
                provisioner: Some("/w/bursar-provisioner".into()),
            },
            sharing: SharingConfig {
                allow_unscrubbed: true,
                refuse_beside_other_plugins: false,
            },
            http: HttpConfig {
                listen: "[::1]:9".parse().unwrap(),
                probes: "[::1]:10".parse().unwrap(),
            },
        };
        assert_eq!(config, expected);
    }

    #[test]
    fn default_context_action_is_none_that_needs_a_budget() {
        let refused = error("[context-policy]\ndefault = \"Evict\"");
        for part in [
            "\"Evict\": write one of InPlace, Process",
            "`context-policy.default`",
        ] {
            assert!(refused.contains(part), "{refused}");
        }
    }

    #[test]
    fn unknown_keys_are_skipped_and_listed() {
        let config = "[resources]\nquantum = \"512Mi\"\nquanta = 1\n[later.table]\nkey = 2";
        let config = parse(config).unwrap();
        assert_eq!(config.resources.quantum, Quantum::Mib512);
        assert_eq!(config.unknown_keys, ["later", "resources.quanta"]);
        let many: String = (0..100).map(|n| format!("key-{n} = {n}\n")).collect();
        assert_eq!(parse(&many).unwrap().unknown_keys.len(), MAX_UNKNOWN_KEYS);
    }

    #[test]
    fn audit_kills_nobody_while_it_has_an_unknown_key() {
        let config = "[audit]\npolicy = \"kill\"\n";
        let policy = |config: &str| parse(config).unwrap().audit.policy;
        assert_eq!(policy(config), AuditPolicy::Kill);
        let unknown = format!("{config}exempt-namespace = [\"gpu-operator\"]");
        assert_eq!(policy(&unknown), AuditPolicy::Report);
        assert_eq!(
            parse(&unknown).unwrap().unknown_keys,
            ["audit.exempt-namespace"]
        );
        let many: String = (0..100).map(|n| format!("key-{n} = {n}\n")).collect();
        assert_eq!(policy(&format!("{many}{unknown}")), AuditPolicy::Report);
    }

    #[test]
    fn invalid_value_is_named_with_field_and_remedy() {
        for (text, parts) in [
            (
                "[resources]\nquantum = \"0\"",
                ["resources.quantum", "\"0\"", "256Mi, 512Mi"],
            ),
            (
                "[resources]\nquantum = \"2Gi\"",
                ["resources.quantum", "\"2Gi\"", "256Mi, 512Mi"],
            ),
            (
                "[resources]\nreserved-memory = \"1GB\"",
                ["resources.reserved-memory", "\"1GB\"", "16Gi"],
            ),
            (
                "[resources]\nreserved-memory = \"-1Gi\"",
                ["resources.reserved-memory", "\"-1Gi\"", "zero or more"],
            ),
            (
                "[resources]\nmanaged-memory-capacity = \"0.7\"",
                ["resources.managed-memory-capacity", "\"0.7\"", "whole"],
            ),
            (
                "[paths]\nrun-dir = \"run\"",
                ["paths.run-dir", "\"run\"", "absolute"],
            ),
            (
                "[driver]\nextra-mounts = [{ host-path = \"x\" }]",
                ["driver.extra-mounts", "\"x\"", "absolute"],
            ),
            (
                "[binding]\nwait = \"soon\"",
                ["binding.wait", "\"soon\"", "25s"],
            ),
            (
                "[binding]\nwait = \"-1s\"",
                ["binding.wait", "\"-1s\"", "25s"],
            ),
            (
                "[binding]\nwait = \"28s\"",
                ["binding.wait", "\"28s\"", "at most 27s"],
            ),
            (
                "[audit]\npolicy = \"warn\"",
                ["audit.policy", "`warn`", "`report` or `kill`"],
            ),
            (
                "[audit]\nkill-after = 0",
                ["audit.kill-after", "0: ", "1 or more"],
            ),
            (
                "[audit]\nhost-programs = [\"/usr/bin/Xorg\"]",
                ["audit.host-programs", "\"/usr/bin/Xorg\"", "write Xorg"],
            ),
            (
                "[retained-memory]\nper-gpu = \"64GB\"",
                ["retained-memory.per-gpu", "\"64GB\"", "Gi"],
            ),
            (
                "[retained-memory]\nfdstore-socket = \"fdstore\"",
                ["retained-memory.fdstore-socket", "\"fdstore\"", "absolute"],
            ),
            (
                "[http]\nlisten = \"9445\"",
                ["http.listen", "\"9445\"", "[::]:9445"],
            ),
            (
                "[http]\nprobes = \"9402\"",
                ["http.probes", "\"9402\"", "[::]:9445"],
            ),
        ] {
            let message = error(text);
            for part in parts {
                assert!(message.contains(part), "{part} is missing in: {message}");
            }
        }
    }

    #[test]
    fn value_of_another_type_is_named() {
        let text = error("[resources]\nquantum = 1");
        assert!(
            text.contains("`resources.quantum`") && text.contains("string"),
            "{text}"
        );
    }

    #[test]
    fn unreadable_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = Config::load(folder.path())
            .expect_err("a folder is no file")
            .to_string();
        assert!(
            error.contains(&folder.path().display().to_string()),
            "{error}"
        );
    }

    #[test]
    fn missing_file_has_every_default() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(
            Config::load(&folder.path().join("none.toml")).unwrap(),
            parse("").unwrap()
        );
    }
}
