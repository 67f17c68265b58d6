//! Computes the node's capacity and devices from its GPUs and configuration: pure.
//!
//! A device id stands for one quantum of the node, not of a GPU. Ids count from 0, so that they are
//! the same after every restart with the same GPUs. Devices become Unhealthy only when a GPU fails.
//! The highest ids do, for the kubelet only counts.

use std::collections::BTreeMap;

use bursar_crds::gpu_node::Reservation;

use bursar_config::ResourcesConfig;
use bursar_gpu::GpuState;
use bursar_kubelet::devices::{DeviceHealth, Devices, DevicesError, check_node_total};
use bursar_ledger as ledger;
use bursar_ledger::units::{Bytes, GpuUuid, Quanta, Resource};

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
            pod: order.waiter.parse().ok()?,
            quanta: Quanta(u32::try_from(order.quanta).ok()?),
        };
        Some((order.gpu.parse().ok()?, reservation))
    };
    orders.iter().filter_map(as_ledgers).collect()
}

/// The node's managed memory in whole quanta.
pub fn managed_capacity(config: &ResourcesConfig) -> Quanta {
    config.managed_capacity.whole_quanta(config.quantum)
}

/// The devices to advertise: device memory, then managed memory.
///
/// # Errors
/// [`DevicesError::TooManyTokens`] where both together exceed the kubelet's limit.
pub fn devices(gpus: &[GpuState], config: &ResourcesConfig) -> Result<[Devices; 2], DevicesError> {
    let total = total_quanta(gpus.iter(), config);
    let healthy = total_quanta(
        gpus.iter().filter(|state| state.health.is_healthy()),
        config,
    );
    let managed = managed_capacity(config).0 as usize;
    check_node_total([total, managed])?;
    Ok([
        Devices::new(Resource::DeviceMemory, device_health(total, healthy))?,
        Devices::new(Resource::ManagedMemory, device_health(managed, managed))?,
    ])
}

fn device_health(total: usize, healthy: usize) -> Vec<DeviceHealth> {
    let health = |index| {
        if index < healthy {
            DeviceHealth::Healthy
        } else {
            DeviceHealth::Unhealthy
        }
    };
    (0..total).map(health).collect()
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
    use bursar_ledger::units::Quantum;

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
        }
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
        let count = |gpus: &[GpuState]| {
            devices(gpus, &config).map(|[device, _]| (device.len(), device.healthy_count()))
        };
        let well = [
            gpu("GPU-a", Bytes::gib(16), Health::Healthy),
            gpu("GPU-b", Bytes::gib(8), Health::Healthy),
        ];
        let sick = [
            gpu("GPU-a", Bytes::gib(16), LOST),
            gpu("GPU-b", Bytes::gib(8), Health::Healthy),
        ];
        assert_eq!(count(&well), Ok((24, 24)));
        assert_eq!(count(&sick), Ok((24, 8)));
        let message = devices(&sick, &config).unwrap()[0].to_message();
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
    fn both_resources_together_stay_within_the_kubelet_limit() {
        let gpus = [gpu("GPU-a", Bytes::gib(1_000), Health::Healthy)];
        let with = |managed| devices(&gpus, &config(Quantum::Mib256, managed, Bytes::ZERO));
        assert!(with(Bytes::gib(24)).is_ok());
        assert_eq!(
            with(Bytes::gib(25)),
            Err(DevicesError::TooManyTokens { tokens: 4_100 })
        );
    }

    #[test]
    fn managed_memory_is_off_without_a_capacity() {
        let [_, managed] = devices(&[], &config(Quantum::Gib1, Bytes::ZERO, Bytes::ZERO)).unwrap();
        assert!(managed.is_empty());
    }
}
