//! Collects what is dead, whenever somebody looks.

use crate::sim::{Sim, SimError};
use crate::table::{RawObject, TableGuard};
use std::sync::atomic::Ordering::Relaxed;

impl TableGuard<'_> {
    /// Takes `bytes` of a unit's room, collecting the dead when it does not fit otherwise. The caller
    /// adds them to an image or an object before it lets go of the books.
    pub(crate) fn reserve(&self, sim: &Sim, unit: usize, bytes: u64) -> Result<(), SimError> {
        let used = &self.raw().units[unit].used;
        let total = sim.units[unit].total;
        let free = || total.saturating_sub(used.load(Relaxed));
        if free() < bytes {
            self.collect(sim);
        }
        if free() < bytes {
            return Err(SimError::OutOfMemory {
                unit,
                wanted: bytes,
                free: free(),
            });
        }
        used.fetch_add(bytes, Relaxed);
        Ok(())
    }

    /// Forgets images and objects that nothing holds any more.
    pub(crate) fn collect(&self, sim: &Sim) {
        self.collect_images(sim);
        for (_, object) in self.objects() {
            self.collect_object(sim, object);
        }
    }

    /// Forgets images whose lock the kernel has dropped.
    pub(crate) fn collect_images(&self, sim: &Sim) {
        let mut died = false;
        for (number, image) in self.images() {
            // Where the kernel does not answer, the image is taken to live: memory is never free by mistake.
            let alive = crate::lock::find_locked_byte(&sim.images_lock, number as u64, 1);
            if matches!(alive, Ok(None)) {
                image.used.store(0, Relaxed);
                died = true;
            }
        }
        if died {
            self.recompute_usage();
        }
    }

    /// Forgets one object if nothing pins its file, and removes the file.
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
