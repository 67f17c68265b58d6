//! Tests the relocation of waiting pods.

use super::*;

/// Adds a pod of 10 of the owner `o`, which waits on node `a`.
fn with_one_of_o(cluster: FakeCluster, uid: &str) -> FakeCluster {
    let waits = cluster.pod(uid, 10, GUARANTEED, Some(("a", None)));
    waits.owned(uid, other("o"))
}

#[test]
fn pod_relocates_to_a_node_with_room_before_it_preempts() {
    let cluster = FakeCluster::default()
        .node("a", &[16, 16])
        .node("b", &[16])
        .pod("10a", 10, BORROWED, Some(("a", Some(0))))
        .pod("10b", 10, GUARANTEED, Some(("a", Some(1))))
        .pod("8", 8, GUARANTEED, Some(("a", None)));
    for (owner, is_relocated) in [
        (other("o"), true),
        (job("even"), true),
        (job("odd"), false),
        (Owner::Unowned, false),
    ] {
        let mut cluster = cluster.clone().owned("8", owner.clone());
        cluster.run(&mut History::default(), 0, 6);
        let evicted = cluster.evicted.len();
        assert_eq!(
            evicted,
            usize::from(!is_relocated),
            "{owner:?}: at once if it may not go"
        );
        cluster.run(&mut History::default(), 6, 30);
        assert_eq!(cluster.evicted.len(), evicted);
        assert_eq!(cluster.moved.len(), usize::from(is_relocated), "{owner:?}");
        assert!(cluster.bound(if is_relocated { "8'" } else { "8" }));
    }
}

#[test]
fn pod_preempts_once_the_other_nodes_room_is_taken() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16])
        .node("b", &[16])
        .pod("10", 10, BORROWED, Some(("a", Some(0))))
        .pod("8", 8, GUARANTEED, Some(("a", None)));
    let mut history = History::default();
    cluster.run(&mut history, 0, 6);
    assert_eq!(cluster.evicted, [] as [&str; 0]);
    cluster = cluster.pod("9", 9, GUARANTEED, Some(("b", Some(0))));
    cluster.run(&mut history, 6, 4);
    assert_eq!(cluster.evicted, ["10"]);
    assert!(cluster.bound("8"));
}

#[test]
fn pod_with_a_started_container_is_not_relocated() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16])
        .node("b", &[16])
        .pod("10", 10, GUARANTEED, Some(("a", Some(0))))
        .pod("8", 10, GUARANTEED, Some(("a", None)))
        .first("8", "a-0", 2);
    cluster.run(&mut History::default(), 0, 60);
    assert_eq!(cluster.moved, [] as [&str; 0]);
}

#[test]
fn room_assumed_by_one_relocation_is_not_given_twice() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16, 16])
        .node("b", &[16])
        .pod("g1", 10, GUARANTEED, Some(("a", Some(0))))
        .pod("g2", 10, GUARANTEED, Some(("a", Some(1))))
        .pod("w1", 10, GUARANTEED, Some(("a", None)))
        .pod("w2", 10, GUARANTEED, Some(("a", None)));
    cluster.run(&mut History::default(), 0, 30);
    assert_eq!(cluster.moved, ["w1"]);
    assert!(cluster.bound("w1'"));
}

#[test]
fn pods_of_one_owner_are_relocated_one_by_one() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16])
        .node("b", &[16])
        .node("c", &[16])
        .node("d", &[16])
        .pod("10", 10, GUARANTEED, Some(("a", Some(0))));
    for uid in ["w1", "w2", "w3"] {
        cluster = with_one_of_o(cluster, uid);
    }
    let mut history = History::default();
    let mut from = 0;
    for (until, moved) in [(18, 1), (38, 2), (60, 3)] {
        cluster.run(&mut history, from, until - from);
        assert_eq!(cluster.moved.len(), moved, "until {until} s");
        from = until;
    }
}

