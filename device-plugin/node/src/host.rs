//! Performs the steps of an allocation on the host; each step may be repeated.

mod error;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bursar_config::{Config, DriverConfig, PathsConfig};
use bursar_gpu::uvm::UvmModule;
use bursar_host::checkpoint::{Checkpoint, LoadError};
use bursar_host::driver_files::{Driver, DriverVersions};
use bursar_host::procfs::read_small;
use bursar_ledger::units::{AllocationId, Bytes, GpuUuid, LeaseId};
use bursar_sessions::lease_handle::{LeaseHandle, LedgerUpdate, NodeView};
use bursar_sessions::{Account, SessionSpec, Sessions, SessionsError};
use rustix::fs::Access;
use tracing::warn;

use super::checkpoint_state::NodeCheckpoint;
use super::installer::Installer;
use crate::cdi::{self, CdiDir};
use crate::shim_install;

pub use error::{HostError, Subsystem};

/// The steps that the allocator performs on the host.
pub trait HostOps: Send {
    /// Writes the checkpoint that the next agent restores.
    fn save_checkpoint(&mut self, state: &NodeCheckpoint) -> Result<(), HostError>;
    /// Creates the allocation's directory and serves its socket; `managed` is its managed quota.
    fn serve_session(
        &mut self,
        binding: &cdi::CdiBinding,
        managed: Bytes,
    ) -> impl Future<Output = Result<(), HostError>> + Send;
    /// Changes the managed quota of an allocation.
    ///
    /// An allocation without a socket gets its quota with [`serve_session`](Self::serve_session).
    fn set_managed_quota(
        &mut self,
        allocation: AllocationId,
        managed: Bytes,
    ) -> Result<(), HostError>;
    /// The memory of each GPU that an allocation's processes exported and others may still map.
    fn exported_memory(&self, allocation: AllocationId) -> Vec<(GpuUuid, Bytes)>;
    /// Charges an allocation with exports of an earlier container; returns the bytes that it
    /// accepted.
    fn charge_inherited(&mut self, allocation: AllocationId, gpu: &GpuUuid, bytes: Bytes) -> Bytes;
    /// The proven upper bounds of unreclaimed memory on the GPUs of `left`.
    ///
    /// The number of a GPU grows with each new record of the ledger and makes older proofs void.
    fn unreclaimed_at_most(&self, left: BTreeMap<GpuUuid, u64>) -> BTreeMap<GpuUuid, Bytes>;
    /// The GPU and the bytes of each lease that an allocation is charged for.
    fn charged_leases(&self, allocation: AllocationId) -> Vec<(GpuUuid, Bytes)>;
    /// Reconciles retained leases with the node's bindings; returns the changes for the ledger.
    fn reconcile_leases(&mut self, node: NodeView) -> impl Future<Output = LedgerUpdate> + Send;
    /// Confirms that the ledger's record of these ended leases is written.
    fn confirm_recorded(&mut self, leases: Vec<LeaseId>) -> impl Future<Output = ()> + Send;
    /// Writes the allocation's CDI file, after which its container can start.
    fn write_cdi(
        &mut self,
        binding: &cdi::CdiBinding,
    ) -> impl Future<Output = Result<(), HostError>> + Send;
    /// Removes the CDI file, the socket and the directory; missing ones count as removed.
    fn tear_down(
        &mut self,
        allocation: AllocationId,
    ) -> impl Future<Output = Result<(), HostError>> + Send;
}

/// The files of the previous agent on the host.
#[derive(Debug)]
pub struct HostSurvey {
    /// Its checkpoint.
    pub checkpoint: Result<Option<NodeCheckpoint>, LoadError>,
    /// The bindings in its CDI files.
    pub(crate) cdi_bindings: Vec<cdi::CdiBinding>,
    /// The allocations whose CDI file this agent cannot read.
    pub unreadable: BTreeSet<AllocationId>,
    /// The allocations that have a directory or a session record.
    pub allocations: BTreeSet<AllocationId>,
}

/// The host of a running agent.
pub struct OsHost {
    checkpoint: Checkpoint,
    cdi: CdiDir,
    sessions: Arc<Sessions>,
    leases: LeaseHandle,
    run_dir: PathBuf,
    sys: PathBuf,
    proc: PathBuf,
    installer: Installer,
    /// The driver at the last look.
    driver: Option<Driver>,
}

