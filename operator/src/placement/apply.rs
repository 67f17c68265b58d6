//! Applies one step of a placement plan.

mod evict;
mod revalidate;

use bursar_crds::GpuNode;
use bursar_crds::gpu_node::{MAX_QUOTAS, QuotaOverride, Reservation};
use futures::TryFutureExt as _;
use futures::future::join_all;
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, Resource as _};
use serde_json::{Value, json};
use tracing::{debug, info, warn};

use super::history::{History, NodeLabels, Uptime};
use super::plan::{NodeRef, PodRef, Step};
use crate::api::error::{ApiError, with_timeout};
use crate::api::job_disruption;
use crate::api::write::ApiWriter;
use crate::clock::Clock;
use crate::cluster::Key;
use crate::cluster::own_writes::send_response;
use crate::cluster::slim_node::SlimNode;
use crate::cluster::slim_pod::SlimPod;

/// The field managers. Each list or map that is applied whole has a manager of its own.
const LABELS_MANAGER: &str = "bursar-operator-labels";
const RESERVATIONS_MANAGER: &str = "bursar-operator-reservations";
const QUOTAS_MANAGER: &str = "bursar-operator-quotas";

/// Applies steps through the API server.
pub(super) struct Executor {
    client: Client,
    writer: ApiWriter,
    options: super::PlacementOptions,
    clock: Clock,
}

impl Executor {
    pub(super) fn new(writer: ApiWriter, options: super::PlacementOptions, clock: Clock) -> Self {
        let client = writer.client().clone();
        Self {
            client,
            writer,
            options,
            clock,
        }
    }

    /// Applies `step` and records the result in `history`.
    pub(super) async fn apply(
        &self,
        step: Step,
        history: &mut History,
        now: Uptime,
    ) -> Result<(), ApiError> {
        match step {
            Step::Label { nodes } => self.label_nodes(nodes, history, now).await,
            Step::Reserve {
                node,
                over,
                reservations,
            } => self.reserve(node, &over, reservations, history).await,
            Step::OverrideQuotas {
                node,
                quotas,
                omitted,
            } => self.override_quotas(node, quotas, omitted, history).await,
            Step::Preempt {
                pending_pod,
                node,
                reservations,
                nominate,
                victims,
            } => {
                if nominate && !self.nominate(&pending_pod, &node, &reservations).await? {
                    return Ok(());
                }
                self.evict_victims(&victims, &pending_pod, (&node, &reservations), history, now)
                    .await
            }
            Step::Relocate {
                pod,
                owner,
                from,
                to,
                room,
            } => {
                self.relocate(&pod, &owner, from, (&to, room), history, now)
                    .await
            }
            Step::ReadJob { namespace, job } => {
                let ignores_disruption =
                    job_disruption::ignores_disruption(&self.client, &namespace, &job).await?;
                history.jobs.insert(job.uid, ignores_disruption);
                Ok(())
            }
        }
    }

    /// Writes the labels of nodes at the same time: one after another they would hold up the next
    /// preemption where the API server is slow.
    async fn label_nodes(
        &self,
        nodes: Vec<(NodeRef, NodeLabels)>,
        history: &mut History,
        now: Uptime,
    ) -> Result<(), ApiError> {
        let writes = nodes.iter().map(|(node, labels)| {
            history.record_label_write();
            self.label_node(node, labels)
        });
        let results = join_all(writes.collect::<Vec<_>>()).await;
        let mut failed = Ok(());
        for ((node, labels), result) in nodes.into_iter().zip(results) {
            match result {
                Ok(()) => drop(history.written_labels.insert(node.name, (labels, now))),
                Err(error) => failed = Err(error),
            }
        }
        failed
    }

    /// Writes the labels of a node by a merge patch, because an apply would keep a label that
    /// another manager wrote too.
    async fn label_node(&self, node: &NodeRef, labels: &NodeLabels) -> Result<(), ApiError> {
        info!(node = node.name, ?labels, "updating node labels");
        let api = Api::<SlimNode>::all(self.client.clone());
        let patch = Patch::Merge(json!({ "metadata": { "uid": node.uid, "labels": labels } }));
        let params = PatchParams {
            field_manager: Some(LABELS_MANAGER.to_owned()),
            ..PatchParams::default()
        };
        let request = api.patch(&node.name, &params, &patch);
        let write = with_timeout("label", format!("Node {}", node.name), request).map_ok(Some);
        send_response(&self.writer.responses().nodes, write).await
    }

