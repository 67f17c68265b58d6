//! Records which chunks of managed memory are on which unit, in the order of their population.
//!
//! The table that all processes share has only the sums. Other processes evict the oldest chunks of
//! this image; the image finds out by the number of evicted ones.

use std::collections::{BTreeMap, VecDeque};

use bursar_sim_state::Image;
use bursar_sim_state::managed::CHUNK;

/// A chunk: the base of its allocation, and its position there.
type Chunk = (u64, u64);

/// The most chunks that become resident at a time.
const STEP: usize = 64;

/// The chunks on one unit.
#[derive(Debug, Default)]
struct UnitChunks {
    /// The resident chunks, each with the number of its population.
    resident: BTreeMap<Chunk, u64>,
    /// All populations, the oldest first; those of freed chunks too.
    order: VecDeque<(Chunk, u64)>,
    populations: u64,
    /// The evicted chunks that are no longer in `resident`.
    evicted: u64,
}

/// The resident chunks of this image, by unit.
#[derive(Debug, Default)]
pub(crate) struct Chunks(BTreeMap<usize, UnitChunks>);

impl UnitChunks {
    /// Removes the chunks that were evicted meanwhile: the oldest ones.
    fn update(&mut self, evicted: u64) {
        while self.evicted < evicted {
            let Some((chunk, number)) = self.order.pop_front() else {
                self.evicted = evicted;
                return;
            };
            if self.resident.get(&chunk) == Some(&number) {
                self.resident.remove(&chunk);
                self.evicted += 1;
            }
        }
    }

    fn add(&mut self, chunk: Chunk) {
        self.populations += 1;
        self.resident.insert(chunk, self.populations);
        self.order.push_back((chunk, self.populations));
    }
}

impl Chunks {
    /// Moves the chunks of a range of an allocation to a unit, as many as find room.
    pub(crate) fn populate(&mut self, image: &Image, unit: usize, base: u64, from: u64, len: u64) {
        let wanted = (from - base) / CHUNK..=(from - base + len.max(1) - 1) / CHUNK;
        let wanted: Vec<Chunk> = wanted.map(|place| (base, place)).collect();
        for (other, chunks) in self.0.iter_mut().filter(|(other, _)| **other != unit) {
            chunks.update(image.evicted_chunks(*other));
            let moved = wanted
                .iter()
                .filter(|chunk| chunks.resident.remove(chunk).is_some());
            let moved = moved.count() as u64;
            image.free_managed(*other, moved);
        }
        let here = self.0.entry(unit).or_default();
        here.update(image.evicted_chunks(unit));
        let missing = wanted
            .into_iter()
            .filter(|chunk| !here.resident.contains_key(chunk));
        let missing: Vec<Chunk> = missing.collect();
        for step in missing.chunks(STEP) {
            let given = image.populate_managed(unit, step.len() as u64) as usize;
            step.iter().take(given).for_each(|chunk| here.add(*chunk));
            // Among the evicted chunks may be this image's own.
            here.update(image.evicted_chunks(unit));
            if given < step.len() {
                return;
            }
        }
    }

    /// Frees the chunks of an allocation.
    pub(crate) fn free(&mut self, image: &Image, base: u64) {
        for (unit, chunks) in &mut self.0 {
            chunks.update(image.evicted_chunks(*unit));
            let before = chunks.resident.len();
            chunks.resident.retain(|(of, _), _| *of != base);
            let freed = before - chunks.resident.len();
            image.free_managed(*unit, freed as u64);
        }
    }
}
