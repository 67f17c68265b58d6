//! Tests reservations of GPUs and the choice of victims.

use super::*;

#[test]
fn guaranteed_pod_preempts_the_fewest_borrowers() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16, 16])
        .pod("b1", 8, BORROWED, Some(("a", Some(0))))
        .pod("b2", 4, BORROWED, Some(("a", Some(1))))
        .pod("b3", 4, BORROWED, Some(("a", Some(1))))
        .pod("owner", 16, GUARANTEED, Some(("a", None)));
    cluster.run(&mut History::default(), 0, 10);
    assert_eq!(cluster.evicted, ["b1"]);
    assert!(cluster.bound("owner") && cluster.bound("b2") && cluster.bound("b3"));
    assert_eq!(cluster.reservations["a"], [], "it is cleared");
}

#[test]
fn unscheduled_pod_is_nominated_before_it_preempts() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16])
        .pod("b1", 16, BORROWED, Some(("a", Some(0))))
        .pod("owner", 16, GUARANTEED, None)
        .pod("thief", 16, BORROWED, None);
    cluster.run(&mut History::default(), 0, 30);
    assert_eq!(cluster.evicted, ["b1"]);
    assert!(cluster.bound("owner"));
    assert!(!cluster.bound("thief"));
}

#[test]
fn non_preempting_or_equal_priority_pod_takes_nothing() {
    for priority in [BORROWED, GUARANTEED] {
        let mut cluster = FakeCluster::default()
            .node("a", &[16])
            .pod("old", 10, priority, Some(("a", Some(0))))
            .pod("same", 8, priority, Some(("a", None)));
        let mut history = History::default();
        cluster.run(&mut history, 0, 30);
        assert_eq!(cluster.evicted, [] as [&str; 0]);
        let writes = cluster.writes;
        cluster.run(&mut history, 30, 600);
        assert_eq!(cluster.writes, writes, "and nothing is written for ever");
    }
}

#[test]
fn job_pod_blocked_by_pdb_is_never_deleted() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16])
        .pod("b", 10, LOW, Some(("a", Some(0))))
        .pod("owner", 8, GUARANTEED, Some(("a", None)));
    cluster.kept = vec!["b".to_owned()];
    cluster.pods.get_mut("b").unwrap().owner = job("even");
    cluster.run(&mut History::default(), 0, 150);
    assert_eq!(cluster.evicted, [] as [&str; 0]);
}

#[test]
fn job_pod_is_preempted_only_if_job_ignores_disruption() {
    for (uid, is_evicted) in [("even", true), ("odd", false)] {
        let mut cluster = FakeCluster::default()
            .node("a", &[16])
            .pod("job", 10, LOW, Some(("a", Some(0))))
            .pod("owner", 8, GUARANTEED, Some(("a", None)));
        cluster.pods.get_mut("job").unwrap().owner = job(uid);
        cluster.run(&mut History::default(), 0, 20);
        assert_eq!(cluster.bound("owner"), is_evicted);
    }
}

#[test]
fn borrower_is_preempted_whatever_its_job_says() {
    for uid in ["even", "odd"] {
        let mut cluster = FakeCluster::default()
            .node("a", &[16])
            .pod("b", 10, BORROWED, Some(("a", Some(0))))
            .owned("b", job(uid))
            .pod("owner", 8, GUARANTEED, Some(("a", None)));
        let mut history = History::default();
        cluster.kept = vec!["b".to_owned()];
        cluster.run(&mut history, 0, 60);
        assert_eq!(cluster.evicted, [] as [&str; 0], "its disruption budget");
        cluster.run(&mut history, 60, 15);
        assert_eq!(cluster.evicted, ["b"]);
        assert!(cluster.bound("owner"));
    }
}

#[test]
fn pdb_blocks_a_victim_for_its_grace_and_no_longer() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16])
        .pod("b", 10, BORROWED, Some(("a", Some(0))))
        .pod("owner", 8, GUARANTEED, Some(("a", None)));
    cluster.kept = vec!["b".to_owned()];
    let mut history = History::default();
    cluster.run(&mut history, 0, 60);
    assert_eq!(cluster.evicted, [] as [&str; 0]);
    cluster.run(&mut history, 60, 15);
    assert_eq!(cluster.evicted, ["b"]);
    assert!(cluster.bound("owner"));
}

