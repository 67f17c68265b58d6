//! Measures facts of Kubernetes on which the design rests (`docs/internals/facts.md`), on clusters
//! of their own without Bursar.

mod device_ids;
mod fake_plugin;
mod nomination;
mod restart_times;
mod write_times;

use std::time::Duration;

use ::kube::api::Api;
use bursar_e2e::cluster::{ClusterOptions, ClusterScope, LocalCluster};
use bursar_e2e::images;
use bursar_e2e::kube;
use bursar_e2e::pods::Pods;
use bursar_e2e::progress::Progress;
use bursar_e2e::wait::{self, Poll};
use k8s_openapi::api::core::v1::Node;
use libtest_mimic::{Failed, Trial};
use tokio::runtime::Runtime;

use crate::shared_cluster::{self, START_TIMEOUT};

/// The name of the clusters.
const CLUSTER: &str = "facts";
const POLL_INTERVAL: Duration = Duration::from_millis(100);

pub(crate) fn trials() -> Vec<Trial> {
    let write_times = Trial::test("main/cluster/facts-write-times", || {
        shared_cluster::take_down();
        Runtime::new()?.block_on(write_times::larger_gpu_node_takes_longer())
    });
    vec![
        fact(
            "main/cluster/facts-device-ids",
            device_ids::kubelet_limits_and_times_lists,
        ),
        fact(
            "main/cluster/facts-restart-times",
            restart_times::kubelet_backs_off_by_default,
        ),
        fact(
            "main/cluster/facts-nomination",
            nomination::freed_devices_go_to_the_nominated_pod,
        ),
        write_times.with_ignored_flag(shared_cluster::kubeconfig().is_some()),
    ]
}

/// A cluster with one node and without Bursar.
struct BareCluster {
    local: LocalCluster,
    pods: Pods,
    progress: Progress,
}

/// Makes a trial on a bare cluster. The shared clusters are taken down before, so that the measured
/// component has the processors.
fn fact(
    name: &'static str,
    act: impl AsyncFnOnce(&mut BareCluster) -> Result<(), Failed> + Send + 'static,
) -> Trial {
    let run = move || {
        shared_cluster::take_down();
        let progress = Progress::start();
        let toolbox = kube::build(&progress)?;
        let options = ClusterOptions {
            name: CLUSTER.to_owned(),
            harness: crate::harness(),
            toolbox,
            scope: ClusterScope::WithNode,
        };
        Runtime::new()?.block_on(async {
            let mut cluster = BareCluster::start(options, progress).await?;
            act(&mut cluster).await?;
            Ok(cluster.local.down()?)
        })
    };
    Trial::test(name, run).with_ignored_flag(shared_cluster::kubeconfig().is_some())
}

impl BareCluster {
    async fn start(options: ClusterOptions, progress: Progress) -> Result<Self, Failed> {
        let local = LocalCluster::up(options, &progress).await?;
        let folder = tempfile::tempdir()?;
        let archive = images::write_pause(folder.path())?;
        local.import_image(&archive.path).await?;
        let pods = Pods::in_namespace(&local.client(), "default").await?;
        Ok(Self {
            local,
            pods,
            progress,
        })
    }

    /// Waits until the node's allocatable has this amount of an extended resource.
    async fn wait_for_allocatable(&self, resource: &str, amount: usize) -> Result<(), Failed> {
        let nodes: Api<Node> = Api::all(self.local.client());
        let wanted = amount.to_string();
        let poll = async || match nodes.get(self.local.node_name()).await {
            Ok(node) => {
                let allocatable = node.status.unwrap_or_default().allocatable;
                match allocatable.unwrap_or_default().remove(resource) {
                    Some(quantity) if quantity.0 == wanted => Poll::Ready(()),
                    other => Poll::Pending(format!("{other:?}")),
                }
            }
            Err(error) => Poll::Pending(error.to_string()),
        };
        let what = format!("{wanted} of {resource} to be allocatable");
        Ok(wait::poll_until(&what, START_TIMEOUT, POLL_INTERVAL, poll).await?)
    }
}
