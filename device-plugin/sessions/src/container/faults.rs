//! Records the container's poisoned process images, and commits the decisions about them.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use bursar_gpu::memory_sample::ProcessMemory;
use bursar_host::clock::ClockReading;
use bursar_ledger::BootTime;
use bursar_ledger::units::{GpuUuid, PodUid};

use bursar_protocol::END_SINCE;
use bursar_protocol::fence::Fence;
use bursar_protocol::messages::{Recovery, Response};

use super::super::Process;
use super::super::recovery::{
    Fault, FaultLog, FaultSource, ProcessImage, RecoveryAction, RecoveryPolicy, XidTarget, is_fault,
};
use super::Container;
use super::recorder::ChangeNumber;

/// The faults that wait for the fault task at most; the oldest of the container are dropped first.
const MAX_UNREPORTED_FAULTS: usize = 64;

/// A process that holds memory of GPUs.
pub(crate) struct GpuHolder {
    pub(crate) pid: u32,
    pub(crate) pod: PodUid,
    pub(crate) gpus: Vec<GpuUuid>,
}

/// The faults of a container's images, and what else fences its images.
pub(crate) struct Faults {
    log: FaultLog,
    /// The faults that the fault task has not taken yet, the oldest first.
    unreported: VecDeque<Fault>,
    /// Whether a GPU of the container is being drained.
    is_drained: bool,
}

impl Faults {
    /// The faults of a checkpoint, after these images have exited.
    pub(super) fn restore(mut log: FaultLog, exited: &[ProcessImage]) -> Faults {
        for image in exited {
            log.record_exit(image);
        }
        Faults {
            log,
            unreported: VecDeque::new(),
            is_drained: false,
        }
    }

    pub(crate) fn log(&self) -> &FaultLog {
        &self.log
    }

    /// Why the agent fences an image.
    fn fence_of(&self, image: &ProcessImage) -> Option<Fence> {
        let fault = self.log.fault_of(image);
        let poisoned = fault.map(|fault| Fence::Poisoned(fault.cuda_error.unwrap_or_default()));
        poisoned.or(self.is_drained.then_some(Fence::Drained))
    }

    /// Sets whether a GPU of the container is being drained. Returns whether that has changed.
    fn set_drained(&mut self, is_drained: bool) -> bool {
        std::mem::replace(&mut self.is_drained, is_drained) != is_drained
    }

    /// Keeps a fault for the fault task.
    fn report(&mut self, fault: Fault) {
        if self.unreported.len() >= MAX_UNREPORTED_FAULTS {
            self.unreported.pop_front();
        }
        self.unreported.push_back(fault);
    }

    /// Whether the fault task has faults to take.
    pub(crate) fn has_unreported(&self) -> bool {
        !self.unreported.is_empty()
    }

    /// Takes the faults since the last call.
    pub(crate) fn take_unreported(&mut self) -> Vec<Fault> {
        std::mem::take(&mut self.unreported).into()
    }
}

impl Container {
    pub(crate) fn faults(&self) -> &Faults {
        &self.faults
    }

    pub(crate) fn faults_mut(&mut self) -> &mut Faults {
        &mut self.faults
    }

    /// Sets the policy for later faults, which outlives the agent.
    pub(crate) fn set_policy(&mut self, policy: RecoveryPolicy) {
        let before = self.faults.log.clone();
        self.faults.log.set_policy(policy);
        self.commit_faults(&before);
    }

    /// Handles the close of a process's socket after the agent's last answer.
    pub(crate) fn handle_disconnect(&mut self, process: Process, image: u64) {
        if let Some(image) = self.memory.find_image(process, image) {
            let before = self.faults.log.clone();
            self.faults.log.record_disconnect(&image);
            self.commit_faults(&before);
        }
    }

    /// Whether the agent grants nothing more to a process's image.
    pub(super) fn is_fenced(&self, pid: u32) -> bool {
        let image = self.memory.image_of(pid);
        self.faults.is_drained
            || self.memory.has_broken_page(pid)
            || image.is_some_and(|image| self.faults.fence_of(&image).is_some())
    }

