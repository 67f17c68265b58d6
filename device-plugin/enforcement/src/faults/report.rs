//! Describes an open fault for the node's status.

use bursar_crds::context_policy::FaultAction;
use bursar_ledger::units::{GpuUuid, PodUid};
use jiff::Timestamp;

/// A process image with a poisoned context, or a faulty GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultReport {
    /// A unique id of this occurrence.
    pub id: String,
    /// The GPU.
    pub gpu: GpuUuid,
    /// The GPU's generation when the fault was first seen.
    pub gpu_generation: u64,
    /// The CUDA error, if the process reported one.
    pub cuda_error: Option<i32>,
    /// The XID, if there was one.
    pub xid: Option<u32>,
    /// The decided action, if any.
    pub action: Option<FaultAction>,
    /// The process image; none for a fault of the GPU itself.
    pub image: Option<ImageReport>,
    /// When the fault was reported; none takes the time of the first write.
    pub time: Option<Timestamp>,
}

/// A process image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageReport {
    /// The pod's UID, if known.
    pub pod_uid: Option<PodUid>,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// The image's process generation.
    pub process_generation: u64,
}