#[test]
fn pod_waiting_for_a_blocked_victim_keeps_the_freed_gpu() {
    let mut cluster = FakeCluster::default()
        .node("a", &[8, 8, 3, 3])
        .pod("b1", 8, BORROWED, Some(("a", Some(0))))
        .pod("b2", 8, BORROWED, Some(("a", Some(1))))
        .pod("owner1", 8, GUARANTEED, None)
        .pod("owner2", 8, GUARANTEED, None)
        .pod("thief", 4, BORROWED, Some(("a", None)));
    cluster.kept = vec!["b2".to_owned()];
    let mut history = History::default();
    cluster.run(&mut history, 0, 60);
    assert_eq!(cluster.evicted, ["b1"]);
    let uids = cluster.reservations["a"].iter().map(|held| &held.pod_uid);
    assert_eq!(uids.collect::<Vec<_>>(), ["owner1", "owner2"]);
    cluster.run(&mut history, 60, 30);
    assert_eq!(cluster.evicted, ["b1", "b2"]);
    assert!(cluster.bound("owner1") && cluster.bound("owner2") && !cluster.bound("thief"));
}

#[test]
fn restarted_operator_keeps_reservations_until_jobs_are_read() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16])
        .pod("job", 10, LOW, Some(("a", Some(0))))
        .pod("owner", 8, GUARANTEED, Some(("a", None)));
    cluster.pods.get_mut("job").unwrap().owner = job("even");
    cluster.kept = vec!["job".to_owned()];
    cluster.run(&mut History::default(), 0, 20);
    assert_eq!(cluster.reservations["a"].len(), 1);
    let now = Duration::from_secs(20);
    let steps = plan(
        &cluster.index().placement_view(),
        &mut History::default(),
        &OPTIONS,
        now,
    );
    assert!(
        steps
            .iter()
            .any(|step| matches!(step, Step::ReadJob { .. })),
        "{steps:?}"
    );
    assert!(
        !steps
            .iter()
            .any(|step| matches!(step, Step::Reserve { .. } | Step::Preempt { .. })),
        "{steps:?}"
    );
}

#[test]
fn failed_reservation_is_dropped_for_its_backoff() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16])
        .pod("b", 10, BORROWED, Some(("a", Some(0))))
        .pod("owner", 8, GUARANTEED, Some(("a", None)));
    let mut history = History::default();
    // No agent acknowledges the reservation.
    for second in 0..400 {
        let now = Duration::from_secs(second);
        for step in plan(
            &cluster.index().placement_view(),
            &mut history,
            &OPTIONS,
            now,
        ) {
            cluster.apply(step, &mut history, now);
        }
    }
    assert_eq!(cluster.reservations["a"], []);
    assert_eq!(cluster.evicted, [] as [&str; 0]);
}

#[test]
fn gpu_with_unevictable_pods_is_tried_after_others() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16, 16])
        .pod("jobpod", 16, LOW, Some(("a", Some(0))))
        .owned("jobpod", job("even"))
        .pod("b1", 8, BORROWED, Some(("a", Some(1))))
        .pod("b2", 8, BORROWED, Some(("a", Some(1))))
        .pod("owner", 16, GUARANTEED, Some(("a", None)));
    cluster.kept = vec!["jobpod".to_owned()];
    let mut history = History::default();
    history.jobs.insert("even".to_owned(), true);
    cluster.run(&mut history, 0, 30);
    assert_eq!(cluster.reservations["a"], [reservation("a-0", "owner", 16)]);
    cluster.run(&mut history, 30, 1_500);
    assert_eq!(cluster.evicted, ["b1", "b2"]);
    assert!(cluster.bound("owner") && cluster.bound("jobpod"));
}

#[test]
fn failed_preemptions_back_off_exponentially() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16])
        .pod("b", 16, BORROWED, Some(("a", Some(0))))
        .pod("owner", 16, GUARANTEED, None);
    // Each victim is recreated, and the operator cannot see why the scheduler avoids the node.
    cluster.all_return = true;
    cluster.preempts = true;
    cluster.shut = vec!["a".to_owned()];
    cluster.run(&mut History::default(), 0, 20_000);
    // After 10 s and 300 s each, and back-offs of 300, 600, 1,200, 2,400 and 3,600 s.
    assert_eq!(cluster.evicted.len(), 8);
}

