//! Finds the cgroups of pods on the host: a pod has ended once its cgroup is removed.
//!
//! The kubelet creates a pod's cgroup before it starts the first container, and removes it after
//! the last one has ended (`pkg/kubelet/cm/pod_container_manager_linux.go`). The name depends on
//! the cgroup driver (`cgroup_manager_linux.go`), the parent on the pod's QoS class and on
//! `--cgroup-root`:
//!
//! ```text
//!   cgroupfs   .../kubepods/pod<uid>                 .../kubepods/burstable/pod<uid>
//!   systemd    .../kubepods.slice/kubepods-pod<uid_>.slice
//!              .../kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid_>.slice
//! ```
//!
//! With cgroup v1 every controller has such a tree; the first tree with the pod is enough.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ffi::OsString;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use bursar_ledger::units::PodUid;

/// The depth of the search for the kubelet's tree: v1 controller, kubelet root (as deep as kind
/// nests it), tree.
const MAX_DEPTH: usize = 5;
/// The number of directories above the kubelet's tree after which the search stops.
const MAX_DIRS: usize = 20_000;

/// The result of the search for a pod's cgroup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodCgroup {
    /// The pod's cgroup.
    Found(PathBuf),
    /// The kubelet's tree exists without this pod.
    Gone,
    /// The kubelet's tree was not found, so the pod may exist.
    Unknown,
}

/// Watches the cgroups of pods for their removal.
#[derive(Debug)]
pub struct PodCgroups {
    root: PathBuf,
    /// The kubelet's trees found so far.
    trees: Vec<PathBuf>,
    watched: BTreeMap<PodUid, PathBuf>,
}

impl PodCgroups {
    /// Watches no pod yet; `root` is the host's cgroup file system.
    pub fn new(root: PathBuf) -> Self {
        Self {
            root,
            trees: Vec::new(),
            watched: BTreeMap::new(),
        }
    }

    /// Finds the pod's cgroup and watches it.
    pub fn watch(&mut self, pod: &PodUid) -> PodCgroup {
        if let Some(path) = self.watched.get(pod) {
            return PodCgroup::Found(path.clone());
        }
        let found = self.find(pod);
        if let PodCgroup::Found(path) = &found {
            self.watched.insert(pod.clone(), path.clone());
        }
        found
    }

    /// The watched pods whose cgroup was removed since the last call; they are watched no more.
    ///
    /// The agent calls this several times a second. A list of each parent costs a system call for
    /// hundreds of pods, so only a pod that is not listed is looked up.
    pub fn drain_ended(&mut self) -> Vec<PodUid> {
        let parents: BTreeSet<&Path> = self
            .watched
            .values()
            .filter_map(|path| path.parent())
            .collect();
        let listed: HashSet<OsString> = parents.into_iter().flat_map(names_in).collect();
        let is_listed = |path: &Path| path.file_name().is_some_and(|name| listed.contains(name));
        let ended = self
            .watched
            .extract_if(.., |_, path| !is_listed(path) && !exists(path));
        ended.map(|(pod, _)| pod).collect()
    }

    /// The cgroup of a watched pod.
    pub fn path(&self, pod: &PodUid) -> Option<&Path> {
        self.watched.get(pod).map(PathBuf::as_path)
    }

    fn find(&mut self, pod: &PodUid) -> PodCgroup {
        if let Some(path) = self.trees.iter().find_map(|tree| find_in_tree(tree, pod)) {
            return PodCgroup::Found(path);
        }
        self.trees = find_trees(&self.root);
        match self.trees.iter().find_map(|tree| find_in_tree(tree, pod)) {
            Some(path) => PodCgroup::Found(path),
            None if self.trees.is_empty() => PodCgroup::Unknown,
            None => PodCgroup::Gone,
        }
    }
}

/// Only `NotFound` means that a cgroup was removed: other errors may be transient.
fn exists(path: &Path) -> bool {
    match path.symlink_metadata() {
        Ok(_) => true,
        Err(error) => error.kind() != std::io::ErrorKind::NotFound,
    }
}

