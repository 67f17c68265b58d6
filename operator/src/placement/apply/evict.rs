//! Evicts victims of waiting pods, or a waiting pod that is relocated.

use bursar_crds::gpu_node::Reservation;
use serde_json::json;
use tracing::info;

use super::Executor;
use crate::api::error::ApiError;
use crate::api::events;
use crate::api::write::EvictionResult;
use crate::cluster::Key;
use crate::placement::history::{History, Uptime};
use crate::placement::plan::{NodeRef, PodRef, Victim};
use crate::quanta::Quanta;

/// The field manager of the recorded relocations.
const RELOCATIONS_MANAGER: &str = "bursar-operator-relocations";

impl Executor {
    /// Evicts the victims one after the other, as long as the pod still needs the GPUs.
    pub(super) async fn evict_victims(
        &self,
        victims: &[Victim],
        pending_pod: &PodRef,
        (node, reservations): (&str, &[Reservation]),
        history: &mut History,
        now: Uptime,
    ) -> Result<(), ApiError> {
        for victim in victims {
            // An eviction may take seconds, in which another operator may choose other GPUs.
            if self
                .revalidate(pending_pod, node, reservations)
                .await?
                .is_none()
            {
                return Ok(());
            }
            self.evict_victim(victim, pending_pod, node, history, now)
                .await?;
        }
        Ok(())
    }

    /// Evicts a pod that waits on its node, so that its replacement goes to another node with room.
    pub(super) async fn relocate(
        &self,
        pod: &PodRef,
        owner: &str,
        from: NodeRef,
        (to, room): (&str, Quanta),
        history: &mut History,
        now: Uptime,
    ) -> Result<(), ApiError> {
        if !self.still_waits(pod, &from.name).await? {
            return Ok(());
        }
        if history.is_first_eviction(&pod.uid) {
            self.record_relocation(from, owner, history, now).await?;
        }
        if self.evict(pod, false, history, now).await? == EvictionResult::Accepted {
            let Key { namespace, name } = &pod.key;
            info!(namespace, pod = name, to, "relocated pod");
            history.record_relocation(owner, to, room, now);
            let note = format!("waits for a GPU on this node, and node {to} has room");
            self.publish_event(pod, "RelocatedForGpuMemory", &note, None)
                .await;
        }
        Ok(())
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

    /// Evicts one pod for another, and publishes on both pods what is done. A refusal is published
    /// once.
    async fn evict_victim(
        &self,
        victim: &Victim,
        pending_pod: &PodRef,
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
                pending_pod = pending_pod.key.name,
                gpu,
                force,
                "preempted pod"
            );
            let note = format!(
                "preempted on {gpu} by {}/{}, which has a higher priority",
                pending_pod.key.namespace, pending_pod.key.name
            );
            self.publish_event(pod, "GpuMemoryReclaimed", &note, Some(pending_pod))
                .await;
            let note = format!("{namespace}/{name} is evicted from {gpu} of {node} for this pod");
            self.publish_event(pending_pod, "GpuMemoryVictimEvicted", &note, Some(pod))
                .await;
        } else if first_attempt {
            let grace = match protected {
                true => "until it allows a disruption".to_owned(),
                false => format!("for at most {} s", self.options.forced_after().as_secs()),
            };
            let note = format!(
                "a PodDisruptionBudget protects {namespace}/{name} on {gpu} of {node}, {grace}"
            );
            self.publish_event(pending_pod, "GpuMemoryVictimProtected", &note, Some(pod))
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
        let mut answer = self.writer.evict(namespace, name, &pod.uid, overdue).await;
        if answer.as_ref().is_err_and(ApiError::has_unknown_effect) {
            // If the API server has deleted the pod, no later plan has it, and the operator would
            // publish nothing. A second request for a pod that is gone counts as accepted.
            answer = self.writer.evict(namespace, name, &pod.uid, overdue).await;
        }
        history.record_eviction(&pod.uid, &answer, now);
        if let Ok(EvictionResult::BlockedByPdb) = answer {
            info!(
                namespace,
                pod = name,
                "PodDisruptionBudget refused the eviction"
            );
        }
        answer
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
