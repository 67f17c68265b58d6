//! Checks properties of every plan, over random clusters and random failures of operators.

use std::cell::Cell;
use std::collections::VecDeque;

use super::*;

/// Nodes of up to three GPUs with borrowers and other pods, and guaranteed pods of every shape that
/// wait on a node or are unscheduled.
fn layouts() -> impl Strategy<Value = FakeCluster> {
    let node = prop::collection::vec(
        (
            8_u64..20,
            prop::collection::vec((1_u64..10, prop::bool::weighted(0.8)), 0..5),
        ),
        1..4,
    );
    let pending_pod = (1_u64..20, 0_usize..3, any::<bool>(), 0_u64..4, 0_u64..12);
    let pending_pods = prop::collection::vec(pending_pod, 1..4);
    (prop::collection::vec(node, 1..3), pending_pods).prop_map(|(nodes, pending_pods)| {
        let mut cluster = FakeCluster::default();
        for (n, gpus) in nodes.iter().enumerate() {
            let name = format!("node{n}");
            let sizes: Vec<u64> = gpus.iter().map(|(size, _)| *size).collect();
            cluster = cluster.node(&name, &sizes);
            for (g, (size, pods)) in gpus.iter().enumerate() {
                let mut free = *size;
                for (p, (request, borrowed)) in pods.iter().enumerate() {
                    if *request > free {
                        continue;
                    }
                    free -= request;
                    let priority = if *borrowed { BORROWED } else { GUARANTEED };
                    let at = Some((name.as_str(), Some(g)));
                    cluster = cluster.pod(&format!("p{n}-{g}-{p}"), *request, priority, at);
                }
            }
        }
        for (w, (request, node, bare, first, shape)) in pending_pods.iter().enumerate() {
            let name = format!("node{}", node % cluster.nodes.len());
            let at = (cluster.tokens(&name) >= *request).then_some((name.as_str(), None));
            let uid = format!("w{w}");
            let gpu = format!("{name}-0");
            let has_started = at.is_some()
                && (1..*request).contains(first)
                && cluster.free(&name, &gpu) >= *first;
            cluster = cluster.pod(&uid, *request, GUARANTEED, at);
            match shape {
                8 | 9 if !has_started && *request > 1 => {
                    cluster = cluster.shape(&uid, Shape::Spread(2));
                }
                10 | 11 if !has_started && *request > 2 => {
                    let sizes = vec![request / 3, request - request / 3];
                    cluster = cluster.shape(&uid, Shape::Containers(sizes));
                }
                _ => {}
            }
            if has_started {
                cluster = cluster.first(&uid, &gpu, *first);
            }
            if *bare {
                cluster = cluster.owned(&uid, Owner::Unowned);
            }
        }
        cluster
    })
}

/// The waiting pods that the GPUs of their node could hold without their evictable borrowers.
fn helped_by_preemption(cluster: &FakeCluster) -> Vec<String> {
    let waiting = cluster
        .pods
        .iter()
        .filter(|(_, pod)| !pod.is_bound() && pod.priority == GUARANTEED);
    let fits = |(_, pod): &(&String, &FakePod)| {
        pod.node.iter().any(|node| {
            let free = |(gpu, capacity): (&String, &u64)| {
                let stay = cluster.pods.values();
                let stay = stay.filter(|other| other.priority == GUARANTEED || other.sticks());
                capacity.saturating_sub(stay.map(|other| other.on(gpu)).sum())
            };
            let free = cluster.nodes[node].iter().map(free).collect();
            pod.fit(&cluster.shares(node, pod), free).is_some()
        })
    };
    waiting.filter(fits).map(|(uid, _)| uid.clone()).collect()
}

/// The evictions of a step one by one, because an operator may crash between them.
fn singly(step: Step) -> Vec<Step> {
    let Step::Preempt {
        pending_pod,
        node,
        reservations,
        nominate,
        victims,
    } = step
    else {
        return vec![step];
    };
    let room = |nominate, victims| Step::Preempt {
        pending_pod: pending_pod.clone(),
        node: node.clone(),
        reservations: reservations.clone(),
        nominate,
        victims,
    };
    let nominated = nominate.then(|| room(true, Vec::new()));
    let evicted = victims.into_iter().map(|victim| room(false, vec![victim]));
    nominated.into_iter().chain(evicted).collect()
}

/// One of the operators that act on the same cluster.
#[derive(Default)]
struct Acting {
    history: History,
    /// The index of the newest view that the operator's watches have delivered.
    view: usize,
}

