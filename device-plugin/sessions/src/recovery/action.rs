//! Names what the agent does about a poisoned image.

use bursar_crds::context_policy::{ContextAction, FaultAction};
use serde::{Deserialize, Serialize};

/// The agent's reaction to a poisoned image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "RecordedAction", into = "RecordedAction")]
pub enum RecoveryAction {
    /// The shim executes the program again, in the same process.
    ReexecInPlace,
    /// The agent kills the process, and the container goes on.
    EndProcess,
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

/// The processes that the agent kills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KilledUnit {
    /// The process of the image alone.
    Process,
    /// The container's root process.
    Container,
}

impl RecoveryAction {
    /// The measure of a policy. `None` where a fault costs the smallest unit that it must.
    pub(super) fn of_policy(policy: ContextAction, can_reexec: bool) -> Option<RecoveryAction> {
        match policy {
            ContextAction::Report => Some(RecoveryAction::NoAction {
                await_eviction: false,
            }),
            ContextAction::Evict => Some(RecoveryAction::NoAction {
                await_eviction: true,
            }),
            ContextAction::InPlace if can_reexec => Some(RecoveryAction::ReexecInPlace),
            ContextAction::InPlace
            | ContextAction::Process
            | ContextAction::Restart
            // The agent rejects an order with an unknown action, but a checkpoint may hold one.
            | ContextAction::Unknown => None,
        }
    }

    /// Converts to the value of the API.
    pub fn to_api(self) -> FaultAction {
        match self {
            RecoveryAction::ReexecInPlace => FaultAction::InPlace,
            RecoveryAction::EndProcess => FaultAction::Process,
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

    /// The consequence for the process, for the fault's Event.
    pub fn describe(self) -> &'static str {
        match self {
            RecoveryAction::ReexecInPlace => "its program is executed again in the same process",
            RecoveryAction::EndProcess => "it ends, and its container goes on",
            RecoveryAction::RestartContainer { over_limit: false } => "its container is restarted",
            RecoveryAction::RestartContainer { over_limit: true } => {
                "its container has been restarted too often and is killed"
            }
            RecoveryAction::NoAction {
                await_eviction: true,
            } => "its pod is to be evicted",
            RecoveryAction::NoAction {
                await_eviction: false,
            } => "nothing is done",
        }
    }

    /// The unit that the agent kills.
    pub(crate) fn killed_unit(self) -> Option<KilledUnit> {
        match self {
            RecoveryAction::EndProcess => Some(KilledUnit::Process),
            RecoveryAction::RestartContainer { .. } => Some(KilledUnit::Container),
            RecoveryAction::ReexecInPlace | RecoveryAction::NoAction { .. } => None,
        }
    }

    /// Whether the program runs again, so that the measure counts among the container's restarts.
    pub fn is_restart(self) -> bool {
        matches!(
            self,
            RecoveryAction::ReexecInPlace | RecoveryAction::RestartContainer { over_limit: false }
        )
    }

    /// Whether another process image follows.
    pub fn has_successor(self) -> bool {
        self.is_restart() || self == RecoveryAction::EndProcess
    }

    /// The image that follows, for the Event about it.
    pub fn describe_successor(self) -> &'static str {
        match self.killed_unit() {
            None => "the program runs again in the same process",
            Some(KilledUnit::Process) => "another process runs",
            Some(KilledUnit::Container) => "the program runs again in a restarted container",
        }
    }

    pub(super) fn stays_open(self) -> bool {
        self.to_api().awaits_eviction()
    }
}

/// A [`RecoveryAction`] in a checkpoint. An older agent that reads it does not know the unit, and
/// restarts the container.
#[derive(Serialize, Deserialize)]
#[serde(rename = "RecoveryAction")]
enum RecordedAction {
    ReexecInPlace,
    RestartContainer {
        over_limit: bool,
        #[serde(default)]
        unit: RecordedUnit,
    },
    NoAction {
        await_eviction: bool,
    },
}

#[derive(Default, Serialize, Deserialize)]
enum RecordedUnit {
    Process,
    #[default]
    Container,
}

impl From<RecordedAction> for RecoveryAction {
    fn from(recorded: RecordedAction) -> RecoveryAction {
        match recorded {
            RecordedAction::ReexecInPlace => RecoveryAction::ReexecInPlace,
            RecordedAction::RestartContainer {
                over_limit: false,
                unit: RecordedUnit::Process,
            } => RecoveryAction::EndProcess,
            RecordedAction::RestartContainer { over_limit, .. } => {
                RecoveryAction::RestartContainer { over_limit }
            }
            RecordedAction::NoAction { await_eviction } => {
                RecoveryAction::NoAction { await_eviction }
            }
        }
    }
}

impl From<RecoveryAction> for RecordedAction {
    fn from(action: RecoveryAction) -> RecordedAction {
        match action {
            RecoveryAction::ReexecInPlace => RecordedAction::ReexecInPlace,
            RecoveryAction::EndProcess => RecordedAction::RestartContainer {
                over_limit: false,
                unit: RecordedUnit::Process,
            },
            RecoveryAction::RestartContainer { over_limit } => RecordedAction::RestartContainer {
                over_limit,
                unit: RecordedUnit::Container,
            },
            RecoveryAction::NoAction { await_eviction } => {
                RecordedAction::NoAction { await_eviction }
            }
        }
    }
}
