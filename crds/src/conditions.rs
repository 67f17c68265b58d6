//! Defines the types and reasons of every condition, and merges conditions into a status.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// Condition types and reasons of a `GpuMemoryBudget`.
pub mod budget {
    /// The budget is accepted, enforced and not exceeded, and its cohort has nodes.
    pub const READY: &str = "Ready";
    /// The operator understands the spec.
    pub const ACCEPTED: &str = "Accepted";
    /// The guarantees of the budget's cohort fit the allocatable memory of the cohort's nodes.
    pub const COVERED: &str = "Covered";
    /// The namespace's pods request more than the budget allows.
    pub const EXCEEDED: &str = "Exceeded";
    /// The API server refuses pods of the namespace beyond the budget.
    pub const ENFORCED: &str = "Enforced";

    /// Nothing is wrong.
    pub const AS_DECLARED: &str = "AsDeclared";
    /// An amount in the spec cannot be read, or amounts contradict each other.
    pub const INVALID_SPEC: &str = "InvalidSpec";
    /// The cohort's guarantees fit.
    pub const GUARANTEES_FIT: &str = "GuaranteesFit";
    /// The cohort's guarantees sum to more than its nodes have.
    pub const OVERCOMMITTED: &str = "Overcommitted";
    /// The cohort has no node with GPUs.
    pub const NO_NODES: &str = "NoNodes";
    /// Pods request no more than the budget allows.
    pub const WITHIN_BUDGET: &str = "WithinBudget";
    /// Guaranteed pods request more than the guarantee.
    pub const OVER_GUARANTEE: &str = "OverGuarantee";
    /// All pods together request more than the limit.
    pub const OVER_LIMIT: &str = "OverLimit";
    /// Pods request more managed memory than its limit.
    pub const OVER_MANAGED_LIMIT: &str = "OverManagedLimit";
    /// The budget's quotas refuse pods that do not fit.
    pub const QUOTAS_IN_FORCE: &str = "QuotasInForce";
    /// The operator has not written a ResourceQuota yet, or its controller has not processed it.
    pub const QUOTA_PENDING: &str = "QuotaPending";
}

/// Condition types and reasons of a `GpuNode`.
pub mod gpu_node {
    /// The agent binds pods to this node's GPUs: each condition holds that counts for `Ready`.
    pub const READY: &str = "Ready";
    /// The NVIDIA driver answers and has at least one GPU.
    pub const GPUS_FOUND: &str = "GpusFound";
    /// The plugin is registered with the kubelet.
    pub const REGISTERED: &str = "Registered";
    /// The agent can write CDI files where the container runtime reads them.
    pub const CDI_READY: &str = "CdiReady";
    /// The node has no more device ids than the kubelet can handle.
    pub const WITHIN_DEVICE_ID_LIMIT: &str = "WithinDeviceIdLimit";
    /// The agent's checkpoint is intact and can be written.
    pub const CHECKPOINT_INTACT: &str = "CheckpointIntact";
    /// The state directory has the agent's newest records; does not count for `Ready`.
    pub const STATE_WRITTEN: &str = "StateWritten";
    /// The agent compares each GPU's use with its accounts every second.
    pub const AUDITED: &str = "Audited";
    /// The driver enforces quotas too, by cgroup; does not count for `Ready`.
    pub const DRIVER_LIMITS: &str = "DriverLimits";

    /// Programs can have retained memory; does not count for `Ready`.
    pub const RETAINED_MEMORY: &str = "RetainedMemory";

    /// The scrub check saw every GPU's driver clear freed memory; does not count for `Ready`.
    pub const MEMORY_SCRUBBED: &str = "MemoryScrubbed";

    /// The agent understands the spec and its configuration; does not count for `Ready`.
    pub const ACCEPTED: &str = "Accepted";

    /// No other device plugin offers the node's GPUs; does not count for `Ready`.
    pub const SOLE_OWNER: &str = "SoleOwner";

    /// The node offers managed memory beside the quotas of GPUs; does not count for `Ready`.
    pub const MANAGED_MEMORY: &str = "ManagedMemory";

    /// The driver may move host memory of programs to GPUs, where no quota counts it; does not
    /// count for `Ready`.
    pub const PAGEABLE_MEMORY_ON_GPU: &str = "PageableMemoryOnGpu";

