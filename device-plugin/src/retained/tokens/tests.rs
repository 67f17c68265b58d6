//! What each event does to a token.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::ledger::Moment;
use crate::retained::leases::{Charged, Node, Open, Opened, Standing};
use crate::sessions::Process;
use crate::units::Bytes;

/// The issuer's container, another of its pod's namespace and one of another namespace.
const A: AllocationId = AllocationId::from_bits(1);
const B: AllocationId = AllocationId::from_bits(2);
const C: AllocationId = AllocationId::from_bits(3);
const LEASE: LeaseId = LeaseId(7);

type Redeemed = Result<MemoryId, TokenRefusal>;
type Event = fn(&mut Bed);

fn gpu() -> GpuUuid {
    "GPU-a".parse().unwrap()
}

fn process(pid: u32) -> Process {
    Process { pid, start: 1 }
}

fn of(allocation: AllocationId, pid: u32) -> Asker {
    Asker {
        allocation,
        process: process(pid),
    }
}

/// The node, with processes 10, 20 and 30 in its containers and a lease that 10 committed.
struct Bed {
    key: NodeKey,
    leases: Leases,
    node: Node,
    images: BTreeMap<AllocationId, Vec<Image>>,
}

impl Bed {
    fn new() -> Bed {
        let standing = |name: &str, namespace: &str| Standing {
            pod: name.parse().unwrap(),
            namespace: Some(namespace.to_owned()),
            gpus: BTreeSet::from([gpu()]),
        };
        let node = Node {
            containers: BTreeMap::from([
                (A, standing("a", "team")),
                (B, standing("b", "team")),
                (C, standing("c", "other")),
            ]),
            quotas: BTreeMap::new(),
            free: BTreeMap::new(),
            generations: BTreeMap::from([(gpu(), 4)]),
        };
        let image = |pid, generation| Image {
            process: process(pid),
            generation,
        };
        let mut bed = Bed {
            key: NodeKey::new("node-a".to_owned(), [1; 32]).unwrap(),
            leases: Leases::default(),
            node,
            images: BTreeMap::from([
                (A, vec![image(10, 5), image(11, 6)]),
                (B, vec![image(20, 5)]),
                (C, vec![image(30, 5)]),
            ]),
        };
        bed.leases.heard(BTreeMap::new(), |_| true);
        bed.stand();
        let open = Open {
            gpu: gpu(),
            name: "weights".to_owned(),
            key: [7; 32],
            bytes: Bytes::gib(1),
            image: 1,
            token: 99,
        };
        let opened = bed.leases.open(of(A, 10), open, Moment(0)).0;
        let Ok(Opened::Make(meta)) = opened else {
            panic!("{opened:?}");
        };
        bed.leases.begin(LEASE, *meta);
        assert!(bed.leases.made(LEASE).0.is_some());
        bed
    }

    fn committed() -> Bed {
        let mut bed = Bed::new();
        let committed = bed.leases.commit(of(A, 10), LEASE, 99, 0, Moment(1));
        assert!(committed.is_ok());
        bed
    }

    fn stand(&mut self) {
        self.leases.stand(self.node.clone(), &Charged::new());
    }

    fn seal(&self, asker: Asker, lease: LeaseId) -> Result<GpuToken, TokenRefusal> {
        self.judge(|judge| judge.seal(asker, &gpu(), lease, 42))
    }

    fn redeem(&self, asker: Asker, token: &GpuToken) -> Redeemed {
        self.judge(|judge| judge.redeem(asker, token))
    }

