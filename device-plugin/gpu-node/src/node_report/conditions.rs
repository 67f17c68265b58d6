//! Decides the conditions of the node: pure.

use bursar_crds::conditions::{ConditionUpdate, gpu_node as names};
use bursar_crds::gpu_node::RuntimeState;
use bursar_enforcement::audit::AuditStatus;
use bursar_enforcement::driver_limits::{LimitState, LimitUse, Limits};
use bursar_gpu::uvm::{EvictionUnsafe, PageableMemory, UvmModule};
use bursar_gpu::{Inventory, NoDriver};
use bursar_host::checkpoint::write_behind::LateWrite;
use bursar_host::driver_files::DriverVersions;
use bursar_kubelet::lifecycle::{NotRegistered, Registration};
use bursar_ledger::units::Bytes;
use bursar_node::actor::Snapshot;
use bursar_node::allocator::KubeletCheckpointProblem;
use bursar_node::host::Subsystem;
use bursar_node::other_plugins::GpuOwners;
use bursar_retained::status::RetainedStatus;

use super::{ReportInputs, late_write};
use crate::quota_overrides::AppliedSpec;

/// The state of each condition except `Ready`.
pub(super) fn conditions(snapshot: &Snapshot, inputs: &ReportInputs) -> Vec<ConditionUpdate> {
    let ReportInputs {
        config,
        unknown_keys,
        registration,
        runtime_problem,
        audited,
        limits,
        overrides,
        retained,
        owners,
        ..
    } = inputs;
    let has_ats = cfg!(target_arch = "aarch64");
    let managed = managed_memory(config.managed_capacity, &snapshot.uvm);
    let states = [
        (names::GPUS_FOUND, gpus_found(snapshot)),
        (names::REGISTERED, registered(registration)),
        (
            names::CDI_READY,
            cdi_ready(snapshot, runtime_problem.as_deref()),
        ),
        (names::WITHIN_DEVICE_ID_LIMIT, token_limit(snapshot)),
        (names::CHECKPOINT_INTACT, checkpoint_intact(snapshot)),
        (
            names::STATE_WRITTEN,
            state_written(late_write(snapshot, audited)),
        ),
        (names::AUDITED, audit_state(audited)),
        (names::DRIVER_LIMITS, driver_limits(limits)),
        (names::RETAINED_MEMORY, retained_memory(retained)),
        (names::MEMORY_SCRUBBED, memory_scrubbed(snapshot, retained)),
        (names::ACCEPTED, accepted(overrides, unknown_keys)),
        (names::SOLE_OWNER, sole_owner(owners)),
        (names::MANAGED_MEMORY, managed),
        (
            names::PAGEABLE_MEMORY_ON_GPU,
            pageable_memory(&snapshot.uvm, has_ats),
        ),
        (
            names::KUBELET_CHECKPOINT_READABLE,
            kubelet_checkpoint(snapshot.problems.kubelet_checkpoint.as_ref()),
        ),
        (names::DRIVER_CHANGED, driver_changed(&snapshot.driver)),
    ];
    let updates = states.into_iter().map(|(type_, state)| ConditionUpdate {
        type_,
        holds: state.holds,
        reason: state.reason,
        message: state.message,
    });
    updates.collect()
}

fn gpus_found(snapshot: &Snapshot) -> State {
    if let Some((Subsystem::Driver, message)) = &snapshot.problems.host {
        return holds_not(names::DRIVER_FAILED, message.clone());
    }
    match &snapshot.inventory {
        Inventory::Starting => pending("NVML has not answered yet"),
        Inventory::NoDriver(why @ NoDriver::Missing(_)) => {
            holds_not(names::DRIVER_MISSING, why.to_string())
        }
        Inventory::NoDriver(why @ (NoDriver::Failed(_) | NoDriver::NotLoaded(_))) => {
            holds_not(names::DRIVER_FAILED, why.to_string())
        }
        Inventory::NoGpu => holds_not(names::NO_GPUS, "the driver lists no GPU"),
        Inventory::Gpus { gpus, .. } => {
            let healthy = gpus.iter().filter(|gpu| gpu.health.is_healthy()).count();
            let message = format!("{healthy} of {} GPUs are healthy", gpus.len());
            match healthy {
                0 => holds_not(names::NO_HEALTHY_GPU, message),
                _ => ok(message),
            }
        }
    }
}

