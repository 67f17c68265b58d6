//! Charges pieces of memory by the chunk of the driver that they lie in.
//!
//! The driver cuts requests of at most 1 MiB from chunks of 2 MiB at multiples of their size. It
//! keeps a chunk while one of its pieces lives (fact F22; of managed memory F29). So a chunk is
//! charged once, whatever is freed of it, until its last piece is.
//!
//! A call does not know before whether the driver will find a hole. So it charges a chunk, and
//! gives this charge back if the piece lies in a known one. Where the quota has no room for a
//! chunk, a call that is alone looks whether there is a hole: at most one chunk is uncharged
//! meanwhile.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

use foldhash::fast::FixedState;

use crate::accounting::{self, Account, Denied, PendingCharge};
use crate::alloc_table::{Charge, ShareState};
use crate::curesult::{self, CuResult};
use crate::driver_calls::{captures, context_ids};
use crate::fork_local::ForkLocal;
use crate::session_state::state;

/// The size of a chunk. Chunks lie at multiples of it.
pub(crate) const CHUNK: u64 = 2 << 20;
/// The largest request that shares a chunk with others.
pub(crate) const MAX_PIECE: u64 = 1 << 20;

/// A chunk with at least one live piece.
#[derive(Clone, Debug)]
struct Chunk {
    charge: Charge,
    live: u64,
}

/// The chunks with their charges, by number: the address divided by the size of a chunk.
#[derive(Clone, Debug, Default)]
struct Chunks(HashMap<u32, Chunk, FixedState>);

static CHUNKS: ForkLocal<Chunks> = ForkLocal::new();

/// Read while a call allocates, and written while one looks for a hole without a charge.
static GATE: ForkLocal<(), RwLock<()>> = ForkLocal::new();

/// Serializes exports, so that one marks a chunk, and the next sees the mark.
static EXPORT: ForkLocal<()> = ForkLocal::new();

/// Forgets the parent's chunks, in a forked child.
pub(crate) fn reset() {
    CHUNKS.reset();
    GATE.reset();
    EXPORT.reset();
}

impl Chunks {
    /// Counts a piece, and takes a charge for a chunk that is not known. Returns whether the chunk
    /// is charged now.
    fn add(&mut self, chunk: u32, charge: impl FnOnce() -> Option<Charge>) -> bool {
        if let Some(known) = self.0.get_mut(&chunk) {
            known.live += 1;
            return true;
        }
        let Some(charge) = charge() else {
            return false;
        };
        self.0.insert(chunk, Chunk { charge, live: 1 });
        true
    }

    /// Takes a piece away. Returns the charge of its chunk if that was the last piece.
    fn remove(&mut self, chunk: u32) -> Option<Charge> {
        let known = self.0.get_mut(&chunk)?;
        known.live -= 1;
        match known.live {
            0 => self.0.remove(&chunk).map(|chunk| chunk.charge),
            _ => None,
        }
    }
}

/// Returns the number of the chunk that a piece lies in. `None`: the memory is no piece, or in two
/// chunks, or beyond the addresses of a device; it is charged alone.
fn chunk_of(pointer: u64, bytes: u64) -> Option<u32> {
    let last = pointer.checked_add(bytes.saturating_sub(1))?;
    let chunk = u32::try_from(pointer / CHUNK).ok();
    chunk.filter(|_| bytes <= MAX_PIECE && pointer / CHUNK == last / CHUNK)
}

/// Charges and allocates a piece by `call`, which returns its pointer and its size.
pub(crate) fn allocate(
    account: Account,
    function: &str,
    call: impl FnOnce() -> Result<(u64, u64), CuResult>,
    free: fn(u64) -> CuResult,
) -> CuResult {
    // The state comes first, because it resets the gate in a forked child.
    let _ = state();
    let gate = GATE.inner();
    let shared = gate.read().unwrap_or_else(PoisonError::into_inner);
    let placed = match accounting::charge_unreported(account, CHUNK) {
        Ok(pending) => place(account, Some(pending), call, free),
        Err(Denied) if captures::may_be_active() => Err(Denied),
        Err(Denied) => {
            drop(shared);
            let _alone = gate.write().unwrap_or_else(PoisonError::into_inner);
            // The calls that were running have given back what they did not need.
            let pending = accounting::charge_unreported(account, CHUNK).ok();
            place(account, pending, call, free)
        }
    };
    placed.unwrap_or_else(|Denied| {
        if let Some(account) = accounting::account_index(account) {
            accounting::report_denial(account, CHUNK, function);
        }
        curesult::OUT_OF_MEMORY
    })
}

