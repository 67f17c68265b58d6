//! Tests each transition of a lease.

mod generations;
mod history;

use bursar_ledger::units::PodUid;
use bursar_protocol::messages::retained::RetainedRefusal;
use bursar_sessions::lease_handle::{Caller, ChargedLeases, ContainerBinding};

use super::*;

const A: AllocationId = AllocationId::from_bits(1);
const B: AllocationId = AllocationId::from_bits(2);
const C: AllocationId = AllocationId::from_bits(3);

fn gpu() -> GpuUuid {
    "GPU-a".parse().unwrap()
}

fn pod(name: &str) -> PodUid {
    name.parse().unwrap()
}

fn binding(name: &str, namespace: &str) -> ContainerBinding {
    ContainerBinding {
        pod: pod(name),
        namespace: Some(namespace.to_owned()),
        gpus: BTreeSet::from([gpu()]),
    }
}

/// Pods `a` and `b` of one namespace, `c` of another; each with one container.
fn node() -> NodeView {
    NodeView {
        containers: BTreeMap::from([
            (A, binding("a", "team")),
            (B, binding("b", "team")),
            (C, binding("c", "other")),
        ]),
        quotas: BTreeMap::from([
            ("team".to_owned(), BTreeMap::from([(gpu(), Bytes::gib(2))])),
            ("other".to_owned(), BTreeMap::from([(gpu(), Bytes::gib(1))])),
        ]),
        free: BTreeMap::new(),
        generations: BTreeMap::from([(gpu(), 1)]),
    }
}

/// The charge of a container for a lease of 1 GiB.
fn charged(allocation: AllocationId, lease: LeaseId) -> ChargedLeases {
    let leases = BTreeMap::from([(lease, (gpu(), Bytes::gib(1)))]);
    BTreeMap::from([(allocation, leases)])
}

fn caller(allocation: AllocationId, pid: u32) -> Caller {
    let process = Process { pid, start: 1 };
    Caller {
        allocation,
        process,
    }
}

fn weights(bytes: Bytes, image: u64, token: u64) -> OpenRequest {
    OpenRequest {
        gpu: gpu(),
        name: "weights".to_owned(),
        key: [7; 32],
        bytes,
        image,
        token,
    }
}

/// A table with the node, a connected fd store, and lease 1, which process 10 of container A writes
/// with token 99.
fn writing() -> LeaseTable {
    let mut table = LeaseTable::default();
    table.resync(BTreeMap::new(), |_| true);
    table.reconcile(node(), &ChargedLeases::new());
    let (opened, effects) = table.open(caller(A, 10), weights(Bytes::gib(1), 5, 99), BootTime(0));
    let Ok(Opened::Create(record)) = opened else {
        panic!("{opened:?}");
    };
    assert_eq!(effects, []);
    table.begin_create(LeaseId(1), *record);
    assert!(table.finish_create(LeaseId(1)).0.is_some());
    table
}

fn committed() -> LeaseTable {
    let mut table = writing();
    table
        .commit(caller(A, 10), LeaseId(1), 99, 0xfeed, BootTime(1))
        .unwrap();
    table
}

fn reopen(table: &mut LeaseTable, caller: Caller) -> Result<Opened, RetainedRefusal> {
    let missing = weights(Bytes::ZERO, 5, 1);
    table.open(caller, missing, BootTime(2)).0
}

#[test]
fn lease_is_read_by_its_namespace_once_committed() {
    let mut table = writing();
    assert_eq!(
        reopen(&mut table, caller(B, 20)),
        Err(RetainedRefusal::Writing)
    );
    assert_eq!(
        reopen(&mut table, caller(C, 30)),
        Err(RetainedRefusal::Missing),
        "another namespace's"
    );
    assert_eq!(
        table.commit(caller(A, 10), LeaseId(1), 98, 0, BootTime(1)),
        Err(RetainedRefusal::Fenced)
    );
    let effects = table.commit(caller(A, 10), LeaseId(1), 99, 0xfeed, BootTime(1));
    assert!(matches!(
        &effects.unwrap()[..],
        [Effect::Update(LeaseId(1), _)]
    ));
    let (opened, effects) = table.open(caller(B, 20), weights(Bytes::ZERO, 5, 1), BootTime(2));
    assert_eq!(opened, Ok(Opened::Read(LeaseId(1))));
    assert!(
        matches!(&effects[..], [Effect::Update(_, record)] if record.openers == BTreeSet::from([pod("a"), pod("b")])),
        "{effects:?}"
    );
    assert_eq!(
        table.commit(caller(C, 30), LeaseId(1), 99, 0xfeed, BootTime(3)),
        Err(RetainedRefusal::Missing)
    );
}

