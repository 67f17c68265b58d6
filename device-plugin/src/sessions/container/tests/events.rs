//! Shows how each event moves the three generations, with the code that maintains them.
//!
//! These are the GPU generation (`gpu/generations.rs`), the process generation (sessions) and the
//! lease id (`retained/leases.rs`).

use std::collections::BTreeSet;

use bursar_crds::budget::ContextAction;
use bursar_protocol::messages::Recovery;

use super::super::super::recovery::RecoveryPolicy;
use super::*;
use crate::checkpoint::Checkpoint;
use crate::clock::ClockReading;
use crate::gpu::generations::GpuGenerations;
use crate::gpu::health::{Health, PersistedHealth, UnhealthyReason};
use crate::gpu::{Gpu, GpuState};
use crate::retained::lease_ids::LeaseIds;
use crate::retained::leases::{
    Caller, ChargedLeases, ContainerBinding, LeaseRecord, LeaseTable, NodeView, OpenRequest,
    Opened, StoredRecord,
};
use bursar_ledger::units::{AllocationId, LeaseId};

/// The effect of an event on a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// The value is unchanged.
    Same,
    /// The value grows by one.
    Next,
    /// The value grows by an unknown number.
    Later,
    /// The holder has ended; the next holder gets a larger value.
    Lost,
    /// The values start again, with a larger GPU generation.
    Anew,
}

use Outcome::{Anew, Later, Lost, Next, Same};

type Event = fn(&mut FakeNode);

/// Each event, with its effect on the GPU generation, the process generation and the lease id.
const EVENTS: &[(&str, Event, [Outcome; 3])] = &[
    ("nothing", |_| {}, [Same, Same, Same]),
    // Events of the process.
    (
        "the process connects again",
        FakeNode::hello,
        [Same, Same, Same],
    ),
    ("a fault poisons it", FakeNode::poison, [Same, Same, Same]),
    (
        "an XID names it",
        FakeNode::poison_by_xid,
        [Same, Same, Same],
    ),
    ("exec", FakeNode::exec, [Same, Next, Same]),
    (
        "a restart in place",
        FakeNode::restart_in_place,
        [Same, Next, Same],
    ),
    (
        "it dies, and another is started",
        FakeNode::restart,
        [Same, Next, Same],
    ),
    ("it starts a child", |m| m.start(8), [Same, Next, Same]),
    (
        "its container is replaced in the same pod",
        FakeNode::replace_container,
        [Same, Anew, Same],
    ),
    (
        "its pod ends, and another comes",
        FakeNode::end_pod,
        [Same, Anew, Lost],
    ),
    // Events of the agent.
    (
        "the agent starts again",
        |m| m.start_agent(false),
        [Same, Same, Same],
    ),
    (
        "the agent starts again without its checkpoint",
        |m| m.start_agent(true),
        [Same, Later, Same],
    ),
    // Events of retained memory.
    (
        "the provisioner ends while it creates a lease",
        FakeNode::end_provisioner,
        [Same, Same, Same],
    ),
    (
        "the fd store connects again",
        |m| m.reconnect_store(),
        [Same, Same, Same],
    ),
    ("the fd store ends", FakeNode::end_store, [Same, Same, Lost]),
    (
        "the lease is discarded",
        FakeNode::discard,
        [Same, Same, Lost],
    ),
    // Events of the GPU.
    (
        "the GPU is sick and recovers",
        FakeNode::fail_and_recover,
        [Same, Same, Same],
    ),
    (
        "it is away",
        |m| m.observe_gpu(AWAY, false),
        [Same, Same, Same],
    ),
    ("it is reset", FakeNode::reset, [Next, Same, Lost]),
    (
        "it is reset while no agent runs",
        FakeNode::reset_unseen,
        [Next, Same, Lost],
    ),
    (
        "it is drained, and that is over",
        FakeNode::drain,
        [Next, Same, Lost],
    ),
    ("the machine boots", FakeNode::boot, [Next, Anew, Lost]),
];

