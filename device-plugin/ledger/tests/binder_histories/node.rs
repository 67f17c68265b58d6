//! Generates a node's random history: a kubelet that follows its rules, GPUs that fail, an agent
//! that crashes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bursar_ledger::units::{AllocationId, DeviceId, PodUid, Quanta, Quantum, Resource};
use bursar_ledger::{
    BindOutcome, Binding, BootTime, ClaimId, Gpu, GpuSpread, Health, Ledger, Placement, Priority,
    RETRY_DEADLINE, RETRY_GRACE, WaitHandle,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::checks::{self, Queue};
use crate::kubelet::{self, Pod};

/// The number of each kind of event. It shows a generator that no longer produces some kind.
#[derive(Clone, Debug, Default)]
pub(crate) struct Coverage {
    bound_at_once: u64,
    bound_later: u64,
    bound_on_retry: u64,
    waited: u64,
    spread: u64,
    managed: u64,
    ended_by_pod: u64,
    crashes: u64,
    lost_events: u64,
    gpu_deaths: u64,
    reused_device_ids: u64,
    gc_collected: u64,
    queue_heads_checked: u64,
    bound_by_pod_group: u64,
}

impl Coverage {
    pub(crate) fn add(&mut self, other: &Self) {
        for (sum, n) in self.fields().into_iter().zip(other.clone().fields()) {
            *sum += *n;
        }
    }

    pub(crate) fn assert_complete(mut self) {
        let text = format!("{self:?}");
        assert!(self.fields().iter().all(|n| **n > 0), "{text}");
    }

    fn fields(&mut self) -> [&mut u64; 14] {
        let Self {
            bound_at_once,
            bound_later,
            bound_on_retry: bound_by_hold,
            waited,
            spread,
            managed,
            ended_by_pod,
            crashes,
            lost_events,
            gpu_deaths,
            reused_device_ids: reused_tokens_of_living,
            gc_collected: collected,
            queue_heads_checked: heads_watched,
            bound_by_pod_group: bound_with_its_pod,
        } = self;
        [
            bound_at_once,
            bound_later,
            bound_by_hold,
            waited,
            spread,
            managed,
            ended_by_pod,
            crashes,
            lost_events,
            gpu_deaths,
            reused_tokens_of_living,
            collected,
            heads_watched,
            bound_with_its_pod,
        ]
    }
}

/// The crashes of the agent in this history.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Crashes {
    Sometimes,
    AfterEveryStep,
    /// A snapshot, restored through the checkpoint's JSON.
    AfterEveryStepThroughJson,
}

pub(crate) struct Node {
    random: StdRng,
    log: bool,
    crashes: Crashes,
    pub(crate) ledger: Ledger,
    pub(crate) now: BootTime,
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) pods: Vec<Pod>,
    free_device_ids: [BTreeSet<u16>; 2],
    next_pod: u64,
    calls: BTreeMap<ClaimId, WaitHandle>,
    /// The bindings that the ledger has reported.
    pub(crate) bound: BTreeMap<AllocationId, (PodUid, Placement)>,
    pub(crate) queue: Queue,
    /// Whether pods may have memory and wait: a GPU failed after they were placed, or restarted
    /// containers had released their memory.
    disturbed: bool,
    pub(crate) coverage: Coverage,
}

const RESOURCES: [Resource; 2] = [Resource::DeviceMemory, Resource::ManagedMemory];
const MANAGED: u32 = 12;

