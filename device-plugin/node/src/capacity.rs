//! Computes the node's capacity and devices from its GPUs and configuration: pure.
//!
//! A device id stands for one quantum of the node, not of a GPU. Ids count from 0, so that they are
//! the same after every restart with the same GPUs. Devices become Unhealthy only when a GPU fails.
//! The kubelet only counts them, but fails a pod for ever if it admits the pod again and an id of
//! it is Unhealthy. So the ids of containers on healthy GPUs become Unhealthy last.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use bursar_crds::gpu_node::Reservation;
use bursar_crds::resources::WHOLE_GPU;

use bursar_config::ResourcesConfig;
use bursar_gpu::GpuState;
use bursar_gpu::uvm::UvmModule;
use bursar_kubelet::devices::{DeviceHealth, Devices, DevicesError, check_node_total};
use bursar_ledger as ledger;
use bursar_ledger::units::{Bytes, GpuUuid, MAX_DEVICE_IDS, Quanta, Resource};
use bursar_ledger::{Ledger, Placement};

/// The GPUs for the ledger: capacity in whole quanta, less the reserve.
pub(crate) fn ledger_gpus(gpus: &[GpuState], config: &ResourcesConfig) -> Vec<ledger::Gpu> {
    let as_ledgers = |state: &GpuState| ledger::Gpu {
        uuid: state.gpu.uuid.clone(),
        capacity: gpu_capacity(state, config),
        health: if state.health.is_healthy() {
            ledger::Health::Healthy
        } else {
            ledger::Health::Unhealthy
        },
    };
    gpus.iter().map(as_ledgers).collect()
}

/// The reservations for the ledger, without those whose GPU or pod id is malformed.
pub(crate) fn parse_reservations(orders: &[Reservation]) -> BTreeMap<GpuUuid, ledger::Reservation> {
    let as_ledgers = |order: &Reservation| {
        let reservation = ledger::Reservation {
            pod: order.pod_uid.parse().ok()?,
            quanta: Quanta(u32::try_from(order.quanta).ok()?),
        };
        Some((order.gpu.parse().ok()?, reservation))
    };
    orders.iter().filter_map(as_ledgers).collect()
}

/// The resources that the node offers. It offers managed memory only while the driver can always
/// evict it, and the pod that owns it pays for its host memory.
pub(crate) fn offered(config: &ResourcesConfig, module: &UvmModule) -> ResourcesConfig {
    ResourcesConfig {
        managed_capacity: match module.check_eviction() {
            Ok(()) => config.managed_capacity,
            Err(_) => Bytes::ZERO,
        },
        ..*config
    }
}

/// The node's managed memory in whole quanta.
pub(crate) fn managed_capacity(config: &ResourcesConfig) -> Quanta {
    config.managed_capacity.whole_quanta(config.quantum)
}

/// The devices to advertise: device memory, managed memory, then compute time. Of devices that are
/// alike, those that were Unhealthy in `before` stay so.
///
/// # Errors
/// [`DevicesError::TooManyDeviceIds`] where both together exceed the kubelet's limit.
pub fn devices(
    gpus: &[GpuState],
    config: &ResourcesConfig,
    ledger: &Ledger,
    before: &Devices,
) -> Result<[Devices; 3], DevicesError> {
    let total = total_quanta(gpus.iter(), config);
    let well = || gpus.iter().filter(|state| state.health.is_healthy());
    let surplus = total - total_quanta(well(), config);
    let managed = managed_devices(managed_capacity(config).0 as usize, ledger);
    check_node_total([total, managed.len()])?;
    let healthy_gpus = well().map(|state| &state.gpu.uuid).collect();
    let holders = id_holders(ledger, &healthy_gpus);
    let was_healthy = |index: usize| before.health().get(index) != Some(&DeviceHealth::Unhealthy);
    let mut order: Vec<usize> = (0..total).collect();
    order.sort_by_cached_key(|&index| (holders.get(&index), was_healthy(index), Reverse(index)));
    let mut health = vec![DeviceHealth::Healthy; total];
    for &index in order.iter().take(surplus) {
        health[index] = DeviceHealth::Unhealthy;
    }
    Ok([
        Devices::new(Resource::DeviceMemory, health)?,
        Devices::new(Resource::ManagedMemory, managed)?,
        Devices::new(Resource::Compute, compute_devices(gpus, config))?,
    ])
}

/// The hundredths of the node's GPUs. Those of a GPU that failed stay: its memory keeps pods away,
/// and a running container must not lose an id.
fn compute_devices(gpus: &[GpuState], config: &ResourcesConfig) -> Vec<DeviceHealth> {
    if config.compute_round.is_none() {
        return Vec::new();
    }
    let gpus = gpus.iter().filter(|state| !state.gpu.uuid.is_mig()).count();
    let count = (gpus * usize::from(WHOLE_GPU)).min(MAX_DEVICE_IDS.into());
    vec![DeviceHealth::Healthy; count]
}