#[test]
fn no_pod_is_preempted_for_one_about_to_relocate() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16])
        .node("b", &[16])
        .node("c", &[16])
        .node("d", &[16])
        .pod("10", 10, BORROWED, Some(("a", Some(0))));
    for uid in ["w1", "w2"] {
        cluster = with_one_of_o(cluster, uid);
    }
    cluster.run(&mut History::default(), 0, 60);
    assert_eq!(cluster.moved, ["w1", "w2"]);
    assert!(cluster.evicted.is_empty(), "{:?}", cluster.evicted);
}

#[test]
fn successful_relocation_does_not_count_as_failed() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16])
        .node("b", &[16, 16])
        .pod("10", 10, GUARANTEED, Some(("a", Some(0))));
    let mut history = History::default();
    cluster = with_one_of_o(cluster, "w1");
    cluster.run(&mut history, 0, 300);
    assert_eq!(cluster.moved, ["w1"]);
    cluster = with_one_of_o(cluster, "w2");
    cluster.run(&mut history, 300, 60);
    assert_eq!(cluster.moved, ["w1", "w2"]);
}

#[test]
fn pod_that_returns_is_not_relocated_to_that_node_again() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16, 16])
        .node("b", &[16])
        .pod("10a", 10, GUARANTEED, Some(("a", Some(0))))
        .pod("10b", 10, GUARANTEED, Some(("a", Some(1))))
        .pod("8", 8, GUARANTEED, Some(("a", None)));
    cluster.shut = vec!["b".to_owned()];
    let mut history = History::default();
    cluster.run(&mut history, 0, 300);
    assert_eq!(cluster.moved, ["8"]);
    cluster = cluster.node("c", &[16]);
    cluster.run(&mut history, 300, 60);
    assert_eq!(cluster.moved, ["8", "8'"]);
    assert!(cluster.bound("8''"));
}

#[test]
fn pod_is_not_relocated_where_another_resource_lacks() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16])
        .node("b", &[16])
        .pod("10", 10, GUARANTEED, Some(("a", Some(0))))
        .pod("8", 8, GUARANTEED, Some(("a", None)))
        .cpu("8", 9);
    cluster.processors.insert("b".to_owned(), 8);
    let mut history = History::default();
    cluster.run(&mut history, 0, 60);
    assert_eq!(cluster.moved, [] as [&str; 0]);
    cluster.processors.insert("b".to_owned(), 9);
    cluster.run(&mut history, 60, 30);
    assert_eq!(cluster.moved, ["8"]);
    assert!(cluster.bound("8'"));
}

#[test]
fn unmovable_pod_does_not_block_the_next_relocation() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16])
        .node("b", &[16])
        .pod("10", 10, GUARANTEED, Some(("a", Some(0))));
    for number in 0..30 {
        let uid = format!("bare{number}");
        cluster = cluster
            .pod(&uid, 8, BORROWED, Some(("a", None)))
            .owned(&uid, Owner::Unowned);
    }
    cluster = cluster.pod("young", 8, BORROWED, Some(("a", None)));
    cluster.run(&mut History::default(), 0, 30);
    assert_eq!(cluster.moved, ["young"]);
}

#[test]
fn restarted_operator_keeps_the_relocation_limit() {
    let mut moves = Vec::new();
    for reborn in [false, true] {
        let mut history = History::default();
        let mut cluster = FakeCluster::default().node("a", &[16]);
        for number in 0..8 {
            cluster = cluster.node(&format!("b{number}"), &[16]);
        }
        let mut count = 0;
        for round in 0..8 {
            // The replacement always lands where it has to wait, and there is always room
            // elsewhere.
            cluster.pods.clear();
            cluster = cluster.pod("10", 10, GUARANTEED, Some(("a", Some(0)))).pod(
                "8",
                8,
                GUARANTEED,
                Some(("a", None)),
            );
            cluster.pods.get_mut("8").unwrap().owner = other("o");
            cluster.moved.clear();
            if reborn {
                history = History::default();
            }
            cluster.run(&mut history, round * 400, 60);
            count += cluster.moved.len();
        }
        moves.push(count);
    }
    assert_eq!(moves, [3, 3]);
}

