//! Counts the pieces of each chunk, without a lock.
//!
//! A chunk's pieces, its account and whether it is exported are one word, which changes by one
//! compare-and-swap. So of two threads one charges a new chunk, and one discharges an ended chunk.
//! The words lie in parts, by the chunk's number.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use bursar_protocol::units::Units;

use crate::alloc_table::{Charge, ShareState};
use crate::chunks::CHUNK;

/// Chunks of a part: 128 GiB of addresses. The kernel gives a page of it at its first use.
const PART: usize = 1 << 16;

/// The parts of all addresses of a device, 49 bits.
const PARTS: usize = 1 << 12;

/// The bits of a word that count its pieces. The account lies above them, and then the share state.
const PIECES: u64 = u32::MAX as u64;
const ACCOUNT_SHIFT: u32 = 32;
const SHARE_SHIFT: u32 = 40;

/// Which charge a chunk has after a piece was counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Added {
    /// The one that it had before.
    Before,
    /// The caller's.
    Charged,
    /// None, because the caller had none. The piece was not counted.
    Uncharged,
}

/// A chunk's word. Zero: the chunk has no piece.
#[derive(Debug, Default)]
pub(crate) struct Chunk(AtomicU64);

impl Chunk {
    /// Counts a piece. A chunk without one is charged to `account`.
    pub(crate) fn add(&self, account: Option<u8>) -> Added {
        let first = account.map(|account| u64::from(account) << ACCOUNT_SHIFT | 1);
        let add = |word| if word == 0 { first } else { Some(word + 1) };
        match self.update(add) {
            Ok(0) => Added::Charged,
            Ok(_) => Added::Before,
            Err(_) => Added::Uncharged,
        }
    }

    /// Takes a piece away. Returns the charge of the chunk if that was the last piece.
    pub(crate) fn remove(&self) -> Option<Charge> {
        let remove = |word| match word & PIECES {
            0 => None,
            1 => Some(0),
            _ => Some(word - 1),
        };
        let before = self.update(remove).ok()?;
        (before & PIECES == 1).then(|| charge_of(before))
    }

    /// Returns the charge of a chunk that has a piece.
    pub(crate) fn charge(&self) -> Option<Charge> {
        let word = self.0.load(Ordering::Acquire);
        (word != 0).then(|| charge_of(word))
    }

    /// Sets how other processes can hold a chunk that has a piece.
    pub(crate) fn set_share(&self, share: ShareState) {
        let set = |word| {
            let other = word & ((1 << SHARE_SHIFT) - 1);
            (word != 0).then_some((share as u64) << SHARE_SHIFT | other)
        };
        let _ = self.update(set);
    }

    fn update(&self, change: impl FnMut(u64) -> Option<u64>) -> Result<u64, u64> {
        let (set, fetch) = (Ordering::AcqRel, Ordering::Acquire);
        self.0.fetch_update(set, fetch, change)
    }
}

fn charge_of(word: u64) -> Charge {
    Charge {
        account: (word >> ACCOUNT_SHIFT) as u8,
        units: Units::within(CHUNK).0,
        context: 0,
        share: ShareState::from_bits(word >> SHARE_SHIFT),
    }
}

/// The chunks of all addresses.
pub(crate) struct ChunkTable(Box<[OnceLock<Box<[Chunk]>>]>);

impl Default for ChunkTable {
    fn default() -> ChunkTable {
        ChunkTable(std::iter::repeat_with(OnceLock::new).take(PARTS).collect())
    }
}

impl ChunkTable {
    /// The chunks that the table has a word for.
    pub(crate) const LEN: u64 = (PART * PARTS) as u64;

