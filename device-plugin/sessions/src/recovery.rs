//! Decides how a container recovers from poisoned process images: pure, with time as an argument.
//!
//! ```text
//!            report (shim)
//!   live ------------------> decided -- ReexecInPlace: closed when the new image says hello
//!      \                      ^  |  \-- RestartContainer: closed at the exit unless over limit
//!       \ XID  REPORT_GRACE   |   \---- NoAction: closed at the exit unless it awaits eviction
//!        +----> fenced -------+
//!
//!   ReexecInPlace --not executed within REPORT_GRACE--> RestartContainer
//! ```
//!
//! A container that awaits eviction is restarted instead once the API server has been unreachable
//! for `EVICTION_TIMEOUT`. A fault without an action can be restarted later, by an order that names
//! the process generation to reach.
//!
//! The agent fences an image from its first fault on, and grants it nothing more. Each image gets
//! one decision, whatever number of reports and XIDs name it. An XID alone decides nothing before
//! `REPORT_GRACE`. The process may be exiting, or its shim may be about to report, and can then
//! restart in place.

use std::time::Duration;

use bursar_crds::budget::{ContextAction, ContextPolicy};
use bursar_crds::gpu_node::FaultAction;
use bursar_host::clock::ClockReading;
use bursar_ledger::BootTime;
use bursar_ledger::units::{AllocationId, GpuUuid};
use jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serialize};

use super::Process;

/// How long the agent waits for the report of an image that an XID names, and for an ordered
/// re-exec.
const REPORT_GRACE: Duration = Duration::from_secs(5);

/// How long an image awaits the eviction of its pod while the API server is unreachable.
const EVICTION_TIMEOUT: Duration = Duration::from_secs(30);

/// What the agent does about poisoned contexts of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoveryPolicy {
    /// The action of first choice.
    pub action: ContextAction,
    /// The number of restarts, of either kind, that the container gets within the window.
    pub max_restarts: u32,
    /// The window in which restarts count.
    pub window: Duration,
}

impl Default for RecoveryPolicy {
    fn default() -> RecoveryPolicy {
        let ContextPolicy {
            action,
            max_restarts,
            window_seconds,
        } = ContextPolicy::default();
        RecoveryPolicy::new(action, max_restarts, window_seconds)
    }
}

impl RecoveryPolicy {
    /// Converts the API's values; the schema allows no negative numbers.
    pub fn new(action: ContextAction, max_restarts: i32, window_seconds: i32) -> RecoveryPolicy {
        RecoveryPolicy {
            action,
            max_restarts: max_restarts.unsigned_abs(),
            window: Duration::from_secs(window_seconds.unsigned_abs().into()),
        }
    }
}

/// What the agent does about a poisoned image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RecoveryAction {
    /// The shim executes the program again, in the same process.
    ReexecInPlace,
    /// The agent kills the container's root process, and the kubelet restarts the container.
    RestartContainer {
        /// Whether the container exceeded its restarts: the fault then stays open.
        over_limit: bool,
    },
    /// The agent only fences the image.
    NoAction {
        /// Whether the fault stays open until the operator evicts the pod.
        await_eviction: bool,
    },
}

impl RecoveryAction {
    /// The label for metrics and messages.
    pub fn as_str(self) -> &'static str {
        match self {
            RecoveryAction::ReexecInPlace => "in-place",
            RecoveryAction::RestartContainer { over_limit: false } => "restart",
            RecoveryAction::RestartContainer { over_limit: true } => "beyond-maximum",
            RecoveryAction::NoAction {
                await_eviction: true,
            } => "evict",
            RecoveryAction::NoAction {
                await_eviction: false,
            } => "report",
        }
    }

    /// Converts to the value of the API.
    pub fn to_api(self) -> FaultAction {
        match self {
            RecoveryAction::ReexecInPlace => FaultAction::InPlace,
            RecoveryAction::RestartContainer { over_limit: false } => FaultAction::Restart,
            RecoveryAction::RestartContainer { over_limit: true } => FaultAction::BeyondMaximum,
            RecoveryAction::NoAction {
                await_eviction: true,
            } => FaultAction::Evict,
            RecoveryAction::NoAction {
                await_eviction: false,
            } => FaultAction::Report,
        }
    }

    fn stays_open(self) -> bool {
        matches!(
            self,
            RecoveryAction::RestartContainer { over_limit: true }
                | RecoveryAction::NoAction {
                    await_eviction: true
                }
        )
    }
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
}

impl Fault {
    /// The decision, once it was made.
    pub fn decision(&self) -> Option<RecoveryAction> {
        self.decided.map(|(decision, _)| decision)
    }
}

