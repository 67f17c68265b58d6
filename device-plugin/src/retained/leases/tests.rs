//! What each step of a lease comes to.

use super::*;

pub(super) const A: AllocationId = AllocationId::from_bits(1);
const B: AllocationId = AllocationId::from_bits(2);
const C: AllocationId = AllocationId::from_bits(3);

pub(super) fn gpu() -> GpuUuid {
    "GPU-a".parse().unwrap()
}

fn pod(name: &str) -> PodUid {
    name.parse().unwrap()
}

fn standing(name: &str, namespace: &str) -> Standing {
    Standing {
        pod: pod(name),
        namespace: Some(namespace.to_owned()),
        gpus: BTreeSet::from([gpu()]),
    }
}

/// Pods `a` and `b` of one namespace, `c` of another; each with one container.
fn node() -> Node {
    Node {
        containers: BTreeMap::from([
            (A, standing("a", "team")),
            (B, standing("b", "team")),
            (C, standing("c", "other")),
        ]),
        quotas: BTreeMap::from([
            ("team".to_owned(), BTreeMap::from([(gpu(), Bytes::gib(2))])),
            ("other".to_owned(), BTreeMap::from([(gpu(), Bytes::gib(1))])),
        ]),
        free: BTreeMap::new(),
        generations: BTreeMap::from([(gpu(), 1)]),
    }
}

/// A container is charged for a lease of 1 GiB.
fn charged(allocation: AllocationId, lease: LeaseId) -> Charged {
    let leases = BTreeMap::from([(lease, (gpu(), Bytes::gib(1)))]);
    BTreeMap::from([(allocation, leases)])
}

fn asker(allocation: AllocationId, pid: u32) -> Asker {
    let process = Process { pid, start: 1 };
    Asker {
        allocation,
        process,
    }
}

fn weights(bytes: Bytes, image: u64, token: u64) -> Open {
    Open {
        gpu: gpu(),
        name: "weights".to_owned(),
        key: [7; 32],
        bytes,
        image,
        token,
    }
}

/// The book with the node, a vault, and lease 1, which process 10 of container A writes with token 99.
fn writing() -> Leases {
    let mut book = Leases::default();
    book.heard(BTreeMap::new(), |_| true);
    book.stand(node(), &Charged::new());
    let (opened, effects) = book.open(asker(A, 10), weights(Bytes::gib(1), 5, 99), Moment(0));
    let Ok(Opened::Make(meta)) = opened else {
        panic!("{opened:?}");
    };
    assert_eq!(effects, []);
    book.begin(LeaseId(1), *meta);
    assert!(book.made(LeaseId(1)).0.is_some());
    book
}

fn committed() -> Leases {
    let mut book = writing();
    book.commit(asker(A, 10), LeaseId(1), 99, 0xfeed, Moment(1))
        .unwrap();
    book
}

fn reopen(book: &mut Leases, who: Asker) -> Result<Opened, RetainedRefusal> {
    let missing = weights(Bytes::ZERO, 5, 1);
    book.open(who, missing, Moment(2)).0
}

#[test]
fn one_writes_others_wait_and_once_it_is_committed_its_namespace_reads_it() {
    let mut book = writing();
    assert_eq!(
        reopen(&mut book, asker(B, 20)),
        Err(RetainedRefusal::Writing)
    );
    assert_eq!(
        reopen(&mut book, asker(C, 30)),
        Err(RetainedRefusal::Missing),
        "another namespace's"
    );
    assert_eq!(
        book.commit(asker(A, 10), LeaseId(1), 98, 0, Moment(1)),
        Err(RetainedRefusal::Fenced)
    );
    let told = book.commit(asker(A, 10), LeaseId(1), 99, 0xfeed, Moment(1));
    assert!(matches!(
        &told.unwrap()[..],
        [Effect::Update(LeaseId(1), _)]
    ));
    let (opened, effects) = book.open(asker(B, 20), weights(Bytes::ZERO, 5, 1), Moment(2));
    assert_eq!(opened, Ok(Opened::Read(LeaseId(1))));
    assert!(
        matches!(&effects[..], [Effect::Update(_, meta)] if meta.openers == BTreeSet::from([pod("a"), pod("b")])),
        "{effects:?}"
    );
    assert_eq!(
        book.commit(asker(C, 30), LeaseId(1), 99, 0xfeed, Moment(3)),
        Err(RetainedRefusal::Missing)
    );
}

