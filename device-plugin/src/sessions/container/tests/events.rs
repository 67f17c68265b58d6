//! Shows how each event moves the three generations, over the code that keeps them: the GPU
//! generation (`node/generations.rs`), the process generation (sessions) and the lease id
//! (`kept/leases.rs`).

use std::collections::BTreeSet;

use bursar_crds::budget::ContextAction;
use bursar_protocol::messages::Recovery;

use super::super::super::recovery::Policy;
use super::*;
use crate::checkpoint::Checkpoint;
use crate::clock::Present;
use crate::gpu::generations::Generations;
use crate::gpu::health::{Health, Memory, Sickness};
use crate::gpu::{Gpu, GpuState};
use crate::retained::lease_ids::Numbers;
use crate::retained::leases::{Asker, Charged, Heard, Leases, Meta, Node, Open, Opened, Standing};
use crate::units::{AllocationId, LeaseId};

/// What becomes of a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Is {
    /// It is what it was.
    Same,
    /// It is the next one.
    Next,
    /// It is a later one: how much later nobody can tell.
    Later,
    /// Nothing has it any more; what takes its place has a later one.
    Lost,
    /// It begins anew, with a later G.
    Anew,
}

use Is::{Anew, Later, Lost, Next, Same};

type Event = fn(&mut Machine);

/// An event, then what becomes of G, P and L.
const EVENTS: &[(&str, Event, [Is; 3])] = &[
    ("nothing", |_| {}, [Same, Same, Same]),
    // The process.
    (
        "the process connects again",
        Machine::hello,
        [Same, Same, Same],
    ),
    ("a fault poisons it", Machine::fault, [Same, Same, Same]),
    ("an XID names it", Machine::xid, [Same, Same, Same]),
    ("exec", Machine::exec, [Same, Next, Same]),
    (
        "a restart in place",
        Machine::restart_in_place,
        [Same, Next, Same],
    ),
    (
        "it dies, and another is started",
        Machine::restart,
        [Same, Next, Same],
    ),
    ("it starts a child", |m| m.start(8), [Same, Next, Same]),
    (
        "its container is replaced in the same pod",
        Machine::replace,
        [Same, Anew, Same],
    ),
    (
        "its pod ends, and another comes",
        Machine::end_pod,
        [Same, Anew, Lost],
    ),
    // The agent.
    (
        "the agent starts again",
        |m| m.start_agent(false),
        [Same, Same, Same],
    ),
    (
        "it does, and the record is lost",
        |m| m.start_agent(true),
        [Same, Later, Same],
    ),
    // Kept memory.
    (
        "the worker dies with what it was making",
        Machine::worker_dies,
        [Same, Same, Same],
    ),
    ("the vault connects again", |m| m.hear(), [Same, Same, Same]),
    ("the vault dies", Machine::vault_dies, [Same, Same, Lost]),
    (
        "the lease is discarded",
        Machine::discard,
        [Same, Same, Lost],
    ),
    // The GPU.
    (
        "the GPU is sick and recovers",
        Machine::sickness,
        [Same, Same, Same],
    ),
    ("it is away", |m| m.see(AWAY, false), [Same, Same, Same]),
    ("it is reset", Machine::reset, [Next, Same, Lost]),
    (
        "it is reset while no agent runs",
        Machine::reset_unseen,
        [Next, Same, Lost],
    ),
    (
        "it is drained, and that is over",
        Machine::drained,
        [Next, Same, Lost],
    ),
    ("the machine boots", Machine::boot, [Next, Anew, Lost]),
];

#[test]
fn each_event_moves_the_generations_of_what_it_ends_and_no_other() {
    for (event, happens, expected) in EVENTS {
        let mut machine = Machine::new();
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
        // What is made from now on is told apart from what was before.
        let made = machine.keep();
        assert_eq!(made == l, found[2] == Same, "{event}: {made} after {l}");
        assert!(made >= l, "{event}");
    }
}

