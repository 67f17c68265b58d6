//! Reads `/proc` of the containers that have GPUs, and rereads only what may have changed.
//!
//! The agent follows no path in a container's own file systems, since a tenant may make them hang.
//! It reads one folder there, `/dev`, and only if the mount table shows a file system of the
//! kernel.
//!
//! The agent rereads a process's memory map when the process's size, image or start time has
//! changed, and after [`MAX_AGE`] in any case. It rereads the mounts each time, since nothing
//! indicates a change.
//!
//! Tenants control the size of these files, so each read has a bound. A container whose files are
//! too large counts as not attested. One probe of a pod reads [`MAPS_BYTES_PER_PROBE`] of memory
//! maps, and the next one starts with the processes that have waited longest.

mod attested;
mod grant;
mod host_view;
mod processes;
mod rights;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bursar_config::{Config, DriverConfig, PathsConfig};
use bursar_host::pod_cgroups::{MAX_PROCESSES, container_cgroups, list_processes};
use bursar_host::procfs::{self, Bounds, Stat};
use bursar_ledger::units::{AllocationId, PodUid};
use bursar_node::cdi::CdiDir;

use super::evaluate::{self, EnforcementGap};
use grant::ContainerGrant;
use processes::ProcessRecord;
use rights::{DeviceCheck, RightsRecord};

pub use attested::AttestedProcess;
pub(crate) use attested::{AttestationTarget, AttestedContainer};
pub use host_view::HostView;

/// The longest time before an unchanged process is read again.
const MAX_AGE: Duration = Duration::from_secs(10);

/// The largest memory map that is read: four times the mappings of `vm.max_map_count`.
const MAPS_BOUNDS: Bounds = Bounds {
    bytes: 16 << 20,
    lines: 1 << 18,
};
/// The largest mount table of a container that is read.
const MOUNTS_BOUNDS: Bounds = Bounds {
    bytes: 4 << 20,
    lines: 4_096,
};
/// The bytes of memory maps that one probe of a pod reads; the last process may exceed them.
const MAPS_BYTES_PER_PROBE: u64 = MAPS_BOUNDS.bytes;

/// Attests the containers of a pod, and caches what it has read.
#[derive(Debug)]
pub(crate) struct PodAttestor {
    paths: PathsConfig,
    driver: DriverConfig,
    cdi: CdiDir,
    /// The mounts and nodes in each allocation's CDI file.
    grants: BTreeMap<AllocationId, ContainerGrant>,
    /// The containers by their cgroup.
    containers: BTreeMap<PathBuf, ContainerRecord>,
    processes: BTreeMap<u32, ProcessRecord>,
    /// The processes that have changed and were not reread, each with the time of the change.
    waiting_since: BTreeMap<u32, Instant>,
    /// The containers whose mounts no process shows, each with the time since then.
    hidden_since: BTreeMap<PathBuf, Instant>,
}

/// A container, identified by its first process.
#[derive(Debug)]
struct ContainerRecord {
    first_process: (u32, Stat),
    /// None for a container without a GPU.
    allocation: Option<AllocationId>,
    /// The rights of its first process.
    rights: RightsRecord,
    /// Whether the record needs no second read: its runtime has set the container up.
    is_final: bool,
    read_at: Instant,
}

/// A container's cgroup in its pod, with the processes in it, the oldest first.
struct FoundContainer<'a> {
    pod: &'a PodUid,
    folder: &'a Path,
    processes: &'a [(u32, Stat)],
}

/// The findings of an earlier probe about a container.
struct KnownContainer {
    allocation: Option<AllocationId>,
    /// The rights, unless they may have changed since.
    rights: Option<RightsRecord>,
    device_check: Option<DeviceCheck>,
}

