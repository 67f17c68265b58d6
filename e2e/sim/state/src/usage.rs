//! Computes a unit's usage and its process list, as NVML reports them.

use crate::image::Charge;
use crate::object::References;
use crate::sim::Sim;
use crate::table::{RawImage, TableGuard};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;

/// A process in NVML's list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessUsage {
    /// The pid on the host; 0 if the process died before the host observed its pid.
    pub pid: u32,
    /// The context, the process's own allocations, and shared memory that it created or alone
    /// refers to (F5 in docs/internals/facts.md).
    pub bytes: u64,
    /// The SM utilization in percent; none without a sample.
    pub sm_percent: Option<u32>,
}

/// The stored utilization of a process without a sample.
pub(crate) const NO_SAMPLE: u32 = u32::MAX;

/// A unit's memory and processes, read after garbage collection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Usage {
    /// Bytes in use, including those of unlisted processes.
    pub used: u64,
    /// The unit's memory in bytes.
    pub total: u64,
    /// The listed processes. Outside the host's pid namespace NVML lists only those of the
    /// caller's.
    pub processes: Vec<ProcessUsage>,
}

impl Sim {
    /// Bytes of a unit in use; for a GPU in MIG mode, the sum over its instances.
    pub fn used(&self, unit: usize) -> u64 {
        let table = self.table.lock();
        table.collect(self);
        self.sum_used(&table, unit)
    }

    fn sum_used(&self, table: &TableGuard<'_>, unit: usize) -> u64 {
        let used = |unit: usize| {
            let charged = table.raw().units[unit].used.load(Relaxed);
            charged + table.managed_bytes(unit)
        };
        match self.units[unit].mig {
            Some(_) => used(unit),
            None => self
                .units
                .iter()
                .filter(|part| part.gpu == self.units[unit].gpu)
                .map(|part| used(part.index))
                .sum(),
        }
    }

    /// Reads a unit's usage and processes.
    pub fn usage(&self, unit: usize) -> Usage {
        let table = self.table.lock();
        table.collect(self);
        Usage {
            used: self.sum_used(&table, unit),
            total: self.units[unit].total,
            processes: self.processes(&table, unit),
        }
    }

    fn processes(&self, table: &TableGuard<'_>, unit: usize) -> Vec<ProcessUsage> {
        let on_host = table.raw().host_namespace.load(Relaxed) == self.namespace;
        let mut bytes: BTreeMap<usize, u64> = table
            .images()
            .filter(|(_, image)| on_host || image.namespace.load(Relaxed) == self.namespace)
            .filter(|(_, image)| image.charges[unit][Charge::Context as usize].load(Relaxed) != 0)
            .map(|(number, image)| {
                (
                    number,
                    image.charges[unit]
                        .iter()
                        .map(|part| part.load(Relaxed))
                        .sum(),
                )
            })
            .collect();
        for (_, object) in table
            .objects()
            .filter(|(_, object)| object.unit.load(Relaxed) as usize == unit)
        {
            let owner = References::of(self, object).charged_image();
            if let Some(listed) = owner.and_then(|owner| bytes.get_mut(&owner)) {
                *listed += object.size.load(Relaxed);
            }
        }
        let images = &table.raw().images;
        bytes
            .into_iter()
            .map(|(number, bytes)| ProcessUsage {
                pid: self.pid_of(&images[number], number),
                bytes,
                sm_percent: Some(images[number].sm_percent.load(Relaxed))
                    .filter(|percent| *percent != NO_SAMPLE),
            })
            .collect()
    }

    /// The image's pid in the caller's namespace.
    ///
    /// The pid is recorded, because the kernel no longer reports it once the process is dead.
    pub(crate) fn pid_of(&self, image: &RawImage, number: usize) -> u32 {
        if image.namespace.load(Relaxed) == self.namespace {
            return image.pid.load(Relaxed);
        }
        if let Ok(Some(pid)) = crate::lock::locking_pid(&self.pids_lock, number as u64) {
            image.host_pid.store(pid, Relaxed);
        }
        image.host_pid.load(Relaxed)
    }

    /// Injects a sticky error code into a process; false if the process has no image.
    pub fn inject_error(&self, pid: u32, code: i32) -> bool {
        self.with_image(pid, |image| image.injected.store(code, Relaxed))
    }

    /// Sets a process's SM utilization in percent, none for no sample; false if the process has no
    /// image.
    pub fn set_sm_percent(&self, pid: u32, percent: Option<u32>) -> bool {
        let percent = percent.unwrap_or(NO_SAMPLE);
        self.with_image(pid, |image| image.sm_percent.store(percent, Relaxed))
    }

    /// Sets the bytes of a process's managed memory that can be evicted from now on; false if the
    /// process has no image.
    pub fn set_host_room(&self, pid: u32, bytes: u64) -> bool {
        self.with_image(pid, |image| image.host_room.store(bytes, Relaxed))
    }

    fn with_image(&self, pid: u32, change: impl FnOnce(&RawImage)) -> bool {
        let table = self.table.lock();
        table.collect_images(self);
        let image = table
            .images()
            .find(|(number, image)| self.pid_of(image, *number) == pid);
        if let Some((_, image)) = image {
            change(image);
        }
        image.is_some()
    }
}
