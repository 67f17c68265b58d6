//! Finds the allocation of a container, with what its CDI file gave it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use bursar_config::PathsConfig;
use bursar_ledger::units::AllocationId;

use super::{PodAttestor, file_name};
use crate::attestation::evaluate::ExpectedMount;
use crate::attestation::mounts::MountTable;

/// The mount points of the allocation's own folder; the image may have a link at `/run`.
const RUN_DIR_MOUNT_POINTS: [&str; 2] = ["/run/bursar", "/var/run/bursar"];

/// The mounts and device nodes that an allocation's container was given.
#[derive(Clone, Debug)]
pub(super) struct ContainerGrant {
    pub(super) mounts: Vec<ExpectedMount>,
    pub(super) nodes: BTreeSet<String>,
}

impl PodAttestor {
    /// The allocation whose folder is mounted in a container.
    pub(super) fn allocation_of(
        &self,
        mounts: &MountTable,
        own: &MountTable,
    ) -> Option<AllocationId> {
        let folder = self.paths.run_dir.join("alloc").canonicalize().ok()?;
        let (_, alloc) = own.resolve(&folder)?;
        mounts
            .iter()
            .filter(|mount| {
                RUN_DIR_MOUNT_POINTS
                    .iter()
                    .any(|point| mount.mount_point == Path::new(point))
            })
            .filter(|mount| mount.source.device == alloc.device)
            .find_map(|mount| {
                let id = mount.source.path.strip_prefix(&alloc.path).ok()?;
                id.to_str()?.parse().ok()
            })
    }

    /// The mounts and nodes in an allocation's CDI file; none where it cannot be read.
    pub(super) fn grant_of(
        &mut self,
        allocation: AllocationId,
        own: &MountTable,
    ) -> Option<ContainerGrant> {
        if let Some(grant) = self.grants.get(&allocation) {
            return Some(grant.clone());
        }
        let edits = self.cdi.read_edits(&allocation)?;
        let mounts = edits.mounts.iter().filter_map(|mount| {
            let of_admin = |extra: &bursar_config::HostMount| {
                (&extra.host_path, &extra.container_path)
                    == (&mount.host_path, &mount.container_path)
            };
            if self.driver.extra_mounts.iter().any(of_admin) {
                return None;
            }
            let (_, source) =
                own.resolve(&self.agent_path(&mount.host_path).canonicalize().ok()?)?;
            let point = mount.container_path.clone();
            Some(ExpectedMount {
                mount_point: point,
                source,
                is_of_driver: !self.is_own(&mount.host_path),
            })
        });
        let nodes = edits.device_nodes.iter();
        let grant = ContainerGrant {
            mounts: mounts.collect(),
            nodes: nodes.map(|node| file_name(&node.path)).collect(),
        };
        self.grants.insert(allocation, grant.clone());
        Some(grant)
    }

    /// Whether a path of the host is in a folder of the agent.
    fn is_own(&self, host_path: &Path) -> bool {
        let PathsConfig {
            state_dir, run_dir, ..
        } = &self.paths;
        host_path.starts_with(state_dir) || host_path.starts_with(run_dir)
    }

    /// The path at which the agent sees a path of the host.
    fn agent_path(&self, host_path: &Path) -> PathBuf {
        if self.is_own(host_path) {
            return host_path.to_owned();
        }
        match host_path.strip_prefix(&self.driver.host_root) {
            Ok(inside) => self.driver.root.join(inside),
            Err(_) => host_path.to_owned(),
        }
    }
}
