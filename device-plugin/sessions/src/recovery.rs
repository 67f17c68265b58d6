//! Decides how a container recovers from poisoned process images: pure, with time as an argument.
//!
//! ```text
//!            report (shim)
//!   live ------------------> decided -- ReexecInPlace: closed when the new image says hello
//!      \                      ^  | |\-- EndProcess: closed when the driver has freed its memory
//!       \ XID  REPORT_GRACE   |  | \--- RestartContainer: closed at the exit unless over limit
//!        +----> fenced -------+  \---- NoAction: closed at the exit unless it awaits eviction
//!
//!   ReexecInPlace --not executed within REPORT_GRACE--> RestartContainer
//!   EndProcess --memory still listed HELD_TIMEOUT after the exit--> RestartContainer
//! ```
//!
//! A fault costs the smallest unit that it must: a process other than the container's root process
//! ends alone. Ended processes and restarted containers have a count each, of the policy's maximum
//! within its window. A process beyond the first count costs its container, and a container beyond
//! the second one its pod. The kill comes after the policy's grace, in which the program can write
//! its error and end by itself.
//!
//! A container that awaits eviction is restarted instead once the API server has been unreachable
//! for `EVICTION_TIMEOUT`. A fault without an action can be restarted later, by an order that names
//! the process generation to reach.
//!
//! The agent fences an image from its first fault on, and grants it nothing more. Each image gets
//! one decision, whatever number of reports and XIDs name it. An XID alone decides nothing before
//! `REPORT_GRACE`. The process may be exiting, or its shim may be about to report, and can then
//! restart in place.

mod action;

use std::time::Duration;

use bursar_crds::context_policy::{ContextAction, ContextPolicy};
use bursar_host::clock::ClockReading;
use bursar_ledger::BootTime;
use bursar_ledger::units::{AllocationId, GpuUuid};
use bursar_protocol::error_class::ErrorClass;
use jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serialize};

use super::Process;

use action::KilledUnit;
pub use action::RecoveryAction;

/// How long the agent waits for the report of an image that an XID names, and for an ordered
/// re-exec.
const REPORT_GRACE: Duration = Duration::from_secs(5);

/// How long the driver may list the memory of an ended process before another process must hold it.
/// The memory of a killed process is free after about 0.1 s (F8 in docs/internals/facts.md).
const HELD_TIMEOUT: Duration = Duration::from_secs(2);

/// The ended images of one container whose memory the driver may still list at most; the oldest is
/// dropped first.
const MAX_AWAITING_RELEASE: usize = 64;

/// How long an image awaits the eviction of its pod while the API server is unreachable.
const EVICTION_TIMEOUT: Duration = Duration::from_secs(30);

/// The agent's reaction to poisoned contexts of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoveryPolicy {
    /// The action of first choice.
    pub action: ContextAction,
    /// The number of restarts, of either kind, that the container gets within the window, and the
    /// number of its processes that end alone.
    pub max_restarts: u32,
    /// The window in which restarts and ended processes count.
    pub window: Duration,
    /// The time from a fault until the agent kills, in which the program can end by itself.
    #[serde(default = "default_grace")]
    pub grace: Duration,
}

/// The grace in checkpoints of older agents.
fn default_grace() -> Duration {
    RecoveryPolicy::default().grace
}

impl Default for RecoveryPolicy {
    fn default() -> RecoveryPolicy {
        RecoveryPolicy::with_action(ContextAction::default())
    }
}

impl RecoveryPolicy {
    /// Converts the API's values; the schema allows no negative numbers.
    pub fn new(
        action: ContextAction,
        max_restarts: i32,
        window_seconds: i32,
        grace_seconds: i32,
    ) -> RecoveryPolicy {
        let seconds = |seconds: i32| Duration::from_secs(seconds.unsigned_abs().into());
        RecoveryPolicy {
            action,
            max_restarts: max_restarts.unsigned_abs(),
            window: seconds(window_seconds),
            grace: seconds(grace_seconds),
        }
    }

