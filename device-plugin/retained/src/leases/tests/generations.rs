//! Shows how each event moves the GPU generation and the id of a lease.
//!
//! `sessions/src/container/tests/events.rs` shows the same for the process generation.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bursar_gpu::generations::GpuGenerations;
use bursar_gpu::health::{Health, PersistedHealth, UnhealthyReason};
use bursar_gpu::{Gpu, GpuState};
use bursar_host::checkpoint::Checkpoint;

use super::*;
use crate::lease_ids::LeaseIds;

/// The effect of an event on a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// The value is unchanged.
    Same,
    /// The value grows by one.
    Next,
    /// The value becomes another one.
    Other,
    /// The lease has ended; the next lease gets a larger id.
    Lost,
}

use Outcome::{Lost, Next, Other, Same};

type Event = fn(&mut FakeNode);

/// Each event, with its effect on the GPU generation and the lease id.
const EVENTS: &[(&str, Event, [Outcome; 2])] = &[
    ("nothing", |_| {}, [Same, Same]),
    (
        "its container is replaced in the same pod",
        FakeNode::replace_container,
        [Same, Same],
    ),
    (
        "its pod ends, and another comes",
        FakeNode::end_pod,
        [Same, Lost],
    ),
    (
        "the agent starts again",
        FakeNode::start_agent,
        [Same, Same],
    ),
    // Events of retained memory.
    (
        "the provisioner ends while it creates a lease",
        FakeNode::end_provisioner,
        [Same, Same],
    ),
    (
        "the fd store connects again",
        FakeNode::reconnect_store,
        [Same, Same],
    ),
    ("the fd store ends", FakeNode::end_store, [Same, Lost]),
    ("the lease is discarded", FakeNode::discard, [Same, Lost]),
    // Events of the GPU.
    (
        "the GPU is unhealthy and recovers",
        FakeNode::fail_and_recover,
        [Same, Same],
    ),
    (
        "it is away",
        |node| node.observe_gpu(AWAY, false),
        [Same, Same],
    ),
    ("it is reset", FakeNode::reset, [Next, Lost]),
    (
        "it is reset while no agent runs",
        FakeNode::reset_unseen,
        [Next, Lost],
    ),
    (
        "it is drained, and that is over",
        FakeNode::drain,
        [Next, Lost],
    ),
    ("the machine boots", FakeNode::boot, [Next, Lost]),
];

#[test]
fn event_moves_only_the_generations_that_it_ends() {
    for (event, happens, expected) in EVENTS {
        let mut node = FakeNode::new();
        let [gpu, lease] = node.generations().map(Option::unwrap);
        happens(&mut node);
        let after = node.generations();
        let became = |before: u64, after: Option<u64>| match after {
            None => Lost,
            Some(after) if after == before => Same,
            Some(after) if after == before + 1 => Next,
            Some(_) => Other,
        };
        let found = [became(gpu, after[0]), became(lease, after[1])];
        assert_eq!(
            found,
            *expected,
            "{event}: {:?} then {after:?}",
            [gpu, lease]
        );
        // The id of a lease that is made afterwards differs from the former one.
        let next = node.commit_lease();
        assert_eq!(
            next == lease,
            found[1] == Same,
            "{event}: {next} after {lease}"
        );
        assert!(next >= lease, "{event}");
    }
}

const PRESENT: PersistedHealth = PersistedHealth {
    away: false,
    awaits_reset: None,
    draining: false,
    drained: false,
};
const DRAINED: PersistedHealth = PersistedHealth {
    away: true,
    awaits_reset: None,
    draining: false,
    drained: true,
};
const AWAY: PersistedHealth = PersistedHealth {
    away: true,
    awaits_reset: None,
    draining: false,
    drained: false,
};

const CHECKSUM: u64 = 0xfeed;

/// A node with one GPU, and a container on it whose process has a lease.
struct FakeNode {
    /// The files that survive a boot.
    disk: tempfile::TempDir,
    boot: u32,
    /// The time when the agent started.
    start: SystemTime,
    ids: LeaseIds,
    gpus: GpuGenerations,
    allocation: u64,
    pod: u32,
    leases: LeaseTable,
    /// The leases that the agent has put into the fd store.
    fdstore: BTreeMap<LeaseId, Option<LeaseRecord>>,
}

impl FakeNode {
    fn new() -> FakeNode {
        let disk = tempfile::tempdir().unwrap();
        let mut node = FakeNode {
            gpus: generations(&disk, 1),
            disk,
            boot: 1,
            start: UNIX_EPOCH,
            ids: LeaseIds::new(UNIX_EPOCH),
            allocation: 1,
            pod: 1,
            leases: LeaseTable::default(),
            fdstore: BTreeMap::new(),
        };
        node.observe_gpu(PRESENT, false);
        node.reconnect_store();
        node.commit_lease();
        node
    }

    /// The GPU generation and the lease id as the agent has them.
    fn generations(&mut self) -> [Option<u64>; 2] {
        let generation = self.gpus.by_gpu().into_values().next();
        let lease = match self.open(Bytes::ZERO) {
            Some(Opened::Read(lease)) => Some(lease.0),
            _ => None,
        };
        [generation, lease]
    }

