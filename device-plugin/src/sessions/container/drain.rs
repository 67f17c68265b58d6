//! A container with a GPU that is drained: it gets nothing more, and what runs in it ends.

use std::collections::BTreeSet;

use super::Container;
use crate::units::{GpuUuid, PodUid};

/// A process that holds GPUs.
pub(in super::super) struct GpuHolder {
    pub(in super::super) pid: u32,
    pub(in super::super) pod: PodUid,
    pub(in super::super) gpus: Vec<GpuUuid>,
}

impl Container {
    /// These GPUs are to be drained: the processes that hold some of them, with a session or without. Not on record: who
    /// drains says it again and again.
    pub(in super::super) fn drain_gpus(&mut self, gpus: &BTreeSet<GpuUuid>) -> Vec<GpuHolder> {
        let mut its = self.gpus();
        its.retain(|gpu| gpus.contains(gpu));
        if self.is_drained == its.is_empty() {
            self.is_drained = !its.is_empty();
            self.publish_fences();
        }
        if !self.is_drained {
            return Vec::new();
        }
        let members = self.processes.keys().copied();
        let pids: BTreeSet<u32> = members.chain(self.credit.untracked_pids()).collect();
        let holder = |pid| GpuHolder {
            pid,
            pod: self.spec.pod.clone(),
            gpus: its.clone(),
        };
        pids.into_iter().map(holder).collect()
    }
}
