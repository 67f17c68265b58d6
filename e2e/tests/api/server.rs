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
const MAX_CONCURRENT_CASES: u32 = 60;
static PERMITS: Semaphore = Semaphore::const_new(MAX_CONCURRENT_CASES as usize);

/// Leave to be at work. Who only looks whether all stays as it is needs none.
pub(crate) type Permit = SemaphorePermit<'static>;

/// Waits for a turn.
pub(crate) async fn acquire_permit() -> Permit {
    acquire_permits(1).await
}

/// Waits until nobody else is at work.
pub(crate) async fn acquire_all_permits() -> Permit {
    acquire_permits(MAX_CONCURRENT_CASES).await
}

async fn acquire_permits(count: u32) -> Permit {
    let turns = PERMITS.acquire_many(count).await;
    turns.expect("nobody closes it")
}

/// A control plane, and what is known of it.
pub(crate) struct Server {
    pub(crate) control_plane: ControlPlane,
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
            control_plane: ControlPlane::start(name, harness, &progress).await?,
            progress,
            undisturbed: OnceCell::new(),
        })
    }
}
