//! The API server that all cases share.

use std::path::PathBuf;

use bursar_e2e::control_plane::{ControlPlane, ControlPlaneError};
use bursar_e2e::progress::Progress;
use tokio::sync::RwLock;

/// The cluster's name.
const CLUSTER: &str = "api";

/// A control plane, and who has it.
pub(crate) struct Server {
    pub(crate) plane: ControlPlane,
    /// Cases share the server; who takes something from it has it alone.
    pub(crate) turns: RwLock<()>,
    pub(crate) progress: Progress,
}

impl Server {
    pub(crate) async fn start(progress: Progress) -> Result<Self, ControlPlaneError> {
        let harness = PathBuf::from(env!("CARGO_BIN_EXE_bursar-e2e"));
        Ok(Self {
            plane: ControlPlane::up(CLUSTER, harness, &progress).await?,
            turns: RwLock::new(()),
            progress,
        })
    }
}
