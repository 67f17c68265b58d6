//! Sets up the environment of tests: a cluster with GPUs and Bursar, ready for pods.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bursar_crds::GpuNode;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, ListParams, LogParams, ObjectList};

use crate::artifacts::Artifacts;
use crate::chart::{self, Chart, ChartError};
use crate::cluster::{
    Cluster, ClusterOptions, ClusterScope, KubeconfigError, LocalCluster, LocalError, WorkerNode,
};
use crate::images::Template;
use crate::pods::{GPU_MEMORY, PodError};
use crate::progress::Progress;
use crate::sim::{Layout, SimError, SimulatedGpus};
use crate::wait::{self, Poll, WaitError};

/// The timeout of the chart's start, for images that are local or pulled once.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(180);
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The simulated GPUs of an environment: their number, and the GiB of each.
pub const SIMULATED_GPUS: (u32, u32) = (2, 16);

/// The image of the CUDA program that pods run.
pub const PROBE: &str = "probe";

/// A cluster with Bursar on it.
pub struct Environment {
    /// The cluster.
    pub cluster: Cluster,
    /// The simulated GPUs, unless the environment uses real ones.
    pub simulated_gpus: Option<SimulatedGpus>,
    /// The image of the CUDA program that pods run.
    pub probe_image: String,
}

