//! Names the differences between the driver's figures and the accounts.

use bursar_host::procfs::ProcessOwner;
use bursar_ledger::units::{AllocationId, Bytes, GpuUuid, PodUid};
use bursar_sessions::Process;

/// A difference between the driver's figures and the accounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// A container has more of a GPU than its quota and all allowances.
    OverQuota {
        /// The container's allocation.
        allocation: AllocationId,
        /// The GPU's UUID.
        gpu: GpuUuid,
        /// The container's quota.
        quota: Bytes,
        /// The bytes that the driver charges to the container's processes.
        charged: Bytes,
        /// The processes with more than their grant and allowance; all of them if none has more.
        processes: Vec<Process>,
    },
    /// A process without a session uses a GPU.
    UntrackedProcess {
        /// The GPU's UUID.
        gpu: GpuUuid,
        /// The process.
        process: Process,
        /// The bytes that the driver charges to the process.
        bytes: Option<Bytes>,
        /// The pod or host to which the process belongs.
        owner: ProcessOwner,
        /// The allocation of its container, if the agent gave it a GPU.
        allocation: Option<AllocationId>,
    },
    /// A process wrote another grant into its credit page.
    TamperedPage {
        /// The allocation of its container.
        allocation: AllocationId,
        /// The process.
        process: Process,
    },
    /// A process uses the driver past the shim. The driver does not list the process, because it
    /// has no context, or has the files of an ended process. Its GPU has unaccounted memory.
    Holder {
        /// The GPU's UUID.
        gpu: GpuUuid,
        /// The process.
        process: Process,
        /// The GPU's unaccounted bytes.
        bytes: Bytes,
        /// The pod of the process.
        pod: PodUid,
        /// The allocation of its container, or one of its pod, if the agent gave the pod memory of
        /// the GPU.
        allocation: Option<AllocationId>,
        /// The bytes that it has imported, if they exceed what all accounts know to be exported.
        imported: Option<Bytes>,
        /// Whether no other pod has such a process.
        is_only_suspect: bool,
    },
    /// A container has more managed memory mapped than it was charged, and its GPU has unaccounted
    /// memory.
    OverManaged {
        /// The container's allocation.
        allocation: AllocationId,
        /// The GPU's UUID.
        gpu: GpuUuid,
        /// The bytes of managed memory that the container was charged.
        charged: Bytes,
        /// The bytes of managed memory that its processes have mapped.
        mapped: Bytes,
        /// The unaccounted bytes that may be its managed memory.
        bytes: Bytes,
    },
    /// A GPU has memory in use that neither the driver nor the accounts charge.
    Unaccounted {
        /// The GPU's UUID.
        gpu: GpuUuid,
        /// The number of bytes.
        bytes: Bytes,
        /// The container whose processes use the driver, if no other has memory of the GPU, the
        /// driver lists no process of another owner, and the bytes exceed what processes of the
        /// host may have left.
        only_container: Option<AllocationId>,
    },
}

impl Finding {
    /// Every kind.
    pub const KINDS: [&'static str; 6] = [
        "over-quota",
        "untracked-process",
        "tampered-page",
        "holder",
        "over-managed",
        "unaccounted",
    ];

    /// The allocation whose container the finding names. Of several suspects one may be innocent,
    /// so the finding names none of them.
    pub fn allocation(&self) -> Option<AllocationId> {
        match self {
            Self::OverQuota { allocation, .. }
            | Self::TamperedPage { allocation, .. }
            | Self::OverManaged { allocation, .. } => Some(*allocation),
            Self::UntrackedProcess { allocation, .. } => *allocation,
            Self::Holder {
                allocation,
                is_only_suspect,
                ..
            } => allocation.filter(|_| *is_only_suspect),
            Self::Unaccounted { only_container, .. } => *only_container,
        }
    }

    /// The kind of the finding, for metrics.
    pub fn kind(&self) -> &'static str {
        let [
            over_quota,
            untracked_process,
            tampered_page,
            holder,
            over_managed,
            unaccounted,
        ] = Self::KINDS;
        match self {
            Self::OverQuota { .. } => over_quota,
            Self::UntrackedProcess { .. } => untracked_process,
            Self::TamperedPage { .. } => tampered_page,
            Self::Holder { .. } => holder,
            Self::OverManaged { .. } => over_managed,
            Self::Unaccounted { .. } => unaccounted,
        }
    }
}
