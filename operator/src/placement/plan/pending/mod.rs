//! Plans for pending pods: relocation to another node, or reservations and preemption.

mod capacity;
mod preempt;
mod relocate;
mod reservations;
mod shares;
mod supply;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bursar_crds::gpu_node::Reservation;

use super::{PlacementOptions, PodRef, Step, gpu_node_ref};
use crate::cluster::Key;
use crate::cluster::facts::node::GpuFacts;
use crate::cluster::facts::pod::{Owner, Placement, PodFacts};
use crate::cluster::facts::snapshot::Snapshot;
use crate::placement::history::{History, Uptime};
use crate::quanta::Quanta;
use reservations::group_by_pod;
use shares::{MAX_CONTAINERS, Shares};

/// How long a pod waits on its node before it preempts. Pods that are terminating anyway may
/// suffice.
const PREEMPTION_DELAY: Duration = Duration::from_secs(2);
/// How long a pod is unschedulable before it preempts. The scheduler's own preemption comes first.
const UNSCHEDULABLE_DELAY: Duration = Duration::from_secs(10);
/// How many pods one plan helps, and how many victims one step evicts.
const MAX_STEPS: usize = 20;
/// How many pending pods one plan considers, so that it fits into the interval.
const MAX_CONSIDERED: usize = 100;

/// The assumed policy of a Job that has not been read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum JobAssumption {
    /// The Job would fail: no pod is evicted on a guess.
    FailsOnDisruption,
    /// The Job ignores disruption: no reservation is dropped on a guess.
    IgnoresDisruption,
}

type ReservationsByNode = BTreeMap<String, Vec<Reservation>>;

/// A pod that needs room on GPUs.
#[derive(Clone, Copy)]
struct PendingPod<'a> {
    key: &'a Key,
    pod: &'a PodFacts,
    /// The amount that the longest waiting container lacks. The whole request of an unscheduled
    /// pod.
    quanta: Quanta,
    /// The pod's node, if it is bound.
    node: Option<&'a str>,
}

impl PendingPod<'_> {
    /// The shares that the pod still needs on the GPUs of a node.
    fn shares(&self, gpus: &GpuFacts) -> Option<Shares> {
        let capacities = gpus.capacities_for(&self.key.namespace);
        let are_many = self.pod.containers.len() > MAX_CONTAINERS && self.node.is_some();
        // The agent places all containers of a pod together, the first time that one starts.
        match gpus.lists(&self.pod.uid) || are_many {
            true => Shares::of_container(self.quanta, self.pod.min_gpus, &capacities),
            false => Shares::of_pod(self.pod, &capacities),
        }
    }
}

/// Plans the steps for all pending pods.
pub(super) fn plan(
    snapshot: &Snapshot<'_>,
    history: &mut History,
    options: &PlacementOptions,
    now: Uptime,
) -> Vec<Step> {
    let mut planner = Planner {
        snapshot,
        history,
        options,
        now,
        pending: BTreeMap::new(),
        terminating: BTreeMap::new(),
        nominated: BTreeMap::new(),
        relocations: Vec::new(),
        considered: Vec::new(),
        unsatisfiable: Vec::new(),
        victims: BTreeSet::new(),
        has_closed_gpus: snapshot.has_closed_gpus(),
        jobs: BTreeMap::new(),
    };
    planner.pending = planner.pending_pods();
    for (uid, (_, pod)) in &snapshot.pods {
        match &pod.placement {
            Placement::Node(node)
                if planner.is_ending(uid, pod)
                    && !planner.history.termination_overdue(uid, now) =>
            {
                let terminating = planner.terminating.entry(node).or_default();
                *terminating = terminating.plus(pod.device);
            }
            Placement::Unscheduled {
                nominated: Some(node),
                ..
            } => planner.nominated.entry(node).or_default().push(pod),
            Placement::Node(_) | Placement::Unscheduled { .. } => {}
        }
    }
    let mut steps = planner.steps();
    let Planner {
        considered, jobs, ..
    } = planner;
    history.record_considered(considered, now);
    steps.extend(jobs.into_values());
    steps
}

struct Planner<'a> {
    snapshot: &'a Snapshot<'a>,
    history: &'a History,
    options: &'a PlacementOptions,
    now: Uptime,
    /// The pending pods by UID.
    pending: BTreeMap<&'a str, PendingPod<'a>>,
    /// The quanta of terminating pods, by node.
    terminating: BTreeMap<&'a str, Quanta>,
    /// The nominated pods by node.
    nominated: BTreeMap<&'a str, Vec<&'a PodFacts>>,
    /// The relocations of this plan: owner, target node and room.
    relocations: Vec<(&'a str, &'a str, Quanta)>,
    /// The pods that this plan considered.
    considered: Vec<String>,
    /// Unscheduled pods that no victims could help. Similar pods need no search.
    unsatisfiable: Vec<PendingPod<'a>>,
    /// The victims of this plan. One on several GPUs may make room for several pods.
    victims: BTreeSet<&'a str>,
    /// Whether some GPU is open to one namespace alone.
    has_closed_gpus: bool,
    /// Reads of the Jobs whose policies matter.
    jobs: BTreeMap<String, Step>,
}