    /// The agent can read which container has which device from the kubelet's own file, whose
    /// format is not an API.
    pub const KUBELET_CHECKPOINT_READABLE: &str = "KubeletCheckpointReadable";

    /// The driver's files on disk are of another version than its loaded module; does not count
    /// for `Ready`.
    pub const DRIVER_CHANGED: &str = "DriverChanged";

    /// The condition holds.
    pub const OK: &str = "Ok";
    /// The agent has not checked yet.
    pub const PENDING: &str = "Pending";
    /// A condition that counts for `Ready` does not hold; the message names it.
    pub const NOT_READY: &str = "NotReady";
    /// The operator misses the node's agent, so the status is old.
    pub const AGENT_AWAY: &str = "AgentAway";
    /// No NVIDIA driver under the configured root.
    pub const DRIVER_MISSING: &str = "DriverMissing";
    /// NVML was found and fails.
    pub const DRIVER_FAILED: &str = "DriverFailed";
    /// The driver has no GPU.
    pub const NO_GPUS: &str = "NoGpus";
    /// Every GPU is unhealthy.
    pub const NO_HEALTHY_GPU: &str = "NoHealthyGpu";
    /// The kubelet's socket is not there or does not answer.
    pub const KUBELET_UNREACHABLE: &str = "KubeletUnreachable";
    /// The plugin relay runs and does not answer.
    pub const RELAY_SILENT: &str = "RelaySilent";
    /// The kubelet refused the registration.
    pub const REGISTRATION_REFUSED: &str = "RegistrationRefused";
    /// The kubelet's folder cannot be read or written.
    pub const KUBELET_FOLDER: &str = "KubeletFolderUnusable";
    /// The CDI folder cannot be written.
    pub const CDI_FOLDER: &str = "CdiFolderUnusable";
    /// The node's container runtime does not inject CDI devices.
    pub const CDI_UNSUPPORTED: &str = "CdiUnsupported";
    /// The node has more device ids than the kubelet can handle; a larger quantum helps.
    pub const TOO_MANY_DEVICE_IDS: &str = "TooManyDeviceIds";
    /// The checkpoint was malformed, and the agent has rebuilt it from the node's state.
    pub const CHECKPOINT_REBUILT: &str = "CheckpointRebuilt";
    /// The kubelet's file of devices is missing or has another form.
    pub const KUBELET_CHECKPOINT_UNREAD: &str = "KubeletCheckpointUnread";
    /// The kubelet's file of devices has entries of another form.
    pub const KUBELET_CHECKPOINT_PARTLY_READ: &str = "KubeletCheckpointPartlyRead";
    /// The checkpoint cannot be written (full disk, read-only).
    pub const CHECKPOINT_UNWRITABLE: &str = "CheckpointUnwritable";
    /// A file of the state directory has lacked its newest value for 5 s.
    pub const WRITE_LATE: &str = "WriteLate";
    /// NVML has not reported the use of a GPU for 5 s.
    pub const AUDIT_STALE: &str = "AuditStale";
    /// The driver has no memory limits for a GPU, or the host no cgroup v2.
    pub const NOT_OFFERED: &str = "NotOffered";
    /// Switched off in the agent's configuration.
    pub const SWITCHED_OFF: &str = "SwitchedOff";
    /// The fd store of retained memory does not answer.
    pub const FD_STORE_UNAVAILABLE: &str = "FdStoreUnavailable";
    /// The scrub check has not seen the driver of a GPU clear freed memory.
    pub const NOT_SCRUBBED: &str = "NotScrubbed";
    /// The provisioner of a GPU hangs in the driver.
    pub const PROVISIONER_HUNG: &str = "ProvisionerHung";
    /// CUDA refuses a GPU on which NVML works.
    pub const CUDA_REFUSED: &str = "CudaRefused";
    /// The spec or the configuration is of another version.
    pub const NOT_UNDERSTOOD: &str = "NotUnderstood";
    /// Another device plugin offers the node's GPUs too.
    pub const OTHER_PLUGIN: &str = "OtherPlugin";
    /// The driver refused a memory limit.
    pub const LIMIT_REFUSED: &str = "LimitRefused";
    /// The driver has a memory limit and does not enforce it.
    pub const LIMIT_NOT_ENFORCED: &str = "LimitNotEnforced";
    /// The driver cannot always move managed memory out of a neighbour's way.
    pub const EVICTION_UNSAFE: &str = "EvictionUnsafe";
    /// The driver's heterogeneous memory management (HMM) is on.
    pub const HMM_ENABLED: &str = "HmmEnabled";
    /// The driver may use address translation services (ATS) of the platform.
    pub const ATS_ENABLED: &str = "AtsEnabled";
    /// The driver's files were replaced, and its module was not loaded again.
    pub const MODULE_NOT_RELOADED: &str = "ModuleNotReloaded";
}

