//! Computes the node's [`NodeReport`] from a snapshot: pure.

mod conditions;
mod containers;
mod events;
mod gpus;

use std::collections::BTreeMap;

use bursar_compute::task::ComputeStatus;
use bursar_config::ResourcesConfig;
use bursar_crds::context_policy::FaultAction;
use bursar_crds::gpu_node::{Fault, FaultKind, NodeMemory, TokenKey};
use bursar_crds::numbers::{to_i32, to_i64};
use bursar_crds::{Amount, GpuNodeStatus};
use bursar_enforcement::audit::AuditStatus;
use bursar_enforcement::driver_limits::Limits;
use bursar_gpu::xid::{XidAction, required_action};
use bursar_gpu::{GpuState, Inventory};
use bursar_host::checkpoint::write_behind::LateWrite;
use bursar_kubelet::lifecycle::Registration;
use bursar_ledger::units::{Bytes, GpuUuid, PodUid, Quanta};
use bursar_ledger::{GpuView, LedgerView};
use bursar_node::actor::Snapshot;
use bursar_node::checkpoint_state::PodName;
use bursar_node::other_plugins::GpuOwners;
use bursar_retained::status::RetainedStatus;
use bursar_retained::tokens::NodePublicKey;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use self::conditions::conditions;
use self::containers::{enforcement_gap, gpu_containers, pending_containers, with_owner};
use self::gpus::{PodLists, gpu_status};
use crate::quota_overrides::AppliedSpec;
use crate::summary::summarize;
use crate::{ExportedMemory, NodeReport};

pub use events::transition_events;

/// The algorithm of [`TokenKey`].
const TOKEN_ALGORITHM: &str = "Ed25519";

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
    /// The keys of the configuration that the agent does not know.
    pub unknown_keys: Vec<String>,
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
    /// How the GPUs' compute time is divided.
    pub computed: ComputeStatus,
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
    let pod_names = pod_names(snapshot);
    let mut lists = PodLists::new(&pod_names);
    let gpus = inventory.gpus().iter();
    let gpus = gpus.map(|state| gpu_status(state, snapshot, inputs, &mut lists));
    let not_enforced = inputs.audited.not_enforced.iter();
    let gpu_faults = inventory.gpus().iter();
    let gpu_faults = gpu_faults.filter_map(|state| gpu_fault(state, generations));
    let leases = inputs.retained.leases.iter();
    let mut status = GpuNodeStatus {
        observed_generation: inputs.overrides.generation,
        boot_id: Some(inputs.boot_id.clone()),
        agent_version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        driver_version,
        token_key: Some(TokenKey {
            algorithm: TOKEN_ALGORITHM.to_owned(),
            public_key: inputs.token_key.to_string(),
        }),
        quantum: Some(Amount::from_bytes(inputs.config.quantum.bytes())),
        summary: None,
        device_memory: device_memory(snapshot),
        managed_memory: managed_memory(snapshot),
        gpus: gpus.collect(),
        waiting: pending_containers(queued_claims),
        not_enforced_count: to_i32(not_enforced.len()),
        not_enforced: not_enforced.map(enforcement_gap).collect(),
        quotas: inputs.overrides.quotas.clone(),
        faults: gpu_faults.chain(inputs.faults.iter().cloned()).collect(),
        containers: gpu_containers(snapshot, &inputs.audited),
        retained_count: to_i32(inputs.retained.readable),
        retained: leases.map(|lease| with_owner(lease, &pod_names)).collect(),
        namespaces: inputs.audited.namespaces.clone(),
        conditions: Vec::new(),
    };
    status.summary = Some(summarize(&status, inputs.config.quantum));
    NodeReport {
        status,
        exported: exported_memory(view, inputs),
        unknown_spec_entries: inputs.overrides.unrecognized.len(),
        conditions: conditions(snapshot, inputs),
    }
}

/// The memory of each GPU that ended pods had exported and others hold.
fn exported_memory(view: &LedgerView, inputs: &ReportInputs) -> BTreeMap<String, ExportedMemory> {
    let gpus = view.gpus.iter().filter(|gpu| gpu.leaked > Bytes::ZERO);
    let exported = gpus.map(|gpu| {
        let exported = ExportedMemory {
            bytes: gpu.leaked,
            is_beside_managed: inputs.audited.managed_gpus.contains(&gpu.uuid),
        };
        (gpu.uuid.to_string(), exported)
    });
    exported.collect()
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

fn device_memory(snapshot: &Snapshot) -> NodeMemory {
    let view = &snapshot.view;
    let free = view.gpus.iter().map(GpuView::unbound).sum();
    node_memory(snapshot, view.healthy_capacity(), free, view.largest_free())
}

fn managed_memory(snapshot: &Snapshot) -> NodeMemory {
    let managed = snapshot.view.managed;
    node_memory(snapshot, managed.capacity, managed.free, managed.free)
}

fn node_memory(
    snapshot: &Snapshot,
    capacity: Quanta,
    free: Quanta,
    largest_free: Quanta,
) -> NodeMemory {
    let is_offered = snapshot.devices_error.is_none();
    NodeMemory {
        allocatable: if is_offered { to_i32(capacity.0) } else { 0 },
        free: to_i32(free.0),
        largest_free: to_i32(largest_free.0),
    }
}

fn generation_of(state: &GpuState, generations: &BTreeMap<GpuUuid, u64>) -> u64 {
    let generation = generations.get(&state.gpu.uuid).copied();
    generation.unwrap_or_default()
}

/// The fault that lost a GPU's memory; `None` for a healthy GPU and for one that may recover.
///
/// The GPU's generation makes the fault's name unique: the generation grows when the fault is over.
/// [`carry_over`](crate::carry_over::carry_over) sets the time.
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
