//! Writes the command line and the configuration file of each component.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::certs;
use super::local::ClusterScope;
use super::run_folder::RunFolder;
use crate::kube::Toolbox;
use crate::node::{ADDRESS, API_PORT, KUBELET_PORT, SERVICE_ADDRESS, address};

/// The first node's name in Kubernetes.
pub(super) const NODE_NAME: &str = "node-1";

/// Returns the name in Kubernetes of the node with this number, from 1 on.
pub(super) fn node_name(number: u8) -> String {
    format!("node-{number}")
}

/// containerd's socket, in the node's mount namespace.
pub(super) const CONTAINERD_SOCKET: &str = "/run/containerd/containerd.sock";
/// The image of the container that holds a pod's namespaces.
pub(super) const PAUSE_IMAGE: &str = crate::images::PAUSE;

/// The name, program and arguments of one component.
#[derive(Debug, Clone)]
pub(super) struct Component {
    pub(super) name: &'static str,
    pub(super) program: PathBuf,
    pub(super) arguments: Vec<String>,
}

/// The decisions about a cluster that precede its start.
#[derive(Debug, Clone)]
pub(super) struct ClusterConfig {
    pub(super) folder: RunFolder,
    /// The run folder with the cluster's certificates: that of the first node.
    pub(super) certificates: RunFolder,
    /// The node's number, from 1 on.
    pub(super) number: u8,
    pub(super) toolbox: Toolbox,
    pub(super) scope: ClusterScope,
    /// Whether the node's only cgroup hierarchy is v2.
    pub(super) cgroup_v2: bool,
    /// The kubelet's `cgroupRoot`.
    pub(super) cgroup_root: String,
}

