//! Finds the forked children that share a process's GPU memory.
//!
//! The driver frees a process's memory with the last descriptor of its device files. A child that
//! was forked without an exec shares them, and keeps all memory of its parent after the parent's
//! end. A child that has executed a program has none of them, because they are closed by an exec.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use bursar_host::procfs::{self, Stat};
use bursar_sessions::Process;

/// The most processes of the node to read.
const MAX_PROCESSES: usize = 65_536;

/// The most descriptors of one process to read.
const MAX_DESCRIPTORS: usize = 65_536;

/// The most children to find.
const MAX_CHILDREN: usize = 512;

/// The descendants of `ancestor` that were forked without an exec and have a device file of the
/// driver open. `proc` is the host's `/proc`.
pub(super) fn find_device_holders(proc: &Path, ancestor: Process) -> Vec<Process> {
    let stats = read_stats(proc);
    let is_there = |stat: &Stat| stat.start_ticks == ancestor.start;
    if !stats.get(&ancestor.pid).is_some_and(is_there) {
        return Vec::new();
    }
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (pid, stat) in &stats {
        children.entry(stat.parent).or_default().push(*pid);
    }
    let mut pending = children.remove(&ancestor.pid).unwrap_or_default();
    let mut holders = Vec::new();
    while let Some(pid) = pending.pop() {
        // Each list is taken once, so that no circle of parents has no end.
        pending.extend(children.remove(&pid).unwrap_or_default());
        let Some(stat) = stats.get(&pid).filter(|stat| stat.forked) else {
            continue;
        };
        if holders.len() < MAX_CHILDREN && has_device_open(&proc.join(pid.to_string())) {
            holders.push(Process {
                pid,
                start: stat.start_ticks,
            });
        }
    }
    holders
}

fn read_stats(proc: &Path) -> BTreeMap<u32, Stat> {
    let entries = fs::read_dir(proc).into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let stat = |pid: u32| {
        let text = procfs::read_small(&proc.join(pid.to_string()).join("stat")).ok()?;
        Some((pid, Stat::parse(&text)?))
    };
    pids.take(MAX_PROCESSES).filter_map(stat).collect()
}

/// Whether a process has a device file of the driver open. A descriptor's link has the file's path
/// as its container sees it.
fn has_device_open(process: &Path) -> bool {
    let descriptors = fs::read_dir(process.join("fd")).into_iter().flatten();
    descriptors
        .flatten()
        .take(MAX_DESCRIPTORS)
        .any(|descriptor| {
            let target = fs::read_link(descriptor.path()).unwrap_or_default();
            let name = target.file_name().and_then(|name| name.to_str());
            let is_device = || {
                let metadata = fs::metadata(descriptor.path());
                metadata.is_ok_and(|metadata| metadata.file_type().is_char_device())
            };
            name.is_some_and(|name| name.starts_with("nvidia")) && is_device()
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNKNOWN: Process = Process { pid: 1, start: 0 };

    /// Lets a process with an open device file fork once more, and execute a program without it.
    fn tree(proc: &Path) {
        // A descriptor's link names the file, and leads to the device.
        let device = proc.join("nvidia0");
        std::os::unix::fs::symlink("/dev/null", &device).unwrap();
        let device = device.to_str().unwrap();
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
            let holders = find_device_holders(proc.path(), Process { pid, start });
            let mut pids: Vec<_> = holders.into_iter().map(|holder| holder.pid).collect();
            pids.sort_unstable();
            pids
        };
        assert_eq!(find(10, 100), [11, 12, 14]);
        assert_eq!(find(10, 99), [0; 0], "another process had this pid");
        assert!(find_device_holders(proc.path(), UNKNOWN).is_empty());
    }
}