#[test]
fn writer_reopens_its_lease_after_a_lost_answer() {
    let mut table = writing();
    let again = weights(Bytes::gib(1), 5, 100);
    let (opened, _) = table.open(caller(A, 10), again, BootTime(1));
    assert_eq!(opened, Ok(Opened::Write(LeaseId(1))));
    assert_eq!(
        table.commit(caller(A, 10), LeaseId(1), 99, 1, BootTime(1)),
        Err(RetainedRefusal::Fenced),
        "the later token counts"
    );
    for _ in 0..2 {
        assert!(
            table
                .commit(caller(A, 10), LeaseId(1), 100, 1, BootTime(1))
                .is_ok()
        );
    }
    assert_eq!(
        table.commit(caller(A, 10), LeaseId(1), 100, 2, BootTime(1)),
        Err(RetainedRefusal::Fenced),
        "another content"
    );
}

#[test]
fn larger_reopen_by_the_writer_replaces_the_lease() {
    let mut table = writing();
    assert_eq!(
        reopen(&mut table, caller(A, 10)),
        Err(RetainedRefusal::Writing),
        "who only looks takes no right away"
    );
    let (opened, effects) = table.open(caller(A, 10), weights(Bytes::gib(2), 5, 100), BootTime(1));
    let Ok(Opened::Create(record)) = opened else {
        panic!("{opened:?}: too small");
    };
    assert_eq!(record.bytes, Bytes::gib(2));
    assert_eq!(effects, [Effect::Charge(LeaseId(1), A)]);
}

#[test]
fn uncommitted_lease_is_released_when_its_token_expires() {
    let mut table = writing();
    let end = BootTime(0) + WRITE_TOKEN_LIFETIME;
    assert_eq!(table.expire_writers(BootTime(end.0 - 1)), []);
    assert_eq!(table.expire_writers(end), [Effect::Charge(LeaseId(1), A)]);
    assert_eq!(committed().expire_writers(end), []);
}

#[test]
fn shared_leases_are_bounded_by_the_namespaces_quota() {
    let mut table = committed();
    reopen(&mut table, caller(B, 20)).unwrap();
    let mut node = node();
    // Pods that create a lease and end.
    for number in 2..4 {
        let allocation = AllocationId::from_bits(100 + number);
        let maker = binding(&format!("maker-{number}"), "team");
        node.containers = BTreeMap::from([(B, binding("b", "team")), (allocation, maker)]);
        table.reconcile(node.clone(), &ChargedLeases::new());
        let open = |bytes| OpenRequest {
            name: number.to_string(),
            ..weights(bytes, 5, 99)
        };
        let maker = caller(allocation, 30);
        let (Ok(Opened::Create(record)), _) = table.open(maker, open(Bytes::gib(1)), BootTime(2))
        else {
            panic!("{number} is there");
        };
        table.begin_create(LeaseId(number), *record);
        table.finish_create(LeaseId(number));
        let id = LeaseId(number);
        table.commit(maker, id, 99, 1, BootTime(2)).unwrap();
        let (opened, _) = table.open(caller(B, 20), open(Bytes::ZERO), BootTime(3));
        let expected = match number {
            2 => Ok(Opened::Read(id)),
            _ => Err(RetainedRefusal::Quota { free: 0 }),
        };
        assert_eq!(opened, expected, "{number}");
        let (again, _) = table.open(maker, open(Bytes::ZERO), BootTime(3));
        assert_eq!(again, Ok(Opened::Read(id)), "its own");
    }
    assert_eq!(
        reopen(&mut table, caller(B, 20)),
        Ok(Opened::Read(LeaseId(1))),
        "what is open stays so"
    );
}

