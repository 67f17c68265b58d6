//! Records the container's poisoned process images, and commits the decisions about them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bursar_gpu::memory_sample::ProcessMemory;
use bursar_host::clock::ClockReading;
use bursar_ledger::BootTime;
use bursar_ledger::units::{GpuUuid, PodUid};

use bursar_protocol::END_SINCE;
use bursar_protocol::messages::{Recovery, Response};

use super::super::recovery::{
    Fault, FaultLog, FaultSource, KillTarget, ProcessImage, RecoveryAction, RecoveryPolicy,
    XidTarget, is_fault,
};
use super::super::{Account, Process};
use super::Container;
use super::recorder::ChangeNumber;

/// The faults that wait for the fault task at most; the oldest of the container are dropped first.
const MAX_UNREPORTED_FAULTS: usize = 64;

/// The faults that the fault task has not taken yet, the oldest first.
#[derive(Debug, Default)]
pub(super) struct UnreportedFaults(VecDeque<Fault>);

impl UnreportedFaults {
    fn push(&mut self, fault: Fault) {
        if self.0.len() >= MAX_UNREPORTED_FAULTS {
            self.0.pop_front();
        }
        self.0.push_back(fault);
    }

    fn take(&mut self) -> Vec<Fault> {
        std::mem::take(&mut self.0).into()
    }
}

impl Container {
    /// Sets the policy for later faults, which outlives the agent.
    pub(in super::super) fn set_policy(&mut self, policy: RecoveryPolicy) {
        let before = self.fault_log.clone();
        self.fault_log.set_policy(policy);
        if before != self.fault_log {
            self.write_checkpoint();
        }
    }

    /// Handles a process's report of a sticky error, and answers how to recover. A code that is not
    /// sticky is no fault. `root` is the root process of the container from which `pid` descends.
    /// Also returns the change that the checkpoint must hold before the answer, besides the fault.
    pub(in super::super) fn handle_poisoned(
        &mut self,
        pid: u32,
        account: u8,
        code: i32,
        can_reexec: bool,
        root: Option<Process>,
        now: ClockReading,
    ) -> (Response, Option<ChangeNumber>) {
        let has_changed = self.memory.update_exports(pid);
        let source = FaultSource::Cuda { code, can_reexec };
        let gpu = match self.memory.account(usize::from(account)) {
            Some(Account::Gpu(gpu)) => Some(gpu.clone()),
            _ => None,
        };
        let decision = is_fault(code).then(|| self.record_fault(pid, gpu, source, root, now));
        let version = self.memory.protocol_version(pid);
        let seconds = u16::try_from(self.fault_log.grace().as_secs()).unwrap_or(u16::MAX);
        let answer = Response::Recovery(match decision.flatten() {
            Some(RecoveryAction::ReexecInPlace) => Recovery::Reexec,
            Some(action) if action.killed_unit().is_some() && version >= Some(END_SINCE) => {
                Recovery::End { seconds }
            }
            _ => Recovery::Continue,
        });
        (answer, has_changed.then(|| self.note_change()))
    }

    /// Handles the close of a process's socket after the agent's last answer.
    pub(in super::super) fn handle_disconnect(&mut self, process: Process, image: u64) {
        let Some(image) = self.memory.find_image(process, image) else {
            return;
        };
        let before = self.fault_log.clone();
        self.fault_log.record_disconnect(process, image.generation);
        if before != self.fault_log {
            self.write_checkpoint();
        }
    }

    pub(in super::super) fn pod(&self) -> &PodUid {
        &self.spec.pod
    }

    /// Finds the image of a process, if this container uses one of the GPUs `on` and the process
    /// had started `by` then.
    pub(in super::super) fn find_xid_target(
        &self,
        pid: u32,
        on: &[GpuUuid],
        by: BootTime,
    ) -> Option<XidTarget> {
        let image = self.memory.image_of(pid)?;
        let gpu = self.memory.gpus().find(|gpu| on.contains(gpu))?.clone();
        (image.process.start_moment() <= by).then_some(XidTarget {
            allocation: self.spec.allocation,
            image,
            gpu,
            root: None,
        })
    }

