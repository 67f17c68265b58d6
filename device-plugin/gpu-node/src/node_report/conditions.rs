//! Decides the conditions of the node: pure.

use bursar_crds::conditions::{ConditionUpdate, gpu_node as names};
use bursar_crds::gpu_node::RuntimeState;
use bursar_enforcement::audit::AuditStatus;
use bursar_enforcement::driver_limits::{LimitState, LimitUse, Limits};
use bursar_gpu::uvm::{EvictionUnsafe, PageableMemory, UvmModule};
use bursar_gpu::{Inventory, NoDriver};
use bursar_host::checkpoint::write_behind::LateWrite;
use bursar_kubelet::lifecycle::{NotRegistered, Registration};
use bursar_ledger::units::Bytes;
use bursar_node::actor::Snapshot;
use bursar_node::host::Subsystem;
use bursar_node::other_plugins::GpuOwners;
use bursar_retained::status::RetainedStatus;

use crate::quota_overrides::AppliedSpec;

pub(super) fn gpus_found_condition(snapshot: &Snapshot) -> ConditionUpdate {
    let condition = |holds, reason, message: String| {
        ConditionUpdate::new(names::GPUS_FOUND, holds, reason, message)
    };
    if let Some((Subsystem::Driver, message)) = &snapshot.problems.host {
        return condition(false, names::DRIVER_FAILED, message.clone());
    }
    match &snapshot.inventory {
        Inventory::Starting => pending_condition(names::GPUS_FOUND, "NVML has not answered yet"),
        Inventory::NoDriver(why @ NoDriver::Missing(_)) => {
            condition(false, names::DRIVER_MISSING, why.to_string())
        }
        Inventory::NoDriver(why @ (NoDriver::Failed(_) | NoDriver::NotLoaded(_))) => {
            condition(false, names::DRIVER_FAILED, why.to_string())
        }
        Inventory::NoGpu => condition(false, names::NO_GPUS, "the driver lists no GPU".to_owned()),
        Inventory::Gpus { gpus, .. } => {
            let healthy = gpus.iter().filter(|gpu| gpu.health.is_healthy()).count();
            let message = format!("{healthy} of {} GPUs are healthy", gpus.len());
            match healthy {
                0 => condition(false, names::NO_HEALTHY_GPU, message),
                _ => condition(true, names::OK, message),
            }
        }
    }
}

pub(super) fn registered_condition(registration: &Registration) -> ConditionUpdate {
    let why = match registration {
        Registration::Registered => {
            return ConditionUpdate::new(
                names::REGISTERED,
                true,
                names::OK,
                "the kubelet watches this node's devices",
            );
        }
        Registration::NotRegistered(why) => why,
    };
    let reason = match why {
        NotRegistered::Starting | NotRegistered::Stopped => {
            return pending_condition(names::REGISTERED, &why.to_string());
        }
        NotRegistered::Directory(_) | NotRegistered::CannotServe(_) => names::KUBELET_FOLDER,
        NotRegistered::NoKubelet(_) | NotRegistered::NoStream | NotRegistered::Relay(_) => {
            names::KUBELET_UNREACHABLE
        }
        NotRegistered::Refused(_) => names::REGISTRATION_REFUSED,
    };
    ConditionUpdate::new(names::REGISTERED, false, reason, why.to_string())
}

pub(super) fn cdi_ready_condition(snapshot: &Snapshot, runtime: Option<&str>) -> ConditionUpdate {
    let condition =
        |reason, message: &str| ConditionUpdate::new(names::CDI_READY, false, reason, message);
    match (&snapshot.problems.cdi, &snapshot.problems.host, runtime) {
        (Some(message), _, _) | (None, Some((Subsystem::Cdi, message)), _) => {
            condition(names::CDI_FOLDER, message)
        }
        (None, _, Some(message)) => condition(names::CDI_UNSUPPORTED, message),
        (None, _, None) => ConditionUpdate::new(
            names::CDI_READY,
            true,
            names::OK,
            "CDI files can be written",
        ),
    }
}

