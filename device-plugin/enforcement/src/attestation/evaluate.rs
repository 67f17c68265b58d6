//! Decides which gap in the enforcement a container has: pure.
//!
//! The inputs are its mounts, its device nodes, its capabilities and its processes' memory maps.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use bursar_host::driver_files::LIBCUDA;

use super::maps::{FileKind, MappedFile};
use super::mounts::{Location, Mount, MountTable};

/// Why a container is not under enforcement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GapReason {
    /// The container has `CAP_SYS_NICE` over the host and may change its share of a GPU's time.
    SysNice,
    /// The agent could not read enough, or got no answer about device access.
    NotAttested,
    /// The container has `CAP_SYS_ADMIN` over the host and can undo any enforcement.
    Privileged,
    /// A mount that the agent ordered is missing.
    MountMissing,
    /// Another file system is mounted over a path of the shim.
    MountedOver,
    /// A process has another libcuda mapped than the shim's entry.
    ForeignDriver,
    /// A process uses the driver, or one of its device nodes, without the shim's entry.
    DriverWithoutShim,
    /// The container may open device nodes of GPUs that it was not given.
    OtherGpus,
}

impl GapReason {
    /// The word in status, events and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::SysNice => "SysNice",
            Self::NotAttested => "NotAttested",
            Self::Privileged => "Privileged",
            Self::MountMissing => "MountMissing",
            Self::MountedOver => "MountedOver",
            Self::ForeignDriver => "ForeignDriver",
            Self::DriverWithoutShim => "DriverWithoutShim",
            Self::OtherGpus => "OtherGpus",
        }
    }
}

/// A gap in a container's enforcement.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EnforcementGap {
    /// The reason as one word.
    pub reason: GapReason,
    /// The path or process at fault, for people. The text is the same for the same fault.
    pub detail: String,
}

/// The longest detail; the paths in it are chosen by tenants.
const MAX_DETAIL: usize = 256;

impl EnforcementGap {
    fn new(reason: GapReason, detail: impl Into<String>) -> Self {
        let mut detail = detail.into();
        detail.truncate(detail.floor_char_boundary(MAX_DETAIL));
        Self { reason, detail }
    }

    /// The gap of a container that the agent could not attest.
    pub(crate) fn not_attested(why: impl Into<String>) -> Self {
        Self::new(GapReason::NotAttested, why)
    }
}

impl std::fmt::Display for EnforcementGap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { reason, detail } = self;
        match reason {
            GapReason::SysNice => {
                f.write_str("the container may change its share of the GPU's time")?
            }
            GapReason::NotAttested => f.write_str("the container could not be attested")?,
            GapReason::Privileged => f.write_str("the container is privileged")?,
            GapReason::MountMissing => f.write_str("a mount is missing")?,
            GapReason::MountedOver => f.write_str("another mount covers a path of the shim")?,
            GapReason::ForeignDriver => f.write_str("a process has another libcuda mapped")?,
            GapReason::DriverWithoutShim => {
                f.write_str("a process uses the driver without the shim")?
            }
            GapReason::OtherGpus => {
                f.write_str("the container may open device nodes of GPUs that it was not given")?
            }
        }
        match detail.as_str() {
            "" => Ok(()),
            detail => write!(f, ": {detail}"),
        }
    }
}

/// A mount that a container with a GPU must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ExpectedMount {
    /// The mount point in the container.
    pub mount_point: PathBuf,
    /// The mounted file or folder.
    pub source: Location,
    /// Whether it is a file of the node's driver, which others than the agent may rename or remove.
    pub is_of_driver: bool,
}

impl ExpectedMount {
    /// Whether the mount is there with another name of its file. The kernel shows the present name
    /// of a mounted file, and `//deleted` behind that of a removed one. Such a mount is the only
    /// one at its point, so nothing covers it, and its file is of the same folder.
    fn is_renamed(&self, mounts: &MountTable) -> bool {
        let at_point = |mount: &&Mount| mount.mount_point == self.mount_point;
        let mut there = mounts.iter().filter(at_point);
        let (Some(only), None) = (there.next(), there.next()) else {
            return false;
        };
        let Location { device, path } = &only.source;
        let path = path.to_str().unwrap_or_default();
        let path = Path::new(path.strip_suffix("//deleted").unwrap_or(path));
        self.is_of_driver
            && *device == self.source.device
            && path.parent() == self.source.path.parent()
            && mounts.is_visible(only)
    }
}