#[test]
fn lease_leaves_its_bytes_when_its_second_owner_ends() {
    let mut table = committed();
    reopen(&mut table, caller(B, 20)).unwrap();
    let mut without = node();
    without.containers.remove(&A);
    table.reconcile(without, &ChargedLeases::new());
    let next = AllocationId::from_bits(9);
    let mut with = node();
    with.containers = BTreeMap::from([(B, binding("b", "team")), (next, binding("a", "team"))]);
    let (update, _) = table.reconcile(with, &charged(next, LeaseId(1)));
    assert_eq!(update.orphaned, Some(BTreeMap::new()));
    let (update, _) = table.reconcile(NodeView::default(), &ChargedLeases::new());
    assert_eq!(update.ended, [(LeaseId(1), gpu(), Bytes::gib(1))]);
}

#[test]
fn lease_is_live_once_its_new_owner_is_charged() {
    let mut table = committed();
    let next = AllocationId::from_bits(9);
    let mut node = node();
    node.containers.remove(&A);
    node.containers.insert(next, binding("a", "team"));
    table.reconcile(node.clone(), &charged(A, LeaseId(1)));
    assert_eq!(table.live_leases(), BTreeMap::new());
    table.reconcile(node, &charged(next, LeaseId(1)));
    assert_eq!(table.live_leases()[&gpu()].len(), 1);
}

#[test]
fn lease_is_charged_and_dropped_when_its_writer_ends() {
    let charge = [Effect::Charge(LeaseId(1), A)];
    let mut died = writing();
    assert_eq!(died.process_ended(caller(A, 10).process), charge);
    assert_eq!(
        died.confirm_charged(LeaseId(1)),
        Some(Effect::Drop(LeaseId(1)))
    );
    died.confirm_dropped(LeaseId(1));
    assert_eq!(died.leases, BTreeMap::new());
    let mut execed = writing();
    let (opened, effects) = execed.open(caller(A, 10), weights(Bytes::gib(1), 6, 1), BootTime(1));
    assert!(matches!(opened, Ok(Opened::Create(_))), "{opened:?}");
    assert_eq!(effects, charge);
    let mut whole = committed();
    assert_eq!(
        whole.process_ended(caller(A, 10).process),
        [],
        "what is committed stays"
    );
}

#[test]
fn write_token_expires_and_another_writer_takes_over() {
    let mut table = writing();
    let late = BootTime(0) + WRITE_TOKEN_LIFETIME;
    assert_eq!(
        table.commit(caller(A, 10), LeaseId(1), 99, 1, late),
        Err(RetainedRefusal::Fenced)
    );
    let (opened, effects) = table.open(caller(B, 20), weights(Bytes::gib(1), 5, 1), late);
    assert!(matches!(opened, Ok(Opened::Create(_))), "{opened:?}");
    assert_eq!(effects, [Effect::Charge(LeaseId(1), A)]);
    // Reading does not expire.
    let mut table = committed();
    let (opened, _) = table.open(caller(A, 10), weights(Bytes::ZERO, 5, 1), late);
    assert_eq!(opened, Ok(Opened::Read(LeaseId(1))));
}

#[test]
fn lease_lives_until_its_last_opener_ends() {
    let mut table = committed();
    reopen(&mut table, caller(B, 20)).unwrap();
    let mut node = node();
    node.containers.remove(&A);
    let (update, effects) = table.reconcile(node.clone(), &ChargedLeases::new());
    assert_eq!(
        (update.orphaned, update.ended, effects),
        (
            Some(BTreeMap::from([(
                gpu(),
                BTreeMap::from([(LeaseId(1), Bytes::gib(1))])
            )])),
            vec![],
            vec![]
        )
    );
    node.containers.remove(&B);
    let (update, effects) = table.reconcile(node.clone(), &ChargedLeases::new());
    assert_eq!(update.orphaned, Some(BTreeMap::new()));
    assert_eq!(update.ended, [(LeaseId(1), gpu(), Bytes::gib(1))]);
    assert_eq!(effects, []);
    assert_eq!(
        table.reconcile(node, &ChargedLeases::new()).0.ended,
        [],
        "reported once"
    );
    assert_eq!(table.live_leases(), BTreeMap::new());
    assert_eq!(
        table.confirm_charged(LeaseId(1)),
        Some(Effect::Drop(LeaseId(1)))
    );
}

