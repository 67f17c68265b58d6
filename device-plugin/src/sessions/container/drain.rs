//! A container with a GPU that is drained: it gets nothing more, and what runs in it ends.

use std::collections::BTreeSet;

use super::Container;
use crate::units::{GpuUuid, PodUid};

/// A process that holds GPUs.
pub(in super::super) struct Holder {
    pub(in super::super) pid: u32,
    pub(in super::super) pod: PodUid,
    pub(in super::super) gpus: Vec<GpuUuid>,
}

impl Container {
    /// These GPUs are to be drained: the processes that hold some of them, with a session or without. Not on record: who
    /// drains says it again and again.
    pub(in super::super) fn drain(&mut self, gpus: &BTreeSet<GpuUuid>) -> Vec<Holder> {
        let mut its = self.gpus();
        its.retain(|gpu| gpus.contains(gpu));
        if self.drained == its.is_empty() {
            self.drained = !its.is_empty();
            self.tell_fences();
        }
        if !self.drained {
            return Vec::new();
        }
        let members = self.members.keys().copied();
        let pids: BTreeSet<u32> = members.chain(self.credit.outsiders()).collect();
        let holder = |pid| Holder {
            pid,
            pod: self.served.pod.clone(),
            gpus: its.clone(),
        };
        pids.into_iter().map(holder).collect()
    }
}
