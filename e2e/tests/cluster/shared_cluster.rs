//! Shares a cluster between trials. The first of them starts it, and `main` takes it down.
//!
//! The harness catches panics of trials, so that `main` always reaches its end. If this process is
//! killed, its connection closes and the node process takes the cluster down.

use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use bursar_e2e::artifacts::Artifacts;
use bursar_e2e::chart::{self, Chart};
use bursar_e2e::cluster::{LocalCluster, WorkerNode};
use bursar_e2e::environment::{Environment, SIMULATED_GPUS};
use bursar_e2e::kube::{self, Toolbox};
use bursar_e2e::paths;
use bursar_e2e::pods::Pods;
use bursar_e2e::progress::Progress;
use bursar_e2e::sim::Layout;
use bursar_e2e::workspace::Profile;
use futures::FutureExt;
use futures::future::try_join_all;
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use tokio::runtime::Runtime;

use crate::on_node::NodeFiles;
use crate::pod_history::PodHistory;
use crate::scripted_program::ScriptedProgram;
use crate::{maintenance, operator, waiters};

/// The name of the cluster with one node.
const CLUSTER: &str = "checks";
/// The name of the cluster with three nodes.
const NODES_CLUSTER: &str = "nodes";
/// The namespace of the trials' pods.
pub(crate) const NAMESPACE: &str = "trials";
/// The probe's path in its image.
pub(crate) const PROBE_PATH: &str = "/usr/local/bin/bursar-probe";
/// The timeout of a trial. Its waits have shorter timeouts, and the longest trial takes 5 minutes
/// on two cores.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(1800);
/// A pod with room starts within this time on a loaded machine.
pub(crate) const START_TIMEOUT: Duration = Duration::from_secs(180);
/// The agent collects a booking without a container after two checks, 30 s apart, once the booking
/// is 60 s old. Other bookings are released when the pod's cgroup is removed.
pub(crate) const RECLAIM_TIMEOUT: Duration = Duration::from_secs(150);

/// The GPUs of the second and the third node. The last GPU of the third one has MIG instances.
pub(crate) const MORE_NODES: [Layout; 2] = [layout(2, None), layout(3, Some(7))];

const fn layout(node: u8, mig_gib: Option<u32>) -> Layout {
    let (count, gib) = SIMULATED_GPUS;
    Layout {
        node,
        count,
        gib,
        mig_gib,
    }
}

/// The environment and the pods of one trial.
pub(crate) struct TrialContext {
    /// The nodes besides the first one.
    pub(crate) workers: Vec<WorkerNode>,
    /// The cluster with Bursar.
    pub(crate) environment: Environment,
    /// kubectl and helm.
    toolbox: Toolbox,
    /// The trial's pods, none at its start.
    pub(crate) pods: Pods,
    /// The history of the pods since the trial's start.
    pub(crate) history: PodHistory,
    /// Prints measurements.
    pub(crate) progress: Progress,
}

enum SharedCluster {
    /// No trial has started the cluster.
    NotStarted,
    Up(Box<(Runtime, TrialContext)>),
    /// The start failed with this cause.
    Broken(String),
}

/// The cluster of most trials, with one node.
static ONE_NODE: Mutex<SharedCluster> = Mutex::new(SharedCluster::NotStarted);
/// The cluster of the trials of several nodes.
static THREE_NODES: Mutex<SharedCluster> = Mutex::new(SharedCluster::NotStarted);

/// Makes a trial on the cluster of one node, or on the user's.
pub(crate) fn trial(
    name: &'static str,
    act: impl AsyncFnOnce(&mut TrialContext) -> Result<(), Failed> + Send + 'static,
) -> Trial {
    trial_on(&ONE_NODE, start, name, act)
}

/// Makes a trial on the cluster of three nodes. The cluster of one node is taken down before.
pub(crate) fn nodes_trial(
    name: &'static str,
    act: impl AsyncFnOnce(&mut TrialContext) -> Result<(), Failed> + Send + 'static,
) -> Trial {
    let start = || {
        end(&ONE_NODE);
        start_three_nodes()
    };
    trial_on(&THREE_NODES, start, name, act).with_ignored_flag(kubeconfig().is_some())
}