#[test]
fn lease_of_an_init_container_passes_to_the_next_container() {
    let mut table = committed();
    let mut node = node();
    let next = AllocationId::from_bits(9);
    node.containers.remove(&A);
    node.containers.insert(next, binding("a", "team"));
    let (update, effects) = table.reconcile(node, &ChargedLeases::new());
    assert_eq!(update.orphaned, Some(BTreeMap::new()));
    assert!(matches!(&effects[..], [Effect::Update(LeaseId(1), record)] if record.owner == next));
    assert_eq!(table.owner(LeaseId(1)), Some(next));
}

#[test]
fn discard_keeps_memory_that_other_pods_may_have_mapped() {
    let mut table = committed();
    reopen(&mut table, caller(B, 20)).unwrap();
    assert_eq!(
        table.discard(caller(C, 30), LeaseId(1)),
        Err(RetainedRefusal::Missing)
    );
    let effects = table.discard(caller(B, 20), LeaseId(1)).unwrap();
    assert!(
        matches!(&effects[..], [Effect::Update(_, _)]),
        "{effects:?}"
    );
    assert_eq!(
        reopen(&mut table, caller(A, 10)),
        Err(RetainedRefusal::Missing)
    );
    let mut alone = committed();
    assert_eq!(
        alone.discard(caller(A, 10), LeaseId(1)).unwrap(),
        [Effect::Charge(LeaseId(1), A)]
    );
    let mut writing = writing();
    assert_eq!(
        writing.discard(caller(A, 11), LeaseId(1)),
        Err(RetainedRefusal::Fenced),
        "another process writes it"
    );
}

#[test]
fn discarded_lease_is_charged_until_other_pods_end() {
    let mut table = committed();
    reopen(&mut table, caller(B, 20)).unwrap();
    let effects = table.discard(caller(A, 10), LeaseId(1)).unwrap();
    assert!(
        matches!(&effects[..], [Effect::Update(_, record)] if record.openers == BTreeSet::from([pod("b")])),
        "{effects:?}"
    );
    let (_, effects) = table.reconcile(node(), &charged(A, LeaseId(1)));
    assert_eq!(effects, [], "the other pod may have it mapped");
    // The pod's next container owns the lease, and does not have it open.
    let next = AllocationId::from_bits(9);
    let mut node = node();
    node.containers.remove(&A);
    node.containers.insert(next, binding("a", "team"));
    let (_, effects) = table.reconcile(node.clone(), &charged(A, LeaseId(1)));
    assert!(matches!(&effects[..], [Effect::Update(_, record)] if record.owner == next));
    node.containers.remove(&B);
    let (_, effects) = table.reconcile(node, &charged(next, LeaseId(1)));
    assert_eq!(effects, [Effect::Charge(LeaseId(1), next)]);
}

#[test]
fn resync_releases_the_older_of_two_leases_with_one_key() {
    let older = committed().get(LeaseId(1)).cloned().unwrap();
    let mut newer = older.clone();
    newer.content = Content::Committed {
        token: 9,
        checksum: 9,
    };
    let stored = BTreeMap::from([
        (LeaseId(1), StoredRecord::Read(older)),
        (LeaseId(4), StoredRecord::Read(newer)),
    ]);
    let mut table = LeaseTable::default();
    table.reconcile(node(), &ChargedLeases::new());
    assert_eq!(
        table.resync(stored, |_| true),
        [Effect::Charge(LeaseId(1), A)]
    );
    assert_eq!(
        reopen(&mut table, caller(A, 11)),
        Ok(Opened::Read(LeaseId(4)))
    );
}