    /// The policy with this action and the API's defaults for the rest.
    pub fn with_action(action: ContextAction) -> RecoveryPolicy {
        let ContextPolicy {
            action: _,
            max_restarts,
            window_seconds,
            grace_seconds,
        } = ContextPolicy::default();
        RecoveryPolicy::new(action, max_restarts, window_seconds, grace_seconds)
    }
}

/// A process that the agent has to kill for a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KillTarget {
    /// This process alone.
    Process(Process),
    /// The root process from which this one descends.
    RootOf(Process),
    /// This root process: its descendant has ended, and another process holds its memory.
    Root(Process),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FaultSource {
    /// The process reported this `CUresult`.
    Cuda {
        code: i32,
        /// Whether the shim can execute the program again in place.
        can_reexec: bool,
    },
    /// The kernel log or NVML named the process with this XID.
    Xid(u32),
}

/// Whether a process that reports this `CUresult` has lost its context, or may have.
pub(super) fn is_fault(code: i32) -> bool {
    let class = ErrorClass::of(code);
    code != 0 && (class.poisons() || class == ErrorClass::Unknown)
}

/// A process image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessImage {
    /// The process.
    pub process: Process,
    /// The process generation: the image's number among the images of its container.
    pub generation: u64,
}

/// The image that a record of the kernel log names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XidTarget {
    /// The allocation of its container.
    pub allocation: AllocationId,
    /// The image.
    pub image: ProcessImage,
    /// The GPU of the container that the record names.
    pub gpu: GpuUuid,
    /// The root process from which the image's process descends, or the process itself. `None`
    /// where it is unknown.
    pub root: Option<Process>,
}

/// An open fault: a poisoned image that the agent or the operator has yet to handle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The image whose context is poisoned.
    pub image: ProcessImage,
    /// The GPU, as far as the agent knows it.
    pub gpu: GpuUuid,
    /// The `CUresult`, if the process reported one.
    pub cuda_error: Option<i32>,
    /// The XID, if one named the process.
    pub xid: Option<u32>,
    /// The wall-clock time of the first report, for users.
    pub time: Timestamp,
    /// The boot time of the first report, for decisions.
    #[serde(default)]
    pub since: BootTime,
    /// The decision and its time; `None` while the agent waits for a report.
    pub decided: Option<(RecoveryAction, RecordedMoment)>,
    /// Whether the image has followed the order to execute its program again. The new image may say
    /// hello minutes later: a program imports modules before it calls CUDA.
    #[serde(default)]
    pub executed: bool,
    /// Whether the image has exited.
    pub ended: bool,
    /// The root process from which the image's process descends, or the process itself. `None`
    /// where it is unknown.
    #[serde(default)]
    pub root: Option<Process>,
    /// Since when the driver has listed the memory of the ended image.
    #[serde(default)]
    pub held_since: Option<BootTime>,
}

impl Fault {
    /// The decision, once it was made.
    pub fn decision(&self) -> Option<RecoveryAction> {
        self.decided.map(|(decision, _)| decision)
    }

    /// Whether another process holds the memory of the ended image, so that its container is
    /// restarted.
    pub fn is_memory_held(&self) -> bool {
        let killed = self.decision().and_then(RecoveryAction::killed_unit);
        self.held_since.is_some() && killed == Some(KilledUnit::Container)
    }

    /// Whether the process is a root process, which nothing in the container outlives.
    fn is_of_root(&self) -> bool {
        self.root == Some(self.image.process)
    }

    /// Whether the ended image stays on record until the driver has freed its memory.
    fn awaits_release(&self) -> bool {
        self.decision() == Some(RecoveryAction::EndProcess) || self.is_memory_held()
    }
}

/// The poisoned images of one container. The checkpoint of the container holds this log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct FaultLog {
    policy: RecoveryPolicy,
    /// When restarts were ordered within the window, the oldest first.
    restarts: Vec<RecordedMoment>,
    /// When the agent decided to end processes alone within the window, the oldest first.
    process_ends: Vec<RecordedMoment>,
    faults: Vec<Fault>,
    /// The last fault that is no longer open.
    last_closed: Option<Fault>,
    /// The number of poisoned images, of ordered restarts, and of those in place, so far.
    pub(super) poisoned: u64,
    pub(super) restarted: u64,
    pub(super) restarted_in_place: u64,
}