fn trial_on(
    cluster: &'static Mutex<SharedCluster>,
    start: impl FnOnce() -> Result<SharedCluster, Failed> + Send + 'static,
    name: &'static str,
    act: impl AsyncFnOnce(&mut TrialContext) -> Result<(), Failed> + Send + 'static,
) -> Trial {
    Trial::test(name, move || {
        let mut state = cluster.lock().unwrap_or_else(PoisonError::into_inner);
        if let SharedCluster::NotStarted = *state {
            *state = start().unwrap_or_else(|failed| {
                SharedCluster::Broken(failed.message().unwrap_or("no reason").to_owned())
            });
        }
        match &mut *state {
            SharedCluster::Up(up) => {
                let (runtime, context) = &mut **up;
                runtime.block_on(context.run(name, act))
            }
            SharedCluster::Broken(why) => Err(format!("no cluster to try it on: {why}").into()),
            SharedCluster::NotStarted => unreachable!("it was just started"),
        }
    })
}

/// Makes a trial as [`trial`] does, for access to the node's own files and processes.
pub(crate) fn node_trial(
    name: &'static str,
    act: impl AsyncFnOnce(&mut TrialContext) -> Result<(), Failed> + Send + 'static,
) -> Trial {
    trial(name, act).with_ignored_flag(kubeconfig().is_some())
}

/// Takes the clusters down that are up.
pub(crate) fn take_down() {
    end(&ONE_NODE);
    end(&THREE_NODES);
}

fn end(cluster: &Mutex<SharedCluster>) {
    let mut state = cluster.lock().unwrap_or_else(PoisonError::into_inner);
    *state = SharedCluster::NotStarted;
}

fn start() -> Result<SharedCluster, Failed> {
    let runtime = Runtime::new()?;
    let progress = Progress::start();
    let context = runtime.block_on(async {
        let (toolbox, environment) = match kubeconfig() {
            Some(kubeconfig) => join(kubeconfig, &progress).await?,
            None => {
                let artifacts =
                    Artifacts::from_workspace(Profile::Dev, crate::harness(), &progress)?;
                let environment = Environment::start(&artifacts, CLUSTER, &progress).await?;
                (artifacts.toolbox, environment)
            }
        };
        TrialContext::of(environment, Vec::new(), toolbox, &progress).await
    })?;
    Ok(SharedCluster::Up(Box::new((runtime, context))))
}

fn start_three_nodes() -> Result<SharedCluster, Failed> {
    let runtime = Runtime::new()?;
    let progress = Progress::start();
    let context = runtime.block_on(async {
        let artifacts = Artifacts::from_workspace(Profile::Dev, crate::harness(), &progress)?;
        let environment = Environment::without_bursar(&artifacts, NODES_CLUSTER, &progress).await?;
        let workers = MORE_NODES.map(|layout| environment.add_node(&artifacts, layout, &progress));
        let workers = try_join_all(workers).await?;
        environment.install_bursar(&artifacts, &progress).await?;
        let (count, gib) = SIMULATED_GPUS;
        let more = MORE_NODES.map(Layout::total_gib).iter().sum::<u32>();
        let all = i64::from(count * gib + more);
        let offered = environment.wait_for_allocatable(|quanta| quanta == all, 2 * START_TIMEOUT);
        offered.await?;
        TrialContext::of(environment, workers, artifacts.toolbox, &progress).await
    })?;
    Ok(SharedCluster::Up(Box::new((runtime, context))))
}

/// Uses the user's cluster with the images of `BURSAR_IMAGES`.
async fn join(kubeconfig: PathBuf, progress: &Progress) -> Result<(Toolbox, Environment), Failed> {
    let images = std::env::var("BURSAR_IMAGES")
        .map_err(|error| format!("BURSAR_IMAGES ({error}): where do its nodes find our images?"))?;
    let toolbox = kube::build(progress)?;
    let chart = Chart::of_repository(toolbox.program("helm"));
    let environment = Environment::attach(kubeconfig, &chart, &images.parse()?, progress).await?;
    Ok((toolbox, environment))
}

/// Returns the user's kubeconfig file, if trials run on that cluster.
pub(crate) fn kubeconfig() -> Option<PathBuf> {
    let path = std::env::var_os("KUBECONFIG").filter(|path| !path.is_empty());
    path.map(PathBuf::from)
}

impl TrialContext {
    async fn of(
        environment: Environment,
        workers: Vec<WorkerNode>,
        toolbox: Toolbox,
        progress: &Progress,
    ) -> Result<Self, Failed> {
        let client = environment.cluster.client();
        let pods = Pods::in_namespace(&client, NAMESPACE).await?;
        let history = PodHistory::of(&pods);
        Ok(Self {
            workers,
            environment,
            toolbox,
            pods,
            history,
            progress: progress.clone(),
        })
    }

