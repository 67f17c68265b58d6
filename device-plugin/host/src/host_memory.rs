//! Reads how much host memory a container and the node can still have.

use std::io::ErrorKind;
use std::path::Path;

use bursar_ledger::units::Bytes;

use crate::procfs::read_small;

/// The host memory that a container can still have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContainerRoom {
    /// By its own limit and that of its pod.
    pub pod: Bytes,
    /// By the limits of the cgroups above the pod, which other pods share.
    pub shared: Bytes,
}

/// The host memory that a container of a pod can still have, by all cgroups up to the root. None
/// where a limit is unknown, as with cgroup v1.
pub fn container_room(container: &Path, pod: &Path) -> Option<ContainerRoom> {
    let mut room = ContainerRoom {
        pod: Bytes(u64::MAX),
        shared: Bytes(u64::MAX),
    };
    for cgroup in container.ancestors() {
        let is_of_pod = cgroup.starts_with(pod);
        let limit = match read_small(&cgroup.join("memory.max")) {
            Ok(limit) => limit,
            // The root has no limit.
            Err(error) if error.kind() == ErrorKind::NotFound && !is_of_pod => break,
            Err(_) => return None,
        };
        let least = match is_of_pod {
            true => &mut room.pod,
            false => &mut room.shared,
        };
        if limit.trim() != "max" {
            let limit: u64 = limit.trim().parse().ok()?;
            *least = Bytes(limit.saturating_sub(used(cgroup)?)).min(*least);
        }
    }
    Some(room)
}

/// The memory of a cgroup less the cached content of files, which the kernel drops if it needs
/// memory. Content that must be written first counts as used.
fn used(cgroup: &Path) -> Option<u64> {
    let current = read_small(&cgroup.join("memory.current")).ok()?;
    let current: u64 = current.trim().parse().ok()?;
    let stat = read_small(&cgroup.join("memory.stat")).unwrap_or_default();
    let sum = |names: &[&str]| {
        let figures = stat.lines().filter_map(|line| {
            let (name, bytes) = line.split_once(' ')?;
            bytes.parse::<u64>().ok().filter(|_| names.contains(&name))
        });
        figures.fold(0, u64::saturating_add)
    };
    let cached = sum(&["inactive_file", "active_file"]);
    let dirty = sum(&["file_dirty", "file_writeback"]);
    Some(current.saturating_sub(cached.saturating_sub(dirty)))
}

/// The host memory that programs can still have; `proc` is the host's.
pub fn node_room(proc: &Path) -> Option<Bytes> {
    let text = read_small(&proc.join("meminfo")).ok()?;
    let available = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = available.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes(kibibytes.checked_mul(1024)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn container_has_the_least_room_up_to_its_pod() {
        let folder = tempfile::tempdir().unwrap();
        let pod = folder.path().join("pod");
        let container = pod.join("main");
        std::fs::create_dir_all(&container).unwrap();
        let limit = |cgroup: &Path, max: &str, current: &str| {
            std::fs::write(cgroup.join("memory.max"), max).unwrap();
            std::fs::write(cgroup.join("memory.current"), current).unwrap();
        };
        let room = || container_room(&container, &pod).map(|room| room.pod.0);
        assert_eq!(room(), None, "cgroup v1");
        limit(&pod, "max\n", "70\n");
        limit(&container, "max\n", "60\n");
        assert_eq!(room(), Some(u64::MAX));
        limit(&container, "100\n", "60\n");
        assert_eq!(room(), Some(40));
        limit(&pod, "90\n", "70\n");
        assert_eq!(room(), Some(20));
        limit(&pod, "60\n", "70\n");
        assert_eq!(room(), Some(0));
    }

    #[test]
    fn container_has_the_room_of_all_cgroups_above_its_pod() {
        let folder = tempfile::tempdir().unwrap();
        let slice = folder.path().join("kubepods");
        let pod = slice.join("pod");
        let container = pod.join("main");
        std::fs::create_dir_all(&container).unwrap();
        for (cgroup, max) in [(&slice, "100"), (&pod, "max"), (&container, "max")] {
            std::fs::write(cgroup.join("memory.max"), max).unwrap();
            std::fs::write(cgroup.join("memory.current"), "90").unwrap();
        }
        let room = container_room(&container, &pod).unwrap();
        assert_eq!((room.pod, room.shared), (Bytes(u64::MAX), Bytes(10)));
        std::fs::write(slice.join("memory.max"), "many").unwrap();
        assert_eq!(container_room(&container, &pod), None);
    }

    #[test]
    fn cached_files_count_as_room_unless_they_are_dirty() {
        let folder = tempfile::tempdir().unwrap();
        let pod = folder.path();
        let write = |file: &str, text: &str| std::fs::write(pod.join(file), text).unwrap();
        write("memory.max", "100");
        write("memory.current", "100");
        let room = || container_room(pod, pod).unwrap().pod;
        assert_eq!(room(), Bytes(0));
        write("memory.stat", "anon 40\ninactive_file 50\nactive_file 10\n");
        assert_eq!(room(), Bytes(60));
        write("memory.stat", "inactive_file 60\nfile_dirty 15\n");
        assert_eq!(room(), Bytes(45));
    }

    #[test]
    fn node_has_the_available_memory() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(node_room(folder.path()), None);
        let text = "MemTotal:       16 kB\nMemAvailable:       12 kB\n";
        std::fs::write(folder.path().join("meminfo"), text).unwrap();
        assert_eq!(node_room(folder.path()), Some(Bytes(12 * 1024)));
        assert!(node_room(Path::new("/proc")) > Some(Bytes::ZERO));
    }
}