/// Runs operators by random bits, which choose the lag of a watch, the step of a crash, and the
/// next of two operators.
fn operate(live: &mut FakeCluster, two: bool, bits: &[u32]) {
    let mut operators = [Acting::default(), Acting::default()];
    let (mut views, mut clock) = (Vec::new(), 0);
    for bits in bits {
        views.push(live.index());
        let now = Duration::from_secs(clock);
        let mut queues = [VecDeque::new(), VecDeque::new()];
        let mut killed = [false; 2];
        for (at, operator) in operators.iter_mut().enumerate().take(1 + usize::from(two)) {
            let bits = bits >> (8 * at);
            let behind = (bits & 3).saturating_sub(1);
            operator.view = operator
                .view
                .max((views.len() - 1).saturating_sub(behind as usize));
            let steps = plan(
                &views[operator.view].placement_view(),
                &mut operator.history,
                &OPTIONS,
                now,
            );
            queues[at] = steps.into_iter().flat_map(singly).collect();
            killed[at] = bits >> 2 & 7 == 0;
            if killed[at] {
                queues[at].truncate((bits >> 5 & 3) as usize);
            }
        }
        let idle = queues.iter().all(VecDeque::is_empty);
        let mut turns = bits >> 16;
        while queues.iter().any(|queue| !queue.is_empty()) {
            let at = (turns & 1) as usize;
            turns = turns.rotate_right(1);
            let at = if queues[at].is_empty() { 1 - at } else { at };
            if let Some(step) = queues[at].pop_front() {
                live.apply(step, &mut operators[at].history, now);
            }
        }
        for (operator, killed) in operators.iter_mut().zip(killed) {
            if killed {
                operator.history = History::default();
            }
        }
        live.advance();
        clock += if idle { 4 } else { 1 };
    }
}

/// For each pending pod only borrowers are evicted, whatever operators fail. They are from as many
/// GPUs of one node as the pod has shares, and none is evicted without need.
fn evicts_only_what_one_pod_lacks(
    mut live: FakeCluster,
    borrowers: Vec<u64>,
    two: bool,
    bits: &[u32],
) -> Result<(), TestCaseError> {
    for (number, request) in borrowers.into_iter().enumerate() {
        live = live.pod(&format!("thief{number}"), request, BORROWED, None);
    }
    let before = live.pods.clone();
    operate(&mut live, two, bits);
    for uid in &live.evicted {
        let priority = before.get(uid).map(|pod| pod.priority);
        prop_assert!(priority.is_none_or(|of| of == BORROWED), "{}", uid);
    }
    let mut pods_with_evictions = BTreeSet::new();
    for ((pending_pod, node), round) in &live.rounds {
        prop_assert!(
            pods_with_evictions.insert(pending_pod),
            "{}: on another node than {} too",
            pending_pod,
            node
        );
        let most = before
            .get(pending_pod)
            .map_or(1, |pod| live.shares(node, pod).len());
        prop_assert!(round.len() <= most, "{}: {:?}", pending_pod, round);
        prop_assert!(
            round.values().all(Round::needed_all),
            "{}: {:?}",
            pending_pod,
            round
        );
    }
    Ok(())
}

// 100,000 layouts together in the long tier.
proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(20_000)))]
    /// A round is one plan, the termination of its victims, and one pass of scheduler and agents.
    /// Neither recreated borrowers nor new guaranteed pods may delay the pending pod then.
    #[test]
    fn preemptor_gets_its_gpu_and_had_no_alternative(
        cluster in layouts(),
        others in prop::collection::vec((0_u64..15, 1_u64..12, any::<bool>()), 0..4),
    ) {
        let mut live = cluster;
        live.all_return = true;
        let mut history = History::default();
        for second in 0..25 {
            for (number, (at, request, borrows)) in others.iter().enumerate() {
                if *at == second {
                    let priority = if *borrows { BORROWED } else { GUARANTEED };
                    live = live.pod(&format!("other{number}"), *request, priority, None);
                }
            }
            let mut before = live.rounds.clone();
            live.run(&mut history, second, 1);
            for ((pending_pod, node), round) in &live.rounds {
                if before.remove(&(pending_pod.clone(), node.clone())).as_ref() != Some(round) {
                    prop_assert!(live.bound(pending_pod), "{} in second {}: {:?}", pending_pod, second, live);
                }
            }
        }
        let helped: BTreeSet<&String> = live.rounds.keys().map(|(pending_pod, _)| pending_pod).collect();
        prop_assert_eq!(helped.len(), live.rounds.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(40_000)))]
    #[test]
    fn crashing_operator_preempts_no_more_than_needed(
        cluster in layouts(),
        borrowers in prop::collection::vec(1_u64..12, 0..3),
        bits in prop::collection::vec(any::<u32>(), 8),
    ) {
        evicts_only_what_one_pod_lacks(cluster, borrowers, false, &bits)?;
    }

    #[test]
    fn two_operators_preempt_no_more_than_needed(
        cluster in layouts(),
        borrowers in prop::collection::vec(1_u64..12, 0..3),
        bits in prop::collection::vec(any::<u32>(), 8),
    ) {
        evicts_only_what_one_pod_lacks(cluster, borrowers, true, &bits)?;
    }
}

/// Marks pods as a Job's, which ignores disruption or does not, or as protected by a
/// PodDisruptionBudget.
fn marked(cluster: &FakeCluster, marks: &[(prop::sample::Index, u8)]) -> FakeCluster {
    let uids: Vec<&String> = cluster.pods.keys().collect();
    let mut marked = cluster.clone();
    // The operator would ask for ever about a Job's pod that is also protected, so the first mark
    // counts.
    for (at, mark) in marks.iter().rev() {
        let at = at.index(uids.len());
        marked.kept.retain(|uid| uid != uids[at]);
        let pod = marked.pods.get_mut(uids[at]).unwrap();
        pod.owner = cluster.pods[uids[at]].owner.clone();
        match mark {
            0 => marked.kept.push(uids[at].clone()),
            1 => pod.owner = job(&format!("{at:02}lets")),
            _ => pod.owner = job(&format!("{at:02}keeps")),
        }
    }
    marked
}

