//! Names the reasons of all Events that the agent publishes.

use kube::runtime::events::EventType;

/// The reasons of all Events that the agent publishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// A container was bound to a GPU or to managed memory.
    Bound,
    /// A container waits on the node until memory is free.
    WaitingForRoom,
    /// A container cannot be bound, for another reason than lack of memory.
    NotBound,
    /// A GPU became unhealthy.
    GpuUnhealthy,
    /// A GPU became healthy again.
    GpuHealthy,
    /// The contents of a GPU's memory are lost; its memory has a new generation.
    GpuMemoryLost,
    /// There is no driver, or the driver has no GPU.
    GpusMissing,
    /// The node has more device ids than the kubelet can handle.
    TooManyDeviceIds,
    /// The checkpoint was malformed; the agent rebuilt it from the node.
    CheckpointRebuilt,
    /// The checkpoint cannot be written.
    CheckpointUnwritable,
    /// CDI files cannot be written.
    CdiUnusable,
    /// The kubelet does not accept the plugin.
    RegistrationFailed,
    /// A container uses more than its quota.
    OverQuota,
    /// A process uses a GPU without a session.
    UntrackedProcess,
    /// A process wrote credit into its own credit page.
    TamperedPage,
    /// Memory of a GPU is in use and charged to no container.
    Unaccounted,
    /// Processes still hold memory that ended pods had exported.
    MemoryLeaked,
    /// Processes ran on after the end of their pod, and were killed.
    OutlivedPod,
    /// The audit's policy killed a process.
    Killed,
    /// The shim denied allocations of a container for lack of quota.
    MemoryDenied,
    /// A program runs again after a fault had poisoned its context.
    ContextRestarted,
    /// A fault has poisoned a process's context.
    ContextPoisoned,
    /// The quota of a container is not enforced.
    NotEnforced,
    /// The quota of a container is enforced again.
    Enforced,
    /// Weights of compute time may not hold on a GPU.
    ComputeNotHeld,
}

impl Reason {
    /// The reason in the Event and in metric labels.
    pub const fn as_str(self) -> &'static str {
        self.describe().0
    }

    pub(super) const fn type_(self) -> EventType {
        self.describe().1
    }

    const fn describe(self) -> (&'static str, EventType) {
        use EventType::{Normal, Warning};
        match self {
            Self::Bound => ("GpuMemoryBound", Normal),
            Self::WaitingForRoom => ("WaitingForGpuMemory", Warning),
            Self::NotBound => ("GpuMemoryNotBound", Warning),
            Self::GpuUnhealthy => ("GpuUnhealthy", Warning),
            Self::GpuHealthy => ("GpuHealthy", Normal),
            // A reboot loses it too, which an admin expects.
            Self::GpuMemoryLost => ("GpuMemoryLost", Normal),
            Self::GpusMissing => ("GpusMissing", Warning),
            Self::TooManyDeviceIds => ("TooManyDeviceIds", Warning),
            Self::CheckpointRebuilt => ("CheckpointRebuilt", Warning),
            Self::CheckpointUnwritable => ("CheckpointUnwritable", Warning),
            Self::CdiUnusable => ("CdiUnusable", Warning),
            Self::RegistrationFailed => ("RegistrationFailed", Warning),
            Self::OverQuota => ("GpuMemoryOverQuota", Warning),
            Self::UntrackedProcess => ("GpuUntrackedProcess", Warning),
            Self::TamperedPage => ("GpuCreditTampered", Warning),
            Self::Unaccounted => ("GpuMemoryUnaccounted", Warning),
            Self::MemoryLeaked => ("GpuMemoryLeaked", Warning),
            Self::OutlivedPod => ("GpuProcessesOutlivedPod", Warning),
            Self::Killed => ("GpuProcessKilled", Warning),
            Self::MemoryDenied => ("GpuMemoryDenied", Warning),
            Self::ContextRestarted => ("GpuContextRestarted", Normal),
            Self::ContextPoisoned => ("GpuContextPoisoned", Warning),
            Self::NotEnforced => ("GpuQuotaNotEnforced", Warning),
            Self::Enforced => ("GpuQuotaEnforced", Normal),
            Self::ComputeNotHeld => ("GpuComputeNotHeld", Warning),
        }
    }
}
