//! Writes a container to its checkpoint, and restores it from there.

use std::sync::Arc;
use std::time::Instant;

use bursar_ledger::BootTime;
use tokio::sync::watch;

use super::super::checkpoint::SessionCheckpoint;
use super::super::{ContainerResolver, SessionSpec};
use super::denials::{Denials, LogLimiter, SharedLogLimiter};
use super::faults::UnreportedFaults;
use super::memory::ContainerMemory;
use super::recording::PendingChanges;
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
            checkpoint,
            is_checkpoint_lost,
            cgroup: None,
            denials: Denials::default(),
            log_limiter: LogLimiter::default(),
            shared_log_limiter: SharedLogLimiter::default(),
            requests: 0,
            fault_log,
            unreported_faults: UnreportedFaults::default(),
            is_drained: false,
            pending_changes: PendingChanges::default(),
            change_notify: Arc::default(),
            orphans_changed: watch::Sender::default(),
            closer: None,
        };
        for image in &exited {
            container.record_exit(image);
        }
        container.close_released_faults();
        // After this write, a checkpoint that is missing next time is a lost one.
        container.write_checkpoint();
        (container, restored)
    }

    /// Writes the accounts to the checkpoint, and returns whether the checkpoint now holds them.
    /// The caller accounts for the time of the write.
    pub(super) fn store_checkpoint(&mut self) -> bool {
        if self.checkpoint.is_closed() {
            return false;
        }
        self.memory.publish_to_siblings();
        let fault_log = self.fault_log.clone();
        let content = self
            .memory
            .checkpoint_content(self.is_checkpoint_lost, fault_log);
        let written = self.checkpoint.write(content);
        if let Err(error) = &written
            && let Some(suppressed) = self.shared_log_limiter.due("record", Instant::now())
        {
            let allocation = self.spec.allocation;
            tracing::warn!(%allocation, %error, suppressed, "failed to write a session checkpoint; free space in /run");
        }
        written.is_ok()
    }
}
