//! Checks that running pods and their memory outlive an upgrade, its rollback, an uninstall and a
//! new installation. Each step changes only what the guide says.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bursar_crds::{GpuMemoryBudget, GpuNode};
use bursar_e2e::artifacts::Artifacts;
use bursar_e2e::chart::{NAMESPACE, RELEASE};
use bursar_e2e::cluster::LocalCluster;
use bursar_e2e::environment::Environment;
use bursar_e2e::paths;
use bursar_e2e::pods::{PodBuilder, Pods};
use bursar_e2e::progress::Progress;
use bursar_e2e::wait::{self, Poll};
use bursar_e2e::workspace::Profile;
use kube::Client;
use kube::api::{Api, ListParams, PostParams};
use libtest_mimic::Failed;
use serde_json::{Value, json};

use crate::cluster_state::{ClusterState, call};
use crate::pod_history::PodHistory;
use crate::quota::event_line;
use crate::shared_cluster::{NAMESPACE as TRIALS, PROBE_PATH};

const GIB: u64 = 1 << 30;
/// The timeout of each step, on a loaded machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(240);
const PAUSE: Duration = Duration::from_millis(500);
/// A cluster is settled if two reads with this pause between them are equal.
const SETTLED: Duration = Duration::from_secs(3);
/// A pod that holds half of its 4 GiB.
pub(crate) const HOLDER: &str = "holder";
/// A pod that holds 1 GiB of its 4 GiB, and has retained memory mapped.
pub(crate) const KEEPER: &str = "keeper";

/// The cluster with two pods, and the programs that act on it.
pub(crate) struct Fixture<'a> {
    pub(crate) local: &'a LocalCluster,
    pub(crate) kubectl: PathBuf,
    helm: PathBuf,
    pub(crate) kubeconfig: PathBuf,
    pub(crate) history: PodHistory,
    pub(crate) progress: &'a Progress,
}

pub(crate) async fn keeps_pods(progress: &Progress) -> Result<(), Failed> {
    let artifacts = Artifacts::from_workspace(Profile::Dev, crate::harness(), progress)?;
    let environment = Environment::without_bursar(&artifacts, "upgrade", progress).await?;
    let client = environment.cluster.client();
    let pods = Pods::in_namespace(&client, TRIALS).await?;
    let fixture = Fixture::of(&environment, &artifacts, &pods, progress)?;
    let before = fixture.settled_state().await?;
    environment.install_bursar(&artifacts, progress).await?;
    create_budget(&client, "12Gi").await?;
    fixture
        .start(&pods, HOLDER, &environment.probe_image)
        .await?;
    fixture
        .start(&pods, KEEPER, &environment.probe_image)
        .await?;
    let retained = fixture.retained_lease(KEEPER).await?;
    assert_eq!(retained["found"], true, "{retained}");
    let installed = fixture.settled_state().await?;
    let helm_values = fixture
        .helm(&["get", "values", RELEASE, "--output=yaml"])
        .await?;
    let folder = tempfile::tempdir()?;
    let values = folder.path().join("values.yaml");
    fs::write(&values, helm_values)?;
    let values = format!("--values={}", values.display());

    let newer = newer_chart(folder.path())?;
    let upgrade = ["upgrade", RELEASE, &newer, "--reset-then-reuse-values"];
    fixture.helm(&upgrade).await?;
    fixture.wait_for_rollouts("upgrade").await?;
    fixture
        .expect_state("upgrade", &installed, is_replaced_by_an_upgrade)
        .await?;
    fixture.check_pods().await?;
    assert_eq!(
        fixture.retained_lease(KEEPER).await?,
        retained,
        "after the upgrade"
    );

    fixture.helm(&["rollback", RELEASE]).await?;
    fixture.wait_for_rollouts("rollback").await?;
    fixture
        .expect_state("rollback", &installed, is_replaced_by_an_upgrade)
        .await?;
    fixture.check_pods().await?;
    assert_eq!(
        fixture.retained_lease(KEEPER).await?,
        retained,
        "after the rollback"
    );

    fixture.check_pods_are_notified().await?;
    fixture.helm(&["uninstall", RELEASE]).await?;
    fixture
        .expect_state("uninstall", &before, stays_after_an_uninstall)
        .await?;
    fixture.history.check_none_failed_or_restarted().await?;

    let chart = paths::repository().join("charts/bursar");
    let chart = chart.display().to_string();
    fixture.helm(&["install", RELEASE, &chart, &values]).await?;
    fixture.wait_for_rollouts("new installation").await?;
    let nodes: Api<GpuNode> = Api::all(client);
    let taken_back = async || match nodes.list(&ListParams::default()).await {
        Ok(list) => match bound_pods(&list.items) {
            2 => Poll::Ready(()),
            number => Poll::Pending(format!("GpuNodes name {number} pods")),
        },
        Err(error) => Poll::Pending(error.to_string()),
    };
    wait::poll_until("both pods in GpuNodes", TIMEOUT, PAUSE, taken_back).await?;
    fixture
        .expect_state("new installation", &installed, is_replaced_by_an_upgrade)
        .await?;
    fixture.check_pods().await?;
    // The fd store's pod is gone, and the retained memory with it.
    let renewed = fixture.retained_lease(KEEPER).await?;
    assert_eq!(renewed["found"], false, "after the new installation");
    drop(fixture);
    drop(environment);
    Ok(())
}

