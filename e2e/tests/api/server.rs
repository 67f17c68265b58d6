//! Starts the API server for the trials, and orders the turns of their cases.

use std::path::PathBuf;

use bursar_e2e::control_plane::{ControlPlane, ControlPlaneError};
use bursar_e2e::progress::Progress;
use libtest_mimic::Failed;
use tokio::sync::{OnceCell, Semaphore, SemaphorePermit};

use crate::case::Outcome;

/// The cluster's name.
const CLUSTER: &str = "api";

/// So many cases are at work at the same time. More would starve each other of two cores.
const AT_ONCE: u32 = 60;
static TURNS: Semaphore = Semaphore::const_new(AT_ONCE as usize);

/// Leave to be at work. Who only looks whether all stays as it is needs none.
pub(crate) type Turn = SemaphorePermit<'static>;

/// Waits for a turn.
pub(crate) async fn turn() -> Turn {
    turns(1).await
}

/// Waits until nobody else is at work.
pub(crate) async fn all_turns() -> Turn {
    turns(AT_ONCE).await
}

async fn turns(count: u32) -> Turn {
    let turns = TURNS.acquire_many(count).await;
    turns.expect("nobody closes it")
}

/// A control plane, and what is known of it.
pub(crate) struct Server {
    pub(crate) plane: ControlPlane,
    pub(crate) progress: Progress,
    /// How the tours go when nothing goes wrong.
    pub(crate) undisturbed: OnceCell<Result<Outcome, Failed>>,
}

impl Server {
    /// Starts the control plane that cases share.
    pub(crate) async fn start(progress: Progress) -> Result<Self, ControlPlaneError> {
        Self::named(CLUSTER, progress).await
    }

    /// Starts a control plane for a case that damages it.
    pub(crate) async fn named(name: &str, progress: Progress) -> Result<Self, ControlPlaneError> {
        let harness = PathBuf::from(env!("CARGO_BIN_EXE_bursar-e2e"));
        Ok(Self {
            plane: ControlPlane::up(name, harness, &progress).await?,
            progress,
            undisturbed: OnceCell::new(),
        })
    }
}