const WELL: Memory = Memory {
    away: false,
    awaits_reset: None,
    drained: false,
};
const DRAINED: Memory = Memory {
    away: true,
    awaits_reset: None,
    drained: true,
};
const AWAY: Memory = Memory {
    away: true,
    awaits_reset: None,
    drained: false,
};

const SUM: u64 = 0xfeed;

/// A node with one GPU, and on it a container whose process keeps a lease.
struct Machine {
    /// What a boot leaves.
    disk: tempfile::TempDir,
    boot: u32,
    gpus: Generations,
    fixture: Fixture,
    container: Container,
    process: Process,
    image: u64,
    allocation: u64,
    pod: u32,
    leases: Leases,
    /// What the vault has, as the agent put it there.
    vault: BTreeMap<LeaseId, Option<Meta>>,
}

impl Machine {
    fn new() -> Machine {
        let disk = tempfile::tempdir().unwrap();
        let fixture = Fixture::with_quota(Bytes::gib(1));
        let mut machine = Machine {
            gpus: generations(&disk, 1),
            disk,
            boot: 1,
            container: fixture.start(),
            fixture,
            process: Process { pid: 7, start: 1 },
            image: 1,
            allocation: 1,
            pod: 1,
            leases: Leases::default(),
            vault: BTreeMap::new(),
        };
        machine.see(WELL, false);
        machine.hello();
        machine.exec();
        machine.hear();
        machine.keep();
        machine
    }

    /// G, P and L as they are on the books.
    fn generations(&mut self) -> [Option<u64>; 3] {
        let g = self.gpus.all().into_values().next();
        let member = self.container.members.get(&self.process.pid);
        let p = member.map(|member| member.generation);
        let l = match self.open(Bytes::ZERO) {
            Some(Opened::Read(lease)) => Some(lease.0),
            _ => None,
        };
        [g, p, l]
    }

    fn asker(&self) -> Asker {
        Asker {
            allocation: AllocationId::from_bits(self.allocation),
            process: self.process,
        }
    }

    fn open(&mut self, bytes: Bytes) -> Option<Opened> {
        let open = Open {
            gpu: gpu().uuid,
            name: "weights".to_owned(),
            key: [7; 32],
            bytes,
            image: self.image,
            token: 99,
        };
        self.leases.open(self.asker(), open, Moment(1)).0.ok()
    }

    /// Opens the lease and commits it where it is new; L.
    fn keep(&mut self) -> u64 {
        match self.open(Bytes::mib(64)) {
            Some(Opened::Make(meta)) => {
                let mut numbers = Numbers::of(self.file("numbers"));
                if let Some(order) = numbers.order() {
                    numbers.arrived(order.carry_out());
                }
                let lease = numbers.peek().unwrap();
                numbers.seen(lease);
                self.leases.begin(lease, *meta);
                assert!(self.leases.made(lease).0.is_some());
                self.leases
                    .commit(self.asker(), lease, 99, SUM, Moment(2))
                    .unwrap();
                self.vault.insert(lease, self.leases.get(lease).cloned());
                lease.0
            }
            Some(Opened::Read(lease)) => lease.0,
            other => panic!("{other:?}"),
        }
    }

    fn file(&self, name: &str) -> Checkpoint {
        Checkpoint::new(self.disk.path().join(name))
    }

    /// The agent sees the GPU, and tells of the node as it stands.
    fn see(&mut self, memory: Memory, sick: bool) {
        let health = match sick {
            true => Health::Unhealthy(Sickness::Xid(74)),
            false => Health::Healthy,
        };
        self.gpus.see(&[GpuState {
            gpu: gpu(),
            health,
            memory,
        }]);
        let standing = Standing {
            pod: format!("pod-{}", self.pod).parse().unwrap(),
            namespace: Some("team".to_owned()),
            gpus: BTreeSet::from([gpu().uuid]),
        };
        let node = Node {
            containers: BTreeMap::from([(AllocationId::from_bits(self.allocation), standing)]),
            generations: self.gpus.all(),
            ..Node::default()
        };
        self.leases.stand(node, &Charged::new());
    }

