//! A process image: its place in the books, which the kernel ends with it.

use crate::sim::{Sim, SimError};
use crate::table::{MAX_IMAGES, RawImage, TableGuard};
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// What an image's bytes are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Charge {
    /// Contexts, with their stacks and kernels' local memory. An image that has some is on NVML's list.
    Context = 0,
    /// What a process without a context takes (F3).
    Client = 1,
    /// Linear memory and pools.
    Memory = 2,
}

/// This process image, registered. Its descriptors are closed by `execve`, shared with a forked child,
/// and gone with the last of them (F1, F13).
#[derive(Debug)]
pub struct Image {
    sim: Arc<Sim>,
    number: usize,
    serial: u64,
    _liveness_lock: File,
    _pid_lock: File,
}

impl Image {
    /// Takes a place.
    ///
    /// # Errors
    /// The lock files cannot be opened, or all places are taken.
    pub fn register(sim: &Arc<Sim>) -> Result<Image, SimError> {
        let at = |step, path| move |source| SimError::Io { step, path, source };
        let (lock_path, pid_path) = (sim.folder.images_lock(), sim.folder.pids_lock());
        let alive = crate::lock::open(&lock_path).map_err(at("opening", lock_path.clone()))?;
        let signature = crate::lock::open(&pid_path).map_err(at("opening", pid_path.clone()))?;
        let books = sim.table.lock();
        books.collect_images(sim);
        for (number, raw) in books.raw().images.iter().enumerate() {
            if raw.used.load(Relaxed) != 0 {
                continue;
            }
            let byte = number as u64;
            // A place whose lock is still held belongs to somebody who is just dying.
            if !crate::lock::try_lock_exclusive(&alive, byte)
                .map_err(at("locking", lock_path.clone()))?
            {
                continue;
            }
            crate::lock::lock_for_process(&signature, byte).map_err(at("signing", pid_path))?;
            let serial = books.raw().next_id.fetch_add(1, Relaxed) + 1;
            reset_row(raw, serial, sim.namespace);
            drop(books);
            return Ok(Image {
                sim: Arc::clone(sim),
                number,
                serial,
                _liveness_lock: alive,
                _pid_lock: signature,
            });
        }
        Err(SimError::TableFull(MAX_IMAGES))
    }

    /// This image's place.
    pub fn slot(&self) -> usize {
        self.number
    }

    /// Which image this is, among all that ever were.
    pub fn serial(&self) -> u64 {
        self.serial
    }

    fn raw(&self) -> &RawImage {
        &self.sim.table.raw().images[self.number]
    }

    /// A sticky code injected from outside, 0 for none.
    pub fn injected(&self) -> i32 {
        self.raw().injected.load(Relaxed)
    }

    /// Takes bytes of a unit, collecting the dead where it must.
    ///
    /// # Errors
    /// [`SimError::OutOfMemory`] when they are not there.
    pub fn charge(&self, unit: usize, charge: Charge, bytes: u64) -> Result<(), SimError> {
        let books = self.sim.table.lock();
        self.check_registered(&books)?;
        books.reserve(&self.sim, unit, bytes)?;
        self.raw().charges[unit][charge as usize].fetch_add(bytes, Relaxed);
        Ok(())
    }

    /// Gives bytes back.
    ///
    /// # Errors
    /// [`SimError::ImageCollected`]: they were given back for it.
    pub fn release(&self, unit: usize, charge: Charge, bytes: u64) -> Result<(), SimError> {
        let books = self.sim.table.lock();
        self.check_registered(&books)?;
        let held = &self.raw().charges[unit][charge as usize];
        let freed = bytes.min(held.load(Relaxed));
        debug_assert_eq!(freed, bytes, "more is released than was charged");
        held.fetch_sub(freed, Relaxed);
        books.raw().units[unit].used.fetch_sub(freed, Relaxed);
        Ok(())
    }

    /// Bytes that this image has of a unit for one purpose.
    pub fn charged(&self, unit: usize, charge: Charge) -> u64 {
        self.raw().charges[unit][charge as usize].load(Relaxed)
    }

    fn check_registered(&self, _books: &TableGuard<'_>) -> Result<(), SimError> {
        let mine =
            self.raw().used.load(Relaxed) != 0 && self.raw().serial.load(Relaxed) == self.serial;
        if mine {
            Ok(())
        } else {
            Err(SimError::ImageCollected)
        }
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let books = self.sim.table.lock();
        if self.check_registered(&books).is_ok() {
            self.raw().used.store(0, Relaxed);
            books.recompute_usage();
        }
    }
}

fn reset_row(raw: &RawImage, serial: u64, namespace: u64) {
    for part in raw.charges.iter().flatten() {
        part.store(0, Relaxed);
    }
    raw.pid.store(std::process::id(), Relaxed);
    raw.namespace.store(namespace, Relaxed);
    raw.serial.store(serial, Relaxed);
    raw.host_pid.store(0, Relaxed);
    raw.injected.store(0, Relaxed);
    raw.used.store(1, Relaxed);
}
