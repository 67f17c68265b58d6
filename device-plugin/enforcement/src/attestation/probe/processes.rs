//! Reads how each process of a container uses the driver.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::{Duration, Instant};

use bursar_host::procfs::{self, Stat};

use super::host_view::HostView;
use super::view::ContainerView;
use super::{AttestedProcess, MAPS_BOUNDS, MAX_AGE, MOUNTS_BOUNDS, PodAttestor};
use crate::attestation::evaluate::{self, DriverUse, EnforcementGap};
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
    /// Probes each process of a container, and returns the first gap. Processes of the mount
    /// namespace of `view` have its mounts.
    pub(super) fn probe_processes(
        &mut self,
        processes: &[(u32, Stat)],
        view: Option<&ContainerView>,
        host: &HostView,
        room: &mut u64,
    ) -> (BTreeMap<u32, AttestedProcess>, Option<EnforcementGap>) {
        self.read_due(processes, view, host, room);
        self.judge(processes, host.now)
    }

    /// Reads the processes that are due while there is room, those that have waited longest first.
    fn read_due(
        &mut self,
        processes: &[(u32, Stat)],
        view: Option<&ContainerView>,
        host: &HostView,
        room: &mut u64,
    ) {
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
            let (driver_use, read) = match self.probe_process(pid, &stat, view, host) {
                Ok(Some((driver_use, read))) => (Some(driver_use), read),
                Ok(None) => continue,
                Err(error) if error.kind() == ErrorKind::FileTooLarge => (None, MAPS_BOUNDS.bytes),
                Err(_) => {
                    self.processes.remove(&pid);
                    continue;
                }
            };
            *room = room.saturating_sub(read);
            let record = ProcessRecord {
                stat,
                driver_use,
                read_at: host.now,
            };
            self.processes.insert(pid, record);
        }
    }

    /// The processes as they were last read, and the first gap of any.
    fn judge(
        &self,
        processes: &[(u32, Stat)],
        now: Instant,
    ) -> (BTreeMap<u32, AttestedProcess>, Option<EnforcementGap>) {
        let (mut running, mut gap) = (BTreeMap::new(), None);
        for (pid, stat) in processes {
            let waiting_since = self.waiting_since.get(pid);
            if waiting_since.is_some_and(|since| now.duration_since(*since) >= MAX_WAIT) {
                let why = "its processes have more mapped than can be read";
                gap.get_or_insert_with(|| EnforcementGap::not_attested(why));
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
                    gap.get_or_insert_with(|| EnforcementGap::not_attested(why));
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
        view: Option<&ContainerView>,
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
        if files.is_empty() {
            return Ok(Some((DriverUse::default(), read)));
        }
        let Some(installed) = host.shim.as_ref() else {
            return Ok(None);
        };
        let namespace = std::fs::read_link(folder.join("ns/mnt")).ok();
        let is_same = |view: &&ContainerView| namespace.is_some() && view.namespace == namespace;
        let (checked, read) = match view.filter(is_same) {
            Some(view) => (
                evaluate::check_process(files, &view.mounts, installed),
                read,
            ),
            None => {
                let mut own = MountTable::default();
                let table = folder.join("mountinfo");
                let more = procfs::for_each_line(&table, MOUNTS_BOUNDS, |line| own.add_line(line))?;
                let checked = match own.resolve(Path::new("/")) {
                    Some(_) => evaluate::check_process(files, &own, installed),
                    // Its root hides its mounts, so whether it has the shim is unknown.
                    None => DriverUse {
                        has_shim: true,
                        gap: Some(EnforcementGap::not_attested("a process hides its mounts")),
                        ..DriverUse::default()
                    },
                };
                (checked, read + more)
            }
        };
        let driver_use = DriverUse {
            device_mappings: devices,
            managed_mapped: managed,
            ..checked
        };
        Ok(Some((driver_use, read)))
    }
}
