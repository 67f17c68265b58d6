//! Tests labels, quota overrides and entries of other writers.

use bursar_crds::Amount;
use bursar_crds::budget::Override;
use bursar_crds::gpu_node::MAX_QUOTAS;

use super::*;

#[test]
fn contested_label_does_not_starve_other_nodes() {
    let mut cluster = FakeCluster::default().node("a", &[]);
    let name = "bursar.dev/largest-gpu-gib".to_owned();
    let mut history = History::default();
    for second in 1..101 {
        let stubborn = [(name.clone(), "80".to_owned())];
        cluster.labels.insert("a".to_owned(), stubborn.into());
        cluster.run(&mut history, second, 1);
        assert!(
            second > 1 || cluster.labels["a"].is_empty(),
            "it is taken off"
        );
    }
    assert_eq!(cluster.writes, 10);
}

#[test]
fn foreign_reservation_and_quota_are_not_overwritten_forever() {
    let mut cluster = FakeCluster::default().node("a", &[16]);
    let foreign = Reservation {
        gpu: "a-0".to_owned(),
        pod_uid: "nobody".to_owned(),
        quanta: 1,
    };
    let mut history = History::default();
    let mut writes = 0;
    for second in 0..100 {
        // Another manager owns the entry, so the operator's apply does not remove it.
        cluster
            .reservations
            .insert("a".to_owned(), vec![foreign.clone()]);
        let now = Duration::from_secs(second);
        for step in plan(
            &cluster.index().placement_view(),
            &mut history,
            &OPTIONS,
            now,
        ) {
            writes += usize::from(matches!(step, Step::Reserve { .. }));
            cluster.apply(step, &mut history, now);
        }
    }
    assert_eq!(writes, 1);
}

#[test]
fn labels_show_free_reclaimable_and_total_of_one_gpu() {
    let mut cluster = FakeCluster::default()
        .node("a", &[16, 16])
        .pod("g", 10, GUARANTEED, Some(("a", Some(0))))
        .pod("b", 12, BORROWED, Some(("a", Some(1))));
    let mut history = History::default();
    cluster.run(&mut history, 1, 1);
    let label = |cluster: &FakeCluster, name: &str| {
        cluster.labels["a"][&format!("bursar.dev/largest-{name}-gib")].clone()
    };
    assert_eq!(label(&cluster, "free"), "6");
    assert_eq!(label(&cluster, "reclaimable"), "16");
    assert_eq!(label(&cluster, "gpu"), "16");
    // A small change is written after it has lasted, a large one at once.
    cluster = cluster.pod("g2", 16, GUARANTEED, None);
    cluster.pods.remove("g2");
    cluster = cluster.pod("g", 5, GUARANTEED, Some(("a", Some(0))));
    cluster.run(&mut history, 2, 1);
    assert_eq!(label(&cluster, "free"), "11", "another bucket");
    cluster = cluster.pod("g", 6, GUARANTEED, Some(("a", Some(0))));
    cluster.run(&mut history, 3, 5);
    assert_eq!(label(&cluster, "free"), "11", "the same bucket");
    cluster.run(&mut history, 8, 10);
    assert_eq!(label(&cluster, "free"), "10");
    let writes = cluster.writes;
    cluster.run(&mut history, 20, 100);
    assert_eq!(cluster.writes, writes);
}

#[test]
fn labels_of_another_quantum_are_removed() {
    let mut cluster = FakeCluster::default().node("a", &[16]);
    let old = [
        "bursar.dev/largest-free-512mib",
        "bursar.dev/largest-gpu-256mib",
        "team",
    ];
    let old = old.map(|name| (name.to_owned(), "16".to_owned()));
    cluster.labels.insert("a".to_owned(), old.into());
    cluster.run(&mut History::default(), 1, 1);
    let left: Vec<_> = cluster.labels["a"].keys().map(String::as_str).collect();
    let wanted = [
        "bursar.dev/largest-free-gib",
        "bursar.dev/largest-gpu-gib",
        "bursar.dev/largest-reclaimable-gib",
        "team",
    ];
    assert_eq!(left, wanted);
    assert_eq!(cluster.writes, 1);
}

fn lowered(device: Option<&str>, managed: Option<&str>) -> Override {
    Override {
        device_memory: device.map(Amount::from),
        managed_memory: managed.map(Amount::from),
        ..Override::default()
    }
}

