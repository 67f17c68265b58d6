//! Starts the API server of the trials, and limits how many cases make changes at once.

use std::path::PathBuf;

use bursar_e2e::control_plane::{ControlPlane, ControlPlaneError};
use bursar_e2e::progress::Progress;
use libtest_mimic::Failed;
use tokio::sync::{OnceCell, Semaphore, SemaphorePermit};

use crate::test_case::Outcome;

/// The cluster's name.
const CLUSTER: &str = "api";

/// The number of cases that make changes concurrently. More would starve each other on two cores.
const MAX_CONCURRENT_CASES: u32 = 60;
static PERMITS: Semaphore = Semaphore::const_new(MAX_CONCURRENT_CASES as usize);

/// Returns whether the long tier runs, with all cases of each trial.
pub(crate) fn is_long() -> bool {
    std::env::var_os("BURSAR_LONG").is_some()
}

/// The permission to make changes. Cases that only watch a state need none.
pub(crate) type Permit = SemaphorePermit<'static>;

/// Waits for a permit.
pub(crate) async fn acquire_permit() -> Permit {
    acquire_permits(1).await
}

/// Waits until no other case makes changes.
pub(crate) async fn acquire_all_permits() -> Permit {
    acquire_permits(MAX_CONCURRENT_CASES).await
}

async fn acquire_permits(count: u32) -> Permit {
    let turns = PERMITS.acquire_many(count).await;
    turns.expect("nobody closes it")
}

/// The control plane with results that the trials share.
pub(crate) struct Server {
    pub(crate) control_plane: ControlPlane,
    pub(crate) progress: Progress,
    /// The outcome of the scenarios without faults.
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