#[test]
fn event_moves_only_the_generations_that_it_ends() {
    for (event, happens, expected) in EVENTS {
        let mut machine = FakeNode::new();
        let [g, p, l] = machine.generations().map(Option::unwrap);
        happens(&mut machine);
        let after = machine.generations();
        let became = |before: u64, after: Option<u64>| match after {
            None => Lost,
            Some(after) if after == before => Same,
            Some(after) if after == before + 1 => Next,
            Some(after) if after > before => Later,
            Some(_) => Anew,
        };
        let found = [
            became(g, after[0]),
            became(p, after[1]),
            became(l, after[2]),
        ];
        assert_eq!(found, *expected, "{event}: {:?} then {after:?}", [g, p, l]);
        // The id of a lease that is made afterwards differs from the former one.
        let made = machine.commit_lease();
        assert_eq!(made == l, found[2] == Same, "{event}: {made} after {l}");
        assert!(made >= l, "{event}");
    }
}

const PRESENT: PersistedHealth = PersistedHealth {
    away: false,
    awaits_reset: None,
    drained: false,
};
const DRAINED: PersistedHealth = PersistedHealth {
    away: true,
    awaits_reset: None,
    drained: true,
};
const AWAY: PersistedHealth = PersistedHealth {
    away: true,
    awaits_reset: None,
    drained: false,
};

const CHECKSUM: u64 = 0xfeed;

/// A node with one GPU, and a container on it whose process has a lease.
struct FakeNode {
    /// The files that survive a boot.
    disk: tempfile::TempDir,
    boot: u32,
    gpus: GpuGenerations,
    fixture: Fixture,
    container: Container,
    process: Process,
    image: u64,
    allocation: u64,
    pod: u32,
    leases: LeaseTable,
    /// The leases that the agent has put into the fd store.
    fdstore: BTreeMap<LeaseId, Option<LeaseRecord>>,
}

impl FakeNode {
    fn new() -> FakeNode {
        let disk = tempfile::tempdir().unwrap();
        let fixture = Fixture::with_quota(Bytes::gib(1));
        let mut machine = FakeNode {
            gpus: generations(&disk, 1),
            disk,
            boot: 1,
            container: fixture.start(),
            fixture,
            process: Process { pid: 7, start: 1 },
            image: 1,
            allocation: 1,
            pod: 1,
            leases: LeaseTable::default(),
            fdstore: BTreeMap::new(),
        };
        machine.observe_gpu(PRESENT, false);
        machine.hello();
        machine.exec();
        machine.reconnect_store();
        machine.commit_lease();
        machine
    }

    /// The GPU generation, the process generation and the lease id as the agent has them.
    fn generations(&mut self) -> [Option<u64>; 3] {
        let g = self.gpus.by_gpu().into_values().next();
        let member = self.container.processes.get(&self.process.pid);
        let p = member.map(|member| member.generation);
        let l = match self.open(Bytes::ZERO) {
            Some(Opened::Read(lease)) => Some(lease.0),
            _ => None,
        };
        [g, p, l]
    }

    fn asker(&self) -> Caller {
        Caller {
            allocation: AllocationId::from_bits(self.allocation),
            process: self.process,
        }
    }

    fn open(&mut self, bytes: Bytes) -> Option<Opened> {
        let open = OpenRequest {
            gpu: gpu().uuid,
            name: "weights".to_owned(),
            key: [7; 32],
            bytes,
            image: self.image,
            token: 99,
        };
        self.leases.open(self.asker(), open, BootTime(1)).0.ok()
    }

    /// Opens the lease, commits it where it is new, and returns its id.
    fn commit_lease(&mut self) -> u64 {
        match self.open(Bytes::mib(64)) {
            Some(Opened::Create(meta)) => {
                let mut numbers = LeaseIds::new(self.file("numbers"));
                if let Some(order) = numbers.next_reservation() {
                    numbers.complete_reservation(order.reserve());
                }
                let lease = numbers.peek().unwrap();
                numbers.observe(lease);
                self.leases.begin_create(lease, *meta);
                assert!(self.leases.finish_create(lease).0.is_some());
                self.leases
                    .commit(self.asker(), lease, 99, CHECKSUM, BootTime(2))
                    .unwrap();
                self.fdstore.insert(lease, self.leases.get(lease).cloned());
                lease.0
            }
            Some(Opened::Read(lease)) => lease.0,
            other => panic!("{other:?}"),
        }
    }

    fn file(&self, name: &str) -> Checkpoint {
        Checkpoint::new(self.disk.path().join(name))
    }