pub(super) fn token_limit_condition(snapshot: &Snapshot) -> ConditionUpdate {
    match &snapshot.devices_error {
        Some(refused) => ConditionUpdate::new(
            names::WITHIN_DEVICE_ID_LIMIT,
            false,
            names::TOO_MANY_DEVICE_IDS,
            refused.to_string(),
        ),
        None => ConditionUpdate::new(
            names::WITHIN_DEVICE_ID_LIMIT,
            true,
            names::OK,
            "the number of devices is within the kubelet's limit",
        ),
    }
}

pub(super) fn checkpoint_intact_condition(snapshot: &Snapshot) -> ConditionUpdate {
    let problems = &snapshot.problems;
    match (&problems.checkpoint, &problems.host, &problems.rebuilt) {
        (Some(message), _, _) | (None, Some((Subsystem::Records, message)), _) => {
            ConditionUpdate::new(
                names::CHECKPOINT_INTACT,
                false,
                names::CHECKPOINT_UNWRITABLE,
                message.clone(),
            )
        }
        (None, _, Some(why)) => ConditionUpdate::new(
            names::CHECKPOINT_INTACT,
            true,
            names::CHECKPOINT_REBUILT,
            format!("rebuilt from the node's CDI files and the kubelet's records: {why}"),
        ),
        (None, _, None) => ConditionUpdate::new(
            names::CHECKPOINT_INTACT,
            true,
            names::OK,
            "the checkpoint is intact",
        ),
    }
}

pub(super) fn state_written_condition(late: Option<&LateWrite>) -> ConditionUpdate {
    match late {
        None => ConditionUpdate::new(
            names::STATE_WRITTEN,
            true,
            names::OK,
            "the state directory has the newest records",
        ),
        Some(LateWrite { directory, lag: _ }) => ConditionUpdate::new(
            names::STATE_WRITTEN,
            false,
            names::WRITE_LATE,
            format!(
                "failed to write to {} for 5 s: the disk hangs or refuses; check the disk of paths.state-dir",
                directory.display()
            ),
        ),
    }
}

pub(super) fn audited_condition(audited: &AuditStatus) -> ConditionUpdate {
    let AuditStatus {
        has_run,
        stale_gpus: stale,
        hanging_pods: hanging,
        ..
    } = audited;
    if !has_run {
        return pending_condition(names::AUDITED, "no audit yet");
    }
    let condition =
        |holds, reason, message| ConditionUpdate::new(names::AUDITED, holds, reason, message);
    let list = |all: &mut dyn Iterator<Item = &str>| all.collect::<Vec<_>>().join(", ");
    if !stale.is_empty() {
        let gpus = list(&mut stale.iter().map(bursar_ledger::units::GpuUuid::as_str));
        let message = format!("failed to list the processes of {gpus}: NVML does not answer");
        return condition(false, names::AUDIT_STALE, message);
    }
    if !hanging.is_empty() {
        let pods = list(&mut hanging.iter().map(bursar_ledger::units::PodUid::as_str));
        let message = format!(
            "failed to read the processes of the pods with the UIDs {pods}: the kernel does not answer"
        );
        return condition(false, names::AUDIT_STALE, message);
    }
    condition(true, names::OK, "every audit is recent".to_owned())
}

