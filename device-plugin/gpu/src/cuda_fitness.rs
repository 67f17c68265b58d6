//! Defines what the starts of a GPU's allocator runtime show of CUDA there.

use std::collections::{BTreeMap, BTreeSet};

use bursar_ledger::units::GpuUuid;

use crate::health::UnhealthyReason;

/// The results for each GPU. A GPU without an entry is untried.
pub type CudaFitnesses = BTreeMap<GpuUuid, CudaFitness>;

/// Returns the GPUs whose results satisfy a condition.
pub fn gpus_where(
    fitnesses: &CudaFitnesses,
    holds: impl Fn(&CudaFitness) -> bool,
) -> BTreeSet<GpuUuid> {
    let found = fitnesses.iter().filter(|(_, fitness)| holds(fitness));
    found.map(|(gpu, _)| gpu.clone()).collect()
}

/// The result of the starts on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaFitness {
    /// Whether pods may use the GPU.
    pub verdict: CudaVerdict,
    /// Whether the GPU cannot access managed memory at the same time as the host.
    pub lacks_concurrent_access: bool,
}

/// Whether pods may use a GPU, by the starts there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaVerdict {
    /// No start has had a result, and the GPU has not waited long enough for one.
    Untried,
    /// The last start succeeded, or has had no result for long.
    Works,
    /// CUDA has refused the GPU since the last start that succeeded. A refusal is a known code, a
    /// start that hung, or the third failed start in a row.
    Refused,
    /// CUDA does not work: the runtime hangs in the driver and cannot be killed, or CUDA has
    /// refused the GPU for long.
    Unfit(UnhealthyReason),
}
