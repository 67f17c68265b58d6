//! What the node says of itself to the API server: a snapshot as a [`NodeReport`], and what of it
//! is worth an event. Pure.

use std::collections::BTreeMap;

use bursar_crds::conditions::{Statement, gpu_node as names};
use bursar_crds::gpu_node::{FaultAction, GpuState as State};

use super::actor::Snapshot;
use super::allocator::BoundContainer;
use super::host::Concern;
use crate::config::ResourcesConfig;
use crate::enforcement::attestation::Lack;
use crate::enforcement::audit::Audited;
use crate::enforcement::driver_limits::{Limit, Limits};
use crate::gpu::health::{Health, Sickness};
use crate::gpu::xid::{Verdict, verdict};
use crate::gpu::{GpuState, Inventory, NoDriver};
use crate::gpu_node::quota_overrides::Ordered;
use crate::gpu_node::{
    FaultReport, GpuHealth, GpuReport, Memory, NodeReport, NotEnforcedReport, Reason, WaitingReport,
};
use crate::kubelet::lifecycle::{NotRegistered, Registration};
use crate::ledger::{GpuView, View};
use crate::retained::status::KeptStatus;
use crate::units::{Bytes, GpuUuid, Quanta, Resource};

/// What is known besides the snapshot.
#[derive(Debug, Clone)]
pub struct Around {
    /// What the node offers.
    pub config: ResourcesConfig,
    /// This boot.
    pub boot: String,
    /// Whether the kubelet follows our device memory.
    pub registration: Registration,
    /// Why the container runtime ignores CDI devices.
    pub runtime: Option<String>,
    /// What the audit found.
    pub audited: Audited,
    /// What became of the driver's own limits.
    pub limits: Limits,
    /// What became of the quotas that were ordered.
    pub ordered: Ordered,
    /// The faults that are open.
    pub faults: Vec<FaultReport>,
    /// How kept memory stands.
    pub kept: KeptStatus,
}

/// The report.
pub fn report(snapshot: &Snapshot, around: &Around) -> NodeReport {
    let Snapshot {
        inventory,
        view,
        waits,
        generations,
        ..
    } = snapshot;
    let driver_version = match inventory {
        Inventory::Gpus { driver, .. } => driver.clone(),
        Inventory::Starting | Inventory::NoDriver(_) | Inventory::NoGpu => None,
    };
    let gpu = |state: &GpuState| gpu(state, view, generation(state, generations));
    NodeReport {
        boot_id: around.boot.clone(),
        driver_version,
        quantum: around.config.quantum,
        device_memory: device_memory(snapshot),
        managed_memory: managed_memory(snapshot),
        gpus: inventory.gpus().iter().map(gpu).collect(),
        waiting: waits
            .iter()
            .filter(|wait| wait.resource == Resource::DeviceMemory)
            .map(waiting)
            .collect(),
        not_enforced: around.audited.not_enforced.iter().map(lacking).collect(),
        ordered: around.ordered.clone(),
        faults: inventory
            .gpus()
            .iter()
            .filter_map(|state| gpu_fault(state, generations))
            .chain(around.faults.iter().cloned())
            .collect(),
        namespaces: around.audited.namespaces.clone(),
        conditions: vec![
            gpus_found(snapshot),
            registered(&around.registration),
            cdi_ready(snapshot, around.runtime.as_deref()),
            within_token_limit(snapshot),
            checkpoint_intact(snapshot),
            audited(&around.audited),
            limits(&around.limits),
            kept_memory(&around.kept),
            memory_scrubbed(snapshot, &around.kept),
            accepted(&around.ordered),
        ],
    }
}

fn device_memory(snapshot: &Snapshot) -> Memory {
    let view = &snapshot.view;
    Memory {
        allocatable: if snapshot.too_many.is_some() {
            Quanta::ZERO
        } else {
            view.healthy_capacity()
        },
        free: view.gpus.iter().map(free).sum(),
        largest_free: view.largest_free(),
    }
}