/// A condition without its transition time and observed generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConditionUpdate {
    /// A type from [`budget`] or [`gpu_node`].
    pub type_: &'static str,
    /// `None` is Unknown.
    pub holds: Option<bool>,
    /// A reason from [`budget`] or [`gpu_node`].
    pub reason: &'static str,
    /// A sentence for people. Without times and counters, so that it changes only with the state.
    pub message: String,
}

impl ConditionUpdate {
    /// A condition with its status as `True` or `False`.
    pub fn new(
        type_: &'static str,
        holds: bool,
        reason: &'static str,
        message: impl Into<String>,
    ) -> Self {
        Self {
            type_,
            holds: Some(holds),
            reason,
            message: message.into(),
        }
    }

    /// Whether the condition keeps its `GpuNode` from being ready.
    pub fn is_problem(&self) -> bool {
        const SPARED: [&str; 9] = [
            gpu_node::STATE_WRITTEN,
            gpu_node::DRIVER_LIMITS,
            gpu_node::RETAINED_MEMORY,
            gpu_node::MEMORY_SCRUBBED,
            gpu_node::ACCEPTED,
            gpu_node::SOLE_OWNER,
            gpu_node::MANAGED_MEMORY,
            gpu_node::PAGEABLE_MEMORY_ON_GPU,
            gpu_node::DRIVER_CHANGED,
        ];
        let is_spared =
            SPARED.contains(&self.type_) || self.reason == gpu_node::KUBELET_CHECKPOINT_PARTLY_READ;
        self.holds != Some(true) && !is_spared
    }
}

/// Merges `statements` into the conditions `before`: an unchanged status keeps its transition
/// time.
///
/// Drops conditions without a statement; keeps the order of the statements.
pub fn update_conditions(
    before: &[Condition],
    statements: &[ConditionUpdate],
    generation: Option<i64>,
    now: &Time,
) -> Vec<Condition> {
    statements
        .iter()
        .map(|statement| {
            let status = match statement.holds {
                Some(true) => "True",
                Some(false) => "False",
                None => "Unknown",
            };
            let since = before
                .iter()
                .find(|old| old.type_ == statement.type_ && old.status == status)
                .map_or_else(|| now.clone(), |old| old.last_transition_time.clone());
            Condition {
                type_: statement.type_.to_owned(),
                status: status.to_owned(),
                reason: statement.reason.to_owned(),
                message: statement.message.clone(),
                observed_generation: generation,
                last_transition_time: since,
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::jiff::Timestamp;

    fn at(second: i64) -> Time {
        Time(Timestamp::from_second(second).unwrap())
    }

    fn covered(holds: bool, message: &str) -> ConditionUpdate {
        ConditionUpdate::new(budget::COVERED, holds, budget::GUARANTEES_FIT, message)
    }

    #[test]
    fn transition_time_changes_only_with_the_status() {
        let first = update_conditions(&[], &[covered(true, "a")], Some(1), &at(10));
        let second = update_conditions(&first, &[covered(true, "b")], Some(2), &at(20));
        assert_eq!(second[0].last_transition_time, at(10));
        assert_eq!(second[0].message, "b");
        assert_eq!(second[0].observed_generation, Some(2));
        let third = update_conditions(&second, &[covered(false, "b")], Some(2), &at(30));
        assert_eq!(third[0].last_transition_time, at(30));
    }

    #[test]
    fn saying_the_same_again_changes_nothing() {
        let first = update_conditions(&[], &[covered(true, "a")], Some(1), &at(10));
        assert_eq!(
            update_conditions(&first, &[covered(true, "a")], Some(1), &at(99)),
            first
        );
    }
}
