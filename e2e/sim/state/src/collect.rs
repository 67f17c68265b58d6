//! Garbage-collects images and objects to which no kernel lock refers any more.
//!
//! Every process that reads the table or needs memory runs the collection; there is no daemon.

use crate::sim::{Sim, SimError};
use crate::table::{RawObject, TableGuard};
use std::sync::atomic::Ordering::Relaxed;

impl TableGuard<'_> {
    /// Reserves `bytes` of a unit. Collects garbage, and then evicts managed memory, when they do
    /// not fit.
    ///
    /// The caller adds the bytes to an image or an object before it releases the table's lock. Then
    /// it waits for the eviction of the returned bytes.
    pub(crate) fn reserve(&self, sim: &Sim, unit: usize, bytes: u64) -> Result<u64, SimError> {
        let used = &self.raw().units[unit].used;
        let free = || self.free(sim, unit);
        if free() < bytes {
            self.collect(sim);
        }
        let mut evicted = 0;
        if free() < bytes && sim.config.uvm_oversubscription && !self.refuses_eviction(unit) {
            evicted = self.evict_managed(sim, unit, bytes - free());
        }
        if free() < bytes {
            return Err(SimError::OutOfMemory {
                unit,
                wanted: bytes,
                free: free(),
            });
        }
        used.fetch_add(bytes, Relaxed);
        Ok(evicted)
    }

    /// Removes unreferenced images and objects.
    pub(crate) fn collect(&self, sim: &Sim) {
        self.collect_images(sim);
        for (_, object) in self.objects() {
            self.collect_object(sim, object);
        }
    }

    /// Removes images whose lock the kernel has dropped.
    pub(crate) fn collect_images(&self, sim: &Sim) {
        let mut died = false;
        for (number, image) in self.images() {
            // If the kernel fails to answer, the image counts as alive, so that memory is never
            // freed early.
            let alive = crate::lock::find_locked_byte(&sim.images_lock, number as u64, 1);
            if matches!(alive, Ok(None)) {
                image.used.store(0, Relaxed);
                died = true;
            }
        }
        if died {
            self.recompute_usage();
            self.drop_unused_caches();
        }
    }

    /// Removes an object and its file if no open file description locks the file.
    pub(crate) fn collect_object(&self, sim: &Sim, object: &RawObject) {
        let path = sim.folder.object(object.id.load(Relaxed));
        let free = match crate::lock::open(&path) {
            Ok(file) => matches!(crate::lock::find_locked_byte(&file, 0, 0), Ok(None)),
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        };
        if !free {
            return;
        }
        let unit = object.unit.load(Relaxed) as usize;
        if !sim.is_scrub_enabled() {
            crate::residue::save_from_file(sim, unit, &path);
        }
        object.used.store(0, Relaxed);
        self.raw().units[unit]
            .used
            .fetch_sub(object.size.load(Relaxed), Relaxed);
        let _ = std::fs::remove_file(path);
    }
}
