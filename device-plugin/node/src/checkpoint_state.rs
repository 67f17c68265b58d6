//! Defines the content of the node's checkpoint.

use std::collections::BTreeMap;

use bursar_ledger::Snapshot;
use bursar_ledger::units::AllocationId;
use serde::{Deserialize, Serialize};

/// The state that an agent leaves to the next agent of the same boot.
///
/// Where the checkpoint is missing or malformed, the next agent restores bindings from the CDI
/// files and the kubelet's checkpoint. An agent ignores fields that it does not know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct NodeCheckpoint {
    /// The kernel's boot id. Times and bindings are void after a reboot, so an agent of another
    /// boot ignores the checkpoint.
    pub boot: String,
    /// The ledger's state.
    pub ledger: Snapshot,
    /// The containers' names, as far as they are known. The file keeps its first name for them.
    #[serde(rename = "holders")]
    pub container_names: BTreeMap<AllocationId, ContainerName>,
}

/// The names of an allocation's container and pod, for messages and metrics.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ContainerName {
    /// The container's name.
    pub container: String,
    /// The pod's namespace and name, if the kubelet has reported them.
    pub pod: Option<PodName>,
}

impl ContainerName {
    /// The namespace, pod and container of a name; empty where the agent does not know them.
    pub fn parts(name: Option<&ContainerName>) -> [String; 3] {
        let pod = name.and_then(|name| name.pod.as_ref());
        [
            pod.map(|pod| pod.namespace.clone()).unwrap_or_default(),
            pod.map(|pod| pod.name.clone()).unwrap_or_default(),
            name.map(|name| name.container.clone()).unwrap_or_default(),
        ]
    }
}

/// A pod's namespace and name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct PodName {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
}

impl std::fmt::Display for PodName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

#[cfg(test)]
mod tests {
    use bursar_host::checkpoint::Checkpoint;
    use bursar_ledger::units::{Bytes, DeviceIdSet, LeaseId, Quanta, Quantum, Resource};
    use bursar_ledger::{
        BindOutcome, BindRequest, BootTime, Gpu, GpuSpread, Health, Ledger, Priority, Reservation,
    };
    use bursar_protocol::testing::{assert_keeps_all, for_each_record};
    use serde_json::Value;

    use super::*;

    const NOW: BootTime = BootTime(5_000);

    /// Starts the first of a pod's containers.
    fn bind(ledger: &mut Ledger, id: u64, pod: &str, on: Resource, ids: &[&str]) -> BindOutcome {
        let containers: Vec<DeviceIdSet> = ids.iter().map(|ids| ids.parse().unwrap()).collect();
        let device_ids = containers[0].clone();
        ledger.add_pending(AllocationId::from_bits(id), on, device_ids.clone(), NOW);
        let request = BindRequest {
            resource: on,
            device_ids,
            containers,
            pod: pod.parse().unwrap(),
            spread: GpuSpread::default(),
            priority: Priority(7),
        };
        ledger.bind(request, NOW).unwrap().outcome
    }

    /// A checkpoint with claims in several states.
    fn sample() -> NodeCheckpoint {
        let mut ledger = Ledger::new(Quantum::Gib1);
        ledger.set_gpus(
            [("GPU-a", Health::Healthy), ("GPU-b", Health::Unhealthy)].map(|(uuid, health)| Gpu {
                uuid: uuid.parse().unwrap(),
                capacity: Quanta(16),
                health,
            }),
        );
        ledger.set_managed_capacity(Quanta(8));
        ledger.set_namespace(&"bound".parse().unwrap(), "team-a");
        let (device, managed) = (Resource::DeviceMemory, Resource::ManagedMemory);
        let bound = bind(&mut ledger, 1, "bound", device, &["0-6", "7-8"]);
        assert!(matches!(bound, BindOutcome::Bound(_)));
        bind(&mut ledger, 2, "managed", managed, &["0-3"]);
        let queued = bind(&mut ledger, 3, "ended-call", device, &["10-25"]);
        let BindOutcome::Queued(wait, _) = queued else {
            panic!("{queued:?}");
        };
        ledger.stop_waiting(wait, BootTime(6_000));
        bind(&mut ledger, 4, "queued", device, &["30-45"]);
        let booked = "50-51".parse().unwrap();
        ledger.add_pending(AllocationId::from_bits(5), device, booked, NOW);
        let gpu = |uuid: &str| uuid.parse::<bursar_ledger::units::GpuUuid>().unwrap();
        ledger.add_unreclaimed(gpu("GPU-b"), Bytes::gib(2), NOW);
        ledger.set_withheld([(gpu("GPU-a"), Bytes::gib(1))].into());
        let leases = [(LeaseId(9), Bytes::mib(512))].into();
        ledger.set_orphaned_leases([(gpu("GPU-b"), leases)].into(), NOW);
        let reservation = Reservation {
            pod: "queued".parse().unwrap(),
            quanta: Quanta(3),
        };
        ledger.set_reservations([(gpu("GPU-a"), reservation)].into());
        let name = ContainerName {
            container: "main".to_owned(),
            pod: Some(PodName {
                namespace: "team-a".to_owned(),
                name: "trainer-0".to_owned(),
            }),
        };
        NodeCheckpoint {
            boot: "6f5902ac-0000-4000-8000-000000000001".to_owned(),
            ledger: ledger.snapshot(),
            container_names: [(AllocationId::from_bits(1), name)].into(),
        }
    }

    /// Compares with the golden text alone, because a later ledger may decide otherwise than the
    /// one that wrote it.
    #[test]
    fn golden_checkpoint_is_read_without_a_loss() {
        let folder = tempfile::tempdir().unwrap();
        let file = Checkpoint::new(folder.path().join("checkpoint.json"));
        let today = || {
            file.save(&sample()).unwrap();
            std::fs::read(file.path()).unwrap()
        };
        for_each_record("checkpoint.json", today, |golden| {
            std::fs::write(file.path(), golden).unwrap();
            let read: NodeCheckpoint = file.load().unwrap().unwrap();
            let text: Value = file.load().unwrap().unwrap();
            assert_keeps_all(&serde_json::to_value(&read).unwrap(), &text);
            let ledger = Ledger::restore(read.ledger, Quantum::Gib1, NOW).unwrap();
            for id in 1..=5 {
                assert!(ledger.has_allocation(AllocationId::from_bits(id)), "{id}");
            }
        });
    }
}
