//! Waiters that go to another node.

use super::*;

/// The same, with a pod of 10 of the owner `o` that waits on the node `a`.
fn with_one_of_o(cluster: Cluster, uid: &str) -> Cluster {
    let waits = cluster.pod(uid, 10, GUARANTEED, Some(("a", None)));
    waits.owned(uid, other("o"))
}

#[test]
fn a_waiter_goes_to_a_node_with_room_rather_than_that_anybody_goes_for_it() {
    let cluster = Cluster::default()
        .node("a", &[16, 16])
        .node("b", &[16])
        .pod("10a", 10, BORROWED, Some(("a", Some(0))))
        .pod("10b", 10, GUARANTEED, Some(("a", Some(1))))
        .pod("8", 8, GUARANTEED, Some(("a", None)));
    for (owner, goes) in [
        (other("o"), true),
        (job("even"), true),
        (job("odd"), false),
        (Owner::Nobody, false),
    ] {
        let mut cluster = cluster.clone().owned("8", owner.clone());
        cluster.run(&mut Memory::default(), 0, 6);
        let evicted = cluster.evicted.len();
        assert_eq!(
            evicted,
            usize::from(!goes),
            "{owner:?}: at once if it may not go"
        );
        cluster.run(&mut Memory::default(), 6, 30);
        assert_eq!(cluster.evicted.len(), evicted);
        assert_eq!(cluster.moved.len(), usize::from(goes), "{owner:?}");
        assert!(cluster.bound(if goes { "8'" } else { "8" }));
    }
}

#[test]
fn room_is_made_for_a_waiter_once_the_room_that_it_could_go_to_is_taken() {
    let mut cluster = Cluster::default()
        .node("a", &[16])
        .node("b", &[16])
        .pod("10", 10, BORROWED, Some(("a", Some(0))))
        .pod("8", 8, GUARANTEED, Some(("a", None)));
    let mut memory = Memory::default();
    cluster.run(&mut memory, 0, 6);
    assert_eq!(cluster.evicted, [] as [&str; 0]);
    cluster = cluster.pod("9", 9, GUARANTEED, Some(("b", Some(0))));
    cluster.run(&mut memory, 6, 4);
    assert_eq!(cluster.evicted, ["10"]);
    assert!(cluster.bound("8"));
}

#[test]
fn a_pod_of_which_a_container_has_memory_already_is_not_moved() {
    let mut cluster = Cluster::default()
        .node("a", &[16])
        .node("b", &[16])
        .pod("10", 10, GUARANTEED, Some(("a", Some(0))))
        .pod("8", 10, GUARANTEED, Some(("a", None)))
        .first("8", "a-0", 2);
    cluster.run(&mut Memory::default(), 0, 60);
    assert_eq!(cluster.moved, [] as [&str; 0]);
}

#[test]
fn what_one_waiter_is_moved_for_is_not_there_for_the_next() {
    let mut cluster = Cluster::default()
        .node("a", &[16, 16])
        .node("b", &[16])
        .pod("g1", 10, GUARANTEED, Some(("a", Some(0))))
        .pod("g2", 10, GUARANTEED, Some(("a", Some(1))))
        .pod("w1", 10, GUARANTEED, Some(("a", None)))
        .pod("w2", 10, GUARANTEED, Some(("a", None)));
    cluster.run(&mut Memory::default(), 0, 30);
    assert_eq!(cluster.moved, ["w1"]);
    assert!(cluster.bound("w1'"));
}

#[test]
fn pods_of_one_owner_are_moved_one_by_one() {
    let mut cluster = Cluster::default()
        .node("a", &[16])
        .node("b", &[16])
        .node("c", &[16])
        .node("d", &[16])
        .pod("10", 10, GUARANTEED, Some(("a", Some(0))));
    for uid in ["w1", "w2", "w3"] {
        cluster = with_one_of_o(cluster, uid);
    }
    let mut memory = Memory::default();
    let mut from = 0;
    for (until, moved) in [(18, 1), (38, 2), (60, 3)] {
        cluster.run(&mut memory, from, until - from);
        assert_eq!(cluster.moved.len(), moved, "until {until} s");
        from = until;
    }
}

#[test]
fn nobody_goes_for_who_is_moved_a_little_later() {
    let mut cluster = Cluster::default()
        .node("a", &[16])
        .node("b", &[16])
        .node("c", &[16])
        .node("d", &[16])
        .pod("10", 10, BORROWED, Some(("a", Some(0))));
    for uid in ["w1", "w2"] {
        cluster = with_one_of_o(cluster, uid);
    }
    cluster.run(&mut Memory::default(), 0, 60);
    assert_eq!(cluster.moved, ["w1", "w2"]);
    assert!(cluster.evicted.is_empty(), "{:?}", cluster.evicted);
}