    fn hello(&mut self) {
        let (process, image) = (self.process, self.image);
        self.container
            .hello(process, image, VERSION, &[], &Host)
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
        self.container.died(self.process, self.image);
        self.start(8);
    }

    fn fault(&mut self) {
        let pid = self.process.pid;
        self.container.poisoned(pid, 0, 700, true, now());
        assert!(self.container.is_fenced(pid));
    }

    fn xid(&mut self) {
        let pid = self.process.pid;
        assert!(poisoned::xid(&mut self.container, pid, &[gpu().uuid]));
        assert!(self.container.is_fenced(self.process.pid));
    }

    fn drained(&mut self) {
        let gpu = gpu().uuid;
        self.leases.drain(BTreeSet::from([gpu]));
        self.see(DRAINED, false);
        self.leases.drain(BTreeSet::new());
        self.see(WELL, false);
    }

    fn restart_in_place(&mut self) {
        let policy = Policy::new(ContextAction::InPlace, 1, 600);
        self.container.set_policy(policy);
        let pid = self.process.pid;
        let verdict = self.container.poisoned(pid, 0, 700, true, now());
        assert_eq!(verdict, Response::Recovery(Recovery::Reexec));
        self.exec();
        assert!(!self.container.is_fenced(pid));
    }

    /// Another container takes the place of this one.
    fn replace(&mut self) {
        self.fixture = Fixture::with_quota(Bytes::gib(1));
        self.container = self.fixture.start();
        self.allocation += 1;
        self.see(WELL, false);
        self.start(8);
    }

    fn end_pod(&mut self) {
        self.pod += 1;
        self.replace();
    }

    fn start_agent(&mut self, lose_record: bool) {
        if lose_record {
            std::fs::remove_file(self.fixture.folder.path().join("record.json")).unwrap();
            self.fixture.served_before = true;
        }
        self.container = self.fixture.start();
        self.gpus = generations(&self.disk, self.boot);
        self.leases = Leases::default();
        self.hear();
        self.see(WELL, false);
        self.hello();
    }

    /// The vault says what it has.
    fn hear(&mut self) {
        self.leases.vault_lost();
        let held = self.vault.iter();
        let held = held.filter_map(|(lease, meta)| Some((*lease, Heard::Read(meta.clone()?))));
        self.leases.heard(held.collect(), |_| true);
        self.see(WELL, false);
    }

    fn vault_dies(&mut self) {
        self.vault.clear();
        self.hear();
    }

    fn worker_dies(&mut self) {
        let other = LeaseId(1 << 40);
        let meta = self.vault.values().next().cloned().flatten().unwrap();
        self.leases.begin(other, meta);
        self.leases.lost(other);
    }

    fn discard(&mut self) {
        let lease = *self.vault.keys().next().unwrap();
        self.leases.discard(self.asker(), lease).unwrap();
    }

    fn sickness(&mut self) {
        self.see(WELL, true);
        self.see(WELL, false);
    }

    fn reset(&mut self) {
        self.see(AWAY, false);
        self.see(WELL, false);
    }

    fn reset_unseen(&mut self) {
        self.see(AWAY, false);
        self.start_agent(false);
    }

    /// What is on tmpfs is gone, and every process with it.
    fn boot(&mut self) {
        self.boot += 1;
        self.vault.clear();
        assert!(self.gpus.is_on_disk());
        self.gpus = generations(&self.disk, self.boot);
        self.leases = Leases::default();
        self.hear();
        self.replace();
    }
}

fn generations(disk: &tempfile::TempDir, boot: u32) -> Generations {
    let boot = format!("boot-{boot}");
    let run = Checkpoint::new(disk.path().join(&boot));
    let disk = Checkpoint::new(disk.path().join("generations.json"));
    Generations::load(run, disk, boot).unwrap()
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

fn now() -> Present {
    Present {
        moment: Moment(3_600_000),
        wall: jiff::Timestamp::UNIX_EPOCH,
    }
}
