//! Pods that wait for a GPU: moved to another node, or given room by pods of lower priority.

mod capacity;
mod preempt;
mod relocate;
mod reservations;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bursar_crds::gpu_node::Reservation;

use super::{Pod, Rules, Step, gpu_node};
use crate::cluster::Key;
use crate::placement::history::{Memory, Moment};
use crate::placement::node::Gpu;
use crate::placement::pod::{Owner, Place, PodFacts};
use crate::placement::snapshot::Scene;
use crate::quanta::Quanta;

/// How long a pod has waited on its node before anybody goes for it: who is ending anyway may be enough.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long the scheduler has had no node for a pod before anybody goes for it: its own preemption comes first.
const UNPLACED_PATIENCE: Duration = Duration::from_secs(10);
/// How many waiters are helped, and pods asked to go for one, in one plan.
const AT_ONCE: usize = 20;
/// How many waiters are looked at in one plan. It has to be made in less than the time between two.
const LOOKS: usize = 100;

/// What a Job that was not looked at yet is taken for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unseen {
    /// One that keeps its pods: nobody goes on a guess.
    Keeps,
    /// One that lets them go: nothing that is under way is given up on a guess either.
    LetsGo,
}

/// The reservations of each node.
type Reserved = BTreeMap<String, Vec<Reservation>>;

/// A pod that waits for room on one GPU.
#[derive(Clone, Copy)]
struct Want<'a> {
    key: &'a Key,
    pod: &'a PodFacts,
    quanta: Quanta,
    /// The node that it is on; none where the scheduler has none.
    node: Option<&'a str>,
}

/// The steps for everybody who waits.
pub(super) fn plan(
    scene: &Scene<'_>,
    memory: &mut Memory,
    rules: &Rules,
    now: Moment,
) -> Vec<Step> {
    let mut planner = Planner {
        scene,
        memory,
        rules,
        now,
        wants: BTreeMap::new(),
        going: BTreeMap::new(),
        nominated: BTreeMap::new(),
        moves: Vec::new(),
        looked: Vec::new(),
        hopeless: Vec::new(),
        jobs: BTreeMap::new(),
    };
    planner.wants = planner.wants();
    for (uid, (_, pod)) in &scene.pods {
        match &pod.place {
            Place::On(node)
                if planner.is_ending(uid, pod) && !planner.memory.overstays(uid, now) =>
            {
                let going = planner.going.entry(node).or_default();
                *going = going.plus(pod.asks);
            }
            Place::Nowhere {
                nominated: Some(node),
                ..
            } => planner.nominated.entry(node).or_default().push(pod),
            Place::On(_) | Place::Nowhere { .. } => {}
        }
    }
    let mut steps = planner.steps();
    let Planner { looked, jobs, .. } = planner;
    memory.looked_at(looked, now);
    steps.extend(jobs.into_values());
    steps
}

struct Planner<'a> {
    scene: &'a Scene<'a>,
    memory: &'a Memory,
    rules: &'a Rules,
    now: Moment,
    /// Who waits for one GPU, by UID.
    wants: BTreeMap<&'a str, Want<'a>>,
    /// What those ask for who are going, by node.
    going: BTreeMap<&'a str, Quanta>,
    /// The pods for whom the scheduler keeps room, by node.
    nominated: BTreeMap<&'a str, Vec<&'a PodFacts>>,
    /// The moves of this plan: the owner, the node that has room, and how much of that is taken by it.
    moves: Vec<(&'a str, &'a str, Quanta)>,
    /// The waiters that were looked at.
    looked: Vec<String>,
    /// Those without a node for whom no GPU has room, whoever goes: others like them need no look at all nodes.
    hopeless: Vec<Want<'a>>,
    /// Looks at the Jobs whose answer would matter.
    jobs: BTreeMap<String, Step>,
}

impl<'a> Planner<'a> {
    fn steps(&mut self) -> Vec<Step> {
        let mut reserved = self.still_reserved();
        let (mut steps, mut helped) = (Vec::new(), 0);
        for want in self.unhelped(&reserved) {
            if helped == AT_ONCE {
                break;
            }
            self.looked.push(want.pod.uid.clone());
            if let Some((owner, at, to)) = self.elsewhere(&want) {
                // Before it is time nobody goes for it either: it loses nothing by going, and they do.
                if self.may_go_now(&want, owner) {
                    self.moves.push((owner, to, want.pod.asks));
                    helped += 1;
                    steps.push(Step::Move {
                        pod: pod(want.key, want.pod),
                        owner: owner.to_owned(),
                        from: gpu_node(self.scene, at),
                        to: to.to_owned(),
                        room: want.pod.asks,
                    });
                }
            } else if let Some((node, reservation)) = self.here(&want, &reserved) {
                helped += 1;
                reserved.entry(node).or_default().push(reservation);
            }
        }
        steps.extend(self.writes(&reserved));
        for (node, held) in &reserved {
            for reservation in held {
                steps.extend(self.make_room(node, reservation));
            }
        }
        steps
    }