fn managed_memory(snapshot: &Snapshot) -> Memory {
    let managed = snapshot.view.managed;
    Memory {
        allocatable: if snapshot.too_many.is_some() {
            Quanta::ZERO
        } else {
            managed.capacity
        },
        free: managed.free,
        largest_free: managed.free,
    }
}

/// What nothing is bound to, kept for a waiter or not.
fn free(gpu: &GpuView) -> Quanta {
    gpu.free + gpu.reserved
}

fn gpu(state: &GpuState, view: &View, generation: u64) -> GpuReport {
    let of_it = view.gpus.iter().find(|gpu| gpu.uuid == state.gpu.uuid);
    let healthy = state.health.is_healthy();
    let held_for = of_it.and_then(|gpu| gpu.held_for.clone());
    GpuReport {
        uuid: state.gpu.uuid.clone(),
        index: state.gpu.minor,
        model: state.gpu.model.clone(),
        memory: state.gpu.memory,
        state: match state.health {
            Health::Unhealthy(Sickness::Lost | Sickness::NoAnswer) => State::Lost,
            Health::Unhealthy(Sickness::Xid(_)) if state.memory.awaits_reset.is_some() => {
                State::Draining
            }
            Health::Unhealthy(Sickness::Draining | Sickness::Drained) => State::Draining,
            Health::Healthy if held_for.is_some() => State::Reserved,
            Health::Healthy | Health::Unhealthy(Sickness::Xid(_) | Sickness::WorkerStuck) => {
                State::Active
            }
        },
        generation,
        health: match state.health {
            Health::Healthy => GpuHealth::Healthy,
            Health::Unhealthy(Sickness::Xid(code)) => GpuHealth::Unhealthy {
                reason: format!("Xid{code}"),
            },
            Health::Unhealthy(why) => GpuHealth::Unhealthy {
                reason: why.reason().to_owned(),
            },
        },
        capacity: of_it
            .filter(|_| healthy)
            .map(|gpu| gpu.capacity)
            .unwrap_or_default(),
        free: of_it.map(free).unwrap_or_default(),
        largest_free: of_it.map(|gpu| gpu.free).unwrap_or_default(),
        leaked: of_it.map(|gpu| gpu.leaked).unwrap_or_default(),
        withheld: of_it.map(|gpu| gpu.withheld).unwrap_or_default(),
        held_for,
        pods: of_it.map(|gpu| gpu.pods.clone()).unwrap_or_default(),
    }
}

fn generation(state: &GpuState, generations: &BTreeMap<GpuUuid, u64>) -> u64 {
    let generation = generations.get(&state.gpu.uuid).copied();
    generation.unwrap_or_default()
}

/// The fault by which a GPU's memory is lost; none where it is well, or may mend with all that is in it. With its
/// generation it has its name for good: G grows when it is over.
fn gpu_fault(state: &GpuState, generations: &BTreeMap<GpuUuid, u64>) -> Option<FaultReport> {
    let code = state.memory.awaits_reset;
    let action = match code.map(verdict) {
        Some(Verdict::Node) => FaultAction::RestartNode,
        Some(_) => FaultAction::ResetGpu,
        None if state.memory.away && !state.memory.drained => FaultAction::Wait,
        None => return None,
    };
    let (gpu, generation) = (&state.gpu.uuid, generation(state, generations));
    Some(FaultReport {
        id: format!("{gpu}-{generation}"),
        gpu: gpu.clone(),
        gpu_generation: generation,
        cuda_error: None,
        xid: code.and_then(|code| u32::try_from(code).ok()),
        action: Some(action),
        image: None,
        time: None,
    })
}

fn waiting(wait: &super::allocator::Wait) -> WaitingReport {
    let holder = wait.holder.as_ref();
    let pod = holder.and_then(|holder| holder.pod.as_ref());
    WaitingReport {
        pod_uid: wait.pod.clone(),
        namespace: pod.map(|pod| pod.namespace.clone()).unwrap_or_default(),
        pod: pod.map(|pod| pod.name.clone()).unwrap_or_default(),
        container: holder
            .map(|holder| holder.container.clone())
            .unwrap_or_default(),
        quanta: wait.quanta,
        since: wait.since,
    }
}