impl FaultLog {
    /// Sets the policy for later faults; decisions stay.
    pub(super) fn set_policy(&mut self, policy: RecoveryPolicy) {
        self.policy = policy;
    }

    /// The time from a fault until the agent kills.
    pub(super) fn grace(&self) -> Duration {
        self.policy.grace
    }

    /// The open faults.
    pub(super) fn faults(&self) -> &[Fault] {
        &self.faults
    }

    /// The container's last fault, open or not.
    pub(super) fn last_fault(&self) -> Option<&Fault> {
        let faults = self.last_closed.iter().chain(&self.faults);
        faults.max_by_key(|fault| fault.since)
    }

    /// Closes the faults that do not stay open.
    fn close_unless(&mut self, mut stays: impl FnMut(&Fault) -> bool) {
        for fault in self.faults.extract_if(.., |fault| !stays(fault)) {
            let last = self.last_closed.as_ref();
            if last.is_none_or(|last| last.since <= fault.since) {
                self.last_closed = Some(fault);
            }
        }
    }

    /// The fault that fences an image.
    pub(super) fn fault_of(&self, image: &ProcessImage) -> Option<&Fault> {
        self.faults.iter().find(|fault| fault.image == *image)
    }

    /// Records a fault of an image. Returns the decision, and the fault if it is new.
    pub(super) fn record(
        &mut self,
        image: ProcessImage,
        gpu: &GpuUuid,
        source: FaultSource,
        root: Option<Process>,
        now: ClockReading,
    ) -> (Option<RecoveryAction>, Option<Fault>) {
        let known = self.faults.iter().position(|fault| fault.image == image);
        let index = known.unwrap_or_else(|| {
            self.drop_obsolete();
            self.poisoned += 1;
            self.faults.push(Fault {
                image,
                gpu: gpu.clone(),
                cuda_error: None,
                xid: None,
                time: now.wall,
                since: now.moment,
                decided: None,
                executed: false,
                ended: false,
                root: None,
                held_since: None,
            });
            self.faults.len() - 1
        });
        if let Some(fault) = self.faults.get_mut(index) {
            fault.root = fault.root.or(root);
        }
        let can_reexec = match (source, self.faults.get_mut(index)) {
            (FaultSource::Cuda { code, can_reexec }, Some(fault)) => {
                fault.cuda_error.get_or_insert(code);
                Some(can_reexec)
            }
            (FaultSource::Xid(code), Some(fault)) => {
                fault.xid.get_or_insert(code);
                None
            }
            (_, None) => None,
        };
        if let Some(can_reexec) = can_reexec {
            self.decide(index, can_reexec, now.moment);
        }
        let fault = self.faults.get(index);
        (
            fault.and_then(Fault::decision),
            fault.filter(|_| known.is_none()).cloned(),
        )
    }

    /// Records that the socket of an image closed after the agent's answer, as an exec closes it.
    pub(super) fn record_disconnect(&mut self, image: &ProcessImage) {
        for fault in &mut self.faults {
            fault.executed |=
                fault.image == *image && fault.decision() == Some(RecoveryAction::ReexecInPlace);
        }
    }

    /// Records the exit of an image, which completes any decision about it.
    pub(super) fn record_exit(&mut self, image: &ProcessImage) {
        for fault in &mut self.faults {
            fault.ended |= fault.image == *image;
        }
        let stays = |fault: &Fault| fault.decision().is_some_and(RecoveryAction::stays_open);
        self.close_unless(|fault| !fault.ended || stays(fault) || fault.awaits_release());
    }

    /// Drops ended images before another fault: a new one makes those over the limit obsolete, and
    /// a bounded number awaits the release of memory.
    fn drop_obsolete(&mut self) {
        let awaits = |fault: &Fault| fault.ended && fault.awaits_release();
        let count = self.faults.iter().filter(|fault| awaits(fault)).count();
        let mut excess = (count + 1).saturating_sub(MAX_AWAITING_RELEASE);
        self.close_unless(|fault| {
            let is_excess = awaits(fault) && excess > 0;
            excess -= usize::from(is_excess);
            !fault.ended || (awaits(fault) && !is_excess)
        });
    }

