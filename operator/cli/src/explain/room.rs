//! Compares a container's request with the GPUs of a node, as the agent places it.

use bursar_crds::GpuNode;
use bursar_crds::gpu_node::GpuStatus;
use bursar_crds::shares::{GpuCapacity, split_quanta};

use super::gpu::unusable;
use crate::objects::Pod;
use crate::show::{bytes, quantum_bytes};
use crate::snapshot::Snapshot;

/// The needs of the largest container of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    /// The device memory in bytes.
    pub(super) bytes: u64,
    /// The least number of GPUs that the container is spread over.
    pub(super) gpus: u16,
}

/// Whether a node has room for a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// On this many GPUs.
    Now(usize),
    /// Once as much is free on each of this many GPUs, or GPUs that are away come back.
    Later(usize),
    /// The node has only this many GPUs, and the container is to be spread over more.
    TooFewGpus(usize),
    /// The node's GPUs are too small, also without pods.
    TooSmall,
}

impl Wanted {
    pub(super) fn of(pod: &Pod) -> Self {
        let requests = pod.gpu_containers().map(|(_, request)| request.bytes());
        let gpus = &pod.metadata.annotations.gpus;
        Self {
            bytes: requests.max().unwrap_or(0),
            gpus: gpus.parse().map_or(1, |gpus: u16| gpus.max(1)),
        }
    }

    /// Whether the container is spread over several GPUs of each node that can hold it.
    pub(super) fn is_spread(self, snapshot: &Snapshot) -> bool {
        let of_nodes = snapshot.gpu_nodes.iter().map(|node| self.room(node));
        let mut held = of_nodes.filter_map(|room| match room {
            Room::Now(gpus) | Room::Later(gpus) => Some(gpus),
            Room::TooFewGpus(_) | Room::TooSmall => None,
        });
        self.gpus > 1 || held.next().is_some_and(|gpus| gpus > 1) && held.all(|gpus| gpus > 1)
    }

    /// The room that a node has for the container.
    pub(super) fn room(self, node: &GpuNode) -> Room {
        let gpus = node.status.as_ref().map_or(&[][..], |status| &status.gpus);
        let quantum = quantum_bytes(node).max(1);
        let count = |quanta: u64| u32::try_from(quanta).unwrap_or(u32::MAX);
        let quanta = count(self.bytes.div_ceil(quantum));
        let offers = |amount: &dyn Fn(&GpuStatus) -> u32| -> Vec<GpuCapacity> {
            let offer = |gpu: &GpuStatus| GpuCapacity {
                quanta: amount(gpu),
                is_combinable: !gpu.uuid.starts_with("MIG-"),
            };
            gpus.iter().map(offer).collect()
        };
        let healthy = |of: i32, gpu: &GpuStatus| match unusable(node, gpu) {
            None => u32::try_from(of).unwrap_or(0),
            Some(_) => 0,
        };
        let capacities = offers(&|gpu| healthy(gpu.capacity, gpu));
        if let Some(shares) = split_quanta(&capacities, quanta, self.gpus) {
            let free = offers(&|gpu| healthy(gpu.largest_free, gpu));
            return match fits(&free, &shares) {
                true => Room::Now(shares.len()),
                false => Room::Later(shares.len()),
            };
        }
        let with_lost = offers(&|gpu| match unusable(node, gpu) {
            None => healthy(gpu.capacity, gpu),
            Some(_) => count(bytes(&gpu.memory) / quantum),
        });
        match split_quanta(&with_lost, quanta, self.gpus) {
            Some(shares) => Room::Later(shares.len()),
            None if self.gpus > 1 && gpus.len() < usize::from(self.gpus) => {
                Room::TooFewGpus(gpus.len())
            }
            None => Room::TooSmall,
        }
    }
}

/// The free memory of a node's healthy GPUs together, in bytes.
pub(super) fn free_bytes(node: &GpuNode) -> u64 {
    let gpus = node.status.as_ref().map_or(&[][..], |status| &status.gpus);
    let healthy = gpus.iter().filter(|gpu| unusable(node, gpu).is_none());
    let free = healthy.map(|gpu| u64::try_from(gpu.largest_free).unwrap_or(0));
    free.fold(0, u64::saturating_add)
        .saturating_mul(quantum_bytes(node))
}

/// Whether each share, largest first, fits on a GPU of its own.
fn fits(free: &[GpuCapacity], shares: &[u32]) -> bool {
    let is_one = shares.len() == 1;
    let usable = free.iter().filter(|gpu| is_one || gpu.is_combinable);
    let mut free: Vec<u32> = usable.map(|gpu| gpu.quanta).collect();
    free.sort_unstable_by(|a, b| b.cmp(a));
    shares.len() <= free.len() && shares.iter().zip(free).all(|(share, free)| *share <= free)
}