fn lacking((container, lack): &(BoundContainer, Lack)) -> NotEnforcedReport {
    let holder = container.holder.as_ref();
    let pod = holder.and_then(|holder| holder.pod.as_ref());
    NotEnforcedReport {
        pod_uid: container.pod.clone(),
        namespace: pod.map(|pod| pod.namespace.clone()).unwrap_or_default(),
        pod: pod.map(|pod| pod.name.clone()).unwrap_or_default(),
        container: holder
            .map(|holder| holder.container.clone())
            .unwrap_or_default(),
        reason: lack.reason.as_str(),
        message: lack.to_string(),
    }
}

fn audited(audited: &Audited) -> Statement {
    let Audited {
        begun,
        stale,
        hanging,
        ..
    } = audited;
    if !begun {
        return pending(names::AUDITED, "no audit yet");
    }
    let says = |holds, reason, message| Statement::new(names::AUDITED, holds, reason, message);
    let list = |all: &mut dyn Iterator<Item = &str>| all.collect::<Vec<_>>().join(", ");
    if !stale.is_empty() {
        let gpus = list(&mut stale.iter().map(crate::units::GpuUuid::as_str));
        let message = format!("NVML does not tell who uses {gpus}");
        return says(false, names::AUDIT_STALE, message);
    }
    if !hanging.is_empty() {
        let pods = list(&mut hanging.iter().map(crate::units::PodUid::as_str));
        let message =
            format!("no look comes back at the processes of the pods with the UIDs {pods}");
        return says(false, names::AUDIT_STALE, message);
    }
    says(true, names::OK, "what programs have is known".to_owned())
}

fn kept_memory(kept: &KeptStatus) -> Statement {
    let says =
        |holds, reason, message: &str| Statement::new(names::KEPT_MEMORY, holds, reason, message);
    let KeptStatus {
        enabled,
        heard,
        cleared: _,
        refused,
        stuck,
        kept: _,
    } = kept;
    match (refused.iter().next(), stuck.first()) {
        _ if !enabled => says(
            false,
            names::SWITCHED_OFF,
            "switched off in the agent's configuration",
        ),
        _ if !heard => says(false, names::VAULT_AWAY, "the vault does not answer"),
        (_, Some(gpu)) => says(
            false,
            names::WORKER_STUCK,
            &format!("the worker of {gpu} hangs in the driver: reset the GPU or restart the node"),
        ),
        (Some((gpu, why)), None) => says(false, names::NOT_SCRUBBED, &format!("{gpu}: {why}")),
        (None, None) => says(
            true,
            names::OK,
            "memory can outlive the processes that use it",
        ),
    }
}

fn memory_scrubbed(snapshot: &Snapshot, kept: &KeptStatus) -> Statement {
    let says = |holds, reason, message: &str| {
        Statement::new(names::MEMORY_SCRUBBED, holds, reason, message)
    };
    let mut gpus = snapshot.inventory.gpus().iter();
    match kept.refused.iter().next() {
        Some((gpu, why)) => says(
            false,
            names::NOT_SCRUBBED,
            &format!(
                "{gpu}: {why}; it is for one namespace until the node restarts, or set sharing.allowUnscrubbed"
            ),
        ),
        None if gpus.all(|state| kept.cleared.contains(&state.gpu.uuid)) => {
            says(true, names::OK, "freed memory comes back cleared")
        }
        None => pending(names::MEMORY_SCRUBBED, "not every GPU was looked at yet"),
    }
}

