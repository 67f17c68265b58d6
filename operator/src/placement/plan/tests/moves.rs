//! Waiters that go to another node.

use super::*;

#[test]
fn a_waiter_goes_to_a_node_with_room_rather_than_that_anybody_goes_for_it() {
    let mut cluster = Cluster::default()
        .node("a", &[16, 16])
        .node("b", &[16])
        .pod("10a", 10, BORROWED, Some(("a", Some(0))))
        .pod("10b", 10, GUARANTEED, Some(("a", Some(1))))
        .pod("8", 8, GUARANTEED, Some(("a", None)));
    // Nobody goes before the time for a move has come: both may.
    cluster.pods.get_mut("10a").unwrap().priority = GUARANTEED;
    cluster.run(&mut Memory::default(), 0, 30);
    assert_eq!(cluster.moved, ["8"]);
    assert!(cluster.bound("8'"));
    assert_eq!(cluster.evicted, [] as [&str; 0]);
}

#[test]
fn an_operator_that_starts_anew_moves_no_owners_pods_more_often_than_one_that_lives_on() {
    let mut moves = Vec::new();
    for reborn in [false, true] {
        let mut memory = Memory::default();
        let mut cluster = Cluster::default().node("a", &[16]).node("b", &[16]);
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
            cluster.pods.get_mut("8").unwrap().owner = Owner::Other {
                uid: "o".to_owned(),
            };
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
