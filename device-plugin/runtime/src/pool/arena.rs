//! The heaps of a pool: one that has all memory, and shards that threads and streams allocate from side by side.
//!
//! A shard takes chunks from the central heap and cuts its blocks from them under a lock of its own, so that eight
//! threads meet rarely. A chunk is a 16th of what is free then: many shards find one, and a large request goes to
//! the central heap itself. What is free in a shard is never lost to others: before a request is refused, empty
//! chunks go back, other shards are asked, and the free ends of chunks go back too, so that free neighbours become
//! one across chunks. A request is refused only where no free range is large enough.
//!
//! The limit is kept in the same way: a share draws credit from an account ahead, so that a block costs no atomic
//! operation on what all threads share. Idle credit is gathered before a request is refused, so the limit is exact.
//!
//! Locks are taken in one order: a shard's, then the central heap's; never two shards'.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use super::heap::{BlockId, End, Heap, Open, Refusal, Taken, Whole};
use super::order::After;
use super::seat;
use crate::budget::Account;
use crate::resource::BudgetSnapshot;

/// Shards of a pool; the central heap beside them.
const SHARDS: usize = 32;
/// The part that is the central heap.
const CENTRAL: usize = 0;
/// Chunks have whole multiples of this.
const CHUNK_LEAST: u64 = 2 << 20;
/// A chunk is such a part of what is free.
const CHUNKS: u64 = 16;
/// A chunk has room for this many of the blocks that are cut from it.
const CHUNK_HOLDS: u64 = 4;
/// Credit is drawn ahead by such a part of what is left.
const CREDITS: u64 = 64;
/// A share that never drew credit keeps up to this.
const CREDIT_KEPT: u64 = 64 << 20;

/// A block's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// The heap that it is of.
    pub(super) part: u8,
    /// Its name there.
    pub(super) id: BlockId,
}

/// What a request got.
#[derive(Clone, Copy, Debug)]
pub(super) struct Placed {
    /// To free it by.
    pub(super) place: Place,
    /// Where it begins.
    pub(super) address: u64,
    /// What may still use it.
    pub(super) after: After,
}

/// A request: bytes, and a power of two that the address is a multiple of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) bytes: u64,
    pub(super) align: u64,
}

/// Bytes and blocks at one instant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Totals {
    /// Bytes that were asked for, of live blocks.
    pub(super) asked: u64,
    /// Bytes that live blocks have.
    pub(super) live: u64,
    /// Live blocks.
    pub(super) blocks: u64,
    /// Free bytes.
    pub(super) free: u64,
    /// The largest free range of one heap.
    pub(super) largest_free: u64,
}

/// A chunk of a shard.
#[derive(Debug)]
struct Chunk {
    /// Its name in the central heap.
    id: BlockId,
    /// Its name in the shard's.
    whole: Whole,
}

/// One heap and what is counted with it.
#[derive(Debug, Default)]
struct Share {
    heap: Heap,
    /// By the region's number; the central heap's regions are slabs, and not here.
    chunks: Vec<Option<Chunk>>,
    /// A chunk that was empty last, kept for the next allocation.
    spare: Option<u32>,
    /// Bytes that may be allocated here before the account is asked.
    credit: u64,
    /// More credit than this and [`CREDIT_KEPT`] goes back.
    drawn: u64,
}

impl Share {
    #[inline]
    fn take(&mut self, part: usize, request: Request) -> Option<Placed> {
        let taken = self.heap.allocate(request.bytes, request.align)?;
        Some(Placed {
            place: Place {
                part: part as u8,
                id: taken.id,
            },
            address: taken.address,
            after: taken.after,
        })
    }

    /// Adds a chunk to a shard.
    fn adopt(&mut self, chunk: Taken) -> Option<()> {
        let vacant = self.chunks.iter().position(Option::is_none);
        let region = vacant.unwrap_or(self.chunks.len());
        let number = u32::try_from(region).ok()?;
        let whole = self
            .heap
            .add(number, chunk.address, chunk.bytes, chunk.after)?;
        if vacant.is_none() {
            self.chunks.push(None);
        }
        self.chunks[region] = Some(Chunk {
            id: chunk.id,
            whole,
        });
        Some(())
    }
}

/// A part on cache lines of its own: neighbours are other threads'.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Part(Mutex<Share>);

