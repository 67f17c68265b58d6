//! Describes how far the drains of GPUs are: the drain task publishes this state.

use std::collections::BTreeSet;

use bursar_ledger::units::GpuUuid;

/// The state of all drains.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DrainState {
    /// GPUs whose drain was requested: nothing new starts there, and running containers end.
    pub requested: BTreeSet<GpuUuid>,
    /// Requested GPUs that are in use by more than their NVML process.
    pub in_use: BTreeSet<GpuUuid>,
    /// Requested GPUs that were unused for long enough: their NVML process ends too.
    pub released: BTreeSet<GpuUuid>,
}