#[test]
fn resync_takes_over_what_the_fd_store_has() {
    let before = committed();
    let record = before.get(LeaseId(1)).cloned().unwrap();
    let stored = BTreeMap::from([(LeaseId(1), StoredRecord::Read(record))]);
    let mut table = LeaseTable::default();
    table.reconcile(node(), &ChargedLeases::new());
    assert_eq!(
        reopen(&mut table, caller(A, 11)),
        Err(RetainedRefusal::Unavailable),
        "before the fd store has listed its leases"
    );
    assert_eq!(table.resync(stored, |_| false), []);
    assert_eq!(
        reopen(&mut table, caller(B, 20)),
        Ok(Opened::Read(LeaseId(1)))
    );
    assert_eq!(
        table.live_leases(),
        BTreeMap::new(),
        "nobody is charged for it yet"
    );
    table.reconcile(node(), &charged(A, LeaseId(1)));
    assert_eq!(table.live_leases()[&gpu()].len(), 1);
    // A writer that exited before the agent connected loses its lease.
    let record = writing().get(LeaseId(1)).cloned().unwrap();
    let stored = BTreeMap::from([(LeaseId(1), StoredRecord::Read(record))]);
    let mut table = LeaseTable::default();
    table.reconcile(node(), &ChargedLeases::new());
    assert_eq!(
        table.resync(stored.clone(), |_| false),
        [Effect::Charge(LeaseId(1), A)]
    );
    let mut table = LeaseTable::default();
    table.reconcile(node(), &ChargedLeases::new());
    assert_eq!(table.resync(stored, |_| true), []);
    assert_eq!(table.writers(), BTreeSet::from([caller(A, 10).process]));
}

#[test]
fn unreadable_lease_stays_and_is_charged() {
    let why = || "missing field `later`".to_owned();
    let extent = Some((gpu(), Bytes::gib(1)));
    let unreadable = |extent| StoredRecord::Unreadable { extent, why: why() };
    let stored = BTreeMap::from([
        (LeaseId(1), unreadable(extent)),
        (LeaseId(2), unreadable(None)),
    ]);
    let mut table = LeaseTable::default();
    assert_eq!(table.resync(stored.clone(), |_| false), []);
    let of_lease_1 = BTreeMap::from([(gpu(), BTreeMap::from([(LeaseId(1), Bytes::gib(1))]))]);
    // The container whose record has the charge stays charged; without one the node is.
    let (update, effects) = table.reconcile(node(), &charged(A, LeaseId(1)));
    assert_eq!((update.orphaned, effects), (Some(BTreeMap::new()), vec![]));
    let (update, effects) = table.reconcile(node(), &ChargedLeases::new());
    assert_eq!(
        (update.orphaned, effects),
        (Some(of_lease_1.clone()), vec![])
    );
    assert_eq!(table.live_leases(), of_lease_1);
    assert!(table.is_unreadable(LeaseId(1)) && table.is_unreadable(LeaseId(2)));
    assert_eq!(table.uncharged(), 1);
    // Another version of the agent can read the blob again.
    let mut read = stored;
    let record = committed().get(LeaseId(1)).cloned().unwrap();
    read.insert(LeaseId(1), StoredRecord::Read(record));
    assert_eq!(table.resync(read, |_| false), []);
    assert!(!table.is_unreadable(LeaseId(1)) && table.get(LeaseId(1)).is_some());
}

#[test]
fn unreadable_lease_is_dropped_when_its_gpu_is_drained() {
    let mut table = LeaseTable::default();
    let extent = Some((gpu(), Bytes::gib(1)));
    let why = "missing field `later`".to_owned();
    table.resync(
        BTreeMap::from([(LeaseId(1), StoredRecord::Unreadable { extent, why })]),
        |_| false,
    );
    table.drain(BTreeSet::from([gpu()]));
    let (_, effects) = table.reconcile(node(), &ChargedLeases::new());
    assert_eq!(effects, [Effect::Drop(LeaseId(1))]);
    assert!(table.has_leases_on(&gpu()) && table.extent(LeaseId(1)).is_some());
    table.confirm_dropped(LeaseId(1));
    assert!(!table.has_leases_on(&gpu()));
}

#[test]
fn lease_of_an_unknown_gpu_is_dropped_when_all_are_drained() {
    let mut table = LeaseTable::default();
    let unreadable = StoredRecord::Unreadable {
        extent: None,
        why: "missing field `gpu`".to_owned(),
    };
    table.resync(BTreeMap::from([(LeaseId(1), unreadable)]), |_| false);
    let other: GpuUuid = "GPU-b".parse().unwrap();
    let node = || NodeView {
        free: [(gpu(), Bytes::ZERO), (other.clone(), Bytes::ZERO)].into(),
        ..node()
    };
    table.drain(BTreeSet::from([gpu()]));
    let (_, effects) = table.reconcile(node(), &ChargedLeases::new());
    assert_eq!(effects, [], "the lease may be on the other GPU");
    table.drain(BTreeSet::from([gpu(), other.clone()]));
    let (_, effects) = table.reconcile(node(), &ChargedLeases::new());
    assert_eq!(effects, [Effect::Drop(LeaseId(1))]);
    table.confirm_dropped(LeaseId(1));
    assert_eq!(table.uncharged(), 0);
}

