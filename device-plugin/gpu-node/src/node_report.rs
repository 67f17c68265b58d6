//! Computes the node's [`NodeReport`] from a snapshot: pure.

mod conditions;
mod containers;
mod events;

use std::collections::BTreeMap;

use bursar_config::ResourcesConfig;
use bursar_crds::context_policy::FaultAction;
use bursar_crds::gpu_node::{Fault, FaultKind, GpuState as State};
use bursar_crds::numbers::to_i64;
use bursar_enforcement::audit::AuditStatus;
use bursar_enforcement::driver_limits::Limits;
use bursar_gpu::health::{Health, UnhealthyReason};
use bursar_gpu::xid::{XidAction, required_action};
use bursar_gpu::{GpuState, Inventory};
use bursar_host::checkpoint::write_behind::LateWrite;
use bursar_kubelet::lifecycle::Registration;
use bursar_ledger::units::{Bytes, GpuUuid, PodUid, Quanta};
use bursar_ledger::{GpuView, LedgerView};
use bursar_node::actor::Snapshot;
use bursar_node::checkpoint_state::PodName;
use bursar_node::other_plugins::GpuOwners;
use bursar_retained::runtimes::RuntimeReport;
use bursar_retained::status::RetainedStatus;
use bursar_retained::tokens::NodePublicKey;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use self::conditions::{
    accepted_condition, audited_condition, cdi_ready_condition, checkpoint_intact_condition,
    driver_limits_condition, gpus_found_condition, managed_memory_condition,
    memory_scrubbed_condition, pageable_memory_condition, registered_condition,
    retained_memory_condition, sole_owner_condition, state_written_condition,
    token_limit_condition,
};
use self::containers::{enforcement_gap, gpu_containers, pending_containers, with_owner};
use crate::quota_overrides::AppliedSpec;
use crate::{GpuHealth, GpuReport, MemoryReport, NodeReport};

pub use events::transition_events;

/// The late write to the state directory that has lasted longest.
pub fn late_write<'a>(snapshot: &'a Snapshot, audited: &'a AuditStatus) -> Option<&'a LateWrite> {
    let late = snapshot.problems.late_write.iter();
    late.chain(&audited.late_write).max_by_key(|late| late.lag)
}

/// The inputs of a report besides the snapshot.
#[derive(Debug, Clone)]
pub struct ReportInputs {
    /// The resources that the node offers.
    pub config: ResourcesConfig,
    /// The boot id.
    pub boot_id: String,
    /// The registration of device memory with the kubelet.
    pub registration: Registration,
    /// The reason why the container runtime ignores CDI devices.
    pub runtime_problem: Option<String>,
    /// The results of the audit.
    pub audited: AuditStatus,
    /// The state of the driver's own memory limits.
    pub limits: Limits,
    /// The state of the quota overrides.
    pub overrides: AppliedSpec,
    /// The open faults.
    pub faults: Vec<Fault>,
    /// The state of retained memory.
    pub retained: RetainedStatus,
    /// The owners of the GPUs.
    pub owners: GpuOwners,
    /// The public key of the node's memory tokens.
    pub token_key: NodePublicKey,
}

/// Computes the report.
pub fn node_report(snapshot: &Snapshot, inputs: &ReportInputs) -> NodeReport {
    let Snapshot {
        inventory,
        view,
        queued_claims,
        generations,
        ..
    } = snapshot;
    let driver_version = match inventory {
        Inventory::Gpus { driver, .. } => driver.clone(),
        Inventory::Starting | Inventory::NoDriver(_) | Inventory::NoGpu => None,
    };
    let gpu = |state: &GpuState| GpuReport {
        runtime: runtime_report(&state.gpu.uuid, &inputs.retained),
        leftover: leftover_on(&state.gpu.uuid, view, inputs),
        has_managed_memory: inputs.audited.managed_gpus.contains(&state.gpu.uuid),
        ..gpu_report(state, view, generation_of(state, generations))
    };
    let pod_names = pod_names(snapshot);
    NodeReport {
        boot_id: inputs.boot_id.clone(),
        driver_version,
        token_key: inputs.token_key,
        quantum: inputs.config.quantum,
        device_memory: device_memory(snapshot),
        managed_memory: managed_memory(snapshot),
        gpus: inventory.gpus().iter().map(gpu).collect(),
        waiting: pending_containers(queued_claims),
        not_enforced: inputs
            .audited
            .not_enforced
            .iter()
            .map(enforcement_gap)
            .collect(),
        applied_spec: inputs.overrides.clone(),
        faults: inventory
            .gpus()
            .iter()
            .filter_map(|state| gpu_fault(state, generations))
            .chain(inputs.faults.iter().cloned())
            .collect(),
        containers: gpu_containers(snapshot, &inputs.audited),
        retained_count: inputs.retained.readable,
        retained: inputs
            .retained
            .leases
            .iter()
            .map(|lease| with_owner(lease, &pod_names))
            .collect(),
        namespaces: inputs.audited.namespaces.clone(),
        pod_names,
        conditions: vec![
            gpus_found_condition(snapshot),
            registered_condition(&inputs.registration),
            cdi_ready_condition(snapshot, inputs.runtime_problem.as_deref()),
            token_limit_condition(snapshot),
            checkpoint_intact_condition(snapshot),
            state_written_condition(late_write(snapshot, &inputs.audited)),
            audited_condition(&inputs.audited),
            driver_limits_condition(&inputs.limits),
            retained_memory_condition(&inputs.retained),
            memory_scrubbed_condition(snapshot, &inputs.retained),
            accepted_condition(&inputs.overrides),
            sole_owner_condition(&inputs.owners),
            managed_memory_condition(inputs.config.managed_capacity, &snapshot.uvm),
            pageable_memory_condition(&snapshot.uvm, cfg!(target_arch = "aarch64")),
        ],
    }
}