impl ClusterConfig {
    /// Writes the certificates and every configuration file.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub(super) fn write_files(&self) -> io::Result<()> {
        for (name, text) in certs::issue().map_err(io::Error::other)? {
            fs::write(self.folder.config(&name), text)?;
        }
        for party in ["controller-manager", "scheduler", "admin"] {
            self.write_kubeconfig(party, party)?;
        }
        self.write_node_files()
    }

    fn write_kubeconfig(&self, name: &str, party: &str) -> io::Result<()> {
        let config = self.kubeconfig(party, &format!("https://{ADDRESS}:{API_PORT}"));
        fs::write(
            self.folder.config(&format!("{name}.kubeconfig")),
            to_json(&config)?,
        )
    }

    /// Writes the configuration files of the kubelet and of containerd.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub(super) fn write_node_files(&self) -> io::Result<()> {
        self.write_kubeconfig("kubelet", &certs::kubelet(self.number))?;
        fs::write(
            self.folder.config("kubelet.json"),
            to_json(&self.kubelet_config())?,
        )?;
        fs::write(self.folder.config("resolv.conf"), "")?;
        fs::write(
            self.folder.config("containerd.toml"),
            self.containerd_config(),
        )?;
        let cni = self.folder.config("cni");
        fs::create_dir_all(&cni)?;
        fs::write(
            cni.join("10-bridge.conflist"),
            to_json(&cni_config(self.number))?,
        )
    }

    /// Writes the administrator's kubeconfig with the host's port of the API server.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(super) fn write_host_kubeconfig(&self, port: u16) -> io::Result<()> {
        let config = self.kubeconfig("admin", &format!("https://127.0.0.1:{port}"));
        fs::write(self.folder.kubeconfig(), to_json(&config)?)
    }

    fn config_path(&self, name: &str) -> String {
        self.folder.config(name).display().to_string()
    }

    fn certificate_path(&self, name: &str) -> String {
        self.certificates.config(name).display().to_string()
    }

    fn kubeconfig(&self, party: &str, server: &str) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "bursar",
            "clusters": [{"name": "bursar", "cluster": {"server": server, "certificate-authority": self.certificate_path("ca.crt")}}],
            "users": [{"name": party, "user": {
                "client-certificate": self.certificate_path(&format!("{party}.crt")),
                "client-key": self.certificate_path(&format!("{party}.key")),
            }}],
            "contexts": [{"name": "bursar", "context": {"cluster": "bursar", "user": party}}],
        })
    }

    fn component(&self, name: &'static str, arguments: Vec<String>) -> Component {
        Component {
            name,
            program: self.toolbox.program(name),
            arguments,
        }
    }

    /// etcd skips fsync, because its data is deleted with the cluster.
    pub(super) fn etcd(&self) -> Component {
        let data = self.folder.scratch().join("etcd").display().to_string();
        self.component(
            "etcd",
            flags(&[
                ("data-dir", &data),
                ("listen-client-urls", "http://127.0.0.1:2379"),
                ("advertise-client-urls", "http://127.0.0.1:2379"),
                ("listen-peer-urls", "http://127.0.0.1:2380"),
                ("unsafe-no-fsync", "true"),
                // The bench of 5,000 nodes writes more than the default of 2 GiB.
                ("quota-backend-bytes", "8589934592"),
                ("log-level", "warn"),
            ]),
        )
    }

    pub(super) fn apiserver(&self) -> Component {
        self.component(
            "kube-apiserver",
            flags(&[
                ("etcd-servers", "http://127.0.0.1:2379"),
                ("bind-address", "0.0.0.0"),
                ("secure-port", &API_PORT.to_string()),
                ("advertise-address", &ADDRESS.to_string()),
                ("service-cluster-ip-range", &format!("{SERVICE_ADDRESS}/24")),
                ("tls-cert-file", &self.config_path("apiserver.crt")),
                ("tls-private-key-file", &self.config_path("apiserver.key")),
                ("client-ca-file", &self.config_path("ca.crt")),
                ("kubelet-certificate-authority", &self.config_path("ca.crt")),
                (
                    "kubelet-client-certificate",
                    &self.config_path("apiserver-kubelet-client.crt"),
                ),
                (
                    "kubelet-client-key",
                    &self.config_path("apiserver-kubelet-client.key"),
                ),
                // No DNS server resolves the node's name.
                ("kubelet-preferred-address-types", "InternalIP"),
                ("service-account-issuer", "https://kubernetes.default.svc"),
                (
                    "service-account-key-file",
                    &self.config_path("service-account.pub"),
                ),
                (
                    "service-account-signing-key-file",
                    &self.config_path("service-account.key"),
                ),
                ("authorization-mode", "Node,RBAC"),
                ("enable-admission-plugins", "NodeRestriction"),
                ("allow-privileged", "true"),
            ]),
        )
    }

    pub(super) fn controller_manager(&self) -> Component {
        let controllers = match self.scope {
            ClusterScope::WithNode => "*",
            ClusterScope::ControlPlaneOnly => {
                "*,-node-lifecycle-controller,-taint-eviction-controller"
            }
        };
        self.component(
            "kube-controller-manager",
            flags(&[
                (
                    "kubeconfig",
                    &self.config_path("controller-manager.kubeconfig"),
                ),
                ("root-ca-file", &self.config_path("ca.crt")),
                (
                    "service-account-private-key-file",
                    &self.config_path("service-account.key"),
                ),
                ("use-service-account-credentials", "true"),
                ("controllers", controllers),
                // The controller manager first creates a service account for each of 40
                // controllers.
                ("kube-api-qps", "500"),
                ("kube-api-burst", "1000"),
                ("leader-elect", "false"),
                ("bind-address", "127.0.0.1"),
            ]),
        )
    }

    pub(super) fn scheduler(&self) -> Component {
        self.component(
            "kube-scheduler",
            flags(&[
                ("kubeconfig", &self.config_path("scheduler.kubeconfig")),
                ("leader-elect", "false"),
                ("bind-address", "127.0.0.1"),
            ]),
        )
    }

    pub(super) fn containerd(&self) -> Component {
        self.component(
            "containerd",
            flags(&[("config", &self.config_path("containerd.toml"))]),
        )
    }

    pub(super) fn kubelet(&self) -> Component {
        self.component(
            "kubelet",
            flags(&[
                ("config", &self.config_path("kubelet.json")),
                ("kubeconfig", &self.config_path("kubelet.kubeconfig")),
                ("hostname-override", &node_name(self.number)),
                ("node-ip", &address(self.number).to_string()),
            ]),
        )
    }

    fn kubelet_config(&self) -> Value {
        let certificate = certs::kubelet(self.number);
        let path = |suffix: &str| self.certificate_path(&format!("{certificate}.{suffix}"));
        let mut config = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": format!("unix://{CONTAINERD_SOCKET}"),
            "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": true},
                               "x509": {"clientCAFile": self.certificate_path("ca.crt")}},
            // The forwarders to other nodes listen on their addresses.
            "address": address(self.number).to_string(), "port": KUBELET_PORT,
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": path("crt"), "tlsPrivateKeyFile": path("key"),
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": self.cgroup_root,
            "enforceNodeAllocatable": [],
            "failSwapOn": false,
            // The node's file systems are overlays of the host's, so the kubelet must not manage
            // their usage.
            "localStorageCapacityIsolation": false,
            "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "nodefs.inodesFree": "0%",
                             "imagefs.available": "0%", "imagefs.inodesFree": "0%"},
            "imageGCHighThresholdPercent": 100,
            // Without a DNS address the kubelet sends a warning event for every pod. No server
            // listens there.
            "clusterDNS": [ADDRESS.to_string()], "clusterDomain": "cluster.local",
            "resolvConf": self.config_path("resolv.conf"),
            // Trials wait for the node's allocatable memory. An unchanged status is written seldom.
            "nodeStatusUpdateFrequency": "1s",
            "nodeStatusReportFrequency": "4s",
            // Tests kill containers repeatedly, and the default back-off grows to minutes.
            "featureGates": {"KubeletCrashLoopBackOffMax": true},
            "crashLoopBackOff": {"maxContainerRestartPeriod": "1s"},
        });
        if !self.cgroup_v2 {
            config["failCgroupV1"] = json!(false);
        }
        config
    }

    /// Returns containerd's configuration in version 3 (containerd `docs/cri/config.md`).
    /// containerd needs no CAP_SYS_RESOURCE with these settings.
    fn containerd_config(&self) -> String {
        let plugins = self
            .toolbox
            .folder_of("bridge")
            .unwrap_or(Path::new("/opt/cni/bin"));
        format!(
            r#"version = 3
root = "/var/lib/containerd"
state = "/run/containerd"

[grpc]
address = "{CONTAINERD_SOCKET}"

[plugins.'io.containerd.cri.v1.images']
snapshotter = "overlayfs"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "{PAUSE_IMAGE}"

[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
disable_apparmor = true
cdi_spec_dirs = ["/run/cdi"]
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ["{plugins}"]
conf_dir = "{cni}"
"#,
            plugins = plugins.display(),
            cni = self.config_path("cni"),
        )
    }
}

/// Connects the pods of a node by one bridge, whose address is their gateway to the node. Pods of
/// different nodes do not reach each other.
fn cni_config(number: u8) -> Value {
    json!({
        "cniVersion": "1.0.0", "name": "bursar-e2e",
        "plugins": [{
            "type": "bridge", "bridge": "cni0", "isGateway": true,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": format!("10.88.{number}.0/24")}]], "routes": [{"dst": "0.0.0.0/0"}],
                     "dataDir": "/run/cni"},
        }],
    })
}

fn flags(flags: &[(&str, &str)]) -> Vec<String> {
    flags
        .iter()
        .map(|(name, value)| format!("--{name}={value}"))
        .collect()
}

fn to_json(value: &Value) -> io::Result<String> {
    Ok(serde_json::to_string_pretty(value)?)
}