    /// Lets the agent observe the GPU, and report the node's containers.
    fn observe_gpu(&mut self, memory: PersistedHealth, sick: bool) {
        let health = match sick {
            true => Health::Unhealthy(UnhealthyReason::Xid(74)),
            false => Health::Healthy,
        };
        self.gpus.observe(&[GpuState {
            gpu: gpu(),
            health,
            persisted: memory,
        }]);
        let standing = ContainerBinding {
            pod: format!("pod-{}", self.pod).parse().unwrap(),
            namespace: Some("team".to_owned()),
            gpus: BTreeSet::from([gpu().uuid]),
        };
        let node = NodeView {
            containers: BTreeMap::from([(AllocationId::from_bits(self.allocation), standing)]),
            generations: self.gpus.by_gpu(),
            ..NodeView::default()
        };
        self.leases.reconcile(node, &ChargedLeases::new());
    }

    fn hello(&mut self) {
        let (process, image) = (self.process, self.image);
        self.container
            .handle_hello(process, image, VERSION, &[], &FakeHost)
            .unwrap();
    }

    fn exec(&mut self) {
        self.image += 1;
        self.hello();
    }

    fn start(&mut self, pid: u32) {
        self.process.pid = pid;
        self.exec();
    }

    fn restart(&mut self) {
        self.container.handle_exit(self.process, self.image);
        self.start(8);
    }

    fn poison(&mut self) {
        let pid = self.process.pid;
        self.container.handle_poisoned(pid, 0, 700, true, now());
        assert!(self.container.is_fenced(pid));
    }

    fn poison_by_xid(&mut self) {
        let pid = self.process.pid;
        assert!(poisoned::xid(&mut self.container, pid, &[gpu().uuid]));
        assert!(self.container.is_fenced(self.process.pid));
    }

    fn drain(&mut self) {
        let gpu = gpu().uuid;
        self.leases.drain(BTreeSet::from([gpu]));
        self.observe_gpu(DRAINED, false);
        self.leases.drain(BTreeSet::new());
        self.observe_gpu(PRESENT, false);
    }

    fn restart_in_place(&mut self) {
        let policy = RecoveryPolicy::new(ContextAction::InPlace, 1, 600);
        self.container.set_policy(policy);
        let pid = self.process.pid;
        let verdict = self.container.handle_poisoned(pid, 0, 700, true, now());
        assert_eq!(verdict, Response::Recovery(Recovery::Reexec));
        self.exec();
        assert!(!self.container.is_fenced(pid));
    }

    /// Replaces the container by another one.
    fn replace_container(&mut self) {
        self.fixture = Fixture::with_quota(Bytes::gib(1));
        self.container = self.fixture.start();
        self.allocation += 1;
        self.observe_gpu(PRESENT, false);
        self.start(8);
    }

    fn end_pod(&mut self) {
        self.pod += 1;
        self.replace_container();
    }

    fn start_agent(&mut self, lose_record: bool) {
        if lose_record {
            std::fs::remove_file(self.fixture.folder.path().join("record.json")).unwrap();
            self.fixture.served_before = true;
        }
        self.container = self.fixture.start();
        self.gpus = generations(&self.disk, self.boot);
        self.leases = LeaseTable::default();
        self.reconnect_store();
        self.observe_gpu(PRESENT, false);
        self.hello();
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
        self.leases.discard(self.asker(), lease).unwrap();
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
        self.start_agent(false);
    }

    /// Boots the machine: files on tmpfs and all processes are gone.
    fn boot(&mut self) {
        self.boot += 1;
        self.fdstore.clear();
        assert!(self.gpus.flush());
        self.gpus = generations(&self.disk, self.boot);
        self.leases = LeaseTable::default();
        self.reconnect_store();
        self.replace_container();
    }
}

fn generations(disk: &tempfile::TempDir, boot: u32) -> GpuGenerations {
    let boot = format!("boot-{boot}");
    let run = Checkpoint::new(disk.path().join(&boot));
    let disk = Checkpoint::new(disk.path().join("generations.json"));
    GpuGenerations::load(run, disk, boot).unwrap()
}

fn gpu() -> Gpu {
    Gpu {
        uuid: "GPU-aaaa".parse().unwrap(),
        minor: 0,
        model: "T".to_owned(),
        memory: Bytes::gib(1),
        pci: None,
        mig_parent: None,
        capabilities: Vec::new(),
    }
}

fn now() -> ClockReading {
    ClockReading {
        moment: BootTime(3_600_000),
        wall: jiff::Timestamp::UNIX_EPOCH,
    }
}