/// Creates a budget for all pods of a trial.
pub(crate) async fn create_budget(client: &Client, guaranteed: &str) -> Result<(), Failed> {
    let budgets: Api<GpuMemoryBudget> = Api::namespaced(client.clone(), TRIALS);
    let budget = serde_json::from_value(json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget",
        "metadata": {"name": "default"}, "spec": {"deviceMemory": {"guaranteed": guaranteed}},
    }))?;
    budgets.create(&PostParams::default(), &budget).await?;
    Ok(())
}

impl<'a> Fixture<'a> {
    pub(crate) fn of(
        environment: &'a Environment,
        artifacts: &Artifacts,
        pods: &Pods,
        progress: &'a Progress,
    ) -> Result<Self, Failed> {
        let none = "this needs a cluster of our own";
        Ok(Self {
            local: environment.cluster.local().ok_or(none)?,
            kubectl: artifacts.toolbox.program("kubectl"),
            helm: artifacts.toolbox.program("helm"),
            kubeconfig: environment.cluster.kubeconfig(),
            history: PodHistory::of(pods),
            progress,
        })
    }
}

impl Fixture<'_> {
    /// Starts a pod of 4 GiB: [`HOLDER`], which holds half of it, or one that retains memory.
    pub(crate) async fn start(&self, pods: &Pods, name: &str, probe: &str) -> Result<(), Failed> {
        let (arguments, event): (&[&str], _) = if name == HOLDER {
            (&["hold", "--bytes=2Gi"], "holding")
        } else {
            self.wait_for_scrub_checks().await?;
            (
                &[
                    "fault",
                    "--times=0",
                    "--file=/count/faults",
                    "--retain=64Mi",
                ],
                "steady",
            )
        };
        let plan = PodBuilder::new(name, probe)
            .arguments(arguments)
            .with_empty_dir("/count")
            .gib(4);
        pods.create(&plan).await?;
        pods.wait_for_log_line(name, TIMEOUT, event_line(event))
            .await?;
        Ok(())
    }

    /// Runs helm on Bursar's namespace.
    pub(crate) async fn helm(&self, arguments: &[&str]) -> Result<String, Failed> {
        let arguments = [arguments, &["--namespace", NAMESPACE]].concat();
        call(&self.helm, &arguments, &self.kubeconfig).await
    }

    /// Runs the probe in a pod's container, and returns the line of an event.
    async fn probe(&self, pod: &str, event: &str, arguments: &[&str]) -> Result<Value, Failed> {
        let exec = ["exec", pod, "--namespace", TRIALS, "--", PROBE_PATH];
        let exec = [&exec[..], arguments].concat();
        let output = call(&self.kubectl, &exec, &self.kubeconfig).await?;
        let line = output.lines().find_map(event_line(event));
        Ok(line.ok_or_else(|| format!("no {event} in {output}"))?)
    }

    /// Waits until the agent retains memory: it has seen the driver clear freed memory.
    async fn wait_for_scrub_checks(&self) -> Result<(), Failed> {
        let condition = ["--for=condition=MemoryScrubbed", "--timeout=240s"];
        let wait = [&["wait", "gpunodes", "--all"], &condition[..]].concat();
        call(&self.kubectl, &wait, &self.kubeconfig).await?;
        Ok(())
    }

    /// Opens a keeper's retained memory, or creates it.
    pub(crate) async fn retained_lease(&self, pod: &str) -> Result<Value, Failed> {
        let retain = ["retain", "--bytes=64Mi"];
        let line = self.probe(pod, "retained", &retain).await?;
        Ok(line["retained"].clone())
    }

    /// Waits until agent and operator are those of the current revision.
    pub(crate) async fn wait_for_rollouts(&self, step: &str) -> Result<(), Failed> {
        let begin = Instant::now();
        for workload in ["daemonset/bursar-agent", "deployment/bursar-operator"] {
            let rollout = ["rollout", "status", workload, "--namespace", NAMESPACE];
            call(&self.kubectl, &rollout, &self.kubeconfig).await?;
        }
        let took = begin.elapsed();
        self.progress
            .report(format_args!("{took:.1?} for the roll-out of the {step}"));
        Ok(())
    }

    /// Checks that no pod was Failed or restarted, and that a greedy program gets at most what the
    /// holder leaves of its quota.
    pub(crate) async fn check_pods(&self) -> Result<(), Failed> {
        self.history.check_none_failed_or_restarted().await?;
        let greedy = ["greedy", "--chunk=64Mi", "--then=exit"];
        let refused = self.probe(HOLDER, "refused", &greedy).await?;
        assert_eq!(
            refused["refused"]["name"], "CUDA_ERROR_OUT_OF_MEMORY",
            "{refused}"
        );
        let got = refused["got"].as_u64().unwrap_or(u64::MAX);
        assert!(got <= 2 * GIB, "more than the quota: {refused}");
        Ok(())
    }

    /// Checks that the plugin's command tells both pods about the uninstall.
    async fn check_pods_are_notified(&self) -> Result<(), Failed> {
        let plugin = crate::harness().with_file_name("kubectl-bursar");
        let output = call(&plugin, &["uninstall", "--notify"], &self.kubeconfig).await?;
        assert!(
            output.starts_with("2 pods with GPU memory told"),
            "{output}"
        );
        for pod in [HOLDER, KEEPER] {
            let describe = ["describe", "pod", pod, "--namespace", TRIALS];
            let described = call(&self.kubectl, &describe, &self.kubeconfig).await?;
            assert!(described.contains("GpuMemoryUninstall"), "{described}");
        }
        Ok(())
    }

    async fn settled_state(&self) -> Result<ClusterState, Failed> {
        let begin = Instant::now();
        let mut state = ClusterState::read(self.local, &self.kubectl).await?;
        loop {
            tokio::time::sleep(SETTLED).await;
            let again = ClusterState::read(self.local, &self.kubectl).await?;
            let changes = again.differences_since(&state);
            if changes.is_empty() {
                return Ok(again);
            }
            assert!(begin.elapsed() < TIMEOUT, "still changes: {changes:#?}");
            state = again;
        }
    }

    /// Waits until cluster and node differ from another state only as explained.
    async fn expect_state(
        &self,
        step: &str,
        from: &ClusterState,
        explained: impl Fn(&str) -> bool,
    ) -> Result<(), Failed> {
        let compared = async || match ClusterState::read(self.local, &self.kubectl).await {
            Ok(now) => {
                let all = now.differences_since(from);
                let left: Vec<&String> = all.iter().filter(|line| !explained(line)).collect();
                match left.is_empty() {
                    true => Poll::Ready(all.len()),
                    false => Poll::Pending(format!("{left:#?}")),
                }
            }
            Err(error) => Poll::Pending(format!("{error:?}")),
        };
        let what = format!("explained differences after the {step}");
        let number = wait::poll_until(&what, TIMEOUT, PAUSE, compared).await?;
        self.progress.report(format_args!(
            "after the {step} the cluster has {number} differences, each explained"
        ));
        Ok(())
    }
}