impl OsHost {
    /// The host of `config`; creates the run directory.
    pub fn new(
        config: &Config,
        sessions: Arc<Sessions>,
        leases: LeaseHandle,
    ) -> Result<Self, HostError> {
        let Config { driver, paths, .. } = config;
        create_readable_dir(&Sessions::alloc_dir(&paths.run_dir))?;
        let (installed_driver, installed_paths) = (driver.clone(), paths.clone());
        Ok(Self {
            sessions,
            leases,
            checkpoint: Checkpoint::new(paths.run_dir.join("checkpoint.json")),
            cdi: CdiDir::new(paths.cdi_dir.clone()),
            run_dir: paths.run_dir.clone(),
            sys: paths.sys.clone(),
            proc: paths.proc.clone(),
            installer: Installer::new(move |before| {
                install(&installed_driver, &installed_paths, before)
            }),
            driver: None,
        })
    }

    /// Reads the previous agent's files and moves a malformed checkpoint aside.
    ///
    /// A CDI directory that cannot be listed counts as empty.
    pub fn survey(&self) -> HostSurvey {
        let checkpoint = self.checkpoint.load_or_set_aside();
        let cdi = self.cdi.list().unwrap_or_else(|error| {
            warn!(%error, "failed to list CDI files");
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

    /// The reason why CDI files cannot be written, as far as access checks tell.
    pub(crate) fn cdi_problem(&self) -> Option<String> {
        let path = self.cdi.path();
        // The agent may be the first to write a CDI file on this node.
        let created = std::fs::create_dir_all(path).map_err(|error| error.to_string());
        let writable = created.and_then(|()| {
            rustix::fs::access(path, Access::WRITE_OK | Access::EXEC_OK)
                .map_err(|error| error.to_string())
        });
        writable
            .err()
            .map(|error| format!("failed to write CDI directory {}: {error}", path.display()))
    }

    /// Reads the driver's module for managed memory, which may have been loaded by now.
    pub(crate) fn uvm_module(&self) -> UvmModule {
        UvmModule::read(&self.sys, &self.proc)
    }

    /// Finds the driver again. Returns whether its files were replaced since the last look.
    pub(crate) async fn has_new_driver(&mut self) -> bool {
        let Ok(node) = self.installer.installed().await else {
            return false;
        };
        let before = self.driver.replace(node.driver.clone());
        before.is_some_and(|before| before != node.driver)
    }

    /// The versions of the driver's files at the last look, and of its loaded module.
    pub(crate) fn driver_versions(&self) -> DriverVersions {
        let module = read_small(&self.sys.join("module/nvidia/version"));
        DriverVersions {
            files: self
                .driver
                .as_ref()
                .and_then(|driver| driver.version.clone()),
            module: module.ok().map(|text| text.trim().to_owned()),
        }
    }
}

/// Installs the shim's files for the present driver, unless `before` is for it.
///
/// Meanwhile the agent may write CDI files that mount the build `before`.
fn install(
    driver: &DriverConfig,
    paths: &PathsConfig,
    before: Option<cdi::CdiNode>,
) -> Result<cdi::CdiNode, HostError> {
    let found = Driver::find_configured(driver)?;
    let before = match before {
        Some(before) if before.driver == found => return Ok(before),
        before => before,
    };
    if let Some(before) = before.as_ref()
        && !before.driver.files().eq(found.files())
    {
        let (before, now) = (&before.driver.version, &found.version);
        warn!(
            ?before,
            ?now,
            "the driver's files were replaced; a container has the new ones from its next start on"
        );
    }
    let shim_dir = shim_install::install(&paths.shim_dir, &found, &paths.state_dir)?;
    // An unreadable CDI file may mount any build, so none is removed.
    if let Some(mut in_use) = CdiDir::new(paths.cdi_dir.clone()).mounted_host_paths() {
        in_use.push(shim_dir.clone());
        in_use.extend(before.map(|before| before.shim_dir));
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

/// The allocations that files or directories in `path` are named after.
fn allocation_ids(path: &Path) -> BTreeSet<AllocationId> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.path().file_stem()?.to_str()?.parse().ok())
        .collect()
}

/// Creates a directory that containers of any user can read.
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
            device_ids: Some(binding.device_ids.clone()),
        };
        self.sessions.serve(served).await?;
        // A session that was served before has its earlier quota.
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
