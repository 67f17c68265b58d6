//! Finds processes of pods that have the driver's device nodes mapped, outside of attested
//! containers.
//!
//! While the driver lists memory of an ended process, another process holds this memory, because it
//! has the ended process's files open. A forked child has these files and the mappings. The audit
//! searches for such processes only while the driver lists memory of an ended process. Open files
//! alone make no suspect, because NVML opens the same files as CUDA and maps none of them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bursar_host::procfs::{self, Bounds, Stat};
use bursar_ledger::units::AllocationId;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, timeout};

use super::collect::{find_live, is_agent_child, is_in_pod, is_running};
use super::compare::{GpuSample, LiveProcess};
use crate::attestation::{AttestedProcess, maps};

/// The most processes of the node, and the most bytes of their memory maps, that the agent reads. A
/// process that the agent has not read is no suspect, and its memory stays withheld.
const MAX_PROCESSES: usize = 65_536;
const MAX_BYTES: u64 = 64 << 20;

/// The largest memory map that the agent reads.
const MAPS_BOUNDS: Bounds = Bounds {
    bytes: 4 << 20,
    lines: 1 << 16,
};

/// For how long the audit uses a result, because a tenant can make each audit search.
const MAX_AGE: Duration = Duration::from_secs(3);

/// How long an audit waits for the search. A later audit takes the result of a longer search.
const TIMEOUT: Duration = Duration::from_millis(200);

/// The last search for processes.
#[derive(Debug, Default)]
pub(super) struct DeviceUsers {
    found: Option<(Instant, BTreeMap<u32, LiveProcess>)>,
    search: Option<JoinHandle<BTreeMap<u32, LiveProcess>>>,
}

impl DeviceUsers {
    /// The processes of pods but those in `attested`, if memory of a long-gone process is in
    /// `samples`.
    pub(super) async fn find(
        &mut self,
        proc: &Path,
        samples: &[GpuSample],
        attested: &BTreeMap<u32, (AllocationId, AttestedProcess)>,
    ) -> BTreeMap<u32, LiveProcess> {
        let mut listed = samples.iter().flat_map(|sample| &sample.processes);
        if !listed.any(|listed| listed.is_gone) {
            self.found = None;
            return BTreeMap::new();
        }
        let is_fresh = |(at, _): &(Instant, _)| at.elapsed() < MAX_AGE;
        if !self.found.as_ref().is_some_and(is_fresh) {
            let mut search = self.search.take().unwrap_or_else(|| {
                let proc: PathBuf = proc.to_owned();
                let attested = attested.keys().copied().collect();
                spawn_blocking(move || search_processes(&proc, &attested))
            });
            match timeout(TIMEOUT, &mut search).await {
                Ok(found) => self.found = found.ok().map(|found| (Instant::now(), found)),
                Err(_) => self.search = Some(search),
            }
        }
        let found = self.found.iter().flat_map(|(_, found)| found.clone());
        found
            .filter(|(pid, user)| is_running(proc, *pid, user.start))
            .collect()
    }
}

/// The runtimes of the agent, which are its children, are no suspects.
fn search_processes(proc: &Path, attested: &BTreeSet<u32>) -> BTreeMap<u32, LiveProcess> {
    let others = procfs::pids(proc).filter(|pid| !attested.contains(pid));
    let mut left = MAX_BYTES;
    let user = |pid| {
        let live = find_live(proc, pid, u64::MAX)?;
        let is_meant = is_in_pod(&live)
            && !is_agent_child(proc, pid)
            && has_device_mapped(proc, pid, &mut left);
        is_meant.then_some((pid, live))
    };
    others.take(MAX_PROCESSES).filter_map(user).collect()
}

fn has_device_mapped(proc: &Path, pid: u32, left: &mut u64) -> bool {
    let stat = Stat::read(proc, pid).filter(|_| *left > 0);
    let Some(folder) = stat.and_then(|stat| procfs::living_folder(proc, pid, &stat)) else {
        return false;
    };
    let mut devices = BTreeSet::new();
    let read = procfs::for_each_line(&folder.join("maps"), MAPS_BOUNDS, |line| {
        maps::add_device_mapping(line, &mut devices);
    });
    *left = left.saturating_sub(read.unwrap_or(MAPS_BOUNDS.bytes));
    !devices.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn child_of_the_agent_is_no_suspect() {
        let proc = tempfile::tempdir().unwrap();
        for (pid, parent) in [(10, 1), (11, std::process::id())] {
            let folder = proc.path().join(pid.to_string());
            std::fs::create_dir(&folder).unwrap();
            let rest = "1 ".repeat(40);
            let cgroup = "0::/kubepods/pod6e0f1c52-7f6e-4a35-9d0f-0a4f3c1b2d3e/0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
            let files = [
                ("stat", format!("{pid} (p) S {parent} {rest}")),
                ("cgroup", format!("{cgroup}\n")),
                (
                    "maps",
                    "7000-8000 rw-s 00000000 00:06 10 /dev/nvidia0\n".to_owned(),
                ),
            ];
            for (name, text) in files {
                std::fs::write(folder.join(name), text).unwrap();
            }
        }
        let found = search_processes(proc.path(), &BTreeSet::new());
        assert_eq!(found.into_keys().collect::<Vec<_>>(), [10]);
    }
}