fn accepted(ordered: &Ordered) -> Statement {
    let Ordered {
        generation,
        not_understood,
        ..
    } = ordered;
    let version = env!("CARGO_PKG_VERSION");
    match not_understood.as_slice() {
        [] if generation.is_none() => pending(names::ACCEPTED, "no spec was read yet"),
        [] => Statement::new(
            names::ACCEPTED,
            true,
            names::OK,
            "the agent understands the spec",
        ),
        [first, others @ ..] => {
            let more = match others.len() {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            let message = format!(
                "failed to read spec.{first}{more}: unknown to version {version} of the agent; upgrade the agent or \
                delete these orders"
            );
            Statement::new(names::ACCEPTED, false, names::NOT_UNDERSTOOD, message)
        }
    }
}

fn limits(limits: &Limits) -> Statement {
    let says = |holds, reason, message: String| {
        Statement::new(names::DRIVER_LIMITS, holds, reason, message)
    };
    let mut refused = limits.iter().filter_map(|((_, gpu), limit)| match limit {
        Limit::Refused { why, .. } => Some(format!("the driver sets no limit on {gpu}: {why}")),
        Limit::Set(_) | Limit::NotOffered => None,
    });
    let mut all = limits.values();
    match (refused.next(), limits.is_empty()) {
        (Some(why), _) => says(false, names::LIMIT_REFUSED, why),
        (None, true) => pending(names::DRIVER_LIMITS, "no pod has had memory yet"),
        (None, false) if all.any(|limit| *limit == Limit::NotOffered) => {
            let why = "the driver offers no memory limits here; pods are held without them";
            says(false, names::NOT_OFFERED, why.to_owned())
        }
        (None, false) => says(true, names::OK, "the driver holds pods too".to_owned()),
    }
}

fn gpus_found(snapshot: &Snapshot) -> Statement {
    let says =
        |holds, reason, message: String| Statement::new(names::GPUS_FOUND, holds, reason, message);
    if let Some((Concern::Driver, message)) = &snapshot.troubles.host {
        return says(false, names::DRIVER_FAILED, message.clone());
    }
    match &snapshot.inventory {
        Inventory::Starting => pending(names::GPUS_FOUND, "NVML has not answered yet"),
        Inventory::NoDriver(why @ NoDriver::Missing(_)) => {
            says(false, names::DRIVER_MISSING, why.to_string())
        }
        Inventory::NoDriver(why @ (NoDriver::Failed(_) | NoDriver::NotLoaded(_))) => {
            says(false, names::DRIVER_FAILED, why.to_string())
        }
        Inventory::NoGpu => says(false, names::NO_GPUS, "the driver lists no GPU".to_owned()),
        Inventory::Gpus { gpus, .. } => {
            let healthy = gpus.iter().filter(|gpu| gpu.health.is_healthy()).count();
            let message = format!("{healthy} of {} GPUs are healthy", gpus.len());
            match healthy {
                0 => says(false, names::NO_HEALTHY_GPU, message),
                _ => says(true, names::OK, message),
            }
        }
    }
}

fn registered(registration: &Registration) -> Statement {
    let why = match registration {
        Registration::Registered => {
            return Statement::new(
                names::REGISTERED,
                true,
                names::OK,
                "the kubelet follows this node's tokens",
            );
        }
        Registration::NotRegistered(why) => why,
    };
    let reason = match why {
        NotRegistered::Starting | NotRegistered::Stopped => {
            return pending(names::REGISTERED, &why.to_string());
        }
        NotRegistered::Directory(_) | NotRegistered::CannotServe(_) => names::KUBELET_FOLDER,
        NotRegistered::NoKubelet(_) | NotRegistered::NoStream => names::KUBELET_UNREACHABLE,
        NotRegistered::Refused(_) => names::REGISTRATION_REFUSED,
    };
    Statement::new(names::REGISTERED, false, reason, why.to_string())
}

fn cdi_ready(snapshot: &Snapshot, runtime: Option<&str>) -> Statement {
    let says = |reason, message: &str| Statement::new(names::CDI_READY, false, reason, message);
    match (&snapshot.troubles.cdi, &snapshot.troubles.host, runtime) {
        (Some(message), _, _) | (None, Some((Concern::Cdi, message)), _) => {
            says(names::CDI_FOLDER, message)
        }
        (None, _, Some(message)) => says(names::CDI_UNSUPPORTED, message),
        (None, _, None) => Statement::new(
            names::CDI_READY,
            true,
            names::OK,
            "CDI files can be written",
        ),
    }
}

fn within_token_limit(snapshot: &Snapshot) -> Statement {
    match &snapshot.too_many {
        Some(refused) => Statement::new(
            names::WITHIN_TOKEN_LIMIT,
            false,
            names::TOO_MANY_TOKENS,
            refused.to_string(),
        ),
        None => Statement::new(
            names::WITHIN_TOKEN_LIMIT,
            true,
            names::OK,
            "the kubelet can handle the tokens",
        ),
    }
}

fn checkpoint_intact(snapshot: &Snapshot) -> Statement {
    let troubles = &snapshot.troubles;
    match (&troubles.checkpoint, &troubles.host, &troubles.rebuilt) {
        (Some(message), _, _) | (None, Some((Concern::Records, message)), _) => Statement::new(
            names::CHECKPOINT_INTACT,
            false,
            names::CHECKPOINT_UNWRITABLE,
            message.clone(),
        ),
        (None, _, Some(why)) => Statement::new(
            names::CHECKPOINT_INTACT,
            true,
            names::CHECKPOINT_REBUILT,
            format!("rebuilt from the node's CDI files and the kubelet's records: {why}"),
        ),
        (None, _, None) => Statement::new(
            names::CHECKPOINT_INTACT,
            true,
            names::OK,
            "the records are whole",
        ),
    }
}

fn pending(type_: &'static str, message: &str) -> Statement {
    Statement {
        type_,
        holds: None,
        reason: names::PENDING,
        message: message.to_owned(),
    }
}

/// What changed from `before` to `after` that people should hear of.
pub fn events(before: Option<&NodeReport>, after: &NodeReport) -> Vec<(Reason, String)> {
    let said_before = |statement: &Statement| {
        before.is_some_and(|before| {
            let same =
                |old: &Statement| old.type_ == statement.type_ && old.reason == statement.reason;
            before.conditions.iter().any(same)
        })
    };
    let news = after
        .conditions
        .iter()
        .filter(|statement| !said_before(statement));
    let mut events: Vec<_> = news
        .filter_map(|statement| Some((reason(statement)?, statement.message.clone())))
        .collect();
    for gpu in &after.gpus {
        let old = before.and_then(|before| before.gpus.iter().find(|old| old.uuid == gpu.uuid));
        match (old.map(|old| &old.health), &gpu.health) {
            (Some(GpuHealth::Healthy) | None, GpuHealth::Unhealthy { reason }) => {
                events.push((
                    Reason::GpuUnhealthy,
                    format!("{} gets no new pods: {reason}", gpu.uuid),
                ));
            }
            (Some(GpuHealth::Unhealthy { .. }), GpuHealth::Healthy) => {
                events.push((
                    Reason::GpuHealthy,
                    format!("{} gets new pods again", gpu.uuid),
                ));
            }
            _ => {}
        }
        if gpu.leaked > Bytes::ZERO && old.is_none_or(|old| old.leaked == Bytes::ZERO) {
            let message = format!(
                "of {} {} that ended pods had exported are held by others, and not given to pods",
                gpu.uuid, gpu.leaked
            );
            events.push((Reason::MemoryLeaked, message));
        }
    }
    events
}

/// A kubelet that restarts is no news, so only a refused registration is.
fn reason(statement: &Statement) -> Option<Reason> {
    match (statement.type_, statement.reason) {
        (_, names::CHECKPOINT_REBUILT) => Some(Reason::CheckpointRebuilt),
        (_, names::CHECKPOINT_UNWRITABLE) => Some(Reason::CheckpointUnwritable),
        (_, names::TOO_MANY_TOKENS) => Some(Reason::TooManyTokens),
        (_, names::REGISTRATION_REFUSED | names::KUBELET_FOLDER) => {
            Some(Reason::RegistrationFailed)
        }
        (names::CDI_READY, _) if statement.holds == Some(false) => Some(Reason::CdiUnusable),
        (names::GPUS_FOUND, _) if statement.holds == Some(false) => Some(Reason::GpusMissing),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