/// Copies the chart with another version and another value, so that each of its objects changes.
fn newer_chart(folder: &Path) -> Result<String, Failed> {
    let chart = folder.join("newer");
    let copied = std::process::Command::new("cp")
        .arg("-r")
        .arg(paths::repository().join("charts/bursar"))
        .arg(&chart)
        .status()?;
    assert!(copied.success(), "the chart was not copied");
    let metadata = chart.join("Chart.yaml");
    let version = format!("\nversion: {}\n", env!("CARGO_PKG_VERSION"));
    let text = fs::read_to_string(&metadata)?;
    assert!(text.contains(&version), "{text}");
    fs::write(&metadata, text.replacen(&version, "\nversion: 9.9.9\n", 1))?;
    Ok(chart.display().to_string())
}

/// Returns whether a replaced pod of Bursar explains the difference, or the release's history. The
/// socket of a plugin has the number of its process: of the agent's, and of the relay's.
fn is_replaced_by_an_upgrade(difference: &str) -> bool {
    let (_, line) = difference.split_at(2);
    let kinds = ["Pod", "ReplicaSet", "ControllerRevision"];
    let replaced = kinds
        .iter()
        .any(|kind| line.starts_with(&format!("{kind} {NAMESPACE} {RELEASE}-")));
    replaced
        || line.starts_with(&format!("Secret {NAMESPACE} sh.helm.release.v1."))
        || ["/var/lib/kubelet/device-plugins", "/run/bursar/relay"]
            .iter()
            .any(|folder| line.starts_with(&format!("{folder}/bursar-gpu-")))
}

