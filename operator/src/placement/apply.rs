//! Carries out one step of a plan.

use std::time::Duration;

use bursar_crds::GpuNode;
use futures::TryFutureExt as _;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::api::{Api, Patch, PatchParams};
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Client, Resource as _};
use serde_json::{Value, json};
use tokio::time::timeout;
use tracing::{debug, info, warn};

use super::history::{Answer, Memory, Moment, NodeLabels};
use super::node::{GpuFacts, SlimNode};
use super::plan::{Object, Pod, Step, Victim};
use super::pod::{Place, PodFacts};
use crate::api::job_disruption;
use crate::api::read::AskError;
use crate::api::write::{Evicted, WriteError, Writer};
use crate::cluster::Key;
use crate::cluster::own_writes::telling;
use crate::cluster::pod_request::AskingPod;
use crate::error::chain;
use crate::run::Clock;

/// Field managers, one for each list or map that is written whole: what one applies takes nothing from the others.
const LABELS_MANAGER: &str = "bursar-operator-labels";
const RESERVATIONS_MANAGER: &str = "bursar-operator-reservations";
const QUOTAS_MANAGER: &str = "bursar-operator-quotas";
const MOVES_MANAGER: &str = "bursar-operator-moves";

/// How long one request may take.
const REQUEST_TIME: Duration = Duration::from_secs(5);

/// A step that was not carried out. The next plan has it again, if it is still of use.
#[derive(Debug, thiserror::Error)]
pub(super) enum ActError {
    /// The API server or the way to it.
    #[error("cannot {what} {name}")]
    Request {
        /// What was to be done.
        what: &'static str,
        /// To what.
        name: String,
        /// What was said.
        source: Box<kube::Error>,
    },
    /// An eviction.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// A look at a Job.
    #[error(transparent)]
    Job(#[from] AskError),
    /// No answer in time.
    #[error("no answer within {} s: {what} {name}", REQUEST_TIME.as_secs())]
    TimedOut {
        /// What was to be done.
        what: &'static str,
        /// To what.
        name: String,
    },
}

/// Makes requests.
pub(super) struct Hands {
    client: Client,
    writer: Writer,
    recorder: Recorder,
    rules: super::Rules,
    clock: Clock,
}

impl Hands {
    pub(super) fn new(writer: Writer, rules: super::Rules, clock: Clock) -> Self {
        let client = writer.client().clone();
        let reporter = Reporter {
            controller: bursar_crds::OPERATOR_MANAGER.to_owned(),
            instance: None,
        };
        Self {
            recorder: Recorder::new(client.clone(), reporter),
            client,
            writer,
            rules,
            clock,
        }
    }