    /// Who waits for one GPU.
    fn wants(&self) -> BTreeMap<&'a str, Want<'a>> {
        let scene = self.scene;
        let on_nodes = scene.gpu_nodes.iter().flat_map(|(node, gpus)| {
            gpus.waiting.iter().filter_map(|waiter| {
                let (key, pod) = *scene.pods.get(waiter.pod.as_str())?;
                (pod.node() == Some(*node)).then_some(Want {
                    key,
                    pod,
                    quanta: waiter.quanta,
                    node: Some(*node),
                })
            })
        });
        let unplaced = scene.pods.values().filter_map(|(key, pod)| {
            // What a pod with several containers needs of one GPU is seen when they start.
            let [(_, quanta)] = pod.containers.as_slice() else {
                return None;
            };
            let refused = matches!(
                pod.place,
                Place::Nowhere {
                    refused: Some(_),
                    ..
                }
            );
            (refused && *quanta == pod.asks).then_some(Want {
                key,
                pod,
                quanta: *quanta,
                node: None,
            })
        });
        let waits = |want: &Want<'_>| {
            !self.is_ending(&want.pod.uid, want.pod) && want.pod.pending && want.pod.one_gpu
        };
        let mut wants = BTreeMap::new();
        for want in on_nodes.chain(unplaced).filter(waits) {
            // Of several containers that wait the one that has waited longest is first.
            wants.entry(want.pod.uid.as_str()).or_insert(want);
        }
        wants
    }

    /// Who has waited for long enough and has no reservation, the most important first, and then the longest waiting.
    /// Of too many those whose turn it is: whose last look is the longest ago.
    fn unhelped(&self, reserved: &Reserved) -> Vec<Want<'a>> {
        let helped = reserved.values().flatten();
        let helped: BTreeSet<&str> = helped.map(|held| held.waiter.as_str()).collect();
        let rank = |want: &Want<'a>| {
            let pod = want.pod;
            (Reverse(pod.priority), Reverse(self.waited(want)), &pod.uid)
        };
        let waits = |want: &Want<'_>| {
            let patience = match want.node {
                Some(_) => PATIENCE,
                None => UNPLACED_PATIENCE,
            };
            self.waited(want) >= patience && !helped.contains(want.pod.uid.as_str())
        };
        let mut wants: Vec<Want<'a>> = self.wants.values().copied().filter(waits).collect();
        wants.sort_by_cached_key(|want| (self.memory.last_look(&want.pod.uid), rank(want)));
        wants.truncate(LOOKS);
        wants.sort_by_cached_key(rank);
        wants
    }

    fn waited(&self, want: &Want<'_>) -> Duration {
        self.memory.waited(&want.pod.uid, self.now)
    }

    fn is_ending(&self, uid: &str, pod: &PodFacts) -> bool {
        pod.ending || self.memory.goes(uid, self.now)
    }

    /// Whether nothing is lost with the pod but its own work: a Job may take a deleted pod for a failed one.
    fn lets_go(&mut self, key: &Key, pod: &PodFacts, unseen: Unseen) -> bool {
        let Owner::Job(job) = &pod.owner else {
            return true;
        };
        if let Some(lets) = self.memory.jobs.get(&job.uid) {
            return *lets;
        }
        let look = Step::LookAtJob {
            namespace: key.namespace.clone(),
            job: job.clone(),
        };
        self.jobs.insert(job.uid.clone(), look);
        unseen == Unseen::LetsGo
    }
}

/// The waiter's reservation of a GPU. What is bound for it there already is included: so the agent counts.
fn reservation(want: &Want<'_>, gpu: &Gpu) -> Option<Reservation> {
    let has = gpu.pods.get(&want.pod.uid).copied().unwrap_or_default();
    Some(Reservation {
        gpu: gpu.uuid.clone(),
        waiter: want.pod.uid.clone(),
        quanta: i32::try_from(want.quanta.plus(has).count()).ok()?,
    })
}

fn pod(key: &Key, facts: &PodFacts) -> Pod {
    Pod {
        key: key.clone(),
        uid: facts.uid.clone(),
    }
}
