//! The containers of one pod are placed together: a pod holds memory for all of them, or for none.

#![allow(
    clippy::unwrap_used,
    reason = "a failed unwrap is a failed test, with its place"
)]

use std::collections::BTreeMap;
use std::time::Duration;

use bursar_ledger::units::{AllocationId, PodUid, Quanta, Quantum, Resource, TokenSet};
use bursar_ledger::{
    Answer, Binding, Gpu, HOLD, Health, Ledger, Moment, Placement, Priority, Shape, Start,
};

const NOW: Moment = Moment(0);

/// A pod with the tokens of its containers, in the order in which they start.
struct Pod {
    uid: PodUid,
    containers: Vec<TokenSet>,
}

fn set(range: std::ops::Range<u16>) -> TokenSet {
    TokenSet::from_indexes(range).unwrap()
}

/// A node of GPUs with so many quanta.
fn node(gpus: &[u32]) -> Ledger {
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

/// The kubelet admits a pod: it allocates for all containers before it starts the first.
fn admit(ledger: &mut Ledger, uid: &str, containers: &[std::ops::Range<u16>]) -> Pod {
    let containers: Vec<TokenSet> = containers.iter().cloned().map(set).collect();
    for tokens in &containers {
        let id = AllocationId::from_bits(ledger.allocations().count() as u64 + 1);
        ledger.book(id, Resource::DeviceMemory, tokens.clone(), NOW);
    }
    Pod {
        uid: uid.parse().unwrap(),
        containers,
    }
}

fn start_at(ledger: &mut Ledger, pod: &Pod, container: usize, now: Moment) -> Answer {
    let start = Start {
        resource: Resource::DeviceMemory,
        tokens: pod.containers[container].clone(),
        containers: pod.containers.clone(),
        pod: pod.uid.clone(),
        shape: Shape::default(),
        priority: Priority(0),
    };
    ledger.start(start, now).unwrap().answer
}

/// Starts a container that has its memory at once: where.
fn bound(ledger: &mut Ledger, pod: &Pod, container: usize) -> Vec<(String, u32)> {
    match start_at(ledger, pod, container, NOW) {
        Answer::Bound(binding) => places(&binding),
        Answer::Wait(_, reason) => panic!("container {container} of {}: {reason}", pod.uid),
    }
}

fn waits(ledger: &mut Ledger, pod: &Pod, container: usize) -> String {
    match start_at(ledger, pod, container, NOW) {
        Answer::Wait(_, reason) => reason.to_string(),
        Answer::Bound(binding) => panic!("container {container} of {}: {binding:?}", pod.uid),
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

/// What is taken of each GPU.
fn taken(ledger: &Ledger) -> Vec<u32> {
    let gpus = ledger.view(NOW).gpus;
    gpus.iter().map(|gpu| gpu.bound.0).collect()
}

#[test]
fn a_pod_of_4_4_12_12_starts_on_two_gpus_of_16() {
    let mut ledger = node(&[16, 16]);
    let pod = admit(&mut ledger, "p", &[0..4, 4..8, 8..20, 20..32]);
    let mut of_gpus: BTreeMap<String, u32> = BTreeMap::new();
    for container in 0..4 {
        for (gpu, quanta) in bound(&mut ledger, &pod, container) {
            *of_gpus.entry(gpu).or_default() += quanta;
        }
    }
    assert_eq!(of_gpus.into_values().collect::<Vec<_>>(), [16, 16]);
}

#[test]
fn two_pods_of_7_and_9_start_at_once_on_two_gpus_of_16() {
    let mut ledger = node(&[16, 16]);
    let one = admit(&mut ledger, "one", &[0..7, 7..16]);
    let two = admit(&mut ledger, "two", &[16..23, 23..32]);
    for container in 0..2 {
        for pod in [&one, &two] {
            bound(&mut ledger, pod, container);
        }
    }
    assert_eq!(taken(&ledger), [16, 16]);
}

#[test]
fn a_pod_that_cannot_be_placed_whole_holds_nothing() {
    let mut ledger = node(&[16, 16]);
    let pod = admit(&mut ledger, "p", &[0..9, 9..18, 18..27]);
    let reason = waits(&mut ledger, &pod, 0);
    assert_eq!(
        reason,
        "waiting for 9 GiB, with 18 GiB for 2 more of the pod's containers, \
         together more than the healthy GPUs hold: largest free 16 GiB (GPU-0)"
    );
    assert_eq!(taken(&ledger), [0, 0]);
    let other = admit(&mut ledger, "other", std::slice::from_ref(&(27..32)));
    bound(&mut ledger, &other, 0);
}

#[test]
fn what_is_held_for_a_pod_outlives_the_agent_and_ends_with_the_pod() {
    let mut ledger = node(&[16, 16]);
    let pod = admit(&mut ledger, "p", &[0..7, 7..16]);
    let other = admit(&mut ledger, "other", std::slice::from_ref(&(16..32)));
    bound(&mut ledger, &pod, 0);
    let mut ledger = Ledger::restore(ledger.snapshot(), Quantum::Gib1, NOW).unwrap();
    assert_eq!(taken(&ledger), [16, 0]);
    bound(&mut ledger, &other, 0);
    bound(&mut ledger, &pod, 1);
    ledger.pod_gone(&pod.uid);
    assert_eq!(taken(&ledger), [0, 16]);
}

#[test]
fn what_is_held_is_given_up_when_the_kubelet_stays_away() {
    let mut ledger = node(&[16]);
    let first = admit(&mut ledger, "first", std::slice::from_ref(&(0..4)));
    bound(&mut ledger, &first, 0);
    let pod = admit(&mut ledger, "p", &[4..11, 11..20]);
    let Answer::Wait(ticket, _) = start_at(&mut ledger, &pod, 0, NOW) else {
        panic!("12 are free");
    };
    ledger.stop_waiting(ticket, NOW);
    ledger.pod_gone(&first.uid);
    assert_eq!(ledger.advance(NOW), []);
    assert_eq!(taken(&ledger), [16], "both are held");
    ledger.advance(NOW + HOLD + Duration::from_secs(1));
    assert_eq!(taken(&ledger), [0]);
}

#[test]
fn init_containers_and_what_follows_them_are_not_added_up() {
    let mut ledger = node(&[16]);
    // An init container, a sidecar, and the main container, which has the tokens of the first.
    let pod = admit(&mut ledger, "p", &[0..8, 12..16, 0..12]);
    assert_eq!(bound(&mut ledger, &pod, 0), [("GPU-0".to_owned(), 8)]);
    assert_eq!(taken(&ledger), [16]);
    bound(&mut ledger, &pod, 1);
    assert_eq!(bound(&mut ledger, &pod, 2), [("GPU-0".to_owned(), 12)]);
    assert_eq!(taken(&ledger), [16]);
    // Its sandbox is made anew.
    for container in 0..3 {
        bound(&mut ledger, &pod, container);
    }
}

#[test]
fn what_is_spread_after_an_init_container_has_its_place_from_the_first() {
    let mut ledger = node(&[16, 16]);
    let pod = admit(&mut ledger, "p", &[0..20, 0..32]);
    let halves = |quanta| ["GPU-0", "GPU-1"].map(|gpu| (gpu.to_owned(), quanta));
    assert_eq!(bound(&mut ledger, &pod, 0), halves(10));
    assert_eq!(taken(&ledger), [16, 16]);
    assert_eq!(bound(&mut ledger, &pod, 1), halves(16));
}

#[test]
fn a_gpu_that_fails_takes_what_was_held_and_the_rest_is_placed_anew() {
    let mut ledger = node(&[16, 16, 16]);
    let pod = admit(&mut ledger, "p", &[0..12, 12..24]);
    assert_eq!(bound(&mut ledger, &pod, 0), [("GPU-0".to_owned(), 12)]);
    assert_eq!(taken(&ledger), [12, 12, 0]);
    ledger.set_gpus(listed(&[16, 16, 16]).map(|gpu| Gpu {
        health: match gpu.uuid.as_str() {
            "GPU-1" => Health::Unhealthy,
            _ => Health::Healthy,
        },
        ..gpu
    }));
    assert_eq!(bound(&mut ledger, &pod, 1), [("GPU-2".to_owned(), 12)]);
    assert_eq!(taken(&ledger), [12, 0, 12]);
}

#[test]
fn a_container_that_starts_again_takes_nothing_from_those_to_come() {
    let mut ledger = node(&[16, 16, 16]);
    let pod = admit(&mut ledger, "p", &[0..6, 6..18, 18..30]);
    bound(&mut ledger, &pod, 0);
    // The GPU of another container fails before that starts: both to come are placed anew.
    let lost = |ledger: &mut Ledger, lost: &str| {
        ledger.set_gpus(listed(&[16, 16, 16]).map(|gpu| Gpu {
            health: match gpu.uuid.as_str() == lost {
                true => Health::Unhealthy,
                false => Health::Healthy,
            },
            ..gpu
        }));
    };
    for gpu in ["GPU-0", "GPU-1"] {
        lost(&mut ledger, gpu);
    }
    lost(&mut ledger, "none");
    bound(&mut ledger, &pod, 1);
    let before = taken(&ledger);
    assert_eq!(before.iter().sum::<u32>(), 30);
    bound(&mut ledger, &pod, 0);
    assert_eq!(taken(&ledger), before);
}

#[test]
fn a_claim_on_mig_instances_waits_with_that_reason() {
    let mut ledger = Ledger::new(Quantum::Gib1);
    let instances = ["MIG-a", "MIG-b"].map(|uuid| Gpu {
        uuid: uuid.parse().unwrap(),
        capacity: Quanta(10),
        health: Health::Healthy,
    });
    ledger.set_gpus(instances);
    let large = admit(&mut ledger, "large", std::slice::from_ref(&(0..16)));
    assert_eq!(
        waits(&mut ledger, &large, 0),
        "waiting for 16 GiB, more than one MIG instance holds: no program uses two: \
         largest free 10 GiB (MIG-a)"
    );
    let pod = admit(&mut ledger, "p", std::slice::from_ref(&(16..20)));
    assert_eq!(bound(&mut ledger, &pod, 0), [("MIG-a".to_owned(), 4)]);
}
