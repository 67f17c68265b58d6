//! Describes GPUs as the `GpuNode` status does. Pure.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use bursar_compute::effect::Verdict;
use bursar_compute::task;
use bursar_crds::Amount;
use bursar_crds::gpu_node::{
    ComputeState, GpuCompute, GpuPod, GpuRuntime, GpuState as State, GpuStatus,
    Health as ApiHealth, HealthStatus, MAX_POD_ENTRIES, MAX_POD_NAMES, MAX_PODS, MAX_SET_ASIDE,
};
use bursar_crds::numbers::{to_i32, to_i64};
use bursar_gpu::health::{Health, UnhealthyReason};
use bursar_gpu::{Gpu, GpuState};
use bursar_ledger::GpuView;
use bursar_ledger::units::{Bytes, GpuUuid, PodUid, Quanta};
use bursar_node::actor::Snapshot;
use bursar_node::checkpoint_state::PodName;
use bursar_retained::status::RetainedStatus;

use super::{ReportInputs, generation_of};

/// The longest reason of [`GpuRuntime`].
const MAX_REASON_LENGTH: usize = 256;

/// Lists pods with their names. The object has a bounded number of both.
pub(super) struct PodLists<'a> {
    known: &'a BTreeMap<PodUid, PodName>,
    names_left: usize,
    entries_left: usize,
}