/// The memory of a GPU that is bound to pods with leftover processes.
fn leftover_on(gpu: &GpuUuid, view: &LedgerView, inputs: &ReportInputs) -> Bytes {
    let on_gpu = view.gpus.iter().filter(|view| view.uuid == *gpu);
    let pods = on_gpu.flat_map(|view| &view.pods);
    let leftover = pods.filter(|(pod, _)| inputs.audited.leftovers.contains(*pod));
    let quanta: Quanta = leftover.map(|(_, quanta)| *quanta).sum();
    quanta.bytes(inputs.config.quantum)
}

/// The names of pods that are bound or wait.
fn pod_names(snapshot: &Snapshot) -> BTreeMap<PodUid, PodName> {
    let bound = snapshot.containers.iter();
    let bound = bound.map(|container| (&container.pod, container.name.as_ref()));
    let waiting = snapshot.queued_claims.iter();
    let waiting = waiting.map(|claim| (&claim.pod, claim.name.as_ref()));
    let named = bound.chain(waiting);
    let named = named.filter_map(|(uid, container)| Some((uid, container?.pod.as_ref()?)));
    named.map(|(uid, pod)| (uid.clone(), pod.clone())).collect()
}

fn device_memory(snapshot: &Snapshot) -> MemoryReport {
    let view = &snapshot.view;
    MemoryReport {
        allocatable: if snapshot.devices_error.is_some() {
            Quanta::ZERO
        } else {
            view.healthy_capacity()
        },
        free: view.gpus.iter().map(GpuView::unbound).sum(),
        largest_free: view.largest_free(),
    }
}

fn managed_memory(snapshot: &Snapshot) -> MemoryReport {
    let managed = snapshot.view.managed;
    MemoryReport {
        allocatable: if snapshot.devices_error.is_some() {
            Quanta::ZERO
        } else {
            managed.capacity
        },
        free: managed.free,
        largest_free: managed.free,
    }
}

fn gpu_report(state: &GpuState, view: &LedgerView, generation: u64) -> GpuReport {
    let in_ledger = view.gpus.iter().find(|gpu| gpu.uuid == state.gpu.uuid);
    let memory = in_ledger.cloned();
    let memory = memory.unwrap_or_else(|| GpuView::empty(state.gpu.uuid.clone()));
    GpuReport {
        gpu: state.gpu.clone(),
        state: match state.health {
            Health::Unhealthy(UnhealthyReason::Lost | UnhealthyReason::NoAnswer) => State::Lost,
            Health::Unhealthy(UnhealthyReason::Xid(_))
                if state.persisted.awaits_reset.is_some() =>
            {
                State::Draining
            }
            Health::Unhealthy(UnhealthyReason::Draining | UnhealthyReason::Drained) => {
                State::Draining
            }
            Health::Healthy if memory.reserved_for.is_some() => State::Reserved,
            Health::Healthy
            | Health::Unhealthy(
                UnhealthyReason::Xid(_)
                | UnhealthyReason::ProvisionerHung
                | UnhealthyReason::CudaRefused
                | UnhealthyReason::OtherOwner,
            ) => State::Active,
        },
        generation,
        health: match state.health {
            Health::Healthy => GpuHealth::Healthy,
            Health::Unhealthy(UnhealthyReason::Xid(code)) => GpuHealth::Unhealthy {
                reason: format!("Xid{code}"),
            },
            Health::Unhealthy(why) => GpuHealth::Unhealthy {
                reason: why.as_str().to_owned(),
            },
        },
        memory,
        runtime: None,
        leftover: Bytes::ZERO,
        has_managed_memory: false,
    }
}

/// The allocator runtime of a GPU, and the bytes that it has lent; none where retained memory is
/// off.
fn runtime_report(gpu: &GpuUuid, retained: &RetainedStatus) -> Option<(RuntimeReport, Bytes)> {
    let report = retained.runtimes.get(gpu).cloned().unwrap_or_default();
    let lent = retained.live.get(gpu).map(|(_, bytes)| *bytes);
    retained.enabled.then(|| (report, lent.unwrap_or_default()))
}

fn generation_of(state: &GpuState, generations: &BTreeMap<GpuUuid, u64>) -> u64 {
    let generation = generations.get(&state.gpu.uuid).copied();
    generation.unwrap_or_default()
}

/// The fault that lost a GPU's memory; `None` for a healthy GPU and for one that may recover.
///
/// The GPU's generation makes the fault's name unique: the generation grows when the fault is over.
/// [`carry_over`](crate::carry_over) sets the time.
fn gpu_fault(state: &GpuState, generations: &BTreeMap<GpuUuid, u64>) -> Option<Fault> {
    let code = state.persisted.awaits_reset;
    let action = match code.map(required_action) {
        Some(XidAction::RestartNode) => FaultAction::RestartNode,
        Some(_) => FaultAction::ResetGpu,
        None if state.persisted.away && !state.persisted.drained => FaultAction::Wait,
        None => return None,
    };
    let (gpu, generation) = (&state.gpu.uuid, generation_of(state, generations));
    Some(Fault {
        id: format!("{gpu}-{generation}"),
        kind: FaultKind::Gpu,
        gpu: gpu.to_string(),
        gpu_generation: to_i64(generation),
        cuda_error: None,
        xid: code.and_then(|code| i32::try_from(code).ok()),
        action: Some(action),
        container: None,
        time: Time(jiff::Timestamp::UNIX_EPOCH),
    })
}

#[cfg(test)]
mod tests;