/// The shim's files on this node, of every build that a container may still use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InstalledShim {
    /// The folder that has a folder for each build.
    pub builds: Location,
    /// The inode of each file, by `<build>/<file>`.
    pub files: BTreeMap<PathBuf, u64>,
}

impl InstalledShim {
    /// Whether a mapped file belongs to the shim: its path resolves to an installed file with the
    /// same inode. On an overlay the map may show another inode than the file has, so the path is
    /// enough.
    fn contains(&self, mapped: &MappedFile, mounts: &MountTable) -> bool {
        let Some((mount, found)) = mounts.resolve(&mapped.path) else {
            return false;
        };
        let Ok(file) = found.path.strip_prefix(&self.builds.path) else {
            return false;
        };
        let inode = self.files.get(file);
        found.device == self.builds.device
            && inode.is_some_and(|inode| *inode == mapped.inode || mount.fs_type == "overlay")
    }
}

/// Checks a container's mounts. The image may have links in a path, so the check counts how often
/// each source is visible. Nothing may be mounted on a source.
pub(crate) fn check_mounts(
    expected: &[ExpectedMount],
    mounts: &MountTable,
) -> Option<EnforcementGap> {
    let sources: BTreeSet<&Location> = expected.iter().map(|mount| &mount.source).collect();
    for source in &sources {
        let wanted = expected
            .iter()
            .filter(|mount| mount.source == **source && !mount.is_renamed(mounts));
        let visible = mounts
            .iter()
            .filter(|mount| mount.source == **source && mounts.is_visible(mount));
        if visible.count() >= wanted.clone().count() {
            continue;
        }
        let resolve = |path: &Path| mounts.resolve(path).map(|(_, found)| found);
        let missing = wanted
            .clone()
            .find(|mount| resolve(&mount.mount_point).as_ref() != Some(source));
        let point = missing
            .map(|mount| mount.mount_point.as_path())
            .unwrap_or(Path::new("/"));
        let covered = mounts.iter().any(|mount| {
            mount.mount_point == point || (mount.source == **source && !mounts.is_visible(mount))
        });
        let reason = match covered {
            true => GapReason::MountedOver,
            false => GapReason::MountMissing,
        };
        return Some(EnforcementGap::new(reason, point.display().to_string()));
    }
    let is_expected = |mount: &&Mount| sources.contains(&mount.source);
    let is_inside_source = |point: &Path| {
        let mut all = mounts.iter().filter(is_expected);
        all.any(|mount| point.starts_with(&mount.mount_point) && point != mount.mount_point)
    };
    let foreign = mounts.iter().filter(|mount| !is_expected(mount));
    let mut inside = foreign
        .map(|mount| &mount.mount_point)
        .filter(|point| is_inside_source(point));
    let point = inside.next()?;
    Some(EnforcementGap::new(
        GapReason::MountedOver,
        point.display().to_string(),
    ))
}

/// How a process uses the driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DriverUse {
    /// Whether the process has the shim's entry mapped, or the shim of an earlier build. Each
    /// program of a container loads it, so it does not show that the process calls the driver
    /// through it.
    pub has_shim: bool,
    /// The addresses at which the process has device nodes of the driver mapped.
    pub device_mappings: BTreeSet<u64>,
    /// The bytes of its mappings of managed memory.
    pub managed_mapped: u64,
    /// The process's use of the driver that bypasses the shim.
    pub gap: Option<EnforcementGap>,
}

