//! Applies one step of a placement plan.

use bursar_crds::GpuNode;
use bursar_crds::gpu_node::Reservation;
use futures::TryFutureExt as _;
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, Resource as _};
use serde_json::{Value, json};
use tracing::{debug, info};

use super::history::{EvictionOutcome, History, NodeLabels, Uptime};
use super::node::{GpuFacts, SlimNode};
use super::plan::{NodeRef, PodRef, Step, Victim};
use super::pod::{Placement, PodFacts};
use crate::api::error::{ApiError, with_timeout};
use crate::api::write::{ApiWriter, EvictionResult};
use crate::api::{events, job_disruption};
use crate::cluster::Key;
use crate::cluster::own_writes::send_response;
use crate::cluster::pod_request::SlimPod;
use crate::run::Clock;

/// The field managers. Each list or map that is applied whole has a manager of its own.
const LABELS_MANAGER: &str = "bursar-operator-labels";
const RESERVATIONS_MANAGER: &str = "bursar-operator-reservations";
const QUOTAS_MANAGER: &str = "bursar-operator-quotas";
const RELOCATIONS_MANAGER: &str = "bursar-operator-relocations";

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
            Step::Label { node, labels } => {
                info!(node = node.name, ?labels, "updating node labels");
                history.record_label_write();
                self.label_node(&node, &labels).await?;
                history.written_labels.insert(node.name, (labels, now));
                Ok(())
            }
            Step::Reserve {
                node,
                over,
                reservations,
            } => self.reserve(node, &over, reservations, history).await,
            Step::OverrideQuotas { node, quotas } => {
                let body = json!({ "spec": { "quotas": quotas } });
                history.quotas.remove(&node.name);
                self.server_side_apply(QUOTAS_MANAGER, "apply quota overrides to", &node, body)
                    .await?;
                info!(
                    node = node.name,
                    orders = quotas.len(),
                    "applied quota overrides"
                );
                history.quotas.insert(node.name, quotas);
                Ok(())
            }
            Step::Preempt {
                waiter,
                node,
                gpus,
                nominate,
                victims,
            } => {
                if nominate && !self.nominate(&waiter, &node, &gpus).await? {
                    return Ok(());
                }
                self.evict_victims(&victims, &waiter, (&node, &gpus), history, now)
                    .await
            }
            Step::Relocate {
                pod,
                owner,
                from,
                to,
                room,
            } => {
                if !self.still_waits(&pod, &from.name).await? {
                    return Ok(());
                }
                if history.is_first_eviction(&pod.uid) {
                    self.record_relocation(from, &owner, history, now).await?;
                }
                if self.evict(&pod, false, history, now).await? == EvictionResult::Accepted {
                    let Key { namespace, name } = &pod.key;
                    info!(namespace, pod = name, to, "relocated pod");
                    history.record_relocation(&owner, &to, room, now);
                    let note = format!("waits for a GPU on this node, and node {to} has room");
                    self.publish_event(&pod, "GpuMemoryWaiterMoved", &note, None)
                        .await;
                }
                Ok(())
            }
            Step::ReadJob { namespace, job } => {
                let ignores_disruption =
                    job_disruption::ignores_disruption(&self.client, &namespace, &job).await?;
                history.jobs.insert(job.uid, ignores_disruption);
                Ok(())
            }
        }
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

    /// Evicts the victims one after the other, as long as the pod still needs the GPUs.
    async fn evict_victims(
        &self,
        victims: &[Victim],
        waiter: &PodRef,
        (node, gpus): (&str, &[String]),
        history: &mut History,
        now: Uptime,
    ) -> Result<(), ApiError> {
        for victim in victims {
            // An eviction may take seconds, in which another operator may choose other GPUs.
            if self.revalidate(waiter, node, gpus).await?.is_none() {
                return Ok(());
            }
            self.evict_victim(victim, waiter, node, history, now)
                .await?;
        }
        Ok(())
    }

    /// Whether a pod that may be relocated still waits on its node.
    ///
    /// A relocation would destroy the work of a started pod. The pod's status may be late, because
    /// the kubelet updates it only between two container starts.
    async fn still_waits(&self, pod: &PodRef, node: &str) -> Result<bool, ApiError> {
        let waiting = self.revalidate_pod(pod, node).await?;
        let waiting = waiting.zip(self.gpu_node(node).await?);
        let waits = waiting.is_some_and(|((facts, _), current)| {
            !GpuFacts::of(&current, self.options.quantum).has_possibly_started(&facts)
        });
        if !waits {
            debug!(
                waiter = pod.key.name,
                "pod waits no longer; skipping the step"
            );
        }
        Ok(waits)
    }

    /// Counts a relocation of the owner's pods in the `GpuNode`, before the eviction. After a crash
    /// the count may be one too high, never one too low.
    async fn record_relocation(
        &self,
        from: NodeRef,
        owner: &str,
        history: &mut History,
        now: Uptime,
    ) -> Result<(), ApiError> {
        let relocations = history.relocations_with(&from.name, owner, now, (self.clock)());
        let records: Vec<_> = relocations.iter().map(|(moved, _)| moved).collect();
        let body = json!({ "spec": { "relocations": records } });
        let verb = "record a relocation on";
        self.server_side_apply(RELOCATIONS_MANAGER, verb, &from, body)
            .await?;
        history.set_relocations(from.name, relocations);
        Ok(())
    }

    /// A merge patch, because an apply would keep a label that another manager wrote too.
    async fn label_node(&self, node: &NodeRef, labels: &NodeLabels) -> Result<(), ApiError> {
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

    /// Reads the pod again. Returns its facts and resource version if the plan still holds for it.
    async fn revalidate_pod(
        &self,
        waiter: &PodRef,
        node: &str,
    ) -> Result<Option<(PodFacts, String)>, ApiError> {
        let pods = Api::<SlimPod>::namespaced(self.client.clone(), &waiter.key.namespace);
        let read = pods.get_opt(&waiter.key.name);
        let found = with_timeout("read", pod_text(&waiter.key), read).await?;
        let Some(found) = found else { return Ok(None) };
        let facts = PodFacts::of(&found, self.options.quantum).filter(|pod| {
            let is_on_node = match &pod.placement {
                Placement::Node(at) => at == node,
                Placement::Unscheduled { nominated, .. } => {
                    nominated.as_ref().is_none_or(|at| at == node)
                }
            };
            is_on_node && pod.uid == waiter.uid && pod.pending && !pod.terminating
        });
        Ok(facts.zip(found.metadata.resource_version))
    }

    /// Reads node and pod again. Returns the pod's version if all GPUs are still reserved for it,
    /// because another operator may have chosen others.
    async fn revalidate(
        &self,
        waiter: &PodRef,
        node: &str,
        gpus: &[String],
    ) -> Result<Option<String>, ApiError> {
        let Some(current) = self.gpu_node(node).await? else {
            return Ok(None);
        };
        let is_reserved = |gpu: &String| {
            let mut reserved = current.spec.reservations.iter();
            let mut all = current.status.iter().flat_map(|status| &status.gpus);
            reserved.any(|one| one.gpu == *gpu && one.waiter == waiter.uid)
                && all.any(|one| one.uuid == *gpu && one.reserved_for.as_ref() == Some(&waiter.uid))
        };
        let version = match gpus.iter().all(is_reserved) {
            true => self.revalidate_pod(waiter, node).await?,
            false => None,
        };
        if version.is_none() {
            debug!(
                waiter = waiter.key.name,
                "pod needs these GPUs no longer; skipping the step"
            );
        }
        Ok(version.map(|(_, version)| version))
    }

    async fn gpu_node(&self, node: &str) -> Result<Option<GpuNode>, ApiError> {
        let nodes = Api::<GpuNode>::all(self.client.clone());
        with_timeout("read", format!("GpuNode {node}"), nodes.get_opt(node)).await
    }

    /// Sets the pod's nominated node, so that the scheduler keeps the room. Returns whether the pod
    /// still needs the GPUs.
    async fn nominate(&self, pod: &PodRef, node: &str, gpus: &[String]) -> Result<bool, ApiError> {
        let Some(version) = self.revalidate(pod, node, gpus).await? else {
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

    /// Evicts one pod for another, and publishes on both pods what is done. A refusal is published
    /// once.
    async fn evict_victim(
        &self,
        victim: &Victim,
        waiter: &PodRef,
        node: &str,
        history: &mut History,
        now: Uptime,
    ) -> Result<(), ApiError> {
        let Victim {
            pod,
            gpu,
            force,
            protected,
        } = victim;
        let first_attempt = history.refused_for(&pod.uid, now).is_none();
        let evicted = self.evict(pod, *force, history, now).await?;
        let (namespace, name) = (&pod.key.namespace, &pod.key.name);
        if evicted == EvictionResult::Accepted {
            info!(
                namespace,
                pod = name,
                waiter = waiter.key.name,
                gpu,
                force,
                "preempted pod"
            );
            let note = format!(
                "preempted on {gpu} by {}/{}, which has a higher priority",
                waiter.key.namespace, waiter.key.name
            );
            self.publish_event(pod, "GpuMemoryReclaimed", &note, Some(waiter))
                .await;
            let note = format!("{namespace}/{name} is evicted from {gpu} of {node} for this pod");
            self.publish_event(waiter, "GpuMemoryVictimEvicted", &note, Some(pod))
                .await;
        } else if first_attempt {
            let grace = match protected {
                true => "until it allows a disruption".to_owned(),
                false => format!("for at most {} s", self.options.forced_after().as_secs()),
            };
            let note = format!(
                "a PodDisruptionBudget protects {namespace}/{name} on {gpu} of {node}, {grace}"
            );
            self.publish_event(waiter, "GpuMemoryVictimProtected", &note, Some(pod))
                .await;
        }
        Ok(())
    }

    /// Evicts a pod and records the result.
    async fn evict(
        &self,
        pod: &PodRef,
        overdue: bool,
        history: &mut History,
        now: Uptime,
    ) -> Result<EvictionResult, ApiError> {
        let Key { namespace, name } = &pod.key;
        let evicted = self.writer.evict(namespace, name, &pod.uid, overdue).await;
        let outcome = match &evicted {
            Ok(EvictionResult::Accepted) => EvictionOutcome::Accepted,
            Ok(EvictionResult::BlockedByPdb) => EvictionOutcome::BlockedByPdb,
            Err(_) => EvictionOutcome::Failed,
        };
        history.record_eviction(&pod.uid, outcome, now);
        if outcome == EvictionOutcome::BlockedByPdb {
            info!(
                namespace,
                pod = name,
                "PodDisruptionBudget refused the eviction"
            );
        }
        evicted
    }

    /// Publishes an Event on a pod, which may name another pod.
    async fn publish_event(&self, pod: &PodRef, reason: &str, note: &str, other: Option<&PodRef>) {
        let other = other.map(event_subject);
        events::publish_placement(&self.client, event_subject(pod), reason, note, other).await;
    }
}

/// A pod as Events name it.
fn event_subject(pod: &PodRef) -> (&str, &str, &str) {
    (&pod.key.namespace, &pod.key.name, &pod.uid)
}

/// A pod as errors name it.
fn pod_text(key: &Key) -> String {
    format!("Pod {}/{}", key.namespace, key.name)
}
