//! Models the kubelet: the device ids of a pod's containers, and the order in which they start.

use std::collections::{BTreeSet, VecDeque};
use std::num::NonZeroU16;
use std::time::Duration;

use bursar_ledger::units::{AllocationId, DeviceIdSet, PodUid, Quanta, Quantum, Resource};
use bursar_ledger::{
    AGING_AFTER, BindOutcome, BindRequest, BootTime, Gpu, GpuSpread, Health, Ledger, Priority,
};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Init,
    Sidecar,
    App,
}

#[derive(Clone, Debug)]
pub(crate) struct Container {
    pub(crate) id: AllocationId,
    pub(crate) resource: Resource,
    pub(crate) device_ids: DeviceIdSet,
}

#[derive(Clone, Debug)]
pub(crate) struct Pod {
    pub(crate) uid: PodUid,
    pub(crate) priority: Priority,
    pub(crate) spread: GpuSpread,
    pub(crate) containers: Vec<Container>,
    /// The number of containers that the kubelet has begun to start. They start in order.
    pub(crate) started: usize,
    /// Whether the kubelet has given its device ids away. Its processes may still run.
    pub(crate) deleted: bool,
}

impl Pod {
    pub(crate) fn bind_request(&self, container: usize) -> BindRequest {
        let Container {
            resource,
            device_ids,
            ..
        } = &self.containers[container];
        BindRequest {
            resource: *resource,
            device_ids: device_ids.clone(),
            containers: self
                .containers
                .iter()
                .filter(|container| container.resource == *resource)
                .map(|container| container.device_ids.clone())
                .collect(),
            pod: self.uid.clone(),
            spread: self.spread,
            priority: self.priority,
        }
    }

    pub(crate) fn device_ids(&self, resource: Resource) -> impl Iterator<Item = u16> {
        self.containers
            .iter()
            .filter(move |container| container.resource == resource)
            .flat_map(|container| container.device_ids.indexes())
    }
}

pub(crate) fn uid(number: u64) -> PodUid {
    format!("p{number}").parse().unwrap()
}

/// A pod's containers with device ids as `devicemanager.Manager` assigns them: from those of the
/// pod's finished init containers first, then free ones, in no order. None if too few are free.
pub(crate) fn admit(
    random: &mut StdRng,
    number: u64,
    resource: Resource,
    sizes: &[(Kind, usize)],
    free: &mut BTreeSet<u16>,
) -> Option<Vec<Container>> {
    let mut pool: Vec<u16> = free.iter().copied().collect();
    pool.shuffle(random);
    let mut reusable: VecDeque<u16> = VecDeque::new();
    let mut containers = Vec::new();
    for (i, &(kind, size)) in sizes.iter().enumerate() {
        let reused = size.min(reusable.len());
        let mut device_ids: Vec<u16> = reusable.drain(..reused).collect();
        let fresh = size - reused;
        if pool.len() < fresh {
            return None;
        }
        device_ids.extend(pool.drain(..fresh));
        if kind == Kind::Init {
            reusable.extend(&device_ids);
        }
        if random.random_bool(0.1) {
            device_ids.push(device_ids[0]);
        }
        containers.push(Container {
            id: AllocationId::from_bits(number * 16 + i as u64),
            resource,
            device_ids: DeviceIdSet::from_indexes(device_ids).unwrap(),
        });
    }
    for container in &containers {
        for device_id in container.device_ids.indexes() {
            free.remove(&device_id);
        }
    }
    Some(containers)
}

pub(crate) fn random_sizes(random: &mut StdRng, largest: usize) -> Vec<(Kind, usize)> {
    let mut sizes = Vec::new();
    let mut some = |random: &mut StdRng, kind, weights: &[usize]| {
        for _ in 0..weights[random.random_range(0..weights.len())] {
            sizes.push((kind, random.random_range(1..=largest)));
        }
    };
    some(random, Kind::Init, &[0, 0, 0, 1, 2]);
    some(random, Kind::Sidecar, &[0, 0, 0, 1]);
    some(random, Kind::App, &[1, 1, 1, 2]);
    sizes
}

pub(crate) fn spread_over(gpus: u16) -> GpuSpread {
    GpuSpread {
        gpus: NonZeroU16::new(gpus).unwrap(),
    }
}

/// Sends small pods that never leave room for a large one on two GPUs of 16 quanta.
///
/// A small pod starts whenever device ids are free. The large pod must have its GPU once it has
/// waited for `AGING_AFTER` and every small pod of that time has ended.
pub(crate) fn stream_against_a_large_pod(seed: u64) {
    const LIFE_S: u64 = 20;
    let mut random = StdRng::seed_from_u64(seed);
    let mut ledger = Ledger::new(Quantum::Gib1);
    ledger.set_gpus(["GPU-a", "GPU-b"].map(|name| Gpu {
        uuid: name.parse().unwrap(),
        capacity: Quanta(16),
        health: Health::Healthy,
    }));
    let mut free: BTreeSet<u16> = (0..32).collect();
    let mut pods: Vec<(Pod, Option<u64>)> = Vec::new();
    let large = uid(5);
    for second in 0..=AGING_AFTER.as_secs() + 3 * LIFE_S {
        let now = BootTime(second * 1000);
        pods.retain(|(pod, ends)| {
            let over = *ends == Some(second);
            if over {
                ledger.release_pod(&pod.uid);
                free.extend(pod.device_ids(Resource::DeviceMemory));
            }
            !over
        });
        for _ in 0..8 {
            let number = pods
                .last()
                .map_or(0, |(pod, _)| pod.containers[0].id_number() + 1);
            let size = if number == 5 {
                16
            } else {
                random.random_range(1..=6)
            };
            let device = Resource::DeviceMemory;
            let sizes = [(Kind::App, size)];
            let Some(containers) = admit(&mut random, number, device, &sizes, &mut free) else {
                break;
            };
            let Container { id, device_ids, .. } = containers[0].clone();
            ledger.add_pending(id, device, device_ids, now);
            let pod = Pod {
                uid: uid(number),
                priority: Priority(0),
                spread: GpuSpread::default(),
                containers,
                started: 1,
                deleted: false,
            };
            pods.push((pod, None));
        }
        for (pod, ends) in &mut pods {
            if ends.is_none()
                && matches!(
                    ledger.bind(pod.bind_request(0), now).unwrap().outcome,
                    BindOutcome::Bound(_)
                )
            {
                if pod.uid == large {
                    return;
                }
                *ends = Some(second + random.random_range(1..=LIFE_S));
            }
        }
        ledger.advance(now + Duration::from_millis(1));
    }
    panic!("seed {seed}: the large pod starved");
}

impl Container {
    fn id_number(&self) -> u64 {
        u64::from_str_radix(&self.id.to_string(), 16).unwrap() / 16
    }
}