fn registered(registration: &Registration) -> State {
    let why = match registration {
        Registration::Registered => {
            return ok("the kubelet watches this node's devices");
        }
        Registration::NotRegistered(why) => why,
    };
    let reason = match why {
        NotRegistered::Starting | NotRegistered::Stopped => {
            return pending(why.to_string());
        }
        NotRegistered::Directory(_) | NotRegistered::CannotServe(_) => names::KUBELET_FOLDER,
        NotRegistered::NoKubelet(_) | NotRegistered::NoStream | NotRegistered::Relay(_) => {
            names::KUBELET_UNREACHABLE
        }
        NotRegistered::RelaySilent => names::RELAY_SILENT,
        NotRegistered::Refused(_) => names::REGISTRATION_REFUSED,
    };
    holds_not(reason, why.to_string())
}

fn cdi_ready(snapshot: &Snapshot, runtime: Option<&str>) -> State {
    match (&snapshot.problems.cdi, &snapshot.problems.host, runtime) {
        (Some(message), _, _) | (None, Some((Subsystem::Cdi, message)), _) => {
            holds_not(names::CDI_FOLDER, message)
        }
        (None, _, Some(message)) => holds_not(names::CDI_UNSUPPORTED, message),
        (None, _, None) => ok("CDI files can be written"),
    }
}

fn token_limit(snapshot: &Snapshot) -> State {
    match &snapshot.devices_error {
        Some(refused) => holds_not(names::TOO_MANY_DEVICE_IDS, refused.to_string()),
        None => ok("the number of devices is within the kubelet's limit"),
    }
}

fn checkpoint_intact(snapshot: &Snapshot) -> State {
    let problems = &snapshot.problems;
    match (&problems.checkpoint, &problems.host, &problems.rebuilt) {
        (Some(message), _, _) | (None, Some((Subsystem::Records, message)), _) => {
            holds_not(names::CHECKPOINT_UNWRITABLE, message.clone())
        }
        (None, _, Some(why)) => holds(
            names::CHECKPOINT_REBUILT,
            format!("rebuilt from the node's CDI files and the kubelet's records: {why}"),
        ),
        (None, _, None) => ok("the checkpoint is intact"),
    }
}

fn kubelet_checkpoint(problem: Option<&KubeletCheckpointProblem>) -> State {
    let Some(KubeletCheckpointProblem { error, is_whole }) = problem else {
        return ok("the kubelet's record of devices can be read");
    };
    match is_whole {
        true => holds_not(
            names::KUBELET_CHECKPOINT_UNREAD,
            format!(
                "{error}, so no container with GPU memory starts; install a version of Bursar \
                 that supports this kubelet"
            ),
        ),
        false => holds_not(
            names::KUBELET_CHECKPOINT_PARTLY_READ,
            format!(
                "{error}, so the containers of these do not start, and the devices of ended pods are \
                 kept until the kubelet drops them"
            ),
        ),
    }
}

fn state_written(late: Option<&LateWrite>) -> State {
    match late {
        None => ok("the state directory has the newest records"),
        Some(LateWrite { directory, lag: _ }) => holds_not(
            names::WRITE_LATE,
            format!(
                "failed to write to {} for 5 s: the disk hangs or refuses; check the disk of paths.state-dir",
                directory.display()
            ),
        ),
    }
}