/// The names in a directory; none of a directory that cannot be listed.
fn names_in(folder: &Path) -> impl Iterator<Item = OsString> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name())
}

/// The kubelet's trees below `root`, breadth first.
fn find_trees(root: &Path) -> Vec<PathBuf> {
    let (mut found, mut level, mut visited) = (Vec::new(), vec![root.to_owned()], 0);
    for _ in 0..MAX_DEPTH {
        let folders: Vec<PathBuf> = level.iter().flat_map(|folder| subdirs(folder)).collect();
        visited += folders.len();
        let (trees, others): (Vec<_>, Vec<_>) = folders
            .into_iter()
            .partition(|folder| is_kubelet_tree(folder));
        found.extend(trees);
        if visited > MAX_DIRS {
            break;
        }
        level = others;
    }
    found
}

fn is_kubelet_tree(folder: &Path) -> bool {
    let name = dir_name(folder);
    name == "kubepods" || name == "kubepods.slice" || name.ends_with("-kubepods.slice")
}

fn find_in_tree(tree: &Path, pod: &PodUid) -> Option<PathBuf> {
    let direct = pod_dir(tree, pod);
    if direct.is_dir() {
        return Some(direct);
    }
    let is_class = |folder: &PathBuf| {
        let name = dir_name(folder);
        ["burstable", "besteffort"]
            .iter()
            .any(|class| name.trim_end_matches(".slice").ends_with(class))
    };
    let classes = subdirs(tree).into_iter().filter(is_class);
    classes
        .map(|class| pod_dir(&class, pod))
        .find(|path| path.is_dir())
}

/// The path of the pod's cgroup as a child of `parent`.
fn pod_dir(parent: &Path, pod: &PodUid) -> PathBuf {
    match dir_name(parent).strip_suffix(".slice") {
        Some(stem) => parent.join(format!(
            "{stem}-pod{}.slice",
            pod.as_str().replace('-', "_")
        )),
        None => parent.join(format!("pod{pod}")),
    }
}

fn dir_name(folder: &Path) -> &str {
    folder
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default()
}

/// The depth of the search in a container's cgroup: a container may create nested cgroups.
const MAX_CONTAINER_DEPTH: usize = 8;
/// The most cgroups of one container to visit.
const MAX_CONTAINER_CGROUPS: usize = 1_000;
/// The most processes of one container to list.
pub const MAX_PROCESSES: usize = 16_384;
/// The most bytes to read of one `cgroup.procs` file.
const MAX_LIST_BYTES: u64 = 16 * MAX_PROCESSES as u64;

/// The cgroups of a pod's containers, the sandbox included.
pub fn container_cgroups(pod: &Path) -> Vec<PathBuf> {
    subdirs(pod)
}

/// The processes of a container, nested cgroups included, and whether the list is complete.
///
/// A removed cgroup has no processes.
pub fn list_processes(container: &Path) -> (Vec<u32>, bool) {
    let mut pids = Vec::new();
    let all = visit_cgroups(container, |folder| {
        let file = std::fs::File::open(folder.join("cgroup.procs"));
        let mut text = String::new();
        let read = file.and_then(|file| file.take(MAX_LIST_BYTES).read_to_string(&mut text));
        pids.extend(text.lines().filter_map(|line| line.parse::<u32>().ok()));
        read.is_ok_and(|read| read as u64 == MAX_LIST_BYTES) || pids.len() > MAX_PROCESSES
    });
    pids.truncate(MAX_PROCESSES);
    (pids, all)
}

/// Visits a container's cgroup and the nested ones until `visit` returns true.
///
/// Returns whether all cgroups were visited and `visit` never returned true.
pub fn visit_cgroups(container: &Path, mut visit: impl FnMut(&Path) -> bool) -> bool {
    let (mut level, mut visited) = (vec![container.to_owned()], 0);
    for _ in 0..MAX_CONTAINER_DEPTH {
        visited += level.len();
        if level.iter().any(|folder| visit(folder)) || visited > MAX_CONTAINER_CGROUPS {
            return false;
        }
        level = level.iter().flat_map(|folder| subdirs(folder)).collect();
    }
    level.is_empty()
}