#[test]
fn leases_are_lost_with_the_fd_store_or_their_gpu() {
    let mut table = committed();
    table.store_disconnected();
    assert_eq!(
        table.live_leases(),
        BTreeMap::new(),
        "nothing is known of it"
    );
    assert_eq!(
        reopen(&mut table, caller(A, 10)),
        Err(RetainedRefusal::Unavailable)
    );
    assert_eq!(
        table.resync(BTreeMap::new(), |_| true),
        [Effect::Charge(LeaseId(1), A)]
    );
    assert_eq!(
        reopen(&mut table, caller(A, 10)),
        Err(RetainedRefusal::Missing)
    );
    // A lower generation comes from a count that started again.
    for generation in [0, 2] {
        let mut table = committed();
        assert_eq!(table.reconcile(node(), &charged(A, LeaseId(1))).1, []);
        let mut node = node();
        node.generations.insert(gpu(), generation);
        let (_, effects) = table.reconcile(node, &ChargedLeases::new());
        assert_eq!(effects, [Effect::Charge(LeaseId(1), A)]);
        assert_eq!(
            reopen(&mut table, caller(A, 10)),
            Err(RetainedRefusal::Missing)
        );
    }
    let mut unknown = node();
    unknown.generations.clear();
    let (_, effects) = committed().reconcile(unknown, &charged(A, LeaseId(1)));
    assert_eq!(effects, [], "nobody knows yet");
}

#[test]
fn drain_releases_leases_and_refuses_new_ones() {
    let mut table = committed();
    table.drain(BTreeSet::from([gpu()]));
    let (_, effects) = table.reconcile(node(), &charged(A, LeaseId(1)));
    assert_eq!(effects, [Effect::Charge(LeaseId(1), A)]);
    let make = |table: &mut LeaseTable| {
        table
            .open(caller(A, 10), weights(Bytes::gib(1), 5, 99), BootTime(9))
            .0
    };
    assert_eq!(make(&mut table), Err(RetainedRefusal::Unavailable));
    assert!(table.has_leases_on(&gpu()));
    assert_eq!(
        table.confirm_charged(LeaseId(1)),
        Some(Effect::Drop(LeaseId(1)))
    );
    table.confirm_dropped(LeaseId(1));
    assert!(!table.has_leases_on(&gpu()));
    table.drain(BTreeSet::new());
    assert!(matches!(make(&mut table), Ok(Opened::Create(_))));
}

#[test]
fn lease_is_released_when_its_writer_ends_during_creation() {
    let mut table = LeaseTable::default();
    table.resync(BTreeMap::new(), |_| true);
    table.reconcile(node(), &ChargedLeases::new());
    let (opened, _) = table.open(caller(A, 10), weights(Bytes::gib(1), 5, 99), BootTime(0));
    let Ok(Opened::Create(record)) = opened else {
        panic!("{opened:?}");
    };
    table.begin_create(LeaseId(1), *record);
    assert_eq!(table.process_ended(caller(A, 10).process), []);
    let (record, effects) = table.finish_create(LeaseId(1));
    assert_eq!(
        (record, effects),
        (None, vec![Effect::Charge(LeaseId(1), A)])
    );
}

#[test]
fn container_owns_a_bounded_number_of_leases() {
    let mut table = LeaseTable::default();
    table.resync(BTreeMap::new(), |_| true);
    table.reconcile(node(), &ChargedLeases::new());
    for number in 0..=MAX_OWNED as u64 {
        let open = OpenRequest {
            name: number.to_string(),
            ..weights(Bytes::mib(2), 5, number)
        };
        match table.open(caller(A, 10), open, BootTime(0)).0 {
            Ok(Opened::Create(record)) => table.begin_create(LeaseId(number + 1), *record),
            refused => {
                assert_eq!(refused, Err(RetainedRefusal::TooMany));
                assert_eq!(number, MAX_OWNED as u64);
                return;
            }
        }
    }
    panic!("nothing was refused");
}

