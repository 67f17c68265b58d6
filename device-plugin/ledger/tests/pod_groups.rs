//! Tests that the containers of one pod are placed together: a pod has memory for all of them, or
//! for none.

#![allow(
    clippy::unwrap_used,
    reason = "a failed unwrap is a failed test, with its place"
)]

use std::collections::BTreeMap;
use std::time::Duration;

use bursar_ledger::units::{AllocationId, DeviceIdSet, PodUid, Quanta, Quantum, Resource};
use bursar_ledger::{
    BindOutcome, BindRequest, Binding, BootTime, Gpu, GpuSpread, Health, Ledger, Placement,
    Priority, RETRY_DEADLINE, RETRY_GRACE, WaitHandle,
};

const NOW: BootTime = BootTime(0);

/// A pod with the device ids of its containers, in their starting order.
struct Pod {
    uid: PodUid,
    containers: Vec<DeviceIdSet>,
}

fn device_ids(range: std::ops::Range<u16>) -> DeviceIdSet {
    DeviceIdSet::from_indexes(range).unwrap()
}

/// A ledger with one GPU for each number of quanta.
fn ledger_with_gpus(gpus: &[u32]) -> Ledger {
    let mut ledger = Ledger::new(Quantum::Gib1);
    ledger.set_gpus(listed(gpus));
    ledger
}

fn listed(gpus: &[u32]) -> impl Iterator<Item = Gpu> {
    gpus.iter().enumerate().map(|(number, quanta)| Gpu {
        uuid: format!("GPU-{number}").parse().unwrap(),
        capacity: Quanta(*quanta),
        health: Health::Healthy,
    })
}

/// Admits a pod as the kubelet does: allocates for all containers before the first starts.
fn allocate_pod(ledger: &mut Ledger, uid: &str, containers: &[std::ops::Range<u16>]) -> Pod {
    let containers: Vec<DeviceIdSet> = containers.iter().cloned().map(device_ids).collect();
    for device_ids in &containers {
        let id = AllocationId::from_bits(ledger.allocations().count() as u64 + 1);
        ledger.add_pending(id, Resource::DeviceMemory, device_ids.clone(), NOW);
    }
    Pod {
        uid: uid.parse().unwrap(),
        containers,
    }
}

fn start_at(ledger: &mut Ledger, pod: &Pod, container: usize, now: BootTime) -> BindOutcome {
    let start = BindRequest {
        resource: Resource::DeviceMemory,
        device_ids: pod.containers[container].clone(),
        containers: pod.containers.clone(),
        pod: pod.uid.clone(),
        spread: GpuSpread::default(),
        priority: Priority(0),
    };
    ledger.bind(start, now).unwrap().outcome
}

/// Starts a container that is bound at once. Returns its places.
fn start_bound(ledger: &mut Ledger, pod: &Pod, container: usize) -> Vec<(String, u32)> {
    match start_at(ledger, pod, container, NOW) {
        BindOutcome::Bound(binding) => places(&binding),
        BindOutcome::Queued(_, reason) => panic!("container {container} of {}: {reason}", pod.uid),
    }
}

fn start_queued(ledger: &mut Ledger, pod: &Pod, container: usize) -> String {
    match start_at(ledger, pod, container, NOW) {
        BindOutcome::Queued(_, reason) => reason.to_string(),
        BindOutcome::Bound(binding) => panic!("container {container} of {}: {binding:?}", pod.uid),
    }
}

fn places(binding: &Binding) -> Vec<(String, u32)> {
    let Placement::Device(shares) = &binding.placement else {
        panic!("{binding:?}");
    };
    let shares = shares.iter();
    shares
        .map(|share| (share.gpu.to_string(), share.quanta.0))
        .collect()
}

/// The taken memory of each GPU.
fn bound_by_gpu(ledger: &Ledger) -> Vec<u32> {
    let gpus = ledger.view(NOW).gpus;
    gpus.iter().map(|gpu| gpu.bound.0).collect()
}

#[test]
fn pod_of_4_4_12_12_fits_on_two_gpus_of_16() {
    let mut ledger = ledger_with_gpus(&[16, 16]);
    let pod = allocate_pod(&mut ledger, "p", &[0..4, 4..8, 8..20, 20..32]);
    let mut quanta_by_gpu: BTreeMap<String, u32> = BTreeMap::new();
    for container in 0..4 {
        for (gpu, quanta) in start_bound(&mut ledger, &pod, container) {
            *quanta_by_gpu.entry(gpu).or_default() += quanta;
        }
    }
    assert_eq!(quanta_by_gpu.into_values().collect::<Vec<_>>(), [16, 16]);
}

