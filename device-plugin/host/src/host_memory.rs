//! Reads how much host memory a container and the node can still have.

use std::path::Path;

use bursar_ledger::units::Bytes;

use crate::procfs::read_small;

/// The host memory that a container of a pod can still have, by its cgroup and that of the pod;
/// none where a limit is unknown, as with cgroup v1.
pub fn container_room(container: &Path, pod: &Path) -> Option<Bytes> {
    let mut room = u64::MAX;
    let cgroups = container.ancestors();
    for cgroup in cgroups.take_while(|cgroup| cgroup.starts_with(pod)) {
        let limit = read_small(&cgroup.join("memory.max")).ok()?;
        if limit.trim() != "max" {
            let limit: u64 = limit.trim().parse().ok()?;
            let current = read_small(&cgroup.join("memory.current")).ok()?;
            room = room.min(limit.saturating_sub(current.trim().parse().ok()?));
        }
    }
    Some(Bytes(room))
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
        let room = || container_room(&container, &pod).map(|bytes| bytes.0);
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
    fn node_has_the_available_memory() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(node_room(folder.path()), None);
        let text = "MemTotal:       16 kB\nMemAvailable:       12 kB\n";
        std::fs::write(folder.path().join("meminfo"), text).unwrap();
        assert_eq!(node_room(folder.path()), Some(Bytes(12 * 1024)));
        assert!(node_room(Path::new("/proc")) > Some(Bytes::ZERO));
    }
}
