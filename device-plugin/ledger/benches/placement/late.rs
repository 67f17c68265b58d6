//! Simulates Bursar: the scheduler places pods by node totals, the kubelet allocates and starts,
//! and the real ledger binds late.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap};

use bursar_ledger::units::{AllocationId, DeviceIdSet, PodUid, Quanta, Quantum, Resource};
use bursar_ledger::{
    BindOutcome, BindRequest, Binding, BootTime, ClaimId, Gpu, GpuSpread, Health, Ledger, Priority,
    WaitHandle,
};

use crate::Outcome;
use crate::workload::{GPU_GIB, GPUS, Pod, Workload};

/// How long `PreStartContainer` waits for memory.
const RPC_MS: u64 = 25_000;
/// When the kubelet retries a failed start: the first time, and later.
const RETRY_MS: [u64; 2] = [500, 14_000];
/// How often the agent checks whether a pod's cgroup is gone.
const POLL_MS: u64 = 500;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The pod's processes are gone.
    Ended(usize),
    /// The pod is created.
    Created(usize),
    /// The kubelet calls `PreStartContainer` for the n-th time.
    ContainerStarts(usize, usize),
    /// This call has reached its timeout.
    CallEnds(usize, usize),
}

struct Node<'a> {
    work: &'a Workload,
    ledger: Ledger,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    /// Pods that the scheduler has not placed, in order of creation.
    pending: Vec<usize>,
    free_device_ids: BTreeSet<u16>,
    device_ids: HashMap<usize, DeviceIdSet>,
    /// Open calls.
    calls: HashMap<ClaimId, (usize, WaitHandle)>,
    wait_times_ms: Vec<u64>,
    failures: usize,
    used_gib_ms: u128,
    last_event_ms: u64,
    /// Whether the scheduler uses the node's label of the largest free GPU.
    steered: bool,
}

pub(crate) fn run(work: &Workload, steered: bool) -> Outcome {
    let mut ledger = Ledger::new(Quantum::Gib1);
    ledger.set_gpus((0..GPUS).map(|i| Gpu {
        uuid: format!("GPU-{i}").parse().expect("a GPU's name"),
        capacity: Quanta(GPU_GIB),
        health: Health::Healthy,
    }));
    let created = work.pods.iter().enumerate();
    let mut node = Node {
        work,
        ledger,
        events: created
            .map(|(pod, p)| Reverse((p.created_ms, Event::Created(pod))))
            .collect(),
        pending: Vec::new(),
        free_device_ids: (0..(GPUS as u16 * GPU_GIB as u16)).collect(),
        device_ids: HashMap::new(),
        calls: HashMap::new(),
        wait_times_ms: vec![u64::MAX; work.pods.len()],
        failures: 0,
        used_gib_ms: 0,
        last_event_ms: work.pods.last().map_or(0, |pod| pod.created_ms),
        steered,
    };
    while let Some(Reverse((now, event))) = node.events.pop() {
        node.handle(event, now);
        let at_once = node
            .events
            .peek()
            .is_some_and(|Reverse((at, _))| *at == now);
        if !at_once {
            node.schedule(now);
            for binding in node.ledger.advance(BootTime(now)) {
                node.run_pod(&binding, now);
            }
        }
    }
    node.failures += node
        .wait_times_ms
        .iter()
        .filter(|&&wait| wait == u64::MAX)
        .count();
    Outcome {
        wait_times_ms: node.wait_times_ms,
        failures: node.failures,
        used_gib_ms: node.used_gib_ms,
        window_ms: node.last_event_ms,
    }
}

impl Node<'_> {
    fn handle(&mut self, event: Event, now: u64) {
        match event {
            Event::Created(pod) => self.pending.push(pod),
            Event::Ended(pod) => {
                self.ledger.release_pod(&uid(pod));
                let device_ids = self
                    .device_ids
                    .remove(&pod)
                    .expect("a pod that ran had device ids");
                self.free_device_ids.extend(device_ids.indexes());
            }
            Event::ContainerStarts(pod, attempt) => self.start(pod, attempt, now),
            Event::CallEnds(pod, attempt) => {
                let call = self.calls.iter().find(|(_, (other, _))| *other == pod);
                if let Some((&claim, &(_, ticket))) = call {
                    self.calls.remove(&claim);
                    self.ledger.stop_waiting(ticket, BootTime(now));
                    let retry = RETRY_MS[attempt.min(RETRY_MS.len() - 1)];
                    let again = Event::ContainerStarts(pod, attempt + 1);
                    self.events.push(Reverse((now + retry, again)));
                }
            }
        }
    }

    /// Places every pod that the node's total (and label) has room for, in order of creation. A pod
    /// that does not fit is skipped, as kube-scheduler does, but without its back-off.
    fn schedule(&mut self, now: u64) {
        let mut label = self.largest_free(now);
        for pod in std::mem::take(&mut self.pending) {
            let gib = self.work.pods[pod].gib as usize;
            if self.free_device_ids.len() < gib || gib > label {
                self.pending.push(pod);
                continue;
            }
            let device_ids: Vec<u16> = self.free_device_ids.iter().copied().take(gib).collect();
            for device_id in &device_ids {
                self.free_device_ids.remove(device_id);
            }
            let device_ids =
                DeviceIdSet::from_indexes(device_ids).expect("a pod asks for something");
            let id = AllocationId::from_bits(pod as u64);
            self.ledger.add_pending(
                id,
                Resource::DeviceMemory,
                device_ids.clone(),
                BootTime(now),
            );
            self.device_ids.insert(pod, device_ids);
            self.start(pod, 0, now);
            label = self.largest_free(now);
        }
    }

    /// The label that the steered scheduler reads: the largest pod that it may place. A real label
    /// lags by some seconds.
    fn largest_free(&self, now: u64) -> usize {
        if self.steered {
            self.ledger.view(BootTime(now)).largest_free().0 as usize
        } else {
            usize::MAX
        }
    }

    fn start(&mut self, pod: usize, attempt: usize, now: u64) {
        let start = BindRequest {
            resource: Resource::DeviceMemory,
            device_ids: self.device_ids[&pod].clone(),
            containers: Vec::new(),
            pod: uid(pod),
            spread: GpuSpread::default(),
            priority: Priority::default(),
        };
        match self.ledger.bind(start, BootTime(now)) {
            Err(_) => self.failures += 1,
            Ok(started) => match started.outcome {
                BindOutcome::Bound(binding) => self.run_pod(&binding, now),
                BindOutcome::Queued(ticket, _) => {
                    self.calls.insert(ticket.claim, (pod, ticket));
                    self.events
                        .push(Reverse((now + RPC_MS, Event::CallEnds(pod, attempt))));
                }
            },
        }
    }

    fn run_pod(&mut self, binding: &Binding, now: u64) {
        self.calls.remove(&binding.claim);
        let number = binding.pod.as_str().trim_start_matches("pod-");
        let pod: usize = number.parse().expect("a pod's name");
        let Pod {
            gib,
            life_ms,
            created_ms,
        } = self.work.pods[pod];
        self.wait_times_ms[pod] = now - created_ms;
        let until = now + life_ms;
        self.used_gib_ms +=
            u128::from(until.min(self.last_event_ms).saturating_sub(now)) * u128::from(gib);
        // The next poll sees the end.
        self.events.push(Reverse((
            until.next_multiple_of(POLL_MS),
            Event::Ended(pod),
        )));
    }
}

fn uid(pod: usize) -> PodUid {
    format!("pod-{pod}").parse().expect("a pod's name")
}