impl Node {
    pub(crate) fn new(seed: u64, log: bool) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let uniform = random.random_bool(0.8);
        let capacity = random.random_range(6..=20);
        let gpus: Vec<Gpu> = (0..random.random_range(1..=4))
            .map(|i| Gpu {
                uuid: format!("GPU-{i}").parse().unwrap(),
                capacity: Quanta(if uniform {
                    capacity
                } else {
                    random.random_range(4..=20)
                }),
                health: Health::Healthy,
            })
            .collect();
        let device_ids: u32 = gpus.iter().map(|gpu| gpu.capacity.0).sum();
        let mut ledger = Ledger::new(Quantum::Gib1);
        ledger.set_gpus(gpus.clone());
        ledger.set_managed_capacity(Quanta(MANAGED));
        let crashes = match seed % 16 {
            0 => Crashes::AfterEveryStepThroughJson,
            1..4 => Crashes::AfterEveryStep,
            _ => Crashes::Sometimes,
        };
        Self {
            random,
            log,
            crashes,
            ledger,
            now: BootTime(1_000_000),
            gpus,
            pods: Vec::new(),
            free_device_ids: [
                (0..device_ids as u16).collect(),
                (0..MANAGED as u16).collect(),
            ],
            next_pod: 0,
            calls: BTreeMap::new(),
            bound: BTreeMap::new(),
            queue: Queue::default(),
            disturbed: false,
            coverage: Coverage::default(),
        }
    }

    fn say(&self, text: impl FnOnce() -> String) {
        if self.log {
            eprintln!("{:>9} {}", self.now.0, text());
        }
    }

    /// Takes a random step, then checks all invariants.
    pub(crate) fn step(&mut self) {
        match self.random.random_range(0..100) {
            0..25 => self.create_pod(),
            25..55 => self.start_random_container(),
            55..60 => self.end_call(),
            60..64 => self.restart_pod(),
            64..75 => self.delete_pod(),
            75..84 => self.end_processes(),
            84..89 => self.flip_gpu(),
            89..92 => self.gc_pending(),
            _ => self.advance_clock(),
        }
        if self.crashes != Crashes::Sometimes || self.random.random_bool(0.05) {
            self.crash();
        }
        self.advance_ledger();
    }

    /// Drains the node: no more pods come, the GPUs are healthy, and running pods end. Every queued
    /// claim must be bound.
    pub(crate) fn drain(&mut self) {
        self.say(|| "drain".to_owned());
        for gpu in &mut self.gpus {
            gpu.health = Health::Healthy;
        }
        self.ledger.set_gpus(self.gpus.clone());
        self.queue.head = None;
        let mut progress = usize::MAX;
        let mut idle_rounds = 0;
        while let Some(first) = self.pods.iter().position(|pod| !pod.deleted) {
            self.now = self.now + RETRY_GRACE / 2;
            if self.random.random_bool(0.2) {
                self.crash();
            }
            for pod in 0..self.pods.len() {
                self.start_next_container(pod);
            }
            self.advance_ledger();
            let last = std::mem::replace(&mut progress, self.progress());
            idle_rounds = if progress == last { idle_rounds + 1 } else { 0 };
            if let Some(over) = self
                .pods
                .iter()
                .position(|pod| pod.deleted || self.is_running(pod))
            {
                self.remove(over);
            } else if idle_rounds > 3 {
                // Memory that was set aside has been freed by now. Claims that the node cannot hold
                // wait for ever.
                if self.disturbed {
                    checks::check_some_memory_is_bound(self);
                } else {
                    checks::check_no_claim_is_blocked(self);
                }
                self.remove(first);
            }
            self.advance_ledger();
        }
        while !self.pods.is_empty() {
            self.remove(0);
        }
        self.advance_ledger();
        let view = self.ledger.view(self.now);
        assert!(
            view.gpus.iter().all(|gpu| gpu.bound == Quanta::ZERO),
            "memory leaked: {view:?}"
        );
        assert_eq!(view.managed.bound, Quanta::ZERO, "managed memory leaked");
        assert_eq!(view.queued_claims, 0, "a queued claim outlived its pod");
    }

    /// Whether every container of the pod has had its memory.
    fn is_running(&self, pod: &Pod) -> bool {
        let last = pod.containers.last();
        pod.started == pod.containers.len()
            && last.is_some_and(|last| self.bound.contains_key(&last.id))
    }

    fn progress(&self) -> usize {
        let started: usize = self.pods.iter().map(|pod| pod.started).sum();
        1000 * self.pods.len() + started + self.bound.len()
    }

    /// Binds the queued claims and checks all invariants.
    fn advance_ledger(&mut self) {
        for binding in self.ledger.advance(self.now) {
            self.say(|| format!("  advance bound {binding:?}"));
            let call = self.calls.remove(&binding.claim);
            assert!(call.is_some(), "bound without a call: {binding:?}");
            self.coverage.bound_later += 1;
            self.record_binding(binding);
        }
        assert!(
            self.ledger.advance(self.now).is_empty(),
            "advance is not idempotent"
        );
        let before = std::mem::take(&mut self.queue);
        self.queue = checks::check_all(self, before);
        self.coverage.queue_heads_checked += u64::from(self.queue.head.is_some());
    }

    fn record_binding(&mut self, binding: Binding) {
        checks::check_placement(self, &binding);
        match &binding.placement {
            Placement::Managed(_) => self.coverage.managed += 1,
            Placement::Device(shares) => self.coverage.spread += u64::from(shares.len() > 1),
        }
        for id in &binding.allocations {
            let new = (binding.pod.clone(), binding.placement.clone());
            if let Some(old) = self.bound.insert(*id, new.clone()) {
                assert_eq!(old, new, "{id} was bound twice");
            }
        }
    }

    fn create_pod(&mut self) {
        let number = self.next_pod;
        self.next_pod += 1;
        let random = &mut self.random;
        let (which, largest) = if random.random_bool(0.1) {
            (1, 8)
        } else {
            (0, 14)
        };
        let largest = if random.random_bool(0.1) {
            2 * largest
        } else {
            largest
        };
        let sizes = kubelet::random_sizes(random, largest);
        let free = &mut self.free_device_ids[which];
        let Some(containers) = kubelet::admit(random, number, RESOURCES[which], &sizes, free)
        else {
            return;
        };
        let gpus = if random.random_bool(0.1) {
            random.random_range(2..=3)
        } else {
            1
        };
        let pod = Pod {
            uid: kubelet::uid(number),
            priority: Priority(if random.random_bool(0.2) {
                random.random_range(-1..=2)
            } else {
                0
            }),
            spread: kubelet::spread_over(gpus),
            containers,
            started: 0,
            deleted: false,
        };
        self.say(|| format!("create {pod:?}"));
        let others: BTreeSet<u16> = self
            .pods
            .iter()
            .filter(|other| other.deleted)
            .flat_map(|other| other.device_ids(RESOURCES[which]).collect::<Vec<_>>())
            .collect();
        self.coverage.reused_device_ids += u64::from(
            pod.device_ids(RESOURCES[which])
                .any(|device_id| others.contains(&device_id)),
        );
        for container in &pod.containers {
            let ids = container
                .device_ids
                .ids(container.resource)
                .map(|id: DeviceId| id.to_string());
            let mut ids: Vec<String> = ids.collect();
            ids.reverse();
            let device_ids =
                bursar_ledger::units::DeviceIdSet::from_ids(container.resource, &ids).unwrap();
            self.ledger.add_pending(
                container.id,
                container.resource,
                device_ids.clone(),
                self.now,
            );
            if self.log || number.is_multiple_of(4) {
                let before = self.ledger.clone();
                self.ledger
                    .add_pending(container.id, container.resource, device_ids, self.now);
                assert_eq!(
                    self.ledger, before,
                    "a repeated allocation changed something"
                );
            }
        }
        self.pods.push(pod);
    }

    fn random_pod(&mut self) -> Option<usize> {
        (!self.pods.is_empty()).then(|| self.random.random_range(0..self.pods.len()))
    }

    fn start_random_container(&mut self) {
        if let Some(pod) = self.random_pod() {
            self.start_next_container(pod);
        }
    }

    /// Starts the pod's next container if the one before has its memory. Otherwise starts the one
    /// before again.
    fn start_next_container(&mut self, index: usize) {
        let pod = &self.pods[index];
        if pod.deleted {
            return;
        }
        let started = pod.started.checked_sub(1);
        let ready = started.is_none_or(|last| self.bound.contains_key(&pod.containers[last].id));
        let next = match started {
            _ if ready && pod.started < pod.containers.len() => pod.started,
            Some(last) => last,
            None => return,
        };
        self.pods[index].started = next + 1;
        self.start_container(index, next);
    }

    fn start_container(&mut self, index: usize, container: usize) {
        let start = self.pods[index].bind_request(container);
        let loses_answer = self.random.random_bool(0.05);
        if loses_answer {
            // The agent crashes before it writes the checkpoint, so the kubelet gets no answer and
            // retries.
            self.coverage.lost_events += 1;
            let mut crashed = self.ledger.clone();
            let _lost = crashed.bind(start.clone(), self.now).unwrap();
            self.crash();
        }
        let started = self.ledger.bind(start.clone(), self.now).unwrap();
        self.say(|| format!("start {start:?}: {started:?}"));
        self.coverage.ended_by_pod += started.ended.len() as u64;
        checks::check_ended(self, &start, &started.ended);
        for id in &started.ended {
            self.bound.remove(id);
        }
        match started.outcome {
            BindOutcome::Bound(binding) => {
                let again = self.ledger.bind(start, self.now).unwrap().outcome;
                assert_eq!(
                    again,
                    BindOutcome::Bound(binding.clone()),
                    "a second bind has another outcome"
                );
                let known = self.bound.contains_key(&binding.allocations[0]);
                let held = self.calls.remove(&binding.claim).is_none()
                    && self.queue.may_be_granted(binding.claim);
                self.coverage.bound_at_once += u64::from(!known && !held);
                let later = !known && !held && self.pods[index].started > 1;
                self.coverage.bound_by_pod_group += u64::from(later);
                self.coverage.bound_on_retry += u64::from(!known && held);
                self.record_binding(binding);
            }
            BindOutcome::Queued(ticket, reason) => {
                self.coverage.waited += 1;
                assert_eq!(
                    reason.needed,
                    start.device_ids.quanta().bytes(Quantum::Gib1)
                );
                if let Some(stale) = self.calls.insert(ticket.claim, ticket) {
                    let before = self.ledger.clone();
                    self.ledger.stop_waiting(stale, self.now);
                    assert_eq!(
                        self.ledger, before,
                        "a stale call's end closed a later call"
                    );
                }
            }
        }
    }

    fn end_call(&mut self) {
        let n = self.calls.len();
        if n > 0 {
            let nth = self.random.random_range(0..n);
            let claim = *self.calls.keys().nth(nth).unwrap();
            let ticket = self.calls.remove(&claim).unwrap();
            self.say(|| format!("call ends: {ticket:?}"));
            self.ledger.stop_waiting(ticket, self.now);
            self.ledger.stop_waiting(ticket, self.now);
        }
    }

    /// Recreates the pod's sandbox: its containers start again from the first.
    fn restart_pod(&mut self) {
        if let Some(index) = self.random_pod()
            && !self.pods[index].deleted
            && self.pods[index].started > 0
        {
            self.say(|| format!("recreate the sandbox of {}", self.pods[index].uid));
            self.pods[index].started = 1;
            self.disturbed = true;
            self.start_container(index, 0);
        }
    }

    /// Deletes the pod: the kubelet gives its device ids to others while its processes still run.
    fn delete_pod(&mut self) {
        if let Some(index) = self.random_pod() {
            self.say(|| format!("delete {}", self.pods[index].uid));
            self.mark_deleted(index);
        }
    }

    fn mark_deleted(&mut self, index: usize) {
        let pod = &mut self.pods[index];
        if !std::mem::replace(&mut pod.deleted, true) {
            for (resource, free) in RESOURCES.into_iter().zip(&mut self.free_device_ids) {
                free.extend(pod.device_ids(resource));
            }
        }
    }

    fn end_processes(&mut self) {
        if let Some(index) = self.random_pod()
            && (self.pods[index].deleted || self.random.random_bool(0.3))
        {
            self.remove(index);
        }
    }

    fn remove(&mut self, index: usize) {
        self.mark_deleted(index);
        let pod = self.pods.remove(index);
        self.say(|| format!("gone {}", pod.uid));
        let released = self.ledger.release_pod(&pod.uid);
        assert!(
            self.ledger.release_pod(&pod.uid).is_empty(),
            "a pod went twice"
        );
        let own: BTreeSet<_> = pod
            .containers
            .iter()
            .map(|container| container.id)
            .collect();
        let foreign: Vec<_> = released.iter().filter(|id| !own.contains(id)).collect();
        // A pending allocation of a rejected pod with the same device ids ends with the pod that
        // started.
        assert!(
            foreign.iter().all(|id| !self.is_live(**id)),
            "took {foreign:?} along"
        );
        for id in &released {
            self.bound.remove(id);
        }
        let outlives = self.bound.values().any(|(other, _)| *other == pod.uid);
        assert!(!outlives, "memory of {} outlived it", pod.uid);
        let waiting: BTreeSet<ClaimId> = self.calls.keys().copied().collect();
        // No agent will answer these calls, so the restarted agent ends them.
        for claim in waiting {
            let ticket = self.calls[&claim];
            let before = self.ledger.clone();
            self.ledger.stop_waiting(ticket, self.now);
            if self.ledger == before {
                self.calls.remove(&claim);
            } else {
                self.ledger = before;
            }
        }
    }

    pub(crate) fn priority_of(&self, uid: &PodUid) -> i32 {
        self.pod(uid).priority.0
    }

    /// Whether the pod has containers that are placed together.
    pub(crate) fn has_several_containers(&self, uid: &PodUid) -> bool {
        self.pod(uid).containers.len() > 1
    }

    pub(crate) fn shape_of(&self, uid: &PodUid) -> GpuSpread {
        self.pod(uid).spread
    }

    fn pod(&self, uid: &PodUid) -> &Pod {
        self.pods
            .iter()
            .find(|pod| pod.uid == *uid)
            .expect("memory of a pod that is gone")
    }

    pub(crate) fn is_live(&self, id: AllocationId) -> bool {
        self.pods
            .iter()
            .filter(|pod| !pod.deleted)
            .any(|pod| pod.containers.iter().any(|container| container.id == id))
    }

    fn flip_gpu(&mut self) {
        let which = self.random.random_range(0..self.gpus.len());
        let gpu = &mut self.gpus[which];
        gpu.health = match gpu.health {
            Health::Healthy => Health::Unhealthy,
            Health::Unhealthy => Health::Healthy,
        };
        self.coverage.gpu_deaths += u64::from(gpu.health == Health::Unhealthy);
        self.disturbed = true;
        let vanishes = self.random.random_bool(0.3);
        self.say(|| format!("gpus {:?}, vanishes: {vanishes}", self.gpus));
        let listed = self
            .gpus
            .iter()
            .filter(|gpu| !vanishes || gpu.health == Health::Healthy);
        self.ledger.set_gpus(listed.cloned());
        self.queue.head = None;
    }

    fn gc_pending(&mut self) {
        self.now = self.now + Duration::from_secs(self.random.random_range(0..90));
        let known: BTreeSet<AllocationId> = self
            .pods
            .iter()
            .filter(|pod| !pod.deleted)
            .flat_map(|pod| pod.containers.iter().map(|container| container.id))
            .collect();
        let collected = self.ledger.gc_pending(&known, self.now);
        self.say(|| format!("collect {collected:?}"));
        self.coverage.gc_collected += collected.len() as u64;
        for id in collected {
            assert!(
                !known.contains(&id),
                "collected {id}, which the kubelet knows"
            );
            assert!(
                !self.bound.contains_key(&id),
                "collected {id}, which is bound"
            );
        }
    }

    fn advance_clock(&mut self) {
        let far = self.random.random_bool(0.1);
        let most = if far {
            2 * RETRY_DEADLINE.as_millis() as u64
        } else {
            30_000
        };
        self.now = self.now + Duration::from_millis(self.random.random_range(0..most));
        self.say(|| "time passes".to_owned());
    }

    /// Restarts the agent from its checkpoint: every open call has ended.
    fn crash(&mut self) {
        self.coverage.crashes += 1;
        let mut snapshot = self.ledger.snapshot();
        if self.crashes == Crashes::AfterEveryStepThroughJson {
            let text = serde_json::to_string(&snapshot).unwrap();
            snapshot = serde_json::from_str(&text).unwrap();
        }
        let bindings: Vec<_> = self.ledger.bindings().collect();
        self.ledger = Ledger::restore(snapshot, Quantum::Gib1, self.now).unwrap();
        assert!(
            self.ledger.bindings().eq(bindings),
            "the restart changed a binding"
        );
        self.calls.clear();
        self.say(|| "crash".to_owned());
    }
}
