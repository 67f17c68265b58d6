//! Finds the forked children that share a process's GPU memory.
//!
//! The driver frees a process's memory with the last descriptor of its device files. A child that
//! was forked without an exec shares them, and keeps all memory of its parent after the parent's
//! end. A child that has executed a program has none of them, because they are closed by an exec.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use bursar_host::procfs::{self, Stat};
use bursar_sessions::Process;

/// The most processes of the node to read.
const MAX_PROCESSES: usize = 65_536;

/// The most descriptors to read of one process. Memory of a child that is not found stays charged,
/// and ends the container later.
const MAX_PROCESS_DESCRIPTORS: usize = 4_096;

/// The most descriptors to read for all condemned processes of a round.
const MAX_DESCRIPTORS: usize = 65_536;

/// The node's processes at one moment.
pub(super) struct ProcessTree {
    proc: PathBuf,
    stats: BTreeMap<u32, Stat>,
    children: BTreeMap<u32, Vec<u32>>,
    descriptors_left: usize,
}

impl ProcessTree {
    /// Reads the processes below `proc`, the host's `/proc`.
    pub(super) fn read(proc: &Path) -> ProcessTree {
        let stats = read_stats(proc);
        let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for (pid, stat) in &stats {
            children.entry(stat.parent).or_default().push(*pid);
        }
        ProcessTree {
            proc: proc.to_owned(),
            stats,
            children,
            descriptors_left: MAX_DESCRIPTORS,
        }
    }

    /// The descendants of `ancestor` that were forked without an exec and have a device file of the
    /// driver open. Takes them out of the tree.
    pub(super) fn take_device_holders(&mut self, ancestor: Process) -> Vec<Process> {
        let is_there = |stat: &Stat| stat.start_ticks == ancestor.start;
        if !self.stats.get(&ancestor.pid).is_some_and(is_there) {
            return Vec::new();
        }
        let mut pending = self.children.remove(&ancestor.pid).unwrap_or_default();
        let mut holders = Vec::new();
        while let Some(pid) = pending.pop() {
            // Each list is taken once, so that no circle of parents has no end.
            pending.extend(self.children.remove(&pid).unwrap_or_default());
            let Some(stat) = self.stats.get(&pid).filter(|stat| stat.forked) else {
                continue;
            };
            let start = stat.start_ticks;
            if self.has_device_open(pid) {
                holders.push(Process { pid, start });
            }
        }
        holders
    }

    /// Whether a process has a device file of the driver open. A descriptor's link has the file's
    /// path as its container sees it. The agent does not follow the link, because a tenant's file
    /// system may answer late or never.
    fn has_device_open(&mut self, pid: u32) -> bool {
        let folder = self.proc.join(pid.to_string()).join("fd");
        let descriptors = fs::read_dir(folder).into_iter().flatten().flatten();
        for descriptor in descriptors.take(MAX_PROCESS_DESCRIPTORS) {
            let Some(left) = self.descriptors_left.checked_sub(1) else {
                return false;
            };
            self.descriptors_left = left;
            if fs::read_link(descriptor.path()).is_ok_and(|target| is_device(&target)) {
                return true;
            }
        }
        false
    }
}

/// Whether a path has the name of a device file that keeps GPU memory: `nvidiactl`, `nvidia-uvm`,
/// `nvidia0` and so on.
fn is_device(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    let rest = name.and_then(|name| name.strip_prefix("nvidia"));
    rest.is_some_and(|rest| {
        let is_number = !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit());
        is_number || ["ctl", "-uvm"].contains(&rest)
    })
}

fn read_stats(proc: &Path) -> BTreeMap<u32, Stat> {
    let stat = |pid| Some((pid, Stat::read(proc, pid)?));
    procfs::pids(proc)
        .take(MAX_PROCESSES)
        .filter_map(stat)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNKNOWN: Process = Process { pid: 1, start: 0 };

    /// Lets a process with an open device file fork once more, and execute a program without it.
    fn tree(proc: &Path) {
        // A path that cannot be followed: the agent reads the link alone.
        let device = "/nowhere/nvidia0";
        // pid, parent, flags (0x40: forked without an exec), open files
        let processes: [(u32, u32, u32, &[&str]); 7] = [
            (10, 1, 0, &[device]),
            (11, 10, 0x40, &["/dev/null", device]),
            (12, 11, 0x40, &[device]),
            (13, 10, 0, &[device]),
            (14, 13, 0x40, &[device]),
            (15, 10, 0x40, &["/dev/null"]),
            (16, 1, 0x40, &[device]),
        ];
        for (pid, parent, flags, files) in processes {
            let folder = proc.join(pid.to_string());
            fs::create_dir_all(folder.join("fd")).unwrap();
            let mut fields = vec!["S".to_owned(), parent.to_string()];
            fields.extend((5..=52).map(|field| match field {
                9 => flags.to_string(),
                22 => (u64::from(pid) * 10).to_string(),
                _ => "0".to_owned(),
            }));
            let stat = format!("{pid} (a) b) {}", fields.join(" "));
            fs::write(folder.join("stat"), stat).unwrap();
            for (number, file) in files.iter().enumerate() {
                std::os::unix::fs::symlink(file, folder.join("fd").join(number.to_string()))
                    .unwrap();
            }
        }
    }

    #[test]
    fn holders_are_the_forked_descendants_with_a_device() {
        let proc = tempfile::tempdir().unwrap();
        tree(proc.path());
        let find = |pid: u32, start: u64| {
            let mut tree = ProcessTree::read(proc.path());
            let holders = tree.take_device_holders(Process { pid, start });
            let mut pids: Vec<_> = holders.into_iter().map(|holder| holder.pid).collect();
            pids.sort_unstable();
            pids
        };
        assert_eq!(find(10, 100), [11, 12, 14]);
        assert_eq!(find(10, 99), [0; 0], "another process had this pid");
        let mut tree = ProcessTree::read(proc.path());
        assert!(tree.take_device_holders(UNKNOWN).is_empty());
    }

    #[test]
    fn descriptors_of_all_children_together_are_bounded() {
        let proc = tempfile::tempdir().unwrap();
        tree(proc.path());
        let mut tree = ProcessTree::read(proc.path());
        // 12 and 14 have one descriptor each, and 11 has its device behind another file.
        tree.descriptors_left = 2;
        let parent = Process {
            pid: 10,
            start: 100,
        };
        assert!(tree.take_device_holders(parent).len() <= 2);
        assert_eq!(tree.descriptors_left, 0);
    }

    #[test]
    fn device_is_known_by_its_name_alone() {
        for name in [
            "/dev/nvidia0",
            "/x/nvidia15",
            "/dev/nvidiactl",
            "/dev/nvidia-uvm",
        ] {
            assert!(is_device(Path::new(name)), "{name}");
        }
        for name in [
            "/dev/nvidia",
            "/dev/nvidia-modeset",
            "/tmp/nvidia-smi.log",
            "/dev/null",
            "",
        ] {
            assert!(!is_device(Path::new(name)), "{name}");
        }
    }
}