    /// Does `step`, and notes what became of it.
    pub(super) async fn act(
        &self,
        step: Step,
        memory: &mut Memory,
        now: Moment,
    ) -> Result<(), ActError> {
        match step {
            Step::Label { node, labels } => {
                info!(node = node.name, ?labels, "node labels");
                memory.label_written();
                self.label(&node, &labels).await?;
                memory.labelled.insert(node.name, (labels, now));
                Ok(())
            }
            Step::Reserve {
                node,
                over,
                reservations,
            } => {
                let there = self.gpu_node(&node.name).await?;
                let Some(there) = there.filter(|there| there.spec.reservations == over) else {
                    debug!(node = node.name, "reserved otherwise by now");
                    return Ok(());
                };
                let body = json!({
                    "metadata": { "resourceVersion": there.metadata.resource_version },
                    "spec": { "reservations": reservations },
                });
                let what = "reserve a GPU of";
                // A write that fails may have arrived: whose what is there is, is open then.
                memory.reservations.remove(&node.name);
                self.apply(RESERVATIONS_MANAGER, what, &node, body).await?;
                info!(node = node.name, ?reservations, "reservations");
                memory.reservations.insert(node.name, reservations);
                Ok(())
            }
            Step::Lower { node, quotas } => {
                let body = json!({ "spec": { "quotas": quotas } });
                memory.quotas.remove(&node.name);
                self.apply(QUOTAS_MANAGER, "order quotas of", &node, body)
                    .await?;
                info!(node = node.name, orders = quotas.len(), "quotas");
                memory.quotas.insert(node.name, quotas);
                Ok(())
            }
            Step::MakeRoom {
                waiter,
                node,
                gpu,
                nominate,
                victims,
            } => {
                if nominate {
                    let Some(version) = self.still_needs(&waiter, &node, &gpu).await? else {
                        debug!(waiter = waiter.key.name, "waits no more, or elsewhere");
                        return Ok(());
                    };
                    self.nominate(&waiter, &version, &node).await?;
                }
                for victim in victims {
                    // An eviction may take seconds, in which another operator chooses otherwise.
                    if self.still_needs(&waiter, &node, &gpu).await?.is_none() {
                        debug!(waiter = waiter.key.name, "waits no more, or elsewhere");
                        return Ok(());
                    }
                    self.end(&victim, &waiter, &gpu, memory, now).await?;
                }
                Ok(())
            }
            Step::Move {
                pod,
                owner,
                from,
                to,
                room,
            } => {
                // Who has begun would lose that. Its status may tell so late: the kubelet writes it between two rounds
                // of starts, and waits for a GPU in one.
                let waits = self.still_waits(&pod, &from.name).await?;
                let waits = waits.zip(self.gpu_node(&from.name).await?);
                if waits.is_none_or(|((facts, _), there)| {
                    GpuFacts::of(&there, self.rules.quantum).may_have_begun(&facts)
                }) {
                    debug!(waiter = pod.key.name, "waits no more");
                    return Ok(());
                }
                if memory.is_first_ask(&pod.uid) {
                    // Before the eviction: whoever comes after a crash may count one too many, never one too few.
                    let moves = memory.moves_with(&from.name, &owner, now, (self.clock)());
                    let told: Vec<_> = moves.iter().map(|(moved, _)| moved).collect();
                    let body = json!({ "spec": { "moves": told } });
                    self.apply(MOVES_MANAGER, "count a move from", &from, body)
                        .await?;
                    memory.recorded(from.name, moves);
                }
                if self.evict(&pod, false, memory, now).await? == Evicted::Ends {
                    let Key { namespace, name } = &pod.key;
                    info!(namespace, pod = name, to, "waiter moved");
                    memory.moved(&owner, &to, room, now);
                    let note = format!("waits for a GPU here, and node {to} has room");
                    self.say(&pod, "GpuMemoryWaiterMoved", note).await;
                }
                Ok(())
            }
            Step::LookAtJob { namespace, job } => {
                let lets_go = job_disruption::lets_go(&self.client, &namespace, &job).await?;
                memory.jobs.insert(job.uid, lets_go);
                Ok(())
            }
        }
    }

    /// No apply: that would leave a label in place which somebody else wrote too.
    async fn label(&self, node: &Object, labels: &NodeLabels) -> Result<(), ActError> {
        let api = Api::<SlimNode>::all(self.client.clone());
        let patch = Patch::Merge(json!({ "metadata": { "uid": node.uid, "labels": labels } }));
        let params = PatchParams {
            field_manager: Some(LABELS_MANAGER.to_owned()),
            ..PatchParams::default()
        };
        let request = api.patch(&node.name, &params, &patch);
        let write = within("label node", &node.name, request).map_ok(Some);
        telling(&self.writer.wrote().nodes, write).await
    }

    /// A server-side apply of `body` to a `GpuNode` that must be there and be the same one.
    async fn apply(
        &self,
        manager: &str,
        what: &'static str,
        node: &Object,
        mut body: Value,
    ) -> Result<(), ActError> {
        body["apiVersion"] = json!(GpuNode::api_version(&()));
        body["kind"] = json!(GpuNode::kind(&()));
        body["metadata"]["name"] = json!(node.name);
        // An apply makes what is missing, unless it says which one it means.
        body["metadata"]["uid"] = json!(node.uid);
        let api = Api::<GpuNode>::all(self.client.clone());
        let params = PatchParams::apply(manager).force();
        let patch = Patch::Apply(body);
        let request = api.patch(&node.name, &params, &patch);
        let write = within(what, &node.name, request).map_ok(Some);
        telling(&self.writer.wrote().gpu_nodes, write).await
    }

    /// The waiter, if it is as the plan thought by the API server's own word, and the version of it that says so.
    async fn still_waits(
        &self,
        waiter: &Pod,
        node: &str,
    ) -> Result<Option<(PodFacts, String)>, ActError> {
        let pods = Api::<AskingPod>::namespaced(self.client.clone(), &waiter.key.namespace);
        let found = within("read pod", &waiter.key.name, pods.get_opt(&waiter.key.name)).await?;
        let Some(found) = found else { return Ok(None) };
        let facts = PodFacts::of(&found, self.rules.quantum).filter(|pod| {
            let here = match &pod.place {
                Place::On(at) => at == node,
                Place::Nowhere { nominated, .. } => nominated.as_ref().is_none_or(|at| at == node),
            };
            here && pod.uid == waiter.uid && pod.pending && !pod.ending
        });
        Ok(facts.zip(found.metadata.resource_version))
    }