#[test]
fn two_pods_of_7_and_9_fit_on_two_gpus_of_16() {
    let mut ledger = ledger_with_gpus(&[16, 16]);
    let first = allocate_pod(&mut ledger, "one", &[0..7, 7..16]);
    let second = allocate_pod(&mut ledger, "two", &[16..23, 23..32]);
    for container in 0..2 {
        for pod in [&first, &second] {
            start_bound(&mut ledger, pod, container);
        }
    }
    assert_eq!(bound_by_gpu(&ledger), [16, 16]);
}

#[test]
fn pod_that_does_not_fit_whole_takes_no_memory() {
    let mut ledger = ledger_with_gpus(&[16, 16]);
    let pod = allocate_pod(&mut ledger, "p", &[0..9, 9..18, 18..27]);
    let reason = start_queued(&mut ledger, &pod, 0);
    assert_eq!(
        reason,
        "waiting for 9 GiB, with 18 GiB for 2 more of the pod's containers, \
         together more than the healthy GPUs hold: largest free 16 GiB (GPU-0)"
    );
    assert_eq!(bound_by_gpu(&ledger), [0, 0]);
    let other = allocate_pod(&mut ledger, "other", std::slice::from_ref(&(27..32)));
    start_bound(&mut ledger, &other, 0);
}

#[test]
fn planned_places_survive_a_restart_and_end_with_the_pod() {
    let mut ledger = ledger_with_gpus(&[16, 16]);
    let pod = allocate_pod(&mut ledger, "p", &[0..7, 7..16]);
    let other = allocate_pod(&mut ledger, "other", std::slice::from_ref(&(16..32)));
    start_bound(&mut ledger, &pod, 0);
    let mut ledger = Ledger::restore(ledger.snapshot(), Quantum::Gib1, NOW).unwrap();
    assert_eq!(bound_by_gpu(&ledger), [16, 0]);
    start_bound(&mut ledger, &other, 0);
    start_bound(&mut ledger, &pod, 1);
    ledger.release_pod(&pod.uid);
    assert_eq!(bound_by_gpu(&ledger), [0, 16]);
}

/// A GPU of 16 on which a pod has 4, and another pod waits for 7 and 9.
struct WaitingPod {
    ledger: Ledger,
    first: Pod,
    pod: Pod,
    /// The call of the waiting pod's first container.
    ticket: WaitHandle,
}

fn pod_that_waits_for_memory() -> WaitingPod {
    let mut ledger = ledger_with_gpus(&[16]);
    let first = allocate_pod(&mut ledger, "first", std::slice::from_ref(&(0..4)));
    start_bound(&mut ledger, &first, 0);
    let pod = allocate_pod(&mut ledger, "p", &[4..11, 11..20]);
    let BindOutcome::Queued(ticket, _) = start_at(&mut ledger, &pod, 0, NOW) else {
        panic!("12 are free");
    };
    WaitingPod {
        ledger,
        first,
        pod,
        ticket,
    }
}

#[test]
fn planned_places_are_dropped_when_no_retry_comes() {
    let WaitingPod {
        mut ledger,
        first,
        ticket,
        ..
    } = pod_that_waits_for_memory();
    ledger.stop_waiting(ticket, NOW);
    ledger.release_pod(&first.uid);
    assert_eq!(ledger.advance(NOW), []);
    assert_eq!(bound_by_gpu(&ledger), [16], "both are set aside");
    ledger.advance(NOW + RETRY_GRACE + Duration::from_secs(1));
    assert_eq!(bound_by_gpu(&ledger), [0]);
}

#[test]
fn planned_places_stay_while_another_container_has_memory() {
    let WaitingPod {
        mut ledger,
        first,
        pod,
        ticket,
    } = pod_that_waits_for_memory();
    let at = |seconds| NOW + Duration::from_secs(seconds);
    ledger.stop_waiting(ticket, at(28));
    let second = start_at(&mut ledger, &pod, 1, at(28));
    assert!(matches!(second, BindOutcome::Queued(..)), "{second:?}");
    ledger.release_pod(&first.uid);
    assert_eq!(ledger.advance(at(50)).len(), 1, "the call is open");
    // The second container's start and the kubelet's next sync delay the first one's retry.
    ledger.advance(at(69));
    assert_eq!(bound_by_gpu(&ledger), [16]);
    let retried = start_at(&mut ledger, &pod, 0, at(75));
    assert!(matches!(retried, BindOutcome::Bound(_)), "{retried:?}");
    ledger.release_pod(&pod.uid);
    assert_eq!(bound_by_gpu(&ledger), [0]);
}

#[test]
fn container_is_placed_with_others_whose_retry_is_late() {
    let WaitingPod {
        mut ledger,
        pod,
        ticket,
        ..
    } = pod_that_waits_for_memory();
    ledger.stop_waiting(ticket, NOW);
    // The kubelet pulls the second container's image for as long.
    let later = NOW + RETRY_DEADLINE;
    ledger.advance(later);
    let second = start_at(&mut ledger, &pod, 1, later);
    assert!(matches!(second, BindOutcome::Queued(..)), "{second:?}");
    assert_eq!(bound_by_gpu(&ledger), [4]);
}

