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

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::accounting::{self, Account, Denied, PendingCharge};
use crate::alloc_table::{Charge, ShareState};
use crate::chunk_table::{Added, ChunkTable};
use crate::curesult::{self, CuResult};
use crate::driver_calls::{captures, context_ids};
use crate::fork_local::ForkLocal;
use crate::session_state::state;

/// The size of a chunk. Chunks lie at multiples of it.
pub(crate) const CHUNK: u64 = 2 << 20;
/// The largest request that shares a chunk with others.
pub(crate) const MAX_PIECE: u64 = 1 << 20;

/// The chunks by number: the address divided by the size of a chunk.
static CHUNKS: ForkLocal<(), ChunkTable> = ForkLocal::new();

static GATE: ForkLocal<(), Gate> = ForkLocal::new();

/// Serializes exports, so that one marks a chunk, and the next sees the mark.
static EXPORT: ForkLocal<()> = ForkLocal::new();

/// Forgets the parent's chunks, in a forked child.
pub(crate) fn reset() {
    CHUNKS.reset();
    GATE.reset();
    EXPORT.reset();
}

/// Read while a call allocates, and written while one looks for a hole without a charge. A thread
/// reads one lock of several, because threads that change one cache line wait for one another.
#[derive(Default)]
struct Gate([GatePart; 16]);

#[derive(Default)]
#[repr(align(64))]
struct GatePart(RwLock<()>);

impl Gate {
    fn share(&self) -> RwLockReadGuard<'_, ()> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static PART: usize = NEXT.fetch_add(1, Ordering::Relaxed);
        }
        let part = PART.with(|part| part % self.0.len());
        self.0[part]
            .0
            .read()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) -> [RwLockWriteGuard<'_, ()>; 16] {
        let all = self.0.each_ref();
        all.map(|part| part.0.write().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Returns the number of the chunk that a piece lies in. `None`: the memory is no piece, or in two
/// chunks, or beyond the addresses of a device; it is charged alone.
fn chunk_of(pointer: u64, bytes: u64) -> Option<u32> {
    let last = pointer.checked_add(bytes.saturating_sub(1))?;
    let chunk = u32::try_from(pointer / CHUNK).ok();
    let is_piece = bytes <= MAX_PIECE && pointer / CHUNK == last / CHUNK;
    chunk.filter(|_| is_piece && pointer / CHUNK < ChunkTable::LEN)
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
    let shared = gate.share();
    let placed = match accounting::charge_unreported(account, CHUNK) {
        Ok(pending) => place(account, Some(pending), call, free),
        Err(Denied) if captures::may_be_active() => Err(Denied),
        Err(Denied) => {
            drop(shared);
            let _alone = gate.close();
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
    let table = CHUNKS.inner();
    let add = |pending: &mut Option<PendingCharge>| {
        let added = table
            .chunk(chunk)
            .add(pending.as_ref().map(PendingCharge::account));
        if added == Added::Charged {
            pending.take().map(PendingCharge::into_charge);
        }
        added
    };
    if add(&mut pending) == Added::Uncharged {
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
    let ended = CHUNKS.inner().chunk(chunk).remove();
    ended.into_iter().for_each(accounting::discharge);
}

/// Makes a call that shares a piece, and so its chunk, and marks the chunk as exported before
/// (fact F23). The caller keeps the piece from being freed meanwhile.
pub(crate) fn share(chunk: u32, share: ShareState, call: impl FnOnce() -> CuResult) -> CuResult {
    let _alone = EXPORT.lock();
    let chunk = CHUNKS.inner().chunk(chunk);
    let Some(before) = chunk.charge() else {
        return call();
    };
    chunk.set_share(before.share.max(share));
    let is_new = before.share == ShareState::Private;
    if is_new && accounting::mark_exported(before).is_err() {
        chunk.set_share(before.share);
        return curesult::NOT_PERMITTED;
    }
    let answer = call();
    if answer != curesult::SUCCESS {
        chunk.set_share(before.share);
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
}
