//! Whether a container is held to its quota, as far as its mounts, its device nodes and its processes' memory maps
//! tell: pure.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use super::maps::{Kind, Mapped};
use super::mounts::{Location, Mounts};
use crate::node::driver_files::LIBCUDA;

/// Why a container is not held to its quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
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

impl Reason {
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
pub struct Lack {
    /// In one word.
    pub reason: Reason,
    /// For people: the path or process that is at fault. Does not change while nothing changes.
    pub detail: String,
}

/// The longest detail: tenants choose the paths in it.
const LONGEST: usize = 256;

impl Lack {
    fn new(reason: Reason, detail: impl Into<String>) -> Self {
        let mut detail = detail.into();
        detail.truncate(detail.floor_char_boundary(LONGEST));
        Self { reason, detail }
    }

    /// Nothing can be said of a container, for this reason.
    pub fn not_attested(why: impl Into<String>) -> Self {
        Self::new(Reason::NotAttested, why)
    }
}

impl std::fmt::Display for Lack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { reason, detail } = self;
        match reason {
            Reason::SysNice => f.write_str("it may change its share of the GPU's time")?,
            Reason::NotAttested => f.write_str("it cannot be told whether it is")?,
            Reason::Privileged => f.write_str("the container is privileged")?,
            Reason::MountMissing => f.write_str("a mount is missing")?,
            Reason::MountedOver => f.write_str("something is mounted over a path of the shim")?,
            Reason::ForeignDriver => f.write_str("a process has another libcuda mapped")?,
            Reason::DriverWithoutShim => {
                f.write_str("a process uses the driver without the shim")?
            }
            Reason::OtherGpus => {
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
pub struct Expected {
    /// Where the container sees it.
    pub point: PathBuf,
    /// What is mounted there.
    pub source: Location,
}

/// The shim's files on this node, of every build that a container may still have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installed {
    /// The folder of the builds' folders.
    pub builds: Location,
    /// The files' numbers, by `<build>/<file>`.
    pub files: BTreeMap<PathBuf, u64>,
}

impl Installed {
    /// Whether a mapped file is a file of the shim's: its path leads to one, and it has that one's number (on an
    /// overlay a map may show another number than the file has).
    fn has(&self, mapped: &Mapped, mounts: &Mounts) -> bool {
        let Some((mount, found)) = mounts.locate(&mapped.path) else {
            return false;
        };
        let Ok(file) = found.path.strip_prefix(&self.builds.path) else {
            return false;
        };
        let inode = self.files.get(file);
        found.device == self.builds.device
            && inode.is_some_and(|inode| *inode == mapped.inode || mount.kind == "overlay")
    }
}

/// What a container lacks of the mounts that it must have. A path may be a link in the image: what counts is that
/// each source is shown as often as it is expected, and that nothing lies on it.
pub fn of_mounts(expected: &[Expected], mounts: &Mounts) -> Option<Lack> {
    let ours: BTreeSet<&Location> = expected.iter().map(|mount| &mount.source).collect();
    for source in &ours {
        let wanted = expected.iter().filter(|mount| mount.source == **source);
        let shown = mounts
            .iter()
            .filter(|mount| mount.source == **source && mounts.shows(mount));
        if shown.count() >= wanted.clone().count() {
            continue;
        }
        let leads = |path: &Path| mounts.locate(path).map(|(_, found)| found);
        let missing = wanted
            .clone()
            .find(|mount| leads(&mount.point).as_ref() != Some(source));
        let point = missing
            .map(|mount| mount.point.as_path())
            .unwrap_or(Path::new("/"));
        let covered = mounts.iter().any(|mount| {
            mount.point == point || (mount.source == **source && !mounts.shows(mount))
        });
        let reason = match covered {
            true => Reason::MountedOver,
            false => Reason::MountMissing,
        };
        return Some(Lack::new(reason, point.display().to_string()));
    }
    let is_ours = |mount: &&super::mounts::Mount| ours.contains(&mount.source);
    let beneath = |point: &Path| {
        let mut all = mounts.iter().filter(is_ours);
        all.any(|mount| point.starts_with(&mount.point) && point != mount.point)
    };
    let foreign = mounts.iter().filter(|mount| !is_ours(mount));
    let mut inside = foreign
        .map(|mount| &mount.point)
        .filter(|point| beneath(point));
    let point = inside.next()?;
    Some(Lack::new(Reason::MountedOver, point.display().to_string()))
}

/// What a process does with the driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Uses {
    /// It has the shim mapped.
    pub shim: bool,
    /// Where it has device nodes of the driver mapped.
    pub devices: BTreeSet<u64>,
    /// What it does that the shim does not see.
    pub lack: Option<Lack>,
}

/// What a process with these `mapped` files does with the driver, where `mounts` is its mount table.
pub fn of_process(mapped: &BTreeSet<Mapped>, mounts: &Mounts, installed: &Installed) -> Uses {
    let ours = |file: &&Mapped| installed.has(file, mounts);
    let named = |kind: Kind| mapped.iter().filter(move |file| file.kind == kind);
    let is_shim = |file: &Mapped| file.path.file_name().is_some_and(|name| name == LIBCUDA);
    let shim = named(Kind::Libcuda).filter(ours).any(is_shim);
    // NVIDIA's rule for newer programs on older drivers: the shim opens an image's compat library itself.
    let foreign = named(Kind::Libcuda)
        .filter(|file| !ours(file))
        .find(|file| !(shim && is_compat(&file.path)));
    let bare = mapped
        .iter()
        .find(|file| matches!(file.kind, Kind::Driver | Kind::Device) && !shim);
    let lack = |reason, file: &Mapped| Lack::new(reason, file.path.display().to_string());
    let lack = match (foreign, bare) {
        (Some(file), _) => Some(lack(Reason::ForeignDriver, file)),
        (None, Some(file)) => Some(lack(Reason::DriverWithoutShim, file)),
        (None, None) => None,
    };
    Uses {
        shim,
        lack,
        ..Uses::default()
    }
}

/// `/usr/local/cuda*/compat/`, where NVIDIA's images have it.
fn is_compat(path: &Path) -> bool {
    let mut parts = path.components().rev().skip(1);
    parts.next() == Some(Component::Normal("compat".as_ref())) && path.starts_with("/usr/local")
}

/// Whether a name in `/dev` is a GPU's node.
pub fn is_gpu(name: &str) -> bool {
    let number = name.strip_prefix("nvidia");
    number.is_some_and(|number| number.parse::<u32>().is_ok())
}

/// Whether a container has to be asked which GPUs it may open: it can make device nodes where it likes, or has one of
/// a GPU that it was not `given`. libcuda makes the nodes of every GPU where it may, so that `seen` says nothing more.
pub fn is_asked(
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
pub fn of_nodes(openable: &BTreeSet<String>) -> Option<Lack> {
    let names: Vec<&str> = openable.iter().map(String::as_str).collect();
    (!names.is_empty()).then(|| Lack::new(Reason::OtherGpus, names.join(", ")))
}

/// For how long a container's runtime may make it, at most. Its own process is the container's first until it executes the
/// program, in the container's cgroup and mounts: it gives up its rights late, and has the host's root over the container's
/// for a moment (`pivot_root`(2), "pivot_root(".", ".")").
const MAKING: Duration = Duration::from_secs(60);

/// Whether a container's rights and mounts are those that its program has. `forked`: its first process, of this age, has
/// executed nothing, as the runtime's own.
pub fn is_made(forked: bool, age: Duration) -> bool {
    !forked || age >= MAKING
}

/// What a container may do to the host: `bounding` are the capabilities that its processes may ever have, over the
/// host or over a user namespace of its own.
pub fn of_rights(bounding: u64, over_the_host: bool) -> Option<Lack> {
    /// `CAP_SYS_ADMIN` (linux/capability.h).
    const SYS_ADMIN: u64 = 1 << 21;
    (over_the_host && bounding & SYS_ADMIN != 0)
        .then(|| Lack::new(Reason::Privileged, "CAP_SYS_ADMIN over the host"))
}

/// What a container may do to its neighbours' time: the driver lets who has this capability set time slices and
/// restart run lists (`RS_ACCESS_NICE`, open-gpu-kernel-modules `rs_access.h`).
pub fn of_scheduling(bounding: u64, over_the_host: bool) -> Option<Lack> {
    /// `CAP_SYS_NICE` (linux/capability.h).
    const SYS_NICE: u64 = 1 << 23;
    (over_the_host && bounding & SYS_NICE != 0)
        .then(|| Lack::new(Reason::SysNice, "CAP_SYS_NICE over the host"))
}

#[cfg(test)]
mod tests;
