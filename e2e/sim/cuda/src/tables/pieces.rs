//! Cuts allocations of at most 1 MiB from chunks of a context (F22 and F28 in
//! docs/internals/facts.md).

use crate::granularity::CHUNK;
use bursar_sim_state::object::Object;
use std::collections::BTreeMap;

/// A chunk that at least one piece lives in.
#[derive(Debug)]
struct Chunk {
    context: u64,
    /// The length of each piece, by its offset.
    pieces: BTreeMap<u64, u64>,
    /// No hole is larger.
    largest_hole: u64,
    /// The object that the chunk became when one of its pieces was exported.
    object: Option<Object>,
}

/// All chunks of a kind of memory of this image, by address.
#[derive(Debug, Default)]
pub(crate) struct Pieces(BTreeMap<u64, Chunk>);

impl Chunk {
    /// Finds the first hole for a piece, or the size of the largest hole.
    fn find_hole(&self, len: u64) -> Result<u64, u64> {
        let (mut end, mut largest) = (0, 0);
        for (start, piece) in self.pieces.iter().chain([(&CHUNK, &0)]) {
            if start - end >= len {
                return Ok(end);
            }
            largest = largest.max(start - end);
            end = start + piece;
        }
        Err(largest)
    }
}

impl Pieces {
    /// Places a piece in a hole of a context's chunks. Returns its address, and its chunk's object.
    pub(crate) fn place(&mut self, context: u64, len: u64) -> Option<(u64, Option<Object>)> {
        let of_context = self
            .0
            .iter_mut()
            .filter(|(_, chunk)| chunk.context == context);
        for (base, chunk) in of_context.filter(|(_, chunk)| chunk.largest_hole >= len) {
            match chunk.find_hole(len) {
                Ok(offset) => {
                    chunk.pieces.insert(offset, len);
                    return Some((base + offset, chunk.object));
                }
                Err(largest) => chunk.largest_hole = largest,
            }
        }
        None
    }

    /// Adds a chunk with a piece at its start.
    pub(crate) fn add(&mut self, base: u64, context: u64, len: u64) {
        let chunk = Chunk {
            context,
            pieces: BTreeMap::from([(0, len)]),
            largest_hole: CHUNK - len,
            object: None,
        };
        self.0.insert(base, chunk);
    }

    /// Removes a piece. Returns its chunk's address and object if it was the last one there.
    pub(crate) fn remove(&mut self, address: u64) -> Option<(u64, Option<Object>)> {
        let base = address - address % CHUNK;
        let chunk = self.0.get_mut(&base)?;
        chunk.pieces.remove(&(address - base));
        chunk.largest_hole = CHUNK;
        if chunk.pieces.is_empty() {
            return self.0.remove(&base).map(|chunk| (base, chunk.object));
        }
        None
    }

    /// Records that the chunk of a piece became an object.
    pub(crate) fn share(&mut self, base: u64, object: Object) {
        if let Some(chunk) = self.0.get_mut(&base) {
            chunk.object = Some(object);
        }
    }
}