#[test]
fn no_pod_is_preempted_while_another_resource_lacks() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16])
        .pod("b", 16, BORROWED, Some(("a", Some(0))))
        .cpu("b", 2)
        .pod("owner", 16, GUARANTEED, None)
        .cpu("owner", 7);
    // Without the borrower there would be enough CPU too, which only the scheduler decides.
    cluster.processors.insert("a".to_owned(), 8);
    let mut history = History::default();
    cluster.run(&mut history, 0, 1_500);
    assert_eq!(cluster.evicted, [] as [&str; 0]);
    assert_eq!(cluster.reservations.get("a"), None);
    cluster.processors.insert("a".to_owned(), 9);
    cluster.run(&mut history, 1_500, 30);
    assert_eq!(cluster.evicted, ["b"]);
    assert!(cluster.bound("owner"));
}

#[test]
fn room_reserved_for_one_pod_is_not_given_twice() {
    let mut cluster = FakeCluster::default()
        .node("a", &[8, 8])
        .pod("b1", 8, BORROWED, Some(("a", Some(0))))
        .pod("b2", 8, BORROWED, Some(("a", Some(1))));
    for uid in ["owner1", "owner2"] {
        cluster = cluster.pod(uid, 8, GUARANTEED, None).cpu(uid, 5);
    }
    cluster.processors.insert("a".to_owned(), 9);
    cluster.run(&mut History::default(), 0, 1_500);
    assert_eq!(cluster.evicted, ["b1"]);
    assert!(cluster.bound("owner1") && !cluster.bound("owner2"));
}

#[test]
fn smaller_pod_is_helped_after_an_unsatisfiable_one() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16])
        .pod("b", 16, BORROWED, Some(("a", Some(0))))
        .pod("owner1", 16, GUARANTEED, None)
        .cpu("owner1", 65)
        .pod("owner2", 16, GUARANTEED, None)
        .cpu("owner2", 1);
    cluster.run(&mut History::default(), 0, 30);
    assert!(cluster.bound("owner2") && !cluster.bound("owner1"));
}

#[test]
fn overdue_termination_does_not_block_another_gpu() {
    // One pod is terminating. The other pod has no object any more, and only its node reports it.
    for known in [true, false] {
        let mut cluster = FakeCluster::default()
            .node("a", &[16, 16])
            .pod("x", 16, BORROWED, Some(("a", Some(0))))
            .pod("b", 16, BORROWED, Some(("a", Some(1))))
            .pod("owner", 16, GUARANTEED, Some(("a", None)));
        cluster.pods.get_mut("x").unwrap().ending = true;
        cluster.slow = vec!["x".to_owned()];
        let mut history = History::default();
        let mut reserved = Vec::new();
        for second in 0..600 {
            let now = Duration::from_secs(second);
            let mut index = cluster.index();
            if !known {
                index.apply(WatchEvent::Pod(Event::Delete((key("n", "x"), None))));
            }
            for step in plan(&index.placement_view(), &mut history, &OPTIONS, now) {
                if let Step::Reserve { reservations, .. } = &step {
                    reserved.push((second, reservations.clone()));
                }
                cluster.apply(step, &mut history, now);
            }
            cluster.advance();
        }
        assert_eq!(reserved[0], (60, vec![reservation("a-1", "owner", 16)]));
        assert_eq!(cluster.evicted, ["b"]);
        assert!(cluster.bound("owner"));
    }
}

#[test]
fn no_second_victim_while_the_first_terminates() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16, 16])
        .pod("b", 16, BORROWED, Some(("a", Some(0))))
        .pod("b1", 8, BORROWED, Some(("a", Some(1))))
        .pod("b2", 8, BORROWED, Some(("a", Some(1))))
        .pod("owner", 16, GUARANTEED, Some(("a", None)));
    cluster.slow = vec!["b".to_owned()];
    let mut history = History::default();
    cluster.run(&mut history, 0, 250);
    assert_eq!(cluster.evicted, ["b"]);
    let (mut quick, mut remembered) = (cluster.clone(), history.clone());
    quick.slow.clear();
    quick.run(&mut remembered, 250, 10);
    assert_eq!(quick.evicted, ["b"]);
    assert!(quick.bound("owner"));
    // A restarted operator plans no step either.
    let mut anew = cluster.clone();
    anew.run(&mut History::default(), 250, 250);
    assert_eq!(anew.evicted, ["b"]);
    // The victim's memory is only partly free.
    cluster.run(&mut history, 250, 400);
    assert_eq!(cluster.evicted, ["b", "b1", "b2"]);
    assert!(cluster.bound("owner"));
}

