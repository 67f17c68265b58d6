//! Reads the host's state once for all pods of an audit.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bursar_config::{DriverConfig, PathsConfig};
use bursar_host::procfs::{self, Bounds};
use tracing::warn;

use super::file_name;
use crate::attestation::evaluate::{self, InstalledShim};
use crate::attestation::mounts::{Location, MountTable};

/// The largest mount table of the agent, which has every pod's mounts.
const OWN_MOUNTS_BOUNDS: Bounds = Bounds {
    bytes: 256 << 20,
    lines: 1 << 20,
};

/// The host's state, read once for all pods of an audit.
#[derive(Debug)]
pub struct HostView {
    pub(super) now: Instant,
    pub(super) uptime: Duration,
    pub(super) own_mounts: MountTable,
    pub(super) shim: Option<InstalledShim>,
    pub(super) user_namespace: Option<PathBuf>,
    /// The device nodes of the node's GPUs, each with its device number.
    pub(super) gpu_nodes: BTreeMap<String, (u64, PathBuf)>,
}

impl HostView {
    /// Reads the present state.
    pub fn read(paths: &PathsConfig, driver: &DriverConfig) -> Self {
        let own = paths.proc.join("self");
        let mut mounts = MountTable::default();
        let table = own.join("mountinfo");
        if let Err(error) =
            procfs::for_each_line(&table, OWN_MOUNTS_BOUNDS, |line| mounts.add_line(line))
        {
            warn!(%error, "failed to read the agent's mount table to its end");
        }
        Self {
            now: Instant::now(),
            uptime: uptime(),
            shim: installed_shim(&paths.state_dir.join("shim"), &mounts),
            user_namespace: std::fs::read_link(own.join("ns/user")).ok(),
            own_mounts: mounts,
            gpu_nodes: gpu_nodes_in(&driver.dev_root),
        }
    }

    /// The nodes of GPUs that are not `given`; other names of a given device are left out.
    pub(super) fn other_gpu_nodes(&self, given: &BTreeSet<String>) -> BTreeMap<String, PathBuf> {
        let numbers = given.iter().filter_map(|name| self.gpu_nodes.get(name));
        let numbers: BTreeSet<u64> = numbers.map(|(number, _)| *number).collect();
        let other_gpus = self.gpu_nodes.iter();
        let other_gpus = other_gpus
            .filter(|(name, (number, _))| !given.contains(*name) && !numbers.contains(number));
        other_gpus
            .map(|(name, (_, path))| (name.clone(), path.clone()))
            .collect()
    }
}

/// The time since boot, suspend included, like the start times of processes.
fn uptime() -> Duration {
    let clock = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::try_from(clock).unwrap_or_default()
}

/// The GPU nodes in a folder, each with its device number.
fn gpu_nodes_in(dev: &Path) -> BTreeMap<String, (u64, PathBuf)> {
    let entries = std::fs::read_dir(dev).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    let gpu = |path: PathBuf| {
        let name = Some(file_name(&path)).filter(|name| evaluate::is_gpu_node(name))?;
        let node = path.symlink_metadata().ok()?;
        let is_device = node.file_type().is_char_device();
        is_device.then(|| (name, (node.rdev(), path)))
    };
    paths.filter_map(gpu).collect()
}

/// The shim's files in the folder of builds; none before the first build is installed.
fn installed_shim(builds: &Path, own: &MountTable) -> Option<InstalledShim> {
    let folder = builds.canonicalize().ok()?;
    let (_, location) = own.resolve(&folder)?;
    let list = |folder: &Path| std::fs::read_dir(folder).into_iter().flatten().flatten();
    let files = list(&folder).flat_map(|build| list(&build.path()));
    let number = |file: std::fs::DirEntry| {
        let inside = file.path().strip_prefix(&folder).ok()?.to_owned();
        Some((inside, file.path().symlink_metadata().ok()?.ino()))
    };
    Some(InstalledShim {
        builds: Location { ..location },
        files: files.filter_map(number).collect(),
    })
}