/// A directory that cannot be listed has no children: cgroups may be removed during the walk.
fn subdirs(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut folders: Vec<_> = entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect();
    folders.sort();
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11";
    const UID_: &str = "8b2e3f0a_1f5c_4c41_9d53_0a5f4f7a9d11";

    fn host(folders: &[&str]) -> (tempfile::TempDir, PodCgroups) {
        let root = tempfile::tempdir().unwrap();
        for folder in folders {
            std::fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        let pods = PodCgroups::new(root.path().to_owned());
        (root, pods)
    }

    #[test]
    fn pod_is_found_under_every_cgroup_driver_class_and_version() {
        for folder in [
            format!("kubepods/pod{UID}"),
            format!("kubepods/burstable/pod{UID}"),
            format!("memory/kubepods/besteffort/pod{UID}"),
            format!("systemd/test-root/kubepods/burstable/pod{UID}"),
            format!("kubepods.slice/kubepods-pod{UID_}.slice"),
            format!("kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_}.slice"),
            format!(
                "docker/0123/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/\
                 kubelet-kubepods-besteffort-pod{UID_}.slice"
            ),
        ] {
            let (root, mut pods) = host(&[&folder, "system.slice/sshd.service"]);
            let found = pods.watch(&UID.parse().unwrap());
            assert_eq!(
                found,
                PodCgroup::Found(root.path().join(&folder)),
                "{folder}"
            );
        }
    }

    #[test]
    fn pod_without_cgroup_in_the_kubelet_tree_is_gone() {
        let (_root, mut pods) = host(&["kubepods/burstable/podother"]);
        assert_eq!(pods.watch(&UID.parse().unwrap()), PodCgroup::Gone);
    }

    #[test]
    fn pod_is_unknown_without_a_kubelet_tree() {
        let (root, mut pods) = host(&["system.slice"]);
        assert_eq!(pods.watch(&UID.parse().unwrap()), PodCgroup::Unknown);
        std::fs::create_dir_all(root.path().join(format!("kubepods/pod{UID}"))).unwrap();
        assert!(matches!(
            pods.watch(&UID.parse().unwrap()),
            PodCgroup::Found(_)
        ));
    }

    #[test]
    fn processes_in_nested_cgroups_of_a_container_are_listed() {
        let folder = format!("kubepods/pod{UID}");
        let (root, _) = host(&[
            &format!("{folder}/c0ffee/inner"),
            &format!("{folder}/pause"),
        ]);
        let pod = root.path().join(folder);
        std::fs::write(pod.join("c0ffee/cgroup.procs"), "12\n7\n").unwrap();
        std::fs::write(pod.join("c0ffee/inner/cgroup.procs"), "8\n").unwrap();
        let containers = container_cgroups(&pod);
        assert_eq!(containers, [pod.join("c0ffee"), pod.join("pause")]);
        assert_eq!(list_processes(&containers[0]), (vec![12, 7, 8], true));
        assert_eq!(list_processes(&containers[1]), (vec![], true));
        let crowd: String = (1..=MAX_PROCESSES + 1)
            .map(|pid| format!("{pid}\n"))
            .collect();
        std::fs::write(pod.join("pause/cgroup.procs"), crowd).unwrap();
        let (pids, all) = list_processes(&containers[1]);
        assert_eq!((pids.len(), all), (MAX_PROCESSES, false));
    }

    #[test]
    fn removed_cgroup_is_reported_once() {
        let folder = format!("kubepods/pod{UID}");
        let (root, mut pods) = host(&[&folder, "kubepods/podother"]);
        let (pod, other): (PodUid, PodUid) = (UID.parse().unwrap(), "other".parse().unwrap());
        pods.watch(&pod);
        pods.watch(&other);
        assert_eq!(pods.drain_ended(), []);
        std::fs::remove_dir(root.path().join(&folder)).unwrap();
        assert_eq!(pods.drain_ended(), [pod]);
        assert_eq!(pods.drain_ended(), []);
        std::fs::remove_dir_all(root.path().join("kubepods")).unwrap();
        assert_eq!(pods.drain_ended(), [other]);
    }
}
