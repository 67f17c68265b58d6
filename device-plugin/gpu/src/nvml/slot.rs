//! Tracks the process through which the watcher probes one part of the driver.

use std::collections::BTreeSet;
use std::io;
use std::time::{Duration, Instant};

use bursar_ledger::units::GpuUuid;
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::warn;

use super::PollIntervals;
use super::process::{Job, NvmlProcess, ProcessNumber, ProcessReport};
use super::protocol::{GpuProbe, Scope};
use crate::pci::PciAddress;

/// The most requests that wait for one GPU.
const JOB_QUEUE_LENGTH: usize = 32;

/// A part of the driver that the watcher probes through one process.
pub(super) struct ProbeSlot {
    pub(super) scope: Scope,
    /// The physical GPU, once NVML has reported it.
    pub(super) uuid: Option<GpuUuid>,
    pub(super) process: Option<SlotProcess>,
    /// The last call did not return in time, and no later call has returned.
    pub(super) is_hung: bool,
    /// The result of the last probe.
    pub(super) found: Option<GpuProbe>,
}

/// A running process, from its slot's view.
pub(super) struct SlotProcess {
    pub(super) id: ProcessNumber,
    pub(super) jobs: mpsc::Sender<Job>,
    /// Stops the process when dropped; none while the process is being stopped.
    pub(super) stop_guard: Option<DropGuard>,
    started_at: Instant,
    /// A probe was sent and is not answered.
    pub(super) is_probing: bool,
    /// A probe of this process has failed.
    has_failed: bool,
}

impl SlotProcess {
    /// Runs a process; none where the system refused to start it.
    pub(super) fn run(
        scope: Scope,
        process: io::Result<NvmlProcess>,
        started: &mut ProcessNumber,
        report: &mpsc::UnboundedSender<(ProcessNumber, ProcessReport)>,
        pace: &PollIntervals,
    ) -> Option<SlotProcess> {
        let process = process
            .inspect_err(|error| warn!(%error, "failed to start a process that calls NVML"))
            .ok()?;
        let (jobs, received) = mpsc::channel(JOB_QUEUE_LENGTH);
        let (stop, id) = (CancellationToken::new(), *started);
        *started += 1;
        let events = (scope != Scope::Driver).then_some(pace.xids);
        tokio::spawn(process.run(id, received, report.clone(), events, stop.clone()));
        Some(SlotProcess {
            id,
            jobs,
            stop_guard: Some(stop.drop_guard()),
            started_at: Instant::now(),
            is_probing: false,
            has_failed: false,
        })
    }
}

impl ProbeSlot {
    pub(super) fn new(scope: Scope) -> Self {
        Self {
            scope,
            uuid: None,
            process: None,
            is_hung: false,
            found: None,
        }
    }

    pub(super) fn is_probing(&self) -> bool {
        self.process
            .as_ref()
            .is_some_and(|running| running.is_probing)
    }

    /// Whether a round waits for this slot's answer, or for the end of its process.
    pub(super) fn is_awaited(&self) -> bool {
        let is_stopping = |running: &SlotProcess| running.stop_guard.is_none();
        (self.is_probing() || self.process.as_ref().is_some_and(is_stopping)) && !self.is_hung
    }

    /// Whether the process has not given its first answer, by which its GPU is known.
    pub(super) fn is_starting(&self) -> bool {
        let runs = |running: &SlotProcess| running.is_probing && running.stop_guard.is_some();
        self.uuid.is_none() && self.process.as_ref().is_some_and(runs)
    }

    /// Sends a probe, unless one is pending or the process is being stopped.
    pub(super) fn probe(&mut self) {
        let is_busy = |running: &SlotProcess| running.is_probing || running.stop_guard.is_none();
        if self.process.as_ref().is_some_and(is_busy) {
            return;
        }
        // An earlier result says nothing about a GPU whose process did not start or takes no job.
        self.found = None;
        if let Some(running) = &mut self.process {
            running.is_probing = running.jobs.try_send(Job::Probe).is_ok();
        }
    }

    /// Starts to stop the process, which stays in the slot until its end.
    pub(super) fn stop_process(&mut self) {
        if let Some(running) = &mut self.process {
            running.stop_guard = None;
            running.is_probing = false;
        }
    }

    /// Stops a process whose probe failed, once its GPU answers or the process is `old`.
    pub(super) fn replace_failed(&mut self, old: Duration) {
        let Some(running) = &mut self.process else {
            return;
        };
        match self.found {
            Some(GpuProbe::Lost | GpuProbe::Failed(_)) => running.has_failed = true,
            Some(GpuProbe::Gpus(..)) if running.has_failed => return self.stop_process(),
            Some(GpuProbe::Gpus(..)) | None => {}
        }
        if running.has_failed && running.started_at.elapsed() >= old && !self.is_hung {
            self.stop_process();
        }
    }

    pub(super) fn is_at(&self, addresses: &BTreeSet<PciAddress>) -> bool {
        matches!(&self.scope, Scope::Address(address) if addresses.contains(address))
    }
}

#[cfg(test)]
impl SlotProcess {
    /// A process that takes no job and never ends.
    pub(super) fn hung(id: ProcessNumber) -> Self {
        Self {
            id,
            jobs: mpsc::channel(1).0,
            stop_guard: Some(CancellationToken::new().drop_guard()),
            started_at: Instant::now(),
            is_probing: false,
            has_failed: false,
        }
    }
}
