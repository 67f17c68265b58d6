//! Whether a container is held to its quota, as far as its mounts, its device nodes and its processes' memory maps
//! tell: pure.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use super::maps::{FileKind, MappedFile};
use super::mounts::{Location, MountTable};
use crate::node::driver_files::LIBCUDA;

/// Why a container is not held to its quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GapReason {
    /// It may change its share of a GPU's time: it has `CAP_SYS_NICE` over the host.
    SysNice,
    /// Too much of it would have to be read, or what it may do could not be asked.
    NotAttested,
    /// It may undo everything: it has `CAP_SYS_ADMIN` over the host.
    Privileged,
    /// One of our mounts is not there.
    MountMissing,
    /// Something is mounted over one of our paths.
    MountedOver,
    /// A process has another libcuda mapped than the shim.
    ForeignDriver,
    /// A process uses the driver, or a device node of it, without the shim.
    DriverWithoutShim,
    /// It may open device nodes of GPUs that it was not given.
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

/// What keeps a container from being held to its quota.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EnforcementGap {
    /// In one word.
    pub reason: GapReason,
    /// For people: the path or process that is at fault. Does not change while nothing changes.
    pub detail: String,
}

/// The longest detail: tenants choose the paths in it.
const MAX_DETAIL: usize = 256;

impl EnforcementGap {
    fn new(reason: GapReason, detail: impl Into<String>) -> Self {
        let mut detail = detail.into();
        detail.truncate(detail.floor_char_boundary(MAX_DETAIL));
        Self { reason, detail }
    }

    /// Nothing can be said of a container, for this reason.
    pub fn not_attested(why: impl Into<String>) -> Self {
        Self::new(GapReason::NotAttested, why)
    }
}

impl std::fmt::Display for EnforcementGap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { reason, detail } = self;
        match reason {
            GapReason::SysNice => f.write_str("it may change its share of the GPU's time")?,
            GapReason::NotAttested => f.write_str("it cannot be told whether it is")?,
            GapReason::Privileged => f.write_str("the container is privileged")?,
            GapReason::MountMissing => f.write_str("a mount is missing")?,
            GapReason::MountedOver => {
                f.write_str("something is mounted over a path of the shim")?
            }
            GapReason::ForeignDriver => f.write_str("a process has another libcuda mapped")?,
            GapReason::DriverWithoutShim => {
                f.write_str("a process uses the driver without the shim")?
            }
            GapReason::OtherGpus => {
                f.write_str("it may open device nodes of GPUs that it was not given")?
            }
        }
        match detail.as_str() {
            "" => Ok(()),
            detail => write!(f, ": {detail}"),
        }
    }
}

/// A mount that a container of ours must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpectedMount {
    /// Where the container sees it.
    pub mount_point: PathBuf,
    /// What is mounted there.
    pub source: Location,
}

/// The shim's files on this node, of every build that a container may still have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstalledShim {
    /// The folder of the builds' folders.
    pub builds: Location,
    /// The files' numbers, by `<build>/<file>`.
    pub files: BTreeMap<PathBuf, u64>,
}

