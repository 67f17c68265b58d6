//! Manages the cgroup of a whole cluster in every hierarchy: v1, hybrid or v2.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getpid, kill_process};

/// The error of an operation on a cgroup.
#[derive(Debug, thiserror::Error)]
#[error("cgroup {path}: {source}")]
pub struct CgroupError {
    path: PathBuf,
    source: io::Error,
}

impl CgroupError {
    fn at(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self { path, source }
    }
}

/// A cgroup of the same path in each mounted hierarchy (cgroups(7)).
#[derive(Debug, Clone)]
pub struct Cgroup {
    mounts: Vec<Hierarchy>,
    path: PathBuf,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Hierarchy {
    mount: PathBuf,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    V1,
    V1Cpuset,
    V2,
}

impl Cgroup {
    /// Returns the cgroup `path`, relative to the root of each mounted hierarchy.
    ///
    /// # Errors
    /// When `/proc/self/mountinfo` cannot be read.
    pub fn new(path: impl Into<PathBuf>) -> Result<Self, CgroupError> {
        let mountinfo = Path::new("/proc/self/mountinfo");
        let text = fs::read_to_string(mountinfo).map_err(CgroupError::at(mountinfo))?;
        Ok(Self {
            mounts: hierarchies(&text),
            path: path.into(),
        })
    }

    /// Returns whether cgroup v2 is the only hierarchy.
    pub fn is_v2(&self) -> bool {
        self.mounts
            .iter()
            .all(|hierarchy| hierarchy.kind == Kind::V2)
    }

    /// Returns the path in the form of the kubelet's `cgroupRoot`.
    pub fn root(&self) -> String {
        format!("/{}", self.path.display())
    }

    /// Creates the cgroup and moves this process into its child `leaf`.
    ///
    /// # Errors
    /// When a hierarchy refuses.
    pub fn enter(&self, leaf: &str) -> Result<(), CgroupError> {
        for hierarchy in &self.mounts {
            let folder = hierarchy.make(&self.path.join(leaf))?;
            let procs = folder.join("cgroup.procs");
            fs::write(&procs, getpid().as_raw_nonzero().to_string())
                .map_err(CgroupError::at(&procs))?;
        }
        Ok(())
    }

    /// Moves this process back to the root of each hierarchy.
    ///
    /// # Errors
    /// When a hierarchy refuses.
    pub fn leave(&self) -> Result<(), CgroupError> {
        for hierarchy in &self.mounts {
            let procs = hierarchy.mount.join("cgroup.procs");
            fs::write(&procs, getpid().as_raw_nonzero().to_string())
                .map_err(CgroupError::at(&procs))?;
        }
        Ok(())
    }

    /// Returns every process in the cgroup and below, except this one.
    pub fn processes(&self) -> BTreeSet<i32> {
        let mut found = BTreeSet::new();
        for hierarchy in &self.mounts {
            collect(&hierarchy.mount.join(&self.path), &mut found);
        }
        found.remove(&getpid().as_raw_nonzero().get());
        found
    }