fn audit_state(audited: &AuditStatus) -> State {
    let AuditStatus {
        has_run,
        stale_gpus: stale,
        hanging_pods: hanging,
        ..
    } = audited;
    if !has_run {
        return pending("no audit yet");
    }
    let list = |all: &mut dyn Iterator<Item = &str>| all.collect::<Vec<_>>().join(", ");
    if !stale.is_empty() {
        let gpus = list(&mut stale.iter().map(bursar_ledger::units::GpuUuid::as_str));
        let message = format!("failed to list the processes of {gpus}: NVML does not answer");
        return holds_not(names::AUDIT_STALE, message);
    }
    if !hanging.is_empty() {
        let pods = list(&mut hanging.iter().map(bursar_ledger::units::PodUid::as_str));
        let message = format!(
            "failed to read the processes of the pods with the UIDs {pods}: the kernel does not answer"
        );
        return holds_not(names::AUDIT_STALE, message);
    }
    ok("every audit is recent")
}

fn driver_limits(limits: &Limits) -> State {
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
        (Some((reason, why)), _) => holds_not(reason, why),
        (None, true) => pending("no pod has had device memory yet"),
        (None, false) if all.clone().any(|limit| *limit == LimitState::Unsupported) => {
            let why = "the driver offers no memory limits; the shim alone enforces quotas";
            holds_not(names::NOT_OFFERED, why)
        }
        (None, false) if all.all(|limit| matches!(limit, LimitState::Set(_, LimitUse::Unused))) => {
            let why = "limits are set; the driver has counted no pod's memory yet";
            pending(why)
        }
        (None, false) => ok("the driver enforces quotas too"),
    }
}

fn retained_memory(retained: &RetainedStatus) -> State {
    let RetainedStatus {
        enabled,
        is_store_connected,
        store_losses: _,
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
        _ if !enabled => holds_not(
            names::SWITCHED_OFF,
            "switched off in the agent's configuration",
        ),
        _ if !is_store_connected => holds_not(
            names::FD_STORE_UNAVAILABLE,
            "the fd store does not reply: see its pod's log and the agent's; if its version is not \
             the agent's, delete the pod, which ends all retained memory",
        ),
        (_, Some((gpu, runtime))) if runtime.state == RuntimeState::Refused => holds_not(
            names::CUDA_REFUSED,
            format!("CUDA refuses {gpu}: {}", runtime.reason),
        ),
        (_, Some((gpu, _))) => holds_not(
            names::PROVISIONER_HUNG,
            format!(
                "the provisioner of {gpu} hangs in the driver: reset the GPU or restart the node"
            ),
        ),
        (Some((gpu, why)), None) => holds_not(names::NOT_SCRUBBED, format!("{gpu}: {why}")),
        (None, None) if *uncharged > 0 => holds_not(
            names::NOT_UNDERSTOOD,
            format!(
                "failed to read GPU and size of {uncharged} retained leases: another version of the agent wrote \
                 them; run that version, or drain all GPUs of the node, which ends all retained memory"
            ),
        ),
        (None, None) => ok("memory can outlive the processes that use it"),
    }
}

fn sole_owner(owners: &GpuOwners) -> State {
    match owners {
        GpuOwners::Unknown => pending("the kubelet has not listed the devices of all plugins yet"),
        GpuOwners::BursarAlone => ok("no other device plugin offers GPUs of this node"),
        GpuOwners::OtherPlugin { resource, devices } => holds_not(
            names::OTHER_PLUGIN,
            format!(
                "another device plugin offers {devices} {resource} too, and gives out the same GPUs; label the \
                 node nvidia.com/gpu.deploy.device-plugin=false, or bursar.dev/agent=false"
            ),
        ),
    }
}

/// The condition of a node with this configured capacity of managed memory.
fn managed_memory(configured: Bytes, module: &UvmModule) -> State {
    match module.check_eviction() {
        _ if configured == Bytes::ZERO => holds_not(
            names::SWITCHED_OFF,
            "gpuMemory.managedPerNode is 0; the quotas of GPUs cover managed memory",
        ),
        Err(why @ (EvictionUnsafe::NotLoaded | EvictionUnsafe::AwaitsFirstStarts)) => {
            pending(why.to_string())
        }
        Err(why) => holds_not(names::EVICTION_UNSAFE, why.to_string()),
        Ok(()) => ok("pods may request managed memory beside the quotas of GPUs"),
    }
}

