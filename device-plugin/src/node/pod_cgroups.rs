//! Finds pods' cgroups on the host, for a pod's end is the end of its cgroup.
//!
//! The kubelet makes a pod's cgroup before it starts the first container and removes it after the last
//! one is gone (`pkg/kubelet/cm/pod_container_manager_linux.go`). Its name depends on the cgroup
//! driver (`cgroup_manager_linux.go`), its parent on the pod's QoS class and on `--cgroup-root`:
//!
//! ```text
//!   cgroupfs   .../kubepods/pod<uid>                 .../kubepods/burstable/pod<uid>
//!   systemd    .../kubepods.slice/kubepods-pod<uid_>.slice
//!              .../kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid_>.slice
//! ```
//!
//! With cgroup v1 that tree stands in each controller's folder, and the first that has the pod will do.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use crate::units::PodUid;

/// How deep below the root the kubelet's tree is looked for: v1 controller, kubelet's root
/// (as deep as kind nests it), tree.
const DEPTH: usize = 5;
/// A host with more cgroups than this above the kubelet's tree is searched no further.
const MOST_FOLDERS: usize = 20_000;

/// Where a pod's cgroup is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodCgroup {
    /// Here.
    At(PathBuf),
    /// The kubelet's tree is there, without this pod.
    Gone,
    /// There is no kubelet's tree to look in: nothing can be said.
    Unknown,
}

/// The pods whose end is awaited.
#[derive(Debug)]
pub struct Pods {
    root: PathBuf,
    /// The kubelet's trees that were found so far.
    trees: Vec<PathBuf>,
    alive: BTreeMap<PodUid, PathBuf>,
}

impl Pods {
    /// No pod yet; `root` is the host's cgroup file system.
    pub fn new(root: PathBuf) -> Self {
        Self {
            root,
            trees: Vec::new(),
            alive: BTreeMap::new(),
        }
    }

    /// Looks for the pod's cgroup, and awaits its end from now on where there is one.
    pub fn follow(&mut self, pod: &PodUid) -> PodCgroup {
        if let Some(path) = self.alive.get(pod) {
            return PodCgroup::At(path.clone());
        }
        let found = self.find(pod);
        if let PodCgroup::At(path) = &found {
            self.alive.insert(pod.clone(), path.clone());
        }
        found
    }

    /// The followed pods whose cgroup has ended since the last call; they are followed no more.
    pub fn take_ended(&mut self) -> Vec<PodUid> {
        let ended = self.alive.extract_if(.., |_, path| !exists(path));
        ended.map(|(pod, _)| pod).collect()
    }

    /// The cgroup of a pod that is followed.
    pub fn folder(&self, pod: &PodUid) -> Option<&Path> {
        self.alive.get(pod).map(PathBuf::as_path)
    }

    fn find(&mut self, pod: &PodUid) -> PodCgroup {
        if let Some(path) = self.trees.iter().find_map(|tree| in_tree(tree, pod)) {
            return PodCgroup::At(path);
        }
        self.trees = trees(&self.root);
        match self.trees.iter().find_map(|tree| in_tree(tree, pod)) {
            Some(path) => PodCgroup::At(path),
            None if self.trees.is_empty() => PodCgroup::Unknown,
            None => PodCgroup::Gone,
        }
    }
}

/// A cgroup that cannot be read for another reason than its absence has not ended.
fn exists(path: &Path) -> bool {
    match path.symlink_metadata() {
        Ok(_) => true,
        Err(error) => error.kind() != std::io::ErrorKind::NotFound,
    }
}

/// The kubelet's trees under `root`, breadth first.
fn trees(root: &Path) -> Vec<PathBuf> {
    let (mut found, mut level, mut seen) = (Vec::new(), vec![root.to_owned()], 0);
    for _ in 0..DEPTH {
        let folders: Vec<PathBuf> = level.iter().flat_map(|folder| subfolders(folder)).collect();
        seen += folders.len();
        let (trees, others): (Vec<_>, Vec<_>) =
            folders.into_iter().partition(|folder| is_tree(folder));
        found.extend(trees);
        if seen > MOST_FOLDERS {
            break;
        }
        level = others;
    }
    found
}

fn is_tree(folder: &Path) -> bool {
    let name = name(folder);
    name == "kubepods" || name == "kubepods.slice" || name.ends_with("-kubepods.slice")
}

fn in_tree(tree: &Path, pod: &PodUid) -> Option<PathBuf> {
    let direct = candidate(tree, pod);
    if direct.is_dir() {
        return Some(direct);
    }
    let is_class = |folder: &PathBuf| {
        let name = name(folder);
        ["burstable", "besteffort"]
            .iter()
            .any(|class| name.trim_end_matches(".slice").ends_with(class))
    };
    let classes = subfolders(tree).into_iter().filter(is_class);
    classes
        .map(|class| candidate(&class, pod))
        .find(|path| path.is_dir())
}

/// The pod's folder if it is directly under `parent`.
fn candidate(parent: &Path, pod: &PodUid) -> PathBuf {
    match name(parent).strip_suffix(".slice") {
        Some(stem) => parent.join(format!(
            "{stem}-pod{}.slice",
            pod.as_str().replace('-', "_")
        )),
        None => parent.join(format!("pod{pod}")),
    }
}