/// The poisoned images of one container. The checkpoint of the container holds this log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct FaultLog {
    policy: RecoveryPolicy,
    /// When restarts were ordered within the window, the oldest first.
    restarts: Vec<RecordedMoment>,
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
    fn close_unless(&mut self, stays: impl Fn(&Fault) -> bool) {
        for fault in self.faults.extract_if(.., |fault| !stays(fault)) {
            let last = self.last_closed.as_ref();
            if last.is_none_or(|last| last.since <= fault.since) {
                self.last_closed = Some(fault);
            }
        }
    }

    /// The fault that fences an image.
    pub(super) fn fault_of(&self, process: Process, generation: u64) -> Option<&Fault> {
        let mut faults = self.faults.iter();
        faults
            .find(|Fault { image, .. }| (image.process, image.generation) == (process, generation))
    }

    /// Records a fault of an image. Returns the decision, and the fault if it is new.
    pub(super) fn record(
        &mut self,
        image: ProcessImage,
        gpu: &GpuUuid,
        source: FaultSource,
        now: ClockReading,
    ) -> (Option<RecoveryAction>, Option<Fault>) {
        let known = self.faults.iter().position(|fault| fault.image == image);
        let index = known.unwrap_or_else(|| {
            // An ended over-limit fault makes all earlier ones obsolete.
            self.close_unless(|fault| !fault.ended);
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
            });
            self.faults.len() - 1
        });
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
            self.decide(index, can_reexec, now);
        }
        let fault = self.faults.get(index);
        (
            fault.and_then(Fault::decision),
            fault.filter(|_| known.is_none()).cloned(),
        )
    }

    /// Records that the socket of an image closed after the agent's answer, as an exec closes it.
    pub(super) fn record_disconnect(&mut self, process: Process, generation: u64) {
        for fault in &mut self.faults {
            let image = &fault.image;
            fault.executed |= (image.process, image.generation) == (process, generation)
                && fault.decision() == Some(RecoveryAction::ReexecInPlace);
        }
    }

    /// Records the exit of an image, which completes any decision about it.
    pub(super) fn record_exit(&mut self, process: Process, generation: u64) {
        for fault in &mut self.faults {
            let image = &fault.image;
            fault.ended |= (image.process, image.generation) == (process, generation);
        }
        let stays = |fault: &Fault| fault.decision().is_some_and(RecoveryAction::stays_open);
        self.close_unless(|fault| !fault.ended || stays(fault));
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
                    self.decide(index, false, now)
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
                    self.restart_container(index, now);
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
        self.close_unless(|fault| !fault.ended || fault.image.generation >= generation);
        for index in 0..self.faults.len() {
            let has_no_action = self.faults.get(index).is_some_and(|fault| {
                let is_left = matches!(fault.decision(), Some(RecoveryAction::NoAction { .. }));
                is_left && fault.image.generation < generation
            });
            if has_no_action {
                self.restart_container(index, now);
            }
        }
        before != self.faults
    }

    /// Rolls back the decisions since `before`, because a later agent would not count these
    /// restarts. The faults stay, so that the images stay fenced and get a new decision.
    pub(super) fn roll_back(&mut self, before: &FaultLog) {
        self.restarts.clone_from(&before.restarts);
        self.restarted = before.restarted;
        self.restarted_in_place = before.restarted_in_place;
        for fault in &mut self.faults {
            let ProcessImage {
                process,
                generation,
            } = fault.image;
            fault.decided = before
                .fault_of(process, generation)
                .and_then(|then| then.decided);
        }
    }

    /// The images whose containers the agent has to kill.
    pub(super) fn images_to_kill(&self) -> impl Iterator<Item = &ProcessImage> {
        let is_killed = |fault: &&Fault| {
            !fault.ended
                && matches!(
                    fault.decision(),
                    Some(RecoveryAction::RestartContainer { .. })
                )
        };
        self.faults
            .iter()
            .filter(is_killed)
            .map(|fault| &fault.image)
    }

    fn decide(&mut self, index: usize, can_reexec: bool, now: ClockReading) {
        if self
            .faults
            .get(index)
            .is_none_or(|fault| fault.decided.is_some())
        {
            return;
        }
        let has_restarts = self.has_restart_left(now);
        let decision = match self.policy.action {
            ContextAction::Report => RecoveryAction::NoAction {
                await_eviction: false,
            },
            ContextAction::Evict => RecoveryAction::NoAction {
                await_eviction: true,
            },
            ContextAction::InPlace if can_reexec && has_restarts => RecoveryAction::ReexecInPlace,
            // The agent rejects an order with an unknown action, but a checkpoint may hold one.
            ContextAction::InPlace | ContextAction::Restart | ContextAction::Unknown => {
                return self.restart_container(index, now);
            }
        };
        self.apply(index, decision, now);
    }

    fn restart_container(&mut self, index: usize, now: ClockReading) {
        let over_limit = !self.has_restart_left(now);
        self.apply(index, RecoveryAction::RestartContainer { over_limit }, now);
    }

    /// Whether the window has room for a restart.
    fn has_restart_left(&mut self, now: ClockReading) -> bool {
        let RecoveryPolicy {
            max_restarts,
            window,
            ..
        } = self.policy;
        self.restarts
            .retain(|RecordedMoment(then)| now.moment.since(*then) < window);
        self.restarts.len() < usize::try_from(max_restarts).unwrap_or(usize::MAX)
    }

    fn apply(&mut self, index: usize, decision: RecoveryAction, now: ClockReading) {
        if let Some(fault) = self.faults.get_mut(index) {
            fault.decided = Some((decision, RecordedMoment(now.moment)));
        }
        if matches!(
            decision,
            RecoveryAction::ReexecInPlace | RecoveryAction::RestartContainer { over_limit: false }
        ) {
            self.restarts.push(RecordedMoment(now.moment));
            self.restarted = self.restarted.saturating_add(1);
        }
        if decision == RecoveryAction::ReexecInPlace {
            self.restarted_in_place = self.restarted_in_place.saturating_add(1);
        }
    }
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