#[test]
fn no_second_victim_while_memory_is_proven_free() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16])
        .pod("b1", 8, BORROWED, Some(("a", Some(0))))
        .pod("b2", 8, BORROWED, Some(("a", Some(0))))
        .pod("owner", 8, GUARANTEED, Some(("a", None)));
    let mut history = History::default();
    let mut second = 0;
    while cluster.left.is_empty() {
        assert!(second < 600, "nobody is evicted");
        let now = Duration::from_secs(second);
        for step in plan(
            &cluster.index().placement_view(),
            &mut history,
            &OPTIONS,
            now,
        ) {
            cluster.apply(step, &mut history, now);
        }
        if !cluster.evicted.is_empty() {
            cluster.left = [("a-0".to_owned(), 8)].into();
        }
        cluster.advance();
        second += 1;
    }
    let (mut quick, mut remembered) = (cluster.clone(), history.clone());
    quick.run(&mut remembered, second, 4);
    quick.left.clear();
    quick.run(&mut remembered, second + 4, 10);
    assert_eq!(quick.evicted.len(), 1);
    assert!(quick.bound("owner"));
    // Memory of another holder does not become free.
    cluster.run(&mut history, second, 10);
    assert_eq!(cluster.evicted.len(), 2);
    assert!(cluster.bound("owner"));
}

#[test]
fn pod_with_two_reservations_keeps_one() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16])
        .node("b", &[16])
        .pod("a1", 16, BORROWED, Some(("a", Some(0))))
        .pod("b1", 16, BORROWED, Some(("b", Some(0))))
        .pod("owner", 16, GUARANTEED, None);
    // Two operators chose different GPUs for it.
    for node in ["a", "b"] {
        let held = reservation(&format!("{node}-0"), "owner", 16);
        cluster
            .reservations
            .insert(node.to_owned(), vec![held.clone()]);
        cluster.held.insert(held.gpu.clone(), held);
    }
    cluster.pods.get_mut("owner").unwrap().nominated = Some("b".to_owned());
    cluster.run(&mut History::default(), 0, 10);
    assert_eq!(cluster.evicted, ["b1"]);
    assert!(cluster.bound("owner"));
}

#[test]
fn unconfirmed_reservation_is_not_repeated_on_another_node() {
    let cluster = FakeCluster::default()
        .node("a", &[16])
        .node("b", &[16])
        .pod("a1", 16, BORROWED, Some(("a", Some(0))))
        .pod("b1", 8, BORROWED, Some(("b", Some(0))))
        .pod("b2", 8, BORROWED, Some(("b", Some(0))))
        .pod("owner", 16, GUARANTEED, None);
    let mut history = History::default();
    let mut real = cluster.clone();
    let reserved = |steps: &[Step]| -> Vec<String> {
        let nodes = steps.iter().filter_map(|step| match step {
            Step::Reserve {
                node, reservations, ..
            } if !reservations.is_empty() => Some(node.name.clone()),
            _ => None,
        });
        nodes.collect()
    };
    for second in 0..11 {
        let now = Duration::from_secs(second);
        let steps = plan(&real.index().placement_view(), &mut history, &OPTIONS, now);
        assert!(
            second < 10 || reserved(&steps) == ["a"],
            "one goes there, and two on the other"
        );
        steps
            .into_iter()
            .for_each(|step| real.apply(step, &mut history, now));
    }
    // The watch of pods is ahead of that of GpuNodes: now the other GPU would be chosen.
    let mut blind = cluster.pod("b1", 1, BORROWED, Some(("b", Some(0))));
    blind.pods.remove("b2");
    let steps = plan(
        &blind.index().placement_view(),
        &mut history,
        &OPTIONS,
        Duration::from_secs(11),
    );
    assert_eq!(reserved(&steps), ["a"], "it is written again at most");
}

