//! The API server that all cases share, with what the chart puts on it.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use bursar_e2e::chart::{NAMESPACE, RELEASE};
use bursar_e2e::cluster::{Extent, Local, Options};
use bursar_e2e::folders;
use bursar_e2e::kube::{self as supplies, Toolbox};
use bursar_e2e::progress::Progress;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use libtest_mimic::Failed;
use serde::Deserialize as _;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use tokio::sync::{Mutex, RwLock};

/// The cluster's name.
const CLUSTER: &str = "api";
/// Of the chart, what is no workload.
const WORKLOADS: [&str; 2] = ["Deployment", "DaemonSet"];

/// etcd, the API server and the controller manager, with the chart's types, rights and policies.
pub(crate) struct Server {
    local: Mutex<Option<Local>>,
    toolbox: Toolbox,
    kubeconfig: PathBuf,
    log: PathBuf,
    config: Config,
    client: Client,
    /// Cases share the server; who takes something from it has it alone.
    pub(crate) turns: RwLock<()>,
    pub(crate) progress: Progress,
}

impl Server {
    pub(crate) async fn start(progress: Progress) -> Result<Self, Failed> {
        let toolbox = supplies::build(&progress)?;
        let options = Options {
            name: CLUSTER.to_owned(),
            harness: PathBuf::from(env!("CARGO_BIN_EXE_bursar-e2e")),
            toolbox: toolbox.clone(),
            extent: Extent::ControlPlane,
        };
        let mut local = Local::up(options, &progress).await?;
        // The garbage collector learns of new types every 30 s, and when it starts.
        local.stop_controller_manager().await?;
        let kubeconfig = Kubeconfig::read_from(local.kubeconfig())?;
        let config =
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        let server = Self {
            kubeconfig: local.kubeconfig(),
            log: local.folder().log("kube-apiserver"),
            client: local.client(),
            local: Mutex::new(Some(local)),
            toolbox,
            config,
            turns: RwLock::new(()),
            progress,
        };
        let mut objects = vec![json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": NAMESPACE } })];
        objects.extend(server.chart(&[]).await?);
        server.apply(objects).await?;
        server.controller_manager(true).await?;
        server
            .progress
            .say("the chart's types, rights and policies are there");
        Ok(server)
    }

    /// Everything but workloads of the chart with these settings.
    pub(crate) async fn chart(&self, settings: &[&str]) -> Result<Vec<Value>, Failed> {
        let mut helm = Command::new(self.toolbox.program("helm"));
        helm.args(["template", RELEASE])
            .arg(folders::repository().join("charts/bursar"))
            .args(["--namespace", NAMESPACE, "--kube-version=1.36.0"])
            .args(settings);
        let rendered = succeed(helm, Vec::new()).await?;
        let documents = serde_yaml_ng::Deserializer::from_slice(&rendered);
        let objects: Result<Vec<Value>, _> = documents.map(Value::deserialize).collect();
        let is_workload = |object: &Value| {
            let kind = object["kind"].as_str();
            kind.is_none_or(|kind| WORKLOADS.contains(&kind))
        };
        let objects = objects?;
        Ok(objects
            .into_iter()
            .filter(|object| !is_workload(object))
            .collect())
    }

    /// Makes or changes these objects.
    pub(crate) async fn apply(&self, objects: Vec<Value>) -> Result<(), Failed> {
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": objects });
        let mut kubectl = Command::new(self.toolbox.program("kubectl"));
        kubectl
            .args([
                "apply",
                "--server-side",
                "--force-conflicts",
                "--filename=-",
            ])
            .env("KUBECONFIG", &self.kubeconfig);
        succeed(kubectl, serde_json::to_vec(&list)?).await.map(drop)
    }

    /// Starts or stops the controller manager.
    pub(crate) async fn controller_manager(&self, runs: bool) -> Result<(), Failed> {
        let mut local = self.local.lock().await;
        let local = local.as_mut().ok_or("it is down")?;
        if runs {
            return Ok(local.start_controller_manager().await?);
        }
        Ok(local.stop_controller_manager().await?)
    }

    /// A client with all rights.
    pub(crate) fn client(&self) -> Client {
        self.client.clone()
    }

    /// The way to the API server with the operator's rights, and no others.
    pub(crate) fn operators(&self) -> Config {
        let mut config = self.config.clone();
        let account = format!("system:serviceaccount:{NAMESPACE}:{RELEASE}-operator");
        config.auth_info.impersonate = Some(account);
        config
    }

    /// What the API server has logged so far.
    pub(crate) async fn log(&self) -> Result<String, Failed> {
        Ok(tokio::fs::read_to_string(&self.log).await?)
    }

    /// Takes it down.
    pub(crate) async fn stop(&self) {
        drop(self.local.lock().await.take());
    }
}

/// Runs a command on this input; what it printed.
async fn succeed(mut command: Command, input: Vec<u8>) -> Result<Vec<u8>, Failed> {
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut child = command.spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(&input).await?;
    }
    let bound = Duration::from_secs(60);
    let output = tokio::time::timeout(bound, child.wait_with_output()).await??;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("{command:?}: {said}").into())
}
