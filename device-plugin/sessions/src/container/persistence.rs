//! Writes a container to its checkpoint, and restores it from there.

use bursar_ledger::BootTime;

use super::super::checkpoint::SessionCheckpoint;
use super::super::{ContainerResolver, SessionSpec};
use super::denials::{Denials, LogLimiter};
use super::faults::Faults;
use super::memory::ContainerMemory;
use super::recorder::Recorder;
use super::{Container, RestoredProcess};

impl Container {
    /// Restores a container from its checkpoint, with its live processes. Where the agent
    /// `served_before`, a missing checkpoint means that unknown processes may live.
    pub(in super::super) fn restore(
        spec: SessionSpec,
        checkpoint: SessionCheckpoint,
        served_before: bool,
        resolver: &dyn ContainerResolver,
        now: BootTime,
    ) -> (Container, Vec<RestoredProcess>) {
        let content = checkpoint.read();
        let is_checkpoint_lost = content
            .as_ref()
            .map_or(served_before, |content| content.incomplete);
        let mut content = content.unwrap_or_default();
        if content.generation == 0 && is_checkpoint_lost {
            // Generations issued since the boot are lower, since a container has at most one image
            // each microsecond. The wall clock may have been set back.
            content.generation = now.0.saturating_mul(1_000);
        }
        let fault_log = std::mem::take(&mut content.fault_log);
        let mut memory = ContainerMemory::new(&spec);
        let (restored, exited) = memory.restore(content, resolver);
        let mut container = Container {
            spec,
            memory,
            recorder: Recorder::new(checkpoint, is_checkpoint_lost),
            cgroup: None,
            denials: Denials::default(),
            log_limiter: LogLimiter::default(),
            faults: Faults::restore(fault_log, &exited),
            closer: None,
        };
        container.close_released_faults();
        // After this write, a checkpoint that is missing next time is a lost one.
        container.write_checkpoint();
        (container, restored)
    }
}
