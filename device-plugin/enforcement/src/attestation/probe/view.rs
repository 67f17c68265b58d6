//! Reads a container's mounts by a process that shows them all.
//!
//! The kernel shows a process the mounts below its root alone, and none of a process whose first
//! thread has ended. So a container's first process can hide the container's mounts: it changes its
//! root, or ends its main thread. Then another thread or process of the same mount namespace shows
//! them. A container in which none does is not attested, and keeps its allocation.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bursar_host::procfs::{self, Stat};
use bursar_ledger::units::{AllocationId, PodUid};

use super::{AttestedContainer, FoundContainer, HostView, MOUNTS_BOUNDS, PodAttestor};
use crate::attestation::evaluate::EnforcementGap;
use crate::attestation::mounts::MountTable;

/// The most processes of a container that are asked for its mounts, the oldest first.
const MAX_READERS: usize = 16;

/// How long a container may show no mounts while its processes start or end.
const HIDDEN_AFTER: Duration = Duration::from_secs(5);

/// A container as one of its processes sees it.
pub(super) struct ContainerView {
    /// The folder of that process, or of its thread, in `/proc`.
    pub(super) folder: PathBuf,
    /// The container's mount namespace.
    pub(super) namespace: Option<PathBuf>,
    pub(super) mounts: MountTable,
    pub(super) are_complete: bool,
}

impl PodAttestor {
    /// The container as its first process sees it, or the next one of its mount namespace that has
    /// the namespace's root. None while its processes end, and where none has that root.
    pub(super) fn read_view(&self, processes: &[(u32, Stat)]) -> Option<ContainerView> {
        let folder = |(pid, stat): &(u32, Stat)| {
            procfs::living_folder(&self.paths.proc, *pid, stat).map(|folder| (*pid, folder))
        };
        let namespace = |folder: &Path| std::fs::read_link(folder.join("ns/mnt")).ok();
        let mut folders = processes.iter().filter_map(folder).take(MAX_READERS);
        let (pid, first) = folders.next()?;
        let of_first = namespace(&first);
        let others = folders.filter(|(_, folder)| namespace(folder) == of_first);
        let mut all = std::iter::once((pid, first)).chain(others);
        all.find_map(|(pid, folder)| {
            let (mounts, are_complete) = self.read_mounts(pid, &folder)?;
            Some(ContainerView {
                folder,
                namespace: of_first.clone(),
                mounts,
                are_complete,
            })
        })
    }

    /// The mounts of a process, and whether they are all. None for a process that is ending, or
    /// that has changed its root.
    fn read_mounts(&self, pid: u32, folder: &Path) -> Option<(MountTable, bool)> {
        let mut mounts = MountTable::default();
        let table = folder.join("mountinfo");
        let read = procfs::for_each_line(&table, MOUNTS_BOUNDS, |line| mounts.add_line(line));
        let are_complete = match read {
            Err(error) if error.kind() != ErrorKind::FileTooLarge => return None,
            // The runtime's mounts come first, so a truncated table still identifies the container.
            read => read.is_ok(),
        };
        mounts.resolve(Path::new("/"))?;
        // The link of a process has its root as the mount namespace names it. That of a process
        // with another mount as its root is no `/`, although it shows the mounts below.
        let thread = match folder.parent().and_then(Path::file_name) {
            Some(task) if task == "task" => folder.to_owned(),
            _ => folder.join("task").join(pid.to_string()),
        };
        let root = std::fs::read_link(thread.join("root"));
        let has_changed = root.is_ok_and(|root| root != Path::new("/"));
        (!has_changed).then_some((mounts, are_complete))
    }

    /// Attests a container whose mounts no process shows; none while its allocation is unknown.
    pub(super) fn attest_hidden(
        &mut self,
        container: &FoundContainer<'_>,
        host: &HostView,
        room: &mut u64,
    ) -> Option<AttestedContainer> {
        let FoundContainer {
            pod,
            folder,
            processes,
        } = *container;
        // A process that has just ended shows none either.
        let now = |(pid, _): &(u32, Stat)| Stat::read(&self.paths.proc, *pid);
        let stats: Vec<Stat> = processes.iter().filter_map(now).collect();
        if stats.iter().all(Stat::has_exited) {
            self.hidden_since.remove(folder);
            return None;
        }
        let is_ending = stats.first().is_none_or(Stat::is_ending);
        let since = self.hidden_since.entry(folder.to_owned());
        let is_late = host.now.duration_since(*since.or_insert(host.now)) >= HIDDEN_AFTER;
        let allocation = self.containers.get(folder)?.allocation?;
        let (processes, _) = self.probe_processes(processes, None, host, room);
        Some(AttestedContainer {
            processes,
            gap: (is_late || !is_ending).then(hidden_gap),
            ..AttestedContainer::new(allocation, pod, folder)
        })
    }

    /// The containers that show no mounts for long and whose allocation is unknown: each may have
    /// any of the pod's `allocations` of which no container was found.
    pub(super) fn hidden_containers(
        &self,
        pod: &PodUid,
        found: &[AttestedContainer],
        allocations: &BTreeSet<AllocationId>,
        now: Instant,
    ) -> Vec<AttestedContainer> {
        let attested: BTreeSet<_> = found.iter().map(|found| found.allocation).collect();
        let mut hidden = Vec::new();
        for (folder, since) in &self.hidden_since {
            let known = self.containers.get(folder);
            let is_known = known.is_some_and(|known| known.allocation.is_some());
            if is_known || now.duration_since(*since) < HIDDEN_AFTER {
                continue;
            }
            let may_have = |allocation: &AllocationId| AttestedContainer {
                gap: Some(hidden_gap()),
                ..AttestedContainer::new(*allocation, pod, folder)
            };
            hidden.extend(allocations.difference(&attested).map(may_have));
        }
        hidden
    }
}

fn hidden_gap() -> EnforcementGap {
    EnforcementGap::not_attested("its processes hide its mounts")
}