    /// Writes into every process's page whether the agent has fenced it, and why.
    pub(super) fn publish_fences(&self) {
        self.memory
            .publish_fences(|image| self.faults.fence_of(image));
    }

    /// Records the exit of an image, which is charged as exited by now.
    pub(super) fn record_exit(&mut self, ended: &ProcessImage) {
        self.faults.log.record_exit(ended);
        self.close_released_faults();
    }

    /// Handles a process's report of a sticky error, and answers how to recover. A code that is not
    /// sticky is no fault. `root` is the root process of the container from which `pid` descends.
    /// Also returns the change that the checkpoint must hold before the answer, besides the fault.
    pub(crate) fn handle_poisoned(
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
        let gpu = self.memory.gpus().nth(usize::from(account)).cloned();
        let decision = is_fault(code).then(|| self.record_fault(pid, gpu, source, root, now));
        let version = self.memory.protocol_version(pid);
        let seconds = u16::try_from(self.faults.log.grace().as_secs()).unwrap_or(u16::MAX);
        let answer = Response::Recovery(match decision.flatten() {
            Some(RecoveryAction::ReexecInPlace) => Recovery::Reexec,
            Some(action) if action.killed_unit().is_some() && version >= Some(END_SINCE) => {
                Recovery::End { seconds }
            }
            _ => Recovery::Continue,
        });
        (answer, has_changed.then(|| self.note_change()))
    }

