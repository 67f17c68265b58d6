//! The agent's configuration: arguments and one TOML file in, a checked [`LaunchConfig`] out.
//!
//! What each field is for, its default and when to change it stand in the chart's `values.yaml`
//! and in [`file`](self) below. An error names the field, its value and the remedy.

mod file;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;

use crate::node::cdi::HostMount;
use crate::units::{Bytes, Quantum};

/// The agent's arguments. Nothing else in the agent reads the environment.
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

/// How log lines are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// One JSON object a line.
    Json,
    /// For people.
    Text,
}

/// Everything that the agent is told, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// What the node offers.
    pub resources: ResourcesConfig,
    /// Where the kubelet is.
    pub kubelet: KubeletConfig,
    /// Where the NVIDIA driver is.
    pub driver: DriverConfig,
    /// Where the agent keeps its own files.
    pub paths: PathsConfig,
    /// How long `PreStartContainer` waits for room before it fails and the kubelet tries again.
    pub bind_wait: Duration,
    /// How programs are audited.
    pub audit: AuditConfig,
    /// Memory that outlives the processes that use it.
    pub retained: RetainedConfig,
    /// Whether pods of several namespaces share GPUs whose driver was not seen to clear freed memory.
    pub allow_unscrubbed: bool,
    /// Where metrics are served.
    pub http_listen: SocketAddr,
    /// Where the kubelet's probes are answered.
    pub http_probes: SocketAddr,
}

/// What the node offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResourcesConfig {
    /// The memory that one token stands for.
    pub quantum: Quantum,
    /// Managed memory of the whole node; zero is off.
    pub managed_capacity: Bytes,
    /// Memory held back on every GPU.
    pub reserved: Bytes,
}

/// Where the kubelet is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubeletConfig {
    /// The folder of `kubelet.sock`, of the plugins' sockets and of the kubelet's device checkpoint.
    pub device_plugin_dir: PathBuf,
    /// The socket of the kubelet's PodResources service.
    pub pod_resources_socket: PathBuf,
}

/// Where the NVIDIA driver is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverConfig {
    /// The driver's root folder as the agent sees it.
    pub root: PathBuf,
    /// The same folder as the container runtime sees it.
    pub host_root: PathBuf,
    /// The host's folder of device nodes.
    pub dev_root: PathBuf,
    /// Further folders that every container with GPU memory gets.
    pub extra_mounts: Vec<HostMount>,
    /// The user and group as which workers and canaries load the driver; none is the agent's own.
    pub provisioner_user: Option<u32>,
}

/// Where the agent keeps its own files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathsConfig {
    /// What lives until the node is reinstalled: the versioned shim files.
    pub state_dir: PathBuf,
    /// What dies with the boot: the checkpoint and the allocations' folders.
    pub run_dir: PathBuf,
    /// The runtime's folder of CDI files.
    pub cdi_dir: PathBuf,
    /// The host's cgroup file system.
    pub cgroup_root: PathBuf,
    /// The image's shim files.
    pub shim_dir: PathBuf,
    /// The host's process file system.
    pub proc: PathBuf,
    /// The kernel's log, where the driver says which process a fault was of.
    pub kernel_log: PathBuf,
}

/// Memory that outlives the processes that use it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetainedConfig {
    /// Whether there is any, where the vault answers.
    pub enabled: bool,
    /// The vault's socket.
    pub fdstore_socket: PathBuf,
    /// The program that makes it; none is the one beside the agent's own.
    pub provisioner: Option<PathBuf>,
}

/// How programs are audited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AuditConfig {
    /// What becomes of a container that takes more than its quota, or takes memory unseen.
    pub policy: AuditPolicy,
    /// What a container may have above its quota before that is a finding.
    pub tolerance: Bytes,
    /// What each of its processes may have besides, that no quota pays for: the code that it loads, and the
    /// device's own heaps.
    pub process_allowance: Bytes,
    /// In how many audits in a row a finding must stand before a process is killed for it.
    pub kill_after: u32,
}

/// What becomes of a container that takes more than its quota, or takes memory unseen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AuditPolicy {
    /// It is reported.
    Report,
    /// It is reported, and its processes that are at fault are killed.
    Kill,
}