pub(super) fn pageable_memory(module: &UvmModule, has_ats: bool) -> State {
    match module.pageable_memory(has_ats) {
        PageableMemory::Unknown => pending("the driver's module nvidia_uvm is not loaded"),
        PageableMemory::OnHost => holds_not(names::OK, "host memory stays on the host"),
        PageableMemory::Hmm => holds(
            names::HMM_ENABLED,
            "the driver may move host memory of programs to GPUs, where no quota counts it; load \
             nvidia_uvm with uvm_disable_hmm=1",
        ),
        PageableMemory::Ats => holds(
            names::ATS_ENABLED,
            "GPUs may access host memory of programs, and hold it, where no quota counts it; use the \
             driver's coherent memory management (CDMM)",
        ),
    }
}

fn driver_changed(DriverVersions { files, module }: &DriverVersions) -> State {
    match (files, module) {
        (Some(files), Some(module)) if files != module => holds(
            names::MODULE_NOT_RELOADED,
            format!(
                "the driver's files are of version {files} and its loaded module is of {module}, so programs \
                 that start now fail to use CUDA; drain the node and load the module again, or restart the node"
            ),
        ),
        (Some(files), Some(_)) => holds_not(
            names::OK,
            format!("the driver's files and its loaded module are of version {files}"),
        ),
        _ => pending("the version of the driver's files or of its module is not known"),
    }
}

fn memory_scrubbed(snapshot: &Snapshot, retained: &RetainedStatus) -> State {
    let mut gpus = snapshot.inventory.gpus().iter();
    match retained.refused.iter().next() {
        Some((gpu, why)) => holds_not(
            names::NOT_SCRUBBED,
            format!(
                "{gpu}: {why}; the GPU serves one namespace until the node restarts, or set sharing.allowUnscrubbed"
            ),
        ),
        None if gpus.all(|state| retained.scrubbed.contains(&state.gpu.uuid)) => {
            ok("freed memory comes back cleared")
        }
        None => pending("not every GPU has had its scrub check yet"),
    }
}

fn accepted(ordered: &AppliedSpec, unknown_keys: &[String]) -> State {
    let spec = ordered.unrecognized.iter();
    let spec = spec.map(|entry| format!("spec.{entry}"));
    let keys = unknown_keys.iter();
    let keys = keys.map(|key| format!("{key} of the agent's configuration"));
    let mut unknown = spec.chain(keys);
    let Some(first) = unknown.next() else {
        return match ordered.generation {
            None => pending("the agent has read no spec yet"),
            Some(_) => ok("the agent understands the spec and its configuration"),
        };
    };
    let more = match unknown.count() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let version = env!("CARGO_PKG_VERSION");
    let message = format!(
        "failed to read {first}{more}: unknown to version {version} of the agent; upgrade the agent or delete these \
         entries"
    );
    holds_not(names::NOT_UNDERSTOOD, message)
}

/// The state of one condition.
pub(super) struct State {
    pub(super) holds: Option<bool>,
    pub(super) reason: &'static str,
    message: String,
}

fn ok(message: impl Into<String>) -> State {
    holds(names::OK, message)
}

fn holds(reason: &'static str, message: impl Into<String>) -> State {
    State {
        holds: Some(true),
        reason,
        message: message.into(),
    }
}

fn holds_not(reason: &'static str, message: impl Into<String>) -> State {
    State {
        holds: Some(false),
        ..holds(reason, message)
    }
}

fn pending(message: impl Into<String>) -> State {
    State {
        holds: None,
        ..holds(names::PENDING, message)
    }
}