    /// Closes the faults of ended images whose memory the driver has freed: all but those of the
    /// pids that are still charged. A fault over the limit stays open.
    pub(super) fn close_released(&mut self, is_charged: impl Fn(u32) -> bool) {
        self.close_unless(|fault| {
            let stays = fault.decision().is_some_and(RecoveryAction::stays_open);
            let awaits = fault.ended && fault.awaits_release() && !stays;
            !awaits || is_charged(fault.image.process.pid)
        });
    }

    /// Records which pids of ended images the driver lists. Returns the faults whose memory another
    /// process holds: their containers are restarted. Where a process has ended by itself, its
    /// forked children have the rest of the grace to end, too.
    pub(super) fn record_held(
        &mut self,
        is_listed: impl Fn(u32) -> bool,
        now: BootTime,
    ) -> Vec<Fault> {
        let mut held = Vec::new();
        for index in 0..self.faults.len() {
            let Some(fault) = self.faults.get_mut(index) else {
                continue;
            };
            let has_ended = fault.ended && fault.decision() == Some(RecoveryAction::EndProcess);
            if !has_ended || fault.root.is_none() {
                continue;
            }
            if !is_listed(fault.image.process.pid) {
                fault.held_since = None;
                continue;
            }
            let held_for = now.since(*fault.held_since.get_or_insert(now));
            if held_for >= HELD_TIMEOUT && now.since(fault.since) >= self.policy.grace {
                self.restart_container(index, now);
                held.extend(self.faults.get(index).cloned());
            }
        }
        held
    }

    /// Makes the decisions whose deadline has passed, and returns whether a fault changed. They
    /// concern faults known by an XID alone, re-execs that did not follow, and evictions while the
    /// API server has been unreachable for `unreachable_for`.
    pub(super) fn tick(&mut self, unreachable_for: Duration, now: ClockReading) -> bool {
        let before = self.faults.clone();
        for index in 0..self.faults.len() {
            let Some(fault) = self.faults.get_mut(index).filter(|fault| !fault.ended) else {
                continue;
            };
            match fault.decided {
                None if now.moment.since(fault.since) >= REPORT_GRACE => {
                    self.decide(index, false, now.moment)
                }
                Some((RecoveryAction::ReexecInPlace, RecordedMoment(then)))
                    if !fault.executed && now.moment.since(then) >= REPORT_GRACE =>
                {
                    let action = RecoveryAction::RestartContainer { over_limit: false };
                    fault.decided = Some((action, RecordedMoment(now.moment)));
                    self.restarted_in_place = self.restarted_in_place.saturating_sub(1);
                }
                Some((
                    RecoveryAction::NoAction {
                        await_eviction: true,
                    },
                    RecordedMoment(then),
                )) if now.moment.since(then).min(unreachable_for) >= EVICTION_TIMEOUT => {
                    self.restart_container(index, now.moment);
                }
                _ => {}
            }
        }
        before != self.faults
    }

    /// Restarts poisoned images without an action below `generation`, and closes faults of such
    /// images that have exited. Returns whether a fault changed.
    pub(super) fn require_generation(&mut self, generation: u64, now: ClockReading) -> bool {
        let before = self.faults.clone();
        self.close_unless(|fault| {
            !fault.ended || fault.awaits_release() || fault.image.generation >= generation
        });
        for index in 0..self.faults.len() {
            let has_no_action = self.faults.get(index).is_some_and(|fault| {
                let is_left = matches!(fault.decision(), Some(RecoveryAction::NoAction { .. }));
                is_left && fault.image.generation < generation
            });
            if has_no_action {
                self.end_smallest_unit(index, now.moment);
            }
        }
        before != self.faults
    }

    /// Rolls back the decisions since `before`, because a later agent would not count these
    /// restarts. The faults stay, so that the images stay fenced and get a new decision.
    pub(super) fn roll_back(&mut self, before: &FaultLog) {
        self.restarts.clone_from(&before.restarts);
        self.process_ends.clone_from(&before.process_ends);
        self.restarted = before.restarted;
        self.restarted_in_place = before.restarted_in_place;
        for fault in &mut self.faults {
            let then = before.fault_of(&fault.image);
            fault.decided = then.and_then(|then| then.decided);
        }
    }

