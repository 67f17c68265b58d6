//! Names the causes that explanations find, each with its remedy.

/// Why a pod does not run, or not as its owner wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// The namespace has no budget, and pods need one.
    NoBudget,
    /// The guarantee is used up.
    OverGuarantee,
    /// The limit is used up.
    OverLimit,
    /// The maximum of one container is lower.
    OverContainerMaximum,
    /// The budget's quotas are not in force yet.
    QuotaPending,
    /// No node has as much memory free in all.
    NoNodeWithRoom,
    /// No node has as much memory, used or free.
    LargerThanNodes,
    /// The node has as much free in all, and no single GPU has.
    Fragmentation,
    /// The node has fewer healthy GPUs than the pod is to be spread over.
    TooFewGpus,
    /// A GPU's free memory is reserved for another pod.
    HeldForAnother,
    /// An older pod of the same Deployment has the memory, and ends once the pod is ready.
    HeldByPredecessor,
    /// Pods of lower priority make room for the pod.
    VictimsLeave,
    /// A disruption budget protects a pod that should make room.
    DisruptionBudget,
    /// A GPU is drained, or is being drained.
    GpuDrained,
    /// A GPU does not answer.
    GpuLost,
    /// No agent works on the node.
    NodeWithoutAgent,
    /// Another plugin gives out the node's GPUs.
    OtherPlugin,
    /// The request counts bytes.
    WrongAmountForm,
    /// The container was denied memory at run time.
    Denied,
    /// A fault poisoned a context, and the program was started again.
    Poisoned,
    /// The program faults more often than the policy allows.
    BeyondMaximum,
    /// No process of the container found the driver.
    NoDriverInImage,
    /// The node has no driver.
    DriverMissing,
    /// The quota is not enforced.
    NotEnforced,
}

impl Cause {
    /// Every cause.
    pub const ALL: [Self; 24] = [
        Self::NoBudget,
        Self::OverGuarantee,
        Self::OverLimit,
        Self::OverContainerMaximum,
        Self::QuotaPending,
        Self::NoNodeWithRoom,
        Self::LargerThanNodes,
        Self::Fragmentation,
        Self::TooFewGpus,
        Self::HeldForAnother,
        Self::HeldByPredecessor,
        Self::VictimsLeave,
        Self::DisruptionBudget,
        Self::GpuDrained,
        Self::GpuLost,
        Self::NodeWithoutAgent,
        Self::OtherPlugin,
        Self::WrongAmountForm,
        Self::Denied,
        Self::Poisoned,
        Self::BeyondMaximum,
        Self::NoDriverInImage,
        Self::DriverMissing,
        Self::NotEnforced,
    ];

    /// The name in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoBudget => "NoBudget",
            Self::OverGuarantee => "OverGuarantee",
            Self::OverLimit => "OverLimit",
            Self::OverContainerMaximum => "OverContainerMaximum",
            Self::QuotaPending => "QuotaPending",
            Self::NoNodeWithRoom => "NoNodeWithRoom",
            Self::LargerThanNodes => "LargerThanNodes",
            Self::Fragmentation => "Fragmentation",
            Self::TooFewGpus => "TooFewGpus",
            Self::HeldForAnother => "HeldForAnother",
            Self::HeldByPredecessor => "HeldByPredecessor",
            Self::VictimsLeave => "VictimsLeave",
            Self::DisruptionBudget => "DisruptionBudget",
            Self::GpuDrained => "GpuDrained",
            Self::GpuLost => "GpuLost",
            Self::NodeWithoutAgent => "NodeWithoutAgent",
            Self::OtherPlugin => "OtherPlugin",
            Self::WrongAmountForm => "WrongAmountForm",
            Self::Denied => "Denied",
            Self::Poisoned => "Poisoned",
            Self::BeyondMaximum => "BeyondMaximum",
            Self::NoDriverInImage => "NoDriverInImage",
            Self::DriverMissing => "DriverMissing",
            Self::NotEnforced => "NotEnforced",
        }
    }

    /// The remedy, where it does not depend on the object.
    pub fn remedy(self) -> Option<&'static str> {
        Some(match self {
            Self::NoBudget => "an admin creates a GpuMemoryBudget named `default` in the namespace",
            Self::OverGuarantee => {
                "raise deviceMemory.guaranteed of the budget; or raise deviceMemory.limit and set \
                 overflow: Borrow; or delete a pod"
            }
            Self::OverLimit => "raise deviceMemory.limit of the budget, or delete a pod",
            Self::OverContainerMaximum => {
                "ask for less in the container, or raise the field of the budget that the refusal names"
            }
            Self::QuotaPending => {
                "wait some seconds; then check that the controller manager and the operator run"
            }
            Self::NoNodeWithRoom => "delete pods that need it less, or add GPUs",
            Self::LargerThanNodes => "ask for less, or add a node with as much GPU memory",
            Self::TooFewGpus => {
                "ask for fewer GPUs with the annotation bursar.dev/gpus, or add a node with as many"
            }
            Self::Fragmentation => "wait until a pod ends; or ask for less",
            Self::HeldByPredecessor => {
                "set maxSurge 0 or Recreate in the strategy of the Deployment, so that the old pod \
                 ends first"
            }
            Self::DisruptionBudget => "let the disruption budget allow a disruption",
            Self::GpuDrained => {
                "an admin runs `kubectl bursar undrain` when the work on the GPU is done"
            }
            Self::GpuLost => "an admin looks at `kubectl bursar gpus` for the GPU's state",
            Self::NodeWithoutAgent => {
                "an admin looks at the agent's pod on the node; a controller replaces a failed pod, \
                 a bare pod has to be created again"
            }
            Self::OtherPlugin => {
                "an admin takes NVIDIA's device plugin off the node (label \
                 nvidia.com/gpu.deploy.device-plugin=false)"
            }
            Self::WrongAmountForm => "write the number of quanta without a unit: 16, not 16Gi",
            Self::Denied => {
                "ask for more memory; in PyTorch, torch.cuda.empty_cache() gives back what is cached"
            }
            Self::Poisoned => {
                "the program's log names the kernel; with contextPolicy.action: InPlace it is \
                 restarted in 0.3 s"
            }
            Self::BeyondMaximum => {
                "correct the program; contextPolicy.maxRestarts of the budget allows more"
            }
            Self::NoDriverInImage => {
                "use an image with glibc (not Alpine), and a dynamically linked program"
            }
            Self::DriverMissing => "an admin installs the driver on the node, or sets driver.root",
            Self::NotEnforced => "take out what the reason names; see docs/use/reference/README.md",
            Self::HeldForAnother | Self::VictimsLeave => return None,
        })
    }
}