/// Why there is no [`LaunchConfig`].
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("config {path}: {source}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not TOML, or has a field that does not exist or is of another type.
    #[error("config {path}: {source}", path = path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Names the line, the field and what was expected.
        source: Box<toml::de::Error>,
    },
    /// A field's value makes no sense.
    #[error("config {path}: {field} = {value:?}: {problem}", path = path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// The field, as `table.field`.
        field: &'static str,
        /// Its value.
        value: String,
        /// What is wrong with it, and what to write instead.
        problem: String,
    },
}

impl Config {
    /// Reads the file at `path`; a file that does not exist is an empty one.
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

    /// Checks the configuration that `text` states; `path` is for the errors.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let file: file::ConfigFile = toml::from_str(text).map_err(|source| ConfigError::Parse {
            path: path.to_owned(),
            source: Box::new(source),
        })?;
        file.resolve().map_err(
            |file::InvalidField {
                 field,
                 value,
                 problem,
             }| ConfigError::Field {
                path: path.to_owned(),
                field,
                value,
                problem,
            },
        )
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
        assert_eq!(config.bind_wait, Duration::from_secs(25));
        assert_eq!(config.http_listen.port(), 9400);
        assert_eq!(config.http_probes.port(), 9402);
        assert_eq!(config.audit.policy, AuditPolicy::Report);
        assert!(config.retained.enabled);
        assert!(!config.allow_unscrubbed);
        assert_eq!(
            config.retained.fdstore_socket,
            Path::new("/run/bursar/vault/vault.sock")
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
            [kubelet]
            device-plugin-dir = "/k/device-plugins"
            pod-resources-socket = "/k/pod-resources.sock"
            [driver]
            root = "/driver-root"
            host-root = "/run/nvidia/driver"
            dev-root = "/run/nvidia/driver/dev"
            worker-user = 65531
            extra-mounts = [{ host-path = "/a", container-path = "/b", read-only = false }, { host-path = "/c" }]
            [paths]
            state-dir = "/s"
            run-dir = "/r"
            cdi-dir = "/c"
            cgroup-root = "/g"
            shim-dir = "/h"
            proc = "/p"
            kernel-log = "/k"
            [binding]
            wait = "2s 500ms"
            [audit]
            policy = "kill"
            tolerance = "128Mi"
            process-allowance = "512Mi"
            kill-after = 5
            [kept]
            enabled = false
            vault-socket = "/v/vault.sock"
            worker = "/w/bursar-worker"
            [sharing]
            allow-unscrubbed = true
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
            resources: ResourcesConfig {
                quantum: Quantum::Mib512,
                managed_capacity: Bytes::gib(64),
                reserved: Bytes::mib(1536),
            },
            kubelet: KubeletConfig {
                device_plugin_dir: "/k/device-plugins".into(),
                pod_resources_socket: "/k/pod-resources.sock".into(),
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
                kernel_log: "/k".into(),
            },
            bind_wait: Duration::from_millis(2_500),
            audit: AuditConfig {
                policy: AuditPolicy::Kill,
                tolerance: Bytes::mib(128),
                process_allowance: Bytes::mib(512),
                kill_after: 5,
            },
            retained: RetainedConfig {
                enabled: false,
                fdstore_socket: "/v/vault.sock".into(),
                provisioner: Some("/w/bursar-worker".into()),
            },
            allow_unscrubbed: true,
            http_listen: "[::1]:9".parse().unwrap(),
            http_probes: "[::1]:10".parse().unwrap(),
        };
        assert_eq!(config, expected);
    }

    #[test]
    fn unknown_field_is_named_with_the_known_ones() {
        let text = error("[resources]\nquantums = \"1Gi\"");
        assert!(
            text.contains("quantums") && text.contains("`quantum`"),
            "{text}"
        );
        assert!(text.contains("line 2"), "{text}");
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
                ["audit.policy", "\"warn\"", "report, kill"],
            ),
            (
                "[audit]\nkill-after = 0",
                ["audit.kill-after", "\"0\"", "1 or more"],
            ),
            (
                "[kept]\nvault-socket = \"vault\"",
                ["kept.vault-socket", "\"vault\"", "absolute"],
            ),
            (
                "[http]\nlisten = \"9400\"",
                ["http.listen", "\"9400\"", "[::]:9400"],
            ),
            (
                "[http]\nprobes = \"9402\"",
                ["http.probes", "\"9402\"", "[::]:9402"],
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
            text.contains("quantum = 1") && text.contains("string"),
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
