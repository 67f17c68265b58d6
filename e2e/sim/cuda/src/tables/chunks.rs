//! Records which chunks of managed and pageable memory are on which unit, from the oldest to the
//! newest.
//!
//! The table that all processes share has only the sums. Other processes evict the oldest chunks of
//! this image; the image finds out by the number of evicted ones.

use std::collections::BTreeMap;

use bursar_sim_state::Image;
use bursar_sim_state::managed::CHUNK;

/// A chunk: the base of its allocation, and its position there.
type Chunk = (u64, u64);

/// The base of all pageable memory, at which no allocation is.
const PAGEABLE: u64 = 0;

/// The most chunks that become resident at a time.
const STEP: usize = 64;

/// The chunks on one unit.
#[derive(Debug, Default)]
struct UnitChunks {
    /// The resident chunks, each with its place in `order`.
    places: BTreeMap<Chunk, u64>,
    /// The resident chunks, the oldest first, each with the unit's number of its population.
    order: BTreeMap<u64, (Chunk, u64)>,
    next_place: u64,
    /// The evicted chunks that have been removed.
    evicted: u64,
}

/// The resident chunks of this image, by unit.
#[derive(Debug, Default)]
pub(crate) struct Chunks(BTreeMap<usize, UnitChunks>);

impl UnitChunks {
    /// Removes the chunks that were evicted meanwhile: the oldest ones.
    fn update(&mut self, evicted: u64) {
        for _ in self.evicted..evicted {
            if let Some((_, (chunk, _))) = self.order.pop_first() {
                self.places.remove(&chunk);
            }
        }
        self.evicted = evicted;
    }

    fn add(&mut self, chunk: Chunk, population: u64) {
        self.places.insert(chunk, self.next_place);
        self.order.insert(self.next_place, (chunk, population));
        self.next_place += 1;
    }

    /// Removes chunks. Returns the populations of those that were resident.
    fn remove(&mut self, chunks: &[Chunk]) -> Vec<u64> {
        let places = chunks.iter().filter_map(|chunk| self.places.remove(chunk));
        let removed = places.filter_map(|place| self.order.remove(&place));
        removed.map(|(_, population)| population).collect()
    }
}

impl Chunks {
    /// Moves the chunks of a range of an allocation to a unit, as many as find room.
    pub(crate) fn populate(&mut self, image: &Image, unit: usize, base: u64, from: u64, len: u64) {
        let wanted = (from - base) / CHUNK..=(from - base + len.max(1) - 1) / CHUNK;
        let wanted: Vec<Chunk> = wanted.map(|place| (base, place)).collect();
        for (other, chunks) in self.0.iter_mut().filter(|(other, _)| **other != unit) {
            image.free_managed(*other, |evicted| {
                chunks.update(evicted);
                chunks.remove(&wanted)
            });
        }
        let here = self.0.entry(unit).or_default();
        here.update(image.evicted_chunks(unit));
        let missing = wanted
            .into_iter()
            .filter(|chunk| !here.places.contains_key(chunk));
        let missing: Vec<Chunk> = missing.collect();
        for step in missing.chunks(STEP) {
            let given = image.populate_managed(unit, step.len() as u64);
            let found_room = step.iter().take(given.chunks as usize);
            found_room.for_each(|chunk| here.add(*chunk, given.number));
            // Among the evicted chunks may be this image's own.
            here.update(image.evicted_chunks(unit));
            if given.chunks < step.len() as u64 {
                return;
            }
        }
    }

    /// Moves the chunks of a range of pageable memory to a unit, as many as find room.
    pub(crate) fn populate_pageable(&mut self, image: &Image, unit: usize, from: u64, len: u64) {
        self.populate(image, unit, PAGEABLE, from, len);
    }

    /// Frees the chunks of an allocation.
    pub(crate) fn free(&mut self, image: &Image, base: u64) {
        for (unit, chunks) in &mut self.0 {
            image.free_managed(*unit, |evicted| {
                chunks.update(evicted);
                let of_base = chunks.places.range((base, 0)..=(base, u64::MAX));
                let of_base: Vec<Chunk> = of_base.map(|(chunk, _)| *chunk).collect();
                chunks.remove(&of_base)
            });
        }
    }
}