/// The devices of managed memory. Those of containers stay Healthy beyond the capacity, which may
/// have become less: they keep their memory.
fn managed_devices(capacity: usize, ledger: &Ledger) -> Vec<DeviceHealth> {
    let held = ledger.held_device_ids(Resource::ManagedMemory);
    let held: BTreeSet<usize> = held
        .flat_map(|(device_ids, _)| device_ids.indexes().map(usize::from))
        .collect();
    let count = held.last().map_or(0, |last| last + 1).max(capacity);
    let others = (0..count).filter(|index| !held.contains(index));
    let free: BTreeSet<usize> = others.take(capacity.saturating_sub(held.len())).collect();
    let health = |index| match held.contains(&index) || free.contains(&index) {
        true => DeviceHealth::Healthy,
        false => DeviceHealth::Unhealthy,
    };
    (0..count).map(health).collect()
}

/// The holder of a device id, in the order in which ids become Unhealthy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum IdHolder {
    /// Containers with memory on a GPU that failed.
    OnFailedGpu,
    /// A container with memory on healthy GPUs only, or without memory yet.
    Well,
}

/// The holder of each device id of device memory that the kubelet has given to a container.
fn id_holders(ledger: &Ledger, healthy_gpus: &BTreeSet<&GpuUuid>) -> BTreeMap<usize, IdHolder> {
    let mut holders = BTreeMap::new();
    for (device_ids, placement) in ledger.held_device_ids(Resource::DeviceMemory) {
        let holder = match placement {
            Some(Placement::Device(shares))
                if !shares.iter().all(|share| healthy_gpus.contains(&share.gpu)) =>
            {
                IdHolder::OnFailedGpu
            }
            _ => IdHolder::Well,
        };
        for index in device_ids.indexes() {
            let known = holders.entry(usize::from(index)).or_insert(holder);
            *known = holder.max(*known);
        }
    }
    holders
}

fn total_quanta<'a>(gpus: impl Iterator<Item = &'a GpuState>, config: &ResourcesConfig) -> usize {
    gpus.map(|state| gpu_capacity(state, config).0 as usize)
        .sum()
}

fn gpu_capacity(state: &GpuState, config: &ResourcesConfig) -> Quanta {
    Bytes(state.gpu.memory.0.saturating_sub(config.reserved.0)).whole_quanta(config.quantum)
}

#[cfg(test)]
mod tests {
    use bursar_gpu::Gpu;
    use bursar_gpu::health::{Health, PersistedHealth, UnhealthyReason};
    use bursar_ledger::units::{AllocationId, DeviceIdSet, Quantum};

    use super::*;

    fn gpu(name: &str, memory: Bytes, health: Health) -> GpuState {
        let gpu = Gpu {
            memory,
            ..Gpu::with_uuid(name)
        };
        GpuState {
            gpu,
            health,
            persisted: PersistedHealth::default(),
        }
    }

    fn config(quantum: Quantum, managed_capacity: Bytes, reserved: Bytes) -> ResourcesConfig {
        ResourcesConfig {
            quantum,
            managed_capacity,
            reserved,
            compute_round: Some(std::time::Duration::from_millis(4)),
        }
    }

    fn no_claims() -> Ledger {
        Ledger::new(Quantum::Gib1)
    }

    fn no_devices() -> Devices {
        Devices::new(Resource::DeviceMemory, Vec::new()).unwrap()
    }

    const LOST: Health = Health::Unhealthy(UnhealthyReason::Lost);

    #[test]
    fn gpu_capacity_is_whole_quanta_less_the_reserve() {
        let gpus = [gpu("GPU-a", Bytes::mib(16_000), Health::Healthy)];
        let offered = |reserved| {
            ledger_gpus(&gpus, &config(Quantum::Gib1, Bytes::ZERO, reserved))[0].capacity
        };
        assert_eq!(offered(Bytes::ZERO), Quanta(15));
        assert_eq!(offered(Bytes::gib(1)), Quanta(14));
        assert_eq!(offered(Bytes::gib(64)), Quanta::ZERO);
    }

    #[test]
    fn lost_gpu_makes_the_highest_device_ids_unhealthy() {
        let config = config(Quantum::Gib1, Bytes::ZERO, Bytes::ZERO);
        let offered = |gpus: &[GpuState]| devices(gpus, &config, &no_claims(), &no_devices());
        let count = |gpus: &[GpuState]| {
            offered(gpus).map(|[device, ..]| (device.len(), device.healthy_count()))
        };
        let well = [
            gpu("GPU-a", Bytes::gib(16), Health::Healthy),
            gpu("GPU-b", Bytes::gib(8), Health::Healthy),
        ];
        let with_lost = [
            gpu("GPU-a", Bytes::gib(16), LOST),
            gpu("GPU-b", Bytes::gib(8), Health::Healthy),
        ];
        assert_eq!(count(&well), Ok((24, 24)));
        assert_eq!(count(&with_lost), Ok((24, 8)));
        let [_, _, compute] = offered(&with_lost).unwrap();
        assert_eq!((compute.len(), compute.healthy_count()), (200, 200));
        let message = offered(&with_lost).unwrap()[0].to_message();
        assert_eq!(
            (
                message.devices[7].id.as_str(),
                message.devices[7].health.as_str()
            ),
            ("m-0007", "Healthy")
        );
        assert_eq!(
            (
                message.devices[8].id.as_str(),
                message.devices[8].health.as_str()
            ),
            ("m-0008", "Unhealthy")
        );
    }

