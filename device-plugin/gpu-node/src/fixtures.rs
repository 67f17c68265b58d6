//! Builds reports for tests.

use std::collections::BTreeMap;

use bursar_crds::conditions::{ConditionUpdate, gpu_node as names};
use bursar_crds::gpu_node::{
    Fault, FaultContainer, FaultKind, GpuContainer, GpuStatus, LeaseState, NodeMemory, NodeSummary,
    RetainedLease,
};
use bursar_crds::{Amount, GpuNodeStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::report::NodeReport;

/// The time that many seconds after the epoch.
pub fn at(second: i64) -> Time {
    Time(jiff::Timestamp::from_second(second).expect("a valid value"))
}

/// Two idle GPUs of 16 GiB.
pub fn report() -> NodeReport {
    NodeReport {
        status: GpuNodeStatus {
            boot_id: Some("b007".into()),
            driver_version: Some("580.1".into()),
            quantum: Some("1Gi".into()),
            device_memory: NodeMemory {
                allocatable: 32,
                free: 32,
                largest_free: 16,
            },
            gpus: (0..2).map(gpu).collect(),
            summary: Some(NodeSummary::default()),
            ..GpuNodeStatus::default()
        },
        conditions: vec![ConditionUpdate::new(
            names::GPUS_FOUND,
            true,
            names::OK,
            "2 GPUs",
        )],
        exported: BTreeMap::new(),
        unknown_spec_entries: 0,
    }
}

/// A lease of retained memory.
pub fn lease(gib: u64) -> RetainedLease {
    RetainedLease {
        namespace: "team".into(),
        name: "weights".into(),
        gpu: "GPU-0".into(),
        generation: 7,
        gpu_generation: 2,
        size: Amount::from_bytes(gib << 30),
        state: LeaseState::Committed,
        owner_uid: "0f".into(),
        owner: String::new(),
        openers: 3,
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
        compute_weight: None,
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

fn gpu(index: i32) -> GpuStatus {
    GpuStatus {
        uuid: format!("GPU-0000000{index}"),
        index,
        model: "Simulated".into(),
        memory: "16Gi".into(),
        generation: 1,
        capacity: 16,
        free: 16,
        largest_free: 16,
        ..GpuStatus::default()
    }
}
