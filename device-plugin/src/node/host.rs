//! What the node does to its host for an allocation: one method per step, each repeatable.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::Access;
use tracing::warn;

use super::checkpoint_state::NodeCheckpoint;
use super::installer::Installer;
use crate::checkpoint::{Checkpoint, LoadError, SaveError};
use crate::config::{Config, DriverConfig, PathsConfig};
use crate::node::cdi::{self, CdiDir, CdiError};
use crate::node::driver_files::{Driver, DriverError};
use crate::node::shim_install::{self, ShimInstallError};
use crate::retained::handle::LeaseHandle;
use crate::retained::leases::{LedgerUpdate, NodeView};
use crate::sessions::{Account, SessionSpec, Sessions, SessionsError};
use crate::units::{AllocationId, Bytes, GpuUuid, LeaseId};

/// Why a step failed. Every step can be tried again.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] SaveError),
    /// The driver.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The shim's files.
    #[error(transparent)]
    Shim(#[from] ShimInstallError),
    /// The shim's files are not there yet.
    #[error(
        "failed to install the shim's files within {0:?}: a file system is slow or hangs; if this goes on, \
         check the disks of paths.state-dir and driver.root"
    )]
    InstallTimeout(std::time::Duration),
    /// The installation of the shim's files panicked.
    #[error("failed to install the shim's files: {0}")]
    Install(#[source] tokio::task::JoinError),
    /// The CDI file.
    #[error(transparent)]
    Cdi(#[from] CdiError),
    /// The allocation's socket or folder.
    #[error(transparent)]
    Sessions(#[from] SessionsError),
    /// The run folder.
    #[error("folder {path}: {source}", path = path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A GPU that NVML does not list at the moment.
    #[error("{0} is bound, and the driver does not list it now")]
    GpuNotListed(GpuUuid),
}

/// Which of the node's conditions a failed step is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subsystem {
    /// The agent's own records and sockets.
    Records,
    /// The driver and its GPUs.
    Driver,
    /// What the container runtime reads.
    Cdi,
}

impl HostError {
    /// What it is about.
    pub fn subsystem(&self) -> Subsystem {
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

/// The steps.
pub trait HostOps: Send {
    /// Makes `state` what a successor finds.
    fn save_checkpoint(&mut self, state: &NodeCheckpoint) -> Result<(), HostError>;
    /// Makes the allocation's folder and serves its socket there; its container may use `managed` memory too.
    fn serve_session(
        &mut self,
        binding: &cdi::CdiBinding,
        managed: Bytes,
    ) -> impl Future<Output = Result<(), HostError>> + Send;
    /// Changes how much managed memory the container of an allocation may use; one that is not exposed yet
    /// is told then.
    fn set_managed_quota(
        &mut self,
        allocation: AllocationId,
        managed: Bytes,
    ) -> Result<(), HostError>;
    /// What of each GPU an allocation's processes had exported: others may hold it when its pod has ended.
    fn exported_memory(&self, allocation: AllocationId) -> Vec<(GpuUuid, Bytes)>;
    /// Charges an allocation that is exposed for what a container before it had exported of a GPU: how much of it is
    /// on record there.
    fn charge_inherited(&mut self, allocation: AllocationId, gpu: &GpuUuid, bytes: Bytes) -> Bytes;
    /// Looks after what was left on GPUs: the most that is held of it, as far as that is proven.
    fn unreclaimed_at_most(&self, left: BTreeMap<GpuUuid, u64>) -> BTreeMap<GpuUuid, Bytes>;
    /// The kept leases that an allocation is charged for: the GPU and what each has.
    fn charged_leases(&self, allocation: AllocationId) -> Vec<(GpuUuid, Bytes)>;
    /// Has kept leases go on or end as the node stands now; what its ledger is to account for.
    fn reconcile_leases(&mut self, node: NodeView) -> impl Future<Output = LedgerUpdate> + Send;
    /// What these kept leases left is on record in the ledger.
    fn confirm_recorded(&mut self, leases: Vec<LeaseId>) -> impl Future<Output = ()> + Send;
    /// Writes the allocation's CDI file: from now on its container can start.
    fn write_cdi(
        &mut self,
        binding: &cdi::CdiBinding,
    ) -> impl Future<Output = Result<(), HostError>> + Send;
    /// Removes the CDI file, the socket and the folder; what is not there is removed already.
    fn tear_down(
        &mut self,
        allocation: AllocationId,
    ) -> impl Future<Output = Result<(), HostError>> + Send;
}

/// What a predecessor left on the host.
#[derive(Debug)]
pub struct HostSurvey {
    /// Its checkpoint.
    pub checkpoint: Result<Option<NodeCheckpoint>, LoadError>,
    /// Its CDI files.
    pub cdi_bindings: Vec<cdi::CdiBinding>,
    /// The allocations whose CDI file this agent cannot read.
    pub unreadable: BTreeSet<AllocationId>,
    /// The allocations that have a folder or a record.
    pub allocations: BTreeSet<AllocationId>,
}

/// The real host.
pub struct OsHost {
    checkpoint: Checkpoint,
    cdi: CdiDir,
    sessions: Arc<Sessions>,
    leases: LeaseHandle,
    run_dir: PathBuf,
    installer: Installer,
}

impl OsHost {
    /// The host of `config`, whose sockets `sessions` serves and whose kept memory is looked after at `desk`; makes
    /// the run folder.
    pub fn new(
        config: &Config,
        sessions: Arc<Sessions>,
        desk: LeaseHandle,
    ) -> Result<Self, HostError> {
        let Config { driver, paths, .. } = config;
        create_readable_dir(&Sessions::alloc_dir(&paths.run_dir))?;
        let (of_driver, of_paths) = (driver.clone(), paths.clone());
        Ok(Self {
            sessions,
            leases: desk,
            checkpoint: Checkpoint::new(paths.run_dir.join("checkpoint.json")),
            cdi: CdiDir::new(paths.cdi_dir.clone()),
            run_dir: paths.run_dir.clone(),
            installer: Installer::new(move |before| install(&of_driver, &of_paths, before)),
        })
    }

    /// Looks for what a predecessor left. A checkpoint that makes no sense is moved aside; CDI files
    /// that cannot be listed are as good as none.
    pub fn survey(&self) -> HostSurvey {
        let checkpoint = self.checkpoint.load();
        if let Err(LoadError::Malformed { .. }) = &checkpoint
            && let Err(error) = self.checkpoint.move_aside()
        {
            warn!(%error, "malformed checkpoint stays in place");
        }
        let cdi = self.cdi.list().unwrap_or_else(|error| {
            warn!(%error, "cdi files not listed");
            Default::default()
        });
        for allocation in &cdi.unreadable {
            warn!(%allocation, "failed to read a CDI file; it stays while the kubelet or the checkpoint knows it");
        }
        let run = &self.run_dir;
        let mut allocations = allocation_ids(&Sessions::alloc_dir(run));
        allocations.extend(allocation_ids(&run.join("sessions")));
        HostSurvey {
            checkpoint,
            cdi_bindings: cdi.bindings,
            unreadable: cdi.unreadable,
            allocations,
        }
    }

    /// Why CDI files cannot be written, as far as that shows without writing one.
    pub fn cdi_problem(&self) -> Option<String> {
        let path = self.cdi.path();
        // The first file's writer makes the folder.
        let made = std::fs::create_dir_all(path).map_err(|error| error.to_string());
        let writable = made.and_then(|()| {
            rustix::fs::access(path, Access::WRITE_OK | Access::EXEC_OK)
                .map_err(|error| error.to_string())
        });
        writable
            .err()
            .map(|error| format!("CDI folder {}: {error}", path.display()))
    }

    /// Forgets where the driver is: it may have changed with the GPUs.
    pub fn mark_driver_stale(&mut self) {
        self.installer.mark_stale();
    }
}

/// Puts the shim's files for the present driver where containers find them. While this runs, the agent
/// may still write CDI files that mount the build `before`.
fn install(
    driver: &DriverConfig,
    paths: &PathsConfig,
    before: Option<PathBuf>,
) -> Result<cdi::CdiNode, HostError> {
    let found = find_driver(driver)?;
    let shim_dir = shim_install::install(&paths.shim_dir, &found, &paths.state_dir)?;
    // A CDI file that cannot be read may mount any build.
    if let Some(mut in_use) = CdiDir::new(paths.cdi_dir.clone()).mounted_host_paths() {
        in_use.push(shim_dir.clone());
        in_use.extend(before);
        let removed = shim_install::remove_unused(&paths.state_dir, &in_use);
        removed.unwrap_or_else(|error| {
            warn!(%error, "failed to remove an unused shim build; the next installation tries again");
        });
    }
    Ok(cdi::CdiNode {
        shim_dir,
        driver: found,
        alloc_dir: Sessions::alloc_dir(&paths.run_dir),
        extra_mounts: driver.extra_mounts.clone(),
    })
}

/// The driver as `config` says.
pub fn find_driver(config: &DriverConfig) -> Result<Driver, DriverError> {
    Driver::find(&config.root, &config.host_root, &config.dev_root)
}

/// The allocations that files or folders in `path` are named after.
fn allocation_ids(path: &Path) -> BTreeSet<AllocationId> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.path().file_stem()?.to_str()?.parse().ok())
        .collect()
}

/// Makes a folder that containers of any user can read.
fn create_readable_dir(path: &Path) -> Result<(), HostError> {
    std::fs::create_dir_all(path)
        .and_then(|()| std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)))
        .map_err(|source| HostError::Folder {
            path: path.to_owned(),
            source,
        })
}