impl PodAttestor {
    /// An attestor with an empty cache.
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            paths: config.paths.clone(),
            driver: config.driver.clone(),
            cdi: CdiDir::new(config.paths.cdi_dir.clone()),
            grants: BTreeMap::new(),
            containers: BTreeMap::new(),
            processes: BTreeMap::new(),
            waiting_since: BTreeMap::new(),
            hidden_since: BTreeMap::new(),
        }
    }

    /// Attests the running containers with GPUs in the pod.
    pub(crate) fn probe(
        &mut self,
        AttestationTarget {
            pod,
            cgroup,
            allocations,
        }: &AttestationTarget,
        host: &HostView,
    ) -> Vec<AttestedContainer> {
        let (mut found, mut folders, mut alive) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
        let mut room = MAPS_BYTES_PER_PROBE;
        for folder in container_cgroups(cgroup) {
            let (processes, all) = self.processes_of(&folder);
            alive.extend(processes.iter().map(|(pid, _)| *pid));
            folders.insert(folder.clone());
            let container = FoundContainer {
                pod,
                folder: &folder,
                processes: &processes,
            };
            let mut attested = self.attest_container(&container, host, &mut room);
            if let Some(attested) = attested.as_mut().filter(|_| !all) {
                let why = format!("it has more than {MAX_PROCESSES} processes");
                let gap = || EnforcementGap::not_attested(why);
                attested.gap.get_or_insert_with(gap);
            }
            found.extend(attested);
        }
        found.extend(self.hidden_containers(pod, &found, allocations, host.now));
        self.containers.retain(|folder, _| folders.contains(folder));
        self.hidden_since
            .retain(|folder, _| folders.contains(folder));
        self.processes.retain(|pid, _| alive.contains(pid));
        self.waiting_since.retain(|pid, _| alive.contains(pid));
        let attested: BTreeSet<_> = found.iter().map(|attested| attested.allocation).collect();
        self.grants
            .retain(|allocation, _| attested.contains(allocation));
        found
    }

    /// The processes of a cgroup, the oldest first, and whether the list is complete.
    fn processes_of(&self, folder: &Path) -> (Vec<(u32, Stat)>, bool) {
        let (pids, all) = list_processes(folder);
        let stat = |pid| Some((pid, Stat::read(&self.paths.proc, pid)?));
        let mut stats: Vec<_> = pids.into_iter().filter_map(stat).collect();
        stats.sort_unstable_by_key(|(pid, stat)| (stat.start_ticks, *pid));
        (stats, all)
    }

    fn attest_container(
        &mut self,
        container: &FoundContainer<'_>,
        host: &HostView,
        room: &mut u64,
    ) -> Option<AttestedContainer> {
        let (folder, processes) = (container.folder, container.processes);
        let &(first, stat) = processes.first()?;
        let KnownContainer {
            allocation,
            rights,
            device_check,
        } = self.known_container(folder, (first, stat), host.now);
        if rights.is_some() && allocation.is_none() {
            return None;
        }
        let Some(view) = self.read_view(processes) else {
            return self.attest_hidden(container, host, room);
        };
        self.hidden_since.remove(folder);
        let mounts = &view.mounts;
        // A container that hides the identifying mount later keeps its allocation.
        let allocation = allocation.or_else(|| self.allocation_of(mounts, &host.own_mounts));
        let grant = allocation.and_then(|allocation| self.grant_of(allocation, &host.own_mounts));
        let is_set_up =
            evaluate::is_set_up(stat.forked, host.uptime.saturating_sub(stat.start_time()));
        let checked_grant = grant.as_ref().filter(|_| is_set_up);
        let rights = match rights {
            Some(rights) => rights,
            None => {
                let check = |grant| {
                    self.check_rights(folder, (first, stat), &view, grant, device_check, host)
                };
                let rights = checked_grant.map(check).unwrap_or_default();
                let container = ContainerRecord {
                    first_process: (first, stat),
                    allocation,
                    rights: rights.clone(),
                    is_final: is_set_up,
                    read_at: host.now,
                };
                self.containers.insert(folder.to_owned(), container);
                rights
            }
        };
        let of_mounts = match view.are_complete {
            true => checked_grant.and_then(|grant| evaluate::check_mounts(&grant.mounts, mounts)),
            false => checked_grant
                .map(|_| EnforcementGap::not_attested("it has too many mounts to be read")),
        };
        let allocation = grant.and(allocation)?;
        let (running, uses) = self.probe_processes(processes, Some(&view), host, room);
        let RightsRecord { gap, minor_gap, .. } = rights;
        Some(AttestedContainer {
            gap: gap.or(of_mounts).or(uses).or(minor_gap),
            processes: running,
            ..AttestedContainer::new(allocation, container.pod, folder)
        })
    }

    /// The findings of an earlier probe about the container with this first process.
    fn known_container(
        &self,
        folder: &Path,
        (first, stat): (u32, Stat),
        now: Instant,
    ) -> KnownContainer {
        let known = self.containers.get(folder);
        let known = known.filter(|known| {
            (known.first_process.0, known.first_process.1.start_ticks) == (first, stat.start_ticks)
        });
        let unchanged = known.filter(|known| {
            known.is_final
                && known.first_process.1.stack == stat.stack
                && now.duration_since(known.read_at) < MAX_AGE
        });
        KnownContainer {
            allocation: known.and_then(|known| known.allocation),
            rights: unchanged.map(|known| known.rights.clone()),
            device_check: known.and_then(|known| known.rights.device_check.clone()),
        }
    }

    fn proc_path(&self, pid: impl std::fmt::Display, file: &str) -> PathBuf {
        self.paths.proc.join(pid.to_string()).join(file)
    }

    fn read_text(&self, pid: impl std::fmt::Display, file: &str) -> io::Result<String> {
        procfs::read_small(&self.proc_path(pid, file))
    }
}

fn file_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests;