    fn caller(&self) -> Caller {
        Caller {
            allocation: AllocationId::from_bits(self.allocation),
            process: Process { pid: 7, start: 1 },
        }
    }

    fn open(&mut self, bytes: Bytes) -> Option<Opened> {
        let open = OpenRequest {
            gpu: gpu().uuid,
            name: "weights".to_owned(),
            key: [7; 32],
            bytes,
            image: 1,
            token: 99,
        };
        self.leases.open(self.caller(), open, BootTime(1)).0.ok()
    }

    /// Opens the lease, commits it where it is new, and returns its id.
    fn commit_lease(&mut self) -> u64 {
        match self.open(Bytes::mib(64)) {
            Some(Opened::Create(meta)) => {
                let lease = self.ids.assign();
                self.leases.begin_create(lease, *meta);
                assert!(self.leases.finish_create(lease).0.is_some());
                self.leases
                    .commit(self.caller(), lease, 99, CHECKSUM, BootTime(2))
                    .unwrap();
                self.fdstore.insert(lease, self.leases.get(lease).cloned());
                lease.0
            }
            Some(Opened::Read(lease)) => lease.0,
            other => panic!("{other:?}"),
        }
    }

    /// Lets the agent observe the GPU, and report the node's containers.
    fn observe_gpu(&mut self, memory: PersistedHealth, is_unhealthy: bool) {
        let health = match is_unhealthy {
            true => Health::Unhealthy(UnhealthyReason::Xid(74)),
            false => Health::Healthy,
        };
        self.gpus.observe(&[GpuState {
            gpu: gpu(),
            health,
            persisted: memory,
        }]);
        let binding = ContainerBinding {
            pod: format!("pod-{}", self.pod).parse().unwrap(),
            namespace: Some("team".to_owned()),
            gpus: BTreeSet::from([gpu().uuid]),
        };
        let node = NodeView {
            containers: BTreeMap::from([(AllocationId::from_bits(self.allocation), binding)]),
            generations: self.gpus.by_gpu(),
            ..NodeView::default()
        };
        self.leases.reconcile(node, &ChargedLeases::new());
    }

    fn drain(&mut self) {
        let gpu = gpu().uuid;
        self.leases.drain(BTreeSet::from([gpu]));
        self.observe_gpu(DRAINED, false);
        self.leases.drain(BTreeSet::new());
        self.observe_gpu(PRESENT, false);
    }

    /// Replaces the container by another one of the same pod.
    fn replace_container(&mut self) {
        self.allocation += 1;
        self.observe_gpu(PRESENT, false);
    }

    fn end_pod(&mut self) {
        self.pod += 1;
        self.replace_container();
    }

    fn start_agent(&mut self) {
        self.gpus = generations(&self.disk, self.boot);
        self.start += Duration::from_secs(1);
        self.ids = LeaseIds::new(self.start);
        self.leases = LeaseTable::default();
        self.reconnect_store();
    }

    /// Lets the fd store list its leases.
    fn reconnect_store(&mut self) {
        self.leases.store_disconnected();
        let held = self.fdstore.iter();
        let held =
            held.filter_map(|(lease, meta)| Some((*lease, StoredRecord::Read(meta.clone()?))));
        self.leases.resync(held.collect(), |_| true);
        self.observe_gpu(PRESENT, false);
    }

    fn end_store(&mut self) {
        self.fdstore.clear();
        self.reconnect_store();
    }

    fn end_provisioner(&mut self) {
        let other = LeaseId(1 << 40);
        let meta = self.fdstore.values().next().cloned().flatten().unwrap();
        self.leases.begin_create(other, meta);
        self.leases.release_uncertain(other);
    }

    fn discard(&mut self) {
        let lease = *self.fdstore.keys().next().unwrap();
        self.leases.discard(self.caller(), lease).unwrap();
    }

    fn fail_and_recover(&mut self) {
        self.observe_gpu(PRESENT, true);
        self.observe_gpu(PRESENT, false);
    }

    fn reset(&mut self) {
        self.observe_gpu(AWAY, false);
        self.observe_gpu(PRESENT, false);
    }

    fn reset_unseen(&mut self) {
        self.observe_gpu(AWAY, false);
        self.start_agent();
    }

    /// Boots the machine: the fd store's memory and the run directory are gone.
    fn boot(&mut self) {
        self.boot += 1;
        self.fdstore.clear();
        assert!(self.gpus.flush());
        self.start_agent();
        self.end_pod();
    }
}

fn generations(disk: &tempfile::TempDir, boot: u32) -> GpuGenerations {
    let boot = format!("boot-{boot}");
    let run = Checkpoint::new(disk.path().join(&boot));
    let disk = Checkpoint::new(disk.path().join("generations.json"));
    GpuGenerations::load(run, disk, boot).unwrap()
}

fn gpu() -> Gpu {
    Gpu::with_uuid("GPU-aaaa")
}
