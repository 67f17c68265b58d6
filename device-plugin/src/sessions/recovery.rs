//! Decides what is done about a container's poisoned process images: pure, time included.
//!
//! ```text
//!            report (the shim)           Execute -- it hung up: executed, and closed once the new image says hello
//!   living -----------------> decided --<           still there after `GRACE`: Kill
//!      \                       ^         Kill ----- its image ends: closed, or stays open where it was one too many
//!       \ XID    no report     |         Leave ---- its image ends: closed, or stays open for who evicts
//!        +-----> fenced -------+
//!                after GRACE
//! ```
//!
//! Who is left for eviction and cannot be evicted, because the API server has been away for `ALONE`, is restarted. What
//! was left as it is can be ordered to be restarted later, by the number that its container's images have to reach.
//!
//! An image is fenced from its first fault on: the agent grants it nothing more. It is decided about once, however
//! often and by whichever way it is told of. An XID alone decides nothing for a while: its process may be dying
//! already, or its shim be about to report, with the chance to restart in place.

use std::time::Duration;

use bursar_crds::budget::{ContextAction, ContextPolicy};
use bursar_crds::gpu_node::FaultAction;
use jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serialize};

use super::Process;
use crate::clock::ClockReading;
use crate::ledger::BootTime;
use crate::units::{AllocationId, GpuUuid};

/// How long an image may take to report what an XID said of it, and to do what it was told.
const REPORT_GRACE: Duration = Duration::from_secs(5);

/// How long an image waits for its pod's eviction while nobody can be told of it.
const EVICTION_TIMEOUT: Duration = Duration::from_secs(30);

/// What is done about poisoned contexts of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoveryPolicy {
    /// What is done first.
    pub action: ContextAction,
    /// How many restarts, of either kind, the container gets within the window.
    pub max_restarts: u32,
    /// The window.
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
    /// As the API says it; its schema allows no negative numbers.
    pub fn new(action: ContextAction, max_restarts: i32, window_seconds: i32) -> RecoveryPolicy {
        RecoveryPolicy {
            action,
            max_restarts: max_restarts.unsigned_abs(),
            window: Duration::from_secs(window_seconds.unsigned_abs().into()),
        }
    }
}

/// What is done about a poisoned image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RecoveryAction {
    /// It executes its program again.
    ReexecInPlace,
    /// Its container's main process is killed; the kubelet restarts the container.
    RestartContainer {
        /// The container was restarted too often: the fault stays open.
        over_limit: bool,
    },
    /// Nothing but the fence.
    NoAction {
        /// The fault stays open for who evicts the pod.
        await_eviction: bool,
    },
}

impl RecoveryAction {
    /// One word for metrics and messages.
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

    /// As the API says it.
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

/// How a fault became known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FaultSource {
    /// The process says that the driver answered this `CUresult`.
    Cuda {
        /// The code.
        code: i32,
        /// Whether its program could be executed again in its place.
        can_reexec: bool,
    },
    /// The kernel's log, or NVML, named the process with this XID.
    Xid(u32),
}

/// A process image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessImage {
    /// The process.
    pub process: Process,
    /// P, its number among the container's images.
    pub generation: u64,
}

/// An image that a record of the kernel's log names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XidTarget {
    /// Its container's.
    pub allocation: AllocationId,
    /// The image.
    pub image: ProcessImage,
    /// The container's GPU that the record names.
    pub gpu: GpuUuid,
}

/// A poisoned image that is still to be dealt with, or that somebody else has to deal with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Whose context it was.
    pub image: ProcessImage,
    /// The GPU, as far as it is known.
    pub gpu: GpuUuid,
    /// The driver's code, if the process reported one.
    pub cuda_error: Option<i32>,
    /// The XID, if one named the process.
    pub xid: Option<u32>,
    /// When it was first told, for people.
    pub time: Timestamp,
    /// When it was first told, for decisions.
    #[serde(default)]
    pub since: BootTime,
    /// What is done about it, since when; none while a report is waited for.
    pub decided: Option<(RecoveryAction, RecordedMoment)>,
    /// Whether an image that was told to execute its program again has done so. The new one may take its time to say
    /// hello: a program imports for minutes before it calls CUDA.
    #[serde(default)]
    pub executed: bool,
    /// Whether the image has ended.
    pub ended: bool,
}

impl Fault {
    /// What is done about it, once that was decided.
    pub fn decision(&self) -> Option<RecoveryAction> {
        self.decided.map(|(decision, _)| decision)
    }
}

/// The poisoned images of one container. On record with its grants.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct FaultLog {
    policy: RecoveryPolicy,
    /// When restarts were ordered, the oldest first, as far as the window reaches.
    restarts: Vec<RecordedMoment>,
    faults: Vec<Fault>,
    /// How many images were poisoned, and how many restarts were ordered, ever.
    pub(super) poisoned: u64,
    pub(super) restarted: u64,
}

impl FaultLog {
    /// What is done about faults from now on. What was decided stands.
    pub(super) fn set_policy(&mut self, policy: RecoveryPolicy) {
        self.policy = policy;
    }

    /// The faults that are open.
    pub(super) fn faults(&self) -> &[Fault] {
        &self.faults
    }

    /// The fault by which an image gets nothing more.
    pub(super) fn fault_of(&self, process: Process, generation: u64) -> Option<&Fault> {
        let mut faults = self.faults.iter();
        faults
            .find(|Fault { image, .. }| (image.process, image.generation) == (process, generation))
    }