#[test]
fn relocation_record_counts_whatever_its_timestamp() {
    for hours in [-48, -2, 0, 2, 48] {
        let mut cluster = FakeCluster::default()
            .node("a", &[16])
            .node("b", &[16])
            .pod("10", 10, GUARANTEED, Some(("a", Some(0))))
            .pod("8", 8, GUARANTEED, Some(("a", None)));
        cluster.pods.get_mut("8").unwrap().owner = other("o");
        let moved = Relocation {
            owner: "o".to_owned(),
            count: 3,
            last: Time(wall(Duration::ZERO) + SignedDuration::from_hours(hours)),
        };
        cluster.moves.insert("a".to_owned(), vec![moved]);
        cluster.run(&mut History::default(), 0, 60);
        assert!(cluster.moved.is_empty(), "{hours} hours");
    }
}

#[test]
fn relocation_counts_of_several_nodes_do_not_overflow() {
    let mut cluster = FakeCluster::default().node("a", &[16]).node("b", &[16]);
    for node in ["a", "b"] {
        let moved = Relocation {
            owner: "o".to_owned(),
            count: i32::MIN,
            last: Time(wall(Duration::ZERO)),
        };
        cluster.moves.insert(node.to_owned(), vec![moved]);
    }
    let index = cluster.index();
    let steps = plan(
        &index.placement_view(),
        &mut History::default(),
        &OPTIONS,
        Duration::ZERO,
    );
    assert!(steps.iter().all(|step| matches!(step, Step::Label { .. })));
}

#[test]
fn pod_is_not_relocated_to_a_gpu_that_is_closed_to_it() {
    for (namespace, moves) in [("other", false), ("n", true)] {
        let mut cluster = FakeCluster::default()
            .node("a", &[16])
            .node("b", &[16])
            .pod("10", 10, GUARANTEED, Some(("a", Some(0))))
            .pod("8", 8, GUARANTEED, Some(("a", None)));
        cluster.only_for = [("b-0".to_owned(), namespace.to_owned())].into();
        cluster.run(&mut History::default(), 0, 20);
        assert_eq!(!cluster.moved.is_empty(), moves, "{namespace}");
    }
}

#[test]
fn only_recreated_pods_are_relocated() {
    let table = [
        (Owner::DaemonSet, false),
        (Owner::Unowned, false),
        (Owner::Node, false),
        (job("odd"), false),
        (job("even"), true),
    ];
    for (owner, moves) in table {
        let mut cluster = FakeCluster::default()
            .node("a", &[16])
            .node("b", &[16])
            .pod("10", 10, GUARANTEED, Some(("a", Some(0))))
            .pod("8", 8, GUARANTEED, Some(("a", None)));
        cluster.pods.get_mut("8").unwrap().owner = owner.clone();
        cluster.run(&mut History::default(), 0, 60);
        assert_eq!(!cluster.moved.is_empty(), moves, "{owner:?}");
    }
}

#[test]
fn pod_over_several_gpus_is_relocated_to_a_node_with_room_on_each() {
    for shape in [Shape::Spread(2), Shape::Containers(vec![12, 12])] {
        let mut cluster = FakeCluster::default()
            .node("a", &[16, 16])
            .node("b", &[32, 8])
            .node("c", &[16, 16])
            .pod("x", 10, GUARANTEED, Some(("a", Some(0))))
            .pod("y", 10, GUARANTEED, Some(("b", Some(0))))
            .pod("owner", 22, GUARANTEED, Some(("a", None)))
            .shape("owner", shape.clone());
        if matches!(shape, Shape::Containers(_)) {
            cluster = cluster.shape("owner", Shape::Containers(vec![11, 11]));
        }
        cluster.run(&mut History::default(), 0, 30);
        assert_eq!(cluster.moved, ["owner"], "{shape:?}");
        assert!(cluster.bound("owner'"), "{shape:?}");
    }
}