#[test]
fn override_reaches_the_pods_node_and_is_lifted_with_it() {
    let mut cluster =
        FakeCluster::default()
            .node("a", &[16])
            .pod("p", 8, GUARANTEED, Some(("a", Some(0))));
    cluster.lowered = [("p", "4Gi"), ("other", "1Gi")]
        .map(|(pod, quota)| (pod.to_owned(), lowered(Some(quota), None)))
        .into();
    let mut history = History::default();
    cluster.run(&mut history, 0, 2);
    let order = QuotaOverride {
        pod_uid: "p".to_owned(),
        container: "main".to_owned(),
        account: "device".to_owned(),
        quota: "4Gi".into(),
    };
    assert_eq!(cluster.quotas["a"], [order]);
    cluster.lowered.clear();
    cluster.run(&mut history, 2, 2);
    assert_eq!(cluster.quotas["a"], []);
}

#[test]
fn overrides_beyond_the_limit_are_counted_on_each_change() {
    let many = MAX_QUOTAS + 3;
    let mut cluster = FakeCluster::default().node("a", &[128]);
    for number in 0..many {
        cluster = cluster.pod(
            &format!("p{number:02}"),
            1,
            GUARANTEED,
            Some(("a", Some(0))),
        );
    }
    let mut history = History::default();
    for (lowered_pods, omitted) in [(MAX_QUOTAS + 2, 2), (many, 3), (MAX_QUOTAS, 0)] {
        cluster.lowered = (0..lowered_pods)
            .map(|number| (format!("p{number:02}"), lowered(Some("0"), None)))
            .collect();
        let mut counted = Vec::new();
        for second in 0..3 {
            let now = Duration::from_secs(second);
            for step in plan(
                &cluster.index().placement_view(),
                &mut history,
                &OPTIONS,
                now,
            ) {
                if let Step::OverrideQuotas { omitted, .. } = step {
                    counted.push(omitted);
                }
                cluster.apply(step, &mut history, now);
            }
        }
        assert_eq!(counted, [omitted]);
        assert_eq!(cluster.quotas["a"].len(), MAX_QUOTAS);
    }
}

#[test]
fn override_of_managed_memory_names_its_own_account() {
    let mut cluster =
        FakeCluster::default()
            .node("a", &[16, 16])
            .pod("p", 8, GUARANTEED, Some(("a", Some(0))));
    let mut history = History::default();
    let mut orders = |lowered: Override| {
        cluster.lowered = [("p".to_owned(), lowered)].into();
        cluster.run(&mut history, 0, 2);
        let orders = cluster.quotas["a"].iter();
        let orders = orders.map(|order| (order.account.clone(), order.quota.clone()));
        orders.collect::<Vec<_>>()
    };
    let order = |account: &str, quota: &str| (account.to_owned(), Amount::from(quota));
    assert_eq!(
        orders(lowered(None, Some("2Gi"))),
        [order("managed", "2Gi")]
    );
    assert_eq!(
        orders(lowered(Some("4Gi"), Some("3Gi"))),
        [order("device", "4Gi"), order("managed", "3Gi")]
    );
}

#[test]
fn override_covers_each_gpu_when_the_agent_lists_one_of_two() {
    // The pod is on two GPUs, and the agent's list of the second is full.
    let cluster = (0..=MAX_PODS).fold(
        FakeCluster::default()
            .node("a", &[64, 512])
            .pod("p", 8, GUARANTEED, Some(("a", Some(0)))),
        |cluster, number| cluster.pod(&format!("o{number}"), 1, GUARANTEED, Some(("a", Some(1)))),
    );
    let mut cluster = cluster;
    cluster.lowered = [("p".to_owned(), lowered(Some("4Gi"), None))].into();
    cluster.run(&mut History::default(), 0, 2);
    let orders = cluster.quotas["a"].iter();
    let orders: Vec<_> = orders
        .map(|order| (order.account.as_str(), &order.quota))
        .collect();
    // The agent spreads an order for `device` over all GPUs of the pod, and one for a UUID not.
    assert_eq!(
        orders,
        [("a-0", &Amount::from("4Gi")), ("a-1", &Amount::from("4Gi"))]
    );
}