    #[test]
    fn ids_on_healthy_gpus_become_unhealthy_last() {
        let config = config(Quantum::Gib1, Bytes::ZERO, Bytes::ZERO);
        let gpus = [
            gpu("GPU-a", Bytes::gib(4), LOST),
            gpu("GPU-b", Bytes::gib(4), Health::Healthy),
        ];
        let mut ledger = no_claims();
        let held = |range| DeviceIdSet::from_indexes(range).unwrap();
        for (number, gpu, range) in [(1, "GPU-a", 0..2), (2, "GPU-b", 6..7)] {
            let share = ledger::Share {
                gpu: gpu.parse().unwrap(),
                quanta: held(range.clone()).quanta(),
            };
            ledger.restore_binding(
                AllocationId::from_bits(number),
                Resource::DeviceMemory,
                held(range),
                format!("pod-{number}").parse().unwrap(),
                Placement::Device(vec![share]),
            );
        }
        let pending = AllocationId::from_bits(3);
        ledger.add_pending(
            pending,
            Resource::DeviceMemory,
            held(7..8),
            ledger::BootTime(0),
        );
        let unhealthy = |ledger: &Ledger, before: &Devices| {
            let [device, ..] = devices(&gpus, &config, ledger, before).unwrap();
            let health = device.health().iter().enumerate();
            let unhealthy = health.filter(|(_, health)| **health == DeviceHealth::Unhealthy);
            let indexes: Vec<usize> = unhealthy.map(|(index, _)| index).collect();
            (indexes, device)
        };
        let (indexes, before) = unhealthy(&ledger, &no_devices());
        assert_eq!(indexes, [2, 3, 4, 5]);
        ledger.release_pod(&"pod-2".parse().unwrap());
        assert_eq!(unhealthy(&ledger, &before).0, indexes, "id 6 is offered");
        ledger.add_pending(
            AllocationId::from_bits(4),
            Resource::DeviceMemory,
            held(2..6),
            ledger::BootTime(0),
        );
        assert_eq!(unhealthy(&ledger, &before).0, [0, 1, 5, 6]);
    }

    #[test]
    fn both_resources_together_stay_within_the_kubelet_limit() {
        let gpus = [gpu("GPU-a", Bytes::gib(1_000), Health::Healthy)];
        let offered_with = |managed| {
            let config = config(Quantum::Mib256, managed, Bytes::ZERO);
            devices(&gpus, &config, &no_claims(), &no_devices())
        };
        assert!(offered_with(Bytes::gib(24)).is_ok());
        assert_eq!(
            offered_with(Bytes::gib(25)),
            Err(DevicesError::TooManyDeviceIds { count: 4_100 })
        );
    }

    #[test]
    fn managed_memory_is_offered_only_while_it_can_be_evicted() {
        let configured = config(Quantum::Gib1, Bytes::gib(8), Bytes::gib(1));
        let module = |oversubscription| UvmModule {
            oversubscription,
            kernel: Some((6, 8)),
            ..UvmModule::default()
        };
        let offered = |oversubscription| offered(&configured, &module(oversubscription));
        assert_eq!(offered(Some(true)), configured);
        let none = config(Quantum::Gib1, Bytes::ZERO, Bytes::gib(1));
        assert_eq!([offered(Some(false)), offered(None)], [none, none]);
        let without_concurrent_access = UvmModule {
            not_concurrent: ["GPU-a".parse().unwrap()].into(),
            ..module(Some(true))
        };
        assert_eq!(
            super::offered(&configured, &without_concurrent_access),
            none
        );
    }

    #[test]
    fn containers_keep_their_managed_ids_when_none_is_offered() {
        let mut ledger = no_claims();
        let id = AllocationId::from_bits(1);
        let held = DeviceIdSet::from_indexes(2..4).unwrap();
        ledger.add_pending(id, Resource::ManagedMemory, held, ledger::BootTime(0));
        let healthy = |capacity| {
            let health = managed_devices(capacity, &ledger).into_iter().enumerate();
            let healthy = health.filter(|(_, health)| *health == DeviceHealth::Healthy);
            healthy.map(|(index, _)| index).collect::<Vec<_>>()
        };
        assert_eq!(healthy(5), [0, 1, 2, 3, 4]);
        assert_eq!(healthy(3), [0, 2, 3]);
        assert_eq!(healthy(0), [2, 3]);
        assert!(managed_devices(0, &no_claims()).is_empty());
    }

    #[test]
    fn managed_memory_is_off_without_a_capacity() {
        let config = config(Quantum::Gib1, Bytes::ZERO, Bytes::ZERO);
        let [_, managed, _] = devices(&[], &config, &no_claims(), &no_devices()).unwrap();
        assert!(managed.is_empty());
    }
}