fn name(folder: &Path) -> &str {
    folder
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default()
}

/// How deep in a container's cgroup its processes are looked for: a container may make cgroups of its own.
const CONTAINER_DEPTH: usize = 8;
/// The most cgroups of one container that are looked into.
const MOST_CGROUPS: usize = 1_000;
/// The most processes of one container that are looked at.
pub const MOST_PROCESSES: usize = 16_384;
/// The most that is read of one cgroup's list of them.
const LONGEST_LIST: u64 = 16 * MOST_PROCESSES as u64;

/// The cgroups of a pod's containers, its sandbox's among them.
pub fn container_folders(pod: &Path) -> Vec<PathBuf> {
    subfolders(pod)
}

/// The processes of a container, those in cgroups of its own included, and whether they are all; a cgroup that ended
/// has none.
pub fn processes_in(container: &Path) -> (Vec<u32>, bool) {
    let mut pids = Vec::new();
    let all = cgroups_in(container, |folder| {
        let file = std::fs::File::open(folder.join("cgroup.procs"));
        let mut text = String::new();
        let read = file.and_then(|file| file.take(LONGEST_LIST).read_to_string(&mut text));
        pids.extend(text.lines().filter_map(|line| line.parse::<u32>().ok()));
        read.is_ok_and(|read| read as u64 == LONGEST_LIST) || pids.len() > MOST_PROCESSES
    });
    pids.truncate(MOST_PROCESSES);
    (pids, all)
}

/// Passes a container's cgroup to `see`, and those in it, until it is `true` of one; whether it was of none, and there
/// are no more.
pub fn cgroups_in(container: &Path, mut see: impl FnMut(&Path) -> bool) -> bool {
    let (mut level, mut seen) = (vec![container.to_owned()], 0);
    for _ in 0..CONTAINER_DEPTH {
        seen += level.len();
        if level.iter().any(|folder| see(folder)) || seen > MOST_CGROUPS {
            return false;
        }
        level = level.iter().flat_map(|folder| subfolders(folder)).collect();
    }
    level.is_empty()
}

/// Folders that cannot be listed have none: cgroups come and go while they are walked.
fn subfolders(folder: &Path) -> Vec<PathBuf> {
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

    fn host(folders: &[&str]) -> (tempfile::TempDir, Pods) {
        let root = tempfile::tempdir().unwrap();
        for folder in folders {
            std::fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        let pods = Pods::new(root.path().to_owned());
        (root, pods)
    }

    #[test]
    fn a_pod_is_found_under_every_cgroup_driver_class_and_version() {
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
            let found = pods.follow(&UID.parse().unwrap());
            assert_eq!(found, PodCgroup::At(root.path().join(&folder)), "{folder}");
        }
    }

    #[test]
    fn a_pod_whose_cgroup_is_missing_from_the_kubelets_tree_is_gone() {
        let (_root, mut pods) = host(&["kubepods/burstable/podother"]);
        assert_eq!(pods.follow(&UID.parse().unwrap()), PodCgroup::Gone);
    }

    #[test]
    fn without_the_kubelets_tree_nothing_is_said() {
        let (root, mut pods) = host(&["system.slice"]);
        assert_eq!(pods.follow(&UID.parse().unwrap()), PodCgroup::Unknown);
        std::fs::create_dir_all(root.path().join(format!("kubepods/pod{UID}"))).unwrap();
        assert!(matches!(
            pods.follow(&UID.parse().unwrap()),
            PodCgroup::At(_)
        ));
    }

    #[test]
    fn a_containers_processes_are_found_in_the_cgroups_that_it_made_itself_too() {
        let folder = format!("kubepods/pod{UID}");
        let (root, _) = host(&[
            &format!("{folder}/c0ffee/inner"),
            &format!("{folder}/pause"),
        ]);
        let pod = root.path().join(folder);
        std::fs::write(pod.join("c0ffee/cgroup.procs"), "12\n7\n").unwrap();
        std::fs::write(pod.join("c0ffee/inner/cgroup.procs"), "8\n").unwrap();
        let containers = container_folders(&pod);
        assert_eq!(containers, [pod.join("c0ffee"), pod.join("pause")]);
        assert_eq!(processes_in(&containers[0]), (vec![12, 7, 8], true));
        assert_eq!(processes_in(&containers[1]), (vec![], true));
        let crowd: String = (1..=MOST_PROCESSES + 1)
            .map(|pid| format!("{pid}\n"))
            .collect();
        std::fs::write(pod.join("pause/cgroup.procs"), crowd).unwrap();
        let (pids, all) = processes_in(&containers[1]);
        assert_eq!((pids.len(), all), (MOST_PROCESSES, false));
    }

    #[test]
    fn the_end_of_a_cgroup_is_told_once() {
        let folder = format!("kubepods/pod{UID}");
        let (root, mut pods) = host(&[&folder, "kubepods/podother"]);
        let (pod, other): (PodUid, PodUid) = (UID.parse().unwrap(), "other".parse().unwrap());
        pods.follow(&pod);
        pods.follow(&other);
        assert_eq!(pods.take_ended(), []);
        std::fs::remove_dir(root.path().join(&folder)).unwrap();
        assert_eq!(pods.take_ended(), [pod]);
        assert_eq!(pods.take_ended(), []);
    }
}