#[test]
fn unsatisfiable_pod_does_not_block_the_next() {
    let mut cluster = FakeCluster::default().node("a", &[16]).node("b", &[16]);
    for number in 0..300 {
        cluster = cluster.pod(&format!("large{number}"), 17, GUARANTEED, None);
    }
    let mut history = History::default();
    cluster.run(&mut history, 0, 20);
    cluster = cluster
        .pod("borrower", 10, BORROWED, Some(("a", Some(0))))
        .pod("owner", 8, GUARANTEED, Some(("a", None)))
        .owned("owner", Owner::Unowned);
    cluster.run(&mut history, 20, 10);
    assert!(cluster.bound("owner"));
}

#[test]
fn pod_with_memory_on_a_gpu_gets_the_rest_there() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16])
        .pod("b", 8, BORROWED, Some(("a", Some(0))))
        .pod("owner", 12, GUARANTEED, Some(("a", None)))
        .first("owner", "a-0", 4);
    let mut history = History::default();
    cluster.run(&mut history, 0, 3);
    // The reservation includes what is already bound for the pod, as the agent counts.
    assert_eq!(cluster.reservations["a"], [reservation("a-0", "owner", 12)]);
    cluster.run(&mut history, 3, 10);
    assert_eq!(cluster.evicted, ["b"]);
    assert!(cluster.bound("owner"));
    assert_eq!(cluster.reservations["a"], [], "it is cleared");
    let writes = cluster.writes;
    cluster.run(&mut history, 13, 60);
    assert_eq!(cluster.writes, writes);
}

#[test]
fn reservation_includes_what_the_pod_has_since() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16])
        .pod("b", 12, BORROWED, Some(("a", Some(0))))
        .pod("owner", 12, GUARANTEED, Some(("a", None)));
    cluster.kept = vec!["b".to_owned()];
    let mut history = History::default();
    cluster.run(&mut history, 0, 6);
    assert_eq!(cluster.reservations["a"], [reservation("a-0", "owner", 12)]);
    // The pod requests 15 in all, and another of its containers came first.
    cluster = cluster
        .pod("owner", 15, GUARANTEED, Some(("a", None)))
        .first("owner", "a-0", 3);
    cluster.run(&mut history, 6, 2);
    assert_eq!(cluster.reservations["a"], [reservation("a-0", "owner", 15)]);
}

#[test]
fn victim_on_two_gpus_is_evicted_once_for_two_pods() {
    let mut cluster = FakeCluster::default()
        .node("a", &[8, 8])
        .pod("x", 16, BORROWED, Some(("a", Some(0))))
        .first("x", "a-1", 8)
        .pod("p", 8, GUARANTEED, Some(("a", None)))
        .pod("q", 8, GUARANTEED, Some(("a", None)));
    cluster.run(&mut History::default(), 0, 10);
    assert_eq!(cluster.evicted, ["x"]);
    assert!(cluster.bound("p") && cluster.bound("q"));
}

#[test]
fn victim_on_two_gpus_counts_once_in_the_nodes_quanta() {
    let mut cluster = FakeCluster::default()
        .node("a", &[8, 12, 5])
        .pod("x", 8, BORROWED, Some(("a", Some(0))))
        .first("x", "a-1", 4)
        .pod("y", 4, BORROWED, Some(("a", Some(1))))
        .pod("z", 13, BORROWED, Some(("a", None)))
        .pod("owner1", 8, GUARANTEED, None)
        .pod("owner2", 12, GUARANTEED, None);
    cluster.run(&mut History::default(), 0, 60);
    // Without it the node has quanta for the first pod and none for the second.
    assert_eq!(cluster.evicted, ["x"]);
    assert!(cluster.bound("owner1") && !cluster.bound("owner2"));
}