#[test]
fn an_answer_that_was_lost_can_be_asked_for_again() {
    let mut book = writing();
    let again = weights(Bytes::gib(1), 5, 100);
    let (opened, _) = book.open(asker(A, 10), again, Moment(1));
    assert_eq!(opened, Ok(Opened::Write(LeaseId(1))));
    assert_eq!(
        book.commit(asker(A, 10), LeaseId(1), 99, 1, Moment(1)),
        Err(RetainedRefusal::Fenced),
        "the later token counts"
    );
    for _ in 0..2 {
        assert!(
            book.commit(asker(A, 10), LeaseId(1), 100, 1, Moment(1))
                .is_ok()
        );
    }
    assert_eq!(
        book.commit(asker(A, 10), LeaseId(1), 100, 2, Moment(1)),
        Err(RetainedRefusal::Fenced),
        "another content"
    );
}

#[test]
fn of_two_threads_that_want_the_same_one_writes_and_who_asked_for_more_writes_anew() {
    let mut book = writing();
    assert_eq!(
        reopen(&mut book, asker(A, 10)),
        Err(RetainedRefusal::Writing),
        "who only looks takes no right away"
    );
    let (opened, effects) = book.open(asker(A, 10), weights(Bytes::gib(2), 5, 100), Moment(1));
    let Ok(Opened::Make(meta)) = opened else {
        panic!("{opened:?}: too small");
    };
    assert_eq!(meta.bytes, Bytes::gib(2));
    assert_eq!(effects, [Effect::Charge(LeaseId(1), A)]);
}

#[test]
fn what_a_writer_does_not_commit_in_time_ends_though_nobody_asks_for_it() {
    let mut book = writing();
    let end = Moment(0) + WRITE_TIME;
    assert_eq!(book.late(Moment(end.0 - 1)), []);
    assert_eq!(book.late(end), [Effect::Charge(LeaseId(1), A)]);
    assert_eq!(committed().late(end), []);
}

#[test]
fn pods_that_own_nothing_keep_no_more_of_a_namespaces_leases_than_its_pods_may_use() {
    let mut book = committed();
    reopen(&mut book, asker(B, 20)).unwrap();
    let mut node = node();
    // Pods that make a lease, and end.
    for number in 2..4 {
        let allocation = AllocationId::from_bits(100 + number);
        let maker = standing(&format!("maker-{number}"), "team");
        node.containers = BTreeMap::from([(B, standing("b", "team")), (allocation, maker)]);
        book.stand(node.clone(), &Charged::new());
        let open = |bytes| Open {
            name: number.to_string(),
            ..weights(bytes, 5, 99)
        };
        let maker = asker(allocation, 30);
        let (Ok(Opened::Make(meta)), _) = book.open(maker, open(Bytes::gib(1)), Moment(2)) else {
            panic!("{number} is there");
        };
        book.begin(LeaseId(number), *meta);
        book.made(LeaseId(number));
        let id = LeaseId(number);
        book.commit(maker, id, 99, 1, Moment(2)).unwrap();
        let (opened, _) = book.open(asker(B, 20), open(Bytes::ZERO), Moment(3));
        let expected = match number {
            2 => Ok(Opened::Read(id)),
            _ => Err(RetainedRefusal::Quota { free: 0 }),
        };
        assert_eq!(opened, expected, "{number}");
        let (again, _) = book.open(maker, open(Bytes::ZERO), Moment(3));
        assert_eq!(again, Ok(Opened::Read(id)), "its own");
    }
    assert_eq!(
        reopen(&mut book, asker(B, 20)),
        Ok(Opened::Read(LeaseId(1))),
        "what is open stays so"
    );
}