    /// The processes that the agent has to kill now.
    pub(super) fn kill_targets(&self, now: BootTime) -> impl Iterator<Item = KillTarget> {
        self.faults.iter().filter_map(move |fault| {
            let process = fault.image.process;
            let is_due = !fault.ended && now.since(fault.since) >= self.policy.grace;
            match fault.decision()?.killed_unit()? {
                KilledUnit::Process => is_due.then_some(KillTarget::Process(process)),
                KilledUnit::Container if fault.ended => fault
                    .root
                    .filter(|_| fault.is_memory_held())
                    .map(KillTarget::Root),
                KilledUnit::Container => is_due.then_some(KillTarget::RootOf(process)),
            }
        })
    }

    /// The pids of processes that end alone, and whose kill is due.
    pub(super) fn ending_pids(&self, now: BootTime) -> impl Iterator<Item = u32> {
        self.kill_targets(now).filter_map(|target| match target {
            KillTarget::Process(process) => Some(process.pid),
            KillTarget::RootOf(_) | KillTarget::Root(_) => None,
        })
    }

    fn decide(&mut self, index: usize, can_reexec: bool, now: BootTime) {
        if self
            .faults
            .get(index)
            .is_none_or(|fault| fault.decided.is_some())
        {
            return;
        }
        let can_reexec = can_reexec && self.has_restart_left(now);
        match RecoveryAction::of_policy(self.policy.action, can_reexec) {
            Some(decision) => self.apply(index, decision, now),
            None => self.end_smallest_unit(index, now),
        }
    }

    /// Ends the process of a fault where the policy ends processes alone, and its container
    /// otherwise. The container's root process is the container.
    fn end_smallest_unit(&mut self, index: usize, now: BootTime) {
        let ends_processes = matches!(
            self.policy.action,
            ContextAction::Process | ContextAction::InPlace
        );
        let is_of_root = self.faults.get(index).is_some_and(Fault::is_of_root);
        let (limit, window) = (self.policy.max_restarts, self.policy.window);
        if ends_processes && !is_of_root && has_room(&mut self.process_ends, limit, window, now) {
            self.apply(index, RecoveryAction::EndProcess, now);
        } else {
            self.restart_container(index, now);
        }
    }

    fn restart_container(&mut self, index: usize, now: BootTime) {
        let over_limit = !self.has_restart_left(now);
        self.apply(index, RecoveryAction::RestartContainer { over_limit }, now);
    }

    fn has_restart_left(&mut self, now: BootTime) -> bool {
        let (limit, window) = (self.policy.max_restarts, self.policy.window);
        has_room(&mut self.restarts, limit, window, now)
    }

    fn apply(&mut self, index: usize, decision: RecoveryAction, now: BootTime) {
        if let Some(fault) = self.faults.get_mut(index) {
            fault.decided = Some((decision, RecordedMoment(now)));
        }
        if decision == RecoveryAction::EndProcess {
            self.process_ends.push(RecordedMoment(now));
        }
        if decision.is_restart() {
            self.restarts.push(RecordedMoment(now));
            self.restarted = self.restarted.saturating_add(1);
        }
        if decision == RecoveryAction::ReexecInPlace {
            self.restarted_in_place = self.restarted_in_place.saturating_add(1);
        }
    }
}

/// Whether the window has room for another moment. Removes those before it.
fn has_room(
    moments: &mut Vec<RecordedMoment>,
    limit: u32,
    window: Duration,
    now: BootTime,
) -> bool {
    moments.retain(|RecordedMoment(then)| now.since(*then) < window);
    moments.len() < usize::try_from(limit).unwrap_or(usize::MAX)
}

/// A moment in a checkpoint. Older agents wrote times of the wall clock, which count as long ago.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct RecordedMoment(pub BootTime);

impl<'de> Deserialize<'de> for RecordedMoment {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let recorded = serde_json::Value::deserialize(from)?;
        Ok(Self(BootTime(recorded.as_u64().unwrap_or_default())))
    }
}

#[cfg(test)]
mod tests;