    /// Applies all reservations of a node, unless they differ from those that the plan saw.
    async fn reserve(
        &self,
        node: NodeRef,
        over: &[Reservation],
        reservations: Vec<Reservation>,
        history: &mut History,
    ) -> Result<(), ApiError> {
        let current = self.gpu_node(&node.name).await?;
        let Some(current) = current.filter(|current| current.spec.reservations == over) else {
            debug!(
                node = node.name,
                "reservations have changed; skipping the step"
            );
            return Ok(());
        };
        let body = json!({
            "metadata": { "resourceVersion": current.metadata.resource_version },
            "spec": { "reservations": reservations },
        });
        let verb = "apply reservations to";
        // A failed write may still have been applied, so the owner of the current entries is
        // unknown.
        history.reservations.remove(&node.name);
        self.server_side_apply(RESERVATIONS_MANAGER, verb, &node, body)
            .await?;
        info!(node = node.name, ?reservations, "applied reservations");
        history.reservations.insert(node.name, reservations);
        Ok(())
    }

    /// Applies all quota overrides of a node.
    async fn override_quotas(
        &self,
        node: NodeRef,
        quotas: Vec<QuotaOverride>,
        omitted: usize,
        history: &mut History,
    ) -> Result<(), ApiError> {
        let body = json!({ "spec": { "quotas": quotas } });
        history.quotas.remove(&node.name);
        self.server_side_apply(QUOTAS_MANAGER, "apply quota overrides to", &node, body)
            .await?;
        info!(
            node = node.name,
            orders = quotas.len(),
            "applied quota overrides"
        );
        let before = history.omitted_quotas.insert(node.name.clone(), omitted);
        if omitted > 0 && before != Some(omitted) {
            warn!(
                node = node.name,
                omitted,
                "failed to order all quota overrides of a node: a GpuNode takes {MAX_QUOTAS}; \
                 remove overrides from the budgets"
            );
        }
        history.quotas.insert(node.name, quotas);
        Ok(())
    }

    /// Applies `body` to an existing `GpuNode` with this UID.
    async fn server_side_apply(
        &self,
        manager: &str,
        verb: &'static str,
        node: &NodeRef,
        mut body: Value,
    ) -> Result<(), ApiError> {
        body["apiVersion"] = json!(GpuNode::api_version(&()));
        body["kind"] = json!(GpuNode::kind(&()));
        body["metadata"]["name"] = json!(node.name);
        // Without a UID the apply would create the object.
        body["metadata"]["uid"] = json!(node.uid);
        let api = Api::<GpuNode>::all(self.client.clone());
        let params = PatchParams::apply(manager).force();
        let patch = Patch::Apply(body);
        let request = api.patch(&node.name, &params, &patch);
        let write = with_timeout(verb, format!("GpuNode {}", node.name), request).map_ok(Some);
        send_response(&self.writer.responses().gpu_nodes, write).await
    }

    /// Sets the pod's nominated node, so that the scheduler keeps the room. Returns whether the pod
    /// still needs the GPUs.
    async fn nominate(
        &self,
        pod: &PodRef,
        node: &str,
        reservations: &[Reservation],
    ) -> Result<bool, ApiError> {
        let Some(version) = self.revalidate(pod, node, reservations).await? else {
            return Ok(false);
        };
        info!(
            namespace = pod.key.namespace,
            pod = pod.key.name,
            node,
            "nominating node"
        );
        let pods = Api::<SlimPod>::namespaced(self.client.clone(), &pod.key.namespace);
        let patch = Patch::Merge(json!({
            "metadata": { "uid": pod.uid, "resourceVersion": version }, "status": { "nominatedNodeName": node },
        }));
        let params = PatchParams::default();
        let request = pods.patch_status(&pod.key.name, &params, &patch);
        let write = with_timeout("nominate", pod_text(&pod.key), request).map_ok(Some);
        send_response(&self.writer.responses().pods, write).await?;
        Ok(true)
    }
}

/// A pod as errors name it.
fn pod_text(key: &Key) -> String {
    format!("Pod {}/{}", key.namespace, key.name)
}
