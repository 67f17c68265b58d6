//! Tests what each event does to a token.

use std::collections::{BTreeMap, BTreeSet};

use bursar_ledger::BootTime;
use bursar_ledger::units::Bytes;
use bursar_sessions::Process;
use bursar_sessions::lease_handle::{ChargedLeases, ContainerBinding, NodeView};
use proptest::prelude::*;

use super::*;
use crate::leases::{OpenRequest, Opened};

/// The issuer's container, another one of its pod's namespace, and one of another namespace.
const A: AllocationId = AllocationId::from_bits(1);
const B: AllocationId = AllocationId::from_bits(2);
const C: AllocationId = AllocationId::from_bits(3);
const LEASE: LeaseId = LeaseId(7);

type Redeemed = Result<MemoryId, TokenRefusal>;
type Event = fn(&mut Fixture);

fn gpu() -> GpuUuid {
    "GPU-a".parse().unwrap()
}

fn process(pid: u32) -> Process {
    Process { pid, start: 1 }
}

fn caller(allocation: AllocationId, pid: u32) -> Caller {
    Caller {
        allocation,
        process: process(pid),
    }
}

/// A node with processes 10, 20 and 30 in its containers, and a lease that process 10 committed.
struct Fixture {
    key: NodeKey,
    leases: LeaseTable,
    node: NodeView,
    images: BTreeMap<AllocationId, Vec<ProcessImage>>,
}

impl Fixture {
    fn new() -> Fixture {
        let binding = |name: &str, namespace: &str| ContainerBinding {
            pod: name.parse().unwrap(),
            namespace: Some(namespace.to_owned()),
            gpus: BTreeSet::from([gpu()]),
        };
        let node = NodeView {
            containers: BTreeMap::from([
                (A, binding("a", "team")),
                (B, binding("b", "team")),
                (C, binding("c", "other")),
            ]),
            quotas: BTreeMap::new(),
            free: BTreeMap::new(),
            generations: BTreeMap::from([(gpu(), 4)]),
        };
        let image = |pid, generation| ProcessImage {
            process: process(pid),
            generation,
        };
        let mut fixture = Fixture {
            key: NodeKey::new("node-a".to_owned(), [1; 32]).unwrap(),
            leases: LeaseTable::default(),
            node,
            images: BTreeMap::from([
                (A, vec![image(10, 5), image(11, 6)]),
                (B, vec![image(20, 5)]),
                (C, vec![image(30, 5)]),
            ]),
        };
        fixture.leases.resync(BTreeMap::new(), |_| true);
        fixture.reconcile();
        let open = OpenRequest {
            gpu: gpu(),
            name: "weights".to_owned(),
            key: [7; 32],
            bytes: Bytes::gib(1),
            image: 1,
            token: 99,
        };
        let opened = fixture.leases.open(caller(A, 10), open, BootTime(0)).0;
        let Ok(Opened::Create(record)) = opened else {
            panic!("{opened:?}");
        };
        fixture.leases.begin_create(LEASE, *record);
        assert!(fixture.leases.finish_create(LEASE).0.is_some());
        fixture
    }

    fn committed() -> Fixture {
        let mut fixture = Fixture::new();
        let committed = fixture
            .leases
            .commit(caller(A, 10), LEASE, 99, 0, BootTime(1));
        assert!(committed.is_ok());
        fixture
    }

    fn reconcile(&mut self) {
        self.leases
            .reconcile(self.node.clone(), &ChargedLeases::new());
    }

    fn seal(&self, caller: Caller, lease: LeaseId) -> Result<GpuToken, TokenRefusal> {
        self.with_authority(|authority| authority.seal(caller, &gpu(), lease, 42))
    }

    fn redeem(&self, caller: Caller, token: &GpuToken) -> Redeemed {
        self.with_authority(|authority| authority.redeem(caller, token))
    }