    /// An image is poisoned; the fault, where that is new.
    pub(super) fn record(
        &mut self,
        image: ProcessImage,
        gpu: &GpuUuid,
        cause: FaultSource,
        now: ClockReading,
    ) -> (Option<RecoveryAction>, Option<Fault>) {
        let known = self.faults.iter().position(|fault| fault.image == image);
        let at = known.unwrap_or_else(|| {
            // One that ended stands for all before it that were one too many.
            self.faults.retain(|fault| !fault.ended);
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
        let able = match (cause, self.faults.get_mut(at)) {
            (
                FaultSource::Cuda {
                    code,
                    can_reexec: able,
                },
                Some(fault),
            ) => {
                fault.cuda_error.get_or_insert(code);
                Some(able)
            }
            (FaultSource::Xid(code), Some(fault)) => {
                fault.xid.get_or_insert(code);
                None
            }
            (_, None) => None,
        };
        if let Some(able) = able {
            self.decide(at, able, now);
        }
        let fault = self.faults.get(at);
        (
            fault.and_then(Fault::decision),
            fault.filter(|_| known.is_none()).cloned(),
        )
    }

    /// An image heard what was decided, and then its socket ended, as an exec ends it.
    pub(super) fn record_disconnect(&mut self, process: Process, generation: u64) {
        for fault in &mut self.faults {
            let image = &fault.image;
            fault.executed |= (image.process, image.generation) == (process, generation)
                && fault.decision() == Some(RecoveryAction::ReexecInPlace);
        }
    }

    /// An image ended: whatever was decided about it is done.
    pub(super) fn record_exit(&mut self, process: Process, generation: u64) {
        for fault in &mut self.faults {
            let image = &fault.image;
            fault.ended |= (image.process, image.generation) == (process, generation);
        }
        let stays = |fault: &Fault| fault.decision().is_some_and(RecoveryAction::stays_open);
        self.faults.retain(|fault| !fault.ended || stays(fault));
    }

    /// Decides about those that were told of by an XID alone, about those that did not do what they were told, and,
    /// where nobody has been reached for so long (`alone`), about those that were left for eviction. Whether anything
    /// changed.
    pub(super) fn tick(&mut self, alone: Duration, now: ClockReading) -> bool {
        let before = self.faults.clone();
        for at in 0..self.faults.len() {
            let Some(fault) = self.faults.get_mut(at).filter(|fault| !fault.ended) else {
                continue;
            };
            match fault.decided {
                None if now.moment.since(fault.since) >= REPORT_GRACE => {
                    self.decide(at, false, now)
                }
                Some((RecoveryAction::ReexecInPlace, RecordedMoment(then)))
                    if !fault.executed && now.moment.since(then) >= REPORT_GRACE =>
                {
                    let killed = RecoveryAction::RestartContainer { over_limit: false };
                    fault.decided = Some((killed, RecordedMoment(now.moment)));
                }
                Some((
                    RecoveryAction::NoAction {
                        await_eviction: true,
                    },
                    RecordedMoment(then),
                )) if now.moment.since(then).min(alone) >= EVICTION_TIMEOUT => {
                    self.restart_container(at, now);
                }
                _ => {}
            }
        }
        before != self.faults
    }

    /// The container's images have to reach the number `generation`: poisoned ones below it that were left as they
    /// are end, and faults of those that have ended are done. Whether anything changed.
    pub(super) fn require_generation(&mut self, generation: u64, now: ClockReading) -> bool {
        let before = self.faults.clone();
        self.faults
            .retain(|fault| !fault.ended || fault.image.generation >= generation);
        for at in 0..self.faults.len() {
            let left = self.faults.get(at).is_some_and(|fault| {
                let is_left = matches!(fault.decision(), Some(RecoveryAction::NoAction { .. }));
                is_left && fault.image.generation < generation
            });
            if left {
                self.restart_container(at, now);
            }
        }
        before != self.faults
    }

    /// Takes back the decisions since `before`: the next agent would not count these restarts. The faults
    /// stay, so that their images stay fenced and are decided about again.
    pub(super) fn roll_back(&mut self, before: &FaultLog) {
        self.restarts.clone_from(&before.restarts);
        self.restarted = before.restarted;
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

    /// The images whose containers are to be killed.
    pub(super) fn images_to_kill(&self) -> impl Iterator<Item = &ProcessImage> {
        let killed = |fault: &&Fault| {
            !fault.ended
                && matches!(
                    fault.decision(),
                    Some(RecoveryAction::RestartContainer { .. })
                )
        };
        self.faults.iter().filter(killed).map(|fault| &fault.image)
    }

    fn decide(&mut self, at: usize, able: bool, now: ClockReading) {
        if self
            .faults
            .get(at)
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
            ContextAction::InPlace if able && has_restarts => RecoveryAction::ReexecInPlace,
            // The agent takes no order with an unknown action; a session record may have one.
            ContextAction::InPlace | ContextAction::Restart | ContextAction::Unknown => {
                return self.restart_container(at, now);
            }
        };
        self.apply(at, decision, now);
    }

    fn restart_container(&mut self, at: usize, now: ClockReading) {
        let beyond = !self.has_restart_left(now);
        self.apply(
            at,
            RecoveryAction::RestartContainer { over_limit: beyond },
            now,
        );
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

    fn apply(&mut self, at: usize, decision: RecoveryAction, now: ClockReading) {
        if let Some(fault) = self.faults.get_mut(at) {
            fault.decided = Some((decision, RecordedMoment(now.moment)));
        }
        if matches!(
            decision,
            RecoveryAction::ReexecInPlace | RecoveryAction::RestartContainer { over_limit: false }
        ) {
            self.restarts.push(RecordedMoment(now.moment));
            self.restarted += 1;
        }
    }
}

/// A moment in a record. Records of older agents have times of the wall clock there, which count as long ago.
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