/// The error of an environment's set-up.
#[derive(Debug, thiserror::Error)]
pub enum EnvironmentError {
    /// The local cluster did not start.
    #[error(transparent)]
    Local(#[from] LocalError),
    /// The cluster is not on this machine.
    #[error("failed to add a node: the cluster is the user's")]
    NotLocal,
    /// The user's cluster cannot be used.
    #[error(transparent)]
    Kubeconfig(#[from] KubeconfigError),
    /// The simulated GPUs could not be set up.
    #[error(transparent)]
    Sim(#[from] SimError),
    /// The chart could not be installed.
    #[error(transparent)]
    Chart(#[from] ChartError),
    /// An operation on a pod failed.
    #[error(transparent)]
    Pod(#[from] PodError),
    /// The API server refused.
    #[error("API server: {0}")]
    Api(#[from] kube::Error),
    /// Bursar does not become ready.
    #[error("{source}\n{state}")]
    NotReady {
        /// The timeout of the wait.
        source: WaitError,
        /// The pods of Bursar, with the ends of their logs.
        state: String,
    },
}

/// Returns whether this machine has a loaded NVIDIA driver.
pub fn has_driver() -> bool {
    Path::new("/proc/driver/nvidia/version").exists() && Path::new("/dev/nvidiactl").exists()
}

impl Environment {
    /// Starts a cluster called `name` with the real GPUs of this machine, or simulated ones, and
    /// installs Bursar.
    ///
    /// # Errors
    /// When a step fails or times out; the cluster is taken down again.
    pub async fn start(
        artifacts: &Artifacts,
        name: &str,
        progress: &Progress,
    ) -> Result<Self, EnvironmentError> {
        let environment = Self::without_bursar(artifacts, name, progress).await?;
        environment.install_bursar(artifacts, progress).await?;
        Ok(environment)
    }

    /// Installs Bursar on a cluster of [`Self::without_bursar`], and waits until it is ready.
    ///
    /// # Errors
    /// When helm fails, or Bursar does not become ready in time.
    pub async fn install_bursar(
        &self,
        artifacts: &Artifacts,
        progress: &Progress,
    ) -> Result<(), EnvironmentError> {
        self.install(&artifacts.chart, &artifacts.image_template, progress)
            .await?;
        self.wait_until_ready(progress).await
    }

    /// Starts a cluster as [`Self::start`] does, with GPUs and images but without Bursar.
    ///
    /// # Errors
    /// When a step fails or times out; the cluster is taken down again.
    pub async fn without_bursar(
        artifacts: &Artifacts,
        name: &str,
        progress: &Progress,
    ) -> Result<Self, EnvironmentError> {
        let options = ClusterOptions {
            name: name.to_owned(),
            harness: artifacts.harness.clone(),
            toolbox: artifacts.toolbox.clone(),
            scope: ClusterScope::WithNode,
        };
        let local = LocalCluster::up(options, progress).await?;
        for archive in artifacts.images.values() {
            local.import_image(&archive.path).await?;
        }
        let probe = artifacts.image_template.reference(PROBE);
        let of_quick_start = Template::of_quick_start().reference(PROBE);
        local.tag_image(&probe, &of_quick_start).await?;
        progress.report(format_args!(
            "{} images are imported",
            artifacts.images.len()
        ));
        let gpus = if has_driver() {
            None
        } else {
            let (count, gib) = SIMULATED_GPUS;
            let layout = Layout {
                node: 1,
                count,
                gib,
                mig_gib: None,
            };
            let gpus = SimulatedGpus::set_up(
                artifacts.simulated_driver.clone(),
                &local.host_path("/"),
                &local.folder().configs(),
                layout,
            )?;
            progress.report(format_args!(
                "{count} simulated GPUs of {gib} GiB are laid out"
            ));
            Some(gpus)
        };
        Ok(Self {
            cluster: Cluster::Local(Box::new(local)),
            simulated_gpus: gpus,
            probe_image: probe,
        })
    }

    /// Adds a node with simulated GPUs and the images to a local cluster.
    ///
    /// # Errors
    /// When a step fails or times out; the node is taken down again.
    pub async fn add_node(
        &self,
        artifacts: &Artifacts,
        layout: Layout,
        progress: &Progress,
    ) -> Result<WorkerNode, EnvironmentError> {
        let Cluster::Local(local) = &self.cluster else {
            return Err(EnvironmentError::NotLocal);
        };
        let node = WorkerNode::join(local, &artifacts.harness, layout.node, progress).await?;
        for archive in artifacts.images.values() {
            node.import_image(&archive.path).await?;
        }
        SimulatedGpus::set_up(
            artifacts.simulated_driver.clone(),
            &node.host_path("/"),
            &node.folder().configs(),
            layout,
        )?;
        Ok(node)
    }

    /// Uses the cluster of `kubeconfig`, whose nodes can pull `images`, and installs Bursar unless
    /// it is present.
    ///
    /// # Errors
    /// As [`Self::start`], but the cluster stays.
    pub async fn attach(
        kubeconfig: PathBuf,
        chart: &Chart,
        images: &Template,
        progress: &Progress,
    ) -> Result<Self, EnvironmentError> {
        let environment = Self {
            cluster: Cluster::external(kubeconfig).await?,
            simulated_gpus: None,
            probe_image: images.reference(PROBE),
        };
        if environment.agent_daemon_sets().await?.items.is_empty() {
            environment.install(chart, images, progress).await?;
        } else {
            progress.report(format_args!("Bursar is in {} already", chart::NAMESPACE));
        }
        environment.wait_until_ready(progress).await?;
        Ok(environment)
    }

    async fn install(
        &self,
        chart: &Chart,
        images: &Template,
        progress: &Progress,
    ) -> Result<(), EnvironmentError> {
        let kubeconfig = self.cluster.kubeconfig();
        chart
            .install(&kubeconfig, images, self.simulated_gpus.is_some())
            .await?;
        progress.report("the chart is installed");
        Ok(())
    }

    async fn wait_until_ready(&self, progress: &Progress) -> Result<(), EnvironmentError> {
        let total = self
            .wait_for_allocatable(|quanta| quanta > 0, STARTUP_TIMEOUT)
            .await?;
        progress.report(format_args!("nodes offer {total} x {GPU_MEMORY}"));
        let ready = async || match self.agent_daemon_sets().await {
            Ok(list) if list.items.iter().all(is_fully_ready) => Poll::Ready(()),
            Ok(_) => Poll::Pending("an agent is not ready".to_owned()),
            Err(error) => Poll::Pending(error.to_string()),
        };
        let ready = wait::poll_until(
            "the agents to be ready",
            STARTUP_TIMEOUT,
            POLL_INTERVAL,
            ready,
        )
        .await;
        self.with_pod_report(ready).await?;
        let operators: Api<Deployment> = Api::namespaced(self.cluster.client(), chart::NAMESPACE);
        let operator = ListParams::default().labels("app.kubernetes.io/component=operator");
        let ready = async || match operators.list(&operator).await {
            Ok(list) if list.items.iter().any(has_ready_replica) => Poll::Ready(()),
            Ok(_) => Poll::Pending("it has no ready replica".to_owned()),
            Err(error) => Poll::Pending(error.to_string()),
        };
        let ready = wait::poll_until(
            "the operator to be ready",
            STARTUP_TIMEOUT,
            POLL_INTERVAL,
            ready,
        )
        .await;
        self.with_pod_report(ready).await
    }

    async fn agent_daemon_sets(&self) -> Result<ObjectList<DaemonSet>, kube::Error> {
        let sets: Api<DaemonSet> = Api::namespaced(self.cluster.client(), chart::NAMESPACE);
        sets.list(&ListParams::default().labels("app.kubernetes.io/component=agent"))
            .await
    }

    /// Adds the report of Bursar's pods to an error.
    async fn with_pod_report<T>(
        &self,
        waited: Result<T, WaitError>,
    ) -> Result<T, EnvironmentError> {
        match waited {
            Ok(value) => Ok(value),
            Err(source) => Err(EnvironmentError::NotReady {
                source,
                state: self.pod_report().await,
            }),
        }
    }

    /// Waits until the GPU memory allocatable on all nodes, in quanta, satisfies `wanted`.
    ///
    /// # Errors
    /// After `bound`, with the report of Bursar's pods.
    pub async fn wait_for_allocatable(
        &self,
        wanted: impl Fn(i64) -> bool,
        bound: Duration,
    ) -> Result<i64, EnvironmentError> {
        let nodes: Api<Node> = Api::all(self.cluster.client());
        let poll = async || match nodes.list(&ListParams::default()).await {
            Ok(list) => {
                let total = list.items.iter().map(allocatable).sum();
                if wanted(total) {
                    Poll::Ready(total)
                } else {
                    Poll::Pending(format!("they offer {total}"))
                }
            }
            Err(error) => Poll::Pending(error.to_string()),
        };
        let what = "the nodes to offer GPU memory as wanted";
        let waited = wait::poll_until(what, bound, POLL_INTERVAL, poll).await;
        self.with_pod_report(waited).await
    }

    /// Describes Bursar's own pods with the ends of their logs, for an error message.
    pub async fn pod_report(&self) -> String {
        let pods: Api<Pod> = Api::namespaced(self.cluster.client(), chart::NAMESPACE);
        let mut text = String::new();
        let list = pods
            .list(&ListParams::default())
            .await
            .map(|list| list.items)
            .unwrap_or_default();
        for pod in list {
            let name = pod.metadata.name.clone().unwrap_or_default();
            let state = crate::pods::PodState::of(&pod);
            let params = LogParams {
                tail_lines: Some(12),
                ..LogParams::default()
            };
            let log = pods.logs(&name, &params).await.unwrap_or_default();
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "--- {name}: {} {}\n{log}",
                state.phase, state.waiting_reason
            );
        }
        text
    }

    /// Returns the sizes of the healthy GPUs in quanta, the largest first. Simulated GPUs have the
    /// sizes of their set-up, real ones the sizes that agents report.
    ///
    /// # Errors
    /// When the API server refuses.
    pub async fn gpu_sizes_in_quanta(&self) -> Result<Vec<u32>, EnvironmentError> {
        if let Some((count, gib)) = self.simulated_gpus.as_ref().map(|_| SIMULATED_GPUS) {
            return Ok(vec![gib; count as usize]);
        }
        let nodes: Api<GpuNode> = Api::all(self.cluster.client());
        let list = nodes.list(&ListParams::default()).await?;
        let gpus = list
            .items
            .iter()
            .flat_map(|node| node.status.iter().flat_map(|status| &status.gpus));
        let mut sizes: Vec<u32> = gpus
            .filter_map(|gpu| u32::try_from(gpu.capacity).ok())
            .filter(|gib| *gib > 0)
            .collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        Ok(sizes)
    }

    /// Returns each node's allocatable GPU memory, in quanta.
    ///
    /// # Errors
    /// When the API server refuses.
    pub async fn allocatable_by_node(&self) -> Result<BTreeMap<String, i64>, kube::Error> {
        let nodes: Api<Node> = Api::all(self.cluster.client());
        let list = nodes.list(&ListParams::default()).await?;
        let entry = |node: &Node| {
            (
                node.metadata.name.clone().unwrap_or_default(),
                allocatable(node),
            )
        };
        Ok(list.items.iter().map(entry).collect())
    }
}

fn has_ready_replica(deployment: &Deployment) -> bool {
    let status = deployment.status.as_ref();
    status.is_some_and(|status| status.ready_replicas.unwrap_or(0) > 0)
}

/// Returns whether every node of the DaemonSet has a ready agent.
fn is_fully_ready(agents: &DaemonSet) -> bool {
    let status = agents.status.as_ref();
    status.is_some_and(|status| {
        status.desired_number_scheduled > 0
            && status.number_ready == status.desired_number_scheduled
    })
}

fn allocatable(node: &Node) -> i64 {
    let amounts = node
        .status
        .as_ref()
        .and_then(|status| status.allocatable.as_ref());
    amounts
        .and_then(|amounts| amounts.get(GPU_MEMORY))
        .and_then(|quantity| quantity.0.parse().ok())
        .unwrap_or(0)
}
