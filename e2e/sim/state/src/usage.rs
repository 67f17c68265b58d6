//! Who uses how much of a unit: NVML's view.

use crate::image::Charge;
use crate::object::References;
use crate::sim::Sim;
use crate::table::{RawImage, TableGuard};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;

/// One process on NVML's list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessUsage {
    /// As the host numbers it; 0 where nobody on the host saw it before it died.
    pub pid: u32,
    /// Its context, what it allocated itself, and shared memory that it made or alone still holds (F5).
    pub bytes: u64,
}

/// A unit's memory and processes, after the dead were collected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Usage {
    /// Bytes in use, whoever holds them.
    pub used: u64,
    /// Bytes of the unit.
    pub total: u64,
    /// In a pid namespace other than the host's only those of that one, as with the real NVML.
    pub processes: Vec<ProcessUsage>,
}

impl Sim {
    /// Bytes in use of a unit; of a GPU with MIG instances, their sum.
    pub fn used(&self, unit: usize) -> u64 {
        let books = self.table.lock();
        books.collect(self);
        self.sum_used(&books, unit)
    }

    fn sum_used(&self, books: &TableGuard<'_>, unit: usize) -> u64 {
        let used = |unit: usize| books.raw().units[unit].used.load(Relaxed);
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

    /// Everything about a unit.
    pub fn usage(&self, unit: usize) -> Usage {
        let books = self.table.lock();
        books.collect(self);
        Usage {
            used: self.sum_used(&books, unit),
            total: self.units[unit].total,
            processes: self.processes(&books, unit),
        }
    }

    fn processes(&self, books: &TableGuard<'_>, unit: usize) -> Vec<ProcessUsage> {
        let on_host = books.raw().host_namespace.load(Relaxed) == self.namespace;
        let mut bytes: BTreeMap<usize, u64> = books
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
        for (_, object) in books
            .objects()
            .filter(|(_, object)| object.unit.load(Relaxed) as usize == unit)
        {
            let owner = References::of(self, object).charged_image();
            if let Some(listed) = owner.and_then(|owner| bytes.get_mut(&owner)) {
                *listed += object.size.load(Relaxed);
            }
        }
        let images = &books.raw().images;
        bytes
            .into_iter()
            .map(|(number, bytes)| ProcessUsage {
                pid: self.pid_of(&images[number], number),
                bytes,
            })
            .collect()
    }

    /// The pid of an image as this namespace numbers it, remembered for when the process is dead.
    fn pid_of(&self, image: &RawImage, number: usize) -> u32 {
        if image.namespace.load(Relaxed) == self.namespace {
            return image.pid.load(Relaxed);
        }
        if let Ok(Some(pid)) = crate::lock::locking_pid(&self.pids_lock, number as u64) {
            image.host_pid.store(pid, Relaxed);
        }
        image.host_pid.load(Relaxed)
    }

    /// Injects a sticky code into a process; false when it has no image.
    pub fn inject_error(&self, pid: u32, code: i32) -> bool {
        let books = self.table.lock();
        books.collect_images(self);
        let image = books
            .images()
            .find(|(number, image)| self.pid_of(image, *number) == pid);
        if let Some((_, image)) = image {
            image.injected.store(code, Relaxed);
        }
        image.is_some()
    }
}
