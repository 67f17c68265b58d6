//! Reads pods and nodes again before a step, because the plan may be out of date.

use bursar_crds::GpuNode;
use bursar_crds::gpu_node::Reservation;
use kube::api::Api;
use tracing::debug;

use super::{Executor, pod_text};
use crate::api::error::{ApiError, with_timeout};
use crate::cluster::facts::node::GpuFacts;
use crate::cluster::facts::pod::{Placement, PodFacts};
use crate::cluster::slim_pod::SlimPod;
use crate::placement::plan::PodRef;

impl Executor {
    pub(super) async fn gpu_node(&self, node: &str) -> Result<Option<GpuNode>, ApiError> {
        let nodes = Api::<GpuNode>::all(self.client.clone());
        with_timeout("read", format!("GpuNode {node}"), nodes.get_opt(node)).await
    }

    /// Whether a pod that may be relocated still waits on its node.
    ///
    /// A relocation would destroy the work of a started pod. The pod's status may be late, because
    /// the kubelet updates it only between two container starts.
    pub(super) async fn still_waits(&self, pod: &PodRef, node: &str) -> Result<bool, ApiError> {
        let waiting = self.revalidate_pod(pod, node).await?;
        let waiting = waiting.zip(self.gpu_node(node).await?);
        let waits = waiting.is_some_and(|((facts, _), current)| {
            !GpuFacts::of(&current, self.options.quantum).has_possibly_started(&facts)
        });
        if !waits {
            debug!(
                pending_pod = pod.key.name,
                "pod waits no longer; skipping the step"
            );
        }
        Ok(waits)
    }

    /// Reads the pod again. Returns its facts and resource version if the plan still holds for it.
    async fn revalidate_pod(
        &self,
        pending_pod: &PodRef,
        node: &str,
    ) -> Result<Option<(PodFacts, String)>, ApiError> {
        let pods = Api::<SlimPod>::namespaced(self.client.clone(), &pending_pod.key.namespace);
        let read = pods.get_opt(&pending_pod.key.name);
        let found = with_timeout("read", pod_text(&pending_pod.key), read).await?;
        let Some(found) = found else { return Ok(None) };
        let facts = PodFacts::of(&found, self.options.quantum).filter(|pod| {
            let is_on_node = match &pod.placement {
                Placement::Node(at) => at == node,
                Placement::Unscheduled { nominated, .. } => {
                    nominated.as_ref().is_none_or(|at| at == node)
                }
            };
            is_on_node && pod.uid == pending_pod.uid && pod.pending && !pod.terminating
        });
        Ok(facts.zip(found.metadata.resource_version))
    }

    /// Reads node and pod again. Returns the pod's version if the pod still has these reservations,
    /// because another operator may have chosen other GPUs or amounts.
    pub(super) async fn revalidate(
        &self,
        pending_pod: &PodRef,
        node: &str,
        reservations: &[Reservation],
    ) -> Result<Option<String>, ApiError> {
        let Some(current) = self.gpu_node(node).await? else {
            return Ok(None);
        };
        let is_kept = |reservation: &Reservation| {
            let mut gpus = current.status.iter().flat_map(|status| &status.gpus);
            current.spec.reservations.contains(reservation)
                && gpus.any(|gpu| {
                    gpu.uuid == reservation.gpu
                        && gpu.reserved_for.as_ref() == Some(&reservation.pod_uid)
                })
        };
        let version = match reservations.iter().all(is_kept) {
            true => self.revalidate_pod(pending_pod, node).await?,
            false => None,
        };
        if version.is_none() {
            debug!(
                pending_pod = pending_pod.key.name,
                "pod needs these GPUs no longer; skipping the step"
            );
        }
        Ok(version.map(|(_, version)| version))
    }
}