#[test]
fn large_cluster_is_planned_within_the_interval() {
    let mut cluster = FakeCluster::default();
    for node in 0..100 {
        let name = format!("n{node}");
        cluster = cluster.node(&name, &[16; 8]);
        for gpu in 0..8 {
            cluster = cluster.pod(
                &format!("{name}-{gpu}"),
                16,
                BORROWED,
                Some((&name, Some(gpu))),
            );
        }
    }
    for pod in 0..10_000 {
        cluster = cluster.pod(&format!("p{pod}"), 1, BORROWED, Some(("another", None)));
    }
    for number in 0..20 {
        cluster = cluster.pod(&format!("w{number}"), 16, GUARANTEED, None);
    }
    // Each pending pod is considered on every GPU without a victim of lower priority.
    for number in 0..5_000 {
        cluster = cluster.pod(&format!("hopeless{number}"), 16, BORROWED - 1, None);
    }
    let index = cluster.index();
    let mut history = History::default();
    let plan_at = |history: &mut History, second| {
        let now = Duration::from_secs(second);
        plan(&index.placement_view(), history, &OPTIONS, now)
    };
    plan_at(&mut history, 0);
    let start = std::time::Instant::now();
    let steps = plan_at(&mut history, 20);
    let took = start.elapsed();
    let reserved = steps.iter().map(|step| match step {
        Step::Reserve { reservations, .. } => reservations.len(),
        _ => 0,
    });
    assert_eq!(reserved.sum::<usize>(), 20);
    assert!(took < Duration::from_secs(5), "{took:?}");
}

#[test]
fn victims_are_found_among_many_small_pods() {
    let mut cluster = FakeCluster::default()
        .node("a", &[80, 80, 80])
        .pod("g1", 55, GUARANTEED, Some(("a", Some(1))))
        .pod("g2", 55, GUARANTEED, Some(("a", Some(2))))
        .pod("owner", 40, GUARANTEED, Some(("a", None)));
    for number in 0..80 {
        cluster = cluster.pod(&format!("b{number}"), 1, BORROWED, Some(("a", Some(0))));
    }
    cluster.run(&mut History::default(), 0, 20);
    assert!(cluster.bound("owner"));
    assert_eq!(cluster.evicted.len(), 40);
}

#[test]
fn memory_set_aside_for_another_pod_is_not_waited_for() {
    let mut cluster = FakeCluster::default()
        .node("a", &[80, 80])
        .pod("g1", 40, GUARANTEED, Some(("a", Some(0))))
        .pod("g2", 40, GUARANTEED, Some(("a", Some(1))))
        .pod("b", 40, BORROWED, Some(("a", Some(1))))
        .pod("whole", 80, GUARANTEED, Some(("a", None)))
        .pod("owner", 30, GUARANTEED, Some(("a", None)));
    cluster.set_aside = [("a-0".to_owned(), ("whole".to_owned(), 40))].into();
    cluster.run(&mut History::default(), 0, 10);
    assert_eq!(cluster.evicted, ["b"]);
    assert_eq!(cluster.pods["owner"].places, [("a-1".to_owned(), 30)]);
}

#[test]
fn spread_pod_leaves_memory_that_is_set_aside_for_another_pod() {
    let mut cluster = FakeCluster::default()
        .node("a", &[80, 80, 80, 80])
        .pod("g0", 40, GUARANTEED, Some(("a", Some(0))))
        .pod("g1", 40, GUARANTEED, Some(("a", Some(1))))
        .pod("b2", 80, BORROWED, Some(("a", Some(2))))
        .pod("b3", 80, BORROWED, Some(("a", Some(3))))
        .pod("whole", 160, GUARANTEED, Some(("a", None)))
        .shape("whole", Shape::Spread(2))
        .pod("owner", 60, GUARANTEED, Some(("a", None)))
        .shape("owner", Shape::Spread(2));
    let whole = |gpu: &str| (gpu.to_owned(), ("whole".to_owned(), 40));
    cluster.set_aside = [whole("a-0"), whole("a-1")].into();
    cluster.run(&mut History::default(), 0, 10);
    let places = &cluster.pods["owner"].places;
    assert!(!places.is_empty(), "borrowers make room");
    let taken = |(gpu, _): &(String, u64)| gpu == "a-0" || gpu == "a-1";
    assert!(!places.iter().any(taken), "{places:?}");
}

#[test]
fn pod_takes_uneven_shares_of_gpus_of_different_size() {
    let mut cluster = FakeCluster::default()
        .node("a", &[80, 20])
        .pod("b1", 80, BORROWED, Some(("a", Some(0))))
        .pod("b2", 20, BORROWED, Some(("a", Some(1))))
        .pod("owner", 90, GUARANTEED, Some(("a", None)));
    cluster.run(&mut History::default(), 0, 10);
    assert_eq!(cluster.evicted, ["b1", "b2"]);
    assert!(cluster.bound("owner"));
}