    /// Finds the image of a process, if this container uses one of the GPUs `on` and the process
    /// had started `by` then.
    pub(crate) fn find_xid_target(
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
    pub(crate) fn record_xid(&mut self, target: &XidTarget, code: u32, now: ClockReading) {
        let pid = target.image.process.pid;
        if self.memory.image_of(pid).as_ref() == Some(&target.image) {
            let (gpu, source) = (target.gpu.clone(), FaultSource::Xid(code));
            self.record_fault(pid, Some(gpu), source, target.root, now);
        }
    }

    /// Makes the decisions whose deadline has passed. The API server has been unreachable for
    /// `unreachable_for`.
    pub(crate) fn tick_faults(&mut self, unreachable_for: Duration, now: ClockReading) {
        let before = self.faults.log.clone();
        if self.faults.log.tick(unreachable_for, now) {
            self.commit_faults(&before);
        }
    }

    /// Restarts the poisoned images below this process generation, as the operator ordered.
    pub(crate) fn require_generation(&mut self, generation: u64, now: ClockReading) {
        let before = self.faults.log.clone();
        if self.faults.log.require_generation(generation, now) && self.commit_faults(&before) {
            tracing::info!(allocation = %self.spec.allocation, generation, "restart ordered");
        }
    }

    /// Closes the faults of ended images whose memory the driver has freed.
    pub(super) fn close_released_faults(&mut self) {
        let [exited, _] = self.memory.credit().exited_and_orphaned();
        let log = &mut self.faults.log;
        log.close_released(|pid| exited.contains_key(&pid));
    }

    /// Restarts the container where another process holds the memory of an image that was ended
    /// alone. The driver charges the image's pid in `samples`, which hold all GPUs.
    pub(super) fn escalate_held_memory(&mut self, samples: &[ProcessMemory], now: BootTime) {
        let before = self.faults.log.clone();
        let is_listed = |pid| {
            // After an exec the driver lists the new image.
            self.memory.image_of(pid).is_none() && samples.iter().any(|sample| sample.contains(pid))
        };
        let held = self.faults.log.record_held(is_listed, now);
        if held.is_empty() || !self.commit_faults(&before) {
            return;
        }
        for fault in held {
            tracing::warn!(allocation = %self.spec.allocation, ?fault, "memory of an ended process is held by another one");
            self.faults.report(fault);
        }
    }

    /// The live images that are not fenced.
    pub(crate) fn process_images(&self) -> Vec<ProcessImage> {
        let is_fenced = |image: &ProcessImage| self.faults.fence_of(image).is_some();
        let images = self.memory.images();
        images.filter(|image| !is_fenced(image)).collect()
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
        let before = self.faults.log.clone();
        let (decision, opened) = self.faults.log.record(image, &gpu, source, root, now);
        if let Some(fault) = opened {
            if let Some(suppressed) = self.log_limiter.due("poisoned", Instant::now()) {
                let allocation = self.spec.allocation;
                tracing::warn!(%allocation, pid, ?fault, suppressed, "context poisoned");
            }
            self.faults.report(fault);
        }
        if before != self.faults.log {
            self.publish_fences();
            if !self.commit_faults(&before) {
                return None;
            }
        }
        decision
    }

    /// Drains these GPUs: fences the container if it uses any, and returns the processes that hold
    /// memory, with a session or untracked. The checkpoint does not hold this state, since the
    /// drain task repeats the call.
    pub(crate) fn drain_gpus(&mut self, gpus: &BTreeSet<GpuUuid>) -> Vec<GpuHolder> {
        let own = self.memory.gpus();
        let drained: Vec<_> = own.filter(|gpu| gpus.contains(gpu)).cloned().collect();
        if self.faults.set_drained(!drained.is_empty()) {
            self.publish_fences();
        }
        if drained.is_empty() {
            return Vec::new();
        }
        let untracked = self.memory.credit().untracked_pids();
        let members = self.memory.images().map(|image| image.process.pid);
        let pids: BTreeSet<u32> = members.chain(untracked).collect();
        let holder = |pid| GpuHolder {
            pid,
            pod: self.spec.pod.clone(),
            gpus: drained.clone(),
        };
        pids.into_iter().map(holder).collect()
    }

    /// Writes the changes of the fault log since `before` to the checkpoint, or rolls its decisions
    /// back where the write fails. So the maximum of restarts holds over restarts of the agent.
    /// Returns whether the checkpoint holds the log.
    fn commit_faults(&mut self, before: &FaultLog) -> bool {
        let is_on_record = self.faults.log == *before || self.write_checkpoint();
        if !is_on_record {
            self.faults.log.roll_back(before);
        }
        is_on_record
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: ClockReading = ClockReading {
        moment: BootTime(3_600_000),
        wall: jiff::Timestamp::UNIX_EPOCH,
    };

    fn image(pid: u32) -> ProcessImage {
        ProcessImage {
            process: Process { pid, start: 1 },
            generation: 1,
        }
    }

    /// Records an XID 31 of an image, and reports the fault.
    fn poison(faults: &mut Faults, pid: u32) {
        let gpu = "GPU-aaaa".parse().unwrap();
        let source = FaultSource::Xid(31);
        let (_, opened) = faults.log.record(image(pid), &gpu, source, None, NOW);
        faults.report(opened.unwrap());
    }

    #[test]
    fn oldest_fault_is_dropped_when_none_is_taken() {
        let mut faults = Faults::restore(FaultLog::default(), &[]);
        assert!(!faults.has_unreported());
        for pid in 0..=MAX_UNREPORTED_FAULTS as u32 {
            poison(&mut faults, pid);
        }
        let taken = faults.take_unreported();
        assert_eq!(taken.len(), MAX_UNREPORTED_FAULTS);
        assert_eq!(taken[0].image, image(1));
        assert!(!faults.has_unreported());
    }

    #[test]
    fn fault_fences_its_image_and_a_drain_fences_all() {
        let mut faults = Faults::restore(FaultLog::default(), &[]);
        poison(&mut faults, 1);
        assert_eq!(faults.fence_of(&image(1)), Some(Fence::Poisoned(0)));
        assert_eq!(faults.fence_of(&image(2)), None);
        assert!(faults.set_drained(true) && !faults.set_drained(true));
        assert_eq!(faults.fence_of(&image(1)), Some(Fence::Poisoned(0)));
        assert_eq!(faults.fence_of(&image(2)), Some(Fence::Drained));
        assert!(faults.set_drained(false));
        let restored = Faults::restore(faults.log, &[image(1)]);
        assert_eq!(restored.fence_of(&image(1)), None, "it has exited");
    }
}
