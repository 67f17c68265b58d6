//! Registers a process image in a table slot that the kernel frees with the process.

use crate::managed::{CHUNK, Population};
use crate::rm::{RmClient, RmError};
use crate::sim::{Sim, SimError};
use crate::table::{MAX_IMAGES, RawImage, TableGuard};
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Purpose of an image's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Charge {
    /// Contexts, with their stacks and the local memory of kernels. NVML lists an image that has
    /// any.
    Context = 0,
    /// Memory overhead of a process without a context (F3 in docs/internals/facts.md).
    Client = 1,
    /// Linear memory and pools.
    Memory = 2,
}

/// The registration of this process image.
///
/// `execve` closes its descriptors and a forked child shares them. The registration ends with the
/// last copy of the descriptors (F1, F13 in docs/internals/facts.md).
#[derive(Debug)]
pub struct Image {
    sim: Arc<Sim>,
    number: usize,
    serial: u64,
    liveness_lock: File,
    _pid_lock: File,
}

impl Image {
    /// Registers this process in a free slot.
    ///
    /// # Errors
    /// The lock files cannot be opened, or all slots are taken.
    pub fn register(sim: &Arc<Sim>) -> Result<Image, SimError> {
        let at = |step, path| move |source| SimError::Io { step, path, source };
        let (lock_path, pid_path) = (sim.folder.images_lock(), sim.folder.pids_lock());
        let alive = crate::lock::open(&lock_path).map_err(at("open", lock_path.clone()))?;
        let signature = crate::lock::open(&pid_path).map_err(at("open", pid_path.clone()))?;
        let table = sim.table.lock();
        table.collect_images(sim);
        for (number, raw) in table.raw().images.iter().enumerate() {
            if raw.used.load(Relaxed) != 0 {
                continue;
            }
            let byte = number as u64;
            // A slot that is still locked belongs to a process that is exiting.
            if !crate::lock::try_lock_exclusive(&alive, byte)
                .map_err(at("lock", lock_path.clone()))?
            {
                continue;
            }
            crate::lock::lock_for_process(&signature, byte).map_err(at("lock", pid_path))?;
            let serial = table.raw().next_id.fetch_add(1, Relaxed) + 1;
            let high_water = &table.raw().images_high_water;
            high_water.fetch_max(number as u32 + 1, Relaxed);
            reset_row(raw, serial, sim);
            drop(table);
            return Ok(Image {
                sim: Arc::clone(sim),
                number,
                serial,
                liveness_lock: alive,
                _pid_lock: signature,
            });
        }
        Err(SimError::TableFull(MAX_IMAGES))
    }

    /// Keeps the registration until the control file of a client is closed, also by a duplicate in
    /// another process (measured on an H200 with driver 580).
    ///
    /// # Errors
    /// The kernel module refuses it.
    pub fn live_as_long_as(&self, client: &RmClient) -> Result<(), RmError> {
        client.hold(&self.liveness_lock)
    }

    /// The image's slot in the table.
    pub fn slot(&self) -> usize {
        self.number
    }

    /// A number that no other image has ever had.
    pub fn serial(&self) -> u64 {
        self.serial
    }

    fn raw(&self) -> &RawImage {
        &self.sim.table.raw().images[self.number]
    }

    /// The sticky error code that `simgpu poison` injected; 0 for none.
    pub fn injected(&self) -> i32 {
        self.raw().injected.load(Relaxed)
    }

    /// Charges bytes of a unit to this image, and collects garbage if they do not fit otherwise.
    ///
    /// # Errors
    /// [`SimError::OutOfMemory`] if they still do not fit.
    pub fn charge(&self, unit: usize, charge: Charge, bytes: u64) -> Result<(), SimError> {
        let table = self.sim.table.lock();
        self.check_registered(&table)?;
        let evicted = table.reserve(&self.sim, unit, bytes)?;
        self.raw().charges[unit][charge as usize].fetch_add(bytes, Relaxed);
        drop(table);
        self.sim.wait_for_eviction(evicted);
        Ok(())
    }

    /// Releases charged bytes.
    ///
    /// # Errors
    /// [`SimError::ImageCollected`] if the collector has already released them.
    pub fn release(&self, unit: usize, charge: Charge, bytes: u64) -> Result<(), SimError> {
        let table = self.sim.table.lock();
        self.check_registered(&table)?;
        let charged = &self.raw().charges[unit][charge as usize];
        let freed = bytes.min(charged.load(Relaxed));
        debug_assert_eq!(freed, bytes, "more is released than was charged");
        charged.fetch_sub(freed, Relaxed);
        table.raw().units[unit].used.fetch_sub(freed, Relaxed);
        if charge == Charge::Context {
            table.drop_unused_caches();
        }
        Ok(())
    }

    /// The bytes of a unit that are charged to this image for one purpose.
    pub fn charged(&self, unit: usize, charge: Charge) -> u64 {
        self.raw().charges[unit][charge as usize].load(Relaxed)
    }

    /// Moves chunks of this image's managed memory to a unit; those without room stay on the host.
    pub fn populate_managed(&self, unit: usize, chunks: u64) -> Population {
        let table = self.sim.table.lock();
        if self.check_registered(&table).is_err() {
            return Population::default();
        }
        let managed = &self.raw().managed[unit];
        let (population, evicted) = table.populate_managed(&self.sim, unit, managed, chunks);
        drop(table);
        self.sim.wait_for_eviction(evicted);
        population
    }

    /// Frees chunks of this image's managed memory on a unit.
    ///
    /// `choose` gets the number of chunks that were evicted so far, and returns the population of
    /// each chunk to be freed. None is evicted meanwhile.
    pub fn free_managed(&self, unit: usize, choose: impl FnOnce(u64) -> Vec<u64>) {
        let table = self.sim.table.lock();
        let freed = choose(self.evicted_chunks(unit));
        if self.check_registered(&table).is_ok() {
            self.raw().managed[unit].free(&freed);
        }
    }

    /// The number of this image's chunks that were evicted from a unit so far.
    pub fn evicted_chunks(&self, unit: usize) -> u64 {
        self.raw().managed[unit].evicted.load(Relaxed) / CHUNK
    }

    fn check_registered(&self, _table: &TableGuard<'_>) -> Result<(), SimError> {
        let is_registered =
            self.raw().used.load(Relaxed) != 0 && self.raw().serial.load(Relaxed) == self.serial;
        if is_registered {
            Ok(())
        } else {
            Err(SimError::ImageCollected)
        }
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let table = self.sim.table.lock();
        if self.check_registered(&table).is_ok() {
            self.raw().used.store(0, Relaxed);
            table.recompute_usage();
            table.drop_unused_caches();
        }
    }
}

fn reset_row(raw: &RawImage, serial: u64, sim: &Sim) {
    for part in raw.charges.iter().flatten() {
        part.store(0, Relaxed);
    }
    for managed in &raw.managed {
        managed.evicted.store(0, Relaxed);
        for run in &managed.runs {
            run.bytes.store(0, Relaxed);
        }
    }
    raw.pid.store(std::process::id(), Relaxed);
    raw.namespace.store(sim.namespace, Relaxed);
    raw.serial.store(serial, Relaxed);
    raw.host_pid.store(0, Relaxed);
    raw.injected.store(0, Relaxed);
    raw.host_room.store(sim.config.uvm_host_room, Relaxed);
    raw.sm_percent.store(0, Relaxed);
    raw.used.store(1, Relaxed);
}