#[test]
fn a_lease_that_has_an_owner_again_leaves_its_bytes_when_that_ends() {
    let mut book = committed();
    reopen(&mut book, asker(B, 20)).unwrap();
    let mut without = node();
    without.containers.remove(&A);
    book.stand(without, &Charged::new());
    let next = AllocationId::from_bits(9);
    let mut with = node();
    with.containers = BTreeMap::from([(B, standing("b", "team")), (next, standing("a", "team"))]);
    let (turn, _) = book.stand(with, &charged(next, LeaseId(1)));
    assert_eq!(turn.orphaned, Some(BTreeMap::new()));
    let (turn, _) = book.stand(Node::default(), &Charged::new());
    assert_eq!(turn.left, [(LeaseId(1), gpu(), Bytes::gib(1))]);
}

#[test]
fn a_lease_is_known_once_its_heir_is_charged_and_not_because_its_last_owner_is() {
    let mut book = committed();
    let next = AllocationId::from_bits(9);
    let mut node = node();
    node.containers.remove(&A);
    node.containers.insert(next, standing("a", "team"));
    book.stand(node.clone(), &charged(A, LeaseId(1)));
    assert_eq!(book.living(), BTreeMap::new());
    book.stand(node, &charged(next, LeaseId(1)));
    assert_eq!(book.living()[&gpu()].len(), 1);
}

#[test]
fn what_a_writer_that_died_or_execed_wrote_is_discarded_and_charged_until_it_is_proven_free() {
    let charge = [Effect::Charge(LeaseId(1), A)];
    let mut died = writing();
    assert_eq!(died.ended(asker(A, 10).process), charge);
    assert_eq!(died.charged(LeaseId(1)), Some(Effect::Drop(LeaseId(1))));
    died.dropped(LeaseId(1));
    assert_eq!(died.leases, BTreeMap::new());
    let mut execed = writing();
    let (opened, effects) = execed.open(asker(A, 10), weights(Bytes::gib(1), 6, 1), Moment(1));
    assert!(matches!(opened, Ok(Opened::Make(_))), "{opened:?}");
    assert_eq!(effects, charge);
    let mut whole = committed();
    assert_eq!(
        whole.ended(asker(A, 10).process),
        [],
        "what is committed stays"
    );
}

#[test]
fn a_token_ends_with_its_time_and_another_writer_may_take_over() {
    let mut book = writing();
    let late = Moment(0) + WRITE_TIME;
    assert_eq!(
        book.commit(asker(A, 10), LeaseId(1), 99, 1, late),
        Err(RetainedRefusal::Fenced)
    );
    let (opened, effects) = book.open(asker(B, 20), weights(Bytes::gib(1), 5, 1), late);
    assert!(matches!(opened, Ok(Opened::Make(_))), "{opened:?}");
    assert_eq!(effects, [Effect::Charge(LeaseId(1), A)]);
    // Reading does not end.
    let mut book = committed();
    let (opened, _) = book.open(asker(A, 10), weights(Bytes::ZERO, 5, 1), late);
    assert_eq!(opened, Ok(Opened::Read(LeaseId(1))));
}