    /// The same, and whether the GPU is reserved and held for the waiter: another operator may have chosen another one.
    async fn still_needs(
        &self,
        waiter: &Pod,
        node: &str,
        gpu: &str,
    ) -> Result<Option<String>, ActError> {
        let Some(there) = self.gpu_node(node).await? else {
            return Ok(None);
        };
        let mut reserved = there.spec.reservations.iter();
        let mut gpus = there.status.iter().flat_map(|status| &status.gpus);
        let held = reserved.any(|held| held.gpu == gpu && held.waiter == waiter.uid)
            && gpus.any(|one| one.uuid == gpu && one.held_for.as_ref() == Some(&waiter.uid));
        match held {
            true => Ok(self
                .still_waits(waiter, node)
                .await?
                .map(|(_, version)| version)),
            false => Ok(None),
        }
    }

    async fn gpu_node(&self, node: &str) -> Result<Option<GpuNode>, ActError> {
        let nodes = Api::<GpuNode>::all(self.client.clone());
        within("read GpuNode", node, nodes.get_opt(node)).await
    }

    /// Tells the scheduler to keep the node's room for the pod, unless somebody has changed the pod since this version.
    async fn nominate(&self, pod: &Pod, version: &str, node: &str) -> Result<(), ActError> {
        info!(
            namespace = pod.key.namespace,
            pod = pod.key.name,
            node,
            "nominated"
        );
        let pods = Api::<AskingPod>::namespaced(self.client.clone(), &pod.key.namespace);
        let patch = Patch::Merge(json!({
            "metadata": { "uid": pod.uid, "resourceVersion": version }, "status": { "nominatedNodeName": node },
        }));
        let params = PatchParams::default();
        let request = pods.patch_status(&pod.key.name, &params, &patch);
        let write = within("nominate pod", &pod.key.name, request).map_ok(Some);
        telling(&self.writer.wrote().pods, write).await
    }

    /// Ends one pod for another.
    async fn end(
        &self,
        victim: &Victim,
        waiter: &Pod,
        gpu: &str,
        memory: &mut Memory,
        now: Moment,
    ) -> Result<(), ActError> {
        let Victim { pod, overdue } = victim;
        if self.evict(pod, *overdue, memory, now).await? == Evicted::Ends {
            let (namespace, name) = (&pod.key.namespace, &pod.key.name);
            info!(
                namespace,
                pod = name,
                waiter = waiter.key.name,
                gpu,
                overdue,
                "evicted"
            );
            let note = format!(
                "made room on {gpu} for {}/{}, of higher priority",
                waiter.key.namespace, waiter.key.name
            );
            self.say(pod, "GpuMemoryReclaimed", note).await;
        }
        Ok(())
    }

    /// Evicts a pod, and notes what became of it.
    async fn evict(
        &self,
        pod: &Pod,
        overdue: bool,
        memory: &mut Memory,
        now: Moment,
    ) -> Result<Evicted, ActError> {
        let Key { namespace, name } = &pod.key;
        let evicted = self.writer.evict(namespace, name, &pod.uid, overdue).await;
        let answer = match &evicted {
            Ok(Evicted::Ends) => Answer::Goes,
            Ok(Evicted::Kept) => Answer::Refused,
            Err(_) => Answer::Failed,
        };
        memory.asked(&pod.uid, answer, now);
        if answer == Answer::Refused {
            info!(namespace, pod = name, "a disruption budget keeps it");
        }
        Ok(evicted?)
    }

    /// An Event on a pod. Nothing depends on it.
    async fn say(&self, pod: &Pod, reason: &str, note: String) {
        let about = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: Some(pod.key.namespace.clone()),
            name: Some(pod.key.name.clone()),
            uid: Some(pod.uid.clone()),
            ..ObjectReference::default()
        };
        let event = Event {
            type_: EventType::Normal,
            reason: reason.to_owned(),
            note: Some(note),
            action: reason.to_owned(),
            secondary: None,
        };
        let said = timeout(REQUEST_TIME, self.recorder.publish(&event, &about)).await;
        if let Ok(Err(error)) = said {
            warn!(error = %chain(&error), reason, "event not sent");
        }
    }
}

async fn within<T>(
    what: &'static str,
    name: &str,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, ActError> {
    let name = || name.to_owned();
    match timeout(REQUEST_TIME, request).await {
        Ok(answer) => answer.map_err(|source| ActError::Request {
            what,
            name: name(),
            source: Box::new(source),
        }),
        Err(_) => Err(ActError::TimedOut { what, name: name() }),
    }
}