    /// Records that an image lost its context by this XID.
    pub(in super::super) fn record_xid(
        &mut self,
        target: &XidTarget,
        code: u32,
        now: ClockReading,
    ) {
        let pid = target.image.process.pid;
        if self.memory.image_of(pid).as_ref() == Some(&target.image) {
            self.record_fault(
                pid,
                Some(target.gpu.clone()),
                FaultSource::Xid(code),
                target.root,
                now,
            );
        }
    }

    /// Makes the decisions whose deadline has passed. The API server has been unreachable for
    /// `unreachable_for`.
    pub(in super::super) fn tick_faults(&mut self, unreachable_for: Duration, now: ClockReading) {
        let before = self.fault_log.clone();
        if self.fault_log.tick(unreachable_for, now) {
            self.commit_decisions(&before);
        }
    }

    /// Restarts the poisoned images below this process generation, as the operator ordered.
    pub(in super::super) fn require_generation(&mut self, generation: u64, now: ClockReading) {
        let before = self.fault_log.clone();
        if self.fault_log.require_generation(generation, now) && self.commit_decisions(&before) {
            tracing::info!(allocation = %self.spec.allocation, generation, "restart ordered");
        }
    }

    /// The processes that the agent has to kill for faults.
    pub(in super::super) fn kill_targets(&self, now: BootTime) -> Vec<KillTarget> {
        self.fault_log.kill_targets(now).collect()
    }

    /// Closes the faults of ended images whose memory the driver has freed.
    pub(super) fn close_released_faults(&mut self) {
        let [exited, _] = self.memory.credit().exited_and_orphaned();
        self.fault_log
            .close_released(|pid| exited.contains_key(&pid));
    }

    /// Restarts the container where another process holds the memory of an image that was ended
    /// alone. The driver charges the image's pid in `samples`, which hold all GPUs.
    pub(super) fn escalate_held_memory(&mut self, samples: &[ProcessMemory], now: BootTime) {
        let before = self.fault_log.clone();
        let is_listed = |pid| {
            // After an exec the driver lists the new image.
            self.memory.image_of(pid).is_none() && samples.iter().any(|sample| sample.contains(pid))
        };
        let held = self.fault_log.record_held(is_listed, now);
        if held.is_empty() || !self.commit_decisions(&before) {
            return;
        }
        for fault in held {
            tracing::warn!(allocation = %self.spec.allocation, ?fault, "memory of an ended process is held by another one");
            self.unreported_faults.push(fault);
        }
    }

    /// The open faults.
    pub(in super::super) fn open_faults(&self) -> &[Fault] {
        self.fault_log.faults()
    }

    /// Whether the fault task has faults to take.
    pub(in super::super) fn has_unreported_faults(&self) -> bool {
        !self.unreported_faults.0.is_empty()
    }

    /// The faults since the last call.
    pub(in super::super) fn take_unreported_faults(&mut self) -> Vec<Fault> {
        self.unreported_faults.take()
    }

    /// The live images that are not fenced.
    pub(in super::super) fn process_images(&self) -> Vec<ProcessImage> {
        let images = self.memory.images();
        images
            .filter(|image| self.fence_of(image).is_none())
            .collect()
    }

    /// Records a fault of a process; the container's first GPU stands for an unknown one.
    fn record_fault(
        &mut self,
        pid: u32,
        gpu: Option<GpuUuid>,
        source: FaultSource,
        root: Option<Process>,
        now: ClockReading,
    ) -> Option<RecoveryAction> {
        let image = self.memory.image_of(pid)?;
        let first = || self.memory.gpus().next().cloned();
        let gpu = gpu.or_else(first)?;
        let before = self.fault_log.clone();
        let (decision, opened) = self.fault_log.record(image, &gpu, source, root, now);
        if let Some(fault) = opened {
            if let Some(suppressed) = self.log_limiter.due("poisoned", Instant::now()) {
                let allocation = self.spec.allocation;
                tracing::warn!(%allocation, pid, ?fault, suppressed, "context poisoned");
            }
            self.unreported_faults.push(fault);
        }
        if before != self.fault_log {
            self.publish_fences();
            if !self.commit_decisions(&before) {
                return None;
            }
        }
        decision
    }

    /// Writes the decisions since `before` to the checkpoint, or rolls them back where the write
    /// fails. So the maximum of restarts holds over restarts of the agent.
    fn commit_decisions(&mut self, before: &FaultLog) -> bool {
        let written = self.write_checkpoint();
        if !written {
            self.fault_log.roll_back(before);
        }
        written
    }
}