/// Returns whether the guide names the difference as what stays after `helm uninstall` alone.
fn stays_after_an_uninstall(difference: &str) -> bool {
    let Some(line) = difference.strip_prefix("+ ") else {
        return false;
    };
    let objects = [
        "CustomResourceDefinition <none> gpumemorybudgets.bursar.dev",
        "CustomResourceDefinition <none> gpunamespaces.bursar.dev",
        "CustomResourceDefinition <none> gpunodes.bursar.dev",
        // The API server has an APIService for each group of CRDs.
        "APIService <none> v1alpha1.bursar.dev",
        "GpuMemoryBudget trials default",
        "GpuNamespace <none> ",
        "GpuNode <none> ",
        "ResourceQuota trials gpu-memory-budget-",
        // The trial's own pods, and the namespace that `helm uninstall` never deletes.
        "Pod trials ",
        "Namespace <none> bursar-system",
        "ConfigMap bursar-system kube-root-ca.crt",
        "ServiceAccount bursar-system default",
        "bursar-system/metadata/labels kubernetes.io/metadata.name=",
        "bursar-system/metadata/labels name=",
    ];
    let folders = ["/run/bursar/", "/run/cdi/bursar.dev-", "/var/lib/bursar/"];
    let of_kubernetes = line.starts_with("Lease kube-node-lease ")
        || line.starts_with("ServiceAccount kube-system ")
        || line.ends_with("device-plugins/kubelet_internal_checkpoint");
    of_kubernetes
        || objects
            .iter()
            .chain(&folders)
            .any(|start| line.starts_with(start))
        || line.contains("/metadata/labels bursar.dev/")
        || line.contains("/status/capacity bursar.dev/")
        || line.contains("/status/allocatable bursar.dev/") && line.ends_with("=0")
}

fn bound_pods(nodes: &[GpuNode]) -> usize {
    let gpus = nodes.iter().flat_map(|node| &node.status);
    gpus.flat_map(|status| &status.gpus)
        .map(|gpu| gpu.pods.len())
        .sum()
}