    /// Kills every process in the cgroup except this one, until none is left.
    ///
    /// # Errors
    /// When processes survive for `bound`, with their ids.
    pub fn kill(&self, bound: Duration) -> Result<(), CgroupError> {
        let start = Instant::now();
        loop {
            let processes = self.processes();
            if processes.is_empty() {
                return Ok(());
            }
            if start.elapsed() > bound {
                let error = io::Error::other(format!(
                    "processes {processes:?} live on after SIGKILL and {bound:?}"
                ));
                return Err(CgroupError::at(&self.path)(error));
            }
            for pid in processes.into_iter().filter_map(Pid::from_raw) {
                // The process may have exited meanwhile.
                let _ = kill_process(pid, Signal::KILL);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Removes the cgroup, and its parent once that is empty.
    ///
    /// # Errors
    /// When a folder is still busy after `bound`.
    pub fn remove(&self, bound: Duration) -> Result<(), CgroupError> {
        let start = Instant::now();
        for hierarchy in &self.mounts {
            let folder = hierarchy.mount.join(&self.path);
            loop {
                match remove_tree(&folder) {
                    Ok(()) => break,
                    Err(_) if start.elapsed() < bound => {
                        std::thread::sleep(Duration::from_millis(20))
                    }
                    Err(error) => return Err(CgroupError::at(&folder)(error)),
                }
            }
            if let Some(parent) = self
                .path
                .parent()
                .filter(|parent| !parent.as_os_str().is_empty())
            {
                let _ = fs::remove_dir(hierarchy.mount.join(parent));
            }
        }
        Ok(())
    }

    /// Removes every child of the cgroup except `leaf`.
    ///
    /// # Errors
    /// When a child has processes.
    pub fn remove_children_except(&self, leaf: &str) -> Result<(), CgroupError> {
        for hierarchy in &self.mounts {
            let folder = hierarchy.mount.join(&self.path);
            for child in fs::read_dir(&folder).into_iter().flatten().flatten() {
                if child.file_name() != leaf && child.file_type().is_ok_and(|kind| kind.is_dir()) {
                    remove_tree(&child.path()).map_err(CgroupError::at(&child.path()))?;
                }
            }
        }
        Ok(())
    }

    /// Returns whether the cgroup exists in some hierarchy.
    pub fn exists(&self) -> bool {
        self.mounts
            .iter()
            .any(|hierarchy| hierarchy.mount.join(&self.path).exists())
    }
}

impl Hierarchy {
    /// Creates `path` and its parents, each ready for processes.
    fn make(&self, path: &Path) -> Result<PathBuf, CgroupError> {
        let mut folder = self.mount.clone();
        for name in path {
            if self.kind == Kind::V2 {
                delegate(&folder);
            }
            let parent = folder.clone();
            folder.push(name);
            match fs::create_dir(&folder) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(CgroupError::at(&folder)(error));
                }
                _ => {}
            }
            if self.kind == Kind::V1Cpuset {
                // The kernel creates a cpuset without processors and memory.
                for file in ["cpuset.cpus", "cpuset.mems"] {
                    let value =
                        fs::read_to_string(parent.join(file)).map_err(CgroupError::at(&parent))?;
                    fs::write(folder.join(file), value.trim()).map_err(CgroupError::at(&folder))?;
                }
            }
        }
        Ok(folder)
    }
}

/// Delegates every controller of a v2 cgroup to its children. A controller that cannot be delegated
/// is left out, because the kubelet names the controllers that it misses.
fn delegate(folder: &Path) {
    let controllers = fs::read_to_string(folder.join("cgroup.controllers")).unwrap_or_default();
    for controller in controllers.split_whitespace() {
        let _ = fs::write(
            folder.join("cgroup.subtree_control"),
            format!("+{controller}"),
        );
    }
}

fn collect(folder: &Path, found: &mut BTreeSet<i32>) {
    let procs = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
    found.extend(
        procs
            .lines()
            .filter_map(|line| line.parse::<i32>().ok())
            .filter(|pid| *pid > 0),
    );
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect(&entry.path(), found);
        }
    }
}

fn remove_tree(folder: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_tree(&entry.path())?;
        }
    }
    fs::remove_dir(folder)
}

/// Lists the cgroup hierarchies in the text of `/proc/self/mountinfo` (proc_pid_mountinfo(5)), each
/// by its first mount. Another program may mount a hierarchy elsewhere too, and unmount that at any
/// time.
fn hierarchies(mountinfo: &str) -> Vec<Hierarchy> {
    let mut found: Vec<Hierarchy> = Vec::new();
    let mut devices = BTreeSet::new();
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - ") else {
            continue;
        };
        let mut right = right.split(' ');
        let kind = match right.next() {
            Some("cgroup") => Kind::V1,
            Some("cgroup2") => Kind::V2,
            _ => continue,
        };
        let options = right.next_back().unwrap_or_default();
        let cpuset = kind == Kind::V1 && options.split(',').any(|option| option == "cpuset");
        let mut left = left.split(' ').skip(2);
        let (Some(device), Some(mount)) = (left.next(), left.nth(1)) else {
            continue;
        };
        if devices.insert(device) {
            found.push(Hierarchy {
                mount: PathBuf::from(mount),
                kind: if cpuset { Kind::V1Cpuset } else { kind },
            });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
24 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 24 0:26 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
31 24 0:27 / /sys/fs/cgroup/memory rw,relatime shared:3 - cgroup cgroup rw,memory
32 24 0:28 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw";

    #[test]
    fn hierarchies_lists_every_mount_of_a_hybrid_system() {
        let found = hierarchies(HYBRID);
        let kinds: Vec<Kind> = found.iter().map(|hierarchy| hierarchy.kind).collect();
        assert_eq!(kinds, [Kind::V1Cpuset, Kind::V1, Kind::V2]);
        assert_eq!(found[1].mount, Path::new("/sys/fs/cgroup/memory"));
    }

    #[test]
    fn hierarchies_lists_the_first_of_two_mounts_only() {
        let bound = "40 24 0:27 / /tmp/x/cgroup/memory rw - cgroup cgroup rw,memory";
        assert_eq!(
            hierarchies(&format!("{HYBRID}\n{bound}")),
            hierarchies(HYBRID)
        );
    }

    #[test]
    fn cgroup_is_v2_when_the_only_hierarchy_is_unified() {
        let unified = "28 24 0:25 / /sys/fs/cgroup rw - cgroup2 cgroup rw,nsdelegate";
        assert!(
            Cgroup {
                mounts: hierarchies(unified),
                path: PathBuf::new()
            }
            .is_v2()
        );
        assert!(
            !Cgroup {
                mounts: hierarchies(HYBRID),
                path: PathBuf::new()
            }
            .is_v2()
        );
    }
}
