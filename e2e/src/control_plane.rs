//! Starts a control plane without nodes, with the objects of the chart except its workloads.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};
use serde::Deserialize as _;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use tokio::sync::Mutex;
use tokio::time::timeout;

use crate::cache::CacheError;
use crate::chart::{ANY_REGISTRY, NAMESPACE, RELEASE};
use crate::cluster::{ClusterOptions, ClusterScope, LocalCluster, LocalError};
use crate::kube::{self as programs, BuildError, Toolbox};
use crate::paths;
use crate::progress::Progress;

/// The kinds of the chart's workloads, which need nodes.
const WORKLOAD_KINDS: [&str; 2] = ["Deployment", "DaemonSet"];
/// Lets the rules on other pods deny, so that trials see what they refuse. They warn by default.
const REFUSE_UNMANAGED: &str = "--set=policies.refuseUnmanagedGpus.validationActions={Deny}";
/// The timeout of a call of helm or kubectl.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(60);

/// The error of a control plane's start or of an operation on it.
#[derive(Debug, thiserror::Error)]
pub enum ControlPlaneError {
    /// Kubernetes could not be built.
    #[error(transparent)]
    Supplies(#[from] CacheError<BuildError>),
    /// The control plane, or one of its processes, did not start.
    #[error(transparent)]
    Local(#[from] LocalError),
    /// The kubeconfig of the control plane cannot be used.
    #[error("the cluster's kubeconfig")]
    Kubeconfig(#[from] KubeconfigError),
    /// A program could not be started, or a file could not be written.
    #[error("{what}: {source}")]
    System {
        /// The program or the file.
        what: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A program failed.
    #[error("{program}: {stderr}")]
    Program {
        /// The program.
        program: PathBuf,
        /// Its standard error.
        stderr: String,
    },
    /// The output of helm is not valid YAML.
    #[error("the rendered chart: {0}")]
    Chart(#[from] serde_yaml_ng::Error),
    /// The control plane was stopped.
    #[error("the control plane is down")]
    Stopped,
}

/// etcd, the API server and the controller manager, with the chart's types, rights and policies.
pub struct ControlPlane {
    local: Mutex<Option<LocalCluster>>,
    toolbox: Toolbox,
    folder: PathBuf,
    kubeconfig: PathBuf,
    log: PathBuf,
    config: Config,
    client: Client,
}

impl ControlPlane {
    /// Starts a control plane of this name. `harness` is the program whose subcommand `node` is the
    /// node process.
    ///
    /// # Errors
    /// When a component does not start, or the API server rejects the chart.
    pub async fn start(
        name: &str,
        harness: PathBuf,
        progress: &Progress,
    ) -> Result<Self, ControlPlaneError> {
        let toolbox = programs::build(progress)?;
        let options = ClusterOptions {
            name: name.to_owned(),
            harness,
            toolbox: toolbox.clone(),
            scope: ClusterScope::ControlPlaneOnly,
        };
        let mut local = LocalCluster::up(options, progress).await?;
        // The garbage collector discovers new types when it starts, and every 30 s.
        local.stop_controller_manager().await?;
        let kubeconfig = Kubeconfig::read_from(local.kubeconfig())?;
        let config =
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        let plane = Self {
            folder: local.folder().path().to_path_buf(),
            kubeconfig: local.kubeconfig(),
            log: local.folder().log("kube-apiserver"),
            client: local.client(),
            local: Mutex::new(Some(local)),
            toolbox,
            config,
        };
        let mut objects = vec![json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": NAMESPACE } })];
        let settings = ["--set=placement.computeRound=4ms"];
        objects.extend(plane.chart_without_workloads(&settings).await?);
        plane.apply(objects).await?;
        plane.set_controller_manager_running(true).await?;
        progress.report("the chart's types, rights and policies are there");
        Ok(plane)
    }

    /// Renders the objects of the chart with these settings, without workloads.
    ///
    /// # Errors
    /// When helm fails.
    pub async fn chart_without_workloads(
        &self,
        settings: &[&str],
    ) -> Result<Vec<Value>, ControlPlaneError> {
        let mut objects = self.manifests(settings).await?;
        objects.retain(|object| {
            object["kind"]
                .as_str()
                .is_some_and(|kind| !WORKLOAD_KINDS.contains(&kind))
        });
        Ok(objects)
    }

    /// Renders all objects of the chart with these settings.
    ///
    /// # Errors
    /// When helm fails.
    pub async fn manifests(&self, settings: &[&str]) -> Result<Vec<Value>, ControlPlaneError> {
        let program = self.toolbox.program("helm");
        let mut helm = Command::new(&program);
        helm.args(["template", RELEASE])
            .arg(paths::repository().join("charts/bursar"))
            .args([
                "--namespace",
                NAMESPACE,
                "--kube-version=1.36.0",
                "--skip-tests",
                ANY_REGISTRY,
                REFUSE_UNMANAGED,
            ])
            .args(settings);
        let rendered = run_to_success(&program, helm, Vec::new()).await?;
        let mut objects = Vec::new();
        for document in serde_yaml_ng::Deserializer::from_slice(&rendered) {
            let object = Value::deserialize(document)?;
            // Some templates render to an empty document.
            if !object.is_null() {
                objects.push(object);
            }
        }
        Ok(objects)
    }

    /// Creates or updates these objects by server-side apply.
    ///
    /// # Errors
    /// When kubectl fails.
    pub async fn apply(&self, objects: Vec<Value>) -> Result<(), ControlPlaneError> {
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": objects });
        let program = self.toolbox.program("kubectl");
        let mut kubectl = Command::new(&program);
        kubectl
            .args([
                "apply",
                "--server-side",
                "--force-conflicts",
                "--filename=-",
            ])
            .env("KUBECONFIG", &self.kubeconfig);
        let input = list.to_string().into_bytes();
        run_to_success(&program, kubectl, input).await.map(drop)
    }

    /// Starts or stops the controller manager.
    ///
    /// # Errors
    /// When the controller manager does not start or exit.
    pub async fn set_controller_manager_running(
        &self,
        runs: bool,
    ) -> Result<(), ControlPlaneError> {
        let mut local = self.local.lock().await;
        let local = local.as_mut().ok_or(ControlPlaneError::Stopped)?;
        if runs {
            return Ok(local.start_controller_manager().await?);
        }
        Ok(local.stop_controller_manager().await?)
    }

    /// Copies etcd's data. The API server is restarted.
    ///
    /// # Errors
    /// When a process does not end or start.
    pub async fn back_up_etcd(&self) -> Result<(), ControlPlaneError> {
        let mut local = self.local.lock().await;
        let local = local.as_mut().ok_or(ControlPlaneError::Stopped)?;
        Ok(local.back_up_etcd().await?)
    }

    /// Restores the copy of [`Self::back_up_etcd`]. Returns once the API server answers.
    ///
    /// # Errors
    /// When a process does not end or start.
    pub async fn restore_etcd(&self) -> Result<(), ControlPlaneError> {
        let mut local = self.local.lock().await;
        let local = local.as_mut().ok_or(ControlPlaneError::Stopped)?;
        Ok(local.restore_etcd().await?)
    }

    /// Returns a client with the administrator's rights.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// Returns the path of a kubeconfig file with the administrator's rights.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Returns a client configuration with the operator's rights, by impersonation.
    pub fn operator_config(&self) -> Config {
        let mut config = self.config.clone();
        config.auth_info.impersonate = Some(operator_user());
        config
    }

    /// Writes [`Self::operator_config`] to a kubeconfig file, for an operator in a process of its
    /// own.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write_operator_kubeconfig(&self) -> Result<PathBuf, ControlPlaneError> {
        let mut kubeconfig = Kubeconfig::read_from(&self.kubeconfig)?;
        for user in &mut kubeconfig.auth_infos {
            if let Some(user) = &mut user.auth_info {
                user.impersonate = Some(operator_user());
            }
        }
        let path = self.folder.join("operator.kubeconfig");
        let text = serde_yaml_ng::to_string(&kubeconfig)?;
        std::fs::write(&path, text).map_err(system_error(&path))?;
        Ok(path)
    }

    /// Returns the ids of the control plane's processes by program name.
    pub async fn processes_named(&self, program: &str) -> Vec<i32> {
        let local = self.local.lock().await;
        let local = local.as_ref();
        local
            .map(|local| local.processes_named(program))
            .unwrap_or_default()
    }

    /// Reads the API server's log.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub async fn api_server_log(&self) -> Result<String, ControlPlaneError> {
        let log = tokio::fs::read_to_string(&self.log).await;
        log.map_err(system_error(&self.log))
    }

    /// Takes the control plane down.
    pub async fn stop(&self) {
        drop(self.local.lock().await.take());
    }
}

fn operator_user() -> String {
    format!("system:serviceaccount:{NAMESPACE}:{RELEASE}-operator")
}

fn system_error(what: &Path) -> impl FnOnce(io::Error) -> ControlPlaneError {
    let what = what.to_path_buf();
    move |source| ControlPlaneError::System { what, source }
}

/// Runs a command with this input, and returns its standard output.
async fn run_to_success(
    program: &Path,
    mut command: Command,
    input: Vec<u8>,
) -> Result<Vec<u8>, ControlPlaneError> {
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut child = command.spawn().map_err(system_error(program))?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin
            .write_all(&input)
            .await
            .map_err(system_error(program))?;
    }
    let failed = |stderr: String| ControlPlaneError::Program {
        program: program.to_path_buf(),
        stderr,
    };
    let output = timeout(PROGRAM_TIMEOUT, child.wait_with_output())
        .await
        .map_err(|_| failed(format!("no end within {PROGRAM_TIMEOUT:?}")))?
        .map_err(system_error(program))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(failed(String::from_utf8_lossy(&output.stderr).into_owned()))
}