fn marks() -> impl Strategy<Value = Vec<(prop::sample::Index, u8)>> {
    prop::collection::vec((any::<prop::sample::Index>(), 0_u8..3), 0..4)
}

/// Plans are applied whole, cut at any step, or by an operator that restarts each time.
#[test]
fn plan_settles_evicting_only_borrowers_and_none_twice() {
    let (cases, lent) = (cases(CASES), Cell::new(0));
    let cuts = prop::collection::vec(prop::option::weighted(0.3, 0_usize..4), 20);
    proptest!(ProptestConfig::with_cases(cases), |(cluster in layouts(), marks in marks(), cuts in cuts)| {
        let mut live = marked(&cluster, &marks);
        let (mut operator, mut second) = (Watching::default(), 0);
        for cut in cuts {
            let happened = operator.act(&mut live, second, cut.unwrap_or(usize::MAX));
            // An operator that crashed after some steps has no history.
            if cut.is_some() {
                operator.history = History::default();
            }
            second += operator.pause(happened);
        }
        let mut run = |live: &mut FakeCluster, seconds| {
            let end = second + seconds;
            while second < end {
                let happened = operator.act(live, second, usize::MAX);
                second += operator.pause(happened);
            }
        };
        // Three relocations and their pauses take some 100 s, and a restarted operator starts a new
        // count.
        run(&mut live, 180);
        for uid in &live.evicted {
            prop_assert_eq!(live.evicted.iter().filter(|other| *other == uid).count(), 1, "{} twice", uid);
            prop_assert_eq!(cluster.pods[uid].priority, BORROWED);
        }
        let writes = live.writes;
        run(&mut live, 60);
        prop_assert_eq!(live.writes, writes, "it does not come to rest");
        prop_assert_eq!(helped_by_preemption(&live), Vec::<String>::new(), "somebody who could be helped waits");
        let held = live.reservations.values().flatten().count();
        let waits = |held: &Reservation| !live.bound(&held.pod_uid);
        prop_assert_eq!(live.reservations.values().flatten().filter(|held| waits(held)).count(), held);
        lent.set(lent.get() + u32::from(!live.evicted.is_empty()));
    });
    assert!(lent.get() >= cases / 5, "{} of {cases}", lent.get());
}

/// Plans for the same state, with and without history: no other pod is evicted.
#[test]
fn replayed_plan_evicts_nobody_else() {
    let (cases, lent) = (cases(CASES), Cell::new(0));
    proptest!(ProptestConfig::with_cases(cases), |(cluster in layouts())| {
        let mut live = cluster;
        let (mut operator, mut second) = (Watching::default(), 0);
        while second < 20 {
            let now = Duration::from_secs(second);
            let blind = live.index();
            let steps = plan(&blind.placement_view(), &mut operator.history, &OPTIONS, now);
            let happened = !steps.is_empty();
            for step in steps {
                live.apply(step, &mut operator.history, now);
            }
            if happened {
                // The watch shows nothing yet and the history does, or the watch shows all to an
                // operator without history.
                let replayed = plan(&blind.placement_view(), &mut operator.history, &OPTIONS, now);
                let anew = plan(&live.index().placement_view(), &mut History::default(), &OPTIONS, now);
                for step in replayed.into_iter().chain(anew) {
                    let preempts = matches!(&step, Step::Preempt { victims, .. } if !victims.is_empty());
                    prop_assert!(!preempts, "{:?}", step);
                }
            }
            live.advance();
            second += operator.pause(happened);
        }
        lent.set(lent.get() + u32::from(!live.evicted.is_empty()));
    });
    assert!(lent.get() >= cases / 5, "{} of {cases}", lent.get());
}

/// A plan that is skipped while nothing changes would have been empty.
#[test]
fn idle_plan_stays_empty_as_time_passes() {
    let (cases, idle) = (cases(CASES) / 40, Cell::new(0));
    let config = ProptestConfig::with_cases(cases);
    proptest!(config, |(cluster in layouts(), seconds in 0_u64..240)| {
        let mut live = cluster;
        let mut history = History::default();
        live.run(&mut history, 0, seconds);
        let now = Duration::from_secs(seconds);
        let steps = plan(&live.index().placement_view(), &mut history, &OPTIONS, now);
        if !steps.is_empty() || !history.is_idle() {
            return Ok(());
        }
        for later in [1, 10, 60, 600, 7200] {
            let now = Duration::from_secs(seconds + later);
            let steps = plan(&live.index().placement_view(), &mut history, &OPTIONS, now);
            prop_assert_eq!(steps, Vec::new(), "after {} s", later);
        }
        idle.set(idle.get() + 1);
    });
    assert!(idle.get() >= cases / 5, "{} of {cases}", idle.get());
}