#[test]
fn init_and_main_containers_share_memory() {
    let mut ledger = ledger_with_gpus(&[16]);
    // The pod has an init container, a sidecar, and the main container, which reuses the device ids
    // of the init container.
    let pod = allocate_pod(&mut ledger, "p", &[0..8, 12..16, 0..12]);
    assert_eq!(start_bound(&mut ledger, &pod, 0), [("GPU-0".to_owned(), 8)]);
    assert_eq!(bound_by_gpu(&ledger), [16]);
    start_bound(&mut ledger, &pod, 1);
    assert_eq!(
        start_bound(&mut ledger, &pod, 2),
        [("GPU-0".to_owned(), 12)]
    );
    assert_eq!(bound_by_gpu(&ledger), [16]);
    // The kubelet recreates the pod's sandbox.
    for container in 0..3 {
        start_bound(&mut ledger, &pod, container);
    }
}

#[test]
fn spread_container_keeps_its_place_after_an_init_container() {
    let mut ledger = ledger_with_gpus(&[16, 16]);
    let pod = allocate_pod(&mut ledger, "p", &[0..20, 0..32]);
    let halves = |quanta| ["GPU-0", "GPU-1"].map(|gpu| (gpu.to_owned(), quanta));
    assert_eq!(start_bound(&mut ledger, &pod, 0), halves(10));
    assert_eq!(bound_by_gpu(&ledger), [16, 16]);
    assert_eq!(start_bound(&mut ledger, &pod, 1), halves(16));
}

#[test]
fn failed_gpu_drops_planned_places_and_pod_is_replanned() {
    let mut ledger = ledger_with_gpus(&[16, 16, 16]);
    let pod = allocate_pod(&mut ledger, "p", &[0..12, 12..24]);
    assert_eq!(
        start_bound(&mut ledger, &pod, 0),
        [("GPU-0".to_owned(), 12)]
    );
    assert_eq!(bound_by_gpu(&ledger), [12, 12, 0]);
    ledger.set_gpus(listed(&[16, 16, 16]).map(|gpu| Gpu {
        health: match gpu.uuid.as_str() {
            "GPU-1" => Health::Unhealthy,
            _ => Health::Healthy,
        },
        ..gpu
    }));
    assert_eq!(
        start_bound(&mut ledger, &pod, 1),
        [("GPU-2".to_owned(), 12)]
    );
    assert_eq!(bound_by_gpu(&ledger), [12, 0, 12]);
}

#[test]
fn restarted_container_leaves_planned_places_of_others() {
    let mut ledger = ledger_with_gpus(&[16, 16, 16]);
    let pod = allocate_pod(&mut ledger, "p", &[0..6, 6..18, 18..30]);
    start_bound(&mut ledger, &pod, 0);
    // The GPU of another container fails before that container starts, so both later containers are
    // placed again.
    let fail_gpu = |ledger: &mut Ledger, failed: &str| {
        ledger.set_gpus(listed(&[16, 16, 16]).map(|gpu| Gpu {
            health: match gpu.uuid.as_str() == failed {
                true => Health::Unhealthy,
                false => Health::Healthy,
            },
            ..gpu
        }));
    };
    for gpu in ["GPU-0", "GPU-1"] {
        fail_gpu(&mut ledger, gpu);
    }
    fail_gpu(&mut ledger, "none");
    start_bound(&mut ledger, &pod, 1);
    let before = bound_by_gpu(&ledger);
    assert_eq!(before.iter().sum::<u32>(), 30);
    start_bound(&mut ledger, &pod, 0);
    assert_eq!(bound_by_gpu(&ledger), before);
}

#[test]
fn claim_beyond_a_mig_instance_waits_with_that_reason() {
    let mut ledger = Ledger::new(Quantum::Gib1);
    let instances = ["MIG-a", "MIG-b"].map(|uuid| Gpu {
        uuid: uuid.parse().unwrap(),
        capacity: Quanta(10),
        health: Health::Healthy,
    });
    ledger.set_gpus(instances);
    let large = allocate_pod(&mut ledger, "large", std::slice::from_ref(&(0..16)));
    assert_eq!(
        start_queued(&mut ledger, &large, 0),
        "waiting for 16 GiB, more than one MIG instance holds: no program uses two: \
         largest free 10 GiB (MIG-a)"
    );
    let pod = allocate_pod(&mut ledger, "p", std::slice::from_ref(&(16..20)));
    assert_eq!(start_bound(&mut ledger, &pod, 0), [("MIG-a".to_owned(), 4)]);
}