impl<'a> Planner<'a> {
    fn steps(&mut self) -> Vec<Step> {
        let mut reserved = self.useful_reservations();
        let (mut steps, mut helped) = (Vec::new(), 0);
        for pending in self.without_reservation(&reserved) {
            if helped == MAX_STEPS {
                break;
            }
            self.considered.push(pending.pod.uid.clone());
            if let Some((owner, at, to)) = self.find_relocation(&pending) {
                // A pod that may relocate soon does not preempt: it loses nothing, and its victims
                // would.
                if self.may_relocate_now(&pending, owner) {
                    self.relocations.push((owner, to, pending.pod.device));
                    helped += 1;
                    steps.push(Step::Relocate {
                        pod: pod_ref(pending.key, pending.pod),
                        owner: owner.to_owned(),
                        from: gpu_node_ref(self.snapshot, at),
                        to: to.to_owned(),
                        room: pending.pod.device,
                    });
                }
            } else if let Some((node, reservations)) = self.find_reservations(&pending, &reserved) {
                helped += 1;
                reserved.entry(node).or_default().extend(reservations);
            }
        }
        steps.extend(self.reservation_writes(&reserved));
        for (node, reservations) in &reserved {
            for of_pod in group_by_pod(reservations) {
                steps.extend(self.preempt(node, &of_pod));
            }
        }
        steps
    }

    /// The pods that need room on GPUs, by UID.
    fn pending_pods(&self) -> BTreeMap<&'a str, PendingPod<'a>> {
        let snapshot = self.snapshot;
        let on_nodes = snapshot.gpu_nodes.iter().flat_map(|(node, gpus)| {
            gpus.pending.iter().filter_map(|container| {
                let (key, pod) = *snapshot.pods.get(container.pod.as_str())?;
                (pod.node() == Some(*node)).then_some(PendingPod {
                    key,
                    pod,
                    quanta: container.quanta,
                    node: Some(*node),
                })
            })
        });
        let unplaced = snapshot.pods.values().filter_map(|(key, pod)| {
            let refused = matches!(
                pod.placement,
                Placement::Unscheduled {
                    unschedulable_since: Some(_),
                    ..
                }
            );
            refused.then_some(PendingPod {
                key,
                pod,
                quanta: pod.device,
                node: None,
            })
        });
        let waits = |pending: &PendingPod<'_>| {
            !self.is_ending(&pending.pod.uid, pending.pod) && pending.pod.pending
        };
        let mut pending_pods = BTreeMap::new();
        for pending in on_nodes.chain(unplaced).filter(waits) {
            // Among several waiting containers of a pod the longest waiting comes first.
            pending_pods
                .entry(pending.pod.uid.as_str())
                .or_insert(pending);
        }
        pending_pods
    }

    /// The pods that have waited for their delay and have no reservation, by priority and then by
    /// waiting time. When there are too many, the ones considered longest ago have their turn.
    fn without_reservation(&self, reserved: &ReservationsByNode) -> Vec<PendingPod<'a>> {
        let helped = reserved.values().flatten();
        let helped: BTreeSet<&str> = helped
            .map(|reservation| reservation.pod_uid.as_str())
            .collect();
        let rank = |pending: &PendingPod<'a>| {
            let pod = pending.pod;
            (
                Reverse(pod.priority),
                Reverse(self.waited(pending)),
                &pod.uid,
            )
        };
        let waits = |pending: &PendingPod<'_>| {
            let patience = match pending.node {
                Some(_) => PREEMPTION_DELAY,
                None => UNSCHEDULABLE_DELAY,
            };
            self.waited(pending) >= patience && !helped.contains(pending.pod.uid.as_str())
        };
        let mut pending_pods: Vec<PendingPod<'a>> =
            self.pending.values().copied().filter(waits).collect();
        pending_pods.sort_by_cached_key(|pending| {
            (
                self.history.last_considered(&pending.pod.uid),
                rank(pending),
            )
        });
        pending_pods.truncate(MAX_CONSIDERED);
        pending_pods.sort_by_cached_key(rank);
        pending_pods
    }

    fn waited(&self, pending: &PendingPod<'_>) -> Duration {
        self.history.waited(&pending.pod.uid, self.now)
    }

    fn is_ending(&self, uid: &str, pod: &PodFacts) -> bool {
        pod.terminating || self.history.eviction_accepted(uid, self.now)
    }

    /// Whether an eviction costs nothing but the pod's own work. A Job may count a deleted pod as a
    /// failure.
    fn ignores_disruption(&mut self, key: &Key, pod: &PodFacts, assumption: JobAssumption) -> bool {
        let Owner::Job(job) = &pod.owner else {
            return true;
        };
        if let Some(ignores) = self.history.jobs.get(&job.uid) {
            return *ignores;
        }
        let read = Step::ReadJob {
            namespace: key.namespace.clone(),
            job: job.clone(),
        };
        self.jobs.insert(job.uid.clone(), read);
        assumption == JobAssumption::IgnoresDisruption
    }
}

fn pod_ref(key: &Key, facts: &PodFacts) -> PodRef {
    PodRef {
        key: key.clone(),
        uid: facts.uid.clone(),
    }
}