/// Allocates a piece and counts it in its chunk. Returns the driver's code, unless the charge is
/// denied. Without a charge the caller is alone.
fn place(
    account: Account,
    pending: Option<PendingCharge>,
    call: impl FnOnce() -> Result<(u64, u64), CuResult>,
    free: fn(u64) -> CuResult,
) -> Result<CuResult, Denied> {
    let (pointer, bytes) = match call() {
        Ok(piece) => piece,
        Err(code) => return Ok(code),
    };
    let context = context_ids::current_id();
    let recorded = match chunk_of(pointer, bytes) {
        Some(chunk) => count(account, pending, chunk, pointer, context),
        None => pending.ok_or(Denied).and_then(|mut pending| {
            pending.adjust(bytes.checked_next_multiple_of(CHUNK).ok_or(Denied)?)?;
            pending.commit(pointer, context)
        }),
    };
    if recorded.is_err() {
        let _ = free(pointer);
    }
    recorded.map(|()| curesult::SUCCESS)
}

/// Counts a piece in its chunk, and records it.
fn count(
    account: Account,
    mut pending: Option<PendingCharge>,
    chunk: u32,
    pointer: u64,
    context: u64,
) -> Result<(), Denied> {
    let add = |pending: &mut Option<PendingCharge>| {
        let charge = || pending.take().map(PendingCharge::into_charge);
        CHUNKS.lock().add(chunk, charge)
    };
    if !add(&mut pending) {
        // A free may just have given back this chunk's charge.
        pending = Some(accounting::charge_unreported(account, CHUNK)?);
        add(&mut pending);
    }
    let piece = Charge {
        account: 0,
        units: chunk,
        context,
        share: ShareState::OfChunk,
    };
    accounting::record(pointer, piece).inspect_err(|Denied| release(chunk))
}

/// Takes a piece that the driver has freed out of its chunk.
pub(crate) fn release(chunk: u32) {
    let ended = CHUNKS.lock().remove(chunk);
    ended.into_iter().for_each(accounting::discharge);
}

/// Makes a call that shares a piece, and so its chunk, and marks the chunk as exported before
/// (fact F23). The caller keeps the piece from being freed meanwhile.
pub(crate) fn share(chunk: u32, share: ShareState, call: impl FnOnce() -> CuResult) -> CuResult {
    let _alone = EXPORT.lock();
    let set = |share: ShareState| {
        let mut chunks = CHUNKS.lock();
        let known = chunks.0.get_mut(&chunk)?;
        let before = known.charge;
        known.charge.share = share;
        Some(before)
    };
    let Some(before) = set(share) else {
        return call();
    };
    set(before.share.max(share));
    let is_new = before.share == ShareState::Private;
    if is_new && accounting::mark_exported(before).is_err() {
        set(before.share);
        return curesult::NOT_PERMITTED;
    }
    let answer = call();
    if answer != curesult::SUCCESS {
        set(before.share);
        if is_new {
            accounting::unmark_exported(before);
        }
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn piece_is_in_one_chunk_or_in_none() {
        assert_eq!(chunk_of(3 * CHUNK + 512, 512), Some(3));
        assert_eq!(chunk_of(3 * CHUNK, MAX_PIECE), Some(3));
        assert_eq!(chunk_of(3 * CHUNK, MAX_PIECE + 1), None);
        assert_eq!(chunk_of(4 * CHUNK - 512, 1024), None, "it straddles");
        assert_eq!(chunk_of(u64::MAX - 511, 512), None, "beyond the addresses");
        assert_eq!(chunk_of(u64::MAX, 512), None);
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
        chunks: Chunks,
        charged: u64,
        /// Each thread's next step, the chunk of its piece, and its own charge.
        threads: Vec<(Step, u32, Option<Charge>)>,
        /// The threads that free their piece.
        frees: Vec<bool>,
    }

    impl Model {
        fn new(frees: &[bool]) -> Model {
            Model {
                driver: vec![0; 4],
                chunks: Chunks::default(),
                charged: 0,
                threads: vec![(Step::Charge, 0, None); frees.len()],
                frees: frees.to_vec(),
            }
        }

        fn taken(&self) -> u64 {
            self.driver.iter().filter(|pieces| **pieces > 0).count() as u64
        }

        /// Makes a thread's next step.
        fn step(&mut self, place: usize) {
            let (step, chunk, pending) = &mut self.threads[place];
            *step = match step {
                Step::Charge => {
                    self.charged += 1;
                    *pending = Some(Charge {
                        account: 0,
                        units: 1,
                        context: 1,
                        share: ShareState::Private,
                    });
                    Step::Allocate
                }
                Step::Allocate => {
                    // Holes fill first, and a chunk that the driver gave back is used again.
                    let hole = self.driver.iter().position(|pieces| *pieces == 1);
                    let empty = self.driver.iter().position(|pieces| *pieces == 0);
                    let found = hole.or(empty).unwrap();
                    self.driver[found] += 1;
                    *chunk = u32::try_from(found).unwrap();
                    Step::Count
                }
                Step::Count => {
                    assert!(self.chunks.add(*chunk, || pending.take()));
                    self.charged -= u64::from(pending.take().is_some());
                    match self.frees[place] {
                        true => Step::Free,
                        false => Step::End,
                    }
                }
                Step::Free => {
                    self.driver[*chunk as usize] -= 1;
                    Step::Release
                }
                Step::Release => {
                    self.charged -= u64::from(self.chunks.remove(*chunk).is_some());
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
                assert_eq!(self.charged, self.chunks.0.len() as u64);
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