    /// Returns a chunk by number.
    pub(crate) fn chunk(&self, number: u32) -> &Chunk {
        let (part, place) = (number as usize / PART, number as usize % PART);
        // SAFETY: zero is a value of an atomic number, which a chunk is.
        let zeroed = || unsafe { Box::new_zeroed_slice(PART).assume_init() };
        &self.0[part].get_or_init(zeroed)[place]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Clone for Chunk {
        fn clone(&self) -> Chunk {
            Chunk(AtomicU64::new(self.0.load(Ordering::Relaxed)))
        }
    }

    #[test]
    fn chunk_keeps_its_charge_until_its_last_piece() {
        let table = ChunkTable::default();
        let last = u32::try_from(ChunkTable::LEN - 1).unwrap();
        for number in [0, 1, last] {
            let chunk = table.chunk(number);
            assert_eq!(chunk.add(None), Added::Uncharged);
            assert_eq!(chunk.add(Some(u8::MAX)), Added::Charged);
            assert_eq!(chunk.add(Some(3)), Added::Before);
            chunk.set_share(ShareState::Descriptor);
            let charge = chunk.charge().unwrap();
            assert_eq!(
                (charge.account, charge.share),
                (u8::MAX, ShareState::Descriptor)
            );
            assert_eq!(charge.units, Units::holding(CHUNK).unwrap().0);
            assert_eq!(chunk.remove(), None);
            assert_eq!(chunk.remove(), Some(charge));
            chunk.set_share(ShareState::Descriptor);
            assert_eq!((chunk.charge(), chunk.remove()), (None, None));
        }
    }

    /// The next step of a thread, which allocates a piece, and may free it.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum Step {
        /// Charges a chunk.
        Charge,
        /// The driver returns a piece.
        Allocate,
        /// Looks for the chunk, and keeps or gives back the charge.
        Count,
        /// The driver frees the piece.
        Free,
        Release,
        End,
    }

    /// Chunks of two pieces, the driver's and the shim's state, and where each thread is.
    #[derive(Clone)]
    struct Model {
        /// The pieces that the driver has in each of its chunks.
        driver: Vec<u64>,
        chunks: Vec<Chunk>,
        charged: u64,
        /// Each thread's next step, and the chunk of its piece.
        threads: Vec<(Step, usize)>,
        /// The threads that free their piece.
        frees: Vec<bool>,
    }

    impl Model {
        fn new(frees: &[bool]) -> Model {
            Model {
                driver: vec![0; 4],
                chunks: std::iter::repeat_with(Chunk::default).take(4).collect(),
                charged: 0,
                threads: vec![(Step::Charge, 0); frees.len()],
                frees: frees.to_vec(),
            }
        }

        fn taken(&self) -> u64 {
            self.driver.iter().filter(|pieces| **pieces > 0).count() as u64
        }

        /// Makes a thread's next step.
        fn step(&mut self, place: usize) {
            let (step, chunk) = &mut self.threads[place];
            *step = match step {
                Step::Charge => {
                    self.charged += 1;
                    Step::Allocate
                }
                Step::Allocate => {
                    // Holes fill first, and a chunk that the driver gave back is used again.
                    let hole = self.driver.iter().position(|pieces| *pieces == 1);
                    let empty = self.driver.iter().position(|pieces| *pieces == 0);
                    let found = hole.or(empty).unwrap();
                    self.driver[found] += 1;
                    *chunk = found;
                    Step::Count
                }
                Step::Count => {
                    let added = self.chunks[*chunk].add(Some(0));
                    assert_ne!(added, Added::Uncharged);
                    self.charged -= u64::from(added == Added::Before);
                    match self.frees[place] {
                        true => Step::Free,
                        false => Step::End,
                    }
                }
                Step::Free => {
                    self.driver[*chunk] -= 1;
                    Step::Release
                }
                Step::Release => {
                    self.charged -= u64::from(self.chunks[*chunk].remove().is_some());
                    Step::End
                }
                Step::End => unreachable!(),
            };
        }

        /// Runs every order of the remaining steps. Returns how many ends there were.
        fn run_all(self) -> u64 {
            assert!(self.charged >= self.taken(), "{:?}", self.threads);
            let left = (0..self.threads.len()).filter(|place| self.threads[*place].0 != Step::End);
            let left: Vec<usize> = left.collect();
            if left.is_empty() {
                assert_eq!(self.charged, self.taken());
                let charged = self.chunks.iter().filter(|chunk| chunk.charge().is_some());
                assert_eq!(self.charged, charged.count() as u64);
                return 1;
            }
            let next = left.into_iter().map(|place| {
                let mut next = self.clone();
                next.step(place);
                next.run_all()
            });
            next.sum()
        }
    }

    #[test]
    fn charge_covers_the_driver_in_each_interleaving() {
        // Two calls in a new chunk; a free before the other call has looked; a last free against
        // the use of its address again.
        for frees in [&[false, false][..], &[true, false], &[true, true, false]] {
            let ends = Model::new(frees).run_all();
            assert!(ends > 1, "{frees:?}: {ends}");
        }
    }
}
