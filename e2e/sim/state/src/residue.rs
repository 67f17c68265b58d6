//! What freed memory leaves behind while scrubbing is off (F6 in docs/facts.md).
//!
//! The first mebibyte of the last freed allocation of a unit is kept, and appears at the start of
//! the next one. Linear memory of a killed process leaves nothing: only what was freed by a call,
//! and shared allocations however they ended.

use crate::sim::Sim;
use std::io::Read as _;
use std::path::Path;

const LIMIT: usize = 1 << 20;

/// Keeps the start of memory that is being freed.
pub fn save(sim: &Sim, unit: usize, memory: &[u8]) {
    // As far as that is possible: without a residue, memory is merely cleaner than asked for.
    let _ = std::fs::write(sim.folder.residue(unit), &memory[..memory.len().min(LIMIT)]);
}

/// Keeps the start of a shared allocation that is being freed.
pub(crate) fn save_from_file(sim: &Sim, unit: usize, path: &Path) {
    let mut bytes = Vec::new();
    let read =
        std::fs::File::open(path).and_then(|file| file.take(LIMIT as u64).read_to_end(&mut bytes));
    if read.is_ok() {
        save(sim, unit, &bytes);
    }
}

/// Takes what was kept, at most `len` bytes of it; nothing while scrubbing is on.
pub fn load(sim: &Sim, unit: usize, len: u64) -> Vec<u8> {
    if sim.is_scrub_enabled() {
        return Vec::new();
    }
    let mut bytes = std::fs::read(sim.folder.residue(unit)).unwrap_or_default();
    bytes.truncate(usize::try_from(len).unwrap_or(usize::MAX));
    bytes
}
