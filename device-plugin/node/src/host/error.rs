//! Defines the errors of steps on the host.

use std::io;
use std::path::PathBuf;

use bursar_host::checkpoint::SaveError;
use bursar_host::driver_files::DriverError;
use bursar_ledger::units::GpuUuid;
use bursar_sessions::SessionsError;

use crate::cdi::CdiError;
use crate::shim_install::ShimInstallError;

/// The reason why a step failed. Every step can be retried.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The checkpoint could not be written.
    #[error(transparent)]
    Checkpoint(#[from] SaveError),
    /// The driver could not be found.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The shim's files could not be installed.
    #[error(transparent)]
    Shim(#[from] ShimInstallError),
    /// The installation of the shim's files has not ended in time.
    #[error(
        "failed to install the shim's files within {0:?}: a file system is slow or hangs; if this goes on, \
         check the disks of paths.state-dir and driver.root"
    )]
    InstallTimeout(std::time::Duration),
    /// The installation of the shim's files panicked.
    #[error("failed to install the shim's files: {0}")]
    Install(#[source] tokio::task::JoinError),
    /// The CDI file could not be written or removed.
    #[error(transparent)]
    Cdi(#[from] CdiError),
    /// The allocation's socket could not be served.
    #[error(transparent)]
    Sessions(#[from] SessionsError),
    /// The run directory could not be created.
    #[error("failed to create directory {path}: {source}", path = path.display())]
    Folder {
        /// The directory.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// A bound GPU that NVML does not list at the moment.
    #[error("failed to find {0}: the driver does not list the bound GPU now")]
    GpuNotListed(GpuUuid),
}

/// The subsystem of a failed step, which selects the node condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subsystem {
    /// The agent's checkpoint and sockets.
    Records,
    /// The driver and its GPUs.
    Driver,
    /// The files that the container runtime reads.
    Cdi,
}

impl HostError {
    pub(crate) fn subsystem(&self) -> Subsystem {
        match self {
            Self::Checkpoint(_) | Self::Sessions(_) | Self::Folder { .. } => Subsystem::Records,
            Self::Driver(_) | Self::GpuNotListed(_) => Subsystem::Driver,
            Self::Shim(_) | Self::InstallTimeout(_) | Self::Install(_) | Self::Cdi(_) => {
                Subsystem::Cdi
            }
        }
    }

    /// A bounded name for conditions, events and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Checkpoint(_) => "CheckpointUnwritable",
            Self::Driver(error) => error.reason(),
            Self::Shim(_) | Self::InstallTimeout(_) | Self::Install(_) => "ShimNotInstalled",
            Self::Cdi(error) => error.reason(),
            Self::Sessions(_) | Self::Folder { .. } => "RunFolderUnusable",
            Self::GpuNotListed(_) => "GpuLost",
        }
    }
}