    async fn run(
        &mut self,
        name: &str,
        act: impl AsyncFnOnce(&mut Self) -> Result<(), Failed>,
    ) -> Result<(), Failed> {
        let begin = Instant::now();
        self.history = PodHistory::of(&self.pods);
        let acted = AssertUnwindSafe(tokio::time::timeout(TRIAL_TIMEOUT, act(self))).catch_unwind();
        let outcome = match acted.await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) => Err(format!("it took longer than {TRIAL_TIMEOUT:?}").into()),
            Err(panic) => Err(panic_message(&*panic).into()),
        };
        let outcome = match outcome {
            Ok(()) => Ok(()),
            Err(failed) => {
                let failed = self.with_pod_history(&failed).await;
                self.reset().await;
                Err(failed)
            }
        };
        let cleared = self.clear().await;
        self.progress
            .report(format_args!("{:.1?} for {name}", begin.elapsed()));
        outcome.and(cleared)
    }

    /// Deletes the trial's pods, and waits until no node has state of them.
    pub(crate) async fn clear(&mut self) -> Result<(), Failed> {
        self.pods.delete_all().await?;
        if self.environment.cluster.local().is_some() {
            self.node_files()?
                .wait_until_no_pod_state(RECLAIM_TIMEOUT)
                .await?;
        }
        for worker in &self.workers {
            let files = NodeFiles::at(worker.host_path("/"));
            files.wait_until_no_pod_state(RECLAIM_TIMEOUT).await?;
        }
        Ok(())
    }

    /// Removes what a failed trial leaves besides its pods, so that the next trial can hold.
    async fn reset(&self) {
        let client = self.environment.cluster.client();
        let mut outcomes = vec![
            operator::scale(&client, 1).await,
            waiters::remove_workloads(self).await,
            waiters::remove_elsewhere(self).await,
            self.set_steering_mode("preferred").await,
        ];
        // A user's nodes may have the labels of a real GPU operator.
        if self.environment.cluster.local().is_some() {
            outcomes.push(maintenance::return_gpus(self).await);
        }
        for failed in outcomes.into_iter().filter_map(Result::err) {
            let why = failed.message().unwrap_or("no reason");
            self.progress
                .report(format_args!("failed to reset the cluster: {why}"));
        }
    }

    async fn with_pod_history(&self, failed: &Failed) -> Failed {
        let why = failed.message().unwrap_or("no reason");
        let summary = self.history.summary();
        let bursar = self.environment.pod_report().await;
        format!("{why}\n--- pods of the trial:\n{summary}\n{bursar}").into()
    }

    /// Runs the probe with these arguments in the container of a probe's pod, and returns its
    /// output.
    ///
    /// # Errors
    /// When the probe fails.
    pub(crate) async fn exec(&self, pod: &str, arguments: &[&str]) -> Result<String, Failed> {
        let output = self.probe_command(pod, arguments).output();
        let output = tokio::time::timeout(START_TIMEOUT, output).await??;
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            return Ok(stdout);
        }
        let stderr = String::from_utf8_lossy(&output.stderr);
        Err(format!("{arguments:?} in {pod}: {stdout} {stderr}").into())
    }

    /// Starts a probe in the container of a probe's pod that executes orders.
    ///
    /// # Errors
    /// When kubectl cannot be started.
    pub(crate) fn scripted_program(&self, pod: &str) -> std::io::Result<ScriptedProgram> {
        ScriptedProgram::start(self.probe_command(pod, &["obey"]))
    }

    /// Returns the command that runs the probe in a pod's container.
    fn probe_command(&self, pod: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.toolbox.program("kubectl"));
        command
            .args([
                "exec",
                pod,
                "--stdin",
                "--namespace",
                NAMESPACE,
                "--",
                PROBE_PATH,
            ])
            .args(arguments)
            .env("KUBECONFIG", self.environment.cluster.kubeconfig())
            .stdin(Stdio::null())
            .kill_on_drop(true);
        command
    }

    /// Whether the cluster has policies that change pods (`MutatingAdmissionPolicy` as v1).
    ///
    /// # Errors
    /// When the API server does not answer.
    pub(crate) async fn has_mutating_policies(&self) -> Result<bool, Failed> {
        let version = self
            .environment
            .cluster
            .client()
            .apiserver_version()
            .await?;
        let minor = version
            .minor
            .trim_end_matches(|digit: char| !digit.is_ascii_digit());
        Ok(minor.parse::<u32>()? >= 36)
    }

    /// Sets the mode of the chart's steering policy, where the cluster can have one.
    ///
    /// # Errors
    /// When helm or kubectl fails.
    pub(crate) async fn set_steering_mode(&self, mode: &str) -> Result<(), Failed> {
        if !self.has_mutating_policies().await? {
            return Ok(());
        }
        if mode == "off" {
            let policy = format!("{}-steering", chart::RELEASE);
            let kind = "mutatingadmissionpolicybindings";
            self.run_kubectl(&["delete", kind, &policy], Vec::new())
                .await?;
            return Ok(());
        }
        let mode = format!("--set=placement.steering={mode}");
        self.apply_template("steering.yaml", &[&mode]).await
    }

    /// Sets whether the chart's policy refuses pods of namespaces without a budget.
    ///
    /// # Errors
    /// When helm or kubectl fails.
    pub(crate) async fn set_require_budget(&self, required: bool) -> Result<(), Failed> {
        let required = format!("--set=policies.requireBudget={required}");
        let exempt = format!("--set=policies.exemptNamespaces={{{NAMESPACE}}}");
        self.apply_template("policy-pods.yaml", &[&required, &exempt])
            .await
    }

    /// Upgrades the release to have plugin relays or none, and waits until its parts are replaced.
    ///
    /// # Errors
    /// When helm fails.
    pub(crate) async fn set_relay(&self, enabled: bool) -> Result<(), Failed> {
        self.upgrade_release(&json!({ "relay": { "enabled": enabled } }))
            .await
    }

    /// Upgrades the release with these values besides its own, and waits until its parts are
    /// replaced.
    ///
    /// # Errors
    /// When helm fails.
    pub(crate) async fn upgrade_release(&self, values: &Value) -> Result<(), Failed> {
        let mut helm = Command::new(self.toolbox.program("helm"));
        helm.args(["upgrade", chart::RELEASE])
            .arg(paths::repository().join("charts/bursar"))
            .args(["--namespace", chart::NAMESPACE, "--reuse-values", "--wait"])
            .arg("--values=-")
            .env("KUBECONFIG", self.environment.cluster.kubeconfig());
        let values = values.to_string().into_bytes();
        run_to_success(helm, values).await.map(drop)
    }

    /// Applies the objects of one of the chart's templates with these settings.
    async fn apply_template(&self, template: &str, settings: &[&str]) -> Result<(), Failed> {
        let mut helm = Command::new(self.toolbox.program("helm"));
        helm.args(["template", chart::RELEASE])
            .arg(paths::repository().join("charts/bursar"))
            .args(["--namespace", chart::NAMESPACE, "--kube-version=1.36.0"])
            .arg(chart::ANY_REGISTRY)
            .arg(format!("--show-only=templates/{template}"))
            .args(settings);
        let objects = run_to_success(helm, Vec::new()).await?;
        let apply = [
            "apply",
            "--server-side",
            "--force-conflicts",
            // A later upgrade of the release would conflict with any other manager.
            "--field-manager=helm",
            "--filename=-",
        ];
        self.run_kubectl(&apply, objects).await.map(drop)
    }

    /// Runs kubectl with an administrator's rights, and returns its standard output.
    ///
    /// # Errors
    /// When kubectl fails, with its standard error.
    pub(crate) async fn run_kubectl(
        &self,
        arguments: &[&str],
        input: Vec<u8>,
    ) -> Result<Vec<u8>, Failed> {
        let mut kubectl = Command::new(self.toolbox.program("kubectl"));
        kubectl
            .args(arguments)
            .env("KUBECONFIG", self.environment.cluster.kubeconfig());
        run_to_success(kubectl, input).await
    }

    /// Returns kubectl and helm.
    pub(crate) const fn toolbox(&self) -> &Toolbox {
        &self.toolbox
    }

    /// Returns the local cluster.
    ///
    /// # Errors
    /// When the cluster is the user's, where the trial should have been ignored.
    pub(crate) fn local(&mut self) -> Result<&mut LocalCluster, Failed> {
        let none = "this needs a cluster of our own";
        Ok(self.environment.cluster.local_mut().ok_or(none)?)
    }

    /// Returns Bursar's files on the local cluster's node.
    ///
    /// # Errors
    /// As [`Self::local`].
    pub(crate) fn node_files(&mut self) -> Result<NodeFiles, Failed> {
        Ok(NodeFiles::of(self.local()?))
    }
}

/// Runs a command with this input, and returns its standard output.
async fn run_to_success(mut command: Command, input: Vec<u8>) -> Result<Vec<u8>, Failed> {
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut child = command.spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(&input).await?;
    }
    let output = tokio::time::timeout(START_TIMEOUT, child.wait_with_output()).await??;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    Err(format!("{command:?}: {stderr}").into())
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("panicked: {}", text.unwrap_or("no message"))
}