#[test]
fn a_lease_lives_as_long_as_one_pod_that_opened_it_and_is_the_nodes_without_its_owner() {
    let mut book = committed();
    reopen(&mut book, asker(B, 20)).unwrap();
    let mut node = node();
    node.containers.remove(&A);
    let (turn, effects) = book.stand(node.clone(), &Charged::new());
    assert_eq!(
        (turn.orphaned, turn.left, effects),
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
    let (turn, effects) = book.stand(node.clone(), &Charged::new());
    assert_eq!(turn.orphaned, Some(BTreeMap::new()));
    assert_eq!(
        turn.left,
        [(LeaseId(1), gpu(), Bytes::ZERO)],
        "it is kept no more"
    );
    assert_eq!(effects, []);
    assert_eq!(book.stand(node, &Charged::new()).0.left, [], "told once");
    assert_eq!(book.living(), BTreeMap::new());
    assert_eq!(book.charged(LeaseId(1)), Some(Effect::Drop(LeaseId(1))));
}

#[test]
fn what_an_init_container_made_is_its_pods_next_containers() {
    let mut book = committed();
    let mut node = node();
    let next = AllocationId::from_bits(9);
    node.containers.remove(&A);
    node.containers.insert(next, standing("a", "team"));
    let (turn, effects) = book.stand(node, &Charged::new());
    assert_eq!(turn.orphaned, Some(BTreeMap::new()));
    assert!(matches!(&effects[..], [Effect::Update(LeaseId(1), meta)] if meta.owner == next));
    assert_eq!(book.owner(LeaseId(1)), Some(next));
}

#[test]
fn what_others_may_have_mapped_is_discarded_only_by_name() {
    let mut book = committed();
    reopen(&mut book, asker(B, 20)).unwrap();
    assert_eq!(
        book.discard(asker(C, 30), LeaseId(1)),
        Err(RetainedRefusal::Missing)
    );
    let effects = book.discard(asker(B, 20), LeaseId(1)).unwrap();
    assert!(
        matches!(&effects[..], [Effect::Update(_, _)]),
        "{effects:?}"
    );
    assert_eq!(
        reopen(&mut book, asker(A, 10)),
        Err(RetainedRefusal::Missing)
    );
    let mut alone = committed();
    assert_eq!(
        alone.discard(asker(A, 10), LeaseId(1)).unwrap(),
        [Effect::Charge(LeaseId(1), A)]
    );
    let mut writing = writing();
    assert_eq!(
        writing.discard(asker(A, 11), LeaseId(1)),
        Err(RetainedRefusal::Fenced),
        "another process writes it"
    );
}

#[test]
fn a_lease_that_its_owner_discarded_is_its_owners_until_the_other_pods_have_ended_and_no_longer() {
    let mut book = committed();
    reopen(&mut book, asker(B, 20)).unwrap();
    let effects = book.discard(asker(A, 10), LeaseId(1)).unwrap();
    assert!(
        matches!(&effects[..], [Effect::Update(_, meta)] if meta.openers == BTreeSet::from([pod("b")])),
        "{effects:?}"
    );
    let (_, effects) = book.stand(node(), &charged(A, LeaseId(1)));
    assert_eq!(effects, [], "the other pod may have it mapped");
    // Its pod's next container owns it, and does not have it open.
    let next = AllocationId::from_bits(9);
    let mut node = node();
    node.containers.remove(&A);
    node.containers.insert(next, standing("a", "team"));
    let (_, effects) = book.stand(node.clone(), &charged(A, LeaseId(1)));
    assert!(matches!(&effects[..], [Effect::Update(_, meta)] if meta.owner == next));
    node.containers.remove(&B);
    let (_, effects) = book.stand(node, &charged(next, LeaseId(1)));
    assert_eq!(effects, [Effect::Charge(LeaseId(1), next)]);
}

#[test]
fn of_two_leases_of_a_title_the_next_agent_knows_that_the_older_one_was_given_up() {
    let older = committed().get(LeaseId(1)).cloned().unwrap();
    let mut newer = older.clone();
    newer.content = Content::Committed {
        token: 9,
        checksum: 9,
    };
    let held = BTreeMap::from([
        (LeaseId(1), Heard::Read(older)),
        (LeaseId(4), Heard::Read(newer)),
    ]);
    let mut book = Leases::default();
    book.stand(node(), &Charged::new());
    assert_eq!(book.heard(held, |_| true), [Effect::Charge(LeaseId(1), A)]);
    assert_eq!(
        reopen(&mut book, asker(A, 11)),
        Ok(Opened::Read(LeaseId(4)))
    );
}

#[test]
fn the_vault_is_the_truth_for_the_next_agent() {
    let before = committed();
    let meta = before.get(LeaseId(1)).cloned().unwrap();
    let held = BTreeMap::from([(LeaseId(1), Heard::Read(meta))]);
    let mut book = Leases::default();
    book.stand(node(), &Charged::new());
    assert_eq!(
        reopen(&mut book, asker(A, 11)),
        Err(RetainedRefusal::Unavailable),
        "before the vault is heard"
    );
    assert_eq!(book.heard(held, |_| false), []);
    assert_eq!(
        reopen(&mut book, asker(B, 20)),
        Ok(Opened::Read(LeaseId(1)))
    );
    assert_eq!(
        book.living(),
        BTreeMap::new(),
        "nobody is charged for it yet"
    );
    book.stand(node(), &charged(A, LeaseId(1)));
    assert_eq!(book.living()[&gpu()].len(), 1);
    // A writer's death counts, whoever saw it.
    let meta = writing().get(LeaseId(1)).cloned().unwrap();
    let held = BTreeMap::from([(LeaseId(1), Heard::Read(meta))]);
    let mut book = Leases::default();
    book.stand(node(), &Charged::new());
    assert_eq!(
        book.heard(held.clone(), |_| false),
        [Effect::Charge(LeaseId(1), A)]
    );
    let mut book = Leases::default();
    book.stand(node(), &Charged::new());
    assert_eq!(book.heard(held, |_| true), []);
    assert_eq!(book.writers(), BTreeSet::from([asker(A, 10).process]));
}

#[test]
fn a_lease_that_cannot_be_read_is_kept_and_charged() {
    let why = || "missing field `later`".to_owned();
    let extent = Some((gpu(), Bytes::gib(1)));
    let unread = |extent| Heard::Unread { extent, why: why() };
    let held = BTreeMap::from([(LeaseId(1), unread(extent)), (LeaseId(2), unread(None))]);
    let mut book = Leases::default();
    assert_eq!(book.heard(held.clone(), |_| false), []);
    let of_lease_1 = BTreeMap::from([(gpu(), BTreeMap::from([(LeaseId(1), Bytes::gib(1))]))]);
    // To the container that its record charges, and to the node where there is none.
    let (turn, effects) = book.stand(node(), &charged(A, LeaseId(1)));
    assert_eq!((turn.orphaned, effects), (Some(BTreeMap::new()), vec![]));
    let (turn, effects) = book.stand(node(), &Charged::new());
    assert_eq!((turn.orphaned, effects), (Some(of_lease_1.clone()), vec![]));
    assert_eq!(book.living(), of_lease_1);
    assert!(book.is_unread(LeaseId(1)) && book.is_unread(LeaseId(2)));
    // Another agent can read it again.
    let mut read = held;
    let meta = committed().get(LeaseId(1)).cloned().unwrap();
    read.insert(LeaseId(1), Heard::Read(meta));
    assert_eq!(book.heard(read, |_| false), []);
    assert!(!book.is_unread(LeaseId(1)) && book.get(LeaseId(1)).is_some());
}

#[test]
fn a_lease_that_cannot_be_read_ends_when_its_gpu_is_drained() {
    let mut book = Leases::default();
    let extent = Some((gpu(), Bytes::gib(1)));
    let why = "missing field `later`".to_owned();
    book.heard(
        BTreeMap::from([(LeaseId(1), Heard::Unread { extent, why })]),
        |_| false,
    );
    book.drain(BTreeSet::from([gpu()]));
    let (_, effects) = book.stand(node(), &Charged::new());
    assert_eq!(effects, [Effect::Drop(LeaseId(1))]);
    assert!(book.are_on(&gpu()) && book.extent(LeaseId(1)).is_some());
    book.dropped(LeaseId(1));
    assert!(!book.are_on(&gpu()));
}

#[test]
fn leases_are_lost_with_the_vault_and_with_their_gpu() {
    let mut book = committed();
    book.vault_lost();
    assert_eq!(book.living(), BTreeMap::new(), "nothing is known of it");
    assert_eq!(
        reopen(&mut book, asker(A, 10)),
        Err(RetainedRefusal::Unavailable)
    );
    assert_eq!(
        book.heard(BTreeMap::new(), |_| true),
        [Effect::Charge(LeaseId(1), A)]
    );
    assert_eq!(
        reopen(&mut book, asker(A, 10)),
        Err(RetainedRefusal::Missing)
    );
    // A lower one is of a count that started again.
    for generation in [0, 2] {
        let mut book = committed();
        assert_eq!(book.stand(node(), &charged(A, LeaseId(1))).1, []);
        let mut node = node();
        node.generations.insert(gpu(), generation);
        let (_, effects) = book.stand(node, &Charged::new());
        assert_eq!(effects, [Effect::Charge(LeaseId(1), A)]);
        assert_eq!(
            reopen(&mut book, asker(A, 10)),
            Err(RetainedRefusal::Missing)
        );
    }
    let mut unknown = node();
    unknown.generations.clear();
    let (_, effects) = committed().stand(unknown, &charged(A, LeaseId(1)));
    assert_eq!(effects, [], "nobody knows yet");
}

#[test]
fn a_drained_gpu_loses_its_leases_and_none_is_made_there_before_that_is_over() {
    let mut book = committed();
    book.drain(BTreeSet::from([gpu()]));
    let (_, effects) = book.stand(node(), &charged(A, LeaseId(1)));
    assert_eq!(effects, [Effect::Charge(LeaseId(1), A)]);
    let make = |book: &mut Leases| {
        book.open(asker(A, 10), weights(Bytes::gib(1), 5, 99), Moment(9))
            .0
    };
    assert_eq!(make(&mut book), Err(RetainedRefusal::Unavailable));
    assert!(book.are_on(&gpu()));
    assert_eq!(book.charged(LeaseId(1)), Some(Effect::Drop(LeaseId(1))));
    book.dropped(LeaseId(1));
    assert!(!book.are_on(&gpu()));
    book.drain(BTreeSet::new());
    assert!(matches!(make(&mut book), Ok(Opened::Make(_))));
}

#[test]
fn a_writer_that_ends_while_its_lease_is_made_gets_none() {
    let mut book = Leases::default();
    book.heard(BTreeMap::new(), |_| true);
    book.stand(node(), &Charged::new());
    let (opened, _) = book.open(asker(A, 10), weights(Bytes::gib(1), 5, 99), Moment(0));
    let Ok(Opened::Make(meta)) = opened else {
        panic!("{opened:?}");
    };
    book.begin(LeaseId(1), *meta);
    assert_eq!(book.ended(asker(A, 10).process), []);
    let (meta, effects) = book.made(LeaseId(1));
    assert_eq!((meta, effects), (None, vec![Effect::Charge(LeaseId(1), A)]));
}

#[test]
fn a_container_owns_so_many_leases_and_no_more() {
    let mut book = Leases::default();
    book.heard(BTreeMap::new(), |_| true);
    book.stand(node(), &Charged::new());
    for number in 0..=MOST_OWNED as u64 {
        let open = Open {
            name: number.to_string(),
            ..weights(Bytes::mib(2), 5, number)
        };
        match book.open(asker(A, 10), open, Moment(0)).0 {
            Ok(Opened::Make(meta)) => book.begin(LeaseId(number + 1), *meta),
            refused => {
                assert_eq!(refused, Err(RetainedRefusal::TooMany));
                assert_eq!(number, MOST_OWNED as u64);
                return;
            }
        }
    }
    panic!("nothing was refused");
}

/// Begins leases in containers of these until one is refused; how many there were.
fn fill(book: &mut Leases, containers: impl Iterator<Item = u64>, from: u64) -> u64 {
    let mut made = 0;
    for container in containers {
        let asker = asker(AllocationId::from_bits(container), 10);
        for number in 0..MOST_OWNED as u64 {
            let open = Open {
                name: format!("{container}-{number}"),
                ..weights(Bytes::mib(2), 5, number)
            };
            match book.open(asker, open, Moment(0)).0 {
                Ok(Opened::Make(meta)) => book.begin(LeaseId(from + made), *meta),
                refused => {
                    assert_eq!(refused, Err(RetainedRefusal::TooMany));
                    return made;
                }
            }
            made += 1;
        }
    }
    panic!("nothing was refused");
}

#[test]
fn namespace_that_fills_the_vault_leaves_others_their_share() {
    let containers = |first: u64, namespace: &'static str| {
        let container = move |number: u64| {
            let standing = standing(&number.to_string(), namespace);
            (AllocationId::from_bits(number), standing)
        };
        (first..first + 300).map(container)
    };
    let greedy = containers(1000, "greedy").chain(containers(2000, "second"));
    let node = Node {
        containers: greedy.chain(containers(3000, "third")).collect(),
        ..node()
    };
    let mut book = Leases::default();
    book.set_room(1024);
    book.heard(BTreeMap::new(), |_| true);
    book.stand(node, &Charged::new());
    let first = fill(&mut book, 1000..1300, 1);
    let second = fill(&mut book, 2000..2300, 1 + first);
    assert_eq!((first, second), (512, 256));
    // What is on its way out is in the vault still.
    book.made(LeaseId(1));
    book.lost(LeaseId(1));
    assert_eq!(fill(&mut book, 1000..1300, 10_000), 0);
    assert_eq!(fill(&mut book, 3000..3300, 20_000), 128);
}