#[test]
fn gpu_that_is_closed_to_a_namespace_is_not_reserved() {
    for at in [None, Some(("a", None))] {
        let mut cluster = FakeCluster::default()
            .node("a", &[16, 16])
            .pod("b0", 16, BORROWED, Some(("a", Some(0))))
            .pod("b1", 16, BORROWED, Some(("a", Some(1))))
            .pod("owner", 16, GUARANTEED, at);
        cluster.only_for = [("a-0".to_owned(), "other".to_owned())].into();
        cluster.run(&mut History::default(), 0, 30);
        assert_eq!(cluster.evicted, ["b1"], "{at:?}");
        assert!(cluster.bound("owner"), "{at:?}");
    }
}

#[test]
fn spread_pod_preempts_on_each_of_its_gpus() {
    for at in [None, Some(("a", None))] {
        let mut cluster = FakeCluster::default()
            .node("a", &[16, 16, 16])
            .pod("b0", 12, BORROWED, Some(("a", Some(0))))
            .pod("b1", 6, BORROWED, Some(("a", Some(1))))
            .pod("b2", 10, BORROWED, Some(("a", Some(2))))
            .pod("owner", 24, GUARANTEED, at)
            .shape("owner", Shape::Spread(2));
        cluster.run(&mut History::default(), 0, 30);
        assert_eq!(cluster.evicted, ["b1", "b2"]);
        let places = [("a-1".to_owned(), 12), ("a-2".to_owned(), 12)];
        assert_eq!(cluster.pods["owner"].places, places);
        assert!(cluster.reservations["a"].is_empty());
    }
}

#[test]
fn containers_of_a_pod_preempt_together() {
    for at in [None, Some(("a", None))] {
        let mut cluster = FakeCluster::default()
            .node("a", &[16, 16])
            .pod("b0", 10, BORROWED, Some(("a", Some(0))))
            .pod("b1", 10, BORROWED, Some(("a", Some(1))))
            .pod("owner", 28, GUARANTEED, at)
            .shape("owner", Shape::Containers(vec![8, 8, 12]));
        cluster.run(&mut History::default(), 0, 30);
        assert_eq!(cluster.evicted, ["b0", "b1"]);
        assert!(cluster.bound("owner"));
    }
}

#[test]
fn nobody_is_evicted_until_every_gpu_is_reserved() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16, 16])
        .pod("b0", 12, BORROWED, Some(("a", Some(0))))
        .pod("b1", 12, BORROWED, Some(("a", Some(1))))
        .pod("owner", 24, GUARANTEED, Some(("a", None)))
        .shape("owner", Shape::Spread(2));
    let reservations = ["a-0", "a-1"].map(|gpu| reservation(gpu, "owner", 12));
    cluster
        .reservations
        .insert("a".to_owned(), reservations.to_vec());
    cluster.held = [("a-0".to_owned(), reservations[0].clone())].into();
    let (mut history, now) = (History::default(), Duration::from_secs(0));
    assert_eq!(plan_steps(&cluster, &mut history, now), Vec::<&str>::new());
    cluster.held = reservations
        .map(|reservation| (reservation.gpu.clone(), reservation))
        .into();
    let steps = plan_steps(&cluster, &mut history, Duration::from_secs(1));
    assert_eq!(steps, ["make-room"]);
}

/// The names of the steps of one plan, without labels.
fn plan_steps(cluster: &FakeCluster, history: &mut History, now: Uptime) -> Vec<&'static str> {
    let steps = plan(&cluster.index().placement_view(), history, &OPTIONS, now);
    let names = steps.iter().map(Step::name);
    names.filter(|name| *name != "label").collect()
}

#[test]
fn victim_on_two_gpus_of_a_pod_is_evicted_once() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16, 16])
        .pod("wide", 24, BORROWED, Some(("a", None)))
        .shape("wide", Shape::Spread(2))
        .pod("owner", 24, GUARANTEED, Some(("a", None)))
        .shape("owner", Shape::Spread(2));
    let places = ["a-0", "a-1"].map(|gpu| (gpu.to_owned(), 12));
    cluster.pods.get_mut("wide").unwrap().places = places.to_vec();
    cluster.run(&mut History::default(), 0, 30);
    assert_eq!(cluster.evicted, ["wide"]);
    assert!(cluster.bound("owner"));
}
