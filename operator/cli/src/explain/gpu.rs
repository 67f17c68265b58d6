//! Says why the agent binds no pod to a GPU.

use bursar_crds::GpuNode;
use bursar_crds::gpu_node::{GpuState, GpuStatus, HealthStatus};

use super::Cause;
use crate::show::gpus;

/// `GPU 0`, or `GPU 0/1` for a MIG instance.
pub(super) fn gpu_name(node: &GpuNode, gpu: &GpuStatus) -> String {
    format!("GPU {}", gpus::index(node, gpu))
}

/// Why the agent binds no pod to the GPU, if so. An XID that only a reset mends drains the GPU too.
pub(super) fn unusable(node: &GpuNode, gpu: &GpuStatus) -> Option<(Cause, String)> {
    let (name, reason) = (gpu_name(node, gpu), &gpu.health.reason);
    match gpu.state {
        GpuState::Draining => Some(match gpus::drain_progress(gpu) {
            Some(progress) => (Cause::GpuDrained, format!("{name} {progress}")),
            None => (Cause::GpuLost, format!("{name} awaits a reset ({reason})")),
        }),
        GpuState::Lost => Some((Cause::GpuLost, format!("{name} is lost ({reason})"))),
        _ if gpu.health.status == HealthStatus::Unhealthy => {
            Some((Cause::GpuLost, format!("{name} is unhealthy ({reason})")))
        }
        _ => None,
    }
}
