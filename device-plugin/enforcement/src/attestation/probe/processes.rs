//! Reads how each process of a container uses the driver.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bursar_host::procfs::{self, Stat};

use super::host_view::HostView;
use super::{AttestedProcess, MAPS_BOUNDS, MAX_AGE, MOUNTS_BOUNDS, PodAttestor};
use crate::attestation::evaluate::{self, DriverUse, EnforcementGap, InstalledShim};
use crate::attestation::maps::{self, DriverFiles};
use crate::attestation::mounts::MountTable;

/// How long a process may wait to be read before its container counts as not attested.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// The facts that the probe has read of a process.
#[derive(Debug)]
pub(super) struct ProcessRecord {
    stat: Stat,
    /// None where the memory map was too large.
    driver_use: Option<DriverUse>,
    read_at: Instant,
}

impl PodAttestor {
    /// Probes each process of a container, and returns the first gap. `first` is the mount
    /// namespace of the container's first process.
    pub(super) fn probe_processes(
        &mut self,
        processes: &[(u32, Stat)],
        first: (&Option<PathBuf>, &MountTable),
        host: &HostView,
        room: &mut u64,
    ) -> (BTreeMap<u32, AttestedProcess>, Option<EnforcementGap>) {
        let mut due = Vec::new();
        for &(pid, stat) in processes {
            if self.needs_reading((pid, stat), host.now) {
                self.waiting_since.entry(pid).or_insert(host.now);
                due.push((pid, stat));
            } else {
                self.waiting_since.remove(&pid);
            }
        }
        due.sort_by_key(|(pid, _)| self.waiting_since.get(pid).copied());
        for (pid, stat) in due {
            if *room == 0 {
                break;
            }
            self.waiting_since.remove(&pid);
            let (uses, read) = match self.probe_process(pid, &stat, first, host) {
                Ok(Some((uses, read))) => (Some(uses), read),
                Ok(None) => continue,
                Err(error) if error.kind() == ErrorKind::FileTooLarge => (None, MAPS_BOUNDS.bytes),
                Err(_) => {
                    self.processes.remove(&pid);
                    continue;
                }
            };
            *room = room.saturating_sub(read);
            let at = host.now;
            self.processes.insert(
                pid,
                ProcessRecord {
                    stat,
                    driver_use: uses,
                    read_at: at,
                },
            );
        }
        let (mut running, mut gap) = (BTreeMap::new(), None);
        for (pid, stat) in processes {
            let waiting_since = self.waiting_since.get(pid);
            if waiting_since.is_some_and(|since| host.now.duration_since(*since) >= MAX_WAIT) {
                let why = "its processes have more mapped than can be read";
                gap = gap.or_else(|| Some(EnforcementGap::not_attested(why)));
            }
            let record = self.processes.get(pid);
            let Some(record) = record.filter(|record| record.stat.start_ticks == stat.start_ticks)
            else {
                continue;
            };
            match &record.driver_use {
                Some(uses) => {
                    let process = AttestedProcess {
                        start: stat.start_ticks,
                        forked: stat.forked,
                        has_shim: uses.has_shim,
                        device_mappings: uses.device_mappings.clone(),
                        managed_mapped: uses.managed_mapped,
                    };
                    running.insert(*pid, process);
                    gap = gap.or_else(|| uses.gap.clone());
                }
                None => {
                    let why = "a process has more mapped than can be read";
                    gap = gap.or_else(|| Some(EnforcementGap::not_attested(why)));
                }
            }
        }
        (running, gap)
    }

    /// Whether a process has to be reread. A process whose map was too large is reread after
    /// [`MAX_AGE`] alone.
    fn needs_reading(&self, (pid, stat): (u32, Stat), now: Instant) -> bool {
        let fresh = |record: &ProcessRecord| {
            let same = match record.driver_use {
                // The kernel shows no size where the first thread has ended.
                Some(_) if stat.has_zombie_leader() => false,
                Some(_) => record.stat == stat,
                None => record.stat.start_ticks == stat.start_ticks,
            };
            same && now.duration_since(record.read_at) < MAX_AGE
        };
        !self.processes.get(&pid).is_some_and(fresh)
    }

    /// How a process uses the driver, and how many bytes were read; none where the shim is not
    /// installed.
    fn probe_process(
        &self,
        pid: u32,
        stat: &Stat,
        first: (&Option<PathBuf>, &MountTable),
        host: &HostView,
    ) -> io::Result<Option<(DriverUse, u64)>> {
        let folder = procfs::living_folder(&self.paths.proc, pid, stat);
        let folder = folder.ok_or(ErrorKind::NotFound)?;
        let mut files = DriverFiles::default();
        let (mut devices, mut managed) = (BTreeSet::new(), 0_u64);
        let read = procfs::for_each_line(&folder.join("maps"), MAPS_BOUNDS, |line| {
            files.add_line(line);
            maps::add_device_mapping(line, &mut devices);
            managed = managed.saturating_add(maps::managed_bytes(line).unwrap_or_default());
        })?;
        let files = files.get().ok_or(ErrorKind::FileTooLarge)?;
        let of_process = |mounts: &MountTable, installed: &InstalledShim| DriverUse {
            device_mappings: devices.clone(),
            managed_mapped: managed,
            ..evaluate::check_process(files, mounts, installed)
        };
        if files.is_empty() {
            return Ok(Some((DriverUse::default(), read)));
        }
        let Some(installed) = host.shim.as_ref() else {
            return Ok(None);
        };
        let (namespace, mounts) = first;
        if namespace.is_some() && std::fs::read_link(folder.join("ns/mnt")).ok() == *namespace {
            return Ok(Some((of_process(mounts, installed), read)));
        }
        let mut own = MountTable::default();
        let table = folder.join("mountinfo");
        let more = procfs::for_each_line(&table, MOUNTS_BOUNDS, |line| own.add_line(line))?;
        if own.resolve(Path::new("/")).is_none() {
            // Its root hides its mounts, so whether it has the shim is unknown.
            let hidden = DriverUse {
                has_shim: true,
                device_mappings: devices,
                managed_mapped: managed,
                gap: Some(EnforcementGap::not_attested("a process hides its mounts")),
            };
            return Ok(Some((hidden, read + more)));
        }
        Ok(Some((of_process(&own, installed), read + more)))
    }
}