#[test]
fn lease_of_an_older_agent_is_read_with_its_key() {
    let title = Title {
        namespace: "team".to_owned(),
        name: "weights".to_owned(),
        key: std::array::from_fn(|byte| 8 * byte as u8),
        gpu: gpu(),
    };
    let written = serde_json::to_value(&title).unwrap();
    let hex = "0008101820283038404850586068707880889098a0a8b0b8c0c8d0d8e0e8f0f8";
    assert_eq!(written["key"], hex);
    let mut older = written.clone();
    older["key"] = title.key.to_vec().into();
    for blob in [written.clone(), older] {
        assert_eq!(serde_json::from_value::<Title>(blob).unwrap(), title);
    }
    for wrong in [
        "",
        "0",
        &hex[2..],
        &hex.replace("08", "+8"),
        &hex.replace("08", "ä"),
    ] {
        let mut other = written.clone();
        other["key"] = wrong.into();
        assert!(serde_json::from_value::<Title>(other).is_err(), "{wrong}");
    }
}

#[test]
fn the_longest_blob_fits_into_the_vault() {
    let name = |number: u32| format!("{number:036}");
    let meta = Meta {
        title: Title {
            namespace: "n".repeat(63),
            name: "\"".repeat(96),
            key: [255; 32],
            gpu: format!("MIG-{}", "f".repeat(60)).parse().unwrap(),
        },
        bytes: Bytes(u64::MAX),
        gpu_generation: u64::MAX,
        owner: A,
        pod: pod(&name(0)),
        openers: (0..MOST_OPENERS as u32)
            .map(|number| pod(&name(number)))
            .collect(),
        content: Content::Writing(Writer {
            process: Process {
                pid: u32::MAX,
                start: u64::MAX,
            },
            image: u64::MAX,
            token: u64::MAX,
            until: Moment(u64::MAX),
        }),
    };
    let length = serde_json::to_vec(&meta).unwrap().len();
    assert!(length <= bursar_protocol::fdstore::MAX_BLOB, "{length}");
}