/// Creates leases in these containers until one is refused; returns how many it created.
fn fill(table: &mut LeaseTable, containers: impl Iterator<Item = u64>, from: u64) -> u64 {
    let mut created = 0;
    for container in containers {
        let caller = caller(AllocationId::from_bits(container), 10);
        for number in 0..MAX_OWNED as u64 {
            let open = OpenRequest {
                name: format!("{container}-{number}"),
                ..weights(Bytes::mib(2), 5, number)
            };
            match table.open(caller, open, BootTime(0)).0 {
                Ok(Opened::Create(record)) => table.begin_create(LeaseId(from + created), *record),
                refused => {
                    assert_eq!(refused, Err(RetainedRefusal::TooMany));
                    return created;
                }
            }
            created += 1;
        }
    }
    panic!("nothing was refused");
}

#[test]
fn namespace_that_fills_the_fd_store_leaves_others_a_share() {
    let containers = |first: u64, namespace: &'static str| {
        let container = move |number: u64| {
            let binding = binding(&number.to_string(), namespace);
            (AllocationId::from_bits(number), binding)
        };
        (first..first + 300).map(container)
    };
    let greedy = containers(1000, "greedy").chain(containers(2000, "second"));
    let node = NodeView {
        containers: greedy.chain(containers(3000, "third")).collect(),
        ..node()
    };
    let mut table = LeaseTable::default();
    table.set_capacity(1024);
    table.resync(BTreeMap::new(), |_| true);
    table.reconcile(node, &ChargedLeases::new());
    let first = fill(&mut table, 1000..1300, 1);
    let second = fill(&mut table, 2000..2300, 1 + first);
    assert_eq!((first, second), (512, 256));
    // The fd store still has a lease that is being released.
    table.finish_create(LeaseId(1));
    table.release_uncertain(LeaseId(1));
    assert_eq!(fill(&mut table, 1000..1300, 10_000), 0);
    assert_eq!(fill(&mut table, 3000..3300, 20_000), 128);
}

#[test]
fn key_of_a_lease_is_written_as_hex_digits() {
    let title = LeaseKey {
        namespace: "team".to_owned(),
        name: "weights".to_owned(),
        key: std::array::from_fn(|byte| 8 * byte as u8),
        gpu: gpu(),
    };
    let written = serde_json::to_value(&title).unwrap();
    let hex = "0008101820283038404850586068707880889098a0a8b0b8c0c8d0d8e0e8f0f8";
    assert_eq!(written["key"], hex);
    let read: LeaseKey = serde_json::from_value(written.clone()).unwrap();
    assert_eq!(read, title);
    for wrong in [
        "",
        "0",
        &hex[2..],
        &hex.replace("08", "+8"),
        &hex.replace("08", "ä"),
    ] {
        let mut other = written.clone();
        other["key"] = wrong.into();
        assert!(
            serde_json::from_value::<LeaseKey>(other).is_err(),
            "{wrong}"
        );
    }
}

#[test]
fn longest_blob_fits_into_the_fd_store() {
    let name = |number: u32| format!("{number:036}");
    let record = LeaseRecord {
        title: LeaseKey {
            namespace: "n".repeat(63),
            name: "\"".repeat(96),
            key: [255; 32],
            gpu: format!("MIG-{}", "f".repeat(60)).parse().unwrap(),
        },
        bytes: Bytes(u64::MAX),
        gpu_generation: u64::MAX,
        owner: A,
        pod: pod(&name(0)),
        openers: (0..MAX_OPENERS as u32)
            .map(|number| pod(&name(number)))
            .collect(),
        content: Content::Writing(Writer {
            process: Process {
                pid: u32::MAX,
                start: u64::MAX,
            },
            image: u64::MAX,
            token: u64::MAX,
            until: BootTime(u64::MAX),
        }),
    };
    let text = serde_json::to_string(&record).unwrap();
    bursar_protocol::fdstore::Blob::try_from(text).unwrap();
}
