//! Fences a container whose GPU is being drained, and names its processes.

use std::collections::BTreeSet;

use bursar_ledger::units::{GpuUuid, PodUid};

use super::Container;

/// A process that holds memory of GPUs.
pub(in super::super) struct GpuHolder {
    pub(in super::super) pid: u32,
    pub(in super::super) pod: PodUid,
    pub(in super::super) gpus: Vec<GpuUuid>,
}

impl Container {
    /// Drains these GPUs: fences the container if it uses any, and returns the processes that hold
    /// memory, with a session or untracked. The checkpoint does not hold this state, since the
    /// drain task repeats the call.
    pub(in super::super) fn drain_gpus(&mut self, gpus: &BTreeSet<GpuUuid>) -> Vec<GpuHolder> {
        let own = self.memory.gpus();
        let drained: Vec<_> = own.filter(|gpu| gpus.contains(gpu)).cloned().collect();
        if self.is_drained == drained.is_empty() {
            self.is_drained = !drained.is_empty();
            self.publish_fences();
        }
        if !self.is_drained {
            return Vec::new();
        }
        let untracked = self.memory.credit().untracked_pids();
        let pids: BTreeSet<u32> = self.memory.pids().chain(untracked).collect();
        let holder = |pid| GpuHolder {
            pid,
            pod: self.spec.pod.clone(),
            gpus: drained.clone(),
        };
        pids.into_iter().map(holder).collect()
    }
}
