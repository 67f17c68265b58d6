//! Builds reports for tests.

use bursar_crds::conditions::{ConditionUpdate, gpu_node as names};
use bursar_crds::gpu_node::{Fault, FaultContainer, FaultKind, GpuContainer, GpuState};
use bursar_gpu::Gpu;
use bursar_ledger::units::{Bytes, Quanta, Quantum};
use bursar_ledger::{GpuView, Health};
use bursar_retained::tokens::NodePublicKey;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::report::{GpuHealth, GpuReport, MemoryReport, NodeReport};

/// The time that many seconds after the epoch.
pub fn at(second: i64) -> Time {
    Time(jiff::Timestamp::from_second(second).expect("a valid value"))
}

/// Two idle GPUs of 16 GiB.
pub fn report() -> NodeReport {
    NodeReport {
        boot_id: "b007".into(),
        driver_version: Some("580.1".into()),
        token_key: NodePublicKey([7; 32]),
        quantum: Quantum::Gib1,
        device_memory: MemoryReport {
            allocatable: Quanta(32),
            free: Quanta(32),
            largest_free: Quanta(16),
        },
        managed_memory: MemoryReport::default(),
        gpus: (0..2).map(gpu).collect(),
        pod_names: std::collections::BTreeMap::new(),
        waiting: Vec::new(),
        not_enforced: Vec::new(),
        faults: Vec::new(),
        containers: Vec::new(),
        retained_count: 0,
        retained: Vec::new(),
        namespaces: Vec::new(),
        applied_spec: crate::quota_overrides::AppliedSpec::default(),
        conditions: vec![ConditionUpdate::new(
            names::GPUS_FOUND,
            true,
            names::OK,
            "2 GPUs",
        )],
    }
}

/// A container of a pod whose names are not known.
pub fn container(pod_uid: &str) -> GpuContainer {
    GpuContainer {
        pod_uid: pod_uid.to_owned(),
        namespace: String::new(),
        pod: String::new(),
        container: "main".into(),
        process_generation: 1,
        restarts: 0,
        restarts_in_place: 0,
        last_fault: None,
    }
}

/// An open fault of the first GPU, or of the context of a process image in container "main" of pod
/// "a", seen that many seconds after the epoch.
pub fn fault(id: &str, kind: FaultKind, seconds: i64) -> Fault {
    Fault {
        id: id.to_owned(),
        kind,
        gpu: "GPU-00000000".into(),
        gpu_generation: 3,
        cuda_error: None,
        xid: Some(79),
        action: None,
        container: (kind == FaultKind::Context).then(|| FaultContainer {
            pod_uid: "a".into(),
            namespace: "team".into(),
            pod: "a".into(),
            container: "main".into(),
            process_generation: seconds,
        }),
        time: at(seconds),
    }
}

fn gpu(index: u32) -> GpuReport {
    let gpu = Gpu {
        minor: index,
        ..Gpu::with_uuid(&format!("GPU-0000000{index}"))
    };
    GpuReport {
        state: GpuState::Active,
        generation: 1,
        health: GpuHealth::Healthy,
        memory: GpuView {
            health: Health::Healthy,
            capacity: Quanta(16),
            free: Quanta(16),
            ..GpuView::empty(gpu.uuid.clone())
        },
        gpu,
        runtime: None,
        leftover: Bytes::ZERO,
        has_managed_memory: false,
    }
}