impl Part {
    #[inline]
    fn lock(&self) -> MutexGuard<'_, Share> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn try_lock(&self) -> Option<MutexGuard<'_, Share>> {
        match self.0.try_lock() {
            Ok(share) => Some(share),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// The heaps.
#[derive(Debug)]
pub(super) struct Arena {
    parts: Box<[Part]>,
    /// Live bytes as asked for, and credit.
    account: Account,
}

impl Arena {
    /// Without memory, and with a limit for live bytes.
    pub(super) fn new(limit: u64) -> Arena {
        Arena {
            account: Account::new(limit),
            parts: std::iter::repeat_with(Part::default)
                .take(1 + SHARDS)
                .collect(),
        }
    }

    /// Adds memory; `None` where it is more than a heap can name.
    pub(super) fn add(&self, slab: u32, address: u64, bytes: u64, after: After) -> Option<Whole> {
        self.central().heap.add(slab, address, bytes, after)
    }

    /// Takes a slab away that is free from end to end; what may still use it.
    pub(super) fn remove(&self, slab: Whole) -> Option<After> {
        self.central().heap.remove(slab)
    }

    /// A block for a stream's lane, of the shard that the calling thread uses for it or of the central heap. `None` also
    /// where idle credit has to be gathered for it.
    #[inline]
    pub(super) fn take(&self, lane: usize, request: Request) -> Option<Placed> {
        let (part, mut share) = self.shard(lane);
        if share.credit < request.bytes {
            self.draw(&mut share, request.bytes)?;
        }
        let placed = match share.take(part, request) {
            Some(placed) => placed,
            None => self.refill(part, &mut share, request)?,
        };
        share.credit -= request.bytes;
        Some(placed)
    }

    /// A block from wherever there is one, for bytes that were charged.
    pub(super) fn take_anywhere(&self, request: Request) -> Option<Placed> {
        self.return_chunks();
        if let Some(placed) = self.central().take(CENTRAL, request) {
            return Some(placed);
        }
        let shards = self.parts.iter().enumerate().skip(1);
        let placed = shards
            .clone()
            .find_map(|(number, part)| part.lock().take(number, request));
        placed.or_else(|| {
            self.return_ends();
            self.central().take(CENTRAL, request)
        })
    }

    /// Charges bytes for [`Arena::take_anywhere`]. It fails only where no credit is idle.
    pub(super) fn charge(&self, bytes: u64) -> Result<(), BudgetSnapshot> {
        loop {
            let found = match self.account.take(bytes) {
                Ok(()) => return Ok(()),
                Err(found) => found,
            };
            // Others draw ahead meanwhile; they draw less each time.
            if self.gather_credit() == 0 {
                return Err(found);
            }
        }
    }

    /// Gives back what was charged and got no block.
    pub(super) fn discharge(&self, bytes: u64) {
        self.account.give_back(bytes);
    }

    /// Changes the limit: what is taken after the return is within it.
    pub(super) fn set_limit(&self, limit: u64) {
        self.account.resize(limit);
        self.gather_credit();
    }

    /// The limit, and live bytes as asked for.
    pub(super) fn limit(&self) -> BudgetSnapshot {
        BudgetSnapshot {
            used: self.totals().asked,
            ..self.account.snapshot()
        }
    }

    /// Takes all credit that is idle from the shares; how much it was.
    fn gather_credit(&self) -> u64 {
        let idle = |part: &Part| {
            let idle = std::mem::take(&mut part.lock().credit);
            self.account.give_back(idle);
            idle
        };
        self.parts.iter().map(idle).sum()
    }

    #[cold]
    fn draw(&self, share: &mut Share, bytes: u64) -> Option<()> {
        let BudgetSnapshot { limit, used } = self.account.snapshot();
        let ahead = limit.saturating_sub(used) / CREDITS;
        let least = bytes - share.credit;
        let drawn = [least.saturating_add(ahead), least]
            .into_iter()
            .find(|&wanted| self.account.take(wanted).is_ok())?;
        share.credit += drawn;
        share.drawn = drawn;
        Some(())
    }

    /// Gives back half of more credit than a share needs.
    #[cold]
    fn return_credit(&self, share: &mut Share) {
        let back = share.credit / 2;
        share.credit -= back;
        self.account.give_back(back);
    }

    /// Frees a block that `after` may still use; `left` as in [`Heap::free`].
    #[inline]
    pub(super) fn free(
        &self,
        place: Place,
        after: After,
        left: impl Fn(After) -> After,
    ) -> Result<(), Refusal> {
        let mut share = self.part(place)?.lock();
        let freed = share.heap.free(place.id, after, left)?;
        if usize::from(place.part) == CENTRAL {
            self.account.give_back(freed.asked);
            return Ok(());
        }
        share.credit += freed.asked;
        if share.credit > share.drawn.max(CREDIT_KEPT).saturating_mul(2) {
            self.return_credit(&mut share);
        }
        if let Some(whole) = freed.whole {
            self.emptied(&mut share, whole);
        }
        Ok(())
    }

    /// Remembers what more may use a live block.
    pub(super) fn used(&self, place: Place, after: After, open: Open) -> Result<(), Refusal> {
        self.part(place)?.lock().heap.used(place.id, after, open)
    }

    /// Gives the empty chunks of all shards back to the central heap.
    pub(super) fn return_chunks(&self) {
        for part in &self.parts[1..] {
            let mut share = part.lock();
            for region in 0..share.chunks.len() {
                self.return_chunk(&mut share, region);
            }
            share.spare = None;
        }
    }

    /// What there is. Heaps are looked at one after the other: sums over a moment in which others go on.
    pub(super) fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        let (mut lent, mut chunks) = (0, 0);
        for (number, part) in self.parts.iter().enumerate() {
            let share = part.lock();
            totals.asked += share.heap.asked_bytes();
            totals.live += share.heap.live_bytes();
            totals.blocks += share.heap.live_blocks();
            totals.free += share.heap.free_bytes();
            totals.largest_free = totals.largest_free.max(share.heap.largest_free());
            if number != CENTRAL {
                lent += share.heap.live_bytes() + share.heap.free_bytes();
                chunks += share.chunks.iter().flatten().count() as u64;
            }
        }
        totals.live = totals.live.saturating_sub(lent);
        totals.blocks = totals.blocks.saturating_sub(chunks);
        totals
    }

    fn central(&self) -> MutexGuard<'_, Share> {
        self.parts[CENTRAL].lock()
    }

    fn part(&self, place: Place) -> Result<&Part, Refusal> {
        self.parts
            .get(usize::from(place.part))
            .ok_or(Refusal::NotLive)
    }

    /// The shard of a lane and the calling thread. A thread that finds another one there moves to the next.
    #[inline]
    fn shard(&self, lane: usize) -> (usize, MutexGuard<'_, Share>) {
        let part = 1 + (lane + seat::of_thread()) % SHARDS;
        if let Some(share) = self.parts[part].try_lock() {
            return (part, share);
        }
        let part = 1 + (lane + seat::next()) % SHARDS;
        (part, self.parts[part].lock())
    }

    /// Gives a shard a chunk and allocates from it, or from the central heap where the request is a large one.
    #[cold]
    fn refill(&self, part: usize, share: &mut Share, request: Request) -> Option<Placed> {
        let mut central = self.central();
        let chunk = central.heap.free_bytes() / CHUNKS;
        let chunk = (chunk - chunk % CHUNK_LEAST).max(CHUNK_LEAST);
        let four = request
            .bytes
            .saturating_add(request.align)
            .saturating_mul(CHUNK_HOLDS);
        if four <= chunk
            && let Some(taken) = central.heap.lend(chunk)
            && share.adopt(taken).is_some()
        {
            return share.take(part, request);
        }
        central.take(CENTRAL, request)
    }

    /// Keeps a chunk that became empty, and gives back the one that was kept before.
    #[cold]
    fn emptied(&self, share: &mut Share, whole: Whole) {
        if let Some(spare) = share.spare.replace(whole.region)
            && spare != whole.region
        {
            self.return_chunk(share, spare as usize);
        }
    }

    /// Gives a chunk back, if it is empty.
    fn return_chunk(&self, share: &mut Share, region: usize) {
        let Some(chunk) = &share.chunks[region] else {
            return;
        };
        let (id, whole) = (chunk.id, chunk.whole);
        if let Some(after) = share.heap.remove(whole) {
            share.chunks[region] = None;
            // A chunk stays allocated for as long as its shard has it.
            let _ = self.central().heap.free(id, after, |all| all);
        }
    }

    /// Gives back the free ends of all shards' chunks.
    fn return_ends(&self) {
        for part in &self.parts[1..] {
            let mut share = part.lock();
            for end in share.heap.ends() {
                self.return_end(&mut share, &end);
            }
        }
    }

    fn return_end(&self, share: &mut Share, end: &End) -> Option<()> {
        let chunk = share.chunks.get(end.region as usize)?.as_ref()?;
        let mut central = self.central();
        let (kept, given) = central.heap.divide(chunk.id, end)?;
        let whole = share.heap.remove_end(end, chunk.whole);
        share.chunks[end.region as usize] = Some(Chunk { id: kept, whole });
        // It was allocated a moment ago, and the lock is held.
        let _ = central.heap.free(given, end.after, |all| all);
        Some(())
    }
}

#[cfg(test)]
mod tests;
