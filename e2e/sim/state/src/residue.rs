//! Carries contents of freed memory over to the next allocation while scrubbing is off (F6 in
//! docs/internals/facts.md).
//!
//! A file records the first mebibyte of a unit's last freed allocation; the next allocation starts
//! with these bytes. A killed process's linear memory is not recorded. A shared allocation is
//! recorded however it ends.

use crate::sim::Sim;
use std::io::Read as _;
use std::path::Path;

const LIMIT: usize = 1 << 20;

/// Records the start of memory that is being freed.
pub fn save(sim: &Sim, unit: usize, memory: &[u8]) {
    // A failed write is ignored: the next allocation is then merely zeroed.
    let _ = std::fs::write(sim.folder.residue(unit), &memory[..memory.len().min(LIMIT)]);
}

/// Records the start of a shared allocation that is being freed.
pub(crate) fn save_from_file(sim: &Sim, unit: usize, path: &Path) {
    let mut bytes = Vec::new();
    let read =
        std::fs::File::open(path).and_then(|file| file.take(LIMIT as u64).read_to_end(&mut bytes));
    if read.is_ok() {
        save(sim, unit, &bytes);
    }
}

/// Reads at most `len` recorded bytes; none while scrubbing is on.
pub fn load(sim: &Sim, unit: usize, len: u64) -> Vec<u8> {
    if sim.is_scrub_enabled() {
        return Vec::new();
    }
    let mut bytes = std::fs::read(sim.folder.residue(unit)).unwrap_or_default();
    bytes.truncate(usize::try_from(len).unwrap_or(usize::MAX));
    bytes
}