impl<'a> PodLists<'a> {
    pub(super) fn new(known: &'a BTreeMap<PodUid, PodName>) -> PodLists<'a> {
        PodLists {
            known,
            names_left: MAX_POD_NAMES,
            entries_left: MAX_POD_ENTRIES,
        }
    }

    /// The pods with the most memory, in a stable order.
    fn largest(&mut self, pods: &BTreeMap<PodUid, Quanta>, most: usize) -> Vec<GpuPod> {
        let mut pods: Vec<_> = pods.iter().collect();
        pods.sort_by_key(|(pod, quanta)| (Reverse(**quanta), *pod));
        let pods = pods.into_iter().take(most);
        pods.map(|(pod, quanta)| self.pod(pod, *quanta)).collect()
    }

    fn pod(&mut self, uid: &PodUid, quanta: Quanta) -> GpuPod {
        let name = self.known.get(uid).filter(|_| self.names_left > 0);
        self.names_left -= usize::from(name.is_some());
        let part = |of: fn(&PodName) -> &String| name.map(of).cloned().unwrap_or_default();
        GpuPod {
            uid: uid.as_str().to_owned(),
            namespace: part(|name| &name.namespace),
            name: part(|name| &name.name),
            quanta: to_i32(quanta.0),
        }
    }
}

pub(super) fn gpu_status(
    state: &GpuState,
    snapshot: &Snapshot,
    inputs: &ReportInputs,
    lists: &mut PodLists<'_>,
) -> GpuStatus {
    let Gpu {
        uuid,
        minor,
        model,
        memory,
        pci: _,
        mig_parent: _,
        capabilities: _,
    } = &state.gpu;
    let mut in_ledger = snapshot.view.gpus.iter().filter(|view| view.uuid == *uuid);
    let absent = GpuView::empty(uuid.clone());
    let in_ledger = in_ledger.next().unwrap_or(&absent);
    let GpuView {
        uuid: _,
        health: _,
        capacity,
        bound: _,
        unreclaimed: _,
        leaked,
        orphaned_leases: _,
        withheld,
        free,
        reserved: _,
        set_aside,
        pods,
        weights: _,
        reserved_for,
        only_for,
    } = in_ledger;
    let set_aside = lists.largest(set_aside, MAX_SET_ASIDE);
    let listed = lists.largest(pods, MAX_PODS.min(lists.entries_left));
    lists.entries_left -= listed.len();
    let amount = |bytes: Bytes| (bytes > Bytes::ZERO).then(|| Amount::from_bytes(bytes.0));
    let health = health(state.health);
    GpuStatus {
        uuid: uuid.to_string(),
        index: to_i32(*minor),
        model: model.clone(),
        memory: Amount::from_bytes(memory.0),
        state: binding_state(state, in_ledger),
        generation: to_i64(generation_of(state, &snapshot.generations)),
        capacity: match health.status {
            HealthStatus::Healthy => to_i32(capacity.0),
            HealthStatus::Unhealthy | HealthStatus::Unknown => 0,
        },
        health,
        // The API's `free` includes memory that the agent sets aside; the ledger's does not.
        free: to_i32(in_ledger.unbound().0),
        largest_free: to_i32(free.0),
        leaked: amount(*leaked + leftover(in_ledger, inputs)),
        withheld: amount(*withheld),
        reserved_for: reserved_for.as_ref().map(ToString::to_string),
        set_aside,
        only_for: only_for.clone(),
        pods_omitted: to_i32(pods.len() - listed.len()),
        pods: listed,
        runtime: gpu_runtime(uuid, &inputs.retained),
        compute: gpu_compute(uuid, inputs),
    }
}

/// The memory that is bound to pods with leftover processes.
fn leftover(in_ledger: &GpuView, inputs: &ReportInputs) -> Bytes {
    let pods = in_ledger.pods.iter();
    let leftover = pods.filter(|(pod, _)| inputs.audited.leftovers.contains(*pod));
    let quanta: Quanta = leftover.map(|(_, quanta)| *quanta).sum();
    quanta.bytes(inputs.config.quantum)
}

fn binding_state(state: &GpuState, in_ledger: &GpuView) -> State {
    match state.health {
        Health::Unhealthy(UnhealthyReason::Lost | UnhealthyReason::NoAnswer) => State::Lost,
        Health::Unhealthy(UnhealthyReason::Xid(_)) if state.persisted.awaits_reset.is_some() => {
            State::Draining
        }
        Health::Unhealthy(UnhealthyReason::Draining | UnhealthyReason::Drained) => State::Draining,
        Health::Healthy if in_ledger.reserved_for.is_some() => State::Reserved,
        Health::Healthy
        | Health::Unhealthy(
            UnhealthyReason::Xid(_)
            | UnhealthyReason::ProvisionerHung
            | UnhealthyReason::CudaRefused
            | UnhealthyReason::OtherOwner,
        ) => State::Active,
    }
}

/// The health, without the time of its last change.
fn health(health: Health) -> ApiHealth {
    let (status, reason) = match health {
        Health::Healthy => (HealthStatus::Healthy, "Ok".to_owned()),
        Health::Unhealthy(UnhealthyReason::Xid(code)) => {
            (HealthStatus::Unhealthy, format!("Xid{code}"))
        }
        Health::Unhealthy(why) => (HealthStatus::Unhealthy, why.as_str().to_owned()),
    };
    ApiHealth {
        status,
        reason,
        since: None,
    }
}

/// How the GPU's compute time is divided; none before the agent knows, and where it offers none.
fn gpu_compute(gpu: &GpuUuid, inputs: &ReportInputs) -> Option<GpuCompute> {
    let mig = task::GpuCompute {
        verdict: Verdict::NotEnforced("MIG instances have compute time of their own".to_owned()),
        problem: None,
        hidden_groups: 0,
    };
    let round = inputs.config.compute_round?;
    let compute = inputs.computed.get(gpu).or(gpu.is_mig().then_some(&mig))?;
    let (state, reason) = match (&compute.verdict, &compute.problem) {
        (Verdict::NotEnforced(why), _) | (_, Some(why)) => {
            (ComputeState::NotEnforced, why.as_str())
        }
        (Verdict::Enforced, None) => (ComputeState::Enforced, ""),
        (Verdict::Unknown(why), None) => (ComputeState::NotTested, why.as_str()),
    };
    let mut reason = reason.to_owned();
    reason.truncate(reason.floor_char_boundary(MAX_REASON_LENGTH));
    Some(GpuCompute {
        state,
        reason,
        round: format!("{round:?}"),
        hidden_groups: to_i32(compute.hidden_groups),
    })
}

/// The allocator runtime of a GPU; none where retained memory is off.
fn gpu_runtime(gpu: &GpuUuid, retained: &RetainedStatus) -> Option<GpuRuntime> {
    let runtime = retained.runtimes.get(gpu).cloned().unwrap_or_default();
    let lent = retained.live.get(gpu).map(|(_, bytes)| *bytes);
    let mut reason = runtime.reason;
    reason.truncate(reason.floor_char_boundary(MAX_REASON_LENGTH));
    retained.enabled.then(|| GpuRuntime {
        state: runtime.state,
        starts: to_i64(runtime.starts),
        lent: Amount::from_bytes(lent.unwrap_or_default().0),
        failures: to_i64(runtime.failures.values().sum()),
        reason,
    })
}