    fn judge<T>(
        &self,
        act: impl FnOnce(Judge<'_, &dyn Fn(&AllocationId) -> Option<Vec<Image>>>) -> T,
    ) -> T {
        act(Judge {
            key: &self.key,
            leases: &self.leases,
            images: &|allocation| self.images.get(allocation).cloned(),
        })
    }

    /// The image of process 10 becomes another.
    fn exec(&mut self) {
        let images = self.images.get_mut(&A).unwrap();
        images.retain(|image| image.process != process(10));
        images.push(Image {
            process: process(10),
            generation: 7,
        });
    }
}

fn fenced(which: Generation, generation: u64) -> Redeemed {
    Err(TokenRefusal::Fenced { which, generation })
}

#[test]
fn a_token_says_what_the_agent_knows_and_is_its_namespaces() {
    let bed = Bed::committed();
    for lease in [NO_LEASE, LEASE] {
        let token = bed.seal(of(A, 10), lease).unwrap();
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
        for asker in [of(A, 10), of(A, 11), of(B, 20), of(B, 999)] {
            assert_eq!(bed.redeem(asker, &token).as_ref(), Ok(&expected));
        }
        let stranger = bed.redeem(of(C, 30), &token);
        assert_eq!(stranger, Err(TokenRefusal::Unknown));
    }
}

#[test]
fn who_has_no_session_or_has_not_opened_the_lease_gets_no_token() {
    let mut bed = Bed::new();
    let refused = |bed: &Bed, asker, lease| bed.seal(asker, lease).unwrap_err();
    assert_eq!(refused(&bed, of(A, 12), NO_LEASE), TokenRefusal::NoSession);
    assert_eq!(refused(&bed, of(B, 20), LEASE), TokenRefusal::NoLease);
    assert_eq!(refused(&bed, of(A, 10), LeaseId(8)), TokenRefusal::NoLease);
    assert_eq!(
        refused(&bed, of(A, 11), LEASE),
        TokenRefusal::NoLease,
        "another writes it"
    );
    assert!(bed.seal(of(A, 10), LEASE).is_ok());
    bed.leases.vault_lost();
    assert_eq!(refused(&bed, of(A, 10), LEASE), TokenRefusal::Unavailable);
    assert!(bed.seal(of(A, 10), NO_LEASE).is_ok());
}

#[test]
fn each_event_ends_the_tokens_of_its_generation_and_no_others() {
    let gpu_lost: Event = |bed| {
        bed.node.generations.insert(gpu(), 5);
        bed.stand();
    };
    let discarded: Event = |bed| drop(bed.leases.discard(of(A, 10), LEASE).unwrap());
    let abandoned: Event = |bed| {
        let open = Open {
            gpu: gpu(),
            name: "weights".to_owned(),
            key: [7; 32],
            bytes: Bytes::ZERO,
            image: 1,
            token: 1,
        };
        bed.node
            .quotas
            .insert("team".to_owned(), BTreeMap::from([(gpu(), Bytes::gib(1))]));
        bed.stand();
        assert!(bed.leases.open(of(B, 20), open, Moment(2)).0.is_ok());
        drop(bed.leases.discard(of(A, 10), LEASE).unwrap());
    };
    let vault_died: Event = |bed| {
        bed.leases.vault_lost();
        bed.leases.heard(BTreeMap::new(), |_| true);
    };
    let ended: Event = |bed| {
        bed.node.containers.remove(&A);
        bed.stand();
    };
    let unknown = || Err(TokenRefusal::Unknown);
    let good = |bed: &Bed, lease| {
        let token = bed.seal(of(A, 10), lease).unwrap();
        bed.redeem(of(B, 20), &token)
    };
    let before = [NO_LEASE, LEASE].map(|lease| good(&Bed::committed(), lease));
    let [own, of_lease] = before;
    let table: [(&str, Event, [Redeemed; 2]); 8] = [
        ("nothing", |_| {}, [own.clone(), of_lease]),
        (
            "the gpu is lost",
            gpu_lost,
            [fenced(Generation::Gpu, 4), fenced(Generation::Gpu, 4)],
        ),
        (
            "exec",
            Bed::exec,
            [
                fenced(Generation::Process, 5),
                fenced(Generation::Process, 5),
            ],
        ),
        (
            "its image ended",
            |bed| drop(bed.images.insert(A, Vec::new())),
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
            "the vault died",
            vault_died,
            [own, fenced(Generation::Lease, 7)],
        ),
        ("its pod ended", ended, [unknown(), unknown()]),
    ];
    for (what, event, expected) in table {
        let mut bed = Bed::committed();
        let tokens = [NO_LEASE, LEASE].map(|lease| bed.seal(of(A, 10), lease).unwrap());
        event(&mut bed);
        let found = tokens.map(|token| bed.redeem(of(B, 20), &token));
        assert_eq!(found, expected, "{what}");
    }
}

#[test]
fn what_an_agent_that_starts_does_not_know_yet_is_not_told_apart_wrongly() {
    let bed = Bed::committed();
    let token = bed.seal(of(A, 10), NO_LEASE).unwrap();
    let unavailable = Err(TokenRefusal::Unavailable);
    let mut started = Bed::committed();
    started.leases = Leases::default();
    assert_eq!(started.redeem(of(B, 20), &token), unavailable);
    let mut unserved = Bed::committed();
    unserved.images.remove(&A);
    assert_eq!(unserved.redeem(of(B, 20), &token), unavailable);
    for nameless in [A, B] {
        let mut bed = Bed::committed();
        let standing = bed.node.containers.get_mut(&nameless).unwrap();
        standing.namespace = None;
        bed.stand();
        assert_eq!(bed.redeem(of(B, 20), &token), unavailable);
    }
    let mut away = Bed::committed();
    away.leases.vault_lost();
    let of_lease = bed.seal(of(A, 10), LEASE).unwrap();
    assert_eq!(away.redeem(of(B, 20), &of_lease), unavailable);
    assert!(away.redeem(of(B, 20), &token).is_ok());
}

#[test]
fn a_new_key_knows_no_token_of_before() {
    let bed = Bed::committed();
    let token = bed.seal(of(A, 10), NO_LEASE).unwrap();
    let mut next = Bed::committed();
    next.key = NodeKey::new("node-a".to_owned(), [2; 32]).unwrap();
    assert_eq!(next.redeem(of(B, 20), &token), Err(TokenRefusal::Forged));
}

proptest! {
    /// Only the present generations are good, whichever way others differ.
    #[test]
    fn a_token_is_redeemed_by_exactly_its_own_lives(g in 3..6u64, p in 4..8u64, l in 6..9u64) {
        let bed = Bed::committed();
        let generations = Generations { gpu: g, process: p, lease: l };
        let token = bed.key.seal(&gpu(), A, generations, 1);
        // P 6 is process 11's: its pod has the lease open too.
        let is_good = g == 4 && (p == 5 || p == 6) && l == LEASE.0;
        prop_assert_eq!(bed.redeem(of(B, 20), &token).is_ok(), is_good);
    }
}