impl InstalledShim {
    /// Whether a mapped file is a file of the shim's: its path leads to one, and it has that one's number (on an
    /// overlay a map may show another number than the file has).
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

/// What a container lacks of the mounts that it must have. A path may be a link in the image: what counts is that
/// each source is shown as often as it is expected, and that nothing lies on it.
pub fn check_mounts(expected: &[ExpectedMount], mounts: &MountTable) -> Option<EnforcementGap> {
    let ours: BTreeSet<&Location> = expected.iter().map(|mount| &mount.source).collect();
    for source in &ours {
        let wanted = expected.iter().filter(|mount| mount.source == **source);
        let shown = mounts
            .iter()
            .filter(|mount| mount.source == **source && mounts.is_visible(mount));
        if shown.count() >= wanted.clone().count() {
            continue;
        }
        let leads = |path: &Path| mounts.resolve(path).map(|(_, found)| found);
        let missing = wanted
            .clone()
            .find(|mount| leads(&mount.mount_point).as_ref() != Some(source));
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
    let is_ours = |mount: &&super::mounts::Mount| ours.contains(&mount.source);
    let beneath = |point: &Path| {
        let mut all = mounts.iter().filter(is_ours);
        all.any(|mount| point.starts_with(&mount.mount_point) && point != mount.mount_point)
    };
    let foreign = mounts.iter().filter(|mount| !is_ours(mount));
    let mut inside = foreign
        .map(|mount| &mount.mount_point)
        .filter(|point| beneath(point));
    let point = inside.next()?;
    Some(EnforcementGap::new(
        GapReason::MountedOver,
        point.display().to_string(),
    ))
}

/// What a process does with the driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverUse {
    /// It has the shim mapped.
    pub has_shim: bool,
    /// Where it has device nodes of the driver mapped.
    pub device_mappings: BTreeSet<u64>,
    /// What it does that the shim does not see.
    pub gap: Option<EnforcementGap>,
}

/// What a process with these `mapped` files does with the driver, where `mounts` is its mount table.
pub fn check_process(
    mapped: &BTreeSet<MappedFile>,
    mounts: &MountTable,
    installed: &InstalledShim,
) -> DriverUse {
    let ours = |file: &&MappedFile| installed.contains(file, mounts);
    let named = |kind: FileKind| mapped.iter().filter(move |file| file.kind == kind);
    let is_shim = |file: &MappedFile| file.path.file_name().is_some_and(|name| name == LIBCUDA);
    let shim = named(FileKind::Libcuda).filter(ours).any(is_shim);
    // NVIDIA's rule for newer programs on older drivers: the shim opens an image's compat library itself.
    let foreign = named(FileKind::Libcuda)
        .filter(|file| !ours(file))
        .find(|file| !(shim && is_compat_library(&file.path)));
    let bare = mapped
        .iter()
        .find(|file| matches!(file.kind, FileKind::Driver | FileKind::Device) && !shim);
    let lack =
        |reason, file: &MappedFile| EnforcementGap::new(reason, file.path.display().to_string());
    let lack = match (foreign, bare) {
        (Some(file), _) => Some(lack(GapReason::ForeignDriver, file)),
        (None, Some(file)) => Some(lack(GapReason::DriverWithoutShim, file)),
        (None, None) => None,
    };
    DriverUse {
        has_shim: shim,
        gap: lack,
        ..DriverUse::default()
    }
}

/// `/usr/local/cuda*/compat/`, where NVIDIA's images have it.
fn is_compat_library(path: &Path) -> bool {
    let mut parts = path.components().rev().skip(1);
    parts.next() == Some(Component::Normal("compat".as_ref())) && path.starts_with("/usr/local")
}

/// Whether a name in `/dev` is a GPU's node.
pub fn is_gpu_node(name: &str) -> bool {
    let number = name.strip_prefix("nvidia");
    number.is_some_and(|number| number.parse::<u32>().is_ok())
}

/// Whether a container has to be asked which GPUs it may open: it can make device nodes where it likes, or has one of
/// a GPU that it was not `given`. libcuda makes the nodes of every GPU where it may, so that `seen` says nothing more.
pub fn needs_device_check(
    given: &BTreeSet<String>,
    seen: &BTreeSet<String>,
    bounding: u64,
    over_the_host: bool,
) -> bool {
    /// `CAP_MKNOD` (linux/capability.h).
    const MKNOD: u64 = 1 << 27;
    over_the_host && bounding & MKNOD != 0 || !seen.is_subset(given)
}

/// What a container may open of GPUs that it was not given.
pub fn check_openable(openable: &BTreeSet<String>) -> Option<EnforcementGap> {
    let names: Vec<&str> = openable.iter().map(String::as_str).collect();
    (!names.is_empty()).then(|| EnforcementGap::new(GapReason::OtherGpus, names.join(", ")))
}

/// For how long a container's runtime may make it, at most. Its own process is the container's first until it executes the
/// program, in the container's cgroup and mounts: it gives up its rights late, and has the host's root over the container's
/// for a moment (`pivot_root`(2), "pivot_root(".", ".")").
const MAX_SETUP: Duration = Duration::from_secs(60);

/// Whether a container's rights and mounts are those that its program has. `forked`: its first process, of this age, has
/// executed nothing, as the runtime's own.
pub fn is_set_up(forked: bool, age: Duration) -> bool {
    !forked || age >= MAX_SETUP
}

/// What a container may do to the host: `bounding` are the capabilities that its processes may ever have, over the
/// host or over a user namespace of its own.
pub fn check_capabilities(bounding: u64, over_the_host: bool) -> Option<EnforcementGap> {
    /// `CAP_SYS_ADMIN` (linux/capability.h).
    const SYS_ADMIN: u64 = 1 << 21;
    (over_the_host && bounding & SYS_ADMIN != 0)
        .then(|| EnforcementGap::new(GapReason::Privileged, "CAP_SYS_ADMIN over the host"))
}

/// What a container may do to its neighbours' time: the driver lets who has this capability set time slices and
/// restart run lists (`RS_ACCESS_NICE`, open-gpu-kernel-modules `rs_access.h`).
pub fn check_scheduling(bounding: u64, over_the_host: bool) -> Option<EnforcementGap> {
    /// `CAP_SYS_NICE` (linux/capability.h).
    const SYS_NICE: u64 = 1 << 23;
    (over_the_host && bounding & SYS_NICE != 0)
        .then(|| EnforcementGap::new(GapReason::SysNice, "CAP_SYS_NICE over the host"))
}

#[cfg(test)]
mod tests;