#[test]
fn a_move_that_came_to_something_was_not_in_vain() {
    let mut cluster = Cluster::default()
        .node("a", &[16])
        .node("b", &[16, 16])
        .pod("10", 10, GUARANTEED, Some(("a", Some(0))));
    let mut memory = Memory::default();
    cluster = with_one_of_o(cluster, "w1");
    cluster.run(&mut memory, 0, 300);
    assert_eq!(cluster.moved, ["w1"]);
    cluster = with_one_of_o(cluster, "w2");
    cluster.run(&mut memory, 300, 60);
    assert_eq!(cluster.moved, ["w1", "w2"]);
}

#[test]
fn who_comes_back_from_a_move_is_not_moved_for_the_room_of_that_node_again() {
    let mut cluster = Cluster::default()
        .node("a", &[16, 16])
        .node("b", &[16])
        .pod("10a", 10, GUARANTEED, Some(("a", Some(0))))
        .pod("10b", 10, GUARANTEED, Some(("a", Some(1))))
        .pod("8", 8, GUARANTEED, Some(("a", None)));
    cluster.shut = vec!["b".to_owned()];
    let mut memory = Memory::default();
    cluster.run(&mut memory, 0, 300);
    assert_eq!(cluster.moved, ["8"]);
    cluster = cluster.node("c", &[16]);
    cluster.run(&mut memory, 300, 60);
    assert_eq!(cluster.moved, ["8", "8'"]);
    assert!(cluster.bound("8''"));
}

#[test]
fn nobody_is_moved_to_a_node_that_lacks_something_else() {
    let mut cluster = Cluster::default()
        .node("a", &[16])
        .node("b", &[16])
        .pod("10", 10, GUARANTEED, Some(("a", Some(0))))
        .pod("8", 8, GUARANTEED, Some(("a", None)))
        .cpu("8", 9);
    cluster.processors.insert("b".to_owned(), 8);
    let mut memory = Memory::default();
    cluster.run(&mut memory, 0, 60);
    assert_eq!(cluster.moved, [] as [&str; 0]);
    cluster.processors.insert("b".to_owned(), 9);
    cluster.run(&mut memory, 60, 30);
    assert_eq!(cluster.moved, ["8"]);
    assert!(cluster.bound("8'"));
}

#[test]
fn who_may_not_go_keeps_nobody_behind_it_from_being_moved() {
    let mut cluster = Cluster::default().node("a", &[16]).node("b", &[16]).pod(
        "10",
        10,
        GUARANTEED,
        Some(("a", Some(0))),
    );
    for number in 0..30 {
        let uid = format!("bare{number}");
        cluster = cluster
            .pod(&uid, 8, BORROWED, Some(("a", None)))
            .owned(&uid, Owner::Nobody);
    }
    cluster = cluster.pod("young", 8, BORROWED, Some(("a", None)));
    cluster.run(&mut Memory::default(), 0, 30);
    assert_eq!(cluster.moved, ["young"]);
}

#[test]
fn an_operator_that_starts_anew_moves_no_owners_pods_more_often_than_one_that_lives_on() {
    let mut moves = Vec::new();
    for reborn in [false, true] {
        let mut memory = Memory::default();
        let mut cluster = Cluster::default().node("a", &[16]);
        for number in 0..8 {
            cluster = cluster.node(&format!("b{number}"), &[16]);
        }
        let mut count = 0;
        for round in 0..8 {
            // It always comes to rest where it has to wait, and there is always room elsewhere.
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
                memory = Memory::default();
            }
            cluster.run(&mut memory, round * 400, 60);
            count += cluster.moved.len();
        }
        moves.push(count);
    }
    assert_eq!(moves, [3, 3]);
}

#[test]
fn record_of_moves_counts_whatever_time_of_day_it_has() {
    for hours in [-48, -2, 0, 2, 48] {
        let mut cluster = Cluster::default()
            .node("a", &[16])
            .node("b", &[16])
            .pod("10", 10, GUARANTEED, Some(("a", Some(0))))
            .pod("8", 8, GUARANTEED, Some(("a", None)));
        cluster.pods.get_mut("8").unwrap().owner = other("o");
        let moved = Moved {
            owner: "o".to_owned(),
            count: 3,
            last: Time(wall(Duration::ZERO) + SignedDuration::from_hours(hours)),
        };
        cluster.moves.insert("a".to_owned(), vec![moved]);
        cluster.run(&mut Memory::default(), 0, 60);
        assert!(cluster.moved.is_empty(), "{hours} hours");
    }
}

#[test]
fn a_daemon_sets_a_bare_and_a_static_pod_are_never_moved_and_a_job_only_if_it_lets_go() {
    let table = [
        (Owner::DaemonSet, false),
        (Owner::Nobody, false),
        (Owner::Node, false),
        (job("odd"), false),
        (job("even"), true),
    ];
    for (owner, moves) in table {
        let mut cluster = Cluster::default()
            .node("a", &[16])
            .node("b", &[16])
            .pod("10", 10, GUARANTEED, Some(("a", Some(0))))
            .pod("8", 8, GUARANTEED, Some(("a", None)));
        cluster.pods.get_mut("8").unwrap().owner = owner.clone();
        cluster.run(&mut Memory::default(), 0, 60);
        assert_eq!(!cluster.moved.is_empty(), moves, "{owner:?}");
    }
}
