//! Tests nodes whose root user writes arbitrary reports into the `GpuNode`.

use super::*;

/// A report on one GPU: its pods with their memory, the free memory, and the pod that it is
/// reserved for.
type Lie = (usize, Vec<(usize, u64)>, u64, Option<usize>);
/// A report on all GPUs, and the waiting containers with their requests.
type Lies = (Vec<Lie>, Vec<(usize, u64)>);

/// On `good` each pod has its memory. On `evil` one pod waits and one borrows.
fn cluster() -> FakeCluster {
    FakeCluster::default()
        .node("good", &[16, 16])
        .node("evil", &[16])
        .pod("g1", 8, BORROWED, Some(("good", Some(0))))
        .pod("g2", 8, BORROWED, Some(("good", Some(0))))
        .pod("g3", 12, LOW, Some(("good", Some(1))))
        .pod("g4", 4, GUARANTEED, Some(("good", Some(1))))
        .pod("e1", 8, BORROWED, Some(("evil", Some(0))))
        .pod("e2", 8, HIGH, Some(("evil", None)))
}

/// The cluster's index with the report of `evil`, which acknowledges its reservations.
fn reported_by_evil(cluster: &FakeCluster, lies: &Lies) -> ClusterIndex {
    let uids = ["g1", "g2", "g3", "g4", "e1", "e2", "gone", "never"];
    let gpus = ["good-0", "good-1", "evil-0", "made-up"];
    let of = |(pod, quanta): &(usize, u64)| (uids[*pod].to_owned(), Quanta::new(*quanta));
    let reserved = cluster.reservations.get("evil");
    let reserved = reserved.map(Vec::as_slice).unwrap_or_default();
    let reported = lies.0.iter().map(|(gpu, pods, free, held)| {
        let acknowledged = reserved
            .iter()
            .find(|reservation| reservation.gpu == gpus[*gpu]);
        let acknowledged = acknowledged.map(|reservation| reservation.pod_uid.clone());
        Gpu {
            uuid: gpus[*gpu].to_owned(),
            capacity: Quanta::new(16),
            free: Quanta::new(*free),
            largest_free: Quanta::new(*free),
            reserved_for: acknowledged.or(held.map(|pod| uids[pod].to_owned())),
            pods: pods.iter().map(of).collect(),
            ..Gpu::default()
        }
    });
    let waiting = lies.1.iter().map(of);
    let facts = GpuFacts {
        uid: "evil".to_owned(),
        gpus: reported.collect(),
        pending: waiting
            .map(|(pod, quanta)| PendingContainer { pod, quanta })
            .collect(),
        reservations: reserved.to_vec(),
        ..GpuFacts::default()
    };
    let mut index = cluster.index();
    index.apply(report("evil", facts));
    index
}

/// The pods that a step evicts or relocates.
fn named(step: &Step) -> Vec<&str> {
    match step {
        Step::Preempt { victims, .. } => victims
            .iter()
            .map(|victim| victim.pod.uid.as_str())
            .collect(),
        Step::Relocate { pod, .. } => vec![&pod.uid],
        _ => Vec::new(),
    }
}

/// The pods that any step names during a sequence of reports of `evil`.
fn all_named(reports: &[Lies]) -> BTreeSet<String> {
    let (mut live, mut history, mut all) = (cluster(), History::default(), BTreeSet::new());
    for (at, lies) in reports.iter().enumerate() {
        // Longer than each delay.
        for second in 0..6 {
            let now = Duration::from_secs(6 * at as u64 + second);
            for step in plan(
                &reported_by_evil(&live, lies).placement_view(),
                &mut history,
                &OPTIONS,
                now,
            ) {
                all.extend(named(&step).into_iter().map(str::to_owned));
                // No pod terminates: each plan sees all pods.
                if matches!(step, Step::Reserve { .. }) {
                    live.apply(step, &mut history, now);
                }
            }
        }
    }
    all
}

#[test]
fn node_report_selects_no_victim_on_another_node() {
    // A pod on it waits, and the report names borrowers of the other node as obstacles.
    let gpu = (2, vec![(0, 8), (1, 8)], 0, None);
    let report = (vec![gpu], vec![(5, 8)]);
    assert_eq!(all_named(&[report]), BTreeSet::new());
    let truth = (vec![(2, vec![(4, 16)], 0, None)], vec![(5, 8)]);
    assert_eq!(all_named(&[truth]), ["e1".to_owned()].into());
}

#[test]
fn mirror_annotation_impersonates_no_other_pod() {
    let live = cluster();
    let mut index = live.index();
    let mut mirror = Snapshot::of(&index.placement_view()).pods["g1"].1.clone();
    mirror.owner = Owner::Node;
    mirror.placement = Placement::Node("elsewhere".to_owned());
    for name in ["a", "z"] {
        let mirror = PodSummary::of_facts(mirror.clone());
        index.apply(WatchEvent::Pod(Event::Apply((
            key("n", name),
            Some(mirror),
        ))));
    }
    let view = index.placement_view();
    let snapshot = Snapshot::of(&view);
    assert_eq!(snapshot.pod("g1").and_then(PodFacts::node), Some("good"));
}