/// Checks the `mapped` files of a process whose mount table is `mounts`.
pub(crate) fn check_process(
    mapped: &BTreeSet<MappedFile>,
    mounts: &MountTable,
    installed: &InstalledShim,
) -> DriverUse {
    let is_installed = |file: &&MappedFile| installed.contains(file, mounts);
    let named = |kind: FileKind| mapped.iter().filter(move |file| file.kind == kind);
    let is_shim = |file: &MappedFile| file.path.file_name().is_some_and(|name| name == LIBCUDA);
    let shim = named(FileKind::Libcuda).filter(is_installed).any(is_shim);
    // For newer programs on older drivers the shim itself opens the image's compat library.
    let foreign = named(FileKind::Libcuda)
        .filter(|file| !is_installed(file))
        .find(|file| !(shim && is_compat_library(&file.path)));
    let unshimmed = mapped
        .iter()
        .find(|file| matches!(file.kind, FileKind::Driver | FileKind::Device) && !shim);
    let gap =
        |reason, file: &MappedFile| EnforcementGap::new(reason, file.path.display().to_string());
    let gap = match (foreign, unshimmed) {
        (Some(file), _) => Some(gap(GapReason::ForeignDriver, file)),
        (None, Some(file)) => Some(gap(GapReason::DriverWithoutShim, file)),
        (None, None) => None,
    };
    DriverUse {
        has_shim: shim,
        gap,
        ..DriverUse::default()
    }
}

/// NVIDIA's images have their compat libraries in `/usr/local/cuda*/compat/`.
fn is_compat_library(path: &Path) -> bool {
    let mut parts = path.components().rev().skip(1);
    parts.next() == Some(Component::Normal("compat".as_ref())) && path.starts_with("/usr/local")
}

/// Whether a name in `/dev` is that of a GPU's node.
pub(crate) fn is_gpu_node(name: &str) -> bool {
    let number = name.strip_prefix("nvidia");
    number.is_some_and(|number| number.parse::<u32>().is_ok())
}

/// Whether the agent has to check which GPUs a container may open. The check is needed if the
/// container can make device nodes, or has a node of a GPU that it was not `given`. Where libcuda
/// may, it makes the nodes of all GPUs, so a node in `visible` alone proves nothing.
pub(crate) fn needs_device_check(
    given: &BTreeSet<String>,
    visible: &BTreeSet<String>,
    bounding: u64,
    over_the_host: bool,
) -> bool {
    /// `CAP_MKNOD` (linux/capability.h).
    const MKNOD: u64 = 1 << 27;
    over_the_host && bounding & MKNOD != 0 || !visible.is_subset(given)
}

/// Checks which GPUs a container may open that it was not given.
pub(crate) fn check_openable(openable: &BTreeSet<String>) -> Option<EnforcementGap> {
    let names: Vec<&str> = openable.iter().map(String::as_str).collect();
    (!names.is_empty()).then(|| EnforcementGap::new(GapReason::OtherGpus, names.join(", ")))
}

/// The longest time that a runtime may need to set up a container. Until it executes the program,
/// the runtime's own process is the container's first. It is in the container's cgroup and mounts,
/// has not dropped the capabilities yet and has the host's root above its own (`pivot_root`(2),
/// "pivot_root(".", ".")").
const MAX_SETUP: Duration = Duration::from_secs(60);

/// Whether a container's capabilities and mounts are those of its program. `forked`: its first
/// process, of this age, has executed no program and may be the runtime's.
pub(crate) fn is_set_up(forked: bool, age: Duration) -> bool {
    !forked || age >= MAX_SETUP
}

/// Checks what a container may do to the host. `bounding` are the capabilities that its processes
/// may ever have, over the host or over a user namespace of their own.
pub(crate) fn check_capabilities(bounding: u64, over_the_host: bool) -> Option<EnforcementGap> {
    /// `CAP_SYS_ADMIN` (linux/capability.h).
    const SYS_ADMIN: u64 = 1 << 21;
    (over_the_host && bounding & SYS_ADMIN != 0)
        .then(|| EnforcementGap::new(GapReason::Privileged, "CAP_SYS_ADMIN over the host"))
}

/// Checks what a container may do to the time of others. With this capability the driver lets a
/// process set time slices and restart run lists (`RS_ACCESS_NICE`, open-gpu-kernel-modules
/// `rs_access.h`).
pub(crate) fn check_scheduling(bounding: u64, over_the_host: bool) -> Option<EnforcementGap> {
    /// `CAP_SYS_NICE` (linux/capability.h).
    const SYS_NICE: u64 = 1 << 23;
    (over_the_host && bounding & SYS_NICE != 0)
        .then(|| EnforcementGap::new(GapReason::SysNice, "CAP_SYS_NICE over the host"))
}

#[cfg(test)]
mod tests;