pub(super) fn driver_limits_condition(limits: &Limits) -> ConditionUpdate {
    let condition = |holds, reason, message: String| {
        ConditionUpdate::new(names::DRIVER_LIMITS, holds, reason, message)
    };
    let mut refused = limits.iter().filter_map(|((_, gpu), limit)| match limit {
        LimitState::Failed { why, .. } => {
            let why = format!("the driver sets no limit on {gpu}: {why}");
            Some((names::LIMIT_REFUSED, why))
        }
        LimitState::Set(limit, LimitUse::Uncounted(unseen)) => {
            let why = format!(
                "the driver counts nothing against a limit of {limit} on {gpu}, where the pod has {unseen}"
            );
            Some((names::LIMIT_NOT_ENFORCED, why))
        }
        LimitState::Set(limit, LimitUse::Exceeded(counted)) => {
            let why = format!("the driver let a pod have {counted} of {gpu}, above its limit of {limit}");
            Some((names::LIMIT_NOT_ENFORCED, why))
        }
        LimitState::Set(..) | LimitState::Unsupported => None,
    });
    let mut all = limits.values();
    match (refused.next(), limits.is_empty()) {
        (Some((reason, why)), _) => condition(false, reason, why),
        (None, true) => pending_condition(names::DRIVER_LIMITS, "no pod has had device memory yet"),
        (None, false) if all.clone().any(|limit| *limit == LimitState::Unsupported) => {
            let why = "the driver offers no memory limits; the shim alone enforces quotas";
            condition(false, names::NOT_OFFERED, why.to_owned())
        }
        (None, false) if all.all(|limit| matches!(limit, LimitState::Set(_, LimitUse::Unused))) => {
            let why = "limits are set; the driver has counted no pod's memory yet";
            pending_condition(names::DRIVER_LIMITS, why)
        }
        (None, false) => condition(true, names::OK, "the driver enforces quotas too".to_owned()),
    }
}

pub(super) fn retained_memory_condition(retained: &RetainedStatus) -> ConditionUpdate {
    let condition = |holds, reason, message: &str| {
        ConditionUpdate::new(names::RETAINED_MEMORY, holds, reason, message)
    };
    let RetainedStatus {
        enabled,
        is_store_connected,
        scrubbed: _,
        refused,
        runtimes,
        live: _,
        readable: _,
        leases: _,
        uncharged,
    } = retained;
    let in_state = |state: RuntimeState| {
        let mut found = runtimes.iter();
        found.find(|(_, runtime)| runtime.state == state)
    };
    let problem = in_state(RuntimeState::Stuck).or_else(|| in_state(RuntimeState::Refused));
    match (refused.iter().next(), problem) {
        _ if !enabled => condition(
            false,
            names::SWITCHED_OFF,
            "switched off in the agent's configuration",
        ),
        _ if !is_store_connected => condition(
            false,
            names::FD_STORE_UNAVAILABLE,
            "the fd store does not reply: see its pod's log; if its version is not the agent's, \
             delete the pod, which ends all retained memory",
        ),
        (_, Some((gpu, runtime))) if runtime.state == RuntimeState::Refused => condition(
            false,
            names::CUDA_REFUSED,
            &format!("CUDA refuses {gpu}: {}", runtime.reason),
        ),
        (_, Some((gpu, _))) => condition(
            false,
            names::PROVISIONER_HUNG,
            &format!(
                "the provisioner of {gpu} hangs in the driver: reset the GPU or restart the node"
            ),
        ),
        (Some((gpu, why)), None) => condition(false, names::NOT_SCRUBBED, &format!("{gpu}: {why}")),
        (None, None) if *uncharged > 0 => condition(
            false,
            names::NOT_UNDERSTOOD,
            &format!(
                "failed to read GPU and size of {uncharged} retained leases: another version of the agent wrote \
                 them; run that version, or restart the fdstore's pod, which ends all retained memory"
            ),
        ),
        (None, None) => condition(
            true,
            names::OK,
            "memory can outlive the processes that use it",
        ),
    }
}

pub(super) fn sole_owner_condition(owners: &GpuOwners) -> ConditionUpdate {
    let condition = |holds, reason, message: String| {
        ConditionUpdate::new(names::SOLE_OWNER, holds, reason, message)
    };
    match owners {
        GpuOwners::Unknown => pending_condition(
            names::SOLE_OWNER,
            "the kubelet has not listed the devices of all plugins yet",
        ),
        GpuOwners::BursarAlone => condition(
            true,
            names::OK,
            "no other device plugin offers GPUs of this node".to_owned(),
        ),
        GpuOwners::OtherPlugin { resource, devices } => condition(
            false,
            names::OTHER_PLUGIN,
            format!(
                "another device plugin offers {devices} {resource} too, and gives out the same GPUs; label the \
                 node nvidia.com/gpu.deploy.device-plugin=false, or bursar.dev/agent=false"
            ),
        ),
    }
}