impl HostOps for OsHost {
    fn save_checkpoint(&mut self, state: &NodeCheckpoint) -> Result<(), HostError> {
        Ok(self.checkpoint.save(state)?)
    }

    async fn serve_session(
        &mut self,
        binding: &cdi::CdiBinding,
        managed: Bytes,
    ) -> Result<(), HostError> {
        let gpus = binding
            .gpus
            .iter()
            .map(|gpu| (gpu.uuid.clone(), gpu.quota))
            .collect();
        let served = SessionSpec {
            allocation: binding.allocation,
            pod: binding.pod.clone(),
            gpus,
            managed,
            tokens: Some(binding.tokens.clone()),
        };
        self.sessions.serve(served).await?;
        // One that was served before goes on with what it was told then.
        self.set_managed_quota(binding.allocation, managed)
    }

    fn set_managed_quota(
        &mut self,
        allocation: AllocationId,
        managed: Bytes,
    ) -> Result<(), HostError> {
        let resized = self
            .sessions
            .set_requested_quota(&allocation, &Account::Managed, managed);
        match resized {
            Ok(()) | Err(SessionsError::Unknown(_)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn exported_memory(&self, allocation: AllocationId) -> Vec<(GpuUuid, Bytes)> {
        self.sessions.exported_bytes(&allocation)
    }

    fn charge_inherited(&mut self, allocation: AllocationId, gpu: &GpuUuid, bytes: Bytes) -> Bytes {
        self.sessions.inherit_exports(&allocation, gpu, bytes)
    }

    fn unreclaimed_at_most(&self, left: BTreeMap<GpuUuid, u64>) -> BTreeMap<GpuUuid, Bytes> {
        self.sessions.bound_unreclaimed(left)
    }

    fn charged_leases(&self, allocation: AllocationId) -> Vec<(GpuUuid, Bytes)> {
        self.sessions
            .charged_leases(&allocation)
            .into_values()
            .collect()
    }

    async fn reconcile_leases(&mut self, node: NodeView) -> LedgerUpdate {
        self.leases.reconcile(node).await
    }

    async fn confirm_recorded(&mut self, leases: Vec<LeaseId>) {
        self.leases.confirm_recorded(leases).await;
    }

    async fn write_cdi(&mut self, binding: &cdi::CdiBinding) -> Result<(), HostError> {
        let node = self.installer.installed().await?;
        Ok(self.cdi.write(node, binding)?)
    }

    async fn tear_down(&mut self, allocation: AllocationId) -> Result<(), HostError> {
        self.cdi.remove(&allocation)?;
        Ok(self.sessions.remove(&allocation).await?)
    }
}