    fn with_authority<T>(
        &self,
        act: impl FnOnce(TokenAuthority<'_, &dyn Fn(&AllocationId) -> Option<Vec<ProcessImage>>>) -> T,
    ) -> T {
        act(TokenAuthority {
            key: &self.key,
            leases: &self.leases,
            images: &|allocation| self.images.get(allocation).cloned(),
        })
    }

    /// Process 10 executes another image.
    fn exec(&mut self) {
        let images = self.images.get_mut(&A).unwrap();
        images.retain(|image| image.process != process(10));
        images.push(ProcessImage {
            process: process(10),
            generation: 7,
        });
    }
}

fn fenced(which: Generation, generation: u64) -> Redeemed {
    Err(TokenRefusal::Fenced { which, generation })
}

#[test]
fn token_carries_generations_and_is_of_its_namespace() {
    let fixture = Fixture::committed();
    for lease in [NO_LEASE, LEASE] {
        let token = fixture.seal(caller(A, 10), lease).unwrap();
        let expected = MemoryId {
            node: "node-a".to_owned(),
            gpu: "GPU-a".to_owned(),
            container: 1,
            generations: Generations {
                gpu: 4,
                process: 5,
                lease: lease.0,
            },
            block: 42,
        };
        for caller in [caller(A, 10), caller(A, 11), caller(B, 20), caller(B, 999)] {
            assert_eq!(fixture.redeem(caller, &token).as_ref(), Ok(&expected));
        }
        let foreign = fixture.redeem(caller(C, 30), &token);
        assert_eq!(foreign, Err(TokenRefusal::Unknown));
    }
}

#[test]
fn seal_needs_a_session_and_the_lease_open() {
    let mut fixture = Fixture::new();
    let refused = |fixture: &Fixture, caller, lease| fixture.seal(caller, lease).unwrap_err();
    assert_eq!(
        refused(&fixture, caller(A, 12), NO_LEASE),
        TokenRefusal::NoSession
    );
    assert_eq!(
        refused(&fixture, caller(B, 20), LEASE),
        TokenRefusal::NoLease
    );
    assert_eq!(
        refused(&fixture, caller(A, 10), LeaseId(8)),
        TokenRefusal::NoLease
    );
    assert_eq!(
        refused(&fixture, caller(A, 11), LEASE),
        TokenRefusal::NoLease,
        "another writes it"
    );
    assert!(fixture.seal(caller(A, 10), LEASE).is_ok());
    fixture.leases.store_disconnected();
    assert_eq!(
        refused(&fixture, caller(A, 10), LEASE),
        TokenRefusal::Unavailable
    );
    assert!(fixture.seal(caller(A, 10), NO_LEASE).is_ok());
}

#[test]
fn each_event_fences_tokens_of_its_generation_only() {
    let gpu_lost: Event = |fixture| {
        fixture.node.generations.insert(gpu(), 5);
        fixture.reconcile();
    };
    let discarded: Event = |fixture| drop(fixture.leases.discard(caller(A, 10), LEASE).unwrap());
    let abandoned: Event = |fixture| {
        let open = OpenRequest {
            gpu: gpu(),
            name: "weights".to_owned(),
            key: [7; 32],
            bytes: Bytes::ZERO,
            image: 1,
            token: 1,
        };
        fixture
            .node
            .quotas
            .insert("team".to_owned(), BTreeMap::from([(gpu(), Bytes::gib(1))]));
        fixture.reconcile();
        assert!(
            fixture
                .leases
                .open(caller(B, 20), open, BootTime(2))
                .0
                .is_ok()
        );
        drop(fixture.leases.discard(caller(A, 10), LEASE).unwrap());
    };
    let fdstore_died: Event = |fixture| {
        fixture.leases.store_disconnected();
        fixture.leases.resync(BTreeMap::new(), |_| true);
    };
    let ended: Event = |fixture| {
        fixture.node.containers.remove(&A);
        fixture.reconcile();
    };
    let unknown = || Err(TokenRefusal::Unknown);
    let good = |fixture: &Fixture, lease| {
        let token = fixture.seal(caller(A, 10), lease).unwrap();
        fixture.redeem(caller(B, 20), &token)
    };
    let before = [NO_LEASE, LEASE].map(|lease| good(&Fixture::committed(), lease));
    let [own, lease_token] = before;
    let table: [(&str, Event, [Redeemed; 2]); 8] = [
        ("nothing", |_| {}, [own.clone(), lease_token]),
        (
            "the gpu is lost",
            gpu_lost,
            [fenced(Generation::Gpu, 4), fenced(Generation::Gpu, 4)],
        ),
        (
            "exec",
            Fixture::exec,
            [
                fenced(Generation::Process, 5),
                fenced(Generation::Process, 5),
            ],
        ),
        (
            "its image ended",
            |fixture| drop(fixture.images.insert(A, Vec::new())),
            [
                fenced(Generation::Process, 5),
                fenced(Generation::Process, 5),
            ],
        ),
        (
            "discarded",
            discarded,
            [own.clone(), fenced(Generation::Lease, 7)],
        ),
        (
            "abandoned",
            abandoned,
            [own.clone(), fenced(Generation::Lease, 7)],
        ),
        (
            "the fd store exited",
            fdstore_died,
            [own, fenced(Generation::Lease, 7)],
        ),
        ("its pod ended", ended, [unknown(), unknown()]),
    ];
    for (what, event, expected) in table {
        let mut fixture = Fixture::committed();
        let tokens = [NO_LEASE, LEASE].map(|lease| fixture.seal(caller(A, 10), lease).unwrap());
        event(&mut fixture);
        let found = tokens.map(|token| fixture.redeem(caller(B, 20), &token));
        assert_eq!(found, expected, "{what}");
    }
}

#[test]
fn redeem_is_unavailable_while_the_agent_starts() {
    let fixture = Fixture::committed();
    let token = fixture.seal(caller(A, 10), NO_LEASE).unwrap();
    let unavailable = Err(TokenRefusal::Unavailable);
    let mut started = Fixture::committed();
    started.leases = LeaseTable::default();
    assert_eq!(started.redeem(caller(B, 20), &token), unavailable);
    let mut unserved = Fixture::committed();
    unserved.images.remove(&A);
    assert_eq!(unserved.redeem(caller(B, 20), &token), unavailable);
    for nameless in [A, B] {
        let mut fixture = Fixture::committed();
        let binding = fixture.node.containers.get_mut(&nameless).unwrap();
        binding.namespace = None;
        fixture.reconcile();
        assert_eq!(fixture.redeem(caller(B, 20), &token), unavailable);
    }
    let mut away = Fixture::committed();
    away.leases.store_disconnected();
    let lease_token = fixture.seal(caller(A, 10), LEASE).unwrap();
    assert_eq!(away.redeem(caller(B, 20), &lease_token), unavailable);
    assert!(away.redeem(caller(B, 20), &token).is_ok());
}

#[test]
fn new_key_refuses_earlier_tokens() {
    let fixture = Fixture::committed();
    let token = fixture.seal(caller(A, 10), NO_LEASE).unwrap();
    let mut next = Fixture::committed();
    next.key = NodeKey::new("node-a".to_owned(), [2; 32]).unwrap();
    assert_eq!(
        next.redeem(caller(B, 20), &token),
        Err(TokenRefusal::Forged)
    );
}

proptest! {
    /// Exactly the current generations are redeemed.
    #[test]
    fn a_token_is_redeemed_by_exactly_its_own_lives(g in 3..6u64, p in 4..8u64, l in 6..9u64) {
        let fixture = Fixture::committed();
        let generations = Generations { gpu: g, process: p, lease: l };
        let token = fixture.key.seal(&gpu(), A, generations, 1);
        // Process generation 6 is process 11's, whose pod has the lease open too.
        let is_good = g == 4 && (p == 5 || p == 6) && l == LEASE.0;
        prop_assert_eq!(fixture.redeem(caller(B, 20), &token).is_ok(), is_good);
    }
}