/// The condition of a node with this configured capacity of managed memory.
pub(super) fn managed_memory_condition(configured: Bytes, module: &UvmModule) -> ConditionUpdate {
    let condition = |holds, reason, message: String| {
        ConditionUpdate::new(names::MANAGED_MEMORY, holds, reason, message)
    };
    match module.check_eviction() {
        _ if configured == Bytes::ZERO => condition(
            false,
            names::SWITCHED_OFF,
            "gpuMemory.managedPerNode is 0; the quotas of GPUs cover managed memory".to_owned(),
        ),
        Err(why @ (EvictionUnsafe::NotLoaded | EvictionUnsafe::AwaitsFirstStarts)) => {
            pending_condition(names::MANAGED_MEMORY, &why.to_string())
        }
        Err(why) => condition(false, names::EVICTION_UNSAFE, why.to_string()),
        Ok(()) => condition(
            true,
            names::OK,
            "pods may request managed memory beside the quotas of GPUs".to_owned(),
        ),
    }
}

pub(super) fn pageable_memory_condition(module: &UvmModule, has_ats: bool) -> ConditionUpdate {
    let condition = |holds, reason, message| {
        ConditionUpdate::new(names::PAGEABLE_MEMORY_ON_GPU, holds, reason, message)
    };
    match module.pageable_memory(has_ats) {
        PageableMemory::Unknown => pending_condition(
            names::PAGEABLE_MEMORY_ON_GPU,
            "the driver's module nvidia_uvm is not loaded",
        ),
        PageableMemory::OnHost => condition(false, names::OK, "host memory stays on the host"),
        PageableMemory::Hmm => condition(
            true,
            names::HMM_ENABLED,
            "the driver may move host memory of programs to GPUs, where no quota counts it; load \
             nvidia_uvm with uvm_disable_hmm=1",
        ),
        PageableMemory::Ats => condition(
            true,
            names::ATS_ENABLED,
            "GPUs may access host memory of programs, and hold it, where no quota counts it; use the \
             driver's coherent memory management (CDMM)",
        ),
    }
}

pub(super) fn memory_scrubbed_condition(
    snapshot: &Snapshot,
    retained: &RetainedStatus,
) -> ConditionUpdate {
    let condition = |holds, reason, message: &str| {
        ConditionUpdate::new(names::MEMORY_SCRUBBED, holds, reason, message)
    };
    let mut gpus = snapshot.inventory.gpus().iter();
    match retained.refused.iter().next() {
        Some((gpu, why)) => condition(
            false,
            names::NOT_SCRUBBED,
            &format!(
                "{gpu}: {why}; the GPU serves one namespace until the node restarts, or set sharing.allowUnscrubbed"
            ),
        ),
        None if gpus.all(|state| retained.scrubbed.contains(&state.gpu.uuid)) => {
            condition(true, names::OK, "freed memory comes back cleared")
        }
        None => pending_condition(
            names::MEMORY_SCRUBBED,
            "not every GPU has had its scrub check yet",
        ),
    }
}

pub(super) fn accepted_condition(ordered: &AppliedSpec) -> ConditionUpdate {
    let AppliedSpec {
        generation,
        unrecognized: not_understood,
        ..
    } = ordered;
    let version = env!("CARGO_PKG_VERSION");
    match not_understood.as_slice() {
        [] if generation.is_none() => {
            pending_condition(names::ACCEPTED, "the agent has read no spec yet")
        }
        [] => ConditionUpdate::new(
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
                delete these entries"
            );
            ConditionUpdate::new(names::ACCEPTED, false, names::NOT_UNDERSTOOD, message)
        }
    }
}

fn pending_condition(type_: &'static str, message: &str) -> ConditionUpdate {
    ConditionUpdate {
        type_,
        holds: None,
        reason: names::PENDING,
        message: message.to_owned(),
    }
}
